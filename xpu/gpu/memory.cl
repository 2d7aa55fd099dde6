// A group has `length` elements of the n.

// x = 0
kernel void zero(TYPED(void, x), const long n, const int length)
{
	LOCATE_TYPED(x);
	const long begin = (long)length * get_group_id(0);
	const int end = min((long)length, n - begin);
	for (int i = LANES * ITEM; i < end; i += LANES * GROUP)
		store_numbers(MOVE(x, x_bf16, begin), x_bf16, i, end, (lanes)0);
}

// dst = x, where either is of bfloat16. If both are, the bits do not change.
kernel void copy(TYPED(void, dst), TYPED(const void, x), const long n, const int length)
{
	LOCATE_TYPED(dst), LOCATE_TYPED(x);
	const long begin = (long)length * get_group_id(0);
	const int end = min((long)length, n - begin);
	for (int i = LANES * ITEM; i < end; i += LANES * GROUP) {
		const global void *from = MOVE(x, x_bf16, begin);
		global void *to = MOVE(dst, dst_bf16, begin);
		if (x_bf16 && dst_bf16)
			store_halves(to, i, end, load_halves(from, i, end));
		else
			store_numbers(to, dst_bf16, i, end, load_numbers(from, x_bf16, i, end));
	}
}

// dst = x + y
kernel void add(MEMORY(float, dst), MEMORY(const float, x), MEMORY(const float, y), const long n, const int length)
{
	LOCATE(dst), LOCATE(x), LOCATE(y);
	const long begin = (long)length * get_group_id(0);
	const int end = min((long)length, n - begin);
	for (int i = LANES * ITEM; i < end; i += LANES * GROUP)
		store_lanes(dst + begin, i, end, load_lanes(x + begin, i, end, 0) + load_lanes(y + begin, i, end, 0));
}

// dst = a x + b y, if y is given, and c is added to its diagonal; a row has width elements.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void combine(MEMORY(float, dst), MEMORY(const float, x), MEMORY(const float, y), const long n, const int length,
	const int width, const float a, const float b, const float c)
{
	LOCATE(dst), LOCATE(x);
	const bool both = GIVEN(y);
	if (both)
		LOCATE(y);
	const long begin = (long)length * get_group_id(0), next = (long)width + 1;
	const int end = min((long)length, n - begin);
	for (int i = LANES * ITEM; i < end; i += LANES * GROUP) {
		lanes v = a * load_lanes(x + begin, i, end, 0);
		if (both)
			v = fma((lanes)b, load_lanes(y + begin, i, end, 0), v);
		store_lanes(dst + begin, i, end, v);
	}
	if (c == 0)
		return;
	barrier(CLK_GLOBAL_MEM_FENCE);
	for (long i = (next - begin % next) % next + next * ITEM; i < end; i += next * GROUP)
		dst[begin + i] += c;
}
