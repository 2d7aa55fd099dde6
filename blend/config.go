package blend

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"mula/internal/strictyaml"
)

// A Config is blend.yaml: what to blend, before any shard has been looked at. One that no file was read for is as good; its shards are
// relative to the working directory.
type Config struct {
	SequenceLength int            `yaml:"sequence_length"` // L; a sample has L+1 tokens
	Seed           uint64         `yaml:"seed"`            // of the order within the sources
	Validation     Number         `yaml:"validation"`      // share of each source's windows that is held out, 0 if not set
	Samples        *int64         `yaml:"samples"`         // length of the plan; nil for as many as all sources have training windows
	Sources        []SourceConfig `yaml:"sources"`
	Stages         []StageConfig  `yaml:"stages"` // none for one stage with the weights of the sources
	Skips          []Range        `yaml:"skips"`  // positions that yield no sample

	Order    string          `yaml:"order"`    // "native", which "" is too, or "megatron": the order is read, and only SequenceLength, Skips and Megatron are set
	Megatron *MegatronConfig `yaml:"megatron"` // what is read

	Packing string `yaml:"packing"` // "best_fit": samples are whole documents, packed; "" for windows
	Pad     *int64 `yaml:"pad"`     // the id behind the last document of a packed sample; nil for the end-of-document id

	dir  string           // shards are relative to it
	file *strictyaml.File // for the lines of what messages are about; nil without one
}

// A SourceConfig is one entry of sources in blend.yaml.
type SourceConfig struct {
	Name      string   `yaml:"name"`
	Shards    []string `yaml:"shards"`     // paths and patterns, see [Seal]
	Weight    Number   `yaml:"weight"`     // share of the samples; if no source has one, the numbers of training windows stand in
	MaxEpochs Number   `yaml:"max_epochs"` // a plan that needs more of the source is refused; no limit if not set
}

// A StageConfig is one entry of stages in blend.yaml.
type StageConfig struct {
	Samples StageLength       `yaml:"samples"`
	Weights map[string]Number `yaml:"weights"` // by source; a source that is missing rests. nil for the weights of the sources
}

// A StageLength is a number of samples, or "rest": as many as are left of the plan's length.
type StageLength struct {
	Rest  bool
	Count int64
}

// A Range is the positions [From, To).
type Range struct {
	From int64 `yaml:"from" json:"from"`
	To   int64 `yaml:"to" json:"to"`
}

// UnmarshalYAML takes a number or the word rest.
func (l *StageLength) UnmarshalYAML(n ast.Node) error {
	if s, ok := n.(*ast.StringNode); ok && s.Value == "rest" {
		*l = StageLength{Rest: true}
		return nil
	}
	if i, ok := n.(*ast.IntegerNode); ok {
		if v, err := strconv.ParseInt(strings.ReplaceAll(i.Token.Value, "_", ""), 10, 64); err == nil && v > 0 {
			*l = StageLength{Count: v}
			return nil
		}
	}
	return strictyaml.At(n, errors.New(`want a positive number of samples, or the word "rest"`))
}

// LoadConfig reads a blend.yaml. Errors name the file and line.
func LoadConfig(path string) (*Config, error) {
	file, err := strictyaml.Read(path)
	if err != nil {
		return nil, err
	}
	return newConfig(file, realDir(filepath.Dir(path)))
}

// ParseConfig reads the text of a blend.yaml. name stands for the file in messages; shards are relative to dir.
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
	if err := file.Decode(c); err != nil {
		return nil, err
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	return c, nil
}

// validate checks everything that does not need the shards.
func (c *Config) validate() error {
	switch c.Order {
	case "", orderNative:
		if c.Megatron != nil {
			return c.file.Errorf("$.megatron", `megatron is read with "order: megatron" only; add that, or leave it out`)
		}
	case orderMegatron:
		return c.validateMegatron()
	default:
		return c.file.Errorf("$.order", "order %q is not known%s (it is %s, or %s to read the index cache of Megatron-LM)", c.Order,
			strictyaml.DidYouMean(c.Order, []string{orderNative, orderMegatron}), orderNative, orderMegatron)
	}
	if c.SequenceLength == 0 && !c.file.Has("$.sequence_length") {
		return c.file.Errorf("$.sequence_length", "sequence_length is missing: give the number of tokens that a sample is to train on, such as 4096")
	}
	if c.SequenceLength < 1 || c.SequenceLength > maxSequenceLength {
		return c.file.Errorf("$.sequence_length", "sequence_length is %d; it must be between 1 and %d", c.SequenceLength, maxSequenceLength)
	}
	if c.Samples != nil && (*c.Samples < 1 || *c.Samples > maxLength) {
		return c.file.Errorf("$.samples", "samples is %d; a plan has between 1 and 2^60 samples", *c.Samples)
	}
	if c.Validation.IsSet() && c.Validation.rat.Cmp(one) >= 0 {
		return c.file.Errorf("$.validation", "validation is %s; it is a share of each source and must be below 1", c.Validation)
	}
	if c.Packing != "" && c.Packing != packingBestFit {
		return c.file.Errorf("$.packing", "packing %q is not known%s (it is %s, or left out for windows)", c.Packing,
			strictyaml.DidYouMean(c.Packing, []string{packingBestFit}), packingBestFit)
	}
	if c.Pad != nil && c.Packing == "" {
		return c.file.Errorf("$.pad", "pad has a meaning only with packing, as windows are never padded; leave it out, or write packing: %s", packingBestFit)
	}
	if c.Pad != nil && (*c.Pad < 0 || *c.Pad > math.MaxInt32) {
		return c.file.Errorf("$.pad", "pad is %d; it is a token id", *c.Pad)
	}
	if len(c.Sources) == 0 {
		return c.file.Errorf("$.sources", "no sources: list at least one, with a name and shards")
	}
	known := map[string]int{}
	weighted := 0
	for i, s := range c.Sources {
		path := fmt.Sprintf("$.sources[%d]", i)
		if err := validateName(s.Name); err != nil {
			return c.file.Errorf(path, "source %d: %w", i+1, err)
		}
		if j, ok := known[s.Name]; ok {
			return c.file.Errorf(path+".name", "sources %d and %d are both called %q", j+1, i+1, s.Name)
		}
		known[s.Name] = i
		if len(s.Shards) == 0 {
			return c.file.Errorf(path, "source %q has no shards", s.Name)
		}
		if s.Weight.IsSet() {
			weighted++
			if s.Weight.sign() == 0 {
				return c.file.Errorf(path+".weight", "the weight of %q is zero; leave the source out, or let it rest in a stage by not naming it there", s.Name)
			}
		}
		if s.MaxEpochs.IsSet() && s.MaxEpochs.sign() == 0 {
			return c.file.Errorf(path+".max_epochs", "max_epochs of %q is zero; leave the source out", s.Name)
		}
	}
	if weighted > 0 && weighted < len(c.Sources) {
		i := slices.IndexFunc(c.Sources, func(s SourceConfig) bool { return !s.Weight.IsSet() })
		return c.file.Errorf(fmt.Sprintf("$.sources[%d]", i), "source %q has no weight, but others have: give every source one, or none", c.Sources[i].Name)
	}
	var fixed int64
	for j, st := range c.Stages {
		path := fmt.Sprintf("$.stages[%d]", j)
		switch {
		case st.Samples.Rest && j < len(c.Stages)-1:
			return c.file.Errorf(path+".samples", `stage %d: only the last stage can have "samples: rest"`, j+1)
		case !st.Samples.Rest && st.Samples.Count == 0:
			return c.file.Errorf(path, `stage %d has no samples: give a number, or "rest" for the last stage`, j+1)
		case st.Samples.Count > maxLength-fixed:
			return c.file.Errorf(path+".samples", "the stages up to number %d have more than 2^60 samples", j+1)
		}
		fixed += st.Samples.Count
		if st.Weights != nil && len(st.Weights) == 0 {
			return c.file.Errorf(path, "stage %d: no source has a weight", j+1)
		}
		for _, name := range slices.Sorted(maps.Keys(st.Weights)) {
			at := path + ".weights.'" + name + "'"
			if _, ok := known[name]; !ok {
				return c.file.Errorf(at, "stage %d gives a weight to %q, which is not a source%s", j+1, name, strictyaml.DidYouMean(name, slices.Sorted(maps.Keys(known))))
			}
			if !st.Weights[name].IsSet() {
				return c.file.Errorf(at, "stage %d: the weight of %q is missing", j+1, name)
			}
			if st.Weights[name].sign() == 0 {
				return c.file.Errorf(at, "stage %d: the weight of %q is zero; leave the source out of the stage and it rests", j+1, name)
			}
		}
	}
	return c.validateSkips()
}

func (c *Config) validateSkips() error {
	for i, r := range c.Skips {
		if r.From < 0 || r.To <= r.From {
			return c.file.Errorf(fmt.Sprintf("$.skips[%d]", i), "skip %d: [%d, %d) is not a range of positions: from is the first that is left out, to the first after it",
				i+1, r.From, r.To)
		}
	}
	return nil
}

// validateMegatron is validate for an order that is read.
func (c *Config) validateMegatron() error {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"seed", c.Seed != 0}, {"packing", c.Packing != ""}, {"pad", c.Pad != nil}, {"validation", c.Validation.IsSet()}, {"samples", c.Samples != nil}, {"sources", len(c.Sources) > 0}, {"stages", len(c.Stages) > 0},
	} {
		if f.set || c.file.Has("$."+f.name) { // 0 and [] say something as well
			return c.file.Errorf("$."+f.name, "%s has no meaning with order megatron, which is what the cache says: leave it out", f.name)
		}
	}
	if c.SequenceLength < 0 || c.SequenceLength > maxSequenceLength {
		return c.file.Errorf("$.sequence_length", "sequence_length is %d; it must be between 1 and %d, or be left out", c.SequenceLength, maxSequenceLength)
	}
	if c.Megatron == nil || c.Megatron.Cache == "" {
		return c.file.Errorf("$.megatron", "order megatron needs the directory of the index files: megatron: {cache: DIR}")
	}
	return c.validateSkips()
}
