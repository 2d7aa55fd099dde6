package train

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"

	"mula/blend"
	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/estimate"
	"mula/train/evaluate"
	"mula/train/optimizer"
	"mula/train/record"
	"mula/xpu"
	"mula/xpu/cpu"
)

// With every optimizer, a run that is stopped and goes on, on another number of threads, is the run
// that was never stopped; and how often it is evaluated and saved changes nothing but the records.
func TestOptimizersResume(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	weights := map[string]optimizer.Name{}
	eachOptimizer(t, func(t *testing.T, name optimizer.Name, yaml string) {
		more := crashConfig + yaml + "steps: 5\nevaluate: {every: 2, samples: 2}\ncheckpoint: {every: 0}\n"
		unbroken := testConfig(t, plan, more)
		want := mustRun(t, unbroken, Options{})
		if other, ok := weights[want.Weights]; ok {
			t.Errorf("the weights equal the weights of %s", other)
		}
		weights[want.Weights] = name
		c := testConfig(t, plan, more)
		mustRun(t, c, stopAfter(2))
		c.Threads = 3
		if got := mustRun(t, c, Options{}); got.Weights != want.Weights || got.Resumed != checkpoint.Name(3) {
			t.Errorf("resumed: %+v, want %+v", got, want)
		}
		sameRun(t, "resumed", unbroken.Output, c.Output)
		c = testConfig(t, plan, crashConfig+yaml+"steps: 5\nevaluate: {every: 1, samples: 1}\ncheckpoint: {every: 1}\n")
		if name == optimizer.ScheduleFreeAdamW { // from the beginning, too, before there is an average
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
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := spikyPlan(t, t.TempDir(), "plan.json", nil, 10, 13)
	eachOptimizer(t, func(t *testing.T, _ optimizer.Name, yaml string) {
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
	var evaluated *record.Evaluation
	result := mustRun(t, c, Options{Progress: func(p Progress) { evaluated = p.Evaluation }})
	d := device(t, 1)
	m, err := moe.New(c.Model.Config, d)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Load(filesystem.OS{}, result.Checkpoint); err != nil {
		t.Fatal(err)
	}
	if got := checkpointtest.WeightsHash(m.Parameters()); got != result.Weights {
		t.Errorf("weights %s, want %s", got, result.Weights)
	}
	data, err := blend.Open(t.Context(), mustPlan(t, plan), blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	got, err := evaluate.Model(t.Context(), m, data, evaluate.Options{Samples: 3, BatchSize: 8})
	if err != nil || got.Loss != evaluated.Loss {
		t.Errorf("loss %v of the checkpoint, %v was recorded; error %v", got.Loss, evaluated.Loss, err)
	}
	f, err := safetensors.Open(filepath.Join(result.Checkpoint, optimizerFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p := m.Parameters()[0]
	y, z := make([]float32, p.Weight.Elements()), make([]float32, p.Weight.Elements())
	if err := errors.Join(f.Float32(y, p.Name+".y", 0), f.Float32(z, p.Name+".z", 0)); err != nil {
		t.Fatal(err)
	}
	var worst, apart float64
	for i, x := range p.Weight.Floats() {
		worst = max(worst, math.Abs(float64(y[i])-(0.9*float64(x)+0.1*float64(z[i]))))
		apart = max(apart, math.Abs(float64(y[i]-x)))
	}
	if worst > 1e-7 || apart < 1e-5 {
		t.Errorf("y is %g from 0.9x + 0.1z and %g from x", worst, apart)
	}
}

// The written fields of an optimizer and a schedule are read back unchanged, zeros included. Fields
// of other optimizers and schedules are not written: the record in a checkpoint of AdamW and a
// cosine has not changed.
func TestOptimizerFields(t *testing.T) {
	plan := mustPlan(t, makePlan(t, t.TempDir(), "plan.json", ""))
	for _, name := range optimizer.Names() {
		name := optimizer.Name(name)
		for _, schedule := range []optimizer.ScheduleName{optimizer.Cosine, optimizer.Linear, optimizer.WSD,
			optimizer.Constant} {
			if name == optimizer.ScheduleFreeAdamW && schedule != optimizer.Constant {
				continue
			}
			c := defaultConfig()
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
			if name != optimizer.AdamW || schedule != optimizer.Cosine {
				continue
			}
			var fields []string
			for _, field := range slices.Sorted(maps.Keys(c.identity())) {
				if strings.HasPrefix(field, "optimizer.") || strings.HasPrefix(field, "schedule.") {
					fields = append(fields, field)
				}
			}
			want := []string{"optimizer.betas", "optimizer.clip", "optimizer.clip_after_warmup", "optimizer.decay",
				"optimizer.eps", "optimizer.moments", "optimizer.name", "optimizer.weight_decay",
				"schedule.decay_steps", "schedule.learning_rate", "schedule.min_learning_rate", "schedule.name",
				"schedule.warmup_from", "schedule.warmup_steps"}
			if !slices.Equal(fields, want) {
				t.Errorf("fields on record %q, want %q", fields, want)
			}
		}
	}
}

// SophiaG estimates the curvature after every second update here, from targets that depend on seed
// and step. With one target fewer in a step, the estimate uses the same number of targets.
func TestSophiaGTargets(t *testing.T) {
	config := defaultOptimizer(optimizer.SophiaG)
	*config.HessianEvery = 2
	p := &moe.Parameter{Name: "p", Shape: []int{3}, Weight: xpu.Of(make([]float32, 3), 3),
		Grad: xpu.Of([]float32{1, -2, 0}, 3)}
	o := mustOptimizer(t, config, 100, device(t, 1), []*moe.Parameter{p})
	for step := range 4 {
		if err := o.Step(t.Context(), 1e-3, 1); err != nil {
			t.Fatal(err)
		}
		if o.CurvatureDue() != (step%2 == 1) {
			t.Errorf("after update %d the estimate is due: %v", step, o.CurvatureDue())
		}
	}
	seeds := map[uint64]bool{}
	for seed := range uint64(3) {
		for step := range int64(3) {
			seeds[stepSeed(seed, step)] = true
		}
	}
	if len(seeds) != 9 {
		t.Errorf("seeds of targets %v", seeds)
	}
	copy(p.Grad.Floats(), []float32{1, -2, 0})
	o.UpdateCurvature(0.5, 50) // (1−β₂)·(50/100)·(0.5·g)²
	for i, want := range []float64{0.01 * 0.5 * 0.25, 0.01 * 0.5, 0} {
		if got := float64(o.Saved(0)[1].Values.Floats()[i]); math.Abs(got-want) > 1e-9 {
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

// optimizerYAML returns the necessary lines of train.yaml for an optimizer.
func optimizerYAML(name optimizer.Name) string {
	fields := map[optimizer.Name]string{optimizer.SophiaG: ", hessian_every: 2"}[name]
	schedule := "{learning_rate: 3e-3, warmup_steps: 2}"
	if name == optimizer.ScheduleFreeAdamW {
		schedule = "{name: constant, learning_rate: 3e-3, warmup_steps: 2}"
	}
	return fmt.Sprintf("optimizer: {name: %s, weight_decay: 0.1%s}\nschedule: %s\n", name, fields, schedule)
}

func device(t testing.TB, threads int) *cpu.Device {
	d := cpu.New(threads, xpu.FP32)
	t.Cleanup(d.Close)
	return d
}

func mustOptimizer(t testing.TB, config optimizer.Config, targets int64, d xpu.Device,
	parameters []*moe.Parameter) *optimizer.Optimizer {
	t.Helper()
	o, err := optimizer.New(config, targets, d, parameters)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// defaultOptimizer is the configuration of an optimizer with its defaults.
func defaultOptimizer(name optimizer.Name) optimizer.Config {
	c := optimizer.Config{Name: name, Clip: 1}
	c.Resolve()
	return c
}

// eachOptimizer runs f with the lines of train.yaml that each optimizer needs.
func eachOptimizer(t *testing.T, f func(t *testing.T, name optimizer.Name, yaml string)) {
	for _, name := range optimizer.Names() {
		name := optimizer.Name(name)
		t.Run(string(name), func(t *testing.T) { f(t, name, optimizerYAML(name)) })
	}
}

// layouts are layouts of four ranks with one stage.
var layouts = []LayoutConfig{{DP: 4, EP: 1, PP: 1}, {DP: 2, EP: 2, PP: 1}, {DP: 1, EP: 4, PP: 1}}

var schemes = []estimate.Scheme{estimate.Unsharded, estimate.SO, estimate.EPSO}
