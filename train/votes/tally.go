package votes

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"mula/blend/fingerprint"
	"mula/train/record"
	"mula/xpu/comm"
)

// SourceSums has sums over the rows of a source in a step.
type SourceSums struct {
	Loss    float64
	Targets int64
	Samples int64
}

// A tally has sums over the votes of consecutive ranks of a stage, computed in the order of the
// ranks and of their rows. Sums of floating-point numbers and the hash depend on this order, so
// that ranks continue a tally instead of adding tallies.
type tally struct {
	totals  totals
	slowest [slowestRanks]slowRank // see addSlow
	sums    []float64              // see [Votes.sums]
	// Of the last stage.
	sources []SourceSums
	hasher  fingerprint.Hasher
}

type totals struct {
	Failed  int64 // ranks
	Aux, Z  float64
	RowLoss float64
	Times   times
	Median  float32 // of the own work; of a complete tally
}

// newTally returns an empty tally of a stage.
func (v *Votes) newTally(stage int) *tally {
	t := &tally{sums: make([]float64, v.sums(stage))}
	if stage == v.stages-1 {
		t.sources = make([]SourceSums, v.sources)
	}
	return t
}

func (t *tally) reset() {
	t.totals, t.hasher, t.slowest = totals{}, fingerprint.Hasher{}, [slowestRanks]slowRank{}
	clear(t.sums)
	clear(t.sources)
}

// add adds the vote of the next rank of the stage, which has the given number there.
func (t *tally) add(v *Votes, number int, vote []uint64) {
	own := timesOf(vote)
	for i, seconds := range own {
		t.totals.Times[i] += seconds
	}
	t.addSlow(slowRank{int32(number + 1), own})
	v.work = append(v.work, own.work())
	t.totals.Failed += int64(vote[voteFailed])
	t.totals.Aux += math.Float64frombits(vote[voteAux])
	t.totals.Z += math.Float64frombits(vote[voteZ])
	for i := range t.sums {
		t.sums[i] += math.Float64frombits(vote[voteHead+i])
	}
	if t.sources == nil {
		return
	}
	for row := range v.rows(0, vote) { // positions are not needed
		t.hasher.AddHash(row.Hash)
		t.totals.RowLoss += row.Loss
		of := &t.sources[row.Source]
		of.Loss, of.Targets, of.Samples = of.Loss+row.Loss, of.Targets+row.Targets, of.Samples+1
	}
}

// bytes returns the length of a tally as appendTo writes it. It depends on the stage only.
func (t *tally) bytes() int {
	n := 0
	for _, part := range t.parts() {
		n += binary.Size(part)
	}
	if t.sources != nil {
		n += fingerprint.HasherBytes
	}
	return n
}

// parts returns the parts of the tally except the hasher, for package binary.
func (t *tally) parts() []any { return []any{&t.totals, &t.slowest, t.sums, t.sources} }

// appendTo appends the tally to b.
func (t *tally) appendTo(b []byte) (_ []byte, err error) {
	for _, part := range t.parts() {
		if b, err = binary.Append(b, binary.LittleEndian, part); err != nil {
			return nil, err
		}
	}
	if t.sources == nil {
		return b, nil
	}
	return t.hasher.AppendBinary(b)
}

// read sets t to a tally that appendTo has written.
func (t *tally) read(b []byte) error {
	for _, part := range t.parts() {
		n, err := binary.Decode(b, binary.LittleEndian, part)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	if t.sources == nil {
		return nil
	}
	return t.hasher.UnmarshalBinary(b)
}

// tallyStage sets the tally of the first rank of each stage to the votes of all its ranks. The
// ranks of a stage are divided into about √n sections of about √n ranks. The first rank of a
// section gets the tally of the sections before it, adds the votes of its section in order, and
// sends the tally to the first rank of the next section, or at last to the first rank of the stage.
func (v *Votes) tallyStage(ctx context.Context) (err error) {
	stage := v.ranks.Stage
	own, n := stage.Rank(), stage.Size()
	first := own - own%v.section
	if own != first {
		return comm.Send(ctx, stage, first, v.own)
	}
	if first == 0 {
		v.tally.reset()
		clear(v.medians)
	} else if err := v.receiveSections(ctx, first-v.section); err != nil {
		return err
	}
	v.work = v.work[:0]
	v.tally.add(v, own, v.own)
	for other := first + 1; other < min(first+v.section, n); other++ {
		if err := comm.Recv(ctx, stage, other, v.other); err != nil {
			return err
		}
		v.tally.add(v, other, v.other)
	}
	v.medians[first/v.section] = median(v.work)
	if v.section < n { // there are several sections
		next := first + v.section
		if next >= n {
			next = 0
		}
		if v.message, err = v.tally.appendTo(v.message[:0]); err == nil {
			v.message, err = binary.Append(v.message, binary.LittleEndian, v.medians)
		}
		if err != nil {
			return err
		}
		if err := comm.Send(ctx, stage, next, v.message); err != nil || own > 0 {
			return err
		}
		if err := v.receiveSections(ctx, (n-1)/v.section*v.section); err != nil {
			return err
		}
	}
	v.tally.totals.Median = v.stageMedian()
	return nil
}

// receiveSections receives the tally and the medians of the sections from a rank of the stage.
func (v *Votes) receiveSections(ctx context.Context, from int) error {
	medians, err := v.receive(ctx, v.ranks.Stage, from, v.tally, binary.Size(v.medians))
	if err == nil {
		_, err = binary.Decode(medians, binary.LittleEndian, v.medians)
	}
	return err
}

// receive sets a tally to the tally that a rank of a group sends, and returns more bytes that
// follow it.
func (v *Votes) receive(ctx context.Context, group *comm.Comm, from int, t *tally, more int) ([]byte, error) {
	length := t.bytes()
	v.message = slices.Grow(v.message[:0], length+more)[:length+more]
	if err := comm.Recv(ctx, group, from, v.message); err != nil {
		return nil, err
	}
	if err := t.read(v.message[:length]); err != nil {
		return nil, fmt.Errorf("the votes from rank %d of %d: %w", from, group.Size(), err)
	}
	return v.message[length:], nil
}

// tallyStages collects the tallies and the counts of all stages on rank 0, which sets m, v.Sources,
// v.Hasher and v.decisions.
func (v *Votes) tallyStages(ctx context.Context, m *record.StepMetrics) (err error) {
	if v.ranks.Stage.Rank() > 0 {
		return nil
	}
	width := bits.Len64(uint64(m.Tokens))
	world := v.ranks.World()
	if world.Rank() > 0 {
		if v.message, err = v.tally.appendTo(v.message[:0]); err != nil {
			return err
		}
		v.message = packBits(v.message, v.counts, width)
		return comm.Send(ctx, world, 0, v.message)
	}
	clear(v.decisions)
	var all times
	for stage := range v.stages {
		t, counts := v.tally, v.counts
		if stage > 0 {
			t, counts = v.newTally(stage), make([]int64, v.layers(stage)*v.model.Experts)
			packed, err := v.receive(ctx, world, v.ranks.At(0, comm.PP, stage), t, (len(counts)*width+7)/8)
			if err != nil {
				return err
			}
			unpackBits(counts, packed, width)
		}
		v.decisions[decideFailed] += float64(t.totals.Failed)
		v.decisions[decideLoss] += t.totals.RowLoss
		v.decisions[decideAux] += t.totals.Aux
		v.decisions[decideZ] += t.totals.Z
		v.place(m, stage, t.sums[:v.routerSums(stage)], counts)
		setPredictionLoss(m, t.sums[v.routerSums(stage):]) // of the last stage
		v.Sources, v.Hasher = t.sources, t.hasher          // the last stage has them
		v.decisions[decisionCount+stage] = float64(t.totals.Median)
		for i, seconds := range t.totals.Times {
			all[i] += seconds
		}
		m.SlowestRanks = append(m.SlowestRanks, v.slowest(stage, t)...)
	}
	m.RankSeconds, m.SlowRanks = new(all.seconds()), all.slow()
	slices.SortStableFunc(m.SlowestRanks, func(a, b record.SlowRank) int {
		if a.Slow != b.Slow && a.Slow {
			return -1
		} else if a.Slow != b.Slow {
			return 1
		}
		return cmp.Compare(b.Excess(), a.Excess())
	})
	m.SlowestRanks = m.SlowestRanks[:min(len(m.SlowestRanks), recordedRanks)]
	return nil
}

// place adds the values of routers and the counts of a stage's layers with experts to m, in the
// order of the model's layers.
func (v *Votes) place(m *record.StepMetrics, stage int, routers []float64, counts []int64) {
	if len(routers) == 0 {
		return
	}
	entropy, dropped := routers[:v.layers(stage)], routers[v.layers(stage):]
	all := v.model.ExpertLayers(0, v.model.AllLayers())
	if m.RouterEntropy == nil {
		m.RouterEntropy, m.ExpertTokens = make([]float64, len(all)), make([][]int64, len(all))
		if len(dropped) > 0 {
			m.DroppedChoices = make([]float64, len(all))
		}
	}
	for i, layer := range v.model.StageExpertLayers(stage, v.stages, v.virtual) {
		at, _ := slices.BinarySearch(all, layer)
		m.RouterEntropy[at] = entropy[i]
		if len(dropped) > 0 {
			m.DroppedChoices[at] = dropped[i]
		}
		m.ExpertTokens[at] = slices.Clone(counts[i*v.model.Experts:][:v.model.Experts])
	}
}

// setPredictionLoss sets the losses of the layers of multi-token prediction, given the sums of
// their cross entropies and the numbers of their targets. A loss without a target is 0. If a loss
// is not finite, it sets none: the gradient is then not finite either.
func setPredictionLoss(m *record.StepMetrics, sums []float64) {
	for pair := range slices.Chunk(sums, 2) {
		loss := pair[0] / max(1, pair[1])
		if math.IsNaN(loss) || math.IsInf(loss, 0) {
			m.PredictionLoss = nil
			return
		}
		m.PredictionLoss = append(m.PredictionLoss, loss)
	}
}

// sumCounts adds v.counts over the ranks of the stage. An expert gets a token at most once, so that
// a count needs as many bits as the number of tokens. Several counts are added as one integer.
func (v *Votes) sumCounts(ctx context.Context, tokens int64) error {
	if len(v.counts) == 0 || v.ranks.Stage.Size() == 1 {
		return nil
	}
	width := bits.Len64(uint64(tokens))
	each := 64 / width
	packed := v.packed[:(len(v.counts)+each-1)/each]
	clear(packed)
	for i, n := range v.counts {
		packed[i/each] |= n << (i % each * width)
	}
	if err := comm.AllReduce(ctx, v.ranks.Stage, packed); err != nil {
		return err
	}
	for i := range v.counts {
		v.counts[i] = packed[i/each] >> (i % each * width) & (1<<width - 1)
	}
	return nil
}

// packBits appends numbers of the given number of bits, at most 56, to b, the lowest bits first.
func packBits(b []byte, numbers []int64, width int) []byte {
	held, n := uint64(0), 0
	for _, x := range numbers {
		held |= uint64(x) << n
		for n += width; n >= 8; n -= 8 {
			b = append(b, byte(held))
			held >>= 8
		}
	}
	if n > 0 {
		b = append(b, byte(held))
	}
	return b
}

// unpackBits is the inverse of packBits.
func unpackBits(numbers []int64, b []byte, width int) {
	held, n := uint64(0), 0
	for i := range numbers {
		for ; n < width; n += 8 {
			held |= uint64(b[0]) << n
			b = b[1:]
		}
		numbers[i] = int64(held & (1<<width - 1))
		held >>= width
		n -= width
	}
}
