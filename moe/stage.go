package moe

import (
	"context"
	"errors"
	"fmt"

	"mula/xpu"
	"mula/xpu/comm"
)

// A Relay is the data that one pipeline stage sends to the next: in the forward pass the residual
// stream, in the backward pass its gradient. Both come with the sums over layers that the router
// losses need.
type Relay struct {
	Hidden xpu.Tensor // [T, H], on the model's device
	Router []float64  // [2E+2]; empty in a dense model

	// Embeddings, [D·T, H], pass between the first and the last group of layers of a model with D
	// layers of multi-token prediction: in the forward pass the embeddings of the tokens that each
	// of these layers reads, and in the backward pass their gradients. Only the first group's relay
	// behind it and the last group's relay before it need them, and not in StageLoss.
	Embeddings xpu.Tensor
}

// SelectLayers selects the group of layers, from 0, that StageForward and StageLoss compute; see
// [Parallel.VirtualStages]. The first group of the first stage and the last group of the last stage
// have no relay before and behind them, respectively. The first group is selected at the start.
func (m *Model) SelectLayers(group int) {
	g := &m.groups[group]
	m.selected, m.stage, m.layers, m.firstBucket = group, g.stage, g.layers, g.firstBucket
}

// LayerGroups is the number of groups of layers of this rank.
func (m *Model) LayerGroups() int { return len(m.groups) }

// NewRelay allocates a Relay for batches of the given shape. Hidden is one tensor of the device's
// New, and so are Embeddings, which are absent without layers of multi-token prediction.
func (m *Model) NewRelay(rows, sequenceLength int) (*Relay, error) {
	tokens := rows * sequenceLength
	hidden, err := m.dev.New(xpu.Float32, tokens, m.cfg.HiddenSize)
	if err != nil {
		return nil, fmt.Errorf("hidden states of %d rows of %d tokens for another stage: %w", rows, sequenceLength, err)
	}
	r := &Relay{Hidden: hidden, Router: make([]float64, m.routerSums())}
	if d := m.cfg.PredictionLayers; d > 0 {
		if r.Embeddings, err = m.dev.New(xpu.Float32, d*tokens, m.cfg.HiddenSize); err != nil {
			m.dev.Release(hidden)
			return nil, fmt.Errorf("embeddings of %d rows of %d tokens for another stage: %w", rows, sequenceLength,
				err)
		}
	}
	return r, nil
}

// isMatrix reports whether a tensor has the given numbers of rows and columns.
func isMatrix(t xpu.Tensor, rows, columns int) bool {
	return t.Rank() == 2 && t.Dim(0) == rows && t.Dim(1) == columns
}

// StageForward runs a batch through this stage's layers and keeps the activations for
// [Model.StageBackward] in the given slot. in is the previous stage's output, nil on the first
// stage; out receives this stage's output and is nil on the last stage. Several batches may be
// under way, each in its own slot. Slots are small numbers from 0, and a slot keeps its memory once
// it was used. The batch must not change before StageBackward.
//
// The batch passes the layers of the group of [Model.SelectLayers].
//
// Every stage must call both methods for every batch, with the same options; each stage may choose
// its own order of batches. Gradients and statistics have the same bits as with [Model.Backward] of
// the complete model, if StageBackward processes the batches in the same order.
func (m *Model) StageForward(ctx context.Context, slot int, batch Batch, in, out *Relay) error {
	if err := batch.check(m.cfg, m.parallel); err != nil {
		return err
	}
	if slot < 0 {
		return fmt.Errorf("slot %d is negative", slot)
	}
	if err := m.checkRelays(batch, true, in, out); err != nil {
		return err
	}
	if err := m.take(slot, batch, true, true); err != nil {
		return err
	}
	if err := m.forward(ctx, in, out); err != nil {
		return err
	}
	m.ws.waits = true
	return nil
}

// StageLoss runs a batch through this stage's layers without a backward pass; in and out are as in
// [Model.StageForward]. The last stage returns the loss, like [Model.Forward]. Slot 0 must be free.
// Layers of multi-token prediction are not computed, and not in the statistics.
func (m *Model) StageLoss(ctx context.Context, batch Batch, in, out *Relay) (Stats, error) {
	if err := m.pass(ctx, batch, false, in, out); err != nil {
		return Stats{}, err
	}
	if m.stage.last {
		m.crossEntropy(BackwardOptions{}, 0, m.ws.own.target, m.ws.ce, xpu.MatMulOptions{})
		if err := m.settle(ctx); err != nil {
			return Stats{}, err
		}
	}
	return m.stats(AuxHF), nil
}

// StageCounts runs a batch through this stage's layers, like [Model.StageLoss] without the loss. It
// returns the number of tokens that chose each expert, as Stats.ExpertCounts.
func (m *Model) StageCounts(ctx context.Context, batch Batch, in, out *Relay) ([][]int64, error) {
	if err := m.pass(ctx, batch, true, in, out); err != nil {
		return nil, err
	}
	if m.stage.last {
		if err := m.settle(ctx); err != nil {
			return nil, err
		}
	}
	return m.countsOfAllGroups(), nil
}

// pass runs a batch through this stage's layers without a backward pass. predict is as in take.
func (m *Model) pass(ctx context.Context, batch Batch, predict bool, in, out *Relay) error {
	if err := batch.check(m.cfg, m.parallel); err != nil {
		return err
	}
	if err := m.checkRelays(batch, predict, in, out); err != nil {
		return err
	}
	if err := m.take(0, batch, false, predict); err != nil {
		return err
	}
	return m.forward(ctx, in, out)
}

// StageBackward runs the batch of a slot back through this stage's layers and adds to the gradients
// of their weights, or sets them, like [Model.Backward]. in is the next stage's result, nil on the
// last stage; out receives this stage's result and is nil on the first stage. The slot is free
// afterwards.
//
// The last stage returns Loss, RowLoss, Aux and Z; ExpertCounts and RouterEntropy cover this
// group's layers. In the forms [AuxSequence] and [AuxGlobal] every group has an Aux. A SetRecompute
// between StageForward and StageBackward has no effect on the batch. StageBackward selects the
// group of layers of the batch.
func (m *Model) StageBackward(ctx context.Context, slot int, opts BackwardOptions, in, out *Relay) (Stats, error) {
	if slot < 0 || slot >= len(m.flights) || !m.flights[slot].waits {
		return Stats{}, fmt.Errorf("slot %d has no batch under way; call StageForward first", slot)
	}
	f := m.flights[slot]
	m.SelectLayers(f.group)
	size, err := m.stepSize(f.batch, opts)
	if err != nil {
		return Stats{}, err
	}
	if err := m.checkRelays(f.batch, true, out, in); err != nil {
		return Stats{}, err
	}
	f.waits = false
	if err := m.ws.plan(m.dev, m.own, f, f.shape); err != nil {
		return Stats{}, err
	}
	return m.backward(ctx, opts, size, in, out)
}

// checkRelays checks the relays of the previous and the next stage. predict is as in take.
func (m *Model) checkRelays(batch Batch, predict bool, before, behind *Relay) error {
	stage, stages := m.parallel.Mesh.OwnIndex(comm.PP), m.parallel.Mesh.Size(comm.PP)
	_, ranks := m.parallel.sequenceRanks()
	tokens, router, width := batch.Rows*(batch.SequenceLength/ranks), m.routerSums(), m.cfg.HiddenSize
	check := func(r *Relay, none bool, name string) error {
		switch {
		case r == nil != none && none:
			return fmt.Errorf("stage %d of %d has no stage %s it; pass nil", stage, stages, name)
		case r == nil != none:
			return fmt.Errorf("stage %d of %d needs a relay for the stage %s it", stage, stages, name)
		case r != nil && (!isMatrix(r.Hidden, tokens, width) || len(r.Router) != router):
			return fmt.Errorf("the relay for the stage %s has %d and %d numbers, and a batch of %d rows of %d "+
				"tokens needs %d and %d", name,
				r.Hidden.Elements(), len(r.Router), batch.Rows, batch.SequenceLength, tokens*width, router)
		}
		return nil
	}
	err := errors.Join(check(before, m.stage.first, "before"), check(behind, m.stage.last, "behind"))
	if d := m.cfg.PredictionLayers; err == nil && predict && d > 0 {
		for _, r := range []*Relay{m.beforeLast(before), m.behindFirst(behind)} {
			if r != nil && !isMatrix(r.Embeddings, d*tokens, width) {
				return fmt.Errorf("a relay between the first and the last stage needs %d embeddings of %d numbers for "+
					"the layers of multi-token prediction, and has %d numbers", d*tokens, width,
					r.Embeddings.Elements())
			}
		}
	}
	return err
}

// beforeLast returns the relay before the selected group of layers, if it is the model's last group
// and not the first one; otherwise nil. behindFirst does the same for the first group and the relay
// behind it. These relays have embeddings.
func (m *Model) beforeLast(r *Relay) *Relay {
	if m.stage.first || !m.stage.last {
		return nil
	}
	return r
}
func (m *Model) behindFirst(r *Relay) *Relay {
	if !m.stage.first || m.stage.last {
		return nil
	}
	return r
}

// oneStage returns an error if the model is one of several pipeline stages.
func (m *Model) oneStage() error {
	if n := m.parallel.Mesh.Size(comm.PP); n > 1 {
		return fmt.Errorf("this is stage %d of %d; use StageForward and StageBackward",
			m.parallel.Mesh.OwnIndex(comm.PP), n)
	}
	return nil
}
