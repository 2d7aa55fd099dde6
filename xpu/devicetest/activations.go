package devicetest

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// halfActivationsFamily checks the commands on activations and moments of bf16: each must compute
// what it computes for the same numbers in float32, with results rounded once.
func halfActivationsFamily(t *testing.T, d xpu.Device, _ float64) {
	t.Run("products", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfLeftOperands(t, d) })
	})
	t.Run("experts", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfExperts(t, d) })
	})
	t.Run("attention", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfAttention(t, d) })
	})
	t.Run("moments", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfMoments(t, d) })
	})
}

// rounded compares the results of a command on either type. A result of bf16 must be the rounded
// result in float32.
func (c halfCase) rounded(name string, results [2]xpu.Tensor) {
	wide, got := read(c, c.d, results[0]), read(c, c.d, results[1])
	for i, want := range wide {
		if results[1].DType() == xpu.BFloat16 {
			want = roundBF16(want)
		}
		if math.Float32bits(want) != math.Float32bits(got[i]) {
			c.Fatalf("%s: element %d of %v is %v, want %v", name, i, results[0].Shape(), got[i], want)
		}
	}
}

// halfLeftOperands has a left operand, or the result of a product of groups, of bf16.
func halfLeftOperands(t *rapid.T, d xpu.Device) {
	c := newHalfCase(t, d)
	size := func(name string, most int) int { return rapid.IntRange(1, most).Draw(t, name) }
	m, n, k := size("m", 200), size("n", 70), size("k", 1100)
	o := xpu.MatMulOptions{Accumulate: rapid.Bool().Draw(t, "accumulate")}
	a, transposed := c.both(m, k), c.both(k, m)
	b, counts := c.floats(k, n), uploadInts(t, d, []int32{int32(m / 3), 0, int32(m - m/3)})
	results := func(shape ...int) [2]xpu.Tensor {
		first := c.both(shape...)[0]
		return [2]xpu.Tensor{first, upload(t, d, read(t, d, first), shape...)}
	}
	products, backward, grouped := results(m, n), results(m, n), results(m, n)
	weights := c.floats(3, k, n)
	rows, gradients := c.floats(m, n), results(3, k, n)
	for kind := range a {
		d.MatMul(products[kind], a[kind], b, o)
		d.MatMul(backward[kind], transposed[kind].T(), b, o)
		d.GroupedMatMul(grouped[kind], a[kind], weights, counts, o)
		d.GroupedWeightGrad(gradients[kind], a[kind], rows, counts, o)
	}
	c.rounded("MatMul", products)
	c.rounded("MatMul, a transposed", backward)
	c.rounded("GroupedMatMul", grouped)
	c.rounded("GroupedWeightGrad", gradients)
	rounded := c.both(m, n)
	for kind := range a {
		d.GroupedMatMul(rounded[kind], a[0], weights, counts, xpu.MatMulOptions{})
	}
	c.rounded("GroupedMatMul, dst of bf16", rounded)
}

// halfExperts has gate and up projections of bf16, and rows of an embedding in bf16.
func halfExperts(t *rapid.T, d xpu.Device) {
	c := newHalfCase(t, d)
	rows, width := rapid.IntRange(1, 80).Draw(t, "rows"), rapid.IntRange(1, 70).Draw(t, "width")
	gateUp, dact := c.both(rows, 2*width), random(c.r, rows*width)
	var weight xpu.Tensor
	weighted := rapid.Bool().Draw(t, "weighted")
	if weighted {
		weight = c.floats(rows)
	}
	act, again := [2]xpu.Tensor{c.floats(rows, width), c.floats(rows, width)}, [2]xpu.Tensor{c.floats(rows, width),
		c.floats(rows, width)}
	dweight := [2]xpu.Tensor{c.floats(rows), c.floats(rows)}
	for kind, x := range gateUp {
		d.SwiGLU(act[kind], x, weight)
		d.SwiGLUGrad(x, again[kind], upload(t, d, dact, rows, width), weight, dweight[kind])
	}
	c.rounded("SwiGLU", act)
	c.rounded("SwiGLUGrad, act", again)
	c.rounded("SwiGLUGrad, gateUp", gateUp)
	if weighted {
		c.rounded("SwiGLUGrad, dweight", dweight)
	}
	clamp, wide := xpu.Clamp{Limit: 0.5, Alpha: 1.702}, c.both(rows, 2*width)
	biases, counts := c.floats(2, 2*width), uploadInts(t, d, []int32{int32(rows / 2), int32(rows - rows/2)})
	for kind, x := range wide {
		d.ClampedSwiGLU(act[kind], x, weight, clamp)
		d.ClampedSwiGLUGrad(x, again[kind], upload(t, d, dact, rows, width), weight, dweight[kind], clamp)
	}
	c.rounded("ClampedSwiGLU", act)
	c.rounded("ClampedSwiGLUGrad, act", again)
	c.rounded("ClampedSwiGLUGrad, gateUp", wide)
	biased := c.both(rows, 2*width)
	for _, x := range biased {
		d.GroupedBias(x, biases, weight, counts)
	}
	c.rounded("GroupedBias", biased)
	d.Copy(biased[0], biased[1])
	var dbias [2]xpu.Tensor
	for kind, x := range biased {
		dbias[kind] = upload(t, d, make([]float32, 4*width), 2, 2*width)
		dweight[kind] = upload(t, d, make([]float32, rows))
		d.GroupedBiasGrad(dbias[kind], x, biases, weight, dweight[kind], counts)
	}
	c.rounded("GroupedBiasGrad", dbias)
	c.rounded("GroupedBiasGrad, weights", dweight)
	ids := make([]int32, rows)
	for i := range ids {
		ids[i] = int32(c.r.IntN(5))
	}
	numbers := uploadInts(t, d, ids)
	for _, table := range []xpu.Tensor{c.floats(5, width), c.both(5, width)[1]} {
		dst := c.both(rows, width)
		for _, x := range dst {
			d.Embed(x, table, numbers)
		}
		c.rounded("Embed", dst)
	}
}

// halfAttention has projections and a context of bf16.
func halfAttention(t *rapid.T, d xpu.Device) {
	c := newHalfCase(t, d)
	sequences, length := rapid.IntRange(1, 2).Draw(t, "rows"), rapid.IntRange(1, 90).Draw(t, "length")
	half, groups := rapid.IntRange(1, 9).Draw(t, "half of a head"), rapid.IntRange(1, 2).Draw(t, "groups")
	heads, share := 2*groups, 2*half
	tokens, width := sequences*length, (heads+2*groups)*share
	kv := func() xpu.Tensor { return c.floats(sequences, groups, length, share) }
	p := xpu.Projections{Epsilon: 1e-5, QWeight: c.floats(heads * share), KWeight: c.floats(groups * share),
		Clip: rapid.SampledFrom([]float64{0, .5}).Draw(t, "clip"), Cos: c.floats(length, half),
		Sin: c.floats(length, half)}
	qkv, context := c.both(tokens, width), c.both(tokens, heads*share)
	q := [2]xpu.Tensor{c.floats(sequences, heads, length, share), c.floats(sequences, heads, length, share)}
	k, v, rq, rk, dqkv, dq := [2]xpu.Tensor{kv(), kv()}, [2]xpu.Tensor{kv(), kv()},
		[2]xpu.Tensor{c.floats(tokens), c.floats(tokens)}, [2]xpu.Tensor{c.floats(tokens), c.floats(tokens)},
		random(c.r, tokens*width), random(c.r, (heads+groups)*share)
	dk, dv, dcontext := kv(), kv(), c.floats(tokens, heads*share)
	var joined, dweights, lse [2]xpu.Tensor
	for kind := range qkv {
		p.QKV, p.Q, p.K, p.V, p.RQ, p.RK = qkv[kind], q[kind], k[kind], v[kind], rq[kind], rk[kind]
		d.SplitHeads(p)
		joined[kind], dweights[kind] = upload(t, d, dqkv, tokens, width), upload(t, d, dq)
		d.JoinHeads(p, joined[kind], dk, dv, dweights[kind].Rows(0, heads*share),
			dweights[kind].Rows(heads*share, len(dq)))
		lse[kind] = c.floats(sequences, heads, length)
		d.Attend(xpu.Attention{Q: q[0], K: k[0], V: v[0], Context: context[kind], LSE: lse[kind]})
	}
	c.rounded("SplitHeads, Q", q)
	c.rounded("SplitHeads, K", k)
	c.rounded("SplitHeads, V", v)
	c.rounded("SplitHeads, RQ", rq)
	c.rounded("JoinHeads", joined)
	c.rounded("JoinHeads, weights", dweights)
	c.rounded("Attend", context)
	c.rounded("Attend, LSE", lse)
	d.Copy(context[0], context[1]) // from the same numbers
	sinks := c.floats(heads)
	for kind := range context {
		d.AddSinks(xpu.Attention{Q: q[0], K: k[0], V: v[0], Context: context[kind], LSE: lse[kind]}, sinks)
	}
	c.rounded("AddSinks", context)
	c.rounded("AddSinks, LSE", lse)
	d.Copy(context[0], context[1])
	var dsinks [2]xpu.Tensor
	for kind := range context {
		dsinks[kind] = c.floats(heads)
		d.Zero(dsinks[kind])
		d.SinksGrad(xpu.Attention{Q: q[0], K: k[0], V: v[0], Context: context[kind], LSE: lse[kind]}, sinks, dcontext,
			dsinks[kind])
	}
	c.rounded("SinksGrad", dsinks)
	var gradients, dkeys, dvalues [2]xpu.Tensor
	for kind := range context {
		gradients[kind], dkeys[kind], dvalues[kind] = upload(t, d, dqkv, tokens, width), kv(), kv()
		d.AttendGrad(xpu.Attention{Q: q[0], K: k[0], V: v[0], Context: context[kind], LSE: lse[0]}, dcontext,
			gradients[kind], dkeys[kind], dvalues[kind])
	}
	c.rounded("AttendGrad", gradients)
	c.rounded("AttendGrad, dk", dkeys)
	c.rounded("AttendGrad, dv", dvalues)
}

// halfMoments updates weights with a state of bf16.
func halfMoments(t *rapid.T, d xpu.Device) {
	c := newHalfCase(t, d)
	n := rapid.IntRange(1, 10_000).Draw(t, "n")
	u := rapid.SampledFrom(UpdateCases).Draw(t, "update").Update
	m, v := c.both(n), c.both(n)
	squares := read(t, d, v[0])
	for i, x := range squares {
		squares[i] = roundBF16(x * x)
	}
	d.Write(v[0], squares)
	d.Write(v[1], squares)
	if rapid.Bool().Draw(t, "second in float32") {
		v[1] = upload(t, d, squares)
	}
	grad, start := random(c.r, n), random(c.r, n)
	var weights [2]xpu.Tensor
	var sums [2][2]float64
	for kind := range weights {
		weights[kind] = upload(t, d, start)
		s := xpu.Moments{Weight: weights[kind], Grad: upload(t, d, grad), M: m[kind]}
		if u.States > 1 {
			s.V = v[kind]
		}
		d.Update(u, []xpu.Moments{s}, sums[kind][:1], sums[kind][1:])
		if err := d.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	c.rounded(u.Rule+", weights", weights)
	c.rounded(u.Rule+", first state", m)
	c.rounded(u.Rule+", second state", v)
	if sums[0] != sums[1] {
		t.Errorf("%s: sums %v, in float32 %v", u.Rule, sums[1], sums[0])
	}
}
