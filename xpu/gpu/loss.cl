// The cross entropy of a row of logits; with a scale other than 0 the gradient of scale·loss takes their place. The sum of exponentials is taken in one
// pass, with the largest logit so far as their shift.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void cross_entropy(MEMORY(float, loss), MEMORY(float, logits), MEMORY(const int, targets), const int width, const float scale)
{
	LOCATE(loss), LOCATE(logits), LOCATE(targets);
	local float part[GROUP];
	const size_t row = get_group_id(0);
	logits += row * width;
	const int target = targets[row];
	if (target < 0) { // not counted
		if (ITEM == 0)
			loss[row] = 0;
		for (int i = LANES * ITEM; scale != 0 && i < width; i += LANES * GROUP)
			store_lanes(logits, i, width, 0);
		return;
	}
	const float right = logits[target];
#ifdef PROCESSOR
	// A processor has a row in its caches, and exponentials cost it more than one pass more.
	if (scale != 0) {
		lanes top = -FLT_MAX, exps[DEEP] = {0};
		for (int i = 0; i < width; i += LANES)
			top = fmax(top, load_lanes(logits, i, width, -INFINITY));
		const float shift = lanes_max(top);
		for (int i = 0; i < width; i += DEEP * LANES)
			#pragma unroll
			for (int d = 0; d < DEEP; d++) {
				const lanes e = exp(load_lanes(logits, i + d * LANES, width, -INFINITY) - shift);
				store_lanes(logits, i + d * LANES, width, e);
				exps[d] += e;
			}
		const float whole = lanes_sum((exps[0] + exps[1]) + (exps[2] + exps[3]));
		for (int i = 0; i < width; i += LANES)
			store_lanes(logits, i, width, load_lanes(logits, i, width, 0) * (scale / whole));
		logits[target] -= scale;
		loss[row] = log(whole) + (shift - right);
		return;
	}
#endif
	lanes largest = -FLT_MAX, sums = 0;
	for (int i = LANES * ITEM; i < width; i += DEEP * LANES * GROUP) {
		lanes z[DEEP], next = largest;
		#pragma unroll
		for (int d = 0; d < DEEP; d++) {
			z[d] = load_lanes(logits, i + d * LANES * GROUP, width, -INFINITY);
			next = fmax(next, z[d]);
		}
		if (any_lane(next > largest)) {
			sums *= exp(largest - next);
			largest = next;
		}
		#pragma unroll
		for (int d = 0; d < DEEP; d++)
			sums += exp(z[d] - largest);
	}
	const float top = group_max(lanes_max(largest), part);
	const float sum = group_sum(lanes_sum(sums * exp(largest - top)), part);
	if (ITEM == 0)
		loss[row] = log(sum) + (top - right);
	if (scale == 0)
		return;
	barrier(CLK_GLOBAL_MEM_FENCE);
	const float factor = scale / sum;
	for (int i = LANES * ITEM; i < width; i += DEEP * LANES * GROUP) {
		lanes z[DEEP];
		#pragma unroll
		for (int d = 0; d < DEEP; d++)
			z[d] = load_lanes(logits, i + d * LANES * GROUP, width, 0);
		#pragma unroll
		for (int d = 0; d < DEEP; d++)
			store_lanes(logits, i + d * LANES * GROUP, width, factor * exp(z[d] - top));
	}
	barrier(CLK_GLOBAL_MEM_FENCE);
	if (ITEM == 0)
		logits[target] -= scale;
}

// The finaliser of SplitMix64.
static ulong mix64(ulong z)
{
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ul;
	z = (z ^ z >> 27) * 0x94d049bb133111ebul;
	return z ^ z >> 31;
}

// The weights of logits i, … of n: their probabilities relative to the largest, in units of 2^-39. Sums of up to 2^24
// weights do not depend on the order.
#ifdef PROCESSOR
typedef ulong16 weights;
#define weights_of(p) convert_ulong16(p)
static ulong weights_sum(weights w)
{
	const ulong8 a = w.lo + w.hi;
	const ulong4 b = a.lo + a.hi;
	return (b.x + b.z) + (b.y + b.w);
}
#define weights_store(w, to) vstore16(w, 0, to)
#else
typedef ulong weights;
#define weights_of(p) ((ulong)(p))
static ulong weights_sum(weights w) { return w; }
#define weights_store(w, to) (*(to) = (w))
#endif

static weights weigh(const global float *logits, int i, int n, float top)
{
	const lanes p = exp(load_lanes(logits, i, n, -INFINITY) - top) * 0x1p39f, none = 0;
	return weights_of(select(none, p, p >= 1)); // NaN has weight 0
}

// Draws the target of a row: the first index at which the sum of weights exceeds a fraction of the total, output number
// first + row of the generator SplitMix64 (Steele, Lea and Flood 2014), whose state is the finalised seed. If all
// weights are 0, as for NaN, the target is 0.
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void draw_targets(MEMORY(int, targets), MEMORY(const float, logits), const int width, const ulong state, const ulong first)
{
	LOCATE(targets), LOCATE(logits);
	local float part[GROUP];
	local ulong sums[GROUP];
	const size_t row = get_group_id(0);
	const bool left_out = targets[row] < 0; // the barriers below are for all
	logits += row * width;
	lanes largest = -FLT_MAX;
	for (int i = LANES * ITEM; i < width; i += LANES * GROUP)
		largest = fmax(largest, load_lanes(logits, i, width, -FLT_MAX));
	const float top = group_max(lanes_max(largest), part);
	const int each = (width + GROUP - 1) / GROUP, begin = min(width, each * ITEM), end = min(width, begin + each);
	weights all = 0;
	for (int i = begin; i < end; i += LANES)
		all += weigh(logits, i, end, top);
	const ulong own = weights_sum(all);
	sums[ITEM] = own;
	if (ITEM == 0 && !left_out)
		targets[row] = 0;
	barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
	ulong before = 0, whole = 0;
	for (int i = 0; i < GROUP; i++) {
		before += i < ITEM ? sums[i] : 0;
		whole += sums[i];
	}
	const ulong share = mix64(state + (first + row + 1) * 0x9e3779b97f4a7c15ul) >> 11; // in units of 2^-53
	const ulong left = mul_hi(whole, share << 11);
	if (left_out || left < before || left >= before + own)
		return;
	for (int i = begin; i < end; i += LANES) {
		const weights some = weigh(logits, i, end, top);
		const ulong sum = weights_sum(some);
		if (before + sum <= left) {
			before += sum;
			continue;
		}
		ulong one[LANES];
		weights_store(some, one);
		int j = 0;
		while ((before += one[j]) <= left)
			j++;
		targets[row] = i + j;
		return;
	}
}

// Rows. Multiplies element i of a row of x [rows, width] by 1 + epsilon * u, where the highest 24 bits of output
// number * 2^32 + i of SplitMix64 are (u + 1) * 2^23.
kernel void jitter(MEMORY(float, x), MEMORY(const int, numbers), const int width, const float epsilon, const ulong state)
{
	LOCATE(x), LOCATE(numbers);
	const size_t row = get_group_id(0);
	const ulong first = ((ulong)numbers[row] << 32) + 1;
	for (int i = ITEM; i < width; i += GROUP) {
		const ulong z = mix64(state + (first + i) * 0x9e3779b97f4a7c15ul);
		const float u = (float)(uint)(z >> 40) * 0x1p-23f - 1;
		x[row * width + i] *= 1 + epsilon * u;
	}
}
