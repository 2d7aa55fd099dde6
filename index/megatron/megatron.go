// Package megatron names, builds, verifies and reads the index caches of Megatron-LM. The files are
// byte-identical to the files that GPTDataset and BlendedDataset write, and have the names that
// Megatron looks for.
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
//	<hash>-BlendedDataset-<split>-dataset_index.npy         int16: the dataset of each sample
//	<hash>-BlendedDataset-<split>-dataset_sample_index.npy  int64: the number of the sample in its dataset
//
// The description contains the request, so names depend only on the [Config]. The contents also
// depend on settings that are not in the description: the token file itself, whether samples have
// an extra token, whether a partial validation sample is kept, and the release of Megatron.
// Releases differ in names and contents. A [Profile] is a group of releases that agree.
//
// [New] opens a configuration and computes all names. [Index.Describe] lists them and [Index.Build]
// builds the files. [Verify] rebuilds the files that the descriptions in a directory specify, and
// compares. [OpenCache] reads a cache as an order of samples.
//
// The rules follow NVIDIA/Megatron-LM, megatron/core/datasets: blended_megatron_dataset_builder.py,
// blended_dataset.py, gpt_dataset.py and helpers.cpp, at the releases of the profiles.
package megatron

import (
	"fmt"

	"mula/index/python"
)

// Arithmetic is the rounding of the errors that the blend loop compares. Megatron's C++ helper
// leaves the choice to the compiler.
type Arithmetic uint8

const (
	// Separate rounds the product and the difference: x86-64 as g++ compiles it without -march.
	Separate Arithmetic = iota
	// Fused rounds once: aarch64 (GH200, GB200, Grace), and x86-64 if the helper was built for
	// x86-64-v3 or newer.
	Fused
)

// Arithmetics lists the names that [ParseArithmetic] accepts.
func Arithmetics() []string { return []string{Separate.String(), Fused.String()} }

// ParseArithmetic parses the name of an arithmetic, "separate" or "fused".
func ParseArithmetic(name string) (Arithmetic, error) {
	for _, a := range []Arithmetic{Separate, Fused} {
		if name == a.String() {
			return a, nil
		}
	}
	return 0, fmt.Errorf("unknown arithmetic %q; use separate (Megatron's helper built for plain x86-64) or fused "+
		"(built for aarch64, or with -march=x86-64-v3 or newer)", name)
}

// String returns the name that [ParseArithmetic] accepts.
func (a Arithmetic) String() string {
	switch a {
	case Separate:
		return "separate"
	case Fused:
		return "fused"
	}
	return fmt.Sprintf("arithmetic(%d)", uint8(a))
}

// Size is a number of requested samples, or open. With an open size, a dataset is one epoch, and a
// blend has all samples of its datasets. The zero Size is open.
type Size struct {
	N     int64
	Given bool
}

// SizeOf returns the size of n samples.
func SizeOf(n int64) Size { return Size{N: n, Given: true} }

// count returns the number, or -1.
func (s Size) count() int64 {
	if s.Given {
		return s.N
	}
	return -1
}

// String returns the number, or "all".
func (s Size) String() string {
	if s.Given {
		return fmt.Sprint(s.N)
	}
	return "all"
}

// value returns the size as in descriptions, a number or null.
func (s Size) value() python.Value {
	if s.Given {
		return python.Int(s.N)
	}
	return python.Null{}
}

// Megatron's defaults for required settings.
const (
	DefaultSplit   = "969, 30, 1" // --split; hashed unchanged, blanks included
	DefaultSurplus = 0.005        // --mid-level-dataset-surplus
	DefaultSeed    = 1234         // --seed
)

// Config is the configuration of Megatron. Hashed fields say so; all other fields affect only the
// contents.
type Config struct {
	Profile    Profile    // the releases of Megatron; see [ProfileNamed]
	Arithmetic Arithmetic // of the blends; not hashed

	Blend Blend // --data-path; its prefixes are hashed unchanged
	// --train-data-path, --valid-data-path, --test-data-path, instead of Blend; nil skips a split
	PerSplit [3]*Blend
	Split    string  // --split, hashed unchanged; required with Blend, forbidden with PerSplit
	Samples  [3]Size // number of samples requested from each split, hashed; see [Schedule.Samples]

	SequenceLength int64  // --seq-length, hashed
	Seed           uint32 // --seed, hashed

	ExtraToken              bool // add_extra_token_to_sequence, Megatron's default
	KeepPartialValidation   bool // drop_last_partial_validation_sequence=False
	RenormalizeBlendWeights bool // core 0.9 and 0.10 only: renormalize_blend_weights, hashed
	// --mid-level-dataset-surplus, core 0.13 and newer; older releases use 0.005. It affects the
	// hashed number of samples
	Surplus float64

	// the tokenizer's object in the description, hashed; see [likeDescription] and
	// [HuggingFaceTokenizer]; not in core 0.4
	Tokenizer python.Value

	// the cache directory, --data-cache-path; "" is Megatron's default, a directory next to each
	// token file
	Cache string
	// the base directory of relative prefixes; "" is the working directory. Does not change the
	// text that is hashed.
	Root string

	Threads int // goroutines that read lengths in New and Describe; 0: GOMAXPROCS
}

// NewConfig returns a configuration with Megatron's defaults: the newest profile, seed 1234, split
// "969, 30, 1", the extra token, surplus 0.005.
func NewConfig() Config {
	all := Profiles()
	return Config{Profile: all[len(all)-1], Split: DefaultSplit, Seed: DefaultSeed, ExtraToken: true,
		Surplus: DefaultSurplus}
}
