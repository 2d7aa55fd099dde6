// Package audit reads shards of any layout in full, once, and says what is wrong or odd about them:
// bytes that are not the manifest's, ids that the tokenizer does not have or that were read as
// another type, documents without their separator or with one inside, empty, huge, repetitive and
// repeated documents, files that occur twice, tokens in no window. It also measures the lengths of
// documents, source by source, and draws them.
package audit

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"mula/internal/quantity"
	"mula/shards"
	"mula/shards/formats"
)

// HugeDocument is the number of tokens from which a document is reported unless [Options] say
// otherwise: such texts are mostly logs, dumps or whole archives.
const HugeDocument = 1 << 20

// maxWorkers bounds Options.Workers.
const maxWorkers = 4096

// Options are the options of [Run].
type Options struct {
	// ids at or above it are errors; 0: what the manifest says, and where that is missing nothing
	// is said
	Vocabulary     int64
	EOD            *int64         // the id that should end each document, -1: none does; nil: what the manifest says
	SequenceLength int            // L: tokens that no window of L+1 reaches are counted; 0: they are not
	Huge           int64          // tokens from which a document is huge; 0: HugeDocument
	DType          string         // element type of shards that do not say it, by its name in numpy; "": by Vocabulary
	Workers        int            // shards that are read at a time, up to 4096; 0: as many as there are processors
	Progress       func(Progress) // called from one goroutine at a time; may be nil
}

// A Progress says how far a run is.
type Progress struct {
	Path  string // of the shard that was read last
	Bytes int64  // read so far, of all shards
	Total int64  // in them
}

// An Input is a shard to look at.
type Input struct {
	Source string // shards of the same name are counted together
	Path   string
	Open   func() (*shards.Shard, error) // of a shard in Megatron's layout; nil: Path is opened, whatever its layout
	// what is wrong with a shard without a manifest by its hash; may be nil, and gives "" if
	// nothing is
	Check func(binSHA256 string) string
}

// A Report is what [Run] found.
type Report struct {
	SequenceLength int       `json:"sequence_length"` // for which windows were counted, 0 if they were not
	Shards         []Shard   `json:"shards"`          // in the order of the inputs
	Sources        []Source  `json:"sources"`         // in the order of their first shards
	Copies         Copies    `json:"copies"`          // documents that are in the shards more than once
	Findings       []Finding `json:"findings"`        // shard by shard, in the order of the inputs
}

// A Source is what the shards of one name are made of.
type Source struct {
	Name    string  `json:"source"`
	Shards  int64   `json:"shards"`
	Tail    int64   `json:"tail_tokens"`
	Lengths Lengths `json:"lengths"`
	Repeats Repeats `json:"repeats"`
}

// A Shard is what one shard is made of. Where there was an error the counts end there.
type Shard struct {
	Source         string    `json:"source"`
	Path           string    `json:"path"`
	Layout         string    `json:"layout"`
	DType          string    `json:"dtype"` // "" if that is not known
	Manifest       string    `json:"manifest_sha256"`
	Compared       bool      `json:"compared"` // there was a manifest, or a plan, to compare the files with
	Verified       bool      `json:"verified"` // and every byte is what that says
	Tokens         int64     `json:"tokens"`
	Documents      int64     `json:"documents"`
	Windows        int64     `json:"windows"`
	Tail           int64     `json:"tail_tokens"`     // at the end, in no window
	EmptyDocuments int64     `json:"empty_documents"` // without a token other than the separator
	LongDocuments  int64     `json:"long_documents"`  // of Options.Huge tokens or more
	Longest        int64     `json:"longest_document"`
	LongestNumber  int64     `json:"longest_document_number"` // -1 if there is none
	BadIDs         int64     `json:"bad_ids"`                 // beyond the vocabulary
	MaxID          uint32    `json:"max_id"`
	DistinctIDs    int64     `json:"distinct_ids"` // below 2^20
	Separator      Separator `json:"separator"`
	Repeats        Repeats   `json:"repeats"`
	Lengths        Lengths   `json:"lengths"`

	content uint64 // of the documents and their order; 0 if there is no token
}

// A Separator says how the id that should end every document is used.
type Separator struct {
	ID              int64 `json:"id"`               // by the options or the manifest; -1 if neither says it
	Documents       int64 `json:"documents"`        // with tokens
	Endings         int64 `json:"endings"`          // of them end with ID
	FirstWithout    int64 `json:"first_without"`    // the first that does not, -1
	Inside          int64 `json:"inside"`           // how often ID occurs elsewhere in documents
	InsideDocuments int64 `json:"inside_documents"` // in how many of them
	FirstInside     int64 `json:"first_inside"`     // the first, -1
	LikelyID        int64 `json:"likely_id"`        // what ends nine of ten documents, -1 if nothing does
	LikelyEndings   int64 `json:"likely_endings"`
	LikelyInside    int64 `json:"likely_inside"`
}

// Repeats counts documents in which a few tokens are repeated over and over, as OLMoE's instance
// filter finds them; that looks at windows where this looks at documents.
type Repeats struct {
	Documents int64            `json:"documents"`
	Tokens    int64            `json:"tokens"`    // of these documents
	ByPeriod  [maxPeriod]int64 `json:"by_period"` // documents by the smallest period found in them, from 1 on
	Worst     Repeat           `json:"worst"`     // the longest; with none its document is -1
}

func (r *Repeats) add(other Repeats) {
	r.Documents += other.Documents
	r.Tokens += other.Tokens
	for i, n := range other.ByPeriod {
		r.ByPeriod[i] += n
	}
}

// Failed says whether any finding is an error.
func (r *Report) Failed() bool {
	for _, f := range r.Findings {
		if f.Level == Error {
			return true
		}
	}
	return false
}

// Run reads the inputs. What is wrong with them is in the report; the error is about what kept Run
// from looking.
func Run(ctx context.Context, inputs []Input, o Options) (*Report, error) {
	if o.Workers < 0 || o.Workers > maxWorkers {
		return nil, fmt.Errorf("checking shards: %d workers: must be between 0, for the number of processors, and %d",
			o.Workers, maxWorkers)
	}
	if o.Vocabulary < 0 || o.Vocabulary > 1<<31 || o.EOD != nil && (*o.EOD < -1 || *o.EOD >= 1<<31) ||
		o.SequenceLength < 0 || o.Huge < 0 {
		return nil, errors.New("checking shards: a vocabulary, a separator, a sequence length or a length of " +
			"documents that cannot be")
	}
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	if o.Huge == 0 {
		o.Huge = HugeDocument
	}
	run := &run{o: o, all: newSample(maxSampled), progress: Progress{}}
	found := make([][]Finding, len(inputs))
	report := &Report{SequenceLength: o.SequenceLength, Shards: make([]Shard, len(inputs)), Findings: []Finding{}}
	first := firsts(inputs)
	for i := range inputs {
		if first[i] == i {
			run.progress.Total += sizeOf(inputs[i].Path)
		}
	}
	g, reading := errgroup.WithContext(ctx)
	g.SetLimit(o.Workers)
	for i := range inputs {
		if first[i] != i {
			continue
		}
		g.Go(func() (err error) {
			report.Shards[i], found[i], err = run.shard(reading, &inputs[i], i)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	content := map[uint64]string{}
	for i, in := range inputs {
		if f := first[i]; f != i {
			report.Shards[i] = report.Shards[f]
			report.Shards[i].Source, report.Shards[i].Path = in.Source, in.Path
			found[i] = []Finding{{Level: Warning, Kind: "copy", Document: -1, Byte: -1,
				Message: "it is listed twice, first as " + inputs[f].Path +
					": what is read by this list reads it twice"}}
		} else if c := report.Shards[i].content; c != 0 {
			if other, ok := content[c]; ok {
				found[i] = append(found[i], Finding{Level: Warning, Kind: "copy", Document: -1, Byte: -1,
					Message: "its tokens are those of " + other + ": the data is there twice"})
			} else {
				content[c] = in.Path
			}
		}
		for _, f := range found[i] {
			f.Source, f.Path = in.Source, in.Path
			report.Findings = append(report.Findings, f)
		}
	}
	report.Copies = run.all.copies(func(shard int) string { return inputs[shard].Path })
	report.addUp()
	return report, nil
}

// addUp makes the sources, and the findings that are about several shards.
func (r *Report) addUp() {
	place := map[string]int{}
	for i := range r.Shards {
		sh := &r.Shards[i]
		k, ok := place[sh.Source]
		if !ok {
			k = len(r.Sources)
			place[sh.Source] = k
			r.Sources = append(r.Sources, Source{Name: sh.Source, Repeats: Repeats{Worst: Repeat{Document: -1}}})
		}
		s := &r.Sources[k]
		s.Shards++
		s.Tail += sh.Tail
		s.Lengths.merge(&sh.Lengths)
		s.Repeats.add(sh.Repeats)
		if sh.Repeats.Worst.Tokens > s.Repeats.Worst.Tokens {
			s.Repeats.Worst = sh.Repeats.Worst
		}
	}
	for i := range r.Sources {
		s := &r.Sources[i]
		s.Lengths.finish()
		if s.Tail*100 > s.Lengths.Tokens {
			r.Findings = append(r.Findings, Finding{Level: Note, Kind: "tail", Source: s.Name, Path: "", Document: -1,
				Byte: -1, Message: fmt.Sprintf(
					"%s of its tokens, at the ends of shards, are in no window: fewer and longer shards lose less",
					share(s.Tail, s.Lengths.Tokens))})
		}
	}
	if c := r.Copies; c.Copies > 0 {
		about := "about "
		if c.Exact {
			about = ""
		}
		most := c.Most[0]
		r.Findings = append(r.Findings, Finding{Level: Note, Kind: "copy", Path: most.Path, Document: most.Document,
			Byte: -1, Message: fmt.Sprintf(
				"%s%s of the documents, with %s%s of the tokens, have the very tokens of another; number %d of this shard, of %s tokens, is there %s times",
				about, percent(c.Share), about, percent(c.TokenShare), most.Document, quantity.Grouped(most.Tokens),
				quantity.Grouped(most.Times))})
	}
}

// firsts gives for each input the number of the first that is the same files.
func firsts(inputs []Input) []int {
	first := make([]int, len(inputs))
	place := map[string]int{}
	for i, in := range inputs {
		l, path, err := detect(in.Path)
		if err != nil {
			path = in.Path
		}
		if whole, err := filepath.Abs(path); err == nil {
			path = whole
		}
		if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
			path = filepath.Join(dir, filepath.Base(path))
		}
		key := string(l) + ":" + path
		if k, ok := place[key]; ok {
			first[i] = k
		} else {
			first[i], place[key] = i, i
		}
	}
	return first
}

// detect tells the layout and the prefix of the shard at path. Of one prefix in two layouts it
// takes Megatron's, which has no name of its own.
func detect(path string) (shards.Layout, string, error) {
	prefix := strings.TrimSuffix(strings.TrimSuffix(path, ".idx"), ".bin")
	if _, err := os.Stat(prefix + ".idx"); err == nil {
		return shards.Megatron, prefix, nil
	}
	return formats.Detect(path)
}

// sizeOf is the size of a shard's files of ids, 0 if they are not found.
func sizeOf(path string) (bytes int64) {
	l, prefix, err := detect(path)
	if err != nil {
		return 0
	}
	names := []string{prefix + map[shards.Layout]string{shards.Megatron: ".bin", shards.Dolma: ".npy",
		shards.Datatrove: ".ds", shards.FMS: ".arrow"}[l]}
	if l == shards.MDS {
		names, _ = filepath.Glob(filepath.Join(prefix, "shard.*"))
	}
	for _, name := range names {
		if info, err := os.Stat(name); err == nil {
			bytes += info.Size()
		}
	}
	return bytes
}

// A run is what the goroutines of [Run] share.
type run struct {
	o Options

	mu       sync.Mutex // guards what follows
	progress Progress
	all      *sample
}

// read says that so many bytes of a shard were read.
func (r *run) read(path string, bytes int64) {
	if r.o.Progress == nil || bytes == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress.Path = path
	r.progress.Bytes = min(r.progress.Bytes+bytes, r.progress.Total)
	r.o.Progress(r.progress)
}

// shard looks at one shard.
func (r *run) shard(ctx context.Context, in *Input, number int) (Shard, []Finding, error) {
	sh := Shard{Source: in.Source, Path: in.Path, LongestNumber: -1,
		Separator: Separator{ID: -1, FirstWithout: -1, FirstInside: -1,
			LikelyID: -1}, Repeats: Repeats{Worst: Repeat{Document: -1}}}
	var findings []Finding
	find := func(f Finding) { findings = append(findings, f) }
	bad := func(err error) {
		for _, err := range parts(err) {
			if slices.ContainsFunc(findings, func(f Finding) bool {
				return strings.HasPrefix(err.Error(),
					f.Message)
			}) {
				continue // the reader compares a file with the manifest too
			}
			f := Finding{Level: Error, Kind: "structure", Document: -1, Byte: -1, Message: err.Error()}
			var d *shards.DamageError
			if errors.As(err, &d) {
				f.Kind, f.Byte = "hash", d.Blocks[0].First
				if len(d.Documents) > 0 {
					f.Document = d.Documents[0]
				}
			}
			find(f)
		}
	}
	local := newSample(maxSampled)
	err := func() error {
		l, prefix, err := detect(in.Path)
		if err != nil && in.Open == nil {
			bad(err)
			return nil
		}
		if in.Open != nil || l == shards.Megatron {
			open := in.Open
			if open == nil {
				open = func() (*shards.Shard, error) { return shards.Open(prefix) }
			}
			s, err := open()
			if err != nil {
				bad(err)
				return nil
			}
			defer s.Close()
			return r.megatron(ctx, in, number, s, &sh, local, find, bad)
		}
		h := formats.Hints{DType: r.o.DType, VocabSize: int(r.o.Vocabulary), EOD: -1}
		if r.o.EOD != nil {
			h.EOD = *r.o.EOD
		}
		d, err := formats.Open(in.Path, h)
		if err != nil {
			bad(err)
			return nil
		}
		defer d.Close()
		sh.Layout = formats.Name(l)
		return r.other(ctx, in, number, d, prefix, &sh, local, find, bad)
	}()
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.merge(local)
	return sh, findings, err
}

// parts are the errors that were joined to one.
func parts(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok && strings.Contains(err.Error(), "\n") {
		return joined.Unwrap()
	}
	return []error{err}
}

// settings are what the options or the manifest say of the ids.
func (r *run) settings(m *shards.Manifest, most int64, find func(Finding)) (limit, eod int64) {
	limit, eod = most, -1
	if m != nil {
		eod = m.Tokenizer.EOD
		if m.Tokenizer.VocabSize > 0 {
			limit = int64(m.Tokenizer.VocabSize)
		}
	} else {
		find(Finding{Level: Note, Kind: "hash", Document: -1, Byte: -1,
			Message: "it has no manifest, so what made it and where its documents come from is not known"})
	}
	if r.o.Vocabulary > 0 {
		limit = r.o.Vocabulary
	}
	if r.o.EOD != nil {
		if m != nil && *r.o.EOD != eod {
			find(Finding{Level: Warning, Kind: "separator", Document: -1, Byte: -1, Message: fmt.Sprintf(
				"by its manifest documents end with id %d (-1: with none); %d was given", eod, *r.o.EOD)})
		}
		eod = *r.o.EOD
	}
	return limit, eod
}

// finish takes up what is known when all is read.
func (r *run) finish(s *scan) {
	sh := s.shard
	if length := int64(r.o.SequenceLength); length > 0 {
		sh.Windows = max(0, sh.Tokens-1) / length
		sh.Tail = sh.Tokens
		if sh.Windows > 0 {
			sh.Tail -= sh.Windows*length + 1
		}
	}
	s.judge(&r.o)
}

// megatron looks at a shard in Megatron's layout, whose documents may be of any size: it is read in
// parts.
func (r *run) megatron(ctx context.Context, in *Input, number int, s *shards.Shard, sh *Shard, local *sample,
	find func(Finding), bad func(error)) error {
	sh.Layout, sh.DType, sh.Tokens, sh.Documents = "megatron", s.DType().String(), s.Tokens(), s.Documents()
	limit, eod := r.settings(s.Manifest(), math.MaxInt32+1, find)
	scan := newScan(sh, number, limit, eod, r.o.Huge, int64(s.DType().Size()), local, find)
	sh.Compared = s.Manifest() != nil || in.Check != nil
	sh.Verified = sh.Compared
	wrong := func(err error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		sh.Verified = false
		bad(err)
		return nil
	}
	if s.Manifest() != nil {
		sum, _, err := shards.HashFile(ctx, s.Prefix()+".json", nil)
		if err != nil {
			if err := wrong(err); err != nil {
				return err
			}
		}
		sh.Manifest = sum
	}
	if err := s.VerifyRest(ctx, nil); err != nil {
		if err := wrong(err); err != nil {
			return err
		}
	}
	reader := documentsOf{scan: scan, shard: s}
	sum, err := s.VerifyTokens(ctx, func(n int64) { r.read(in.Path, n) }, reader.take)
	if err == nil && reader.err == nil {
		reader.err = s.Guard(reader.finish)
	}
	if reader.err != nil {
		sh.Verified = false
		bad(reader.err)
	}
	if err != nil {
		if err := wrong(err); err != nil {
			return err
		}
	}
	if s.Manifest() == nil && in.Check != nil {
		if message := in.Check(sum); message != "" {
			sh.Verified = false
			find(Finding{Level: Error, Kind: "hash", Document: -1, Byte: -1, Message: message})
		}
	}
	r.finish(scan)
	return nil
}

// documentsOf cuts the ids of a shard into its documents.
type documentsOf struct {
	scan   *scan
	shard  *shards.Shard
	next   int64 // token
	span   shards.Span
	begun  bool     // span is the document of number scan.document
	buffer []uint32 // the last ids of the document, before those of the part that is taken
	err    error    // about .idx: nothing more is known of documents
}

// take takes the next ids.
func (d *documentsOf) take(ids []uint32) error {
	for used := 0; used < len(ids); {
		if d.err == nil && !d.begun {
			d.err = d.begin()
		}
		if d.err != nil {
			return nil // the hash is still wanted
		}
		n := min(int64(len(ids)-used), d.span.End-d.next)
		part := ids[used : used+int(n)]
		if d.next == d.span.First {
			d.scan.part(part, 0)
		} else {
			history := len(d.buffer)
			d.buffer = append(d.buffer, part...)
			d.scan.part(d.buffer, history)
			d.buffer = d.buffer[:0]
		}
		used += int(n)
		d.next += n
		if d.next == d.span.End {
			d.scan.end()
			d.begun = false
			d.buffer = d.buffer[:0]
		} else { // the part ends here
			keep := ids[max(0, used-maxPeriod, used-int(d.next-d.span.First)):used]
			d.buffer = append(d.buffer[:0], keep...)
		}
	}
	return nil
}

// begin goes to the next document with tokens, if there is one.
func (d *documentsOf) begin() error {
	for d.scan.document < d.shard.Documents() {
		span, err := d.shard.Span(d.scan.document)
		if err != nil {
			return err
		}
		if span.First != d.next {
			return fmt.Errorf("%s.idx: document %d begins with token %d, the one before ends at %d: %w",
				d.shard.Prefix(), span.Document, span.First, d.next, shards.ErrCorrupt)
		}
		if d.span = span; span.First < span.End {
			d.begun = true
			return nil
		}
		d.scan.end()
	}
	if left := d.shard.Tokens() - d.next; left > 0 {
		return fmt.Errorf("%s.idx: documents end at token %d, %d before the end: %w", d.shard.Prefix(), d.next, left,
			shards.ErrCorrupt)
	}
	return nil
}

// finish counts the empty documents at the end.
func (d *documentsOf) finish() error {
	if err := d.begin(); err != nil {
		return err
	}
	if d.begun {
		return fmt.Errorf("%s.idx: document %d has tokens behind the end: %w", d.shard.Prefix(), d.scan.document,
			shards.ErrCorrupt)
	}
	return nil
}

// other looks at a shard of another layout.
func (r *run) other(ctx context.Context, in *Input, number int, d shards.DocumentReader, prefix string, sh *Shard,
	local *sample,
	find func(Finding), bad func(error)) error {
	m := d.Manifest()
	if x, ok := d.(interface{ DType() string }); ok {
		sh.DType = x.DType()
	}
	width := map[string]int64{"uint8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "int64": 8,
		"uint64": 8}[sh.DType]
	limit, eod := r.settings(m, 1<<32, find)
	scan := newScan(sh, number, limit, eod, r.o.Huge, width, local, find)
	if m != nil {
		sh.Compared, sh.Verified = true, true
		if err := verifyFiles(ctx, prefix, m, sh, find); err != nil {
			return err
		}
	}
	read := int64(0)
	for doc, err := range d.All(ctx) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			bad(err)
			sh.Verified = false
			break
		}
		scan.part(doc.Tokens, 0)
		scan.end()
		if read += int64(len(doc.Tokens)) * max(width, 1); read > 1<<20 {
			r.read(in.Path, read)
			read = 0
		}
	}
	r.read(in.Path, read)
	sh.Tokens, sh.Documents = scan.token, scan.document
	r.finish(scan)
	return nil
}

// verifyFiles compares the files of a shard with its manifest.
func verifyFiles(ctx context.Context, prefix string, m *shards.Manifest, sh *Shard, find func(Finding)) error {
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		want := m.Files[name]
		file := formats.FilePath(m.Layout, prefix, name)
		sum, bytes, err := shards.HashFile(ctx, file, nil)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		message := ""
		if err != nil {
			message = err.Error()
		} else if sum != want.SHA256 || bytes != want.Bytes {
			message = fmt.Sprintf("%s: expected %d bytes with SHA-256 %s, found %d bytes with %s; restore it or "+
				"write the shard again",
				file, want.Bytes, want.SHA256, bytes, sum)
		}
		if message != "" {
			sh.Verified = false
			find(Finding{Level: Error, Kind: "hash", Document: -1, Byte: -1, Message: message})
		}
	}
	for _, path := range []string{prefix + ".json", filepath.Join(prefix, "mula.json")} {
		if sum, _, err := shards.HashFile(ctx, path, nil); err == nil {
			sh.Manifest = sum
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
