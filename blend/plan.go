package blend

import (
	"errors"
	"fmt"
	"iter"
	"math/big"
	"path/filepath"
	"sort"
	"strings"
	"unicode/utf8"

	"mula/blend/mixture"
	"mula/index"
	"mula/index/packing"
	"mula/shards"
)

// OrderVersion is the version of the native order of plans that do not amend another plan.
// AmendedVersion is the version of plans that do. Both give the same samples if no source has
// grown.
const (
	OrderVersion   = 1
	AmendedVersion = 2
)

// The orders of windows with a locality: of plans that do not amend another plan, and of plans that
// do.
const (
	BlocksOrder        = "blocks 1"
	BlocksAmendedOrder = "blocks 2"
)

// Limits of a plan. They keep every product within 128 bits and every sum within 64.
const (
	maxLength         = 1 << 60 // samples
	maxTokens         = 1 << 60 // of a source
	maxSequenceLength = 1 << 28
	maxNameLength     = 255 // bytes of a source's name
)

var one = big.NewRat(1, 1)

// A Plan fixes the order of all samples of a run. [Seal] and [ReadPlan] return plans. A plan must
// not be changed, and is safe for concurrent use.
type Plan struct {
	Seed           uint64
	SequenceLength int        // L; a sample has L+1 tokens
	Tokenizer      *Tokenizer // of the shards; nil if no manifest names one
	Sources        []Source
	Stages         []Stage
	Skips          []Range // in ascending order, neither overlapping nor adjacent
	Checks         []Check // samples at some positions, to detect changed shards or another implementation
	HeldOut        string  // fraction of the windows that is held out for validation, as written; "" for none

	// Parents are the plans that were amended to this plan by [Amend], oldest first. It is empty if
	// the plan does not amend another.
	Parents []Parent

	foreign     int64 // see Foreign
	fingerprint string
	provisional string     // the fingerprint before the plan was completed; "" if it never was provisional
	file        string     // that the plan was read from; "" for a new plan
	base        string     // directory that paths of shards are relative to
	schedule    []schedule // by stage
	totals      []int64    // by source: samples in the whole plan
	length      int64
	order       order
}

// A Tokenizer identifies the tokenizer of a plan's shards.
type Tokenizer struct {
	SHA256     string `json:"sha256"`     // of tokenizer.json, in hexadecimal
	Vocabulary int    `json:"vocabulary"` // highest id + 1; 0 if unknown
	EOD        int64  `json:"eod"`        // end-of-document id, -1 without one
}

// TokenizerHash returns the SHA-256 of the tokenizer.json of the plan's shards, in hexadecimal, or
// "" if the plan does not have it.
func (p *Plan) TokenizerHash() string {
	if p.Tokenizer == nil {
		return ""
	}
	return p.Tokenizer.SHA256
}

// A Source is a named list of shards.
type Source struct {
	Name       string
	MaxEpochs  string // the limit as written; "" for none
	Validation int64  // number of validation windows: the last of the original shards and of each growth
	Shards     []Shard
	Growth     []Growth     // shards that amendments added, in order; nil if none
	Packed     []PackedPart // of the original shards, then of each growth; nil unless the plan is packed

	windows  *index.Windows
	order    *index.Order
	training int64
	firsts   []int64 // by shard, if the source is packed: number of its first token in its part
	parts    []part  // nil unless the source has grown
}

// A Shard describes one shard of a plan. The plan's fingerprint covers all fields except the path.
type Shard struct {
	Path      string       `json:"-"` // prefix of the files
	DType     shards.DType `json:"dtype"`
	Tokens    int64        `json:"tokens"`
	Documents int64        `json:"documents"`
	Bin       string       `json:"bin,omitempty"` // SHA-256 of the .bin file, in hexadecimal
	Index     string       `json:"idx,omitempty"` // SHA-256 of the .idx file

	// Sample replaces the hashes in a provisional plan: see [sample.Sample]. A packed plan also has
	// Index.
	Sample string `json:"sample,omitempty"`

	sampled string // the Sample that the plan had before it was completed
	blocks  string // [sample.Sample.Blocks], if Sample is not empty
	sums    string // prefix of the manifest and the sums, if they are not beside the shard
}

// A Stage is a range of positions with its own weights.
type Stage struct {
	Samples int64    `json:"samples"`
	Weights []uint64 `json:"weights"` // by source, in lowest terms; 0 if the stage does not draw from the source
	Written []string `json:"-"`       // the weights as written, "" for weight 0
}

// A Range is the half-open range [From, To).
type Range struct {
	From int64 `yaml:"from" json:"from"`
	To   int64 `yaml:"to" json:"to"`
}

// A Check is the sample at a position when the plan was built.
type Check struct {
	Position int64  `json:"position"`
	Source   int    `json:"source"`
	Window   int64  `json:"window"`
	Hash     string `json:"sample"` // SampleHash of the window's tokens, in hexadecimal
}

// A Parent is a plan that was amended to this plan by [Amend].
type Parent struct {
	Fingerprint string `json:"fingerprint"` // of the amended plan
	At          int64  `json:"at"`          // samples before this position are the samples of the amended plan
	Reason      string `json:"reason"`      // why the plan was amended; may be empty
}

// A Growth is the list of shards that an amendment appended to a source.
type Growth struct {
	// number of the source's first sample that may use the new windows
	Sample     int64 `json:"sample"`
	Shards     int   `json:"shards"`             // number of new shards
	Validation int64 `json:"validation_windows"` // number of validation windows, the last of the new windows
}

// A PackedPart describes the packing of the original shards of a source, or of the shards that one
// growth added.
type PackedPart struct {
	File   string `json:"file"` // name of the index file
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
	packing.Statistics

	directory string // of the index file
}

func (k *PackedPart) path() string { return filepath.Join(k.directory, k.File) }

// A part is the windows that a source got from the original plan or from one growth. Its first
// `count` windows are training windows; the others are validation windows.
type part struct {
	shard    int   // number of its first shard
	window   int64 // number of its first window among all windows of the source
	training int64 // training number of that window
	count    int64
}

// schedule has the precomputed values of one stage.
type schedule struct {
	start int64 // first position
	tree  *mixture.Tree
	base  []int64 // by source: samples in earlier stages
}

// A Sample is a window at a position.
type Sample struct {
	Position int64 // in the plan; -1 for a validation window
	Source   int   // index in Plan.Sources
	Epoch    int64 // of the source, from 0; -1 for a validation window
	Window   int64 // number among all windows of the source
	Shard    int   // index in Source.Shards
	Token    int64 // first token of the window in the shard
	Skipped  bool  // the plan skips the position
}

// Foreign returns the number of shards that had no manifest when [Seal] or [Amend] built the plan.
// It is 0 for a plan from a file.
func (p *Plan) Foreign() int64 { return p.foreign }

// Windows returns the number of windows of the source, including validation windows.
func (s *Source) Windows() int64 { return s.training + s.Validation }

// Training returns the number of training windows, which is the length of an epoch. If the source
// has grown, earlier epochs are shorter.
func (s *Source) Training() int64 { return s.training }

// SampleTokens returns the number of tokens of a sample: L+1, the inputs and the target of the
// last.
func (p *Plan) SampleTokens() int { return p.SequenceLength + 1 }

// TokenBytes returns the number of bytes of a token in a stream of the plan: 2 if every shard is
// uint16, else 4.
func (p *Plan) TokenBytes() int {
	for _, s := range p.Sources {
		for _, sh := range s.Shards {
			if sh.DType != shards.UInt16 {
				return 4
			}
		}
	}
	return 2
}

// compile validates the plan and computes its derived fields. It allocates only a few words for
// each entry of the plan, so that the memory for a hostile plan is at most a multiple of its file
// size.
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
		if err := p.order.compileSource(s); err != nil {
			return fmt.Errorf("source %q: %w", s.Name, err)
		}
	}
	if err := p.checkParents(); err != nil {
		return err
	}
	if err := p.order.compile(); err != nil {
		return err
	}
	end := int64(-1)
	for i, r := range p.Skips {
		if r.From < 0 || r.To <= r.From || r.From <= end || r.To > p.length {
			return fmt.Errorf("skip %d: [%d, %d) is empty, out of order or beyond the plan's %d positions", i+1, r.From,
				r.To, p.length)
		}
		end = r.To // adjacent ranges are refused, so that a set of positions has one representation
	}
	return nil
}

// checkShards validates the descriptions of the source's shards.
func (s *Source) checkShards() error {
	if len(s.Shards) == 0 {
		return errors.New("no shards")
	}
	var total int64
	for i, sh := range s.Shards {
		if sh.DType != shards.UInt16 && sh.DType != shards.Int32 {
			return fmt.Errorf("shard %d has elements of type %.20q; supported are uint16 and int32", i+1, sh.DType)
		}
		if sh.Tokens < 0 || sh.Tokens > maxTokens-total || sh.Documents < 0 {
			return fmt.Errorf("shard %d has invalid counts: %d tokens, %d documents", i+1, sh.Tokens, sh.Documents)
		}
		if !sh.sealed() {
			return fmt.Errorf("shard %d has no valid SHA-256 of its files", i+1)
		}
		total += sh.Tokens
	}
	return nil
}

// Length returns the number of positions, including skipped positions.
func (p *Plan) Length() int64 { return p.length }

// ShardPath returns the prefix of a shard's files.
func (p *Plan) ShardPath(source, shard int) string {
	return p.path(p.Sources[source].Shards[shard].Path)
}

// Locate computes the sample at a position in [0, Length). In a packed plan that is not open, Shard
// and Token are −1. Locate fails if the index files of the order cannot be read.
func (p *Plan) Locate(position int64) (Sample, error) {
	if position < 0 || position >= p.length {
		return Sample{}, fmt.Errorf("position %d is not in the plan, which has positions 0 to %d", position, p.length-1)
	}
	return p.order.locate(position)
}

// skipped reports whether a position is in one of the skips.
func (p *Plan) skipped(position int64) bool {
	i := sort.Search(len(p.Skips), func(i int) bool { return p.Skips[i].To > position })
	return i < len(p.Skips) && p.Skips[i].From <= position
}

// Position is the inverse of [Plan.Locate]: it returns the position that draws a source's window in
// an epoch. ok is false if the plan ends before that position, or if the window is a validation
// window. If the order is not [Traits.Scheduled], the plan must be open, epoch must be -1, and
// Position searches the whole order.
func (p *Plan) Position(source int, epoch, window int64) (position int64, ok bool) {
	return p.order.position(source, epoch, window)
}

// position returns the position of a source's sample number k.
func (p *Plan) position(source int, k int64) (int64, bool) {
	if k < 0 || k >= p.totals[source] {
		return 0, false
	}
	// The last stage before which the source has at most k samples has sample k.
	j := sort.Search(len(p.schedule)-1, func(j int) bool { return p.schedule[j+1].base[source] > k })
	st := &p.schedule[j]
	y, ok := st.tree.Inverse(source, k-st.base[source])
	return st.start + y, ok
}

// Validation lists the validation windows of a source in stored order. They have no position and no
// epoch. If the order is not [Traits.Scheduled], they are known only of an open plan.
func (p *Plan) Validation(source int) iter.Seq[Sample] { return p.order.validation(source) }

// checkPositions lists the positions of the check values for a plan of this length: the first 8,
// and 8 that are evenly spread, in ascending order and without repetition.
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

// verifyPositions verifies that the check values have the right positions.
func (p *Plan) verifyPositions() error {
	positions := checkPositions(p.length)
	if len(p.Checks) != len(positions) {
		return fmt.Errorf("the plan has %d check values, want %d", len(p.Checks), len(positions))
	}
	for i, c := range p.Checks {
		if c.Position != positions[i] || !isHex(c.Hash, 32) {
			return fmt.Errorf("check value %d has position %d or an invalid hash; want position %d", i+1, c.Position,
				positions[i])
		}
	}
	return nil
}

// verifyPairs compares the check values with the samples that the order yields.
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
			return fmt.Errorf("position %d has window %d of source %d, but the plan was built with window %d of "+
				"source %d: the plan was changed by hand, or built with another implementation of the order; "+
				"build a new plan",
				c.Position, s.Window, s.Source, c.Window, c.Source)
		}
	}
	return nil
}

// validateName refuses names that a message, a table or the canonical form of a plan cannot hold
// without escapes.
func validateName(name string) error {
	switch {
	case name == "":
		return errors.New("the name is empty")
	case len(name) > maxNameLength:
		return fmt.Errorf("the name %.20q… has more than %d bytes", name, maxNameLength)
	case !utf8.ValidString(name):
		return fmt.Errorf("the name %q is not UTF-8", name)
	}
	if !isPlainText(name) {
		return fmt.Errorf("the name %q contains a quotation mark, backslash or control character", name)
	}
	return nil
}

// isPlainText reports whether JSON represents the text without escapes: it is UTF-8 without
// quotation marks, backslashes and control characters.
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
