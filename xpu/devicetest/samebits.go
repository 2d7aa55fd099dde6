package devicetest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"mula/xpu"
)

// SameBits checks that two devices compute the same bits: it runs each command on both with the
// same numbers. It is for devices with the same Arithmetic that differ otherwise, for example in
// threads, and for one device twice, to check that its results do not depend on the timing of its
// workers.
func SameBits(t *testing.T, one, other xpu.Device) {
	for _, s := range []step{
		{rows: 1, length: 1, heads: 1, kvHeads: 1, size: 2, experts: 1, perToken: 1, inner: 1, vocabulary: 2},
		{rows: 3, length: 70, heads: 4, kvHeads: 2, size: 6, experts: 5, perToken: 2, inner: 9, vocabulary: 35,
			clip: 0.6, norm: true, zFactor: 0.1},
		{rows: 2, length: 150, heads: 3, kvHeads: 3, size: 16, experts: 16, perToken: 3, inner: 40, vocabulary: 300,
			uniform: true, norm: true, sample: true},
		{rows: 1, length: 40, heads: 2, kvHeads: 1, size: 8, experts: 3, perToken: 3, inner: 70, vocabulary: 90,
			clip: 0.4, first: 25},
		{rows: 2, length: 170, heads: 2, kvHeads: 1, size: 10, experts: 2, perToken: 1, inner: 8, vocabulary: 20,
			document: 60},
	} {
		t.Run(fmt.Sprintf("%+v", s), func(t *testing.T) {
			want, got := s.run(t, one), s.run(t, other)
			for i, w := range want {
				g := got[i]
				for j := range w.bits {
					if g.bits[j] != w.bits[j] {
						t.Errorf("%s, element %d of %d: %s has %x, %s has %x", w.name, j, len(w.bits), one.Name(),
							w.bits[j], other.Name(), g.bits[j])
						break
					}
				}
			}
		})
	}
}

// A step is the sizes and options of one run of all commands.
type step struct {
	rows, length, heads, kvHeads, size   int
	experts, perToken, inner, vocabulary int
	first                                int // position of the first token, for Attend
	// length of documents to which attention is restricted, and whose last target is negative; 0:
	// no documents
	document              int
	clip, zFactor         float64
	norm, uniform, sample bool
}

// bits are a result of any type.
type bits struct {
	name string
	bits []uint64
}

// A recorder runs commands on a device and keeps their results.
type recorder struct {
	t       *testing.T
	d       xpu.Device
	source  *rand.Rand
	results []bits
}

// floats allocates a tensor of numbers in ±1. zeros allocates a tensor that the device writes.
func (r *recorder) floats(shape ...int) xpu.Tensor {
	x := r.zeros(shape...)
	host := make([]float32, x.Elements())
	for i := range host {
		host[i] = 2*r.source.Float32() - 1
	}
	r.d.Write(x, host)
	return x
}

func (r *recorder) zeros(shape ...int) xpu.Tensor {
	n, err := xpu.Elements(shape)
	if err != nil {
		r.t.Fatal(err)
	}
	return upload(r.t, r.d, make([]float32, n), shape...)
}

func (r *recorder) ints(below int, shape ...int) xpu.Tensor {
	n, err := xpu.Elements(shape)
	if err != nil {
		r.t.Fatal(err)
	}
	x := make([]int32, n)
	for i := range x {
		x[i] = int32(r.source.IntN(below))
	}
	return uploadInts(r.t, r.d, x, shape...)
}

// keep records the contents of tensors.
func (r *recorder) keep(name string, x ...xpu.Tensor) {
	r.t.Helper()
	for i, x := range x {
		b := bits{name: fmt.Sprintf("%s, result %d", name, i)}
		if x.Present() && x.DType() == xpu.Int32 {
			for _, v := range readInts(r.t, r.d, x) {
				b.bits = append(b.bits, uint64(v))
			}
		} else {
			for _, v := range read(r.t, r.d, x) {
				b.bits = append(b.bits, uint64(math.Float32bits(v)))
			}
		}
		r.results = append(r.results, b)
	}
}

// keepHost records host results.
func (r *recorder) keepHost(name string, x ...[]float64) {
	r.t.Helper()
	if err := r.d.Wait(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	for i, x := range x {
		b := bits{name: fmt.Sprintf("%s, host result %d", name, i)}
		for _, v := range x {
			b.bits = append(b.bits, math.Float64bits(v))
		}
		r.results = append(r.results, b)
	}
}

// run runs all commands on a device.
func (s step) run(t *testing.T, d xpu.Device) []bits {
	r := &recorder{t: t, d: d, source: rand.New(rand.NewPCG(7, uint64(s.length)))}
	s.elements(r)
	s.norms(r)
	s.attention(r)
	s.latent(r)
	s.routing(r)
	s.loss(r)
	s.update(r)
	return r.results
}

func (s step) tokens() int { return s.rows * s.length }
func (s step) width() int  { return s.heads * s.size }

func (s step) elements(r *recorder) {
	const n = 70000
	x, y, sum, moved := r.floats(n), r.floats(n), r.floats(n), r.floats(n)
	r.d.Add(sum, x, y)
	r.d.Copy(moved.Rows(1, n), x.Rows(1, n))
	r.d.Zero(y.Rows(3, n-1))
	r.keep("Zero, Copy, Add", y, moved, sum)

	ids := r.ints(s.vocabulary, s.tokens())
	table, dst := r.floats(s.vocabulary, s.width()), r.zeros(s.tokens(), s.width())
	r.d.Embed(dst, table, ids)
	r.d.EmbedGrad(table, dst, ids, 1)
	r.keep("Embed, EmbedGrad", dst, table)

	r.d.Jitter(dst, xpu.Jitter{Numbers: ids, Epsilon: 0.2, Seed: 7})
	r.keep("Jitter", dst)
}

func (s step) norms(r *recorder) {
	t, width := s.tokens(), s.width()
	n := xpu.Norm{Epsilon: 1e-5, Mean: r.zeros(t), RStd: r.zeros(t)}
	var dweight xpu.Tensor
	if s.norm {
		n.Weight, dweight = r.floats(width), r.floats(width)
	}
	x, y, again, dx, dy := r.floats(t, width), r.zeros(t, width), r.zeros(t, width), r.floats(t, width),
		r.floats(t, width)
	r.d.Normalize(y, x, n, false)
	r.d.Normalize(again, x, n, true)
	r.d.NormGrad(dx, dy, x, n, dweight)
	r.keep("Normalize, NormGrad", y, again, n.RStd, dx, dweight)
}

// latent runs the projections and heads of latent attention.
func (s step) latent(r *recorder) {
	t, capacity, plain := s.tokens(), s.first+s.length, s.size/2
	turned := s.size - plain + (s.size-plain)%2
	size := plain + turned + (plain+turned)%2
	l := xpu.LatentHeads{Queries: r.floats(t, s.heads*(plain+turned)), KeysValues: r.floats(t, s.heads*(plain+plain+1)),
		Rotated: r.floats(t, turned), Interleaved: true, Cos: r.floats(capacity, turned/2),
		Sin: r.floats(capacity, turned/2), Scale: 0.3, First: s.first, Q: r.zeros(s.rows, s.heads, s.length, size),
		K: r.zeros(s.rows, s.heads, capacity, size), V: r.zeros(s.rows, s.heads, capacity, size)}
	r.d.SplitLatent(l)
	narrow := r.zeros(s.rows*s.heads*s.length, plain)
	r.d.CopyColumns(narrow, l.Q.Reshape(s.rows*s.heads*s.length, size))
	r.keep("SplitLatent, CopyColumns", l.Q, l.K, l.V, narrow)
	if s.first > 0 {
		return
	}
	r.d.JoinLatent(l, r.floats(t, s.heads*size), r.floats(l.K.Shape()...), r.floats(l.K.Shape()...))
	r.keep("JoinLatent", l.Queries, l.KeysValues, l.Rotated)
}

func (s step) attention(r *recorder) {
	t, capacity, projections := s.tokens(), s.first+s.length, (s.heads+2*s.kvHeads)*s.size
	keys := []int{s.rows, s.kvHeads, capacity, s.size}
	p := xpu.Projections{
		QKV: r.floats(t, projections), Epsilon: 1e-5, RQ: r.zeros(t), RK: r.zeros(t), Clip: s.clip,
		Cos: r.floats(capacity, s.size/2), Sin: r.floats(capacity, s.size/2), First: s.first,
		Q: r.zeros(s.rows, s.heads, s.length, s.size), K: r.floats(keys...), V: r.floats(keys...),
	}
	var dq, dk xpu.Tensor
	if s.norm {
		p.QWeight, p.KWeight = r.floats(s.width()), r.floats(s.kvHeads*s.size)
		dq, dk = r.floats(s.width()), r.floats(s.kvHeads*s.size)
	}
	r.d.SplitHeads(p)
	r.keep("SplitHeads", p.Q, p.K, p.V)
	a := xpu.Attention{Q: p.Q, K: p.K, V: p.V, First: s.first, Context: r.zeros(t, s.width()),
		LSE: r.zeros(s.rows, s.heads, s.length)}
	if s.document > 0 {
		begin := make([]int32, t)
		for i := range begin {
			begin[i] = int32(i % s.length / s.document * s.document)
		}
		a.Begin = uploadInts(r.t, r.d, begin, s.rows, s.length)
	}
	r.d.Attend(a)
	r.keep("Attend", a.Context, a.LSE)
	dcontext, dqkv, dkeys, dvalues := r.floats(t, s.width()), r.zeros(t, projections), r.zeros(keys...),
		r.zeros(keys...)
	r.d.AttendGrad(a, dcontext, dqkv, dkeys, dvalues)
	r.keep("AttendGrad", dqkv, dkeys, dvalues)
	if s.first > 0 {
		return
	}
	if s.norm {
		squares, products := r.zeros(2, t), r.zeros(2, t)
		r.d.SumHeads(squares, p, xpu.Tensor{}, xpu.Tensor{})
		r.d.SumHeads(products, p, dqkv, dkeys)
		r.keep("SumHeads", squares, products)
	}
	r.d.JoinHeads(p, dqkv, dkeys, dvalues, dq, dk)
	r.keep("JoinHeads", dqkv, dq, dk)
}

// routing runs a layer of experts, forward and backward.
func (s step) routing(r *recorder) {
	t, rows, width := s.tokens(), s.tokens()*s.perToken, s.width()
	logits := r.floats(t, s.experts)
	route := xpu.Routing{
		Probs: r.zeros(t, s.experts), LSE: r.zeros(t), Chosen: r.ints(1, t, s.perToken), Counts: r.ints(1, s.experts),
		RowOf: r.ints(1, t, s.perToken), TokenOf: r.ints(1, rows), Weight: r.zeros(rows),
	}
	stats := xpu.RouterStats{Probs: make([]float64, s.experts), Counts: make([]int64, s.experts)}
	r.d.Route(route, logits, s.uniform, &stats)
	r.d.SortRows(route)
	r.keep("Route, SortRows", route.Probs, route.LSE, route.Weight, route.Chosen, route.Counts, route.RowOf,
		route.TokenOf)
	counts := make([]float64, s.experts)
	for i, n := range stats.Counts {
		counts[i] = float64(n)
	}
	r.keepHost("Route", stats.Probs, counts, []float64{stats.LSE2, stats.Entropy})

	var none xpu.Tensor
	var plain xpu.MatMulOptions
	x, y := r.floats(t, width), r.zeros(t, width)
	gathered, gateUp, act, out := r.zeros(rows, width), r.zeros(rows, 2*s.inner), r.zeros(rows, s.inner),
		r.zeros(rows, width)
	up, down := r.floats(s.experts, 2*s.inner, width), r.floats(s.experts, width, s.inner)
	r.d.GatherRows(gathered, x, route.TokenOf)
	r.d.GroupedMatMul(gateUp, gathered, up.T(), route.Counts, plain)
	r.d.SwiGLU(act, gateUp, route.Weight)
	r.d.GroupedMatMul(out, act, down.T(), route.Counts, plain)
	r.d.SumRows(y, x, out, route.RowOf)
	r.keep("experts", gathered, gateUp, act, out, y)

	dact, dweight, dlogits, slope := r.zeros(rows, s.inner), r.zeros(rows), r.zeros(t, s.experts), r.floats(s.experts)
	dup, ddown := r.floats(up.Shape()...), r.floats(down.Shape()...)
	r.d.GatherRows(out, x, route.TokenOf)
	r.d.GroupedMatMul(dact, out, down, route.Counts, plain)
	r.d.SwiGLUGrad(gateUp, act, dact, route.Weight, dweight)
	r.d.GroupedWeightGrad(ddown, out, act, route.Counts, xpu.MatMulOptions{Accumulate: true})
	r.d.GroupedWeightGrad(dup, gateUp, gathered, route.Counts, plain)
	r.d.GroupedMatMul(gathered, gateUp, up, route.Counts, plain)
	r.d.SumRows(y, none, gathered, route.RowOf)
	r.d.RouteGrad(route, dlogits, slope, dweight, s.zFactor)
	r.keep("gradients of experts", gateUp, act, dweight, dup, ddown, gathered, y, dlogits)

	// Without weights, as in a dense layer.
	gateUp, act, dact = gateUp.Rows(0, t), act.Rows(0, t), dact.Rows(0, t)
	r.d.MatMul(gateUp, x, up.Index(0).T(), xpu.MatMulOptions{Accumulate: true})
	r.d.SwiGLU(act, gateUp, none)
	r.keep("dense", act)
	r.d.SwiGLUGrad(gateUp, act, dact, none, none)
	r.d.MatMul(dup.Index(0), gateUp.T(), x, plain)
	r.keep("gradients of dense", gateUp, dup)
}

func (s step) loss(r *recorder) {
	t, loss := s.tokens(), make([]float64, s.tokens())
	targets := make([]int32, t)
	for i := range targets {
		if targets[i] = int32(r.source.IntN(s.vocabulary)); s.document > 0 && (i+1)%s.document == 0 {
			targets[i] = -1
		}
	}
	c := xpu.CrossEntropy{Logits: r.floats(t, s.vocabulary), Targets: uploadInts(r.t, r.d, targets), Loss: loss,
		Sample: s.sample, Seed: 3, First: 11}
	r.d.CrossEntropy(c)
	r.keepHost("CrossEntropy", loss)
	c.Logits, c.Scale = r.floats(t, s.vocabulary), 0.3
	r.d.CrossEntropy(c)
	r.keep("CrossEntropy with its gradient", c.Logits, c.Targets)
	r.keepHost("CrossEntropy with its gradient", loss)
}

func (s step) update(r *recorder) {
	sizes := []int{1, xpu.BlockSize + 5, 0, 333}
	var stretches []xpu.Moments
	var gradients []xpu.Tensor
	for _, n := range sizes {
		squares := make([]float32, n)
		for i := range squares {
			squares[i] = r.source.Float32()
		}
		v := upload(r.t, r.d, squares)
		stretches = append(stretches, xpu.Moments{Weight: r.floats(n), Grad: r.floats(n), M: r.floats(n), V: v})
		gradients = append(gradients, stretches[len(stretches)-1].Grad)
	}
	sums, before, change := make([]float64, 4), make([]float64, 4), make([]float64, 4)
	r.d.SumSquares(gradients, sums)
	rule := xpu.AdamW{LearningRate: 0.01, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1, Step: 3,
		GradScale: 0.7}
	r.d.Update(rule.Update(), stretches, before, change)
	rule.DecayAfter, rule.WeightDecay = 0.01, 0
	r.d.Update(rule.Update(), stretches, nil, nil)
	r.keepHost("SumSquares, AdamW", sums, before, change)
	for _, m := range stretches {
		r.keep("AdamW", m.Weight, m.M, m.V)
	}
}
