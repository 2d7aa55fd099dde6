package local_test

import (
	"testing"

	"mula/xpu/linktest"
	"mula/xpu/local"
)

func TestLinks(t *testing.T) {
	for size := 1; size <= 4; size++ {
		linktest.Together(t, local.New(size))
	}
}

func BenchmarkAllReduce(b *testing.B) { linktest.Benchmark(b, local.New(2)) }
