package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/alloctest"
	"mula/xpu"
)

// eachVectorSet runs f with every kernel set of this machine, one after the other.
func eachVectorSet(t *testing.T, f func(t *testing.T)) {
	defer func(s *kernelSet) { vectorSet = s }(vectorSet)
	for _, k := range kernelSets() {
		vectorSet = k
		t.Run(k.name, f)
	}
}

// ulps is the distance of x from want in units in the last place of a normal float32 near want.
func ulps(x float32, want float64) float64 {
	_, e := math.Frexp(want)
	return math.Abs(float64(x)-want) / math.Ldexp(1, max(e, -125)-24)
}

func TestExpError(t *testing.T) {
	eachVectorSet(t, func(t *testing.T) {
		const chunk = 1 << 12
		x, y := make([]float32, chunk), make([]float32, chunk)
		worst, at := 0.0, float32(0)
		from, to := float32(-87.33654), float32(88.72283)
		steps := 1 << 20
		for done := 0; done < steps; done += chunk {
			for i := range x {
				u := float32(done+i) / float32(steps)
				switch {
				case i%4 == 0:
					x[i] = from + u*(to-from)
				case i%4 == 1:
					x[i] = -0.4 + u*0.8
				case i%4 == 2:
					// where n changes
					x[i] = float32(math.Ln2 * (float64(int(u*200)-100) + 0.5) * (1 + 1e-7*float64(i)))
				default:
					x[i] = -20 * u
				}
				x[i] = min(max(x[i], from), to)
			}
			ExpSum(y, x, 0)
			for i, v := range x {
				if e := ulps(y[i], math.Exp(float64(v))); e > worst {
					worst, at = e, v
				}
			}
		}
		t.Logf("largest error %.3f ulp, at %v", worst, at)
		if worst > 1.1 {
			t.Errorf("exp(%v) is %.3f ulp away", at, worst)
		}
	})
}

func TestExpSpecial(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	x := []float32{0, inf, -inf, nan, 88.72283, 88.72284, 1000, -87.336544, -87.33656, -104, -1000, math.MaxFloat32,
		-math.MaxFloat32,
		1e-45, -1e-45, math.Float32frombits(0xffffffff), math.Float32frombits(0x7f800001)}
	want := []float64{1, math.Inf(1), 0, math.NaN(), math.Exp(float64(float32(88.72283))), math.Inf(1), math.Inf(1),
		math.Exp(float64(float32(-87.336544))), 0, 0, 0, math.Inf(1), 0, 1, 1, math.NaN(), math.NaN()}
	eachVectorSet(t, func(t *testing.T) {
		for _, pad := range []int{0, 15} { // in a complete block, and in the remainder
			in, out := append(make([]float32, pad), x...), make([]float32, len(x)+pad)
			ExpSum(out, in, 0)
			for i, w := range want {
				got := out[pad+i]
				switch {
				case math.IsNaN(w) || math.IsInf(w, 0) || w == 0:
					if float64(got) != w && !(math.IsNaN(w) && got != got) {
						t.Errorf("exp(%v) = %v, want %v", x[i], got, w)
					}
				case ulps(got, w) > 1.1:
					t.Errorf("exp(%v) = %v, want %v", x[i], got, w)
				}
			}
		}
		if s := ExpSum(make([]float32, 2), []float32{nan, 1}, 1); s == s {
			t.Errorf("a NaN is not in the sum %v", s)
		}
		if s := ExpSum(nil, nil, 0); s != 0 {
			t.Errorf("the sum of nothing is %v", s)
		}
	})
}

// vectorResults calls every function on vectors of length n, from the given seed, and names what
// comes out.
func vectorResults(seed uint64, n int) map[string][]float32 {
	r := rand.New(rand.NewPCG(seed, 2))
	draw := func(scale float64) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(r.NormFloat64() * scale)
		}
		return x
	}
	out := func() []float32 { return make([]float32, n) }
	x, y, z := draw(4), draw(1), draw(1)
	res := map[string][]float32{"x": x, "y": y, "z": z}
	res["max"] = []float32{Max(x)}
	e := out()
	res["expSum"], res["exp"] = []float32{ExpSum(e, x, 1.5)}, e
	res["swiglu"], res["dGate"], res["dUp"] = out(), out(), out()
	SwiGLU(res["swiglu"], x, y)
	SwiGLUGrad(res["dGate"], res["dUp"], x, y, z)
	res["dot"] = []float32{Dot(x, y)}
	res["addScaled"] = out()
	sumScaled(res["addScaled"], x, 0.37, y)
	res["axpy"] = append([]float32(nil), x...)
	Axpy(res["axpy"], -1.7, z)
	res["scale"] = append([]float32(nil), x...)
	Scale(res["scale"], 1/3.)
	res["mulScaled"], res["softmaxGrad"], res["rotated"], res["rotatedBack"] = out(), out(), out(), out()
	MulScaled(res["mulScaled"], x, 0.7, y)
	res["addProduct"] = append([]float32(nil), x...)
	AddProduct(res["addProduct"], -0.3, y, z)
	SoftmaxGrad(res["softmaxGrad"], x, y, 0.6)
	even := n &^ 1
	Rotate(res["rotated"][:even], x[:even], y[:even/2], z[:even/2], 0.8)
	RotateBack(res["rotatedBack"][:even], x[:even], y[:even/2], z[:even/2], 0.8)
	bits := math.Float64bits(SumSquares(x))
	res["sumSquares"] = []float32{math.Float32frombits(uint32(bits)), math.Float32frombits(uint32(bits >> 32)),
		float32(math.Float64frombits(bits))}
	w, m, v := append([]float32(nil), x...), append([]float32(nil), y...), out()
	for i := range v {
		v[i] = z[i] * z[i]
	}
	updateAdamW(xpu.AdamW{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1, Step: 3,
		GradScale: 0.5}, w, z, m, v)
	res["adamwWeight"], res["adamwFirst"], res["adamwSecond"] = w, m, v
	return res
}

// TestVectorValues compares with the formulas in float64.
func TestVectorValues(t *testing.T) {
	eachVectorSet(t, func(t *testing.T) {
		for _, n := range []int{1, 15, 16, 17, 31, 32, 33, 64, 100, 1000} {
			res := vectorResults(uint64(n), n)
			x, y, z := res["x"], res["y"], res["z"]
			var exps, dots, squares float64
			largest := math.Inf(-1)
			for i := range n {
				a, b, c := float64(x[i]), float64(y[i]), float64(z[i])
				sigma := 1 / (1 + math.Exp(-a))
				exps += math.Exp(float64(x[i] - 1.5))
				dots += a * b
				squares += a * a
				largest = max(largest, a)
				if half := n / 2; i < half {
					p, q, scale := float64(x[i]), float64(x[half+i]), float64(float32(0.8))
					for name, want := range map[string][2]float64{
						"rotated": {p*b - q*c, q*b + p*c}, "rotatedBack": {p*b + q*c, q*b - p*c},
					} {
						for j, w := range want {
							most := 4e-7 * (math.Abs(p) + math.Abs(q)) * (math.Abs(b) + math.Abs(c))
							if got := float64(res[name][i+j*half]); !(math.Abs(got-scale*w) <= most) {
								t.Errorf("n %d: %s[%d] = %v, want %v", n, name, i+j*half, got, scale*w)
							}
						}
					}
				}
				m, v := 0.9*b+0.1*0.5*c, 0.95*c*c+0.05*0.25*c*c
				for name, want := range map[string]float64{
					"exp": math.Exp(float64(x[i] - 1.5)), "swiglu": a * sigma * b,
					"dGate": c * b * sigma * (1 + a*(1-sigma)), "dUp": c * a * sigma,
					"mulScaled": a * float64(float32(0.7)) * b, "addProduct": a - float64(float32(0.3))*b*c,
					"softmaxGrad": a * (b - float64(float32(0.6))),
					"addScaled":   a + float64(float32(0.37))*b, "axpy": a - float64(float32(1.7))*c,
					"scale":      a * float64(float32(1/3.)),
					"adamwFirst": m, "adamwSecond": v,
					"adamwWeight": a*(1-1e-3) - 1e-2/(1-0.9*0.9*0.9)*m/(math.Sqrt(v)/math.Sqrt(1-0.95*0.95*0.95)+1e-8),
				} {
					most := 4e-7 * (math.Abs(want) + math.Abs(a) + math.Abs(b) + math.Abs(c))
					if got := float64(res[name][i]); !(math.Abs(got-want) <= most) {
						t.Errorf("n %d: %s[%d] = %v, want %v", n, name, i, got, want)
					}
				}
			}
			for name, want := range map[string]float64{"expSum": exps, "dot": dots, "max": largest} {
				if got := float64(res[name][0]); !(math.Abs(got-want) <= 1e-5*(1+math.Abs(want))) {
					t.Errorf("n %d: %s = %v, want %v", n, name, got, want)
				}
			}
			if got := float64(res["sumSquares"][2]); !(math.Abs(got-squares) <= 1e-6*squares) {
				t.Errorf("n %d: sumSquares = %v, want %v", n, got, squares)
			}
		}
	})
}

// TestVectorSameBits compares the bits of the assembly sets with each other, the Go form with
// itself from an odd place in memory, and all of them where the package comment says that they
// agree.
func TestVectorSameBits(t *testing.T) {
	defer func(s *kernelSet) { vectorSet = s }(vectorSet)
	rapid.Check(t, func(t *rapid.T) {
		n, seed := rapid.IntRange(0, 200).Draw(t, "n"), rapid.Uint64().Draw(t, "seed")
		var first map[string][]float32
		for _, k := range kernelSets() {
			vectorSet = k
			res := vectorResults(seed, n)
			if first == nil {
				first = res
			}
			for name, x := range res {
				if k.arithmetic != kernelSets()[0].arithmetic && name != "sumSquares" && name != "max" {
					continue
				}
				for i := range x {
					if math.Float32bits(x[i]) != math.Float32bits(first[name][i]) {
						t.Fatalf("%s of %d: element %d is %x with %s, %x with %s", name, n, i, x[i], k.name,
							first[name][i], kernelSets()[0].name)
					}
				}
			}
		}
	})
}

// TestVectorSplit: what works element by element gives the same bits wherever a slice is cut.
func TestVectorSplit(t *testing.T) {
	eachVectorSet(t, func(t *testing.T) {
		const n = 100
		x, y, z := uniform(1, n), uniform(2, n), uniform(3, n)
		o := xpu.AdamW{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1, Step: 3,
			GradScale: 0.5}
		run := func(cuts ...int) (all [5][]float32) {
			for i := range all {
				all[i] = make([]float32, n)
			}
			w, m, v, dg, du := append([]float32(nil), x...), append([]float32(nil), y...), fill(n, 0.1), all[3], all[4]
			from := 0
			for _, to := range append(cuts, n) {
				updateAdamW(o, w[from:to], z[from:to], m[from:to], v[from:to])
				AddProduct(w[from:to], 0.1, x[from:to], z[from:to])
				MulScaled(w[from:to], w[from:to], 1.1, y[from:to])
				SoftmaxGrad(w[from:to], w[from:to], z[from:to], 0.2)
				SwiGLUGrad(dg[from:to], du[from:to], x[from:to], y[from:to], z[from:to])
				from = to
			}
			all[0], all[1], all[2] = w, m, v
			return all
		}
		want := run()
		for _, got := range [][5][]float32{run(1), run(50), run(16, 33, 99), run(7, 8, 9, 10)} {
			for a := range got {
				for i := range got[a] {
					if got[a][i] != want[a][i] {
						t.Fatalf("result %d, element %d: %x, want %x", a, i, got[a][i], want[a][i])
					}
				}
			}
		}
	})
}

func TestAdamWFlushes(t *testing.T) {
	eachVectorSet(t, func(t *testing.T) {
		o := xpu.AdamW{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, Step: 1000, GradScale: 1}
		w, m, v := fill(17, 1), fill(17, 0x1.1p-126), fill(17, 0x1.01p-126)
		updateAdamW(o, w, make([]float32, 17), m, v)
		for i := range w {
			if w[i] != 1 || m[i] != 0 || v[i] != 0 {
				t.Errorf("element %d: weight %v, moments %v and %v", i, w[i], m[i], v[i])
			}
		}
		// The mode of the processor must not stay behind.
		if x := float32(0x1p-126); x*w[0]/2 == 0 {
			t.Error("denormal numbers have become zero outside")
		}
	})
}

func TestInPlace(t *testing.T) {
	eachVectorSet(t, func(t *testing.T) {
		for _, n := range []int{5, 16, 37} {
			gate, up, d := uniform(1, n), uniform(2, n), uniform(3, n)
			a, b := make([]float32, n), make([]float32, n)
			SwiGLUGrad(a, b, gate, up, d)
			SwiGLUGrad(gate, up, gate, up, d)
			turned, back := make([]float32, 2*n), append(append([]float32(nil), a...), b...)
			Rotate(turned, back, gate, up, 0.5)
			Rotate(back, back, gate, up, 0.5)
			for i := range turned {
				if turned[i] != back[i] {
					t.Errorf("n %d, rotated element %d differs in place", n, i)
				}
			}
			e := make([]float32, n)
			s := ExpSum(e, d, 1)
			if s2 := ExpSum(d, d, 1); s != s2 {
				t.Errorf("in place the sum is %v, otherwise %v", s2, s)
			}
			for i := range a {
				if a[i] != gate[i] || b[i] != up[i] || e[i] != d[i] {
					t.Errorf("n %d, element %d differs in place", n, i)
				}
			}
		}
	})
}

func TestMax(t *testing.T) {
	eachVectorSet(t, func(t *testing.T) {
		nan, inf := float32(math.NaN()), float32(math.Inf(1))
		for _, n := range []int{0, 1, 31, 32, 33, 100} {
			for at := range n {
				x := fill(n, -3)
				x[n-1-at] = nan
				x[at] = 2
				if got := Max(x); got != 2 {
					t.Errorf("n %d, at %d: %v", n, at, got)
				}
			}
			if got := Max(fill(n, nan)); got != -inf {
				t.Errorf("of %d NaN: %v", n, got)
			}
		}
	})
}

func TestLengths(t *testing.T) {
	for name, f := range map[string]func(a, b []float32){
		"ExpSum": func(a, b []float32) { ExpSum(a, b, 0) }, "Dot": func(a, b []float32) { Dot(a, b) },
		"SwiGLU":      func(a, b []float32) { SwiGLU(a, a, b) },
		"SwiGLUGrad":  func(a, b []float32) { SwiGLUGrad(a, a, a, a, b) },
		"MulScaled":   func(a, b []float32) { MulScaled(a, a, 1, b) },
		"AddProduct":  func(a, b []float32) { AddProduct(a, 1, a, b) },
		"SoftmaxGrad": func(a, b []float32) { SoftmaxGrad(a, a, b, 1) },
		"Rotate":      func(a, b []float32) { Rotate(a, a, a[:len(a)/2], b[:(len(b)+1)/2+len(b)%2], 1) },
		"sumScaled":   func(a, b []float32) { sumScaled(a, a, 1, b) },
	} {
		for _, lengths := range [][2]int{{32, 31}, {31, 32}} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s of %d and %d elements did not panic", name, lengths[0], lengths[1])
					}
				}()
				f(make([]float32, lengths[0]), make([]float32, lengths[1]))
			}()
		}
	}
}

func TestVectorsDoNotAllocate(t *testing.T) {
	x, y, z := uniform(1, 37), uniform(2, 37), uniform(3, 37)
	if n := alloctest.Least(func() {
		Max(x)
		ExpSum(z, x, 1)
		SwiGLUGrad(z, z, x, y, z)
		Dot(x, y)
		Axpy(z, 1, x)
		MulScaled(z, x, 1, y)
		AddProduct(z, 1, x, y)
		SoftmaxGrad(z, x, y, 1)
		Rotate(z[:34], x[:34], y[:17], y[:17], 1)
		SumSquares(x)
		updateAdamW(xpu.AdamW{Step: 1, Beta1: .9, Beta2: .9}, z, x, y, y)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkVector works on 4096 elements, a row of logits, and on the weights of a layer.
func BenchmarkVector(b *testing.B) {
	defer func(s *kernelSet) { vectorSet = s }(vectorSet)
	const n = 4096
	x, y, z, v := uniform(1, n), uniform(2, n), uniform(3, n), fill(n, 0.1)
	for _, k := range kernelSets() {
		for _, f := range []struct {
			name string
			run  func()
		}{
			{"Max", func() { Max(x) }},
			{"ExpSum", func() { ExpSum(z, x, 0.5) }},
			{"SwiGLU", func() { SwiGLU(z, x, y) }},
			{"SwiGLUGrad", func() { SwiGLUGrad(z, z, x, y, v) }},
			{"Dot", func() { Dot(x, y) }},
			{"Dot64", func() { Dot(x[:64], y[:64]) }},
			{"Axpy", func() { Axpy(z, 0.5, x) }},
			{"MulScaled", func() { MulScaled(z, x, 0.5, y) }},
			{"AddProduct", func() { AddProduct(z, 0.5, x, y) }},
			{"SoftmaxGrad", func() { SoftmaxGrad(z, x, y, 0.5) }},
			{"Rotate", func() { Rotate(z, x, y[:n/2], v[:n/2], 0.5) }},
			{"SumSquares", func() { SumSquares(x) }},
			{"AdamW", func() {
				updateAdamW(xpu.AdamW{LearningRate: 1e-3, Step: 9, Beta1: .9, Beta2: .95, GradScale: 1}, z, x, y, v)
			}},
		} {
			b.Run(fmt.Sprintf("%s/%s", f.name, k.name), func(b *testing.B) {
				vectorSet = k
				start := cpuSeconds()
				for b.Loop() {
					f.run()
				}
				elements := n
				if f.name == "Dot64" {
					elements = 64
				}
				b.ReportMetric((cpuSeconds()-start)*1e9/float64(elements*b.N), "cpu-ns/element")
			})
		}
	}
}
