// Biases of groups of rows. starts[g] is the first row of group g, and starts[groups] the number of rows.

#include "groups.cl"

// Adds to row r of x the row of bias of its group, times weight[r], if there are weights.
kernel void grouped_bias(TYPED(void, x), TYPED(const void, bias), MEMORY(const float, weight), MEMORY(const int, starts), const int groups, const int width)
{
	LOCATE_TYPED(x), LOCATE_TYPED(bias), LOCATE(starts);
	const size_t row = get_group_id(0);
	x = MOVE(x, x_bf16, row * width);
	bias = MOVE(bias, bias_bf16, (size_t)group_of(starts, groups, row) * width);
	float w = 1;
	if (GIVEN(weight)) {
		LOCATE(weight);
		w = weight[row];
	}
	for (int i = LANES * ITEM; i < width; i += LANES * GROUP)
		store_numbers(x, x_bf16, i, width, load_numbers(x, x_bf16, i, width) + load_numbers(bias, bias_bf16, i, width) * w);
}

// Group (group of rows, part) of the grid adds to columns part·columns, … of the group's row of dbias the rows of dy, each times its weight.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void grouped_bias_grad(TYPED(void, dbias), TYPED(const void, dy), MEMORY(const float, weight), MEMORY(const int, starts), const int width, const int columns)
{
	LOCATE_TYPED(dbias), LOCATE_TYPED(dy), LOCATE(starts);
	if (GIVEN(weight))
		LOCATE(weight);
	const size_t group = get_group_id(0);
	const int begin = starts[group], end = starts[group + 1];
	const int column = columns * get_group_id(1), last = min(width, column + columns);
	if (begin == end)
		return;
	dbias = MOVE(dbias, dbias_bf16, group * width);
	for (int i = column + LANES * ITEM; i < last; i += LANES * GROUP) {
		const lanes old = load_numbers(dbias, dbias_bf16, i, last);
		lanes sum = dbias_bf16 ? (lanes)0 : old; // a sum in bfloat16 would be rounded for each row
		for (int row = begin; row < end; row++)
			sum += load_numbers(MOVE(dy, dy_bf16, (size_t)row * width), dy_bf16, i, last) * (GIVEN(weight) ? weight[row] : 1);
		store_numbers(dbias, dbias_bf16, i, last, dbias_bf16 ? old + sum : sum);
	}
}

// Adds to dweight[r] the product of row r of dy and the row of bias of its group.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void grouped_bias_weights(MEMORY(float, dweight), TYPED(const void, dy), TYPED(const void, bias), MEMORY(const int, starts), const int groups, const int width)
{
	LOCATE(dweight), LOCATE_TYPED(dy), LOCATE_TYPED(bias), LOCATE(starts);
	local float part[GROUP];
	const size_t row = get_group_id(0);
	dy = MOVE(dy, dy_bf16, row * width);
	bias = MOVE(bias, bias_bf16, (size_t)group_of(starts, groups, row) * width);
	lanes products = 0;
	for (int i = LANES * ITEM; i < width; i += LANES * GROUP)
		products += load_numbers(dy, dy_bf16, i, width) * load_numbers(bias, bias_bf16, i, width);
	const float sum = group_sum(lanes_sum(products), part);
	if (ITEM == 0)
		dweight[row] += sum;
}
