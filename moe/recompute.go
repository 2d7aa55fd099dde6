package moe

import (
	"context"
	"fmt"
)

// Recompute says what of a layer's forward pass the backward pass computes again, so that it need
// not be kept: less memory for more work. The choice of experts is always kept.
type Recompute string

// The levels of recomputation. Each keeps less than the one before.
const (
	// RecomputeNone keeps everything that the backward pass reads.
	RecomputeNone Recompute = "none"

	// RecomputeExperts computes the gate and up projections of the experts, or of the one
	// feed-forward block of a dense layer, again. Where ranks share the experts, they send the
	// inputs once more.
	RecomputeExperts Recompute = "experts"

	// RecomputeLayers computes the attention again, too: of a layer only its input and its routing
	// are kept.
	RecomputeLayers Recompute = "layers"
)

// Recomputes lists the levels, from the most memory to the least.
func Recomputes() []string {
	return []string{string(RecomputeNone), string(RecomputeExperts), string(RecomputeLayers)}
}

// attention says whether the attention is computed again, and experts whether the experts are.
func (r Recompute) attention() bool { return r == RecomputeLayers }
func (r Recompute) experts() bool   { return r == RecomputeExperts || r == RecomputeLayers }

func (r Recompute) validate() error {
	if r != "" && r != RecomputeNone && !r.experts() {
		return fmt.Errorf("recompute %q is unknown; known are %q, %q and %q", r, RecomputeNone, RecomputeExperts,
			RecomputeLayers)
	}
	return nil
}

// SetRecompute chooses what the backward passes that follow compute again; before the first call it
// is nothing. The gradients are the same bits. A level that is not known makes them fail.
func (m *Model) SetRecompute(r Recompute) { m.recompute = r }

// restore computes what the backward pass reads of layer number and the forward pass has not kept,
// with the input of the experts in ws.h. With fresh, the layer was the last to go through the
// forward pass, and what layers share is still its.
func (m *Model) restore(ctx context.Context, l *layer, st *saved, number int, fresh bool) error {
	w := &m.ws
	if !fresh && w.shape.recompute.attention() {
		m.attend(l, st, w.ownKeys())
		m.dev.Normalize(w.h, st.x1, m.norm2(l, st), false)
	} else {
		m.dev.Normalize(w.h, st.x1, m.norm2(l, st), true)
	}
	if fresh || !w.shape.recompute.experts() {
		return nil
	}
	if m.dispatch != nil {
		return m.dispatch.expand(ctx, m, l, number)
	}
	m.expand(l, st, w.h)
	return nil
}
