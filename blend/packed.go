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

// A Packing describes a plan whose samples are whole documents, packed by [mula/index/packing],
// instead of windows. Each packed sample has a window number of its source; the validation samples
// come last. Its shard and first token are the shard and first token of its first document. They
// are stored in one index file per source, so only the plan of a [Data] knows them. In other plans
// they are −1.
type Packing struct {
	Padding uint32 // token id after the last document of a sample, up to L+1 tokens

	directory string // of the index files
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

func (p *Plan) sealedPacked() sealedPacked {
	f := sealedPacked{Order: PackedOrder, Seed: p.Seed, SequenceLength: p.SequenceLength, Tokenizer: p.Tokenizer,
		Padding: p.Packing.Padding,
		Stages:  p.Stages, Skips: p.sealedSkips(), Checks: p.Checks}
	for _, s := range p.Sources {
		f.Sources = append(f.Sources, sealedPackedList{s.Name, s.Packed, s.Shards})
	}
	return f
}

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
		Stages: f.Plan.Stages,
		Skips:  f.Plan.Skips, Checks: f.Plan.Checks, Packing: &Packing{Padding: f.Plan.Padding,
			directory: f.Written.Packings}}
	for _, s := range f.Plan.Sources {
		p.Sources = append(p.Sources, Source{Name: s.Name, Shards: s.Shards, Packed: s.Packing})
	}
	return p, f.Fingerprint, p.takeWritten(f.Written)
}

// compilePacked does what compile does, for a packed source.
func (s *Source) compilePacked(seed uint64, sequenceLength int) error {
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
	case !k.Valid(sequenceLength+1) || k.Tokens != total:
		return fmt.Errorf("the packing has %d tokens in %d samples of %d tokens, but the shards have %d tokens",
			k.Tokens, k.Samples, sequenceLength+1, total)
	case k.Bytes < 0 || !isHex(k.SHA256, 64) || filepath.Base(k.File) != k.File || strings.ContainsAny(k.File, `/\`) ||
		validateName(k.File) != nil:
		return fmt.Errorf("the packing index %.80q has an invalid description", k.File)
	case k.Samples == 0:
		return errors.New("no shard has a token; add text")
	case k.Samples == k.HeldOut:
		return errors.New("all documents are in the validation split; add documents, or lower validation")
	}
	s.windows, s.Validation, s.training = nil, k.HeldOut, k.Samples-k.HeldOut
	s.order = index.NewOrder(seed, s.Name, s.training)
	return nil
}

// checkPadding validates the padding id.
func (p *Plan) checkPadding() error {
	limit := (&Data{Plan: p}).idLimit()
	for _, s := range p.Sources {
		for _, sh := range s.Shards {
			if sh.DType == shards.UInt16 {
				limit = min(limit, math.MaxUint16+1)
			}
		}
	}
	if p.Packing.Padding >= limit {
		return fmt.Errorf("the padding id is %d, but the shards have ids below %d; set another with pad, or --pad",
			p.Packing.Padding, limit)
	}
	return nil
}

// pieces appends the pieces of a sample of an open plan. Each piece is part of one document.
func (p *Plan) pieces(dst []segment, s *Sample) ([]segment, error) {
	var buffer [32]packing.Piece
	list, err := p.packings[s.Source].Sample(buffer[:0], s.Window)
	if err != nil {
		return dst, fmt.Errorf("source %q: %w; restore the file, or build a new plan", p.Sources[s.Source].Name, err)
	}
	for _, piece := range list {
		dst = append(dst, p.Sources[s.Source].segment(piece))
	}
	return dst, nil
}

// segment locates a piece. A piece is in one shard, because documents are.
func (s *Source) segment(piece packing.Piece) segment {
	shard := sort.Search(len(s.firsts)-1, func(i int) bool { return s.firsts[i+1] > piece.Token })
	return segment{shard: shard, token: piece.Token - s.firsts[shard], length: int64(piece.Length), begins: true}
}

// beginPacked sets the shard and the first token of a packed sample.
func (p *Plan) beginPacked(s *Sample) error {
	if p.packings == nil {
		s.Shard, s.Token = -1, -1
		return nil
	}
	var buffer [32]segment
	segments, err := p.pieces(buffer[:0], s)
	if err != nil {
		return err
	}
	s.Shard, s.Token = segments[0].shard, segments[0].token
	return nil
}

// packedValidation is [Plan.Validation] for a packed plan. A sample that cannot be read reports an
// error when it is read.
func (p *Plan) packedValidation(source int) iter.Seq[Sample] {
	return func(yield func(Sample) bool) {
		s := &p.Sources[source]
		for w := s.training; w < s.Windows(); w++ {
			sample := Sample{Position: -1, Source: source, Epoch: -1, Window: w}
			if err := p.beginPacked(&sample); err != nil {
				sample.Shard, sample.Token = -1, -1
			}
			if !yield(sample) {
				return
			}
		}
	}
}

// packedPlaces lists the samples that hold a document, each with the part that it holds. It reads
// the whole index, because there is no formula.
func (d *Data) packedPlaces(ctx context.Context, doc Document) iter.Seq2[Occurrence, error] {
	return func(yield func(Occurrence, error) bool) {
		src := &d.Sources[doc.Source]
		first := src.firsts[doc.Shard] + doc.First
		left, window := doc.Tokens, int64(0)
		for pieces, err := range d.packings[doc.Source].All(ctx) {
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

// openPackings opens the index files of a packed plan, and compares them with the plan without
// reading complete files.
func openPackings(p *Plan) (_ []*packing.Index, err error) {
	var open []*packing.Index
	defer func() {
		if err != nil {
			closePackings(open)
		}
	}()
	for i := range p.Sources {
		s := &p.Sources[i]
		x, err := packing.Open(p.packingPath(i))
		if err != nil {
			return nil, fmt.Errorf("source %q: %w; restore the file, or build a new plan", s.Name, err)
		}
		open = append(open, x)
		if x.Capacity() != p.SequenceLength+1 || x.Statistics != s.Packed.Statistics || x.Size() != s.Packed.Bytes {
			return nil, fmt.Errorf("source %q: the packing index %s has changed since the plan was built: %d samples "+
				"in %d bytes, previously %d in %d; restore it, or build a new plan",
				s.Name, p.packingPath(i), x.Samples, x.Size(), s.Packed.Samples, s.Packed.Bytes)
		}
	}
	return open, nil
}

// packingPath returns the path of the packing index of a source.
func (p *Plan) packingPath(source int) string {
	return filepath.Join(p.Packing.directory, p.Sources[source].Packed.File)
}

// closePackings closes index files.
func closePackings(open []*packing.Index) error {
	var errs []error
	for _, x := range open {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}

// pack packs the sources of a plan. Their shards must have been described. With options, pack
// hashes the shards, and builds or reuses the index files. Without options, it only counts.
func (d *Data) pack(ctx context.Context, c *Config, l *ledger, opts *SealOptions) error {
	p := d.Plan
	p.Packing = new(Packing)
	switch {
	case c.Pad != nil:
		p.Packing.Padding = uint32(*c.Pad)
	case p.Tokenizer == nil || p.Tokenizer.EOD < 0:
		return c.file.Errorf("$.packing",
			"samples are padded with the end-of-document id, but no shard has one; "+
				"set pad, or --pad")
	default:
		p.Packing.Padding = uint32(p.Tokenizer.EOD)
	}
	if err := p.checkPadding(); err != nil {
		return c.file.Errorf("$.pad", "%w", err)
	}
	if opts != nil {
		if err := d.hashFiles(ctx, l, opts.Progress); err != nil {
			return err
		}
		folder := opts.Packings
		if folder == "" {
			folder = c.dir
		}
		var err error
		if p.Packing.directory, err = absolutePath(folder); err != nil {
			return err
		}
	}
	read := d.packProgress(opts)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i := range p.Sources {
		g.Go(func() error {
			err := d.packSource(ctx, c, i, opts != nil, read)
			if err != nil {
				return c.file.Errorf(fmt.Sprintf("$.sources[%d]", i), "source %q: %w", p.Sources[i].Name, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil || opts == nil {
		return err
	}
	var err error
	p.packings, err = openPackings(p)
	return err
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
func (d *Data) packSource(ctx context.Context, c *Config, source int, build bool,
	read func(source int, tokens int64)) error {
	s := &d.Sources[source]
	from := packing.Source{Capacity: d.SequenceLength + 1, Documents: d.documentLengths(source, read)}
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
	f, err := packing.Build(ctx, nil, d.Packing.directory, &from)
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

// An orderFile is an index file of a plan's order.
type orderFile struct {
	path   string
	of     string // the cache or packing that the file belongs to, for messages
	bytes  int64
	sha256 string
}

// orderFiles lists the index files of the order. The native order of windows has none.
func (p *Plan) orderFiles() []orderFile {
	var files []orderFile
	if m := p.Megatron; m != nil {
		for _, f := range m.Files {
			files = append(files, orderFile{filepath.Join(p.path(m.directory), f.Name),
				"the cache " + p.path(m.directory), f.Bytes, f.SHA256})
		}
	}
	if p.Packing != nil {
		for i := range p.Sources {
			k := p.Sources[i].Packed
			files = append(files, orderFile{p.packingPath(i), fmt.Sprintf("the packing of source %q",
				p.Sources[i].Name), k.Bytes, k.SHA256})
		}
	}
	return files
}
