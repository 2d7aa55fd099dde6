// Package blendcorpus names, builds and verifies the index caches of BlendCorpus and of
// Megatron-DeepSpeed: the files that their GPTDataset, BuildCorpusDataset and BlendableDataset
// would have written, to the byte, under the names that they will look for.
//
// Token files belong to corpora, and a blend has three levels. All numbers in blends are int64,
// whatever their size:
//
//	<h>.dsc <h>_doc_idx.npy <h>_sample_idx.npy <h>_shuffle_idx.npy   one split of one token file; see package gpt
//	<h>.dsc <h>_index.npy <h>_sample_index.npy                       a corpus: which of its files each sample comes from, and which sample of it
//	<h>.dsc <h>_index.npy <h>_sample_index.npy                       the blend: which corpus each sample comes from, and which sample of it
//
// <h> is the MD5 of the text in <h>.dsc. A flat blend, as deepspeedai/Megatron-DeepSpeed has it,
// has no corpora: its samples come from files.
//
// What is hashed of a corpus is its name and number of samples only, neither its files nor their
// shares, seed or split. So two blends that share a cache directory may ask for one name and need
// different contents, and the original would use what is there without a word. Here the contents
// belong to a unit's settings, and a corpus whose contents were another's is built anew; but one
// name can serve one blend only: give each blend a cache directory of its own.
//
// The rules are those of zhenghh04/blendcorpus (blendcorpus/data: gpt_dataset.py,
// blendable_dataset.py, dataset_utils.py, helpers.cpp) and of the files of these names in
// argonne-lcf/Megatron-DeepSpeed.
package blendcorpus

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

// Profile is the program that will read the cache. They differ in the description of a corpus, and
// in a rounding of the weights of corpora.
type Profile uint8

// The profiles.
const (
	BlendCorpus Profile = iota
	MegatronDeepSpeed
)

var profileNames = [...]string{"blendcorpus", "megatron-deepspeed"}

// ProfileNamed finds a profile by its name, "blendcorpus" or "megatron-deepspeed".
func ProfileNamed(name string) (Profile, error) {
	for i, known := range profileNames {
		if name == known {
			return Profile(i), nil
		}
	}
	return 0, fmt.Errorf("profile %q is not known; give one of %s", name, strings.Join(profileNames[:], ", "))
}

// String is the name that [ProfileNamed] finds.
func (p Profile) String() string {
	if int(p) < len(profileNames) {
		return profileNames[p]
	}
	return fmt.Sprintf("profile(%d)", uint8(p))
}

// Split numbers the splits.
type Split uint8

// The splits, which are also the places in [Config.Samples].
const (
	Train Split = iota
	Valid
	Test
)

var splitNames = [...]string{"train", "valid", "test"}

// String is the name of the split in descriptions.
func (s Split) String() string {
	if int(s) < len(splitNames) {
		return splitNames[s]
	}
	return fmt.Sprintf("split(%d)", uint8(s))
}

// DefaultSplit is the programs' own split string, blanks included; it is hashed as it stands.
const DefaultSplit = "969, 30, 1"

// Config is what the program would be told. Where a field is hashed, that is said.
type Config struct {
	Profile Profile
	// the arithmetic of blends: rounded once, as by helpers compiled for aarch64 or for x86-64-v3;
	// not hashed
	Fused bool

	Files []File // --data-file-list; see [ParseFileList]. Prefixes are hashed
	// the one file was given without a weight: then there is no blend, and no 0.5 % on top of the
	// samples asked for
	Plain   bool
	Split   string   // --split; hashed as it stands
	Samples [3]int64 // asked for of train, valid and test; see [Requests]. What follows from them is hashed

	SequenceLength int64  // --seq-length, hashed
	Seed           uint32 // --seed, hashed

	// blend_sample_in_corpus, the default; otherwise a corpus is its files one after the other.
	// BlendCorpus hashes it
	BlendSampleInCorpus   bool
	ShuffleSampleInCorpus bool  // shuffle_sample_in_corpus. It changes no file, but BlendCorpus hashes it
	ExactEpochs           int64 // train_data_exact_num_epochs; 0 for as many as are needed. Hashed

	// AllowUnreadable builds also what the program builds but cannot read in full: files whose
	// share of a split is no document, and blends that take more samples from a file or corpus than
	// it has. Training stops when it comes to such a sample. Otherwise they are refused.
	AllowUnreadable bool

	// Cache is the directory for all files, --data-cache-path. Without one the programs keep the
	// indices of token files in directories named index-cache beside them, and no blends at all.
	Cache string
	// where relative prefixes are looked for, "" being the working directory; the text that is
	// hashed does not change
	Root string

	Threads int // how many goroutines read lengths at once, in New; 0: GOMAXPROCS
}

// NewConfig is a configuration with the program's defaults: split "969, 30, 1", samples blended
// within corpora, and the seed 123 of BlendCorpus or 1234 of Megatron-DeepSpeed.
func NewConfig(p Profile) Config {
	c := Config{Profile: p, Split: DefaultSplit, Seed: 1234, BlendSampleInCorpus: true}
	if p == BlendCorpus {
		c.Seed = 123
	}
	return c
}

// Requests are the numbers of samples that BlendCorpus asks for of train, valid and test.
// Megatron-DeepSpeed does too, except that it asks evaluations of valid often, ⌊train iterations /
// evaluation interval⌋ + 1 in its training loop; for BlendCorpus it is 1.
func Requests(globalBatchSize, trainIters, evalIters, evaluations int64) ([3]int64, error) {
	var out [3]int64
	for s, factors := range [3][3]int64{{globalBatchSize, trainIters, 1}, {globalBatchSize, evalIters, evaluations},
		{globalBatchSize, evalIters, 1}} {
		out[s] = 1
		for _, f := range factors {
			switch {
			case f < 0:
				return [3]int64{}, fmt.Errorf("%d is negative; batch size, iterations and evaluations are not", f)
			case f > 0 && out[s] > math.MaxInt64/f:
				return [3]int64{}, fmt.Errorf("%s: batch size times iterations are more samples than can be counted",
					Split(s))
			}
			out[s] *= f
		}
	}
	return out, nil
}

// check refuses what does not depend on the token files.
func (c *Config) check() error {
	switch {
	case int(c.Profile) >= len(profileNames):
		return fmt.Errorf("%s is not known", c.Profile)
	case len(c.Files) == 0:
		return errors.New("the list of token files is empty")
	case c.SequenceLength < 1 || c.SequenceLength >= math.MaxInt32:
		return fmt.Errorf("the sequence length is %d; it should be the number of tokens of a sample, as --seq-length",
			c.SequenceLength)
	case c.ExactEpochs < 0:
		return fmt.Errorf("exactly %d epochs are asked for; give a number above 0, or 0 for as many as are needed",
			c.ExactEpochs)
	}
	for s, n := range c.Samples {
		if n < 0 || n > math.MaxInt64/4/c.SequenceLength {
			return fmt.Errorf("%s: %d samples of %d tokens are asked for", Split(s), n, c.SequenceLength)
		}
	}
	if c.Plain && (len(c.Files) != 1 || !c.flat()) {
		return fmt.Errorf("%d files without weights; only a single one without a corpus needs none", len(c.Files))
	}
	for i, f := range c.Files {
		if err := f.check(c.flat()); err != nil {
			return fmt.Errorf("token file %d: %w", i+1, err)
		}
	}
	if !utf8.ValidString(c.Split) || strings.ContainsAny(c.Split, "\r\n") {
		return fmt.Errorf("the split string %q should be like 969, 30, 1", c.Split)
	}
	return nil
}

// flat says that there are no corpora.
func (c *Config) flat() bool { return c.Files[0].Corpus == "" }
