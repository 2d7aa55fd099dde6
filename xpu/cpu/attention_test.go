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
	h := xpu.Heads{Rows: 1, Length: length, Heads: 8, KVHeads: 8, Size: 64}
	d := New(1, xpu.FP32)
	defer d.Close()
	r := rand.New(rand.NewPCG(1, 2))
	floats := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = r.Float32() - 0.5
		}
		return x
	}
	n := length * h.Heads * h.Size
	a := xpu.Attention{Heads: h, Q: floats(n), K: floats(n), V: floats(n), Capacity: length, Context: floats(n),
		LSE: floats(length * h.Heads)}
	dcontext, dqkv, dk, dv := floats(n), floats(3*n), floats(n), floats(n)
	for _, document := range []int{length, 1024, 256, 64} {
		a.Begin = nil
		for i := 0; document < length && i < length; i++ {
			a.Begin = append(a.Begin, int32(i/document*document))
		}
		b.Run(fmt.Sprintf("documents of %d", document), func(b *testing.B) {
			for range b.N {
				d.Attend(a)
				d.AttendGrad(a, dcontext, dqkv, dk, dv)
			}
		})
	}
}
