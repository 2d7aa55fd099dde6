// dst = x + y
kernel void add(MEMORY(float, dst), MEMORY(const float, x), MEMORY(const float, y), const long n)
{
	LOCATE(dst), LOCATE(x), LOCATE(y);
	const size_t i = get_global_id(0);
	if (i < n)
		dst[i] = x[i] + y[i];
}
