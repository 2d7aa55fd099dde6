// Products of bfloat16 by the matrix instruction of Intel's Data Center GPU Max (Ponte Vecchio); see dpas.cl. A sub-group computes a tile of 32×64 of C:
// 4×4 blocks. For a step it reads a panel of A and a panel of B. Weights, which are packed as B, and C may be bfloat16 in memory.

#include "dpas.cl"
#include "groups.cl"
#include "pvc_tile.cl"

kernel void pvc_plan(MEMORY(int, plan), MEMORY(const int, counts), const int groups, const int rows, const int band_rows)
{
	LOCATE(plan);
	const int group = get_global_id(0);
	if (group > groups)
		return;
	int row = 0, panel = 0, step = 0, band = 0;
	if (GIVEN(counts)) {
		LOCATE(counts);
		for (int g = 0; g < group; g++) {
			const int n = clamp(counts[g], 0, rows - row); // whatever counts hold, nothing beyond the rows is touched
			row += n;
			panel += (n + TILE_ROWS - 1) / TILE_ROWS;
			step += (n + 2 * STEP - 1) / (2 * STEP) * 2;
			band += (n + band_rows - 1) / band_rows;
		}
	} else if (group > 0) {
		row = rows;
		panel = (rows + TILE_ROWS - 1) / TILE_ROWS;
		step = (rows + 2 * STEP - 1) / (2 * STEP) * 2;
		band = (rows + band_rows - 1) / band_rows;
	}
	ROW(plan, groups)[group] = row;
	PANEL(plan, groups)[group] = panel;
	TERMS(plan, groups)[group] = step;
	BAND(plan, groups)[group] = band;
}

// Packs groups of rows as A: element (i, t) of x is x[i*row_stride + t*stride]. The first row of a group is the first
// row of its panels. A work-item has a row (0) and a step (1).
kernel void pvc_pack_rows(MEMORY(uint, a), TYPED(const void, x), MEMORY(const int, plan), const int groups, const long row_stride, const long stride,
	const int k, const int steps)
{
	LOCATE(a), LOCATE_TYPED(x), LOCATE(plan);
	const int panel = get_global_id(0) / TILE_ROWS, in_panel = get_global_id(0) % TILE_ROWS, step = get_global_id(1);
	if (step >= steps || panel >= PANEL(plan, groups)[groups])
		return;
	const int group = group_of(PANEL(plan, groups), groups, panel);
	const int first = ROW(plan, groups)[group], count = ROW(plan, groups)[group + 1] - first;
	const int row = (panel - PANEL(plan, groups)[group]) * TILE_ROWS + in_panel;
	const uint8 v = pack_numbers(x, x_bf16, (first + row) * row_stride + step * STEP * stride, stride, row < count ? k - step * STEP : 0);
	store_a(a + (size_t)panel * steps * A_PANEL, step, in_panel, v);
}

// Packs matrices as B, one after the other: element (t, j) of a matrix is x[t*stride + j*column_stride]. A work-item has a column (0) and a step (1) of a
// matrix (2).
kernel void pvc_pack_matrices(MEMORY(uint, b), TYPED(const void, x), const long size, const long stride, const long column_stride, const int k,
	const int n, const int steps)
{
	LOCATE(b), LOCATE_TYPED(x);
	const int column = get_global_id(0), step = get_global_id(1), panels = (n + TILE_COLUMNS - 1) / TILE_COLUMNS;
	const size_t matrix = get_global_id(2);
	if (step >= steps || column >= panels * TILE_COLUMNS)
		return;
	const int there = column < n ? k - step * STEP : 0;
	const uint8 v = pack_numbers(x, x_bf16, matrix * size + step * STEP * stride + column * column_stride, stride, there);
	store_b(b + (matrix * panels + column / TILE_COLUMNS) * steps * B_PANEL, step, column % TILE_COLUMNS, v);
}

// Packs x, whose rows are the terms, as A and B of sums over the rows of each group: element (t, j) of x is x[t*stride
// + j*column_stride]. The first row of a group is the first term of its steps; steps bounds the steps of all groups. A
// work-item has a column of x (0) and a step (1).
kernel void pvc_pack_left(MEMORY(uint, a), TYPED(const void, x), MEMORY(const int, plan), const int groups, const long stride, const long column_stride,
	const int m, const int steps)
{
	LOCATE(a), LOCATE_TYPED(x), LOCATE(plan);
	const int column = get_global_id(0), step = get_global_id(1);
	if (column >= (m + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS || step >= TERMS(plan, groups)[groups])
		return;
	const int group = group_of(TERMS(plan, groups), groups, step);
	const int first = ROW(plan, groups)[group] + (step - TERMS(plan, groups)[group]) * STEP;
	const uint8 v = pack_numbers(x, x_bf16, first * stride + column * column_stride, stride, column < m ? ROW(plan, groups)[group + 1] - first : 0);
	store_a(a + (size_t)(column / TILE_ROWS) * steps * A_PANEL, step, column % TILE_ROWS, v);
}

kernel void pvc_pack_right(MEMORY(uint, b), TYPED(const void, x), MEMORY(const int, plan), const int groups, const long stride, const long column_stride,
	const int n, const int steps)
{
	LOCATE(b), LOCATE_TYPED(x), LOCATE(plan);
	const int column = get_global_id(0), step = get_global_id(1);
	if (column >= (n + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS || step >= TERMS(plan, groups)[groups])
		return;
	const int group = group_of(TERMS(plan, groups), groups, step);
	const int first = ROW(plan, groups)[group] + (step - TERMS(plan, groups)[group]) * STEP;
	const uint8 v = pack_numbers(x, x_bf16, first * stride + column * column_stride, stride, column < n ? ROW(plan, groups)[group + 1] - first : 0);
	store_b(b + (size_t)(column / TILE_COLUMNS) * steps * B_PANEL, step, column % TILE_COLUMNS, v);
}

// A part of the panels that a work-group reads: where two steps begin that the sub-group prefetches, and the distance to the next two.
typedef struct { global const uint *at; int pitch; } prefetched;

// Two steps of a work-group have 12 pieces of 2 KiB: one in each of 4 panels of A, two in each of 4 panels of B. The panels of the work-group start at a and
// b, and their tiles are `steps` steps apart. Tiles after the last ones are not read.
inline prefetched part_of(global const uint *a, global const uint *b, const int steps, const int last_row, const int last_column)
{
	const int piece = SUBGROUP % (3 * SIDE), column = (piece - SIDE) / 2;
	prefetched part;
	if (piece < SIDE) {
		part.at = a + (size_t)min(piece, last_row) * steps * A_PANEL + AHEAD * A_PANEL;
		part.pitch = 2 * A_PANEL;
	} else {
		part.at = b + (size_t)min(column, last_column) * steps * B_PANEL + (AHEAD + piece % 2) * B_PANEL;
		part.pitch = 2 * B_PANEL;
	}
	return part;
}

// A tile of rows × columns elements of C, from `steps` steps of the panels of A and B. The sub-group prefetches its part
// of the work-group's panels.
inline void multiply(global void *c, const int bf16, const size_t ld, global const uint *a, global const uint *b, prefetched part, const int steps, const int rows,
	const int columns, const int accumulate)
{
	c_block sum[4][4];
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int j = 0; j < 4; j++)
			sum[i][j] = zero_block();
	for (int step = 0; step < steps; step += 2) {
		if (step + AHEAD < steps)
			prefetch_panel(part.at);
		part.at += part.pitch;
		a_block left[2][4];
		load_left(left, a);
		#pragma unroll
		for (int h = 0; h < 2; h++) {
			b_block right[4];
			load_right(right, b + h * B_PANEL);
			#pragma unroll
			for (int i = 0; i < 4; i++)
				#pragma unroll
				for (int j = 0; j < 4; j++)
					sum[i][j] = multiply_block(left[h][i], right[j], sum[i][j]);
		}
		a += 2 * A_PANEL;
		b += 2 * B_PANEL;
	}
	store_tile(c, bf16, ld, sum, rows, columns, accumulate);
}

// C = A·B, or += with accumulate, for groups of rows, each with its own matrix of n columns: pvc_pack_rows by pvc_pack_matrices. A work-group has 256
// columns (0) of a band of 128 rows (1).
kernel SUBGROUPS void pvc_product(TYPED(void, c), MEMORY(const uint, a), MEMORY(const uint, b), MEMORY(const int, plan), const int groups, const int ld,
	const int n, const int steps, const int accumulate)
{
	LOCATE_TYPED(c), LOCATE(a), LOCATE(b), LOCATE(plan);
	const int band = get_group_id(1);
	if (band >= BAND(plan, groups)[groups])
		return;
	const int group = group_of(BAND(plan, groups), groups, band);
	const int first = ROW(plan, groups)[group], count = ROW(plan, groups)[group + 1] - first;
	const int panel = (band - BAND(plan, groups)[group]) * SIDE + SUBGROUP / SIDE, row = panel * TILE_ROWS;
	const int panels = (n + TILE_COLUMNS - 1) / TILE_COLUMNS, column = get_group_id(0) * SIDE + SUBGROUP % SIDE;
	if (row >= count || column >= panels)
		return;
	a += (size_t)(PANEL(plan, groups)[group] + panel) * steps * A_PANEL;
	b += ((size_t)group * panels + column) * steps * B_PANEL;
	const int down = SUBGROUP / SIDE, across = SUBGROUP % SIDE;
	const prefetched part = part_of(a - (size_t)down * steps * A_PANEL, b - (size_t)across * steps * B_PANEL, steps,
		(count - 1) / TILE_ROWS - panel + down, panels - 1 - column + across);
	multiply(MOVE(c, c_bf16, (size_t)(first + row) * ld + column * TILE_COLUMNS), c_bf16, ld, a, b, part, steps, count - row,
		n - column * TILE_COLUMNS, accumulate);
}

// C = A·B, or += with accumulate, m×n, for each group a sum over its rows: pvc_pack_left by pvc_pack_right, with the
// same steps. The result of a group without rows is zero. A work-group has 256 columns (0) of 128 rows (1) of a group's
// matrix (2), which is size elements after the previous matrix.
kernel SUBGROUPS void pvc_weight_grad(TYPED(void, c), MEMORY(const uint, a), MEMORY(const uint, b), MEMORY(const int, plan), const int groups, const long size,
	const int ld, const int m, const int n, const int steps, const int accumulate)
{
	LOCATE_TYPED(c), LOCATE(a), LOCATE(b), LOCATE(plan);
	const int group = get_group_id(2), panel = get_group_id(1) * SIDE + SUBGROUP / SIDE, column = get_group_id(0) * SIDE + SUBGROUP % SIDE;
	const int begin = TERMS(plan, groups)[group], end = TERMS(plan, groups)[group + 1];
	if (panel * TILE_ROWS >= m || column * TILE_COLUMNS >= n || accumulate && begin == end)
		return;
	a += ((size_t)panel * steps + begin) * A_PANEL;
	b += ((size_t)column * steps + begin) * B_PANEL;
	const int down = SUBGROUP / SIDE, across = SUBGROUP % SIDE;
	const prefetched part = part_of(a - (size_t)down * steps * A_PANEL, b - (size_t)across * steps * B_PANEL, steps,
		(m - 1) / TILE_ROWS - panel + down, (n - 1) / TILE_COLUMNS - column + across);
	multiply(MOVE(c, c_bf16, group * size + (size_t)panel * TILE_ROWS * ld + column * TILE_COLUMNS), c_bf16, ld, a, b, part, end - begin,
		m - panel * TILE_ROWS, n - column * TILE_COLUMNS, accumulate);
}
