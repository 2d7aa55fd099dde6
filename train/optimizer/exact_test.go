package optimizer

import (
	"math"
	"math/big"
	"testing"

	"pgregory.net/rapid"
)

// An exact sum is the sum of its summands rounded once, for sums of squares of any float32 numbers,
// in any order.
func TestExactSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		square := rapid.Custom(func(t *rapid.T) float64 {
			x := float64(math.Float32frombits(rapid.Uint32Range(0, math.Float32bits(math.MaxFloat32)).Draw(t, "bits")))
			return x * x
		})
		values := rapid.SliceOf(rapid.OneOf(square, rapid.SampledFrom([]float64{0, 1, math.Ldexp(1, -298),
			math.Ldexp(1<<53-1, 272-53)}))).Draw(t, "values")
		want, sum := new(big.Float).SetPrec(1000), new(exactSum)
		var parts [2]exactSum
		for i, x := range values {
			want.Add(want, big.NewFloat(x))
			parts[i%2].add(x)
		}
		for i := range sum {
			sum[i] = parts[1][i] + parts[0][i]
		}
		if exact, _ := want.Float64(); sum.value() != exact {
			t.Errorf("%v add up to %v, want %v", values, sum.value(), exact)
		}
		sum.add(math.Inf(1))
		if !math.IsNaN(sum.value()) {
			t.Errorf("a sum with Inf is %v", sum.value())
		}
	})
}

// Every limb has room for the blocks of any model.
func TestExactSumOfManyBlocks(t *testing.T) {
	var sum exactSum
	largest := float64(math.MaxFloat32) * math.MaxFloat32 * blockSize
	sum.add(largest)
	const times = 1 << 31
	for i := range exactWords {
		sum[i] *= times
	}
	if got := sum.value(); got != largest*times {
		t.Errorf("2^31 blocks add up to %v, want %v", got, largest*times)
	}
}
