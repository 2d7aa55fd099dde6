package job

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"mula/internal/objects"
	"mula/shards"
	"mula/shards/formats"
	"mula/tokenize"
	"mula/tokenize/documents"
)

// A description is the contents of job.json: the settings that determine the bytes of the output,
// and how the work is divided, which does not affect the output.
type description struct {
	Format int `json:"format"` // 1 or 2
	// ID distinguishes jobs in the same folder of a store. It is in all files of a job, because a
	// process that was stopped may write a file of an older job at any time. Local jobs have none.
	ID       string   `json:"id,omitempty"`
	Settings settings `json:"settings"`
	Inputs   []input  `json:"inputs"`
	// Names are the names of the inputs in the ids of documents without ids. Format 1 has no names
	// and uses the base names of the files.
	Names []string `json:"names,omitempty"`

	// Private means that an input can be read only once, such as standard input. The job belongs to
	// one process and cannot be resumed.
	Private bool `json:"private"`

	// Units are the pieces of work that processes claim: one piece of a large input, or several
	// consecutive small inputs.
	Units []unit `json:"units"`
	// SegmentBytes is the weight at which a segment is full. All processes must use the same value:
	// a process continues the segments of a killed process.
	SegmentBytes int64 `json:"segment_bytes"`

	// Replaces lists the files of the shards that an earlier job wrote here. At the end, the files
	// that this job does not overwrite are removed.
	Replaces []string `json:"replaces,omitempty"`
}

// descriptionFormat is the format of the jobs that this program starts. It resumes jobs of format 1
// too, with their original rules: the ids of documents without ids contain the base names of the
// files, and byte order marks are not removed.
const descriptionFormat = 2

// name returns the name of an input in the ids of documents without ids.
func (d *description) name(input int) string {
	if d.Format == 1 {
		return filepath.Base(d.Inputs[input].Path)
	}
	return d.Names[input]
}

// settings are the options that determine the bytes of the output.
type settings struct {
	Tokenizer    shards.TokenizerInfo `json:"tokenizer"`
	Layout       shards.Layout        `json:"layout"`
	TextField    string               `json:"text_field"`
	IDField      string               `json:"id_field"`
	InputFormat  string               `json:"input_format"`
	TextUnit     string               `json:"text_unit"`
	MaxLine      int                  `json:"max_line"`
	ShardTokens  int64                `json:"shard_tokens"` // 0: one shard
	Shuffle      bool                 `json:"shuffle"`
	ShuffleSeed  uint64               `json:"shuffle_seed"`
	Sample       float64              `json:"sample"` // 0: all
	MaxDocuments int64                `json:"max_documents"`
}

// An input is the state of an input at the start of the job.
type input struct {
	Path     string `json:"path"`     // a URL has no credentials
	Size     int64  `json:"size"`     // in bytes, -1 if it is not a regular file
	Modified int64  `json:"modified"` // nanoseconds since 1970; 0 if unknown
	// Version is the ETag or generation of an object.
	Version string `json:"version,omitempty"`
}

// same reports whether an input is unchanged. The time of an object with a version is not compared.
func (in input) same(other input) bool {
	if in.Version != "" && in.Version == other.Version {
		other.Modified = in.Modified
	}
	return in == other
}

// A unit is a run of parts that are read one after the other.
type unit []part

// A part is a piece of an input ([documents.Piece]), with the index of the input.
type part struct {
	Input      int
	Start, End int64
}

// MarshalJSON writes the three numbers as an array.
func (p part) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "[%d,%d,%d]", p.Input, p.Start, p.End), nil
}

// UnmarshalJSON reads them.
func (p *part) UnmarshalJSON(text []byte) error {
	_, err := fmt.Sscanf(string(text), "[%d,%d,%d]", &p.Input, &p.Start, &p.End)
	return err
}

// Limits of the division into units.
const (
	maxUnitBytes = 256 << 20 // on disk
	minUnitBytes = 8 << 20
	manyUnits    = 256 // small inputs are cut into about this number of units
	maxParts     = 1024
	// approximately: each unit has one or two files in the folder, and needs memory
	maxUnits = 1 << 16

	segmentBytes = 64 << 20
)

// describe returns the description for the options, without the units.
func describe(ctx context.Context, o *Options) (*description, error) {
	d := &description{Format: descriptionFormat, Settings: settings{
		Tokenizer: shards.TokenizerInfo{
			SHA256: o.Tokenizer.SHA256(), VocabSize: o.Tokenizer.VocabSize(), EOD: -1,
			ClassTable: tokenize.ClassTable(), Specials: o.Specials.String(),
			AddSpecialTokens: o.AddSpecialTokens, TruncationAndPaddingIgnored: o.Tokenizer.IgnoredTruncationOrPadding(),
		},
		Layout: o.Layout, TextField: o.Read.Text, IDField: o.Read.ID, InputFormat: o.Read.Format.String(),
		TextUnit: o.Read.Unit.String(), MaxLine: o.Read.MaxLine,
		ShardTokens: o.ShardTokens, Shuffle: o.Shuffle, ShuffleSeed: o.ShuffleSeed, Sample: o.Sample,
		MaxDocuments: o.MaxDocuments,
	}}
	if o.AppendEOD {
		d.Settings.Tokenizer.EOD = int64(o.EOD)
	}
	if d.Names = o.Names; d.Names == nil {
		d.Names = documents.BaseNames(o.Inputs)
	}
	d.Inputs = make([]input, len(o.Inputs))
	var group errgroup.Group // a store needs milliseconds for each
	group.SetLimit(32)
	for i, path := range o.Inputs {
		group.Go(func() (err error) {
			d.Inputs[i], err = look(ctx, path)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for _, in := range d.Inputs {
		d.Private = d.Private || in.Size < 0
	}
	return d, nil
}

// look returns the current state of an input.
func look(ctx context.Context, path string) (input, error) {
	in := input{Path: objects.Clean(path), Size: -1}
	if path == "-" {
		return in, nil
	}
	if objects.IsURL(path) {
		info, err := objects.Stat(ctx, path)
		if err != nil {
			return in, fmt.Errorf("tokenizing: %w", err)
		}
		in.Size, in.Version = info.Size, info.Version
		if !info.Modified.IsZero() {
			in.Modified = info.Modified.UnixNano()
		}
		return in, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return in, fmt.Errorf("tokenizing: %w", err)
	}
	if info.Mode().IsRegular() {
		in.Size, in.Modified = info.Size(), info.ModTime().UnixNano()
	}
	return in, nil
}

// size returns the size of all inputs, -1 if unknown.
func (d *description) size() (size int64) {
	for _, in := range d.Inputs {
		if in.Size < 0 {
			return -1
		}
		size += in.Size
	}
	return size
}

// cut divides the inputs into units. target is the size of a unit on disk; 0 derives it from the
// size of the inputs.
func (d *description) cut(ctx context.Context, o *Options, target int64) error {
	if target <= 0 {
		target = min(max(d.size()/manyUnits, minUnitBytes), maxUnitBytes)
	}
	target = max(target, d.size()/maxUnits)
	pieces, err := documents.Pieces(ctx, o.Inputs, o.Read, target)
	if err != nil {
		return err
	}
	number := make(map[string]int, len(d.Inputs))
	for i, path := range o.Inputs {
		number[path] = i
	}
	d.Units = nil
	var open int64 // bytes of the last unit
	for i, p := range pieces {
		n := number[p.File]
		whole := (i == 0 || pieces[i-1].File != p.File) && (i+1 == len(pieces) || pieces[i+1].File != p.File)
		bytes := target // target, for a piece of a divided input
		if whole {
			bytes = max(d.Inputs[n].Size, 0)
		}
		last := len(d.Units) - 1
		if last < 0 || open+bytes > target || len(d.Units[last]) == maxParts {
			d.Units, open = append(d.Units, nil), 0
			last++
		}
		d.Units[last] = append(d.Units[last], part{n, p.Start, p.End})
		open += bytes
	}
	return nil
}

// width returns the number of bytes of an id in the spool.
func (d *description) width() int {
	return shards.SmallestDType(d.Settings.Tokenizer.VocabSize, shards.UInt16, shards.UInt32).Size()
}

// difference describes the first difference between the settings and inputs of d and other, apart
// from sizes and times; "" if they agree.
func (d *description) difference(other *description) string {
	a, b := d.Settings, other.Settings
	if other.Format == 1 && a.IDField == "" && b.IDField == "id" { // "id" was the default of the command
		a.IDField = "id"
	}
	for _, s := range []struct {
		what         string
		here, before any
	}{
		{"the tokenizer's SHA-256", a.Tokenizer.SHA256, b.Tokenizer.SHA256},
		{"the size of the vocabulary", a.Tokenizer.VocabSize, b.Tokenizer.VocabSize},
		{"the end-of-document id (-1: none)", a.Tokenizer.EOD, b.Tokenizer.EOD},
		{"the table of character classes", a.Tokenizer.ClassTable, b.Tokenizer.ClassTable},
		{"the treatment of special tokens in a text", a.Tokenizer.Specials, b.Tokenizer.Specials},
		{"whether special tokens are added", a.Tokenizer.AddSpecialTokens, b.Tokenizer.AddSpecialTokens},
		{"the layout", formats.Name(a.Layout), formats.Name(b.Layout)},
		{"the text field", a.TextField, b.TextField},
		{"the id field", a.IDField, b.IDField},
		{"the format of the inputs", a.InputFormat, b.InputFormat},
		{"the unit of text files", a.TextUnit, b.TextUnit},
		{"the longest line", a.MaxLine, b.MaxLine},
		{"the tokens of a shard (0: one shard)", a.ShardTokens, b.ShardTokens},
		{"shuffling", a.Shuffle, b.Shuffle},
		{"the seed of shuffling", a.ShuffleSeed, b.ShuffleSeed},
		{"the fraction (0: all)", a.Sample, b.Sample},
		{"the maximum number of documents (0: all)", a.MaxDocuments, b.MaxDocuments},
		{"the number of inputs", len(d.Inputs), len(other.Inputs)},
	} {
		if s.here != s.before {
			return fmt.Sprintf("%s is %v, but was %v", s.what, s.here, s.before)
		}
	}
	for i, in := range d.Inputs {
		if in.Path != other.Inputs[i].Path {
			return fmt.Sprintf("input %d is %s, but was %s", i+1, in.Path, other.Inputs[i].Path)
		}
		if other.Format > 1 && d.Names[i] != other.Names[i] {
			return fmt.Sprintf("documents of %s without ids would have ids %s:LINE, but had %s:LINE, because the "+
				"file or its folder was named differently", in.Path, d.Names[i], other.Names[i])
		}
	}
	return ""
}

// changed returns the indices of the inputs whose size or time has changed.
func (d *description) changed(now *description) (inputs []int) {
	for i, in := range d.Inputs {
		if !now.Inputs[i].same(in) {
			inputs = append(inputs, i)
		}
	}
	return inputs
}

// valid checks that the numbers in a job.json are usable.
func (d *description) valid() error {
	next := 0
	for _, u := range d.Units {
		if len(u) == 0 || len(u) > maxParts {
			return fmt.Errorf("job.json has a unit of %d parts", len(u))
		}
		for _, p := range u {
			if p.Input < next || p.Input >= len(d.Inputs) || p.Start < 0 {
				return fmt.Errorf("job.json has an invalid part of input %d", p.Input)
			}
			next = p.Input
		}
	}
	if d.Format > 1 && len(d.Names) != len(d.Inputs) {
		return fmt.Errorf("job.json has %d inputs and %d names of inputs", len(d.Inputs), len(d.Names))
	}
	if formats.Of(d.Settings.Layout) == nil {
		return fmt.Errorf("job.json has the unknown layout %q", d.Settings.Layout)
	}
	if d.SegmentBytes <= 0 {
		return fmt.Errorf("job.json has segments of %d bytes", d.SegmentBytes)
	}
	return nil
}

// names lists the inputs for messages.
func (d *description) names() string {
	var names []string
	for i, in := range d.Inputs {
		if i == 10 {
			names = append(names, fmt.Sprintf("and %d more", len(d.Inputs)-i))
			break
		}
		if in.Path == "-" {
			in.Path = "standard input"
		}
		names = append(names, in.Path)
	}
	return strings.Join(names, ", ")
}
