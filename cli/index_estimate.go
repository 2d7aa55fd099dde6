package cli

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

// nowhere discards the output of a probe.
type nowhere struct{}

func (nowhere) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }

// estimateSeconds estimates the time to compute the entries, without writing, in seconds. It makes
// short probes of this machine: a data set of synthetic documents, and a blend with the same number
// of data sets as each blend.
func estimateSeconds(ctx context.Context, entries []indexEntry, threads int) (float64, error) {
	const length = 1024 // tokens of a synthetic document
	lengths := make([]byte, 4*probeDocuments)
	for i := range probeDocuments {
		binary.LittleEndian.PutUint32(lengths[4*i:], uint32(length/2+i%length))
	}
	d := gpt.Dataset{Lengths: lengths, End: probeDocuments, SequenceLength: 4096, ExtraToken: true, Samples: -1}
	var perDocument float64
	for range 2 { // the first run includes page faults
		began := time.Now()
		layout, err := d.Layout()
		if err != nil {
			return 0, err
		}
		var b gpt.Builder
		if err := b.Build(ctx, &d, layout, gpt.Files{Documents: nowhere{}, Samples: nowhere{}, Shuffle: nowhere{}},
			nil); err != nil {
			return 0, err
		}
		perDocument = time.Since(began).Seconds() / probeDocuments
	}
	perSample := map[int]float64{} // by number of datasets
	var seconds float64
	for i := range entries {
		e := &entries[i]
		n := len(e.Prefixes)
		if n < 2 || e.Kind == "GPTDataset" {
			if len(e.Files) > 0 {
				seconds += perDocument * float64(e.Files[0].Bytes) / 4
			}
			continue
		}
		if perSample[n] == 0 {
			weights := make([]float64, n)
			for k := range weights {
				weights[k] = (1 + float64(k)/float64(n)) / (1.5 * float64(n))
			}
			began := time.Now()
			if _, err := greedy.Weighted(ctx, greedy.Rule{Weights: weights}, probeSamples, nil, 1,
				func(int64, []int16, []int64) error { return nil }); err != nil {
				return 0, err
			}
			perSample[n] = time.Since(began).Seconds() / probeSamples
		}
		seconds += perSample[n] * float64(e.Samples)
	}
	return seconds / float64(threads), nil
}
