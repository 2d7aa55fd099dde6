package gpt_test

import (
	"fmt"

	"mula/index/gpt"
)

// Three documents of 5, 0 and 4 tokens, and 12 samples of two tokens: three epochs have 13 samples.
func ExampleDataset_Layout() {
	d := gpt.Dataset{
		Lengths: []byte{5, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0},
		First:   0, End: 3,
		SequenceLength: 2, ExtraToken: true,
		Samples: 12,
	}
	l, err := d.Layout()
	fmt.Println(l.Epochs, l.DocumentEntries, l.Samples, l.Separate, err)
	fmt.Println(l.DocumentBytes, l.SampleBytes, l.SampleDescr, l.ShuffleBytes, l.ShuffleDescr)
	// Output:
	// 3 9 13 false <nil>
	// 164 240 <i4 180 <u4
}
