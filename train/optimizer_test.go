package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"

	"mula/blend"
	"mula/internal/alloctest"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
)

func device(t testing.TB, threads int) *cpu.Device {
	d := cpu.New(threads, xpu.FP32)
	t.Cleanup(d.Close)
	return d
}

func mustOptimizer(t testing.TB, config OptimizerConfig, targets int64, d xpu.Device,
	parameters []*moe.Parameter) *Optimizer {
	t.Helper()
	o, err := NewOptimizer(config, targets, d, parameters)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// defaultOptimizer is the configuration of an optimizer with its defaults.
func defaultOptimizer(name OptimizerName) OptimizerConfig {
	c := OptimizerConfig{Name: name, Clip: 1}
	c.resolve()
	return c
}

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
	config := OptimizerConfig{Name: AdamW, Betas: golden.Config.Betas, Epsilon: &golden.Config.Eps,
		WeightDecay: &golden.Config.WeightDecay, Decay: DecayTorch}
	var parameters []*moe.Parameter
	for _, w := range golden.Initial {
		parameters = append(parameters, &moe.Parameter{Weight: toFloat32(w), Grad: make([]float32, len(w))})
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
			copy(p.Grad, toFloat32(g.Gradients[i]))
		}
		norm := gradientNorm(t, o)
		if math.Abs(norm-g.Norm) > 1e-6*g.Norm {
			t.Errorf("step %d: gradient norm %v, torch has %v", step, norm, g.Norm)
		}
		update(t, o, g.LR, clipFactor(norm, 1))
		for i, p := range parameters {
			compare(step, "weight", p.Weight, g.Weights[i])
			compare(step, "exp_avg", o.state[i][0].values, g.ExpAvg[i])
			compare(step, "exp_avg_sq", o.state[i][1].values, g.ExpAvgSq[i])
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
		parameter := &moe.Parameter{Weight: make([]float32, n), Grad: make([]float32, n)}
		p, other, m, v := make([]float64, n), make([]float64, n), make([]float64, n), make([]float64, n)
		for i := range p {
			parameter.Weight[i] = float32(rng.NormFloat64())
			p[i] = float64(parameter.Weight[i])
			other[i] = p[i]
		}
		o := mustOptimizer(t, config, 1, device(t, 2), []*moe.Parameter{parameter})
		for step := 1; step <= steps; step++ {
			for i := range parameter.Grad {
				parameter.Grad[i] = float32(rng.NormFloat64())
				g := float64(parameter.Grad[i]) * 0.5
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
			p := &moe.Parameter{Weight: make([]float32, n), Grad: make([]float32, n)}
			for i := range n {
				p.Weight[i], p.Grad[i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())
			}
			parameters = append(parameters, p)
		}
		o := mustOptimizer(t, defaultOptimizer(AdamW), 1, device(t, threads), parameters)
		norm := gradientNorm(t, o)
		update(t, o, 1e-3, clipFactor(norm, 1))
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
					t.Fatalf("%d threads: tensor %d, element %d is %v, want %v", threads, i, j, weights[i][j],
						first[i][j])
				}
			}
		}
	}
}

func TestGradientNorm(t *testing.T) {
	p := &moe.Parameter{Weight: make([]float32, 2*blockSize), Grad: make([]float32, 2*blockSize)}
	o := mustOptimizer(t, defaultOptimizer(AdamW), 1, device(t, 2), []*moe.Parameter{p})
	p.Grad[0], p.Grad[2*blockSize-1] = 3, -4
	if got := gradientNorm(t, o); got != 5 {
		t.Errorf("norm %v, want 5", got)
	}
	p.Grad[7] = math.MaxFloat32 // its square is beyond float32
	if got := gradientNorm(t, o); math.IsInf(got, 0) || got < math.MaxFloat32 {
		t.Errorf("norm %v of a large but finite gradient", got)
	}
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		p.Grad[blockSize+1] = float32(bad)
		if got := gradientNorm(t, o); !math.IsNaN(got) && !math.IsInf(got, 0) {
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

// A goldenRun is a case of testdata/optimizers.json or groups.json, which testdata/optimizers.py
// made with the reference implementations.
type goldenRun struct {
	Name      OptimizerName
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
	for name := range optimizerSpecs {
		if !seen[name] && name != AdamW { // which has a file of its own
			t.Errorf("there is no golden run of %s", name)
		}
	}
}

// The same with groups of parameters, which the reference implementations have as param_groups.
func TestGroupsGolden(t *testing.T) {
	seen := compareGolden(t, "testdata/groups.json")
	for name := range optimizerSpecs {
		if !seen[name] {
			t.Errorf("there is no golden run of %s", name)
		}
	}
}

// compareGolden runs the cases of a golden file, and returns whose they are.
func compareGolden(t *testing.T, path string) (seen map[OptimizerName]bool) {
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
	seen = map[OptimizerName]bool{}
	for number, run := range golden.Cases {
		t.Run(fmt.Sprint(number, " ", run.Name), func(t *testing.T) {
			seen[run.Name] = true
			config := OptimizerConfig{Name: run.Name}
			text, err := json.Marshal(run.Config) // YAML is a superset
			if err != nil {
				t.Fatal(err)
			}
			if err := yaml.Unmarshal(text, &config); err != nil {
				t.Fatal(err)
			}
			config.resolve()
			var parameters []*moe.Parameter
			for i, w := range golden.Initial {
				parameters = append(parameters, &moe.Parameter{Name: golden.Names[i], Shape: golden.Shapes[i],
					Weight: toFloat32(w), Grad: make([]float32, len(w))})
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
					copy(p.Grad, toFloat32(golden.Gradients[step][i]))
				}
				update(t, o, rate, 1)
				for i, p := range parameters {
					compare(step, "weight", p.Name, p.Weight, run.Weights[step][i])
				}
				if o.CurvatureDue() {
					for i, p := range parameters {
						copy(p.Grad, toFloat32(golden.Sampled[step][i]))
					}
					o.UpdateCurvature(1, golden.Targets)
				}
			}
			for i, p := range parameters {
				for _, s := range o.state[i] {
					compare(len(run.Rates), s.name, p.Name, s.values, run.State[s.name][i])
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
					compare(len(run.Rates), "average", p.Name, p.Weight, run.Average[i])
				}
			}
			t.Logf("largest differences, in units of 2^-24 of the largest element: %v", worst)
		})
	}
	return seen
}

// eachOptimizer runs f with the necessary lines of train.yaml for every optimizer.
func eachOptimizer(t *testing.T, f func(t *testing.T, name OptimizerName, yaml string)) {
	for name := range optimizerSpecs {
		t.Run(string(name), func(t *testing.T) { f(t, name, optimizerYAML(name)) })
	}
}

// optimizerYAML returns the necessary lines of train.yaml for an optimizer.
func optimizerYAML(name OptimizerName) string {
	fields := map[OptimizerName]string{SophiaG: ", hessian_every: 2"}[name]
	schedule := "{learning_rate: 3e-3, warmup_steps: 2}"
	if name == ScheduleFreeAdamW {
		schedule = "{name: constant, learning_rate: 3e-3, warmup_steps: 2}"
	}
	return fmt.Sprintf("optimizer: {name: %s, weight_decay: 0.1%s}\nschedule: %s\n", name, fields, schedule)
}

// With every optimizer, a run that is stopped and goes on, on another number of threads, is the run
// that was never stopped; and how often it is evaluated and saved changes nothing but the records.
func TestOptimizersResume(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	weights := map[string]OptimizerName{}
	eachOptimizer(t, func(t *testing.T, name OptimizerName, yaml string) {
		more := crashConfig + yaml + "steps: 5\nevaluate: {every: 2, samples: 2}\ncheckpoint: {every: 0}\n"
		unbroken := testConfig(t, plan, more)
		want := mustRun(t, unbroken, Options{})
		if other, ok := weights[want.Weights]; ok {
			t.Errorf("the weights are those of %s", other)
		}
		weights[want.Weights] = name
		c := testConfig(t, plan, more)
		mustRun(t, c, stopAfter(2))
		c.Threads = 3
		if got := mustRun(t, c, Options{}); got.Weights != want.Weights || got.Resumed != checkpointName(3) {
			t.Errorf("resumed: %+v, want %+v", got, want)
		}
		sameRun(t, "resumed", unbroken.Output, c.Output)
		c = testConfig(t, plan, crashConfig+yaml+"steps: 5\nevaluate: {every: 1, samples: 1}\ncheckpoint: {every: 1}\n")
		if name == ScheduleFreeAdamW { // from the beginning, too, before there is an average
			stop := make(chan struct{})
			close(stop)
			mustRun(t, c, Options{Stop: stop})
		}
		if got := mustRun(t, c, Options{}); got.Weights != want.Weights || got.LastLoss != want.LastLoss {
			t.Errorf("evaluated and saved after every step: %+v, want %+v", got, want)
		}
	})
}

// The same with everything at once: in bf16, in uneven micro-batches, killed after the run has gone
// back from a spike, and started again on another number of threads without recomputation.
func TestOptimizersKill(t *testing.T) {
	t.Parallel()
	plan := spikyPlan(t, t.TempDir(), "plan.json", nil, 10, 13)
	eachOptimizer(t, func(t *testing.T, _ OptimizerName, yaml string) {
		unbroken := testConfig(t, plan, crashConfig+strings.Replace(yaml, "3e-3", "2e-2",
			1)+"steps: 16\nmicro_batch_size: 3\ncheckpoint: {every: 8}\nprecision: bf16\nrecompute: layers\n"+
			"spikes: {action: rollback, window: 4, sigma: 4, skip_steps: 2}\n")
		mustRun(t, unbroken, Options{})
		if len(linesWith(t, unbroken.Output, "rollback")) == 0 {
			t.Error("no spike")
		}
		c := unbroken
		c.Output = filepath.Join(t.TempDir(), "run")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		n := 0
		if _, err := Run(ctx, c, Options{Progress: func(Progress) {
			if n++; n == 14 {
				cancel()
			}
		}}); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		c.Threads, c.Recompute = 3, moe.RecomputeNone
		mustRun(t, c, Options{})
		sameRun(t, "killed", unbroken.Output, c.Output)
	})
}

// A checkpoint of schedule-free AdamW holds the average as the model, and what it was evaluated
// with is that.
func TestScheduleFreeCheckpoint(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan,
		"optimizer: {name: schedule_free_adamw}\nschedule: {name: constant, learning_rate: 1e-2, warmup_steps: "+
			"2}\nevaluate: {every: 8, samples: 3}\n")
	var evaluated *Evaluation
	result := mustRun(t, c, Options{Progress: func(p Progress) { evaluated = p.Evaluation }})
	d := device(t, 1)
	m, err := moe.New(c.Model.Config, d)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Load(result.Checkpoint); err != nil {
		t.Fatal(err)
	}
	if got := WeightsHash(m.Parameters()); got != result.Weights {
		t.Errorf("weights %s, want %s", got, result.Weights)
	}
	data, err := blend.Open(t.Context(), mustPlan(t, plan), blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	got, err := Evaluate(t.Context(), m, data, EvaluateOptions{Samples: 3, BatchSize: 8})
	if err != nil || got.Loss != evaluated.Loss {
		t.Errorf("loss %v of the checkpoint, %v was recorded; error %v", got.Loss, evaluated.Loss, err)
	}
	f, err := safetensors.Open(filepath.Join(result.Checkpoint, optimizerFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p := m.Parameters()[0]
	y, z := make([]float32, len(p.Weight)), make([]float32, len(p.Weight))
	if err := errors.Join(f.Float32(y, p.Name+".y", 0), f.Float32(z, p.Name+".z", 0)); err != nil {
		t.Fatal(err)
	}
	var worst, apart float64
	for i, x := range p.Weight {
		worst = max(worst, math.Abs(float64(y[i])-(0.9*float64(x)+0.1*float64(z[i]))))
		apart = max(apart, math.Abs(float64(y[i]-x)))
	}
	if worst > 1e-7 || apart < 1e-5 {
		t.Errorf("y is %g from 0.9x + 0.1z and %g from x", worst, apart)
	}
}

// testParameters are tensors of all kinds of names that Muon distinguishes, of sizes that are cut
// into blocks in every way.
func testParameters(seed uint64) []*moe.Parameter {
	rng := rand.New(rand.NewPCG(seed, 4))
	var parameters []*moe.Parameter
	for _, p := range []moe.Parameter{
		{Name: "model.embed_tokens.weight", Shape: []int{17, 9}},
		{Name: "model.layers.0.self_attn.q_proj.weight", Shape: []int{260, 256}},
		{Name: "model.layers.0.self_attn.o_proj.weight", Shape: []int{64, 1030}},
		{Name: "model.layers.0.mlp.gate.weight", Shape: []int{4, 9}},
		{Name: "model.layers.0.mlp.experts.0.up_proj.weight", Shape: []int{70, 30}},
		{Name: "model.layers.0.mlp.experts.1.down_proj.weight", Shape: []int{30, 70}},
		{Name: "model.norm.weight", Shape: []int{measureSize + 1}},
		{Name: "lm_head.weight", Shape: []int{2, blockSize}},
	} {
		n := 1
		for _, d := range p.Shape {
			n *= d
		}
		p.Weight, p.Grad = make([]float32, n), make([]float32, n)
		for i := range p.Weight {
			p.Weight[i] = float32(rng.NormFloat64())
		}
		parameters = append(parameters, &p)
	}
	return parameters
}

// runSteps does steps of an optimizer with gradients that depend on their number alone.
func runSteps(o *Optimizer, from, to int) {
	for step := from; step < to; step++ {
		draw := func() {
			rng := rand.New(rand.NewPCG(uint64(step), 5))
			for _, p := range o.parameters {
				for i := range p.Grad {
					p.Grad[i] = rng.Float32() - 0.5
				}
			}
		}
		draw()
		norm, err := o.GradientNorm(context.Background())
		if err := errors.Join(err, o.Step(context.Background(), 1e-3*float64(step+1),
			clipFactor(norm, 1))); err != nil {
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
	eachOptimizer(t, func(t *testing.T, name OptimizerName, _ string) {
		config := defaultOptimizer(name)
		if name == SophiaG {
			*config.HessianEvery = 1
		}
		var want [][]float32
		var ratios []ratio
		for _, threads := range []int{1, 2, 3} {
			o := mustOptimizer(t, config, 100, device(t, threads), testParameters(1))
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
				before = append(before, slices.Clone(p.Weight))
			}
			o.Measure(threads > 1)
			runSteps(o, 2, 3)
			if want == nil {
				for _, p := range o.parameters {
					want = append(want, slices.Clone(p.Weight))
				}
				if u, w := o.Ratio(0); u != 0 || w != 0 {
					t.Errorf("a step that was not measured has ratio %v, %v", u, w)
				}
			}
			for i, p := range o.parameters {
				if !slices.Equal(p.Weight, want[i]) {
					t.Fatalf("%d threads: %s differs", threads, p.Name)
				}
				if threads == 1 {
					continue
				}
				var got, expected ratio
				got.update, got.weight = o.Ratio(i)
				for j, w := range before[i] {
					d := float64(p.Weight[j] - w)
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

// savedNames are the first four tensors of optimizer.safetensors, which older checkpoints have,
// too.
var savedNames = map[OptimizerName][]string{
	AdamW: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.exp_avg_sq",
		"model.layers.0.self_attn.q_proj.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.exp_avg_sq"},
	SophiaG: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.hessian",
		"model.layers.0.self_attn.q_proj.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.hessian"},
	Muon: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.exp_avg_sq",
		"model.layers.0.self_attn.q_proj.weight.momentum_buffer",
		"model.layers.0.self_attn.o_proj.weight.momentum_buffer"},
	Lamb: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.exp_avg_sq",
		"model.layers.0.self_attn.q_proj.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.exp_avg_sq"},
	ADOPT: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.exp_avg_sq",
		"model.layers.0.self_attn.q_proj.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.exp_avg_sq"},
	Lion: {"model.embed_tokens.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.exp_avg",
		"model.layers.0.self_attn.o_proj.weight.exp_avg", "model.layers.0.mlp.gate.weight.exp_avg"},
	ScheduleFreeAdamW: {"model.embed_tokens.weight.y", "model.embed_tokens.weight.z",
		"model.embed_tokens.weight.exp_avg_sq", "model.layers.0.self_attn.q_proj.weight.y"},
}

// The written fields of an optimizer and a schedule are read back unchanged, zeros included. Fields
// of other optimizers and schedules are not written: the record in a checkpoint of AdamW and a
// cosine has not changed.
func TestOptimizerFields(t *testing.T) {
	plan := mustPlan(t, makePlan(t, t.TempDir(), "plan.json", ""))
	for name := range optimizerSpecs {
		for schedule := range scheduleFields {
			if name == ScheduleFreeAdamW && schedule != Constant {
				continue
			}
			c := DefaultConfig()
			c.Optimizer.Name, c.Schedule.Name = name, schedule
			c, err := c.resolve(plan)
			if err != nil {
				t.Fatal(err)
			}
			text, err := yaml.Marshal(c)
			if err != nil {
				t.Fatal(err)
			}
			again, err := ParseConfig(text, "train.yaml")
			if err != nil {
				t.Fatalf("%s, %s: %v in\n%s", name, schedule, err, text)
			}
			if diff := cmp.Diff(c.Optimizer, again.Optimizer); diff != "" {
				t.Errorf("%s (-written +read):\n%s", name, diff)
			}
			if diff := cmp.Diff(c.Schedule, again.Schedule); diff != "" {
				t.Errorf("%s (-written +read):\n%s", schedule, diff)
			}
			*c.Optimizer.WeightDecay = 7
			if other := defaultOptimizer(name); *other.WeightDecay == 7 {
				t.Errorf("%s: a configuration has changed the defaults", name)
			}
			if name != AdamW || schedule != Cosine {
				continue
			}
			var fields []string
			for _, field := range sortedKeys(c.identity()) {
				if strings.HasPrefix(field, "optimizer.") || strings.HasPrefix(field, "schedule.") {
					fields = append(fields, field)
				}
			}
			want := []string{"optimizer.betas", "optimizer.clip", "optimizer.clip_after_warmup", "optimizer.decay",
				"optimizer.eps", "optimizer.name", "optimizer.weight_decay",
				"schedule.decay_steps", "schedule.learning_rate", "schedule.min_learning_rate", "schedule.name",
				"schedule.warmup_from", "schedule.warmup_steps"}
			if !slices.Equal(fields, want) {
				t.Errorf("fields on record %q, want %q", fields, want)
			}
		}
	}
}

// The written state is read back to the same bits. The state of another optimizer or model is
// refused.
func TestOptimizersState(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := func(name OptimizerName) string { return filepath.Join(dir, string(name)) }
	saved := func(name OptimizerName) string { return filepath.Join(path(name), checkpointName(3)) }
	eachOptimizer(t, func(t *testing.T, name OptimizerName, _ string) {
		d := device(t, 2)
		o := mustOptimizer(t, defaultOptimizer(name), 100, d, testParameters(1))
		runSteps(o, 0, 3)
		s := testShare(t, o)
		if err := saveCheckpoint(t.Context(), comm.NewSingle(), path(name), &State{Step: 3}, s, nil); err != nil {
			t.Fatal(err)
		}
		ranges, _, err := s.written()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, r := range ranges[:4] {
			names = append(names, s.rangeName(r))
		}
		if want := savedNames[name]; !slices.Equal(names, want) {
			t.Errorf("tensors %q, want %q", names, want)
		}
		again := mustOptimizer(t, defaultOptimizer(name), 100, d, testParameters(2))
		for i, p := range again.parameters {
			copy(p.Weight, o.parameters[i].Weight)
		}
		if err := testShare(t, again).load(t.Context(), comm.NewSingle(), saved(name)); err != nil {
			t.Fatal(err)
		}
		again.Updates = o.Updates
		runSteps(o, 3, 5)
		runSteps(again, 3, 5)
		for i, p := range again.parameters {
			if !slices.Equal(p.Weight, o.parameters[i].Weight) {
				t.Errorf("%s differs after two more steps", p.Name)
			}
		}
		fewer := mustOptimizer(t, defaultOptimizer(name), 100, d, testParameters(1)[1:])
		if err := testShare(t, fewer).load(t.Context(), comm.NewSingle(), saved(name)); err == nil ||
			!strings.Contains(err.Error(), path(name)) ||
			!strings.Contains(err.Error(), "does not belong to this model and optimizer") {
			t.Errorf("state of another model: %v", err)
		}
	})
	d := device(t, 1)
	for name := range optimizerSpecs {
		for other := range optimizerSpecs {
			same := name == other || slices.Contains([]OptimizerName{AdamW, Lamb, ADOPT}, name) &&
				slices.Contains([]OptimizerName{AdamW, Lamb, ADOPT}, other)
			o := mustOptimizer(t, defaultOptimizer(name), 100, d, testParameters(1))
			if err := testShare(t, o).load(t.Context(), comm.NewSingle(), saved(other)); (err == nil) != same {
				t.Errorf("%s reads the state of %s: %v", name, other, err)
			}
		}
	}
	// Numbers that are missing or damaged.
	o := mustOptimizer(t, defaultOptimizer(ScheduleFreeAdamW), 100, d, testParameters(1))
	for _, text := range []map[string]string{nil, {"lr_max": "1"}, {"lr_max": "1", "weight_sum": "x"},
		{"lr_max": "NaN", "weight_sum": "1"}} {
		if err := o.setMetadata(text); err == nil {
			t.Errorf("metadata %v is accepted", text)
		}
	}
}

func TestOptimizersAllocate(t *testing.T) {
	eachOptimizer(t, func(t *testing.T, name OptimizerName, _ string) {
		o := mustOptimizer(t, defaultOptimizer(name), 100, device(t, 2), testParameters(1))
		step := func() {
			norm := gradientNorm(t, o)
			update(t, o, 1e-3, clipFactor(norm, 1))
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
		for name := range optimizerSpecs {
			o := mustOptimizer(t, defaultOptimizer(name), 1, d, m.Parameters())
			var got int64
			for _, tensors := range o.state {
				for _, s := range tensors {
					got += 4 * int64(len(s.values))
				}
			}
			if r, ok := o.rule.(*muon); ok {
				scratch := []*muonScratch{r.largeScratch}
				for range len(r.scratch) {
					scratch = append(scratch, <-r.scratch)
				}
				for _, s := range scratch {
					if s != nil {
						got += 4 * int64(len(s.x)+len(s.a)+len(s.b))
					}
				}
			}
			config := DefaultConfig()
			config.Model.Config, config.Optimizer.Name, config.Threads = c, name, 2
			need := config.memory(1, 16)
			onDevice := need.Optimizer - need.HostOnly
			if want := need.Optimizer; got != want {
				t.Errorf("%s of %s takes %d bytes, the summary says %d", name, preset, got, want)
			}
			var made int64
			for _, x := range o.memory {
				made += 4 * int64(len(x))
			}
			if made < onDevice || made > onDevice+2*64*int64(len(o.parameters)) {
				// each tensor starts at a cache line
				t.Errorf("%s of %s takes %d bytes of the device, the summary says %d", name, preset, made, onDevice)
			}
		}
	}
}

// SophiaG estimates the curvature after every second update here, from targets that depend on seed
// and step. With one target fewer in a step, the estimate uses the same number of targets.
func TestSophiaGTargets(t *testing.T) {
	config := defaultOptimizer(SophiaG)
	*config.HessianEvery = 2
	p := &moe.Parameter{Name: "p", Shape: []int{3}, Weight: make([]float32, 3), Grad: []float32{1, -2, 0}}
	o := mustOptimizer(t, config, 100, device(t, 1), []*moe.Parameter{p})
	for step := range 4 {
		if update(t, o, 1e-3, 1); o.CurvatureDue() != (step%2 == 1) {
			t.Errorf("after update %d the estimate is due: %v", step, o.CurvatureDue())
		}
	}
	seeds := map[uint64]bool{}
	for seed := range uint64(3) {
		for step := range int64(3) {
			seeds[curvatureSeed(seed, step)] = true
		}
	}
	if len(seeds) != 9 {
		t.Errorf("seeds of targets %v", seeds)
	}
	p.Grad[0], p.Grad[1], p.Grad[2] = 1, -2, 0
	o.UpdateCurvature(0.5, 50) // (1−β₂)·(50/100)·(0.5·g)²
	for i, want := range []float64{0.01 * 0.5 * 0.25, 0.01 * 0.5, 0} {
		if got := float64(o.state[0][1].values[i]); math.Abs(got-want) > 1e-9 {
			t.Errorf("hessian[%d] is %v, want %v", i, got, want)
		}
	}
}

// However a step is cut into micro-batches, the estimate of the curvature is of the same drawn
// targets; with another seed it is of others.
func TestSophiaGMicroBatches(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	hessian := func(more string) []float32 {
		c := testConfig(t, plan,
			crashConfig+"steps: 2\noptimizer: {name: sophiag, hessian_every: 2}\nschedule: {learning_rate: "+
				"1e-6}\naux_loss: {form: none}\nevaluate: {every: 0}\n"+more)
		f, err := safetensors.Open(filepath.Join(mustRun(t, c, Options{}).Checkpoint, optimizerFile))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		const name = "lm_head.weight.hessian"
		tensor, _ := f.Tensor(name)
		values := make([]float32, tensor.Elements())
		if err := f.Float32(values, name, 0); err != nil {
			t.Fatal(err)
		}
		return values
	}
	distance := func(x, y []float32) float64 { // beside the norm of x
		var d, n float64
		for i := range x {
			d += float64(x[i]-y[i]) * float64(x[i]-y[i])
			n += float64(x[i]) * float64(x[i])
		}
		return math.Sqrt(d / n)
	}
	want := hessian("micro_batch_size: 8\n")
	for _, micro := range []int{3, 1} {
		if d := distance(want, hessian(fmt.Sprintf("micro_batch_size: %d\n", micro))); !(d < 1e-3) {
			t.Errorf("micro-batches of %d: the estimate is %g away", micro, d)
		}
	}
	if d := distance(want, hessian("seed: 1\n")); d < 0.1 {
		t.Errorf("another seed: the estimate is only %g away", d)
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
	for _, name := range sortedKeys(optimizerSpecs) {
		b.Run(string(name), func(b *testing.B) {
			m.Init(1)
			o := mustOptimizer(b, defaultOptimizer(name), 1, d, m.Parameters())
			for _, p := range m.Parameters() {
				for i := range p.Grad {
					p.Grad[i] = float32(i%7) - 3
				}
			}
			for b.Loop() {
				update(b, o, 1e-3, 1)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(c.TotalParameters()), "ns/parameter")
		})
	}
}
