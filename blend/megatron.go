package blend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"mula/blend/mixture"
	"mula/index/cache"
	"mula/index/megatron"
	"mula/index/rebuild"
	"mula/internal/mapping"
	"mula/internal/strictjson"
	"mula/shards"
	"mula/shards/facts"
)

// MegatronOrder is the order version in plan.json for an order that is read from an index cache of
// Megatron-LM.
const MegatronOrder = "megatron 1"

// A megatronOrder is an order that is read from an index cache of Megatron-LM. Samples can be
// located only by a [cacheOrder], the order of an open plan. The sources are the datasets, with one
// shard each. A window is a sample of the dataset; its shard and token locate its first segment.
// There are no epochs, because Megatron shuffles the documents of all epochs together: Sample.Epoch
// is -1.
type megatronOrder struct {
	plan  *Plan
	cache cacheDescription

	directory, root string // of the files; for relative prefixes
}

// A cacheDescription describes the index cache that a plan's order is read from.
type cacheDescription struct {
	Name       string `json:"name"`       // hash of the blend or dataset: the MD5 of its description
	Validation string `json:"validation"` // hash of the validation blend or dataset; "" for none
	// a sample has one token more than Megatron's sequence length, as is Megatron's default
	ExtraToken bool        `json:"extra_token"`
	Files      []CacheFile `json:"files"` // all files that the order depends on, by name
}

// A CacheFile is a file of an index cache.
type CacheFile struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// A cacheOrder is a megatronOrder with open caches.
type cacheOrder struct {
	*megatronOrder
	train   *megatron.Cache
	valid   *megatron.Cache // nil without validation
	indexes []openedIndex   // by source
	held    []int           // by source: index of its dataset in valid, -1 if none
}

// An openedIndex is the .idx file of a source, opened when it is first needed.
type openedIndex struct {
	once sync.Once
	x    *shards.Index
	err  error
}

// index returns the .idx file of a source.
func (o *cacheOrder) index(source int) (*shards.Index, error) {
	x := &o.indexes[source]
	x.once.Do(func() { x.x, x.err = shards.OpenIndex(o.plan.ShardPath(source, 0)) })
	return x.x, x.err
}

// sealedMegatron replaces sealedPlan in a plan whose order is read from a Megatron cache.
type sealedMegatron struct {
	Order          string            `json:"order"`
	SequenceLength int               `json:"sequence_length"`
	Tokenizer      *Tokenizer        `json:"tokenizer"`
	Length         int64             `json:"length"`
	Cache          *cacheDescription `json:"cache"`
	Sources        []sealedDataset   `json:"sources"`
	Skips          []Range           `json:"skips"`
	Checks         []Check           `json:"checks"`
}

type sealedDataset struct {
	Name       string  `json:"name"`
	Samples    int64   `json:"samples"`
	Drawn      int64   `json:"drawn_samples"`
	Validation int64   `json:"validation_samples"`
	Shards     []Shard `json:"shards"`
}

func (o *megatronOrder) traits() Traits {
	return Traits{Version: MegatronOrder, name: "the order of Megatron-LM",
		instead: "use a plan with mula's native order"}
}

func (o *megatronOrder) sealed() any {
	p := o.plan
	f := sealedMegatron{Order: MegatronOrder, SequenceLength: p.SequenceLength, Tokenizer: p.Tokenizer,
		Length: p.length, Cache: &o.cache, Skips: p.sealedSkips(), Checks: p.Checks}
	for i, s := range p.Sources {
		f.Sources = append(f.Sources, sealedDataset{s.Name, s.training, p.totals[i], s.Validation, s.Shards})
	}
	return f
}

func (o *megatronOrder) writeFiles(w *writtenPlan, relative func(string) (string, error)) (err error) {
	w.Stages, w.Cache = [][]string{}, new(writtenCache)
	if w.Cache.Directory, err = relative(o.folder()); err != nil {
		return err
	}
	w.Cache.Root, err = relative(o.plan.path(o.root))
	return err
}

// resolve does nothing: the paths are relative to the base of the plan, like paths of shards.
func (o *megatronOrder) resolve() {}

// folder returns the directory of the cache.
func (o *megatronOrder) folder() string { return o.plan.path(o.directory) }

// parseMegatron parses a plan whose order is read from a cache.
func parseMegatron(data []byte) (*Plan, string, error) {
	var f planFile[sealedMegatron]
	if err := strictjson.Decode(data, &f); err != nil {
		return nil, "", err
	}
	if len(f.Written.Sources) != len(f.Plan.Sources) || f.Plan.Cache == nil || f.Written.Cache == nil {
		return nil, "", fmt.Errorf("`plan` has %d sources and needs a cache, but `written` has %d sources, or `cache` "+
			"is missing", len(f.Plan.Sources), len(f.Written.Sources))
	}
	p := &Plan{SequenceLength: f.Plan.SequenceLength, Tokenizer: f.Plan.Tokenizer, Skips: f.Plan.Skips,
		Checks: f.Plan.Checks, length: f.Plan.Length}
	p.order = &megatronOrder{p, *f.Plan.Cache, f.Written.Cache.Directory, f.Written.Cache.Root}
	for i, s := range f.Plan.Sources {
		if err := placeShards(s.Name, s.Shards, f.Written.Sources[i].Paths); err != nil {
			return nil, "", err
		}
		p.Sources = append(p.Sources, Source{Name: s.Name, training: s.Samples, Validation: s.Validation,
			Shards: s.Shards})
		p.totals = append(p.totals, s.Drawn)
	}
	return p, f.Fingerprint, nil
}

// errCacheNotOpen reports that a plan was not opened before a sample was located.
var errCacheNotOpen = errors.New("the order is in the files of a Megatron cache; open the plan to read it")

func (*megatronOrder) locate(int64) (Sample, error) { return Sample{}, errCacheNotOpen }

func (*megatronOrder) segments(dst []segment, _ Sample) ([]segment, error) {
	return dst, errCacheNotOpen
}

func (*megatronOrder) position(int, int64, int64) (int64, bool) { return 0, false }

func (*megatronOrder) positions(_ context.Context, from, to int64, yield func(Block, error) bool) {
	if from < to {
		yield(Block{}, errCacheNotOpen)
	}
}

func (*megatronOrder) validation(int) iter.Seq[Sample] { return func(func(Sample) bool) {} }

func (*megatronOrder) occurrences(context.Context, Document) iter.Seq2[Occurrence, error] {
	return func(yield func(Occurrence, error) bool) { yield(Occurrence{}, errCacheNotOpen) }
}

func (*megatronOrder) close() error { return nil }

func (o *megatronOrder) closed() order { return o }

func (o *megatronOrder) files() (files []orderFile) {
	for i := range o.cache.Files {
		f := &o.cache.Files[i]
		files = append(files, orderFile{filepath.Join(o.folder(), f.Name), "the cache " + o.folder(), f.Bytes,
			&f.SHA256})
	}
	return files
}

// open implements order. It compares the cache with the plan without reading complete files.
func (o *megatronOrder) open(ctx context.Context, p *Plan, waiting func(string)) (_ order, err error) {
	opened, err := (&megatronOrder{p, o.cache, o.directory, o.root}).await(ctx, waiting)
	if err != nil {
		return nil, err
	}
	if err = opened.bind(); err == nil {
		err = opened.verifyCache()
	}
	if err != nil {
		opened.close()
		return nil, err
	}
	return opened, nil
}

// openCaches opens the caches. It does not open the plan's shards.
func (o *megatronOrder) openCaches() (_ *cacheOrder, err error) {
	opened := &cacheOrder{megatronOrder: o}
	defer func() {
		if err != nil {
			opened.close()
		}
	}()
	root := o.plan.path(o.root)
	if opened.train, err = megatron.OpenCache(o.folder(), o.cache.Name, root); err != nil {
		return nil, err
	}
	if o.cache.Validation != "" {
		if opened.valid, err = megatron.OpenCache(o.folder(), o.cache.Validation, root); err != nil {
			return nil, fmt.Errorf("validation: %w", err)
		}
	}
	return opened, nil
}

// await calls openCaches. If waiting is not nil, it waits while other processes build missing
// files.
func (o *megatronOrder) await(ctx context.Context, waiting func(string)) (opened *cacheOrder, err error) {
	err = awaitCache(ctx, o.folder(), waiting, func() (err error) {
		opened, err = o.openCaches()
		return err
	})
	return opened, err
}

// awaitCache calls open until no file is missing that another process is building. If waiting is
// nil, it calls open once.
func awaitCache(ctx context.Context, dir string, waiting func(string), open func() error) error {
	if waiting == nil {
		return open()
	}
	return cache.Await(ctx, dir,
		func(builder string) { waiting(fmt.Sprintf("waiting for %s, which is building %s", builder, dir)) }, open)
}

// bind maps the datasets of the caches to the sources of the plan.
func (o *cacheOrder) bind() error {
	o.held = slices.Repeat([]int{-1}, len(o.plan.Sources))
	o.indexes = make([]openedIndex, len(o.plan.Sources))
	if o.valid == nil {
		return nil
	}
	if o.valid.SequenceLength() != o.train.SequenceLength() || o.valid.ExtraToken() != o.train.ExtraToken() {
		return fmt.Errorf("validation samples have %d tokens and training samples %d; use index files of one run",
			o.valid.SequenceLength(), o.train.SequenceLength())
	}
	train := o.train.Datasets()
	for v, dataset := range o.valid.Datasets() {
		i := 0
		for i < len(train) && (train[i].Path != dataset.Path || o.held[i] >= 0) {
			i++
		}
		if i == len(train) {
			return fmt.Errorf("the validation blend has dataset %s, but training does not; remove "+
				"megatron.validation, and evaluate on another plan", dataset.Prefix)
		}
		o.held[i] = v
	}
	return nil
}

func (o *cacheOrder) close() error {
	var errs []error
	for _, c := range []*megatron.Cache{o.train, o.valid} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	for i := range o.indexes {
		if x := o.indexes[i].x; x != nil {
			errs = append(errs, x.Close())
		}
	}
	return errors.Join(errs...)
}

// locate returns the sample at a position.
func (o *cacheOrder) locate(position int64) (Sample, error) {
	s := Sample{Position: position, Epoch: -1, Skipped: o.plan.skipped(position)}
	err := mapping.Guard(func() (err error) {
		s.Source, s.Window, err = o.train.Sample(position)
		return err
	})
	if err != nil {
		return Sample{}, err
	}
	err = o.begin(&s)
	return s, err
}

// begin sets the first token of a sample.
func (o *cacheOrder) begin(s *Sample) error {
	var buffer [16]segment
	segments, err := o.segments(buffer[:0], *s)
	if err == nil && len(segments) > 0 {
		s.Token = segments[0].token
	}
	return err
}

// segments appends the segments of a sample.
func (o *cacheOrder) segments(dst []segment, s Sample) ([]segment, error) {
	cache, dataset, number := o.train, s.Source, s.Window
	if training := o.plan.Sources[s.Source].training; number >= training {
		cache, dataset, number = o.valid, o.held[s.Source], number-training
		if cache == nil || dataset < 0 {
			return dst, fmt.Errorf("source %q has no sample %d", o.plan.Sources[s.Source].Name, s.Window)
		}
	}
	x, err := o.index(s.Source)
	if err != nil {
		return dst, err
	}
	err = mapping.Guard(func() error {
		var buffer [16]megatron.Segment
		list, err := cache.Segments(buffer[:0], dataset, number)
		if err != nil {
			return err
		}
		for _, g := range list {
			start, err := x.SequenceStart(g.Document)
			if err != nil {
				return err
			}
			dst = append(dst, segment{token: start + g.Offset, length: g.Length, begins: g.Offset == 0})
		}
		return nil
	})
	return dst, err
}

// whole reports whether a sample has all of its tokens. The last sample of a validation set may be
// short; Megatron then pads it.
func (o *cacheOrder) whole(segments []segment) bool {
	return lengthOf(segments) == int64(o.plan.SampleTokens())
}

// validation lists the validation samples of a source: the samples that the validation blend draws,
// without the short one.
func (o *cacheOrder) validation(source int) iter.Seq[Sample] {
	return func(yield func(Sample) bool) {
		src := &o.plan.Sources[source]
		left := src.Validation
		var segments []segment
		for number := src.training; left > 0; number++ {
			s := Sample{Position: -1, Source: source, Epoch: -1, Window: number}
			var err error
			// In a damaged cache the counts may differ. A sample that cannot be read reports an
			// error when it is read.
			if segments, err = o.segments(segments[:0], s); err == nil && !o.whole(segments) {
				continue
			}
			if len(segments) > 0 {
				s.Token = segments[0].token
			}
			left--
			if !yield(s) {
				return
			}
		}
	}
}

// position searches the order, until an error, because there is no formula.
func (o *cacheOrder) position(source int, epoch, window int64) (int64, bool) {
	if epoch != -1 || window < 0 || window >= o.plan.Sources[source].training {
		return 0, false
	}
	for b, err := range o.plan.Positions(context.Background(), 0, o.plan.length) {
		if err != nil {
			break
		}
		for i, w := range b.Windows {
			if w == window && int(b.Sources[i]) == source {
				return b.First + int64(i), true
			}
		}
	}
	return 0, false
}

// positions reads the order in blocks.
func (o *cacheOrder) positions(ctx context.Context, from, to int64, yield func(Block, error) bool) {
	n := min(to-from, blockLength)
	b := Block{from, make([]int32, n), make([]int64, n)}
	for ; b.First < to; b.First += n {
		n = min(to-b.First, blockLength)
		b.Sources, b.Windows = b.Sources[:n], b.Windows[:n]
		err := context.Cause(ctx)
		if err == nil {
			err = o.fill(&b)
		}
		if err != nil {
			yield(Block{}, err)
			return
		}
		if !yield(b, nil) {
			return
		}
	}
}

// fill fills a block.
func (o *cacheOrder) fill(b *Block) error {
	return mapping.Guard(func() error {
		for i := range b.Sources {
			source, number, err := o.train.Sample(b.First + int64(i))
			if err != nil {
				return err
			}
			b.Sources[i], b.Windows[i] = int32(source), number
		}
		return nil
	})
}

// occurrences lists the occurrences of a document. It first finds the samples that hold the
// document, then the positions of these samples.
func (o *cacheOrder) occurrences(ctx context.Context, doc Document) iter.Seq2[Occurrence, error] {
	return func(yield func(Occurrence, error) bool) {
		src := &o.plan.Sources[doc.Source]
		end := doc.First + doc.Tokens
		samples := src.training
		if o.held[doc.Source] >= 0 {
			samples += o.valid.Datasets()[o.held[doc.Source]].Samples
		}
		type place struct {
			Occurrence
			drawn []int64 // positions
		}
		found := map[int64][]int{} // sample → indices in places
		var places []place
		var segments []segment
		for w := range samples {
			if w%(1<<12) == 0 && ctx.Err() != nil {
				yield(Occurrence{}, context.Cause(ctx))
				return
			}
			s := Sample{Position: -1, Source: doc.Source, Epoch: -1, Window: w, Shard: doc.Shard}
			var err error
			if segments, err = o.segments(segments[:0], s); err != nil {
				yield(Occurrence{}, err)
				return
			}
			if w >= src.training && !o.whole(segments) {
				continue
			}
			at := int64(0) // in the sample
			for _, g := range segments {
				from, to := max(g.token, doc.First), min(g.token+g.length, end)
				if from < to {
					s.Token = segments[0].token
					found[w] = append(found[w], len(places))
					places = append(places, place{Occurrence: Occurrence{Sample: s,
						Part: Part{doc, int(at + from - g.token), int(at + to - g.token)}}})
				}
				at += g.length
			}
		}
		if len(places) == 0 {
			yield(Occurrence{Part: Part{Document: doc}, Use: NoWindow,
				Sample: Sample{Position: -1, Source: doc.Source, Epoch: -1, Window: -1, Shard: doc.Shard}}, nil)
			return
		}
		for b, err := range o.plan.Positions(ctx, 0, o.plan.length) {
			if err != nil {
				yield(Occurrence{}, err)
				return
			}
			for i, source := range b.Sources {
				if int(source) != doc.Source {
					continue
				}
				for _, k := range found[b.Windows[i]] {
					places[k].drawn = append(places[k].drawn, b.First+int64(i))
				}
			}
		}
		for _, p := range places {
			switch {
			case p.Sample.Window >= src.training:
				p.Use = HeldOut
			case len(p.drawn) == 0:
				p.Use = NotReached
			}
			if len(p.drawn) == 0 && !yield(p.Occurrence, nil) {
				return
			}
			for _, k := range p.drawn {
				p.Use, p.Sample.Position, p.Sample.Skipped = Drawn, k, o.plan.skipped(k)
				if p.Sample.Skipped {
					p.Use = SkippedOver
				}
				if !yield(p.Occurrence, nil) {
					return
				}
			}
		}
	}
}

// surveyMegatron returns the open data of a plan that reads a cache. The plan has no hashes and no
// check values yet.
func surveyMegatron(ctx context.Context, c *Config, l *facts.Cache, opts *SealOptions) (_ *Data, err error) {
	var waiting func(string)
	if opts != nil {
		waiting = opts.Waiting
	}
	at := func(field string, err error) error {
		return c.file.Errorf("$.megatron"+field, "order megatron: %w", err)
	}
	p := &Plan{SequenceLength: c.SequenceLength}
	o := &megatronOrder{plan: p}
	m := &o.cache
	for _, d := range []struct {
		to      *string
		written string
	}{{&o.directory, c.Megatron.Cache}, {&o.root, c.Megatron.Root}} {
		path := filepath.FromSlash(d.written)
		if !filepath.IsAbs(path) {
			path = filepath.Join(c.dir, path)
		}
		if *d.to, err = absolutePath(path); err != nil {
			return nil, at("", err)
		}
	}
	if m.Name = hashOf(c.Megatron.Name); c.Megatron.Name == "" {
		if err = awaitCache(ctx, o.directory, waiting, func() (err error) {
			m.Name, err = onlyOrder(o.directory, cmp.Or(c.Megatron.Split, rebuild.Train.String()))
			return err
		}); err != nil {
			return nil, at(".cache", err)
		}
	}
	m.Validation = hashOf(c.Megatron.Validation)
	opened, err := o.await(ctx, waiting)
	if err != nil {
		return nil, at("", err)
	}
	p.order = opened
	defer func() {
		if err != nil {
			opened.close()
		}
	}()
	train := opened.train
	if split := c.Megatron.Split; split != "" && split != train.Split().String() {
		return nil, at(".split", fmt.Errorf("%s belongs to the split %s, not %s", m.Name, train.Split(), split))
	}
	m.ExtraToken = train.ExtraToken()
	length := int(min(train.SequenceLength(), math.MaxInt32))
	if !m.ExtraToken { // the last of a sample's tokens is a target only
		length--
	}
	if p.SequenceLength == 0 {
		p.SequenceLength = length
	}
	if p.SequenceLength != length {
		extra := ""
		if !m.ExtraToken {
			extra = " (one less than Megatron's, because there is no extra token)"
		}
		return nil, c.file.Errorf("$.sequence_length",
			"sequence_length is %d, but the samples of the cache train on %d tokens%s; set that value, or remove it",
			p.SequenceLength, length, extra)
	}
	if p.length = train.Len(); p.length == 0 {
		return nil, at(".cache", errors.New("the order has no samples"))
	}
	names := map[string]bool{}
	for _, dataset := range train.Datasets() {
		name := dataset.Prefix
		for n := 2; names[name]; n++ { // Megatron may read a file twice
			name = fmt.Sprintf("%s (%d)", dataset.Prefix, n)
		}
		names[name] = true
		path, err := absolutePath(dataset.Path)
		if err != nil {
			return nil, at("", err)
		}
		p.Sources = append(p.Sources, Source{Name: name, training: dataset.Samples,
			Shards: []Shard{{Path: path, Bin: unhashed, Index: unhashed}}})
	}
	if err := opened.bind(); err != nil {
		return nil, at("", err)
	}
	if err := opened.check(ctx); err != nil {
		return nil, at(".cache", err)
	}
	if err := opened.count(ctx); err != nil {
		return nil, err
	}
	if m.Files, err = opened.listFiles(); err != nil {
		return nil, at(".cache", err)
	}
	d := newData(p, false)
	if err := d.survey(ctx, l); err != nil {
		return nil, err
	}
	d.describeShards()
	if p.Tokenizer, err = d.tokenizer(); err != nil {
		return nil, err
	}
	p.Stages = nil // compile adds the only stage
	if err := p.resolveSkips(c, p.length); err != nil {
		return nil, err
	}
	if err := p.compile(); err != nil {
		return nil, at("", err)
	}
	return d, nil
}

// hashOf returns the part of a file name before its first hyphen.
func hashOf(name string) string {
	if name == "" {
		return ""
	}
	hash, _, _ := strings.Cut(filepath.Base(filepath.FromSlash(name)), "-")
	return hash
}

// check reads the complete caches, so that no plan is built from a damaged cache.
func (o *cacheOrder) check(ctx context.Context) error {
	if err := o.train.Check(ctx); err != nil {
		return err
	}
	if o.valid == nil {
		return nil
	}
	if err := o.valid.Check(ctx); err != nil {
		return fmt.Errorf("validation: %w", err)
	}
	return nil
}

// count counts the samples of each source that the order draws, and its validation samples.
func (o *cacheOrder) count(ctx context.Context) error {
	p := o.plan
	p.totals = make([]int64, len(p.Sources))
	for b, err := range p.Positions(ctx, 0, p.length) {
		if err != nil {
			return err
		}
		for _, source := range b.Sources {
			p.totals[source]++
		}
	}
	if o.valid == nil {
		return nil
	}
	sources := make([]int, len(o.valid.Datasets())) // by dataset of valid
	for i, v := range o.held {
		if v >= 0 {
			sources[v] = i
		}
	}
	var segments []segment
	for k := range o.valid.Len() {
		if k%(1<<16) == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var dataset int
		var number int64
		err := mapping.Guard(func() (err error) {
			dataset, number, err = o.valid.Sample(k)
			return err
		})
		if err != nil {
			return err
		}
		src := &p.Sources[sources[dataset]]
		if segments, err = o.segments(segments[:0], Sample{Source: sources[dataset], Window: src.training +
			number}); err != nil {
			return err
		}
		if o.whole(segments) {
			src.Validation++
		}
	}
	return nil
}

// describedOrders lists the hashes of the blends and datasets that a cache describes for a split.
func describedOrders(dir, split string) (blends, datasets []string, err error) {
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range list {
		if !strings.HasSuffix(e.Name(), "-description.txt") {
			continue
		}
		described, err := megatron.ReadLike(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, nil, err
		}
		if described.Of.String() != split {
			continue
		}
		if described.Class == "GPTDataset" {
			datasets = append(datasets, hashOf(e.Name()))
		} else {
			blends = append(blends, hashOf(e.Name()))
		}
	}
	return blends, datasets, nil
}

// unready is an error about a missing file that another process may be building.
type unready string

func (e unready) Error() string { return string(e) }

func (unready) Is(target error) bool { return target == fs.ErrNotExist }

// onlyOrder returns the only blend of a split in a cache, or its only dataset if there is no blend.
func onlyOrder(dir, split string) (string, error) {
	blends, datasets, err := describedOrders(dir, split)
	if err != nil {
		return "", err
	}
	found, what := blends, "blends"
	if len(found) == 0 {
		found, what = datasets, "datasets"
		if builders, err := cache.Builders(dir); err != nil || len(builders) > 0 {
			// another process may be building a blend of the datasets
			return "", errors.Join(unready(fmt.Sprintf("%s does not describe a blend of the split %s yet", dir, split)),
				err)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return "", unready(fmt.Sprintf("%s describes neither a blend nor a dataset of the split %s", dir, split))
	}
	return "", fmt.Errorf("%s has %d %s of the split %s, such as %s and %s; select one with name", dir, len(found),
		what, split, found[0], found[1])
}

// listFiles lists the files of the order and of the validation split, with their sizes.
func (o *cacheOrder) listFiles() ([]CacheFile, error) {
	names := o.train.Files()
	if o.valid != nil {
		names = append(names, o.valid.Files()...)
	}
	slices.Sort(names)
	var files []CacheFile
	for _, name := range slices.Compact(names) {
		info, err := os.Stat(filepath.Join(o.folder(), name))
		if err != nil {
			return nil, err
		}
		files = append(files, CacheFile{name, info.Size(), unhashed})
	}
	return files, nil
}

func (o *megatronOrder) compileSource(*Source) error { return nil } // compile validates all sources

func (o *megatronOrder) compile() error {
	p, m := o.plan, &o.cache
	if !isHex(m.Name, 32) || m.Validation != "" && !isHex(m.Validation, 32) {
		return errors.New("name and validation of the cache must be hashes of 32 hexadecimal digits")
	}
	if p.length < 1 || p.length > maxLength || len(p.totals) != len(p.Sources) {
		return fmt.Errorf("the plan has %d samples, but the limits are 1 and 2^60", p.length)
	}
	var drawn int64
	weights := make([]uint64, len(p.Sources))
	for i := range p.Sources {
		s := &p.Sources[i]
		if len(s.Shards) != 1 {
			return fmt.Errorf("source %q has %d shards; a Megatron dataset has one", s.Name, len(s.Shards))
		}
		if s.training < 0 || s.training > maxLength || s.Validation < 0 || s.Validation > maxLength ||
			p.totals[i] < 0 || p.totals[i] > p.length-drawn {
			return fmt.Errorf("source %q has invalid counts: %d of %d samples drawn, %d for "+
				"validation", s.Name, p.totals[i],
				s.training, s.Validation)
		}
		drawn += p.totals[i]
		weights[i] = uint64(p.totals[i])
	}
	if drawn != p.length {
		return fmt.Errorf("the sources have %d samples in total, but the plan has %d", drawn, p.length)
	}
	p.Stages = []Stage{{Samples: p.length, Weights: weights, Written: make([]string, len(weights))}}
	p.schedule = []schedule{{tree: new(mixture.Tree), base: make([]int64, len(p.Sources))}}
	last := ""
	for _, f := range m.Files {
		if f.Name <= last || filepath.Base(f.Name) != f.Name || strings.ContainsAny(f.Name, `/\`) ||
			validateName(f.Name) != nil || f.Bytes < 0 || !isHex(f.SHA256, 64) {
			return fmt.Errorf("the cache's file %.80q has an invalid description", f.Name)
		}
		last = f.Name
	}
	return nil
}

// verifyCache compares the open cache with the plan, without reading complete files.
func (o *cacheOrder) verifyCache() error {
	p, m := o.plan, &o.cache
	changed := func(format string, args ...any) error {
		return fmt.Errorf("the cache %s has changed since the plan was built: %s; restore it, or build a new plan",
			o.folder(), fmt.Sprintf(format, args...))
	}
	for _, f := range m.Files {
		info, err := os.Stat(filepath.Join(o.folder(), f.Name))
		if err != nil {
			return changed("%v", err)
		}
		if info.Size() != f.Bytes {
			return changed("%s has %d bytes, previously %d", f.Name, info.Size(), f.Bytes)
		}
	}
	length := o.train.SequenceLength()
	if !m.ExtraToken {
		length--
	}
	datasets := o.train.Datasets()
	switch {
	case o.train.Len() != p.length:
		return changed("it has %d samples, previously %d", o.train.Len(), p.length)
	case o.train.ExtraToken() != m.ExtraToken || length != int64(p.SequenceLength):
		return changed("its samples have another length")
	case len(datasets) != len(p.Sources):
		return changed("it has %d datasets, previously %d", len(datasets), len(p.Sources))
	}
	for i, dataset := range datasets {
		if dataset.Samples != p.Sources[i].training {
			return changed("dataset %s has %d samples, previously %d", dataset.Prefix, dataset.Samples,
				p.Sources[i].training)
		}
		if v := o.held[i]; p.Sources[i].Validation > 0 &&
			(v < 0 || o.valid.Datasets()[v].Samples < p.Sources[i].Validation) {
			return changed("dataset %s has fewer than %d validation samples", dataset.Prefix, p.Sources[i].Validation)
		}
	}
	return nil
}
