#include "squares.cl"
#include "stretches.cl"

// sums [groups, 3] of the squares of x in stretches; a group has length elements.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void sum_squares(MEMORY(float, sums), TYPED(const void, x), MEMORY(const long, table), const int stretches, const int length)
{
	LOCATE(sums), LOCATE_TYPED(x), LOCATE(table);
	local float part[GROUP];
	const global long *s = stretch_of(table, stretches);
	const long begin = length * ((long)get_group_id(0) - s[FIRST_GROUP]);
	const int end = min((long)length, s[ELEMENTS] - begin);
	x = MOVE(x, x_bf16, s[0] + begin);
	squares all = {0, 0, 0};
	for (int i = LANES * ITEM; i < end; i += AT_A_TIME) {
		lanes sum[DEEP], size = 0;
		#pragma unroll
		for (int d = 0; d < DEEP; d++)
			sum[d] = 0;
		for (int k = i; k < min(end, i + AT_A_TIME); k += DEEP * LANES * GROUP) {
			#pragma unroll
			for (int d = 0; d < DEEP; d++) {
				const lanes v = load_numbers(x, x_bf16, k + d * LANES * GROUP, end);
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
			add_square(&some, load_numbers(x, x_bf16, k, end));
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

// Word i of the n elements of x, whose bits are words of memory; zeros beyond the last element.
INLINE ulong word_of(const global void *x, const int bf16, const int i, const int n)
{
	if (!bf16)
		return i < n ? ((const global uint *)x)[i] : 0;
	const global ushort *two = (const global ushort *)x + 2 * i;
	return (2 * i < n ? (uint)two[0] : 0) | (2 * i + 1 < n ? (uint)two[1] << 16 : 0);
}

// sums [groups, 2] are the lower and the upper half of the contribution of a group's elements to the checksum of their
// block of x [n]: see xpu.Checksum. A group has length elements, and a block a whole number of groups.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void checksums(MEMORY(uint, sums), TYPED(const void, x), const long n, const int length, const int block, const ulong key)
{
	LOCATE(sums), LOCATE_TYPED(x);
	local ulong part[GROUP];
	const long begin = (long)length * get_group_id(0);
	const int end = min((long)length, n - begin), in_word = x_bf16 ? 2 : 1;
	const int first = begin % block / in_word, words = (end + in_word - 1) / in_word;
	x = MOVE(x, x_bf16, begin);
	ulong sum = 0;
	for (int i = 4 * ITEM; i < words; i += 4 * GROUP) {
		const ulong at = (first + i) / 2;
		ulong a = word_of(x, x_bf16, i, end) | word_of(x, x_bf16, i + 1, end) << 32;
		ulong b = word_of(x, x_bf16, i + 2, end) | word_of(x, x_bf16, i + 3, end) << 32;
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
