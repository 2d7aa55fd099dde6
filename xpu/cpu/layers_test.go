package cpu

import (
	"fmt"
	"math"
	"testing"

	"mula/internal/alloctest"
	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/devicetest"
)

// TestDevice compares with plain Go in float64: the best kernel set and Go alone in fp32, and the
// best in bf16. The others have the bits of the best.
func TestDevice(t *testing.T) {
	longtest.SkipIfShort(t)
	defer func(s *kernelSet) { vectorSet = s }(vectorSet)
	sets := kernelSets()
	for _, c := range []struct {
		set, vectors *kernelSet
		tolerance    float64
	}{{sets[0], sets[0], 1e-5}, {sets[len(sets)-1], sets[len(sets)-1], 1e-5}, {kernelsFor(xpu.BF16)[0], sets[0],
		1e-2}} {
		t.Run(fmt.Sprintf("%s %s", c.set.name, c.set.precision), func(t *testing.T) {
			vectorSet = c.vectors
			d := newDevice(c.set, 2)
			defer d.Close()
			devicetest.Run(t, d, c.tolerance, devicetest.Common)
		})
	}
}

// TestHalves checks activations and moments of bfloat16 with every kernel set for bf16, and with
// the best one for fp32.
func TestHalves(t *testing.T) {
	longtest.SkipIfShort(t)
	for _, set := range append(kernelSets()[:1], kernelsFor(xpu.BF16)...) {
		t.Run(fmt.Sprintf("%s %s", set.name, set.precision), func(t *testing.T) {
			d := newDevice(set, 2)
			defer d.Close()
			devicetest.Run(t, d, 0, devicetest.HalfActivations)
		})
	}
}

// TestThreads: results depend neither on the number of workers nor on what they happen to do.
func TestThreads(t *testing.T) {
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		t.Run(string(precision), func(t *testing.T) {
			one, many := New(1, precision), New(5, precision)
			defer one.Close()
			defer many.Close()
			devicetest.SameBits(t, one, many)
		})
	}
}

// TestLayersDoNotAllocate holds the promise that a training step in its steady state allocates
// nothing here.
func TestLayersDoNotAllocate(t *testing.T) {
	d := New(2, xpu.FP32)
	defer d.Close()
	const rows, length, heads, kv, size, experts, perToken, inner, vocabulary = 2, 70, 4, 2, 8, 4, 2, 16, 50
	const tokens, width, pairs = rows * length, heads * size, rows * length * perToken
	tensor := func(dtype xpu.DType, shape ...int) xpu.Tensor {
		x, err := d.New(dtype, shape...)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	f := func(shape ...int) xpu.Tensor {
		x := tensor(xpu.Float32, shape...)
		d.Write(x, uniform(uint64(x.Elements()), x.Elements()))
		return x
	}
	ints := func(shape ...int) xpu.Tensor { return tensor(xpu.Int32, shape...) }
	const projections = (heads + 2*kv) * size
	norm := xpu.Norm{Epsilon: 1e-5, Weight: f(width), RStd: f(tokens)}
	plain := xpu.Norm{Epsilon: 1e-5, Mean: f(tokens), RStd: f(tokens)}
	p := xpu.Projections{QKV: f(tokens, projections), QWeight: f(width), KWeight: f(kv * size), Epsilon: 1e-5,
		RQ: f(tokens), RK: f(tokens), Clip: 1, Cos: f(length, size/2), Sin: f(length, size/2),
		Q: f(rows, heads, length, size), K: f(rows, kv, length, size), V: f(rows, kv, length, size)}
	a := xpu.Attention{Q: p.Q, K: p.K, V: p.V, Context: f(tokens, width), LSE: f(rows, heads, length)}
	r := xpu.Routing{Probs: f(tokens, experts), LSE: f(tokens), Chosen: ints(tokens, perToken), Counts: ints(experts),
		RowOf: ints(tokens, perToken), TokenOf: ints(pairs), Weight: f(pairs)}
	limited := r
	limited.RouterKind = xpu.RouterKind{Sigmoid: true, Bias: f(experts), Groups: 2, TopGroups: 1, SumOfTwo: true}
	rotated := f(tokens, 4)
	latent := xpu.LatentHeads{Queries: f(tokens, heads*8), KeysValues: f(tokens, heads*(4+size)), Rotated: rotated,
		Interleaved: true, Cos: f(length, 2), Sin: f(length, 2), Scale: 1, Q: p.Q, K: f(rows, heads, length, size),
		V: f(rows, heads, length, size)}
	stats := &xpu.RouterStats{Probs: make([]float64, experts), Counts: make([]int64, experts)}
	c := xpu.CrossEntropy{Logits: f(tokens, vocabulary), Targets: ints(tokens), Loss: make([]float64, tokens), Scale: 1}
	x, y, dqkv, sumsOfHeads := f(tokens, width), f(tokens, width), f(tokens, projections), f(2, tokens)
	gateUp, act, dact, logits := f(pairs, 2*inner), f(pairs, inner), f(pairs, inner), f(tokens, experts)
	slope, rowOf := f(experts), ints(tokens, 1)
	biases, ofPairs, sinks, clamp := f(1, 2*inner), ints(1), f(heads), xpu.Clamp{Limit: 7, Alpha: 1}
	ofPairs.Ints()[0] = pairs
	moments := []xpu.Moments{{Weight: f(70000), Grad: f(70000), M: f(70000), V: tensor(xpu.Float32, 70000)}}
	gradients, sums, change := []xpu.Tensor{moments[0].Grad}, make([]float64, 2), make([]float64, 2)
	host := make([]float32, x.Elements())
	for name, run := range map[string]func(){
		"Zero":         func() { d.Zero(y) },
		"Copy":         func() { d.Copy(y, x) },
		"Add":          func() { d.Add(y, x, x) },
		"Embed":        func() { d.Embed(y, x, c.Targets) },
		"EmbedGrad":    func() { d.EmbedGrad(y, x, c.Targets, -1) },
		"Normalize":    func() { d.Normalize(y, x, norm, false) },
		"NormGrad":     func() { d.NormGrad(y, x, a.Context, norm, norm.Weight) },
		"LayerNorm":    func() { d.Normalize(y, x, plain, true) },
		"SplitHeads":   func() { d.SplitHeads(p) },
		"JoinHeads":    func() { d.JoinHeads(p, dqkv, p.K, p.V, p.QWeight, p.KWeight) },
		"SumHeads":     func() { d.SumHeads(sumsOfHeads, p, dqkv, p.K) },
		"SplitLatent":  func() { d.SplitLatent(latent) },
		"JoinLatent":   func() { d.JoinLatent(latent, x, p.Q, p.Q) },
		"CopyColumns":  func() { d.CopyColumns(rotated, x) },
		"Attend":       func() { d.Attend(a) },
		"AttendGrad":   func() { d.AttendGrad(a, x, dqkv, p.K, p.V) },
		"Route":        func() { d.Route(r, logits, false, stats) },
		"Groups":       func() { d.Route(limited, logits, false, stats); d.RouteGrad(limited, logits, slope, r.Weight, 0) },
		"SortRows":     func() { d.Route(r, logits, true, stats); d.SortRows(r) },
		"RouteGrad":    func() { d.RouteGrad(r, logits, slope, r.Weight, 1) },
		"GatherRows":   func() { d.GatherRows(y, x, c.Targets) },
		"SumRows":      func() { d.SumRows(y, x, x, rowOf) },
		"SwiGLU":       func() { d.SwiGLU(act, gateUp, r.Weight) },
		"SwiGLUGrad":   func() { d.SwiGLUGrad(gateUp, act, dact, r.Weight, r.Weight) },
		"Clamped":      func() { d.ClampedSwiGLU(act, gateUp, r.Weight, clamp) },
		"ClampedGrad":  func() { d.ClampedSwiGLUGrad(gateUp, act, dact, r.Weight, r.Weight, clamp) },
		"Bias":         func() { d.GroupedBias(gateUp, biases, r.Weight, ofPairs) },
		"BiasGrad":     func() { d.GroupedBiasGrad(biases, gateUp, biases, r.Weight, r.Weight, ofPairs) },
		"AddSinks":     func() { d.AddSinks(a, sinks) },
		"SinksGrad":    func() { d.SinksGrad(a, sinks, x, sinks) },
		"CrossEntropy": func() { d.CrossEntropy(c) },
		"SumSquares":   func() { d.SumSquares(gradients, sums) },
		"Update":       func() { d.Update(xpu.AdamW{Step: 1}.Update(), moments, sums, change) },
		"Read":         func() { d.Write(x, host); d.Read(t.Context(), host, x); d.Wait(t.Context()) },
	} {
		if n := alloctest.Least(run); n > 0 {
			t.Errorf("%s: %v allocations a run", name, n)
		}
	}
}

func TestMemory(t *testing.T) {
	d, other := New(1, xpu.FP32), New(1, xpu.FP32)
	defer d.Close()
	defer other.Close()
	x, err := d.New(xpu.Float32, 10)
	if err != nil {
		t.Fatal(err)
	}
	n, err := d.New(xpu.Int32, 10)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.New(xpu.Float32, math.MaxInt/2); err == nil {
		t.Error("there is memory for more numbers than there are addresses")
	}
	if _, err := d.New(xpu.Int32, -1); err == nil {
		t.Error("there is memory for a negative number of elements")
	}
	panics := func(what string, f func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s did not panic", what)
			}
		}()
		f()
	}
	panics("releasing memory of another device", func() { other.Release(x) })
	panics("releasing a part", func() { d.Release(x.Rows(0, 5)) })
	panics("releasing memory that is not the device's", func() { d.Release(xpu.OfInts(make([]int32, 10), 10)) })
	d.Release(x)
	d.Release(n)
	d.Release(xpu.Tensor{})
	panics("releasing memory twice", func() { d.Release(x) })
	if len(d.made) > 0 {
		t.Errorf("%d pieces of memory are still counted", len(d.made))
	}
}

// BenchmarkDevice measures every command at the sizes of mula-mini, for 1024 tokens.
func BenchmarkDevice(b *testing.B) {
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		b.Run(string(precision), func(b *testing.B) {
			d := New(0, precision)
			defer d.Close()
			devicetest.Benchmark(b, d, 2)
		})
	}
}
