package blend

import (
	"cmp"
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
	"mula/shards/facts"
)

// The order versions in plan.json for plans with packed samples: of plans that do not amend another
// plan, and of plans that do. Both give the same samples if no source has grown.
const (
	PackedOrder        = "packed 1"
	PackedAmendedOrder = "packed 2"
)

// A packedOrder is the order of a plan whose samples are whole documents, packed by
// [mula/index/packing], instead of windows. Each part of a source, which is its original shards or
// the shards that one growth added, is packed separately. Each packed sample has a window number of
// its source; the validation samples of a part come last. Its shard and first token are the shard
// and first token of its first document. They are stored in one index file per part, so only an
// openPackedOrder knows them. In plans that are not open they are −1.
type packedOrder struct {
	scheduled
	padding uint32 // token id after the last document of a sample, up to L+1 tokens
}

// An openPackedOrder is a packedOrder with open index files.
type openPackedOrder struct {
	*packedOrder
	packings [][]*packing.Index // by source and part
}

func (o *packedOrder) traits() Traits {
	version := PackedOrder
	if len(o.plan.Parents) > 0 {
		version = PackedAmendedOrder
	}
	return Traits{Version: version, Scheduled: true, Padded: true, Padding: o.padding,
		name: "a packed plan", instead: "build a plan without packing"}
}

// packed returns the statistics of all parts of a packed source together.
func (s *Source) packed() (sum packing.Statistics) {
	for _, k := range s.Packed {
		sum.Samples += k.Samples
		sum.HeldOut += k.HeldOut
		sum.Documents += k.Documents
		sum.Cut += k.Cut
		sum.Pieces += k.Pieces
		sum.Tokens += k.Tokens
	}
	return sum
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
	Name    string      `json:"name"`
	Packing *PackedPart `json:"packing"`
	Shards  []Shard     `json:"shards"`
}

// sealedPackedAmended replaces sealedPacked in a plan that amends another: order "packed 2".
type sealedPackedAmended struct {
	Order          string            `json:"order"`
	Parents        []Parent          `json:"parents"`
	Seed           uint64            `json:"seed"`
	SequenceLength int               `json:"sequence_length"`
	Tokenizer      *Tokenizer        `json:"tokenizer"`
	Padding        uint32            `json:"padding"`
	Sources        []grownPackedList `json:"sources"`
	Stages         []Stage           `json:"stages"`
	Skips          []Range           `json:"skips"`
	Checks         []Check           `json:"checks"`
}

type grownPackedList struct {
	Name    string         `json:"name"`
	Packing *PackedPart    `json:"packing"` // of the original shards
	Growth  []packedGrowth `json:"growth"`
	Shards  []Shard        `json:"shards"`
}

// A packedGrowth is a Growth whose validation windows are the validation samples of its packing.
type packedGrowth struct {
	Sample  int64       `json:"sample"`
	Shards  int         `json:"shards"`
	Packing *PackedPart `json:"packing"`
}

func (o *packedOrder) sealed() any {
	p := o.plan
	if len(p.Parents) > 0 {
		return o.sealedAmended()
	}
	f := sealedPacked{Order: PackedOrder, Seed: p.Seed, SequenceLength: p.SequenceLength, Tokenizer: p.Tokenizer,
		Padding: o.padding, Stages: p.Stages, Skips: p.sealedSkips(), Checks: p.Checks}
	for _, s := range p.Sources {
		f.Sources = append(f.Sources, sealedPackedList{s.Name, &s.Packed[0], s.Shards})
	}
	return f
}

func (o *packedOrder) sealedAmended() sealedPackedAmended {
	p := o.plan
	f := sealedPackedAmended{Order: PackedAmendedOrder, Parents: p.Parents, Seed: p.Seed,
		SequenceLength: p.SequenceLength, Tokenizer: p.Tokenizer, Padding: o.padding, Stages: p.Stages,
		Skips: p.sealedSkips(), Checks: p.Checks}
	for _, s := range p.Sources {
		list := grownPackedList{s.Name, &s.Packed[0], []packedGrowth{}, s.Shards}
		for i, g := range s.Growth {
			list.Growth = append(list.Growth, packedGrowth{g.Sample, g.Shards, &s.Packed[i+1]})
		}
		f.Sources = append(f.Sources, list)
	}
	return f
}

// writeFiles writes the directories of the packing indexes. The index files of a plan that amends
// no other are in one directory.
func (o *packedOrder) writeFiles(w *writtenPlan, relative func(string) (string, error)) error {
	for i := range o.plan.Sources {
		for _, k := range o.plan.Sources[i].Packed {
			directory, err := relative(k.directory)
			if err != nil {
				return err
			}
			if len(o.plan.Parents) == 0 {
				w.Packings = directory
			} else {
				w.Sources[i].Packings = append(w.Sources[i].Packings, directory)
			}
		}
	}
	return o.scheduled.writeFiles(w, relative)
}

// resolve makes the directories relative to the plan, even if OpenOptions.Base is set.
func (o *packedOrder) resolve() {
	for i := range o.plan.Sources {
		for j := range o.plan.Sources[i].Packed {
			k := &o.plan.Sources[i].Packed[j]
			k.directory = o.plan.path(k.directory)
		}
	}
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
		Stages: f.Plan.Stages, Skips: f.Plan.Skips, Checks: f.Plan.Checks}
	p.order = &packedOrder{scheduled{p}, f.Plan.Padding}
	for _, s := range f.Plan.Sources {
		source := Source{Name: s.Name, Shards: s.Shards}
		if s.Packing != nil {
			s.Packing.directory = f.Written.Packings
			source.Packed = []PackedPart{*s.Packing}
		}
		p.Sources = append(p.Sources, source)
	}
	return p, f.Fingerprint, p.takeWritten(f.Written)
}

// parsePackedAmended parses a plan of order "packed 2".
func parsePackedAmended(data []byte) (*Plan, string, error) {
	var f planFile[sealedPackedAmended]
	if err := strictjson.Decode(data, &f); err != nil {
		return nil, "", err
	}
	if len(f.Plan.Parents) == 0 {
		return nil, "", fmt.Errorf("order version %q is for amended plans, but the plan has no parent",
			PackedAmendedOrder)
	}
	p := &Plan{Seed: f.Plan.Seed, SequenceLength: f.Plan.SequenceLength, Tokenizer: f.Plan.Tokenizer,
		Stages: f.Plan.Stages, Skips: f.Plan.Skips, Checks: f.Plan.Checks, Parents: f.Plan.Parents}
	p.order = &packedOrder{scheduled{p}, f.Plan.Padding}
	for _, s := range f.Plan.Sources {
		source := Source{Name: s.Name, Shards: s.Shards}
		packings := []*PackedPart{s.Packing}
		for _, g := range s.Growth {
			packings = append(packings, g.Packing)
		}
		for i, k := range packings {
			if k == nil {
				return nil, "", fmt.Errorf("source %q: part %d has no packing", s.Name, i+1)
			}
			source.Packed = append(source.Packed, *k)
		}
		for _, g := range s.Growth {
			source.Growth = append(source.Growth, Growth{g.Sample, g.Shards, g.Packing.HeldOut})
		}
		p.Sources = append(p.Sources, source)
	}
	if err := p.takeWritten(f.Written); err != nil {
		return nil, "", err
	}
	for i := range p.Sources {
		s, directories := &p.Sources[i], f.Written.Sources[i].Packings
		if len(directories) != len(s.Packed) {
			return nil, "", fmt.Errorf("source %q has %d packings in %d directories", s.Name, len(s.Packed),
				len(directories))
		}
		for j := range s.Packed {
			s.Packed[j].directory = directories[j]
		}
	}
	return p, f.Fingerprint, nil
}

func (o *packedOrder) compileSource(s *Source) error {
	if len(s.Packed) == 0 {
		return errors.New("the source has no packing, but the plan is packed")
	}
	shards, err := s.shardsByPart()
	if err != nil {
		return err
	}
	s.windows, s.Validation, s.training = nil, 0, 0
	s.firsts = make([]int64, len(s.Shards))
	samples := make([]int64, len(shards))
	next := 0
	for i, n := range shards {
		var total int64
		for range n {
			s.firsts[next] = total
			total += s.Shards[next].Tokens
			next++
		}
		k := &s.Packed[i]
		switch {
		case !k.Valid(o.plan.SampleTokens()) || k.Tokens != total:
			return fmt.Errorf("the packing has %d tokens in %d samples of %d tokens, but the shards have %d tokens",
				k.Tokens, k.Samples, o.plan.SampleTokens(), total)
		case k.Bytes < 0 || !isHex(k.SHA256, 64) || filepath.Base(k.File) != k.File ||
			strings.ContainsAny(k.File, `/\`) || validateName(k.File) != nil:
			return fmt.Errorf("the packing index %.80q has an invalid description", k.File)
		case k.Samples == 0:
			return errors.New("no shard has a token; add text")
		case k.Samples == k.HeldOut:
			return errors.New("all documents are in the validation split; add documents, or lower validation")
		}
		samples[i] = k.Samples
		s.Validation += k.HeldOut
		s.training += k.Samples - k.HeldOut
	}
	if len(s.Growth) > 0 {
		return s.compileGrowth(o.plan.Seed, index.Locality{}, shards, samples)
	}
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
	switch {
	case o.padding < limit:
		return nil
	case len(o.plan.Parents) > 0:
		return fmt.Errorf("the padding id of the plan is %d, but the shards have ids below %d; add shards with int32 "+
			"ids, or build a new plan with another padding id", o.padding, limit)
	}
	return fmt.Errorf("the padding id is %d, but the shards have ids below %d; set another with pad, or --pad",
		o.padding, limit)
}

func (o *packedOrder) locate(position int64) (Sample, error) {
	source, epoch, window := o.draw(position)
	return Sample{position, source, epoch, window, -1, -1, o.plan.skipped(position)}, nil
}

func (o *openPackedOrder) locate(position int64) (Sample, error) {
	s, err := o.packedOrder.locate(position)
	if err == nil {
		err = o.begin(&s)
	}
	return s, err
}

func (*packedOrder) segments(dst []segment, _ Sample) ([]segment, error) { return dst, errNotOpen }

// segments implements order. Each segment is part of one document.
func (o *openPackedOrder) segments(dst []segment, s Sample) ([]segment, error) {
	src := &o.plan.Sources[s.Source]
	var buffer [32]packing.Piece
	part, sample := src.partOf(s.Window)
	list, err := o.packings[s.Source][part].Sample(buffer[:0], sample)
	if err != nil {
		return dst, fmt.Errorf("source %q: %w; restore the file, or build a new plan", src.Name, err)
	}
	for _, piece := range list {
		dst = append(dst, src.segment(part, piece))
	}
	return dst, nil
}

// segment locates a piece of a part. A piece is in one shard, because documents are.
func (s *Source) segment(part int, piece packing.Piece) segment {
	first, end := s.partShards(part)
	shard := first + sort.Search(end-first-1, func(i int) bool { return s.firsts[first+i+1] > piece.Token })
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
		for _, held := range s.validationWindows() {
			for w := held.From; w < held.To; w++ {
				if !yield(Sample{Position: -1, Source: source, Epoch: -1, Window: w, Shard: -1, Token: -1}) {
					return
				}
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
		part, window := src.partOfShard(doc.Shard)
		left := doc.Tokens
		for pieces, err := range o.packings[doc.Source][part].All(ctx) {
			if err != nil {
				yield(Occurrence{}, fmt.Errorf("source %q: %w", src.Name, err))
				return
			}
			at := 0
			for _, piece := range pieces {
				if piece.Token >= first && piece.Token < first+doc.Tokens {
					begin := src.segment(part, pieces[0])
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
	opened := &openPackedOrder{packedOrder: &packedOrder{scheduled{p}, o.padding},
		packings: make([][]*packing.Index, len(p.Sources))}
	defer func() {
		if err != nil {
			opened.close()
		}
	}()
	for i := range p.Sources {
		s := &p.Sources[i]
		for j := range s.Packed {
			k := &s.Packed[j]
			x, err := packing.Open(k.path())
			if err != nil {
				return nil, fmt.Errorf("source %q: %w; restore the file, or build a new plan", s.Name, err)
			}
			opened.packings[i] = append(opened.packings[i], x)
			if x.Capacity() != p.SampleTokens() || x.Statistics != k.Statistics || x.Size() != k.Bytes {
				return nil, fmt.Errorf("source %q: the packing index %s has changed since the plan was built: %d "+
					"samples in %d bytes, previously %d in %d; restore it, or build a new plan",
					s.Name, k.path(), x.Samples, x.Size(), k.Samples, k.Bytes)
			}
		}
	}
	return opened, nil
}

func (o *packedOrder) closed() order { return o }

func (o *packedOrder) files() (files []orderFile) {
	for i := range o.plan.Sources {
		s := &o.plan.Sources[i]
		for j := range s.Packed {
			k, of := &s.Packed[j], fmt.Sprintf("the packing of source %q", s.Name)
			if j > 0 {
				of = fmt.Sprintf("the packing of growth %d of source %q", j, s.Name)
			}
			files = append(files, orderFile{k.path(), of, k.Bytes, &k.SHA256})
		}
	}
	return files
}

func (o *openPackedOrder) close() error {
	var errs []error
	for _, list := range o.packings {
		for _, x := range list {
			errs = append(errs, x.Close())
		}
	}
	return errors.Join(errs...)
}

// pack packs the sources of a plan and sets its order. The shards must have been described. With
// options, pack hashes the shards, and builds or reuses the index files. Without options, it only
// counts.
func (d *Data) pack(ctx context.Context, c *Config, l *facts.Cache, opts *SealOptions) error {
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
	b, err := d.newPacker(ctx, l, opts, c.dir, make([]int, len(p.Sources)))
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i := range p.Sources {
		g.Go(func() error {
			if err := b.pack(ctx, i, 0, c.Validation); err != nil {
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

func (o *packedOrder) amend(p *Plan) order { return &packedOrder{scheduled{p}, o.padding} }

// extend implements amendable.
func (o *packedOrder) extend(ctx context.Context, b *packer, s *Source, source, first int, held Number) (out int64,
	err error) {
	if err := b.pack(ctx, source, first, held); err != nil {
		return 0, err
	}
	k := &s.Packed[len(s.Packed)-1]
	switch {
	case k.Samples == 0:
		return 0, errors.New("no new shard has a token; add more text")
	case k.Samples == k.HeldOut:
		return 0, errors.New("all documents of the new shards are validation documents; add more text")
	}
	return k.HeldOut, nil
}

// A packer packs parts of the sources of a plan that is being built.
type packer struct {
	d         *Data
	directory string // of the index files; "": only count
	read      func(source int, tokens int64)
}

// newPacker returns a packer for the shards of each source from number first on. With options, it
// hashes the shards, and the packer builds or reuses index files: in opts.Packings, or in dir.
// Without options, it only counts.
func (d *Data) newPacker(ctx context.Context, l *facts.Cache, opts *SealOptions, dir string,
	first []int) (*packer, error) {
	b := &packer{d: d, read: func(int, int64) {}}
	if opts == nil {
		return b, nil
	}
	d.packs = true
	if err := d.hashFiles(ctx, l, nil, opts); err != nil {
		return nil, err
	}
	var err error
	if b.directory, err = absolutePath(cmp.Or(opts.Packings, dir)); err != nil || opts.Packing == nil {
		return b, err
	}
	var mu sync.Mutex
	var done, total int64
	for i, s := range d.Sources {
		for _, sh := range s.Shards[first[i]:] {
			total += 2 * sh.Tokens // building a file reads the documents twice
		}
	}
	b.read = func(source int, tokens int64) {
		mu.Lock()
		defer mu.Unlock()
		done += tokens
		opts.Packing(PackProgress{d.Sources[source].Name, done, total})
	}
	return b, nil
}

// pack packs the shards of a source from number first on, and appends the part to the source's
// packings. It holds out the given fraction of the part.
func (b *packer) pack(ctx context.Context, source, first int, held Number) error {
	s := &b.d.Sources[source]
	from := packing.Source{Capacity: b.d.SampleTokens(), Documents: b.documentLengths(source, first)}
	for _, sh := range s.Shards[first:] {
		from.Shards = append(from.Shards, packing.Shard{Tokens: sh.Tokens, Index: sh.Index})
		from.HeldOut += sh.Tokens
	}
	if held.IsSet() {
		n, _ := held.ceilTimes(from.HeldOut) // at most HeldOut, because the fraction is below 1
		var err error
		if from.HeldOut, err = b.documentBefore(source, first, from.HeldOut-n); err != nil {
			return err
		}
	}
	if b.directory == "" {
		statistics, err := packing.Count(ctx, &from)
		s.Packed = append(s.Packed, PackedPart{File: from.Name(), SHA256: unhashed, Statistics: statistics})
		return err
	}
	f, err := packing.Build(ctx, nil, b.directory, &from)
	if err != nil {
		return err
	}
	s.Packed = append(s.Packed, PackedPart{f.Name, f.Bytes, f.SHA256, f.Statistics, b.directory})
	return nil
}

// documentLengths lists the number of tokens of each document in the shards of a source from number
// first on, in order. It reports processed tokens at intervals.
func (b *packer) documentLengths(source, first int) iter.Seq2[int64, error] {
	const often = 1 << 16 // documents
	return func(yield func(int64, error) bool) {
		var documents, tokens int64
		d := b.d
		for k := first; k < len(d.Sources[source].Shards); k++ {
			shard, err := d.pool.Acquire(d.firsts[source] + k)
			if err != nil {
				yield(0, err)
				return
			}
			for n, err := range shard.DocumentLengths() {
				if !yield(n, err) || err != nil {
					d.pool.Release(d.firsts[source] + k)
					return
				}
				tokens += n
				if documents++; documents%often == 0 {
					b.read(source, tokens)
					tokens = 0
				}
			}
			d.pool.Release(d.firsts[source] + k)
		}
	}
}

// documentBefore returns the first token of the document that holds a token. Tokens are numbered
// through the shards of the source from number first on. At the end of the source it returns the
// end.
func (b *packer) documentBefore(source, first int, token int64) (int64, error) {
	d, before := b.d, int64(0)
	for k := first; k < len(d.Sources[source].Shards); k++ {
		sh := d.Sources[source].Shards[k]
		if token >= before+sh.Tokens {
			before += sh.Tokens
			continue
		}
		shard, err := d.pool.Acquire(d.firsts[source] + k)
		if err != nil {
			return 0, err
		}
		defer d.pool.Release(d.firsts[source] + k)
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
