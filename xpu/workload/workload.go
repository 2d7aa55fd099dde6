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

// make allocates a tensor.
func (m *maker) make(dtype xpu.DType, shape []int) (x xpu.Tensor) {
	if m.err == nil {
		x, m.err = m.d.New(dtype, shape...)
	}
	return x
}

// zeros allocates zeros.
func (m *maker) zeros(shape ...int) xpu.Tensor {
	x := m.make(xpu.Float32, shape)
	if m.err == nil {
		// written, because the operating system may map all pages to one page of zeros
		m.d.Write(x, make([]float32, x.Elements()))
	}
	return x
}

// floats allocates numbers in ±0.5.
func (m *maker) floats(shape ...int) xpu.Tensor {
	x := m.make(xpu.Float32, shape)
	if m.err == nil {
		host := make([]float32, x.Elements())
		for i := range host {
			host[i] = m.source.Float32() - 0.5
		}
		m.d.Write(x, host)
	}
	return x
}

// ints allocates whole numbers in [0, below).
func (m *maker) ints(below int, shape ...int) xpu.Tensor {
	x := m.make(xpu.Int32, shape)
	if m.err == nil {
		host := make([]int32, x.Elements())
		for i := range host {
			host[i] = int32(m.source.IntN(below))
		}
		m.d.WriteInts(x, host)
	}
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

	var plain xpu.MatMulOptions
	add := xpu.MatMulOptions{Accumulate: true}

	x, y, z := m.floats(tokens, width), m.floats(tokens, width), m.floats(tokens, width)
	give("Zero", keys, 0, func() { d.Zero(z) })
	give("Copy", 2*keys, 0, func() { d.Copy(z, x) })
	give("Add", 3*keys, 0, func() { d.Add(z, x, y) })
	give("Combine", 3*keys, 0, func() { d.Combine(z, x, y, 0.5, 2, 0) })

	ids, table := m.ints(vocabulary, tokens), m.floats(vocabulary, width)
	dtable := m.zeros(vocabulary, width)
	give("Embed", 2*keys, 0, func() { d.Embed(z, table, ids) })
	give("EmbedGrad", 3*keys, 0, func() { d.EmbedGrad(dtable, x, ids, -1) })

	norm := xpu.Norm{Epsilon: 1e-5, Weight: m.floats(width), RStd: m.floats(tokens)}
	nothing, dnorm := m.zeros(tokens, width), m.zeros(width)
	give("Normalize", 2*keys, 0, func() { d.Normalize(y, x, norm, false) })
	give("NormGrad", 5*keys, 0, func() { d.NormGrad(z, nothing, x, norm, dnorm) })

	ofHeads := func() xpu.Tensor { return m.floats(rows, heads, length, headSize) }
	p := xpu.Projections{QKV: m.floats(tokens, projections), QWeight: m.floats(width), KWeight: m.floats(width),
		Epsilon: 1e-5, RQ: m.floats(tokens), RK: m.floats(tokens), Cos: m.floats(length, headSize/2),
		Sin: m.floats(length, headSize/2), Q: ofHeads(), K: ofHeads(), V: ofHeads()}
	a := xpu.Attention{Q: p.Q, K: p.K, V: p.V, Context: m.floats(tokens, width), LSE: m.floats(rows, heads, length)}
	w, dw, dqkv, dcontext, dx := m.floats(projections, width), m.zeros(projections, width),
		m.floats(tokens, projections), m.floats(tokens, width), m.zeros(tokens, width)
	dk, dv, joined, dq, dkNorm := ofHeads(), ofHeads(), m.zeros(tokens, projections), m.zeros(width), m.zeros(width)
	elements, flops := tokens*(width+projections)+projections*width, 2*tokens*width*projections
	give("MatMul projections", elements, flops, func() { d.MatMul(p.QKV, x, w.T(), plain) })
	give("MatMul projections, gradient of inputs", elements, flops, func() { d.MatMul(dx, dqkv, w, plain) })
	give("MatMul projections, gradient of weights", elements+projections*width, flops,
		func() { d.MatMul(dw, dqkv.T(), x, add) })
	give("SplitHeads", 6*keys, 0, func() { d.SplitHeads(p) })
	scores := rows * heads * length * (length + 1) / 2 * headSize
	give("Attend", 4*keys, 4*scores, func() { d.Attend(a) })
	give("AttendGrad", 8*keys, 10*scores, func() { d.AttendGrad(a, dcontext, dqkv, dk, dv) })
	ofNorms := m.zeros(2, tokens)
	give("SumHeads", 4*keys, 0, func() { d.SumHeads(ofNorms, p, dqkv, dk) })
	give("JoinHeads", 8*keys, 0, func() { d.JoinHeads(p, joined, dk, dv, dq, dkNorm) })

	logits := m.floats(tokens, experts)
	r := xpu.Routing{Probs: m.floats(tokens, experts), LSE: m.floats(tokens), Chosen: m.ints(1, tokens, perToken),
		Counts: m.ints(1, experts), RowOf: m.ints(1, tokens, perToken), TokenOf: m.ints(1, pairs),
		Weight: m.floats(pairs)}
	stats := &xpu.RouterStats{Probs: make([]float64, experts), Counts: make([]int64, experts)}
	slope, dweight, dlogits := m.floats(experts), m.floats(pairs), m.floats(tokens, experts)
	give("Route", 2*tokens*experts+pairs, 0, func() { d.Route(r, logits, false, stats) })
	give("SortRows", 5*pairs, 0, func() { d.SortRows(r) })
	give("RouteGrad", 2*tokens*experts+3*pairs, 0, func() { d.RouteGrad(r, dlogits, slope, dweight, 0.1) })

	gathered, dgathered := m.floats(pairs, width), m.floats(pairs, width)
	gateUp, act, dact, rest, zero := m.floats(pairs, 2*inner), m.floats(pairs, inner), m.floats(pairs, inner),
		m.zeros(pairs, 2*inner), m.zeros(pairs, inner)
	up, down := m.floats(experts, 2*inner, width), m.floats(experts, width, inner)
	dup, ddown := m.zeros(experts, 2*inner, width), m.zeros(experts, width, inner)
	first, second := m.zeros(experts, 2*inner, width), m.zeros(experts, 2*inner, width)

	// The following commands use these choices.
	if m.err != nil {
		return nil, fmt.Errorf("workload of %d tokens: %w", tokens, m.err)
	}
	d.Route(r, logits, false, stats)
	d.SortRows(r)
	counts := make([]int32, experts)
	if err := d.ReadInts(ctx, counts, r.Counts); err != nil {
		return nil, err
	}
	// each calls a command for each expert, with a range of rows
	each := func(command func(expert, from, to int)) func() {
		return func() {
			row := 0
			for e, n := range counts {
				command(e, row, row+int(n))
				row += int(n)
			}
		}
	}

	upElements, downElements := experts*2*inner*width, experts*width*inner
	give("GatherRows", 2*pairs*width, 0, func() { d.GatherRows(gathered, x, r.TokenOf) })
	elements, flops = pairs*(width+2*inner)+upElements, 2*pairs*width*2*inner
	give("GroupedMatMul gate and up", elements, flops,
		func() { d.GroupedMatMul(gateUp, gathered, up.T(), r.Counts, plain) })
	oneByOne(each(func(e, from, to int) {
		d.MatMul(gateUp.Rows(from, to), gathered.Rows(from, to), up.Index(e).T(), plain)
	}))
	give("GroupedMatMul gate and up, gradient of inputs", elements, flops,
		func() { d.GroupedMatMul(dgathered, gateUp, up, r.Counts, plain) })
	oneByOne(each(func(e, from, to int) {
		d.MatMul(dgathered.Rows(from, to), gateUp.Rows(from, to), up.Index(e), plain)
	}))
	give("GroupedWeightGrad gate and up", elements+upElements, flops,
		func() { d.GroupedWeightGrad(dup, gateUp, gathered, r.Counts, add) })
	oneByOne(each(func(e, from, to int) {
		d.MatMul(dup.Index(e), gateUp.Rows(from, to).T(), gathered.Rows(from, to), add)
	}))
	elements, flops = pairs*(width+inner)+downElements, 2*pairs*width*inner
	give("GroupedMatMul down", elements, flops, func() { d.GroupedMatMul(dgathered, act, down.T(), r.Counts, plain) })
	oneByOne(each(func(e, from, to int) {
		d.MatMul(dgathered.Rows(from, to), act.Rows(from, to), down.Index(e).T(), plain)
	}))
	give("GroupedMatMul down, gradient of inputs", elements, flops,
		func() { d.GroupedMatMul(dact, gathered, down, r.Counts, plain) })
	oneByOne(each(func(e, from, to int) {
		d.MatMul(dact.Rows(from, to), gathered.Rows(from, to), down.Index(e), plain)
	}))
	give("GroupedWeightGrad down", elements+downElements, flops,
		func() { d.GroupedWeightGrad(ddown, gathered, act, r.Counts, add) })
	oneByOne(each(func(e, from, to int) {
		d.MatMul(ddown.Index(e), gathered.Rows(from, to).T(), act.Rows(from, to), add)
	}))
	give("SwiGLU", pairs*3*inner, 0, func() { d.SwiGLU(act, gateUp, r.Weight) })
	give("SwiGLUGrad", pairs*6*inner, 0, func() { d.SwiGLUGrad(rest, act, zero, r.Weight, dweight) })
	give("SumRows", pairs*width+2*keys, 0, func() { d.SumRows(z, x, gathered, r.RowOf) })

	block := min(tokens, lossBlock)
	c := xpu.CrossEntropy{Logits: m.floats(block, vocabulary), Targets: ids.Rows(0, block),
		Loss: make([]float64, block), Scale: 1e-3}
	give("MatMul logits", block*(width+vocabulary)+vocabulary*width, 2*block*width*vocabulary,
		func() { d.MatMul(c.Logits, x.Rows(0, block), table.T(), plain) })
	give("CrossEntropy", 2*block*vocabulary, 0, func() { d.CrossEntropy(c) })

	stretches, sums := []xpu.Tensor{dup}, make([]float64, (upElements+xpu.BlockSize-1)/xpu.BlockSize)
	moments := []xpu.Moments{{Weight: up, Grad: dup, M: first, V: second}}
	give("SumSquares", upElements, 0, func() { d.SumSquares(stretches, sums) })
	checksums := make([]uint64, len(sums))
	give("Checksums", upElements, 0, func() { d.Checksums(stretches, checksums) })
	rule := xpu.AdamW{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, Step: 9, GradScale: 1}.Update()
	give("AdamW", 7*upElements, 0, func() { d.Update(rule, moments, nil, nil) })
	if m.err != nil {
		return nil, fmt.Errorf("workload of %d tokens: %w", tokens, m.err)
	}
	return all, nil
}
