// Package votes exchanges the results of each step among the ranks of a run, so that all ranks act
// in the same way and rank 0 has the metrics of all. If a value is not finite, it finds the rank
// that first computed such a value.
package votes

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"

	"mula/blend/fingerprint"
	"mula/moe"
	"mula/train/collective"
	"mula/train/group"
	"mula/train/record"
	"mula/xpu/comm"
)

// A Row is a sample of the current step and its result.
type Row struct {
	Position int64
	Source   int
	Targets  int64    // unmasked
	Loss     float64  // sum of the cross entropies of its unmasked targets
	Hash     [16]byte // of its tokens
}

// Votes has the votes about a step: of this rank, their sums over all ranks, and if the ranks need
// them, the votes of all ranks.
type Votes struct {
	// Rows has the rows whose losses this rank has. After Gather it has the rows of all ranks, in
	// the order of their positions.
	Rows []Row

	// After Exchange, of the rows of all ranks; only on rank 0.
	Sources []SourceSums
	Hasher  fingerprint.Hasher

	Slow SlowLimit // which ranks are slow

	pace    pace
	ranks   *group.Group
	model   moe.Config
	stages  int
	virtual int // groups of layers of a stage
	slots   int // rows of a rank in a step
	sources int
	first   int64 // position of the step

	section   int       // ranks of a stage in a section; see tallyStage
	work      []float32 // own work of the ranks of a section
	medians   []float32 // of the own work of the ranks of each section
	own       []uint64  // this rank's vote
	other     []uint64  // of another rank of the stage
	tally     *tally
	message   []byte
	counts    []int64 // tokens of each expert of each layer with experts of this stage
	packed    []int64
	decisions []float64 // what Exchange broadcasts

	gathered []uint64 // the votes of all ranks, nil before Gather
	bounds   []int    // of each rank's vote; nil before the first Gather
}

// The vote of a rank, in 64-bit words: voteHead, the entropies of the routers of its stage, with a
// capacity of experts the dropped choices of these layers, and on the last stage the loss and the
// number of targets of each layer of multi-token prediction, and voteRow for each of its positions.
const (
	voteFailed = iota // 1 if the rank could not compute the step
	voteTensor        // 1 + Own.Tensor
	voteAux           // its part of the router's losses
	voteZ
	voteNonFinite // 1 if Own.NonFinite
	voteTimes     // of Own.Seconds, three words
	_
	_
	voteHead

	// 1 + number of the source, 0 if the position is skipped; the upper half has the number of
	// unmasked targets
	voteSource = iota - voteHead - 1
	voteLoss
	voteHash // of the sample, two words
	_
	voteRow
)

// Own is the vote of this rank, in addition to its metrics.
type Own struct {
	Err       error // if the rank could not compute its part
	Tensor    int   // first tensor in which its gradient is not finite, or -1
	NonFinite bool  // its pipeline stage has computed non-finite values from finite input
	Seconds   record.RankSeconds

	Predictions []Prediction // of each layer of multi-token prediction; only of the last stage
}

// A Prediction has the sum of the cross entropies of a layer of multi-token prediction, and the
// number of its targets.
type Prediction struct {
	Loss    float64
	Targets int64
}

// New returns the votes of a run with batchSize rows in a step, from the given number of sources.
// Each pipeline stage has the given number of groups of layers; see [moe.Config.StageGroups].
func New(ranks *group.Group, model moe.Config, virtualStages, batchSize, sources int) *Votes {
	n := ranks.Size(comm.Data)
	v := &Votes{ranks: ranks, model: model, stages: ranks.Size(comm.PP), virtual: virtualStages,
		slots: batchSize / ranks.Readers(), sources: sources, section: collective.Section(n),
		decisions: make([]float64, decisionCount+ranks.Size(comm.PP))}
	stage := ranks.OwnIndex(comm.PP)
	v.own, v.other = make([]uint64, v.voteWords(stage)), make([]uint64, v.voteWords(stage))
	v.counts = make([]int64, v.layers(stage)*model.Experts)
	v.packed = make([]int64, len(v.counts))
	v.tally, v.medians = v.newTally(stage), make([]float32, (n+v.section-1)/v.section)
	return v
}

// layers returns the number of layers with experts of a stage.
func (v *Votes) layers(stage int) int {
	return len(v.model.StageExpertLayers(stage, v.stages, v.virtual))
}

// sums returns the number of values of a stage that a tally adds one by one: the values of routers,
// and of the last stage two for each layer of multi-token prediction.
func (v *Votes) sums(stage int) int {
	n := v.routerSums(stage)
	if stage == v.stages-1 {
		n += 2 * v.model.PredictionLayers
	}
	return n
}

// routerSums returns the number of entropies and dropped choices of a stage.
func (v *Votes) routerSums(stage int) int {
	if v.model.ExpertCapacity > 0 {
		return 2 * v.layers(stage)
	}
	return v.layers(stage)
}

// voteWords returns the length of a vote of a stage.
func (v *Votes) voteWords(stage int) int {
	words := voteHead + v.sums(stage)
	if stage == v.stages-1 {
		words += v.slots * voteRow
	}
	return words
}

// What rank 0 tells all ranks.
const (
	decideFailed = iota // number of ranks that could not compute the step
	decideLoss
	decideAux
	decideZ
	decisionCount // and then the median of the own work of each stage
)

// Exchange adds the losses and the counts of m, and v.Rows, over all ranks. All ranks call it, and
// get the sum of the losses of all rows and the losses of the routers. Only rank 0 gets the rest.
// It returns an error if a rank could not compute its part.
func (v *Votes) Exchange(ctx context.Context, m *record.StepMetrics, own Own) error {
	v.first, v.gathered, v.Sources = m.First, nil, nil
	v.vote(m, own)
	clear(v.counts)
	for layer, counts := range m.ExpertTokens {
		copy(v.counts[layer*v.model.Experts:], counts)
	}
	m.Loss, m.AuxLoss, m.ZLoss, m.RouterEntropy, m.ExpertTokens, m.SlowestRanks = 0, 0, 0, nil, nil, nil
	m.DroppedChoices, m.PredictionLoss = nil, nil
	err := v.sumCounts(ctx, m.Tokens)
	if err == nil {
		err = v.tallyStage(ctx)
	}
	if err == nil {
		err = v.tallyStages(ctx, m)
	}
	world := v.ranks.World()
	if err == nil {
		err = comm.Broadcast(ctx, world, 0, v.decisions)
	}
	if err != nil {
		return &collective.BrokenError{Err: errors.Join(own.Err, fmt.Errorf("step %d: %w", m.Step, err))}
	}
	if v.decisions[decideFailed] > 0 {
		return collective.Agree(ctx, world, own.Err)
	}
	m.Loss, m.AuxLoss, m.ZLoss = v.decisions[decideLoss], v.decisions[decideAux], v.decisions[decideZ]
	if v.ranks.Size(comm.Data) > 1 {
		v.pace.step(v.Slow, float64(own.Seconds.Own()), v.decisions[decisionCount+v.ranks.OwnIndex(comm.PP)])
	}
	return nil
}

// vote sets this rank's vote.
func (v *Votes) vote(m *record.StepMetrics, own Own) {
	vote := v.own
	clear(vote)
	if own.Err != nil {
		vote[voteFailed] = 1
	}
	if own.NonFinite {
		vote[voteNonFinite] = 1
	}
	vote[voteTensor] = uint64(own.Tensor + 1)
	vote[voteAux], vote[voteZ] = math.Float64bits(m.AuxLoss), math.Float64bits(m.ZLoss)
	newTimes(own.Seconds, v.pace.slow).vote(vote)
	for layer, entropy := range m.RouterEntropy {
		vote[voteHead+layer] = math.Float64bits(entropy)
	}
	stage := v.ranks.OwnIndex(comm.PP)
	for layer, dropped := range m.DroppedChoices {
		vote[voteHead+v.layers(stage)+layer] = math.Float64bits(dropped)
	}
	after := voteHead + v.routerSums(stage)
	for k, p := range own.Predictions {
		vote[after+2*k], vote[after+2*k+1] = math.Float64bits(p.Loss), math.Float64bits(float64(p.Targets))
	}
	for _, row := range v.Rows {
		slot := v.slot(vote, int((row.Position-m.First)%int64(v.slots)))
		slot[voteSource], slot[voteLoss] = uint64(row.Targets)<<32|uint64(row.Source+1), math.Float64bits(row.Loss)
		slot[voteHash] = binary.LittleEndian.Uint64(row.Hash[:8])
		slot[voteHash+1] = binary.LittleEndian.Uint64(row.Hash[8:])
	}
}

// rows yields the rows in the vote of a rank of the last stage, which has the given number there.
func (v *Votes) rows(number int, vote []uint64) iter.Seq[Row] {
	return func(yield func(Row) bool) {
		for i := range v.slots {
			slot := v.slot(vote, i)
			if slot[voteSource] == 0 {
				continue
			}
			row := Row{Position: v.first + int64(number*v.slots+i),
				Source: int(uint32(slot[voteSource]) - 1), Targets: int64(slot[voteSource] >> 32),
				Loss: math.Float64frombits(slot[voteLoss])}
			binary.LittleEndian.PutUint64(row.Hash[:8], slot[voteHash])
			binary.LittleEndian.PutUint64(row.Hash[8:], slot[voteHash+1])
			if !yield(row) {
				return
			}
		}
	}
}

// Gather gathers the votes of the last Exchange on every rank, and sets v.Rows. It is needed to
// find the cause of values that are not finite. All ranks call it.
func (v *Votes) Gather(ctx context.Context) error {
	if v.gathered != nil {
		return nil
	}
	n := v.ranks.Ranks()
	if v.bounds == nil {
		v.bounds = make([]int, n+1)
		for rank := range n {
			v.bounds[rank+1] = v.bounds[rank] + v.voteWords(v.ranks.Index(rank, comm.PP))
		}
	}
	v.gathered = make([]uint64, v.bounds[n])
	copy(v.of(v.ranks.Rank()), v.own)
	if err := comm.AllGather(ctx, v.ranks.World(), v.gathered, v.bounds); err != nil {
		return &collective.BrokenError{Err: fmt.Errorf("gathering the votes of all ranks: %w", err)}
	}
	v.Rows = v.Rows[:0]
	for rank := range n {
		if v.ranks.Index(rank, comm.PP) == v.stages-1 {
			v.Rows = slices.AppendSeq(v.Rows, v.rows(v.ranks.ReaderOf(rank), v.of(rank)))
		}
	}
	return nil
}

// of returns the vote of a rank, after Gather.
func (v *Votes) of(rank int) []uint64 { return v.gathered[v.bounds[rank]:v.bounds[rank+1]] }

// slot returns the part of a vote about a position of the rank, on the last stage.
func (v *Votes) slot(vote []uint64, i int) []uint64 {
	return vote[len(vote)-(v.slots-i)*voteRow:][:voteRow]
}

// reader returns the number of the reader of a position, among the ranks that read rows.
func (v *Votes) reader(position int64) int {
	return int(position / int64(v.slots) % int64(v.ranks.Readers()))
}

// RowsOf returns the rows that a rank has read, or all rows if the rank has none.
func (v *Votes) RowsOf(rank int) []Row {
	reader := v.ranks.ReaderOf(rank)
	rows := slices.DeleteFunc(slices.Clone(v.Rows), func(row Row) bool { return v.reader(row.Position) != reader })
	if len(rows) == 0 { // all positions of the rank are skipped
		return v.Rows
	}
	return rows
}

// firstBad returns the rank that first computed the non-finite values of rank. They spread from
// stage to stage, and between ranks that share sequences: of these ranks, it is the first that has
// computed such values from finite ones, or rank.
func (v *Votes) firstBad(rank int) int {
	n := v.ranks.Sequence.Size()
	first := v.ranks.ReaderOf(rank) * n
	for stage := range v.stages {
		of := v.ranks.At(rank, comm.PP, stage)
		for number := first; number < first+n; number++ {
			if other := v.ranks.At(of, comm.Data, number); v.of(other)[voteNonFinite] != 0 {
				return other
			}
		}
	}
	return rank
}

// BadLoss returns the rank that caused the non-finite loss of a position.
func (v *Votes) BadLoss(position int64) int {
	last := v.ranks.At(0, comm.PP, v.ranks.Size(comm.PP)-1)
	return v.firstBad(v.ranks.At(last, comm.Data, v.reader(position)*v.ranks.Sequence.Size()))
}

// BadRouterLoss returns the rank that caused the first non-finite loss of a router, or -1.
func (v *Votes) BadRouterLoss() int {
	for rank := range v.ranks.Ranks() {
		if vote := v.of(rank); !finite(vote[voteAux]) || !finite(vote[voteZ]) {
			return v.firstBad(rank)
		}
	}
	return -1
}

// BadGradient returns the rank that caused the first non-finite gradient, and the number of the
// tensor. It returns -1 if the gradients of all ranks are finite.
func (v *Votes) BadGradient() (rank, tensor int) {
	for rank := range v.ranks.Ranks() {
		if tensor := v.of(rank)[voteTensor]; tensor > 0 {
			first := v.firstBad(rank)
			if own := v.of(first)[voteTensor]; own > 0 {
				tensor = own
			}
			return first, int(tensor - 1)
		}
	}
	return -1, -1
}

// Diverged reports whether no single host is the source of non-finite values in this step: the rows
// of all readers have such values, ranks on several hosts have computed them from finite values, or
// only the sum over ranks is not finite. In a run of one pipeline, the first bad stage is the
// source.
func (v *Votes) Diverged() bool {
	if v.gathered == nil { // all votes are finite
		return true
	}
	hosts, readers := map[string]bool{}, map[int]bool{}
	for rank := range v.ranks.Ranks() {
		if !v.finite(rank) {
			readers[v.ranks.ReaderOf(rank)] = true
			hosts[v.ranks.Hosts[v.firstBad(rank)]] = true
		}
	}
	return len(hosts) != 1 || len(readers) == v.ranks.Readers() && len(readers) > 1
}

// finite reports whether all values in the vote of a rank are finite: its losses, and its own
// gradient.
func (v *Votes) finite(rank int) bool {
	vote := v.of(rank)
	if vote[voteTensor] != 0 || vote[voteNonFinite] != 0 || !finite(vote[voteAux]) || !finite(vote[voteZ]) {
		return false
	}
	if v.ranks.Index(rank, comm.PP) < v.stages-1 {
		return true
	}
	for row := range v.rows(0, vote) {
		if !finite(math.Float64bits(row.Loss)) {
			return false
		}
	}
	return true
}

// finite reports whether the float64 with the given bits is finite.
func finite(bits uint64) bool { return bits>>52&0x7ff != 0x7ff }
