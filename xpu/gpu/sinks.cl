// Sinks of an attention. A head of a token has one logsumexp, at [row][head][position], and `size` numbers of the context, at [token][head].
#define LSE_AT(token, head) ((token) / length * heads * length + (head) * length + (token) % length)

// Replaces the logsumexp of each head of a token by that with its sink. factors[token][head] is the share of the other scores.
kernel void sink_factors(MEMORY(float, lse), MEMORY(float, factors), MEMORY(const float, sinks), const int tokens, const int heads, const int length)
{
	LOCATE(lse), LOCATE(factors), LOCATE(sinks);
	const int i = get_global_id(0), token = i / heads, head = i % heads;
	if (token >= tokens)
		return;
	const float old = lse[LSE_AT(token, head)], sink = sinks[head];
	const float with = fmax(old, sink) + log1p(exp(-fabs(old - sink))); // NaN if one of them is
	lse[LSE_AT(token, head)] = with;
	factors[i] = exp(old - with);
}

// Multiplies the heads of a token by their factors.
kernel void scale_heads(TYPED(void, context), MEMORY(const float, factors), const int heads, const int size)
{
	LOCATE_TYPED(context), LOCATE(factors);
	const size_t token = get_group_id(0);
	factors += token * heads;
	context = MOVE(context, context_bf16, token * heads * size);
#ifdef PROCESSOR
	for (int head = 0; head < heads; head++) {
		global void *numbers = MOVE(context, context_bf16, head * size);
		for (int i = 0; i < size; i += LANES)
			store_numbers(numbers, context_bf16, i, size, load_numbers(numbers, context_bf16, i, size) * factors[head]);
	}
#else
	for (int i = ITEM; i < heads * size; i += GROUP)
		store_numbers(context, context_bf16, i, heads * size, load_numbers(context, context_bf16, i, heads * size) * factors[i / size]);
#endif
}

// Group (token, head) of the grid computes the term of a token in the gradient of a head's sink.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void sink_terms(MEMORY(float, terms), TYPED(const void, context), MEMORY(const float, dcontext), MEMORY(const float, lse), MEMORY(const float, sinks),
	const int heads, const int length, const int size)
{
	LOCATE(terms), LOCATE_TYPED(context), LOCATE(dcontext), LOCATE(lse), LOCATE(sinks);
	local float part[GROUP];
	const int token = get_group_id(0), head = get_group_id(1);
	const size_t at = ((size_t)token * heads + head) * size;
	context = MOVE(context, context_bf16, at);
	dcontext += at;
	lanes products = 0;
	for (int i = LANES * ITEM; i < size; i += LANES * GROUP)
		products += load_numbers(context, context_bf16, i, size) * load_lanes(dcontext, i, size, 0);
	const float sum = group_sum(lanes_sum(products), part);
	if (ITEM == 0)
		terms[head * get_num_groups(0) + token] = -exp(sinks[head] - lse[LSE_AT(token, head)]) * sum;
}

// Adds the terms of a head to the gradient of its sink.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void sinks_grad(TYPED(void, dsinks), MEMORY(const float, terms), const int tokens)
{
	LOCATE_TYPED(dsinks), LOCATE(terms);
	local float part[GROUP];
	const int head = get_group_id(0);
	terms += (size_t)head * tokens;
	lanes some = 0;
	for (int i = LANES * ITEM; i < tokens; i += LANES * GROUP)
		some += load_lanes(terms, i, tokens, 0);
	const float sum = group_sum(lanes_sum(some), part);
	if (ITEM == 0)
		store_numbers(dsinks, dsinks_bf16, head, head + 1, load_numbers(dsinks, dsinks_bf16, head, head + 1) + sum);
}
