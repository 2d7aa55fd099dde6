package moe

import (
	"context"
	"errors"
	"fmt"
)

// A Relay is what one stage of a pipeline gives to the next: forwards the residual stream,
// backwards its gradient, and beside either the sums over layers that the losses of the router
// need. Hidden is memory of the model's device: who sends it to another rank calls ToHost before,
// who has received it ToDevice after.
type Relay struct {
	Hidden []float32 // [T, H]
	Router []float64 // [2E+2]; empty in a dense model
}

// NewRelay makes one for batches of the given shape. Hidden is as Floats of the device gave it.
func (m *Model) NewRelay(rows, sequenceLength int) (*Relay, error) {
	hidden, err := m.dev.Floats(rows * sequenceLength * m.cfg.HiddenSize)
	if err != nil {
		return nil, fmt.Errorf("hidden states of %d rows of %d tokens for another stage: %w", rows, sequenceLength, err)
	}
	return &Relay{hidden, make([]float64, m.routerSums())}, nil
}

// StageForward runs a batch through the layers of this stage, and leaves in slot number slot what
// [Model.StageBackward] wants. in is the stage before's result, nil on the first stage; the stage's
// own result goes to out, which is nil on the last. Several batches may be under way at once, each
// in its own slot; slots are small numbers from 0, and each that was used keeps its memory. The
// batch must not change before StageBackward.
//
// For every batch all stages call both, with the same options, and each for its batches in any
// order. The gradients and the statistics are those of [Model.Backward] of the whole model, to the
// bit, if the batches come to StageBackward in the same order as there.
func (m *Model) StageForward(ctx context.Context, slot int, batch Batch, in, out *Relay) error {
	if err := batch.check(m.cfg, m.parallel); err != nil {
		return err
	}
	if slot < 0 {
		return fmt.Errorf("slot %d is negative", slot)
	}
	if err := m.checkRelays(batch, in, out); err != nil {
		return err
	}
	if err := m.take(slot, batch, true); err != nil {
		return err
	}
	if err := m.forward(ctx, in, out); err != nil {
		return err
	}
	m.ws.waits = true
	return nil
}

// StageLoss runs a batch through the layers of this stage without a backward pass to come; in and
// out are those of [Model.StageForward]. The last stage knows its loss, as [Model.Forward] gives
// it. No batch may be under way in slot 0.
func (m *Model) StageLoss(ctx context.Context, batch Batch, in, out *Relay) (Stats, error) {
	if err := batch.check(m.cfg, m.parallel); err != nil {
		return Stats{}, err
	}
	if err := m.checkRelays(batch, in, out); err != nil {
		return Stats{}, err
	}
	if err := m.take(0, batch, false); err != nil {
		return Stats{}, err
	}
	if err := m.forward(ctx, in, out); err != nil {
		return Stats{}, err
	}
	if m.stage.last {
		m.crossEntropy(BackwardOptions{}, 0)
		if err := m.settle(ctx); err != nil {
			return Stats{}, err
		}
	}
	return m.stats(AuxHF), nil
}

// StageBackward runs the batch that is under way in a slot back through the layers of this stage,
// and adds to the gradients of their weights, as [Model.Backward] does. in is the result of the
// stage behind, nil on the last stage; the stage's own result goes to out, which is nil on the
// first. The slot is free afterwards.
//
// Loss, RowLoss, Aux and Z are known to the last stage; ExpertCounts and RouterEntropy are those of
// the layers held here. With SetRecompute between the two calls of a batch, it is the first call's
// that counts.
func (m *Model) StageBackward(ctx context.Context, slot int, opts BackwardOptions, in, out *Relay) (Stats, error) {
	if slot < 0 || slot >= len(m.flights) || !m.flights[slot].waits {
		return Stats{}, fmt.Errorf("slot %d has no batch under way; StageForward comes first", slot)
	}
	f := m.flights[slot]
	size, err := m.stepSize(f.batch, opts)
	if err != nil {
		return Stats{}, err
	}
	if err := m.checkRelays(f.batch, out, in); err != nil {
		return Stats{}, err
	}
	f.waits = false
	if err := m.ws.plan(m.dev, m.cfg, f, f.shape); err != nil {
		return Stats{}, err
	}
	return m.backward(ctx, opts, size, in, out)
}

// checkRelays says what is wrong with what is given to or taken from the stages before and behind
// this one.
func (m *Model) checkRelays(batch Batch, before, behind *Relay) error {
	check := func(r *Relay, none bool, name string) error {
		switch hidden, router := batch.Rows*batch.SequenceLength*m.cfg.HiddenSize, m.routerSums(); {
		case r == nil != none && none:
			return fmt.Errorf("stage %d of %d has no stage %s it; give nil", m.parallel.Stage,
				max(1, m.parallel.Stages), name)
		case r == nil != none:
			return fmt.Errorf("stage %d of %d needs a relay for the stage %s it", m.parallel.Stage, m.parallel.Stages,
				name)
		case r != nil && (len(r.Hidden) != hidden || len(r.Router) != router):
			return fmt.Errorf("the relay for the stage %s has %d and %d numbers, and a batch of %d rows of %d "+
				"tokens needs %d and %d", name,
				len(r.Hidden), len(r.Router), batch.Rows, batch.SequenceLength, hidden, router)
		}
		return nil
	}
	return errors.Join(check(before, m.stage.first, "before"), check(behind, m.stage.last, "behind"))
}

// oneStage refuses a whole pass on a stage of a pipeline.
func (m *Model) oneStage() error {
	if n := m.parallel.Stages; n > 1 {
		return fmt.Errorf("this is stage %d of %d; use StageForward and StageBackward", m.parallel.Stage, n)
	}
	return nil
}
