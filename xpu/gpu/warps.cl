// Instructions of NVIDIA's GPUs from compute capability 8.0 on, as PTX in the text: a warp of 32 lanes multiplies blocks of bfloat16 with its tensor cores.
//
// # Blocks
//
// One instruction, mma.m16n8k16, is C += A·B with A of 16×16, B of 16×8 and C of 16×8. Lane l, with g = l / 4 and t = l % 4, has
//
//	four a   of A: pairs of terms 2t and 2t+1 of the rows g and g+8, then terms 2t+8 and 2t+9 of these rows
//	four b   of two B: terms 2t and 2t+1 of column g, then terms 2t+8 and 2t+9; then these of the second
//	block c  of C: columns 2t and 2t+1 of row g, then of row g+8
//
// ldmatrix loads four matrices of 8×8 numbers of 16 bits from local memory. Lanes 8i to 8i+7 give the rows of matrix i, 16 bytes each; lane l gets numbers
// 2t and 2t+1 of row g of each, or of column g if they are turned. So it loads a block of A, or two of B.
//
// # Emulation
//
// With EMULATED a warp is one work-item with 32 lanes in an array, for any device. The kernels are the same: they use OF(x) for what the lane of EACH_LANE
// has of x.

#define WARP_LANES 32

// Rows in local memory have PIECES pieces of 16 bytes. A piece is at another place in other rows, so that eight rows of one piece are in all banks.
#if PIECES == 2
#define PLACE(row, piece) ((row) * PIECES + ((piece) ^ (row) / 4 % 2))
#elif PIECES == 4
#define PLACE(row, piece) ((row) * PIECES + ((piece) ^ (row) / 2 % 4))
#else
#define PLACE(row, piece) ((row) * PIECES + ((piece) ^ (row) % 8))
#endif

// The row and the piece that a lane gives for load_matrices: of 16 rows and two pieces, first the rows, or of each eight rows first the pieces.
#define ROW_FIRST(lane) ((lane) % 16)
#define PIECE_LAST(lane) ((lane) / 16)
#define ROW_LAST(lane) ((lane) % 8 + (lane) / 16 * 8)
#define PIECE_FIRST(lane) ((lane) / 8 % 2)

typedef struct { uint v[4]; } lane_four;
typedef struct { float v[4]; } lane_block;
typedef struct { float v[2]; } lane_pair; // of rows g and g+8

// Two numbers as bfloat16.
INLINE uint pack_two(const float x, const float y) { return as_uint(operand(x)) >> 16 | as_uint(operand(y)) & 0xffff0000u; }

#ifdef EMULATED

typedef struct { lane_four lane[WARP_LANES]; } four;
typedef struct { lane_block lane[WARP_LANES]; } block;
typedef struct { lane_pair lane[WARP_LANES]; } pair;

#define WARP ((int)get_local_id(0))
#define WARP_ITEMS 1
#define EACH_LANE for (int lane = 0; lane < WARP_LANES; lane++)
#define OF(x) (x).lane[lane]

INLINE void copy_piece(local uint4 *to, const global uint4 *from) { *to = *from; }
#define end_copies()
#define await_copies(most)

INLINE four load_matrices(const local uint4 *tile, const int row, const int piece, const bool rows_first, const bool turned)
{
	four x;
	for (int lane = 0; lane < WARP_LANES; lane++)
		for (int i = 0; i < 4; i++) {
			ushort two[2];
			for (int j = 0; j < 2; j++) {
				const int from = 8 * i + (turned ? lane % 4 * 2 + j : lane / 4), at = turned ? lane / 4 : lane % 4 * 2 + j;
				const int r = row + (rows_first ? ROW_FIRST(from) : ROW_LAST(from)), p = piece + (rows_first ? PIECE_LAST(from) : PIECE_FIRST(from));
				two[j] = ((const local ushort *)(tile + PLACE(r, p)))[at];
			}
			x.lane[lane].v[i] = two[0] | (uint)two[1] << 16;
		}
	return x;
}

INLINE float half_of(const uint two, const int i) { return as_float(i ? two & 0xffff0000u : two << 16); }

// The block c plus the product of a and of one of the two blocks of b.
INLINE block multiply_block(const four a, const four b, const int second, block c)
{
	for (int lane = 0; lane < WARP_LANES; lane++)
		for (int i = 0; i < 4; i++) {
			const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
			for (int t = 0; t < 16; t++) {
				const int high = t / 8, at = t / 2 % 4;
				c.lane[lane].v[i] += half_of(a.lane[row % 8 * 4 + at].v[row / 8 + 2 * high], t % 2) *
					half_of(b.lane[column * 4 + at].v[2 * second + high], t % 2);
			}
		}
	return c;
}

// The value of the lane whose number differs in the bits of `by`.
INLINE pair exchange(const pair x, const int by)
{
	pair y;
	for (int lane = 0; lane < WARP_LANES; lane++)
		y.lane[lane] = x.lane[lane ^ by];
	return y;
}

#define pack_weights(x, y) pack_two(x, y)
#define exponential(x) exp(x)

#else

typedef lane_four four;
typedef lane_block block;
typedef lane_pair pair;

#define WARP ((int)get_local_id(0) / WARP_LANES)
#define WARP_ITEMS WARP_LANES
#define EACH_LANE for (int lane = get_local_id(0) % WARP_LANES, once = 1; once; once = 0)
#define OF(x) (x)

INLINE void copy_piece(local uint4 *to, const global uint4 *from)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "l"(to), "l"(from) : "memory");
}

// Ends a group of copies; waits until at most the given number of groups are under way.
#define end_copies() asm volatile("cp.async.commit_group;" : : : "memory")
#define await_copies(most) asm volatile("cp.async.wait_group %0;" : : "n"(most) : "memory")

INLINE four load_matrices(const local uint4 *tile, const int row, const int piece, const bool rows_first, const bool turned)
{
	const int lane = get_local_id(0) % WARP_LANES;
	const int r = row + (rows_first ? ROW_FIRST(lane) : ROW_LAST(lane)), p = piece + (rows_first ? PIECE_LAST(lane) : PIECE_FIRST(lane));
	const local uint4 *from = tile + PLACE(r, p);
	four x;
	if (turned)
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
			: "=r"(x.v[0]), "=r"(x.v[1]), "=r"(x.v[2]), "=r"(x.v[3]) : "l"(from) : "memory");
	else
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
			: "=r"(x.v[0]), "=r"(x.v[1]), "=r"(x.v[2]), "=r"(x.v[3]) : "l"(from) : "memory");
	return x;
}

INLINE block multiply_block(const four a, const four b, const int second, block c)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
		: "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
		: "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b.v[2 * second]), "r"(b.v[2 * second + 1]));
	return c;
}

INLINE float exponential(const float x)
{
	float y;
	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * M_LOG2E_F));
	return y;
}

// pack_two by the hardware, which keeps denormal numbers.
INLINE uint pack_weights(const float x, const float y)
{
	uint both;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
	return both;
}

INLINE pair exchange(const pair x, const int by)
{
	pair y;
	asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(y.v[0]) : "f"(x.v[0]), "r"(by));
	asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(y.v[1]) : "f"(x.v[1]), "r"(by));
	return y;
}

#endif

INLINE block zero_block(void)
{
	block c;
	EACH_LANE
		for (int i = 0; i < 4; i++)
			OF(c).v[i] = 0;
	return c;
}

// Starts to copy `count` rows of PIECES pieces to local memory, by the work-items of `warps` warps. Beyond the last of `rows` rows it is the last again.
INLINE void copy_rows(local uint4 *to, const global uint4 *from, const int count, const int rows, const size_t pitch, const int warps)
{
	#pragma unroll
	for (int i = 0; i < count * PIECES / (WARP_LANES * warps); i++)
		EACH_LANE {
			const int at = WARP_LANES * (warps * i + WARP) + lane, row = at / PIECES, piece = at % PIECES;
			copy_piece(to + PLACE(row, piece), from + min(row, rows - 1) * pitch + piece);
		}
}

// Writes a block of C, as far as it has rows and columns.
INLINE void store_two(global void *to, const int bf16, float x, float y, const int columns, const int accumulate)
{
	if (bf16) {
		if (columns > 0)
			store_numbers(to, 1, 0, 1, accumulate ? load_numbers(to, 1, 0, 1) + x : x);
		if (columns > 1)
			store_numbers(to, 1, 1, 2, accumulate ? load_numbers(to, 1, 1, 2) + y : y);
		return;
	}
	global float *c = to;
	if (columns >= 2 && ((ulong)c & 7) == 0) {
		global float2 *two = (global float2 *)c;
		*two = accumulate ? *two + (float2)(x, y) : (float2)(x, y);
		return;
	}
	if (columns > 0)
		c[0] = accumulate ? c[0] + x : x;
	if (columns > 1)
		c[1] = accumulate ? c[1] + y : y;
}

INLINE void store_block(global void *c, const int bf16, const long ld, const block x, const int rows, const int columns, const int accumulate)
{
	EACH_LANE {
		const int row = lane / 4, column = lane % 4 * 2;
		if (row < rows)
			store_two(MOVE(c, bf16, row * ld + column), bf16, OF(x).v[0], OF(x).v[1], columns - column, accumulate);
		if (row + 8 < rows)
			store_two(MOVE(c, bf16, (row + 8) * ld + column), bf16, OF(x).v[2], OF(x).v[3], columns - column, accumulate);
	}
}
