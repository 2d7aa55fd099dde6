// Products of bfloat16 by the tensor cores of NVIDIA's GPUs; see warps.cl. Given by Go: the tile of a work-group, DOWN × ACROSS warps with HIGH × WIDE
// blocks each, the PIECES of 8 terms of a step, and STAGES.
//
// # Packed operands
//
// Operands are float32 in memory, or B is bfloat16. They are rounded and packed first, in steps of STEP terms: of a step, all rows of A, or columns of B, follow each other,
// and the terms of a row lie side by side, two in a uint. So what a tile needs of a step is contiguous. Terms beyond the last are zero. The operands of the
// sums of groups have a multiple of STEP terms for each group.
//
// # Sums
//
// A work-group computes a tile of C, and takes STEP terms at a time from local memory. STAGES of them are there: one is multiplied while the others are
// copied (cp.async). An instruction adds 16 terms to an element of C, in ascending order from zero. Chains of terms are as in products.cl.

#define STEP (8 * PIECES)
#define TILE_ROWS (16 * HIGH * DOWN)
#define TILE_COLUMNS (8 * WIDE * ACROSS)

// Consecutive work-groups compute the tiles of a band of rows, so that they find operands in the cache.
#define BAND 8

#include "groups.cl"
#include "warps.cl"

// A plan has the first row, and the first packed term, of each group of rows, and then their ends.
#define ROW(plan, groups) (plan)
#define TERMS(plan, groups) ((plan) + (groups) + 1)

kernel void nvidia_plan(MEMORY(int, plan), MEMORY(const int, counts), const int groups, const int rows)
{
	LOCATE(plan), LOCATE(counts);
	const int group = get_global_id(0);
	if (group > groups)
		return;
	int row = 0, terms = 0;
	for (int g = 0; g < group; g++) {
		const int n = clamp(counts[g], 0, rows - row); // whatever counts hold, nothing beyond the rows is touched
		row += n;
		terms += (n + STEP - 1) / STEP * STEP;
	}
	ROW(plan, groups)[group] = row;
	TERMS(plan, groups)[group] = terms;
}

// Packs matrices whose terms lie side by side, in steps: element (i, t) of a matrix is x[i*ld + t]. A work-item has four terms of a row; the rows are those
// of all matrices.
kernel void nvidia_pack(MEMORY(uint, dst), TYPED(const void, x), const int rows, const int each, const long size, const long ld, const int k, const int step,
	const int steps)
{
	LOCATE(dst), LOCATE_TYPED(x);
	const int i = get_global_id(0), row = i / (step / 4) % rows, t = i / (step / 4) / rows * step + 4 * (i % (step / 4));
	if (t >= steps * step)
		return;
	x = MOVE(x, x_bf16, row / each * size + row % each * ld + t);
	global uint2 *to = (global uint2 *)(dst + 2 * (size_t)i);
	if (x_bf16 && t + 4 <= k && ((ulong)x & 7) == 0) {
		*to = as_uint2(*(const global ushort4 *)x);
		return;
	}
	float4 v;
	if (!x_bf16 && t + 4 <= k && ((ulong)x & 15) == 0)
		v = *(const global float4 *)x;
	else
		v = (float4)(load_numbers(x, x_bf16, 0, k - t), load_numbers(x, x_bf16, 1, k - t), load_numbers(x, x_bf16, 2, k - t),
			load_numbers(x, x_bf16, 3, k - t));
	*to = (uint2)(pack_two(v.x, v.y), pack_two(v.z, v.w));
}

// Packs matrices whose rows lie side by side: element (i, t) of a matrix is x[i + t*ld]. A work-group has SLAB rows (0) and a step (1) of a matrix (2). A
// plan has the terms of groups.
#define SLAB 64
kernel __attribute__((reqd_work_group_size(128, 1, 1)))
void nvidia_turn(MEMORY(uint, dst), TYPED(const void, x), MEMORY(const int, plan), const int groups, const int rows, const long size, const long ld,
	const int k)
{
	local float slab[STEP][SLAB + 1];
	LOCATE(dst), LOCATE_TYPED(x);
	const int item = get_local_id(0), at = SLAB * get_group_id(0), step = STEP * get_group_id(1);
	int first = step, terms = k - step;
	if (GIVEN(plan)) {
		LOCATE(plan);
		terms = 0;
		if (step < TERMS(plan, groups)[groups]) {
			const int group = group_of(TERMS(plan, groups), groups, step);
			first = ROW(plan, groups)[group] + step - TERMS(plan, groups)[group];
			terms = ROW(plan, groups)[group + 1] - first;
		}
	}
	x = MOVE(x, x_bf16, get_group_id(2) * size + at);
	for (int i = 0; i < STEP * SLAB / 128; i++) {
		const int r = item % SLAB, t = 128 / SLAB * i + item / SLAB;
		slab[t][r] = at + r < rows && t < terms ? load_numbers(MOVE(x, x_bf16, (first + t) * ld), x_bf16, r, rows) : 0;
	}
	barrier(CLK_LOCAL_MEM_FENCE);
	dst += (get_group_id(1) * get_num_groups(2) * rows + get_group_id(2) * rows + at) * (STEP / 2);
	for (int i = 0; i < STEP / 2 * SLAB / 128; i++) {
		const int t = item % (STEP / 2), r = 128 / (STEP / 2) * i + item / (STEP / 2);
		if (at + r < rows)
			dst[r * (STEP / 2) + t] = pack_two(slab[2 * t][r], slab[2 * t + 1][r]);
	}
}

// Starts to copy a step of A and of B to local memory.
INLINE void copy_stage(local uint4 *to, const global uint4 *a, const int rows, const global uint4 *b, const int columns)
{
	copy_rows(to, a, TILE_ROWS, rows, PIECES, DOWN * ACROSS);
	copy_rows(to + TILE_ROWS * PIECES, b, TILE_COLUMNS, columns, PIECES, DOWN * ACROSS);
}

// C = A·B, or += with accumulate, of packed operands with `terms` terms, and b_rows columns of all matrices B. With tiles, the rows of groups follow each other, and there is a matrix B for each. With a plan, the terms of groups follow each other, and there is a matrix C for
// each. With a length of chains, dimension 2 is the chain, and each has its own matrix C. Dimension 0 is the tile.
kernel __attribute__((reqd_work_group_size(WARP_ITEMS * DOWN * ACROSS, 1, 1)))
void nvidia_product(TYPED(void, c), MEMORY(const uint, a_words), MEMORY(const uint, b_words), MEMORY(const int, tiles), MEMORY(const int, plan),
	const int groups, const int m, const int n, const int terms, const int b_rows, const long ldc, const int accumulate, const int chain)
{
	local uint4 stages[STAGES][(TILE_ROWS + TILE_COLUMNS) * PIECES];
	LOCATE_TYPED(c), LOCATE(a_words), LOCATE(b_words);
	const global uint4 *a = (const global uint4 *)a_words, *b = (const global uint4 *)b_words;
	const int across = (n + TILE_COLUMNS - 1) / TILE_COLUMNS, down = (int)get_num_groups(0) / across;
	const int band = (int)get_group_id(0) / (BAND * across), in_band = (int)get_group_id(0) % (BAND * across), high = min(BAND, down - BAND * band);
	const int tile = BAND * band + in_band % high, column = in_band / high * TILE_COLUMNS;
	int row = tile * TILE_ROWS, rows = m - row, first = 0, last = terms;
	size_t matrix = 0; // elements of C before it
	b += column * PIECES;
	if (GIVEN(tiles)) {
		LOCATE(tiles);
		const int4 its = vload4(tile, tiles);
		row = its.y, rows = its.z;
		b += its.x * (size_t)n * PIECES;
	} else if (GIVEN(plan)) {
		LOCATE(plan);
		first = TERMS(plan, groups)[get_group_id(2)], last = TERMS(plan, groups)[get_group_id(2) + 1];
		matrix = get_group_id(2) * (size_t)m * n;
	} else if (chain > 0) {
		first = chain * (int)get_group_id(2), last = min(first + chain, terms);
		matrix = get_group_id(2) * (size_t)m * n;
	}
	if (rows <= 0 || accumulate && first >= last)
		return;
	const size_t a_step = (size_t)m * PIECES, b_step = (size_t)b_rows * PIECES;
	a += first / STEP * a_step + row * (size_t)PIECES, b += first / STEP * b_step;
	c = MOVE(c, c_bf16, matrix + row * ldc + column);
	const int warp_row = WARP / ACROSS * 16 * HIGH, warp_column = WARP % ACROSS * 8 * WIDE, columns = n - column;
	block sum[HIGH][WIDE];
	#pragma unroll
	for (int i = 0; i < HIGH; i++)
		#pragma unroll
		for (int j = 0; j < WIDE; j++)
			sum[i][j] = zero_block();
	const int steps = (last - first) / STEP;
	#pragma unroll
	for (int s = 0; s < STAGES - 1; s++) {
		if (s < steps)
			copy_stage(stages[s], a + s * a_step, rows, b + s * b_step, columns);
		end_copies();
	}
	int now = 0, empty = STAGES - 1; // the stage that is multiplied, and the one before it
	for (int step = 0; step < steps; step++) {
		await_copies(STAGES - 2);
		barrier(CLK_LOCAL_MEM_FENCE);
		const int next = step + STAGES - 1;
		if (next < steps)
			copy_stage(stages[empty], a + next * a_step, rows, b + next * b_step, columns);
		end_copies();
		const local uint4 *left = stages[now], *right = left + TILE_ROWS * PIECES;
		#pragma unroll
		for (int piece = 0; piece < PIECES; piece += 2) {
			four x[HIGH], y[WIDE / 2];
			#pragma unroll
			for (int i = 0; i < HIGH; i++)
				x[i] = load_matrices(left, warp_row + 16 * i, piece, true, false);
			#pragma unroll
			for (int j = 0; j < WIDE / 2; j++)
				y[j] = load_matrices(right, warp_column + 16 * j, piece, false, false);
			#pragma unroll
			for (int i = 0; i < HIGH; i++)
				#pragma unroll
				for (int j = 0; j < WIDE; j++)
					sum[i][j] = multiply_block(x[i], y[j / 2], j % 2, sum[i][j]);
		}
		empty = now;
		now = now + 1 == STAGES ? 0 : now + 1;
	}
	#pragma unroll
	for (int i = 0; i < HIGH; i++)
		#pragma unroll
		for (int j = 0; j < WIDE; j++) {
			const int r = warp_row + 16 * i, at = warp_column + 8 * j;
			store_block(MOVE(c, c_bf16, r * ldc + at), c_bf16, ldc, sum[i][j], rows - r, columns - at, accumulate);
		}
}
