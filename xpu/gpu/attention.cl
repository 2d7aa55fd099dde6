// Attention in tiles: the scores of a tile of queries and keys are only in registers or local memory. The forward pass
// keeps the logsumexp of each query. The backward pass recomputes probabilities from it, once for the gradients of
// queries and once for the gradients of keys and values, so that exactly one group writes an element.
//
// A group owns queries (or keys), and reads the others in tiles from position 0 (or from its own position), in order.
// The result of a query depends only on its own keys: tiles start at the first key, and keys that a query does not see
// have weight 0 and are added to nothing else. If begin is given, queries do not see the keys before it. Tiles in which
// no query of the group sees a key, or no key is seen, are skipped.

#ifdef PROCESSOR

// A work-item owns 16 rows, a lane of its vectors each. Elements of the others are the same for all lanes.
#define OWN 16
#define TILE 32 // rows of the others at a time
#define BLOCK 8 // of sums in registers

// Column j of the rows becomes to[j]; rows from `rows` on are zero.
static inline void load_own(local float16 *to, const global float *from, const long ld, const int rows, const int size)
{
	local float *x = (local float *)to;
	for (int r = 0; r < OWN; r++)
		for (int j = 0; j < size; j++)
			x[j * OWN + r] = r < rows ? operand(from[r * ld + j]) : 0;
}

static inline void load_tile(local float *to, const global float *from, const long ld, const int rows, const int size)
{
	for (int r = 0; r < rows; r++)
		for (int j = 0; j < size; j++)
			to[r * size + j] = operand(from[r * ld + j]);
	for (int i = rows * size; i < TILE * size; i++)
		to[i] = 0;
}

// s[r] = the products of row r of the tile and the own rows.
static inline void dots(local float16 *s, const local float16 *own, const local float *tile, const int size)
{
	for (int r = 0; r < TILE; r += BLOCK) {
		float16 sum[BLOCK];
		#pragma unroll
		for (int i = 0; i < BLOCK; i++)
			sum[i] = 0;
		for (int j = 0; j < size; j++) {
			const float16 x = own[j];
			#pragma unroll
			for (int i = 0; i < BLOCK; i++)
				sum[i] = fma((float16)tile[(r + i) * size + j], x, sum[i]);
		}
		#pragma unroll
		for (int i = 0; i < BLOCK; i++)
			s[r + i] = sum[i];
	}
}

// sum[j] += the rows of the tile at column j, times their weights. It rounds the weights.
static inline void add_rows(local float16 *sum, local float16 *weight, const local float *tile, const int size)
{
#ifdef BF16
	local float *w = (local float *)weight;
	for (int i = 0; i < TILE * OWN; i++)
		w[i] = operand(w[i]);
#endif
	for (int j = 0; j < size; j += BLOCK) {
		float16 part[BLOCK];
		int at[BLOCK];
		#pragma unroll
		for (int i = 0; i < BLOCK; i++) {
			at[i] = min(j + i, size - 1); // the last column may be computed more than once
			part[i] = sum[at[i]];
		}
		for (int r = 0; r < TILE; r++) {
			const float16 x = weight[r];
			#pragma unroll
			for (int i = 0; i < BLOCK; i++)
				part[i] = fma((float16)tile[r * size + at[i]], x, part[i]);
		}
		#pragma unroll
		for (int i = 0; i < BLOCK; i++)
			sum[at[i]] = part[i];
	}
}

static inline void clear(local float16 *x, const int n)
{
	for (int i = 0; i < n; i++)
		x[i] = 0;
}

static inline void store(global float *to, const long ld, const local float16 *from, const int rows, const int size)
{
	const local float *x = (const local float *)from;
	for (int r = 0; r < rows; r++)
		for (int j = 0; j < size; j++)
			to[r * ld + j] = x[j * OWN + r];
}

#define NUMBERS (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)

// The first keys that the own queries see, for the given rows.
static inline int16 load_begins(const global int *begin, const int rows)
{
	int each[OWN];
	for (int r = 0; r < OWN; r++)
		each[r] = begin[min(r, rows - 1)];
	return vload16(0, each);
}

// Queries, heads, rows of the batch. memory is 4·size + TILE.
kernel void attend(MEMORY(float, context), MEMORY(float, lse), MEMORY(const float, q), MEMORY(const float, k), MEMORY(const float, v),
	MEMORY(const int, begin), const int length, const int share, const int size, const int first, const int capacity, local float16 *memory)
{
	LOCATE(context), LOCATE(lse), LOCATE(q), LOCATE(k), LOCATE(v);
	const int from = ((int)get_num_groups(0) - 1 - (int)get_group_id(0)) * OWN, n = min(OWN, length - from); // the longest first
	const int head = get_group_id(1), heads = get_num_groups(1), row = get_group_id(2), past = first + from, keys = past + n;
	const long queries = ((long)row * heads + head) * length + from, group = (long)row * (heads / share) + head / share;
	k += group * capacity * size, v += group * capacity * size;

	local float16 *own = memory, *sum = own + size, *weight = sum + size;
	local float *tile = (local float *)(weight + TILE);
	load_own(own, q + queries * size, size, n, size);
	clear(sum, size);
	float16 top = -FLT_MAX, total = 0; // a number, so that a tile of keys that are all hidden from a query changes nothing
	int16 low = 0;
	int since = 0, seen = 0; // the first tile, and the first key that the last query sees
	if (GIVEN(begin)) {
		LOCATE(begin);
		begin += (long)row * length + from;
		low = load_begins(begin, n), since = begin[0] / TILE * TILE, seen = begin[n - 1];
	}
	for (int t = since; t < keys; t += TILE) {
		const int others = min(TILE, keys - t);
		load_tile(tile, k + (long)t * size, size, others, size);
		dots(weight, own, tile, size);
		float16 best = top;
		for (int r = 0; r < TILE; r++) {
			if (t + r > past)
				weight[r] = select(weight[r], (float16)-INFINITY, (int16)(t + r) > past + NUMBERS);
			if (t + r < seen)
				weight[r] = select(weight[r], (float16)-INFINITY, (int16)(t + r) < low);
			best = fmax(best, weight[r]);
		}
		const float16 scale = exp(top - best);
		top = best;
		total *= scale;
		for (int r = 0; r < TILE; r++) {
			const float16 p = exp(weight[r] - top);
			weight[r] = p;
			total += p;
		}
		for (int j = 0; j < size; j++)
			sum[j] *= scale;
		load_tile(tile, v + (long)t * size, size, others, size);
		add_rows(sum, weight, tile, size);
	}
	for (int j = 0; j < size; j++)
		sum[j] /= total;
	store(context + (((long)row * length + from) * heads + head) * size, (long)heads * size, sum, n, size);
	weight[0] = top + log(total);
	for (int r = 0; r < n; r++)
		lse[queries + r] = ((local float *)weight)[r];
}

// Queries, heads, rows. memory is 7·size + 2·TILE. delta becomes Σ dO·O of each query.
kernel void attend_grad_queries(MEMORY(float, dqkv), MEMORY(float, delta), MEMORY(const float, dcontext), MEMORY(const float, context), MEMORY(const float, lse),
	MEMORY(const float, q), MEMORY(const float, k), MEMORY(const float, v), MEMORY(const int, begin), const int length, const int share, const int size,
	const int first, const int capacity, const int width, local float16 *memory)
{
	LOCATE(dqkv), LOCATE(delta), LOCATE(dcontext), LOCATE(context), LOCATE(lse), LOCATE(q), LOCATE(k), LOCATE(v);
	const int from = ((int)get_num_groups(0) - 1 - (int)get_group_id(0)) * OWN, n = min(OWN, length - from);
	const int head = get_group_id(1), heads = get_num_groups(1), row = get_group_id(2), past = first + from, keys = past + n;
	const long queries = ((long)row * heads + head) * length + from, group = (long)row * (heads / share) + head / share;
	const long out = (((long)row * length + from) * heads + head) * size, ld = (long)heads * size;
	k += group * capacity * size, v += group * capacity * size;

	local float16 *own = memory, *down = own + size, *sum = down + size, *weight = sum + size, *slope = weight + TILE;
	local float *tile_k = (local float *)(slope + TILE), *tile_v = tile_k + TILE * size;
	for (int r = 0; r < OWN; r++) {
		float16 part = 0;
		int j = 0;
		for (; r < n && j + 16 <= size; j += 16)
			part = fma(vload16(0, dcontext + out + r * ld + j), vload16(0, context + out + r * ld + j), part);
		float all = lanes_sum(part);
		for (; r < n && j < size; j++)
			all = fma(dcontext[out + r * ld + j], context[out + r * ld + j], all);
		((local float *)weight)[r] = r < n ? lse[queries + r] : 0;
		((local float *)slope)[r] = all;
		if (r < n)
			delta[queries + r] = all;
	}
	const float16 logsum = weight[0], through = slope[0];
	load_own(own, q + queries * size, size, n, size);
	load_own(down, dcontext + out, ld, n, size);
	clear(sum, size);
	int16 low = 0;
	int since = 0, seen = 0;
	if (GIVEN(begin)) {
		LOCATE(begin);
		begin += (long)row * length + from;
		low = load_begins(begin, n), since = begin[0] / TILE * TILE, seen = begin[n - 1];
	}
	for (int t = since; t < keys; t += TILE) {
		const int others = min(TILE, keys - t);
		load_tile(tile_k, k + (long)t * size, size, others, size);
		load_tile(tile_v, v + (long)t * size, size, others, size);
		dots(weight, own, tile_k, size);
		dots(slope, down, tile_v, size);
		for (int r = 0; r < TILE; r++) {
			float16 p = exp(weight[r] - logsum);
			if (t + r > past)
				p = select(p, (float16)0, (int16)(t + r) > past + NUMBERS);
			if (t + r < seen)
				p = select(p, (float16)0, (int16)(t + r) < low);
			weight[r] = p * (slope[r] - through);
		}
		add_rows(sum, weight, tile_k, size);
	}
	store(dqkv + ((long)row * length + from) * width + (long)head * size, width, sum, n, size);
}

// Keys, heads of keys, rows. memory is 8·size + 2·TILE.
kernel void attend_grad_keys(MEMORY(float, dk), MEMORY(float, dv), MEMORY(const float, delta), MEMORY(const float, dcontext), MEMORY(const float, lse),
	MEMORY(const float, q), MEMORY(const float, k), MEMORY(const float, v), MEMORY(const int, begin), const int length, const int share, const int size,
	const int first, const int capacity, local float16 *memory)
{
	LOCATE(dk), LOCATE(dv), LOCATE(delta), LOCATE(dcontext), LOCATE(lse), LOCATE(q), LOCATE(k), LOCATE(v);
	const int from = (int)get_group_id(0) * OWN, n = min(OWN, first + length - from);
	const int heads = get_num_groups(1) * share, row = get_group_id(2);
	const long keys = (((long)row * get_num_groups(1) + get_group_id(1)) * capacity + from) * size, ld = (long)heads * size;

	local float16 *own_k = memory, *own_v = own_k + size, *sum_k = own_v + size, *sum_v = sum_k + size, *weight = sum_v + size, *slope = weight + TILE;
	local float *tile_q = (local float *)(slope + TILE), *tile_o = tile_q + TILE * size;
	load_own(own_k, k + keys, size, n, size);
	load_own(own_v, v + keys, size, n, size);
	clear(sum_k, size);
	clear(sum_v, size);
	if (GIVEN(begin)) {
		LOCATE(begin);
		begin += (long)row * length;
	}
	for (int head = get_group_id(1) * share, last = head + share; head < last; head++) {
		const long queries = ((long)row * heads + head) * length;
		for (int t = max(from - first, 0); t < length; t += TILE) {
			if (GIVEN(begin) && begin[t] >= from + n)
				break; // neither these queries nor later queries see a key of the group
			const int others = min(TILE, length - t);
			load_tile(tile_q, q + (queries + t) * size, size, others, size);
			load_tile(tile_o, dcontext + (((long)row * length + t) * heads + head) * size, ld, others, size);
			dots(weight, own_k, tile_q, size);
			dots(slope, own_v, tile_o, size);
			for (int r = 0; r < TILE; r++) {
				if (r >= others) {
					weight[r] = slope[r] = 0;
					continue;
				}
				float16 p = exp(weight[r] - lse[queries + t + r]);
				if (first + t + r < from + OWN - 1)
					p = select(p, (float16)0, (int16)(first + t + r) < from + NUMBERS);
				if (GIVEN(begin) && begin[t + r] > from)
					p = select(p, (float16)0, (int16)begin[t + r] > from + NUMBERS);
				weight[r] = p;
				slope[r] = p * (slope[r] - delta[queries + t + r]);
			}
			add_rows(sum_v, weight, tile_o, size);
			add_rows(sum_k, slope, tile_q, size);
		}
	}
	store(dk + keys, size, sum_k, n, size);
	store(dv + keys, size, sum_v, n, size);
}

#elif defined(PANELS)

// A group of 16 × 16 work-items owns 64 rows and takes 64 of the others at a time. An item has 4 × 4 of the tile's products, rows 4·(item / 16) on and
// columns 4·(item modulo 16) on, and of the sums for the same rows 4 columns in each of PANELS panels of 64. Heads that have more columns than these
// panels are several groups' work, which all compute the scores.
#define SIDE 64
#define DEPTH 16 // rows in local memory at a time
#define PITCH 68 // of a row there, a multiple of 4

#ifdef cl_intel_required_subgroup_size
#define ITEMS __attribute__((reqd_work_group_size(256, 1, 1), intel_reqd_sub_group_size(16))) // of 32 each would have half the registers
#else
#define ITEMS __attribute__((reqd_work_group_size(256, 1, 1)))
#endif

// s = the products of the own rows x and the others' rows y. Rows beyond their number are zero. chunk is 2·DEPTH·PITCH.
INLINE void dots(float4 s[4], const global float *x, const long x_ld, const int x_rows, const global float *y, const long y_ld, const int y_rows,
	const int size, local float *chunk)
{
	local float *left = chunk, *right = chunk + DEPTH * PITCH;
	const int item = get_local_id(0), row = item / 16 * 4, column = item % 16 * 4;
	#pragma unroll
	for (int i = 0; i < 4; i++)
		s[i] = 0;
	for (int t = 0; t < size; t += DEPTH) {
		barrier(CLK_LOCAL_MEM_FENCE);
		#pragma unroll
		for (int i = 0; i < 4; i++) {
			const int r = item / DEPTH + 16 * i, d = item % DEPTH;
			left[d * PITCH + r] = t + d < size && r < x_rows ? operand(x[r * x_ld + t + d]) : 0;
			right[d * PITCH + r] = t + d < size && r < y_rows ? operand(y[r * y_ld + t + d]) : 0;
		}
		barrier(CLK_LOCAL_MEM_FENCE);
		#pragma unroll 4
		for (int d = 0; d < DEPTH; d++) {
			const float4 p = vload4(0, left + d * PITCH + row), q = vload4(0, right + d * PITCH + column);
			s[0] = fma(p.x, q, s[0]);
			s[1] = fma(p.y, q, s[1]);
			s[2] = fma(p.z, q, s[2]);
			s[3] = fma(p.w, q, s[3]);
		}
	}
}

// keep leaves the items' weights s in local memory, rounded: row r of the others in weight[r·PITCH], its own rows in order.
INLINE void keep(local float *weight, const float4 s[4])
{
	local float *to = weight + get_local_id(0) % 16 * 4 * PITCH + get_local_id(0) / 16 * 4;
	vstore4((float4)(operand(s[0].x), operand(s[1].x), operand(s[2].x), operand(s[3].x)), 0, to);
	vstore4((float4)(operand(s[0].y), operand(s[1].y), operand(s[2].y), operand(s[3].y)), 0, to + PITCH);
	vstore4((float4)(operand(s[0].z), operand(s[1].z), operand(s[2].z), operand(s[3].z)), 0, to + 2 * PITCH);
	vstore4((float4)(operand(s[0].w), operand(s[1].w), operand(s[2].w), operand(s[3].w)), 0, to + 3 * PITCH);
}

// sum += the others' rows y, times their weights; columns from `first` on.
INLINE void add_rows(float4 sum[4][PANELS], const local float *weight, const global float *y, const long ld, const int rows, const int first, const int size,
	local float *chunk)
{
	const int item = get_local_id(0), row = item / 16 * 4, column = item % 16 * 4;
	for (int t = 0; t < rows; t += DEPTH) {
		barrier(CLK_LOCAL_MEM_FENCE);
		#pragma unroll
		for (int i = 0; i < 4 * PANELS; i++) {
			const int at = 256 * i + item, r = t + at / (64 * PANELS), j = first + at % (64 * PANELS);
			chunk[at] = r < rows && j < size ? operand(y[r * ld + j]) : 0;
		}
		barrier(CLK_LOCAL_MEM_FENCE);
		#pragma unroll 4
		for (int d = 0; d < DEPTH; d++) {
			const float4 w = vload4(0, weight + (t + d) * PITCH + row);
			#pragma unroll
			for (int p = 0; p < PANELS; p++) {
				const float4 v = vload4(0, chunk + d * 64 * PANELS + 64 * p + column);
				sum[0][p] = fma(w.x, v, sum[0][p]);
				sum[1][p] = fma(w.y, v, sum[1][p]);
				sum[2][p] = fma(w.z, v, sum[2][p]);
				sum[3][p] = fma(w.w, v, sum[3][p]);
			}
		}
	}
}

INLINE void clear(float4 sum[4][PANELS])
{
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int p = 0; p < PANELS; p++)
			sum[i][p] = 0;
}

// store writes the item's part of the first `rows` own rows, times scale.
INLINE void store(global float *to, const long ld, const float4 sum[4][PANELS], const float scale[4], const int rows, const int first, const int size)
{
	const int row = get_local_id(0) / 16 * 4, column = first + get_local_id(0) % 16 * 4;
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int p = 0; p < PANELS; p++) {
			const float4 v = sum[i][p] * scale[i];
			const int j = column + 64 * p;
			global float *at = to + (row + i) * ld + j;
			if (row + i < rows) {
				if (j < size)
					at[0] = v.x;
				if (j + 1 < size)
					at[1] = v.y;
				if (j + 2 < size)
					at[2] = v.z;
				if (j + 3 < size)
					at[3] = v.w;
			}
		}
}

// share_rows gives all 16 items of a row what each has of it.
INLINE void share_rows(local float *chunk, const float mine[4])
{
	const int x = get_local_id(0) % 16, row = get_local_id(0) / 16 * 4;
	barrier(CLK_LOCAL_MEM_FENCE);
	#pragma unroll
	for (int i = 0; i < 4; i++)
		chunk[(row + i) * 16 + x] = mine[i];
	barrier(CLK_LOCAL_MEM_FENCE);
}

#define ROW(chunk, i) vload16(get_local_id(0) / 16 * 4 + (i), chunk) // what share_rows gave of the item's i-th row

INLINE float sum16(const float16 v)
{
	const float8 a = v.lo + v.hi;
	const float4 b = a.lo + a.hi;
	return b.x + b.y + (b.z + b.w);
}

INLINE float max16(const float16 v)
{
	const float8 a = fmax(v.lo, v.hi);
	const float4 b = fmax(a.lo, a.hi);
	return fmax(fmax(b.x, b.y), fmax(b.z, b.w));
}

INLINE float max4(const float4 v) { return fmax(fmax(v.x, v.y), fmax(v.z, v.w)); }

// hidden sets the numbers to v whose positions, counted from `at`, are not from first to last.
INLINE float4 hidden(const float4 s, const int at, const int first, const int last, const float v)
{
	const int4 position = at + (int4)(0, 1, 2, 3);
	return select(s, (float4)v, position < first || position > last);
}

// load_begins loads the first keys that the queries of the item see, for the given rows of the group.
INLINE void load_begins(int low[4], const global int *begin, const int rows)
{
	#pragma unroll
	for (int i = 0; i < 4; i++)
		low[i] = begin[min((int)get_local_id(0) / 16 * 4 + i, rows - 1)];
}

#include "documents.cl"

// Queries, heads, rows of the batch times groups of panels. memory is 2·DEPTH·PITCH + SIDE·PITCH floats.
kernel ITEMS void attend(MEMORY(float, context), MEMORY(float, lse), MEMORY(const float, q), MEMORY(const float, k), MEMORY(const float, v),
	MEMORY(const int, begin), const int length, const int share, const int size, const int first, const int capacity, local float16 *memory)
{
	LOCATE(context), LOCATE(lse), LOCATE(q), LOCATE(k), LOCATE(v);
	const int parts = (size + 64 * PANELS - 1) / (64 * PANELS), part = (int)get_group_id(2) % parts, row = (int)get_group_id(2) / parts;
	const int from = ((int)get_num_groups(0) - 1 - (int)get_group_id(0)) * SIDE, n = min(SIDE, length - from); // the longest first
	const int head = get_group_id(1), heads = get_num_groups(1), past = first + from, keys = past + n;
	const long queries = ((long)row * heads + head) * length + from, group = (long)row * (heads / share) + head / share;
	q += queries * size, k += group * capacity * size, v += group * capacity * size;

	local float *chunk = (local float *)memory, *weight = chunk + 2 * DEPTH * PITCH;
	const int mine = get_local_id(0) / 16 * 4, column = get_local_id(0) % 16 * 4;
	float4 sum[4][PANELS];
	float top[4], total[4];
	clear(sum);
	#pragma unroll
	for (int i = 0; i < 4; i++)
		top[i] = -FLT_MAX, total[i] = 0; // a number, so that a tile of keys that are all hidden from a query changes nothing
	int low[4] = {0, 0, 0, 0}, since = 0;
	if (GIVEN(begin)) {
		LOCATE(begin);
		begin += (long)row * length + from;
		load_begins(low, begin, n);
		since = begin[0] / SIDE * SIDE;
	}
	for (int t = since; t < keys; t += SIDE) {
		const int others = min(SIDE, keys - t);
		float4 s[4];
		float best[4];
		dots(s, q, size, n, k + (long)t * size, size, others, size, chunk);
		#pragma unroll
		for (int i = 0; i < 4; i++) {
			s[i] = hidden(s[i], t + column, low[i], past + mine + i, -INFINITY);
			best[i] = max4(s[i]);
		}
		share_rows(chunk, best);
		#pragma unroll
		for (int i = 0; i < 4; i++) {
			const float now = fmax(top[i], max16(ROW(chunk, i))), scale = exp(top[i] - now);
			top[i] = now;
			s[i] = exp(s[i] - now);
			total[i] = fma(total[i], scale, s[i].x + s[i].y + (s[i].z + s[i].w));
			#pragma unroll
			for (int p = 0; p < PANELS; p++)
				sum[i][p] *= scale;
		}
		keep(weight, s);
		add_rows(sum, weight, v + (long)t * size, size, others, 64 * PANELS * part, size, chunk);
	}
	share_rows(chunk, total);
	#pragma unroll
	for (int i = 0; i < 4; i++) {
		const float all = sum16(ROW(chunk, i));
		if (part == 0 && column == 0 && mine + i < n)
			lse[queries + mine + i] = top[i] + log(all);
		total[i] = 1 / all;
	}
	store(context + (((long)row * length + from) * heads + head) * size, (long)heads * size, sum, total, n, 64 * PANELS * part, size);
}

// Queries, heads, rows times groups of panels. delta becomes Σ dO·O of each query.
kernel ITEMS void attend_grad_queries(MEMORY(float, dqkv), MEMORY(float, delta), MEMORY(const float, dcontext), MEMORY(const float, context),
	MEMORY(const float, lse), MEMORY(const float, q), MEMORY(const float, k), MEMORY(const float, v), MEMORY(const int, begin), const int length, const int share, const int size,
	const int first, const int capacity, const int width, local float16 *memory)
{
	LOCATE(dqkv), LOCATE(delta), LOCATE(dcontext), LOCATE(context), LOCATE(lse), LOCATE(q), LOCATE(k), LOCATE(v);
	const int parts = (size + 64 * PANELS - 1) / (64 * PANELS), part = (int)get_group_id(2) % parts, row = (int)get_group_id(2) / parts;
	const int from = ((int)get_num_groups(0) - 1 - (int)get_group_id(0)) * SIDE, n = min(SIDE, length - from);
	const int head = get_group_id(1), heads = get_num_groups(1), past = first + from, keys = past + n;
	const long queries = ((long)row * heads + head) * length + from, group = (long)row * (heads / share) + head / share;
	const long out = (((long)row * length + from) * heads + head) * size, ld = (long)heads * size;
	q += queries * size, k += group * capacity * size, v += group * capacity * size, dcontext += out, context += out;

	local float *chunk = (local float *)memory, *weight = chunk + 2 * DEPTH * PITCH;
	const int mine = get_local_id(0) / 16 * 4, column = get_local_id(0) % 16 * 4;
	float4 sum[4][PANELS];
	float logsum[4], through[4];
	#pragma unroll
	for (int i = 0; i < 4; i++) {
		const int r = mine + i;
		through[i] = 0;
		for (int j = get_local_id(0) % 16; r < n && j < size; j += 16)
			through[i] = fma(dcontext[r * ld + j], context[r * ld + j], through[i]);
		logsum[i] = r < n ? lse[queries + r] : 0;
	}
	share_rows(chunk, through);
	#pragma unroll
	for (int i = 0; i < 4; i++) {
		through[i] = sum16(ROW(chunk, i));
		if (part == 0 && column == 0 && mine + i < n)
			delta[queries + mine + i] = through[i];
	}
	clear(sum);
	int low[4] = {0, 0, 0, 0}, since = 0;
	if (GIVEN(begin)) {
		LOCATE(begin);
		begin += (long)row * length + from;
		load_begins(low, begin, n);
		since = begin[0] / SIDE * SIDE;
	}
	for (int t = since; t < keys; t += SIDE) {
		const int others = min(SIDE, keys - t);
		float4 s[4], slope[4];
		dots(s, q, size, n, k + (long)t * size, size, others, size, chunk);
		dots(slope, dcontext, ld, n, v + (long)t * size, size, others, size, chunk);
		#pragma unroll
		for (int i = 0; i < 4; i++)
			s[i] = hidden(exp(s[i] - logsum[i]) * (slope[i] - through[i]), t + column, low[i], past + mine + i, 0);
		keep(weight, s);
		add_rows(sum, weight, k + (long)t * size, size, others, 64 * PANELS * part, size, chunk);
	}
	const float one[4] = {1, 1, 1, 1};
	store(dqkv + ((long)row * length + from) * width + (long)head * size, width, sum, one, n, 64 * PANELS * part, size);
}

// Keys, heads of keys, rows times groups of panels.
kernel ITEMS void attend_grad_keys(MEMORY(float, dk), MEMORY(float, dv), MEMORY(const float, delta), MEMORY(const float, dcontext), MEMORY(const float, lse),
	MEMORY(const float, q), MEMORY(const float, k), MEMORY(const float, v), MEMORY(const int, begin), const int length, const int share, const int size,
	const int first, const int capacity, local float16 *memory)
{
	LOCATE(dk), LOCATE(dv), LOCATE(delta), LOCATE(dcontext), LOCATE(lse), LOCATE(q), LOCATE(k), LOCATE(v);
	const int parts = (size + 64 * PANELS - 1) / (64 * PANELS), part = (int)get_group_id(2) % parts, row = (int)get_group_id(2) / parts;
	const int from = (int)get_group_id(0) * SIDE, n = min(SIDE, first + length - from);
	const int heads = get_num_groups(1) * share;
	const long keys = (((long)row * get_num_groups(1) + get_group_id(1)) * capacity + from) * size, ld = (long)heads * size;
	k += keys, v += keys;

	local float *chunk = (local float *)memory, *weight = chunk + 2 * DEPTH * PITCH;
	const int mine = get_local_id(0) / 16 * 4, column = get_local_id(0) % 16 * 4;
	float4 sum_k[4][PANELS], sum_v[4][PANELS];
	clear(sum_k);
	clear(sum_v);
	int stop = length, end[4] = {length, length, length, length}; // the first query that sees no key of the group, and the first that does not see each key of the item
	if (GIVEN(begin)) {
		LOCATE(begin);
		begin += (long)row * length;
		stop = first_beyond(begin, length, first, from + n - 1);
		#pragma unroll
		for (int i = 0; i < 4; i++)
			end[i] = first_beyond(begin, length, first, from + mine + i);
	}
	for (int head = get_group_id(1) * share, last = head + share; head < last; head++) {
		const long queries = ((long)row * heads + head) * length;
		for (int t = max(from - first, 0); t < stop; t += SIDE) {
			const int others = min(SIDE, length - t);
			const global float *tile = q + (queries + t) * size, *down = dcontext + (((long)row * length + t) * heads + head) * size;
			float4 s[4], slope[4];
			dots(s, k, size, n, tile, size, others, size, chunk);
			dots(slope, v, size, n, down, ld, others, size, chunk);
			// of the item's columns, which are queries
			const int at = t + column, most = length - 1;
			const global float *l = lse + queries, *d = delta + queries;
			const float4 logsum = (float4)(l[min(at, most)], l[min(at + 1, most)], l[min(at + 2, most)], l[min(at + 3, most)]);
			const float4 through = (float4)(d[min(at, most)], d[min(at + 1, most)], d[min(at + 2, most)], d[min(at + 3, most)]);
			#pragma unroll
			for (int i = 0; i < 4; i++) {
				s[i] = hidden(exp(s[i] - logsum), at, from + mine + i - first, end[i] - 1, 0);
				slope[i] = s[i] * (slope[i] - through);
			}
			keep(weight, s);
			add_rows(sum_v, weight, down, ld, others, 64 * PANELS * part, size, chunk);
			barrier(CLK_LOCAL_MEM_FENCE);
			keep(weight, slope);
			add_rows(sum_k, weight, tile, size, others, 64 * PANELS * part, size, chunk);
		}
	}
	const float one[4] = {1, 1, 1, 1};
	store(dk + keys, size, sum_k, one, n, 64 * PANELS * part, size);
	store(dv + keys, size, sum_v, one, n, 64 * PANELS * part, size);
}

#endif
