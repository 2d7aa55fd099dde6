// Package pipeline runs the forward and backward passes of a rank's micro-batches, with all layers
// of the model or with one stage of several. Stages send hidden states and gradients to each other.
package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"mula/moe"
	"mula/train/collective"
	"mula/train/samples"
	"mula/xpu"
	"mula/xpu/comm"
)

// A Pipeline connects this rank's stage with its neighbours. All stages of a data rank read the
// same rows, so they know the number of rows of each micro-batch.
//
// A stage that cannot compute a batch still sends the data that its neighbours wait for. All stages
// then reach the vote, which reports the error.
type Pipeline struct {
	group  *comm.Comm // a rank's number in it is its stage
	back   *comm.Comm // the same ranks, for gradients
	ends   *comm.Comm // the same ranks, for embeddings of the first and the last group of layers
	groups int        // of layers of each stage
	Model  *moe.Model
	device xpu.Device
	length int // tokens of a row
	own    int // of these, the tokens that this rank computes

	experts bool // other ranks have experts of this stage, so each pass needs all ranks

	in, out    relay       // of the current batch
	embeddings buffer      // of in or out, for a batch with layers of multi-token prediction
	none       *moe.Relay  // for a batch without rows
	slots      []slotState // of the model

	nonFinite bool // this stage computed non-finite values from finite input
}

// A relay has memory for the hidden states of the largest batch so far.
type relay struct {
	*moe.Relay
	hidden buffer
}

// A buffer is memory for the largest matrix so far.
type buffer struct {
	memory xpu.Tensor
	host   []float32 // for its data, if the device does not share memory with the host
}

// New returns the pipeline of a rank. With several groups of layers, back is another communicator
// of the group [comm.PP]: with two stages, hidden states and gradients go to the same rank, in an
// order that differs between the two. If the model has layers of multi-token prediction and several
// stages, embeddings is one more communicator of that group.
func New(mesh *comm.Mesh, back, embeddings *comm.Comm, m *moe.Model, sequenceLength int) (*Pipeline, error) {
	p := &Pipeline{group: mesh.Group(comm.PP), back: back, ends: embeddings, groups: m.LayerGroups(), Model: m,
		device: m.Device(), length: sequenceLength, own: sequenceLength / m.Sequence().Size(),
		experts: mesh.Size(comm.EP) > 1}
	if p.groups == 1 {
		p.back = p.group
	}
	if p.group.Size() == 1 {
		return p, nil // no neighbour
	}
	var errs [3]error
	for i, made := range []**moe.Relay{&p.in.Relay, &p.out.Relay, &p.none} {
		*made, errs[i] = m.NewRelay(0, p.own)
	}
	return p, errors.Join(errs[:]...)
}

// Free releases the pipeline's device memory. The pipeline is unusable afterwards.
func (p *Pipeline) Free() {
	for _, b := range []*buffer{&p.in.hidden, &p.out.hidden, &p.embeddings} {
		if b.memory.Present() {
			p.device.Release(b.memory)
			b.memory = xpu.Tensor{}
		}
	}
}

// Last reports whether this stage has the losses.
func (p *Pipeline) Last() bool { return p.group.Rank() == p.group.Size()-1 }

// TakeNonFinite reports whether this rank has computed non-finite values from finite input since
// the last call, and sent them to another stage or to ranks that share its sequences. losses are
// this rank's parts of losses that it shares.
func (p *Pipeline) TakeNonFinite(losses []float64) bool {
	exchanged := p.Model.NonFinite()
	for _, loss := range losses {
		p.nonFinite = p.nonFinite || loss-loss != 0 && !exchanged.Received
	}
	found := p.nonFinite || exchanged.Made
	p.nonFinite, *exchanged = false, moe.NonFinite{}
	return found
}

// last reports whether a group of this stage's layers is the last of the model, and first whether
// it is the first.
func (p *Pipeline) last(group int) bool  { return p.Last() && group == p.groups-1 }
func (p *Pipeline) first(group int) bool { return p.group.Rank() == 0 && group == 0 }

// A passed batch is a batch of a number of rows in a forward pass (step 1) or a backward pass (step
// -1) through a group of this stage's layers.
type passed struct {
	group, step, rows int
	predicts          bool // the pass includes layers of multi-token prediction
}

// forward describes a forward pass of training.
func (p *Pipeline) forward(group, rows int) passed {
	return passed{group, 1, rows, p.Model.Config().PredictionLayers > 0}
}

// pass runs the pass of a batch. compute gets the input of one neighbour and the output for the
// other, nil without a neighbour. After an error of pass, the stage cannot communicate.
//
// With layers of multi-token prediction, the first and the last group of the model also exchange
// embeddings and their gradients. They have a communicator of their own, so that the order of
// messages between the same two stages is the order of the micro-batches.
func (p *Pipeline) pass(ctx context.Context, b passed, compute func(in, out *moe.Relay) error) error {
	n, link, begins, ends := p.group.Size(), p.group, p.first(b.group), p.last(b.group)
	if b.step < 0 {
		link, begins, ends = p.back, ends, begins
	}
	from, to := (p.group.Rank()-b.step+n)%n, (p.group.Rank()+b.step+n)%n
	in, err := p.relay(&p.in, begins, b.rows)
	if err != nil {
		return err
	}
	out, err := p.relay(&p.out, ends, b.rows)
	if err != nil {
		return err
	}
	sends, receives := b.predicts && begins && !ends, b.predicts && ends && !begins // embeddings
	otherEnd := n - 1 - p.group.Rank()
	if sends || receives {
		r := out
		if receives {
			r = in
		}
		if r.Embeddings, err = p.matrix(&p.embeddings, p.Model.Config().PredictionLayers*b.rows*p.own); err != nil {
			return err
		}
	}
	var hidden, embeddings []float32 // received
	if in != nil && b.rows > 0 {
		if hidden, err = p.receive(ctx, link, from, in.Hidden, &p.in.hidden); err != nil {
			return err
		}
		if len(in.Router) > 0 {
			if err := comm.Recv(ctx, link, from, in.Router); err != nil {
				return err
			}
		}
	}
	if receives && b.rows > 0 {
		if embeddings, err = p.receive(ctx, p.ends, otherEnd, in.Embeddings, &p.embeddings); err != nil {
			return err
		}
	}
	finite := func() bool { return moe.Finite(hidden) && moe.Finite(embeddings) }
	if p.own < p.length && !finite() {
		p.Model.NonFinite().Received = true
	}
	if err := compute(in, out); err != nil {
		return err
	}
	if out == nil || b.rows == 0 {
		return nil
	}
	send := func(link *comm.Comm, to int, x xpu.Tensor, memory *buffer) error {
		sent, err := xpu.Numbers(ctx, p.device, x, &memory.host)
		if err != nil {
			return err
		}
		p.nonFinite = p.nonFinite || !moe.Finite(sent) && finite() && !p.Model.NonFinite().Received
		return comm.Send(ctx, link, to, sent)
	}
	if sends {
		if err := send(p.ends, otherEnd, out.Embeddings, &p.embeddings); err != nil {
			return err
		}
	}
	if err := send(link, to, out.Hidden, &p.out.hidden); err != nil {
		return err
	}
	if len(out.Router) > 0 {
		return comm.Send(ctx, link, to, out.Router)
	}
	return nil
}

// receive receives the numbers of x from a stage, and returns them. memory is the buffer of x.
func (p *Pipeline) receive(ctx context.Context, link *comm.Comm, from int, x xpu.Tensor, memory *buffer) ([]float32,
	error) {
	received := xpu.HostBuffer(x, &memory.host)
	if err := comm.Recv(ctx, link, from, received); err != nil {
		return nil, err
	}
	xpu.SetNumbers(p.device, x, received)
	return received, nil
}

// relay returns r for a batch of rows rows, or nil if there is no neighbour. Relays without rows
// are not sent.
func (p *Pipeline) relay(r *relay, none bool, rows int) (_ *moe.Relay, err error) {
	if none {
		return nil, nil
	}
	r.Embeddings = xpu.Tensor{}
	if r.Hidden, err = p.matrix(&r.hidden, rows*p.own); err != nil {
		return nil, err
	}
	if rows == 0 {
		clear(r.Router)
	}
	return r.Relay, nil
}

// matrix returns a matrix of hidden states, or of embeddings, in a buffer.
func (p *Pipeline) matrix(b *buffer, rows int) (xpu.Tensor, error) {
	if !b.memory.Present() || rows > b.memory.Dim(0) {
		if b.memory.Present() {
			p.device.Release(b.memory)
		}
		var err error
		if b.memory, err = p.device.New(xpu.Float32, rows, p.Model.Config().HiddenSize); err != nil {
			b.memory = xpu.Tensor{}
			return xpu.Tensor{}, err
		}
	}
	return b.memory.Rows(0, rows), nil
}

// blank sets the output of a batch that cannot be computed to zeros. It returns relays without rows
// with which the model takes part in the exchanges of its experts.
func (p *Pipeline) blank(in, out *moe.Relay) (noneIn, noneOut *moe.Relay) {
	if p.group.Size() == 1 {
		return nil, nil
	}
	clear(p.none.Router)
	if in != nil {
		noneIn = p.none
	}
	if out != nil {
		p.device.Zero(out.Hidden)
		if out.Embeddings.Elements() > 0 {
			p.device.Zero(out.Embeddings)
		}
		clear(out.Router)
		noneOut = p.none
	}
	return noneIn, noneOut
}

// A Step has this rank's rows of a step.
type Step struct {
	Number     int64 // of the step
	Rows       *samples.Rows
	Position   func(row int) int64
	MicroBatch int    // rows of a micro-batch
	Passes     int    // backward passes; may exceed the number of micro-batches
	Before     int64  // number of rows of lower ranks
	JitterSeed uint64 // of the noise of the model's routers
	// called in the last pass when the gradients of a bucket are complete; may be nil
	Done func(bucket int)

	// SumCounts adds the tokens of each expert over all ranks of the stage, for
	// [moe.BackwardOptions.StepCounts]; nil if they are not needed. MostPasses is then the largest
	// number of Passes of these ranks.
	SumCounts  func(ctx context.Context, counts [][]int64) error
	MostPasses int
}

// batch returns the rows [first, end) of a micro-batch, and its batch. There may be no rows.
func (s Step) batch(number int) (first, end int, batch moe.Batch) {
	first = min(number*s.MicroBatch, s.Rows.Len())
	end = min(first+s.MicroBatch, s.Rows.Len())
	batch = s.Rows.Batch(first, end)
	batch.Jitter = moe.BatchJitter{On: true, Seed: s.JitterSeed, First: s.firstInput(first)}
	batch.Drop = true
	return first, end, batch
}

// firstInput returns the number of the first input of a row of this rank, in the order of the rows
// of all ranks.
func (s Step) firstInput(row int) int64 { return (s.Before + int64(row)) * int64(s.Rows.Length) }

// setPass sets the options of the backward pass of a micro-batch that starts at row first. The
// first micro-batch of a group of layers sets its gradients, and the last completes its buckets.
func (s Step) setPass(number, first int, options *moe.BackwardOptions) {
	options.First = number == 0
	options.FirstTarget = s.firstInput(first)
	if options.Done = nil; number == s.Passes-1 {
		options.Done = s.Done
	}
}

// failed adds the positions of the rows [first, end) to an error.
func (s Step) failed(first, end int, err error) error {
	return fmt.Errorf("step %d, positions %d to %d: %w", s.Number, s.Position(first), s.Position(end-1), err)
}

// Backward computes the gradients of this rank's rows of a step. It calls each after every
// micro-batch that has rows. If a batch cannot be computed, the rank continues without rows, and
// Backward returns the error at the end. If other ranks share the rows, it returns a
// [collective.BrokenError] at once, because they wait for this rank in the attention.
func (p *Pipeline) Backward(ctx context.Context, s Step, options moe.BackwardOptions,
	each func(first, end int, stats moe.Stats)) (failed error) {
	var counter stepCounter
	if s.SumCounts != nil {
		counter = stepCounter{p: p, s: s}
		if s.MostPasses > 1 || p.groups > 1 {
			if failed = counter.countFirst(ctx); collective.IsBroken(failed) {
				return failed
			}
		}
		options.StepCounts = counter.stepCounts
	}
	if p.group.Size() > 1 {
		failed = p.stages(ctx, s, options, failed, each)
	} else {
		failed = p.whole(ctx, s, options, failed, each)
	}
	if s.SumCounts != nil && !collective.IsBroken(failed) { // the other ranks wait, if this one had no pass
		if _, err := counter.stepCounts(ctx, p.noCounts()); err != nil {
			return errors.Join(failed, err)
		}
	}
	return failed
}

// A stepCounter computes [moe.BackwardOptions.StepCounts] of a step. If each rank computes at most
// one micro-batch, the counts of its pass are added over the ranks. Otherwise it counts first, in
// forward passes of all micro-batches.
type stepCounter struct {
	p     *Pipeline
	s     Step
	total [][]int64 // nil before they are known
}

// countFirst counts in forward passes of all micro-batches.
func (c *stepCounter) countFirst(ctx context.Context) error {
	own, failed := c.p.count(ctx, c.s)
	if collective.IsBroken(failed) {
		return failed
	}
	if _, err := c.stepCounts(ctx, own); err != nil {
		return errors.Join(failed, err)
	}
	return failed
}

// stepCounts returns the counts of the step. The first call adds own over the ranks.
func (c *stepCounter) stepCounts(ctx context.Context, own [][]int64) ([][]int64, error) {
	if c.total != nil {
		return c.total, nil
	}
	c.total = c.p.noCounts()
	for layer := range own {
		copy(c.total[layer], own[layer])
	}
	if err := c.s.SumCounts(ctx, c.total); err != nil {
		return nil, &collective.BrokenError{Err: fmt.Errorf("step %d: %w", c.s.Number, err)}
	}
	return c.total, nil
}

// noCounts returns zeros in the form of Stats.ExpertCounts.
func (p *Pipeline) noCounts() [][]int64 {
	config := p.Model.Config()
	counts := make([][]int64, len(config.StageExpertLayers(p.group.Rank(), p.group.Size(), p.groups)))
	for i := range counts {
		counts[i] = make([]int64, config.Experts)
	}
	return counts
}

// count returns the tokens of this rank's rows that chose each expert, as Stats.ExpertCounts. If a
// batch cannot be computed, the rank continues like in [Pipeline.Backward].
func (p *Pipeline) count(ctx context.Context, s Step) (counts [][]int64, failed error) {
	none := moe.Batch{SequenceLength: p.length}
	counts = p.noCounts()
	for _, next := range schedule(p.group.Rank(), p.group.Size(), p.groups, s.Passes) {
		if next.backward {
			continue
		}
		first, end, batch := s.batch(next.batch)
		p.Model.SelectLayers(next.group)
		err := p.onlyForward(ctx, p.forward(next.group, end-first), func(in, out *moe.Relay) error {
			if failed == nil {
				own, err := p.Model.StageCounts(ctx, batch, in, out)
				if err == nil {
					for layer := range own {
						for expert, n := range own[layer] {
							counts[layer][expert] += n
						}
					}
					return nil
				}
				if first == end {
					return err
				}
				if failed = s.failed(first, end, err); p.own < p.length {
					return failed
				}
			}
			in, out = p.blank(in, out)
			if !p.experts {
				return nil
			}
			_, err := p.Model.StageCounts(ctx, none, in, out)
			return err
		})
		if err != nil {
			return nil, &collective.BrokenError{Err: errors.Join(failed, fmt.Errorf("step %d, pipeline stage %d: %w",
				s.Number, p.group.Rank(), err))}
		}
	}
	return counts, failed
}

// onlyForward is [Pipeline.pass] of a forward pass that no backward pass follows. With one group of
// layers, a stage continues when the next stage has received the batch, so at most one batch waits
// at a stage. With several groups, the stages wait for each other's earlier groups.
func (p *Pipeline) onlyForward(ctx context.Context, b passed, compute func(in, out *moe.Relay) error) error {
	if p.groups > 1 {
		return p.pass(ctx, b, compute)
	}
	return p.acknowledged(ctx, b, compute)
}

// acknowledged is [Pipeline.pass] of a forward pass that ends when the next stage has received the
// batch.
func (p *Pipeline) acknowledged(ctx context.Context, b passed, compute func(in, out *moe.Relay) error) error {
	note, n := []byte{1}, p.group.Size()
	err := p.pass(ctx, b, func(in, out *moe.Relay) error {
		if in != nil {
			if err := comm.Send(ctx, p.group, (p.group.Rank()-1+n)%n, note); err != nil {
				return err
			}
		}
		return compute(in, out)
	})
	if err == nil && !p.last(b.group) {
		err = comm.Recv(ctx, p.group, (p.group.Rank()+1)%n, note)
	}
	return err
}

// whole is Backward for a model with one pipeline stage. failed is an error of this rank before it.
func (p *Pipeline) whole(ctx context.Context, s Step, options moe.BackwardOptions, failed error,
	each func(first, end int, stats moe.Stats)) error {
	none := moe.Batch{SequenceLength: p.length}
	for pass := range s.Passes {
		first, end, micro := s.batch(pass)
		if failed != nil && !p.experts {
			break // no rank waits for this rank's passes
		} else if failed != nil {
			first, micro = end, none
		}
		if err := ctx.Err(); err != nil {
			return &collective.BrokenError{Err: err}
		}
		s.setPass(pass, first, &options)
		stats, err := p.Model.Backward(ctx, micro, options)
		switch {
		case err == nil && end > first:
			each(first, end, stats)
		case err == nil:
		case collective.IsBroken(err):
			return err
		case first == end:
			return &collective.BrokenError{Err: errors.Join(failed, fmt.Errorf("step %d: %w", s.Number, err))}
		default:
			failed = s.failed(first, end, err)
			if p.own < p.length {
				return &collective.BrokenError{Err: failed}
			}
			if !p.experts {
				continue
			}
			if _, err := p.Model.Backward(ctx, none, options); err != nil {
				return &collective.BrokenError{Err: failed}
			}
		}
	}
	return failed
}

// stages is Backward for one stage of several, in the order of [schedule]. failed is an error of
// this rank before it.
func (p *Pipeline) stages(ctx context.Context, s Step, options moe.BackwardOptions, failed error,
	each func(first, end int, stats moe.Stats)) error {
	none := moe.Batch{SequenceLength: p.length}
	lost := func(err error) error {
		return &collective.BrokenError{Err: errors.Join(failed,
			fmt.Errorf("step %d, pipeline stage %d: %w", s.Number, p.group.Rank(), err))}
	}
	type key struct{ group, batch int }
	slots := map[key]int{} // of the model's batches
	forward := func(group, number int) error {
		first, end, batch := s.batch(number)
		slot := p.freeSlot()
		slots[key{group, number}] = slot
		p.Model.SelectLayers(group)
		return p.pass(ctx, p.forward(group, end-first), func(in, out *moe.Relay) error {
			if failed == nil {
				err := p.Model.StageForward(ctx, slot, batch, in, out)
				if err == nil {
					p.slots[slot].computed = true
					return nil
				}
				if first == end {
					return err
				}
				failed = s.failed(first, end, err)
				if p.own < p.length {
					return failed
				}
			}
			in, out = p.blank(in, out)
			if !p.experts {
				return nil // no rank waits for this rank's experts
			}
			return p.Model.StageForward(ctx, slot, none, in, out)
		})
	}
	backward := func(group, number int) error {
		first, end, _ := s.batch(number)
		slot := slots[key{group, number}]
		computed := p.slots[slot].computed
		p.slots[slot] = slotState{}
		s.setPass(number, first, &options)
		b := p.forward(group, end-first)
		b.step = -1
		return p.pass(ctx, b, func(in, out *moe.Relay) error {
			if !computed {
				in, out = p.blank(in, out)
				if !p.experts {
					return nil
				}
			}
			stats, err := p.Model.StageBackward(ctx, slot, options, in, out)
			if err == nil && computed && end > first {
				each(first, end, stats)
			}
			return err
		})
	}
	for _, next := range schedule(p.group.Rank(), p.group.Size(), p.groups, s.Passes) {
		run := forward
		if next.backward {
			run = backward
		}
		if err := run(next.group, next.batch); err != nil {
			return lost(err)
		}
	}
	return failed
}

// A slotState is the use of a slot of the model in a step.
type slotState struct {
	used     bool // from the forward pass to the backward pass
	computed bool // the model has its batch
}

// freeSlot returns the first slot that is not used, and marks it as used.
func (p *Pipeline) freeSlot() int {
	i := slices.IndexFunc(p.slots, func(s slotState) bool { return !s.used })
	if i < 0 {
		i, p.slots = len(p.slots), append(p.slots, slotState{})
	}
	p.slots[i] = slotState{used: true}
	return i
}

// Loss computes the losses of a batch without a backward pass. The last stage has the losses. A
// batch without rows, although rows is above 0, could not be read. A stage continues when the next
// stage has received the batch, so at most one batch waits at a stage.
//
// Ranks that share sequences get the same losses of rows. They compute a batch only if all of them
// have read it.
func (p *Pipeline) Loss(ctx context.Context, batch moe.Batch, rows int) (moe.Stats, error) {
	sequence := p.Model.Sequence()
	if sequence.Size() == 1 {
		return p.loss(ctx, batch, rows)
	}
	missing := []int64{int64(rows - batch.Rows)}
	if err := comm.AllReduce(ctx, sequence, missing); err != nil {
		return moe.Stats{}, err
	}
	if missing[0] > 0 {
		batch = moe.Batch{SequenceLength: p.length}
	}
	stats, err := p.loss(ctx, batch, rows)
	if err != nil || !p.Last() || batch.Rows == 0 {
		return stats, err
	}
	return stats, comm.AllReduce(ctx, sequence, stats.RowLoss)
}

// loss is [Pipeline.Loss] of a rank that has complete rows. The batch passes one group of layers
// after the other.
func (p *Pipeline) loss(ctx context.Context, batch moe.Batch, rows int) (stats moe.Stats, err error) {
	var failed error
	for group := range p.groups {
		p.Model.SelectLayers(group)
		err = p.acknowledged(ctx, passed{group: group, step: 1, rows: rows}, func(in, out *moe.Relay) error {
			if batch.Rows == rows && failed == nil {
				var err error
				if stats, err = p.Model.StageLoss(ctx, batch, in, out); err == nil {
					return nil
				}
				if failed = err; rows == 0 {
					return failed
				}
			}
			in, out = p.blank(in, out)
			if !p.experts {
				return nil
			}
			_, err := p.Model.StageLoss(ctx, moe.Batch{SequenceLength: p.length}, in, out)
			return err
		})
		if err != nil {
			break
		}
	}
	return stats, errors.Join(failed, err)
}
