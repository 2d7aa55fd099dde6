// What products of pvc.cl and pvc_direct.cl share: the tiles of work-groups, the plan of groups, and the writes to C.

// A work-group is HIGH × SIDE sub-groups: HIGH from top to bottom, SIDE side by side. pvc_direct.cl may be compiled with another HIGH.
#define SIDE 4
#ifndef HIGH
#define HIGH 4
#endif
#define SUBGROUP_COUNT (HIGH * SIDE)
#define AHEAD 4 // steps from a prefetch to its use

// A number of bfloat16 in memory becomes x, or with accumulate the sum of both.
static void store_sum(global ushort *c, const float x, const int accumulate)
{
	store_numbers(c, 1, 0, 1, accumulate ? load_numbers(c, 1, 0, 1) + x : x);
}

// store_block for C of bfloat16.
inline void store_rounded(global ushort *c, const size_t ld, c_block x, const int rows, const int columns, const int accumulate)
{
#ifdef EMULATED
	for (int l = 0; l < min(columns, 16); l++)
		for (int i = 0; i < min(rows, 8); i++)
			store_sum(c + i * ld + l, x.lane[l][i], accumulate);
#else
	const int lane = get_sub_group_local_id();
	if (lane < columns) {
		#pragma unroll
		for (int i = 0; i < 8; i++)
			if (i < rows)
				store_sum(c + i * ld + lane, x[i], accumulate);
	}
#endif
}

// A plan has the first row, panel of 32 rows, step of 16 rows (each group has an even number of steps), and band of each group, and then their ends. A band
// is the rows of a work-group. Without counts there is one group of all rows.
#define ROW(plan, groups) (plan)
#define PANEL(plan, groups) ((plan) + (groups) + 1)
#define TERMS(plan, groups) ((plan) + 2 * ((groups) + 1))
#define BAND(plan, groups) ((plan) + 3 * ((groups) + 1))

// Writes a tile of rows × columns elements of C. All loops over blocks are unrolled and their indices are constants:
// otherwise blocks are kept in memory.
inline void store_tile(global void *c, const int bf16, const size_t ld, const c_block sum[4][4], const int rows, const int columns, const int accumulate)
{
	if (bf16) {
		#pragma unroll
		for (int i = 0; i < 4; i++)
			#pragma unroll
			for (int j = 0; j < 4; j++)
				store_rounded((global ushort *)c + 8 * i * ld + 16 * j, ld, sum[i][j], rows - 8 * i, columns - 16 * j, accumulate);
		return;
	}
	#pragma unroll
	for (int i = 0; i < 4; i++)
		#pragma unroll
		for (int j = 0; j < 4; j++)
			store_block((global float *)c + 8 * i * ld + 16 * j, ld, sum[i][j], rows - 8 * i, columns - 16 * j, accumulate);
}
