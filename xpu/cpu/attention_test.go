package cpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"mula/xpu"
)

// BenchmarkAttend measures attention over rows of 4,096 tokens in documents of several lengths. A
// document of 4,096 tokens attends to all.
func BenchmarkAttend(b *testing.B) {
	const length = 4096
	const heads, size = 8, 64
	d := New(1, xpu.FP32)
	defer d.Close()
	r := rand.New(rand.NewPCG(1, 2))
	floats := func(shape ...int) xpu.Tensor {
		x := make([]float32, 3*length*heads*size)
		for i := range x {
			x[i] = r.Float32() - 0.5
		}
		return xpu.Of(x, shape...)
	}
	ofHeads := func() xpu.Tensor { return floats(1, heads, length, size) }
	a := xpu.Attention{Q: ofHeads(), K: ofHeads(), V: ofHeads(), Context: floats(length, heads*size),
		LSE: floats(1, heads, length)}
	dcontext, dqkv, dk, dv := floats(length, heads*size), floats(length, 3*heads*size), ofHeads(), ofHeads()
	for _, document := range []int{length, 1024, 256, 64} {
		a.Begin = xpu.Tensor{}
		if document < length {
			begin := make([]int32, length)
			for i := range begin {
				begin[i] = int32(i / document * document)
			}
			a.Begin = xpu.OfInts(begin, 1, length)
		}
		b.Run(fmt.Sprintf("documents of %d", document), func(b *testing.B) {
			for range b.N {
				d.Attend(a)
				d.AttendGrad(a, dcontext, dqkv, dk, dv)
			}
		})
	}
}
