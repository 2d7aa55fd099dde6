// Routing works on blocks of this number of tokens, a multiple of 32; also in router.go.
#define TOKENS 64

// The softmax of a token's logits [experts]: probs, and its lse and entropy.
static void softmax(global float *probs, global float *lse, global float *entropy, const global float *logits, const int experts, local float *part)
{
	float top = -FLT_MAX;
	for (int i = LANES * ITEM; i < experts; i += LANES * GROUP)
		top = fmax(top, lanes_max(load_lanes(logits, i, experts, -FLT_MAX)));
	top = group_max(top, part);
	lanes sums = 0;
	for (int i = LANES * ITEM; i < experts; i += LANES * GROUP) {
		const lanes e = exp(load_lanes(logits, i, experts, -INFINITY) - top);
		store_lanes(probs, i, experts, e);
		sums += e;
	}
	const float sum = group_sum(lanes_sum(sums), part), share = 1 / sum, shift = top + log(sum);
	lanes products = 0;
	for (int i = LANES * ITEM; i < experts; i += LANES * GROUP) {
		const lanes p = load_lanes(probs, i, experts, 0) * share;
		store_lanes(probs, i, experts, p);
		products += p * load_lanes(logits, i, experts, 0);
	}
	const float product = group_sum(lanes_sum(products), part);
	if (ITEM == 0) {
		*lse = shift;
		*entropy = shift - product; // -ln p = lse - z
	}
}

// The sigmoids of a token's logits [experts]: probs, their sum, and the entropy of probs divided by the sum.
static void sigmoids(global float *probs, global float *total, global float *entropy, const global float *logits, const int experts, local float *part)
{
	float sum = 0, logs = 0;
	for (int e = ITEM; e < experts; e += GROUP) {
		const float p = 1 / (1 + exp(-logits[e]));
		probs[e] = p;
		sum += p;
		logs += p > 0 ? p * log(p) : 0;
	}
	sum = group_sum(sum, part);
	logs = group_sum(logs, part);
	if (ITEM == 0) {
		*total = sum;
		*entropy = log(sum) - logs / sum;
	}
}

// A whole number with the order of a float; and the float of that number. NaN also has a place in the order.
static uint ordered(const float v)
{
	const uint u = as_uint(v);
	return u & 0x80000000 ? ~u : u | 0x80000000;
}

static float unordered(const uint u)
{
	return as_float(u & 0x80000000 ? u & 0x7fffffff : ~u);
}

// The number of elements of order [n] before element i, by size and then by number.
static int rank_of(const local uint *order, const int n, const int i)
{
	const uint own = order[i];
	int rank = 0;
	for (int j = 0; j < i; j++)
		rank += order[j] >= own;
	for (int j = i + 1; j < n; j++)
		rank += order[j] > own;
	return rank;
}

// Experts outside of the best topGroups of the groups become last in the order. values [groups] is memory.
static void limit_groups(local uint *order, local uint *values, const int experts, const int groups, const int topGroups, const int sumOfTwo)
{
	const int size = experts / groups;
	for (int g = ITEM; g < groups; g += GROUP) {
		uint first = 0, second = 0;
		for (int i = g * size; i < (g + 1) * size; i++) {
			const uint v = order[i];
			second = v > first ? first : max(second, v);
			first = max(first, v);
		}
		values[g] = sumOfTwo ? ordered(unordered(first) + unordered(second)) : first;
	}
	barrier(CLK_LOCAL_MEM_FENCE);
	for (int g = ITEM; g < groups; g += GROUP) {
		const bool chosen = rank_of(values, groups, g) < topGroups;
		for (int i = g * size; i < (g + 1) * size; i++)
			order[i] = chosen ? max(order[i], 1u) : 0;
	}
	barrier(CLK_LOCAL_MEM_FENCE);
}

// The logits [experts] of a token become its scores probs, lse and entropy; chosen [perToken] are its experts.
//
// The rank of an expert is the number of experts before it, by score plus bias and then by number. So NaN also has a
// rank from 0 to experts - 1. order has experts + groups elements.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void route(MEMORY(float, probs), MEMORY(float, lse), MEMORY(int, chosen), MEMORY(float, entropy), MEMORY(const float, logits), MEMORY(const float, bias),
	const int experts, const int perToken, const int sigmoid, const int groups, const int topGroups, const int sumOfTwo, const int uniform,
	local uint *order)
{
	LOCATE(probs), LOCATE(lse), LOCATE(chosen), LOCATE(entropy), LOCATE(logits), LOCATE(bias);
	local float part[GROUP];
	const size_t token = get_group_id(0);
	probs += token * experts;
	chosen += token * perToken;
	if (sigmoid)
		sigmoids(probs, lse + token, entropy + token, logits + token * experts, experts, part);
	else
		softmax(probs, lse + token, entropy + token, logits + token * experts, experts, part);
	if (uniform) {
		for (int j = ITEM; j < perToken; j += GROUP)
			chosen[j] = (token * perToken + j) % experts;
		return;
	}
	barrier(CLK_GLOBAL_MEM_FENCE);
	for (int e = ITEM; e < experts; e += GROUP)
		order[e] = ordered(GIVEN(bias) ? probs[e] + bias[e] : probs[e]);
	barrier(CLK_LOCAL_MEM_FENCE);
	if (groups > 1)
		limit_groups(order, order + experts, experts, groups, topGroups, sumOfTwo);
	for (int e = ITEM; e < experts; e += GROUP) {
		const int rank = rank_of(order, experts, e);
		if (rank < perToken)
			chosen[rank] = e;
	}
}

// How often each expert was chosen by the tokens of a block: counts [blocks, experts].
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void count_choices(MEMORY(int, counts), MEMORY(const int, chosen), const int tokens, const int perToken, const int experts, local int *count)
{
	LOCATE(counts), LOCATE(chosen);
	const size_t first = TOKENS * get_group_id(0);
	counts += get_group_id(0) * experts;
	chosen += first * perToken;
	const int choices = min((size_t)TOKENS, tokens - first) * perToken;
	for (int e = ITEM; e < experts; e += GROUP)
		count[e] = 0;
	barrier(CLK_LOCAL_MEM_FENCE);
	for (int i = ITEM; i < choices; i += GROUP)
#if GROUP > 1
		atomic_inc(&count[chosen[i]]); // of whole numbers: in any order the same
#else
		count[chosen[i]]++;
#endif
	barrier(CLK_LOCAL_MEM_FENCE);
	for (int e = ITEM; e < experts; e += GROUP)
		counts[e] = count[e];
}

// Sums over the tokens of a block: of the experts' parts of the distribution, of the squared lse (without sigmoid), of the entropy: sums [blocks, experts + 2].
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void route_sums(MEMORY(float, sums), MEMORY(const float, probs), MEMORY(const float, lse), MEMORY(const float, entropy), const int tokens, const int experts, const int sigmoid)
{
	LOCATE(sums), LOCATE(probs), LOCATE(lse), LOCATE(entropy);
	local float part[GROUP];
	const size_t first = TOKENS * get_group_id(0);
	const int n = min((size_t)TOKENS, tokens - first);
	sums += get_group_id(0) * (experts + 2);
	probs += first * experts;
	for (int i = LANES * ITEM; i < experts; i += LANES * GROUP) {
		lanes sum = 0;
		for (int t = 0; t < n; t++)
			sum += sigmoid ? load_lanes(probs + t * experts, i, experts, 0) / lse[first + t] : load_lanes(probs + t * experts, i, experts, 0);
		store_lanes(sums, i, experts, sum);
	}
	float squares = 0, entropies = 0;
	for (int t = ITEM; t < n; t += GROUP) {
		squares += sigmoid ? 0 : lse[first + t] * lse[first + t];
		entropies += entropy[first + t];
	}
	squares = group_sum(squares, part);
	entropies = group_sum(entropies, part);
	if (ITEM == 0) {
		sums[experts] = squares;
		sums[experts + 1] = entropies;
	}
}

// The sum of each column of sums [blocks, experts + 2], and of counts [blocks, experts]: totals [experts + 2 +
// experts], whose last elements are the counts, which are also written to all.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void route_totals(MEMORY(float, totals), MEMORY(int, all), MEMORY(const float, sums), MEMORY(const int, counts), const int blocks, const int experts)
{
	LOCATE(totals), LOCATE(all), LOCATE(sums), LOCATE(counts);
	local float part[GROUP];
	local int partCount[GROUP];
	const int column = get_group_id(0);
	float sum = 0, lost = 0; // what rounding has added too much
	for (size_t b = ITEM; b < blocks; b += GROUP) {
		const float v = sums[b * (experts + 2) + column] - lost, next = sum + v;
		lost = (next - sum) - v;
		sum = next;
	}
	sum = group_sum(sum, part);
	if (ITEM == 0)
		totals[column] = sum;
	if (column >= experts)
		return;
	int count = 0;
	for (size_t b = ITEM; b < blocks; b += GROUP)
		count += counts[b * experts + column];
	count = group_sum_int(count, partCount);
	if (ITEM == 0) {
		((global int *)totals)[experts + 2 + column] = count;
		all[column] = count;
	}
}

// counts [blocks, experts] become the first row of each expert's choices of each block, in the order of experts, then blocks. Group e has expert e; all
// are the counts of all blocks.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void first_rows(MEMORY(int, counts), MEMORY(const int, all), const int blocks, const int experts)
{
	LOCATE(counts), LOCATE(all);
	local int part[GROUP];
	const int expert = get_group_id(0);
	int before = 0; // rows of the experts before
	for (int e = ITEM; e < expert; e += GROUP)
		before += all[e];
	before = group_sum_int(before, part);
	const int each = (blocks + GROUP - 1) / GROUP, begin = min(blocks, each * ITEM), end = min(blocks, begin + each);
	int own = 0;
	for (int b = begin; b < end; b++)
		own += counts[(size_t)b * experts + expert];
	barrier(CLK_LOCAL_MEM_FENCE);
	part[ITEM] = own;
	barrier(CLK_LOCAL_MEM_FENCE);
	int row = before;
	for (int i = 0; i < ITEM; i++)
		row += part[i];
	for (int b = begin; b < end; b++) {
		const size_t at = (size_t)b * experts + expert;
		const int n = counts[at];
		counts[at] = row;
		row += n;
	}
}

// The sum of the scores of a token's experts, and epsilon; at least `least`.
static float selected(const global float *probs, const global int *chosen, const int perToken, const float epsilon, const float least)
{
	float sum = 0;
	for (int j = 0; j < perToken; j++)
		sum += probs[chosen[j]];
	return fmax(sum + epsilon, least);
}

// The routing weight of one of a token's experts.
static float share(const global float *probs, const global int *chosen, const int perToken, const int renormalize, const float epsilon, const float least,
	const float factor, const int expert)
{
	return (renormalize ? probs[expert] / selected(probs, chosen, perToken, epsilon, least) : probs[expert]) * factor;
}

// The rows of a block's choices: the rows of an expert follow each other in the order of tokens, starting at first
// [blocks, experts]. A token's bit in choosers [experts] is set if it has chosen the expert.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void sort_rows(MEMORY(int, rowOf), MEMORY(int, tokenOf), MEMORY(float, weight), MEMORY(const int, chosen), MEMORY(const float, probs), MEMORY(const int, first),
	const int tokens, const int perToken, const int experts, const int renormalize, const float epsilon, const float least, const float factor, local uint *choosers)
{
	LOCATE(rowOf), LOCATE(tokenOf), LOCATE(weight), LOCATE(chosen), LOCATE(probs), LOCATE(first);
	const size_t begin = TOKENS * get_group_id(0);
	const int choices = min((size_t)TOKENS, tokens - begin) * perToken;
	first += get_group_id(0) * experts;
	chosen += begin * perToken;
	rowOf += begin * perToken;
#if GROUP == 1
	for (int e = 0; e < experts; e++)
		choosers[e] = first[e]; // the row of the next token that has chosen the expert
	for (int token = 0, i = 0; i < choices; token++)
		for (int j = 0; j < perToken; j++, i++) {
			const int expert = chosen[i], row = choosers[expert]++;
			rowOf[i] = row;
			tokenOf[row] = begin + token;
			weight[row] = share(probs + (begin + token) * experts, chosen + token * perToken, perToken, renormalize, epsilon, least, factor, expert);
		}
#else
	for (int i = ITEM; i < experts * TOKENS / 32; i += GROUP)
		choosers[i] = 0;
	barrier(CLK_LOCAL_MEM_FENCE);
	for (int i = ITEM; i < choices; i += GROUP) {
		const int token = i / perToken;
		atomic_or(&choosers[chosen[i] * (TOKENS / 32) + token / 32], 1u << token % 32);
	}
	barrier(CLK_LOCAL_MEM_FENCE);
	for (int i = ITEM; i < choices; i += GROUP) {
		const int token = i / perToken, expert = chosen[i];
		const local uint *words = choosers + expert * (TOKENS / 32);
		int row = first[expert] + popcount(words[token / 32] & ((1u << token % 32) - 1));
		for (int w = 0; w < token / 32; w++)
			row += popcount(words[w]);
		rowOf[i] = row;
		tokenOf[row] = begin + token;
		weight[row] = share(probs + (begin + token) * experts, chosen + token * perToken, perToken, renormalize, epsilon, least, factor, expert);
	}
#endif
}

// The gradient of a token's logits: slope and, for the chosen experts, the gradients of their weights, through the
// softmax, and the gradient of the squared lse; or through the sigmoids, and slope through the division by their sum.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void route_grad(MEMORY(float, dlogits), MEMORY(const float, probs), MEMORY(const float, lse), MEMORY(const int, chosen), MEMORY(const int, rowOf),
	MEMORY(const float, slope), MEMORY(const float, dweight), const int experts, const int perToken, const int slopeTokens, const float zFactor, const int renormalize,
	const float epsilon, const float least, const float factor, const int sigmoid, local float *gradient)
{
	LOCATE(dlogits), LOCATE(probs), LOCATE(lse), LOCATE(chosen), LOCATE(rowOf), LOCATE(slope), LOCATE(dweight);
	local float part[GROUP];
	const size_t token = get_group_id(0);
	slope += token / slopeTokens * experts;
	dlogits += token * experts;
	probs += token * experts;
	chosen += token * perToken;
	rowOf += token * perToken;
	float share = 1, along = 0;
	if (sigmoid) {
		for (int e = ITEM; e < experts; e += GROUP)
			along += probs[e] * slope[e];
		share = 1 / lse[token];
		along = group_sum(along, part) * share;
	}
	for (int e = ITEM; e < experts; e += GROUP)
		gradient[e] = (slope[e] - along) * share;
	barrier(CLK_LOCAL_MEM_FENCE);
	float scale = 1, mean = 0;
	if (renormalize) {
		const float sum = selected(probs, chosen, perToken, epsilon, least);
		scale = 1 / sum;
		for (int j = 0; j < perToken && (least == 0 || sum > least); j++)
			mean += probs[chosen[j]] * scale * dweight[rowOf[j]];
	}
	for (int j = ITEM; j < perToken; j += GROUP)
		gradient[chosen[j]] += (dweight[rowOf[j]] - mean) * scale * factor; // a token chooses no expert twice
	barrier(CLK_LOCAL_MEM_FENCE);
	if (sigmoid) {
		for (int e = ITEM; e < experts; e += GROUP)
			dlogits[e] = gradient[e] * probs[e] * (1 - probs[e]);
		return;
	}
	float product = 0;
	for (int e = ITEM; e < experts; e += GROUP)
		product += probs[e] * gradient[e];
	product = group_sum(product, part) - zFactor * lse[token];
	for (int e = ITEM; e < experts; e += GROUP)
		dlogits[e] = probs[e] * (gradient[e] - product);
}
