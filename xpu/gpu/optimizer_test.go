package gpu

import (
	"math/rand/v2"
	"slices"
	"testing"

	"mula/internal/longtest"
	"mula/xpu"
)

// Stretches in one memory are one launch, with the bits of a launch for each.
func TestStretches(t *testing.T) {
	longtest.SkipIfShort(t)
	s, found := shapes(someDevice(t))["gpu"]
	if !found {
		t.Fatal("no shape for a GPU")
	}
	d, err := newDevice(t.Context(), someDevice(t), Options{Threads: 1, Profile: true}, s)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	lengths, gap := []int{5, 0, squaresLength + 3, 1, xpu.BlockSize + 1, 300}, 7
	all, blocks := 0, 0
	for _, n := range lengths {
		all += n + gap
		blocks += over(n, xpu.BlockSize)
	}
	r := rand.New(rand.NewPCG(1, 0))
	numbers := [4][]float32{normal(r, all), normal(r, all), normal(r, all), normal(r, all)}
	for i, x := range numbers[3] {
		numbers[3][i] = x * x
	}
	// With together, the stretches are views of one tensor, with gaps.
	run := func(together bool) (bits [][]float32, sums [3][]float64, launches int) {
		for i := range sums {
			sums[i] = make([]float64, blocks)
		}
		before := len(d.events)
		var whole [4]xpu.Tensor
		for i, x := range numbers {
			whole[i] = upload(t, d, x)
		}
		var moments []xpu.Moments
		var gradients []xpu.Tensor
		at := 0
		for _, n := range lengths {
			var x [4]xpu.Tensor
			for i := range x {
				if x[i] = whole[i].Rows(at, at+n); !together {
					x[i] = upload(t, d, numbers[i][at:at+n])
				}
			}
			moments = append(moments, xpu.Moments{Weight: x[0], Grad: x[1], M: x[2], V: x[3]})
			gradients = append(gradients, x[1])
			at += n + gap
		}
		update := xpu.AdamW{LearningRate: 0.1, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1, Step: 3,
			GradScale: 1}.Update()
		d.SumSquares(gradients, sums[0])
		d.Update(update, moments, sums[1], sums[2])
		d.Update(update, moments, nil, nil)
		launches = len(d.events) - before
		for _, m := range moments {
			for _, x := range []xpu.Tensor{m.Weight, m.M, m.V} {
				bits = append(bits, numbersOf(t, d, x))
			}
		}
		return bits, sums, launches
	}
	for range 2 { // the second time with tables that were kept
		want, wantSums, many := run(false)
		got, gotSums, few := run(true)
		for i := range want {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("numbers %d of a stretch have other bits", i)
			}
		}
		for i := range wantSums {
			if !slices.Equal(gotSums[i], wantSums[i]) {
				t.Errorf("sums %d: %v, want %v", i, gotSums[i], wantSums[i])
			}
		}
		if many != 3*(len(lengths)-1) || few >= many {
			t.Errorf("%d launches of separate memories, %d of one", many, few)
		}
	}
}
