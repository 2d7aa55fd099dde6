package numpy

import (
	"fmt"
	"math"
	"math/big"
	"testing"

	"pgregory.net/rapid"
)

func TestSumsOfNumpy(t *testing.T) {
	g := readGolden(t)
	sizes := make([]int, 300)
	for i := range sizes {
		sizes[i] = i
	}
	sizes = append(sizes, 511, 512, 513, 1000, 1023, 1024, 1025, 4095, 4096, 8191, 8192, 8193, 10000, 20011)
	if len(g.Sums) != len(sizes) {
		t.Fatalf("%d sums, want %d", len(g.Sums), len(sizes))
	}
	for i, n := range sizes {
		d := draws{uint64(1000003*n + 7)}
		a := make([]float64, n)
		for j := range a {
			a[j] = d.unit() - 0.5
		}
		if got := fmt.Sprintf("%016x", math.Float64bits(Sum(a))); got != g.Sums[i] {
			t.Errorf("%d elements: %s, numpy has %s", n, got, g.Sums[i])
		}
	}
}

// Whole numbers are summed exactly whatever the order; others to within the bound of pairwise
// summation.
func TestSumIsASum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 0, 3000).Draw(t, "a")
		exact, size := new(big.Float).SetPrec(2000), 0.0
		for _, v := range a {
			exact.Add(exact, big.NewFloat(v))
			size += math.Abs(v)
		}
		want, _ := exact.Float64()
		if got := Sum(a); math.Abs(got-want) > 64*size*0x1p-53 {
			t.Errorf("%v, exactly %v", got, want)
		}
		for i := range a {
			a[i] = math.Round(a[i])
		}
		var whole int64
		for _, v := range a {
			whole += int64(v)
		}
		if got := Sum(a); got != float64(whole) {
			t.Errorf("%v, want %d", got, whole)
		}
	})
}

func TestNormalize(t *testing.T) {
	// 969, 30, 1 of Megatron-LM's default split.
	got := Normalize([]float64{969, 30, 1})
	if want := []float64{0.969, 0.03, 0.001}; got[0] != want[0] || got[1] != want[1] || got[2] != want[2] {
		t.Errorf("%v, want %v", got, want)
	}
	if got := Normalize(nil); len(got) != 0 {
		t.Errorf("nothing gives %v", got)
	}
}
