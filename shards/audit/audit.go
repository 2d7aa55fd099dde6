// Package audit reads shards of any layout once, in full, and reports problems: bytes that differ
// from the manifest, ids outside the vocabulary or read with the wrong type, documents without
// their separator or with a separator inside, empty, huge, repetitive and duplicate documents,
// duplicate files, and tokens in no window. It also measures and draws the lengths of documents by
// source.
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
	"mula/shards/layout"
)

// HugeDocument is the default number of tokens from which a document is reported as huge. Such
// documents are mostly logs, dumps or archives.
const HugeDocument = 1 << 20

// maxWorkers is the maximum of Options.Workers.
const maxWorkers = 4096

// Options are the options of [Run].
type Options struct {
	// ids at or above it are errors; 0: the manifest's vocabulary, and no check without a manifest
	Vocabulary     int64
	EOD            *int64         // the id that should end each document, -1: no such id; nil: the manifest's id
	SequenceLength int            // L: tokens outside all windows of L+1 are counted; 0: not counted
	Huge           int64          // tokens from which a document is huge; 0: HugeDocument
	DType          string         // numpy name of the element type, for shards without one; "": from Vocabulary
	Workers        int            // shards that are read at a time, up to 4096; 0: the number of processors
	Progress       func(Progress) // called from one goroutine at a time; may be nil
}

// A Progress is the progress of a run.
type Progress struct {
	Path  string // the shard that was read last
	Bytes int64  // bytes read so far, of all shards
	Total int64  // bytes of all shards
}

// An Input is a shard to check.
type Input struct {
	Source string // shards with the same name are counted together
	Path   string
	Open   func() (*shards.Shard, error) // opens a shard in Megatron's layout; nil: Path is opened, in any layout
	// returns the problem with the hash of a shard without a manifest, or ""; may be nil
	Check func(binSHA256 string) string
}

// A Report is the result of [Run].
type Report struct {
	SequenceLength int       `json:"sequence_length"` // used to count windows, 0 if not counted
	Shards         []Shard   `json:"shards"`          // in the order of the inputs
	Sources        []Source  `json:"sources"`         // in the order of their first shards
	Copies         Copies    `json:"copies"`          // documents that occur more than once
	Findings       []Finding `json:"findings"`        // shard by shard, in the order of the inputs
}

// A Source has the statistics of all shards of one source.
type Source struct {
	Name    string  `json:"source"`
	Shards  int64   `json:"shards"`
	Tail    int64   `json:"tail_tokens"`
	Lengths Lengths `json:"lengths"`
	Repeats Repeats `json:"repeats"`
}

// A Shard has the statistics of one shard. After an error the counts are incomplete.
type Shard struct {
	Source         string       `json:"source"`
	Path           string       `json:"path"`
	Layout         string       `json:"layout"`
	DType          shards.DType `json:"dtype"` // "" if not known
	Manifest       string       `json:"manifest_sha256"`
	Compared       bool         `json:"compared"` // the files were compared with a manifest or a plan
	Verified       bool         `json:"verified"` // all compared bytes are equal
	Tokens         int64        `json:"tokens"`
	Documents      int64        `json:"documents"`
	Windows        int64        `json:"windows"`
	Tail           int64        `json:"tail_tokens"`     // at the end, in no window
	EmptyDocuments int64        `json:"empty_documents"` // no token except the separator
	LongDocuments  int64        `json:"long_documents"`  // at least Options.Huge tokens
	Longest        int64        `json:"longest_document"`
	LongestNumber  int64        `json:"longest_document_number"` // -1 without documents
	BadIDs         int64        `json:"bad_ids"`                 // outside the vocabulary
	MaxID          uint32       `json:"max_id"`
	DistinctIDs    int64        `json:"distinct_ids"` // only ids below 2^20
	Separator      Separator    `json:"separator"`
	Repeats        Repeats      `json:"repeats"`
	Lengths        Lengths      `json:"lengths"`

	content uint64 // hash of the documents in order; 0 without tokens
}

// A Separator has statistics about the id that should end every document.
type Separator struct {
	ID              int64 `json:"id"`               // from the options or the manifest; -1 if neither has it
	Documents       int64 `json:"documents"`        // documents with tokens
	Endings         int64 `json:"endings"`          // documents that end with ID
	FirstWithout    int64 `json:"first_without"`    // the first document that does not, or -1
	Inside          int64 `json:"inside"`           // occurrences of ID inside documents
	InsideDocuments int64 `json:"inside_documents"` // documents with ID inside
	FirstInside     int64 `json:"first_inside"`     // the first of them, or -1
	LikelyID        int64 `json:"likely_id"`        // the id that ends at least nine of ten documents, or -1
	LikelyEndings   int64 `json:"likely_endings"`
	LikelyInside    int64 `json:"likely_inside"`
}

// Repeats counts documents in which a few tokens are repeated many times. It uses the criterion of
// OLMoE's instance filter, but that filter checks windows, and Repeats checks documents.
type Repeats struct {
	Documents int64            `json:"documents"`
	Tokens    int64            `json:"tokens"`    // tokens of these documents
	ByPeriod  [maxPeriod]int64 `json:"by_period"` // documents by their smallest period, from 1
	Worst     Repeat           `json:"worst"`     // the longest repetition; Document is -1 without repetitions
}

func (r *Repeats) add(other Repeats) {
	r.Documents += other.Documents
	r.Tokens += other.Tokens
	for i, n := range other.ByPeriod {
		r.ByPeriod[i] += n
	}
}

// Failed reports whether a finding is an error.
func (r *Report) Failed() bool {
	for _, f := range r.Findings {
		if f.Level == Error {
			return true
		}
	}
	return false
}

// Run reads the inputs and returns a report of their problems. The error is not nil only if Run
// could not complete the check.
func Run(ctx context.Context, inputs []Input, o Options) (*Report, error) {
	if o.Workers < 0 || o.Workers > maxWorkers {
		return nil, fmt.Errorf("checking shards: %d workers; want 0, for the number of processors, to %d",
			o.Workers, maxWorkers)
	}
	if o.Vocabulary < 0 || o.Vocabulary > 1<<31 || o.EOD != nil && (*o.EOD < -1 || *o.EOD >= 1<<31) ||
		o.SequenceLength < 0 || o.Huge < 0 {
		return nil, errors.New("checking shards: a vocabulary, separator, sequence length or document length " +
			"is out of range")
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
				Message: "it is listed twice, first as " + inputs[f].Path + ": its data is read twice"}}
		} else if c := report.Shards[i].content; c != 0 {
			if other, ok := content[c]; ok {
				found[i] = append(found[i], Finding{Level: Warning, Kind: "copy", Document: -1, Byte: -1,
					Message: "its tokens equal those in " + other + ": the data is duplicated"})
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

// addUp computes the sources, and the findings about several shards.
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
					"%s of its tokens, at the ends of shards, are in no window; use fewer and longer shards",
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
				"%s%s of the documents, with %s%s of the tokens, are copies of others; document %d of this shard, "+
					"with %s tokens, occurs %s times",
				about, percent(c.Share), about, percent(c.TokenShare), most.Document, quantity.Grouped(most.Tokens),
				quantity.Grouped(most.Times))})
	}
}

// firsts returns for each input the index of the first input with the same files.
func firsts(inputs []Input) []int {
	first := make([]int, len(inputs))
	place := map[string]int{}
	for i, in := range inputs {
		key := ""
		l, path, err := detect(in.Path)
		if err != nil {
			path = in.Path
		} else {
			key = string(l.ID)
		}
		if whole, err := filepath.Abs(path); err == nil {
			path = whole
		}
		if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
			path = filepath.Join(dir, filepath.Base(path))
		}
		key += ":" + path
		if k, ok := place[key]; ok {
			first[i] = k
		} else {
			first[i], place[key] = i, i
		}
	}
	return first
}

// detect returns the layout and the prefix of the shard at path. If a prefix exists in two layouts,
// it prefers Megatron's, because the path of a Megatron shard has no suffix.
func detect(path string) (*layout.Layout, string, error) {
	l := &formats.Megatron
	prefix, _ := l.Prefix(path)
	if _, err := os.Stat(l.At(prefix, l.Marker)); err == nil {
		return l, prefix, nil
	}
	return formats.Detect(path)
}

// sizeOf returns the size of a shard's files of ids, 0 if they do not exist.
func sizeOf(path string) (bytes int64) {
	l, prefix, err := detect(path)
	if err != nil {
		return 0
	}
	return l.SizeOfIDs(prefix)
}

// A run is the shared state of the goroutines of [Run].
type run struct {
	o Options

	mu       sync.Mutex // guards the fields below
	progress Progress
	all      *sample
}

// read adds bytes of a shard to the progress.
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

// shard checks one shard.
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
				continue // the reader has also compared the file with the manifest
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
		if in.Open != nil || l == &formats.Megatron {
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
		d, err := l.Open(prefix, h)
		if err != nil {
			bad(err)
			return nil
		}
		defer d.Close()
		sh.Layout = l.Name
		return r.other(ctx, in, number, d, l, prefix, &sh, local, find, bad)
	}()
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.merge(local)
	return sh, findings, err
}

// parts returns the errors that were joined into err.
func parts(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok && strings.Contains(err.Error(), "\n") {
		return joined.Unwrap()
	}
	return []error{err}
}

// settings determines the vocabulary and the separator from the options or the manifest.
func (r *run) settings(m *shards.Manifest, most int64, find func(Finding)) (limit, eod int64) {
	limit, eod = most, -1
	if m != nil && m.Foreign() {
		find(Finding{Level: Note, Kind: "hash", Document: -1, Byte: -1,
			Message: "another program wrote the shard; its tokenizer and the origins of its documents are unknown"})
	} else if m != nil {
		eod = m.Tokenizer.EOD
		if m.Tokenizer.VocabSize > 0 {
			limit = int64(m.Tokenizer.VocabSize)
		}
	} else {
		find(Finding{Level: Note, Kind: "hash", Document: -1, Byte: -1,
			Message: "no manifest; its tokenizer and the origins of its documents are unknown"})
	}
	if r.o.Vocabulary > 0 {
		limit = r.o.Vocabulary
	}
	if r.o.EOD != nil {
		if m != nil && !m.Foreign() && *r.o.EOD != eod {
			find(Finding{Level: Warning, Kind: "separator", Document: -1, Byte: -1, Message: fmt.Sprintf(
				"the end-of-document id is %d in its manifest (-1: none), but %d was given", eod, *r.o.EOD)})
		}
		eod = *r.o.EOD
	}
	return limit, eod
}

// finish completes the statistics after the last token.
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

// megatron checks a shard in Megatron's layout. It reads the shard in chunks, because documents may
// have any size.
func (r *run) megatron(ctx context.Context, in *Input, number int, s *shards.Shard, sh *Shard, local *sample,
	find func(Finding), bad func(error)) error {
	sh.Layout, sh.DType, sh.Tokens, sh.Documents = formats.Megatron.Name, s.DType(), s.Tokens(), s.Documents()
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
		sum, _, err := shards.HashFile(ctx, s.ManifestPath(), nil)
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

// documentsOf splits the ids of a shard into documents.
type documentsOf struct {
	scan   *scan
	shard  *shards.Shard
	next   int64 // token
	span   shards.Span
	begun  bool     // span is the document with number scan.document
	buffer []uint32 // the last ids of the document before the current chunk
	err    error    // about .idx: no further documents are known
}

// take processes the next ids.
func (d *documentsOf) take(ids []uint32) error {
	for used := 0; used < len(ids); {
		if d.err == nil && !d.begun {
			d.err = d.begin()
		}
		if d.err != nil {
			return nil // continue: the caller still needs the hash
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
		} else { // the chunk ends within the document
			keep := ids[max(0, used-maxPeriod, used-int(d.next-d.span.First)):used]
			d.buffer = append(d.buffer[:0], keep...)
		}
	}
	return nil
}

// begin starts the next document with tokens, if there is one.
func (d *documentsOf) begin() error {
	for d.scan.document < d.shard.Documents() {
		span, err := d.shard.Span(d.scan.document)
		if err != nil {
			return err
		}
		if span.First != d.next {
			return fmt.Errorf("%s.idx: document %d starts at token %d, but the previous document ends at %d: %w",
				d.shard.Prefix(), span.Document, span.First, d.next, shards.ErrCorrupt)
		}
		if d.span = span; span.First < span.End {
			d.begun = true
			return nil
		}
		d.scan.end()
	}
	if left := d.shard.Tokens() - d.next; left > 0 {
		return fmt.Errorf("%s.idx: documents end at token %d, but %d more tokens follow: %w", d.shard.Prefix(), d.next,
			left,
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
		return fmt.Errorf("%s.idx: document %d has tokens after the end of the shard: %w", d.shard.Prefix(),
			d.scan.document,
			shards.ErrCorrupt)
	}
	return nil
}

// other checks a shard of another layout.
func (r *run) other(ctx context.Context, in *Input, number int, d shards.DocumentReader, l *layout.Layout,
	prefix string, sh *Shard, local *sample, find func(Finding), bad func(error)) error {
	m := d.Manifest()
	sh.DType = d.DType()
	width := int64(sh.DType.Size())
	limit, eod := r.settings(m, 1<<32, find)
	scan := newScan(sh, number, limit, eod, r.o.Huge, width, local, find)
	if m != nil {
		sh.Compared, sh.Verified = true, true
		if err := verifyFiles(ctx, l, prefix, m, sh, find); err != nil {
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
func verifyFiles(ctx context.Context, l *layout.Layout, prefix string, m *shards.Manifest, sh *Shard,
	find func(Finding)) error {
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		want := m.Files[name]
		file := l.FilePath(prefix, name)
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
	sum, _, err := shards.HashFile(ctx, l.At(prefix, l.Manifest), nil)
	if err == nil {
		sh.Manifest = sum
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
