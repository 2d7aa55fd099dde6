package blend

import (
	"errors"
	"fmt"
	"iter"
	"math/big"
	"sort"
	"strings"
	"unicode/utf8"

	"mula/index"
	"mula/index/packing"
	"mula/shards"
)

// OrderVersion is the version of the native order of plans that amend no other, and AmendedVersion
// that of plans which do: it has the same arithmetic where no source has grown.
const (
	OrderVersion   = 1
	AmendedVersion = 2
)

// Limits of a plan. They keep every product within 128 bits and every sum within 64.
const (
	maxLength         = 1 << 60 // samples
	maxTokens         = 1 << 60 // of a source
	maxSequenceLength = 1 << 28
	maxNameLength     = 255 // bytes of a source's name
)

var one = big.NewRat(1, 1)

// A Plan fixes the order of all samples of a run. [Seal] and [ReadPlan] make plans; they are not to
// be changed afterwards, and are safe for concurrent use.
type Plan struct {
	Seed           uint64
	SequenceLength int        // L; a sample has L+1 tokens
	Tokenizer      *Tokenizer // what made the ids; nil if no shard's manifest says
	Sources        []Source
	Stages         []Stage
	Skips          []Range // in order, apart from each other
	Checks         []Check // what stands at some positions, to notice an implementation or shards that have changed
	HeldOut        string  // the share of the windows that is held out for validation, as written; "" for none

	// Megatron is set in a plan whose order is read from an index cache of Megatron-LM. Only an
	// open plan, the one of a [Data], then knows what stands where. Its sources are the datasets,
	// of one shard each; what is called a window elsewhere is a sample of the dataset, and its
	// place in the shard, where its tokens lie in several stretches, is that of the first. There
	// are no epochs: Megatron shuffles the documents of all epochs together. Sample.Epoch is -1.
	Megatron *Megatron

	// Packing is set in a plan whose samples are packed documents, not windows.
	Packing *Packing

	// Parents are the plans that this one comes from by [Amend], the oldest first; none for a plan
	// that amends no other.
	Parents []Parent

	fingerprint string
	base        string     // directory that paths of shards are relative to
	schedule    []schedule // one a stage
	totals      []int64    // samples of each source in the whole plan
	length      int64
	order       *cacheOrder      // the open cache of a plan with Megatron set
	packings    []*packing.Index // by source, of an open plan with Packing set
}

// A Tokenizer is what the plan knows of the tokenizer that made its shards.
type Tokenizer struct {
	SHA256     string `json:"sha256"`     // of tokenizer.json, in hexadecimal
	Vocabulary int    `json:"vocabulary"` // highest id + 1; 0 if it is not known
	EOD        int64  `json:"eod"`        // the id that ends documents, -1 if there is none
}

// A Source is a named list of shards.
type Source struct {
	Name       string
	MaxEpochs  string // the limit as written; "" for none
	Validation int64  // windows held out: the last ones, of the first shards and of what each growth has added
	Shards     []Shard
	Packed     *PackedSource // nil unless the plan is packed
	Growth     []Growth      // what amendments have added to the shards, in order; nil for nothing

	windows  *index.Windows
	order    *index.Order
	training int64
	firsts   []int64 // number of the first token of each shard among those of all, if the source is packed
	parts    []part  // of a source that has grown, else nil
}

// A Shard is what the plan knows of one shard. The plan's fingerprint covers all but the path.
type Shard struct {
	Path      string `json:"-"` // prefix of the files
	DType     string `json:"dtype"`
	Tokens    int64  `json:"tokens"`
	Documents int64  `json:"documents"`
	Bin       string `json:"bin"` // SHA-256 of the .bin file, in hexadecimal
	Index     string `json:"idx"` // SHA-256 of the .idx file
}

// A Stage is a stretch of the plan with its own weights.
type Stage struct {
	Samples int64    `json:"samples"`
	Weights []uint64 `json:"weights"` // by source, in lowest terms; 0 for a source that rests
	Written []string `json:"-"`       // the weights as they were written, "" for a source that rests
}

// A Check is what stood at a position when the plan was sealed.
type Check struct {
	Position int64  `json:"position"`
	Source   int    `json:"source"`
	Window   int64  `json:"window"`
	Hash     string `json:"sample"` // SampleHash of the window's tokens, in hexadecimal
}

// A Sample is a window at a place in the order.
type Sample struct {
	Position int64 // in the order; -1 for a held-out window
	Source   int   // index in Plan.Sources
	Epoch    int64 // of the source, from 0; -1 for a held-out window
	Window   int64 // among all windows of the source
	Shard    int   // index in Source.Shards
	Token    int64 // of the shard, at which the window begins
	Skipped  bool  // the plan leaves the position out
}

// schedule is the arithmetic of one stage.
type schedule struct {
	start int64 // first position
	tree  *Tree
	base  []int64 // samples of each source in the stages before
}

// Windows is the number of windows of the source, held-out ones included.
func (s *Source) Windows() int64 { return s.training + s.Validation }

// Training is the number of windows that an epoch has: all but the held-out ones. Where the source
// has grown, earlier epochs have fewer.
func (s *Source) Training() int64 { return s.training }

// Windowed says whether samples are windows: L+1 consecutive tokens of a shard, whose places follow
// from the plan alone. Those of packed plans, and of plans whose order is read, are in files of
// their own.
func (p *Plan) Windowed() bool { return p.Megatron == nil && p.Packing == nil }

// compile checks the parts of a plan against each other and prepares the arithmetic. Nothing is
// allocated beyond a few words for what the plan lists, so that a hostile plan cannot ask for more
// memory than its file had bytes, times a constant.
func (p *Plan) compile() error {
	if p.SequenceLength < 1 || p.SequenceLength > maxSequenceLength {
		return fmt.Errorf("sequence length %d is not between 1 and %d", p.SequenceLength, maxSequenceLength)
	}
	if t := p.Tokenizer; t != nil && (t.Vocabulary < 0 || !isHex(t.SHA256, 64) || t.EOD < -1) {
		return errors.New("invalid `tokenizer`")
	}
	if len(p.Sources) == 0 {
		return errors.New("the plan has no sources")
	}
	names := make(map[string]bool, len(p.Sources))
	for i := range p.Sources {
		s := &p.Sources[i]
		if err := validateName(s.Name); err != nil {
			return fmt.Errorf("source %d: %w", i+1, err)
		}
		if names[s.Name] {
			return fmt.Errorf("two sources are called %q", s.Name)
		}
		names[s.Name] = true
		if err := s.checkShards(); err != nil {
			return fmt.Errorf("source %q: %w", s.Name, err)
		}
		var err error
		switch {
		case p.Packing != nil:
			err = s.compilePacked(p.Seed, p.SequenceLength)
		case p.Megatron == nil:
			err = s.compile(p.Seed, p.SequenceLength)
		}
		if err != nil {
			return fmt.Errorf("source %q: %w", s.Name, err)
		}
	}
	if p.Packing != nil {
		if err := p.checkPadding(); err != nil {
			return err
		}
	}
	if err := p.checkParents(); err != nil {
		return err
	}
	if err := p.compileStages(); err != nil {
		return err
	}
	end := int64(-1)
	for i, r := range p.Skips {
		if r.From < 0 || r.To <= r.From || r.From <= end || r.To > p.length {
			return fmt.Errorf("skip %d: [%d, %d) is empty, out of order or beyond the plan's %d positions", i+1, r.From,
				r.To, p.length)
		}
		end = r.To // the next must not even touch, so that one set of positions has one form
	}
	return nil
}

// compileStages prepares what shares the positions out among the sources.
func (p *Plan) compileStages() error {
	if p.Megatron != nil {
		return p.compileMegatron()
	}
	if len(p.Stages) == 0 {
		return errors.New("the plan has no stages")
	}
	p.totals = make([]int64, len(p.Sources))
	p.schedule = nil
	p.length = 0
	for j, st := range p.Stages {
		if st.Samples < 1 || st.Samples > maxLength-p.length {
			return fmt.Errorf("stage %d: %d samples; a plan has at most 2^60", j+1, st.Samples)
		}
		if len(st.Weights) != len(p.Sources) || st.Written != nil && len(st.Written) != len(p.Sources) {
			return fmt.Errorf("stage %d: %d weights for %d sources", j+1, len(st.Weights), len(p.Sources))
		}
		tree, err := NewTree(st.Weights)
		if err != nil {
			return fmt.Errorf("stage %d: %w", j+1, err)
		}
		base := append([]int64(nil), p.totals...)
		p.schedule = append(p.schedule, schedule{p.length, tree, base})
		for s, n := range tree.Counts(st.Samples) {
			p.totals[s] += n
		}
		p.length += st.Samples
	}
	return nil
}

// checkShards checks what the plan knows of the source's shards.
func (s *Source) checkShards() error {
	if len(s.Shards) == 0 {
		return errors.New("no shards")
	}
	var total int64
	for i, sh := range s.Shards {
		if sh.DType != shards.UInt16.String() && sh.DType != shards.Int32.String() {
			return fmt.Errorf("shard %d has elements of type %.20q; known are uint16 and int32", i+1, sh.DType)
		}
		if sh.Tokens < 0 || sh.Tokens > maxTokens-total || sh.Documents < 0 {
			return fmt.Errorf("shard %d: %d tokens, %d documents", i+1, sh.Tokens, sh.Documents)
		}
		if !isHex(sh.Bin, 64) || !isHex(sh.Index, 64) {
			return fmt.Errorf("shard %d has no SHA-256 of its files", i+1)
		}
		total += sh.Tokens
	}
	return nil
}

// compile prepares the order within the source, whose shards have been checked.
func (s *Source) compile(seed uint64, sequenceLength int) error {
	counts := make([]int64, len(s.Shards))
	for i, sh := range s.Shards {
		counts[i] = sh.Tokens
	}
	var err error
	if s.windows, err = index.NewWindows(sequenceLength, counts); err != nil {
		return err
	}
	if s.Validation < 0 || s.Validation > s.windows.Count() {
		return fmt.Errorf("%d of %d windows are held out", s.Validation, s.windows.Count())
	}
	if s.training = s.windows.Count() - s.Validation; s.training == 0 {
		if s.windows.Count() == 0 {
			return fmt.Errorf("no shard has the %d tokens of a window: give it more text, or shorten sequence_length",
				sequenceLength+1)
		}
		return fmt.Errorf("all %d windows are held out for validation: give it more text, or lower validation",
			s.windows.Count())
	}
	if len(s.Growth) > 0 {
		return s.compileGrowth(seed)
	}
	s.order = index.NewOrder(seed, s.Name, s.Training())
	return nil
}

// Length is the number of positions, skipped ones included.
func (p *Plan) Length() int64 { return p.length }

// ShardPath is the prefix of a shard's files.
func (p *Plan) ShardPath(source, shard int) string {
	return p.path(p.Sources[source].Shards[shard].Path)
}

// Locate computes what stands at a position, in [0, Length). Of a packed plan that is not open it
// knows neither shard nor token: both are −1. It fails, too, where index files that the order is
// read from cannot be read.
func (p *Plan) Locate(position int64) (Sample, error) {
	if position < 0 || position >= p.length {
		return Sample{}, fmt.Errorf("position %d is not in the plan, which has positions 0 to %d", position, p.length-1)
	}
	if p.Megatron != nil {
		if p.order == nil {
			return Sample{}, errors.New("the order is in the files of a Megatron cache: open the plan to read it")
		}
		return p.order.locate(position)
	}
	st := &p.schedule[sort.Search(len(p.schedule)-1, func(j int) bool { return p.schedule[j+1].start > position })]
	source, k := st.tree.At(position - st.start)
	s := Sample{Position: position, Source: source, Skipped: p.skipped(position)}
	src := &p.Sources[source]
	epoch, window := src.order.At(st.base[source] + k)
	s.Epoch, s.Window = epoch, src.window(window)
	if p.Packing != nil {
		err := p.beginPacked(&s)
		return s, err
	}
	s.Shard, s.Token = src.windows.Locate(s.Window)
	return s, nil
}

// skipped says whether a position is in one of the skips.
func (p *Plan) skipped(position int64) bool {
	i := sort.Search(len(p.Skips), func(i int) bool { return p.Skips[i].To > position })
	return i < len(p.Skips) && p.Skips[i].From <= position
}

// Position is the inverse of [Plan.Locate]: the position at which a source's window is drawn in an
// epoch. ok is false if the plan ends before, or if the window is held out. With [Plan.Megatron]
// set there is no formula for it and the whole order is looked through, in the open plan of a
// [Data]; the epoch is then -1.
func (p *Plan) Position(source int, epoch, window int64) (position int64, ok bool) {
	s := &p.Sources[source]
	if p.Megatron != nil {
		if p.order == nil || epoch != -1 || window < 0 || window >= s.Training() {
			return 0, false
		}
		return p.order.position(source, window)
	}
	training, ok := s.trainingWindow(window)
	if !ok || epoch < 0 || epoch > s.order.EpochOf(p.totals[source]) {
		return 0, false
	}
	if _, length := s.order.Span(epoch); training >= length {
		return 0, false
	}
	return p.position(source, s.order.Inverse(epoch, training))
}

// position is the position of a source's sample number k.
func (p *Plan) position(source int, k int64) (int64, bool) {
	if k < 0 || k >= p.totals[source] {
		return 0, false
	}
	// The last stage before which the source has had at most k samples is the one that has it.
	j := sort.Search(len(p.schedule)-1, func(j int) bool { return p.schedule[j+1].base[source] > k })
	st := &p.schedule[j]
	y, ok := st.tree.Inverse(source, k-st.base[source])
	return st.start + y, ok
}

// Validation lists the held-out windows of a source in their stored order. They have no position
// and no epoch.
func (p *Plan) Validation(source int) iter.Seq[Sample] {
	return func(yield func(Sample) bool) {
		s := &p.Sources[source]
		if p.order != nil {
			p.order.validation(source)(yield)
			return
		}
		if p.Megatron != nil {
			return // nothing is known of them before the plan is open
		}
		if p.Packing != nil {
			p.packedValidation(source)(yield)
			return
		}
		for _, held := range s.heldOut() {
			for w := held.From; w < held.To; w++ {
				shard, token := s.windows.Locate(w)
				if !yield(Sample{Position: -1, Source: source, Epoch: -1, Window: w, Shard: shard, Token: token}) {
					return
				}
			}
		}
	}
}

// checkPositions are the positions that a plan of this length is checked at: the first 8, and 8
// spread over the order, in order and without repetition.
func checkPositions(length int64) []int64 {
	var list []int64
	for i := range min(8, length) {
		list = append(list, i)
	}
	for j := range int64(8) {
		// floor((2j+1)·length/16), with length/16 split so that the product stays small
		if at := (2*j+1)*(length/16) + (2*j+1)*(length%16)/16; at > list[len(list)-1] {
			list = append(list, at)
		}
	}
	return list
}

// verifyPositions checks that the check values are about the positions that they should be about.
func (p *Plan) verifyPositions() error {
	positions := checkPositions(p.length)
	if len(p.Checks) != len(positions) {
		return fmt.Errorf("the plan has %d check values, want %d", len(p.Checks), len(positions))
	}
	for i, c := range p.Checks {
		if c.Position != positions[i] || !isHex(c.Hash, 32) {
			return fmt.Errorf("check value %d is about position %d, want %d with the hash of a sample", i+1, c.Position,
				positions[i])
		}
	}
	return nil
}

// verifyPairs compares the check values with what the order gives.
func (p *Plan) verifyPairs() error {
	if err := p.verifyPositions(); err != nil {
		return err
	}
	for _, c := range p.Checks {
		s, err := p.Locate(c.Position)
		if err != nil {
			return err
		}
		if s.Source != c.Source || s.Window != c.Window {
			return fmt.Errorf("position %d holds window %d of source %d, but the plan was sealed with window %d of "+
				"source %d there: "+
				"it was made by an implementation of the order that differs, or was changed by hand; seal it again",
				c.Position, s.Window, s.Source, c.Window, c.Source)
		}
	}
	return nil
}

// validateName refuses names that a message, a table or the canonical form of a plan could not hold
// as they are.
func validateName(name string) error {
	switch {
	case name == "":
		return errors.New("it has no name")
	case len(name) > maxNameLength:
		return fmt.Errorf("the name %.20q… has more than %d bytes", name, maxNameLength)
	case !utf8.ValidString(name):
		return fmt.Errorf("the name %q is not UTF-8", name)
	}
	if !isPlainText(name) {
		return fmt.Errorf("the name %q has a quotation mark, backslash or control character in it", name)
	}
	return nil
}

// isPlainText says whether JSON holds a text without escapes: it is UTF-8 without quotation marks,
// backslashes, and control characters.
func isPlainText(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool {
		return r < 0x20 || r == 0x7f || strings.ContainsRune("\"\\\u2028\u2029", r)
	})
}

func isHex(s string, digits int) bool {
	if len(s) != digits {
		return false
	}
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
