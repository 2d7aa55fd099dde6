// What stands before the kernels of each file. Given by Go: GROUP, the work-items that share a row (1 on a processor); PROCESSOR, if one work-item
// does alone what a group shares on a GPU; FP64, if there are doubles; BF16, if products round their operands.

#ifdef FP64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
#pragma OPENCL FP_CONTRACT OFF // what is fused says fma

// C99 emits no code for a function that is only inline: where AMD's compiler does not inline it, its linker fails. A
// function that gets a kernel's local array is neither inline nor static: see norm.cl.
#define INLINE static inline __attribute__((always_inline))

// The parameters of memory: a buffer, and the element at which the memory begins. LOCATE(x); makes x point to it; it stands first in a kernel, of
// optional memory behind GIVEN(x).
#define MEMORY(type, x) global type *x, const ulong x##_at
#define NONE 0xfffffffffffffffful
#define GIVEN(x) (x##_at != NONE)
#define LOCATE(x) (x += x##_at)

// The parameters of memory of float or, if x_bf16 is set, of bfloat16. MOVE(x, bf16, n) is the address of its element n.
#define TYPED(type, x) global type *x, const ulong x##_at, const int x##_bf16
#define MOVE(x, bf16, n) ((bf16) ? (global void *)((global ushort *)(x) + (n)) : (global void *)((global float *)(x) + (n)))
#define LOCATE_TYPED(x) (x = MOVE(x, x##_bf16, x##_at))

// The item within its group, from 0 to GROUP - 1: for (int i = ITEM; i < width; i += GROUP).
#if GROUP > 1
#define ITEM ((int)get_local_id(0))
#else
#define ITEM 0
#endif

// The sum or the largest of the group's values, for all its work-items, in an order of their numbers alone. part is local float[GROUP].
float group_sum(float v, local float *part)
{
#if GROUP > 1
	barrier(CLK_LOCAL_MEM_FENCE);
	part[ITEM] = v;
	for (int n = GROUP / 2; n > 0; n /= 2) {
		barrier(CLK_LOCAL_MEM_FENCE);
		if (ITEM < n)
			part[ITEM] += part[ITEM + n];
	}
	barrier(CLK_LOCAL_MEM_FENCE);
	v = part[0];
#endif
	return v;
}

float group_max(float v, local float *part)
{
#if GROUP > 1
	barrier(CLK_LOCAL_MEM_FENCE);
	part[ITEM] = v;
	for (int n = GROUP / 2; n > 0; n /= 2) {
		barrier(CLK_LOCAL_MEM_FENCE);
		if (ITEM < n)
			part[ITEM] = fmax(part[ITEM], part[ITEM + n]);
	}
	barrier(CLK_LOCAL_MEM_FENCE);
	v = part[0];
#endif
	return v;
}

// group_sum of whole numbers.
int group_sum_int(int v, local int *part)
{
#if GROUP > 1
	barrier(CLK_LOCAL_MEM_FENCE);
	part[ITEM] = v;
	for (int n = GROUP / 2; n > 0; n /= 2) {
		barrier(CLK_LOCAL_MEM_FENCE);
		if (ITEM < n)
			part[ITEM] += part[ITEM + n];
	}
	barrier(CLK_LOCAL_MEM_FENCE);
	v = part[0];
#endif
	return v;
}

// An operand as a product takes it: in bf16 rounded to the nearest, ties to even; a denormal number is zero, a NaN stays one. Not INLINE: with
// that, Intel's compiler has too few registers in attend_grad_keys.
float operand(const float x)
{
#ifdef BF16
	const uint u = as_uint(x), size = u & 0x7fffffffu;
	const uint rounded = size > 0x7f800000u ? u | 0x400000u : size < 0x800000u ? u & 0x80000000u : u + 0x7fffu + (u >> 16 & 1u);
	return as_float(rounded & 0xffff0000u);
#else
	return x;
#endif
}

// Lanes: the elements that a work-item takes at once. On a GPU it is one, and the items of a group lie side by side in memory; on a processor they are
// a vector, as its compiler makes none of loops with functions in them.
//
//	for (int i = LANES * ITEM; i < width; i += LANES * GROUP)
//		store_lanes(y, i, width, exp(load_lanes(x, i, width, 0)));
//
// Loops that wait for one load after the other do DEEP of them at a time.
#define DEEP 4

#ifdef PROCESSOR
#define LANES 16
typedef float16 lanes;
typedef uint16 lane_bits;
typedef ushort16 lane_halves;
#define as_lanes(u) as_float16(u)
#define as_lane_bits(v) as_uint16(v)
#define to_lane_bits(h) convert_uint16(h)
#define to_lane_halves(u) convert_ushort16(u)

// Elements i, i+1, … of the n of x; what is beyond them is fill.
static lanes load_lanes(const global float *x, int i, int n, float fill)
{
	if (n - i >= LANES)
		return vload16(0, x + i);
	float y[LANES];
	for (int j = 0; j < LANES; j++)
		y[j] = i + j < n ? x[i + j] : fill;
	return vload16(0, y);
}

static void store_lanes(global float *x, int i, int n, lanes v)
{
	if (n - i >= LANES) {
		vstore16(v, 0, x + i);
		return;
	}
	float y[LANES];
	vstore16(v, 0, y);
	for (int j = 0; i + j < n; j++)
		x[i + j] = y[j];
}

static float lanes_sum(lanes v)
{
	const float8 a = v.lo + v.hi;
	const float4 b = a.lo + a.hi;
	return (b.x + b.z) + (b.y + b.w);
}

static float lanes_max(lanes v)
{
	const float8 a = fmax(v.lo, v.hi);
	const float4 b = fmax(a.lo, a.hi);
	return fmax(fmax(b.x, b.z), fmax(b.y, b.w));
}

static lane_halves load_halves(const global ushort *x, int i, int n)
{
	if (n - i >= LANES)
		return vload16(0, x + i);
	ushort y[LANES];
	for (int j = 0; j < LANES; j++)
		y[j] = i + j < n ? x[i + j] : 0;
	return vload16(0, y);
}

static void store_halves(global ushort *x, int i, int n, lane_halves v)
{
	if (n - i >= LANES) {
		vstore16(v, 0, x + i);
		return;
	}
	ushort y[LANES];
	vstore16(v, 0, y);
	for (int j = 0; i + j < n; j++)
		x[i + j] = y[j];
}

#define any_lane(c) any(c)
#else
#define LANES 1
typedef float lanes;
typedef uint lane_bits;
typedef ushort lane_halves;
#define as_lanes(u) as_float(u)
#define as_lane_bits(v) as_uint(v)
#define to_lane_bits(h) ((uint)(h))
#define to_lane_halves(u) ((ushort)(u))

static lanes load_lanes(const global float *x, int i, int n, float fill) { return i < n ? x[i] : fill; }

static void store_lanes(global float *x, int i, int n, lanes v)
{
	if (i < n)
		x[i] = v;
}

static float lanes_sum(lanes v) { return v; }
static float lanes_max(lanes v) { return v; }

static lane_halves load_halves(const global ushort *x, int i, int n) { return i < n ? x[i] : 0; }

static void store_halves(global ushort *x, int i, int n, lane_halves v)
{
	if (i < n)
		x[i] = v;
}

#define any_lane(c) (c)
#endif

// Numbers as bfloat16, by the definition of xpu.BF16, in the lower halves of words.
static lane_bits round_lanes(const lanes x)
{
	const lane_bits u = as_lane_bits(x), size = u & 0x7fffffffu;
	lane_bits rounded = u + 0x7fffu + (u >> 16 & 1u);
	rounded = select(rounded, u & 0x80000000u, size < 0x800000u);
	rounded = select(rounded, u | 0x400000u, size > 0x7f800000u);
	return rounded >> 16;
}

// load_lanes and store_lanes for memory of either type. Elements beyond the last are zero.
static lanes load_numbers(const global void *x, const int bf16, const int i, const int n)
{
	if (bf16)
		return as_lanes(to_lane_bits(load_halves((const global ushort *)x, i, n)) << 16);
	return load_lanes((const global float *)x, i, n, 0);
}

static void store_numbers(global void *x, const int bf16, const int i, const int n, const lanes v)
{
	if (bf16)
		store_halves((global ushort *)x, i, n, to_lane_halves(round_lanes(v)));
	else
		store_lanes((global float *)x, i, n, v);
}
