package devicetest

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// RunHalves checks the commands of processors on activations and moments of bf16: each must compute
// what it computes for the same numbers in float32, with results rounded once.
func RunHalves(t *testing.T, d xpu.Device) {
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

// A typed runs commands on the same numbers as float32 and as bf16.
type typed struct {
	t tester
	d xpu.Device
	r *rand.Rand
}

func newTyped(t *rapid.T, d xpu.Device, stream uint64) typed {
	return typed{t, d, rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), stream))}
}

// both returns the same numbers in either type.
func (y typed) both(shape ...int) [2]xpu.Tensor {
	n, _ := xpu.Elements(shape)
	half := uploadHalves(y.t, y.d, halfBits(y.r, n), shape...)
	return [2]xpu.Tensor{upload(y.t, y.d, read(y.t, y.d, half), shape...), half}
}

func (y typed) floats(shape ...int) xpu.Tensor {
	n, _ := xpu.Elements(shape)
	return upload(y.t, y.d, random(y.r, n), shape...)
}

// same compares the results of a command on either type. A result of bf16 must be the rounded
// result in float32.
func (y typed) same(name string, results [2]xpu.Tensor) {
	wide, got := read(y.t, y.d, results[0]), read(y.t, y.d, results[1])
	for i, want := range wide {
		if results[1].DType() == xpu.BFloat16 {
			want = roundBF16(want)
		}
		if math.Float32bits(want) != math.Float32bits(got[i]) {
			y.t.Fatalf("%s: element %d of %v is %v, want %v", name, i, results[0].Shape(), got[i], want)
		}
	}
}

// halfLeftOperands has a left operand, or the result of a product of groups, of bf16.
func halfLeftOperands(t *rapid.T, d xpu.Device) {
	y := newTyped(t, d, 4)
	size := func(name string, most int) int { return rapid.IntRange(1, most).Draw(t, name) }
	m, n, k := size("m", 200), size("n", 70), size("k", 1100)
	o := xpu.MatMulOptions{Accumulate: rapid.Bool().Draw(t, "accumulate")}
	a, transposed := y.both(m, k), y.both(k, m)
	b, counts := y.floats(k, n), uploadInts(t, d, []int32{int32(m / 3), 0, int32(m - m/3)})
	results := func(shape ...int) [2]xpu.Tensor {
		first := y.both(shape...)[0]
		return [2]xpu.Tensor{first, upload(t, d, read(t, d, first), shape...)}
	}
	products, backward, grouped := results(m, n), results(m, n), results(m, n)
	weights := y.floats(3, k, n)
	rows, gradients := y.floats(m, n), results(3, k, n)
	for kind := range a {
		d.MatMul(products[kind], a[kind], b, o)
		d.MatMul(backward[kind], transposed[kind].T(), b, o)
		d.GroupedMatMul(grouped[kind], a[kind], weights, counts, o)
		d.GroupedWeightGrad(gradients[kind], a[kind], rows, counts, o)
	}
	y.same("MatMul", products)
	y.same("MatMul, a transposed", backward)
	y.same("GroupedMatMul", grouped)
	y.same("GroupedWeightGrad", gradients)
	rounded := y.both(m, n)
	for kind := range a {
		d.GroupedMatMul(rounded[kind], a[0], weights, counts, xpu.MatMulOptions{})
	}
	y.same("GroupedMatMul, dst of bf16", rounded)
}

// halfExperts has gate and up projections of bf16, and rows of an embedding in bf16.
func halfExperts(t *rapid.T, d xpu.Device) {
	y := newTyped(t, d, 5)
	rows, width := rapid.IntRange(1, 80).Draw(t, "rows"), rapid.IntRange(1, 70).Draw(t, "width")
	gateUp, dact := y.both(rows, 2*width), random(y.r, rows*width)
	var weight xpu.Tensor
	weighted := rapid.Bool().Draw(t, "weighted")
	if weighted {
		weight = y.floats(rows)
	}
	act, again := [2]xpu.Tensor{y.floats(rows, width), y.floats(rows, width)}, [2]xpu.Tensor{y.floats(rows, width),
		y.floats(rows, width)}
	dweight := [2]xpu.Tensor{y.floats(rows), y.floats(rows)}
	for kind, x := range gateUp {
		d.SwiGLU(act[kind], x, weight)
		d.SwiGLUGrad(x, again[kind], upload(t, d, dact, rows, width), weight, dweight[kind])
	}
	y.same("SwiGLU", act)
	y.same("SwiGLUGrad, act", again)
	y.same("SwiGLUGrad, gateUp", gateUp)
	if weighted {
		y.same("SwiGLUGrad, dweight", dweight)
	}
	ids := make([]int32, rows)
	for i := range ids {
		ids[i] = int32(y.r.IntN(5))
	}
	numbers := uploadInts(t, d, ids)
	for _, table := range []xpu.Tensor{y.floats(5, width), y.both(5, width)[1]} {
		dst := y.both(rows, width)
		for _, x := range dst {
			d.Embed(x, table, numbers)
		}
		y.same("Embed", dst)
	}
}

// halfAttention has projections and a context of bf16.
func halfAttention(t *rapid.T, d xpu.Device) {
	y := newTyped(t, d, 6)
	sequences, length := rapid.IntRange(1, 2).Draw(t, "rows"), rapid.IntRange(1, 90).Draw(t, "length")
	half, groups := rapid.IntRange(1, 9).Draw(t, "half of a head"), rapid.IntRange(1, 2).Draw(t, "groups")
	heads, share := 2*groups, 2*half
	tokens, width := sequences*length, (heads+2*groups)*share
	kv := func() xpu.Tensor { return y.floats(sequences, groups, length, share) }
	p := xpu.Projections{Epsilon: 1e-5, QWeight: y.floats(heads * share), KWeight: y.floats(groups * share),
		Clip: rapid.SampledFrom([]float64{0, .5}).Draw(t, "clip"), Cos: y.floats(length, half),
		Sin: y.floats(length, half)}
	qkv, context := y.both(tokens, width), y.both(tokens, heads*share)
	q := [2]xpu.Tensor{y.floats(sequences, heads, length, share), y.floats(sequences, heads, length, share)}
	k, v, rq, rk, dqkv, dq := [2]xpu.Tensor{kv(), kv()}, [2]xpu.Tensor{kv(), kv()},
		[2]xpu.Tensor{y.floats(tokens), y.floats(tokens)}, [2]xpu.Tensor{y.floats(tokens), y.floats(tokens)},
		random(y.r, tokens*width), random(y.r, (heads+groups)*share)
	dk, dv, dcontext := kv(), kv(), y.floats(tokens, heads*share)
	var joined, dweights, lse [2]xpu.Tensor
	for kind := range qkv {
		p.QKV, p.Q, p.K, p.V, p.RQ, p.RK = qkv[kind], q[kind], k[kind], v[kind], rq[kind], rk[kind]
		d.SplitHeads(p)
		joined[kind], dweights[kind] = upload(t, d, dqkv, tokens, width), upload(t, d, dq)
		d.JoinHeads(p, joined[kind], dk, dv, dweights[kind].Rows(0, heads*share),
			dweights[kind].Rows(heads*share, len(dq)))
		lse[kind] = y.floats(sequences, heads, length)
		d.Attend(xpu.Attention{Q: q[0], K: k[0], V: v[0], Context: context[kind], LSE: lse[kind]})
	}
	y.same("SplitHeads, Q", q)
	y.same("SplitHeads, K", k)
	y.same("SplitHeads, V", v)
	y.same("SplitHeads, RQ", rq)
	y.same("JoinHeads", joined)
	y.same("JoinHeads, weights", dweights)
	y.same("Attend", context)
	y.same("Attend, LSE", lse)
	d.Copy(context[0], context[1]) // the gradient from the same numbers
	var gradients, dkeys, dvalues [2]xpu.Tensor
	for kind := range context {
		gradients[kind], dkeys[kind], dvalues[kind] = upload(t, d, dqkv, tokens, width), kv(), kv()
		d.AttendGrad(xpu.Attention{Q: q[0], K: k[0], V: v[0], Context: context[kind], LSE: lse[0]}, dcontext,
			gradients[kind], dkeys[kind], dvalues[kind])
	}
	y.same("AttendGrad", gradients)
	y.same("AttendGrad, dk", dkeys)
	y.same("AttendGrad, dv", dvalues)
}

// halfMoments updates weights with a state of bf16.
func halfMoments(t *rapid.T, d xpu.Device) {
	y := newTyped(t, d, 7)
	n := rapid.IntRange(1, 10_000).Draw(t, "n")
	c := rapid.SampledFrom(UpdateCases).Draw(t, "update")
	u := c.Update
	m, v := y.both(n), y.both(n)
	squares := read(t, d, v[0])
	for i, x := range squares {
		squares[i] = roundBF16(x * x)
	}
	d.Write(v[0], squares)
	d.Write(v[1], squares)
	if rapid.Bool().Draw(t, "second in float32") {
		v[1] = upload(t, d, squares)
	}
	grad, start := random(y.r, n), random(y.r, n)
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
	y.same(u.Rule+", weights", weights)
	y.same(u.Rule+", first state", m)
	y.same(u.Rule+", second state", v)
	if sums[0] != sums[1] {
		t.Errorf("%s: sums %v, in float32 %v", u.Rule, sums[1], sums[0])
	}
}
