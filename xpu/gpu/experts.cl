// With `halves`, the numbers of a row of a result are bfloat16, in the first half of its memory; see operands.go.

// Row r of dst is row numbers[r] of x, whose rows are `pitch` numbers apart.
kernel void gather_rows(TYPED(void, dst), TYPED(const void, x), MEMORY(const int, numbers), const int width, const int pitch, const int halves)
{
	LOCATE_TYPED(dst), LOCATE_TYPED(x), LOCATE(numbers);
	const size_t row = get_group_id(0);
	dst = MOVE(dst, dst_bf16, row * width);
	x = MOVE(x, x_bf16, (size_t)numbers[row] * pitch);
	for (int i = LANES * ITEM; i < width; i += DEEP * LANES * GROUP) {
		lanes v[DEEP];
		#pragma unroll
		for (int d = 0; d < DEEP; d++)
			v[d] = load_numbers(x, x_bf16, i + d * LANES * GROUP, width);
		#pragma unroll
		for (int d = 0; d < DEEP; d++)
			store_numbers(dst, halves | dst_bf16, i + d * LANES * GROUP, width, v[d]);
	}
}

// Row t of dst is the sum of row t of x, if there is x, and the rows rowOf[t·perToken], … of y.
kernel void sum_rows(MEMORY(float, dst), MEMORY(const float, x), MEMORY(const float, y), MEMORY(const int, rowOf), const int perToken, const int width)
{
	LOCATE(dst), LOCATE(y), LOCATE(rowOf);
	const size_t token = get_group_id(0);
	dst += token * width;
	rowOf += token * perToken;
	int first = 0;
	if (GIVEN(x)) {
		LOCATE(x);
		x += token * width;
	} else {
		x = y + (size_t)rowOf[0] * width;
		first = 1;
	}
	for (int i = LANES * ITEM; i < width; i += LANES * GROUP) {
		lanes sum = load_lanes(x, i, width, 0);
		for (int j = first; j < perToken; j++)
			sum += load_lanes(y + (size_t)rowOf[j] * width, i, width, 0);
		store_lanes(dst, i, width, sum);
	}
}

// act = silu(gate)·up·weight of a row
kernel void swiglu(MEMORY(float, act), TYPED(const void, gateUp), MEMORY(const float, weight), const int width, const int halves)
{
	LOCATE(act), LOCATE_TYPED(gateUp);
	const size_t row = get_group_id(0);
	act += row * width;
	const global void *gate = MOVE(gateUp, gateUp_bf16, 2 * row * width), *up = MOVE(gate, gateUp_bf16, width);
	float w = 1;
	if (GIVEN(weight)) {
		LOCATE(weight);
		w = weight[row];
	}
	for (int i = LANES * ITEM; i < width; i += LANES * GROUP) {
		const lanes g = load_numbers(gate, gateUp_bf16, i, width), u = load_numbers(up, gateUp_bf16, i, width);
		store_numbers(act, halves, i, width, g / (1 + exp(-g)) * u * w);
	}
}

// The gradient of swiglu, in place of gate and up; act again; and with weights their gradient. With `halved`, for which `gates` has the numbers of a row, the
// gradients of gate and up are bfloat16 and take the memory of gate, which is float.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void swiglu_grad(TYPED(void, gateUp), MEMORY(float, act), MEMORY(const float, dact), MEMORY(const float, weight), MEMORY(float, dweight), const int width,
	const int halves, const int halved, local float *gates)
{
	LOCATE_TYPED(gateUp), LOCATE(act), LOCATE(dact);
	local float part[GROUP];
	const size_t row = get_group_id(0);
	const int bf16 = gateUp_bf16 | halved; // of the gradients
	gateUp = MOVE(gateUp, gateUp_bf16, 2 * row * width);
	const global void *up = MOVE(gateUp, gateUp_bf16, width);
	global void *gradUp = MOVE(gateUp, bf16, width);
	act += row * width;
	dact += row * width;
	float w = 1;
	if (GIVEN(weight)) {
		LOCATE(weight);
		w = weight[row];
	}
#ifndef PROCESSOR
	if (halved) {
		for (int i = ITEM; i < width; i += GROUP)
			gates[i] = ((const global float *)gateUp)[i];
		barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE); // before the gradients take their memory
	}
#endif
	lanes dw = 0;
	for (int i = LANES * ITEM; i < width; i += LANES * GROUP) {
#ifdef PROCESSOR
		const lanes g = load_numbers(gateUp, gateUp_bf16, i, width);
#else
		const float g = halved ? gates[i] : load_numbers(gateUp, gateUp_bf16, i, width);
#endif
		const lanes u = load_numbers(up, gateUp_bf16, i, width), da = load_lanes(dact, i, width, 0);
		const lanes s = 1 / (1 + exp(-g)), gs = g * s, a = gs * u, dwa = da * w;
		dw += a * da;
		store_numbers(act, halves, i, width, a * w);
		store_numbers(gateUp, bf16, i, width, dwa * u * (s + gs * (1 - s)));
		store_numbers(gradUp, bf16, i, width, dwa * gs);
	}
	if (GIVEN(weight)) {
		LOCATE(dweight);
		const float sum = group_sum(lanes_sum(dw), part);
		if (ITEM == 0)
			dweight[row] = sum;
	}
}
