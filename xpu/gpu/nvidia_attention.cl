// Attention by the tensor cores of NVIDIA's GPUs; see warps.cl, and attention.cl for what the kernels compute. Given by Go: GRAD, for the kernels of
// gradients, and PIECES, the size of a packed row of a head in pieces of 16 bytes; what is beyond the size of the head is zero.
//
// A work-group owns 64 queries (or keys), 16 of each of its 4 warps, and reads the others in tiles of TILE. Blocks of scores stay in registers: the scores of
// 16 rows, rounded, are the left operand of the next product. multiply_block adds 16 keys (or queries) at a time, in ascending order.

#define WARPS 4
#define OWN (16 * WARPS)
#ifdef GRAD // with tiles for which there are enough registers
#define TILE (256 / PIECES)
#else
#define TILE (PIECES == 16 ? 32 : 64)
#endif
#define ITEMS __attribute__((reqd_work_group_size(WARP_ITEMS * WARPS, 1, 1)))

#include "warps.cl"

// s = the products of a warp's own rows and the others' rows.
INLINE void dots(block s[TILE / 8], const local uint4 *own, const local uint4 *others)
{
	#pragma unroll
	for (int j = 0; j < TILE / 8; j++)
		s[j] = zero_block();
	#pragma unroll
	for (int piece = 0; piece < PIECES; piece += 2) {
		const four a = load_matrices(own, 16 * WARP, piece, true, false);
		#pragma unroll
		for (int j = 0; j < TILE / 16; j++) {
			const four b = load_matrices(others, 16 * j, piece, false, false);
			s[2 * j] = multiply_block(a, b, 0, s[2 * j]);
			s[2 * j + 1] = multiply_block(a, b, 1, s[2 * j + 1]);
		}
	}
}

// sum += the others' rows, times their weights, rounded.
INLINE void add_rows(block sum[PIECES], const block weight[TILE / 8], const local uint4 *others)
{
	#pragma unroll
	for (int j = 0; j < TILE / 16; j++) {
		four a;
		EACH_LANE
			#pragma unroll
			for (int i = 0; i < 2; i++) {
				OF(a).v[i] = pack_weights(OF(weight[2 * j]).v[2 * i], OF(weight[2 * j]).v[2 * i + 1]);
				OF(a).v[i + 2] = pack_weights(OF(weight[2 * j + 1]).v[2 * i], OF(weight[2 * j + 1]).v[2 * i + 1]);
			}
		#pragma unroll
		for (int piece = 0; piece < PIECES; piece += 2) {
			const four b = load_matrices(others, 16 * j, piece, true, true);
			sum[piece] = multiply_block(a, b, 0, sum[piece]);
			sum[piece + 1] = multiply_block(a, b, 1, sum[piece + 1]);
		}
	}
}

INLINE void clear(block sum[PIECES])
{
	#pragma unroll
	for (int i = 0; i < PIECES; i++)
		sum[i] = zero_block();
}

// store writes a warp's part of the first `rows` own rows, times scale.
INLINE void store(global float *to, const long ld, const block sum[PIECES], const pair scale, const int rows, const int size)
{
	const int row = 16 * WARP;
	#pragma unroll
	for (int i = 0; i < PIECES; i++) {
		block x = sum[i];
		EACH_LANE
			#pragma unroll
			for (int j = 0; j < 4; j++)
				OF(x).v[j] *= OF(scale).v[j / 2];
		store_block(to + row * ld + 8 * i, 0, ld, x, rows - row, size - 8 * i, 0);
	}
}

// The largest, or the sum, of the four lanes that share rows, for all of them.
INLINE pair row_max(pair x)
{
	#pragma unroll
	for (int by = 1; by < 4; by *= 2) {
		const pair y = exchange(x, by);
		EACH_LANE
			#pragma unroll
			for (int i = 0; i < 2; i++)
				OF(x).v[i] = fmax(OF(x).v[i], OF(y).v[i]);
	}
	return x;
}

// The sum of `lanes` lanes that lie side by side, a power of two.
INLINE pair lane_sum(pair x, const int count)
{
	#pragma unroll
	for (int by = 1; by < count; by *= 2) {
		const pair y = exchange(x, by);
		EACH_LANE
			#pragma unroll
			for (int i = 0; i < 2; i++)
				OF(x).v[i] += OF(y).v[i];
	}
	return x;
}

INLINE pair pair_of(const float v)
{
	pair x;
	EACH_LANE
		OF(x).v[0] = OF(x).v[1] = v;
	return x;
}

// The own row, and the row of the others in a tile, of number i of block j.
#define OWN_ROW(i) (16 * WARP + lane / 4 + 8 * ((i) / 2))
#define OTHER_ROW(j, i) (8 * (j) + lane % 4 * 2 + (i) % 2)

#include "documents.cl"

// hide sets the scores of own queries with keys that they do not see to v. The first query is at position `from`, the first key at t.
INLINE void hide(block s[TILE / 8], const global int *begin, const bool documents, const int from, const int n, const int t, const float v)
{
	if (t + TILE - 1 <= from && !documents)
		return;
	EACH_LANE
		#pragma unroll
		for (int i = 0; i < 4; i++) {
			const int last = from + OWN_ROW(i), first = documents ? begin[min(OWN_ROW(i), n - 1)] : 0;
			#pragma unroll
			for (int j = 0; j < TILE / 8; j++) {
				const int key = t + OTHER_ROW(j, i);
				if (key > last || key < first)
					OF(s[j]).v[i] = v;
			}
		}
}

#ifndef GRAD

// Queries, heads, rows of the batch.
kernel ITEMS void nvidia_attend(MEMORY(float, context), MEMORY(float, lse), MEMORY(const uint, q_words), MEMORY(const uint, k_words),
	MEMORY(const uint, v_words), MEMORY(const int, begin), const int length, const int share, const int size)
{
	local uint4 own[OWN * PIECES], key_tile[TILE * PIECES], value_tile[TILE * PIECES];
	LOCATE(context), LOCATE(lse), LOCATE(q_words), LOCATE(k_words), LOCATE(v_words);
	const int from = ((int)get_num_groups(0) - 1 - (int)get_group_id(0)) * OWN, n = min(OWN, length - from), keys = from + n; // the longest first
	const int head = get_group_id(1), heads = get_num_groups(1), row = get_group_id(2);
	const long queries = ((long)row * heads + head) * length + from, group = (long)row * (heads / share) + head / share;
	const global uint4 *q = (const global uint4 *)q_words + queries * PIECES;
	const global uint4 *k = (const global uint4 *)k_words + group * length * PIECES, *v = (const global uint4 *)v_words + group * length * PIECES;
	const bool documents = GIVEN(begin);
	int since = 0;
	if (documents) {
		LOCATE(begin);
		begin += (long)row * length + from;
		since = begin[0] / TILE * TILE;
	}
	copy_rows(own, q, OWN, n, PIECES, WARPS);
	copy_rows(key_tile, k + since * PIECES, TILE, keys - since, PIECES, WARPS);
	end_copies();
	copy_rows(value_tile, v + since * PIECES, TILE, keys - since, PIECES, WARPS);
	end_copies();
	block sum[PIECES];
	clear(sum);
	pair top = pair_of(-FLT_MAX), total = pair_of(0); // a number, so that a tile of keys that are all hidden from a query changes nothing
	for (int t = since; t < keys; t += TILE) {
		const int next = t + TILE;
		block s[TILE / 8];
		await_copies(1);
		barrier(CLK_LOCAL_MEM_FENCE);
		dots(s, own, key_tile);
		barrier(CLK_LOCAL_MEM_FENCE);
		if (next < keys)
			copy_rows(key_tile, k + next * PIECES, TILE, keys - next, PIECES, WARPS);
		end_copies();
		hide(s, begin, documents, from, n, t, -INFINITY);
		pair best = top;
		EACH_LANE
			#pragma unroll
			for (int j = 0; j < TILE / 8; j++)
				#pragma unroll
				for (int i = 0; i < 4; i++)
					OF(best).v[i / 2] = fmax(OF(best).v[i / 2], OF(s[j]).v[i]);
		best = row_max(best);
		EACH_LANE {
			#pragma unroll
			for (int i = 0; i < 2; i++) {
				const float scale = exponential(OF(top).v[i] - OF(best).v[i]);
				OF(top).v[i] = OF(best).v[i];
				OF(total).v[i] *= scale;
				#pragma unroll
				for (int j = 0; j < PIECES; j++) {
					OF(sum[j]).v[2 * i] *= scale;
					OF(sum[j]).v[2 * i + 1] *= scale;
				}
			}
			#pragma unroll
			for (int j = 0; j < TILE / 8; j++)
				#pragma unroll
				for (int i = 0; i < 4; i++) {
					const float p = exponential(OF(s[j]).v[i] - OF(top).v[i / 2]);
					OF(s[j]).v[i] = p;
					OF(total).v[i / 2] += p;
				}
		}
		await_copies(1);
		barrier(CLK_LOCAL_MEM_FENCE);
		add_rows(sum, s, value_tile);
		barrier(CLK_LOCAL_MEM_FENCE);
		if (next < keys)
			copy_rows(value_tile, v + next * PIECES, TILE, keys - next, PIECES, WARPS);
		end_copies();
	}
	total = lane_sum(total, 4);
	EACH_LANE
		#pragma unroll
		for (int i = 0; i < 2; i++) {
			const int r = OWN_ROW(2 * i);
			if (lane % 4 == 0 && r < n)
				lse[queries + r] = OF(top).v[i] + log(OF(total).v[i]);
			OF(total).v[i] = 1 / OF(total).v[i];
		}
	store(context + (((long)row * length + from) * heads + head) * size, (long)heads * size, sum, total, n, size);
}

#else

// Queries, heads, rows. delta becomes Σ dO·O of each query. The packed rows of dO are in the order of dcontext: tokens, heads.
kernel ITEMS void nvidia_grad_queries(MEMORY(float, dqkv), MEMORY(float, delta), MEMORY(const float, dcontext), MEMORY(const float, context),
	MEMORY(const float, lse), MEMORY(const uint, q_words), MEMORY(const uint, k_words), MEMORY(const uint, v_words), MEMORY(const uint, down_words),
	MEMORY(const int, begin), const int length, const int share, const int size, const int width)
{
	local uint4 own[OWN * PIECES], own_down[OWN * PIECES], key_tile[TILE * PIECES], value_tile[TILE * PIECES];
	LOCATE(dqkv), LOCATE(delta), LOCATE(dcontext), LOCATE(context), LOCATE(lse), LOCATE(q_words), LOCATE(k_words), LOCATE(v_words), LOCATE(down_words);
	const int from = ((int)get_num_groups(0) - 1 - (int)get_group_id(0)) * OWN, n = min(OWN, length - from), keys = from + n;
	const int head = get_group_id(1), heads = get_num_groups(1), row = get_group_id(2);
	const long queries = ((long)row * heads + head) * length + from, group = (long)row * (heads / share) + head / share;
	const long out = ((long)row * length + from) * heads + head, ld = (long)heads * size;
	const global uint4 *q = (const global uint4 *)q_words + queries * PIECES, *down = (const global uint4 *)down_words + out * PIECES;
	const global uint4 *k = (const global uint4 *)k_words + group * length * PIECES, *v = (const global uint4 *)v_words + group * length * PIECES;
	const bool documents = GIVEN(begin);
	int since = 0;
	if (documents) {
		LOCATE(begin);
		begin += (long)row * length + from;
		since = begin[0] / TILE * TILE;
	}
	copy_rows(own, q, OWN, n, PIECES, WARPS);
	copy_rows(own_down, down, OWN, n, heads * PIECES, WARPS);
	copy_rows(key_tile, k + since * PIECES, TILE, keys - since, PIECES, WARPS);
	copy_rows(value_tile, v + since * PIECES, TILE, keys - since, PIECES, WARPS);
	end_copies();
	pair through = pair_of(0), logsum;
	dcontext += out * size, context += out * size;
	for (int r = 0; r < 8; r++) { // a warp has two rows at a time, r and r+8
		pair x;
		EACH_LANE
			#pragma unroll
			for (int i = 0; i < 2; i++) {
				const long at = min(16 * WARP + r + 8 * i, n - 1) * ld;
				float part = 0;
				for (int j = lane; j < size; j += WARP_LANES)
					part = fma(dcontext[at + j], context[at + j], part);
				OF(x).v[i] = part;
			}
		x = lane_sum(x, WARP_LANES);
		EACH_LANE
			if (lane / 4 == r)
				OF(through) = OF(x);
	}
	EACH_LANE
		#pragma unroll
		for (int i = 0; i < 2; i++) {
			const int r = OWN_ROW(2 * i);
			if (lane % 4 == 0 && r < n)
				delta[queries + r] = OF(through).v[i];
			OF(logsum).v[i] = lse[queries + min(r, n - 1)];
		}
	block sum[PIECES];
	clear(sum);
	for (int t = since; t < keys; t += TILE) {
		const int next = t + TILE;
		block s[TILE / 8], slope[TILE / 8];
		await_copies(0);
		barrier(CLK_LOCAL_MEM_FENCE);
		dots(s, own, key_tile);
		dots(slope, own_down, value_tile);
		barrier(CLK_LOCAL_MEM_FENCE);
		if (next < keys)
			copy_rows(value_tile, v + next * PIECES, TILE, keys - next, PIECES, WARPS);
		EACH_LANE
			#pragma unroll
			for (int j = 0; j < TILE / 8; j++)
				#pragma unroll
				for (int i = 0; i < 4; i++)
					OF(s[j]).v[i] = exponential(OF(s[j]).v[i] - OF(logsum).v[i / 2]) * (OF(slope[j]).v[i] - OF(through).v[i / 2]);
		hide(s, begin, documents, from, n, t, 0);
		add_rows(sum, s, key_tile);
		barrier(CLK_LOCAL_MEM_FENCE);
		if (next < keys)
			copy_rows(key_tile, k + next * PIECES, TILE, keys - next, PIECES, WARPS);
		end_copies();
	}
	store(dqkv + ((long)row * length + from) * width + (long)head * size, width, sum, pair_of(1), n, size);
}

// Keys, heads of keys, rows.
kernel ITEMS void nvidia_grad_keys(MEMORY(float, dk), MEMORY(float, dv), MEMORY(const float, delta), MEMORY(const float, lse), MEMORY(const uint, q_words),
	MEMORY(const uint, k_words), MEMORY(const uint, v_words), MEMORY(const uint, down_words), MEMORY(const int, begin), const int length, const int share,
	const int size)
{
	local uint4 own[OWN * PIECES], own_values[OWN * PIECES], tile[TILE * PIECES], down_tile[TILE * PIECES];
	LOCATE(dk), LOCATE(dv), LOCATE(delta), LOCATE(lse), LOCATE(q_words), LOCATE(k_words), LOCATE(v_words), LOCATE(down_words);
	const int from = (int)get_group_id(0) * OWN, n = min(OWN, length - from), heads = get_num_groups(1) * share, row = get_group_id(2);
	const long keys = ((long)row * get_num_groups(1) + get_group_id(1)) * length + from;
	const global uint4 *k = (const global uint4 *)k_words + keys * PIECES, *v = (const global uint4 *)v_words + keys * PIECES;
	const global uint4 *q = (const global uint4 *)q_words, *down = (const global uint4 *)down_words;
	const bool documents = GIVEN(begin);
	int stop = length; // the first query that sees no key of the group
	if (documents) {
		LOCATE(begin);
		begin += (long)row * length;
		stop = first_beyond(begin, length, 0, from + n - 1);
	}
	copy_rows(own, k, OWN, n, PIECES, WARPS);
	copy_rows(own_values, v, OWN, n, PIECES, WARPS);
	block sum_k[PIECES], sum_v[PIECES];
	clear(sum_k);
	clear(sum_v);
	// All heads of queries follow each other: turn i is tile i % tiles of a head.
	const int tiles = (stop - from + TILE - 1) / TILE, turns = tiles * share;
	const long heads_before = (long)row * heads + get_group_id(1) * share; // of this batch row and group
#define QUERIES(i) (q + ((heads_before + (i) / tiles) * length + from + (i) % tiles * TILE) * PIECES)
#define DOWN(i) (down + (((long)row * length + from + (i) % tiles * TILE) * heads + get_group_id(1) * share + (i) / tiles) * PIECES)
#define THERE(i) (length - from - (i) % tiles * TILE)
	copy_rows(tile, QUERIES(0), TILE, THERE(0), PIECES, WARPS);
	copy_rows(down_tile, DOWN(0), TILE, THERE(0), heads * PIECES, WARPS);
	end_copies();
	for (int turn = 0; turn < turns; turn++) {
		const int t = from + turn % tiles * TILE;
		const long queries = (heads_before + turn / tiles) * length;
		block s[TILE / 8], slope[TILE / 8];
		await_copies(0);
		barrier(CLK_LOCAL_MEM_FENCE);
		dots(s, own, tile);
		dots(slope, own_values, down_tile);
		EACH_LANE
			#pragma unroll
			for (int j = 0; j < TILE / 8; j++)
				#pragma unroll
				for (int i = 0; i < 2; i++) { // of the columns, which are queries
					const int query = t + OTHER_ROW(j, i), at = min(query, length - 1), first = documents ? begin[at] : 0;
					const float logsum = lse[queries + at], through = delta[queries + at];
					#pragma unroll
					for (int h = i; h < 4; h += 2) {
						const int key = from + OWN_ROW(h);
						const bool sees = query >= key && query < length && first <= key;
						OF(s[j]).v[h] = sees ? exponential(OF(s[j]).v[h] - logsum) : 0;
						OF(slope[j]).v[h] = OF(s[j]).v[h] * (OF(slope[j]).v[h] - through);
					}
				}
		add_rows(sum_v, s, down_tile);
		barrier(CLK_LOCAL_MEM_FENCE);
		if (turn + 1 < turns)
			copy_rows(down_tile, DOWN(turn + 1), TILE, THERE(turn + 1), heads * PIECES, WARPS);
		add_rows(sum_k, slope, tile);
		barrier(CLK_LOCAL_MEM_FENCE);
		if (turn + 1 < turns)
			copy_rows(tile, QUERIES(turn + 1), TILE, THERE(turn + 1), PIECES, WARPS);
		end_copies();
	}
	store(dk + keys * size, size, sum_k, pair_of(1), n, size);
	store(dv + keys * size, size, sum_v, pair_of(1), n, size);
}

#endif
