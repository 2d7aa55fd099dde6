package optimizer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/goccy/go-yaml"

	"mula/internal/alloctest"
	"mula/moe"
	"mula/train/optimizer/optimizertest"
	"mula/xpu"
	"mula/xpu/cpu"
)

func device(t testing.TB, threads int) *cpu.Device {
	d := cpu.New(threads, xpu.FP32)
	t.Cleanup(d.Close)
	return d
}

func mustOptimizer(t testing.TB, config Config, targets int64, d xpu.Device,
	parameters []*moe.Parameter) *Optimizer {
	t.Helper()
	o, err := New(config, targets, d, parameters)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// defaultOptimizer is the configuration of an optimizer with its defaults.
func defaultOptimizer(name Name) Config {
	c := Config{Name: name, Clip: 1}
	c.Resolve()
	return c
}

// tensor returns a tensor of one dimension.
func tensor(x []float32) xpu.Tensor { return xpu.Of(x, len(x)) }

func toFloat32(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return y
}

// The golden file holds every number of ten steps of torch.optim.AdamW; testdata/adamw.py made it.
// Differences come from the order of roundings; where terms cancel they are small beside the terms,
// not beside the sum, so they are held against the largest of the tensor.
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
	config := Config{Name: AdamW, Betas: golden.Config.Betas, Epsilon: &golden.Config.Eps,
		WeightDecay: &golden.Config.WeightDecay, Decay: DecayTorch}
	var parameters []*moe.Parameter
	for _, w := range golden.Initial {
		parameters = append(parameters, &moe.Parameter{Weight: tensor(toFloat32(w)),
			Grad: tensor(make([]float32, len(w)))})
	}
	o := mustOptimizer(t, config, 1, device(t, 2), parameters)
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
			copy(p.Grad.Floats(), toFloat32(g.Gradients[i]))
		}
		norm := gradientNorm(t, o)
		if math.Abs(norm-g.Norm) > 1e-6*g.Norm {
			t.Errorf("step %d: gradient norm %v, torch has %v", step, norm, g.Norm)
		}
		update(t, o, g.LR, ClipFactor(norm, 1))
		for i, p := range parameters {
			compare(step, "weight", p.Weight.Floats(), g.Weights[i])
			compare(step, "exp_avg", o.state[i][0].Values.Floats(), g.ExpAvg[i])
			compare(step, "exp_avg_sq", o.state[i][1].Values.Floats(), g.ExpAvgSq[i])
		}
	}
}

// Both forms of decay against their formulas in float64, and against each other: with decay, they
// must not be the same.
func TestAdamWDecayForms(t *testing.T) {
	const n, steps, lr = 1000, 20, 3e-2
	for _, form := range []DecayForm{DecayTorch, DecayOptimus} {
		config := defaultOptimizer(AdamW)
		config.Decay = form
		rng := rand.New(rand.NewPCG(1, 2))
		parameter := &moe.Parameter{Weight: tensor(make([]float32, n)), Grad: tensor(make([]float32, n))}
		p, other, m, v := make([]float64, n), make([]float64, n), make([]float64, n), make([]float64, n)
		for i := range p {
			parameter.Weight.Floats()[i] = float32(rng.NormFloat64())
			p[i] = float64(parameter.Weight.Floats()[i])
			other[i] = p[i]
		}
		o := mustOptimizer(t, config, 1, device(t, 2), []*moe.Parameter{parameter})
		for step := 1; step <= steps; step++ {
			for i := range parameter.Grad.Floats() {
				parameter.Grad.Floats()[i] = float32(rng.NormFloat64())
				g := float64(parameter.Grad.Floats()[i]) * 0.5
				m[i] = 0.9*m[i] + 0.1*g
				v[i] = 0.95*v[i] + 0.05*g*g
				update := lr * m[i] / (1 - math.Pow(0.9,
					float64(step))) / (math.Sqrt(v[i]/(1-math.Pow(0.95, float64(step)))) + 1e-8)
				before := p[i] - lr*0.1*p[i] - update
				after := p[i] - update
				after -= lr * 0.1 * after
				p[i], other[i] = before, after
				if form == DecayOptimus {
					p[i], other[i] = after, before
				}
			}
			update(t, o, lr, 0.5)
		}
		var worst, apart float64
		for i := range p {
			worst = max(worst, math.Abs(float64(parameter.Weight.Floats()[i])-p[i]))
			apart = max(apart, math.Abs(float64(parameter.Weight.Floats()[i])-other[i]))
		}
		if worst > 3e-6 {
			t.Errorf("%s: differs from its formula by %g", form, worst)
		}
		if apart < 10*worst {
			t.Errorf("%s: as near to the other form's formula (%g) as to its own (%g)", form, apart, worst)
		}
	}
}

// The result does not depend on the number of threads, for tensors that are cut into blocks in
// every way.
func TestAdamWThreads(t *testing.T) {
	sizes := []int{1, blockSize - 1, blockSize, blockSize + 1, 2*blockSize + 17}
	var first [][]float32
	var firstNorm float64
	for _, threads := range []int{1, 2, 3} {
		rng := rand.New(rand.NewPCG(3, 4))
		var parameters []*moe.Parameter
		for _, n := range sizes {
			p := &moe.Parameter{Weight: tensor(make([]float32, n)), Grad: tensor(make([]float32, n))}
			for i := range n {
				p.Weight.Floats()[i], p.Grad.Floats()[i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())
			}
			parameters = append(parameters, p)
		}
		o := mustOptimizer(t, defaultOptimizer(AdamW), 1, device(t, threads), parameters)
		norm := gradientNorm(t, o)
		update(t, o, 1e-3, ClipFactor(norm, 1))
		var weights [][]float32
		for _, p := range parameters {
			weights = append(weights, p.Weight.Floats())
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
					t.Fatalf("%d threads: tensor %d, element %d is %v, want %v", threads, i, j, weights[i][j],
						first[i][j])
				}
			}
		}
	}
}

func TestGradientNorm(t *testing.T) {
	p := &moe.Parameter{Weight: tensor(make([]float32, 2*blockSize)), Grad: tensor(make([]float32, 2*blockSize))}
	o := mustOptimizer(t, defaultOptimizer(AdamW), 1, device(t, 2), []*moe.Parameter{p})
	p.Grad.Floats()[0], p.Grad.Floats()[2*blockSize-1] = 3, -4
	if got := gradientNorm(t, o); got != 5 {
		t.Errorf("norm %v, want 5", got)
	}
	p.Grad.Floats()[7] = math.MaxFloat32 // its square is beyond float32
	if got := gradientNorm(t, o); math.IsInf(got, 0) || got < math.MaxFloat32 {
		t.Errorf("norm %v of a large but finite gradient", got)
	}
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		p.Grad.Floats()[blockSize+1] = float32(bad)
		if got := gradientNorm(t, o); !math.IsNaN(got) && !math.IsInf(got, 0) {
			t.Errorf("norm %v with a gradient of %v", got, bad)
		}
	}
}

func TestClipFactor(t *testing.T) {
	for _, test := range []struct{ norm, limit, want float64 }{
		{0.5, 1, 1}, {2, 1, 1 / 2.000001}, {1e9, 0, 1}, {0, 1, 1}, {1 - 1e-6, 1, 1},
	} {
		if got := ClipFactor(test.norm, test.limit); math.Abs(got-test.want) > 1e-12 {
			t.Errorf("norm %v, limit %v: factor %v, want %v", test.norm, test.limit, got, test.want)
		}
	}
}

// A goldenRun is a case of testdata/optimizers.json or groups.json, which testdata/optimizers.py
// made with the reference implementations.
type goldenRun struct {
	Name      Name
	Config    map[string]any
	Rates     []float64
	Weights   [][][]float64          // of each step and parameter
	State     map[string][][]float64 // after the last step
	Average   [][]float64
	LRMax     float64 `json:"lr_max"`
	WeightSum float64 `json:"weight_sum"`
}

// The golden file holds every weight of 20 steps of the reference implementations. Differences come
// from the order of roundings, and where terms cancel they are small beside the terms; so they are
// held against the largest weight of the tensor, and the state against the largest of its tensor.
func TestOptimizersGolden(t *testing.T) {
	seen := compareGolden(t, "testdata/optimizers.json")
	for name := range specs {
		if !seen[name] && name != AdamW { // which has a file of its own
			t.Errorf("there is no golden run of %s", name)
		}
	}
}

// The same with groups of parameters, which the reference implementations have as param_groups.
func TestGroupsGolden(t *testing.T) {
	seen := compareGolden(t, "testdata/groups.json")
	for name := range specs {
		if !seen[name] {
			t.Errorf("there is no golden run of %s", name)
		}
	}
}

// compareGolden runs the cases of a golden file, and returns whose they are.
func compareGolden(t *testing.T, path string) (seen map[Name]bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Targets   int64
		Names     []string
		Shapes    [][]int
		Initial   [][]float64
		Gradients [][][]float64
		Sampled   map[int][][]float64
		Cases     []goldenRun
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	seen = map[Name]bool{}
	for number, run := range golden.Cases {
		t.Run(fmt.Sprint(number, " ", run.Name), func(t *testing.T) {
			seen[run.Name] = true
			config := Config{Name: run.Name}
			text, err := json.Marshal(run.Config) // YAML is a superset
			if err != nil {
				t.Fatal(err)
			}
			if err := yaml.Unmarshal(text, &config); err != nil {
				t.Fatal(err)
			}
			config.Resolve()
			var parameters []*moe.Parameter
			for i, w := range golden.Initial {
				parameters = append(parameters, &moe.Parameter{Name: golden.Names[i], Shape: golden.Shapes[i],
					Weight: tensor(toFloat32(w)), Grad: tensor(make([]float32, len(w)))})
			}
			o := mustOptimizer(t, config, golden.Targets, device(t, 2), parameters)
			worst := map[string]float64{} // in units of 2^-24 of the largest
			compare := func(step int, what, name string, got []float32, want []float64) {
				t.Helper()
				if len(got) != len(want) {
					t.Fatalf("%s of %s has %d elements, want %d", what, name, len(got), len(want))
				}
				var largest float64
				for _, w := range want {
					largest = max(largest, math.Abs(w))
				}
				for i := range want {
					d := math.Abs(float64(got[i])-want[i]) / max(largest, 1e-30) * (1 << 24)
					worst[what] = max(worst[what], d)
					if !(d <= 16) {
						t.Errorf("step %d: %s[%d] of %s is %v, the reference has %v", step, what, i, name, got[i],
							want[i])
					}
				}
			}
			for step, rate := range run.Rates {
				for i, p := range parameters {
					copy(p.Grad.Floats(), toFloat32(golden.Gradients[step][i]))
				}
				update(t, o, rate, 1)
				for i, p := range parameters {
					compare(step, "weight", p.Name, p.Weight.Floats(), run.Weights[step][i])
				}
				if o.CurvatureDue() {
					for i, p := range parameters {
						copy(p.Grad.Floats(), toFloat32(golden.Sampled[step][i]))
					}
					o.UpdateCurvature(1, golden.Targets)
				}
			}
			for i, p := range parameters {
				for _, s := range o.state[i] {
					compare(len(run.Rates), s.Name, p.Name, s.Values.Floats(), run.State[s.Name][i])
				}
			}
			if s, ok := o.rule.(scalarRule); ok {
				for name, want := range map[string]float64{"lr_max": run.LRMax, "weight_sum": run.WeightSum} {
					if got := *s.scalars()[name]; math.Abs(got-want) > 1e-15*want {
						t.Errorf("%s is %v, the reference has %v", name, got, want)
					}
				}
				warmup := Schedule{Name: Constant, Peak: 1e-2, Warmup: 4}
				for step, rate := range run.Rates {
					if got := warmup.LearningRate(int64(step)); math.Abs(got-rate) > 1e-17 {
						t.Errorf("step %d has learning rate %v, the reference %v", step, got, rate)
					}
				}
				average(t, o, true)
				for i, p := range parameters {
					compare(len(run.Rates), "average", p.Name, p.Weight.Floats(), run.Average[i])
				}
			}
			t.Logf("largest differences, in units of 2^-24 of the largest element: %v", worst)
		})
	}
	return seen
}

// eachOptimizer runs f for every optimizer.
func eachOptimizer(t *testing.T, f func(t *testing.T, name Name)) {
	for name := range specs {
		t.Run(string(name), func(t *testing.T) { f(t, name) })
	}
}

// runSteps does steps of an optimizer with gradients that depend on their number alone.
func runSteps(o *Optimizer, from, to int) {
	for step := from; step < to; step++ {
		draw := func() {
			rng := rand.New(rand.NewPCG(uint64(step), 5))
			for _, p := range o.parameters {
				for i := range p.Grad.Floats() {
					p.Grad.Floats()[i] = rng.Float32() - 0.5
				}
			}
		}
		draw()
		norm, err := o.GradientNorm(context.Background())
		if err := errors.Join(err, o.Step(context.Background(), 1e-3*float64(step+1),
			ClipFactor(norm, 1))); err != nil {
			panic(err) // one rank alone cannot fail
		}
		if o.CurvatureDue() {
			draw()
			o.UpdateCurvature(0.5, 90)
		}
	}
}

// Neither threads nor measuring change a bit, and what is measured is the change of the weights.
func TestOptimizersThreadsAndMeasure(t *testing.T) {
	t.Parallel()
	eachOptimizer(t, func(t *testing.T, name Name) {
		config := defaultOptimizer(name)
		if name == SophiaG {
			*config.HessianEvery = 1
		}
		var want [][]float32
		var ratios []ratio
		for _, threads := range []int{1, 2, 3} {
			o := mustOptimizer(t, config, 100, device(t, threads), optimizertest.Parameters(1))
			if r, ok := o.rule.(*muon); ok && threads > 1 {
				// one matrix as if it were a large one, which is orthogonalized on all workers
				r.large, r.small = r.small[:1], r.small[1:]
				var err error
				if r.largeScratch, err = newMuonScratch(o, r.large); err != nil {
					t.Fatal(err)
				}
			}
			runSteps(o, 0, 2)
			var before [][]float32
			for _, p := range o.parameters {
				before = append(before, slices.Clone(p.Weight.Floats()))
			}
			o.Measure(threads > 1)
			runSteps(o, 2, 3)
			if want == nil {
				for _, p := range o.parameters {
					want = append(want, slices.Clone(p.Weight.Floats()))
				}
				if u, w := o.Ratio(0); u != 0 || w != 0 {
					t.Errorf("a step that was not measured has ratio %v, %v", u, w)
				}
			}
			for i, p := range o.parameters {
				if !slices.Equal(p.Weight.Floats(), want[i]) {
					t.Fatalf("%d threads: %s differs", threads, p.Name)
				}
				if threads == 1 {
					continue
				}
				var got, expected ratio
				got.update, got.weight = o.Ratio(i)
				for j, w := range before[i] {
					d := float64(p.Weight.Floats()[j] - w)
					expected.update += d * d
					expected.weight += float64(w) * float64(w)
				}
				if math.Abs(got.update-math.Sqrt(expected.update)) > 1e-12*got.update ||
					math.Abs(got.weight-math.Sqrt(expected.weight)) > 1e-12*got.weight || got.update == 0 {
					t.Errorf("%s: measured %v, squares %v", p.Name, got, expected)
				}
				if threads == 2 {
					ratios = append(ratios, got)
				} else if got != ratios[i] {
					t.Errorf("%s: %v on 3 threads, %v on 2", p.Name, got, ratios[i])
				}
			}
			o.Measure(false)
			if runSteps(o, 3, 4); o.measured {
				t.Error("measured without being asked")
			}
		}
	})
}

// The sign of a zero gradient changes no weight that is not negative zero.
func TestSignOfZero(t *testing.T) {
	eachOptimizer(t, func(t *testing.T, name Name) {
		config := defaultOptimizer(name)
		if name == SophiaG {
			*config.HessianEvery = 1
		}
		var want [][]float32
		for _, sign := range []float64{1, -1} {
			o := mustOptimizer(t, config, 100, device(t, 1), optimizertest.Parameters(1))
			o.parameters[0].Weight.Floats()[1] = 0
			for step := range 4 {
				for i, p := range o.parameters {
					g := p.Grad.Floats()
					for j := range g {
						// never, only at first, or only later another number
						if g[j] = float32(math.Sin(float64(7*step + i + j))); j%4 == 1 || j%4 == 2+step/2 {
							g[j] = float32(math.Copysign(0, sign))
						}
					}
				}
				if err := o.Step(t.Context(), 1e-2, 0.5); err != nil {
					t.Fatal(err)
				}
				if o.CurvatureDue() {
					o.UpdateCurvature(0.5, 90)
				}
			}
			for i, p := range o.parameters {
				w := p.Weight.Floats()
				if sign > 0 {
					want = append(want, slices.Clone(w))
				} else if !slices.EqualFunc(w, want[i], func(a, b float32) bool {
					return math.Float32bits(a) == math.Float32bits(b)
				}) {
					t.Errorf("%s differs", p.Name)
				}
			}
		}
	})
}

func TestOptimizersAllocate(t *testing.T) {
	eachOptimizer(t, func(t *testing.T, name Name) {
		o := mustOptimizer(t, defaultOptimizer(name), 100, device(t, 2), optimizertest.Parameters(1))
		step := func() {
			norm := gradientNorm(t, o)
			update(t, o, 1e-3, ClipFactor(norm, 1))
			if name == SophiaG {
				o.UpdateCurvature(1, 100)
			}
			average(t, o, true)
			average(t, o, false)
		}
		for range 3 {
			step()
		}
		for _, measure := range []bool{false, true} {
			o.Measure(measure)
			if n := alloctest.Least(step); n > 0 {
				t.Errorf("%v allocations in a step, measured: %v", n, measure)
			}
		}
	})
}

// The memory in a summary equals the memory that an optimizer allocates.
func TestOptimizerBytes(t *testing.T) {
	for _, preset := range []string{"mula-nano", "mula-tiny", "mula-mini"} {
		c, err := moe.Preset(preset)
		if err != nil {
			t.Fatal(err)
		}
		if preset == "mula-mini" {
			// large matrices
			c.Layers, c.Experts, c.ExpertsPerToken, c.IntermediateSize, c.VocabSize, c.PadTokenID, c.EOSTokenID = 1, 1,
				1, 2048, 512, moe.NoToken, moe.NoToken
		}
		d := device(t, 2)
		m, err := moe.New(c, d)
		if err != nil {
			t.Fatal(err)
		}
		for name := range specs {
			o := mustOptimizer(t, defaultOptimizer(name), 1, d, m.Parameters())
			var got int64
			for _, tensors := range o.state {
				for _, s := range tensors {
					got += 4 * int64(s.Values.Elements())
				}
			}
			if r, ok := o.rule.(*muon); ok {
				scratch := []*muonScratch{r.largeScratch}
				for range len(r.scratch) {
					scratch = append(scratch, <-r.scratch)
				}
				for _, s := range scratch {
					if s != nil {
						got += 4 * int64(s.x.Elements()+s.a.Elements()+s.b.Elements())
					}
				}
			}
			want, _ := name.ScratchBytes(c, 2, 1)
			for _, tensor := range c.Tensors() {
				want += 4 * tensor.Elements() * int64(name.State(tensor.Name, tensor.Shape))
			}
			if got != want {
				t.Errorf("%s of %s takes %d bytes, the summary says %d", name, preset, got, want)
			}
			var made int64
			for _, x := range o.memory {
				made += 4 * int64(x.Elements())
			}
			if made < want || made > want+2*64*int64(len(o.parameters)) {
				// each tensor starts at a cache line
				t.Errorf("%s of %s takes %d bytes of the device, the summary says %d", name, preset, made, want)
			}
		}
	}
}

// BenchmarkOptimizers are the updates of the parameters of mula-tiny, in its tensors, on one
// thread.
func BenchmarkOptimizers(b *testing.B) {
	c, err := moe.Preset("mula-tiny")
	if err != nil {
		b.Fatal(err)
	}
	d := device(b, 1)
	m, err := moe.New(c, d)
	if err != nil {
		b.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(specs)) {
		b.Run(string(name), func(b *testing.B) {
			m.Init(1)
			o := mustOptimizer(b, defaultOptimizer(name), 1, d, m.Parameters())
			for _, p := range m.Parameters() {
				for i := range p.Grad.Floats() {
					p.Grad.Floats()[i] = float32(i%7) - 3
				}
			}
			for b.Loop() {
				update(b, o, 1e-3, 1)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(c.TotalParameters()), "ns/parameter")
		})
	}
}
