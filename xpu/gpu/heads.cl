// Projections and heads: norm, clipping and rotation, and the way back. Of the first `turned` elements of a head, elements j and j + turned/2 are rotated
// together, or if they are interleaved elements 2j and 2j + 1. Of the n elements behind them, which are not rotated, elements j and j + n/2 form pairs.
// A work-item has LANES pairs of a head at a time, and keeps them.

// The shape of heads, and the rotation of a token's position.
typedef struct {
	int size, turned, interleaved;
	const global float *cosine, *sine;
} turns;

// Pairs of a head: elements low + step·j and high + step·j of a projection, for j from `from` on, below `count`.
typedef struct {
	int head, low, high, step, from, count;
	bool turned;
} pairs;

// pieces is the number of pieces of LANES pairs of a head.
static int pieces(const turns t) { return (t.turned / 2 + LANES - 1) / LANES + ((t.size - t.turned) / 2 + LANES - 1) / LANES; }

// Piece i of the heads of a projection.
static pairs pairs_of(const int i, const turns t)
{
	pairs p;
	const int all = pieces(t), rotated = (t.turned / 2 + LANES - 1) / LANES, piece = i % all;
	p.head = i / all, p.turned = piece < rotated;
	p.count = p.turned ? t.turned / 2 : (t.size - t.turned) / 2;
	p.from = (p.turned ? piece : piece - rotated) * LANES;
	const bool adjacent = p.turned && t.interleaved;
	p.low = p.head * t.size + (p.turned ? 0 : t.turned), p.high = p.low + (adjacent ? 1 : p.count), p.step = adjacent ? 2 : 1;
	return p;
}

// load_numbers and store_lanes for elements step·i, step·(i + 1), … of the step·n elements of x.
static lanes load_steps(const global void *x, const int bf16, const int step, const int i, const int n)
{
#if LANES > 1
	if (step > 1) {
		float y[LANES];
		for (int j = 0; j < LANES; j++) {
			const int at = step * (i + j);
			y[j] = i + j >= n ? 0 : bf16 ? as_float((uint)((const global ushort *)x)[at] << 16) : ((const global float *)x)[at];
		}
		return vload16(0, y);
	}
#endif
	return load_numbers(x, bf16, step * i, step * n);
}

static void store_steps(global float *x, const int step, const int i, const int n, const lanes v)
{
#if LANES > 1
	if (step > 1) {
		float y[LANES];
		vstore16(v, 0, y);
		for (int j = 0; j < LANES && i + j < n; j++)
			x[step * (i + j)] = y[j];
		return;
	}
#endif
	store_lanes(x, step * i, step * n, v);
}

static lanes cosines(const pairs p, const turns t) { return p.turned ? load_lanes(t.cosine, p.from, p.count, 0) : (lanes)1; }
static lanes sines(const pairs p, const turns t) { return p.turned ? load_lanes(t.sine, p.from, p.count, 0) : (lanes)0; }

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
	const turns t, const float bound, const float scale)
{
	const int all = heads * pieces(t);
	for (int i = ITEM; i < all; i += GROUP) {
		const pairs p = pairs_of(i, t);
		const int j = p.from, n = p.count, step = p.step;
		const lanes c = cosines(p, t), s = sines(p, t);
		lanes u = load_steps(MOVE(x, x_bf16, p.low), x_bf16, step, j, n), v = load_steps(MOVE(x, x_bf16, p.high), x_bf16, step, j, n);
		if (normed) {
			u = load_steps(MOVE(weight, bf16, p.low), bf16, step, j, n) * (u * r);
			v = load_steps(MOVE(weight, bf16, p.high), bf16, step, j, n) * (v * r);
		}
		u = clipped(u, bound), v = clipped(v, bound);
		global float *head = to + p.head * pitch - p.head * t.size; // elements of the projection have the same places in it
		store_steps(head + p.low, step, j, n, (u * c - v * s) * scale);
		store_steps(head + p.high, step, j, n, (v * c + u * s) * scale);
	}
}

// A projection of the token becomes heads as in split_one. It has `norms` norms, each of heads / norms heads, whose inverse roots are in roots,
// or if they are not known are written there.
static void split_side(global float *to, const ulong pitch, const global void *x, const int x_bf16, const global void *weight, const int bf16, const bool normed, const int norms,
	global float *roots, const bool known, const float epsilon, const int heads, const turns t, const float bound, const float scale, local float *part)
{
	const int each = heads / norms, width = each * t.size;
	for (int n = 0; n < norms; n++) {
		float r = 1;
		if (normed && known)
			r = roots[n];
		else if (normed) {
			r = 1 / sqrt(group_sum(squares(x, x_bf16, width), part) / width + epsilon);
			if (ITEM == 0)
				roots[n] = r;
		}
		split_one(to, pitch, x, x_bf16, weight, bf16, normed, r, each, t, bound, scale);
		x = MOVE(x, x_bf16, width), to += each * pitch;
	}
}

// Tokens.
kernel void split_heads(MEMORY(float, q), MEMORY(float, k), MEMORY(float, v), TYPED(const void, qkv), TYPED(const void, q_weight),
	TYPED(const void, k_weight), MEMORY(float, rq), MEMORY(float, rk), MEMORY(const float, cosine), MEMORY(const float, sine), const int length,
	const int heads, const int kv_heads, const int size, const int turned, const int interleaved, const int first, const int capacity, const int q_norms, const int k_norms, const float epsilon,
	const int known, const float bound, const float scale)
{
	LOCATE(q), LOCATE(k), LOCATE(v), LOCATE_TYPED(qkv), LOCATE_TYPED(q_weight), LOCATE_TYPED(k_weight), LOCATE(rq), LOCATE(rk), LOCATE(cosine), LOCATE(sine);
	local float part[GROUP];
	const ulong token = get_group_id(0), row = token / length, position = token % length, place = first + position;
	const int width = heads * size, kv_width = kv_heads * size;
	qkv = MOVE(qkv, qkv_bf16, token * (width + 2 * kv_width));
	const turns t = { size, turned, interleaved, cosine + place * (turned / 2), sine + place * (turned / 2) };
	const bool q_normed = GIVEN(q_weight), k_normed = GIVEN(k_weight);
	split_side(q + (row * heads * length + position) * size, (ulong)length * size, qkv, qkv_bf16, q_weight, q_weight_bf16, q_normed, q_norms, rq + token * q_norms, known, epsilon,
		heads, t, bound, scale, part);
	const ulong to = (row * kv_heads * capacity + place) * size, pitch = (ulong)capacity * size;
	split_side(k + to, pitch, MOVE(qkv, qkv_bf16, width), qkv_bf16, k_weight, k_weight_bf16, k_normed, k_norms, rk + token * k_norms, known, epsilon, kv_heads, t, bound, 1, part);
	const global void *values = MOVE(qkv, qkv_bf16, width + kv_width);
	const int blocks = (size + LANES - 1) / LANES;
	for (int i = ITEM; i < kv_heads * blocks; i += GROUP) {
		const int a = i / blocks, j = i % blocks * LANES;
		store_lanes(v + to + a * pitch, j, size, clipped(load_numbers(MOVE(values, qkv_bf16, a * size), qkv_bf16, j, size), bound));
	}
}

// The gradient of elements step·j of one half of the pairs of a head, g, through rotation and clipping: with a norm its share
// of the gradient of the weight is added to partial, and the result is the gradient times the weight.
static lanes join_half(lanes g, global float *partial, const bool fresh, const global void *x, const int x_bf16, const global void *weight, const int bf16, const bool normed,
	const float r, const int step, const int j, const int half_size, const float bound, lanes *sum)
{
	const lanes v = load_steps(x, x_bf16, step, j, half_size);
	if (!normed)
		return within(g, v, bound);
	const lanes w = load_steps(weight, bf16, step, j, half_size);
	g = within(g, w * (v * r), bound);
	store_steps(partial, step, j, half_size, fresh ? g * v * r : fma(g * v, (lanes)r, load_steps(partial, 0, step, j, half_size)));
	g *= w;
	*sum = fma(g, v, *sum);
	return g;
}

// The gradient of heads, head a of it at from + a·pitch, goes through rotation and clipping to a projection of the token, dx, which may be the same
// memory. Without a norm that is the gradient of the projection. It returns the work-item's share of the sum of products with the projection.
static float join_one(global float *dx, const global float *from, const ulong pitch, global float *partial, const bool fresh, const global void *x,
	const int x_bf16, const global void *weight, const int bf16, const bool normed, const float r, const int heads, const turns t, const float bound, const float scale)
{
	const int all = heads * pieces(t);
	lanes sum = 0;
	for (int i = ITEM; i < all; i += GROUP) {
		const pairs p = pairs_of(i, t);
		const int j = p.from, n = p.count, low = p.low, high = p.high, step = p.step;
		const global float *head = from + p.head * pitch - p.head * t.size; // elements of the projection have the same places in it
		const lanes c = cosines(p, t), s = sines(p, t);
		const lanes u = load_steps(head + low, 0, step, j, n), v = load_steps(head + high, 0, step, j, n);
		const lanes g = join_half((u * c + v * s) * scale, partial + low, fresh, MOVE(x, x_bf16, low), x_bf16, MOVE(weight, bf16, low), bf16, normed, r, step, j, n, bound, &sum);
		const lanes h = join_half((v * c - u * s) * scale, partial + high, fresh, MOVE(x, x_bf16, high), x_bf16, MOVE(weight, bf16, high), bf16, normed, r, step, j, n, bound, &sum);
		store_steps(dx + low, step, j, n, g);
		store_steps(dx + high, step, j, n, h);
	}
	return lanes_sum(sum);
}

// What join_one left of a norm's gradient, with the sum of all items' shares.
static void join_norm(global float *dx, const global void *x, const int x_bf16, const float r, const float sum, const int heads, const turns t)
{
	const int all = heads * pieces(t);
	const float b = r * r * r / (t.size * heads) * sum;
	for (int i = ITEM; i < all; i += GROUP) { // the pairs that the item has had in join_one
		const pairs p = pairs_of(i, t);
		const int j = p.from, n = p.count, step = p.step;
		store_steps(dx + p.low, step, j, n, r * load_steps(dx + p.low, 0, step, j, n) - b * load_steps(MOVE(x, x_bf16, p.low), x_bf16, step, j, n));
		store_steps(dx + p.high, step, j, n, r * load_steps(dx + p.high, 0, step, j, n) - b * load_steps(MOVE(x, x_bf16, p.high), x_bf16, step, j, n));
	}
}

// The gradient of heads goes to a projection of the token as in join_one, and through its norms, as in split_side. mean is null, or has the mean of
// the products over all columns of a norm that is wider than the projection.
static void join_side(global float *dx, const global float *from, const ulong pitch, global float *partial, const bool fresh, const global void *x,
	const int x_bf16, const global void *weight, const int bf16, const bool normed, const int norms, const global float *roots, const global float *mean,
	const int heads, const turns t, const float bound, const float scale, local float *part)
{
	const int each = heads / norms, width = each * t.size;
	for (int n = 0; n < norms; n++) {
		const float r = normed ? roots[n] : 1;
		// the work-item has the same weights in every norm
		const float own = join_one(dx, from, pitch, partial, fresh && n == 0, x, x_bf16, weight, bf16, normed, r, each, t, bound, scale);
		if (normed)
			join_norm(dx, x, x_bf16, r, mean ? mean[0] * width : group_sum(own, part), each, t);
		dx += width, x = MOVE(x, x_bf16, width), from += each * pitch;
	}
}

// Consecutive groups of `each` tokens. Row g of partial, q_normed and then k_normed elements, becomes the sum of the
// gradients of the weights over the tokens of group g.
kernel void join_heads(MEMORY(float, dqkv), MEMORY(const float, dk), MEMORY(const float, dv), TYPED(const void, qkv), TYPED(const void, q_weight),
	TYPED(const void, k_weight), MEMORY(const float, rq), MEMORY(const float, rk), MEMORY(const float, means), MEMORY(const float, cosine),
	MEMORY(const float, sine), MEMORY(float, partial), const int tokens, const int each, const int length, const int heads, const int kv_heads, const int size, const int turned, const int interleaved,
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
		const turns t = { size, turned, interleaved, cosine + position * (turned / 2), sine + position * (turned / 2) };
		global float *dx = dqkv + (ulong)token * (width + 2 * kv_width);
		join_side(dx, dx, size, partial, token == first, x, qkv_bf16, q_weight, q_weight_bf16, q_normed > 0, q_norms, rq + (ulong)token * q_norms,
			GIVEN(means) ? means + token : 0, heads, t, bound, scale, part);
		join_side(dx + width, dk + from, pitch, partial + q_normed, token == first, MOVE(x, qkv_bf16, width), qkv_bf16, k_weight, k_weight_bf16, k_normed > 0,
			k_norms, rk + (ulong)token * k_norms, GIVEN(means) ? means + tokens + token : 0, kv_heads, t, bound, 1, part);
		const int blocks = (size + LANES - 1) / LANES;
		for (int i = ITEM; i < kv_heads * blocks; i += GROUP) {
			const int a = i / blocks, j = i % blocks * LANES, at = width + kv_width + a * size;
			store_lanes(dx + at, j, size, within(load_lanes(dv + from + a * pitch, j, size, 0), load_numbers(MOVE(x, qkv_bf16, at), qkv_bf16, j, size), bound));
		}
	}
}

// The work-item's share of the sum of weight·g·x, where g is the gradient of heads through rotation and clipping, as in join_one.
static float products_of(const global float *from, const ulong pitch, const global void *x, const int x_bf16, const global void *weight, const int bf16,
	const float r, const int heads, const turns t, const float bound, const float scale)
{
	const int all = heads * pieces(t);
	lanes sum = 0;
	for (int i = ITEM; i < all; i += GROUP) {
		const pairs at = pairs_of(i, t);
		const int j = at.from, n = at.count, low = at.low, high = at.high, step = at.step;
		const global float *head = from + at.head * pitch - at.head * t.size; // elements of the projection have the same places in it
		const lanes c = cosines(at, t), s = sines(at, t);
		const lanes u = load_steps(head + low, 0, step, j, n), v = load_steps(head + high, 0, step, j, n);
		const lanes p = load_steps(MOVE(x, x_bf16, low), x_bf16, step, j, n), q = load_steps(MOVE(x, x_bf16, high), x_bf16, step, j, n);
		const lanes wp = load_steps(MOVE(weight, bf16, low), bf16, step, j, n) * p, wq = load_steps(MOVE(weight, bf16, high), bf16, step, j, n) * q;
		sum = fma(within((u * c + v * s) * scale, wp * r, bound), wp, sum);
		sum = fma(within((v * c - u * s) * scale, wq * r, bound), wq, sum);
	}
	return lanes_sum(sum);
}

// Tokens. The parts of sums over the columns of norms: of squares, or with dqkv of products with gradients.
kernel void sum_heads(MEMORY(float, sums), TYPED(const void, qkv), TYPED(const void, q_weight), TYPED(const void, k_weight), MEMORY(const float, rq),
	MEMORY(const float, rk), MEMORY(const float, cosine), MEMORY(const float, sine), MEMORY(const float, dqkv), MEMORY(const float, dk), const int tokens,
	const int length, const int heads, const int kv_heads, const int size, const int turned, const int interleaved, const float bound, const float scale)
{
	LOCATE(sums), LOCATE_TYPED(qkv), LOCATE_TYPED(q_weight), LOCATE_TYPED(k_weight), LOCATE(rq), LOCATE(rk), LOCATE(cosine), LOCATE(sine), LOCATE(dqkv), LOCATE(dk);
	local float part[GROUP];
	const ulong token = get_group_id(0), row = token / length, position = token % length;
	const int width = heads * size, kv_width = kv_heads * size;
	const global void *x = MOVE(qkv, qkv_bf16, token * (width + 2 * kv_width)), *y = MOVE(x, qkv_bf16, width);
	float queries, keys;
	if (GIVEN(dqkv)) {
		const turns t = { size, turned, interleaved, cosine + position * (turned / 2), sine + position * (turned / 2) };
		queries = products_of(dqkv + token * (width + 2 * kv_width), size, x, qkv_bf16, q_weight, q_weight_bf16, rq[token], heads, t, bound, scale);
		keys = products_of(dk + (row * kv_heads * length + position) * size, (ulong)length * size, y, qkv_bf16, k_weight, k_weight_bf16, rk[token], kv_heads, t, bound, 1);
	} else {
		queries = squares(x, qkv_bf16, width);
		keys = squares(y, qkv_bf16, kv_width);
	}
	queries = group_sum(queries, part);
	keys = group_sum(keys, part);
	if (ITEM == 0)
		sums[token] = queries, sums[tokens + token] = keys;
}
