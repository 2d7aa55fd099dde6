// act = gate·σ(alpha·gate)·(up + 1)·weight of a row, with gate at most limit and up in ±limit. With `halves`, the numbers of act are bfloat16, in the first
// half of its memory; see operands.go.
kernel void clamped_swiglu(MEMORY(float, act), TYPED(const void, gateUp), MEMORY(const float, weight), const int width, const float limit, const float alpha,
	const int halves)
{
	LOCATE(act), LOCATE_TYPED(gateUp);
	const size_t row = get_group_id(0);
	act += row * width;
	const global void *gate = MOVE(gateUp, gateUp_bf16, 2 * row * width), *up = MOVE(gate, gateUp_bf16, width);
	const lanes most = limit, least = -limit;
	float w = 1;
	if (GIVEN(weight)) {
		LOCATE(weight);
		w = weight[row];
	}
	for (int i = LANES * ITEM; i < width; i += LANES * GROUP) {
		lanes g = load_numbers(gate, gateUp_bf16, i, width), u = load_numbers(up, gateUp_bf16, i, width);
		g = select(g, most, g > most); // a NaN stays
		u = select(select(u, most, u > most), least, u < least);
		store_numbers(act, halves, i, width, g / (1 + exp(-alpha * g)) * (u + 1) * w);
	}
}

// The gradient of clamped_swiglu, in place of gate and up; act again; and with weights their gradient.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void clamped_swiglu_grad(TYPED(void, gateUp), MEMORY(float, act), MEMORY(const float, dact), MEMORY(const float, weight), MEMORY(float, dweight),
	const int width, const float limit, const float alpha, const int halves)
{
	LOCATE_TYPED(gateUp), LOCATE(act), LOCATE(dact);
	local float part[GROUP];
	const size_t row = get_group_id(0);
	gateUp = MOVE(gateUp, gateUp_bf16, 2 * row * width);
	global void *up = MOVE(gateUp, gateUp_bf16, width);
	act += row * width;
	dact += row * width;
	const lanes most = limit, least = -limit;
	float w = 1;
	if (GIVEN(weight)) {
		LOCATE(weight);
		w = weight[row];
	}
	lanes dw = 0;
	for (int i = LANES * ITEM; i < width; i += LANES * GROUP) {
		const lanes gate = load_numbers(gateUp, gateUp_bf16, i, width), ups = load_numbers(up, gateUp_bf16, i, width);
		const lanes da = load_lanes(dact, i, width, 0), g = select(gate, most, gate > most);
		const lanes u = select(select(ups, most, ups > most), least, ups < least) + 1;
		const lanes s = 1 / (1 + exp(-alpha * g)), gs = g * s, a = gs * u, dwa = da * w, zero = 0;
		dw += a * da;
		store_numbers(act, halves, i, width, a * w);
		store_numbers(gateUp, gateUp_bf16, i, width, select(dwa * u * (s + alpha * gs * (1 - s)), zero, gate > most));
		store_numbers(up, gateUp_bf16, i, width, select(select(dwa * gs, zero, ups > most), zero, ups < least));
	}
	if (GIVEN(weight)) {
		LOCATE(dweight);
		const float sum = group_sum(lanes_sum(dw), part);
		if (ITEM == 0)
			dweight[row] = sum;
	}
}
