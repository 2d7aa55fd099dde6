// The tokens in the order of their ids, and of equal ids in their own: a token's place in order is the number of those before it. Of the first token of
// an id ends has, at its place, the place after the last one; of others, and of those whose id is skip, it has 0.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void order_tokens(MEMORY(int, order), MEMORY(int, ends), MEMORY(const int, ids), const int tokens, const int skip)
{
	LOCATE(order), LOCATE(ends), LOCATE(ids);
	local int part[GROUP];
	const int token = get_group_id(0), id = ids[token];
	int less = 0, before = 0, equal = 0;
	for (int t = ITEM; t < tokens; t += GROUP) {
		less += ids[t] < id;
		before += ids[t] == id & t < token;
		equal += ids[t] == id;
	}
	less = group_sum_int(less, part);
	before = group_sum_int(before, part);
	equal = group_sum_int(equal, part);
	if (ITEM == 0) {
		order[less + before] = token;
		ends[less + before] = before == 0 && id != skip ? less + equal : 0;
	}
}

// The gradient of an embedding. Group (place, part) of the grid adds to columns part·columns, … of the row of dtable that is the id's whose first token
// is at that place the rows of dx of all its tokens.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void embed_grad(MEMORY(float, dtable), MEMORY(const float, dx), MEMORY(const int, ids), MEMORY(const int, order), MEMORY(const int, ends),
	const int width, const int columns)
{
	LOCATE(dtable), LOCATE(dx), LOCATE(ids), LOCATE(order), LOCATE(ends);
	const int begin = get_group_id(0), end = ends[begin];
	if (end == 0)
		return;
	const int column = columns * get_group_id(1), last = min(width, column + columns);
	dtable += (size_t)ids[order[begin]] * width;
	for (int i = column + LANES * ITEM; i < last; i += LANES * GROUP) {
		lanes sum = load_lanes(dtable, i, last, 0);
#ifndef PROCESSOR
		#pragma unroll 4
#endif
		for (int t = begin; t < end; t++)
			sum += load_lanes(dx + (size_t)order[t] * width, i, last, 0);
		store_lanes(dtable, i, last, sum);
	}
}
