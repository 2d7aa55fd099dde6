// Products that read matrices of bfloat16 as they are in memory, row by row, by loads of blocks with two dimensions (OpenCL extension
// cl_intel_subgroup_2d_block_io). Numbers beyond the edges of a matrix are zero. So the rows of a group may begin anywhere.
//
// The terms of a row of A lie side by side (`rows`), or the rows of a term (`turned`). A load turns pairs of numbers: lane l of a register has two numbers of
// row l in memory. For the turned A, these are two rows of a term, so the compiler separates them: two moves for each register. For a B of rows, they are two
// terms of a column, which is the order of dpas. For a turned B, another load makes pairs of rows.

#include "dpas.cl"
#include "groups.cl"
#include "pvc_tile.cl"

// A matrix in memory. Rows have `width` numbers, at least 32, and are `pitch` apart, a multiple of 8. `at` is a multiple of 64 bytes.
typedef struct { global const ushort *at; int width, height, pitch; } matrix;

// C in memory: numbers of float or bfloat16, whose rows are `ld` apart. With `blocks`, it can be written by blocks with two dimensions, which omit what is
// beyond its edges.
typedef struct { global void *at; int bf16, blocks, width, height, ld; } result;

// Writes a tile at a row and a column, element by element.
inline void store_elements(const result c, const c_block sum[4][4], const int row, const int column, const int accumulate)
{
	store_tile(MOVE(c.at, c.bf16, (size_t)row * c.ld + column), c.bf16, c.ld, sum, c.height - row, c.width - column, accumulate);
}

#ifdef EMULATED

inline ushort number_at(const matrix x, const int column, const int row)
{
	return column < x.width && row < x.height ? x.at[(size_t)row * x.pitch + column] : 0;
}

inline void load_left_rows(a_block left[2][4], const matrix a, const int row, const int term)
{
	for (int i = 0; i < TILE_ROWS; i++)
		for (int t = 0; t < 2 * STEP; t++)
			left[t / STEP][i / 8].lane[t % STEP][i % 8] = number_at(a, term + t, row + i);
}

inline void load_left_turned(a_block left[2][4], const matrix a, const int row, const int term)
{
	for (int i = 0; i < TILE_ROWS; i++)
		for (int t = 0; t < 2 * STEP; t++)
			left[t / STEP][i / 8].lane[t % STEP][i % 8] = number_at(a, row + i, term + t);
}

inline void load_right_rows(b_block right[4], const matrix b, const int column, const int term)
{
	for (int l = 0; l < TILE_COLUMNS; l++)
		for (int i = 0; i < STEP / 2; i++)
			right[l / 16].lane[l % 16][i] = number_at(b, term + 2 * i, column + l) | (uint)number_at(b, term + 2 * i + 1, column + l) << 16;
}

inline void load_right_turned(b_block right[4], const matrix b, const int column, const int term)
{
	for (int l = 0; l < TILE_COLUMNS; l++)
		for (int i = 0; i < STEP / 2; i++)
			right[l / 16].lane[l % 16][i] = number_at(b, column + l, term + 2 * i) | (uint)number_at(b, column + l, term + 2 * i + 1) << 16;
}

#define prefetch_block(x, column, row)
#define arrive()
#define await()

inline void store_result(const result c, const c_block sum[4][4], const int row, const int column, const int accumulate)
{
	if (!c.blocks) {
		store_elements(c, sum, row, column, accumulate);
		return;
	}
	for (int i = 0; i < TILE_ROWS; i++)
		for (int j = 0; j < TILE_COLUMNS; j++)
			if (row + i < c.height && column + j < c.width) {
				const size_t at = (size_t)(row + i) * c.ld + column + j;
				const float x = sum[i / 8][j / 16].lane[j % 16][i % 8];
				if (!c.bf16) {
					global float *y = (global float *)c.at + at;
					*y = accumulate ? x + *y : x;
				} else
					store_sum((global ushort *)c.at + at, x, accumulate);
			}
}

#else

#ifdef cl_intel_subgroup_2d_block_io

#define BLOCK(x, column, row) (global void *)(x).at, 2 * (x).width, (x).height, 2 * (x).pitch, (int2)(column, row)

// 32 rows × 32 numbers: two blocks of 16 numbers, one after the other.
inline void read_rows(ushort v[64], const matrix x, const int column, const int row) { intel_sub_group_2d_block_read_16b_32r16x2c(BLOCK(x, column, row), v); }

// 16 rows × 8 pairs: pair i of row l is element i of lane l.
inline uint8 read_turned(const matrix x, const int column, const int row)
{
	uint v[8];
	intel_sub_group_2d_block_read_transpose_32b_16r8x1c(BLOCK(x, column / 2, row), v);
	return vload8(0, v);
}

// 16 rows × 32 numbers, in two blocks of pairs of rows.
inline void read_pairs(uint8 v[2], const matrix x, const int column, const int row)
{
	uint u[16];
	intel_sub_group_2d_block_read_transform_16b_16r16x2c(BLOCK(x, column, row), u);
	v[0] = vload8(0, u), v[1] = vload8(1, u);
}

// Starts to load 32 rows × 32 numbers to the first-level cache.
inline void prefetch_block(const matrix x, const int column, const int row) { intel_sub_group_2d_block_prefetch_16b_32r16x2c(BLOCK(x, column, row)); }

// A split barrier: no sub-group passes await() before all sub-groups of the work-group have called arrive(). No memory is made visible.
#ifdef cl_intel_split_work_group_barrier
#define arrive() intel_work_group_barrier_arrive(0)
#define await() intel_work_group_barrier_wait(0)
#else
#define arrive()
#define await()
#endif

#define RESULT(c, bytes, column, row) (c).at, (bytes) * (c).width, (c).height, (bytes) * (c).ld, (int2)(column, row)

// 8 rows × 16 numbers.
inline void write_block(const result c, float8 x, const int column, const int row, const int accumulate)
{
	uint v[8];
	if (accumulate) {
		intel_sub_group_2d_block_read_32b_8r16x1c(RESULT(c, 4, column, row), v);
		x += as_float8(vload8(0, v));
	}
	vstore8(as_uint8(x), 0, v);
	intel_sub_group_2d_block_write_32b_8r16x1c(RESULT(c, 4, column, row), v);
}

inline void write_rounded_block(const result c, float8 x, const int column, const int row, const int accumulate)
{
	ushort v[8];
	if (accumulate) {
		intel_sub_group_2d_block_read_16b_8r16x1c(RESULT(c, 2, column, row), v);
		x += as_float8(convert_uint8(vload8(0, v)) << 16);
	}
	#pragma unroll
	for (int i = 0; i < 8; i++)
		v[i] = round_lanes(x[i]);
	intel_sub_group_2d_block_write_16b_8r16x1c(RESULT(c, 2, column, row), v);
}

inline void store_result(const result c, const c_block sum[4][4], const int row, const int column, const int accumulate)
{
	if (!c.blocks) {
		store_elements(c, sum, row, column, accumulate);
		return;
	}
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int j = 0; j < 4; j++)
			if (c.bf16)
				write_rounded_block(c, sum[i][j], column + 16 * j, row + 8 * i, accumulate);
			else
				write_block(c, sum[i][j], column + 16 * j, row + 8 * i, accumulate);
}

#else

// The names of the same loads in Debian 12's compiler, which does not declare the extension. They load at most 512 bytes. With them, the kernels can be
// checked; a device uses the kernels only with the extension.
short16 __builtin_IB_subgroup_block_read_flat_u16_m8k16v2(long x, int width, int height, int pitch, int2 at);
uint8 __builtin_IB_subgroup_block_read_flat_transpose_u32_k8(long x, int width, int height, int pitch, int2 at);
int8 __builtin_IB_subgroup_block_read_flat_transform_u16_k16(long x, int width, int height, int pitch, int2 at);

#define BLOCK(x, column, row) (long)(x).at, 2 * (x).width - 1, (x).height - 1, 2 * (x).pitch - 1, (int2)(column, row)

inline void read_rows(ushort v[64], const matrix x, const int column, const int row)
{
	#pragma unroll
	for (int i = 0; i < 4; i++) {
		const ushort16 u = as_ushort16(__builtin_IB_subgroup_block_read_flat_u16_m8k16v2(BLOCK(x, column, row + 8 * i)));
		vstore8(u.lo, i, v), vstore8(u.hi, 4 + i, v);
	}
}

inline uint8 read_turned(const matrix x, const int column, const int row)
{
	return __builtin_IB_subgroup_block_read_flat_transpose_u32_k8(BLOCK(x, column / 2, row));
}

inline void read_pairs(uint8 v[2], const matrix x, const int column, const int row)
{
	v[0] = as_uint8(__builtin_IB_subgroup_block_read_flat_transform_u16_k16(BLOCK(x, column, row)));
	v[1] = as_uint8(__builtin_IB_subgroup_block_read_flat_transform_u16_k16(BLOCK(x, column + 16, row)));
}

#define prefetch_block(x, column, row)
#define arrive()
#define await()
#define store_result store_elements

#endif

// Two steps of A, 32 rows, and one of B, 64 columns.
inline void load_left_rows(a_block left[2][4], const matrix a, const int row, const int term)
{
	ushort v[64];
	read_rows(v, a, term, row);
	#pragma unroll
	for (int i = 0; i < 8; i++)
		left[i / 4][i % 4] = as_short8(vload8(i, v));
}

inline void load_left_turned(a_block left[2][4], const matrix a, const int row, const int term)
{
	#pragma unroll
	for (int i = 0; i < 4; i++) {
		const uint8 v = read_turned(a, row + i % 2 * 16, term + i / 2 * STEP);
		left[i / 2][i % 2 * 2] = as_short8(v.lo), left[i / 2][i % 2 * 2 + 1] = as_short8(v.hi);
	}
}

inline void load_right_rows(b_block right[4], const matrix b, const int column, const int term)
{
	#pragma unroll
	for (int j = 0; j < 4; j++)
		right[j] = as_int8(read_turned(b, term, column + 16 * j));
}

inline void load_right_turned(b_block right[4], const matrix b, const int column, const int term)
{
	#pragma unroll
	for (int j = 0; j < 4; j += 2) {
		uint8 v[2];
		read_pairs(v, b, column + 16 * j, term);
		right[j] = as_int8(v[0]), right[j + 1] = as_int8(v[1]);
	}
}

#endif

// The tile of a product at a row and a column of C, which are the rows and columns of A and B, too. Its terms are `first` … `last` - 1. A sub-group whose
// tile is outside of C is idle: it has no products, but prefetches and keeps step.
//
// Two steps of a work-group have blocks of 32×32 numbers: HIGH of A and 2·SIDE of B. The first sub-groups prefetch one of them each. The barrier keeps
// sub-groups within two steps of each other, so that their shared operands are in the first-level cache.
#define PIECES (HIGH + 2 * SIDE)
#define MULTIPLY(name, left_form, right_form, LEFT_AT, RIGHT_AT) \
inline void name(const result c, const matrix a, const matrix b, const int row, const int column, const int first, const int last, const int accumulate) \
{ \
	const int busy = row < c.height && column < c.width, piece = SUBGROUP, stop = piece < PIECES ? last : first; \
	matrix ahead = b; \
	if (piece < HIGH) \
		ahead = a; \
	const int ahead_row = row + (piece - SUBGROUP / SIDE) * TILE_ROWS; \
	const int ahead_column = column - SUBGROUP % SIDE * TILE_COLUMNS + (piece - HIGH) * (TILE_COLUMNS / 2); \
	c_block sum[4][4]; \
	_Pragma("unroll") \
	for (int i = 0; i < 4; i++) \
		_Pragma("unroll") \
		for (int j = 0; j < 4; j++) \
			sum[i][j] = zero_block(); \
	for (int term = first; term < last; term += 2 * STEP) { \
		arrive(); \
		const int next = term + AHEAD * STEP; \
		if (next < stop) { \
			const int2 left = LEFT_AT(ahead_row, next), right = RIGHT_AT(ahead_column, next); \
			const int2 at = piece < HIGH ? left : right; \
			prefetch_block(ahead, at.x, at.y); \
		} \
		if (busy) { \
			a_block left[2][4]; \
			left_form(left, a, row, term); \
			_Pragma("unroll") \
			for (int h = 0; h < 2; h++) { \
				b_block right[4]; \
				right_form(right, b, column, term + h * STEP); \
				_Pragma("unroll") \
				for (int i = 0; i < 4; i++) \
					_Pragma("unroll") \
					for (int j = 0; j < 4; j++) \
						sum[i][j] = multiply_block(left[h][i], right[j], sum[i][j]); \
			} \
		} \
		await(); \
	} \
	if (busy) \
		store_result(c, sum, row, column, accumulate); \
}
#define ACROSS(i, term) (int2)(term, i)
#define DOWN(i, term) (int2)(i, term)
MULTIPLY(multiply_rows_rows, load_left_rows, load_right_rows, ACROSS, ACROSS)
MULTIPLY(multiply_rows_turned, load_left_rows, load_right_turned, ACROSS, DOWN)
MULTIPLY(multiply_turned_turned, load_left_turned, load_right_turned, DOWN, DOWN)

// The tile of a sub-group in a product of groups of rows: its group, its first row and column of C, and the end of the group's rows, or 0 if the work-group
// has no rows.
typedef struct { int group, row, column, end; } band_tile;

inline band_tile tile_of(global const int *plan, const int groups)
{
	band_tile t = {0, 0, 0, 0};
	const int band = get_group_id(1);
	if (band >= BAND(plan, groups)[groups])
		return t;
	t.group = group_of(BAND(plan, groups), groups, band);
	t.row = ROW(plan, groups)[t.group] + ((band - BAND(plan, groups)[t.group]) * HIGH + SUBGROUP / SIDE) * TILE_ROWS;
	t.column = (get_group_id(0) * SIDE + SUBGROUP % SIDE) * TILE_COLUMNS;
	t.end = ROW(plan, groups)[t.group + 1];
	return t;
}

// C = A·B, or += with accumulate, for groups of rows of A, each with its own matrix B of n columns and k terms. The matrices B are `size` numbers apart. A row
// of B in memory has the terms of a column in pvc_forward, and the columns of a term in pvc_backward. A work-group has 256 columns (0) of a band of rows (1).
kernel SUBGROUPS void pvc_forward(TYPED(void, c), MEMORY(const ushort, a), MEMORY(const ushort, b), MEMORY(const int, plan), const int groups, const int ld,
	const int n, const int k, const int a_width, const int a_pitch, const int b_width, const int b_pitch, const long size, const int blocks,
	const int accumulate)
{
	LOCATE_TYPED(c), LOCATE(a), LOCATE(b), LOCATE(plan);
	const band_tile t = tile_of(plan, groups);
	if (t.end == 0)
		return;
	const result to = {c, c_bf16, blocks, n, t.end, ld};
	const matrix left = {a, a_width, t.end, a_pitch}, right = {b + t.group * size, b_width, n, b_pitch};
	multiply_rows_rows(to, left, right, t.row, t.column, 0, k, accumulate);
}

kernel SUBGROUPS void pvc_backward(TYPED(void, c), MEMORY(const ushort, a), MEMORY(const ushort, b), MEMORY(const int, plan), const int groups, const int ld,
	const int n, const int k, const int a_width, const int a_pitch, const int b_width, const int b_pitch, const long size, const int blocks,
	const int accumulate)
{
	LOCATE_TYPED(c), LOCATE(a), LOCATE(b), LOCATE(plan);
	const band_tile t = tile_of(plan, groups);
	if (t.end == 0)
		return;
	const result to = {c, c_bf16, blocks, n, t.end, ld};
	const matrix left = {a, a_width, t.end, a_pitch}, right = {b + t.group * size, b_width, k, b_pitch};
	multiply_rows_turned(to, left, right, t.row, t.column, 0, k, accumulate);
}

// C = Aᵀ·B, or += with accumulate, m×n, for each group a sum over its rows of A and B. The result of a group without rows is zero. A work-group has 256
// columns (0) of 32·HIGH rows (1) of a group's matrix (2), which is size elements after the previous matrix.
kernel SUBGROUPS void pvc_gradient(TYPED(void, c), MEMORY(const ushort, a), MEMORY(const ushort, b), MEMORY(const int, plan), const int groups,
	const long size, const int ld, const int m, const int n, const int a_width, const int a_pitch, const int b_width, const int b_pitch, const int blocks,
	const int accumulate)
{
	LOCATE_TYPED(c), LOCATE(a), LOCATE(b), LOCATE(plan);
	const int group = get_group_id(2), begin = ROW(plan, groups)[group], end = ROW(plan, groups)[group + 1];
	if (accumulate && begin == end)
		return;
	const int row = (get_group_id(1) * HIGH + SUBGROUP / SIDE) * TILE_ROWS, column = (get_group_id(0) * SIDE + SUBGROUP % SIDE) * TILE_COLUMNS;
	const result to = {MOVE(c, c_bf16, group * size), c_bf16, blocks, n, m, ld};
	const matrix left = {a, a_width, end, a_pitch}, right = {b, b_width, end, b_pitch};
	multiply_turned_turned(to, left, right, row, column, begin, end, accumulate);
}

// Rounds matrices, one after the other, of `lines` lines each. Number i of a line of a matrix is x[matrix*size + line*stride + i]. Lines of `to` are `pitch`
// apart, a multiple of 32; numbers beyond `width` are zero. A work-item has 16 numbers.
kernel void pvc_round(MEMORY(ushort, to), TYPED(const void, x), const int matrices, const int lines, const long size, const long stride, const int width,
	const int pitch)
{
	LOCATE(to), LOCATE_TYPED(x);
	const size_t parts = pitch / STEP, part = get_global_id(0) % parts, line = get_global_id(0) / parts;
	if (line >= (size_t)matrices * lines)
		return;
	const uint8 v = pack_numbers(x, x_bf16, line / lines * size + line % lines * stride + part * STEP, 1, width - (int)part * STEP);
	vstore8(v, 0, (global uint *)(to + line * pitch) + part * (STEP / 2));
}

// Rounds the rows of x in place: the numbers of a row are bfloat16 in the first half of its memory afterwards. A group has a row. In a turn
// it writes to memory that it has read in this turn or before.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void pvc_round_rows(MEMORY(float, x), const int width)
{
	LOCATE(x);
	x += get_group_id(0) * (size_t)width;
	global ushort *to = (global ushort *)x;
	for (int first = 0; first < width; first += GROUP) {
		const int i = first + ITEM;
		const float v = i < width ? x[i] : 0;
		barrier(CLK_GLOBAL_MEM_FENCE);
		if (i < width)
			to[i] = round_lanes(v);
	}
}
