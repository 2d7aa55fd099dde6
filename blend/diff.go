package blend

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// A Relation describes whether one plan amends another.
type Relation string

// The relations of a first and a second plan.
const (
	SamePlan       Relation = "same"
	SecondAmends   Relation = "second_amends_first" // the first plan is a parent of the second
	FirstAmends    Relation = "first_amends_second"
	CommonAncestor Relation = "common_ancestor" // both amend a third plan
	Unrelated      Relation = "none"
)

// A Difference is the result of [Diff].
type Difference struct {
	// Same is the number of leading positions at which both plans have the same samples and skips.
	// It is computed from shards, stages, skips and growth, not from the list of parents. After
	// these positions the plans differ, except for samples that are equal by chance.
	Same     int64    `json:"same"`
	Relation Relation `json:"relation"`
	Ancestor string   `json:"ancestor,omitempty"` // fingerprint of the youngest common ancestor; may be a plan itself
	First    []Parent `json:"first_amendments"`   // from the ancestor to the first plan, oldest first
	Second   []Parent `json:"second_amendments"`
	Changes  []Change `json:"changes"` // from the first plan to the second, by position

	Sources []SourceDifference `json:"sources"` // sources of the first plan, then sources of the second alone
}

// A Change is one difference.
type Change struct {
	From int64 `json:"from"` // the first position that it affects; -1 if it changes no sample
	// order, cache, padding, sequence_length, seed, tokenizer, sources, stages, skips or length
	What string `json:"what"`
	Text string `json:"text"`
}

// A SourceDifference compares the samples that two plans draw from a source. It counts positions
// from Difference.Same on, including skipped positions. For plans that read their order from files,
// it counts all positions.
type SourceDifference struct {
	Name   string  `json:"name"`
	First  Drawing `json:"first"`
	Second Drawing `json:"second"`
}

// A Drawing is a number of positions, and its fraction of all positions, from 0 to 1.
type Drawing struct {
	Samples int64   `json:"samples"`
	Share   float64 `json:"share"`
}

// Diff lists the differences between two plans, and the first position of each.
func Diff(a, b *Plan) *Difference {
	d := &Difference{Changes: []Change{}}
	d.relate(a, b)
	length := min(a.length, b.length)
	add := func(from int64, what, format string, args ...any) {
		d.Changes = append(d.Changes, Change{from, what, fmt.Sprintf(format, args...)})
	}
	was, is := a.Traits(), b.Traits()
	native := was.Scheduled && is.Scheduled
	switch {
	case was.name != is.name:
		add(0, "order", "the order has version %s, had %s", is.Version, was.Version)
	case !native && !slices.EqualFunc(a.order.files(), b.order.files(), orderFile.same):
		add(0, "cache", "the order is read from other index files")
	case was.Padding != is.Padding:
		add(0, "padding", "samples are padded with id %d, were padded with %d", is.Padding, was.Padding)
	}
	if a.SequenceLength != b.SequenceLength {
		add(0, "sequence_length", "sequence length is %d, was %d", b.SequenceLength, a.SequenceLength)
	}
	if native && a.Seed != b.Seed {
		add(0, "seed", "the seed is %d, was %d", b.Seed, a.Seed)
	}
	if was.Locality != is.Locality {
		add(0, "shuffle", "the windows are shuffled in %s, were shuffled in %s", localityText(is.Locality),
			localityText(was.Locality))
	}
	if s, t := a.Tokenizer, b.Tokenizer; (s == nil) != (t == nil) || s != nil && *s != *t {
		add(-1, "tokenizer", "the tokenizer is %s, was %s", t, s)
	}
	d.compareSources(a, b, native)
	if native {
		if from, text := compareStages(a, b); from < length {
			add(from, "stages", "%s", text)
		}
	}
	for _, r := range subtract(b.Skips, a.Skips) {
		if r.From < length {
			add(r.From, "skips", "%s skipped", areText(r))
		}
	}
	for _, r := range subtract(a.Skips, b.Skips) {
		if r.From < length {
			add(r.From, "skips", "%s no longer skipped", areText(r))
		}
	}
	if a.length != b.length {
		add(length, "length", "the plan has %d positions, had %d", b.length, a.length)
	}
	d.Same = length
	for _, c := range d.Changes {
		if c.From >= 0 {
			d.Same = min(d.Same, c.From)
		}
	}
	slices.SortStableFunc(d.Changes, func(a, b Change) int { return cmp.Compare(a.From, b.From) })
	d.share(a, b, native)
	return d
}

// String describes the tokenizer.
func (t *Tokenizer) String() string {
	if t == nil {
		return "not known"
	}
	return fmt.Sprintf("%.12s… (%d ids, end of document %d)", t.SHA256, t.Vocabulary, t.EOD)
}

// relate finds the youngest common ancestor.
func (d *Difference) relate(a, b *Plan) {
	d.Relation, d.First, d.Second = Unrelated, []Parent{}, []Parent{}
	line := func(p *Plan) []string { // from the oldest to the plan itself
		var list []string
		for _, parent := range p.Parents {
			list = append(list, parent.Fingerprint)
		}
		return append(list, p.fingerprint)
	}
	first, second := line(a), line(b)
	if a.Has(b.fingerprint) || b.Has(a.fingerprint) { // one of the two may be provisional
		first[len(first)-1] = second[len(second)-1]
	}
	for i := len(first) - 1; i >= 0; i-- {
		j := slices.Index(second, first[i])
		if j < 0 {
			continue
		}
		d.Ancestor = first[i]
		d.First, d.Second = append(d.First, a.Parents[i:]...), append(d.Second, b.Parents[j:]...)
		switch {
		case len(d.First) == 0 && len(d.Second) == 0:
			d.Relation = SamePlan
		case len(d.First) == 0:
			d.Relation = SecondAmends
		case len(d.Second) == 0:
			d.Relation = FirstAmends
		default:
			d.Relation = CommonAncestor
		}
		return
	}
}

// compareSources adds new, missing and changed sources.
func (d *Difference) compareSources(a, b *Plan, native bool) {
	index := func(p *Plan) map[string]int {
		m := map[string]int{}
		for i, s := range p.Sources {
			m[s.Name] = i
		}
		return m
	}
	first, second := index(a), index(b)
	at := func(p *Plan, source int, sample int64) int64 {
		if !native {
			return 0
		}
		if position, ok := p.position(source, sample); ok {
			return position
		}
		return -1
	}
	for i, s := range a.Sources {
		j, ok := second[s.Name]
		if !ok {
			d.Changes = append(d.Changes, Change{at(a, i, 0), "sources", fmt.Sprintf("source %s was removed", s.Name)})
			continue
		}
		for _, c := range a.Sources[i].compare(&b.Sources[j]) {
			// Growth takes effect at the first sample that the plan draws with the new windows. The
			// other plan may draw the sample with this number elsewhere, but only if the stages
			// differ before.
			from := int64(0)
			switch c.in {
			case inFirst:
				from = at(a, i, c.sample)
			case inSecond:
				from = at(b, j, c.sample)
			case inBoth:
				x, y := at(a, i, 0), at(b, j, 0)
				if from = min(x, y); from < 0 {
					from = max(x, y)
				}
			}
			d.Changes = append(d.Changes, Change{from, "sources", fmt.Sprintf("source %s %s", s.Name, c.text)})
		}
	}
	for j, s := range b.Sources {
		if _, ok := first[s.Name]; !ok {
			d.Changes = append(d.Changes, Change{at(b, j, 0), "sources", fmt.Sprintf("source %s is new: %s", s.Name,
				sizeText(len(s.Shards), s.Windows()))})
		}
	}
}

// A sourceChange is one difference between two sources, from a sample on.
type sourceChange struct {
	sample int64
	in     int // the source that has it: inFirst, inSecond or inBoth
	text   string
}

const (
	inFirst = iota
	inSecond
	inBoth
)

// compare lists the differences between two versions of a source: in the original shards, or in
// their growth.
func (s *Source) compare(t *Source) (list []sourceChange) {
	if (s.Packed == nil) != (t.Packed == nil) || s.Packed != nil && s.Packed[0].SHA256 != t.Packed[0].SHA256 {
		return []sourceChange{{0, inBoth, "is packed differently"}}
	}
	was, is := s.pieces(), t.pieces()
	same := 0
	for same < min(len(was), len(is)) && was[same].equal(is[same]) {
		same++
	}
	if same == 0 {
		return []sourceChange{{0, inBoth, fmt.Sprintf("has other shards or other validation windows: %s, %d of them "+
			"for validation; had %s, %d for validation",
			sizeText(len(t.Shards), t.Windows()), t.Validation, sizeText(len(s.Shards), s.Windows()), s.Validation)}}
	}
	for _, p := range was[same:] {
		list = append(list, sourceChange{p.sample, inFirst, p.text("less")})
	}
	for _, p := range is[same:] {
		list = append(list, sourceChange{p.sample, inSecond, p.text("more")})
	}
	return list
}

// sizeText describes a number of shards and their windows.
func sizeText(shards int, windows int64) string {
	if shards == 1 {
		return fmt.Sprintf("1 shard of %d windows", windows)
	}
	return fmt.Sprintf("%d shards of %d windows", shards, windows)
}

// A piece is the original shards of a source, or the shards that one amendment added.
type piece struct {
	sample, held int64
	windows      int64
	shards       []Shard
	packing      string // SHA-256 of the packing index; "" unless the plan is packed
}

// text describes a piece that one source has and the other plan's source does not.
func (p piece) text(more string) string {
	text := fmt.Sprintf("has %s %s from its sample %d on", sizeText(len(p.shards), p.windows), more, p.sample)
	if p.held > 0 {
		text += fmt.Sprintf(" (%d for validation)", p.held)
	}
	return text
}

func (p piece) equal(q piece) bool {
	if p.sample != q.sample || p.held != q.held || p.packing != q.packing {
		return false
	}
	return slices.EqualFunc(p.shards, q.shards, func(a, b Shard) bool {
		return a.same(b)
	})
}

// pieces lists the pieces of the source, in order.
func (s *Source) pieces() []piece {
	held := s.Validation
	for _, g := range s.Growth {
		held -= g.Validation
	}
	list := []piece{{held: held}}
	for _, g := range s.Growth {
		list = append(list, piece{sample: g.Sample, held: g.Validation})
	}
	for i := range list {
		first, end := s.partShards(i)
		p := &list[i]
		p.shards, p.windows = s.Shards[first:end], s.Windows()
		if s.parts != nil {
			p.windows = s.parts[i].count + p.held
		}
		if s.Packed != nil {
			p.packing = s.Packed[i].SHA256
		}
	}
	return list
}

// compareStages returns the first position at which the stages distribute positions differently,
// and a description. Without a difference, it returns the shorter plan's length.
func compareStages(a, b *Plan) (from int64, text string) {
	weights := func(p *Plan, j int) (list []weighted) {
		for i, w := range p.Stages[j].Weights {
			if w > 0 {
				list = append(list, weighted{p.Sources[i].Name, w})
			}
		}
		return list
	}
	for j := range min(len(a.Stages), len(b.Stages)) {
		was, is := weights(a, j), weights(b, j)
		if !slices.Equal(was, is) {
			return from, fmt.Sprintf("weights are %s; were %s", weightsText(is), weightsText(was))
		}
		n, m := a.Stages[j].Samples, b.Stages[j].Samples
		if from += min(n, m); n == m {
			continue
		}
		// The longer stage continues; the other plan has another stage there, or ends.
		switch {
		case n < m && j+1 < len(a.Stages):
			return from, fmt.Sprintf("weights stay %s for %d positions; previously a stage with %s followed",
				weightsText(is), m-n, weightsText(weights(a, j+1)))
		case m < n && j+1 < len(b.Stages):
			return from, fmt.Sprintf("weights are %s; previously the stage with %s continued for %d positions",
				weightsText(weights(b, j+1)), weightsText(was), n-m)
		}
		return from, ""
	}
	return from, ""
}

type weighted struct {
	source string
	weight uint64
}

// weightsText formats weights as percentages.
func weightsText(list []weighted) string {
	const most = 8
	var sum float64
	for _, w := range list {
		sum += float64(w.weight)
	}
	var texts []string
	for i, w := range list {
		if i == most && len(list) > most+1 {
			texts = append(texts, fmt.Sprintf("and %d more", len(list)-most))
			break
		}
		texts = append(texts, fmt.Sprintf("%s %.3f %%", w.source, 100*float64(w.weight)/sum))
	}
	return strings.Join(texts, ", ")
}

// areText returns the start of a sentence about a range of positions.
func areText(r Range) string {
	if r.To == r.From+1 {
		return fmt.Sprintf("position %d is", r.From)
	}
	return fmt.Sprintf("positions %d to %d are", r.From, r.To-1)
}

// subtract returns the parts of the ranges in list that no range in other covers. Both lists are
// sorted and disjoint.
func subtract(list, other []Range) []Range {
	var left []Range
	for _, r := range list {
		for _, o := range other {
			if o.To <= r.From {
				continue
			}
			if o.From >= r.To {
				break
			}
			if r.From < o.From {
				left = append(left, Range{r.From, o.From})
			}
			r.From = o.To
		}
		if r.From < r.To {
			left = append(left, r)
		}
	}
	return left
}

// share counts the samples that both plans draw from each source.
func (d *Difference) share(a, b *Plan, native bool) {
	parts := func(p *Plan) map[string]Drawing {
		m, all := map[string]Drawing{}, float64(p.length-d.Same)
		counts := make([]int64, len(p.Sources))
		if native {
			counts = p.drawn(d.Same)
		} else {
			all = float64(p.length)
		}
		for i, s := range p.Sources {
			n := p.totals[i] - counts[i]
			share := 0.0
			if all > 0 {
				share = float64(n) / all
			}
			m[s.Name] = Drawing{n, share}
		}
		return m
	}
	first, second := parts(a), parts(b)
	for _, s := range a.Sources {
		d.Sources = append(d.Sources, SourceDifference{s.Name, first[s.Name], second[s.Name]})
	}
	for _, s := range b.Sources {
		if _, ok := first[s.Name]; !ok {
			d.Sources = append(d.Sources, SourceDifference{s.Name, Drawing{}, second[s.Name]})
		}
	}
}
