// The matrix instruction of Intel's Data Center GPU Max (Ponte Vecchio), dpas, which multiplies blocks of bfloat16. A sub-group of 16 lanes executes it
// together (OpenCL extension cl_intel_subgroup_matrix_multiply_accumulate). Operands are rounded and packed first, in the
// order of the instruction, so that a sub-group reads its operands from consecutive memory. Given by the file that includes this one: SUBGROUP_COUNT, the
// sub-groups of a work-group.
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
// A step is 16 terms of a sum. A panel of A is 32 rows × 16 terms, as ushort row by row. A panel of B is 16 terms × 64 columns: 4 blocks one after the
// other, each with 8 rows of pairs as above, as uint. The panels of all steps lie one after the other; their number is even. Numbers beyond the end of a
// matrix or of a group of rows are zero.
//
// With WIDE, two steps of A lie side by side, in rows of 32 terms. Then one instruction reads both, and one a panel of B, 2 KiB each: blocks of
// memory with two dimensions (cl_intel_subgroup_2d_block_io), whose rows must have 64 bytes. Compilers that do not know it, as Debian 12's, read 256
// bytes at a time.
//
// # Emulation
//
// With EMULATED a sub-group is one work-item with 16 lanes in an array, for any device: the definitions of block, load, multiply and store below are
// all that differs.
//
// Functions are inline, and neither static nor INLINE: with these, Intel's compiler keeps blocks in memory.

#define TILE_ROWS 32
#define TILE_COLUMNS 64
#define STEP 16
#define A_PANEL (TILE_ROWS * STEP / 2)    // uints
#define B_PANEL (TILE_COLUMNS * STEP / 2) // uints

#ifdef EMULATED

typedef struct { ushort lane[16][8]; } a_block;
typedef struct { uint8 lane[16]; } b_block;
typedef struct { float8 lane[16]; } c_block;

#define SUBGROUP ((int)get_local_id(0))
#define SUBGROUPS __attribute__((reqd_work_group_size(SUBGROUP_COUNT, 1, 1)))

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

#define prefetch_panel(x)

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
		c.lane[l] = 0;
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
#define SUBGROUPS __attribute__((reqd_work_group_size(16 * SUBGROUP_COUNT, 1, 1))) __attribute__((intel_reqd_sub_group_size(16)))

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

// Starts to load 2 KiB to the first-level cache.
inline void prefetch_panel(global const uint *x) { intel_sub_group_2d_block_prefetch_32b_32r16x1c((global void *)x, 64, 32, 64, (int2)(0, 0)); }

#else

#define prefetch_panel(x)

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

// The bits of a step of bfloat16, in pairs.
inline uint8 pairs(const uint v[STEP])
{
	return (uint8)(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16, v[8] | v[9] << 16,
		v[10] | v[11] << 16, v[12] | v[13] << 16, v[14] | v[15] << 16);
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
	uint rounded[STEP];
	#pragma unroll
	for (int i = 0; i < STEP; i++)
		rounded[i] = round_lanes(v[i]);
	return pairs(rounded);
}

// pack_step for numbers of bfloat16.
inline uint8 pack_halves(global const ushort *x, const long stride, const int there)
{
	if (there >= STEP && stride == 1)
		return as_uint8(vload16(0, x));
	uint v[STEP];
	#pragma unroll
	for (int i = 0; i < STEP; i++)
		v[i] = i < there ? x[i * stride] : 0;
	return pairs(v);
}

// pack_step for numbers of either type, from number n of x on.
inline uint8 pack_numbers(global const void *x, const int bf16, const long n, const long stride, const int there)
{
	x = MOVE(x, bf16, n);
	return bf16 ? pack_halves(x, stride, there) : pack_step(x, stride, there);
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
