package simulate

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"mula/blend"
	"mula/index"
	"mula/shards"
)

// Shuffle describes how consecutive samples are related, in the steps that were examined one by
// one. Skipped positions are excluded.
type Shuffle struct {
	Steps     int64           `json:"steps"`   // number examined: all of the range, or evenly spaced parts of it
	Samples   int64           `json:"samples"` // number in the examined steps
	Whole     bool            `json:"whole"`   // the complete range was examined
	Documents bool            `json:"documents"`
	Sources   []SourceShuffle `json:"sources"`
}

// A Count is how often something occurred, and its expected number if each epoch were a uniform
// permutation of the training windows.
type Count struct {
	Seen     int64   `json:"seen"`
	Expected float64 `json:"expected"` // -1: unknown
}

// SourceShuffle describes the samples of one source. A pair is two samples that are consecutive in
// the source's order.
type SourceShuffle struct {
	Name    string `json:"name"`
	Samples int64  `json:"samples"`
	Pairs   int64  `json:"pairs"`

	// mean |difference| of the window numbers of a pair, divided by the number of training windows;
	// uniform: 1/3
	Distance    float64 `json:"distance"`
	DistanceOff float64 `json:"distance_off"` // deviation of the mean from uniform, in standard deviations
	// fraction of the pairs by distance, in bins of equal width from 0 to 1
	Distances []float64 `json:"distances"`
	Uniform   []float64 `json:"distances_uniform"`
	Adjacent  Count     `json:"adjacent"` // pairs of adjacent windows
	// fraction of the pairs with one even and one odd window number; uniform: 1/2
	Parity    float64 `json:"parity_changes"`
	ParityOff float64 `json:"parity_off"`
	SameShard Count   `json:"same_shard"` // pairs
	// SameDocument counts pairs whose windows have tokens of a common document. BatchDocument
	// counts any two such samples of one step.
	SameDocument  Count `json:"same_document"`
	BatchDocument Count `json:"batch_document"`
	// samples whose window occurs earlier in the same step, as is possible at the start of an epoch
	BatchWindow Count `json:"batch_window"`
	// samples whose window occurs earlier in the same epoch: always 0 in a correct order
	EpochWindow int64 `json:"epoch_window"`

	Windows   []Times    `json:"window_repeats"`   // windows by number of draws, in the examined steps
	Documents []Passes   `json:"document_repeats"` // documents by number of reads
	Most      MostlyRead `json:"most_read_document"`
}

// Times is the number of windows that were drawn Times times.
type Times struct {
	Times   int64 `json:"times"`
	Windows int64 `json:"windows"`
}

// Passes is the number of documents in one class of reads. The number of reads of a document is the
// number of samples with one of its tokens, divided by the number of windows with one.
type Passes struct {
	Passes    string `json:"passes"`
	Documents int64  `json:"documents"`
}

// MostlyRead is the document with the most samples that have one of its tokens.
type MostlyRead struct {
	Shard    int   `json:"shard"` // in the source
	Document int64 `json:"document"`
	Tokens   int64 `json:"tokens"`
	Samples  int64 `json:"samples"` // 0: no document was examined
}

const (
	distanceBins = 20
	minStretches = 16 // number of parts, if the range is not examined completely
	maxTimes     = 64 // maximum of Times.Times; larger numbers are added to it
)

// passClasses are the classes of Passes, in order.
var passClasses = []string{"less than 1", "1", "above 1 to 2", "above 2 to 4", "above 4 to 8", "above 8"}

// passClass returns the class of a document by its numbers of samples and windows.
func passClass(samples, windows int64) int {
	switch {
	case samples < windows:
		return 0
	case samples == windows:
		return 1
	case samples <= 2*windows:
		return 2
	case samples <= 4*windows:
		return 3
	case samples <= 8*windows:
		return 4
	}
	return 5
}

// A look is one examined sample.
type look struct {
	step        int64
	window      int64
	token       int64
	epoch       int64
	first, last int64 // numbers of its first and last document in the shard; only with s.Data
	reach       int64 // number of later windows with a token of its last document
	shard       int32
	begins      bool // the source's first sample in a part of the range, which forms no pair
}

// stretchesOfSteps returns the ranges of steps [from, to) to examine: the complete range, or parts
// of equal length that are evenly spaced from its start to its end.
func (s *simulation) stretchesOfSteps() [][2]int64 {
	batch := int64(s.BatchSize)
	first, steps := s.From/batch, (s.To-s.From+batch-1)/batch
	budget := max(1, s.Samples/batch)
	if budget >= steps {
		return [][2]int64{{first, first + steps}}
	}
	n := min(minStretches, budget)
	length := budget / n
	var list [][2]int64
	for i := range n {
		at := first
		if n > 1 {
			at += int64(float64(steps-length) * float64(i) / float64(n-1))
		}
		list = append(list, [2]int64{at, at + length})
	}
	return list
}

func (s *simulation) shuffle() (Shuffle, error) {
	out := Shuffle{Documents: s.Data != nil && s.traits.Windows}
	stretches := s.stretchesOfSteps()
	out.Whole = len(stretches) == 1 &&
		stretches[0][1]-stretches[0][0] == (s.To-s.From+int64(s.BatchSize)-1)/int64(s.BatchSize)
	sources := make([]sourceTally, len(s.plan.Sources))
	for i := range sources {
		sources[i].begin(&s.plan.Sources[i], s.numbered(i))
	}
	var looks []look
	for _, part := range stretches {
		out.Steps += part[1] - part[0]
	}
	total := min(out.Steps*int64(s.BatchSize), s.To-s.From)
	for _, part := range stretches {
		for i := range sources {
			sources[i].last = -1
		}
		for p := part[0] * int64(s.BatchSize); p < min(part[1]*int64(s.BatchSize), s.To); p++ {
			at, err := s.locate(p)
			if err != nil {
				return out, err
			}
			if at.Skipped {
				continue
			}
			t := &sources[at.Source]
			t.looks = append(t.looks, int32(len(looks)))
			looks = append(looks, look{step: p / int64(s.BatchSize), window: at.Window, token: at.Token,
				epoch: at.Epoch, shard: int32(at.Shard), begins: t.last < 0})
			t.pair(at.Window)
			if len(looks)&0xffff == 0 {
				s.Progress("examining samples", int64(len(looks)), total)
			}
		}
	}
	out.Samples = int64(len(looks))
	for i := range sources {
		src, err := s.sourceShuffle(i, &sources[i], looks, out.Documents)
		if err != nil {
			return out, err
		}
		out.Sources = append(out.Sources, src)
		s.Progress("counting repeats and documents", int64(i+1), int64(len(sources)))
	}
	return out, nil
}

// A sourceTally counts the pairs of one source.
type sourceTally struct {
	training  int64
	known     bool  // windows are drawn uniformly, so expected values are known
	last      int64 // window of the previous sample, -1 for none
	pairs     int64
	distance  float64
	distances [distanceBins]int64
	adjacent  int64
	parity    int64
	looks     []int32 // indices of its samples, in order
	byWindow  []int32 // the same, sorted by window, then by order
}

func (t *sourceTally) begin(s *blend.Source, numbered bool) {
	*t = sourceTally{training: s.Training(), known: numbered && s.Training() > 1, last: -1}
}

func (t *sourceTally) pair(window int64) {
	if window >= t.training {
		t.known = false
	}
	if t.last >= 0 {
		d := max(window-t.last, t.last-window)
		t.pairs++
		t.distance += float64(d)
		t.distances[min(distanceBins-1, int(float64(d)/float64(t.training)*distanceBins))]++
		if d == 1 {
			t.adjacent++
		}
		t.parity += d & 1
	}
	t.last = window
}

// uniform returns the fractions of distances between two windows of n, drawn without replacement.
// Distance d has probability 2(n − d)/(n(n − 1)); uniform adds up the probabilities in each bin.
func uniform(n int64) []float64 {
	below := func(d float64) float64 { // fraction of the distances from 1 to d
		d = min(d, float64(n-1))
		return d * (2*float64(n) - d - 1) / (float64(n) * float64(n-1))
	}
	var shares []float64
	before := 0.0
	for i := 1; i <= distanceBins; i++ {
		end := math.Ceil(float64(n)*float64(i)/distanceBins) - 1 // the largest distance in this bin
		if i == distanceBins {
			end = float64(n)
		}
		now := below(max(0, end))
		shares = append(shares, now-before)
		before = now
	}
	return shares
}

// sourceShuffle computes the statistics of source i.
func (s *simulation) sourceShuffle(i int, t *sourceTally, looks []look, documents bool) (SourceShuffle, error) {
	src := &s.plan.Sources[i]
	out := SourceShuffle{Name: src.Name, Samples: int64(len(t.looks)), Pairs: t.pairs,
		Adjacent: Count{0, -1}, SameShard: Count{0, -1}, SameDocument: Count{0, -1}, BatchDocument: Count{0,
			-1}, BatchWindow: Count{0, -1}}
	n, pairs := float64(t.training), float64(t.pairs)
	if t.pairs > 0 && s.traits.Scheduled {
		out.Distance, out.Parity = t.distance/pairs/n, float64(t.parity)/pairs
		out.Adjacent.Seen = t.adjacent
		for _, c := range t.distances {
			out.Distances = append(out.Distances, float64(c)/pairs)
		}
	}
	if t.known && t.pairs > 0 {
		out.Uniform = uniform(t.training)
		// The two distances of three consecutive windows are correlated, so the mean of m distances
		// has variance 1/18m + 2/180m = 1/15m.
		out.DistanceOff = (out.Distance - (n+1)/3/n) * math.Sqrt(15*pairs)
		odd := math.Floor(n / 2)
		out.ParityOff = (out.Parity - 2*odd*(n-odd)/(n*(n-1))) * 2 * math.Sqrt(pairs)
		out.Adjacent.Expected = pairs * 2 / n
	}
	t.byWindow = slices.Clone(t.looks)
	slices.SortStableFunc(t.byWindow, func(a, b int32) int { return cmp.Compare(looks[a].window, looks[b].window) })
	if documents {
		if err := s.findDocuments(i, t, looks); err != nil {
			return out, err
		}
	}
	var reach float64
	for k, a := range t.looks {
		reach += float64(looks[a].reach)
		if looks[a].begins {
			continue
		}
		before := &looks[t.looks[k-1]]
		if before.shard == looks[a].shard {
			out.SameShard.Seen++
			if documents && before.shares(&looks[a]) {
				out.SameDocument.Seen++
			}
		}
	}
	sameStep, turns, inBatch := s.steps(t, looks, documents)
	out.BatchDocument.Seen = inBatch
	if t.known {
		out.BatchWindow.Expected = turns / n
	}
	if t.known && s.traits.Windows {
		left, chance := t.training, 0.0
		for _, sh := range src.Shards {
			w := min(left, index.ShardWindows(s.plan.SequenceLength, sh.Tokens))
			left -= w
			chance += float64(w) * float64(w-1) / (n * (n - 1))
		}
		out.SameShard.Expected = pairs * chance
		if documents && len(t.looks) > 0 {
			// Of the n(n − 1)/2 pairs of windows, n · mean(reach) share a document. The mean is
			// estimated from the examined windows.
			chance := 2 * reach / float64(len(t.looks)) / (n - 1)
			out.SameDocument.Expected, out.BatchDocument.Expected = pairs*chance, sameStep*chance
		}
	}
	s.repeats(&out, t, looks)
	if documents {
		return out, s.passes(&out, i, t, looks)
	}
	return out, nil
}

// shares reports whether two different windows of a shard have tokens of a common document.
func (a *look) shares(b *look) bool {
	return a.window != b.window && max(a.first, b.first) <= min(a.last, b.last)
}

// steps counts the pairs of the source's samples within a step, the pairs among them of different
// epochs, and the pairs that share a document.
func (s *simulation) steps(t *sourceTally, looks []look, documents bool) (pairs, turns float64, sharing int64) {
	var step []int32
	for from := 0; from < len(t.looks); {
		to, epoch := from, from // the first sample of the step, and of the newest epoch in it
		for ; to < len(t.looks) && looks[t.looks[to]].step == looks[t.looks[from]].step; to++ {
			if looks[t.looks[to]].epoch != looks[t.looks[epoch]].epoch {
				epoch = to
			}
			turns += float64(epoch - from)
		}
		pairs += float64(to-from) * float64(to-from-1) / 2
		if documents {
			step = append(step[:0], t.looks[from:to]...)
			slices.SortFunc(step, func(a, b int32) int { return cmp.Compare(looks[a].window, looks[b].window) })
			for k := range step {
				a := &looks[step[k]]
				for _, b := range step[k+1:] {
					if looks[b].shard != a.shard || looks[b].first > a.last {
						break
					}
					if a.shares(&looks[b]) {
						sharing++
					}
				}
			}
		}
		from = to
	}
	return pairs, turns, sharing
}

// repeats counts how often windows were drawn.
func (s *simulation) repeats(out *SourceShuffle, t *sourceTally, looks []look) {
	times := make(map[int64]int64)
	list := t.byWindow
	for from := 0; from < len(list); {
		to := from + 1
		for ; to < len(list) && looks[list[to]].window == looks[list[from]].window; to++ {
			before, now := &looks[list[to-1]], &looks[list[to]]
			if before.step == now.step {
				out.BatchWindow.Seen++
			}
			if before.epoch == now.epoch && now.epoch >= 0 {
				out.EpochWindow++
			}
		}
		times[min(int64(to-from), maxTimes)]++
		from = to
	}
	for n, windows := range times {
		out.Windows = append(out.Windows, Times{n, windows})
	}
	slices.SortFunc(out.Windows, func(a, b Times) int { return cmp.Compare(a.Times, b.Times) })
}

// eachShard opens each shard with samples of the source, and calls f with the shard and its samples
// in stored order.
func (s *simulation) eachShard(source int, t *sourceTally, looks []look,
	f func(shard *shards.Shard, list []int32) error) error {
	list := t.byWindow // also sorted by shard, because windows are numbered through the shards
	for from := 0; from < len(list); {
		k := looks[list[from]].shard
		to := from
		for to < len(list) && looks[list[to]].shard == k {
			to++
		}
		shard, err := shards.Open(s.plan.ShardPath(source, int(k)))
		if err == nil {
			err = shard.Guard(func() error { return f(shard, list[from:to]) })
			shard.Close()
		}
		if err != nil {
			return fmt.Errorf("source %q: %w", s.plan.Sources[source].Name, err)
		}
		from = to
	}
	return nil
}

// findDocuments sets the first and last document of each sample, and the reach of the last
// document.
func (s *simulation) findDocuments(source int, t *sourceTally, looks []look) error {
	length := int64(s.plan.SequenceLength)
	return s.eachShard(source, t, looks, func(shard *shards.Shard, list []int32) error {
		windows := index.ShardWindows(s.plan.SequenceLength, shard.Tokens())
		for _, i := range list {
			l := &looks[i]
			var err error
			if l.first, err = shard.DocumentAt(l.token); err != nil {
				return err
			}
			if l.last, err = shard.DocumentAt(l.token + length); err != nil {
				return err
			}
			span, err := shard.Span(l.last)
			if err != nil {
				return err
			}
			l.reach = max(0, min((span.End-1)/length, windows-1)-l.token/length)
			if t.known { // windows after the last training window are validation windows
				l.reach = min(l.reach, t.training-1-l.window)
			}
		}
		return s.ctx.Err()
	})
}

// passes counts how often documents were read. Samples in stored order have documents in stored
// order, so one sweep over the starts and ends of samples is enough.
func (s *simulation) passes(out *SourceShuffle, source int, t *sourceTally, looks []look) error {
	classes := make([]int64, len(passClasses))
	length := int64(s.plan.SequenceLength)
	err := s.eachShard(source, t, looks, func(shard *shards.Shard, list []int32) error {
		windows := index.ShardWindows(s.plan.SequenceLength, shard.Tokens())
		begun, ended := 0, 0 // samples whose first document is at most d, and whose last document is before d
		for d := int64(0); ended < len(list); d++ {
			if begun == ended { // between samples
				d = max(d, looks[list[begun]].first)
			}
			for begun < len(list) && looks[list[begun]].first <= d {
				begun++
			}
			if span, err := shard.Span(d); err != nil {
				return err
			} else if samples := int64(begun - ended); span.First < span.End {
				first, last := max(0, span.First-1)/length, min((span.End-1)/length, windows-1)
				classes[passClass(samples, last-first+1)]++
				if samples > out.Most.Samples {
					out.Most = MostlyRead{int(looks[list[0]].shard), d, span.End - span.First, samples}
				}
			}
			for ended < len(list) && looks[list[ended]].last <= d {
				ended++
			}
			if d&0xffff == 0 && s.ctx.Err() != nil {
				return s.ctx.Err()
			}
		}
		return nil
	})
	for k, n := range classes {
		out.Documents = append(out.Documents, Passes{passClasses[k], n})
	}
	return err
}
