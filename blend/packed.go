package blend

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"mula/index"
	"mula/index/packing"
	"mula/internal/strictjson"
	"mula/shards"
)

// packingBestFit is the name of the packing in blend.yaml.
const packingBestFit = "best_fit"

// PackedOrder is the order version in plan.json for a plan with packed samples.
const PackedOrder = "packed 1"

// A packedOrder is the order of a plan whose samples are whole documents, packed by
// [mula/index/packing], instead of windows. Each packed sample has a window number of its source;
// the validation samples come last. Its shard and first token are the shard and first token of its
// first document. They are stored in one index file per source, so only an openPackedOrder knows
// them. In plans that are not open they are −1.
type packedOrder struct {
	scheduled
	padding   uint32 // token id after the last document of a sample, up to L+1 tokens
	directory string // of the index files
}

// An openPackedOrder is a packedOrder with open index files.
type openPackedOrder struct {
	*packedOrder
	packings []*packing.Index // by source
}

func (o *packedOrder) traits() Traits {
	return Traits{Version: PackedOrder, Scheduled: true, Padded: true, Padding: o.padding,
		name: "a packed plan", instead: "build a plan without packing"}
}

// A PackedSource describes the packing of a source.
type PackedSource struct {
	File   string `json:"file"` // name of the index file
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
	packing.Statistics
}

// sealedPacked replaces sealedPlan in a plan with packed samples.
type sealedPacked struct {
	Order          string             `json:"order"`
	Seed           uint64             `json:"seed"`
	SequenceLength int                `json:"sequence_length"`
	Tokenizer      *Tokenizer         `json:"tokenizer"`
	Padding        uint32             `json:"padding"`
	Sources        []sealedPackedList `json:"sources"`
	Stages         []Stage            `json:"stages"`
	Skips          []Range            `json:"skips"`
	Checks         []Check            `json:"checks"`
}

type sealedPackedList struct {
	Name    string        `json:"name"`
	Packing *PackedSource `json:"packing"`
	Shards  []Shard       `json:"shards"`
}

func (o *packedOrder) sealed() any {
	p := o.plan
	f := sealedPacked{Order: PackedOrder, Seed: p.Seed, SequenceLength: p.SequenceLength, Tokenizer: p.Tokenizer,
		Padding: o.padding, Stages: p.Stages, Skips: p.sealedSkips(), Checks: p.Checks}
	for _, s := range p.Sources {
		f.Sources = append(f.Sources, sealedPackedList{s.Name, s.Packed, s.Shards})
	}
	return f
}

// writeFiles writes the directory of the packing indexes.
func (o *packedOrder) writeFiles(w *writtenPlan, relative func(string) (string, error)) (err error) {
	if w.Packings, err = relative(o.directory); err != nil {
		return err
	}
	return o.scheduled.writeFiles(w, relative)
}

// resolve makes the directory relative to the plan, even if OpenOptions.Base is set.
func (o *packedOrder) resolve() { o.directory = o.plan.path(o.directory) }

// parsePacked is parseNative for packed samples.
func parsePacked(data []byte) (*Plan, string, error) {
	var f planFile[sealedPacked]
	if err := strictjson.Decode(data, &f); err != nil {
		return nil, "", err
	}
	if f.Written.Packings == "" {
		return nil, "", errors.New("the plan is packed, but does not name the directory of its packing indexes")
	}
	p := &Plan{Seed: f.Plan.Seed, SequenceLength: f.Plan.SequenceLength, Tokenizer: f.Plan.Tokenizer,
		Stages: f.Plan.Stages, Skips: f.Plan.Skips, Checks: f.Plan.Checks}
	p.order = &packedOrder{scheduled{p}, f.Plan.Padding, f.Written.Packings}
	for _, s := range f.Plan.Sources {
		p.Sources = append(p.Sources, Source{Name: s.Name, Shards: s.Shards, Packed: s.Packing})
	}
	return p, f.Fingerprint, p.takeWritten(f.Written)
}

func (o *packedOrder) compileSource(s *Source) error {
	k := s.Packed
	if k == nil {
		return errors.New("the source has no packing, but the plan is packed")
	}
	s.firsts = make([]int64, len(s.Shards))
	var total int64
	for i, sh := range s.Shards {
		s.firsts[i] = total
		total += sh.Tokens
	}
	switch {
	case !k.Valid(o.plan.SampleTokens()) || k.Tokens != total:
		return fmt.Errorf("the packing has %d tokens in %d samples of %d tokens, but the shards have %d tokens",
			k.Tokens, k.Samples, o.plan.SampleTokens(), total)
	case k.Bytes < 0 || !isHex(k.SHA256, 64) || filepath.Base(k.File) != k.File || strings.ContainsAny(k.File, `/\`) ||
		validateName(k.File) != nil:
		return fmt.Errorf("the packing index %.80q has an invalid description", k.File)
	case k.Samples == 0:
		return errors.New("no shard has a token; add text")
	case k.Samples == k.HeldOut:
		return errors.New("all documents are in the validation split; add documents, or lower validation")
	}
	s.windows, s.Validation, s.training = nil, k.HeldOut, k.Samples-k.HeldOut
	s.order = index.NewOrder(o.plan.Seed, s.Name, s.training)
	return nil
}

func (o *packedOrder) compile() error {
	if err := o.checkPadding(); err != nil {
		return err
	}
	return o.compileStages()
}

// checkPadding validates the padding id.
func (o *packedOrder) checkPadding() error {
	limit := o.plan.idLimit()
	for _, s := range o.plan.Sources {
		for _, sh := range s.Shards {
			if sh.DType == shards.UInt16 {
				limit = min(limit, math.MaxUint16+1)
			}
		}
	}
	if o.padding >= limit {
		return fmt.Errorf("the padding id is %d, but the shards have ids below %d; set another with pad, or --pad",
			o.padding, limit)
	}
	return nil
}

func (o *packedOrder) locate(position int64) (Sample, error) {
	s := o.draw(position)
	s.Shard, s.Token = -1, -1
	return s, nil
}

func (o *openPackedOrder) locate(position int64) (Sample, error) {
	s := o.draw(position)
	err := o.begin(&s)
	return s, err
}

func (*packedOrder) segments(dst []segment, _ Sample) ([]segment, error) { return dst, errNotOpen }

// segments implements order. Each segment is part of one document.
func (o *openPackedOrder) segments(dst []segment, s Sample) ([]segment, error) {
	src := &o.plan.Sources[s.Source]
	var buffer [32]packing.Piece
	list, err := o.packings[s.Source].Sample(buffer[:0], s.Window)
	if err != nil {
		return dst, fmt.Errorf("source %q: %w; restore the file, or build a new plan", src.Name, err)
	}
	for _, piece := range list {
		dst = append(dst, src.segment(piece))
	}
	return dst, nil
}

// segment locates a piece. A piece is in one shard, because documents are.
func (s *Source) segment(piece packing.Piece) segment {
	shard := sort.Search(len(s.firsts)-1, func(i int) bool { return s.firsts[i+1] > piece.Token })
	return segment{shard: shard, token: piece.Token - s.firsts[shard], length: int64(piece.Length), begins: true}
}

// begin sets the shard and the first token of a sample.
func (o *openPackedOrder) begin(s *Sample) error {
	var buffer [32]segment
	segments, err := o.segments(buffer[:0], *s)
	if err != nil {
		return err
	}
	s.Shard, s.Token = segments[0].shard, segments[0].token
	return nil
}

func (o *packedOrder) validation(source int) iter.Seq[Sample] {
	return func(yield func(Sample) bool) {
		s := &o.plan.Sources[source]
		for w := s.training; w < s.Windows(); w++ {
			if !yield(Sample{Position: -1, Source: source, Epoch: -1, Window: w, Shard: -1, Token: -1}) {
				return
			}
		}
	}
}

// validation implements order. A sample that cannot be read reports an error when it is read.
func (o *openPackedOrder) validation(source int) iter.Seq[Sample] {
	return func(yield func(Sample) bool) {
		for s := range o.packedOrder.validation(source) {
			if err := o.begin(&s); err != nil {
				s.Shard, s.Token = -1, -1
			}
			if !yield(s) {
				return
			}
		}
	}
}

func (o *packedOrder) occurrences(context.Context, Document) iter.Seq2[Occurrence, error] {
	return func(yield func(Occurrence, error) bool) { yield(Occurrence{}, errNotOpen) }
}

func (o *openPackedOrder) occurrences(ctx context.Context, doc Document) iter.Seq2[Occurrence, error] {
	return o.uses(ctx, doc, o.holding(ctx, doc))
}

// holding lists the samples that hold a document, each with the part that it holds. It reads the
// whole index, because there is no formula.
func (o *openPackedOrder) holding(ctx context.Context, doc Document) iter.Seq2[Occurrence, error] {
	return func(yield func(Occurrence, error) bool) {
		src := &o.plan.Sources[doc.Source]
		first := src.firsts[doc.Shard] + doc.First
		left, window := doc.Tokens, int64(0)
		for pieces, err := range o.packings[doc.Source].All(ctx) {
			if err != nil {
				yield(Occurrence{}, fmt.Errorf("source %q: %w", src.Name, err))
				return
			}
			at := 0
			for _, piece := range pieces {
				if piece.Token >= first && piece.Token < first+doc.Tokens {
					begin := src.segment(pieces[0])
					o := Occurrence{Part: Part{doc, at, at + int(piece.Length)},
						Sample: Sample{Position: -1, Source: doc.Source, Epoch: -1, Window: window, Shard: begin.shard,
							Token: begin.token}}
					if !yield(o, nil) {
						return
					}
					left -= int64(piece.Length)
				}
				at += int(piece.Length)
			}
			if window++; left == 0 { // each token is in one sample
				return
			}
		}
	}
}

// open implements order. It compares the index files with the plan without reading complete files.
func (o *packedOrder) open(_ context.Context, p *Plan, _ func(string)) (_ order, err error) {
	opened := &openPackedOrder{packedOrder: &packedOrder{scheduled{p}, o.padding, o.directory}}
	defer func() {
		if err != nil {
			opened.close()
		}
	}()
	for i := range p.Sources {
		s := &p.Sources[i]
		x, err := packing.Open(o.path(s))
		if err != nil {
			return nil, fmt.Errorf("source %q: %w; restore the file, or build a new plan", s.Name, err)
		}
		opened.packings = append(opened.packings, x)
		if x.Capacity() != p.SampleTokens() || x.Statistics != s.Packed.Statistics || x.Size() != s.Packed.Bytes {
			return nil, fmt.Errorf("source %q: the packing index %s has changed since the plan was built: %d samples "+
				"in %d bytes, previously %d in %d; restore it, or build a new plan",
				s.Name, o.path(s), x.Samples, x.Size(), s.Packed.Samples, s.Packed.Bytes)
		}
	}
	return opened, nil
}

// path returns the path of the packing index of a source.
func (o *packedOrder) path(s *Source) string { return filepath.Join(o.directory, s.Packed.File) }

func (o *packedOrder) files() (files []orderFile) {
	for i := range o.plan.Sources {
		s := &o.plan.Sources[i]
		files = append(files, orderFile{o.path(s), fmt.Sprintf("the packing of source %q", s.Name), s.Packed.Bytes,
			&s.Packed.SHA256})
	}
	return files
}

func (o *openPackedOrder) close() error {
	var errs []error
	for _, x := range o.packings {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}

// pack packs the sources of a plan and sets its order. The shards must have been described. With
// options, pack hashes the shards, and builds or reuses the index files. Without options, it only
// counts.
func (d *Data) pack(ctx context.Context, c *Config, l *ledger, opts *SealOptions) error {
	p := d.Plan
	o := &packedOrder{scheduled: scheduled{p}}
	switch {
	case c.Pad != nil:
		o.padding = uint32(*c.Pad)
	case p.Tokenizer == nil || p.Tokenizer.EOD < 0:
		return c.file.Errorf("$.packing",
			"samples are padded with the end-of-document id, but no shard has one; "+
				"set pad, or --pad")
	default:
		o.padding = uint32(p.Tokenizer.EOD)
	}
	if err := o.checkPadding(); err != nil {
		return c.file.Errorf("$.pad", "%w", err)
	}
	if opts != nil {
		if err := d.hashFiles(ctx, l, nil, opts.Progress); err != nil {
			return err
		}
		folder := opts.Packings
		if folder == "" {
			folder = c.dir
		}
		var err error
		if o.directory, err = absolutePath(folder); err != nil {
			return err
		}
	}
	read := d.packProgress(opts)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i := range p.Sources {
		g.Go(func() error {
			err := d.packSource(ctx, c, o, i, opts != nil, read)
			if err != nil {
				return c.file.Errorf(fmt.Sprintf("$.sources[%d]", i), "source %q: %w", p.Sources[i].Name, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if p.order = o; opts == nil {
		return nil
	}
	opened, err := o.open(ctx, p, nil)
	if err != nil {
		return err
	}
	p.order = opened
	return nil
}

// packProgress returns a function that adds processed tokens and reports the progress to
// opts.Packing.
func (d *Data) packProgress(opts *SealOptions) func(source int, tokens int64) {
	if opts == nil || opts.Packing == nil {
		return func(int, int64) {}
	}
	var mu sync.Mutex
	var done, total int64
	for _, s := range d.Sources {
		for _, sh := range s.Shards {
			total += 2 * sh.Tokens // building a file reads the documents twice
		}
	}
	return func(source int, tokens int64) {
		mu.Lock()
		defer mu.Unlock()
		done += tokens
		opts.Packing(PackProgress{d.Sources[source].Name, done, total})
	}
}

// packSource packs one source. It reports the tokens of processed documents to read.
func (d *Data) packSource(ctx context.Context, c *Config, o *packedOrder, source int, build bool,
	read func(source int, tokens int64)) error {
	s := &d.Sources[source]
	from := packing.Source{Capacity: d.SampleTokens(), Documents: d.documentLengths(source, read)}
	for _, sh := range s.Shards {
		from.Shards = append(from.Shards, packing.Shard{Tokens: sh.Tokens, Index: sh.Index})
		from.HeldOut += sh.Tokens
	}
	if c.Validation.IsSet() {
		held, _ := c.Validation.ceilTimes(from.HeldOut) // at most HeldOut, because validation is below 1
		var err error
		if from.HeldOut, err = d.documentBefore(source, from.HeldOut-held); err != nil {
			return err
		}
	}
	s.Packed = &PackedSource{File: from.Name(), SHA256: unhashed}
	if !build {
		var err error
		s.Packed.Statistics, err = packing.Count(ctx, &from)
		return err
	}
	f, err := packing.Build(ctx, nil, o.directory, &from)
	if err != nil {
		return err
	}
	s.Packed = &PackedSource{f.Name, f.Bytes, f.SHA256, f.Statistics}
	return nil
}

// documentLengths lists the number of tokens of each document of a source, in order. It reports
// processed tokens to read at intervals.
func (d *Data) documentLengths(source int, read func(source int, tokens int64)) iter.Seq2[int64, error] {
	const often = 1 << 16 // documents
	return func(yield func(int64, error) bool) {
		var documents, tokens int64
		for k := range d.Sources[source].Shards {
			shard, err := d.shelf.take(source, k)
			if err != nil {
				yield(0, err)
				return
			}
			for n, err := range shard.Index().DocumentLengths() {
				if !yield(n, err) || err != nil {
					d.shelf.put(source, k)
					return
				}
				tokens += n
				if documents++; documents%often == 0 {
					read(source, tokens)
					tokens = 0
				}
			}
			d.shelf.put(source, k)
		}
	}
}

// documentBefore returns the first token of the document that holds a token. Tokens are numbered
// through all shards of the source. At the end of the source it returns the end.
func (d *Data) documentBefore(source int, token int64) (int64, error) {
	before := int64(0)
	for k, sh := range d.Sources[source].Shards {
		if token >= before+sh.Tokens {
			before += sh.Tokens
			continue
		}
		shard, err := d.shelf.take(source, k)
		if err != nil {
			return 0, err
		}
		defer d.shelf.put(source, k)
		err = shard.Guard(func() error {
			document, err := shard.DocumentAt(token - before)
			if err != nil {
				return err
			}
			span, err := shard.Span(document)
			before += span.First
			return err
		})
		return before, err
	}
	return before, nil
}
