// Projections and heads: norm, clipping and rotation, and the way back. Elements j and j + size/2 of a head are rotated together; a work-item has LANES
// pairs of a head at a time, and keeps them: block i is of head i / blocks, where `blocks` is the number of such pieces of a head.

// The work-item's share of the sum of squares of the n elements of x.
static float squares(const global void *x, const int bf16, const int n)
{
	lanes sum = 0;
	for (int i = LANES * ITEM; i < n; i += LANES * GROUP) {
		const lanes v = load_numbers(x, bf16, i, n);
		sum = fma(v, v, sum);
	}
	return lanes_sum(sum);
}

// clipped limits v to ±bound; 0 is no bound.
static lanes clipped(const lanes v, const float bound)
{
	return bound == 0 ? v : v > bound ? (lanes)bound : v < -bound ? (lanes)-bound : v;
}

// within is g, but zero where v was clipped.
static lanes within(const lanes g, const lanes v, const float bound)
{
	return bound == 0 ? g : v > bound || v < -bound ? (lanes)0 : g;
}

// A projection of the token becomes heads; head a is written at to + a·pitch.
static void split_one(global float *to, const ulong pitch, const global void *x, const int x_bf16, const global void *weight, const int bf16, const bool normed, const float r, const int heads,
	const int half_size, const global float *cosine, const global float *sine, const float bound, const float scale)
{
	const int blocks = (half_size + LANES - 1) / LANES;
	for (int i = ITEM; i < heads * blocks; i += GROUP) {
		const int a = i / blocks, j = i % blocks * LANES, at = a * 2 * half_size;
		const lanes c = load_lanes(cosine, j, half_size, 0), s = load_lanes(sine, j, half_size, 0);
		lanes u = load_numbers(MOVE(x, x_bf16, at), x_bf16, j, half_size), v = load_numbers(MOVE(x, x_bf16, at + half_size), x_bf16, j, half_size);
		if (normed) {
			u = load_numbers(MOVE(weight, bf16, at), bf16, j, half_size) * (u * r);
			v = load_numbers(MOVE(weight, bf16, at + half_size), bf16, j, half_size) * (v * r);
		}
		u = clipped(u, bound), v = clipped(v, bound);
		store_lanes(to + a * pitch, j, half_size, (u * c - v * s) * scale);
		store_lanes(to + a * pitch + half_size, j, half_size, (v * c + u * s) * scale);
	}
}

// A projection of the token becomes heads as in split_one. It has `norms` norms, each of heads / norms heads, whose inverse roots are in roots,
// or if they are not known are written there.
static void split_side(global float *to, const ulong pitch, const global void *x, const int x_bf16, const global void *weight, const int bf16, const bool normed, const int norms,
	global float *roots, const bool known, const float epsilon, const int heads, const int half_size, const global float *cosine, const global float *sine,
	const float bound, const float scale, local float *part)
{
	const int each = heads / norms, width = each * 2 * half_size;
	for (int n = 0; n < norms; n++) {
		float r = 1;
		if (normed && known)
			r = roots[n];
		else if (normed) {
			r = 1 / sqrt(group_sum(squares(x, x_bf16, width), part) / width + epsilon);
			if (ITEM == 0)
				roots[n] = r;
		}
		split_one(to, pitch, x, x_bf16, weight, bf16, normed, r, each, half_size, cosine, sine, bound, scale);
		x = MOVE(x, x_bf16, width), to += each * pitch;
	}
}

// Tokens.
kernel void split_heads(MEMORY(float, q), MEMORY(float, k), MEMORY(float, v), TYPED(const void, qkv), TYPED(const void, q_weight),
	TYPED(const void, k_weight), MEMORY(float, rq), MEMORY(float, rk), MEMORY(const float, cosine), MEMORY(const float, sine), const int length,
	const int heads, const int kv_heads, const int size, const int first, const int capacity, const int q_norms, const int k_norms, const float epsilon,
	const int known, const float bound, const float scale)
{
	LOCATE(q), LOCATE(k), LOCATE(v), LOCATE_TYPED(qkv), LOCATE_TYPED(q_weight), LOCATE_TYPED(k_weight), LOCATE(rq), LOCATE(rk), LOCATE(cosine), LOCATE(sine);
	local float part[GROUP];
	const ulong token = get_group_id(0), row = token / length, position = token % length, place = first + position;
	const int width = heads * size, kv_width = kv_heads * size;
	qkv = MOVE(qkv, qkv_bf16, token * (width + 2 * kv_width));
	cosine += place * (size / 2), sine += place * (size / 2);
	const bool q_normed = GIVEN(q_weight), k_normed = GIVEN(k_weight);
	split_side(q + (row * heads * length + position) * size, (ulong)length * size, qkv, qkv_bf16, q_weight, q_weight_bf16, q_normed, q_norms, rq + token * q_norms, known, epsilon,
		heads, size / 2, cosine, sine, bound, scale, part);
	const ulong to = (row * kv_heads * capacity + place) * size, pitch = (ulong)capacity * size;
	split_side(k + to, pitch, MOVE(qkv, qkv_bf16, width), qkv_bf16, k_weight, k_weight_bf16, k_normed, k_norms, rk + token * k_norms, known, epsilon, kv_heads, size / 2, cosine, sine, bound, 1,
		part);
	const global void *values = MOVE(qkv, qkv_bf16, width + kv_width);
	const int blocks = (size + LANES - 1) / LANES;
	for (int i = ITEM; i < kv_heads * blocks; i += GROUP) {
		const int a = i / blocks, j = i % blocks * LANES;
		store_lanes(v + to + a * pitch, j, size, clipped(load_numbers(MOVE(values, qkv_bf16, a * size), qkv_bf16, j, size), bound));
	}
}

// The gradient of element j of a head at `at` of a projection, g, through rotation and clipping: with a norm its share
// of the gradient of the weight is added to partial, and the result is the gradient times the weight.
static lanes join_half(lanes g, global float *partial, const bool fresh, const global void *x, const int x_bf16, const global void *weight, const int bf16, const bool normed,
	const float r, const int j, const int half_size, const float bound, lanes *sum)
{
	const lanes v = load_numbers(x, x_bf16, j, half_size);
	if (!normed)
		return within(g, v, bound);
	const lanes w = load_numbers(weight, bf16, j, half_size);
	g = within(g, w * (v * r), bound);
	store_lanes(partial, j, half_size, fresh ? g * v * r : fma(g * v, (lanes)r, load_lanes(partial, j, half_size, 0)));
	g *= w;
	*sum = fma(g, v, *sum);
	return g;
}

// The gradient of heads, head a of it at from + a·pitch, goes through rotation and clipping to a projection of the token, dx, which may be the same
// memory. Without a norm that is the gradient of the projection. It returns the work-item's share of the sum of products with the projection.
static float join_one(global float *dx, const global float *from, const ulong pitch, global float *partial, const bool fresh, const global void *x,
	const int x_bf16, const global void *weight, const int bf16, const bool normed, const float r, const int heads, const int half_size, const global float *cosine, const global float *sine,
	const float bound, const float scale)
{
	const int blocks = (half_size + LANES - 1) / LANES;
	lanes sum = 0;
	for (int i = ITEM; i < heads * blocks; i += GROUP) {
		const int a = i / blocks, j = i % blocks * LANES, low = a * 2 * half_size, high = low + half_size;
		const lanes c = load_lanes(cosine, j, half_size, 0), s = load_lanes(sine, j, half_size, 0);
		const lanes u = load_lanes(from + a * pitch, j, half_size, 0), v = load_lanes(from + a * pitch + half_size, j, half_size, 0);
		const lanes g = join_half((u * c + v * s) * scale, partial + low, fresh, MOVE(x, x_bf16, low), x_bf16, MOVE(weight, bf16, low), bf16, normed, r, j, half_size, bound, &sum);
		const lanes h = join_half((v * c - u * s) * scale, partial + high, fresh, MOVE(x, x_bf16, high), x_bf16, MOVE(weight, bf16, high), bf16, normed, r, j, half_size, bound, &sum);
		store_lanes(dx + low, j, half_size, g);
		store_lanes(dx + high, j, half_size, h);
	}
	return lanes_sum(sum);
}

// What join_one left of a norm's gradient, with the sum of all items' shares.
static void join_norm(global float *dx, const global void *x, const int x_bf16, const float r, const float sum, const int heads, const int half_size)
{
	const int blocks = (half_size + LANES - 1) / LANES;
	const float b = r * r * r / (2 * half_size * heads) * sum;
	for (int i = ITEM; i < heads * blocks; i += GROUP) { // the pairs that the item has had in join_one
		const int j = i % blocks * LANES, low = i / blocks * 2 * half_size, high = low + half_size;
		store_lanes(dx + low, j, half_size, r * load_lanes(dx + low, j, half_size, 0) - b * load_numbers(MOVE(x, x_bf16, low), x_bf16, j, half_size));
		store_lanes(dx + high, j, half_size, r * load_lanes(dx + high, j, half_size, 0) - b * load_numbers(MOVE(x, x_bf16, high), x_bf16, j, half_size));
	}
}

// The gradient of heads goes to a projection of the token as in join_one, and through its norms, as in split_side. mean is null, or has the mean of
// the products over all columns of a norm that is wider than the projection.
static void join_side(global float *dx, const global float *from, const ulong pitch, global float *partial, const bool fresh, const global void *x,
	const int x_bf16, const global void *weight, const int bf16, const bool normed, const int norms, const global float *roots, const global float *mean,
	const int heads, const int half_size, const global float *cosine, const global float *sine, const float bound, const float scale, local float *part)
{
	const int each = heads / norms, width = each * 2 * half_size;
	for (int n = 0; n < norms; n++) {
		const float r = normed ? roots[n] : 1;
		// the work-item has the same weights in every norm
		const float own = join_one(dx, from, pitch, partial, fresh && n == 0, x, x_bf16, weight, bf16, normed, r, each, half_size, cosine, sine, bound, scale);
		if (normed)
			join_norm(dx, x, x_bf16, r, mean ? mean[0] * width : group_sum(own, part), each, half_size);
		dx += width, x = MOVE(x, x_bf16, width), from += each * pitch;
	}
}

// Consecutive groups of `each` tokens. Row g of partial, q_normed and then k_normed elements, becomes the sum of the
// gradients of the weights over the tokens of group g.
kernel void join_heads(MEMORY(float, dqkv), MEMORY(const float, dk), MEMORY(const float, dv), TYPED(const void, qkv), TYPED(const void, q_weight),
	TYPED(const void, k_weight), MEMORY(const float, rq), MEMORY(const float, rk), MEMORY(const float, means), MEMORY(const float, cosine),
	MEMORY(const float, sine), MEMORY(float, partial), const int tokens, const int each, const int length, const int heads, const int kv_heads, const int size,
	const int q_norms, const int k_norms, const float bound, const float scale)
{
	LOCATE(dqkv), LOCATE(dk), LOCATE(dv), LOCATE_TYPED(qkv), LOCATE_TYPED(q_weight), LOCATE_TYPED(k_weight), LOCATE(rq), LOCATE(rk), LOCATE(means);
	LOCATE(cosine), LOCATE(sine), LOCATE(partial);
	local float part[GROUP];
	const int first = (int)get_group_id(0) * each, last = min(first + each, tokens);
	const int width = heads * size, kv_width = kv_heads * size;
	const int q_normed = GIVEN(q_weight) ? width / q_norms : 0, k_normed = GIVEN(k_weight) ? kv_width / k_norms : 0; // weights
	const ulong pitch = (ulong)length * size;
	partial += get_group_id(0) * (q_normed + k_normed);
	for (int token = first; token < last; token++) {
		const ulong row = token / length, position = token % length, from = (row * kv_heads * length + position) * size;
		const global void *x = MOVE(qkv, qkv_bf16, (ulong)token * (width + 2 * kv_width));
		const global float *c = cosine + position * (size / 2), *s = sine + position * (size / 2);
		global float *dx = dqkv + (ulong)token * (width + 2 * kv_width);
		join_side(dx, dx, size, partial, token == first, x, qkv_bf16, q_weight, q_weight_bf16, q_normed > 0, q_norms, rq + (ulong)token * q_norms,
			GIVEN(means) ? means + token : 0, heads, size / 2, c, s, bound, scale, part);
		join_side(dx + width, dk + from, pitch, partial + q_normed, token == first, MOVE(x, qkv_bf16, width), qkv_bf16, k_weight, k_weight_bf16, k_normed > 0,
			k_norms, rk + (ulong)token * k_norms, GIVEN(means) ? means + tokens + token : 0, kv_heads, size / 2, c, s, bound, 1, part);
		const int blocks = (size + LANES - 1) / LANES;
		for (int i = ITEM; i < kv_heads * blocks; i += GROUP) {
			const int a = i / blocks, j = i % blocks * LANES, at = width + kv_width + a * size;
			store_lanes(dx + at, j, size, within(load_lanes(dv + from + a * pitch, j, size, 0), load_numbers(MOVE(x, qkv_bf16, at), qkv_bf16, j, size), bound));
		}
	}
}

// The work-item's share of the sum of weight·g·x, where g is the gradient of heads through rotation and clipping, as in join_one.
static float products_of(const global float *from, const ulong pitch, const global void *x, const int x_bf16, const global void *weight, const int bf16,
	const float r, const int heads, const int half_size, const global float *cosine, const global float *sine, const float bound, const float scale)
{
	const int blocks = (half_size + LANES - 1) / LANES;
	lanes sum = 0;
	for (int i = ITEM; i < heads * blocks; i += GROUP) {
		const int a = i / blocks, j = i % blocks * LANES, low = a * 2 * half_size, high = low + half_size;
		const lanes c = load_lanes(cosine, j, half_size, 0), s = load_lanes(sine, j, half_size, 0);
		const lanes u = load_lanes(from + a * pitch, j, half_size, 0), v = load_lanes(from + a * pitch + half_size, j, half_size, 0);
		const lanes p = load_numbers(MOVE(x, x_bf16, low), x_bf16, j, half_size), q = load_numbers(MOVE(x, x_bf16, high), x_bf16, j, half_size);
		const lanes wp = load_numbers(MOVE(weight, bf16, low), bf16, j, half_size) * p, wq = load_numbers(MOVE(weight, bf16, high), bf16, j, half_size) * q;
		sum = fma(within((u * c + v * s) * scale, wp * r, bound), wp, sum);
		sum = fma(within((v * c - u * s) * scale, wq * r, bound), wq, sum);
	}
	return lanes_sum(sum);
}

// Tokens. The parts of sums over the columns of norms: of squares, or with dqkv of products with gradients.
kernel void sum_heads(MEMORY(float, sums), TYPED(const void, qkv), TYPED(const void, q_weight), TYPED(const void, k_weight), MEMORY(const float, rq),
	MEMORY(const float, rk), MEMORY(const float, cosine), MEMORY(const float, sine), MEMORY(const float, dqkv), MEMORY(const float, dk), const int tokens,
	const int length, const int heads, const int kv_heads, const int size, const float bound, const float scale)
{
	LOCATE(sums), LOCATE_TYPED(qkv), LOCATE_TYPED(q_weight), LOCATE_TYPED(k_weight), LOCATE(rq), LOCATE(rk), LOCATE(cosine), LOCATE(sine), LOCATE(dqkv), LOCATE(dk);
	local float part[GROUP];
	const ulong token = get_group_id(0), row = token / length, position = token % length;
	const int width = heads * size, kv_width = kv_heads * size;
	const global void *x = MOVE(qkv, qkv_bf16, token * (width + 2 * kv_width)), *y = MOVE(x, qkv_bf16, width);
	float queries, keys;
	if (GIVEN(dqkv)) {
		cosine += position * (size / 2), sine += position * (size / 2);
		queries = products_of(dqkv + token * (width + 2 * kv_width), size, x, qkv_bf16, q_weight, q_weight_bf16, rq[token], heads, size / 2, cosine, sine, bound, scale);
		keys = products_of(dk + (row * kv_heads * length + position) * size, (ulong)length * size, y, qkv_bf16, k_weight, k_weight_bf16, rk[token], kv_heads, size / 2,
			cosine, sine, bound, 1);
	} else {
		queries = squares(x, qkv_bf16, width);
		keys = squares(y, qkv_bf16, kv_width);
	}
	queries = group_sum(queries, part);
	keys = group_sum(keys, part);
	if (ITEM == 0)
		sums[token] = queries, sums[tokens + token] = keys;
}
