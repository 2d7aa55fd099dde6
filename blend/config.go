package blend

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"

	"github.com/goccy/go-yaml/ast"

	"mula/index"
	"mula/internal/quantity"
	"mula/internal/strictyaml"
)

// packingBestFit is the name of the packing in blend.yaml.
const packingBestFit = "best_fit"

// The names of orders in blend.yaml.
const (
	orderNative   = "native"
	orderMegatron = "megatron"
)

// A Config is the content of blend.yaml. A Config built in code is equally valid; its shard paths
// are relative to the working directory.
type Config struct {
	SequenceLength int    `yaml:"sequence_length"` // L; a sample has L+1 tokens
	Seed           uint64 `yaml:"seed"`            // of the order within the sources
	// fraction of each source's windows in the validation split, 0 if not set
	Validation Number `yaml:"validation"`
	// length of the plan; nil: the number of training windows of all sources
	Samples *int64 `yaml:"samples" count:"suffix"`
	// length in tokens; a sample has L of them. Samples and Tokens must not both be set
	Tokens  *int64         `yaml:"tokens" count:"suffix"`
	Sources []SourceConfig `yaml:"sources"`
	Stages  []StageConfig  `yaml:"stages"` // empty: one stage with the weights of the sources
	Skips   []Range        `yaml:"skips"`  // positions that yield no sample

	// "native" (the default) or "megatron". A Megatron order is read from index files, so only
	// SequenceLength, Skips and Megatron may be set with it
	Order    string          `yaml:"order"`
	Megatron *MegatronConfig `yaml:"megatron"` // location of the index files

	// locality of the windows of a source; nil: all windows of an epoch are shuffled
	Shuffle *ShuffleConfig `yaml:"shuffle"`

	Packing string `yaml:"packing"` // "best_fit": samples are whole documents, packed; "" for windows
	// token id after the last document of a packed sample; nil: the end-of-document id
	Pad *int64 `yaml:"pad"`

	dir  string           // shard paths are relative to it
	file *strictyaml.File // for lines in messages; may be nil
}

// A ShuffleConfig makes a plan draw windows that are stored together at about the same time: see
// [index.Locality].
type ShuffleConfig struct {
	Block int64 `yaml:"block" count:"suffix"` // windows of a block
	Group int64 `yaml:"group" count:"suffix"` // blocks of a group; default 64
}

// defaultGroup is the default of [ShuffleConfig.Group].
const defaultGroup = 64

// locality returns the locality of the windows of a source.
func (c *Config) locality() index.Locality {
	if c.Shuffle == nil {
		return index.Locality{}
	}
	return index.Locality{Block: c.Shuffle.Block, Group: cmp.Or(c.Shuffle.Group, defaultGroup)}
}

// A SourceConfig is one entry of sources in blend.yaml.
type SourceConfig struct {
	Name   string   `yaml:"name" url:"ok"`
	Shards []string `yaml:"shards" url:"ok"` // paths, URLs and patterns, see [Seal]
	// share of the samples; if no source has a weight, weights are the numbers of training windows
	Weight    Number `yaml:"weight"`
	MaxEpochs Number `yaml:"max_epochs"` // limit on the epochs that a plan may draw; no limit if not set
}

// A StageConfig is one entry of stages in blend.yaml.
type StageConfig struct {
	Samples StageLength `yaml:"samples"`
	Tokens  *int64      `yaml:"tokens" count:"suffix"` // instead of Samples, as in a Config
	// by source; the stage draws nothing from a missing source. nil: the weights of the sources
	Weights map[string]Number `yaml:"weights"`
}

// A MegatronConfig is the entry megatron in blend.yaml. It selects an order of an index cache.
type MegatronConfig struct {
	Cache string `yaml:"cache"` // directory of the index files
	// hash of a blend or dataset, or a file whose name starts with the hash; "": the only order of
	// the split
	Name       string `yaml:"name"`
	Split      string `yaml:"split"`      // "": train
	Validation string `yaml:"validation"` // like Name, for the validation split; "": none
	// directory for relative prefixes of token files; "": the configuration's directory
	Root string `yaml:"root"`
}

// A StageLength is a number of samples, or "rest": the remaining samples of the plan.
type StageLength struct {
	Rest  bool
	Count int64
}

// UnmarshalYAML accepts a number, optionally with a suffix of [quantity.Count], or the word rest.
func (l *StageLength) UnmarshalYAML(n ast.Node) error {
	if s, ok := n.(*ast.StringNode); ok && s.Value == "rest" {
		*l = StageLength{Rest: true}
		return nil
	}
	if scalar, ok := n.(ast.ScalarNode); ok {
		v, err := quantity.Count(fmt.Sprint(scalar.GetToken().Value))
		if err == nil && v > 0 {
			*l = StageLength{Count: v}
			return nil
		}
		if err != nil && !errors.Is(err, quantity.ErrForm) {
			return err
		}
	}
	return errors.New(`want a positive number of samples such as 20000 or 20k, or the word "rest"`)
}

// samplesOf returns the number of samples for the given training tokens, rounded up.
func samplesOf(tokens int64, sequenceLength int) int64 {
	n := tokens / int64(sequenceLength)
	if tokens%int64(sequenceLength) > 0 {
		n++
	}
	return n
}

// length returns a plan's length in samples, nil if neither samples nor tokens are set.
func length(samples, tokens *int64, sequenceLength int) *int64 {
	if samples == nil && tokens != nil {
		return new(samplesOf(*tokens, sequenceLength))
	}
	return samples
}

// length returns the length of the stage in samples.
func (s StageConfig) length(sequenceLength int) StageLength {
	if s.Tokens != nil {
		return StageLength{Count: samplesOf(*s.Tokens, sequenceLength)}
	}
	return s.Samples
}

// check validates the length of stage j of n.
func (s StageConfig) check(file *strictyaml.File, j, n int) error {
	path := fmt.Sprintf("$.stages[%d]", j)
	switch {
	case s.Tokens != nil && s.Samples != (StageLength{}):
		return file.Errorf(path+".tokens", "stage %d has both samples and tokens; remove one", j+1)
	case s.Tokens != nil && *s.Tokens < 1:
		return file.Errorf(path+".tokens", "tokens of stage %d is %d; it must be at least 1", j+1, *s.Tokens)
	case s.Samples.Rest && j < n-1:
		return file.Errorf(path+".samples", `stage %d: only the last stage can have "samples: rest"`, j+1)
	case !s.Samples.Rest && s.Samples.Count == 0 && s.Tokens == nil:
		return file.Errorf(path,
			`stage %d has no samples; set samples or tokens, or "samples: rest" in the last stage`, j+1)
	}
	return nil
}

// LoadConfig reads a blend.yaml. Errors name the file and line.
func LoadConfig(path string) (*Config, error) {
	file, err := strictyaml.Read(path)
	if err != nil {
		return nil, err
	}
	return newConfig(file, realDir(filepath.Dir(path)))
}

// Warnings returns warnings about the file, such as deprecated field names, with file and line.
func (c *Config) Warnings() []string { return c.file.Warnings() }

// ParseConfig parses the text of a blend.yaml. Messages use name as the file's name. Shard paths
// are relative to dir.
func ParseConfig(data []byte, name, dir string) (*Config, error) {
	file, err := strictyaml.Parse(data, name)
	if err != nil {
		return nil, err
	}
	return newConfig(file, dir)
}

func newConfig(file *strictyaml.File, dir string) (*Config, error) {
	if file.Empty() {
		return nil, file.Errorf("$", "the file is empty")
	}
	c := &Config{dir: dir, file: file}
	decoded := file.Decode(c)
	if err := strictyaml.All([]error{decoded}, c.problems(decoded)); err != nil {
		return nil, err
	}
	return c, nil
}

// validate checks everything that does not need the shards.
func (c *Config) validate() error { return strictyaml.All(c.problems(nil)) }

// problems returns the errors that can be found without the shards. decoded is the error of
// decoding the file; fields that could not be decoded are not checked.
func (c *Config) problems(decoded error) []error {
	kind, ok := c.ordered()
	problems := kind.problems(c, decoded)
	if ok {
		return problems
	}
	var names []string
	for _, o := range orderConfigs() {
		names = append(names, o.name)
	}
	unknown := c.file.Errorf("$.order",
		"order %q is not known%s (it is %s, or %s to read the index cache of Megatron-LM)", c.Order,
		strictyaml.DidYouMean(c.Order, names), orderNative, orderMegatron)
	return append([]error{unknown}, problems...)
}

// nativeProblems returns the problems of a configuration with order native.
func (c *Config) nativeProblems(decoded error) (problems []error) {
	bad := func(path, format string, args ...any) {
		problems = append(problems, c.file.Errorf(path, format, args...))
	}
	if c.Megatron != nil && cmp.Or(c.Order, orderNative) == orderNative {
		bad("$.megatron", `megatron requires "order: megatron"; add it, or remove megatron`)
	}
	switch {
	case c.SequenceLength == 0 && !c.file.Has("$.sequence_length"):
		bad("$.sequence_length",
			"sequence_length is missing; give the number of training tokens per sample, such as 4096")
	case c.SequenceLength < 1 || c.SequenceLength > maxSequenceLength:
		bad("$.sequence_length", "sequence_length is %d; it must be between 1 and %d", c.SequenceLength,
			maxSequenceLength)
	}
	if c.Samples != nil && (*c.Samples < 1 || *c.Samples > maxLength) {
		bad("$.samples", "samples is %d; a plan has between 1 and 2^60 samples", *c.Samples)
	}
	problems = append(problems, checkTokens(c.file, c.Samples, c.Tokens))
	if c.Validation.IsSet() && c.Validation.rat.Cmp(one) >= 0 {
		bad("$.validation", "validation is %s; it must be below 1, as a fraction of each source", c.Validation)
	}
	if c.Packing != "" && c.Packing != packingBestFit {
		bad("$.packing", "packing %q is not known%s (use %s, or omit packing for windows)", c.Packing,
			strictyaml.DidYouMean(c.Packing, []string{packingBestFit}), packingBestFit)
	}
	if c.Shuffle != nil {
		if err := c.locality().Check(); err != nil {
			bad("$.shuffle", "shuffle: %w", err)
		}
		if c.Packing != "" {
			bad("$.shuffle", "shuffle is for windows, and packed samples are shuffled in the whole source; remove "+
				"shuffle or packing")
		}
	}
	if c.Pad != nil && c.Packing == "" {
		bad("$.pad",
			"pad requires packing, because windows are never padded; remove it, or add packing: %s",
			packingBestFit)
	} else if c.Pad != nil && (*c.Pad < 0 || *c.Pad > math.MaxInt32) {
		bad("$.pad", "pad is %d; it is a token id", *c.Pad)
	}
	known := c.checkSources(bad)
	var fixed int64
	for j, st := range c.Stages {
		path := fmt.Sprintf("$.stages[%d]", j)
		if err := st.check(c.file, j, len(c.Stages)); err != nil {
			problems = append(problems, err)
		} else if count := st.length(max(1, c.SequenceLength)).Count; count > maxLength-fixed {
			bad(path, "the stages up to number %d have more than 2^60 samples", j+1)
		} else {
			fixed += count
		}
		if st.Weights != nil && len(st.Weights) == 0 {
			bad(path, "stage %d: no source has a weight", j+1)
		}
		for _, name := range slices.Sorted(maps.Keys(st.Weights)) {
			at := path + ".weights.'" + name + "'"
			switch _, ok := known[name]; {
			case !ok && strictyaml.Unread(decoded, "$.sources"): // sources are incomplete
			case !ok:
				bad(at, "stage %d has a weight for %q, which is not a source%s", j+1, name,
					strictyaml.DidYouMean(name, slices.Sorted(maps.Keys(known))))
			case !st.Weights[name].IsSet() && !strictyaml.Unread(decoded, path+".weights"):
				bad(at, "stage %d: the weight of %q is missing", j+1, name)
			case st.Weights[name].IsSet() && st.Weights[name].sign() == 0:
				bad(at, "stage %d: the weight of %q is zero; to pause a source, omit it from the stage", j+1, name)
			}
		}
	}
	return append(problems, c.skipProblems()...)
}

// checkSources reports the problems of the sources, and returns their indices by name.
func (c *Config) checkSources(bad func(path, format string, args ...any)) map[string]int {
	known := map[string]int{}
	if len(c.Sources) == 0 {
		bad("$.sources", "no sources; list at least one, with a name and shards: - {name: web, shards: [web/*.idx]}")
		return known
	}
	weighted := 0
	for i, s := range c.Sources {
		path := fmt.Sprintf("$.sources[%d]", i)
		if err := validateName(s.Name); err != nil {
			bad(path, "source %d: %w", i+1, err)
		} else if j, ok := known[s.Name]; ok {
			bad(path+".name", "sources %d and %d are both called %q", j+1, i+1, s.Name)
		} else {
			known[s.Name] = i
		}
		if len(s.Shards) == 0 {
			bad(path, "source %q has no shards", s.Name)
		}
		if s.Weight.IsSet() {
			weighted++
			if s.Weight.sign() == 0 {
				bad(path+".weight",
					"the weight of %q is zero; remove the source, or omit it from a stage to pause it",
					s.Name)
			}
		}
		if s.MaxEpochs.IsSet() && s.MaxEpochs.sign() == 0 {
			bad(path+".max_epochs", "max_epochs of %q is zero; remove the source", s.Name)
		}
	}
	if weighted > 0 && weighted < len(c.Sources) {
		i := slices.IndexFunc(c.Sources, func(s SourceConfig) bool { return !s.Weight.IsSet() })
		bad(fmt.Sprintf("$.sources[%d]", i), "source %q has no weight, but others have: give every source one, or none",
			c.Sources[i].Name)
	}
	return known
}

// checkTokens validates the length of a plan in tokens.
func checkTokens(file *strictyaml.File, samples, tokens *int64) error {
	switch {
	case tokens != nil && samples != nil:
		return file.Errorf("$.tokens", "samples and tokens are both set; remove one")
	case tokens != nil && (*tokens < 1 || *tokens > maxLength):
		return file.Errorf("$.tokens", "tokens is %d; a plan has between 1 and 2^60 tokens", *tokens)
	}
	return nil
}

func (c *Config) skipProblems() (problems []error) {
	for i, r := range c.Skips {
		if r.From < 0 || r.To <= r.From {
			problems = append(problems, c.file.Errorf(fmt.Sprintf("$.skips[%d]", i), "skip %d: [%d, %d) is not a "+
				"range of positions: from is the first skipped position, to the first position after the range",
				i+1, r.From, r.To))
		}
	}
	return problems
}

// megatronProblems returns the problems of a configuration with order megatron.
func (c *Config) megatronProblems(error) (problems []error) {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"seed", c.Seed != 0}, {"packing", c.Packing != ""}, {"pad", c.Pad != nil}, {"shuffle", c.Shuffle != nil},
		{"validation", c.Validation.IsSet()}, {"samples", c.Samples != nil},
		{"tokens", c.Tokens != nil}, {"sources", len(c.Sources) > 0}, {"stages", len(c.Stages) > 0},
	} {
		if f.set || c.file.Has("$."+f.name) { // explicit 0 and [] are refused too
			problems = append(problems, c.file.Errorf("$."+f.name,
				"%s cannot be set with `order: megatron`, which takes it from the cache; remove it", f.name))
		}
	}
	if c.SequenceLength < 0 || c.SequenceLength > maxSequenceLength {
		problems = append(problems, c.file.Errorf("$.sequence_length",
			"sequence_length is %d; it must be between 1 and %d, or omitted", c.SequenceLength, maxSequenceLength))
	}
	if c.Megatron == nil || c.Megatron.Cache == "" {
		problems = append(problems, c.file.Errorf("$.megatron",
			"order megatron needs the directory of the index files: megatron: {cache: DIR}"))
	}
	return append(problems, c.skipProblems()...)
}
