package rebuild

import (
	"context"
	"encoding/binary"
	"time"

	"mula/index/gpt"
	"mula/index/greedy"
)

const (
	probeDocuments = 1 << 18
	probeSamples   = 1 << 17
)

// discard discards the output of a probe.
type discard struct{}

func (discard) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }

// Estimate estimates the time to compute entries, without writing, with the given number of
// threads. It makes short probes of this machine: a dataset of synthetic documents, and a blend
// with the same number of datasets as each blend.
func Estimate(ctx context.Context, entries []Entry, threads int) (time.Duration, error) {
	perDocument, err := probeDataset(ctx)
	if err != nil {
		return 0, err
	}
	perSample := map[int]float64{} // by number of datasets
	var seconds float64
	for _, e := range entries {
		n := len(e.Prefixes)
		if n < 2 || e.Class == DatasetClass {
			if len(e.Sizes) > 0 {
				seconds += perDocument * float64(e.Sizes[0]) / 4
			}
			continue
		}
		if perSample[n] == 0 {
			if perSample[n], err = probeBlend(ctx, n); err != nil {
				return 0, err
			}
		}
		seconds += perSample[n] * float64(e.Length)
	}
	return time.Duration(seconds / float64(threads) * float64(time.Second)), nil
}

// probeDataset returns the seconds per document of a dataset.
func probeDataset(ctx context.Context) (float64, error) {
	const length = 1024 // tokens of a synthetic document
	lengths := make([]byte, 4*probeDocuments)
	for i := range probeDocuments {
		binary.LittleEndian.PutUint32(lengths[4*i:], uint32(length/2+i%length))
	}
	d := gpt.Dataset{Lengths: lengths, End: probeDocuments, SequenceLength: 4096, ExtraToken: true, Samples: -1}
	var seconds float64
	for range 2 { // the first run includes page faults
		began := time.Now()
		layout, err := d.Layout()
		if err != nil {
			return 0, err
		}
		var b gpt.Builder
		if err := b.Build(ctx, &d, layout, gpt.Files{Documents: discard{}, Samples: discard{}, Shuffle: discard{}},
			nil); err != nil {
			return 0, err
		}
		seconds = time.Since(began).Seconds()
	}
	return seconds / probeDocuments, nil
}

// probeBlend returns the seconds per sample of a blend of n datasets.
func probeBlend(ctx context.Context, n int) (float64, error) {
	weights := make([]float64, n)
	for k := range weights {
		weights[k] = (1 + float64(k)/float64(n)) / (1.5 * float64(n))
	}
	began := time.Now()
	_, err := greedy.Weighted(ctx, greedy.Rule{Weights: weights}, probeSamples, nil, 1,
		func(int64, []int16, []int64) error { return nil })
	return time.Since(began).Seconds() / probeSamples, err
}
