package train

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"mula/moe"
	"mula/xpu/cpu"
)

func device(t testing.TB, threads int) *cpu.Device {
	d := cpu.New(threads)
	t.Cleanup(d.Close)
	return d
}

func toFloat32(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return y
}

// The golden file holds every number of ten steps of torch.optim.AdamW; testdata/adamw.py made it. Differences come from the order of
// roundings; where terms cancel they are small beside the terms, not beside the sum, so they are held against the largest of the tensor.
func TestAdamWTorch(t *testing.T) {
	data, err := os.ReadFile("testdata/adamw.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Config struct {
			Betas       []float64
			Eps         float64
			WeightDecay float64 `json:"weight_decay"`
		}
		Initial [][]float64
		Steps   []struct {
			LR                 float64
			Norm               float64
			Gradients, Weights [][]float64
			ExpAvg             [][]float64 `json:"exp_avg"`
			ExpAvgSq           [][]float64 `json:"exp_avg_sq"`
		}
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	config := OptimizerConfig{Betas: golden.Config.Betas, Epsilon: golden.Config.Eps,
		WeightDecay: golden.Config.WeightDecay, Decay: DecayTorch}
	var parameters []*moe.Parameter
	for _, w := range golden.Initial {
		parameters = append(parameters, &moe.Parameter{Weight: toFloat32(w), Grad: make([]float32, len(w))})
	}
	o := NewAdamW(config, device(t, 2), parameters)
	compare := func(step int, what string, got []float32, want []float64) {
		t.Helper()
		var largest float64
		for _, w := range want {
			largest = max(largest, math.Abs(w))
		}
		for i := range want {
			if d := math.Abs(float64(got[i]) - want[i]); d > 4*math.Pow(2, -24)*largest {
				t.Errorf("step %d: %s[%d] is %v, torch has %v", step, what, i, got[i], want[i])
			}
		}
	}
	if len(golden.Steps) != 10 {
		t.Fatalf("%d steps", len(golden.Steps))
	}
	for step, g := range golden.Steps {
		for i, p := range parameters {
			copy(p.Grad, toFloat32(g.Gradients[i]))
		}
		norm := o.GradientNorm()
		if math.Abs(norm-g.Norm) > 1e-6*g.Norm {
			t.Errorf("step %d: gradient norm %v, torch has %v", step, norm, g.Norm)
		}
		o.Step(g.LR, clipFactor(norm, 1))
		for i, p := range parameters {
			compare(step, "weight", p.Weight, g.Weights[i])
			compare(step, "exp_avg", o.ExpAvg[i], g.ExpAvg[i])
			compare(step, "exp_avg_sq", o.ExpSq[i], g.ExpAvgSq[i])
		}
	}
}

// Both forms of decay against their formulas in float64, and against each other: with decay, they must not be the same.
func TestAdamWDecayForms(t *testing.T) {
	const n, steps, lr = 1000, 20, 3e-2
	for _, form := range []DecayForm{DecayTorch, DecayOptimus} {
		config := OptimizerConfig{Betas: []float64{0.9, 0.95}, Epsilon: 1e-8, WeightDecay: 0.1, Decay: form}
		rng := rand.New(rand.NewPCG(1, 2))
		parameter := &moe.Parameter{Weight: make([]float32, n), Grad: make([]float32, n)}
		p, other, m, v := make([]float64, n), make([]float64, n), make([]float64, n), make([]float64, n)
		for i := range p {
			parameter.Weight[i] = float32(rng.NormFloat64())
			p[i] = float64(parameter.Weight[i])
			other[i] = p[i]
		}
		o := NewAdamW(config, device(t, 2), []*moe.Parameter{parameter})
		for step := 1; step <= steps; step++ {
			for i := range parameter.Grad {
				parameter.Grad[i] = float32(rng.NormFloat64())
				g := float64(parameter.Grad[i]) * 0.5
				m[i] = 0.9*m[i] + 0.1*g
				v[i] = 0.95*v[i] + 0.05*g*g
				update := lr * m[i] / (1 - math.Pow(0.9, float64(step))) / (math.Sqrt(v[i]/(1-math.Pow(0.95, float64(step)))) + 1e-8)
				before := p[i] - lr*0.1*p[i] - update
				after := p[i] - update
				after -= lr * 0.1 * after
				p[i], other[i] = before, after
				if form == DecayOptimus {
					p[i], other[i] = after, before
				}
			}
			o.Step(lr, 0.5)
		}
		var worst, apart float64
		for i := range p {
			worst = max(worst, math.Abs(float64(parameter.Weight[i])-p[i]))
			apart = max(apart, math.Abs(float64(parameter.Weight[i])-other[i]))
		}
		if worst > 3e-6 {
			t.Errorf("%s: differs from its formula by %g", form, worst)
		}
		if apart < 10*worst {
			t.Errorf("%s: as near to the other form's formula (%g) as to its own (%g)", form, apart, worst)
		}
	}
}

// The result does not depend on the number of threads, for tensors that are cut into blocks in every way.
func TestAdamWThreads(t *testing.T) {
	sizes := []int{1, blockSize - 1, blockSize, blockSize + 1, 2*blockSize + 17}
	var first [][]float32
	var firstNorm float64
	for _, threads := range []int{1, 2, 3} {
		rng := rand.New(rand.NewPCG(3, 4))
		var parameters []*moe.Parameter
		for _, n := range sizes {
			p := &moe.Parameter{Weight: make([]float32, n), Grad: make([]float32, n)}
			for i := range n {
				p.Weight[i], p.Grad[i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())
			}
			parameters = append(parameters, p)
		}
		o := NewAdamW(DefaultConfig().Optimizer, device(t, threads), parameters)
		norm := o.GradientNorm()
		o.Step(1e-3, clipFactor(norm, 1))
		var weights [][]float32
		for _, p := range parameters {
			weights = append(weights, p.Weight)
		}
		if first == nil {
			first, firstNorm = weights, norm
			continue
		}
		if norm != firstNorm {
			t.Errorf("%d threads: norm %v, want %v", threads, norm, firstNorm)
		}
		for i := range weights {
			for j := range weights[i] {
				if weights[i][j] != first[i][j] {
					t.Fatalf("%d threads: tensor %d, element %d is %v, want %v", threads, i, j, weights[i][j], first[i][j])
				}
			}
		}
	}
}

func TestGradientNorm(t *testing.T) {
	p := &moe.Parameter{Weight: make([]float32, 2*blockSize), Grad: make([]float32, 2*blockSize)}
	o := NewAdamW(DefaultConfig().Optimizer, device(t, 2), []*moe.Parameter{p})
	p.Grad[0], p.Grad[2*blockSize-1] = 3, -4
	if got := o.GradientNorm(); got != 5 {
		t.Errorf("norm %v, want 5", got)
	}
	p.Grad[7] = math.MaxFloat32 // its square is beyond float32
	if got := o.GradientNorm(); math.IsInf(got, 0) || got < math.MaxFloat32 {
		t.Errorf("norm %v of a large but finite gradient", got)
	}
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		p.Grad[blockSize+1] = float32(bad)
		if got := o.GradientNorm(); !math.IsNaN(got) && !math.IsInf(got, 0) {
			t.Errorf("norm %v with a gradient of %v", got, bad)
		}
	}
}

func TestClipFactor(t *testing.T) {
	for _, test := range []struct{ norm, limit, want float64 }{
		{0.5, 1, 1}, {2, 1, 1 / 2.000001}, {1e9, 0, 1}, {0, 1, 1}, {1 - 1e-6, 1, 1},
	} {
		if got := clipFactor(test.norm, test.limit); math.Abs(got-test.want) > 1e-12 {
			t.Errorf("norm %v, limit %v: factor %v, want %v", test.norm, test.limit, got, test.want)
		}
	}
}

// The parameters of mula-tiny in one tensor.
func BenchmarkAdamW(b *testing.B) {
	const n = 9_457_920
	p := &moe.Parameter{Weight: make([]float32, n), Grad: make([]float32, n)}
	for i := range p.Grad {
		p.Grad[i] = float32(i%7) - 3
	}
	o := NewAdamW(DefaultConfig().Optimizer, device(b, 2), []*moe.Parameter{p})
	b.SetBytes(7 * 4 * n) // read four vectors, write three
	for b.Loop() {
		o.Step(1e-3, clipFactor(o.GradientNorm(), 1))
	}
}
