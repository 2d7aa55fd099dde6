// Products of bfloat16 by the matrix instruction of Intel's Data Center GPU Max (Ponte Vecchio), dpas, which a
// sub-group of 16 lanes executes together (OpenCL extension cl_intel_subgroup_matrix_multiply_accumulate). Operands are
// float32 in memory. They are rounded and packed first, in the order of the instruction, so that a sub-group reads its
// operands from consecutive memory.
//
// # Blocks
//
// One instruction is C += A·B with A of 8×16, B of 16×16 and C of 8×16. Lane l has
//
//	short8 a   of A: a[i] is row i of column l
//	int8   b   of B: b[i] is rows 2i (lower half) and 2i+1 (upper half) of column l
//	float8 c   of C: c[i] is row i of column l
//
// # Packed operands
//
// A sub-group computes a tile of 32×64 of C: 4×4 blocks. What it reads for 16 terms of the sum, a step, is a panel of A, 32 rows × 16 terms, as
// ushort row by row, and a panel of B, 16 terms × 64 columns, 4 blocks one after the other, of each 8 rows of pairs as above, as uint. The panels of a
// tile's steps lie one after the other; their number is even. What is beyond the end of a matrix or of a group of rows is zero.
//
// With WIDE, two steps of A lie side by side, in rows of 32 terms. Then one instruction reads both, and one a panel of B, 2 KiB each: blocks of
// memory with two dimensions (cl_intel_subgroup_2d_block_io), whose rows must have 64 bytes. Compilers that do not know it, as Debian 12's, read 256
// bytes at a time.
//
// # Emulation
//
// With EMULATED a sub-group is one work-item with 16 lanes in an array, for any device: the definitions of block, load, multiply and store below are
// all that differs.

#define TILE_ROWS 32
#define TILE_COLUMNS 64
#define STEP 16
#define A_PANEL (TILE_ROWS * STEP / 2)    // uints
#define B_PANEL (TILE_COLUMNS * STEP / 2) // uints

// A work-group is 4×4 sub-groups side by side.
#define SIDE 4

#ifdef EMULATED

typedef struct { ushort lane[16][8]; } a_block;
typedef struct { uint lane[16][8]; } b_block;
typedef struct { float lane[16][8]; } c_block;

#define SUBGROUP ((int)get_local_id(0))
#define SUBGROUPS __attribute__((reqd_work_group_size(SIDE * SIDE, 1, 1)))

// Two steps of A, and one of B.
inline void load_left(a_block left[2][4], global const uint *a)
{
	global const ushort *p = (global const ushort *)a;
	for (int step = 0; step < 2; step++)
		for (int row = 0; row < TILE_ROWS; row++)
			for (int l = 0; l < 16; l++)
#ifdef WIDE
				left[step][row / 8].lane[l][row % 8] = p[32 * row + 16 * step + l];
#else
				left[step][row / 8].lane[l][row % 8] = p[2 * A_PANEL * step + 16 * row + l];
#endif
}

inline void load_right(b_block right[4], global const uint *b)
{
	for (int row = 0; row < 32; row++)
		for (int l = 0; l < 16; l++)
			right[row / 8].lane[l][row % 8] = b[16 * row + l];
}

inline c_block zero_block(void)
{
	c_block c;
	for (int l = 0; l < 16; l++)
		for (int i = 0; i < 8; i++)
			c.lane[l][i] = 0;
	return c;
}

inline c_block multiply_block(a_block a, b_block b, c_block c)
{
	for (int l = 0; l < 16; l++)
		for (int i = 0; i < 8; i++)
			for (int t = 0; t < 16; t++) {
				const uint pair = b.lane[l][t / 2];
				c.lane[l][i] += as_float((uint)a.lane[t][i] << 16) * as_float(t % 2 ? pair & 0xffff0000u : pair << 16);
			}
	return c;
}

inline void store_block(global float *c, const size_t ld, c_block x, const int rows, const int columns, const int accumulate)
{
	for (int l = 0; l < min(columns, 16); l++)
		for (int i = 0; i < min(rows, 8); i++)
			c[i * ld + l] = accumulate ? c[i * ld + l] + x.lane[l][i] : x.lane[l][i];
}

#else

typedef short8 a_block;
typedef int8 b_block;
typedef float8 c_block;

// Debian 12's compiler knows the function without declaring it.
float8 __attribute__((overloadable)) intel_sub_group_bf16_bf16_matrix_mad_k16(short8 a, int8 b, float8 c);

#define SUBGROUP ((int)get_sub_group_id())
#define SUBGROUPS __attribute__((reqd_work_group_size(16 * SIDE * SIDE, 1, 1))) __attribute__((intel_reqd_sub_group_size(16)))

#ifdef cl_intel_subgroup_2d_block_io
#define WIDE

// Element i of lane l is column l of row i of the block. For A there are two blocks, one after the other.
inline void load_left(a_block left[2][4], global const uint *a)
{
	ushort v[64];
	intel_sub_group_2d_block_read_16b_32r16x2c((global void *)a, 64, 32, 64, (int2)(0, 0), v);
	#pragma unroll
	for (int i = 0; i < 8; i++)
		left[i / 4][i % 4] = as_short8(vload8(i, v));
}

inline void load_right(b_block right[4], global const uint *b)
{
	uint v[32];
	intel_sub_group_2d_block_read_32b_32r16x1c((global void *)b, 64, 32, 64, (int2)(0, 0), v);
	#pragma unroll
	for (int j = 0; j < 4; j++)
		right[j] = as_int8(vload8(j, v));
}

#else

// Element i of lane l is p[16·i + l].
inline void load_left(a_block left[2][4], global const uint *a)
{
	#pragma unroll
	for (int i = 0; i < 8; i++)
		left[i / 4][i % 4] = as_short8(intel_sub_group_block_read_us8((global const ushort *)(a + i * (A_PANEL / 4))));
}

inline void load_right(b_block right[4], global const uint *b)
{
	#pragma unroll
	for (int j = 0; j < 4; j++)
		right[j] = as_int8(intel_sub_group_block_read8(b + j * (B_PANEL / 4)));
}

#endif

#define zero_block() ((float8)0)
#define multiply_block(a, b, c) intel_sub_group_bf16_bf16_matrix_mad_k16(a, b, c)

inline void store_block(global float *c, const size_t ld, c_block x, const int rows, const int columns, const int accumulate)
{
	const int lane = get_sub_group_local_id();
	c += lane;
	if (rows >= 8 && columns >= 16) { // most blocks are whole, and need no questions
		if (accumulate) {
			#pragma unroll
			for (int i = 0; i < 8; i++)
				x[i] += c[i * ld];
		}
		#pragma unroll
		for (int i = 0; i < 8; i++)
			c[i * ld] = x[i];
	} else if (lane < columns) {
		#pragma unroll
		for (int i = 0; i < 8; i++)
			if (i < rows)
				c[i * ld] = accumulate ? x[i] + c[i * ld] : x[i];
	}
}

#endif

#include "groups.cl"

// A plan has the first row, panel of 32 rows, step of 16 rows (each group has an even number of steps), and band of 128
// rows of each group, and then their ends. Without counts there is one group of all rows.
#define ROW(plan, groups) (plan)
#define PANEL(plan, groups) ((plan) + (groups) + 1)
#define TERMS(plan, groups) ((plan) + 2 * ((groups) + 1))
#define BAND(plan, groups) ((plan) + 3 * ((groups) + 1))
#define BAND_ROWS (SIDE * TILE_ROWS)

kernel void pvc_plan(MEMORY(int, plan), MEMORY(const int, counts), const int groups, const int rows)
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
			band += (n + BAND_ROWS - 1) / BAND_ROWS;
		}
	} else if (group > 0) {
		row = rows;
		panel = (rows + TILE_ROWS - 1) / TILE_ROWS;
		step = (rows + 2 * STEP - 1) / (2 * STEP) * 2;
		band = (rows + BAND_ROWS - 1) / BAND_ROWS;
	}
	ROW(plan, groups)[group] = row;
	PANEL(plan, groups)[group] = panel;
	TERMS(plan, groups)[group] = step;
	BAND(plan, groups)[group] = band;
}

// A number as a bfloat16: to the nearest, ties to even; a denormal number becomes zero, a NaN stays one.
inline uint round_bf16(const float x)
{
	const uint bits = as_uint(x), size = bits & 0x7fffffffu;
	const uint rounded = size > 0x7f800000u ? bits | 0x400000u : size < 0x800000u ? bits & 0x80000000u : bits + 0x7fffu + (bits >> 16 & 1);
	return rounded >> 16;
}

// A step of numbers in pairs. Numbers beyond `there` are zero.
inline uint8 pack_step(global const float *x, const long stride, const int there)
{
	float v[STEP];
	if (there >= STEP && stride == 1) {
		#pragma unroll
		for (int i = 0; i < STEP; i += 4)
			vstore4(vload4(0, x + i), 0, v + i);
	} else {
		#pragma unroll
		for (int i = 0; i < STEP; i++)
			v[i] = i < there ? x[i * stride] : 0;
	}
	return (uint8)(round_bf16(v[0]) | round_bf16(v[1]) << 16, round_bf16(v[2]) | round_bf16(v[3]) << 16,
		round_bf16(v[4]) | round_bf16(v[5]) << 16, round_bf16(v[6]) | round_bf16(v[7]) << 16,
		round_bf16(v[8]) | round_bf16(v[9]) << 16, round_bf16(v[10]) | round_bf16(v[11]) << 16,
		round_bf16(v[12]) | round_bf16(v[13]) << 16, round_bf16(v[14]) | round_bf16(v[15]) << 16);
}

// Writes a step of a row of A, or of a column of B, to the panels of its tile.
inline void store_a(global uint *panels, const int step, const int row, const uint8 v)
{
#ifdef WIDE
	vstore8(v, 0, panels + (step / 2 * TILE_ROWS + row) * STEP + step % 2 * (STEP / 2));
#else
	vstore8(v, 0, panels + step * A_PANEL + row * (STEP / 2));
#endif
}

inline void store_b(global uint *panels, const int step, const int column, const uint8 v)
{
	global uint *panel = panels + step * B_PANEL + column / 16 * (16 * STEP / 2) + column % 16;
	panel[0] = v.s0, panel[16] = v.s1, panel[32] = v.s2, panel[48] = v.s3;
	panel[64] = v.s4, panel[80] = v.s5, panel[96] = v.s6, panel[112] = v.s7;
}

// Packs groups of rows as A: element (i, t) of x is x[i*row_stride + t*stride]. The first row of a group is the first
// row of its panels. A work-item has a row (0) and a step (1).
kernel void pvc_pack_rows(MEMORY(uint, a), MEMORY(const float, x), MEMORY(const int, plan), const int groups, const long row_stride, const long stride,
	const int k, const int steps)
{
	LOCATE(a), LOCATE(x), LOCATE(plan);
	const int panel = get_global_id(0) / TILE_ROWS, in_panel = get_global_id(0) % TILE_ROWS, step = get_global_id(1);
	if (step >= steps || panel >= PANEL(plan, groups)[groups])
		return;
	const int group = group_of(PANEL(plan, groups), groups, panel);
	const int first = ROW(plan, groups)[group], count = ROW(plan, groups)[group + 1] - first;
	const int row = (panel - PANEL(plan, groups)[group]) * TILE_ROWS + in_panel;
	const uint8 v = pack_step(x + (first + row) * row_stride + step * STEP * stride, stride, row < count ? k - step * STEP : 0);
	store_a(a + (size_t)panel * steps * A_PANEL, step, in_panel, v);
}

// Packs matrices as B, one after the other: element (t, j) of a matrix is x[t*stride + j*column_stride]. A work-item has a column (0) and a step (1) of a
// matrix (2).
kernel void pvc_pack_matrices(MEMORY(uint, b), MEMORY(const float, x), const long size, const long stride, const long column_stride, const int k,
	const int n, const int steps)
{
	LOCATE(b), LOCATE(x);
	const int column = get_global_id(0), step = get_global_id(1), panels = (n + TILE_COLUMNS - 1) / TILE_COLUMNS;
	const size_t matrix = get_global_id(2);
	if (step >= steps || column >= panels * TILE_COLUMNS)
		return;
	const uint8 v = pack_step(x + matrix * size + step * STEP * stride + column * column_stride, stride, column < n ? k - step * STEP : 0);
	store_b(b + (matrix * panels + column / TILE_COLUMNS) * steps * B_PANEL, step, column % TILE_COLUMNS, v);
}

// Packs x, whose rows are the terms, as A and B of sums over the rows of each group: element (t, j) of x is x[t*stride
// + j*column_stride]. The first row of a group is the first term of its steps; steps bounds the steps of all groups. A
// work-item has a column of x (0) and a step (1).
kernel void pvc_pack_left(MEMORY(uint, a), MEMORY(const float, x), MEMORY(const int, plan), const int groups, const long stride, const long column_stride,
	const int m, const int steps)
{
	LOCATE(a), LOCATE(x), LOCATE(plan);
	const int column = get_global_id(0), step = get_global_id(1);
	if (column >= (m + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS || step >= TERMS(plan, groups)[groups])
		return;
	const int group = group_of(TERMS(plan, groups), groups, step);
	const int first = ROW(plan, groups)[group] + (step - TERMS(plan, groups)[group]) * STEP;
	const uint8 v = pack_step(x + first * stride + column * column_stride, stride, column < m ? ROW(plan, groups)[group + 1] - first : 0);
	store_a(a + (size_t)(column / TILE_ROWS) * steps * A_PANEL, step, column % TILE_ROWS, v);
}

kernel void pvc_pack_right(MEMORY(uint, b), MEMORY(const float, x), MEMORY(const int, plan), const int groups, const long stride, const long column_stride,
	const int n, const int steps)
{
	LOCATE(b), LOCATE(x), LOCATE(plan);
	const int column = get_global_id(0), step = get_global_id(1);
	if (column >= (n + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS || step >= TERMS(plan, groups)[groups])
		return;
	const int group = group_of(TERMS(plan, groups), groups, step);
	const int first = ROW(plan, groups)[group] + (step - TERMS(plan, groups)[group]) * STEP;
	const uint8 v = pack_step(x + first * stride + column * column_stride, stride, column < n ? ROW(plan, groups)[group + 1] - first : 0);
	store_b(b + (size_t)(column / TILE_COLUMNS) * steps * B_PANEL, step, column % TILE_COLUMNS, v);
}

// A tile of rows × columns elements of C, from `steps` steps of the panels of A and B. All loops over blocks are
// unrolled and their indices are constants: otherwise blocks are kept in memory.
inline void multiply(global float *c, const size_t ld, global const uint *a, global const uint *b, const int steps, const int rows, const int columns,
	const int accumulate)
{
	c_block sum[4][4];
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int j = 0; j < 4; j++)
			sum[i][j] = zero_block();
	for (int step = 0; step < steps; step += 2) {
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
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int j = 0; j < 4; j++)
			store_block(c + 8 * i * ld + 16 * j, ld, sum[i][j], rows - 8 * i, columns - 16 * j, accumulate);
}

// C = A·B, or += with accumulate, for groups of rows, each with its own matrix of n columns: pvc_pack_rows by pvc_pack_matrices. A work-group has 256
// columns (0) of a band of 128 rows (1).
kernel SUBGROUPS void pvc_product(MEMORY(float, c), MEMORY(const uint, a), MEMORY(const uint, b), MEMORY(const int, plan), const int groups, const int ld,
	const int n, const int steps, const int accumulate)
{
	LOCATE(c), LOCATE(a), LOCATE(b), LOCATE(plan);
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
	multiply(c + (size_t)(first + row) * ld + column * TILE_COLUMNS, ld, a, b, steps, count - row, n - column * TILE_COLUMNS, accumulate);
}

// C = A·B, or += with accumulate, m×n, for each group a sum over its rows: pvc_pack_left by pvc_pack_right, with the
// same steps. The result of a group without rows is zero. A work-group has 256 columns (0) of 128 rows (1) of a group's
// matrix (2), which is size elements after the previous matrix.
kernel SUBGROUPS void pvc_weight_grad(MEMORY(float, c), MEMORY(const uint, a), MEMORY(const uint, b), MEMORY(const int, plan), const int groups, const long size,
	const int ld, const int m, const int n, const int steps, const int accumulate)
{
	LOCATE(c), LOCATE(a), LOCATE(b), LOCATE(plan);
	const int group = get_group_id(2), panel = get_group_id(1) * SIDE + SUBGROUP / SIDE, column = get_group_id(0) * SIDE + SUBGROUP % SIDE;
	const int begin = TERMS(plan, groups)[group], end = TERMS(plan, groups)[group + 1];
	if (panel * TILE_ROWS >= m || column * TILE_COLUMNS >= n || accumulate && begin == end)
		return;
	a += ((size_t)panel * steps + begin) * A_PANEL;
	b += ((size_t)column * steps + begin) * B_PANEL;
	multiply(c + group * size + (size_t)panel * TILE_ROWS * ld + column * TILE_COLUMNS, ld, a, b, end - begin, m - panel * TILE_ROWS,
		n - column * TILE_COLUMNS, accumulate);
}
