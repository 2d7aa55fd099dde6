package blend

import (
	"context"
	"fmt"
	"iter"
	"strconv"

	"mula/index"
	"mula/internal/strictjson"
)

// A windowOrder is mula's native order of windows: order version 1, and version 2 if the plan
// amends another. With a locality, it is order "blocks 1" or "blocks 2".
type windowOrder struct {
	scheduled
	locality index.Locality
}

func newWindowOrder(p *Plan, l index.Locality) *windowOrder { return &windowOrder{scheduled{p}, l} }

func (o *windowOrder) traits() Traits {
	amended := len(o.plan.Parents) > 0
	t := Traits{Version: strconv.Itoa(OrderVersion), Windows: true, Scheduled: true, Locality: o.locality,
		name: "mula's native order"}
	switch local := o.locality != (index.Locality{}); {
	case local && amended:
		t.Version = BlocksAmendedOrder
	case local:
		t.Version = BlocksOrder
	case amended:
		t.Version = strconv.Itoa(AmendedVersion)
	}
	return t
}

// localityText describes a locality for messages.
func localityText(l index.Locality) string {
	if l == (index.Locality{}) {
		return "the whole source"
	}
	return fmt.Sprintf("groups of %d blocks of %d windows", l.Group, l.Block)
}

// holdOutWindows sets the number of validation windows of all sources, given their fraction.
func (p *Plan) holdOutWindows(fraction Number) {
	if !fraction.IsSet() {
		return
	}
	for i := range p.Sources {
		s := &p.Sources[i]
		var windows int64
		for _, sh := range s.Shards {
			windows += index.ShardWindows(p.SequenceLength, sh.Tokens)
		}
		s.Validation, _ = fraction.ceilTimes(windows) // at most windows, because the fraction is below 1
	}
}

// compileSource implements order. The source's shards must have been checked.
func (o *windowOrder) compileSource(s *Source) error {
	counts := make([]int64, len(s.Shards))
	for i, sh := range s.Shards {
		counts[i] = sh.Tokens
	}
	var err error
	if s.windows, err = index.NewWindows(o.plan.SequenceLength, counts); err != nil {
		return err
	}
	if s.Validation < 0 || s.Validation > s.windows.Count() {
		return fmt.Errorf("%d of %d windows are validation windows", s.Validation, s.windows.Count())
	}
	if s.training = s.windows.Count() - s.Validation; s.training == 0 {
		if s.windows.Count() == 0 {
			return fmt.Errorf("no shard has the %d tokens of a window; add text, or lower sequence_length",
				o.plan.SampleTokens())
		}
		return fmt.Errorf("all %d windows are in the validation split; add text, or lower validation",
			s.windows.Count())
	}
	if len(s.Growth) > 0 {
		shards, err := s.shardsByPart()
		if err != nil {
			return err
		}
		windows := make([]int64, len(shards))
		next := 0
		for i, n := range shards {
			for range n {
				windows[i] += s.windows.ShardCount(next)
				next++
			}
		}
		return s.compileGrowth(o.plan.Seed, o.locality, shards, windows)
	}
	s.order = index.NewLocalOrder(o.plan.Seed, s.Name, s.Training(), o.locality)
	return nil
}

func (o *windowOrder) amend(p *Plan) order { return newWindowOrder(p, o.locality) }

// extend implements amendable.
func (o *windowOrder) extend(_ context.Context, _ *packer, s *Source, _, first int, held Number) (out int64,
	err error) {
	var windows int64
	for _, sh := range s.Shards[first:] {
		windows += index.ShardWindows(o.plan.SequenceLength, sh.Tokens)
	}
	if held.IsSet() {
		out, _ = held.ceilTimes(windows) // at most windows, as the share is below 1
	}
	switch {
	case windows == 0:
		return 0, fmt.Errorf("no new shard has the %d tokens of a window; add more text", o.plan.SampleTokens())
	case windows == out:
		return 0, fmt.Errorf("all %d windows of the new shards are validation windows; add more text", windows)
	}
	return out, nil
}

func (o *windowOrder) compile() error { return o.compileStages() }

func (o *windowOrder) open(_ context.Context, p *Plan, _ func(string)) (order, error) {
	return newWindowOrder(p, o.locality), nil
}

func (o *windowOrder) closed() order { return o }

func (o *windowOrder) locate(position int64) (Sample, error) {
	source, epoch, window := o.draw(position)
	shard, token := o.plan.Sources[source].windows.Locate(window)
	return Sample{position, source, epoch, window, shard, token, o.plan.skipped(position)}, nil
}

func (o *windowOrder) segments(dst []segment, s Sample) ([]segment, error) {
	return append(dst, segment{shard: s.Shard, token: s.Token, length: int64(o.plan.SampleTokens())}), nil
}

func (o *windowOrder) validation(source int) iter.Seq[Sample] {
	return func(yield func(Sample) bool) {
		s := &o.plan.Sources[source]
		for _, held := range s.validationWindows() {
			for w := held.From; w < held.To; w++ {
				shard, token := s.windows.Locate(w)
				if !yield(Sample{Position: -1, Source: source, Epoch: -1, Window: w, Shard: shard, Token: token}) {
					return
				}
			}
		}
	}
}

func (o *windowOrder) occurrences(ctx context.Context, doc Document) iter.Seq2[Occurrence, error] {
	return o.uses(ctx, doc, o.holding(doc))
}

// holding lists the windows that hold a document, each with the part that it holds.
func (o *windowOrder) holding(doc Document) iter.Seq2[Occurrence, error] {
	return func(yield func(Occurrence, error) bool) {
		windows := o.plan.Sources[doc.Source].windows
		first, last, ok := windows.Reading(doc.Shard, doc.First, doc.First+doc.Tokens)
		for w := first; ok && w <= last; w++ {
			_, token := windows.Locate(w)
			o := Occurrence{
				Part: Part{doc, int(max(0, doc.First-token)),
					int(min(doc.First+doc.Tokens-token, int64(o.plan.SampleTokens())))},
				Sample: Sample{Position: -1, Source: doc.Source, Epoch: -1, Window: w, Shard: doc.Shard, Token: token},
			}
			if !yield(o, nil) {
				return
			}
		}
	}
}

// sealedPlan is the meaning of a plan of order version 1. Its JSON text with the fields in this
// order and without white space is the canonical form. The SHA-256 of this text is the plan's
// fingerprint.
type sealedPlan struct {
	Order          int            `json:"order"`
	Seed           uint64         `json:"seed"`
	SequenceLength int            `json:"sequence_length"`
	Tokenizer      *Tokenizer     `json:"tokenizer"`
	Sources        []sealedSource `json:"sources"`
	Stages         []Stage        `json:"stages"`
	Skips          []Range        `json:"skips"`
	Checks         []Check        `json:"checks"`
}

type sealedSource struct {
	Name       string  `json:"name"`
	Validation int64   `json:"validation_windows"`
	Shards     []Shard `json:"shards"`
}

// sealedAmended replaces sealedPlan in a plan that amends another: order version 2.
type sealedAmended struct {
	Order          int           `json:"order"`
	Parents        []Parent      `json:"parents"`
	Seed           uint64        `json:"seed"`
	SequenceLength int           `json:"sequence_length"`
	Tokenizer      *Tokenizer    `json:"tokenizer"`
	Sources        []grownSource `json:"sources"`
	Stages         []Stage       `json:"stages"`
	Skips          []Range       `json:"skips"`
	Checks         []Check       `json:"checks"`
}

type grownSource struct {
	Name       string   `json:"name"`
	Validation int64    `json:"validation_windows"`
	Growth     []Growth `json:"growth"`
	Shards     []Shard  `json:"shards"`
}

// sealedBlocks replaces sealedPlan in a plan of order "blocks 1", and sealedBlocksAmended in a plan
// of order "blocks 2". Their first members replace the member order of the embedded plans.
type sealedBlocks struct {
	Order   string         `json:"order"`
	Shuffle index.Locality `json:"shuffle"`
	sealedPlan
}

type sealedBlocksAmended struct {
	Order   string         `json:"order"`
	Shuffle index.Locality `json:"shuffle"`
	sealedAmended
}

func (o *windowOrder) sealed() any {
	local := o.locality != (index.Locality{})
	switch amended := len(o.plan.Parents) > 0; {
	case local && amended:
		return sealedBlocksAmended{BlocksAmendedOrder, o.locality, o.sealedAmended()}
	case local:
		return sealedBlocks{BlocksOrder, o.locality, o.sealedPlan()}
	case amended:
		return o.sealedAmended()
	}
	return o.sealedPlan()
}

func (o *windowOrder) sealedPlan() sealedPlan {
	p := o.plan
	f := sealedPlan{Order: OrderVersion, Seed: p.Seed, SequenceLength: p.SequenceLength, Tokenizer: p.Tokenizer,
		Stages: p.Stages, Skips: p.sealedSkips(), Checks: p.Checks}
	for _, s := range p.Sources {
		f.Sources = append(f.Sources, sealedSource{s.Name, s.Validation, s.Shards})
	}
	return f
}

func (o *windowOrder) sealedAmended() sealedAmended {
	p := o.plan
	f := sealedAmended{Order: AmendedVersion, Parents: p.Parents, Seed: p.Seed, SequenceLength: p.SequenceLength,
		Tokenizer: p.Tokenizer, Stages: p.Stages, Skips: p.sealedSkips(), Checks: p.Checks}
	for _, s := range p.Sources {
		growth := s.Growth
		if growth == nil {
			growth = []Growth{}
		}
		f.Sources = append(f.Sources, grownSource{s.Name, s.Validation, growth, s.Shards})
	}
	return f
}

// parseNative parses a plan of order version 1.
func parseNative(data []byte) (*Plan, string, error) {
	var f planFile[sealedPlan]
	if err := strictjson.Decode(data, &f); err != nil {
		return nil, "", err
	}
	p := f.Plan.plan(index.Locality{})
	return p, f.Fingerprint, p.takeWritten(f.Written)
}

// parseBlocks parses a plan of order "blocks 1".
func parseBlocks(data []byte) (*Plan, string, error) {
	var f planFile[sealedBlocks]
	if err := strictjson.Decode(data, &f); err != nil {
		return nil, "", err
	}
	if err := f.Plan.Shuffle.Check(); err != nil {
		return nil, "", fmt.Errorf("`shuffle`: %w", err)
	}
	p := f.Plan.plan(f.Plan.Shuffle)
	return p, f.Fingerprint, p.takeWritten(f.Written)
}

// plan returns the plan without the paths of its shards.
func (f *sealedPlan) plan(l index.Locality) *Plan {
	p := &Plan{Seed: f.Seed, SequenceLength: f.SequenceLength, Tokenizer: f.Tokenizer, Stages: f.Stages, Skips: f.Skips,
		Checks: f.Checks}
	p.order = newWindowOrder(p, l)
	for _, s := range f.Sources {
		p.Sources = append(p.Sources, Source{Name: s.Name, Validation: s.Validation, Shards: s.Shards})
	}
	return p
}

// parseAmended parses a plan of order version 2.
func parseAmended(data []byte) (*Plan, string, error) {
	var f planFile[sealedAmended]
	if err := strictjson.Decode(data, &f); err != nil {
		return nil, "", err
	}
	p, err := f.Plan.plan(strconv.Itoa(AmendedVersion), index.Locality{})
	if err != nil {
		return nil, "", err
	}
	return p, f.Fingerprint, p.takeWritten(f.Written)
}

// parseBlocksAmended parses a plan of order "blocks 2".
func parseBlocksAmended(data []byte) (*Plan, string, error) {
	var f planFile[sealedBlocksAmended]
	if err := strictjson.Decode(data, &f); err != nil {
		return nil, "", err
	}
	if err := f.Plan.Shuffle.Check(); err != nil {
		return nil, "", fmt.Errorf("`shuffle`: %w", err)
	}
	p, err := f.Plan.plan(BlocksAmendedOrder, f.Plan.Shuffle)
	if err != nil {
		return nil, "", err
	}
	return p, f.Fingerprint, p.takeWritten(f.Written)
}

// plan returns the plan without the paths of its shards. version is its order, for messages.
func (f *sealedAmended) plan(version string, l index.Locality) (*Plan, error) {
	if len(f.Parents) == 0 {
		return nil, fmt.Errorf("order version %s is for amended plans, but the plan has no parent", version)
	}
	p := &Plan{Seed: f.Seed, SequenceLength: f.SequenceLength, Tokenizer: f.Tokenizer, Stages: f.Stages, Skips: f.Skips,
		Checks: f.Checks, Parents: f.Parents}
	p.order = newWindowOrder(p, l)
	for _, s := range f.Sources {
		p.Sources = append(p.Sources, Source{Name: s.Name, Validation: s.Validation, Shards: s.Shards,
			Growth: s.Growth})
	}
	return p, nil
}
