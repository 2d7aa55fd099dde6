package checkpoint

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/optimizer"
	"mula/train/optimizer/optimizertest"
	"mula/xpu"
	"mula/xpu/comm"
)

// savedNames are the first four tensors of optimizer.safetensors, which older checkpoints have,
// too.
var savedNames = map[optimizer.Name][]string{
	optimizer.AdamW: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.exp_avg_sq",
		"model.layers.0.self_attn.q_proj.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.exp_avg_sq"},
	optimizer.SophiaG: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.hessian",
		"model.layers.0.self_attn.q_proj.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.hessian"},
	optimizer.Muon: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.exp_avg_sq",
		"model.layers.0.self_attn.q_proj.weight.momentum_buffer",
		"model.layers.0.self_attn.o_proj.weight.momentum_buffer"},
	optimizer.Lamb: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.exp_avg_sq",
		"model.layers.0.self_attn.q_proj.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.exp_avg_sq"},
	optimizer.ADOPT: {"model.embed_tokens.weight.exp_avg", "model.embed_tokens.weight.exp_avg_sq",
		"model.layers.0.self_attn.q_proj.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.exp_avg_sq"},
	optimizer.Lion: {"model.embed_tokens.weight.exp_avg", "model.layers.0.self_attn.q_proj.weight.exp_avg",
		"model.layers.0.self_attn.o_proj.weight.exp_avg", "model.layers.0.mlp.gate.weight.exp_avg"},
	optimizer.ScheduleFreeAdamW: {"model.embed_tokens.weight.y", "model.embed_tokens.weight.z",
		"model.embed_tokens.weight.exp_avg_sq", "model.layers.0.self_attn.q_proj.weight.y"},
}

// The written state is read back to the same bits. The state of another optimizer or model is
// refused.
func TestOptimizersState(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	path := func(name optimizer.Name) string { return filepath.Join(dir, string(name)) }
	saved := func(name optimizer.Name) string { return filepath.Join(path(name), Name(3)) }
	for _, name := range optimizer.Names() {
		name := optimizer.Name(name)
		d := checkpointtest.Device(t, 2)
		o := newOptimizer(t, name, d, optimizertest.Parameters(1))
		runSteps(t, o, 0, 3)
		s := testShard(t, d, o)
		if err := Save(t.Context(), comm.NewSingle(), path(name), &State{Step: 3}, s, Options{}); err != nil {
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
		again := newOptimizer(t, name, d, optimizertest.Parameters(2))
		for i, p := range again.Parameters() {
			copy(p.Weight.Floats(), o.Parameters()[i].Weight.Floats())
		}
		if err := testShard(t, d, again).Load(t.Context(), comm.NewSingle(), listed(t, saved(name))); err != nil {
			t.Fatal(err)
		}
		again.Updates = o.Updates
		runSteps(t, o, 3, 5)
		runSteps(t, again, 3, 5)
		for i, p := range again.Parameters() {
			if !slices.Equal(p.Weight.Floats(), o.Parameters()[i].Weight.Floats()) {
				t.Errorf("%s differs after two more steps", p.Name)
			}
		}
		fewer := newOptimizer(t, name, d, optimizertest.Parameters(1)[1:])
		if err := testShard(t, d, fewer).Load(t.Context(), comm.NewSingle(), listed(t, saved(name))); err == nil ||
			!strings.Contains(err.Error(), path(name)) ||
			!strings.Contains(err.Error(), "does not belong to this model and optimizer") {
			t.Errorf("state of another model: %v", err)
		}
	}
	d := checkpointtest.Device(t, 1)
	for _, name := range optimizer.Names() {
		name := optimizer.Name(name)
		for _, other := range optimizer.Names() {
			other := optimizer.Name(other)
			same := name == other ||
				slices.Contains([]optimizer.Name{optimizer.AdamW, optimizer.Lamb, optimizer.ADOPT}, name) &&
					slices.Contains([]optimizer.Name{optimizer.AdamW, optimizer.Lamb, optimizer.ADOPT}, other)
			o := newOptimizer(t, name, d, optimizertest.Parameters(1))
			err := testShard(t, d, o).Load(t.Context(), comm.NewSingle(), listed(t, saved(other)))
			if (err == nil) != same {
				t.Errorf("%s reads the state of %s: %v", name, other, err)
			}
		}
	}
	// Numbers that are missing or damaged.
	o := newOptimizer(t, optimizer.ScheduleFreeAdamW, d, optimizertest.Parameters(1))
	for _, text := range []map[string]string{nil, {"lr_max": "1"}, {"lr_max": "1", "weight_sum": "x"},
		{"lr_max": "NaN", "weight_sum": "1"}} {
		if err := o.SetMetadata(text); err == nil {
			t.Errorf("metadata %v is accepted", text)
		}
	}
}

// runSteps does the steps [from, to) with gradients that depend only on the number of the step.
func runSteps(t testing.TB, o *optimizer.Optimizer, from, to int) {
	t.Helper()
	for step := from; step < to; step++ {
		rng := rand.New(rand.NewPCG(uint64(step), 5))
		for _, p := range o.Parameters() {
			for i := range p.Grad.Floats() {
				p.Grad.Floats()[i] = rng.Float32() - 0.5
			}
		}
		if err := o.Step(t.Context(), 1e-3*float64(step+1), 0.5); err != nil {
			t.Fatal(err)
		}
		if o.CurvatureDue() {
			o.UpdateCurvature(0.5, 90)
		}
	}
}

// newOptimizer returns an optimizer with its default settings.
func newOptimizer(t testing.TB, name optimizer.Name, d xpu.Device, parameters []*moe.Parameter) *optimizer.Optimizer {
	t.Helper()
	c := optimizer.Config{Name: name, Clip: 1}
	c.Resolve()
	o, err := optimizer.New(c, 100, d, parameters)
	if err != nil {
		t.Fatal(err)
	}
	return o
}
