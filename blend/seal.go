package blend

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"mula/blend/fingerprint"
	"mula/internal/objects"
	"mula/internal/strictyaml"
	"mula/shards"
	"mula/shards/facts"
	"mula/shards/sample"
)

// SealOptions are the options of [Seal].
type SealOptions struct {
	// called, from one goroutine at a time, while files without a manifest are hashed; may be nil
	Progress func(HashProgress)

	// Sample makes Seal read a sample of each large shard without a manifest, instead of all its
	// bytes. The plan is then provisional: see [Plan.Provisional] and [Complete].
	Sample   bool
	Sampling func(shards, total int) // called, from one goroutine at a time, after each sample; may be nil

	// Sums is the folder in which [Complete] is to write manifests and block sums of these shards.
	// "" means beside the shards.
	Sums string

	// Waiting, if not nil, makes Seal wait while another process builds the index files that an
	// order is read from: see [OpenOptions.Waiting].
	Waiting func(message string)

	Packing func(PackProgress) // called, from one goroutine at a time, while documents are packed; may be nil

	// Packings is the directory for the index files of a packed plan, normally the directory of its
	// plan.json. Existing index files are reused. "" is the configuration's directory.
	Packings string
}

// PackProgress is the progress of packing documents.
type PackProgress struct {
	Source string // the source that was packed last
	// number of tokens in processed documents. A source is processed twice if its index file does
	// not exist yet
	Tokens int64
	Total  int64 // number of tokens to process
}

// HashProgress is the progress of hashing files.
type HashProgress struct {
	Path  string // the file that was read last
	Bytes int64  // bytes read so far
	Total int64  // bytes to read
}

// Seal builds the plan of a configuration. It finds the shards, counts their windows, resolves
// weights and stages, validates limits, and stores hashes of the shards and check values. Hashes
// come from the shards' manifests; a shard without a manifest is read completely, unless
// opts.Sample is set. An index cache
// for the order is also read completely, and refused if it is inconsistent: see
// [megatron.Cache.Check].
//
// An entry of shards in the configuration is the path of a shard (with or without .idx or .bin), or
// a pattern of filepath.Match, relative to the configuration's directory. Matches are sorted by
// bytes. A pattern without a match is an error. A shard that is listed twice, in one source or in
// two, is an error, too: a larger weight repeats a source more often. A plan that skips all
// positions is refused. If max_epochs would be exceeded, the error wraps an *[EpochsError].
func Seal(ctx context.Context, c *Config, opts SealOptions) (*Plan, error) {
	l := facts.Open()
	defer l.Close()
	d, err := survey(ctx, c, l, &opts)
	if err != nil {
		return nil, err
	}
	defer d.closeBuilt()
	p := d.Plan
	if err := d.hashFiles(ctx, l, p.order.files(), &opts); err != nil {
		return nil, err
	}
	if err := d.fetchChecks(ctx); err != nil {
		return nil, err
	}
	if err := d.noteChecks(); err != nil {
		return nil, err
	}
	return p, p.seal()
}

// closeBuilt closes the shards and index files of a plan that was built. The plan is then not open,
// as if it had been read.
func (d *Data) closeBuilt() {
	d.Close() // of files that were only read; no data can be lost
	d.order = d.order.closed()
}

// noteChecks stores the check values in the plan.
func (d *Data) noteChecks() error {
	tokens := make([]uint32, d.SampleTokens())
	for _, position := range checkPositions(d.length) {
		s, err := d.Locate(position)
		if err != nil {
			return err
		}
		if err := d.Tokens(tokens, s); err != nil {
			return err
		}
		h := fingerprint.SampleHash(tokens)
		d.Checks = append(d.Checks, Check{position, s.Source, s.Window, hex.EncodeToString(h[:])})
	}
	return nil
}

// Survey does what [Seal] does, but without hashes. It finds and opens the shards, makes every
// check that a plan must pass, and returns a summary of the plan. It reads no token and writes
// nothing. It reads every entry of an index cache.
func Survey(ctx context.Context, c *Config) (*Summary, error) {
	l := facts.Open()
	defer l.Close()
	d, err := survey(ctx, c, l, nil)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Summary(), nil
}

// unhashed is the placeholder for an unknown hash of a file.
var unhashed = strings.Repeat("0", 64)

// survey returns the open shards and the plan of a configuration, without check values. If opts is
// nil, it writes nothing. The plan has hashes only if it is packed and opts is not nil.
func survey(ctx context.Context, c *Config, l *facts.Cache, opts *SealOptions) (*Data, error) {
	if err := c.validate(); err != nil { // c may be built in code, or changed after loading
		return nil, err
	}
	kind, _ := c.ordered() // known, since c is valid
	return kind.survey(ctx, c, l, opts)
}

// surveyNative is survey for orders that mula computes: windows, or packed documents.
func surveyNative(ctx context.Context, c *Config, l *facts.Cache, opts *SealOptions) (_ *Data, err error) {
	p := &Plan{Seed: c.Seed, SequenceLength: c.SequenceLength, HeldOut: c.Validation.String()}
	p.order = newWindowOrder(p, c.locality()) // pack replaces it
	list := shardList{dir: c.dir, listed: map[string]string{}, links: realPaths{}}
	for i, sc := range c.Sources {
		s := Source{Name: sc.Name, MaxEpochs: sc.MaxEpochs.String()}
		for j, pattern := range sc.Shards {
			found, err := list.find(ctx, sc.Name, pattern)
			if err != nil {
				return nil, c.file.Errorf(fmt.Sprintf("$.sources[%d].shards[%d]", i, j), "%w", err)
			}
			s.Shards = append(s.Shards, found...)
		}
		p.Sources = append(p.Sources, s)
	}
	d := newData(p, false)
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if err = d.survey(ctx, l); err != nil {
		return nil, err
	}
	d.describeShards()
	if p.Tokenizer, err = d.tokenizer(); err != nil {
		return nil, err
	}
	if c.Packing != "" {
		if err := d.pack(ctx, c, l, opts); err != nil {
			return nil, err
		}
	} else {
		p.holdOutWindows(c.Validation)
	}
	var available int64 // training windows
	for i := range p.Sources {
		s := &p.Sources[i]
		where := fmt.Sprintf("$.sources[%d]", i)
		if err := s.checkShards(); err != nil {
			return nil, c.file.Errorf(where, "source %q: %w", s.Name, err)
		}
		if err := p.order.compileSource(s); err != nil {
			return nil, c.file.Errorf(where, "source %q: %w", s.Name, err)
		}
		if available += s.Training(); available > maxLength {
			return nil, c.file.Errorf(where, "the sources have more than 2^60 windows")
		}
	}
	if err := p.resolveStages(c, available); err != nil {
		return nil, err
	}
	var length int64
	for _, st := range p.Stages {
		length += st.Samples
	}
	if err := p.resolveSkips(c, length); err != nil {
		return nil, err
	}
	if err := p.compile(); err != nil {
		return nil, c.file.Errorf("$", "%w", err)
	}
	limits := make([]Number, len(c.Sources))
	for i, s := range c.Sources {
		limits[i] = s.MaxEpochs
		if used := slices.ContainsFunc(p.Stages, func(st Stage) bool { return st.Weights[i] > 0 }); !used {
			return nil, c.file.Errorf(fmt.Sprintf("$.sources[%d]", i),
				"source %q has a weight in no stage; add a weight, or remove the source", s.Name)
		}
	}
	if source, err := p.checkEpochs(limits); err != nil {
		return nil, c.file.Errorf(fmt.Sprintf("$.sources[%d]", source), "%w", err)
	}
	return d, nil
}

// A shardList finds the shards that a configuration names, each only once.
type shardList struct {
	dir    string            // directory for relative patterns
	listed map[string]string // real path of a shard → its source
	links  realPaths

	planned map[string]string // likewise for shards of the plan that is amended
}

// find returns the shards that an entry of a source names, without hashes.
func (l *shardList) find(ctx context.Context, source, pattern string) ([]Shard, error) {
	paths, err := expand(ctx, l.dir, pattern)
	if err != nil {
		return nil, fmt.Errorf("source %q: %w", source, err)
	}
	var found []Shard
	for _, path := range paths {
		absolute, err := absolutePath(path)
		if err != nil {
			return nil, fmt.Errorf("source %q: %w", source, err)
		}
		real := l.links.of(absolute)
		if other, ok := l.planned[real]; ok {
			return nil, fmt.Errorf("shard %s is already in the plan, in source %q; list only new shards", path,
				other)
		}
		switch other, ok := l.listed[real]; {
		case ok && other == source:
			return nil, fmt.Errorf("shard %s is listed twice in source %q; remove one entry, or repeat the source "+
				"more often with a larger weight", path, source)
		case ok:
			return nil,
				fmt.Errorf("shard %s is listed twice, in source %q and in source %q; remove one entry, or repeat the "+
					"source more often with a larger weight", path, other, source)
		}
		l.listed[real] = source
		found = append(found, Shard{Path: absolute, Bin: unhashed, Index: unhashed})
	}
	return found, nil
}

// describeShards copies the facts of the shards to the plan.
func (d *Data) describeShards() {
	for i := range d.Sources {
		for k, f := range d.facts[i] {
			sh := &d.Sources[i].Shards[k]
			sh.DType, sh.Tokens, sh.Documents = f.DType, f.Tokens, f.Documents
		}
	}
}

// resolveStages sets the length and integer weights of each stage. available is the number of
// training windows of all sources.
func (p *Plan) resolveStages(c *Config, available int64) error {
	defaults := make([]Number, len(c.Sources))
	for i, s := range c.Sources {
		defaults[i] = s.Weight
		if !s.Weight.IsSet() { // then no source has a weight
			defaults[i] = integer(p.Sources[i].Training())
		}
	}
	stages := c.Stages
	if len(stages) == 0 {
		stages = []StageConfig{{Samples: StageLength{Rest: true}}}
	}
	end := available
	given := length(c.Samples, c.Tokens, c.SequenceLength)
	if given != nil {
		end = *given
	}
	reached, err := p.addStages(c.file, stages, 0, end, defaults)
	if err == nil && given != nil && reached != end {
		field, text := lengthText(end, c.Tokens)
		err = c.file.Errorf("$."+field,
			"%s, but the stages add up to %d; remove %s, or set \"samples: rest\" in the last stage", text, reached,
			field)
	}
	return err
}

// lengthText returns the field that sets the length of a plan, and its value in words.
func lengthText(samples int64, tokens *int64) (field, text string) {
	if tokens != nil {
		return "tokens", fmt.Sprintf("tokens is %d, which is %d samples", *tokens, samples)
	}
	return "samples", fmt.Sprintf("samples is %d", samples)
}

// addStages adds the stages of a file to the plan's stages, from position at, and returns the
// position after them. "samples: rest" fills up to length. defaults are the weights of stages
// without weights.
func (p *Plan) addStages(file *strictyaml.File, stages []StageConfig, at, length int64, defaults []Number) (end int64,
	err error) {
	end = at
	for j, sc := range stages {
		st := Stage{Samples: sc.length(p.SequenceLength).Count}
		where := fmt.Sprintf("$.stages[%d]", j)
		if sc.Samples.Rest {
			if st.Samples = length - end; st.Samples < 1 && len(p.Parents) > 0 {
				return end, file.Errorf(where, "no samples remain after position %d, because the plan has %d "+
					"positions; set samples to a larger number", end, length)
			} else if st.Samples < 1 {
				return end, file.Errorf(where,
					"no samples remain for stage %d: earlier stages have %d samples, the plan "+
						"has %d; set samples to a larger number", j+1, end, length)
			}
		}
		if st.Samples > maxLength-end {
			return end, file.Errorf(where, "the plan would have more than 2^60 samples")
		}
		end += st.Samples
		weights := defaults
		if sc.Weights != nil {
			weights = make([]Number, len(p.Sources))
			for i, s := range p.Sources {
				weights[i] = sc.Weights[s.Name]
			}
		}
		if err := st.weigh(weights); err != nil {
			return end, file.Errorf(where, "stage %d: %w", j+1, err)
		}
		p.Stages = append(p.Stages, st)
	}
	return end, nil
}

// weigh sets the weights of the stage.
func (s *Stage) weigh(weights []Number) (err error) {
	for _, w := range weights {
		s.Written = append(s.Written, w.String())
	}
	s.Weights, err = integers(weights)
	return err
}

// resolveSkips sorts the skips and joins ranges that overlap or touch.
func (p *Plan) resolveSkips(c *Config, length int64) error {
	for i, r := range c.Skips {
		if r.To > length {
			return c.file.Errorf(fmt.Sprintf("$.skips[%d]", i), "skip %d: [%d, %d) extends beyond the plan's %d "+
				"positions", i+1, r.From, r.To, length)
		}
	}
	sorted := slices.Clone(c.Skips)
	slices.SortFunc(sorted, func(a, b Range) int { return cmp.Compare(a.From, b.From) })
	for _, r := range sorted {
		if n := len(p.Skips); n > 0 && r.From <= p.Skips[n-1].To {
			p.Skips[n-1].To = max(p.Skips[n-1].To, r.To)
		} else {
			p.Skips = append(p.Skips, r)
		}
	}
	if len(p.Skips) > 0 && p.Skips[0] == (Range{0, length}) {
		return c.file.Errorf("$.skips", "the skips cover all %d positions of the plan; skip fewer positions",
			length)
	}
	return nil
}

// expand lists the prefixes of the shards that an entry of the configuration names, each once,
// sorted by bytes.
func expand(ctx context.Context, dir, pattern string) ([]string, error) {
	prefix := strings.TrimSuffix(strings.TrimSuffix(pattern, ".idx"), ".bin")
	if prefix == "" {
		return nil, fmt.Errorf("%q names no shard", pattern)
	}
	stem := prefix
	remote := objects.IsURL(stem)
	if !filepath.IsAbs(stem) && !remote {
		// Brackets in the name of a directory are not part of the pattern.
		stem = filepath.Join(escapePattern(dir), filepath.FromSlash(stem))
	}
	// A complete shard has an .idx. A shard with only a .bin is listed as well, so that opening it
	// reports the problem.
	found := map[string]bool{}
	if _, err := filepath.Match(stem, ""); err != nil { // without the suffix below, which could close a bracket
		return nil, fmt.Errorf("the pattern %q is malformed: %w", pattern, err)
	}
	const endings = ".[ib][di][xn]" // .idx and .bin with one listing
	var matches []string
	var err error
	switch {
	case !remote:
		matches, err = filepath.Glob(stem + endings)
	case strings.ContainsAny(stem, `*?[\`):
		var entries []objects.Entry
		entries, err = objects.Glob(ctx, stem+endings)
		for _, e := range entries {
			matches = append(matches, e.URL)
		}
	default: // a web server cannot list its files
		for _, ending := range []string{".idx", ".bin"} {
			switch _, statErr := objects.Stat(ctx, stem+ending); {
			case statErr == nil:
				matches = append(matches, stem+ending)
			case !errors.Is(statErr, fs.ErrNotExist):
				err = statErr
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("looking for %q: %w", pattern, err)
	}
	for _, m := range matches {
		for _, ending := range []string{".idx", ".bin"} {
			if prefix, ok := strings.CutSuffix(m, ending); ok {
				found[prefix] = true
			}
		}
	}
	if len(found) == 0 {
		hint := ""
		for _, more := range []string{"-*", "/*"} { // shards of mula tokenize --shard-tokens, a folder of shards
			if matches, _ := filepath.Glob(stem + more + endings); !remote && len(matches) > 0 {
				hint = fmt.Sprintf("; did you mean %q?", strings.TrimSuffix(prefix, "/")+more)
			}
		}
		return nil, fmt.Errorf("%q matches no shard (looked for %s.idx and .bin)%s", pattern, stem, hint)
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// tokenizer returns the tokenizer of the shards whose manifests name one. It fails if they differ.
func (d *Data) tokenizer() (*Tokenizer, error) {
	var t *facts.Tokenizer
	var first string
	for i := range d.facts {
		for k := range d.facts[i] {
			u := &d.facts[i][k].Tokenizer
			switch {
			case u.SHA256 == "": // no manifest, or written from ids without a known tokenizer
			case t == nil:
				t, first = u, d.ShardPath(i, k)
			case t.SHA256 != u.SHA256 || t.Vocabulary != u.Vocabulary:
				return nil, fmt.Errorf("shards of different tokenizers cannot be blended: %s has tokenizer %.12s… "+
					"(%d ids), %s has %.12s… (%d ids); tokenize one of them again",
					first, t.SHA256, t.Vocabulary, d.ShardPath(i, k), u.SHA256, u.Vocabulary)
			case t.EOD != u.EOD:
				return nil, fmt.Errorf("shards with different end-of-document ids cannot be blended: %s has %d, %s "+
					"has %d (-1: no such id); tokenize one of them again",
					first, t.EOD, d.ShardPath(i, k), u.EOD)
			}
		}
	}
	if t == nil {
		return nil, nil
	}
	return new(Tokenizer(*t)), nil
}

// hashFiles sets the hashes of all shards in the plan. They come from manifests, from the cache of
// shard facts, or from reading and checking the files. It also hashes the index files. The .idx of
// a shard with a manifest is compared with the manifest, unless the cache says that it was. A
// second call does nothing. With opts.Sample, large shards without a manifest get samples, even if
// their hashes are in the cache, so that the plan does not depend on the cache.
func (d *Data) hashFiles(ctx context.Context, l *facts.Cache, files []orderFile, opts *SealOptions) error {
	if d.hashed {
		return nil
	}
	d.hashed = true
	progress := opts.Progress
	sizes, err := d.foreignSizes(ctx)
	if err != nil {
		return err
	}
	var sampled, unread []shardNumber
	var total int64
	for i, list := range d.facts {
		for k, f := range list {
			sh := &d.Sources[i].Shards[k]
			if sh.Sample != "" { // of the plan that is amended
				continue
			}
			path := d.ShardPath(i, k)
			endings := []string{".bin", ".idx"}
			if opts.Sample && !f.Manifest && sh.Bin == unhashed {
				if sizes[path+".bin"]+sizes[path+".idx"] > sample.Small {
					sampled = append(sampled, shardNumber{i, k})
					continue
				}
			}
			sh.Bin, sh.Index = f.Bin, f.Index
			if f.Bin != "" {
				if objects.IsURL(path) {
					continue // the .idx is compared with the manifest when it is fetched
				}
				if s, trusted := facts.StampsOf(path); !f.Manifest || trusted && l.IndexVerified(path, s) {
					continue
				}
				endings = endings[1:]
			}
			unread = append(unread, shardNumber{i, k})
			if f.Manifest {
				size, err := sizeOf(ctx, path+".idx")
				if err != nil {
					return err
				}
				total += size
				continue
			}
			for _, ending := range endings {
				total += sizes[path+ending]
			}
		}
	}
	var mu sync.Mutex
	var done int64
	counter := func(path string, counted bool) func(int64) {
		if progress == nil || !counted {
			return nil
		}
		return func(n int64) {
			mu.Lock()
			defer mu.Unlock()
			done += n
			progress(HashProgress{path, done, total})
		}
	}
	read := func(ctx context.Context, path string) (hash string, err error) {
		hash, _, err = shards.HashFile(ctx, path, counter(path, true))
		return hash, err
	}
	if err := d.sampleShards(ctx, sampled, opts); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, f := range files {
		total += f.bytes
	}
	for _, f := range files {
		g.Go(func() (err error) {
			*f.sha256, err = read(ctx, f.path)
			return err
		})
	}
	for _, p := range unread {
		g.Go(func() error {
			path := d.ShardPath(p.source, p.shard)
			before, trusted := facts.StampsOf(path)
			s, err := d.pool.Acquire(d.firsts[p.source] + p.shard)
			if err != nil {
				return err
			}
			defer d.pool.Release(d.firsts[p.source] + p.shard)
			sh, f := &d.Sources[p.source].Shards[p.shard], d.facts[p.source][p.shard]
			if err := s.VerifyIndex(ctx, counter(path+".idx", f.Manifest)); err != nil {
				return fmt.Errorf("source %q: %w", d.Sources[p.source].Name, err)
			}
			if f.Manifest {
				if trusted {
					l.NoteIndex(path, f, before)
				}
				return nil
			}
			for _, file := range []struct {
				path string
				to   *string
			}{{path + ".bin", &sh.Bin}, {path + ".idx", &sh.Index}} {
				if *file.to, err = read(ctx, file.path); err != nil {
					return err
				}
			}
			if f.Bin, f.Index = sh.Bin, sh.Index; trusted {
				l.Note(path, f, before)
			}
			return nil
		})
	}
	return g.Wait()
}

// foreignSizes returns the sizes of the files of all shards without a manifest, by path. It counts
// these shards.
func (d *Data) foreignSizes(ctx context.Context) (map[string]int64, error) {
	var mu sync.Mutex
	sizes := map[string]int64{}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(samplers)
	for i, list := range d.facts {
		for k, f := range list {
			if f.Manifest {
				continue
			}
			d.foreign++
			for _, ending := range []string{".bin", ".idx"} {
				path := d.ShardPath(i, k) + ending
				g.Go(func() error {
					size, err := sizeOf(ctx, path)
					mu.Lock()
					defer mu.Unlock()
					sizes[path] = size
					return err
				})
			}
		}
	}
	return sizes, g.Wait()
}

// shardNumber identifies a shard by the index of its source and its index in the source.
type shardNumber struct{ source, shard int }

// samplers is the number of shards that are examined at once. Most of the time is spent waiting for
// the disk or the object store.
const samplers = 64

// sampleShards sets the samples of shards. If the plan will be packed, it also sets the hashes of
// their .idx, because packing reads these files completely.
func (d *Data) sampleShards(ctx context.Context, list []shardNumber, opts *SealOptions) (err error) {
	folder := opts.Sums
	if folder != "" {
		if folder, err = absolutePath(folder); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	done := 0
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(samplers)
	for _, p := range list {
		g.Go(func() error {
			path := d.ShardPath(p.source, p.shard)
			c, err := sample.Read(ctx, path)
			if err != nil {
				return fmt.Errorf("source %q: %w", d.Sources[p.source].Name, err)
			}
			sh, taken := &d.Sources[p.source].Shards[p.shard], c.Sample()
			sh.Sample, sh.blocks, sh.Bin, sh.Index = taken.Hash, taken.Blocks, "", ""
			if folder != "" {
				sh.sums = sidecarIn(folder, path, taken.Hash)
			}
			if d.packs {
				if sh.Index, _, err = shards.HashFile(ctx, path+".idx", nil); err != nil {
					return err
				}
			}
			if opts.Sampling != nil {
				mu.Lock()
				defer mu.Unlock()
				done++
				opts.Sampling(done, len(list))
			}
			return nil
		})
	}
	return g.Wait()
}
