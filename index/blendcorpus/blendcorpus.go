// Package blendcorpus names, builds and verifies the index caches of BlendCorpus and of
// Megatron-DeepSpeed. The files are byte-identical to the files that GPTDataset, BuildCorpusDataset
// and BlendableDataset of these programs write, and have the names that the programs look for.
//
// Token files belong to corpora, and a blend has three levels. All numbers in blends are int64,
// whatever their size:
//
//	<h>.dsc <h>_doc_idx.npy <h>_sample_idx.npy <h>_shuffle_idx.npy   one split of one token file; see package gpt
//	<h>.dsc <h>_index.npy <h>_sample_index.npy                       a corpus: file and sample in it, of each sample
//	<h>.dsc <h>_index.npy <h>_sample_index.npy                       the blend: corpus and sample in it, of each sample
//
// <h> is the MD5 of the text in <h>.dsc. A flat blend (deepspeedai/Megatron-DeepSpeed) has no
// corpora: its samples come directly from files.
//
// The hash of a corpus covers only its name and number of samples. It does not cover its files,
// their weights, the seed or the split. Two blends that share a cache directory may therefore use
// the same name for different contents, and the original programs would silently read the existing
// files. This package compares the settings too, and rebuilds a corpus whose settings differ. A
// directory can still hold only one blend per name: use a separate cache directory for each blend.
//
// The rules follow zhenghh04/blendcorpus (blendcorpus/data: gpt_dataset.py, blendable_dataset.py,
// dataset_utils.py, helpers.cpp) and the files with the same names in
// argonne-lcf/Megatron-DeepSpeed.
package blendcorpus

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"mula/index/rebuild"
)

// Profile is the program that will read the cache. The profiles differ in the description of a
// corpus, and in a rounding of the weights of corpora.
type Profile uint8

// The profiles.
const (
	BlendCorpus Profile = iota
	MegatronDeepSpeed
)

var profileNames = [...]string{"blendcorpus", "megatron-deepspeed"}

// ProfileNamed returns the profile with the given name, "blendcorpus" or "megatron-deepspeed".
func ProfileNamed(name string) (Profile, error) {
	for i, known := range profileNames {
		if name == known {
			return Profile(i), nil
		}
	}
	return 0, fmt.Errorf("unknown profile %q; use one of %s", name, strings.Join(profileNames[:], ", "))
}

// String returns the name that [ProfileNamed] accepts.
func (p Profile) String() string {
	if int(p) < len(profileNames) {
		return profileNames[p]
	}
	return fmt.Sprintf("profile(%d)", uint8(p))
}

// defaultSplit is the default split string of both programs. It is hashed unchanged, blanks
// included.
const defaultSplit = "969, 30, 1"

// Config is the configuration of the program. Fields that are part of a hash say so.
type Config struct {
	Profile Profile
	// whether the blend arithmetic fuses multiply and add (one rounding), as helpers compiled for
	// aarch64 or x86-64-v3 do; not hashed
	Fused bool

	Files []File // --data-file-list; see [ParseFileList]. The prefixes are hashed
	// The only file was given without a weight. Then there is no blend, and the 0.5 % of extra
	// samples is not added.
	Plain bool
	Split string // --split; hashed unchanged
	// samples of train, valid and test; see [Requests]. The resulting sizes are hashed
	Samples [3]int64

	SequenceLength int64  // --seq-length, hashed
	Seed           uint32 // --seed, hashed

	// blend_sample_in_corpus, the default. Without it, the files of a corpus follow one another.
	// Hashed by BlendCorpus.
	BlendSampleInCorpus bool
	// shuffle_sample_in_corpus. Does not affect the files, but BlendCorpus hashes it
	ShuffleSampleInCorpus bool
	ExactEpochs           int64 // train_data_exact_num_epochs; 0 for as many as needed. Hashed

	// AllowUnreadable also builds files that the program can build but not read completely: a file
	// without a document in a split, or a blend that takes more samples from a file or corpus than
	// it has. Training stops at the first such sample. By default, these are errors.
	AllowUnreadable bool

	// Cache is the directory of all files, --data-cache-path. If empty, the programs keep the
	// indices of token files in directories named index-cache next to the token files, and do not
	// store blends.
	Cache string
	// the base directory of relative prefixes; "" is the working directory. Does not change the
	// text that is hashed.
	Root string

	Threads int // goroutines that read lengths in New; 0: GOMAXPROCS
}

// NewConfig returns the program's defaults: split "969, 30, 1", samples blended within corpora, and
// seed 123 (BlendCorpus) or 1234 (Megatron-DeepSpeed).
func NewConfig(p Profile) Config {
	c := Config{Profile: p, Split: defaultSplit, Seed: 1234, BlendSampleInCorpus: true}
	if p == BlendCorpus {
		c.Seed = 123
	}
	return c
}

// Requests returns the numbers of train, valid and test samples that BlendCorpus requests, where
// evaluations is 1. In Megatron-DeepSpeed, evaluations applies to valid and is ⌊train iterations /
// evaluation interval⌋ + 1 in its training loop.
func Requests(globalBatchSize, trainIters, evalIters, evaluations int64) ([3]int64, error) {
	var out [3]int64
	for s, factors := range [3][3]int64{{globalBatchSize, trainIters, 1}, {globalBatchSize, evalIters, evaluations},
		{globalBatchSize, evalIters, 1}} {
		out[s] = 1
		for _, f := range factors {
			switch {
			case f < 0:
				return [3]int64{}, fmt.Errorf("%d is negative; batch size, iterations and evaluations must be 0 or "+
					"more", f)
			case f > 0 && out[s] > math.MaxInt64/f:
				return [3]int64{}, fmt.Errorf("%s: batch size times iterations exceeds the largest sample count",
					rebuild.Split(s))
			}
			out[s] *= f
		}
	}
	return out, nil
}

// check validates everything that does not depend on the token files.
func (c *Config) check() error {
	switch {
	case int(c.Profile) >= len(profileNames):
		return fmt.Errorf("%s is unknown", c.Profile)
	case len(c.Files) == 0:
		return errors.New("the list of token files is empty")
	case c.SequenceLength < 1 || c.SequenceLength >= math.MaxInt32:
		return fmt.Errorf("sequence length %d is invalid; give the number of tokens of a sample, as --seq-length",
			c.SequenceLength)
	case c.ExactEpochs < 0:
		return fmt.Errorf("invalid number of exact epochs %d; give a number above 0, or 0 for as many as needed",
			c.ExactEpochs)
	}
	for s, n := range c.Samples {
		if n < 0 || n > math.MaxInt64/4/c.SequenceLength {
			return fmt.Errorf("%s: %d samples of %d tokens are out of range", rebuild.Split(s), n, c.SequenceLength)
		}
	}
	if c.Plain && (len(c.Files) != 1 || !c.flat()) {
		return fmt.Errorf("%d files without weights; only a single file without a corpus needs no weight", len(c.Files))
	}
	for i, f := range c.Files {
		if err := f.check(c.flat()); err != nil {
			return fmt.Errorf("token file %d: %w", i+1, err)
		}
	}
	if !utf8.ValidString(c.Split) || strings.ContainsAny(c.Split, "\r\n") {
		return fmt.Errorf("invalid split %q; write it like 969, 30, 1", c.Split)
	}
	return nil
}

// flat reports whether there are no corpora.
func (c *Config) flat() bool { return c.Files[0].Corpus == "" }
