// RMSNorm with a weight and LayerNorm without, and their gradients. A group has a row at a time.

// The kernels contain group_sum directly, outside conditions. If a static function always gets a kernel's local memory,
// PoCL 3.1 gives all groups the same memory when it optimizes the shape for GPUs.

// Rows. Without weight it is a LayerNorm. With `halves`, the numbers of a row of h are bfloat16, in the first half of its
// memory; see operands.go.
kernel void norm(MEMORY(float, h), MEMORY(const float, x), TYPED(const void, weight), MEMORY(float, mean), MEMORY(float, rstd), const int width,
	const float epsilon, const int known, const int halves)
{
	LOCATE(h), LOCATE(x), LOCATE_TYPED(weight), LOCATE(mean), LOCATE(rstd);
	local float part[GROUP];
	const size_t row = get_group_id(0);
	const bool rms = GIVEN(weight);
	h += row * width, x += row * width;
	lanes sum = 0;
	for (int i = LANES * ITEM; i < width && !rms && !known; i += LANES * GROUP)
		sum += load_lanes(x, i, width, 0);
	float m = group_sum(lanes_sum(sum), part) / width;
	sum = 0;
	for (int i = LANES * ITEM; i < width && !known; i += LANES * GROUP) {
		const lanes v = load_lanes(x, i, width, m) - m;
		sum = fma(v, v, sum);
	}
	float r = 1 / sqrt(group_sum(lanes_sum(sum), part) / width + epsilon);
	if (known) {
		r = rstd[row];
		if (!rms)
			m = mean[row];
	} else if (ITEM == 0) {
		rstd[row] = r;
		if (!rms)
			mean[row] = m;
	}
	if (rms)
		for (int i = LANES * ITEM; i < width; i += LANES * GROUP)
			store_numbers(h, halves, i, width, load_numbers(weight, weight_bf16, i, width) * (load_lanes(x, i, width, 0) * r));
	else
		for (int i = LANES * ITEM; i < width; i += LANES * GROUP)
			store_numbers(h, halves, i, width, (load_lanes(x, i, width, 0) - m) * r);
}

// Consecutive groups of `each` rows. With a weight, row g of partial becomes the sum of the weight's gradient over the
// rows of group g.
kernel void norm_grad(MEMORY(float, dx), MEMORY(const float, dh), MEMORY(const float, x), TYPED(const void, weight), MEMORY(const float, mean),
	MEMORY(const float, rstd), MEMORY(float, partial), const int width, const int rows, const int each)
{
	LOCATE(dx), LOCATE(dh), LOCATE(x), LOCATE_TYPED(weight), LOCATE(mean), LOCATE(rstd), LOCATE(partial);
	local float part[GROUP];
	const int first = (int)get_group_id(0) * each, last = min(first + each, rows);
	const bool rms = GIVEN(weight);
	partial += (size_t)get_group_id(0) * width;
	for (int row = first; row < last; row++) {
		const global float *d = dh + (size_t)row * width, *v = x + (size_t)row * width;
		global float *to = dx + (size_t)row * width;
		const float r = rstd[row];
		const float m = rms ? 0 : mean[row];
		lanes sum = 0, dot = 0; // of the gradient, and of it and the row
		for (int i = LANES * ITEM; i < width; i += LANES * GROUP) {
			const lanes z = load_lanes(v, i, width, m) - m;
			lanes y = load_lanes(d, i, width, 0);
			if (rms) {
				store_lanes(partial, i, width, row == first ? y * z * r : fma(y * z, (lanes)r, load_lanes(partial, i, width, 0)));
				y *= load_numbers(weight, weight_bf16, i, width);
			}
			sum += y;
			dot = fma(y, z, dot);
		}
		const float mean_sum = group_sum(lanes_sum(sum), part) / width, along = group_sum(lanes_sum(dot), part) / width * r * r, down = rms ? 0 : mean_sum;
		for (int i = LANES * ITEM; i < width; i += LANES * GROUP) {
			const lanes z = load_lanes(v, i, width, m) - m;
			lanes y = load_lanes(d, i, width, 0);
			if (rms)
				y *= load_numbers(weight, weight_bf16, i, width);
			store_lanes(to, i, width, fma((lanes)r, y - down - z * along, load_lanes(to, i, width, 0)));
		}
	}
}

// Groups of 16 columns: to += the sum of the rows of partial, which are `stride` apart. The order depends only on the
// number of rows.
kernel void add_partial(TYPED(void, to), MEMORY(const float, partial), const int rows, const int stride, const int width)
{
	LOCATE_TYPED(to), LOCATE(partial);
#if GROUP > 1
	local float part[GROUP];
	const int column = 16 * (int)get_group_id(0) + ITEM % 16;
	float sum = 0;
	if (column < width)
		for (int row = ITEM / 16; row < rows; row += GROUP / 16)
			sum += partial[(size_t)row * stride + column];
	part[ITEM] = sum;
	barrier(CLK_LOCAL_MEM_FENCE);
	if (ITEM < 16 && column < width) {
		for (int i = ITEM + 16; i < GROUP; i += 16)
			sum += part[i];
		store_numbers(to, to_bf16, column, width, load_numbers(to, to_bf16, column, width) + sum);
	}
#else
	const int column = LANES * (int)get_group_id(0);
	lanes sum = 0;
	for (int row = 0; row < rows; row++)
		sum += load_lanes(partial + (size_t)row * stride, column, width, 0);
	store_numbers(to, to_bf16, column, width, load_numbers(to, to_bf16, column, width) + sum);
#endif
}
