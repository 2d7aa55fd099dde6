package moe

import "mula/xpu"

// Noise of routers (https://arxiv.org/abs/2101.03961, section 2.2), in the form of transformers'
// Mixtral: in training, the input of the router and of the experts of a layer is
//
//	norm(x)·u, with u uniform in [1-RouterJitter, 1+RouterJitter] for each element
//
// Shared experts have the same input. u is a function of [BatchJitter.Seed], the layer, the number
// of the input in the step, and the element ([xpu.Jitter]). It does not depend on the layout, and
// the backward pass and recomputation draw the same numbers again.

// validateJitter returns an error if the model cannot have the noise.
func (c Config) validateJitter(bad func(field, format string, args ...any) error) error {
	const field = "router_jitter_noise"
	switch noise := c.RouterJitter; {
	case !(noise >= 0 && noise < 1):
		return bad(field, "is %g; it must be at least 0 and below 1", noise)
	case noise > 0 && !c.moe():
		return bad(field, "is %g; it must be 0, because a dense model has no router", noise)
	}
	return nil
}

// HasJitterField reports whether config.json of the family has the noise.
func (c Config) HasJitterField() bool { return c.family().jitterField }

// jitters reports whether a pass over a batch has noise.
func (c Config) jitters(b Batch) bool { return b.Jitter.On && c.RouterJitter > 0 }

// writeNumbers sets the numbers of the inputs of the current flight, if its batch has noise.
func (m *Model) writeNumbers() {
	w := &m.ws
	if !w.numbers.Present() {
		return
	}
	numbers := room(&w.ints, w.numbers.Elements())
	for t := range numbers {
		row, i := m.rowPosition(t)
		numbers[t] = int32(w.batch.Jitter.First + int64(row*w.batch.SequenceLength+i))
	}
	m.dev.WriteInts(w.numbers, numbers)
}

// jitter multiplies x, the input of the feed-forward block of a layer or its gradient, by the
// noise. number is the index of the layer.
func (m *Model) jitter(l *layer, number int, x xpu.Tensor) {
	w := &m.ws
	if !w.numbers.Present() || !l.hasExperts() {
		return
	}
	seed := xpu.Mix64(w.batch.Jitter.Seed + uint64(m.stage.from+number))
	m.dev.Jitter(x, xpu.Jitter{Numbers: w.numbers, Epsilon: float32(m.cfg.RouterJitter), Seed: seed})
}
