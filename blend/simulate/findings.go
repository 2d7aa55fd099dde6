package simulate

import (
	"fmt"
	"math"

	"mula/internal/quantity"
)

// Where a finding begins. Of a right order none is made in a million runs: see
// docs/reference/simulate.md.
const (
	manyDeviations = 6    // standard deviations
	leastDistance  = 0.01 // difference of the mean distance that is worth a word
	leastParity    = 0.02
	leastTail      = 0.05 // share of a source's tokens in no window
	// from which on repeated data is known to help less (N. Muennighoff and others, 2023,
	// arXiv:2305.16264)
	manyEpochs = 4
	muchMore   = 4 // bytes moved for a byte of tokens
)

// above says whether something was seen much more often than expected.
func (c Count) above() bool {
	return c.Expected >= 0 && float64(c.Seen) > c.Expected+manyDeviations*math.Sqrt(c.Expected)+manyDeviations
}

// findings are the sentences that follow from the figures.
func (r *Report) findings() []Finding {
	list := []Finding{}
	add := func(level Level, source, format string, args ...any) {
		list = append(list, Finding{level, source, fmt.Sprintf(format, args...)})
	}
	rd := &r.Reading
	if rd.StepTime > 0 && rd.Busy.Requests > 0 {
		switch {
		case !rd.KeepsUp:
			late := fmt.Sprintf("a step waits %s for its data on the mean", seconds(rd.Waited))
			if rd.Waited == 0 {
				late = fmt.Sprintf("no step was seen to wait for its data, because %d steps are read ahead and the "+
					"others leave time for these", stepsAhead)
			}
			add(Warning, "",
				"%s does not keep up: in the slowest tenth of the steps the data takes %s to read and the step %s to compute; a node needs %s and gets %s; %s", rd.Storage.Name,
				seconds(rd.Busy.ReadTime), seconds(rd.StepTime), perSecond(rd.Needed), perSecond(rd.Got), late)
		case rd.NodesKept > 0:
			add(Note, "", "%s keeps up if at most %s nodes read as much as the one that was followed here",
				rd.Storage.Name, quantity.Grouped(rd.NodesKept))
		default:
			add(Note, "", "%s keeps up, with any number of nodes", rd.Storage.Name)
		}
		if !rd.KeepsUp && rd.NodesKept == 0 {
			add(Note, "",
				"fewer nodes would not help: what one node reads is too much, or takes too many requests one after the other")
		} else if !rd.KeepsUp {
			add(Note, "", "it would keep up with %s nodes of the same share", quantity.Grouped(rd.NodesKept))
		}
	}
	if rd.TokenBytes > 0 && rd.WantedBytes > muchMore*rd.TokenBytes {
		add(Note, "", "for each byte of tokens %.3g bytes are moved: a sample has %s, a request brings %s",
			rd.WantedBytes/rd.TokenBytes,
			bytesText(int64(rd.sampleBytes)), bytesText(rd.Storage.RequestSize))
	}
	if rd.RepeatSize > rd.Storage.Cache {
		add(Note, "",
			"later epochs are read from storage again, unless a cache of %s a node has all of the sources that the plan repeats; the cache assumed has %s, and after an epoch "+
				"a node has itself read 1/%d of them", bytesText(rd.RepeatSize), bytesText(rd.Storage.Cache), rd.Nodes)
	}
	for i := range r.Mixture.Sources {
		m := &r.Mixture.Sources[i]
		if m.Outside > 0 {
			add(Warning, m.Name,
				"its share is not what the weights ask for: in %d of %d intervals it is beyond the bound, at most %.4g samples off where %.3g are allowed",
				m.Outside, len(r.Mixture.Intervals), m.Deviation, m.Bound)
		}
		if m.Cells > 0 && m.Unevenness > manyDeviations {
			add(Warning, m.Name,
				"its windows are not drawn from all of it alike: parts of the source come together (%.3g standard deviations more than chance)", m.Unevenness)
		}
	}
	for i := range r.Shuffle.Sources {
		s := &r.Shuffle.Sources[i]
		if s.EpochWindow > 0 {
			add(Warning, s.Name, "%s samples have a window that their epoch has had already",
				quantity.Grouped(s.EpochWindow))
		}
		if math.Abs(s.DistanceOff) > manyDeviations && math.Abs(s.Distance-1.0/3) > leastDistance {
			add(Warning, s.Name,
				"samples that follow each other are %.3g of the source apart, on the mean; shuffled they would be 0.333", s.Distance)
		}
		if math.Abs(s.ParityOff) > manyDeviations && math.Abs(s.Parity-0.5) > leastParity {
			add(Warning, s.Name,
				"of samples that follow each other %.3g %% change between even and odd windows; shuffled it would be 50 %%", 100*s.Parity)
		}
		for _, c := range []struct {
			Count
			what string
		}{
			{s.Adjacent, "pairs of samples that follow each other are windows side by side"},
			{s.SameShard, "pairs of samples that follow each other are of one shard"},
			{s.SameDocument, "pairs of samples that follow each other share a document"},
			{s.BatchDocument, "pairs of samples of a step share a document"},
			{s.BatchWindow, "samples have a window that their step has already"},
		} {
			if c.above() {
				add(Warning, s.Name, "%s %s; shuffled it would be about %.3g", quantity.Grouped(c.Seen), c.what,
					c.Expected)
			}
		}
	}
	for i := range r.Sources {
		s := &r.Sources[i]
		if s.Tail > 0 && float64(s.Tail) > leastTail*float64(s.Tokens) {
			add(Note, s.Name,
				"%s of its tokens are at the ends of shards and in no window: larger shards would lose less",
				perCent(float64(s.Tail)/float64(s.Tokens)))
		}
		if s.Epochs > manyEpochs {
			add(Note, s.Name, "the plan draws each window %.1f times on the mean", s.Epochs)
		}
	}
	return list
}
