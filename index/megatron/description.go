package megatron

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"mula/index/gpt"
	"mula/index/python"
	"mula/index/rebuild"
	"mula/internal/filesystem"
)

// A description is a parsed description.txt.
type description struct {
	class string
	split rebuild.Split
	named bool // the text contains the split; before core 0.7, only the datasets of a blend do
	text  string

	// Of a GPT dataset.
	object         python.Object
	pathPrefix     bool // in the format of core 0.4
	prefix         string
	samples        Size
	seed           uint32
	sequenceLength int64
	splitString    string // "" for null: the split has its own files
	matrix         [3]stretch
	tokenizer      python.Value // nil in core 0.4

	// Of a blend.
	members     []*description
	weights     []float64 // if size is given
	counts      []int64   // if size is not given
	size        Size
	renormalize bool // it has the key renormalize_blend_weights
}

// parseDescription parses a description. It must be formatted like Python's json.dumps(indent=4),
// because the hash covers the text.
func parseDescription(text []byte) (*description, error) {
	v, err := python.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("not a Megatron description: %w", err)
	}
	if python.Dumps(v) != string(text) {
		return nil, errors.New("not a Megatron description: the JSON is not formatted as Python does with indent=4")
	}
	return describe(v)
}

// describe parses the object of a description.
func describe(v python.Value) (*description, error) {
	o, ok := v.(python.Object)
	if !ok {
		return nil, errors.New("not a Megatron description: want an object with a class")
	}
	class, _ := o.Get("class").(python.String)
	switch class {
	case gptClass:
		return describeGPT(o)
	case blendClass:
		return describeBlend(o)
	}
	return nil, fmt.Errorf("unknown class %q; use GPTDataset or BlendedDataset", string(class))
}

// keys reports whether an object has exactly these keys, in order.
func keys(o python.Object, want ...string) bool {
	return slices.EqualFunc(o, want, func(m python.Member, key string) bool { return m.Key == key })
}

func describeGPT(o python.Object) (*description, error) {
	d := &description{class: gptClass, object: o, text: python.Dumps(o), named: true}
	path := "dataset_path"
	switch {
	case keys(o, "class", path, "num_samples", "index_split", "random_seed", "sequence_length", "split", "split_matrix",
		"tokenizer"):
	case keys(o, "class", "path_prefix", "num_samples", "index_split", "split", "random_seed", "sequence_length"):
		path, d.pathPrefix = "path_prefix", true
	default:
		return nil, errors.New("GPTDataset: its keys do not match any known release of Megatron")
	}
	r := reader{o: o, class: gptClass}
	d.prefix = r.text(path)
	d.samples = r.size("num_samples")
	d.split = r.split("index_split")
	d.seed = uint32(r.number("random_seed", math.MaxUint32))
	d.sequenceLength = r.number("sequence_length", math.MaxInt32)
	if d.sequenceLength == 0 {
		r.bad("sequence_length", "a number above 0")
	}
	if d.prefix == "" {
		r.bad(path, "a prefix")
	}
	d.matrix = [3]stretch{{0, 1, true}, {0, 1, true}, {0, 1, true}}
	if _, null := o.Get("split").(python.Null); !null {
		if d.splitString = r.text("split"); d.splitString == "" {
			r.bad("split", "text with numbers, or null")
		}
	}
	if !d.pathPrefix {
		d.tokenizer = o.Get("tokenizer")
		_, none := o.Get("split_matrix").(python.Null)
		switch {
		case none != (d.splitString == ""):
			r.bad("split_matrix", "null if and only if split is null")
		case !none:
			d.matrix = r.matrix("split_matrix")
		}
		if !d.matrix[d.split].present {
			r.bad("split_matrix", "a pair for the split "+d.split.String())
		}
	}
	return d, r.err
}

func describeBlend(o python.Object) (*description, error) {
	d := &description{class: blendClass, object: o, text: python.Dumps(o)}
	switch {
	case keys(o, "class", "datasets", "weights", "size"):
	case keys(o, "class", "datasets", "split", "weights", "size"):
		d.named = true
	case keys(o, "class", "datasets", "split", "weights", "size", "renormalize_blend_weights"):
		d.named, d.renormalize = true, true
	default:
		return nil, errors.New("BlendedDataset: its keys do not match any known release of Megatron")
	}
	r := reader{o: o, class: blendClass}
	members, _ := o.Get("datasets").(python.List)
	weights, _ := o.Get("weights").(python.List)
	switch {
	case len(members) == 0 || len(members) > maxDatasets:
		r.bad("datasets", fmt.Sprintf("a list of 1 to %d datasets", maxDatasets))
	case len(weights) != len(members):
		r.bad("weights", "one number per dataset")
	}
	if d.size = r.size("size"); r.err != nil {
		return nil, r.err
	}
	for i, v := range members {
		m, err := describe(v)
		if err != nil {
			return nil, fmt.Errorf("dataset %d: %w", i+1, err)
		}
		if m.class != gptClass {
			return nil, fmt.Errorf("dataset %d of the blend is a %s; only GPTDatasets are supported", i+1, m.class)
		}
		if first := d.members; len(first) > 0 && (m.split != first[0].split ||
			m.sequenceLength != first[0].sequenceLength || m.pathPrefix != first[0].pathPrefix) {
			return nil,
				fmt.Errorf("dataset %d of the blend differs from the first in split, sequence length or release", i+1)
		}
		d.members = append(d.members, m)
	}
	d.split = d.members[0].split
	if d.named && r.split("split") != d.split {
		r.bad("split", "the split of its datasets")
	}
	for _, v := range weights {
		switch w := v.(type) {
		case python.Number:
			if !(w >= 0 && w <= 1) || !d.size.Given {
				r.bad("weights", "fractions if there is a size, otherwise integers")
			}
			d.weights = append(d.weights, float64(w))
		case python.Int:
			if w <= 0 || d.size.Given || int64(w) > math.MaxInt64/maxDatasets {
				r.bad("weights", "fractions if there is a size, otherwise integers above 0")
			}
			d.counts = append(d.counts, int64(w))
		default:
			r.bad("weights", "numbers")
		}
	}
	return d, r.err
}

// A reader reads values of an object and keeps the first error.
type reader struct {
	o     python.Object
	class string
	err   error
}

func (r *reader) bad(key, want string) {
	if r.err == nil {
		r.err = fmt.Errorf("%s: %s must be %s", r.class, key, want)
	}
}

func (r *reader) text(key string) string {
	s, ok := r.o.Get(key).(python.String)
	if !ok {
		r.bad(key, "text")
	}
	return string(s)
}

func (r *reader) number(key string, most int64) int64 {
	n, ok := r.o.Get(key).(python.Int)
	if !ok || n < 0 || int64(n) > most {
		r.bad(key, fmt.Sprintf("an integer up to %d", most))
		return 0
	}
	return int64(n)
}

func (r *reader) size(key string) Size {
	if _, null := r.o.Get(key).(python.Null); null {
		return Size{}
	}
	return SizeOf(r.number(key, 1<<53)) // more samples than any index has
}

func (r *reader) split(key string) rebuild.Split {
	s, ok := rebuild.SplitNamed(r.text(key))
	if !ok {
		r.bad(key, "train, valid or test")
	}
	return s
}

func (r *reader) matrix(key string) [3]stretch {
	var m [3]stretch
	list, _ := r.o.Get(key).(python.List)
	if len(list) != len(m) {
		r.bad(key, "a list of three")
		return m
	}
	for i, v := range list {
		if _, null := v.(python.Null); null {
			continue
		}
		pair, _ := v.(python.List)
		if len(pair) != 2 {
			r.bad(key, "a list of pairs and nulls")
			return m
		}
		left, right := fraction(pair[0]), fraction(pair[1])
		if !(left >= 0 && left < right && right < 1.5) {
			r.bad(key, "a list of pairs of fractions in ascending order")
			return m
		}
		m[i] = stretch{left, right, true}
	}
	return m
}

// fraction returns a number, or NaN.
func fraction(v python.Value) float64 {
	switch v := v.(type) {
	case python.Int:
		return float64(v)
	case python.Number:
		return float64(v)
	}
	return math.NaN()
}

// documents returns the range of sequences, in a file of ns, that belong to a described dataset.
func (d *description) documents(ns int64) (first, end int64, err error) {
	switch {
	case d.splitString == "":
		return 0, ns, nil
	case d.pathPrefix:
		fractions, err := parseSplit(d.splitString)
		if err != nil {
			return 0, 0, err
		}
		edges := gpt.SplitEdges(fractions, ns)
		return edges[d.split], edges[d.split+1], nil
	}
	first, end = d.matrix[d.split].documents(ns)
	return first, end, nil
}

// profiles returns the profiles that write such a description under such a name. bare means a file
// name without a split.
func (d *description) profiles(bare bool) []Profile {
	gpt := d
	if d.class == blendClass {
		gpt = d.members[0]
	}
	var found []Profile
	for _, p := range profiles {
		if p.pathPrefix != gpt.pathPrefix || p.bareNames != bare {
			continue
		}
		if d.class == blendClass && (p.renormalize != d.renormalize || p.bareNames == d.named) {
			continue
		}
		found = append(found, p)
	}
	return found
}

// A Like holds the contents of another dataset's description.txt that apply to the whole training.
type Like struct {
	Tokenizer      python.Value // nil if the description has no tokenizer, as in core 0.4
	SequenceLength int64
	Seed           uint32
	// "" if each split had its own token files (--train-data-path and similar options)
	Split string
	// that write such descriptions, oldest first; the newest is the best guess
	Profiles []Profile

	// Properties of the described dataset or blend, as an example.
	Class    string // "GPTDataset" or "BlendedDataset"
	Prefixes []string
	Samples  Size // requested
	Of       rebuild.Split
}

// ReadLike calls [likeDescription] for a description.txt.
func ReadLike(path string) (Like, error) {
	text, err := readDescription(filesystem.OS{}, path)
	if err != nil {
		return Like{}, err
	}
	l, err := likeDescription(text)
	if err != nil {
		return Like{}, fmt.Errorf("%s: %w", path, err)
	}
	return l, nil
}

// likeDescription extracts from the text of a description everything that another index of the same
// training needs, above all the tokenizer's object.
func likeDescription(text []byte) (Like, error) {
	d, err := parseDescription(text)
	if err != nil {
		return Like{}, err
	}
	l := Like{Class: d.class, Of: d.split, Samples: d.samples}
	gpt := d
	if d.class == blendClass {
		gpt, l.Samples = d.members[0], d.size
		for _, m := range d.members {
			l.Prefixes = append(l.Prefixes, m.prefix)
		}
	} else {
		l.Prefixes = []string{d.prefix}
	}
	l.Tokenizer, l.SequenceLength, l.Seed, l.Split = gpt.tokenizer, gpt.sequenceLength, gpt.seed, gpt.splitString
	for _, bare := range []bool{true, false} {
		l.Profiles = append(l.Profiles, d.profiles(bare)...)
	}
	return l, nil
}
