package moe

import "mula/xpu"

// The cache of generation. A decoder reads the prompt, and then token by token. Each layer keeps
// the keys and values of earlier tokens in the form that its attention needs:
//
//   - All keys and values, for G heads of D elements.
//   - With a window of W positions, the last W of them. Token t is at index t mod W. The order of
//     keys does not matter, because they are rotated, and the next token attends to all of them.
//   - With latent attention, the latents and the rotated elements of keys.
//
// With latents, the prompt is computed with keys and values of all heads, as in training. For a
// later token, the projections from latents are applied to its queries and to the result of its
// attention (https://arxiv.org/abs/2405.04434, section 2.1.2). With u the part of a head, C the
// latents [n, R] of n tokens and Kr their rotated elements:
//
//	q·k = (Wk·qp)·C + qr·Kr       Wkᵀ, Wv: the rows of u(Wkvb) of keys and of values
//	v = Wv·(P·C)                  P the softmax of the scores
//
// So all heads share one head of keys, [C, Kr], which is also their head of values.

// CacheMemory returns the bytes of the keys and values that [Model.Generate] keeps for a prompt and
// new tokens, together the given number.
func (c Config) CacheMemory(tokens int) (bytes int64) {
	for l := range c.Layers {
		n, width := c.cacheShape(l, tokens)
		bytes += 4 * int64(n) * int64(width)
		if !c.latent() { // keys and values
			bytes += 4 * int64(n) * int64(width)
		}
	}
	return bytes
}

// cacheShape returns the number of tokens that the cache of a layer has room for, if a sequence has
// the given number, and the number of elements of a token: its latent, or its keys.
func (c Config) cacheShape(layer, tokens int) (n, width int) {
	if window := c.window(layer); window > 0 {
		tokens = min(tokens, window)
	}
	if c.latent() {
		return tokens, c.latentCacheWidth()
	}
	return tokens, c.KVWidth()
}

// latentCacheWidth returns the size of a latent with the rotated elements of keys. Attention needs
// an even number.
func (c Config) latentCacheWidth() int { return (c.KVRank + c.RotatedSize + 1) / 2 * 2 }

// A layerCache is the cache of one layer.
type layerCache struct {
	k, v    xpu.Tensor     // [1, G, n, D]
	latents xpu.Tensor     // [1, 1, n, latentCacheWidth] instead
	ofAll   *generateSpace // the decoder's
}

// generateSpace is working memory of a decoder for all layers.
type generateSpace struct {
	// [G·W] rows of the prompt's keys in the order of the cache of a layer with a window of W
	order xpu.Tensor

	// With latent attention, E = latentCacheWidth:
	queries   xpu.Tensor // [1, A, 1, E]
	context   xpu.Tensor // [1, A·E]
	ofHeads   xpu.Tensor // [A, R] queries, and results, of the heads, without rotated elements
	oneOfEach xpu.Tensor // [A] ones: each head has one row
}

// newCache allocates the caches of the layers for a sequence of the given number of tokens.
func (d *decoder) newCache() error {
	m, c := d.m, &d.m.cfg
	var err error
	allocate := func(dtype xpu.DType, shape ...int) (t xpu.Tensor) {
		if err == nil {
			t, err = m.dev.New(dtype, shape...)
		}
		return t
	}
	for l := range d.layers {
		cache := &d.layers[l]
		n, width := c.cacheShape(l, d.capacity)
		if cache.ofAll = &d.space; c.latent() {
			cache.latents = allocate(xpu.Float32, 1, 1, n, width)
			continue
		}
		cache.k = allocate(xpu.Float32, 1, c.KVHeads, n, c.HeadDim())
		cache.v = allocate(xpu.Float32, 1, c.KVHeads, n, c.HeadDim())
	}
	if window := c.SlidingWindow; window > 0 {
		d.space.order = allocate(xpu.Int32, c.KVHeads*min(d.capacity, window))
	}
	if c.latent() {
		width := c.latentCacheWidth()
		d.space.queries = allocate(xpu.Float32, 1, c.Heads, 1, width)
		d.space.context = allocate(xpu.Float32, 1, c.Heads*width)
		d.space.ofHeads = allocate(xpu.Float32, c.Heads, c.KVRank)
		d.space.oneOfEach = allocate(xpu.Int32, c.Heads)
		if err == nil {
			ones := make([]int32, c.Heads)
			for i := range ones {
				ones[i] = 1
			}
			m.dev.WriteInts(d.space.oneOfEach, ones)
		}
	}
	return err
}

// freeCache releases the caches.
func (d *decoder) freeCache() {
	for _, cache := range d.layers {
		for _, t := range []xpu.Tensor{cache.k, cache.v, cache.latents} {
			d.m.dev.Release(t)
		}
	}
	s := &d.space
	for _, t := range []xpu.Tensor{s.order, s.queries, s.context, s.ofHeads, s.oneOfEach} {
		d.m.dev.Release(t)
	}
}

// orderPrompt prepares the caches of layers with a window for a prompt of n tokens.
func (d *decoder) orderPrompt(n int) {
	order := d.space.order
	if !order.Present() {
		return
	}
	heads := d.m.cfg.KVHeads
	size := order.Dim(0) / heads
	rows := make([]int32, heads*size)
	for head := range heads {
		for t := max(0, n-size); t < n; t++ {
			rows[head*size+t%size] = int32(head*n + t)
		}
	}
	d.m.dev.WriteInts(order, rows)
}

// target returns the destination of the keys and values of a layer's next tokens.
func (d *decoder) target(layer int) kvTarget {
	m, cache := d.m, &d.layers[layer]
	to := kvTarget{k: cache.k, v: cache.v, first: d.length, position: d.length, cache: cache}
	switch {
	case m.cfg.latent(), m.layers[layer].window > 0 && d.length == 0:
		to.k, to.v, to.first = m.ws.k, m.ws.v, 0
	case m.layers[layer].window > 0:
		to.first = d.length % cache.k.Dim(2)
	}
	return to
}

// keepPrompt copies the keys and values of the prompt to a layer's cache, if attend has not written
// them there.
func (m *Model) keepPrompt(l *layer, to kvTarget) {
	switch cache := to.cache; {
	case cache == nil || to.position > 0:
	case m.cfg.latent():
		m.keepLatents(cache, 0)
	case l.window > 0:
		for _, copied := range [][2]xpu.Tensor{{cache.k, to.k}, {cache.v, to.v}} {
			size := copied[0].Dim(3)
			m.dev.GatherRows(copied[0].Reshape(cache.ofAll.order.Dim(0), size),
				copied[1].Reshape(copied[1].Elements()/size, size), cache.ofAll.order)
		}
	}
}

// keepLatents writes the latents of a pass to a layer's cache, from the given position on. They are
// in the workspace, and the rotated elements in its heads of keys.
func (m *Model) keepLatents(cache *layerCache, position int) {
	c, w := &m.cfg, &m.ws
	n, width := w.shape.tokens(), c.latentCacheWidth()
	to := cache.latents.Reshape(cache.latents.Dim(2), width).Rows(position, position+n)
	m.dev.CopyColumns(to.Slice(1, 0, c.KVRank), w.latent.normedKV)
	keys := w.k.Index(0).Index(0) // all heads have the same rotated elements
	m.dev.CopyColumns(to.Slice(1, c.KVRank, width), keys.Slice(1, c.PlainSize, c.queryElements()))
}

// attendLatents computes the result of the attention of one token after the prompt, from the
// normalised hidden state in ws.h. See [layerCache].
func (m *Model) attendLatents(l *layer, st *saved, to kvTarget) {
	c, w, s, cache := &m.cfg, &m.ws, to.cache.ofAll, to.cache
	heads, rank, width := c.Heads, c.KVRank, c.latentCacheWidth()
	weights := l.latent.kv.w.Reshape(heads, c.PlainSize+c.ValueSize, rank)

	// The rotated elements. The heads get no keys and values.
	m.projectQueries(l, st, false)
	m.dev.Normalize(w.latent.normedKV, st.latent.kv.x, st.latent.kv.norm(l.latent.kvNorm), false)
	m.dev.Zero(w.latent.keysValues)
	m.splitLatentHeads(l, st, to)
	m.keepLatents(cache, to.position)

	// Queries for latents. The product is over the rows of values, too, with zeros.
	q, padded := w.q.Reshape(heads, c.HeadDim()), w.latent.keysValues.Reshape(heads, c.PlainSize+c.ValueSize)
	m.dev.CopyColumns(padded, q.Slice(1, 0, c.PlainSize))
	m.dev.GroupedMatMul(s.ofHeads, padded, weights, s.oneOfEach, xpu.MatMulOptions{})
	queries, context := s.queries.Reshape(heads, width), s.context.Reshape(heads, width)
	m.dev.CopyColumns(queries.Slice(1, 0, rank), s.ofHeads)
	m.dev.CopyColumns(queries.Slice(1, rank, width), q.Slice(1, c.PlainSize, c.queryElements()))

	m.dev.Attend(xpu.Attention{Q: s.queries, K: cache.latents, V: cache.latents, First: to.position,
		Context: s.context, LSE: st.lse})

	m.dev.CopyColumns(s.ofHeads, context.Slice(1, 0, rank))
	m.dev.GroupedMatMul(padded, s.ofHeads, weights.T(), s.oneOfEach, xpu.MatMulOptions{})
	m.dev.CopyColumns(w.latent.narrow.Reshape(heads, c.ValueSize),
		padded.Slice(1, c.PlainSize, c.PlainSize+c.ValueSize))
	m.dev.Copy(st.ctx, w.latent.narrow)
}
