// Package megatron names, builds, verifies and reads the index caches of Megatron-LM: the files
// that its GPTDataset and BlendedDataset would have written, to the byte, under the names that they
// will ask for.
//
// A cache is a directory of files. A GPT dataset is one split of one token file, and has
//
//	<hash>-GPTDataset-<split>-description.txt     the text whose MD5 is <hash>
//	<hash>-GPTDataset-<split>-document_index.npy  int32: the documents, epoch after epoch, shuffled
//	<hash>-GPTDataset-<split>-sample_index.npy    int32 or int64 pairs: where each sample begins
//	<hash>-GPTDataset-<split>-shuffle_index.npy   uint32 or int64: the order of the samples
//
// and a blend of such datasets has
//
//	<hash>-BlendedDataset-<split>-description.txt
//	<hash>-BlendedDataset-<split>-dataset_index.npy         int16: which dataset each sample comes from
//	<hash>-BlendedDataset-<split>-dataset_sample_index.npy  int64: and which of its samples that is
//
// The description says what was asked for, so names follow from a [Config] alone; what it does not
// say, although the contents depend on it, are the token file itself, whether samples have an extra
// token, whether a partial validation sample is kept, and the release of Megatron. Releases differ
// in names and contents; a [Profile] stands for those that agree.
//
// [New] opens a configuration: it computes all names, and [Index.Describe] and [Index.Build] do the
// rest. [Verify] rebuilds what the descriptions in a directory say and compares. [OpenCache] reads
// a cache as an order of samples.
//
// The rules are those of NVIDIA/Megatron-LM, megatron/core/datasets:
// blended_megatron_dataset_builder.py, blended_dataset.py, gpt_dataset.py and helpers.cpp, at the
// releases that the profiles name.
package megatron

import (
	"fmt"

	"mula/index/python"
)

// Arithmetic is the rounding of the errors that the blend loop compares. Megatron's C++ helper
// leaves it to the compiler.
type Arithmetic uint8

const (
	// Separate rounds the product and the difference: x86-64 as g++ compiles it without -march.
	Separate Arithmetic = iota
	// Fused rounds once: aarch64 (GH200, GB200, Grace), and x86-64 where the helper was built for
	// x86-64-v3 or newer.
	Fused
)

// Arithmetics lists the names that [ParseArithmetic] reads.
func Arithmetics() []string { return []string{Separate.String(), Fused.String()} }

// ParseArithmetic reads the name of an arithmetic, "separate" or "fused".
func ParseArithmetic(name string) (Arithmetic, error) {
	for _, a := range []Arithmetic{Separate, Fused} {
		if name == a.String() {
			return a, nil
		}
	}
	return 0, fmt.Errorf("arithmetic %q is not known: give separate (Megatron's helper built for plain x86-64) or "+
		"fused (built for aarch64, or with -march=x86-64-v3 and the like)", name)
}

// String is the name that [ParseArithmetic] reads.
func (a Arithmetic) String() string {
	switch a {
	case Separate:
		return "separate"
	case Fused:
		return "fused"
	}
	return fmt.Sprintf("arithmetic(%d)", uint8(a))
}

// Split numbers the three splits in Megatron's order.
type Split uint8

// The splits, which are also the places in [Config.PerSplit] and [Config.Samples].
const (
	Train Split = iota
	Valid
	Test
)

// String is the name of the split in descriptions and file names.
func (s Split) String() string {
	if int(s) < len(splitNames) {
		return splitNames[s]
	}
	return fmt.Sprintf("split(%d)", uint8(s))
}

var splitNames = [...]string{"train", "valid", "test"}

func splitNamed(name string) (Split, bool) {
	for i, known := range splitNames {
		if known == name {
			return Split(i), true
		}
	}
	return 0, false
}

// Size is a number of samples asked for, or none: then a dataset is one epoch, and a blend all that
// its datasets have. The zero Size is none.
type Size struct {
	N     int64
	Given bool
}

// SizeOf is the size of n samples.
func SizeOf(n int64) Size { return Size{N: n, Given: true} }

// String is the number, or "all".
func (s Size) String() string {
	if s.Given {
		return fmt.Sprint(s.N)
	}
	return "all"
}

// value is the size as descriptions have it, a number or null.
func (s Size) value() python.Value {
	if s.Given {
		return python.Int(s.N)
	}
	return python.Null{}
}

// Megatron's defaults, where a configuration has to say something.
const (
	DefaultSplit   = "969, 30, 1" // --split, blanks included; hashed as it stands
	DefaultSurplus = 0.005        // --mid-level-dataset-surplus
	DefaultSeed    = 1234         // --seed
)

// Config is what Megatron would be told. Where a field is hashed, that is said; everything else
// changes contents only.
type Config struct {
	Profile    Profile    // which releases of Megatron; see [ProfileNamed]
	Arithmetic Arithmetic // of the blends; not hashed

	Blend Blend // --data-path; its prefixes are hashed as they stand
	// --train-data-path, --valid-data-path, --test-data-path, instead of Blend; nil leaves a split
	// out
	PerSplit [3]*Blend
	Split    string  // --split, hashed as it stands; required with Blend, forbidden with PerSplit
	Samples  [3]Size // how many samples to ask for of each split, hashed; see [Schedule.Samples]

	SequenceLength int64  // --seq-length, hashed
	Seed           uint32 // --seed, hashed

	ExtraToken              bool // add_extra_token_to_sequence, Megatron's default
	KeepPartialValidation   bool // drop_last_partial_validation_sequence=False
	RenormalizeBlendWeights bool // core 0.9 and 0.10 only: renormalize_blend_weights, hashed
	// --mid-level-dataset-surplus, core 0.13 and newer; older ones have 0.005. It changes the
	// hashed number of samples
	Surplus float64

	// the tokenizer's object in the description, hashed; see [LikeDescription] and
	// [HuggingFaceTokenizer]; core 0.4 has none
	Tokenizer python.Value

	// the directory of the cache, --data-cache-path; "" is Megatron's default, a directory beside
	// each token file
	Cache string
	// where relative prefixes are looked for, "" being the working directory; the text that is
	// hashed does not change
	Root string

	Threads int // how many goroutines read lengths at once, in New and Describe; 0: GOMAXPROCS
}

// NewConfig is a configuration with Megatron's defaults: the newest profile, seed 1234, split "969,
// 30, 1", the extra token, surplus 0.005.
func NewConfig() Config {
	all := Profiles()
	return Config{Profile: all[len(all)-1], Split: DefaultSplit, Seed: DefaultSeed, ExtraToken: true,
		Surplus: DefaultSurplus}
}
