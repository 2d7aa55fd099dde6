package shards

import (
	"path/filepath"
	"testing"
)

// BenchmarkAppend measures the throughput of a Writer, in bytes of ids, fsync included.
func BenchmarkAppend(b *testing.B) {
	tokens := make([]uint32, 1000)
	for i := range tokens {
		tokens[i] = uint32(i*7919) % 50279
	}
	const documents = 100_000
	for _, dtype := range []DType{UInt16, Int32} {
		b.Run(string(dtype), func(b *testing.B) {
			b.SetBytes(int64(documents * len(tokens) * dtype.Size()))
			for b.Loop() {
				w, err := Create(filepath.Join(b.TempDir(), "x"), dtype, testInfo)
				if err != nil {
					b.Fatal(err)
				}
				for d := range int64(documents) {
					if err := w.Append(tokens, origin(d)); err != nil {
						b.Fatal(err)
					}
				}
				if err := w.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
