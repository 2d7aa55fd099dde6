package discrete

import (
	"math"

	"mula/xpu"
)

// added returns the result of a product as a tensor that the product reads, if it adds to it.
func added(dst xpu.Tensor, o xpu.MatMulOptions) reads {
	if o.Accumulate {
		return reads{dst}
	}
	return nil
}

// MatMul multiplies matrices; see [xpu.Products].
func (d *Device) MatMul(dst, a, b xpu.Tensor, o xpu.MatMulOptions) {
	if d.works(added(dst, o), writes{dst}, a, b) {
		d.inner.MatMul(dst, a, b, o)
	}
}

// GroupedMatMul multiplies groups of rows; see [xpu.Products].
func (d *Device) GroupedMatMul(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	if d.works(append(added(dst, o), counts), writes{dst}, a, b) {
		d.inner.GroupedMatMul(dst, a, b, counts, o)
	}
}

// GroupedWeightGrad computes the gradients of the matrices of groups; see [xpu.Products].
func (d *Device) GroupedWeightGrad(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	if d.works(append(added(dst, o), counts), writes{dst}, a, b) {
		d.inner.GroupedWeightGrad(dst, a, b, counts, o)
	}
}

// Zero sets x to zero.
func (d *Device) Zero(x xpu.Tensor) {
	if d.works(nil, writes{x}) {
		d.inner.Zero(x)
	}
}

// Copy sets dst to x.
func (d *Device) Copy(dst, x xpu.Tensor) {
	if d.works(reads{x}, writes{dst}) {
		d.inner.Copy(dst, x)
	}
}

// Add sets dst to x + y.
func (d *Device) Add(dst, x, y xpu.Tensor) {
	if d.works(reads{x, y}, writes{dst}) {
		d.inner.Add(dst, x, y)
	}
}

// Combine combines matrices; see [xpu.Layers].
func (d *Device) Combine(dst, x, y xpu.Tensor, a, b, c float32) {
	if d.works(reads{x, y}, writes{dst}) {
		d.inner.Combine(dst, x, y, a, b, c)
	}
}

// Embed looks up rows of a table; see [xpu.Layers].
func (d *Device) Embed(dst, table, ids xpu.Tensor) {
	if d.works(reads{table, ids}, writes{dst}) {
		d.inner.Embed(dst, table, ids)
	}
}

// EmbedGrad is the gradient of Embed; see [xpu.Layers].
func (d *Device) EmbedGrad(dtable, dx, ids xpu.Tensor, skip int32) {
	if d.works(reads{dtable, dx, ids}, writes{dtable}) {
		d.inner.EmbedGrad(dtable, dx, ids, skip)
	}
}

// Normalize computes the norm of rows; see [xpu.Layers].
func (d *Device) Normalize(h, x xpu.Tensor, n xpu.Norm, known bool) {
	r, w := reads{x, n.Weight}, writes{h}
	if known {
		r = append(r, n.Mean, n.RStd)
	} else {
		w = append(w, n.Mean, n.RStd)
	}
	if d.works(r, w) {
		d.inner.Normalize(h, x, n, known)
	}
}

// NormGrad computes the gradient of a norm; see [xpu.Layers].
func (d *Device) NormGrad(dx, dh, x xpu.Tensor, n xpu.Norm, dweight xpu.Tensor) {
	if d.works(reads{dx, dh, x, n.Weight, n.Mean, n.RStd, dweight}, writes{dx, dh, dweight}) {
		d.inner.NormGrad(dx, dh, x, n, dweight)
	}
}

// SplitHeads splits projections into heads; see [xpu.Layers].
func (d *Device) SplitHeads(p xpu.Projections) {
	r, w := reads{p.QKV, p.QWeight, p.KWeight, p.Cos, p.Sin}, writes{p.Q, p.K, p.V}
	if p.Known {
		r = append(r, p.RQ, p.RK)
	} else {
		w = append(w, p.RQ, p.RK)
	}
	if d.works(r, w, p.Means) {
		d.inner.SplitHeads(p)
	}
}

// JoinHeads computes the gradients of projections from the gradients of heads; see [xpu.Layers].
func (d *Device) JoinHeads(p xpu.Projections, dqkv, dk, dv, dqWeight, dkWeight xpu.Tensor) {
	r := reads{p.QKV, p.QWeight, p.KWeight, p.RQ, p.RK, p.Means, p.Cos, p.Sin, dqkv, dk, dv, dqWeight, dkWeight}
	if d.works(r, writes{dqkv, dqWeight, dkWeight}, p.Q, p.K, p.V) {
		d.inner.JoinHeads(p, dqkv, dk, dv, dqWeight, dkWeight)
	}
}

// SumHeads adds the columns of norms; see [xpu.Layers].
func (d *Device) SumHeads(sums xpu.Tensor, p xpu.Projections, dqkv, dk xpu.Tensor) {
	r := reads{p.QKV, p.QWeight, p.KWeight, p.RQ, p.RK, p.Cos, p.Sin, dqkv, dk}
	if d.works(r, writes{sums}, p.Means, p.Q, p.K, p.V) {
		d.inner.SumHeads(sums, p, dqkv, dk)
	}
}

// SplitLatent splits projections of latent attention into heads; see [xpu.Layers].
func (d *Device) SplitLatent(l xpu.LatentHeads) {
	if d.works(reads{l.Queries, l.KeysValues, l.Rotated, l.Cos, l.Sin}, writes{l.Q, l.K, l.V}) {
		d.inner.SplitLatent(l)
	}
}

// JoinLatent computes the gradients of projections of latent attention; see [xpu.Layers].
func (d *Device) JoinLatent(l xpu.LatentHeads, dq, dk, dv xpu.Tensor) {
	if d.works(reads{l.Cos, l.Sin, dq, dk, dv}, writes{l.Queries, l.KeysValues, l.Rotated}, l.Q, l.K, l.V) {
		d.inner.JoinLatent(l, dq, dk, dv)
	}
}

// Jitter multiplies elements by random numbers; see [xpu.Layers].
func (d *Device) Jitter(x xpu.Tensor, j xpu.Jitter) {
	if d.works(reads{x, j.Numbers}, writes{x}) {
		d.inner.Jitter(x, j)
	}
}

// CopyColumns copies columns; see [xpu.Layers].
func (d *Device) CopyColumns(dst, x xpu.Tensor) {
	if d.works(reads{x}, writes{dst}) {
		d.inner.CopyColumns(dst, x)
	}
}

// Attend computes causal attention; see [xpu.Layers].
func (d *Device) Attend(a xpu.Attention) {
	if d.works(reads{a.Q, a.K, a.V, a.Begin}, writes{a.Context, a.LSE}) {
		d.inner.Attend(a)
	}
}

// AttendGrad computes the gradients of an attention; see [xpu.Layers].
func (d *Device) AttendGrad(a xpu.Attention, dcontext, dqkv, dk, dv xpu.Tensor) {
	if d.works(reads{a.Q, a.K, a.V, a.Context, a.LSE, a.Begin, dcontext}, writes{dqkv, dk, dv}) {
		d.inner.AttendGrad(a, dcontext, dqkv, dk, dv)
	}
}

// AddSinks adds sinks to an attention; see [xpu.Layers].
func (d *Device) AddSinks(a xpu.Attention, sinks xpu.Tensor) {
	if d.works(reads{a.Context, a.LSE, sinks}, writes{a.Context, a.LSE}, a.Q, a.K, a.V, a.Begin) {
		d.inner.AddSinks(a, sinks)
	}
}

// SinksGrad computes the gradient of sinks; see [xpu.Layers].
func (d *Device) SinksGrad(a xpu.Attention, sinks, dcontext, dsinks xpu.Tensor) {
	if d.works(reads{a.Context, a.LSE, sinks, dcontext, dsinks}, writes{dsinks}, a.Q, a.K, a.V, a.Begin) {
		d.inner.SinksGrad(a, sinks, dcontext, dsinks)
	}
}

// Route computes a router's distribution and choices; see [xpu.Layers].
func (d *Device) Route(r xpu.Routing, logits xpu.Tensor, uniform bool, stats *xpu.RouterStats) {
	computed := xpu.RouterStats{Probs: make([]float64, len(stats.Probs)), Counts: make([]int64, len(stats.Counts))}
	if d.works(reads{logits, r.Bias}, writes{r.Probs, r.LSE, r.Chosen, r.Counts}, r.RowOf, r.TokenOf, r.Weight) {
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
	if d.works(reads{r.Probs, r.Chosen, r.Counts}, writes{r.RowOf, r.TokenOf, r.Weight}, r.LSE, r.Bias) {
		d.inner.SortRows(r)
	}
}

// RouteGrad computes the gradient of a router's logits; see [xpu.Layers].
func (d *Device) RouteGrad(r xpu.Routing, dlogits, slope, dweight xpu.Tensor, zFactor float64) {
	if d.works(reads{r.Probs, r.LSE, r.Chosen, r.RowOf, slope, dweight}, writes{dlogits}, r.Counts, r.TokenOf,
		r.Weight, r.Bias) {
		d.inner.RouteGrad(r, dlogits, slope, dweight, zFactor)
	}
}

// GatherRows copies rows; see [xpu.Layers].
func (d *Device) GatherRows(dst, x, tokenOf xpu.Tensor) {
	r, operands := reads{tokenOf}, []xpu.Tensor{x}
	if !dst.IsOperand() {
		r, operands = append(r, x), nil
	}
	if d.works(r, writes{dst}, operands...) {
		d.inner.GatherRows(dst, x, tokenOf)
	}
}

// SumRows adds the rows of each token; see [xpu.Layers].
func (d *Device) SumRows(dst, x, y, rowOf xpu.Tensor) {
	if d.works(reads{x, y, rowOf}, writes{dst}) {
		d.inner.SumRows(dst, x, y, rowOf)
	}
}

// SwiGLU computes the activation of experts; see [xpu.Layers].
func (d *Device) SwiGLU(act, gateUp, weight xpu.Tensor) {
	if d.works(reads{gateUp, weight}, writes{act}) {
		d.inner.SwiGLU(act, gateUp, weight)
	}
}

// SwiGLUGrad is the gradient of SwiGLU; see [xpu.Layers].
func (d *Device) SwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor) {
	if d.works(reads{gateUp, dact, weight}, writes{gateUp, act, dact, dweight}) {
		d.inner.SwiGLUGrad(gateUp, act, dact, weight, dweight)
	}
}

// ClampedSwiGLU computes the activation of experts with clamps; see [xpu.Layers].
func (d *Device) ClampedSwiGLU(act, gateUp, weight xpu.Tensor, c xpu.Clamp) {
	if d.works(reads{gateUp, weight}, writes{act}) {
		d.inner.ClampedSwiGLU(act, gateUp, weight, c)
	}
}

// ClampedSwiGLUGrad is the gradient of ClampedSwiGLU; see [xpu.Layers].
func (d *Device) ClampedSwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor, c xpu.Clamp) {
	if d.works(reads{gateUp, dact, weight}, writes{gateUp, act, dact, dweight}) {
		d.inner.ClampedSwiGLUGrad(gateUp, act, dact, weight, dweight, c)
	}
}

// GroupedBias adds biases to groups of rows; see [xpu.Layers].
func (d *Device) GroupedBias(x, bias, weight, counts xpu.Tensor) {
	if d.works(reads{x, bias, weight, counts}, writes{x}) {
		d.inner.GroupedBias(x, bias, weight, counts)
	}
}

// GroupedBiasGrad computes the gradients of GroupedBias; see [xpu.Layers].
func (d *Device) GroupedBiasGrad(dbias, dy, bias, weight, dweight, counts xpu.Tensor) {
	if d.works(reads{dbias, dy, bias, weight, dweight, counts}, writes{dbias, dweight}) {
		d.inner.GroupedBiasGrad(dbias, dy, bias, weight, dweight, counts)
	}
}

// CrossEntropy computes cross entropies of targets; see [xpu.Layers].
func (d *Device) CrossEntropy(c xpu.CrossEntropy) {
	loss, computed := d.result(c.Loss)
	if d.works(reads{c.Logits, c.Targets}, writes{c.Logits, c.Targets}) {
		c.Loss = loss
		d.inner.CrossEntropy(c)
	}
	computed()
}

// SumSquares sums the squares of blocks; see [xpu.Layers].
func (d *Device) SumSquares(stretches []xpu.Tensor, sums []float64) {
	sums, computed := d.result(sums)
	if d.works(stretches, nil) {
		d.inner.SumSquares(stretches, sums)
	}
	computed()
}

// Checksums computes the checksums of blocks; see [xpu.Layers].
func (d *Device) Checksums(stretches []xpu.Tensor, sums []uint64) {
	computed := make([]uint64, len(sums))
	if d.works(stretches, nil) {
		d.inner.Checksums(stretches, computed)
	}
	for i := range sums {
		sums[i] = math.MaxUint64
	}
	d.later(func() { copy(sums, computed) })
}

// Update updates weights and optimizer state; see [xpu.Layers].
func (d *Device) Update(u xpu.Update, stretches []xpu.Moments, before, change []float64) {
	var r reads
	var w writes
	for _, s := range stretches {
		r = append(r, s.Weight, s.Grad, s.M, s.V)
		w = append(w, s.Weight, s.M, s.V)
		if u.ReplacesGrad {
			w = append(w, s.Grad)
		}
	}
	before, computedBefore := d.result(before)
	change, computedChange := d.result(change)
	if d.works(r, w) {
		d.inner.Update(u, stretches, before, change)
	}
	computedBefore()
	computedChange()
}
