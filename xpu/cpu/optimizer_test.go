package cpu

import (
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/alloctest"
	"mula/xpu"
)

// An updateCase is one of the updates with constants at which every term matters, and its formula
// in float64.
type updateCase struct {
	name    string
	run     func(w, grad, a, b []float32)
	formula func(w, g, a, b float64) [4]float64 // the new values, of a gradient that is multiplied already
}

const updateScale = 0.5

var updateCases = []updateCase{
	{"adamw", func(w, grad, a, b []float32) {
		updateAdamW(xpu.AdamW{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-6, WeightDecay: 0.1, Step: 3,
			GradScale: updateScale}, w, grad, a, b)
	}, func(w, g, m, v float64) [4]float64 {
		m, v = 0.9*m+0.1*g, 0.99*v+0.01*g*g
		return [4]float64{w*(1-1e-3) - 1e-2*m/(1-0.729)/(math.Sqrt(v/(1-0.99*0.99*0.99))+1e-6), g, m, v}
	}},
	{"lion", func(w, grad, a, _ []float32) {
		Update(xpu.Lion{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, WeightDecay: 0.1,
			GradScale: updateScale}.Update(), w, grad, a, nil)
	}, func(w, g, m, b float64) [4]float64 {
		sign := 0.0
		if u := 0.9*m + 0.1*g; u != 0 {
			sign = math.Copysign(1, u)
		}
		return [4]float64{w*(1-1e-3) - 1e-2*sign, g, 0.99*m + 0.01*g, b}
	}},
	{"sophia", func(w, grad, a, b []float32) {
		Update(xpu.Sophia{LearningRate: 1e-2, Beta1: 0.965, Curvature: 3, WeightDecay: 0.1,
			GradScale: updateScale}.Update(),
			w, grad, a, b)
	}, func(w, g, m, h float64) [4]float64 {
		m = 0.965*m + 0.035*g
		return [4]float64{w*(1-1e-3) - 1e-2*max(-1, min(1, m/(3*h+1e-15))), g, m, h}
	}},
	{"adopt", func(w, grad, a, b []float32) {
		Update(xpu.ADOPT{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-6, Clip: 1.5, WeightDecay: 0.1,
			GradScale: updateScale}.Update(), w, grad, a, b)
	}, func(w, g, m, v float64) [4]float64 {
		m = 0.9*m + 0.1*max(-1.5, min(1.5, g/max(math.Sqrt(v), 1e-6)))
		return [4]float64{w*(1-1e-3) - 1e-2*m, g, m, 0.99*v + 0.01*g*g}
	}},
	{"lamb", func(w, grad, a, b []float32) {
		Update(xpu.Lamb{Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-6, WeightDecay: 0.1, Step: 3,
			GradScale: updateScale}.Update(),
			w, grad, a, b)
	}, func(w, g, m, v float64) [4]float64 {
		m, v = 0.9*m+0.1*g, 0.99*v+0.01*g*g
		return [4]float64{w, m/(1-0.729)/(math.Sqrt(v/(1-0.99*0.99*0.99))+1e-6) + 0.1*w, m, v}
	}},
	{"muon", func(w, grad, a, _ []float32) {
		Update(xpu.Muon{Momentum: 0.95, Nesterov: true, GradScale: updateScale}.Update(), w, grad, a, nil)
	}, func(w, g, m, b float64) [4]float64 {
		m = 0.95*m + 0.05*g
		return [4]float64{w, 0.95*m + 0.05*g, m, b}
	}},
	{"muon without nesterov", func(w, grad, a, _ []float32) {
		Update(xpu.Muon{Momentum: 0.95, GradScale: updateScale}.Update(), w, grad, a, nil)
	}, func(w, g, m, b float64) [4]float64 {
		m = 0.95*m + 0.05*g
		return [4]float64{w, m, m, b}
	}},
	{"schedule-free", func(w, grad, a, b []float32) {
		Update(xpu.ScheduleFreeAdamW{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, WeightDecay: 0.1,
			Step:  3,
			Share: 0.3, GradScale: updateScale}.Update(), w, grad, a, b)
	}, func(y, g, z, v float64) [4]float64 {
		v = 0.99*v + 0.01*g*g
		u := g/(math.Sqrt(v/(1-0.99*0.99*0.99))+1e-8) + 0.1*y
		return [4]float64{y + 0.3*(z-y) + 1e-2*(0.9*0.7-1)*u, g, z - 1e-2*u, v}
	}},
	{"average of squares", func(w, grad, a, b []float32) {
		Update(xpu.AverageSquares{Decay: 0.99, Rest: 0.02, GradScale: updateScale}.Update(), w, grad, a, b)
	}, func(w, g, m, v float64) [4]float64 {
		return [4]float64{w, g, m, 0.99*v + 0.02*g*g}
	}},
}

// updateAdamW is a step of AdamW on this goroutine.
func updateAdamW(o xpu.AdamW, w, grad, m, v []float32) {
	Update(o.Update(), w, grad, m, v)
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
	eachVectorSet(t, func(t *testing.T) {
		for _, u := range updateCases {
			for _, n := range []int{1, 15, 16, 37, 200} {
				before, after := updateData(uint64(n), n), updateData(uint64(n), n)
				u.run(after[0], after[1], after[2], after[3])
				for i := range n {
					g := float64(before[1][i]) * updateScale
					want := u.formula(float64(before[0][i]), g, float64(before[2][i]), float64(before[3][i]))
					if after[1][i] == before[1][i] {
						want[1] = float64(before[1][i]) // not replaced: it need not be multiplied
					}
					for k := range want {
						if got := float64(after[k][i]); !(math.Abs(got-want[k]) <= 4e-7*(1+math.Abs(want[k]))) {
							t.Fatalf("%s, %d elements: vector %d, element %d is %v, want %v", u.name, n, k, i, got,
								want[k])
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
		u := rapid.SampledFrom(updateCases).Draw(t, "update")
		var first [4][]float32
		for i, k := range kernelSets() {
			vectorSet = k
			whole, parts := updateData(seed, n), updateData(seed, n)
			u.run(whole[0], whole[1], whole[2], whole[3])
			u.run(parts[0][:cut], parts[1][:cut], parts[2][:cut], parts[3][:cut])
			u.run(parts[0][cut:], parts[1][cut:], parts[2][cut:], parts[3][cut:])
			if i == 0 || k.arithmetic != kernelSets()[0].arithmetic {
				first = whole
			}
			for v := range whole {
				for j, x := range whole[v] {
					if math.Float32bits(x) != math.Float32bits(parts[v][j]) ||
						math.Float32bits(x) != math.Float32bits(first[v][j]) {
						t.Fatalf("%s with %s: vector %d, element %d of %d is %x, cut at %d %x, with the first set %x",
							u.name, k.name, v, j, n, x, cut, parts[v][j], first[v][j])
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
		for _, u := range updateCases {
			w, grad, a, b := fill(17, 1), make([]float32, 17), fill(17, 0x1.01p-126), fill(17, 0x1.01p-126)
			u.run(w, grad, a, b)
			for i := range a {
				for _, x := range []float32{a[i], b[i]} {
					if x != 0 && math.Abs(float64(x)) < 0x1p-126 {
						t.Errorf("%s: element %d is %v", u.name, i, x)
					}
				}
			}
			if x := float32(0x1p-126); x*w[0]*0.5 == 0 {
				t.Errorf("%s: denormal numbers have become zero outside", u.name)
			}
		}
	})
}

func TestUpdatesRefuseLengths(t *testing.T) {
	long, short := make([]float32, 32), make([]float32, 31)
	for _, u := range updateCases {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: vectors of different lengths were accepted", u.name)
				}
			}()
			u.run(long, long, short, short)
		}()
	}
}

func TestUpdatesAllocate(t *testing.T) {
	x := updateData(1, 37)
	for _, u := range updateCases {
		if n := alloctest.Least(func() { u.run(x[0], x[1], x[2], x[3]) }); n > 0 {
			t.Errorf("%s: %v allocations", u.name, n)
		}
	}
}

// In the cache and, with 32 MiB a vector, out of it.
func BenchmarkUpdates(b *testing.B) {
	defer func(s *kernelSet) { vectorSet = s }(vectorSet)
	for _, n := range []int{1 << 12, 1 << 23} {
		x := updateData(1, n)
		cases := append([]updateCase{{name: "adamw", run: func(w, grad, m, v []float32) {
			updateAdamW(xpu.AdamW{LearningRate: 1e-3, Step: 9, Beta1: .9, Beta2: .95, GradScale: 1}, w, grad, m, v)
		}}}, updateCases...)
		for _, u := range cases {
			for _, k := range kernelSets() {
				b.Run(fmt.Sprintf("%s/%s/%d", u.name, k.name, n), func(b *testing.B) {
					vectorSet = k
					begin := cpuSeconds()
					for b.Loop() {
						u.run(x[0], x[1], x[2], x[3])
					}
					b.ReportMetric((cpuSeconds()-begin)*1e9/float64(b.N)/float64(n), "cpu-ns/element")
				})
			}
		}
	}
}
