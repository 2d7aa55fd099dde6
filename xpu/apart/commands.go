package apart

import (
	"fmt"
	"math"

	"mula/xpu"
)

// Each command below calls the inner device with the device's sides of its operands. Then it
// poisons the host's side of everything that it wrote, and nothing else.

// tensor returns a tensor on the device's side.
func (d *Device) tensor(t xpu.Tensor) xpu.Tensor { return t.On(d.floats(t.Host())) }

// MatMul multiplies matrices; see [xpu.Products].
func (d *Device) MatMul(dst, a, b xpu.Tensor, o xpu.MatMulOptions) {
	if dst, a, b := d.tensor(dst), d.tensor(a), d.tensor(b); d.works() {
		d.inner.MatMul(dst, a, b, o)
	}
	poisonRows(dst.Host(), dst)
}

// poisonRows poisons the rows of a matrix on the host's side, but not the gaps between them.
func poisonRows(x []float32, t xpu.Tensor) {
	stride, _, _ := t.Stored()
	for i := 0; i < t.Dim(0) && len(x) > 0; i++ {
		poison(x[i*stride:][:t.Dim(1)])
	}
}

// GroupedMatMul multiplies groups of rows; see [xpu.Products].
func (d *Device) GroupedMatMul(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	inner := xpu.OfInts(d.ints(counts.HostInts()), counts.Elements())
	if dst, a, b := d.tensor(dst), d.tensor(a), d.tensor(b); d.works() {
		d.inner.GroupedMatMul(dst, a, b, inner, o)
	}
	poison(dst.Host())
}

// GroupedWeightGrad computes the gradients of the matrices of groups; see [xpu.Products].
func (d *Device) GroupedWeightGrad(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	inner := xpu.OfInts(d.ints(counts.HostInts()), counts.Elements())
	if dst, a, b := d.tensor(dst), d.tensor(a), d.tensor(b); d.works() {
		d.inner.GroupedWeightGrad(dst, a, b, inner, o)
	}
	poison(dst.Host()) // including groups without rows, which the host cannot know
}

// Zero sets x to zero.
func (d *Device) Zero(x []float32) {
	if x := d.floats(x); d.works() {
		d.inner.Zero(x)
	}
	poison(x)
}

// Copy sets dst to x.
func (d *Device) Copy(dst, x []float32) {
	if dst, x := d.floats(dst), d.floats(x); d.works() {
		d.inner.Copy(dst, x)
	}
	poison(dst)
}

// Add sets dst to x + y.
func (d *Device) Add(dst, x, y []float32) {
	if dst, x, y := d.floats(dst), d.floats(x), d.floats(y); d.works() {
		d.inner.Add(dst, x, y)
	}
	poison(dst)
}

// Embed looks up rows of a table; see [xpu.Layers].
func (d *Device) Embed(dst, table []float32, ids []int32, width int) {
	if dst, table, ids := d.floats(dst), d.floats(table), d.ints(ids); d.works() {
		d.inner.Embed(dst, table, ids, width)
	}
	poison(dst[:len(ids)*width])
}

// EmbedGrad is the gradient of Embed; see [xpu.Layers]. It panics if the two sides of ids differ.
func (d *Device) EmbedGrad(dtable, dx []float32, ids []int32, width int, skip int32) {
	twins := d.ints(ids)
	for i, id := range twins {
		if ids[i] != id {
			panic(fmt.Sprintf("apart: EmbedGrad: id %d of %d is %d on the device and %d on the host", i, len(ids), id,
				ids[i]))
		}
	}
	if dtable, dx := d.floats(dtable), d.floats(dx); d.works() {
		d.inner.EmbedGrad(dtable, dx, twins, width, skip)
	}
	for _, id := range ids {
		if id != skip {
			poison(dtable[int(id)*width:][:width])
		}
	}
}

// norm returns n on the device's side.
func (d *Device) norm(n xpu.Norm) xpu.Norm {
	n.Weight, n.Mean, n.RStd = d.floats(n.Weight), d.floats(n.Mean), d.floats(n.RStd)
	return n
}

// Normalize computes the norm of rows; see [xpu.Layers].
func (d *Device) Normalize(h, x []float32, n xpu.Norm, known bool) {
	if h, x, n := d.floats(h), d.floats(x), d.norm(n); d.works() {
		d.inner.Normalize(h, x, n, known)
	}
	poison(h[:len(x)])
	if tokens := len(x) / n.Width; !known {
		poison(n.RStd[:tokens])
		if len(n.Weight) == 0 {
			poison(n.Mean[:tokens])
		}
	}
}

// NormGrad computes the gradient of a norm; see [xpu.Layers].
func (d *Device) NormGrad(dx, dh, x []float32, n xpu.Norm, dweight []float32) {
	if dx, dh, x, n, dweight := d.floats(dx), d.floats(dh), d.floats(x), d.norm(n), d.floats(dweight); d.works() {
		d.inner.NormGrad(dx, dh, x, n, dweight)
	}
	poison(dx[:len(x)], dh[:len(x)], dweight)
}

// projections returns p on the device's side.
func (d *Device) projections(p xpu.Projections) xpu.Projections {
	for _, x := range []*[]float32{&p.QKV, &p.QWeight, &p.KWeight, &p.RQ, &p.RK, &p.Cos, &p.Sin, &p.Q, &p.K, &p.V} {
		*x = d.floats(*x)
	}
	return p
}

// SplitHeads splits projections into heads; see [xpu.Layers].
func (d *Device) SplitHeads(p xpu.Projections) {
	if p := d.projections(p); d.works() {
		d.inner.SplitHeads(p)
	}
	tokens, size := p.Rows*p.Length, p.Size
	poison(p.Q[:tokens*p.Heads.Heads*size])
	for group := range p.Rows * p.KVHeads {
		at, n := (group*p.Capacity+p.First)*size, p.Length*size
		poison(p.K[at:][:n], p.V[at:][:n])
	}
	if !p.Known && len(p.QWeight) > 0 {
		poison(p.RQ[:tokens])
	}
	if !p.Known && len(p.KWeight) > 0 {
		poison(p.RK[:tokens])
	}
}

// JoinHeads computes the gradients of projections from the gradients of heads; see [xpu.Layers].
func (d *Device) JoinHeads(p xpu.Projections, dqkv, dk, dv, dqWeight, dkWeight []float32) {
	if p, dqkv, dk, dv, dqWeight, dkWeight := d.projections(p), d.floats(dqkv), d.floats(dk), d.floats(dv),
		d.floats(dqWeight), d.floats(dkWeight); d.works() {
		d.inner.JoinHeads(p, dqkv, dk, dv, dqWeight, dkWeight)
	}
	poison(dqkv[:p.Rows*p.Length*p.Width()], dqWeight, dkWeight)
}

// attention returns a on the device's side.
func (d *Device) attention(a xpu.Attention) xpu.Attention {
	a.Q, a.K, a.V, a.Context, a.LSE, a.Begin = d.floats(a.Q), d.floats(a.K), d.floats(a.V), d.floats(a.Context),
		d.floats(a.LSE), d.ints(a.Begin)
	return a
}

// Attend computes causal attention; see [xpu.Layers].
func (d *Device) Attend(a xpu.Attention) {
	if a := d.attention(a); d.works() {
		d.inner.Attend(a)
	}
	n := a.Rows * a.Length * a.Heads.Heads
	poison(a.Context[:n*a.Size], a.LSE[:n])
}

// AttendGrad computes the gradients of an attention; see [xpu.Layers].
func (d *Device) AttendGrad(a xpu.Attention, dcontext, dqkv, dk, dv []float32) {
	if a, dcontext, dqkv, dk, dv := d.attention(a), d.floats(dcontext), d.floats(dqkv), d.floats(dk),
		d.floats(dv); d.works() {
		d.inner.AttendGrad(a, dcontext, dqkv, dk, dv)
	}
	tokens := a.Rows * a.Length
	if tokens > 0 {
		poisonRows(dqkv, xpu.Of(dqkv, len(dqkv)).Strided(tokens, a.Heads.Heads*a.Size, a.Width()))
	}
	poison(dk[:tokens*a.KVHeads*a.Size], dv[:tokens*a.KVHeads*a.Size])
}

// routing returns r on the device's side.
func (d *Device) routing(r xpu.Routing) xpu.Routing {
	r.Probs, r.LSE, r.Weight = d.floats(r.Probs), d.floats(r.LSE), d.floats(r.Weight)
	r.Chosen, r.Counts, r.RowOf, r.TokenOf = d.ints(r.Chosen), d.ints(r.Counts), d.ints(r.RowOf), d.ints(r.TokenOf)
	return r
}

// Route computes a router's distribution and choices; see [xpu.Layers].
func (d *Device) Route(r xpu.Routing, logits []float32, uniform bool, stats *xpu.RouterStats) {
	brought := xpu.RouterStats{Probs: make([]float64, len(stats.Probs)), Counts: make([]int64, len(stats.Counts))}
	if r, logits := d.routing(r), d.floats(logits); d.works() {
		d.inner.Route(r, logits, uniform, &brought)
	}
	probs, counts := stats.Probs, stats.Counts
	for i := range probs {
		probs[i] = math.NaN()
	}
	for i := range counts {
		counts[i] = math.MinInt64
	}
	stats.LSE2, stats.Entropy = math.NaN(), math.NaN()
	d.later(func() {
		copy(probs, brought.Probs)
		copy(counts, brought.Counts)
		stats.LSE2, stats.Entropy = brought.LSE2, brought.Entropy
	})
	poison(r.Probs, r.LSE)
	poisonInts(r.Chosen, r.Counts)
}

// SortRows orders choices by expert; see [xpu.Layers].
func (d *Device) SortRows(r xpu.Routing) {
	if r := d.routing(r); d.works() {
		d.inner.SortRows(r)
	}
	poisonInts(r.RowOf, r.TokenOf)
	poison(r.Weight)
}

// RouteGrad computes the gradient of a router's logits; see [xpu.Layers].
func (d *Device) RouteGrad(r xpu.Routing, dlogits, slope, dweight []float32, zFactor float64) {
	if r, dlogits, slope, dweight := d.routing(r), d.floats(dlogits), d.floats(slope), d.floats(dweight); d.works() {
		d.inner.RouteGrad(r, dlogits, slope, dweight, zFactor)
	}
	poison(dlogits)
}

// GatherRows copies rows; see [xpu.Layers].
func (d *Device) GatherRows(dst, x []float32, tokenOf []int32, width int) {
	if dst, x, tokenOf := d.floats(dst), d.floats(x), d.ints(tokenOf); d.works() {
		d.inner.GatherRows(dst, x, tokenOf, width)
	}
	poison(dst[:len(tokenOf)*width])
}

// SumRows adds the rows of each token; see [xpu.Layers].
func (d *Device) SumRows(dst, x, y []float32, rowOf []int32, perToken, width int) {
	if dst, x, y, rowOf := d.floats(dst), d.floats(x), d.floats(y), d.ints(rowOf); d.works() {
		d.inner.SumRows(dst, x, y, rowOf, perToken, width)
	}
	poison(dst[:len(rowOf)/perToken*width])
}

// SwiGLU computes the activation of experts; see [xpu.Layers].
func (d *Device) SwiGLU(act, gateUp, weight []float32, width int) {
	if act, gateUp, weight := d.floats(act), d.floats(gateUp), d.floats(weight); d.works() {
		d.inner.SwiGLU(act, gateUp, weight, width)
	}
	poison(act)
}

// SwiGLUGrad is the gradient of SwiGLU; see [xpu.Layers].
func (d *Device) SwiGLUGrad(gateUp, act, dact, weight, dweight []float32, width int) {
	if gateUp, act, dact, weight, dweight := d.floats(gateUp), d.floats(act), d.floats(dact), d.floats(weight),
		d.floats(dweight); d.works() {
		d.inner.SwiGLUGrad(gateUp, act, dact, weight, dweight, width)
	}
	poison(gateUp, act, dact)
	if len(weight) > 0 {
		poison(dweight)
	}
}

// CrossEntropy computes cross entropies of targets; see [xpu.Layers].
func (d *Device) CrossEntropy(c xpu.CrossEntropy) {
	inside := c
	loss, computed := d.result(c.Loss)
	inside.Logits, inside.Targets, inside.Loss = d.floats(c.Logits), d.ints(c.Targets), loss
	if d.works() {
		d.inner.CrossEntropy(inside)
	}
	computed()
	poison(c.Logits)
	if c.Sample {
		poisonInts(c.Targets)
	}
}

// SumSquares sums the squares of blocks; see [xpu.Layers].
func (d *Device) SumSquares(stretches [][]float32, sums []float64) {
	inside := make([][]float32, len(stretches))
	for i, x := range stretches {
		inside[i] = d.floats(x)
	}
	sums, computed := d.result(sums)
	if d.works() {
		d.inner.SumSquares(inside, sums)
	}
	computed()
}

// Checksums computes the checksums of blocks; see [xpu.Layers].
func (d *Device) Checksums(stretches [][]float32, sums []uint64) {
	inside, brought := make([][]float32, len(stretches)), make([]uint64, len(sums))
	for i, x := range stretches {
		inside[i] = d.floats(x)
	}
	if d.works() {
		d.inner.Checksums(inside, brought)
	}
	for i := range sums {
		sums[i] = math.MaxUint64
	}
	d.later(func() { copy(sums, brought) })
}

// Update updates weights and optimizer state; see [xpu.Layers].
func (d *Device) Update(u xpu.Update, stretches []xpu.Moments, before, change []float64) {
	inside := make([]xpu.Moments, len(stretches))
	for i, s := range stretches {
		inside[i] = xpu.Moments{Weight: d.floats(s.Weight), Grad: d.floats(s.Grad), M: d.floats(s.M), V: d.floats(s.V)}
	}
	before, computedBefore := d.result(before)
	change, computedChange := d.result(change)
	if d.works() {
		d.inner.Update(u, inside, before, change)
	}
	computedBefore()
	computedChange()
	for _, s := range stretches {
		poison(s.Weight, s.Grad, s.M, s.V)
	}
}
