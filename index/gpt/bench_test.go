package gpt

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"mula/index/numpy"
)

// BenchmarkBuild builds from lognormal lengths (mean 1250, median 607 tokens) with S = 4096,
// without the disk. It reports CPU time per document.
func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{100_000, 1_500_000, 15_000_000, 100_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			d := benchmarkDataset(n)
			builder := &Builder{}
			defer builder.Release()
			run := func() {
				l, err := d.Layout()
				if err == nil {
					err = builder.Build(context.Background(), d, l, Files{discard{}, discard{}, discard{}}, nil)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			run() // fresh memory costs more than the work
			before := cpuSeconds()
			for b.Loop() {
				run()
			}
			b.ReportMetric(1e9*(cpuSeconds()-before)/float64(b.N)/float64(n), "cpu-ns/document")
			b.ReportMetric(float64(b.Elapsed())/float64(b.N)/float64(n), "ns/document")
		})
	}
}

func benchmarkDataset(n int) *Dataset {
	random := rand.New(rand.NewPCG(1, 2))
	lengths := make([]int32, n)
	const different = 1 << 20
	for i := range lengths[:min(n, different)] {
		lengths[i] = int32(max(1, 607*math.Exp(1.2*random.NormFloat64())))
	}
	for i := different; i < n; i += different {
		copy(lengths[i:], lengths[:different])
	}
	return &Dataset{Lengths: lengthBytes(lengths...), End: int64(n), SequenceLength: 4096, ExtraToken: true,
		Samples: -1, Seed: 1234}
}

func BenchmarkKernels(b *testing.B) {
	const n = 16 << 20
	d := benchmarkDataset(n)
	memory, release := numpy.Aligned(8 * n)
	defer release()
	pairs := uint64s(memory)
	ids := make([]uint32, 1<<20)
	table := make([]uint64, n)
	each := func(name string, f func()) {
		b.Run(name, func(b *testing.B) {
			f()
			before := cpuSeconds()
			for b.Loop() {
				f()
			}
			b.ReportMetric(1e9*(cpuSeconds()-before)/float64(b.N)/n, "cpu-ns/document")
		})
	}
	each("sum", func() { sumLengths(d.Lengths) })
	each("fill", func() { fillPairs(pairs, d.Lengths, 0, true) })
	each("fill in cache", func() {
		for i := 0; i < n; i += 1 << 16 {
			fillPairs(pairs[:1<<16], d.Lengths[4*i:4*(i+1<<16)], 0, false)
		}
	})
	each("narrow", func() {
		for i := 0; i < n; i += batch {
			narrow(ids[i%len(ids):], pairs[i:i+batch])
		}
	})
	each("narrow in cache", func() {
		for i := 0; i < n; i += batch {
			narrow(ids, pairs[:batch])
		}
	})
	fillPairs(pairs, d.Lengths, 0, true)
	each("rows in cache", func() {
		tokens := int64(0)
		for _, p := range pairs[:batch] {
			tokens += int64(p >> 32)
		}
		tokens *= n / batch
		r := newRows(4096, 1)
		r.bound, r.position, r.row = tokens-1, n-1, (tokens-1)/4096
		r.target = r.row * 4096
		for range n / batch {
			low := max(1, r.row-(1<<14))
			r.fill32(table[:1<<15], low, pairs[:batch])
		}
	})
	l, err := d.Layout()
	if err != nil {
		b.Fatal(err)
	}
	each("rows", func() {
		r := newRows(4096, 1)
		r.bound, r.position, r.row, r.target = l.TokensPerEpoch-1, n-1, l.Samples, l.Samples*4096
		for i := n; i > 0; i -= batch {
			r.fill32(table, 1, pairs[i-batch:i])
		}
	})
}
