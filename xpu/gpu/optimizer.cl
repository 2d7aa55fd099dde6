// Squares of numbers of any size, added up without doubles: those of large and small numbers by themselves, of numbers times 2^-80 and 2^80. None of the
// sums of 2^16 numbers is infinite or nothing, unless the numbers are.
typedef struct {
	lanes large, middle, small;
} squares;

static void add_square(squares *s, lanes x)
{
	const lanes size = fabs(x), none = 0, middle = select(x, none, size > 0x1p40f || size < 0x1p-40f);
	s->middle += middle * middle;
	if (any_lane(size > 0x1p40f || size < 0x1p-40f)) {
		const lanes large = select(none, x * 0x1p-80f, size > 0x1p40f), small = select(none, x * 0x1p80f, size < 0x1p-40f);
		s->large += large * large;
		s->small += small * small;
	}
}

static void add_squares(squares *s, squares t)
{
	s->large += t.large;
	s->middle += t.middle;
	s->small += t.small;
}

// The three sums of a group.
void store_squares(global float *sums, squares s, local float *part)
{
	const float large = group_sum(lanes_sum(s.large), part), middle = group_sum(lanes_sum(s.middle), part), small = group_sum(lanes_sum(s.small), part);
	if (ITEM == 0) {
		sums[0] = large;
		sums[1] = middle;
		sums[2] = small;
	}
}

// A group adds up the squares of so many elements at a time, 32 for each lane, and then these sums, so that no sum has many terms.
#define AT_A_TIME (32 * LANES * GROUP)

// sums [groups, 3] of the squares of x [n]; a group has length elements.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void sum_squares(MEMORY(float, sums), MEMORY(const float, x), const long n, const int length)
{
	LOCATE(sums), LOCATE(x);
	local float part[GROUP];
	const long begin = (long)length * get_group_id(0);
	const int end = min((long)length, n - begin);
	x += begin;
	squares all = {0, 0, 0};
	for (int i = LANES * ITEM; i < end; i += AT_A_TIME) {
		lanes sum[DEEP], size = 0;
		#pragma unroll
		for (int d = 0; d < DEEP; d++)
			sum[d] = 0;
		for (int k = i; k < min(end, i + AT_A_TIME); k += DEEP * LANES * GROUP) {
			#pragma unroll
			for (int d = 0; d < DEEP; d++) {
				const lanes v = load_lanes(x, k + d * LANES * GROUP, end, 0);
				sum[d] = fma(v, v, sum[d]);
				size = fmax(size, fabs(v));
			}
		}
		if (!any_lane(size > 0x1p40f || size > 0 && size < 0x1p-40f)) {
			all.middle += (sum[0] + sum[1]) + (sum[2] + sum[3]); // beside the largest of a lane, what is too small for its square is nothing
			continue;
		}
		squares some = {0, 0, 0};
		for (int k = i; k < min(end, i + AT_A_TIME); k += LANES * GROUP)
			add_square(&some, load_lanes(x, k, end, 0));
		add_squares(&all, some);
	}
	store_squares(sums + 3 * get_group_id(0), all, part);
}

// group_sum of words of 64 bits.
ulong group_sum_long(ulong v, local ulong *part)
{
#if GROUP > 1
	part[ITEM] = v;
	for (int n = GROUP / 2; n > 0; n /= 2) {
		barrier(CLK_LOCAL_MEM_FENCE);
		if (ITEM < n)
			part[ITEM] += part[ITEM + n];
	}
	barrier(CLK_LOCAL_MEM_FENCE);
	v = part[0];
#endif
	return v;
}

// sums [groups, 2] are the lower and the upper half of what the elements of a group add to the checksum of their block of x [n]: see xpu.Checksum. A
// group has length elements, and a block a whole number of groups.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void checksums(MEMORY(uint, sums), MEMORY(const uint, x), const long n, const int length, const int block, const ulong key)
{
	LOCATE(sums), LOCATE(x);
	local ulong part[GROUP];
	const long begin = (long)length * get_group_id(0);
	const int end = min((long)length, n - begin), first = begin % block;
	x += begin;
	ulong sum = 0;
	for (int i = 4 * ITEM; i < end; i += 4 * GROUP) {
		const ulong at = (first + i) / 2;
		ulong a = x[i], b = 0;
		if (i + 1 < end)
			a |= (ulong)x[i + 1] << 32;
		if (i + 2 < end)
			b = x[i + 2];
		if (i + 3 < end)
			b |= (ulong)x[i + 3] << 32;
		a ^= (at + 1) * key;
		b ^= (at + 2) * key;
		sum += a * b ^ mul_hi(a, b);
	}
	sum = group_sum_long(sum, part);
	if (ITEM == 0) {
		sums[2 * get_group_id(0)] = (uint)sum;
		sums[2 * get_group_id(0) + 1] = (uint)(sum >> 32);
	}
}

// AdamW of n weights, of which a group has length. rest are 1 - beta; rate is that without the bias of m, and root takes the bias from v. Of before and
// change, if they are given, [groups, 3] are the squares of the weights and of what was added to them.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void adamw(MEMORY(float, weight), MEMORY(const float, grad), MEMORY(float, m), MEMORY(float, v), MEMORY(float, before), MEMORY(float, change),
	const long n, const int length, const float gradScale, const float beta1, const float rest1, const float beta2, const float rest2, const float decay,
	const float rate, const float epsilon, const float root, const float keep)
{
	LOCATE(weight), LOCATE(grad), LOCATE(m), LOCATE(v);
	local float part[GROUP];
	const long begin = (long)length * get_group_id(0);
	const int end = min((long)length, n - begin);
	weight += begin;
	grad += begin;
	m += begin;
	v += begin;
	squares allBefore = {0, 0, 0}, allChange = {0, 0, 0};
	for (int i = LANES * ITEM; i < end; i += AT_A_TIME) {
		squares someBefore = {0, 0, 0}, someChange = {0, 0, 0};
		for (int k = i; k < min(end, i + AT_A_TIME); k += LANES * GROUP) {
			const lanes w = load_lanes(weight, k, end, 0), g = load_lanes(grad, k, end, 0) * gradScale;
			const lanes a = beta1 * load_lanes(m, k, end, 0) + rest1 * g, q = beta2 * load_lanes(v, k, end, 0) + rest2 * (g * g);
			const lanes next = (decay * w - rate * a / (root * sqrt(q) + epsilon)) * keep;
			store_lanes(m, k, end, a);
			store_lanes(v, k, end, q);
			store_lanes(weight, k, end, next);
			if (GIVEN(before)) {
				add_square(&someBefore, w);
				add_square(&someChange, next - w);
			}
		}
		add_squares(&allBefore, someBefore);
		add_squares(&allChange, someChange);
	}
	if (GIVEN(before)) {
		LOCATE(before), LOCATE(change);
		store_squares(before + 3 * get_group_id(0), allBefore, part);
		store_squares(change + 3 * get_group_id(0), allChange, part);
	}
}
