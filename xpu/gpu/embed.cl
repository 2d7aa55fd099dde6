// Tokens are sorted by their ids, and tokens of one id by their positions: first in blocks, then by merging runs of blocks, two at a time. Tokens of a run
// come before the tokens of the next run, so their order is a matter of ids alone.
#define BLOCK 64

// Sorts the tokens of blocks. A token's place in its block is the number of tokens of the block that are before it.
kernel void order_tokens(MEMORY(int, order), MEMORY(const int, ids), const int tokens)
{
	LOCATE(order), LOCATE(ids);
	const int token = get_global_id(0);
	if (token >= tokens)
		return;
	const int first = token / BLOCK * BLOCK, end = min(first + BLOCK, tokens), id = ids[token];
	int place = first;
	for (int t = first; t < end; t++)
		place += ids[t] < id + (t < token); // ids are less than the number of rows of a table
	order[place] = token;
}

// The first place from `low` on, before `high`, whose token has an id of at least this.
INLINE int place_of(global const int *order, global const int *ids, int low, int high, const int id)
{
	while (low < high) {
		const int middle = low + (high - low) / 2;
		if (ids[order[middle]] < id)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

// Merges runs of `run` tokens. A work-item has a token: its place is the number of tokens of both runs that are before it.
kernel void merge_tokens(MEMORY(int, merged), MEMORY(const int, order), MEMORY(const int, ids), const int tokens, const int run)
{
	LOCATE(merged), LOCATE(order), LOCATE(ids);
	const int at = get_global_id(0);
	if (at >= tokens)
		return;
	const int second = at / run % 2, first = at / run * run, token = order[at], id = ids[token];
	const int other = second ? first - run : min(first + run, tokens), end = min(other + run, tokens);
	merged[at - (second ? run : 0) + place_of(order, ids, other, end, id + second) - other] = token;
}

// Of the first token of an id, ends has, at its place, the place after the id's last token. Of others, and of the id skip, it has 0.
kernel void end_tokens(MEMORY(int, ends), MEMORY(const int, order), MEMORY(const int, ids), const int tokens, const int skip)
{
	LOCATE(ends), LOCATE(order), LOCATE(ids);
	const int at = get_global_id(0);
	if (at >= tokens)
		return;
	const int id = ids[order[at]];
	const bool first = at == 0 || ids[order[at - 1]] != id;
	ends[at] = first && id != skip ? place_of(order, ids, at + 1, tokens, id + 1) : 0;
}

// The gradient of an embedding. Group (place, part) of the grid adds to columns part·columns, … of the row of dtable that is the id's whose first token
// is at that place the rows of dx of all its tokens.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void embed_grad(TYPED(void, dtable), MEMORY(const float, dx), MEMORY(const int, ids), MEMORY(const int, order), MEMORY(const int, ends),
	const int width, const int columns)
{
	LOCATE_TYPED(dtable), LOCATE(dx), LOCATE(ids), LOCATE(order), LOCATE(ends);
	const int begin = get_group_id(0), end = ends[begin];
	if (end == 0)
		return;
	const int column = columns * get_group_id(1), last = min(width, column + columns);
	dtable = MOVE(dtable, dtable_bf16, (size_t)ids[order[begin]] * width);
	for (int i = column + LANES * ITEM; i < last; i += LANES * GROUP) {
		const lanes old = load_numbers(dtable, dtable_bf16, i, last);
		lanes sum = dtable_bf16 ? (lanes)0 : old; // a sum in bfloat16 would be rounded for each token
#ifndef PROCESSOR
		#pragma unroll 4
#endif
		for (int t = begin; t < end; t++)
			sum += load_lanes(dx + (size_t)order[t] * width, i, last, 0);
		store_numbers(dtable, dtable_bf16, i, last, dtable_bf16 ? old + sum : sum);
	}
}
