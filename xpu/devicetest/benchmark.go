package devicetest

import (
	"math/rand/v2"
	"testing"

	"mula/xpu"
)

// Benchmark measures every command at the sizes of mula-mini, for so many rows of 512 tokens. It reports what has to be read and written at least, in
// GB/s, and of products, attention included, the rate in GFLOP/s, of which attention needs those of the keys that a query may see. Behind the
// products of experts it measures the same by a product for each expert ("one by one").
func Benchmark(b *testing.B, d xpu.Device, rows int) {
	const length, heads, size, experts, perToken, inner, vocabulary = 512, 8, 64, 64, 8, 256, 50304
	const width, projections = heads * size, 3 * heads * size
	tokens := rows * length
	pairs, keys := tokens*perToken, tokens*width
	source := rand.New(rand.NewPCG(1, 1))
	fail := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	floats := func(n int) []float32 {
		x, err := d.Floats(n)
		fail(err)
		b.Cleanup(func() { d.Free(x) })
		copy(x, random(source, n))
		d.ToDevice(x)
		return x
	}
	ints := func(n, below int) []int32 {
		x, err := d.Ints(n)
		fail(err)
		b.Cleanup(func() { d.FreeInts(x) })
		for i := range x {
			x[i] = int32(source.IntN(below))
		}
		d.IntsToDevice(x)
		return x
	}
	// What commands spoil is zero, or it would become smaller with each call, down to denormal numbers, which are slow on some devices.

	// elements are those read and written, flops the multiplications and additions of products
	measure := func(name string, elements, flops int, command func()) {
		b.Run(name, func(b *testing.B) {
			command()
			fail(d.Wait(b.Context()))
			for b.Loop() {
				command()
				fail(d.Wait(b.Context()))
			}
			seconds := b.Elapsed().Seconds() / float64(b.N)
			b.ReportMetric(4e-9*float64(elements)/seconds, "GB/s")
			if flops > 0 {
				b.ReportMetric(1e-9*float64(flops)/seconds, "GFLOP/s")
			}
		})
	}

	x, y, z := floats(keys), floats(keys), floats(keys)
	dcontext := floats(keys)
	measure("Zero", keys, 0, func() { d.Zero(z) })
	measure("Copy", 2*keys, 0, func() { d.Copy(z, x) })
	measure("Add", 3*keys, 0, func() { d.Add(z, x, y) })

	ids, table := ints(tokens, vocabulary), floats(vocabulary*width)
	measure("Embed", 2*keys, 0, func() { d.Embed(z, table, ids, width) })
	measure("EmbedGrad", 3*keys, 0, func() { d.EmbedGrad(table, x, ids, width, -1) })

	norm := xpu.Norm{Width: width, Epsilon: 1e-5, Weight: floats(width), RStd: floats(tokens)}
	dweight := floats(width)
	measure("Normalize", 2*keys, 0, func() { d.Normalize(y, x, norm, false) })
	d.Zero(y)
	measure("NormGrad", 5*keys, 0, func() { d.NormGrad(z, y, x, norm, dweight) })

	h := xpu.Heads{Rows: rows, Length: length, Heads: heads, KVHeads: heads, Size: size}
	p := xpu.Projections{Heads: h, QKV: floats(tokens * projections), QWeight: floats(width), KWeight: floats(width), Epsilon: 1e-5, RQ: floats(tokens), RK: floats(tokens),
		Cos: floats(length * size / 2), Sin: floats(length * size / 2), Capacity: length, Q: floats(keys), K: floats(keys), V: floats(keys)}
	a := xpu.Attention{Heads: h, Q: p.Q, K: p.K, V: p.V, Capacity: length, Context: x, LSE: floats(tokens * heads)}
	dqkv, dk, dv, dqWeight, dkWeight := floats(tokens*projections), floats(keys), floats(keys), floats(width), floats(width)
	w := floats(projections * width)
	measure("MatMul projections", tokens*(width+projections)+width*projections, 2*tokens*width*projections, func() {
		d.MatMul(false, true, tokens, projections, width, x, width, w, width, p.QKV, projections, false)
	})
	measure("MatMul projections, gradient of weights", tokens*(width+projections)+2*width*projections, 2*tokens*width*projections, func() {
		d.MatMul(true, false, projections, width, tokens, dqkv, projections, x, width, w, width, true)
	})
	measure("SplitHeads", 6*keys, 0, func() { d.SplitHeads(p) })
	scores := rows * heads * length * (length + 1) / 2 * size
	measure("Attend", 4*keys, 4*scores, func() { d.Attend(a) })
	measure("AttendGrad", 8*keys, 10*scores, func() { d.AttendGrad(a, dcontext, dqkv, dk, dv) })
	d.Zero(dqkv)
	measure("JoinHeads", 8*keys, 0, func() { d.JoinHeads(p, dqkv, dk, dv, dqWeight, dkWeight) })

	logits := floats(tokens * experts)
	r := xpu.Routing{Experts: experts, PerToken: perToken, Probs: floats(tokens * experts), LSE: floats(tokens), Chosen: ints(pairs, 1), Counts: ints(experts, 1),
		RowOf: ints(pairs, 1), TokenOf: ints(pairs, 1), Weight: floats(pairs)}
	stats := &xpu.RouterStats{Probs: make([]float64, experts), Counts: make([]int64, experts)}
	slope, dweights, dlogits := floats(experts), floats(pairs), floats(tokens*experts)
	measure("Route", 2*tokens*experts+pairs, 0, func() { d.Route(r, logits, false, stats) })
	measure("SortRows", 5*pairs, 0, func() { d.SortRows(r) })
	d.Route(r, logits, false, stats) // whichever measurements were asked for
	d.SortRows(r)
	measure("RouteGrad", 2*tokens*experts+3*pairs, 0, func() { d.RouteGrad(r, dlogits, slope, dweights, 0.1) })

	gathered, gateUp, act, dact := floats(pairs*width), floats(pairs*2*inner), floats(pairs*inner), floats(pairs*inner)
	up, down := floats(experts*2*inner*width), floats(experts*width*inner)
	upFlops, downFlops := 2*pairs*width*2*inner, 2*pairs*width*inner
	upElements, downElements := pairs*(width+2*inner)+len(up), pairs*(width+inner)+len(down)
	measure("GatherRows", 2*pairs*width, 0, func() { d.GatherRows(gathered, x, r.TokenOf, width) })
	measure("GroupedMatMul gate and up", upElements, upFlops, func() {
		d.GroupedMatMul(r.Counts, pairs, true, 2*inner, width, gathered, up, gateUp, false)
	})
	counts := make([]int32, experts)
	fail(d.IntsToHost(b.Context(), r.Counts))
	copy(counts, r.Counts)
	measure("GroupedMatMul gate and up, one by one", upElements, upFlops, func() {
		row := 0
		for e, n := range counts {
			d.MatMul(false, true, int(n), 2*inner, width, gathered[row*width:], width, up[e*2*inner*width:], width, gateUp[row*2*inner:], 2*inner, false)
			row += int(n)
		}
	})
	measure("SwiGLU", pairs*3*inner, 0, func() { d.SwiGLU(act, gateUp, r.Weight, inner) })
	measure("GroupedMatMul down", downElements, downFlops, func() { d.GroupedMatMul(r.Counts, pairs, true, width, inner, act, down, gathered, false) })
	measure("SumRows", pairs*width+2*keys, 0, func() { d.SumRows(z, x, gathered, r.RowOf, perToken, width) })
	measure("GroupedMatMul down, gradient of inputs", downElements, downFlops, func() { d.GroupedMatMul(r.Counts, pairs, false, inner, width, gathered, down, dact, false) })
	d.Zero(dact)
	measure("SwiGLUGrad", pairs*6*inner, 0, func() { d.SwiGLUGrad(gateUp, act, dact, r.Weight, dweights, inner) })
	d.Copy(gateUp, floats(len(gateUp)))
	measure("GroupedMatMul gate and up, gradient of inputs", upElements, upFlops, func() { d.GroupedMatMul(r.Counts, pairs, false, width, 2*inner, gateUp, up, gathered, false) })
	measure("GroupedWeightGrad down", downElements+len(down), downFlops, func() { d.GroupedWeightGrad(r.Counts, pairs, width, inner, gathered, act, down, true) })
	measure("GroupedWeightGrad gate and up", upElements+len(up), upFlops, func() { d.GroupedWeightGrad(r.Counts, pairs, 2*inner, width, gateUp, gathered, up, true) })
	measure("GroupedWeightGrad gate and up, one by one", upElements+len(up), upFlops, func() {
		row := 0
		for e, n := range counts {
			d.MatMul(true, false, 2*inner, width, int(n), gateUp[row*2*inner:], 2*inner, gathered[row*width:], width, up[e*2*inner*width:], width, true)
			row += int(n)
		}
	})

	block := min(tokens, 256)
	c := xpu.CrossEntropy{Width: vocabulary, Logits: floats(block * vocabulary), Targets: ids[:block], Loss: make([]float64, block), Scale: 1e-3}
	measure("MatMul logits", block*(width+vocabulary)+vocabulary*width, 2*block*width*vocabulary, func() {
		d.MatMul(false, true, block, vocabulary, width, x, width, table, width, c.Logits, vocabulary, false)
	})
	measure("CrossEntropy", 2*len(c.Logits), 0, func() { d.CrossEntropy(c) })

	moments := []xpu.Moments{{Weight: up, Grad: floats(len(up)), M: floats(len(up)), V: floats(len(up))}}
	d.Zero(moments[0].V)
	gradients, sums := [][]float32{moments[0].Grad}, make([]float64, (len(up)+xpu.BlockSize-1)/xpu.BlockSize)
	measure("SumSquares", len(up), 0, func() { d.SumSquares(gradients, sums) })
	measure("AdamW", 7*len(up), 0, func() {
		d.AdamW(xpu.AdamW{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, Step: 9, GradScale: 1, Keep: 1}, moments, nil, nil)
	})
}
