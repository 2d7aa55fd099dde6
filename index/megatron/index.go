package megatron

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"mula/index/gpt"
	"mula/index/numpy"
	"mula/index/python"
	"mula/index/rebuild"
	"mula/shards"
)

// An Index is an opened configuration: its token files, and the names of everything that Megatron
// would build from them. It is safe for concurrent use until [Index.Close].
type Index struct {
	config   Config
	files    map[string]*shards.Index // by prefix
	datasets []*dataset               // each name once, by split and then by prefix
	blends   []*blend
	named    map[string]*dataset // by file name

	fractions [3]float64 // of the split string
	stretches [3]stretch // of every file
}

// A dataset is a GPT dataset: one split of one file.
type dataset struct {
	split   rebuild.Split
	prefix  string
	file    *shards.Index
	samples Size
	gpt     gpt.Dataset

	object python.Object // its description
	text   string        // the same as text
	hash   string        // MD5 of the text

	once   sync.Once
	layout gpt.Layout
	err    error
}

// A blend is a BlendedDataset. It has weights, or, if it blends all samples, their counts.
type blend struct {
	split   rebuild.Split
	members []*dataset // a member may occur several times
	weights []float64  // the weights of the blend loop, if size is given
	counts  []int64    // samples of each member, if size is not given
	size    Size

	text string
	hash string
}

// New opens a configuration. It opens the .idx files, and returns an error for a configuration that
// Megatron would reject or never finish building. The names of blends without weights depend on
// token counts, so for those New reads the lengths of all files.
func New(ctx context.Context, c Config) (_ *Index, err error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	x := &Index{config: c, files: map[string]*shards.Index{}, named: map[string]*dataset{}}
	defer func() {
		if err != nil {
			x.Close()
		}
	}()
	attributes, err := x.divide()
	if err != nil {
		return nil, err
	}
	if err := gpt.FetchTokens(ctx, c.Root, c.Prefixes(), x.files); err != nil {
		return nil, err
	}
	for s := range c.Samples {
		b := c.PerSplit[s]
		if b == nil && !c.Blend.empty() && x.stretches[s].present {
			b = &c.Blend
		}
		if b == nil {
			continue
		}
		if err := x.add(ctx, rebuild.Split(s), b, attributes); err != nil {
			return nil, err
		}
	}
	return x, nil
}

// Prefixes returns the prefixes of all token files, with repeats.
func (c *Config) Prefixes() []string {
	prefixes := slices.Clone(c.Blend.Prefixes)
	for _, b := range c.PerSplit {
		if b != nil {
			prefixes = append(prefixes, b.Prefixes...)
		}
	}
	return prefixes
}

// check validates everything that does not depend on the files.
func (c *Config) check() error {
	p := c.Profile
	if p.name == "" {
		return errors.New("no profile; see ProfileNamed")
	}
	if c.Arithmetic > Fused {
		return fmt.Errorf("%s is unknown", c.Arithmetic)
	}
	if c.SequenceLength < 1 || c.SequenceLength > math.MaxInt32 {
		return fmt.Errorf("sequence length %d is invalid; give the number of tokens of a sample, as --seq-length",
			c.SequenceLength)
	}
	for s, size := range c.Samples {
		switch {
		case size.Given && size.N < 0:
			return fmt.Errorf("%s: invalid number of samples %d; use 0 or more", rebuild.Split(s), size.N)
		case size.Given && size.N > (math.MaxInt64-1)/c.SequenceLength/2:
			return fmt.Errorf("%s: %d samples of %d tokens are out of range; request fewer samples",
				rebuild.Split(s), size.N, c.SequenceLength)
		}
	}
	if !p.fixedSurplus && !(c.Surplus >= 0 && c.Surplus <= 1000) {
		return fmt.Errorf("the surplus is %s; use a small fraction like 0.005", python.Float(c.Surplus))
	}
	if p.bareNames && !c.ExtraToken {
		return fmt.Errorf("samples of Megatron core %s always have the extra token; the option is supported from 0.7",
			p.tags)
	}
	if p.bareNames && c.KeepPartialValidation {
		return fmt.Errorf("a partial validation sample is always dropped by Megatron core %s; "+
			"the option is supported from 0.7",
			p.tags)
	}
	if c.RenormalizeBlendWeights && !p.renormalize {
		return fmt.Errorf("renormalize_blend_weights is an option of Megatron core 0.9 and 0.10; %s does not support "+
			"it",
			p.tags)
	}
	if p.pathPrefix != (c.Tokenizer == nil) {
		if p.pathPrefix {
			return fmt.Errorf("descriptions of Megatron core %s have no tokenizer; remove it", p.tags)
		}
		return errors.New("the tokenizer's object is missing, and the file names depend on it; take it from a " +
			"description.txt that Megatron wrote for this tokenizer, or give it as JSON")
	}
	return c.checkBlends()
}

// checkBlends rejects invalid combinations of blends, split and sizes.
func (c *Config) checkBlends() error {
	perSplit := false
	for s, b := range c.PerSplit {
		if b == nil {
			continue
		}
		perSplit = true
		if err := b.check(c.Profile, "the "+rebuild.Split(s).String()+" blend"); err != nil {
			return err
		}
	}
	switch {
	case perSplit && !c.Blend.empty():
		return errors.New("there is a blend for all splits and a blend for a single split; give only one kind")
	case perSplit && c.Split != "":
		return fmt.Errorf("a split string (%q) divides files between splits, but each split has its own files; "+
			"remove the split string", c.Split)
	case !perSplit && c.Blend.empty():
		return errors.New("no token files; give at least one")
	case !perSplit && c.Split == "":
		return fmt.Errorf("the split string is missing; Megatron's default is %q", DefaultSplit)
	}
	if !perSplit {
		if err := c.Blend.check(c.Profile, "the blend"); err != nil {
			return err
		}
	}
	for s, size := range c.Samples {
		b := &c.Blend
		if perSplit {
			b = c.PerSplit[s]
		}
		// Megatron also checks skipped splits, and weights that it will not use.
		if b != nil && b.Weights != nil && !size.Given {
			return fmt.Errorf("%s: weights divide a number of samples, but no number is given; give one, or remove "+
				"the weights to blend all samples", rebuild.Split(s))
		}
	}
	return nil
}

// divide computes which part of every file belongs to each split, and returns that part of the
// descriptions.
func (x *Index) divide() (attributes python.Object, err error) {
	c := &x.config
	x.stretches = [3]stretch{{0, 1, true}, {0, 1, true}, {0, 1, true}}
	if c.Split == "" {
		return c.attributes(python.Null{}, python.Null{}), nil
	}
	if x.fractions, err = parseSplit(c.Split); err != nil {
		return nil, err
	}
	x.stretches = splitMatrix(x.fractions)
	if c.Profile.pathPrefix {
		for i, f := range x.fractions {
			x.stretches[i].present = f != 0
		}
	}
	return c.attributes(python.String(c.Split), matrixValue(x.stretches)), nil
}

// attributes returns the members at the end of a GPT dataset's description, which all datasets of a
// configuration share.
func (c *Config) attributes(split, matrix python.Value) python.Object {
	seed := python.Member{Key: "random_seed", Value: python.Int(c.Seed)}
	length := python.Member{Key: "sequence_length", Value: python.Int(c.SequenceLength)}
	if c.Profile.pathPrefix {
		return python.Object{{Key: "split", Value: split}, seed, length}
	}
	return python.Object{seed, length, {Key: "split", Value: split}, {Key: "split_matrix", Value: matrix},
		{Key: "tokenizer", Value: c.Tokenizer}}
}

// documents returns the range of sequences, in a file of ns, that belong to a split.
func (x *Index) documents(s rebuild.Split, ns int64) (first, end int64) {
	if x.config.Split != "" && x.config.Profile.pathPrefix {
		edges := gpt.SplitEdges(x.fractions, ns)
		return edges[s], edges[s+1]
	}
	return x.stretches[s].documents(ns)
}

// add creates the datasets of one split, and their blend if Megatron creates one.
func (x *Index) add(ctx context.Context, s rebuild.Split, b *Blend, attributes python.Object) error {
	c := &x.config
	n := c.Samples[s]
	perSplit := c.PerSplit[s] != nil
	// A single prefix is not a blend. With a weight, it is a blend under --data-path and, before
	// 0.7, in a split's own list.
	if len(b.Prefixes) == 1 && (b.Weights == nil || perSplit && !c.Profile.bareNames) {
		if c.Profile.bareNames && !n.Given || c.Profile.pathPrefix && n.N == 0 {
			return c.needsSize(s)
		}
		_, err := x.dataset(s, b.Prefixes[0], n, attributes)
		return err
	}
	if c.Profile.bareNames && (!n.Given || n.N == 0) {
		return c.needsSize(s)
	}
	if b.Weights == nil {
		return x.unweighted(ctx, s, b, n, attributes)
	}
	weights := b.normalized()
	parts, err := c.shares(weights, n.N)
	if err != nil {
		return fmt.Errorf("%s: %w", s, err)
	}
	members := make([]*dataset, len(b.Prefixes))
	for i, prefix := range b.Prefixes {
		if members[i], err = x.dataset(s, prefix, SizeOf(parts.samples[i]), attributes); err != nil {
			return err
		}
	}
	if c.RenormalizeBlendWeights {
		if parts.size == 0 {
			return fmt.Errorf("%s: weights cannot be renormalized over 0 samples; request samples", s)
		}
		for i, part := range parts.samples {
			weights[i] = float64(part) / float64(parts.size)
		}
	}
	return x.blend(&blend{split: s, members: members, weights: numpy.Normalize(weights), size: SizeOf(parts.size)})
}

func (c *Config) needsSize(s rebuild.Split) error {
	return fmt.Errorf("%s: Megatron core %s needs a number of samples above 0 (open sizes are supported from 0.7); "+
		"give a number, or skip the split", s, c.Profile.tags)
}

// unweighted blends whole epochs, in proportion to their samples.
func (x *Index) unweighted(ctx context.Context, s rebuild.Split, b *Blend, n Size, attributes python.Object) error {
	members := make([]*dataset, len(b.Prefixes))
	for i, prefix := range b.Prefixes {
		var err error
		if members[i], err = x.dataset(s, prefix, Size{}, attributes); err != nil {
			return err
		}
	}
	if err := measure(ctx, members, x.config.Threads); err != nil {
		return err
	}
	made := &blend{split: s, members: members, counts: make([]int64, len(members))}
	weights := make([]float64, len(members))
	var total int64
	for i, d := range members {
		if d.layout.Samples == 0 {
			return fmt.Errorf("%s, %s split: its %d tokens are less than a sample of %d, and Megatron cannot blend "+
				"such a file without weights; remove it, or merge it with another",
				d.file.Path(), s, d.layout.TokensPerEpoch, x.config.SequenceLength)
		}
		made.counts[i] = d.layout.Samples
		weights[i] = float64(d.layout.Samples)
		total += d.layout.Samples
	}
	if n.Given {
		made.size = SizeOf(min(n.N, total))
		made.weights = numpy.Normalize(weights)
	}
	return x.blend(made)
}

// dataset returns the GPT dataset of a name. Two calls for the same name return the same dataset.
func (x *Index) dataset(s rebuild.Split, prefix string, n Size, attributes python.Object) (*dataset, error) {
	c := &x.config
	d := &dataset{split: s, prefix: prefix, samples: n}
	key := "dataset_path"
	if c.Profile.pathPrefix {
		key = "path_prefix"
	}
	d.object = append(python.Object{
		{Key: "class", Value: python.String(gptClass)},
		{Key: key, Value: python.String(prefix)},
		{Key: "num_samples", Value: n.value()},
		{Key: "index_split", Value: python.String(s.String())},
	}, attributes...)
	d.text, d.hash = named(d.object)
	name := c.Profile.gptName(d.hash, s)
	if known := x.named[name]; known != nil {
		return known, nil
	}

	file, err := x.open(prefix)
	if err != nil {
		return nil, err
	}
	d.file = file
	ns := file.Sequences()
	first, end := x.documents(s, ns)
	switch {
	case ns > 1<<31:
		return nil, fmt.Errorf("%s has %d sequences; Megatron numbers them with 32 bits and silently fails beyond "+
			"2147483648; divide the file", file.Path(), ns)
	case first < 0 || end > ns:
		return nil, fmt.Errorf("%s, %s split: split %q selects sequences %d to %d of %d by the rounding of this "+
			"profile; change the split slightly",
			file.Path(), s, c.Split, first, end, ns)
	case first > end, first == end && n.Given && (n.N > 0 || c.ExtraToken):
		return nil, fmt.Errorf("%s, %s split: none of its %d sequences are in split %q, with which most releases of "+
			"Megatron never finish; set the split to 0, give it a larger share, or merge the file with another",
			file.Path(), s, ns, c.Split)
	}
	tokens, err := file.SequenceTokens(first, end)
	if err != nil {
		return nil, err
	}
	d.gpt = gpt.Dataset{
		Lengths: file.Lengths(), Guard: file.Guard, First: first, End: end, Tokens: tokens,
		SequenceLength: c.SequenceLength, ExtraToken: c.ExtraToken,
		KeepPartial:  s == rebuild.Valid && c.KeepPartialValidation,
		CheckOffsets: c.Profile.checkOffsets, AllowEmpty: true, Samples: -1, Seed: c.Seed,
		SampleType: c.Profile.sampleType,
	}
	if n.Given {
		d.gpt.Samples = n.N
	}
	x.named[name] = d
	x.datasets = append(x.datasets, d)
	return d, nil
}

// open opens a token file's index once.
func (x *Index) open(prefix string) (*shards.Index, error) {
	if file := x.files[prefix]; file != nil {
		return file, nil
	}
	file, err := openIndex(x.config.Root, prefix)
	if err != nil {
		return nil, err
	}
	x.files[prefix] = file
	return file, nil
}

// openIndex opens the .idx file of a prefix.
func openIndex(root, prefix string) (*shards.Index, error) {
	file, err := gpt.OpenTokens(root, prefix)
	if _, number := python.ParseFloat(prefix); number && errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w; it looks like a weight: in a list of an odd number of words all are prefixes, as "+
			"in Megatron; give every prefix a weight, or no prefix", err)
	}
	return file, err
}

// blend computes the name of a blend.
func (x *Index) blend(b *blend) error {
	c := &x.config
	datasets := make(python.List, len(b.members))
	for i, d := range b.members {
		datasets[i] = d.object
	}
	weights := make(python.List, len(b.members))
	for i := range weights {
		if b.size.Given {
			weights[i] = python.Number(b.weights[i])
		} else {
			weights[i] = python.Int(b.counts[i])
		}
	}
	object := python.Object{{Key: "class", Value: python.String(blendClass)}, {Key: "datasets", Value: datasets}}
	if !c.Profile.bareNames {
		object = append(object, python.Member{Key: "split", Value: python.String(b.split.String())})
	}
	object = append(object, python.Member{Key: "weights", Value: weights},
		python.Member{Key: "size", Value: b.size.value()})
	if c.Profile.renormalize {
		object = append(object, python.Member{Key: "renormalize_blend_weights",
			Value: python.Bool(c.RenormalizeBlendWeights)})
	}
	b.text, b.hash = named(object)
	x.blends = append(x.blends, b)
	return nil
}

// named returns a description's text and the hash that names its files.
func named(o python.Object) (text, hash string) {
	text = python.Dumps(o)
	return text, hashed(text)
}

// hashed returns the hash in Megatron's file names: the MD5 of a description, in lower case.
func hashed(text string) string {
	sum := md5.Sum([]byte(text))
	return hex.EncodeToString(sum[:])
}

// measure computes the layouts of datasets with the given number of threads; 0 is GOMAXPROCS.
func measure(ctx context.Context, datasets []*dataset, threads int) error {
	g, ctx := errgroup.WithContext(ctx)
	if threads < 1 {
		threads = runtime.GOMAXPROCS(0)
	}
	g.SetLimit(threads)
	for _, d := range datasets {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			_, err := d.measured()
			return err
		})
	}
	return g.Wait()
}

// measured returns the dataset's layout. It reads the lengths once.
func (d *dataset) measured() (gpt.Layout, error) {
	d.once.Do(func() {
		d.file.ReadAhead()
		if d.layout, d.err = d.gpt.Layout(); d.err != nil {
			d.err = fmt.Errorf("%s, %s split: %w", d.file.Path(), d.split, d.err)
		}
	})
	return d.layout, d.err
}

// directory returns the directory of a dataset's files. Megatron's default is a directory that is
// named like the prefix.
func (x *Index) directory(d *dataset) string {
	if x.config.Cache != "" {
		return x.config.Cache
	}
	return filepath.Join(gpt.Locate(x.config.Root, d.prefix), "cache", gptClass+"_indices")
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
