package devicetest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"mula/xpu"
)

// jitterFamily checks the bits of Jitter against another implementation of the generator, which
// steps through the outputs in order.
func jitterFamily(t *testing.T, d xpu.Device, _ float64) {
	for i, c := range []struct{ rows, width int }{{1, 1}, {7, 33}, {300, 64}, {3, 1030}, {0, 5}} {
		t.Run(fmt.Sprintf("%d rows of %d", c.rows, c.width), func(t *testing.T) {
			source := rand.New(rand.NewPCG(23, uint64(i)))
			x, numbers, seed := random(source, c.rows*c.width), make([]int32, c.rows), source.Uint64()
			const epsilon = float32(0.125)
			var want []float32
			for row := range numbers {
				numbers[row] = source.Int32()
				state := finalised(seed) + uint64(numbers[row])<<32*0x9e3779b97f4a7c15
				for column := range c.width {
					state += 0x9e3779b97f4a7c15
					u := float32(finalised(state)>>40)/(1<<23) - 1
					factor := epsilon * u // exact, because epsilon is a power of 2
					want = append(want, x[row*c.width+column]*(1+factor))
				}
			}
			device := upload(t, d, x, c.rows, c.width)
			d.Jitter(device, xpu.Jitter{Numbers: uploadInts(t, d, numbers), Epsilon: epsilon, Seed: seed})
			for k, got := range read(t, d, device) {
				if got != want[k] {
					t.Fatalf("row %d, element %d is %v, want %v", k/c.width, k%c.width, got, want[k])
				}
			}
		})
	}
}

// finalised is the finaliser of SplitMix64.
func finalised(z uint64) uint64 {
	z ^= z >> 30
	z *= 0xbf58476d1ce4e5b9
	z ^= z >> 27
	z *= 0x94d049bb133111eb
	return z ^ z>>31
}
