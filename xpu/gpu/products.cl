// Products of matrices, C = op(A)·op(B). Of a stored matrix with leading dimension ld, element (i, j) of op is x[i·rows + j·columns]: rows = ld and
// columns = 1 as it is, the other way round of the transpose. An element of C is one chain of fused multiply-adds over the terms, in ascending order,
// from zero; so it depends on nothing but its operands. On a GPU a product without groups has chains of a limited number of terms (products.go), whose
// sums are added in ascending order.

// The rows and the group of a tile. With tiles the rows of groups follow each other, and a tile has rows of one group.
// With starts the terms of groups follow each other, and there is a matrix C for each.
typedef struct {
	int group, row, rows, first, terms;
} part;

INLINE part part_of(const int at, const global int *tiles, const bool tiled, const global int *starts, const bool started, const int height, const int m, const int k)
{
	part p;
	if (tiled) {
		const int4 tile = vload4(at, tiles);
		p.group = tile.x, p.row = tile.y, p.rows = tile.z;
	} else {
		p.group = started ? get_group_id(2) : 0;
		p.row = at * height;
		p.rows = min(height, m - p.row);
	}
	p.first = started ? starts[p.group] : 0;
	p.terms = started ? starts[p.group + 1] - p.first : k;
	return p;
}

// tiles[i] = (group, first row, rows, 0): the rows of each group in tiles of `height` rows; unused tiles have no rows.
// One group of work-items.
kernel void tiles_of_groups(MEMORY(int, tiles), MEMORY(const int, counts), const int groups, const int height, const int rows, const int length)
{
	LOCATE(tiles), LOCATE(counts);
	const int item = get_local_id(0), items = get_local_size(0);
	for (int g = item; g <= groups; g += items) {
		int start = 0, at = 0;
		for (int i = 0; i < g; i++) {
			start += counts[i];
			at += (counts[i] + height - 1) / height;
		}
		if (g == groups) {
			for (; at < length; at++)
				vstore4((int4)(0), at, tiles);
			break;
		}
		const int end = min(start + counts[g], rows);
		for (; start < end && at < length; start += height, at++)
			vstore4((int4)(g, start, min(height, end - start), 0), at, tiles);
	}
}

// starts[g] = the rows of the groups before g
kernel void starts_of_groups(MEMORY(int, starts), MEMORY(const int, counts), const int groups, const int rows)
{
	LOCATE(starts), LOCATE(counts);
	const int g = get_global_id(0);
	if (g > groups)
		return;
	int start = 0;
	for (int i = 0; i < g; i++)
		start += counts[i];
	starts[g] = min(start, rows);
}

#ifdef PROCESSOR

// A work-item has ROWS × PANEL elements of C in registers. op(B) is stored in panels of PANEL columns, term after term,
// with zeros beyond its last column.
#define PANEL 32
#define ROWS 8
#define STRIP 16

// A rounded copy of a matrix. Dimension 1 is the row.
kernel void round_operand(MEMORY(float, dst), MEMORY(const float, x), const int columns, const long dst_ld, const long ld)
{
	LOCATE(dst), LOCATE(x);
	const size_t i = get_global_id(0), row = get_group_id(1);
	if (i < columns)
		dst[row * dst_ld + i] = operand(x[row * ld + i]);
}

// The transpose of that, dst[i · dst_ld + r]: a work-item has STRIP rows of a column. Dimension 1 is the strip.
kernel void transpose_operand(MEMORY(float, dst), MEMORY(const float, x), const int rows, const int columns, const long dst_ld, const long ld)
{
	LOCATE(dst), LOCATE(x);
	const size_t i = get_global_id(0), first = STRIP * get_group_id(1);
	if (i >= columns)
		return;
	x += first * ld + i;
	dst += i * dst_ld + first;
	if (first + STRIP <= rows) {
		float line[STRIP];
		#pragma unroll
		for (int r = 0; r < STRIP; r++)
			line[r] = operand(x[r * ld]);
		#pragma unroll
		for (int r = 0; r < STRIP; r++)
			dst[r] = line[r];
		return;
	}
	for (int r = 0; first + r < rows; r++)
		dst[r] = operand(x[r * ld]);
}

INLINE float16 operands(float16 x)
{
#ifdef BF16
	float v[16];
	vstore16(x, 0, v);
	for (int i = 0; i < 16; i++)
		v[i] = operand(v[i]);
	x = vload16(0, v);
#endif
	return x;
}

// The elements of a and b, alternating.
INLINE float16 in_turns(const float8 a, const float8 b)
{
	return (float16)(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3, a.s4, b.s4, a.s5, b.s5, a.s6, b.s6, a.s7, b.s7);
}

// The transpose of 16 rows. The place of an element has eight bits: the bits of its row and the bits of its column. A
// round rotates them by one bit.
INLINE void transpose(float16 x[16])
{
	#pragma unroll
	for (int round = 0; round < 4; round++) {
		float16 y[16];
		#pragma unroll
		for (int i = 0; i < 8; i++) {
			y[2 * i] = in_turns(x[i].lo, x[i + 8].lo);
			y[2 * i + 1] = in_turns(x[i].hi, x[i + 8].hi);
		}
		#pragma unroll
		for (int i = 0; i < 16; i++)
			x[i] = y[i];
	}
}

// Half a panel of 16 terms of op(B), in rows of terms: element (t, j) is b[t·rows + j·columns], one of the two strides
// is 1. Elements beyond `terms` and n are zero.
INLINE void load_half(float16 x[16], const global void *b, const int bf16, const long rows, const long columns, const int terms, const int n)
{
	const bool turned = rows == 1;
	const long ld = turned ? columns : rows;
	const int lines = turned ? n : terms, elements = turned ? terms : n; // as they are stored
	if (lines >= 16 && elements >= 16 && !bf16)
		#pragma unroll
		for (int i = 0; i < 16; i++)
			x[i] = vload16(0, (const global float *)b + i * ld);
	else
		#pragma unroll
		for (int i = 0; i < 16; i++)
			x[i] = i < lines ? load_numbers(MOVE(b, bf16, i * ld), bf16, 0, elements) : 0;
	if (turned)
		transpose(x);
	#pragma unroll
	for (int i = 0; i < 16; i++)
		x[i] = operands(x[i]);
}

// panels[matrix][panel][term][PANEL] = op(B), starting at a column: a work-item has STRIP terms of a panel. Dimension 0
// is the strip, 1 the panel, 2 the matrix. With counts, matrices of groups without rows are skipped.
kernel void pack_panels(MEMORY(float, panels), TYPED(const void, b), MEMORY(const int, counts), const int column, const int n, const int k, const long b_rows,
	const long b_columns, const long b_stack)
{
	LOCATE(panels), LOCATE_TYPED(b), LOCATE(counts);
	if (GIVEN(counts) && counts[get_group_id(2)] == 0)
		return;
	const int first = STRIP * get_group_id(0), at = column + PANEL * get_group_id(1), terms = min(STRIP, k - first);
	const size_t panel = get_group_id(2) * get_num_groups(1) + get_group_id(1);
	panels += (panel * k + first) * PANEL;
	b = MOVE(b, b_bf16, get_group_id(2) * b_stack + first * b_rows + at * b_columns);
	for (int side = 0; side < PANEL; side += 16) {
		float16 x[16];
		load_half(x, MOVE(b, b_bf16, side * b_columns), b_bf16, b_rows, b_columns, terms, n - at - side);
		for (int t = 0; t < terms; t++)
			vstore16(x[t], 0, panels + t * PANEL + side);
	}
}

// The rows of a tile, from A on; beyond the last, the last again. The sums are in left and right, 16 columns each, from zero on.
#define SUMS(name, space) \
INLINE void name(float16 left[ROWS], float16 right[ROWS], const global float *a, const long a_rows, const long a_columns, \
	const int rows, const space float *panel, const long terms) \
{ \
	const global float *row[ROWS]; \
	_Pragma("unroll") \
	for (int r = 0; r < ROWS; r++) { \
		row[r] = a + min(r, rows - 1) * a_rows; \
		left[r] = right[r] = 0; \
	} \
	for (long t = 0; t < terms; t++) { \
		const float16 x = vload16(2 * t, panel), y = vload16(2 * t + 1, panel); \
		_Pragma("unroll") \
		for (int r = 0; r < ROWS; r++) { \
			const float16 v = row[r][t * a_columns]; \
			left[r] = fma(v, x, left[r]); \
			right[r] = fma(v, y, right[r]); \
		} \
	} \
}
SUMS(sums, global)
SUMS(local_sums, local)

// Elements i, … of the n of x become v, or with accumulate the sum of both.
INLINE void store_sum(global void *x, const int bf16, const int i, const int n, const float16 v, const int accumulate)
{
	store_numbers(x, bf16, i, n, accumulate ? load_numbers(x, bf16, i, n) + v : v);
}

// Writes the tile to c, which has n more columns.
INLINE void store_sums(global void *c, const int bf16, const long ldc, const float16 left[ROWS], const float16 right[ROWS], const int rows,
	const int n, const int accumulate)
{
	#pragma unroll
	for (int r = 0; r < ROWS; r++)
		if (r < rows) {
			global void *to = MOVE(c, bf16, r * ldc);
			store_sum(to, bf16, 0, n, left[r], accumulate);
			if (n > 16)
				store_sum(to, bf16, 16, n, right[r], accumulate);
		}
}

kernel void multiply_registers(TYPED(void, c), MEMORY(const float, a), MEMORY(const float, panels), MEMORY(const int, tiles), MEMORY(const int, starts),
	const int column, const int m, const int n, const int k, const long a_rows, const long a_columns, const long ldc, const int accumulate)
{
	LOCATE_TYPED(c), LOCATE(a), LOCATE(panels), LOCATE(tiles), LOCATE(starts);
	// With tiles, panels are dimension 0: the rows of a tile and the matrix of its group stay in the caches, while all panels have their turn. Without,
	// they are dimension 1: a panel stays there.
	const bool tiled = GIVEN(tiles);
	const int down = get_group_id(tiled ? 1 : 0), across = get_group_id(tiled ? 0 : 1);
	const part p = part_of(down, tiles, tiled, starts, GIVEN(starts), ROWS, m, k);
	if (p.rows <= 0 || accumulate && p.terms <= 0)
		return;
	const size_t panel = (tiled ? p.group * get_num_groups(0) : 0) + across;
	const int j = column + PANEL * across;
	float16 left[ROWS], right[ROWS];
	sums(left, right, a + p.row * a_rows + p.first * a_columns, a_rows, a_columns, p.rows, panels + (panel * k + p.first) * PANEL, p.terms);
	c = MOVE(c, c_bf16, (GIVEN(starts) ? (size_t)p.group * m * n : 0) + p.row * ldc + j);
	store_sums(c, c_bf16, ldc, left, right, p.rows, n - j, accumulate);
}

// Groups of rows with few terms: a work-item has a panel of the group's matrix in local memory, and multiplies up to
// `band` rows of the group by it. Dimension 0 is the band, 1 the panel, 2 the group. A is rounded, and its rows are
// contiguous.
kernel void multiply_groups(TYPED(void, c), MEMORY(const float, a), TYPED(const void, b), MEMORY(const int, starts), const int band, const int n, const int k,
	const long a_rows, const long b_rows, const long b_columns, const long b_stack, const long ldc, const int accumulate, local float *panel)
{
	LOCATE_TYPED(c), LOCATE(a), LOCATE_TYPED(b), LOCATE(starts);
	const int group = get_group_id(2), first = starts[group] + band * (int)get_group_id(0), last = min(starts[group + 1], first + band);
	if (first >= last || accumulate && k == 0)
		return;
	const int j = PANEL * get_group_id(1);
	b = MOVE(b, b_bf16, group * b_stack + j * b_columns);
	for (int t = 0; t < k; t += STRIP)
		for (int side = 0; side < PANEL; side += 16) {
			float16 x[16];
			load_half(x, MOVE(b, b_bf16, t * b_rows + side * b_columns), b_bf16, b_rows, b_columns, k - t, n - j - side);
			#pragma unroll
			for (int i = 0; i < STRIP; i++)
				vstore16(x[i], 0, panel + (t + i) * PANEL + side); // up to a whole strip
		}
	for (int row = first; row < last; row += ROWS) {
		float16 left[ROWS], right[ROWS];
		local_sums(left, right, a + row * a_rows, a_rows, 1, last - row, panel, k);
		store_sums(MOVE(c, c_bf16, row * ldc + j), c_bf16, ldc, left, right, last - row, n - j, accumulate);
	}
}

#else

// The sum of matrices that follow each other in memory, in their order. A work-item has four columns of a row.
kernel void add_chains(TYPED(void, c), MEMORY(const float, x), const int matrices, const int m, const int n, const long ldc, const int accumulate)
{
	LOCATE_TYPED(c), LOCATE(x);
	const int quads = (n + 3) / 4, row = get_global_id(0) / quads, j = 4 * (get_global_id(0) % quads);
	if (row >= m)
		return;
	const size_t each = (size_t)m * n;
	c = MOVE(c, c_bf16, row * ldc + j);
	x += row * (size_t)n + j;
	if (!c_bf16 && n % 4 == 0 && ((ulong)c & 15) == 0 && ((ulong)x & 15) == 0) {
		float4 sum = accumulate ? *(const global float4 *)c + *(const global float4 *)x : *(const global float4 *)x;
		for (int g = 1; g < matrices; g++)
			sum += *(const global float4 *)(x + g * each);
		*(global float4 *)c = sum;
		return;
	}
	for (int i = 0; i < 4 && j + i < n; i++) {
		const float old = accumulate ? load_numbers(c, c_bf16, i, n) : 0;
		float sum = accumulate && !c_bf16 ? old + x[i] : x[i];
		for (int g = 1; g < matrices; g++)
			sum += x[g * each + i];
		store_numbers(c, c_bf16, i, n, accumulate && c_bf16 ? old + sum : sum);
	}
}

// 64 work-items have SIDE × SIDE elements of C, each 8 × 8 of them: rows and columns 4·y … 4·y+3 and 32 + 4·y …, with y of 8. DEPTH terms of
// A and B at a time are in local memory, zeros beyond their edges. With a length of chains, dimension 2 is the chain, and each has its own matrix C.
#define SIDE 64
#define DEPTH 16
#define LINE (SIDE + 4)

// The item's four numbers of each part of a tile: they lie side by side in memory, in rows if `along` is 1, else in terms. Beyond the edges they are zero.
#define QUAD(i) (64 * (i) + (int)get_local_id(0))
#define QUAD_ROW(i, along) (along == 1 ? 4 * (QUAD(i) % 16) : QUAD(i) / 4)
#define QUAD_TERM(i, along) (along == 1 ? QUAD(i) / 16 : 4 * (QUAD(i) % 4))

INLINE void load_tile(float4 v[4], const global void *x, const int bf16, const long along, const long terms, const int size, const int depth)
{
	#pragma unroll
	for (int i = 0; i < 4; i++) {
		const int at = QUAD_ROW(i, along), d = QUAD_TERM(i, along);
		const int there = along == 1 ? d < depth ? size - at : 0 : at < size ? depth - d : 0;
		if (bf16) {
			const global ushort *from = (const global ushort *)x + at * along + d * terms;
			ushort4 h;
			if (there >= 4 && ((ulong)from & 7) == 0)
				h = *(const global ushort4 *)from;
			else
				h = (ushort4)(there > 0 ? from[0] : 0, there > 1 ? from[1] : 0, there > 2 ? from[2] : 0, there > 3 ? from[3] : 0);
			v[i] = as_float4(convert_uint4(h) << 16);
			continue;
		}
		const global float *from = (const global float *)x + at * along + d * terms;
		if (there >= 4 && ((ulong)from & 15) == 0)
			v[i] = *(const global float4 *)from;
		else
			v[i] = (float4)(there > 0 ? from[0] : 0, there > 1 ? from[1] : 0, there > 2 ? from[2] : 0, there > 3 ? from[3] : 0);
	}
}

INLINE void fill_tile(local float (*tile)[LINE], const float4 v[4], const long along)
{
	#pragma unroll
	for (int i = 0; i < 4; i++) {
		const int at = QUAD_ROW(i, along), d = QUAD_TERM(i, along);
		const float4 x = (float4)(operand(v[i].x), operand(v[i].y), operand(v[i].z), operand(v[i].w));
		if (along == 1) {
			vstore4(x, 0, tile[d] + at);
		} else {
			tile[d][at] = x.x;
			tile[d + 1][at] = x.y;
			tile[d + 2][at] = x.z;
			tile[d + 3][at] = x.w;
		}
	}
}

INLINE void store_four(global void *to, const int bf16, const float4 v, const int n, const int accumulate)
{
	global float *c = to;
	if (bf16) {
		const float x[4] = {v.x, v.y, v.z, v.w};
		#pragma unroll
		for (int i = 0; i < 4; i++)
			store_numbers(to, 1, i, n, accumulate ? load_numbers(to, 1, i, n) + x[i] : x[i]);
		return;
	}
	if (n >= 4) {
		vstore4(accumulate ? vload4(0, c) + v : v, 0, c);
		return;
	}
	if (n > 0)
		c[0] = accumulate ? c[0] + v.x : v.x;
	if (n > 1)
		c[1] = accumulate ? c[1] + v.y : v.y;
	if (n > 2)
		c[2] = accumulate ? c[2] + v.z : v.z;
}

INLINE void store_row(global void *c, const int bf16, const float8 v, const bool is, const int x, const int n, const int accumulate)
{
	if (is) {
		store_four(MOVE(c, bf16, x), bf16, v.lo, n - x, accumulate);
		store_four(MOVE(c, bf16, x + 32), bf16, v.hi, n - x - 32, accumulate);
	}
}

// A tile is loaded while the one before it is multiplied, where an item has registers for that.
#ifdef cl_intel_required_subgroup_size
#define AHEAD 0
#else
#define AHEAD 1
#endif

#ifdef cl_intel_required_subgroup_size
__attribute__((intel_reqd_sub_group_size(16))) // in sub-groups of 32 Intel's compiler has too few registers for an item
#endif
kernel __attribute__((reqd_work_group_size(64, 1, 1)))
void multiply_shared(TYPED(void, c), MEMORY(const float, a), TYPED(const void, b), MEMORY(const int, tiles), MEMORY(const int, starts),
	const int m, const int n, const int k, const long a_rows, const long a_columns, const long b_rows, const long b_columns, const long b_stack, const long ldc,
	const int accumulate, const int chain)
{
	local float __attribute__((aligned(16))) left[DEPTH][LINE], right[DEPTH][LINE];
	LOCATE_TYPED(c), LOCATE(a), LOCATE_TYPED(b), LOCATE(tiles), LOCATE(starts);
	part p = part_of(get_group_id(0), tiles, GIVEN(tiles), starts, GIVEN(starts), SIDE, m, k);
	if (chain > 0)
		p.first = chain * (int)get_group_id(2), p.terms = min(chain, k - p.first);
	if (p.rows <= 0 || accumulate && p.terms <= 0)
		return;
	const int column = SIDE * get_group_id(1), y = 4 * (get_local_id(0) / 8), x = 4 * (get_local_id(0) % 8);
	a += p.row * a_rows + p.first * a_columns;
	b = MOVE(b, b_bf16, (GIVEN(tiles) ? p.group * b_stack : p.first * b_rows) + column * b_columns);
	c = MOVE(c, c_bf16, (GIVEN(starts) || chain > 0 ? get_group_id(2) * m * n : 0) + p.row * ldc + column);
	float8 sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}; // indexed by constants alone: so it stays in registers
	float4 next_left[4], next_right[4];
#define LOAD(t) \
	load_tile(next_left, a + (t) * a_columns, 0, a_rows, a_columns, p.rows, p.terms - (t)); \
	load_tile(next_right, MOVE(b, b_bf16, (t) * b_rows), b_bf16, b_columns, b_rows, n - column, p.terms - (t))
	if (AHEAD) {
		LOAD(0);
	}
	for (int t = 0; t < p.terms; t += DEPTH) {
		if (!AHEAD) {
			LOAD(t);
		}
		fill_tile(left, next_left, a_rows);
		fill_tile(right, next_right, b_columns);
		barrier(CLK_LOCAL_MEM_FENCE);
		if (AHEAD && t + DEPTH < p.terms) {
			LOAD(t + DEPTH);
		}
		#pragma unroll 4
		for (int d = 0; d < DEPTH; d++) {
			const float8 v = (float8)(vload4(0, left[d] + y), vload4(0, left[d] + y + 32)), w = (float8)(vload4(0, right[d] + x), vload4(0, right[d] + x + 32));
			sum[0] = fma((float8)v.s0, w, sum[0]);
			sum[1] = fma((float8)v.s1, w, sum[1]);
			sum[2] = fma((float8)v.s2, w, sum[2]);
			sum[3] = fma((float8)v.s3, w, sum[3]);
			sum[4] = fma((float8)v.s4, w, sum[4]);
			sum[5] = fma((float8)v.s5, w, sum[5]);
			sum[6] = fma((float8)v.s6, w, sum[6]);
			sum[7] = fma((float8)v.s7, w, sum[7]);
		}
		barrier(CLK_LOCAL_MEM_FENCE);
	}
#define STORE(i) store_row(MOVE(c, c_bf16, (y + ROW(i)) * ldc), c_bf16, sum[i], y + ROW(i) < p.rows, x, n - column, accumulate)
#define ROW(i) (i % 4 + 32 * (i / 4))
	STORE(0);
	STORE(1);
	STORE(2);
	STORE(3);
	STORE(4);
	STORE(5);
	STORE(6);
	STORE(7);
}

#endif
