//go:build !purego

package cpu

import (
	"math"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/cpu"
)

// Rounding with AVX2, which BF16 does not use where there are kernels of pairs, is defined like all
// other rounding.
func TestHalvesAVX2(t *testing.T) {
	if !cpu.X86.HasAVX2 {
		t.Skip("no AVX2")
	}
	r := rand.New(rand.NewPCG(1, 2))
	x := make([]float32, 1<<16)
	for i := range x {
		x[i] = math.Float32frombits(r.Uint32()&0xffff | uint32(i)<<16) // every kind of number
	}
	got, want := make([]uint16, len(x)), append([]float32(nil), x...)
	halvesAVX2(&got[0], &x[0], int64(len(x)))
	roundBF16Go(want)
	for i, w := range want {
		if bits := uint16(math.Float32bits(w) >> 16); got[i] != bits {
			t.Fatalf("%#x becomes %#x, want %#x", math.Float32bits(x[i]), got[i], bits)
		}
	}
}
