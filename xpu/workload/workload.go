// Package workload runs every command of an [xpu.Device] at the sizes of mula-mini, to measure
// devices.
package workload

import (
	"context"
	"fmt"
	"math/rand/v2"

	"mula/xpu"
)

// Experts is the number of experts of mula-mini.
const Experts = 64

// The other sizes of mula-mini.
const (
	length     = 512 // tokens per row
	heads      = 8
	headSize   = 64
	width      = heads * headSize
	experts    = Experts
	perToken   = 8
	inner      = 256 // width of an expert
	vocabulary = 50304
)

// lossBlock is the number of tokens whose logits are in memory at a time.
const lossBlock = 256

// A Command is a command with its operands. It may be run any number of times, in any order with
// other commands.
type Command struct {
	Name     string
	Elements int // minimum number of elements read and written
	// multiplications and additions of products; of attention, only for the keys that a query may
	// see. 0 for other commands
	FLOPs   int
	Grouped string // the command that does the same in one call, if this one multiplies per expert
	Give    func()
}

// A maker allocates memory until an allocation fails.
type maker struct {
	d      xpu.Device
	source *rand.Rand
	err    error
}

// zeros allocates n zeros.
func (m *maker) zeros(n int) (x []float32) {
	if m.err != nil {
		return nil
	}
	if x, m.err = m.d.Floats(n); m.err == nil {
		clear(x) // written, because the operating system may map all pages to one page of zeros
	}
	return x
}

// floats allocates n numbers in ±0.5.
func (m *maker) floats(n int) []float32 {
	x := m.zeros(n)
	for i := range x {
		x[i] = m.source.Float32() - 0.5
	}
	if m.err == nil {
		m.d.ToDevice(x)
	}
	return x
}

// ints allocates n whole numbers in [0, below).
func (m *maker) ints(n, below int) (x []int32) {
	if m.err != nil {
		return nil
	}
	if x, m.err = m.d.Ints(n); m.err != nil {
		return nil
	}
	for i := range x {
		x[i] = int32(m.source.IntN(below))
	}
	m.d.IntsToDevice(x)
	return x
}

// Commands returns all commands with operands for the given number of rows of 512 tokens. Their
// memory is freed with the device: about 600 MB, and 50 MB for each row.
//
// No command reads a buffer that another command adds to, and a command overwrites only its own
// zero buffers. Growing numbers would become infinite, and shrinking numbers denormal, which is
// slow on some devices.
func Commands(ctx context.Context, d xpu.Device, rows int) ([]Command, error) {
	m := &maker{d: d, source: rand.New(rand.NewPCG(1, 1))}
	var all []Command
	give := func(name string, elements, flops int, command func()) {
		all = append(all, Command{Name: name, Elements: elements, FLOPs: flops, Give: command})
	}
	oneByOne := func(command func()) {
		last := all[len(all)-1]
		all = append(all, Command{last.Name + ", one by one", last.Elements, last.FLOPs, last.Name, command})
	}
	const projections = 3 * width
	tokens := rows * length
	pairs, keys := tokens*perToken, tokens*width

	x, y, z := m.floats(keys), m.floats(keys), m.floats(keys)
	give("Zero", keys, 0, func() { d.Zero(z) })
	give("Copy", 2*keys, 0, func() { d.Copy(z, x) })
	give("Add", 3*keys, 0, func() { d.Add(z, x, y) })

	ids, table := m.ints(tokens, vocabulary), m.floats(vocabulary*width)
	dtable := m.zeros(vocabulary * width)
	give("Embed", 2*keys, 0, func() { d.Embed(z, table, ids, width) })
	give("EmbedGrad", 3*keys, 0, func() { d.EmbedGrad(dtable, x, ids, width, -1) })

	norm := xpu.Norm{Width: width, Epsilon: 1e-5, Weight: m.floats(width), RStd: m.floats(tokens)}
	nothing, dnorm := m.zeros(keys), m.zeros(width)
	give("Normalize", 2*keys, 0, func() { d.Normalize(y, x, norm, false) })
	give("NormGrad", 5*keys, 0, func() { d.NormGrad(z, nothing, x, norm, dnorm) })

	h := xpu.Heads{Rows: rows, Length: length, Heads: heads, KVHeads: heads, Size: headSize}
	p := xpu.Projections{Heads: h, QKV: m.floats(tokens * projections), QWeight: m.floats(width),
		KWeight: m.floats(width), Epsilon: 1e-5, RQ: m.floats(tokens),
		RK: m.floats(tokens), Cos: m.floats(length * headSize / 2), Sin: m.floats(length * headSize / 2),
		Capacity: length, Q: m.floats(keys), K: m.floats(keys),
		V: m.floats(keys)}
	a := xpu.Attention{Heads: h, Q: p.Q, K: p.K, V: p.V, Capacity: length, Context: m.floats(keys),
		LSE: m.floats(tokens * heads)}
	w, dw, dqkv, dcontext, dx := m.floats(projections*width), m.zeros(projections*width), m.floats(tokens*projections),
		m.floats(keys), m.zeros(keys)
	dk, dv, joined, dq, dkNorm := m.floats(keys), m.floats(keys), m.zeros(tokens*projections), m.zeros(width),
		m.zeros(width)
	elements, flops := tokens*(width+projections)+len(w), 2*tokens*width*projections
	give("MatMul projections", elements, flops, func() {
		d.MatMul(xpu.Of(p.QKV, tokens, projections), xpu.Of(x, tokens, width),
			xpu.Of(w, projections, width).T(), xpu.MatMulOptions{})
	})
	give("MatMul projections, gradient of inputs", elements, flops, func() {
		d.MatMul(xpu.Of(dx, tokens, width), xpu.Of(dqkv, tokens, projections),
			xpu.Of(w, projections, width), xpu.MatMulOptions{})
	})
	give("MatMul projections, gradient of weights", elements+len(w), flops, func() {
		d.MatMul(xpu.Of(dw, projections, width), xpu.Of(dqkv, tokens, projections).T(),
			xpu.Of(x, tokens, width), xpu.MatMulOptions{Accumulate: true})
	})
	give("SplitHeads", 6*keys, 0, func() { d.SplitHeads(p) })
	scores := rows * heads * length * (length + 1) / 2 * headSize
	give("Attend", 4*keys, 4*scores, func() { d.Attend(a) })
	give("AttendGrad", 8*keys, 10*scores, func() { d.AttendGrad(a, dcontext, dqkv, dk, dv) })
	give("JoinHeads", 8*keys, 0, func() { d.JoinHeads(p, joined, dk, dv, dq, dkNorm) })

	logits := m.floats(tokens * experts)
	r := xpu.Routing{Experts: experts, PerToken: perToken, Probs: m.floats(tokens * experts), LSE: m.floats(tokens),
		Chosen: m.ints(pairs, 1),
		Counts: m.ints(experts, 1), RowOf: m.ints(pairs, 1), TokenOf: m.ints(pairs, 1), Weight: m.floats(pairs)}
	stats := &xpu.RouterStats{Probs: make([]float64, experts), Counts: make([]int64, experts)}
	slope, dweight, dlogits := m.floats(experts), m.floats(pairs), m.floats(tokens*experts)
	give("Route", 2*tokens*experts+pairs, 0, func() { d.Route(r, logits, false, stats) })
	give("SortRows", 5*pairs, 0, func() { d.SortRows(r) })
	give("RouteGrad", 2*tokens*experts+3*pairs, 0, func() { d.RouteGrad(r, dlogits, slope, dweight, 0.1) })

	gathered, dgathered := m.floats(pairs*width), m.floats(pairs*width)
	gateUp, act, dact, rest, zero := m.floats(pairs*2*inner), m.floats(pairs*inner), m.floats(pairs*inner),
		m.zeros(pairs*2*inner), m.zeros(pairs*inner)
	up, down := m.floats(experts*2*inner*width), m.floats(experts*width*inner)
	dup, ddown, first, second := m.zeros(len(up)), m.zeros(len(down)), m.zeros(len(up)), m.zeros(len(up))

	// The following commands use these choices.
	if m.err != nil {
		return nil, fmt.Errorf("workload of %d tokens: %w", tokens, m.err)
	}
	d.Route(r, logits, false, stats)
	d.SortRows(r)
	if err := d.IntsToHost(ctx, r.Counts); err != nil {
		return nil, err
	}
	counts := append([]int32(nil), r.Counts...)
	each := func(command func(expert, row, n int)) func() {
		return func() {
			row := 0
			for e, n := range counts {
				command(e, row, int(n))
				row += int(n)
			}
		}
	}

	give("GatherRows", 2*pairs*width, 0, func() { d.GatherRows(gathered, x, r.TokenOf, width) })
	elements, flops = pairs*(width+2*inner)+len(up), 2*pairs*width*2*inner
	give("GroupedMatMul gate and up", elements, flops, func() {
		d.GroupedMatMul(xpu.Of(gateUp, pairs, 2*inner), xpu.Of(gathered, pairs, width),
			xpu.Of(up, len(r.Counts), 2*inner, width).T(), xpu.OfInts(r.Counts, len(r.Counts)),
			xpu.MatMulOptions{})
	})
	oneByOne(each(func(e, row, n int) {
		d.MatMul(xpu.Of(gateUp[row*2*inner:], n, 2*inner), xpu.Of(gathered[row*width:], n, width),
			xpu.Of(up[e*2*inner*width:], 2*inner, width).T(), xpu.MatMulOptions{})
	}))
	give("GroupedMatMul gate and up, gradient of inputs", elements, flops,
		func() {
			d.GroupedMatMul(xpu.Of(dgathered, pairs, width), xpu.Of(gateUp, pairs, 2*inner),
				xpu.Of(up, len(r.Counts), 2*inner, width), xpu.OfInts(r.Counts, len(r.Counts)), xpu.MatMulOptions{})
		})
	oneByOne(each(func(e, row, n int) {
		d.MatMul(xpu.Of(dgathered[row*width:], n, width), xpu.Of(gateUp[row*2*inner:], n, 2*inner),
			xpu.Of(up[e*2*inner*width:], 2*inner, width), xpu.MatMulOptions{})
	}))
	give("GroupedWeightGrad gate and up", elements+len(up), flops,
		func() {
			d.GroupedWeightGrad(xpu.Of(dup, len(r.Counts), 2*inner, width),
				xpu.Of(gateUp, pairs, 2*inner), xpu.Of(gathered, pairs, width),
				xpu.OfInts(r.Counts, len(r.Counts)), xpu.MatMulOptions{Accumulate: true})
		})
	oneByOne(each(func(e, row, n int) {
		d.MatMul(xpu.Of(dup[e*2*inner*width:], 2*inner, width),
			xpu.Of(gateUp[row*2*inner:], n, 2*inner).T(), xpu.Of(gathered[row*width:], n, width),
			xpu.MatMulOptions{Accumulate: true})
	}))
	elements, flops = pairs*(width+inner)+len(down), 2*pairs*width*inner
	give("GroupedMatMul down", elements, flops, func() {
		d.GroupedMatMul(xpu.Of(dgathered, pairs, width), xpu.Of(act, pairs, inner),
			xpu.Of(down, len(r.Counts), width, inner).T(), xpu.OfInts(r.Counts, len(r.Counts)),
			xpu.MatMulOptions{})
	})
	oneByOne(each(func(e, row, n int) {
		d.MatMul(xpu.Of(dgathered[row*width:], n, width), xpu.Of(act[row*inner:], n, inner),
			xpu.Of(down[e*width*inner:], width, inner).T(), xpu.MatMulOptions{})
	}))
	give("GroupedMatMul down, gradient of inputs", elements, flops,
		func() {
			d.GroupedMatMul(xpu.Of(dact, pairs, inner), xpu.Of(gathered, pairs, width),
				xpu.Of(down, len(r.Counts), width, inner), xpu.OfInts(r.Counts, len(r.Counts)), xpu.MatMulOptions{})
		})
	oneByOne(each(func(e, row, n int) {
		d.MatMul(xpu.Of(dact[row*inner:], n, inner), xpu.Of(gathered[row*width:], n, width),
			xpu.Of(down[e*width*inner:], width, inner), xpu.MatMulOptions{})
	}))
	give("GroupedWeightGrad down", elements+len(down), flops,
		func() {
			d.GroupedWeightGrad(xpu.Of(ddown, len(r.Counts), width, inner),
				xpu.Of(gathered, pairs, width), xpu.Of(act, pairs, inner), xpu.OfInts(r.Counts, len(r.Counts)),
				xpu.MatMulOptions{Accumulate: true})
		})
	oneByOne(each(func(e, row, n int) {
		d.MatMul(xpu.Of(ddown[e*width*inner:], width, inner),
			xpu.Of(gathered[row*width:], n, width).T(), xpu.Of(act[row*inner:], n, inner),
			xpu.MatMulOptions{Accumulate: true})
	}))
	give("SwiGLU", pairs*3*inner, 0, func() { d.SwiGLU(act, gateUp, r.Weight, inner) })
	give("SwiGLUGrad", pairs*6*inner, 0, func() { d.SwiGLUGrad(rest, act, zero, r.Weight, dweight, inner) })
	give("SumRows", pairs*width+2*keys, 0, func() { d.SumRows(z, x, gathered, r.RowOf, perToken, width) })

	block := min(tokens, lossBlock)
	c := xpu.CrossEntropy{Width: vocabulary, Logits: m.floats(block * vocabulary), Targets: ids[:block],
		Loss: make([]float64, block), Scale: 1e-3}
	give("MatMul logits", block*(width+vocabulary)+vocabulary*width, 2*block*width*vocabulary, func() {
		d.MatMul(xpu.Of(c.Logits, block, vocabulary), xpu.Of(x, block, width),
			xpu.Of(table, vocabulary, width).T(), xpu.MatMulOptions{})
	})
	give("CrossEntropy", 2*len(c.Logits), 0, func() { d.CrossEntropy(c) })

	stretches, sums := [][]float32{dup}, make([]float64, (len(up)+xpu.BlockSize-1)/xpu.BlockSize)
	moments := []xpu.Moments{{Weight: up, Grad: dup, M: first, V: second}}
	give("SumSquares", len(up), 0, func() { d.SumSquares(stretches, sums) })
	checksums := make([]uint64, len(sums))
	give("Checksums", len(up), 0, func() { d.Checksums(stretches, checksums) })
	rule := xpu.AdamW{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, Step: 9, GradScale: 1}.Update()
	give("AdamW", 7*len(up), 0, func() { d.Update(rule, moments, nil, nil) })
	if m.err != nil {
		return nil, fmt.Errorf("workload of %d tokens: %w", tokens, m.err)
	}
	return all, nil
}
