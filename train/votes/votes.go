// Package votes exchanges the results of each step among the ranks of a run, so that all ranks have
// the same metrics and act in the same way. If a value is not finite, it finds the rank that first
// computed such a value.
package votes

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

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

// Votes has the votes of all ranks about a step.
type Votes struct {
	// Rows has the rows whose losses this rank has. After Exchange it has the rows of all ranks, in
	// the order of their positions.
	Rows []Row

	ranks           *group.Group
	layers, experts int      // layers with experts, and the experts of each
	slots           int      // rows of a rank in a step
	votes           []uint64 // of each rank
	bounds          []int    // of each rank's vote
	counts          []int64  // tokens of each expert of each layer
}

// The vote of a rank, in 64-bit words: voteHead, the entropy of each layer's router, and voteRow
// for each of its positions.
const (
	voteFailed = iota // 1 if the rank could not compute the step
	voteTensor        // 1 + Own.Tensor
	voteAux           // its part of the router's losses
	voteZ
	voteNonFinite // 1 if Own.NonFinite
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
	Err        error // if the rank could not compute its part
	FirstLayer int   // of its pipeline stage
	Tensor     int   // first tensor in which its gradient is not finite, or -1
	NonFinite  bool  // its pipeline stage has computed non-finite values from finite input
}

// New returns the votes of a run with batchSize rows in a step.
func New(ranks *group.Group, model moe.Config, batchSize int) *Votes {
	v := &Votes{ranks: ranks, experts: model.Experts, slots: batchSize / ranks.Size(comm.Data)}
	if v.experts > 0 {
		v.layers = model.Layers
	}
	words := voteHead + v.layers + v.slots*voteRow
	v.votes, v.bounds = make([]uint64, ranks.Ranks()*words), make([]int, ranks.Ranks()+1)
	for rank := range v.bounds {
		v.bounds[rank] = rank * words
	}
	v.counts = make([]int64, v.layers*v.experts)
	return v
}

// Exchange combines the losses and the counts of m, and v.Rows, over all ranks. All ranks call it.
// It returns an error if a rank could not compute its part.
func (v *Votes) Exchange(ctx context.Context, m *record.StepMetrics, own Own) error {
	world, vote := v.ranks.World(), v.vote(v.ranks.Rank())
	clear(vote)
	if own.Err != nil {
		vote[voteFailed] = 1
	}
	if own.NonFinite {
		vote[voteNonFinite] = 1
	}
	vote[voteTensor] = uint64(own.Tensor + 1)
	vote[voteAux], vote[voteZ] = math.Float64bits(m.AuxLoss), math.Float64bits(m.ZLoss)
	for layer, entropy := range m.RouterEntropy {
		vote[voteHead+own.FirstLayer+layer] = math.Float64bits(entropy)
	}
	for _, row := range v.Rows {
		slot := v.slot(vote, int((row.Position-m.First)%int64(v.slots)))
		slot[voteSource], slot[voteLoss] = uint64(row.Targets)<<32|uint64(row.Source+1), math.Float64bits(row.Loss)
		slot[voteHash] = binary.LittleEndian.Uint64(row.Hash[:8])
		slot[voteHash+1] = binary.LittleEndian.Uint64(row.Hash[8:])
	}
	clear(v.counts)
	for layer, counts := range m.ExpertTokens {
		copy(v.counts[(own.FirstLayer+layer)*v.experts:], counts)
	}
	err := comm.AllGather(ctx, world, v.votes, v.bounds)
	if err == nil {
		err = comm.AllReduce(ctx, world, v.counts)
	}
	if err != nil {
		return &collective.BrokenError{Err: errors.Join(own.Err, fmt.Errorf("step %d: %w", m.Step, err))}
	}

	m.AuxLoss, m.ZLoss, m.RouterEntropy, m.ExpertTokens = 0, 0, nil, nil
	if v.layers > 0 {
		m.RouterEntropy = make([]float64, v.layers)
	}
	v.Rows = v.Rows[:0]
	for rank := range v.ranks.Ranks() { // the last stages have the losses, in the order of their rows
		vote := v.vote(rank)
		if vote[voteFailed] != 0 {
			return collective.Agree(ctx, world, own.Err)
		}
		m.AuxLoss += math.Float64frombits(vote[voteAux])
		m.ZLoss += math.Float64frombits(vote[voteZ])
		for layer := range m.RouterEntropy {
			m.RouterEntropy[layer] += math.Float64frombits(vote[voteHead+layer])
		}
		for i := range v.slots {
			slot := v.slot(vote, i)
			if slot[voteSource] == 0 {
				continue
			}
			row := Row{Position: m.First + int64(v.ranks.Index(rank, comm.Data)*v.slots+i),
				Source: int(uint32(slot[voteSource]) - 1), Targets: int64(slot[voteSource] >> 32),
				Loss: math.Float64frombits(slot[voteLoss])}
			binary.LittleEndian.PutUint64(row.Hash[:8], slot[voteHash])
			binary.LittleEndian.PutUint64(row.Hash[8:], slot[voteHash+1])
			v.Rows = append(v.Rows, row)
		}
	}
	for layer := range v.layers {
		m.ExpertTokens = append(m.ExpertTokens, slices.Clone(v.counts[layer*v.experts:(layer+1)*v.experts]))
	}
	return nil
}

func (v *Votes) vote(rank int) []uint64 { return v.votes[v.bounds[rank]:v.bounds[rank+1]] }

// slot returns the part of a vote about a position of the rank.
func (v *Votes) slot(vote []uint64, i int) []uint64 {
	return vote[voteHead+v.layers+i*voteRow:][:voteRow]
}

// reader returns the number of the reader of a position, among the ranks that read rows.
func (v *Votes) reader(position int64) int {
	return int(position / int64(v.slots) % int64(v.ranks.Size(comm.Data)))
}

// RowsOf returns the rows that a rank has read, or all rows if the rank has none.
func (v *Votes) RowsOf(rank int) []Row {
	reader := v.ranks.Index(rank, comm.Data)
	rows := slices.DeleteFunc(slices.Clone(v.Rows), func(row Row) bool { return v.reader(row.Position) != reader })
	if len(rows) == 0 { // all positions of the rank are skipped
		return v.Rows
	}
	return rows
}

// firstBadStage returns the rank that first computed the non-finite values of rank: the first such
// stage of its pipeline, or rank. Non-finite values spread from stage to stage.
func (v *Votes) firstBadStage(rank int) int {
	for _, other := range v.ranks.Shape.Group(rank, comm.PP) {
		if v.vote(other)[voteNonFinite] != 0 {
			return other
		}
	}
	return rank
}

// BadLoss returns the rank that caused the non-finite loss of a position.
func (v *Votes) BadLoss(position int64) int {
	last := v.ranks.At(0, comm.PP, v.ranks.Size(comm.PP)-1)
	return v.firstBadStage(v.ranks.At(last, comm.Data, v.reader(position)))
}

// BadRouterLoss returns the rank that caused the first non-finite loss of a router, or -1.
func (v *Votes) BadRouterLoss() int {
	for rank := range v.ranks.Ranks() {
		if vote := v.vote(rank); !finite(vote[voteAux]) || !finite(vote[voteZ]) {
			return v.firstBadStage(rank)
		}
	}
	return -1
}

// BadGradient returns the rank that caused the first non-finite gradient, and the number of the
// tensor. It returns -1 if the gradients of all ranks are finite.
func (v *Votes) BadGradient() (rank, tensor int) {
	for rank := range v.ranks.Ranks() {
		if tensor := v.vote(rank)[voteTensor]; tensor > 0 {
			first := v.firstBadStage(rank)
			if own := v.vote(first)[voteTensor]; own > 0 {
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
	hosts, readers := map[string]bool{}, map[int]bool{}
	for rank := range v.ranks.Ranks() {
		if !v.finite(rank) {
			readers[v.ranks.Index(rank, comm.Data)] = true
			hosts[v.ranks.Hosts[v.firstBadStage(rank)]] = true
		}
	}
	return len(hosts) != 1 || len(readers) == v.ranks.Size(comm.Data) && len(readers) > 1
}

// finite reports whether all values in the vote of a rank are finite: its losses, and its own
// gradient.
func (v *Votes) finite(rank int) bool {
	vote := v.vote(rank)
	if vote[voteTensor] != 0 || vote[voteNonFinite] != 0 || !finite(vote[voteAux]) || !finite(vote[voteZ]) {
		return false
	}
	for i := range v.slots {
		if slot := v.slot(vote, i); slot[voteSource] != 0 && !finite(slot[voteLoss]) {
			return false
		}
	}
	return true
}

// finite reports whether the float64 with the given bits is finite.
func finite(bits uint64) bool { return bits>>52&0x7ff != 0x7ff }
