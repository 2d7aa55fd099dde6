package blendcorpus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/semaphore"

	"mula/index/cache"
	"mula/index/gpt"
	"mula/index/numpy"
	"mula/internal/mapping"
	"mula/shards"
)

// VerifyOptions are the choices of [Verify].
type VerifyOptions struct {
	Root     string         // where relative prefixes are looked for, "" being the working directory
	Threads  int            // how many goroutines compute at once; at least 1
	Progress func(Verified) // told of each description as it is done, if not nil
}

// A Report is what [Verify] found, one entry for each description, in the order of their names.
type Report struct {
	Descriptions []Verified
}

// A Verified description. Exactly one of How, Difference and Problem is set.
type Verified struct {
	Description string // the name of the file
	Class       string // ClassDataset, ClassCorpus or ClassBlend; "" for a text of none
	What        string // prefix and split, or the name of the corpus

	How        string      // the files are as they should be: by which reading of the description
	Difference *Difference // the first file that is not as it should be
	Problem    string      // why nothing can be said, or which file is missing
}

// OK reports whether all files of all descriptions are as they should be.
func (r Report) OK() bool {
	return !slices.ContainsFunc(r.Descriptions, func(v Verified) bool { return v.How == "" })
}

// maxDescription bounds what is read of a description: one of a flat blend has some 200 bytes a
// file.
const maxDescription = 64 << 20

// Verify computes what the descriptions in a directory say, and compares it with the data files.
// Both arithmetics and, where the description leaves it open, all else that the contents may depend
// on are tried. The members of a corpus are found through the descriptions of the blend that has it
// and of its token files, which must therefore be in the same directory.
func Verify(ctx context.Context, dir string, o VerifyOptions) (Report, error) {
	o.Threads = max(1, o.Threads)
	v := &verifier{dir: dir, o: o, pool: semaphore.NewWeighted(int64(o.Threads)), files: map[string]*shards.Index{}}
	defer v.close()
	if err := v.read(); err != nil {
		return Report{}, err
	}
	if len(v.descriptions) == 0 {
		return Report{}, fmt.Errorf("%s holds no index that BlendCorpus or Megatron-DeepSpeed would look for: no "+
			"file ends with %s", dir, descriptionEnd)
	}
	var r Report
	for _, d := range v.descriptions {
		got, err := v.verify(ctx, d)
		if err != nil {
			return r, fmt.Errorf("%s: %w", filepath.Join(dir, d.hash+descriptionEnd), err)
		}
		r.Descriptions = append(r.Descriptions, got)
		if o.Progress != nil {
			o.Progress(got)
		}
	}
	return r, nil
}

// A verifier holds what all descriptions of a directory say.
type verifier struct {
	dir          string
	o            VerifyOptions
	pool         *semaphore.Weighted
	builder      gpt.Builder
	files        map[string]*shards.Index
	descriptions []*description
}

// A description that was read.
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

// An entry is a corpus in the description of a blend: its prefixes, size, and sequence length and
// seed without anything between them.
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
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		hash, ok := strings.CutSuffix(e.Name(), descriptionEnd)
		if !ok {
			continue
		}
		name := filepath.Join(v.dir, e.Name())
		info, err := os.Stat(name)
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() || info.Size() > maxDescription {
			return fmt.Errorf("%s is no description: %d bytes", name, info.Size())
		}
		text, err := os.ReadFile(name)
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

// parseDescription reads a description of any class; its class is "" if it has none.
func parseDescription(text string) *description {
	d := &description{text: text}
	ok := true
	number := func(s string) int64 {
		n, err := strconv.ParseInt(s, 10, 64)
		ok = ok && err == nil && n < 1<<53
		return n
	}
	if m := datasetForm.FindStringSubmatch(text); m != nil {
		d.class = ClassDataset
		d.request = request{prefix: m[1], split: Split(slices.Index(splitNames[:], m[2])), samples: number(m[3]),
			sequenceLength: number(m[5]), splitText: m[7]}
		d.epochs = number(m[4])
		seed := number(m[6])
		ok = ok && seed <= math.MaxUint32 && d.epochs > 0 && d.sequenceLength > 0
		d.seed = uint32(seed)
	} else if m := blendForm.FindStringSubmatch(text); m != nil {
		d.class = ClassBlend
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
		d.class = ClassCorpus
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

// verify looks at one description and its data files.
func (v *verifier) verify(ctx context.Context, d *description) (Verified, error) {
	out := Verified{Description: d.hash + descriptionEnd, Class: d.class}
	if d.class == "" {
		out.Problem = "the text is no description of a data set, corpus or blend"
		return out, nil
	}
	if want := hash(d.text); want != d.hash {
		out.Problem = "the name does not belong to the text, which asks for " + want + descriptionEnd
		return out, nil
	}
	ends := blendEnds[:]
	if d.class == ClassDataset {
		ends = datasetEnds[:]
	}
	for _, name := range named(d.hash, ends) {
		if _, err := os.Stat(filepath.Join(v.dir, name)); errors.Is(err, fs.ErrNotExist) {
			out.Problem = name + " is missing"
			return out, nil
		} else if err != nil {
			return out, err
		}
	}
	var err error
	switch d.class {
	case ClassDataset:
		out.What = d.prefix + ", " + d.split.String()
		err = v.dataset(ctx, d, &out)
	case ClassCorpus:
		out.What = "corpus " + d.corpus
		err = v.blend(ctx, d, v.corpora(d),
			"which files it is made of is not known: the descriptions of its blend and of its token files are not here",
			&out)
	default:
		out.What = fmt.Sprintf("blend of %d samples", d.size)
		err = v.blend(ctx, d, v.tops(d), "only eight digits of its weights are known", &out)
	}
	return out, err
}

// dataset verifies the files of a dataset, once for the documents that the split string gives it,
// and once for all documents of the file, which it has if each split has files of its own.
func (v *verifier) dataset(ctx context.Context, d *description, out *Verified) error {
	file := v.files[d.prefix]
	if file == nil {
		var err error
		if file, err = gpt.OpenTokens(v.o.Root, d.prefix); err != nil {
			out.Problem = "its token file cannot be read: " + err.Error()
			return nil
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
	var problem string
	for _, r := range readings {
		if r.first < 0 || r.first >= r.end {
			continue
		}
		made := d.over(file, r.first, r.end, d.epochs)
		layout, err := made.Layout()
		if err != nil {
			problem = err.Error()
			continue
		}
		names, sizes := named(d.hash, datasetEnds[:]), layout.Sizes()
		if problem, err = v.implausible(names, sizes); err != nil {
			return err
		} else if problem != "" {
			continue
		}
		files, err := compare(v.dir, names, sizes)
		if err != nil {
			return err
		}
		w := files.writers()
		err = v.builder.Build(ctx, &made, layout, gpt.Files{Documents: w[0], Samples: w[1], Shuffle: w[2]}, v.pool)
		difference := files.difference()
		if err == nil {
			err = files.cut()
		}
		files.close()
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, mapping.ErrUnreadable):
			out.Problem, out.Difference = err.Error(), nil
			return nil
		case err != nil:
			problem = err.Error()
		case difference == nil:
			out.How, out.Difference = r.how, nil
			return nil
		case out.Difference == nil:
			out.Difference = difference
		}
	}
	if out.Difference == nil {
		out.Problem = "it cannot be built: " + problem
	}
	return nil
}

// implausible says why files cannot be those of the given sizes, "" if they may be. Where far
// larger ones are described than are there, the description is not theirs, and to build them could
// take more time and memory than there is.
func (v *verifier) implausible(names []string, sizes []int64) (problem string, err error) {
	var want, have int64
	for i, name := range names {
		info, err := os.Stat(filepath.Join(v.dir, name))
		if err != nil {
			return "", err
		}
		want += sizes[i]
		have += info.Size()
	}
	if want/4 > 1<<28+have { // of nearly 2^63 bytes, four times anything would overflow
		return fmt.Sprintf("the description asks for files of %d bytes together, and those here have %d", want,
			have), nil
	}
	return "", nil
}

// A candidate is a blend that may be the one described.
type candidate struct {
	how string
	blend
}

// blend verifies the files of a corpus or blend: they must be those of one of the candidates.
func (v *verifier) blend(ctx context.Context, d *description, candidates []candidate, none string,
	out *Verified) error {
	if len(candidates) == 0 {
		out.Problem = none
		return nil
	}
	for _, c := range candidates {
		for _, c.fused = range []bool{false, true} {
			how := c.how + ", separate arithmetic"
			if c.fused {
				how = c.how + ", fused arithmetic"
			}
			if c.concat {
				how = c.how
			}
			c.lenient = true
			problem, err := v.implausible(named(d.hash, blendEnds[:]), c.sizes())
			if err != nil {
				return err
			}
			if problem != "" {
				out.Problem = problem // of all candidates: they have one size
				return nil
			}
			files, err := compare(v.dir, named(d.hash, blendEnds[:]), c.sizes())
			if err != nil {
				return err
			}
			err = c.write(ctx, files.writers(), v.pool, v.o.Threads)
			difference := files.difference()
			if err == nil {
				err = files.cut()
			}
			files.close()
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case errors.Is(err, mapping.ErrUnreadable):
				out.Problem, out.Difference = err.Error(), nil
				return nil
			case err != nil:
				out.Problem, out.Difference = "it cannot be built: "+err.Error(), nil
				return nil
			case difference == nil:
				out.How, out.Difference = how, nil
				return nil
			// The candidate that agrees longest is the one to compare with.
			case out.Difference == nil || difference.Offset > out.Difference.Offset &&
				difference.File == out.Difference.File:
				out.Difference = difference
			}
			if c.concat {
				break
			}
		}
	}
	return nil
}

// tops are the blends that a blend's description may mean: of corpora, whose sizes it says, and of
// files, whose weights are known if this package has built the blend.
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
	for _, o := range v.descriptions { // any of them may be the one of train
		if o.class == ClassBlend && o.entries != nil && o.size > 0 && o.size != d.size {
			candidates = append(candidates, candidate{how: MegatronDeepSpeed.String(),
				blend: blend{size: d.size, parts: parts, weights: corpusWeights(MegatronDeepSpeed, parts, d.size,
					o.size)}})
		}
	}
	return slices.DeleteFunc(candidates, func(c candidate) bool { return numpy.ArrayString(c.weights) != d.weights })
}

// recorded are the settings that this package has kept of a blend.
func (v *verifier) recorded(d *description) (blendSettings, error) {
	var record struct{ Settings blendSettings }
	name := filepath.Join(v.dir, cache.StateDir, d.hash+descriptionEnd+".json")
	info, err := os.Stat(name)
	if err != nil {
		return blendSettings{}, err
	}
	if info.Size() > maxDescription {
		return blendSettings{}, fmt.Errorf("%s has %d bytes", name, info.Size())
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return blendSettings{}, err
	}
	err = json.Unmarshal(text, &record)
	return record.Settings, err
}

// maxCorpora bounds how many readings of one corpus are tried.
const maxCorpora = 64

// corpora are the corpora that a description may mean. A blend in the directory says which files
// belong to a corpus of this size; their descriptions say how many samples each was built for, in
// one run, which is one split, sequence length, seed and split string.
func (v *verifier) corpora(d *description) []candidate {
	type run struct {
		split  Split
		length int64
		seed   uint32
		text   string
	}
	asked := map[run]map[string][]int64{}
	var runs []run
	for _, o := range v.descriptions {
		if o.class != ClassDataset {
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

// divisions are the ways in which the members can have been asked for samples that add up to the
// size of their corpus: each for a number that a description says. One member may lack a
// description, because it has no document in the split: it has the rest.
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
