package cpu

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/alloctest"
	"mula/xpu"
	"mula/xpu/devicetest"
)

// runUpdate runs the update of a case on this goroutine.
func runUpdate(c devicetest.UpdateCase, x [4][]float32) {
	if c.Update.States == 1 {
		x[3] = nil
	}
	updateVectors(c.Update, x[0], x[1], x[2], x[3])
}

// updateAdamW is a step of AdamW on this goroutine.
func updateAdamW(o xpu.AdamW, w, grad, m, v []float32) {
	updateVectors(o.Update(), w, grad, m, v)
}

// updateData is four vectors for an update: weights, gradient, momentum and second moment. One
// element in eight of each is zero.
func updateData(seed uint64, n int) (x [4][]float32) {
	for i := range x {
		x[i] = append([]float32(nil), uniform(seed+uint64(i), n)...)
		for j := range x[i] {
			if (uint64(j)*2654435761+seed+uint64(5*i))%8 == 0 {
				x[i][j] = 0
			}
		}
	}
	for j, v := range x[3] {
		x[3][j] = v * v
	}
	return x
}

func TestUpdates(t *testing.T) {
	for rule := range updateKernels {
		isOfRule := func(c devicetest.UpdateCase) bool { return c.Update.Rule == rule }
		if !slices.ContainsFunc(devicetest.UpdateCases, isOfRule) {
			t.Errorf("devicetest.UpdateCases has no case of %s", rule)
		}
	}
	eachVectorSet(t, func(t *testing.T) {
		for _, u := range devicetest.UpdateCases {
			for _, n := range []int{1, 15, 16, 37, 200} {
				before, after := updateData(uint64(n), n), updateData(uint64(n), n)
				runUpdate(u, after)
				for i := range n {
					g := float64(before[1][i]) * devicetest.UpdateScale
					var want [4]float64
					want[0], want[1], want[2], want[3] = u.Formula(float64(before[0][i]), g, float64(before[2][i]),
						float64(before[3][i]))
					for k := range want {
						if got := float64(after[k][i]); !(math.Abs(got-want[k]) <= 4e-7*(1+math.Abs(want[k]))) {
							t.Fatalf("%s, %d elements: vector %d, element %d is %v, want %v", u.Update.Rule, n, k, i,
								got, want[k])
						}
					}
				}
			}
		}
	})
}

// The assembly sets have the same bits, and wherever a slice is cut, each set has its own again.
func TestUpdatesSameBits(t *testing.T) {
	defer func(s *kernelSet) { vectorSet = s }(vectorSet)
	rapid.Check(t, func(t *rapid.T) {
		n, seed := rapid.IntRange(1, 100).Draw(t, "n"), rapid.Uint64().Draw(t, "seed")
		cut := rapid.IntRange(0, n).Draw(t, "cut")
		u := rapid.SampledFrom(devicetest.UpdateCases).Draw(t, "update")
		var first [4][]float32
		for i, k := range kernelSets() {
			vectorSet = k
			whole, parts := updateData(seed, n), updateData(seed, n)
			runUpdate(u, whole)
			var head, tail [4][]float32
			for v, x := range parts {
				head[v], tail[v] = x[:cut], x[cut:]
			}
			runUpdate(u, head)
			runUpdate(u, tail)
			if i == 0 || k.arithmetic != kernelSets()[0].arithmetic {
				first = whole
			}
			for v := range whole {
				for j, x := range whole[v] {
					if math.Float32bits(x) != math.Float32bits(parts[v][j]) ||
						math.Float32bits(x) != math.Float32bits(first[v][j]) {
						t.Fatalf("%s with %s: vector %d, element %d of %d is %x, cut at %d %x, with the first set %x",
							u.Update.Rule, k.name, v, j, n, x, cut, parts[v][j], first[v][j])
					}
				}
			}
		}
	})
}

// Moments of weights that get no more gradients become zero rather than denormal, and the mode of
// the processor does not stay behind.
func TestUpdatesFlush(t *testing.T) {
	eachVectorSet(t, func(t *testing.T) {
		for _, u := range devicetest.UpdateCases {
			w, grad, a, b := fill(17, 1), make([]float32, 17), fill(17, 0x1.01p-126), fill(17, 0x1.01p-126)
			runUpdate(u, [4][]float32{w, grad, a, b})
			for i := range a {
				for _, x := range []float32{a[i], b[i]} {
					if x != 0 && math.Abs(float64(x)) < 0x1p-126 {
						t.Errorf("%s: element %d is %v", u.Update.Rule, i, x)
					}
				}
			}
			if x := float32(0x1p-126); x*w[0]*0.5 == 0 {
				t.Errorf("%s: denormal numbers have become zero outside", u.Update.Rule)
			}
		}
	})
}

func TestUpdatesRefuseLengths(t *testing.T) {
	long, short := make([]float32, 32), make([]float32, 31)
	for _, u := range devicetest.UpdateCases {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: vectors of different lengths were accepted", u.Update.Rule)
				}
			}()
			runUpdate(u, [4][]float32{long, long, short, short})
		}()
	}
}

func TestUpdatesAllocate(t *testing.T) {
	x := updateData(1, 37)
	for _, u := range devicetest.UpdateCases {
		if n := alloctest.Least(func() { runUpdate(u, x) }); n > 0 {
			t.Errorf("%s: %v allocations", u.Update.Rule, n)
		}
	}
}

// In the cache and, with 32 MiB a vector, out of it.
func BenchmarkUpdates(b *testing.B) {
	defer func(s *kernelSet) { vectorSet = s }(vectorSet)
	for _, n := range []int{1 << 12, 1 << 23} {
		x := updateData(1, n)
		for _, u := range devicetest.UpdateCases {
			for _, k := range kernelSets() {
				b.Run(fmt.Sprintf("%s/%s/%d", u.Update.Rule, k.name, n), func(b *testing.B) {
					vectorSet = k
					begin := cpuSeconds()
					for b.Loop() {
						runUpdate(u, x)
					}
					b.ReportMetric((cpuSeconds()-begin)*1e9/float64(b.N)/float64(n), "cpu-ns/element")
				})
			}
		}
	}
}

// updateVectors runs an update on one goroutine, with the best kernel set of the machine.
func updateVectors(u xpu.Update, weight, grad, m, v []float32) {
	updateRange(&u, &moments{Weight: weight, M: m, V: v}, 0, grad)
}
