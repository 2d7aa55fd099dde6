// Package gpt builds the index of one GPT dataset, byte for byte as Megatron-LM's GPTDataset and
// BlendCorpus write it: three .npy files that say in which order the documents of one file are read
// (document index), where in that order each sample begins (sample index), and in which order the
// samples are taken (shuffle index).
//
// The rules are those of megatron/core/datasets/gpt_dataset.py and helpers.cpp (build_sample_idx),
// Megatron-LM core 0.4 to 0.19. What the files are called, which documents belong to a split and
// how many samples are asked for is decided above, by the packages megatron and blendcorpus.
//
// A "document" here is what Megatron-LM's documentation calls so: one sequence of the .idx file.
package gpt

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
)

// Dataset is one split of one file, and what is asked of it.
type Dataset struct {
	// length in tokens of every sequence of the file: little-endian int32, at any alignment, as
	// they lie in the .idx file
	Lengths []byte

	// Guard is called with whatever reads Lengths, on any goroutine, and gives its error or one of
	// its own, for lengths that lie in a mapped file (shards.Index.Guard); nil for others.
	Guard func(read func() error) error

	First, End int64 // the documents of the split: First, …, End-1
	Tokens     int64 // of the split by the starts of its sequences, with which the lengths are compared; 0: not known

	SequenceLength int64 // S, tokens of a sample
	ExtraToken     bool  // samples overlap by one token (add_extra_token_to_sequence, x = 1)
	// keep a last sample shorter than S (drop_last_partial_validation_sequence = False; only valid
	// splits have it)
	KeepPartial bool

	// A kept partial sample that ends with an empty document has the offset -1, if there is an
	// extra token: 0 tokens of that document and 1 back. Core 0.7 to 0.9 write it. Later releases
	// check int32 sample indexes and refuse it; CheckOffsets says that Build should.
	CheckOffsets bool

	// AllowEmpty builds a split without tokens where no token is needed: for one epoch, or for no
	// samples without an extra token. Core 0.7 and later write it, with no sample.
	AllowEmpty bool

	Samples int64 // N, samples asked for; -1 if no number is asked for, which means one epoch
	Epochs  int64 // 0: as many epochs as N needs; else this number, as BlendCorpus may force it

	Seed       uint32
	SampleType SampleType
}

// SampleType is the type of the numbers in the sample index. It differs between versions of
// Megatron-LM.
type SampleType int

const (
	Auto  SampleType = iota // int32 where it suffices, else int64: core 0.10 and later
	Int32                   // core 0.4 to 0.7
	Int64                   // core 0.8 and 0.9, BlendCorpus, Megatron-DeepSpeed
)

// Layout is what follows from a dataset's numbers alone, without a shuffle: counts, types, and the
// sizes of the three files.
type Layout struct {
	TokensPerEpoch  int64 // T, tokens of the documents First … End-1
	Epochs          int64 // E, how often each document is read
	DocumentEntries int64 // length of the document index, E·(End-First)
	Samples         int64 // n; the sample index has n+1 rows
	// m: the samples 0 … m-1 are shuffled among themselves, and so are m … n-1. m = n unless
	// Separate
	Shuffled int64
	Separate bool // the documents of the last epoch are shuffled apart from those before

	SampleDescr, ShuffleDescr                string // numpy's names of the types: "<i4" or "<i8", "<u4" or "<i8"
	DocumentBytes, SampleBytes, ShuffleBytes int64  // sizes of the whole files, headers included
}

// Sizes are the sizes of the document, sample and shuffle index, in the order of [Workshop.Build].
func (l *Layout) Sizes() []int64 { return []int64{l.DocumentBytes, l.SampleBytes, l.ShuffleBytes} }

const (
	headerBytes = 128     // of every .npy file here
	maxTokens   = 1 << 62 // E·T beyond this is refused, so that no sum below overflows
	maxInt32    = 1<<31 - 1
)

// Layout counts the tokens of the split and derives everything else from their number. It refuses
// what Megatron-LM cannot build (a split without tokens, more than 2³¹ sequences, numbers beyond
// its types) and lengths that no .idx file should hold.
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

// layout is Layout for a split with so many tokens.
func (d *Dataset) layout(tokens int64) (Layout, error) {
	documents := d.End - d.First
	if tokens <= 0 && !d.emptyAllowed() {
		return Layout{}, fmt.Errorf("the split, sequences %d to %d, has no tokens (Megatron-LM would loop for ever): "+
			"give the split a larger share or leave this file out", d.First, d.End)
	}

	l := Layout{TokensPerEpoch: tokens, Epochs: 1}
	x := d.extra()
	if d.Samples >= 0 {
		high, low := bits.Mul64(uint64(d.Samples), uint64(d.SequenceLength))
		if high != 0 || low >= maxTokens {
			return Layout{}, fmt.Errorf("%d samples of %d tokens are more than 2^62 tokens", d.Samples,
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
		return Layout{}, fmt.Errorf("%d epochs of %d tokens are more than 2^62 tokens", l.Epochs, tokens)
	}
	// Every document of the split could be empty but one, so the number of entries is bounded on
	// its own.
	if high, low := bits.Mul64(uint64(l.Epochs), uint64(documents)); high != 0 || low >= maxTokens/16 {
		return Layout{}, fmt.Errorf("%d epochs of %d documents are too many entries", l.Epochs, documents)
	}
	l.DocumentEntries = l.Epochs * documents

	// below 0 only for an empty split: then there are no samples, as below is rounded towards 0
	all := l.Epochs*tokens - x
	l.Samples = all / d.SequenceLength
	if d.KeepPartial {
		// Upstream divides in single precision (helpers.cpp), so that large counts come out
		// inexact. All three steps round to float32.
		l.Samples = int64(math.Ceil(float64(float32(all) / float32(d.SequenceLength))))
	}
	l.Shuffled = l.Samples
	if l.Epochs > 1 {
		before := ((l.Epochs-1)*tokens - x) / d.SequenceLength
		last := d.Samples - before
		perEpoch := (tokens - x) / d.SequenceLength
		if last < 0 || last > perEpoch+1 { // cannot happen unless epochs are forced
			return Layout{}, fmt.Errorf("%d epochs do not fit %d samples: %d of them would come from the last "+
				"epoch, which has %d; "+
				"ask for other numbers", l.Epochs, d.Samples, last, perEpoch)
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
		return Layout{}, fmt.Errorf("%d document entries do not fit the int32 sample index of this version: "+
			"choose a newer profile or fewer samples", l.DocumentEntries)
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

// Parts is how several processes may divide a dataset, as places in the files of [Workshop.Build]:
// nil for one that is too small to be worth it. The shuffle index depends on nothing but how many
// draws the document index has used up, which are quickly skipped. The document index is one
// shuffle, each of whose steps needs those before, and the sample index follows from it while it is
// in the processor's caches.
func (d *Dataset) Parts() [][]int {
	if d.End-d.First < large && d.Samples < large {
		return nil
	}
	return [][]int{{0, 1}, {2}}
}

// Memory is how many bytes it takes to build the dataset, without its lengths and without the
// chunks on their way to the disk: 8 for each document entry that is shuffled at once (all, or
// those before a separate final epoch), or 4 for each sample if that is more; and for large
// datasets the queues of the shuffle, up to 1 GiB or, if that is more, 3 for each document entry.
func (l *Layout) Memory() int64 {
	entries := l.DocumentEntries
	if l.Separate {
		entries -= entries / l.Epochs
	}
	return max(8*entries, l.ShuffleBytes) + max(queues(entries, 12), queues(l.shuffleEntries(), 8))
}

// queues is what numpy.Shuffler takes, at most, to shuffle so many elements on several threads,
// with messages of so many bytes.
func queues(elements, message int64) int64 {
	if elements < 8<<20 {
		return 0
	}
	return min(elements*message, max(1<<30, elements*message/4))
}

// shuffleEntries is the length of the shuffle index: n, except that upstream never makes it shorter
// than its first part, which a single-precision n below m would ask for.
func (l *Layout) shuffleEntries() int64 { return max(l.Samples, l.Shuffled) }

// emptyAllowed reports whether the dataset is built although its split has no tokens. With samples
// of one token that overlap by one, Megatron-LM counts -1 samples and fails.
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
		return fmt.Errorf("the lengths take %d bytes, which is no multiple of 4", len(d.Lengths))
	case d.First < 0 || d.End > sequences || d.First > d.End:
		return fmt.Errorf("the split goes from sequence %d to %d, and the file has %d", d.First, d.End, sequences)
	case d.First == d.End && !d.emptyAllowed():
		return fmt.Errorf("the split is empty (sequences %d to %d; Megatron-LM would loop for ever): "+
			"give the split a larger share or leave this file out", d.First, d.End)
	case d.End > maxInt32+1:
		return fmt.Errorf("the split reaches sequence %d, and document ids are int32: divide the file into parts of "+
			"at most 2^31 sequences", d.End-1)
	case d.SequenceLength < 1 || d.SequenceLength > maxInt32-1:
		return fmt.Errorf("a sequence length of %d is not between 1 and %d", d.SequenceLength, maxInt32-1)
	case d.Samples < -1:
		return fmt.Errorf("%d samples are asked for", d.Samples)
	case d.Epochs < 0:
		return fmt.Errorf("%d epochs are asked for", d.Epochs)
	case d.Epochs > 1 && d.Samples < 0:
		return errors.New("a forced number of epochs needs a number of samples")
	case d.SampleType < Auto || d.SampleType > Int64:
		return fmt.Errorf("unknown sample type %d", d.SampleType)
	}
	return nil
}

// guard calls what reads lengths.
func (d *Dataset) guard(read func() error) error {
	if d.Guard == nil {
		return read()
	}
	return d.Guard(read)
}

// tokens is T, the exact sum of the split's lengths.
func (d *Dataset) tokens() (sum int64, err error) {
	err = d.guard(func() error {
		lengths := d.Lengths[4*d.First : 4*d.End]
		var negative bool
		if sum, negative = sumLengths(lengths); !negative {
			return nil
		}
		for i := range d.End - d.First {
			if v := lengthAt(lengths, i); v < 0 {
				return fmt.Errorf("sequence %d has the length %d: the .idx file is damaged", d.First+i, v)
			}
		}
		return errors.New("the lengths of the sequences change while they are read: build the index when the .idx " +
			"file is complete")
	})
	if err == nil && d.Tokens != 0 && d.Tokens != sum {
		err = fmt.Errorf("the lengths of the sequences %d to %d add up to %d tokens, but their starts say %d: the "+
			".idx file is damaged", d.First, d.End-1, sum, d.Tokens)
	}
	return sum, err
}
