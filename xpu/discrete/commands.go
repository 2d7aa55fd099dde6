package discrete

import (
	"math"

	"mula/xpu"
)

// MatMul multiplies matrices; see [xpu.Products].
func (d *Device) MatMul(dst, a, b xpu.Tensor, o xpu.MatMulOptions) {
	d.writes(dst)
	if d.works(dst, a, b) {
		d.inner.MatMul(dst, a, b, o)
	}
}

// GroupedMatMul multiplies groups of rows; see [xpu.Products].
func (d *Device) GroupedMatMul(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	d.writes(dst)
	if d.works(dst, a, b, counts) {
		d.inner.GroupedMatMul(dst, a, b, counts, o)
	}
}

// GroupedWeightGrad computes the gradients of the matrices of groups; see [xpu.Products].
func (d *Device) GroupedWeightGrad(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	d.writes(dst)
	if d.works(dst, a, b, counts) {
		d.inner.GroupedWeightGrad(dst, a, b, counts, o)
	}
}

// Zero sets x to zero.
func (d *Device) Zero(x xpu.Tensor) {
	d.writes(x)
	if d.works(x) {
		d.inner.Zero(x)
	}
}

// Copy sets dst to x.
func (d *Device) Copy(dst, x xpu.Tensor) {
	d.reads(x)
	d.writes(dst)
	if d.works(dst, x) {
		d.inner.Copy(dst, x)
	}
}

// Add sets dst to x + y.
func (d *Device) Add(dst, x, y xpu.Tensor) {
	d.reads(x, y)
	d.writes(dst)
	if d.works(dst, x, y) {
		d.inner.Add(dst, x, y)
	}
}

// Combine combines matrices; see [xpu.Layers].
func (d *Device) Combine(dst, x, y xpu.Tensor, a, b, c float32) {
	if d.works(dst, x, y) {
		d.inner.Combine(dst, x, y, a, b, c)
	}
}

// Embed looks up rows of a table; see [xpu.Layers].
func (d *Device) Embed(dst, table, ids xpu.Tensor) {
	d.writes(dst)
	if d.works(dst, table, ids) {
		d.inner.Embed(dst, table, ids)
	}
}

// EmbedGrad is the gradient of Embed; see [xpu.Layers].
func (d *Device) EmbedGrad(dtable, dx, ids xpu.Tensor, skip int32) {
	d.reads(dx)
	if d.works(dtable, dx, ids) {
		d.inner.EmbedGrad(dtable, dx, ids, skip)
	}
}

// Normalize computes the norm of rows; see [xpu.Layers].
func (d *Device) Normalize(h, x xpu.Tensor, n xpu.Norm, known bool) {
	d.reads(x)
	d.writes(h)
	if d.works(h, x, n.Weight, n.Mean, n.RStd) {
		d.inner.Normalize(h, x, n, known)
	}
}

// NormGrad computes the gradient of a norm; see [xpu.Layers].
func (d *Device) NormGrad(dx, dh, x xpu.Tensor, n xpu.Norm, dweight xpu.Tensor) {
	d.reads(dx, dh, x)
	if d.works(dx, dh, x, n.Weight, n.Mean, n.RStd, dweight) {
		d.inner.NormGrad(dx, dh, x, n, dweight)
	}
}

func projections(p xpu.Projections) []xpu.Tensor {
	return []xpu.Tensor{p.QKV, p.QWeight, p.KWeight, p.RQ, p.RK, p.Cos, p.Sin, p.Q, p.K, p.V}
}

// SplitHeads splits projections into heads; see [xpu.Layers].
func (d *Device) SplitHeads(p xpu.Projections) {
	d.reads(p.QKV)
	d.writes(p.Q, p.K, p.V)
	if d.works(projections(p)...) {
		d.inner.SplitHeads(p)
	}
}

// JoinHeads computes the gradients of projections from the gradients of heads; see [xpu.Layers].
func (d *Device) JoinHeads(p xpu.Projections, dqkv, dk, dv, dqWeight, dkWeight xpu.Tensor) {
	d.reads(p.QKV, dqkv, dk, dv)
	d.writes(dqkv)
	if d.works(append(projections(p), dqkv, dk, dv, dqWeight, dkWeight)...) {
		d.inner.JoinHeads(p, dqkv, dk, dv, dqWeight, dkWeight)
	}
}

func latentHeads(l xpu.LatentHeads) []xpu.Tensor {
	return []xpu.Tensor{l.Queries, l.KeysValues, l.Rotated, l.Cos, l.Sin, l.Q, l.K, l.V}
}

// SplitLatent splits projections of latent attention into heads; see [xpu.Layers].
func (d *Device) SplitLatent(l xpu.LatentHeads) {
	d.reads(l.Queries, l.KeysValues, l.Rotated)
	d.writes(l.Q, l.K, l.V)
	if d.works(latentHeads(l)...) {
		d.inner.SplitLatent(l)
	}
}

// JoinLatent computes the gradients of projections of latent attention; see [xpu.Layers].
func (d *Device) JoinLatent(l xpu.LatentHeads, dq, dk, dv xpu.Tensor) {
	d.reads(dq, dk, dv)
	d.writes(l.Queries, l.KeysValues, l.Rotated)
	if d.works(append(latentHeads(l), dq, dk, dv)...) {
		d.inner.JoinLatent(l, dq, dk, dv)
	}
}

// CopyColumns copies columns; see [xpu.Layers].
func (d *Device) CopyColumns(dst, x xpu.Tensor) {
	d.reads(x)
	d.writes(dst)
	if d.works(dst, x) {
		d.inner.CopyColumns(dst, x)
	}
}

// Attend computes causal attention; see [xpu.Layers].
func (d *Device) Attend(a xpu.Attention) {
	d.reads(a.Q, a.K, a.V)
	d.writes(a.Context)
	if d.works(a.Q, a.K, a.V, a.Context, a.LSE, a.Begin) {
		d.inner.Attend(a)
	}
}

// AttendGrad computes the gradients of an attention; see [xpu.Layers].
func (d *Device) AttendGrad(a xpu.Attention, dcontext, dqkv, dk, dv xpu.Tensor) {
	d.reads(a.Q, a.K, a.V, a.Context, dcontext)
	d.writes(dqkv, dk, dv)
	if d.works(a.Q, a.K, a.V, a.Context, a.LSE, a.Begin, dcontext, dqkv, dk, dv) {
		d.inner.AttendGrad(a, dcontext, dqkv, dk, dv)
	}
}

func routing(r xpu.Routing) []xpu.Tensor {
	return []xpu.Tensor{r.Probs, r.LSE, r.Weight, r.Chosen, r.Counts, r.RowOf, r.TokenOf, r.Bias}
}

// Route computes a router's distribution and choices; see [xpu.Layers].
func (d *Device) Route(r xpu.Routing, logits xpu.Tensor, uniform bool, stats *xpu.RouterStats) {
	d.reads(logits)
	computed := xpu.RouterStats{Probs: make([]float64, len(stats.Probs)), Counts: make([]int64, len(stats.Counts))}
	if d.works(append(routing(r), logits)...) {
		d.inner.Route(r, logits, uniform, &computed)
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
		copy(probs, computed.Probs)
		copy(counts, computed.Counts)
		stats.LSE2, stats.Entropy = computed.LSE2, computed.Entropy
	})
}

// SortRows orders choices by expert; see [xpu.Layers].
func (d *Device) SortRows(r xpu.Routing) {
	if d.works(routing(r)...) {
		d.inner.SortRows(r)
	}
}

// RouteGrad computes the gradient of a router's logits; see [xpu.Layers].
func (d *Device) RouteGrad(r xpu.Routing, dlogits, slope, dweight xpu.Tensor, zFactor float64) {
	d.writes(dlogits)
	if d.works(append(routing(r), dlogits, slope, dweight)...) {
		d.inner.RouteGrad(r, dlogits, slope, dweight, zFactor)
	}
}

// GatherRows copies rows; see [xpu.Layers].
func (d *Device) GatherRows(dst, x, tokenOf xpu.Tensor) {
	if !dst.IsOperand() {
		d.reads(x)
	}
	d.writes(dst)
	if d.works(dst, x, tokenOf) {
		d.inner.GatherRows(dst, x, tokenOf)
	}
}

// SumRows adds the rows of each token; see [xpu.Layers].
func (d *Device) SumRows(dst, x, y, rowOf xpu.Tensor) {
	d.reads(x, y)
	d.writes(dst)
	if d.works(dst, x, y, rowOf) {
		d.inner.SumRows(dst, x, y, rowOf)
	}
}

// SwiGLU computes the activation of experts; see [xpu.Layers].
func (d *Device) SwiGLU(act, gateUp, weight xpu.Tensor) {
	d.reads(gateUp)
	d.writes(act)
	if d.works(act, gateUp, weight) {
		d.inner.SwiGLU(act, gateUp, weight)
	}
}

// SwiGLUGrad is the gradient of SwiGLU; see [xpu.Layers].
func (d *Device) SwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor) {
	d.reads(gateUp, dact)
	d.writes(gateUp, act)
	if d.works(gateUp, act, dact, weight, dweight) {
		d.inner.SwiGLUGrad(gateUp, act, dact, weight, dweight)
	}
}

// CrossEntropy computes cross entropies of targets; see [xpu.Layers].
func (d *Device) CrossEntropy(c xpu.CrossEntropy) {
	d.reads(c.Logits)
	loss, computed := d.result(c.Loss)
	if d.works(c.Logits, c.Targets) {
		c.Loss = loss
		d.inner.CrossEntropy(c)
	}
	computed()
}

// SumSquares sums the squares of blocks; see [xpu.Layers].
func (d *Device) SumSquares(stretches []xpu.Tensor, sums []float64) {
	d.reads(stretches...)
	sums, computed := d.result(sums)
	if d.works(stretches...) {
		d.inner.SumSquares(stretches, sums)
	}
	computed()
}

// Checksums computes the checksums of blocks; see [xpu.Layers].
func (d *Device) Checksums(stretches []xpu.Tensor, sums []uint64) {
	d.reads(stretches...)
	computed := make([]uint64, len(sums))
	if d.works(stretches...) {
		d.inner.Checksums(stretches, computed)
	}
	for i := range sums {
		sums[i] = math.MaxUint64
	}
	d.later(func() { copy(sums, computed) })
}

// Update updates weights and optimizer state; see [xpu.Layers].
func (d *Device) Update(u xpu.Update, stretches []xpu.Moments, before, change []float64) {
	var operands []xpu.Tensor
	for _, s := range stretches {
		operands = append(operands, s.Weight, s.Grad, s.M, s.V)
	}
	before, computedBefore := d.result(before)
	change, computedChange := d.result(change)
	if d.works(operands...) {
		d.inner.Update(u, stretches, before, change)
	}
	computedBefore()
	computedChange()
}
