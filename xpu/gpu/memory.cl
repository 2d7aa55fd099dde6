// A group has `length` elements of the n.

// x = 0
kernel void zero(MEMORY(float, x), const long n, const int length)
{
	LOCATE(x);
	const long begin = (long)length * get_group_id(0);
	const int end = min((long)length, n - begin);
	for (int i = LANES * ITEM; i < end; i += LANES * GROUP)
		store_lanes(x + begin, i, end, (lanes)0);
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
