package blendcorpus

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"mula/index/gpt"
	"mula/index/greedy"
	"mula/index/numpy"
	"mula/index/rebuild"
	"mula/shards"
)

// An Index is an opened configuration: its token files, and the names of everything that the
// program would build from them. It is safe for concurrent use until [Index.Close].
type Index struct {
	config    Config
	fractions [3]float64
	files     map[string]*shards.Index // by prefix
	datasets  []*dataset               // each name once, by split and then in list order
	named     map[string]*dataset      // by hash
	// each name once: for every split the corpora, then their blend
	blends []*blend
}

// New opens a configuration: it opens the .idx files and counts the tokens of every split. It reads
// all lengths, because names depend on the number of epochs. New returns an error for a
// configuration that the program would reject or never finish building, and, unless allowed by
// [Config.AllowUnreadable], for one whose files it would fail to read.
func New(ctx context.Context, c Config) (_ *Index, err error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	fractions, present, err := parseSplit(c.Split, c.flat())
	if err != nil {
		return nil, err
	}
	weights, err := normalized(c.Files)
	if err != nil {
		return nil, err
	}
	x := &Index{config: c, fractions: fractions, files: map[string]*shards.Index{}, named: map[string]*dataset{}}
	defer func() {
		if err != nil {
			x.Close()
		}
	}()
	var plans []*plan
	var train int64 // samples of the train split, even if the split is not built
	for s := range c.Samples {
		p, err := x.plan(rebuild.Split(s), weights)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", rebuild.Split(s), err)
		}
		if p.split == rebuild.Train {
			train = p.total
		}
		if present[s] && (p.total > 0 || c.flat()) {
			plans = append(plans, p)
		}
	}
	prefixes := make([]string, len(c.Files))
	for i, f := range c.Files {
		prefixes[i] = f.Prefix
	}
	if err := gpt.FetchTokens(ctx, c.Root, prefixes, x.files); err != nil {
		return nil, err
	}
	for _, p := range plans {
		if err := x.open(p); err != nil {
			return nil, err
		}
	}
	if err := measure(ctx, plans, c.Threads); err != nil {
		return nil, err
	}
	for _, p := range plans {
		if err := x.assemble(p, weights, train); err != nil {
			return nil, fmt.Errorf("%s: %w", p.split, err)
		}
	}
	return x, nil
}

// A plan has the requests of one split to the files, in their order.
type plan struct {
	split    rebuild.Split
	samples  []int64
	total    int64
	datasets []*dataset // nil for a file without a document in the split
}

// plan divides the requested samples between the files.
func (x *Index) plan(s rebuild.Split, weights []float64) (*plan, error) {
	c := &x.config
	p := &plan{split: s, samples: make([]int64, len(c.Files))}
	for i, w := range weights {
		var err error
		if p.samples[i], err = share(c.Samples[s], w); err != nil {
			return nil, err
		}
		if c.Plain {
			p.samples[i] = c.Samples[s]
		}
		if p.total += p.samples[i]; p.total >= 1<<53 {
			return nil, fmt.Errorf("%d samples cannot be blended exactly; request fewer samples", p.total)
		}
	}
	return p, nil
}

// open opens the files of a split and finds their documents.
func (x *Index) open(p *plan) error {
	c := &x.config
	p.datasets = make([]*dataset, len(c.Files))
	empty := 0
	for i, f := range c.Files {
		file := x.files[f.Prefix]
		if file == nil {
			var err error
			if file, err = gpt.OpenTokens(c.Root, f.Prefix); err != nil {
				return err
			}
			x.files[f.Prefix] = file
		}
		sequences := file.Sequences()
		edges := gpt.SplitEdges(x.fractions, sequences)
		first, end := edges[p.split], edges[p.split+1]
		if first < end {
			if first < 0 {
				return fmt.Errorf("%s, %s split: rounding of split %q gives first sequence %d, where the program "+
					"stops; change the split slightly",
					file.Path(), p.split, c.Split, first)
			}
			epochs := int64(0)
			if p.split == rebuild.Train {
				epochs = c.ExactEpochs
			}
			d := &dataset{file: file, request: request{
				prefix: f.Prefix, split: p.split, samples: p.samples[i],
				sequenceLength: c.SequenceLength, seed: c.Seed, splitText: c.Split,
			}}
			tokens, err := file.SequenceTokens(first, end)
			if err != nil {
				return err
			}
			d.gpt = d.over(file, first, end, epochs)
			d.gpt.Tokens = tokens
			p.datasets[i] = d
			continue
		}
		empty++
		if !c.flat() && !c.AllowUnreadable {
			return fmt.Errorf("%s, %s split: none of its %d sequences are in split %q, although %d samples are "+
				"requested from them, and training would stop at the first such sample; set the split to 0, give it "+
				"a larger share, or merge the file with another", file.Path(), p.split,
				sequences, c.Split, p.samples[i])
		}
	}
	switch {
	case !c.flat() || empty == 0:
		return nil
	case empty == len(c.Files):
		p.datasets = nil // nothing of this split is built
		return nil
	}
	return fmt.Errorf("%s split: split %q leaves %d of the %d files without a document, and the program stops there "+
		"(fewer data sets than weights); set the split to 0, give it a larger share, or merge files",
		p.split, c.Split, empty, len(c.Files))
}

// measure counts the tokens of all datasets with the given number of threads; 0 is GOMAXPROCS.
func measure(ctx context.Context, plans []*plan, threads int) error {
	if threads < 1 {
		threads = runtime.GOMAXPROCS(0)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(threads)
	for _, p := range plans {
		for _, d := range p.datasets {
			if d == nil {
				continue
			}
			g.Go(func() error {
				if err := ctx.Err(); err != nil {
					return context.Cause(ctx)
				}
				return d.measure()
			})
		}
	}
	return g.Wait()
}

// assemble creates the datasets and blends of a split. train is the number of samples in the blend
// of the train split.
func (x *Index) assemble(p *plan, weights []float64, train int64) error {
	c := &x.config
	if p.datasets == nil {
		return nil
	}
	for i, d := range p.datasets {
		if d == nil {
			continue
		}
		if known := x.named[d.hash]; known != nil {
			p.datasets[i] = known
			continue
		}
		x.named[d.hash] = d
		x.datasets = append(x.datasets, d)
	}
	if c.Plain {
		return nil
	}
	if c.flat() {
		return x.assembleFlat(p, weights)
	}
	return x.assembleCorpora(p, train)
}

func (x *Index) assembleFlat(p *plan, weights []float64) error {
	c := &x.config
	if p.total == 0 {
		return fmt.Errorf("no samples are requested, and the program stops at an empty blend; request samples, or "+
			"set the split to 0 in %q", c.Split)
	}
	b := &blend{name: "blend", splits: []rebuild.Split{p.split}, size: p.total, lenient: c.AllowUnreadable,
		weights: numpy.Normalize(weights), fused: c.Fused}
	entries := make([]string, len(p.datasets))
	for i, d := range p.datasets {
		entries[i] = d.text(d.epochs)
		b.parts = append(b.parts, part{d.prefix, p.samples[i], d.layout.Samples})
	}
	b.text = blendText(entries, b.weights, b.size)
	return x.addBlend(b)
}

func (x *Index) assembleCorpora(p *plan, train int64) error {
	c := &x.config
	members := map[string][]int{} // files by corpus
	var names []string
	for i, f := range c.Files {
		if members[f.Corpus] == nil {
			names = append(names, f.Corpus)
		}
		members[f.Corpus] = append(members[f.Corpus], i)
	}
	slices.Sort(names) // Python sorts by code point, which is the byte order of UTF-8

	top := &blend{name: "blend", splits: []rebuild.Split{p.split}, size: p.total,
		lenient: c.AllowUnreadable, fused: c.Fused}
	var entries []string
	for _, name := range names {
		b := &blend{name: "corpus " + name, splits: []rebuild.Split{p.split}, concat: !c.BlendSampleInCorpus,
			lenient: c.AllowUnreadable, fused: c.Fused}
		var prefixes []string
		for _, i := range members[name] {
			made := part{name: c.Files[i].Prefix, asked: p.samples[i]}
			if d := p.datasets[i]; d != nil {
				made.have = d.layout.Samples
			}
			b.parts = append(b.parts, made)
			b.size += made.asked
			prefixes = append(prefixes, made.name)
		}
		for _, made := range b.parts {
			b.weights = append(b.weights, float64(made.asked)/float64(b.size))
		}
		b.text = corpusText(c.Profile, name, b.size, c.BlendSampleInCorpus, c.ShuffleSampleInCorpus)
		if err := x.addBlend(b); err != nil {
			return err
		}
		top.parts = append(top.parts, part{b.name, b.size, b.size})
		entries = append(entries, corpusEntry(prefixes, b.size, c.SequenceLength, c.Seed))
	}
	top.weights = corpusWeights(c.Profile, top.parts, p.total, train)
	if slices.ContainsFunc(top.weights, math.IsNaN) ||
		slices.ContainsFunc(top.weights, func(w float64) bool { return math.IsInf(w, 0) }) {
		return errors.New("Megatron-DeepSpeed divides by the number of train samples, which is 0, and stops there; " +
			"request train samples, or set this split to 0 too")
	}
	top.text = blendText(entries, top.weights, top.size)
	return x.addBlend(top)
}

// corpusWeights returns the weights of corpora. Megatron-DeepSpeed divides the samples of all
// splits by the train samples and then normalizes, which cancels the division up to rounding.
func corpusWeights(profile Profile, corpora []part, total, train int64) []float64 {
	divisor := total
	if profile == MegatronDeepSpeed {
		divisor = train
	}
	weights := make([]float64, len(corpora))
	for i, corpus := range corpora {
		weights[i] = float64(corpus.asked) / float64(divisor)
	}
	return numpy.Normalize(weights)
}

// addBlend adds a blend unless its name exists: splits of the same size share their corpora.
func (x *Index) addBlend(b *blend) error {
	if !b.concat && len(b.parts) > greedy.MaxDatasets {
		return fmt.Errorf("%s has %d parts; at most %d can be blended; merge some of them", b.name, len(b.parts),
			greedy.MaxDatasets)
	}
	for _, known := range x.blends {
		if known.text != b.text {
			continue
		}
		if !known.alike(b) {
			return fmt.Errorf("%s and %s have the same name, %s, but different contents, so the program would read "+
				"the wrong file; request a different number of samples",
				known.title(), b.title(), b.hash())
		}
		known.splits = append(known.splits, b.splits...)
		// Of a shared part, the split with fewer samples limits how many may be taken.
		for i := range known.parts {
			known.parts[i].have = min(known.parts[i].have, b.parts[i].have)
		}
		return nil
	}
	x.blends = append(x.blends, b)
	return nil
}

// Close releases the token files. The Index must not be used afterwards.
func (x *Index) Close() error {
	var errs []error
	for _, file := range x.files {
		errs = append(errs, file.Close())
	}
	x.files = nil
	return errors.Join(errs...)
}
