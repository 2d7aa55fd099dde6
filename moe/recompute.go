package moe

import (
	"context"
	"fmt"

	"mula/xpu"
)

// Recompute names the results of a layer's forward pass that the backward pass computes again
// instead of keeping them: less memory for more work. The choice of experts is always kept.
type Recompute string

// The levels of recomputation. Each keeps less than the one before.
const (
	// RecomputeNone keeps everything that the backward pass reads.
	RecomputeNone Recompute = "none"

	// RecomputeExperts recomputes the gate and up projections of the experts, or of the
	// feed-forward block of a dense layer. Ranks that share the experts send the inputs again.
	RecomputeExperts Recompute = "experts"

	// RecomputeLayers also recomputes the attention: only a layer's input and its routing are kept,
	// and the input of a norm after the feed-forward block.
	RecomputeLayers Recompute = "layers"
)

// Recomputes lists the levels, from the most memory to the least.
func Recomputes() []string {
	return []string{string(RecomputeNone), string(RecomputeExperts), string(RecomputeLayers)}
}

// attention reports whether the attention is recomputed, and experts whether the experts are.
func (r Recompute) attention() bool { return r == RecomputeLayers }
func (r Recompute) experts() bool   { return r == RecomputeExperts || r == RecomputeLayers }

func (r Recompute) validate() error {
	if r != "" && r != RecomputeNone && !r.experts() {
		return fmt.Errorf("unknown recompute level %q; the choices are %q, %q and %q", r, RecomputeNone,
			RecomputeExperts,
			RecomputeLayers)
	}
	return nil
}

// SetRecompute sets the level of the following backward passes; the default is [RecomputeNone]. The
// level does not change a bit of the gradients. An unknown level makes the passes fail.
func (m *Model) SetRecompute(r Recompute) { m.recompute = r }

// SetActivations sets the type of the large activations of the following passes: the projections of
// queries, keys and values, the result of the attention before its output projection, and the gate
// and up projections. They are computed in float32. With BFloat16 they are rounded once, and both
// the forward and the backward pass read the rounded numbers. The device must then be a processor,
// and ranks must not share sequences. The default is Float32. Logits and Generate ignore the
// setting.
func (m *Model) SetActivations(dtype xpu.DType) { m.activations = dtype }

// restore recomputes the values that the backward pass of layer number reads and the forward pass
// did not keep, with the input of the feed-forward block in ws.h, and of a network that all tokens
// use also in [Model.heldInputs]. fresh means that the layer was the last in the forward pass, so
// that the buffers shared by the layers still hold its values.
func (m *Model) restore(ctx context.Context, l *layer, st *saved, number int, fresh bool) error {
	w := &m.ws
	if !fresh && w.shape.recompute.attention() {
		if err := m.attend(ctx, l, st, w.ownKeys()); err != nil {
			return err
		}
		m.blockInput(w.h, st.x1, m.norm2(l, st), false)
	} else {
		m.blockInput(w.h, st.x1, m.norm2(l, st), true)
	}
	m.jitter(l, number, w.h)
	switch {
	case fresh:
		return nil
	case !w.shape.recompute.experts():
		if !l.hasNetwork() {
			return nil
		}
		_, err := m.allInputs(ctx)
		return err
	}
	if l.hasShared() {
		if err := m.sharedNetwork(l, st).expand(ctx, m); err != nil {
			return err
		}
	}
	return m.blockOf(l).expand(ctx, m, l, st, number)
}
