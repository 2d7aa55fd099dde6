package simulate

import (
	"fmt"
	"math"

	"mula/internal/quantity"
)

// Thresholds of findings. For a correct order, the probability of a warning is less than one in a
// million: see docs/reference/simulate.md.
const (
	manyDeviations = 6    // standard deviations
	leastDistance  = 0.01 // smallest reported difference of the mean distance
	leastParity    = 0.02
	leastTail      = 0.05 // fraction of a source's tokens in no window
	// number of epochs from which repeated data helps less (N. Muennighoff and others, 2023,
	// arXiv:2305.16264)
	manyEpochs = 4
	muchMore   = 4    // bytes read per byte of tokens
	muchAgain  = 0.05 // fraction of the bytes from an object store that are fetched again
)

// above reports whether Seen is much larger than Expected.
func (c Count) above() bool {
	return c.Expected >= 0 && float64(c.Seen) > c.Expected+manyDeviations*math.Sqrt(c.Expected)+manyDeviations
}

// findings returns the findings that follow from the figures. local means that the order draws
// windows that are stored together at about the same time, on purpose.
func (r *Report) findings(local bool) []Finding {
	list := []Finding{}
	clusters := Warning // level of findings that such an order causes
	if local {
		clusters = Note
	}
	add := func(level Level, source, format string, args ...any) {
		list = append(list, Finding{level, source, fmt.Sprintf(format, args...)})
	}
	rd := &r.Reading
	if rd.StepTime > 0 && rd.Busy.Requests > 0 {
		switch {
		case !rd.KeepsUp:
			late := fmt.Sprintf("a step waits %s for its data on average", quantity.Seconds(rd.Waited))
			if rd.Waited == 0 {
				late = fmt.Sprintf("no simulated step waits for its data, because %d steps are read ahead and the "+
					"other steps are faster", stepsAhead)
			}
			add(Warning, "",
				"%s does not keep up: in the slowest 10 %% of the steps, reading takes %s and computing %s; "+
					"a node needs %s and gets %s; %s", rd.Storage.Name,
				quantity.Seconds(rd.Busy.ReadTime), quantity.Seconds(rd.StepTime), perSecond(rd.Needed),
				perSecond(rd.Got), late)
		case rd.NodesKept > 0:
			add(Note, "", "%s keeps up with at most %s nodes",
				rd.Storage.Name, quantity.Grouped(rd.NodesKept))
		default:
			add(Note, "", "%s keeps up with any number of nodes", rd.Storage.Name)
		}
		if !rd.KeepsUp && rd.NodesKept == 0 {
			add(Note, "",
				"fewer nodes would not help: one node reads too much, or makes too many requests in sequence")
		} else if !rd.KeepsUp {
			add(Note, "", "it would keep up with %s nodes that read the same amount each",
				quantity.Grouped(rd.NodesKept))
		}
	}
	if rd.TokenBytes > 0 && rd.WantedBytes > muchMore*rd.TokenBytes {
		add(Note, "", "%.3g bytes are read per byte of tokens: a sample has %s, a request reads %s",
			rd.WantedBytes/rd.TokenBytes,
			quantity.Bytes(int64(rd.sampleBytes)), quantity.Bytes(rd.Storage.RequestSize))
	}
	if rd.RepeatSize > rd.Storage.Cache {
		add(Note, "",
			"later epochs are read from storage again, unless each node has a cache of %s for all repeated sources; "+
				"the assumed cache has %s, and after an epoch "+
				"a node has read 1/%d of them itself", quantity.Bytes(rd.RepeatSize),
			quantity.Bytes(rd.Storage.Cache), rd.Nodes)
	}
	if st := &r.Store; st.GroupBytes > st.CacheLimit/2 {
		add(Note, "",
			"the cache of an object store has %s, and the groups of blocks of all sources %s: only single windows are "+
				"fetched; set MULA_CACHE_SIZE to at least %s", quantity.Bytes(st.CacheLimit),
			quantity.Bytes(st.GroupBytes), quantity.Bytes(2*st.GroupBytes))
	} else if float64(st.Again) > muchAgain*float64(st.Bytes) {
		add(Note, "",
			"%s of the bytes from an object store are fetched again, because a cache of %s has removed them; a larger "+
				"MULA_CACHE_SIZE, or shuffle in blend.yaml, avoids that", share(float64(st.Again)/float64(st.Bytes)),
			quantity.Bytes(st.CacheLimit))
	}
	for i := range r.Mixture.Sources {
		m := &r.Mixture.Sources[i]
		if m.Outside > 0 {
			add(Warning, m.Name,
				"the share deviates from the weights: %d of %d intervals exceed the bound; the largest deviation is "+
					"%.4g samples where %.3g are allowed",
				m.Outside, len(r.Mixture.Intervals), m.Deviation, m.Bound)
		}
		if m.Cells > 0 && m.Unevenness > manyDeviations {
			add(clusters, m.Name,
				"the windows are not drawn evenly: ranges of the source cluster (%.3g standard deviations above "+
					"chance)",
				m.Unevenness)
		}
	}
	for i := range r.Shuffle.Sources {
		s := &r.Shuffle.Sources[i]
		if s.EpochWindow > 0 {
			add(Warning, s.Name, "%s samples repeat a window of the same epoch",
				quantity.Grouped(s.EpochWindow))
		}
		if math.Abs(s.DistanceOff) > manyDeviations && math.Abs(s.Distance-1.0/3) > leastDistance {
			add(clusters, s.Name,
				"the mean distance of consecutive samples is %.3g of the source; a shuffle gives 0.333", s.Distance)
		}
		if math.Abs(s.ParityOff) > manyDeviations && math.Abs(s.Parity-0.5) > leastParity {
			add(Warning, s.Name,
				"%.3g %% of consecutive samples change between even and odd windows; a shuffle gives 50 %%",
				100*s.Parity)
		}
		for _, c := range []struct {
			Count
			level Level
			what  string
		}{
			{s.Adjacent, clusters, "pairs of consecutive samples are adjacent windows"},
			{s.SameShard, clusters, "pairs of consecutive samples are from the same shard"},
			{s.SameDocument, clusters, "pairs of consecutive samples share a document"},
			{s.BatchDocument, clusters, "pairs of samples of a step share a document"},
			{s.BatchWindow, Warning, "samples repeat a window of the same step"},
		} {
			if c.above() {
				add(c.level, s.Name, "%s %s; a shuffle gives about %.3g", quantity.Grouped(c.Seen), c.what,
					c.Expected)
			}
		}
	}
	for i := range r.Sources {
		s := &r.Sources[i]
		if s.Tail > 0 && float64(s.Tail) > leastTail*float64(s.Tokens) {
			add(Note, s.Name,
				"%s of the tokens are at the ends of shards, outside all windows; larger shards lose less",
				perCent(float64(s.Tail)/float64(s.Tokens)))
		}
		if s.Epochs > manyEpochs {
			add(Note, s.Name, "the plan reads each window %.1f times on average", s.Epochs)
		}
	}
	return list
}
