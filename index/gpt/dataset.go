// Package gpt builds the index of one GPT dataset, byte for byte as Megatron-LM's GPTDataset and
// BlendCorpus write it. The index is three .npy files: the order in which the documents of one file
// are read (document index), where each sample begins in that order (sample index), and the order
// of the samples (shuffle index).
//
// The rules follow megatron/core/datasets/gpt_dataset.py and helpers.cpp (build_sample_idx),
// Megatron-LM core 0.4 to 0.19. The packages megatron and blendcorpus determine the names of the
// files, the documents of a split and the number of samples.
//
// A "document" here has the meaning of Megatron-LM's documentation: one sequence of the .idx file.
package gpt

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
)

// Dataset is one split of one file, and the samples requested from it.
type Dataset struct {
	// lengths in tokens of all sequences of the file: little-endian int32, at any alignment, as in
	// the .idx file
	Lengths []byte

	// Guard calls read, which reads Lengths, on any goroutine, and returns read's error or its own.
	// It is needed for lengths in a mapped file (shards.Index.Guard); otherwise it is nil.
	Guard func(read func() error) error

	First, End int64 // the documents of the split: First, …, End-1
	// of the split according to its sequence starts, for a check against the lengths; 0: not known
	Tokens int64

	SequenceLength int64 // S, tokens of a sample
	ExtraToken     bool  // samples overlap by one token (add_extra_token_to_sequence, x = 1)
	// keep a last sample shorter than S (drop_last_partial_validation_sequence = False; only for
	// valid splits)
	KeepPartial bool

	// A kept partial sample that ends with an empty document has offset -1 if there is an extra
	// token: 0 tokens of that document, and 1 back. Core 0.7 to 0.9 write it. Later releases check
	// int32 sample indexes and reject it; CheckOffsets makes Build reject it too.
	CheckOffsets bool

	// AllowEmpty builds a split without tokens if no token is needed: for one epoch, or for no
	// samples without an extra token. Core 0.7 and later write such an index, without samples.
	AllowEmpty bool

	Samples int64 // N, samples requested; -1 for one epoch
	// 0: as many epochs as N needs; otherwise this number, which BlendCorpus can force
	Epochs int64

	Seed       uint32
	SampleType SampleType
}

// SampleType is the type of the numbers in the sample index. It depends on the version of
// Megatron-LM.
type SampleType int

const (
	Auto  SampleType = iota // int32 if it suffices, otherwise int64: core 0.10 and later
	Int32                   // core 0.4 to 0.7
	Int64                   // core 0.8 and 0.9, BlendCorpus, Megatron-DeepSpeed
)

// Layout holds everything that is known without a shuffle: counts, types, and the sizes of the
// three files.
type Layout struct {
	TokensPerEpoch  int64 // T, tokens of the documents First … End-1
	Epochs          int64 // E, the number of times each document is read
	DocumentEntries int64 // length of the document index, E·(End-First)
	Samples         int64 // n; the sample index has n+1 rows
	// m: the samples 0 … m-1 are shuffled among themselves, and so are m … n-1. m = n unless
	// Separate
	Shuffled int64
	Separate bool // the documents of the last epoch are shuffled separately from the earlier epochs

	SampleDescr, ShuffleDescr                string // numpy's names of the types: "<i4" or "<i8", "<u4" or "<i8"
	DocumentBytes, SampleBytes, ShuffleBytes int64  // file sizes, headers included
}

// Sizes returns the sizes of the document, sample and shuffle index, in the order of
// [Workers.Build].
func (l *Layout) Sizes() []int64 { return []int64{l.DocumentBytes, l.SampleBytes, l.ShuffleBytes} }

const (
	headerBytes = 128     // of every .npy file here
	maxTokens   = 1 << 62 // larger E·T are rejected, so that no sum below overflows
	maxInt32    = 1<<31 - 1
)

// Layout counts the tokens of the split and derives all other values. It returns an error for a
// dataset that Megatron-LM cannot build (a split without tokens, more than 2³¹ sequences, numbers
// beyond its types), and for invalid lengths.
func (d *Dataset) Layout() (Layout, error) {
	if err := d.check(); err != nil {
		return Layout{}, err
	}
	tokens, err := d.tokens()
	if err != nil {
		return Layout{}, err
	}
	return d.layout(tokens)
}

// layout is Layout for a split with the given number of tokens.
func (d *Dataset) layout(tokens int64) (Layout, error) {
	documents := d.End - d.First
	if tokens <= 0 && !d.emptyAllowed() {
		return Layout{}, fmt.Errorf("the split, sequences %d to %d, has no tokens (Megatron-LM would loop forever); "+
			"give the split a larger share or remove this file", d.First, d.End)
	}

	l := Layout{TokensPerEpoch: tokens, Epochs: 1}
	x := d.extra()
	if d.Samples >= 0 {
		high, low := bits.Mul64(uint64(d.Samples), uint64(d.SequenceLength))
		if high != 0 || low >= maxTokens {
			return Layout{}, fmt.Errorf("%d samples of %d tokens exceed 2^62 tokens; request fewer samples", d.Samples,
				d.SequenceLength)
		}
		if asked := int64(low) + x; asked > tokens {
			l.Epochs = (asked-1)/tokens + 1 // the smallest E with E·T ≥ N·S + x
		}
	}
	if d.Epochs > 0 {
		l.Epochs = d.Epochs
	}
	if high, low := bits.Mul64(uint64(l.Epochs), uint64(tokens)); high != 0 || low >= maxTokens {
		return Layout{}, fmt.Errorf("%d epochs of %d tokens exceed 2^62 tokens; use fewer epochs", l.Epochs, tokens)
	}
	// Every document of the split but one could be empty, so the number of entries has its own
	// bound.
	if high, low := bits.Mul64(uint64(l.Epochs), uint64(documents)); high != 0 || low >= maxTokens/16 {
		return Layout{}, fmt.Errorf("%d epochs of %d documents are too many entries; use fewer epochs", l.Epochs,
			documents)
	}
	l.DocumentEntries = l.Epochs * documents

	// below 0 only for an empty split, which has no samples because the division rounds towards 0
	all := l.Epochs*tokens - x
	l.Samples = all / d.SequenceLength
	if d.KeepPartial {
		// Upstream divides in single precision (helpers.cpp), so large counts are inexact. All
		// three steps round to float32.
		l.Samples = int64(math.Ceil(float64(float32(all) / float32(d.SequenceLength))))
	}
	l.Shuffled = l.Samples
	if l.Epochs > 1 {
		before := ((l.Epochs-1)*tokens - x) / d.SequenceLength
		last := d.Samples - before
		perEpoch := (tokens - x) / d.SequenceLength
		if last < 0 || last > perEpoch+1 { // cannot happen unless the number of epochs is forced
			return Layout{}, fmt.Errorf("%d epochs do not match %d samples: %d of them would come from the last "+
				"epoch, which has only %d; change the number of epochs or samples", l.Epochs, d.Samples, last, perEpoch)
		}
		if l.Separate = last < int64(0.80*float64(perEpoch)); l.Separate {
			l.Shuffled = before
		}
	}

	width := int64(4)
	l.SampleDescr, l.ShuffleDescr = "<i4", "<u4"
	switch {
	case d.SampleType == Int64, d.SampleType == Auto && l.DocumentEntries > maxInt32:
		l.SampleDescr, width = "<i8", 8
	case l.DocumentEntries > maxInt32:
		return Layout{}, fmt.Errorf("%d document entries do not fit the int32 sample index of this version; use a "+
			"newer profile or fewer samples", l.DocumentEntries)
	}
	shuffleWidth := int64(4)
	if l.Samples >= math.MaxUint32-1 {
		l.ShuffleDescr, shuffleWidth = "<i8", 8
	}
	l.DocumentBytes = headerBytes + 4*l.DocumentEntries
	l.SampleBytes = headerBytes + 2*width*(l.Samples+1)
	l.ShuffleBytes = headerBytes + shuffleWidth*l.shuffleEntries()
	return l, nil
}

// Parts returns how several processes can divide a dataset, as indices of the files of
// [Workers.Build], or nil if the dataset is too small to divide. The shuffle index depends only on
// how many draws the document index consumes, and draws are quickly skipped. The document index is
// one sequential shuffle, and the sample index is computed from it while it is in the processor's
// caches.
func (d *Dataset) Parts() [][]int {
	if d.End-d.First < large && d.Samples < large {
		return nil
	}
	return [][]int{{0, 1}, {2}}
}

// Memory returns how many bytes are needed to build the dataset, without its lengths and the chunks
// that wait to be written. These are 8 bytes for each document entry that is shuffled at once (all
// entries, or the entries before a separate final epoch), or 4 bytes for each sample if that is
// more. Large datasets also need the queues of the shuffle: up to 1 GiB or, if that is more, 3
// bytes for each document entry.
func (l *Layout) Memory() int64 {
	entries := l.DocumentEntries
	if l.Separate {
		entries -= entries / l.Epochs
	}
	return max(8*entries, l.ShuffleBytes) + max(queues(entries, 12), queues(l.shuffleEntries(), 8))
}

// queues returns the maximum memory that numpy.Shuffler needs to shuffle the given number of
// elements on several threads, with messages of the given size in bytes.
func queues(elements, message int64) int64 {
	if elements < 8<<20 {
		return 0
	}
	return min(elements*message, max(1<<30, elements*message/4))
}

// shuffleEntries is the length of the shuffle index: n, except that upstream never makes it shorter
// than its first part. A single-precision n can be below m.
func (l *Layout) shuffleEntries() int64 { return max(l.Samples, l.Shuffled) }

// emptyAllowed reports whether a dataset whose split has no tokens is built. With samples of one
// token that overlap by one, Megatron-LM counts -1 samples and fails.
func (d *Dataset) emptyAllowed() bool {
	return d.AllowEmpty && (d.Samples < 0 || d.Samples == 0 && !d.ExtraToken) && d.SequenceLength > d.extra()
}

// extra is x, 1 if samples overlap by a token.
func (d *Dataset) extra() int64 {
	if d.ExtraToken {
		return 1
	}
	return 0
}

func (d *Dataset) check() error {
	sequences := int64(len(d.Lengths) / 4)
	switch {
	case len(d.Lengths)%4 != 0:
		return fmt.Errorf("the lengths take %d bytes, which is not a multiple of 4", len(d.Lengths))
	case d.First < 0 || d.End > sequences || d.First > d.End:
		return fmt.Errorf("the split is sequences %d to %d, but the file has %d", d.First, d.End, sequences)
	case d.First == d.End && !d.emptyAllowed():
		return fmt.Errorf("the split is empty (sequences %d to %d; Megatron-LM would loop forever); give the split a "+
			"larger share or remove this file", d.First, d.End)
	case d.End > maxInt32+1:
		return fmt.Errorf("the split reaches sequence %d, and document ids are int32; divide the file into parts of "+
			"at most 2^31 sequences", d.End-1)
	case d.SequenceLength < 1 || d.SequenceLength > maxInt32-1:
		return fmt.Errorf("the sequence length %d is not between 1 and %d", d.SequenceLength, maxInt32-1)
	case d.Samples < -1:
		return fmt.Errorf("invalid number of samples %d; use 0 or more", d.Samples)
	case d.Epochs < 0:
		return fmt.Errorf("invalid number of epochs %d; use 0 or more", d.Epochs)
	case d.Epochs > 1 && d.Samples < 0:
		return errors.New("a forced number of epochs needs a number of samples")
	case d.SampleType < Auto || d.SampleType > Int64:
		return fmt.Errorf("unknown sample type %d", d.SampleType)
	}
	return nil
}

// guard calls read, which reads lengths.
func (d *Dataset) guard(read func() error) error {
	if d.Guard == nil {
		return read()
	}
	return d.Guard(read)
}

// tokens returns T, the exact sum of the split's lengths.
func (d *Dataset) tokens() (sum int64, err error) {
	err = d.guard(func() error {
		lengths := d.Lengths[4*d.First : 4*d.End]
		var negative bool
		if sum, negative = sumLengths(lengths); !negative {
			return nil
		}
		for i := range d.End - d.First {
			if v := lengthAt(lengths, i); v < 0 {
				return fmt.Errorf("sequence %d has length %d; the .idx file is damaged", d.First+i, v)
			}
		}
		return errors.New("the lengths of the sequences changed while they were read; build the index when the .idx " +
			"file is complete")
	})
	if err == nil && d.Tokens != 0 && d.Tokens != sum {
		err = fmt.Errorf("the lengths of the sequences %d to %d add up to %d tokens, but their starts give %d; the "+
			".idx file is damaged", d.First, d.End-1, sum, d.Tokens)
	}
	return sum, err
}
