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

// Shuffle is what samples that follow each other have to do with each other, over the steps that
// were looked at one by one, without skipped positions.
type Shuffle struct {
	Steps     int64           `json:"steps"`   // looked at: all of the range, or stretches of steps spread over it
	Samples   int64           `json:"samples"` // in them
	Whole     bool            `json:"whole"`   // all of the range
	Documents bool            `json:"documents"`
	Sources   []SourceShuffle `json:"sources"`
}

// A Count is how often something was seen, and how often it would be if each epoch were a uniform
// permutation of the training windows.
type Count struct {
	Seen     int64   `json:"seen"`
	Expected float64 `json:"expected"` // -1: it is not known
}

// SourceShuffle is about the samples of one source. A pair is two of its samples that follow each
// other in the source's order.
type SourceShuffle struct {
	Name    string `json:"name"`
	Samples int64  `json:"samples"`
	Pairs   int64  `json:"pairs"`

	// mean |difference| of the window numbers of a pair, in training windows; uniform: 1/3
	Distance    float64 `json:"distance"`
	DistanceOff float64 `json:"distance_off"` // how far the mean is from that, in standard deviations
	// share of the pairs by distance, in parts of the same width from 0 to 1
	Distances []float64 `json:"distances"`
	Uniform   []float64 `json:"distances_uniform"`
	Adjacent  Count     `json:"adjacent"` // pairs of windows side by side
	// share of the pairs whose window numbers are one even, one odd; uniform: 1/2
	Parity    float64 `json:"parity_changes"`
	ParityOff float64 `json:"parity_off"`
	SameShard Count   `json:"same_shard"` // pairs
	// SameDocument are pairs whose windows hold tokens of one document, BatchDocument two samples
	// of one step for which that is so.
	SameDocument  Count `json:"same_document"`
	BatchDocument Count `json:"batch_document"`
	// samples of a step whose window the step has already, as may be where an epoch begins
	BatchWindow Count `json:"batch_window"`
	// samples whose window their epoch has had already: never, in a right order
	EpochWindow int64 `json:"epoch_window"`

	Windows   []Times    `json:"window_repeats"`   // how many windows were drawn so often, in the steps looked at
	Documents []Passes   `json:"document_repeats"` // how many documents were read so often
	Most      MostlyRead `json:"most_read_document"`
}

// Times is how many windows were drawn so many times.
type Times struct {
	Times   int64 `json:"times"`
	Windows int64 `json:"windows"`
}

// Passes is how many documents were read so often: samples that hold a token of the document, for
// each window that does.
type Passes struct {
	Passes    string `json:"passes"`
	Documents int64  `json:"documents"`
}

// MostlyRead is the document that most samples hold a token of, the first of several.
type MostlyRead struct {
	Shard    int   `json:"shard"` // in the source
	Document int64 `json:"document"`
	Tokens   int64 `json:"tokens"`
	Samples  int64 `json:"samples"` // 0: none was looked at
}

const (
	distanceBins = 20
	minStretches = 16 // that are looked at where not all of the range is
	maxTimes     = 64 // lines of Windows
)

// passClasses are the classes of Passes, in order.
var passClasses = []string{"less than 1", "1", "above 1 to 2", "above 2 to 4", "above 4 to 8", "above 8"}

// passClass is the class of a document that so many samples hold, which has so many windows.
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

// A look is one sample that was looked at.
type look struct {
	step        int64
	window      int64
	token       int64
	epoch       int64
	first, last int64 // numbers of its first and last document in the shard; with s.Data only
	reach       int64 // windows behind it that hold a token of its last document
	shard       int32
	begins      bool // the source's first in a stretch of steps: it makes no pair
}

// stretchesOfSteps are the steps to look at, [from, to): the whole range, or stretches of it of the
// same length, from its begin to its end.
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
	out := Shuffle{Documents: s.Data != nil && s.plan.Windowed()}
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
				s.Progress("neighbours", int64(len(looks)), total)
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
		s.Progress("repeats and documents", int64(i+1), int64(len(sources)))
	}
	return out, nil
}

// A sourceTally counts the pairs of one source as they come.
type sourceTally struct {
	training  int64
	known     bool  // its windows are all drawn from alike, so that what a uniform permutation gives can be said
	last      int64 // window of the sample before, -1 for none
	pairs     int64
	distance  float64
	distances [distanceBins]int64
	adjacent  int64
	parity    int64
	looks     []int32 // its samples, in order
	byWindow  []int32 // the same by window, those of one window in order
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

// uniform gives the shares of distances that two windows of n, drawn without replacement, have: 2(n
// − d)/(n(n − 1)) of d, added up over the parts.
func uniform(n int64) []float64 {
	below := func(d float64) float64 { // share of the distances from 1 to d
		d = min(d, float64(n-1))
		return d * (2*float64(n) - d - 1) / (float64(n) * float64(n-1))
	}
	var shares []float64
	before := 0.0
	for i := 1; i <= distanceBins; i++ {
		end := math.Ceil(float64(n)*float64(i)/distanceBins) - 1 // the last distance below this part's end
		if i == distanceBins {
			end = float64(n)
		}
		now := below(max(0, end))
		shares = append(shares, now-before)
		before = now
	}
	return shares
}

// sourceShuffle is what the samples of source i come to.
func (s *simulation) sourceShuffle(i int, t *sourceTally, looks []look, documents bool) (SourceShuffle, error) {
	src := &s.plan.Sources[i]
	out := SourceShuffle{Name: src.Name, Samples: int64(len(t.looks)), Pairs: t.pairs,
		Adjacent: Count{0, -1}, SameShard: Count{0, -1}, SameDocument: Count{0, -1}, BatchDocument: Count{0,
			-1}, BatchWindow: Count{0, -1}}
	n, pairs := float64(t.training), float64(t.pairs)
	if t.pairs > 0 && s.plan.Megatron == nil {
		out.Distance, out.Parity = t.distance/pairs/n, float64(t.parity)/pairs
		out.Adjacent.Seen = t.adjacent
		for _, c := range t.distances {
			out.Distances = append(out.Distances, float64(c)/pairs)
		}
	}
	if t.known && t.pairs > 0 {
		out.Uniform = uniform(t.training)
		// Of three windows in a row the two distances belong together, so that the mean of m has
		// variance 1/18m + 2/180m = 1/15m.
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
	if t.known && s.plan.Windowed() {
		left, chance := t.training, 0.0
		for _, sh := range src.Shards {
			w := min(left, index.ShardWindows(s.plan.SequenceLength, sh.Tokens))
			left -= w
			chance += float64(w) * float64(w-1) / (n * (n - 1))
		}
		out.SameShard.Expected = pairs * chance
		if documents && len(t.looks) > 0 {
			// Of the n(n − 1)/2 pairs of windows, n · mean(reach) share a document; the windows
			// looked at stand for all.
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

// shares says whether two different windows of a shard hold tokens of one document.
func (a *look) shares(b *look) bool {
	return a.window != b.window && max(a.first, b.first) <= min(a.last, b.last)
}

// steps counts the pairs of samples of the source that are in one step, those of them that are of
// two epochs, and those that share a document.
func (s *simulation) steps(t *sourceTally, looks []look, documents bool) (pairs, turns float64, sharing int64) {
	var step []int32
	for from := 0; from < len(t.looks); {
		to, epoch := from, from // the first of the step, and of the newest epoch in it
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

// eachShard calls f with each shard that samples of the source are of, open, and its samples in
// stored order.
func (s *simulation) eachShard(source int, t *sourceTally, looks []look,
	f func(shard *shards.Shard, list []int32) error) error {
	list := t.byWindow // so shard after shard, as windows are numbered
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

// findDocuments finds the first and last document of each sample, and how far the last one reaches.
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
			if t.known { // the windows behind the last training window are held out
				l.reach = min(l.reach, t.training-1-l.window)
			}
		}
		return s.ctx.Err()
	})
}

// passes counts how often documents were read. As samples in stored order have documents in order,
// a sweep over where they begin and end is enough.
func (s *simulation) passes(out *SourceShuffle, source int, t *sourceTally, looks []look) error {
	classes := make([]int64, len(passClasses))
	length := int64(s.plan.SequenceLength)
	err := s.eachShard(source, t, looks, func(shard *shards.Shard, list []int32) error {
		windows := index.ShardWindows(s.plan.SequenceLength, shard.Tokens())
		begun, ended := 0, 0 // samples whose first document is at or before d, whose last is before d
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
