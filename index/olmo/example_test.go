package olmo_test

import (
	"fmt"

	"mula/index/olmo"
)

// The order that OLMo-core trains in on a mixture: it takes the first tokens of each file, so the
// parts are the files of a data set.
func ExampleMix() {
	sources := []olmo.MixtureSource{
		{Name: "web", Ratio: 0.75, MaxSourceFraction: 1, MaxRepetitionRatio: 1, Tokens: []int64{5000, 3000}},
		{Name: "code", Ratio: 0.25, MaxSourceFraction: 1, MaxRepetitionRatio: 2, Tokens: []int64{1500}},
	}
	parts, err := olmo.Mix(sources, 8000, 1000, 100)
	if err != nil {
		fmt.Println(err)
		return
	}
	d := olmo.Dataset{DType: olmo.Uint16, SequenceLength: 100}
	for _, p := range parts {
		path := fmt.Sprintf("%s-%d.npy", sources[p.Source].Name, p.File)
		d.Files = append(d.Files, olmo.File{Path: path, Bytes: p.Tokens * d.DType.Size()})
		fmt.Println(path, p.Tokens)
	}
	fmt.Println(d.Order(34521, 1).Name())
	// Output:
	// web-0.npy 3700
	// web-1.npy 2300
	// code-0.npy 1500
	// code-0.npy 500
	// global_indices_dataset_size80_epoch1_seed34521_v1.npy
}
