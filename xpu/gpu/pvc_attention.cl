// Attention by the matrix instruction of Intel's Data Center GPU Max (Ponte Vecchio); see dpas.cl, and attention.cl for what the kernels compute. Given by
// Go: DEPTH, the size of a packed head, 64 or 128. Dimensions beyond the size of the head are zero.
//
// # Blocks of scores
//
// A sub-group owns 16 queries (or keys): the columns of its blocks, one for each lane. The rows of a block of scores are keys (or queries) of the others.
// So the largest score of a query and the sum of its weights need no exchange between lanes. Weights, rounded, are the right operand of the next product
// in the lane that has them. Sums are transposed: a row is a dimension of the head, and a lane has all dimensions of its query. One instruction adds 16 keys
// (or queries), in ascending order.
//
// # Packed heads
//
// A head is a matrix of rows (positions) by dimensions. Others are left operands, in panels: `rows` has 32 positions and all dimensions for each panel, the
// terms of scores; `turned` has 32 dimensions and all positions, the terms of sums. The own rows are a right operand: 16 positions and all dimensions.
// Positions are filled up with zeros to a multiple of 64.

#define SUBGROUP_COUNT 8

#include "dpas.cl"

#define OWN 16
#define DEPTH_STEPS (DEPTH / STEP)
#define OWN_BLOCK (OWN * STEP / 2) // uints
#define ROW_NUMBERS (DEPTH / 2) // uints of a position
#define TILE (32 * TILE_PANELS)
#define LOG2E 1.44269504f

#ifdef EMULATED

typedef struct { float lane[16]; } numbers;
typedef struct { int lane[16]; } positions;

#define EACH_LANE for (int lane = 0; lane < 16; lane++)
#define OF(x) ((x).lane[lane])
#define power(x) exp2(x)
#define as_block(x) as_uint8(x)
#define round_weight(x) (ushort)round_lanes(x)

inline b_block load_own(global const uint *b)
{
	b_block x;
	for (int l = 0; l < 16; l++)
		for (int i = 0; i < 8; i++)
			x.lane[l][i] = b[16 * i + l];
	return x;
}

inline bool in_any_lane(const positions x)
{
	for (int l = 0; l < 16; l++)
		if (x.lane[l])
			return true;
	return false;
}

#define number_of_lane(x, l) (x).lane[l]

#else

typedef float numbers;
typedef int positions;

#define EACH_LANE for (int lane = get_sub_group_local_id(), once = 1; once; once = 0)
#define OF(x) (x)
#define power(x) native_exp2(x)
#define as_block(x) as_int8(x)
#define in_any_lane(x) sub_group_any(x)
#define number_of_lane(x, l) sub_group_broadcast(x, l)

// round_lanes by the hardware, which may keep denormal numbers.
ushort __attribute__((overloadable)) intel_convert_bfloat16_as_ushort(float x);
#define round_weight(x) intel_convert_bfloat16_as_ushort(x)

inline b_block load_own(global const uint *b) { return as_int8(intel_sub_group_block_read8(b)); }

#endif

// The numbers of eight lanes, from the given lane on, for all lanes.
inline float8 numbers_of_block(const numbers x, const int l)
{
	return (float8)(number_of_lane(x, l), number_of_lane(x, l + 1), number_of_lane(x, l + 2), number_of_lane(x, l + 3), number_of_lane(x, l + 4),
		number_of_lane(x, l + 5), number_of_lane(x, l + 6), number_of_lane(x, l + 7));
}

// s = the products of others, in `rows`, and own rows.
inline void dots(c_block *s, const int panels, global const uint *others, global const uint *own)
{
	#pragma unroll
	for (int i = 0; i < 4 * panels; i++)
		s[i] = zero_block();
	#pragma unroll
	for (int step = 0; step < DEPTH_STEPS; step += 2) {
		const b_block right[2] = {load_own(own + step * OWN_BLOCK), load_own(own + (step + 1) * OWN_BLOCK)};
		#pragma unroll
		for (int p = 0; p < panels; p++) {
			a_block left[2][4];
			load_left(left, others + (p * DEPTH_STEPS + step) * A_PANEL);
			#pragma unroll
			for (int h = 0; h < 2; h++)
				#pragma unroll
				for (int i = 0; i < 4; i++)
					s[4 * p + i] = multiply_block(left[h][i], right[h], s[4 * p + i]);
		}
	}
}

// Two blocks of weights, rounded, as a right operand.
inline b_block pack_weights(const c_block first, const c_block second)
{
	b_block b;
	EACH_LANE {
		const float8 x = OF(first), y = OF(second);
		OF(b) = as_block((ushort16)(round_weight(x.s0), round_weight(x.s1), round_weight(x.s2), round_weight(x.s3), round_weight(x.s4), round_weight(x.s5),
			round_weight(x.s6), round_weight(x.s7), round_weight(y.s0), round_weight(y.s1), round_weight(y.s2), round_weight(y.s3), round_weight(y.s4),
			round_weight(y.s5), round_weight(y.s6), round_weight(y.s7)));
	}
	return b;
}

// sum += others, in `turned`, times their packed weights. Panels of 32 dimensions are `pitch` apart.
inline void add_rows(c_block *sum, const b_block *weight, const int panels, global const uint *turned, const size_t pitch)
{
	#pragma unroll
	for (int p = 0; p < panels; p++)
		#pragma unroll
		for (int d = 0; d < DEPTH / 32; d++) {
			a_block left[2][4];
			load_left(left, turned + d * pitch + 2 * p * A_PANEL);
			#pragma unroll
			for (int h = 0; h < 2; h++)
				#pragma unroll
				for (int i = 0; i < 4; i++)
					sum[4 * d + i] = multiply_block(left[h][i], weight[2 * p + h], sum[4 * d + i]);
		}
}

inline void clear(c_block sum[DEPTH / 8])
{
	#pragma unroll
	for (int i = 0; i < DEPTH / 8; i++)
		sum[i] = zero_block();
}

// store writes the sums of the own rows from `from` on, times scale. Rows are ld apart.
inline void store_own(global float *to, const long ld, const c_block sum[DEPTH / 8], const numbers scale, const int from, const int length, const int size)
{
	EACH_LANE {
		global float *own = to + (from + lane) * ld;
		if (from + lane < length) {
			#pragma unroll
			for (int i = 0; i < DEPTH / 8; i++) {
				const float8 v = OF(sum[i]) * OF(scale);
				if (8 * i + 8 <= size) {
					vstore8(v, 0, own + 8 * i);
				} else {
					#pragma unroll
					for (int j = 0; j < 8; j++)
						if (8 * i + j < size)
							own[8 * i + j] = v[j];
				}
			}
		}
	}
}

#include "documents.cl"

// Packs heads as left operands. Row i of a head's panels has the terms t at x[i*row_stride + t*stride]; a head is at (its number / heads)*outer + (its
// number modulo heads)*inner. A work-item has a row (0) and a step (1) of a head (2).
kernel void pvc_pack_heads_left(MEMORY(uint, a), MEMORY(const float, x), const int heads, const long outer, const long inner, const long row_stride,
	const long stride, const int rows, const int terms, const int steps)
{
	LOCATE(a), LOCATE(x);
	const int row = get_global_id(0), step = get_global_id(1), head = get_global_id(2), panels = get_num_groups(0);
	if (step >= steps)
		return;
	const uint8 v = pack_step(x + head / heads * outer + head % heads * inner + row * row_stride + step * STEP * stride, stride,
		row < rows ? terms - step * STEP : 0);
	store_a(a + ((size_t)head * panels + row / TILE_ROWS) * steps * A_PANEL, step, row % TILE_ROWS, v);
}

// Packs heads as right operands. A work-item has a row (0) and a step (1) of a head (2).
kernel void pvc_pack_heads_right(MEMORY(uint, b), MEMORY(const float, x), const int heads, const long outer, const long inner, const long row_stride,
	const int rows, const int terms)
{
	LOCATE(b), LOCATE(x);
	const int row = get_global_id(0), step = get_global_id(1), head = get_global_id(2);
	const uint8 v = pack_step(x + head / heads * outer + head % heads * inner + row * row_stride + step * STEP, 1, row < rows ? terms - step * STEP : 0);
	store_b(b + (((size_t)head * (get_global_size(0) / OWN) + row / OWN) * DEPTH_STEPS + step) * OWN_BLOCK, 0, row % OWN, v);
}

// A head's packed operands; steps is the number of steps of its positions.
#define HEAD_ROWS(x, head, steps) ((x) + (size_t)(head) * (steps) * STEP * ROW_NUMBERS)
#define PITCH(steps) ((size_t)(steps) * A_PANEL)

// The sub-group's first query, the longest first.
#define FIRST_QUERY ((((int)get_num_groups(0) - 1 - (int)get_group_id(0)) * SUBGROUP_COUNT + SUBGROUP) * OWN)

// The first keys that the own queries see: of each query, of the first query, and of the last query.
typedef struct { positions each; int first, last; } first_keys;

// begin is the kernel's parameter. `from` is the first own query, in a row of the batch.
inline first_keys first_keys_of(global const int *begin, const ulong begin_at, const int row, const int from, const int length)
{
	first_keys x;
	const bool documents = GIVEN(begin);
	if (documents) {
		LOCATE(begin);
		begin += (long)row * length;
	}
	EACH_LANE
		OF(x.each) = documents ? begin[min(from + lane, length - 1)] : 0;
	x.first = documents ? begin[from] : 0, x.last = documents ? begin[min(from + OWN, length) - 1] : 0;
	return x;
}

#define NUMBERS (int8)(0, 1, 2, 3, 4, 5, 6, 7)

// hide sets the scores of own queries with keys that they do not see to v. The first query is at position `from`, the first key at t.
inline void hide(c_block *s, const int panels, const first_keys low, const int from, const int t, const float v)
{
	if (t + 32 * panels - 1 <= from && t >= low.last)
		return;
	EACH_LANE {
		const int8 key = t - OF(low.each) + NUMBERS;
		const uint8 last = from + lane - OF(low.each);
		#pragma unroll
		for (int j = 0; j < 4 * panels; j++)
			OF(s[j]) = select(OF(s[j]), (float8)v, as_uint8(key + 8 * j) > last);
	}
}

#define TILE_PANELS 2

// Queries, heads, rows of the batch.
kernel SUBGROUPS void pvc_attend(MEMORY(float, context), MEMORY(float, lse), MEMORY(const uint, q), MEMORY(const uint, k), MEMORY(const uint, v),
	MEMORY(const int, begin), const int length, const int share, const int size, const int steps)
{
	LOCATE(context), LOCATE(lse), LOCATE(q), LOCATE(k), LOCATE(v);
	const int from = FIRST_QUERY, keys = min(from + OWN, length), head = get_group_id(1), heads = get_num_groups(1), row = get_group_id(2);
	if (from >= length)
		return;
	const int queries = row * heads + head, group = row * (heads / share) + head / share;
	const first_keys low = first_keys_of(begin, begin_at, row, from, length);
	q = HEAD_ROWS(q, queries, steps) + from * ROW_NUMBERS;
	k = HEAD_ROWS(k, group, steps), v = HEAD_ROWS(v, group, steps);
	c_block sum[DEPTH / 8];
	clear(sum);
	numbers top, total;
	EACH_LANE
		OF(top) = -FLT_MAX / 2, OF(total) = 0; // a number, so that a tile of keys that are all hidden from a query changes nothing
	for (int t = low.first / TILE * TILE; t < keys; t += TILE) {
		c_block s[4 * TILE_PANELS];
		dots(s, TILE_PANELS, k + t * ROW_NUMBERS, q);
		hide(s, TILE_PANELS, low, from, t, -INFINITY);
		numbers scale;
		positions higher;
		EACH_LANE {
			float8 best = OF(s[0]);
			#pragma unroll
			for (int j = 1; j < 4 * TILE_PANELS; j++)
				best = fmax(best, OF(s[j]));
			const float4 four = fmax(best.lo, best.hi);
			const float now = fmax(fmax(fmax(four.x, four.y), fmax(four.z, four.w)), OF(top));
			OF(higher) = now > OF(top);
			OF(scale) = power((OF(top) - now) * LOG2E);
			OF(top) = now;
		}
		if (in_any_lane(higher)) // a scale of 1 changes nothing
			EACH_LANE {
				OF(total) *= OF(scale);
				#pragma unroll
				for (int j = 0; j < DEPTH / 8; j++)
					OF(sum[j]) *= OF(scale);
			}
		b_block weight[2 * TILE_PANELS];
		#pragma unroll
		for (int j = 0; j < 4 * TILE_PANELS; j++) {
			EACH_LANE {
				const float8 p = power(fma(OF(s[j]), (float8)LOG2E, (float8)(-OF(top) * LOG2E)));
				const float4 four = p.lo + p.hi;
				OF(total) += (four.x + four.y) + (four.z + four.w);
				OF(s[j]) = p;
			}
			if (j % 2)
				weight[j / 2] = pack_weights(s[j - 1], s[j]);
		}
		add_rows(sum, weight, TILE_PANELS, v + t * (A_PANEL / STEP), PITCH(steps));
	}
	EACH_LANE {
		if (from + lane < length)
			lse[(long)queries * length + from + lane] = OF(top) + log(OF(total));
		OF(total) = 1 / OF(total);
	}
	store_own(context + ((long)row * length * heads + head) * size, (long)heads * size, sum, total, from, length, size);
}

#undef TILE_PANELS
#define TILE_PANELS 1

// Queries, heads, rows. delta becomes Σ dO·O of each query.
kernel SUBGROUPS void pvc_grad_queries(MEMORY(float, dqkv), MEMORY(float, delta), MEMORY(const float, dcontext), MEMORY(const float, context),
	MEMORY(const float, lse), MEMORY(const uint, q), MEMORY(const uint, down), MEMORY(const uint, k), MEMORY(const uint, k_turned), MEMORY(const uint, v),
	MEMORY(const int, begin), const int length, const int share, const int size, const int width, const int steps)
{
	LOCATE(dqkv), LOCATE(delta), LOCATE(dcontext), LOCATE(context), LOCATE(lse), LOCATE(q), LOCATE(down), LOCATE(k), LOCATE(k_turned), LOCATE(v);
	const int from = FIRST_QUERY, keys = min(from + OWN, length), head = get_group_id(1), heads = get_num_groups(1), row = get_group_id(2);
	if (from >= length)
		return;
	const int queries = row * heads + head, group = row * (heads / share) + head / share;
	const first_keys low = first_keys_of(begin, begin_at, row, from, length);
	numbers through, shift, one;
	EACH_LANE {
		const int query = min(from + lane, length - 1);
		const long at = (((long)row * length + query) * heads + head) * size;
		float part = 0;
		int j = 0;
		for (; j + 4 <= size; j += 4) {
			const float4 x = vload4(0, dcontext + at + j), y = vload4(0, context + at + j);
			part = fma(x.x, y.x, part), part = fma(x.y, y.y, part), part = fma(x.z, y.z, part), part = fma(x.w, y.w, part);
		}
		for (; j < size; j++)
			part = fma(dcontext[at + j], context[at + j], part);
		if (from + lane < length)
			delta[(long)queries * length + query] = part;
		OF(through) = part, OF(shift) = -lse[(long)queries * length + query] * LOG2E, OF(one) = 1;
	}
	q = HEAD_ROWS(q, queries, steps) + from * ROW_NUMBERS, down = HEAD_ROWS(down, queries, steps) + from * ROW_NUMBERS;
	k = HEAD_ROWS(k, group, steps), k_turned = HEAD_ROWS(k_turned, group, steps), v = HEAD_ROWS(v, group, steps);
	c_block sum[DEPTH / 8];
	clear(sum);
	for (int t = low.first / TILE * TILE; t < keys; t += TILE) {
		c_block s[4 * TILE_PANELS], slope[4 * TILE_PANELS];
		dots(s, TILE_PANELS, k + t * ROW_NUMBERS, q);
		dots(slope, TILE_PANELS, v + t * ROW_NUMBERS, down);
		EACH_LANE
			#pragma unroll
			for (int j = 0; j < 4 * TILE_PANELS; j++)
				OF(s[j]) = power(fma(OF(s[j]), (float8)LOG2E, (float8)OF(shift))) * (OF(slope[j]) - OF(through));
		hide(s, TILE_PANELS, low, from, t, 0);
		b_block weight[2 * TILE_PANELS];
		#pragma unroll
		for (int j = 0; j < 2 * TILE_PANELS; j++)
			weight[j] = pack_weights(s[2 * j], s[2 * j + 1]);
		add_rows(sum, weight, TILE_PANELS, k_turned + t * (A_PANEL / STEP), PITCH(steps));
	}
	store_own(dqkv + (long)row * length * width + (long)head * size, width, sum, one, from, length, size);
}

// Keys, heads of keys, rows. Two sub-groups share 16 keys. The first computes weights, gives them to the second in local memory, and has the gradients of
// values. The second has the gradients of keys.
kernel SUBGROUPS void pvc_grad_keys(MEMORY(float, dk), MEMORY(float, dv), MEMORY(const float, delta), MEMORY(const float, lse), MEMORY(const uint, q),
	MEMORY(const uint, q_turned), MEMORY(const uint, down), MEMORY(const uint, down_turned), MEMORY(const uint, k), MEMORY(const uint, v),
	MEMORY(const int, begin), const int length, const int share, const int size, const int steps)
{
	local float4 shared[2][SUBGROUP_COUNT / 2][TILE / 4 * OWN]; // a barrier is between writing a half and reading it, and the other half is written then
	LOCATE(dk), LOCATE(dv), LOCATE(delta), LOCATE(lse), LOCATE(q), LOCATE(q_turned), LOCATE(down), LOCATE(down_turned), LOCATE(k), LOCATE(v);
	const int first = (int)get_group_id(0) * (SUBGROUP_COUNT / 2) * OWN, n = min(SUBGROUP_COUNT / 2 * OWN, length - first);
	const int from = first + SUBGROUP / 2 * OWN, heads = get_num_groups(1) * share, row = get_group_id(2);
	const int group = row * (int)get_num_groups(1) + (int)get_group_id(1);
	const bool second = SUBGROUP % 2;
	int stop = length, whole = length; // the first query that sees no key of the group, and the first that does not see the first key of the sub-group
	positions end; // the first query that does not see the key of the lane
	EACH_LANE
		OF(end) = length;
	if (GIVEN(begin)) {
		LOCATE(begin);
		begin += (long)row * length;
		stop = first_beyond(begin, length, 0, first + n - 1);
		whole = first_beyond(begin, length, 0, min(from, length - 1));
		EACH_LANE
			OF(end) = first_beyond(begin, length, 0, min(from + lane, length - 1));
	}
	global const uint *own = HEAD_ROWS(second ? v : k, group, steps) + from * ROW_NUMBERS;
	global const uint *others = second ? down : q, *turned = second ? q_turned : down_turned;
	global const float *values = second ? delta : lse;
	numbers one;
	EACH_LANE
		OF(one) = 1;
	c_block sum[DEPTH / 8];
	clear(sum);
	int turn = 0;
	for (int i = 0; i < share; i++) {
		const int queries = row * heads + (int)get_group_id(1) * share + i;
		for (int t = first; t < stop; t += TILE) {
			c_block s[4 * TILE_PANELS];
			dots(s, TILE_PANELS, HEAD_ROWS(others, queries, steps) + t * ROW_NUMBERS, own);
			numbers value[2 * TILE_PANELS]; // of the queries, 16 at a time
			EACH_LANE
				#pragma unroll
				for (int j = 0; j < 2 * TILE_PANELS; j++)
					OF(value[j]) = values[(long)queries * length + min(t + 16 * j + lane, length - 1)];
			local float4 *weights = shared[turn][SUBGROUP / 2];
			turn = !turn;
			if (!second) {
				#pragma unroll
				for (int j = 0; j < 4 * TILE_PANELS; j++) {
					const float8 shift = -LOG2E * numbers_of_block(value[j / 2], j % 2 * 8);
					EACH_LANE
						OF(s[j]) = power(fma(OF(s[j]), (float8)LOG2E, shift));
				}
				if (t < from + OWN - 1 || t + TILE > whole)
					EACH_LANE {
						const int8 query = t - (from + lane) + NUMBERS;
						const uint8 count = max(OF(end) - (from + lane), 0); // of the queries that see the key
						#pragma unroll
						for (int j = 0; j < 4 * TILE_PANELS; j++)
							OF(s[j]) = select(OF(s[j]), (float8)0, as_uint8(query + 8 * j) >= count);
					}
				EACH_LANE
					#pragma unroll
					for (int j = 0; j < 4 * TILE_PANELS; j++)
						weights[2 * j * OWN + lane] = OF(s[j]).lo, weights[(2 * j + 1) * OWN + lane] = OF(s[j]).hi;
			}
			barrier(CLK_LOCAL_MEM_FENCE);
			if (second) {
				#pragma unroll
				for (int j = 0; j < 4 * TILE_PANELS; j++) {
					const float8 through = numbers_of_block(value[j / 2], j % 2 * 8);
					EACH_LANE
						OF(s[j]) = (float8)(weights[2 * j * OWN + lane], weights[(2 * j + 1) * OWN + lane]) * (OF(s[j]) - through);
				}
			}
			b_block weight[2 * TILE_PANELS];
			#pragma unroll
			for (int j = 0; j < 2 * TILE_PANELS; j++)
				weight[j] = pack_weights(s[2 * j], s[2 * j + 1]);
			add_rows(sum, weight, TILE_PANELS, HEAD_ROWS(turned, queries, steps) + t * (A_PANEL / STEP), PITCH(steps));
		}
	}
	store_own((second ? dk : dv) + (long)group * length * size, size, sum, one, from, length, size);
}
