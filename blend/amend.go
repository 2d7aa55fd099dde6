package blend

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sort"

	"mula/index"
	"mula/internal/strictyaml"
)

// An Amendment is what is to change in a plan from a position on. The exported fields with names in
// YAML are those of an amend.yaml; one that no file was read for is as good.
type Amendment struct {
	// length of the plan from now on; nil: as before, or what Stages add up to
	Samples *int64 `yaml:"samples" count:"suffix"`
	Tokens  *int64 `yaml:"tokens" count:"suffix"` // the same in tokens, as in a [Config]
	// new sources, and new shards of old ones; Weight must not be set
	Sources []SourceConfig    `yaml:"sources"`
	Weights map[string]Number `yaml:"weights"` // of one stage that follows At, as in a StageConfig
	// what follows At. Without Stages and Weights the stages go on as they were planned
	Stages []StageConfig `yaml:"stages"`

	At     int64   `yaml:"-"` // the samples at the positions before stay as they are; 0 to the plan's length
	Skips  []Range `yaml:"-"` // further positions that yield no sample, from At on
	Reason string  `yaml:"-"` // why, for whoever reads the plan; may be empty

	dir  string
	file *strictyaml.File
}

// LoadAmendment reads an amend.yaml. Errors name the file and line.
func LoadAmendment(path string) (*Amendment, error) {
	file, err := strictyaml.Read(path)
	if err != nil {
		return nil, err
	}
	return newAmendment(file, realDir(filepath.Dir(path)))
}

// Warnings returns remarks about the file, such as old names of fields, with file and line.
func (a *Amendment) Warnings() []string { return a.file.Warnings() }

// ParseAmendment reads the text of an amend.yaml. name stands for the file in messages; shards are
// relative to dir.
func ParseAmendment(data []byte, name, dir string) (*Amendment, error) {
	file, err := strictyaml.Parse(data, name)
	if err != nil {
		return nil, err
	}
	return newAmendment(file, dir)
}

func newAmendment(file *strictyaml.File, dir string) (*Amendment, error) {
	if file.Empty() {
		return nil, file.Errorf("$", "the file is empty")
	}
	a := &Amendment{dir: dir, file: file}
	if err := file.Decode(a); err != nil {
		return nil, err
	}
	return a, nil
}

// Amend makes a plan that is another one up to a position, and from there on what the amendment
// says. It names the other as its parent. The samples before the position are the same, to the bit;
// nothing that a source has given is given again before its epoch ends, also where the source has
// got new shards: these are mixed with what the epoch has left.
//
// The shards of the parent are compared with it as [Open] does; new ones are hashed as by [Seal],
// and the last of their windows are held out, as many as the parent's share asks for. Epoch limits
// of the parent stay, unless the amendment has an entry for the source that says another; they
// count from the plan's beginning.
func Amend(ctx context.Context, parent *Plan, a *Amendment, opts SealOptions) (*Plan, error) {
	l := openLedger()
	defer l.close()
	d, err := amended(ctx, parent, a, l)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if err := d.hashFiles(ctx, l, opts.Progress); err != nil {
		return nil, err
	}
	for i, s := range parent.Sources {
		for k, was := range s.Shards {
			if is := d.Sources[i].Shards[k]; is.Bin != was.Bin || is.Index != was.Index {
				return nil, d.changed(i, k, "its files have SHA-256 %.16s… and %.16s…, had %.16s… and %.16s…", is.Bin,
					is.Index, was.Bin, was.Index)
			}
		}
	}
	if err := d.noteChecks(); err != nil {
		return nil, err
	}
	return d.Plan, d.seal()
}

// SurveyAmendment is the first part of [Amend], as [Survey] is of [Seal]: every check, and what the
// plan would be.
func SurveyAmendment(ctx context.Context, parent *Plan, a *Amendment) (*Summary, error) {
	l := openLedger()
	defer l.close()
	d, err := amended(ctx, parent, a, l)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Summary(), nil
}

// amended gives the amended plan, without hashes of new shards and check values, and its open
// shards.
func amended(ctx context.Context, parent *Plan, a *Amendment, l *ledger) (_ *Data, err error) {
	if err := a.validate(parent); err != nil {
		return nil, err
	}
	p := &Plan{Seed: parent.Seed, SequenceLength: parent.SequenceLength, HeldOut: parent.HeldOut,
		Parents: append(slices.Clone(parent.Parents), Parent{parent.fingerprint, a.At, a.Reason})}
	if len(p.Parents) > maxParents {
		return nil, fmt.Errorf("the plan has been amended %d times, as often as can be: seal a new one",
			len(parent.Parents))
	}
	list := shardList{dir: a.dir, listed: map[string]string{}, links: realPaths{}, planned: map[string]string{}}
	for i, s := range parent.Sources {
		s := Source{Name: s.Name, MaxEpochs: s.MaxEpochs, Validation: s.Validation, Shards: slices.Clone(s.Shards),
			Growth: slices.Clone(s.Growth)}
		for k := range s.Shards {
			if s.Shards[k].Path, err = absolutePath(parent.ShardPath(i, k)); err != nil {
				return nil, err
			}
			list.planned[list.links.of(s.Shards[k].Path)] = s.Name
		}
		p.Sources = append(p.Sources, s)
	}
	// entry of the amendment about each source, from 1; 0 for none
	entries := make([]int, len(p.Sources), len(p.Sources)+len(a.Sources))
	for i, e := range a.Sources {
		at := slices.IndexFunc(p.Sources, func(s Source) bool { return s.Name == e.Name })
		if at < 0 {
			at = len(p.Sources)
			p.Sources, entries = append(p.Sources, Source{Name: e.Name}), append(entries, 0)
		}
		entries[at] = i + 1
		s := &p.Sources[at]
		if e.MaxEpochs.IsSet() {
			s.MaxEpochs = e.MaxEpochs.String()
		}
		for j, pattern := range e.Shards {
			found, err := list.find(e.Name, pattern)
			if err != nil {
				return nil, a.file.Errorf(fmt.Sprintf("$.sources[%d].shards[%d]", i, j), "%w", err)
			}
			s.Shards = append(s.Shards, found...)
		}
	}
	d, err := newData(ctx, p, l)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if err := d.compareParent(ctx, parent); err != nil {
		return nil, err
	}
	d.describeShards()
	if p.Tokenizer, err = d.tokenizer(); err != nil {
		return nil, err
	}
	if was := parent.Tokenizer; was != nil { // its shards may have lost their manifests since
		if p.Tokenizer != nil && *p.Tokenizer != *was {
			return nil, fmt.Errorf("the new shards have tokenizer %.12s… (%d ids, end of document %d), the plan has "+
				"%.12s… (%d ids, end of document %d): tokenize them again",
				p.Tokenizer.SHA256, p.Tokenizer.Vocabulary, p.Tokenizer.EOD, was.SHA256, was.Vocabulary, was.EOD)
		}
		p.Tokenizer = was
	}
	before := parent.drawn(a.At)
	var held Number
	if p.HeldOut != "" {
		if held, err = ParseNumber(p.HeldOut); err != nil {
			return nil, fmt.Errorf("the plan's share of validation: %w", err)
		}
	}
	where := func(source int) string { // in the file
		if entries[source] == 0 {
			return "$"
		}
		return fmt.Sprintf("$.sources[%d]", entries[source]-1)
	}
	limits := make([]Number, len(p.Sources))
	for i := range p.Sources {
		s := &p.Sources[i]
		old, drawn := 0, int64(0)
		if i < len(parent.Sources) {
			old, drawn = len(parent.Sources[i].Shards), before[i]
		}
		if err := s.checkShards(); err != nil {
			return nil, a.file.Errorf(where(i), "source %q: %w", s.Name, err)
		}
		if err := s.grow(old, drawn, p.SequenceLength, held); err != nil {
			return nil, a.file.Errorf(where(i), "source %q: %w", s.Name, err)
		}
		if s.MaxEpochs != "" {
			if limits[i], err = ParseNumber(s.MaxEpochs); err != nil {
				return nil, a.file.Errorf(where(i), "max_epochs of %q: %w", s.Name, err)
			}
		}
	}
	if err := p.resumeStages(parent, a); err != nil {
		return nil, err
	}
	var length int64
	for _, st := range p.Stages {
		length += st.Samples
	}
	if err := p.addSkips(parent, a, length); err != nil {
		return nil, err
	}
	if err := p.compile(); err != nil {
		return nil, a.file.Errorf("$", "%w", err)
	}
	for i := len(parent.Sources); i < len(p.Sources); i++ {
		if p.totals[i] == 0 {
			return nil, a.file.Errorf(where(i),
				"the plan draws nothing from source %q: give it a weight, in weights or in a stage", p.Sources[i].Name)
		}
	}
	if source, err := p.checkEpochs(limits); err != nil {
		var e *EpochsError
		if errors.As(err, &e) && (e.Fits < a.At || e.Fits == a.At && (a.Weights != nil || len(a.Stages) > 0)) {
			e.Fits = 0 // no amendment from At on makes the plan so short
			err = fmt.Errorf("%w; what is drawn before position %d stays, and counts", err, a.At)
		}
		return nil, a.file.Errorf(where(source), "%w", err)
	}
	return d, nil
}

// length is the length of the plan that the amendment asks for, nil if it does not.
func (a *Amendment) length(parent *Plan) *int64 {
	return length(a.Samples, a.Tokens, parent.SequenceLength)
}

// validate checks what does not need the shards.
func (a *Amendment) validate(parent *Plan) error {
	if !parent.Windowed() {
		return fmt.Errorf("the plan has order %q, and only plans of mula's native order can be amended: seal "+
			"another plan with `mula blend`", parent.OrderVersion())
	}
	if a.At < 0 || a.At > parent.length {
		return fmt.Errorf("position %d: the plan can be amended from position 0 to position %d, its end", a.At,
			parent.length)
	}
	if err := validateNewReason(a.Reason); err != nil {
		return err
	}
	if err := checkTokens(a.file, a.Samples, a.Tokens); err != nil {
		return err
	}
	samples := a.length(parent)
	if samples == nil && len(a.Sources) == 0 && a.Weights == nil && len(a.Stages) == 0 && len(a.Skips) == 0 {
		return a.file.Errorf("$", "nothing to amend; give samples, sources, weights or stages, or skip positions "+
			"with --skip FROM:TO")
	}
	if samples != nil && (*samples < 1 || *samples < a.At || *samples > maxLength) {
		field, text := lengthText(*samples, a.Tokens)
		return a.file.Errorf("$."+field,
			"%s: it is the length of the whole plan, and must be at least %d samples and at most 2^60", text, max(1,
				a.At))
	}
	if a.Weights != nil && len(a.Stages) > 0 {
		return a.file.Errorf("$.weights", "both weights and stages say what follows: leave one of them out")
	}
	var known []string
	for _, s := range parent.Sources {
		known = append(known, s.Name)
	}
	given := map[string]bool{}
	for i, s := range a.Sources {
		path := fmt.Sprintf("$.sources[%d]", i)
		if err := validateName(s.Name); err != nil {
			return a.file.Errorf(path, "source %d: %w", i+1, err)
		}
		if given[s.Name] {
			return a.file.Errorf(path+".name", "two entries are about source %q", s.Name)
		}
		given[s.Name] = true
		old := slices.Contains(known, s.Name)
		switch {
		case s.Weight.IsSet():
			return a.file.Errorf(path+".weight",
				"source %q has a weight; in an amendment, give the weights of all sources in `weights` or in stages", s.Name)
		case len(s.Shards) == 0 && !old:
			return a.file.Errorf(path, "source %q has no shards%s", s.Name, strictyaml.DidYouMean(s.Name, known))
		case len(s.Shards) == 0 && !s.MaxEpochs.IsSet():
			return a.file.Errorf(path, "nothing new is said of source %q: give shards or max_epochs", s.Name)
		case s.MaxEpochs.IsSet() && s.MaxEpochs.sign() == 0:
			return a.file.Errorf(path+".max_epochs",
				"max_epochs of %q is zero; to draw no more of it, leave it out of the weights", s.Name)
		}
		if !old {
			known = append(known, s.Name)
		}
	}
	checkWeights := func(path string, weights map[string]Number) error {
		if len(weights) == 0 {
			return a.file.Errorf(path, "no source has a weight")
		}
		for _, name := range slices.Sorted(maps.Keys(weights)) {
			at := path + ".'" + name + "'"
			if !slices.Contains(known, name) {
				return a.file.Errorf(at, "a weight for %q, which is not a source%s", name,
					strictyaml.DidYouMean(name, known))
			}
			if weights[name].sign() == 0 {
				return a.file.Errorf(at, "the weight of %q is missing or zero; leave the source out and it rests", name)
			}
		}
		return nil
	}
	if a.Weights != nil {
		if err := checkWeights("$.weights", a.Weights); err != nil {
			return err
		}
	}
	for j, st := range a.Stages {
		if err := st.check(a.file, j, len(a.Stages)); err != nil {
			return err
		}
		if err := checkWeights(fmt.Sprintf("$.stages[%d].weights", j), st.Weights); err != nil {
			return err
		}
	}
	for i, r := range a.Skips {
		if r.From < 0 || r.To <= r.From {
			return fmt.Errorf("skip %d: [%d, %d) is not a range of positions: from is the first skipped position, "+
				"to the first position after the range", i+1, r.From, r.To)
		}
		if r.From < a.At {
			return fmt.Errorf("skip %d: [%d, %d) begins before position %d, from which on the plan is amended: "+
				"positions before it stay as they are", i+1, r.From, r.To, a.At)
		}
	}
	return nil
}

// compareParent compares the shards that the parent has with it, and some of their tokens.
func (d *Data) compareParent(ctx context.Context, parent *Plan) error {
	was := &Data{Plan: parent, shelf: d.shelf} // sources and shards that both have, have the same numbers
	for i, s := range parent.Sources {
		was.facts = append(was.facts, d.facts[i][:len(s.Shards)])
		for k, sh := range s.Shards {
			if f := &d.facts[i][k]; f.bin == "" { // no manifest, and read when the parent was sealed
				f.bin, f.index = sh.Bin, sh.Index
			}
		}
	}
	return was.verify(ctx, false)
}

// drawn gives how many samples each source has before a position.
func (p *Plan) drawn(position int64) []int64 {
	st := &p.schedule[sort.Search(len(p.schedule)-1, func(j int) bool { return p.schedule[j+1].start > position })]
	counts := st.tree.Counts(position - st.start)
	for i := range counts {
		counts[i] += st.base[i]
	}
	return counts
}

// grow counts the windows of the source's new shards, those from number `old` on, and holds the
// share of them out. drawn is the number of the source's samples that are drawn without them.
func (s *Source) grow(old int, drawn int64, sequenceLength int, held Number) error {
	if old == len(s.Shards) {
		return nil
	}
	var windows, out int64
	for _, sh := range s.Shards[old:] {
		windows += index.ShardWindows(sequenceLength, sh.Tokens)
	}
	if held.IsSet() {
		out, _ = held.ceilTimes(windows) // at most windows, as the share is below 1
	}
	switch {
	case windows == 0:
		return fmt.Errorf("no new shard has the %d tokens of a window: give it more text", sequenceLength+1)
	case windows == out:
		return fmt.Errorf("all %d windows of the new shards are held out for validation: give it more text", windows)
	}
	s.Validation += out
	if old == 0 {
		return nil
	}
	if n := len(s.Growth); n > 0 && s.Growth[n-1].Sample > drawn {
		return fmt.Errorf("it grows already at its sample %d, which comes after the position of this amendment "+
			"(sample %d): amend at a later position, or amend the plan before that growth",
			s.Growth[n-1].Sample, drawn)
	}
	s.Growth = append(s.Growth, Growth{Sample: drawn, Shards: len(s.Shards) - old, Validation: out})
	return nil
}

// resumeStages makes the stages: the parent's up to the position of the amendment, and what
// follows.
func (p *Plan) resumeStages(parent *Plan, a *Amendment) error {
	fresh := len(p.Sources) - len(parent.Sources)
	for _, st := range parent.Stages {
		st.Weights = append(slices.Clone(st.Weights), make([]uint64, fresh)...)
		if st.Written == nil {
			st.Written = make([]string, len(parent.Sources))
		}
		st.Written = append(slices.Clone(st.Written), make([]string, fresh)...)
		p.Stages = append(p.Stages, st)
	}
	length, given := parent.length, a.length(parent)
	if given != nil {
		length = *given
	}
	if a.Weights == nil && len(a.Stages) == 0 {
		if fresh > 0 {
			return a.file.Errorf("$.sources",
				"source %q is new: say in weights or stages how much of it there is to be from position %d on",
				p.Sources[len(parent.Sources)].Name, a.At)
		}
		if grown := length - parent.length; grown > 0 {
			p.Stages[len(p.Stages)-1].Samples += grown
		} else {
			p.cutStages(length)
		}
		return nil
	}
	p.cutStages(a.At)
	stages := a.Stages
	if a.Weights != nil {
		stages = []StageConfig{{Samples: StageLength{Rest: true}, Weights: a.Weights}}
	}
	end, err := p.addStages(a.file, stages, a.At, length, nil)
	if err == nil && given != nil && end != length {
		field, text := lengthText(length, a.Tokens)
		err = a.file.Errorf("$."+field,
			"%s, but position %d and the stages add up to %d: leave %s out, or make the last stage \"samples: rest\"",
			text, a.At, end, field)
	}
	return err
}

// cutStages leaves the positions before one.
func (p *Plan) cutStages(position int64) {
	for j := range p.Stages {
		if st := &p.Stages[j]; st.Samples >= position {
			st.Samples = position
			if p.Stages = p.Stages[:j+1]; position == 0 {
				p.Stages = p.Stages[:j]
			}
			return
		}
		position -= p.Stages[j].Samples
	}
}

// addSkips gives the plan the parent's skips, as far as it goes, and the amendment's.
func (p *Plan) addSkips(parent *Plan, a *Amendment, length int64) error {
	all := Config{Skips: slices.Clone(a.Skips), file: a.file}
	for _, r := range parent.Skips {
		if r.To = min(r.To, length); r.From < r.To {
			all.Skips = append(all.Skips, r)
		}
	}
	if err := p.resolveSkips(&all, length); err != nil {
		return err
	}
	if a.length(parent) == nil && len(a.Sources) == 0 && a.Weights == nil && len(a.Stages) == 0 &&
		slices.Equal(p.Skips, parent.Skips) {
		return errors.New("the plan already skips all of these positions")
	}
	return nil
}
