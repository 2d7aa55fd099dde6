// Kernels that measure a device, in OpenCL C 1.2. All matrices are row-major, of float.

// to[i] = i modulo period, less offset: whole numbers, whose small products are exact in any order.
kernel void pattern(global float *restrict to, const uint period, const float offset)
{
	const size_t i = get_global_id(0);
	to[i] = (float)(i % period) - offset;
}

// A work-item moves 16 bytes.
kernel void copy(global float4 *restrict to, const global float4 *restrict from)
{
	const size_t i = get_global_id(0);
	to[i] = from[i];
}

// C = A·B, of n columns and k terms. A work-item has 8 rows and 16 columns of C in registers; nothing is shared.
#define ROWS 8
kernel void product_registers(global float *restrict c, const global float *restrict a, const global float *restrict b, const int n, const int k)
{
	const size_t column = 16 * get_global_id(0), row = ROWS * get_global_id(1);
	float16 sum[ROWS];
	#pragma unroll
	for (int r = 0; r < ROWS; r++)
		sum[r] = 0;
	for (int t = 0; t < k; t++) {
		const float16 line = vload16(0, b + (size_t)t * n + column);
		#pragma unroll
		for (int r = 0; r < ROWS; r++)
			sum[r] = mad((float16)(a[(row + r) * k + t]), line, sum[r]);
	}
	#pragma unroll
	for (int r = 0; r < ROWS; r++)
		vstore16(sum[r], 0, c + (row + r) * n + column);
}

// C = A·B, of n columns and k terms, a multiple of 16. A group of 16 × 16 work-items has 64 × 64 elements of C, each item 4 × 4 of them; 16 terms
// of A and B at a time are in local memory. Items of one row of the group have columns side by side.
#define SIDE 64
#define DEPTH 16
kernel __attribute__((reqd_work_group_size(16, 16, 1)))
void product_shared(global float *restrict c, const global float *restrict a, const global float *restrict b, const int n, const int k)
{
	local float left[DEPTH][SIDE + 1], right[DEPTH][SIDE];
	const int x = get_local_id(0), y = get_local_id(1), item = 16 * y + x;
	const size_t column = (size_t)SIDE * get_group_id(0), row = (size_t)SIDE * get_group_id(1);
	float sum[4][4];
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int j = 0; j < 4; j++)
			sum[i][j] = 0;
	for (int t = 0; t < k; t += DEPTH) {
		#pragma unroll
		for (int i = 0; i < 4; i++) {
			const int at = 256 * i + item;
			left[at % DEPTH][at / DEPTH] = a[(row + at / DEPTH) * k + t + at % DEPTH];
			right[at / SIDE][at % SIDE] = b[(size_t)(t + at / SIDE) * n + column + at % SIDE];
		}
		barrier(CLK_LOCAL_MEM_FENCE);
		#pragma unroll
		for (int d = 0; d < DEPTH; d++) {
			float p[4], q[4];
			#pragma unroll
			for (int i = 0; i < 4; i++) {
				p[i] = left[d][y + 16 * i];
				q[i] = right[d][x + 16 * i];
			}
			#pragma unroll
			for (int i = 0; i < 4; i++)
				#pragma unroll
				for (int j = 0; j < 4; j++)
					sum[i][j] = mad(p[i], q[j], sum[i][j]);
		}
		barrier(CLK_LOCAL_MEM_FENCE);
	}
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int j = 0; j < 4; j++)
			c[(row + y + 16 * i) * n + column + x + 16 * j] = sum[i][j];
}
