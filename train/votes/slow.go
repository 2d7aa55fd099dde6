package votes

import (
	"cmp"
	"math"
	"slices"

	"mula/train/record"
	"mula/xpu/comm"
)

const (
	slowestRanks  = 3 // ranks of a stage whose times rank 0 gets
	recordedRanks = 3 // ranks of all stages in the metrics of a step
)

// A slowRank is a rank in a [tally].
type slowRank struct {
	Number int32 // 1 + number of the rank in its stage; 0: no rank
	Times  times
}

// SlowLimit defines slow ranks. The zero value finds none.
//
// A rank is late in a step if its own work takes more than Factor times the median of its stage,
// and at least 50 ms more, because other processes of a machine delay short steps by as much. A
// counter from 0 to Steps rises by one in such a step, and falls by one in other steps. The rank is
// slow from the time when the counter reaches Steps until the counter is 0 again. So rare long
// steps make no rank slow, and a slow rank may be quick in some steps.
type SlowLimit struct {
	Factor float64
	Steps  int64 // 0: no rank is slow
}

// leastExcess is the number of seconds by which the own work of a late rank is longer, at least.
const leastExcess = 0.05

// A pace has the counter of a [SlowLimit] for this rank.
type pace struct {
	late int64
	slow bool
}

// step adds a step in which this rank's own work took seconds.
func (p *pace) step(limit SlowLimit, seconds, median float64) {
	if median > 0 && seconds > max(limit.Factor*median, median+leastExcess) {
		p.late = min(p.late+1, limit.Steps)
	} else {
		p.late = max(p.late-1, 0)
	}
	p.slow = limit.Steps > 0 && (p.late == limit.Steps || p.slow && p.late > 0)
}

// times has seconds of a rank or of several ranks: reading, compute, update, waiting, saving. The
// last number is the number of slow ranks among them. A vote has two numbers in a word.
type times [6]float32

func newTimes(s record.RankSeconds, slow bool) times {
	t := times{float32(s.Reading), float32(s.Compute), float32(s.Update), float32(s.Waiting), float32(s.Saving)}
	if slow {
		t[5] = 1
	}
	return t
}

func (t times) seconds() record.RankSeconds {
	return record.RankSeconds{Reading: record.Seconds(t[0]), Compute: record.Seconds(t[1]),
		Update: record.Seconds(t[2]), Waiting: record.Seconds(t[3]), Saving: record.Seconds(t[4])}
}

// work returns the seconds of the rank's own work, see [record.RankSeconds.Own].
func (t times) work() float32 { return t[0] + t[1] + t[2] }

// vote sets the times in a vote.
func (t times) vote(vote []uint64) {
	for i := range len(t) / 2 {
		vote[voteTimes+i] = uint64(math.Float32bits(t[2*i])) | uint64(math.Float32bits(t[2*i+1]))<<32
	}
}

// timesOf returns the times in a vote.
func timesOf(vote []uint64) (t times) {
	for i := range t {
		t[i] = math.Float32frombits(uint32(vote[voteTimes+i/2] >> (i % 2 * 32)))
	}
	return t
}

// slow returns the number of slow ranks.
func (t times) slow() int { return int(t[5]) }

// addSlow adds a rank to the slowest ranks, if it is one of them. Ranks that are slow by the
// [SlowLimit] precede the others, so that rank 0 gets them in every step.
func (t *tally) addSlow(rank slowRank) {
	for i := range t.slowest {
		other := t.slowest[i].Times
		if cmp.Or(rank.Times.slow()-other.slow(), cmp.Compare(rank.Times.work(), other.work())) > 0 {
			rank, t.slowest[i] = t.slowest[i], rank
		}
	}
}

// slowest returns the slowest ranks of a stage, whose complete tally is t, if the stage has several
// ranks.
func (v *Votes) slowest(stage int, t *tally) (slowest []record.SlowRank) {
	if v.ranks.Size(comm.Data) == 1 {
		return nil
	}
	first := v.ranks.At(0, comm.PP, stage)
	for _, r := range t.slowest {
		if r.Number == 0 {
			break
		}
		rank := v.ranks.At(first, comm.Data, int(r.Number)-1)
		slowest = append(slowest, record.SlowRank{Rank: rank, Host: v.ranks.Hosts[rank],
			Median: record.Seconds(t.totals.Median), RankSeconds: r.Times.seconds(), Slow: r.Times.slow() > 0})
	}
	return slowest
}

// stageMedian returns the median of the medians of the sections. Each counts once for each rank of
// its section.
func (v *Votes) stageMedian() float32 {
	var all []float32
	for _, m := range v.medians {
		all = append(all, slices.Repeat([]float32{m}, min(v.section, v.ranks.Size(comm.Data)-len(all)))...)
	}
	return median(all)
}

// median sorts values and returns the lower median.
func median(values []float32) float32 {
	slices.Sort(values)
	return values[(len(values)-1)/2]
}
