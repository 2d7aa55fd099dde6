package gpt

import (
	"strings"
	"testing"
)

func TestLayout(t *testing.T) {
	lengths := lengthBytes(10, 0, 5, 7, 3) // 25 tokens
	tests := []struct {
		name string
		d    Dataset
		want Layout
	}{
		{"one epoch", Dataset{Samples: -1, ExtraToken: true}, Layout{Epochs: 1, DocumentEntries: 5, Samples: 6,
			Shuffled: 6}},
		{"without the extra token", Dataset{Samples: -1, SequenceLength: 5}, Layout{Epochs: 1, DocumentEntries: 5,
			Samples: 5, Shuffled: 5}},
		{"with it", Dataset{Samples: -1, SequenceLength: 5, ExtraToken: true}, Layout{Epochs: 1, DocumentEntries: 5,
			Samples: 4, Shuffled: 4}},
		{"partial", Dataset{Samples: -1, SequenceLength: 7, ExtraToken: true, KeepPartial: true},
			Layout{Epochs: 1, DocumentEntries: 5, Samples: 4, Shuffled: 4}},
		{"N = 0", Dataset{Samples: 0}, Layout{Epochs: 1, DocumentEntries: 5, Samples: 6, Shuffled: 6}},
		{"N exactly one epoch", Dataset{Samples: 6, ExtraToken: true}, Layout{Epochs: 1, DocumentEntries: 5, Samples: 6,
			Shuffled: 6}},
		{"N one more", Dataset{Samples: 7, ExtraToken: true}, Layout{Epochs: 2, DocumentEntries: 10, Samples: 12,
			Shuffled: 6, Separate: true}},
		// trunc(0.8·6) = 4
		{"4 of 6 stay together", Dataset{Samples: 10, ExtraToken: true}, Layout{Epochs: 2, DocumentEntries: 10,
			Samples: 12, Shuffled: 12}},
		{"tiny", Dataset{Samples: -1, SequenceLength: 100, ExtraToken: true}, Layout{Epochs: 1, DocumentEntries: 5}},
	}
	for _, tt := range tests {
		tt.d.Lengths, tt.d.End = lengths, 5
		if tt.d.SequenceLength == 0 {
			tt.d.SequenceLength = 4
		}
		tt.want.TokensPerEpoch = 25
		tt.want.SampleDescr, tt.want.ShuffleDescr = "<i4", "<u4"
		tt.want.DocumentBytes = 128 + 4*tt.want.DocumentEntries
		tt.want.SampleBytes = 128 + 8*(tt.want.Samples+1)
		tt.want.ShuffleBytes = 128 + 4*tt.want.Samples
		if got, err := tt.d.Layout(); err != nil || got != tt.want {
			t.Errorf("%s: %+v, %v\nwant %+v", tt.name, got, err, tt.want)
		}
	}
}

// The types and counts of large datasets, from few lengths.
func TestLayoutOfLargeDatasets(t *testing.T) {
	huge := lengthBytes(maxInt32, maxInt32, maxInt32)
	// 10¹²+1 tokens, S = 4096, are 244140624 samples in single precision, where exact
	// arithmetic says 244140625.
	lengths := make([]int32, 1000)
	for i := range lengths {
		lengths[i] = 1e9
	}
	lengths[0]++
	d := Dataset{Lengths: lengthBytes(lengths...), End: 1000, SequenceLength: 4096, ExtraToken: true, KeepPartial: true,
		Samples: -1}
	if l, err := d.Layout(); err != nil || l.Samples != 244140624 {
		t.Errorf("single precision: %d samples, %v", l.Samples, err)
	}
	d.KeepPartial = false
	if l, err := d.Layout(); err != nil || l.Samples != 244140625 {
		t.Errorf("exactly: %d samples, %v", l.Samples, err)
	}

	d = Dataset{Lengths: huge, End: 3, SequenceLength: 1, Samples: -1}
	l, err := d.Layout()
	if err != nil || l.ShuffleDescr != "<i8" || l.SampleDescr != "<i4" || l.ShuffleBytes != 128+8*3*maxInt32 ||
		l.SampleBytes != 128+8*(3*maxInt32+1) {
		t.Errorf("n ≥ 2³²-2: %+v, %v", l, err)
	}
	d = Dataset{Lengths: lengthBytes(maxInt32, maxInt32-1), End: 2, SequenceLength: 1, Samples: -1}
	if l, err := d.Layout(); err != nil || l.ShuffleDescr != "<u4" { // n = 2³²-3
		t.Errorf("n = 2³²-3: %+v, %v", l, err)
	}
	d.ExtraToken, d.Lengths = true, lengthBytes(maxInt32, maxInt32, 1) // n = 2³²-2
	d.End = 3
	if l, err := d.Layout(); err != nil || l.ShuffleDescr != "<i8" {
		t.Errorf("n = 2³²-2: %+v, %v", l, err)
	}

	ones := make([]int32, 1<<10)
	for i := range ones {
		ones[i] = 1
	}
	d = Dataset{Lengths: lengthBytes(ones...), End: 1 << 10, SequenceLength: 1, Samples: 1<<31 - 1024}
	if l, err := d.Layout(); err != nil || l.SampleDescr != "<i4" || l.DocumentEntries != 1<<31-1024 {
		t.Errorf("just below 2³¹ entries: %+v, %v", l, err)
	}
	d.Samples++
	if l, err := d.Layout(); err != nil || l.SampleDescr != "<i8" || l.DocumentEntries != 1<<31 ||
		l.SampleBytes != 128+16*(1<<31+1) {
		t.Errorf("2³¹ entries: %+v, %v", l, err)
	}
	d.SampleType = Int32
	if _, err := d.Layout(); err == nil || !strings.Contains(err.Error(), "int32 sample index") {
		t.Errorf("2³¹ entries in int32: %v", err)
	}
}

func TestLayoutRefuses(t *testing.T) {
	tests := []struct {
		name, want string
		change     func(d *Dataset)
	}{
		{"empty split", "split is empty", func(d *Dataset) { d.First = d.End }},
		{"no tokens", "has no tokens", func(d *Dataset) { d.First, d.End = 1, 3 }},
		{"empty split, a sample", "split is empty", func(d *Dataset) { d.First, d.AllowEmpty = d.End, true }},
		{"empty split, overlap of no samples", "split is empty", func(d *Dataset) {
			d.First, d.AllowEmpty,
				d.Samples = d.End, true, 0
		}},
		{"empty split, samples of one token", "split is empty", func(d *Dataset) {
			d.First, d.AllowEmpty, d.Samples,
				d.SequenceLength = d.End, true, -1, 1
		}},
		{"no tokens, a sample", "has no tokens", func(d *Dataset) { d.First, d.End, d.AllowEmpty = 1, 3, true }},
		{"negative length", "sequence 4 has length -7", func(d *Dataset) { d.End = 6 }},
		{"end beyond the file", "the file has 6", func(d *Dataset) { d.End = 7 }},
		{"negative start", "is sequences -1", func(d *Dataset) { d.First = -1 }},
		{"odd bytes", "not a multiple of 4", func(d *Dataset) { d.Lengths = d.Lengths[1:] }},
		{"sequence length 0", "sequence length 0", func(d *Dataset) { d.SequenceLength = 0 }},
		{"sequence length 2³¹-1", "sequence length 2147483647", func(d *Dataset) { d.SequenceLength = maxInt32 }},
		{"samples", "number of samples -2", func(d *Dataset) { d.Samples = -2 }},
		{"too many samples", "exceed 2^62", func(d *Dataset) { d.Samples = 1 << 61 }},
		{"overflowing samples", "exceed 2^62", func(d *Dataset) { d.Samples = 1<<63 - 1 }},
		{"too many epochs", "too many entries", func(d *Dataset) { d.Samples = 1 << 58 }},
		{"forced epochs, too many", "do not match", func(d *Dataset) { d.Epochs, d.Samples = 4, 1 }},
		{"forced epochs, too few", "do not match", func(d *Dataset) { d.Epochs, d.Samples = 2, 1000 }},
		{"forced epochs without samples", "needs a number of samples", func(d *Dataset) {
			d.Epochs, d.Samples = 2,
				-1
		}},
		{"negative epochs", "number of epochs -1", func(d *Dataset) { d.Epochs = -1 }},
		{"type", "sample type 3", func(d *Dataset) { d.SampleType = 3 }},
	}
	for _, tt := range tests {
		d := &Dataset{Lengths: lengthBytes(5, 0, 0, 6, -7, 1), End: 4, SequenceLength: 4, ExtraToken: true, Samples: 1}
		tt.change(d)
		if _, err := d.Layout(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// A split without tokens is built where no token is needed, with no sample, as Megatron-LM core 0.7
// and later do.
func TestEmptySplit(t *testing.T) {
	for _, d := range []*Dataset{
		{First: 4, End: 4, ExtraToken: true, Samples: -1},
		{First: 1, End: 3, ExtraToken: true, Samples: -1, KeepPartial: true},
		{First: 4, End: 4, Samples: 0},
	} {
		d.Lengths, d.SequenceLength, d.AllowEmpty = lengthBytes(5, 0, 0, 6), 4, true
		l, err := d.Layout()
		if err != nil || l.Samples != 0 || l.Epochs != 1 || l.DocumentEntries != d.End-d.First ||
			l.SampleBytes != headerBytes+8 || l.ShuffleBytes != headerBytes {
			t.Errorf("%+v: %+v, %v", d, l, err)
		}
	}
}
