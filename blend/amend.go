package blend

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sort"

	"mula/internal/strictyaml"
	"mula/shards/facts"
)

// An Amendment is a change of a plan from position At on. The fields with YAML names are the fields
// of amend.yaml. An Amendment built in code is equally valid; its shard paths are relative to the
// working directory.
type Amendment struct {
	// length of the amended plan; nil: the parent's length, or the sum of Stages
	Samples *int64 `yaml:"samples" count:"suffix"`
	Tokens  *int64 `yaml:"tokens" count:"suffix"` // the same in tokens, as in a [Config]
	// new sources, and new shards of the parent's sources; Weight must not be set
	Sources []SourceConfig    `yaml:"sources"`
	Weights map[string]Number `yaml:"weights"` // of one stage from At on, as in a StageConfig
	// the stages from At on; without Stages and Weights, the parent's stages continue
	Stages []StageConfig `yaml:"stages"`

	At     int64   `yaml:"-"` // the samples before At do not change; 0 to the parent's length
	Skips  []Range `yaml:"-"` // further positions, at or after At, that yield no sample
	Reason string  `yaml:"-"` // why the plan is amended, for readers of the plan; may be empty

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

// Warnings returns warnings about the file, such as deprecated field names, with file and line.
func (a *Amendment) Warnings() []string { return a.file.Warnings() }

// ParseAmendment parses the text of an amend.yaml. Messages use name as the file's name. Shard
// paths are relative to dir.
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

// Amend builds a plan that equals parent before position a.At and follows the amendment from there
// on. The new plan names parent as its parent. The samples before the position are bit-identical.
// No window is drawn again before its epoch ends, even if its source gets new shards: the new
// windows are mixed with the rest of the epoch.
//
// The shards of parent are verified as [Open] does. New shards are hashed as [Seal] does, and the
// last of their windows are held out: the validation fraction of parent. The epoch limits of parent
// remain, unless an entry of the amendment changes them. They count from position 0.
//
// If parent is packed, the documents of the new shards of each source are packed by themselves, to
// index files in opts.Packings. The new plan also reads the index files of parent.
func Amend(ctx context.Context, parent *Plan, a *Amendment, opts SealOptions) (*Plan, error) {
	l := facts.Open()
	defer l.Close()
	d, err := amended(ctx, parent, a, l, &opts)
	if err != nil {
		return nil, err
	}
	defer d.closeBuilt()
	if err := d.hashFiles(ctx, l, nil, &opts); err != nil {
		return nil, err
	}
	for i, s := range parent.Sources {
		for k, was := range s.Shards {
			if is := d.Sources[i].Shards[k]; is.Bin != was.Bin || is.Index != was.Index {
				return nil, d.changed(i, k, "SHA-256 of its files is %.16s… and %.16s…, was %.16s… and %.16s…", is.Bin,
					is.Index, was.Bin, was.Index)
			}
		}
	}
	if err := d.noteChecks(); err != nil {
		return nil, err
	}
	return d.Plan, d.seal()
}

// SurveyAmendment runs every check of [Amend] without building the plan, and returns a summary of
// the plan that Amend would build.
func SurveyAmendment(ctx context.Context, parent *Plan, a *Amendment) (*Summary, error) {
	l := facts.Open()
	defer l.Close()
	d, err := amended(ctx, parent, a, l, nil)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Summary(), nil
}

// amended returns the amended plan without check values, and its open shards. If opts is nil, it
// writes nothing. The new shards have hashes only if the plan is packed and opts is not nil.
func amended(ctx context.Context, parent *Plan, a *Amendment, l *facts.Cache, opts *SealOptions) (_ *Data, err error) {
	if err := a.validate(parent); err != nil {
		return nil, err
	}
	p := &Plan{Seed: parent.Seed, SequenceLength: parent.SequenceLength, HeldOut: parent.HeldOut,
		Parents: append(slices.Clone(parent.Parents), Parent{parent.fingerprint, a.At, a.Reason})}
	kind := parent.order.(amendable) // checked by validate
	p.order = kind.amend(p)
	if len(p.Parents) > maxParents {
		return nil, fmt.Errorf("the plan has been amended %d times, which is the limit; build a new plan with "+
			"`mula blend`", len(parent.Parents))
	}
	list := shardList{dir: a.dir, listed: map[string]string{}, links: realPaths{}, planned: map[string]string{}}
	for i, s := range parent.Sources {
		s := Source{Name: s.Name, MaxEpochs: s.MaxEpochs, Validation: s.Validation, Shards: slices.Clone(s.Shards),
			Growth: slices.Clone(s.Growth), Packed: slices.Clone(s.Packed)}
		for k := range s.Shards {
			sh := &s.Shards[k]
			if sh.Path, err = absolutePath(parent.ShardPath(i, k)); err != nil {
				return nil, err
			}
			sh.sampled = "" // the new plan never had the sample
			if sh.sums != "" {
				if sh.sums, err = absolutePath(parent.sidecar(i, k)); err != nil {
					return nil, err
				}
			}
			list.planned[list.links.of(s.Shards[k].Path)] = s.Name
		}
		p.Sources = append(p.Sources, s)
	}
	// index+1 of the amendment's entry for each source; 0: no entry
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
			found, err := list.find(ctx, e.Name, pattern)
			if err != nil {
				return nil, a.file.Errorf(fmt.Sprintf("$.sources[%d].shards[%d]", i, j), "%w", err)
			}
			s.Shards = append(s.Shards, found...)
		}
	}
	d := newData(p, false)
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if err = d.survey(ctx, l); err != nil {
		return nil, err
	}
	if err := d.compareParent(ctx, parent); err != nil {
		return nil, err
	}
	d.describeShards()
	if p.Tokenizer, err = d.tokenizer(); err != nil {
		return nil, err
	}
	if was := parent.Tokenizer; was != nil { // its shards may have lost their manifests
		if p.Tokenizer != nil && *p.Tokenizer != *was {
			return nil, fmt.Errorf("the new shards have tokenizer %.12s… (%d ids, end of document %d), the plan has "+
				"%.12s… (%d ids, end of document %d); tokenize them again",
				p.Tokenizer.SHA256, p.Tokenizer.Vocabulary, p.Tokenizer.EOD, was.SHA256, was.Vocabulary, was.EOD)
		}
		p.Tokenizer = was
	}
	before := parent.drawn(a.At)
	var held Number
	if p.HeldOut != "" {
		if held, err = ParseNumber(p.HeldOut); err != nil {
			return nil, fmt.Errorf("the plan's validation fraction: %w", err)
		}
	}
	where := func(source int) string { // in the file
		if entries[source] == 0 {
			return "$"
		}
		return fmt.Sprintf("$.sources[%d]", entries[source]-1)
	}
	first := make([]int, len(p.Sources)) // new shard
	for i, s := range parent.Sources {
		first[i] = len(s.Shards)
	}
	var packer *packer
	if p.Traits().Padded {
		if packer, err = d.newPacker(ctx, l, opts, a.dir, first); err != nil {
			return nil, err
		}
	}
	limits := make([]Number, len(p.Sources))
	for i := range p.Sources {
		s := &p.Sources[i]
		drawn := int64(0)
		if i < len(parent.Sources) {
			drawn = before[i]
		}
		if err := s.checkShards(); err != nil {
			return nil, a.file.Errorf(where(i), "source %q: %w", s.Name, err)
		}
		if first[i] < len(s.Shards) {
			out, err := kind.extend(ctx, packer, s, i, first[i], held)
			if err == nil {
				err = s.grow(first[i], drawn, out)
			}
			if err != nil {
				return nil, a.file.Errorf(where(i), "source %q: %w", s.Name, err)
			}
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
				"the plan draws nothing from source %q; add a weight in weights or in a stage", p.Sources[i].Name)
		}
	}
	if source, err := p.checkEpochs(limits); err != nil {
		var e *EpochsError
		if errors.As(err, &e) && (e.Fits < a.At || e.Fits == a.At && (a.Weights != nil || len(a.Stages) > 0)) {
			e.Fits = 0 // no amendment from At on makes the plan short enough
			err = fmt.Errorf("%w; samples drawn before position %d cannot change, and count", err, a.At)
		}
		return nil, a.file.Errorf(where(source), "%w", err)
	}
	if opts != nil {
		opened, err := p.order.open(ctx, p, nil)
		if err != nil {
			return nil, err
		}
		p.order = opened
	}
	return d, nil
}

// length returns the plan's length that the amendment sets, nil if it sets none.
func (a *Amendment) length(parent *Plan) *int64 {
	return length(a.Samples, a.Tokens, parent.SequenceLength)
}

// validate checks everything that does not need the shards.
func (a *Amendment) validate(parent *Plan) error {
	if !parent.Traits().Amendable {
		return fmt.Errorf("the plan has order %q, which cannot be amended, because it is read from index files; "+
			"build another plan with `mula blend`", parent.OrderVersion())
	}
	if a.At < 0 || a.At > parent.length {
		return fmt.Errorf("position %d: must be between 0 and the plan's length, %d", a.At, parent.length)
	}
	if err := validateNewReason(a.Reason); err != nil {
		return err
	}
	if err := checkTokens(a.file, a.Samples, a.Tokens); err != nil {
		return err
	}
	samples := a.length(parent)
	if samples == nil && len(a.Sources) == 0 && a.Weights == nil && len(a.Stages) == 0 && len(a.Skips) == 0 {
		return a.file.Errorf("$", "nothing to amend; set samples, sources, weights or stages, or skip positions "+
			"with --skip FROM:TO")
	}
	if samples != nil && (*samples < 1 || *samples < a.At || *samples > maxLength) {
		field, text := lengthText(*samples, a.Tokens)
		return a.file.Errorf("$."+field,
			"%s: the length of the amended plan, from position 0, must be at least %d samples and at most 2^60", text,
			max(1, a.At))
	}
	if a.Weights != nil && len(a.Stages) > 0 {
		return a.file.Errorf("$.weights", "weights and stages are both set; remove one")
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
			return a.file.Errorf(path+".name", "source %q has two entries", s.Name)
		}
		given[s.Name] = true
		old := slices.Contains(known, s.Name)
		switch {
		case s.Weight.IsSet():
			return a.file.Errorf(path+".weight",
				"source %q has a weight; in an amendment, set the weights of all sources in `weights` or in stages",
				s.Name)
		case len(s.Shards) == 0 && !old:
			return a.file.Errorf(path, "source %q has no shards%s", s.Name, strictyaml.DidYouMean(s.Name, known))
		case len(s.Shards) == 0 && !s.MaxEpochs.IsSet():
			return a.file.Errorf(path, "the entry of source %q changes nothing; add shards or max_epochs", s.Name)
		case s.MaxEpochs.IsSet() && s.MaxEpochs.sign() == 0:
			return a.file.Errorf(path+".max_epochs",
				"max_epochs of %q is zero; to pause the source, omit it from the weights", s.Name)
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
				return a.file.Errorf(at, "the weight of %q is missing or zero; to pause a source, omit it from the "+
					"weights",
					name)
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
			return fmt.Errorf("skip %d: [%d, %d) starts before position %d, where the amendment starts; earlier "+
				"positions cannot change", i+1, r.From, r.To, a.At)
		}
	}
	return nil
}

// compareParent verifies the parent's shards, and some of their tokens.
func (d *Data) compareParent(ctx context.Context, parent *Plan) error {
	opened := *parent
	var err error
	if opened.order, err = parent.order.open(ctx, &opened, nil); err != nil {
		return err
	}
	defer opened.order.close()
	was := &Data{Plan: &opened, pool: d.pool, firsts: d.firsts} // sources and shards of the parent keep their indices
	for i, s := range parent.Sources {
		was.facts = append(was.facts, d.facts[i][:len(s.Shards)])
		for k, sh := range s.Shards {
			if f := &d.facts[i][k]; f.Bin == "" { // no manifest; hashed when the parent was built
				f.Bin, f.Index = sh.Bin, sh.Index
			}
		}
	}
	return was.verify(ctx, false)
}

// drawn returns the number of samples that each source has before a position.
func (p *Plan) drawn(position int64) []int64 {
	st := &p.schedule[sort.Search(len(p.schedule)-1, func(j int) bool { return p.schedule[j+1].start > position })]
	counts := st.tree.Counts(position - st.start)
	for i := range counts {
		counts[i] += st.base[i]
	}
	return counts
}

// grow adds the source's new shards, which start at index first and have `out` validation windows.
// drawn is the number of the source's samples before the new shards.
func (s *Source) grow(first int, drawn, out int64) error {
	s.Validation += out
	if first == 0 {
		return nil
	}
	if n := len(s.Growth); n > 0 && s.Growth[n-1].Sample > drawn {
		return fmt.Errorf("the source already grows at its sample %d, after the position of this amendment (sample "+
			"%d); amend at a later position, or amend the plan before that growth",
			s.Growth[n-1].Sample, drawn)
	}
	s.Growth = append(s.Growth, Growth{Sample: drawn, Shards: len(s.Shards) - first, Validation: out})
	return nil
}

// resumeStages sets the stages: the parent's up to the amendment's position, then the amendment's.
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
				"source %q is new; set its weight from position %d on, in weights or stages",
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
			"%s, but position %d and the stages add up to %d; remove %s, or set \"samples: rest\" in the last stage",
			text, a.At, end, field)
	}
	return err
}

// cutStages removes the positions from position on.
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

// addSkips adds the parent's skips before the plan's end, and the amendment's.
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
