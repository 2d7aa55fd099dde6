package apart

import (
	"math"

	"mula/xpu"
)

// Each command below calls the inner device with the device's sides of its operands. Then it
// poisons the host's side of everything that it wrote, and nothing else.

// tensor returns a tensor on the device's side.
func (d *Device) tensor(t xpu.Tensor) xpu.Tensor {
	switch {
	case t.Elements() == 0 || t.IsDiscrete():
		return t
	case t.DType() == xpu.Int32:
		return t.On(nil, d.ints(t.Ints()))
	}
	return t.On(d.floats(t.Floats()), nil)
}

// tensors replaces tensors by the same ones on the device's side.
func (d *Device) tensors(tensors ...*xpu.Tensor) {
	for _, t := range tensors {
		*t = d.tensor(*t)
	}
}

// MatMul multiplies matrices; see [xpu.Products].
func (d *Device) MatMul(dst, a, b xpu.Tensor, o xpu.MatMulOptions) {
	if dst, a, b := d.tensor(dst), d.tensor(a), d.tensor(b); d.works() {
		d.inner.MatMul(dst, a, b, o)
	}
	poisonRows(dst)
}

// poisonRows poisons the rows of a matrix on the host's side, but not the gaps between them.
func poisonRows(t xpu.Tensor) {
	for i := range t.Dim(0) {
		poison(t.Index(i))
	}
}

// GroupedMatMul multiplies groups of rows; see [xpu.Products].
func (d *Device) GroupedMatMul(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	if dst, a, b, counts := d.tensor(dst), d.tensor(a), d.tensor(b), d.tensor(counts); d.works() {
		d.inner.GroupedMatMul(dst, a, b, counts, o)
	}
	poison(dst)
}

// GroupedWeightGrad computes the gradients of the matrices of groups; see [xpu.Products].
func (d *Device) GroupedWeightGrad(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	if dst, a, b, counts := d.tensor(dst), d.tensor(a), d.tensor(b), d.tensor(counts); d.works() {
		d.inner.GroupedWeightGrad(dst, a, b, counts, o)
	}
	poison(dst) // including groups without rows, which the host cannot know
}

// Zero sets x to zero.
func (d *Device) Zero(x xpu.Tensor) {
	if x := d.tensor(x); d.works() {
		d.inner.Zero(x)
	}
	poison(x)
}

// Copy sets dst to x.
func (d *Device) Copy(dst, x xpu.Tensor) {
	if dst, x := d.tensor(dst), d.tensor(x); d.works() {
		d.inner.Copy(dst, x)
	}
	poison(dst)
}

// Add sets dst to x + y.
func (d *Device) Add(dst, x, y xpu.Tensor) {
	if dst, x, y := d.tensor(dst), d.tensor(x), d.tensor(y); d.works() {
		d.inner.Add(dst, x, y)
	}
	poison(dst)
}

// Embed looks up rows of a table; see [xpu.Layers].
func (d *Device) Embed(dst, table, ids xpu.Tensor) {
	if dst, table, ids := d.tensor(dst), d.tensor(table), d.tensor(ids); d.works() {
		d.inner.Embed(dst, table, ids)
	}
	poison(dst)
}

// EmbedGrad is the gradient of Embed; see [xpu.Layers].
func (d *Device) EmbedGrad(dtable, dx, ids xpu.Tensor, skip int32) {
	inner := d.tensor(ids)
	if dtable, dx := d.tensor(dtable), d.tensor(dx); d.works() {
		d.inner.EmbedGrad(dtable, dx, inner, skip)
	}
	for _, id := range inner.Ints() {
		if id != skip {
			poison(dtable.Index(int(id)))
		}
	}
}

// norm returns n on the device's side.
func (d *Device) norm(n xpu.Norm) xpu.Norm {
	d.tensors(&n.Weight, &n.Mean, &n.RStd)
	return n
}

// Normalize computes the norm of rows; see [xpu.Layers].
func (d *Device) Normalize(h, x xpu.Tensor, n xpu.Norm, known bool) {
	if h, x, n := d.tensor(h), d.tensor(x), d.norm(n); d.works() {
		d.inner.Normalize(h, x, n, known)
	}
	poison(h)
	if !known {
		poison(n.RStd)
		if !n.Weight.Present() {
			poison(n.Mean)
		}
	}
}

// NormGrad computes the gradient of a norm; see [xpu.Layers].
func (d *Device) NormGrad(dx, dh, x xpu.Tensor, n xpu.Norm, dweight xpu.Tensor) {
	if dx, dh, x, n, dweight := d.tensor(dx), d.tensor(dh), d.tensor(x), d.norm(n), d.tensor(dweight); d.works() {
		d.inner.NormGrad(dx, dh, x, n, dweight)
	}
	poison(dx, dh, dweight)
}

// projections returns p on the device's side.
func (d *Device) projections(p xpu.Projections) xpu.Projections {
	d.tensors(&p.QKV, &p.QWeight, &p.KWeight, &p.RQ, &p.RK, &p.Cos, &p.Sin, &p.Q, &p.K, &p.V)
	return p
}

// SplitHeads splits projections into heads; see [xpu.Layers].
func (d *Device) SplitHeads(p xpu.Projections) {
	if p := d.projections(p); d.works() {
		d.inner.SplitHeads(p)
	}
	poison(p.Q)
	h := p.Heads()
	for _, x := range []xpu.Tensor{p.K, p.V} {
		for row := range h.Rows {
			for head := range h.KVHeads {
				poison(x.Index(row).Index(head).Rows(p.First, p.First+h.Length))
			}
		}
	}
	if !p.Known && p.QWeight.Present() {
		poison(p.RQ)
	}
	if !p.Known && p.KWeight.Present() {
		poison(p.RK)
	}
}

// JoinHeads computes the gradients of projections from the gradients of heads; see [xpu.Layers].
func (d *Device) JoinHeads(p xpu.Projections, dqkv, dk, dv, dqWeight, dkWeight xpu.Tensor) {
	inner := []xpu.Tensor{dqkv, dk, dv, dqWeight, dkWeight}
	for i := range inner {
		d.tensors(&inner[i])
	}
	if p := d.projections(p); d.works() {
		d.inner.JoinHeads(p, inner[0], inner[1], inner[2], inner[3], inner[4])
	}
	poison(dqkv, dqWeight, dkWeight)
}

// attention returns a on the device's side.
func (d *Device) attention(a xpu.Attention) xpu.Attention {
	d.tensors(&a.Q, &a.K, &a.V, &a.Context, &a.LSE, &a.Begin)
	return a
}

// Attend computes causal attention; see [xpu.Layers].
func (d *Device) Attend(a xpu.Attention) {
	if a := d.attention(a); d.works() {
		d.inner.Attend(a)
	}
	poison(a.Context, a.LSE)
}

// AttendGrad computes the gradients of an attention; see [xpu.Layers].
func (d *Device) AttendGrad(a xpu.Attention, dcontext, dqkv, dk, dv xpu.Tensor) {
	inner := []xpu.Tensor{dcontext, dqkv, dk, dv}
	for i := range inner {
		d.tensors(&inner[i])
	}
	if a := d.attention(a); d.works() {
		d.inner.AttendGrad(a, inner[0], inner[1], inner[2], inner[3])
	}
	poisonRows(dqkv.Slice(1, 0, a.Context.Dim(1)))
	poison(dk, dv)
}

// routing returns r on the device's side.
func (d *Device) routing(r xpu.Routing) xpu.Routing {
	d.tensors(&r.Probs, &r.LSE, &r.Weight, &r.Chosen, &r.Counts, &r.RowOf, &r.TokenOf)
	return r
}

// Route computes a router's distribution and choices; see [xpu.Layers].
func (d *Device) Route(r xpu.Routing, logits xpu.Tensor, uniform bool, stats *xpu.RouterStats) {
	brought := xpu.RouterStats{Probs: make([]float64, len(stats.Probs)), Counts: make([]int64, len(stats.Counts))}
	if r, logits := d.routing(r), d.tensor(logits); d.works() {
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
	poison(r.Probs, r.LSE, r.Chosen, r.Counts)
}

// SortRows orders choices by expert; see [xpu.Layers].
func (d *Device) SortRows(r xpu.Routing) {
	if r := d.routing(r); d.works() {
		d.inner.SortRows(r)
	}
	poison(r.RowOf, r.TokenOf, r.Weight)
}

// RouteGrad computes the gradient of a router's logits; see [xpu.Layers].
func (d *Device) RouteGrad(r xpu.Routing, dlogits, slope, dweight xpu.Tensor, zFactor float64) {
	if r, dlogits, slope, dweight := d.routing(r), d.tensor(dlogits), d.tensor(slope), d.tensor(dweight); d.works() {
		d.inner.RouteGrad(r, dlogits, slope, dweight, zFactor)
	}
	poison(dlogits)
}

// GatherRows copies rows; see [xpu.Layers].
func (d *Device) GatherRows(dst, x, tokenOf xpu.Tensor) {
	if dst, x, tokenOf := d.tensor(dst), d.tensor(x), d.tensor(tokenOf); d.works() {
		d.inner.GatherRows(dst, x, tokenOf)
	}
	poison(dst)
}

// SumRows adds the rows of each token; see [xpu.Layers].
func (d *Device) SumRows(dst, x, y, rowOf xpu.Tensor) {
	if dst, x, y, rowOf := d.tensor(dst), d.tensor(x), d.tensor(y), d.tensor(rowOf); d.works() {
		d.inner.SumRows(dst, x, y, rowOf)
	}
	poison(dst)
}

// SwiGLU computes the activation of experts; see [xpu.Layers].
func (d *Device) SwiGLU(act, gateUp, weight xpu.Tensor) {
	if act, gateUp, weight := d.tensor(act), d.tensor(gateUp), d.tensor(weight); d.works() {
		d.inner.SwiGLU(act, gateUp, weight)
	}
	poison(act)
}

// SwiGLUGrad is the gradient of SwiGLU; see [xpu.Layers].
func (d *Device) SwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor) {
	if gateUp, act, dact, weight, dweight := d.tensor(gateUp), d.tensor(act), d.tensor(dact), d.tensor(weight),
		d.tensor(dweight); d.works() {
		d.inner.SwiGLUGrad(gateUp, act, dact, weight, dweight)
	}
	poison(gateUp, act, dact)
	if weight.Present() {
		poison(dweight)
	}
}

// CrossEntropy computes cross entropies of targets; see [xpu.Layers].
func (d *Device) CrossEntropy(c xpu.CrossEntropy) {
	inside := c
	loss, computed := d.result(c.Loss)
	inside.Logits, inside.Targets, inside.Loss = d.tensor(c.Logits), d.tensor(c.Targets), loss
	if d.works() {
		d.inner.CrossEntropy(inside)
	}
	computed()
	poison(c.Logits)
	if c.Sample {
		poison(c.Targets)
	}
}

// SumSquares sums the squares of blocks; see [xpu.Layers].
func (d *Device) SumSquares(stretches []xpu.Tensor, sums []float64) {
	inside := make([]xpu.Tensor, len(stretches))
	for i, x := range stretches {
		inside[i] = d.tensor(x)
	}
	sums, computed := d.result(sums)
	if d.works() {
		d.inner.SumSquares(inside, sums)
	}
	computed()
}

// Checksums computes the checksums of blocks; see [xpu.Layers].
func (d *Device) Checksums(stretches []xpu.Tensor, sums []uint64) {
	inside, brought := make([]xpu.Tensor, len(stretches)), make([]uint64, len(sums))
	for i, x := range stretches {
		inside[i] = d.tensor(x)
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
		d.tensors(&s.Weight, &s.Grad, &s.M, &s.V)
		inside[i] = s
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
