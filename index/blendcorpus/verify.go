package blendcorpus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/semaphore"

	"mula/index/cache"
	"mula/index/gpt"
	"mula/index/numpy"
	"mula/index/rebuild"
	"mula/internal/filesystem"
	"mula/internal/mapping"
	"mula/internal/objects"
	"mula/internal/quantity"
	"mula/shards"
)

// maxDescription bounds the size of a description that is read. A flat blend has about 200 bytes
// per file.
const maxDescription = 64 << 20

// Verify computes the files that the descriptions in a directory specify, and compares them with
// the data files. Verify tries both arithmetics and, where the description is ambiguous, every
// other setting that affects the contents. It finds the members of a corpus through the
// descriptions of the corpus's blend and token files, which must be in the same directory.
func Verify(ctx context.Context, dir string, o rebuild.VerifyOptions) (rebuild.Report, error) {
	o.Threads, o.FS = max(1, o.Threads), filesystem.Default(o.FS)
	v := &verifier{dir: dir, o: o, pool: semaphore.NewWeighted(int64(o.Threads)), files: map[string]*shards.Index{}}
	defer v.close()
	if err := v.read(); err != nil {
		return rebuild.Report{}, err
	}
	if len(v.descriptions) == 0 {
		return rebuild.Report{}, fmt.Errorf("%s holds no index of BlendCorpus or Megatron-DeepSpeed: no file name "+
			"ends with %s; name another directory", dir, descriptionEnd)
	}
	var r rebuild.Report
	equal := true
	for _, d := range v.descriptions {
		got, err := v.verify(ctx, d)
		if err != nil {
			return r, fmt.Errorf("%s: %w", objects.Join(dir, d.hash+descriptionEnd), err)
		}
		r.Verdicts = append(r.Verdicts, got)
		equal = equal && got.Equal
		if o.Progress != nil {
			o.Progress(len(r.Verdicts), len(v.descriptions), got.Description)
		}
	}
	if equal {
		r.Writers = []string{"BlendCorpus or Megatron-DeepSpeed"}
	}
	return r, nil
}

// A verifier holds the contents of all descriptions in a directory.
type verifier struct {
	dir          string
	o            rebuild.VerifyOptions
	pool         *semaphore.Weighted
	builder      gpt.Builder
	files        map[string]*shards.Index
	descriptions []*description
}

// A description is a parsed description.
type description struct {
	hash, text string
	class      string
	request            // of a dataset
	epochs     int64   // of a dataset
	corpus     string  // name of a corpus
	size       int64   // of a corpus or blend
	modes      []bool  // of a corpus: whether samples may be blended
	entries    []entry // of a blend of corpora
	weights    string  // of a blend, as numpy writes them
}

// An entry is a corpus in the description of a blend: its prefixes, its size, and then sequence
// length and seed with nothing between them.
type entry struct {
	prefixes []string
	size     int64
	tail     string
}

func (v *verifier) close() {
	v.builder.Release()
	for _, f := range v.files {
		f.Close()
	}
}

// read reads all descriptions.
func (v *verifier) read() error {
	entries, err := v.o.FS.ReadDir(v.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		hash, ok := strings.CutSuffix(e.Name(), descriptionEnd)
		if !ok {
			continue
		}
		name := objects.Join(v.dir, e.Name())
		info, err := v.o.FS.Stat(name)
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() || info.Size() > maxDescription {
			return fmt.Errorf("%s is not a description: %d bytes", name, info.Size())
		}
		text, err := filesystem.ReadFile(v.o.FS, name)
		if err != nil {
			return err
		}
		d := parseDescription(string(text))
		d.hash = hash
		v.descriptions = append(v.descriptions, d)
	}
	return nil
}

var (
	datasetForm = regexp.MustCompile(`^GPT Dataset\n\nData prefix ([^\n]+)\nDataset name (train|valid|test)\nNumber of samples (\d+)\nNumber of epochs (\d+)\n` +
		`Sequence length (\d+)\nRandom seed (\d+)\nSplit ([^\n]*)\n$`)
	corpusForm = regexp.MustCompile(`^([^\n]+)\n (\d+)(?: \+ blend_sample_in_corpus: (True|False)\+ shuffle_sample_in_corpus: (?:True|False))?$`)
	blendForm  = regexp.MustCompile(`(?s)^Blendable dataset\n\nDatasets:\n(.+)\n\nWeights: (\[[^\]]*\])\nSize: (\d+)\n$`)
	entryForm  = regexp.MustCompile(`^CorpusDataset:(.*),-(\d+)-(\d+)$`)
)

// parseDescription parses a description of any class. The class is "" if the text is not a
// description.
func parseDescription(text string) *description {
	d := &description{text: text}
	ok := true
	number := func(s string) int64 {
		n, err := strconv.ParseInt(s, 10, 64)
		ok = ok && err == nil && n < 1<<53
		return n
	}
	if m := datasetForm.FindStringSubmatch(text); m != nil {
		d.class = classDataset
		split, _ := rebuild.SplitNamed(m[2])
		d.request = request{prefix: m[1], split: split, samples: number(m[3]), sequenceLength: number(m[5]),
			splitText: m[7]}
		d.epochs = number(m[4])
		seed := number(m[6])
		ok = ok && seed <= math.MaxUint32 && d.epochs > 0 && d.sequenceLength > 0
		d.seed = uint32(seed)
	} else if m := blendForm.FindStringSubmatch(text); m != nil {
		d.class = classBlend
		d.weights, d.size = m[2], number(m[3])
		for _, line := range strings.Split(m[1], "\n\n") {
			e := entryForm.FindStringSubmatch(line)
			if e == nil {
				d.entries = nil // a flat blend
				break
			}
			d.entries = append(d.entries, entry{strings.Split(e[1], ","), number(e[2]), e[3]})
		}
	} else if m := corpusForm.FindStringSubmatch(text); m != nil {
		d.class = classCorpus
		d.corpus, d.size = m[1], number(m[2])
		switch m[3] {
		case "True":
			d.modes = []bool{true}
		case "False":
			d.modes = []bool{false}
		default:
			d.modes = []bool{true, false}
		}
	}
	if !ok {
		d.class = ""
	}
	return d
}

// subject returns the prefix and split of a dataset, or the name of a corpus.
func (d *description) subject() string {
	switch d.class {
	case classDataset:
		return d.prefix + ", " + d.split.String()
	case classCorpus:
		return "corpus " + d.corpus
	}
	return fmt.Sprintf("blend of %d samples", d.size)
}

// verify checks one description and its data files.
func (v *verifier) verify(ctx context.Context, d *description) (rebuild.Verdict, error) {
	out := rebuild.Verdict{Description: d.hash + descriptionEnd, Kind: d.class, Prefixes: []string{""}}
	if d.class == "" {
		out.Problem = "the text is not a description of a data set, corpus or blend"
		return out, nil
	}
	if want := hash(d.text); want != d.hash {
		out.Problem = "the file name does not match the text, whose name is " + want + descriptionEnd
		return out, nil
	}
	ends := blendEnds[:]
	if d.class == classDataset {
		ends = datasetEnds[:]
	}
	files, err := rebuild.OpenFiles(v.o.FS, v.dir, named(d.hash, ends))
	if err != nil {
		return out, err
	}
	defer files.Close()
	for _, f := range files {
		if f.Missing {
			out.Problem = f.Name + " is missing"
			return out, nil
		}
	}
	out.Prefixes[0] = d.subject()
	var difference *rebuild.Difference
	switch d.class {
	case classDataset:
		out.Settings, difference, err = v.dataset(ctx, d, files)
	case classCorpus:
		out.Settings, difference, err = v.blend(ctx, d, files, v.corpora(d),
			"its files are unknown: the descriptions of its blend and of its token files are not in this directory")
	default:
		out.Settings, difference, err = v.blend(ctx, d, files, v.tops(d), "only eight digits of its weights are known")
	}
	switch {
	case ctx.Err() != nil:
		return out, context.Cause(ctx)
	case err != nil:
		out.Problem = err.Error()
	case difference != nil:
		out.Differs, out.Problem = true, fmt.Sprintf("%s differs first at byte %s", difference.File,
			quantity.Grouped(difference.Offset))
	default:
		out.Equal = true
	}
	return out, nil
}

// dataset compares the files of a dataset twice: with the documents that the split string selects,
// and with all documents of the file, for the case that each split has its own files. It returns
// how the description was interpreted, if the files are equal. The error is the reason why they
// cannot be compared.
func (v *verifier) dataset(ctx context.Context, d *description, files rebuild.Files) (
	how string, difference *rebuild.Difference, err error) {
	file := v.files[d.prefix]
	if file == nil {
		if file, err = gpt.OpenPrefix(ctx, v.o.Root, d.prefix); err != nil {
			return "", nil, fmt.Errorf("cannot read its token file: %w", err)
		}
		v.files[d.prefix] = file
	}
	type reading struct {
		how        string
		first, end int64
	}
	readings := []reading{{"all documents", 0, file.Sequences()}}
	if fractions, _, err := parseSplit(d.splitText, true); err == nil {
		edges := gpt.SplitEdges(fractions, file.Sequences())
		readings = []reading{{"documents by the split string", edges[d.split], edges[d.split+1]}, readings[0]}
	}
	problem := errors.New("")
	for _, r := range readings {
		if r.first < 0 || r.first >= r.end {
			continue
		}
		made := d.over(file, r.first, r.end, d.epochs)
		layout, err := made.Layout()
		if err != nil {
			problem = err
			continue
		}
		if problem = implausible(files, layout.Sizes()); problem != nil {
			continue
		}
		first, err := files.Difference(layout.Sizes(), func(w []io.WriterAt) error {
			return v.builder.Build(ctx, &made, layout, gpt.Files{Documents: w[0], Samples: w[1], Shuffle: w[2]}, v.pool)
		})
		switch {
		case ctx.Err() != nil, errors.Is(err, mapping.ErrUnreadable):
			return "", nil, err
		case err != nil:
			problem = err
		case first == nil:
			return r.how, nil, nil
		case difference == nil:
			difference = first
		}
	}
	if difference == nil {
		return "", nil, fmt.Errorf("cannot build it: %w", problem)
	}
	return "", difference, nil
}

// implausible returns why the files cannot have the given sizes, nil if they can.
func implausible(files rebuild.Files, sizes []int64) error {
	var want int64
	for _, size := range sizes {
		want += size
	}
	if files.Plausible(want) {
		return nil
	}
	return fmt.Errorf("the description requires %d bytes in total, but the files have %d", want, files.Bytes())
}

// A candidate is a blend that the description may refer to.
type candidate struct {
	how string
	blend
}

// blend compares the files of a corpus or blend, which must match one of the candidates. It returns
// how the description was interpreted, if the files are equal. The error is the reason why they
// cannot be compared.
func (v *verifier) blend(ctx context.Context, d *description, files rebuild.Files, candidates []candidate,
	none string) (how string, difference *rebuild.Difference, err error) {
	if len(candidates) == 0 {
		return "", nil, errors.New(none)
	}
	for _, c := range candidates {
		for _, c.fused = range []bool{false, true} {
			c.lenient = true
			if err := implausible(files, c.sizes()); err != nil {
				return "", nil, err // for all candidates, which have the same size
			}
			first, err := files.Difference(c.sizes(), func(to []io.WriterAt) error {
				return c.write(ctx, to, v.pool, v.o.Threads)
			})
			switch {
			case ctx.Err() != nil, errors.Is(err, mapping.ErrUnreadable):
				return "", nil, err
			case err != nil:
				return "", nil, fmt.Errorf("cannot build it: %w", err)
			case first == nil && c.concat:
				return c.how, nil, nil
			case first == nil && c.fused:
				return c.how + ", fused arithmetic", nil, nil
			case first == nil:
				return c.how + ", separate arithmetic", nil, nil
			// Report the candidate that agrees longest.
			case difference == nil || first.Offset > difference.Offset && first.File == difference.File:
				difference = first
			}
			if c.concat {
				break
			}
		}
	}
	return "", difference, nil
}

// tops returns the blends that a blend's description may refer to: of corpora, whose sizes the
// description contains, and of files, whose weights are known if this package built the blend.
func (v *verifier) tops(d *description) []candidate {
	if d.entries == nil {
		s, err := v.recorded(d)
		if err != nil || numpy.ArrayString(s.Weights) != d.weights || len(s.Weights) != len(s.Parts) || s.Concat {
			return nil
		}
		c := candidate{how: "weights as recorded", blend: blend{size: d.size, weights: s.Weights}}
		for _, name := range s.Parts {
			c.parts = append(c.parts, part{name: name})
		}
		return []candidate{c}
	}
	var parts []part
	for _, e := range d.entries {
		parts = append(parts, part{asked: e.size})
	}
	candidates := []candidate{{how: BlendCorpus.String(), blend: blend{size: d.size, parts: parts,
		weights: corpusWeights(BlendCorpus, parts, d.size, 0)}}}
	for _, o := range v.descriptions { // any of them may be the train blend
		if o.class == classBlend && o.entries != nil && o.size > 0 && o.size != d.size {
			candidates = append(candidates, candidate{how: MegatronDeepSpeed.String(),
				blend: blend{size: d.size, parts: parts, weights: corpusWeights(MegatronDeepSpeed, parts, d.size,
					o.size)}})
		}
	}
	return slices.DeleteFunc(candidates, func(c candidate) bool { return numpy.ArrayString(c.weights) != d.weights })
}

// recorded returns the settings that this package recorded for a blend.
func (v *verifier) recorded(d *description) (blendSettings, error) {
	var record struct{ Settings blendSettings }
	name := objects.Join(v.dir, cache.StateDir+"/"+d.hash+descriptionEnd+".json")
	info, err := v.o.FS.Stat(name)
	if err != nil {
		return blendSettings{}, err
	}
	if info.Size() > maxDescription {
		return blendSettings{}, fmt.Errorf("%s has %d bytes", name, info.Size())
	}
	text, err := filesystem.ReadFile(v.o.FS, name)
	if err != nil {
		return blendSettings{}, err
	}
	err = json.Unmarshal(text, &record)
	return record.Settings, err
}

// maxCorpora bounds how many interpretations of a corpus are tried.
const maxCorpora = 64

// corpora returns the corpora that a description may refer to. A blend in the directory names the
// files of a corpus of this size. The files' descriptions contain the number of samples that each
// was built for in one run, that is, for one split, sequence length, seed and split string.
func (v *verifier) corpora(d *description) []candidate {
	type run struct {
		split  rebuild.Split
		length int64
		seed   uint32
		text   string
	}
	asked := map[run]map[string][]int64{}
	var runs []run
	for _, o := range v.descriptions {
		if o.class != classDataset {
			continue
		}
		r := run{o.split, o.sequenceLength, o.seed, o.splitText}
		if asked[r] == nil {
			asked[r] = map[string][]int64{}
			runs = append(runs, r)
		}
		if !slices.Contains(asked[r][o.prefix], o.samples) {
			asked[r][o.prefix] = append(asked[r][o.prefix], o.samples)
		}
	}
	var candidates []candidate
	for _, top := range v.descriptions {
		for _, e := range top.entries {
			if e.size != d.size {
				continue
			}
			for _, r := range runs {
				if fmt.Sprintf("%d%d", r.length, r.seed) != e.tail {
					continue
				}
				for _, parts := range divisions(e.prefixes, asked[r], e.size) {
					for _, blended := range d.modes {
						c := candidate{how: "as members blended", blend: blend{size: e.size, parts: parts,
							concat: !blended}}
						if !blended {
							c.how = "as members one after the other"
						}
						for _, p := range parts {
							c.weights = append(c.weights, float64(p.asked)/float64(e.size))
						}
						if len(candidates) < maxCorpora && !slices.ContainsFunc(candidates,
							func(o candidate) bool { return o.alike(&c.blend) }) {
							candidates = append(candidates, c)
						}
					}
				}
			}
		}
	}
	return candidates
}

// divisions returns the possible sample requests of the members that add up to the size of their
// corpus, each a number from a description. One member may have no description, because it has no
// document in the split: it gets the remainder.
func divisions(prefixes []string, samples map[string][]int64, size int64) [][]part {
	var out [][]part
	steps := 0
	var add func(parts []part, left int64, missing int)
	add = func(parts []part, left int64, missing int) {
		if steps++; left < 0 || steps > 1000*maxCorpora {
			return
		}
		if len(parts) == len(prefixes) {
			if missing >= 0 {
				parts[missing].asked, left = left, 0
			}
			if left == 0 {
				out = append(out, slices.Clone(parts))
			}
			return
		}
		prefix := prefixes[len(parts)]
		for _, n := range samples[prefix] {
			add(append(slices.Clip(parts), part{name: prefix, asked: n}), left-n, missing)
		}
		if len(samples[prefix]) == 0 && missing < 0 {
			add(append(slices.Clip(parts), part{name: prefix}), left, len(parts))
		}
	}
	add(nil, size, -1)
	return out
}
