package cpu

import (
	"math"

	"mula/xpu"
)

// AddSinks adds sinks to an attention; see [xpu.Layers].
func (h *Host) AddSinks(x xpu.Attention, sinks xpu.Tensor) {
	xpu.CheckAddSinks(x, sinks)
	a := attentionOf(x)
	t := h.begin(operands{attention: a})
	defer t.end()
	t.w = t.weights(0, sinks)
	t.split(a.Tokens(), func(t *task, _, lo, hi int) {
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		a := &t.attention
		width := a.Heads.Heads * a.Size
		for token := lo; token < hi; token++ {
			context := row(a.Context, a.halves, token, width, buffer)
			for head, sink := range t.w {
				lse := a.lseOf(token, head)
				low, high := min(float64(*lse), float64(sink)), max(float64(*lse), float64(sink))
				with := high + math.Log1p(math.Exp(low-high))
				Scale(context[head*a.Size:][:a.Size], float32(math.Exp(float64(*lse)-with)))
				*lse = float32(with)
			}
			if a.halves != nil {
				BF16(a.halves[token*width:][:width], context)
			}
		}
	})
}

// SinksGrad computes the gradient of sinks; see [xpu.Layers]. It adds in float64.
func (h *Host) SinksGrad(x xpu.Attention, sinks, dcontext, dsinks xpu.Tensor) {
	xpu.CheckSinksGrad(x, sinks, dcontext, dsinks)
	a := attentionOf(x)
	t := h.begin(operands{attention: a, x: dcontext.Floats()})
	defer t.end()
	t.dst, t.dstHalves = numbers(dsinks)
	t.w = t.weights(0, sinks)
	t.split(a.Heads.Heads, func(t *task, _, lo, hi int) {
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		a := &t.attention
		heads, size := a.Heads.Heads, a.Size
		for head := lo; head < hi; head++ {
			sum := 0.0
			for token := range a.Tokens() {
				at := token*heads + head
				p := math.Exp(float64(t.w[head]) - float64(*a.lseOf(token, head)))
				sum -= p * float64(Dot(row(a.Context, a.halves, at, size, buffer), t.x[at*size:][:size]))
			}
			if t.dstHalves == nil {
				t.dst[head] += float32(sum)
			} else {
				addHalves(t.dstHalves[head:][:1], []float32{float32(sum)})
			}
		}
	})
}

// lseOf returns the LSE of a token's query of a head.
func (a *attention) lseOf(token, head int) *float32 {
	return &a.LSE[(token/a.Length*a.Heads.Heads+head)*a.Length+token%a.Length]
}
