// Projections and heads of latent attention, and the way back. A head has `plain` elements without rotation, then `turned` rotated elements, then zeros up
// to `size`. The rotated elements of keys are the same in all heads. A value has `values` elements, then zeros. Elements j and j + turned / 2 of the rotated
// elements of a head come from elements 2j and 2j + 1 of the projection if they are interleaved, and otherwise from j and j + turned / 2.

// Element i of a head of queries or keys from its plain and rotated elements, without scale.
static float latent_element(const global float *plain_x, const global float *turned_x, const int plain, const int turned, const global float *cosine,
	const global float *sine, const int interleaved, const int i)
{
	if (i < plain)
		return plain_x[i];
	if (i >= plain + turned)
		return 0;
	const int half_size = turned / 2, high = i - plain >= half_size, j = i - plain - high * half_size;
	const float u = turned_x[interleaved ? 2 * j : j], v = turned_x[interleaved ? 2 * j + 1 : j + half_size];
	return high ? v * cosine[j] + u * sine[j] : u * cosine[j] - v * sine[j];
}

// The gradient of rotated element i of a projection, given the gradient dy of the rotated elements of a head.
static float latent_back(const global float *dy, const int turned, const global float *cosine, const global float *sine, const int interleaved, const int i)
{
	const int half_size = turned / 2, high = interleaved ? i % 2 : i >= half_size, j = interleaved ? i / 2 : i - high * half_size;
	const float u = dy[j], v = dy[j + half_size];
	return high ? v * cosine[j] - u * sine[j] : u * cosine[j] + v * sine[j];
}

// Tokens.
kernel void split_latent(MEMORY(float, q), MEMORY(float, k), MEMORY(float, v), MEMORY(const float, queries), MEMORY(const float, keys_values),
	MEMORY(const float, rotated), MEMORY(const float, cosine), MEMORY(const float, sine), const int length, const int heads, const int size, const int plain,
	const int turned, const int values, const int first, const int capacity, const int interleaved, const float scale)
{
	LOCATE(q), LOCATE(k), LOCATE(v), LOCATE(queries), LOCATE(keys_values), LOCATE(rotated), LOCATE(cosine), LOCATE(sine);
	const ulong token = get_group_id(0), row = token / length, position = token % length, place = first + position;
	cosine += place * (turned / 2), sine += place * (turned / 2);
	rotated += token * turned;
	for (int n = ITEM; n < heads * size; n += GROUP) {
		const int a = n / size, i = n % size;
		const global float *x = queries + (token * heads + a) * (plain + turned), *y = keys_values + (token * heads + a) * (plain + values);
		const ulong head = row * heads + a, to = (head * capacity + place) * size + i;
		q[(head * length + position) * size + i] = latent_element(x, x + plain, plain, turned, cosine, sine, interleaved, i) * scale;
		k[to] = latent_element(y, rotated, plain, turned, cosine, sine, interleaved, i);
		v[to] = i < values ? y[plain + i] : 0;
	}
}

// Tokens. dq has the heads of a token one after the other; dk and dv have the layout of keys. The sum over heads adds them in their order.
kernel void join_latent(MEMORY(float, queries), MEMORY(float, keys_values), MEMORY(float, rotated), MEMORY(const float, dq), MEMORY(const float, dk),
	MEMORY(const float, dv), MEMORY(const float, cosine), MEMORY(const float, sine), const int length, const int heads, const int size, const int plain,
	const int turned, const int values, const int interleaved, const float scale)
{
	LOCATE(queries), LOCATE(keys_values), LOCATE(rotated), LOCATE(dq), LOCATE(dk), LOCATE(dv), LOCATE(cosine), LOCATE(sine);
	const ulong token = get_group_id(0), row = token / length, position = token % length;
	cosine += position * (turned / 2), sine += position * (turned / 2);
	queries += token * heads * (plain + turned), keys_values += token * heads * (plain + values), rotated += token * turned;
	dq += token * heads * size;
	const ulong from = (row * heads * length + position) * size, pitch = (ulong)length * size;
	for (int n = ITEM; n < heads * (plain + turned); n += GROUP) {
		const int a = n / (plain + turned), i = n % (plain + turned);
		const global float *dy = dq + a * size;
		queries[n] = (i < plain ? dy[i] : latent_back(dy + plain, turned, cosine, sine, interleaved, i - plain)) * scale;
	}
	for (int n = ITEM; n < heads * (plain + values); n += GROUP) {
		const int a = n / (plain + values), i = n % (plain + values);
		keys_values[n] = i < plain ? dk[from + a * pitch + i] : dv[from + a * pitch + i - plain];
	}
	for (int i = ITEM; i < turned; i += GROUP) {
		float sum = 0;
		for (int a = 0; a < heads; a++)
			sum += latent_back(dk + from + a * pitch + plain, turned, cosine, sine, interleaved, i);
		rotated[i] = sum;
	}
}

// Rows. dst [rows, width] gets the first columns of x [rows, width_x], and zero in further columns. Rows start `stride` and `stride_x` elements apart.
kernel void copy_columns(MEMORY(float, dst), MEMORY(const float, x), const int width, const int width_x, const int stride, const int stride_x)
{
	LOCATE(dst), LOCATE(x);
	const ulong row = get_group_id(0);
	for (int i = ITEM; i < width; i += GROUP)
		dst[row * stride + i] = i < width_x ? x[row * stride_x + i] : 0;
}
