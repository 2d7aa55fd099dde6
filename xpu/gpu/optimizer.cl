#include "squares.cl"
#include "stretches.cl"

// sums [groups, 3] of the squares of x in stretches; a group has length elements.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void sum_squares(MEMORY(float, sums), MEMORY(const float, x), MEMORY(const long, table), const int stretches, const int length)
{
	LOCATE(sums), LOCATE(x), LOCATE(table);
	local float part[GROUP];
	const global long *s = stretch_of(table, stretches);
	const long begin = length * ((long)get_group_id(0) - s[FIRST_GROUP]);
	const int end = min((long)length, s[ELEMENTS] - begin);
	x += s[0] + begin;
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

// sums [groups, 2] are the lower and the upper half of the contribution of a group's elements to the checksum of their
// block of x [n]: see xpu.Checksum. A group has length elements, and a block a whole number of groups.
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
