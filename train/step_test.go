package train

import (
	"context"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"mula/internal/alloctest"
	"mula/internal/longtest"
	"mula/moe"
	"mula/train/checkpoint"
	"mula/train/optimizer"
)

// A step in its steady state, forward, backward and update, allocates nothing, with and without
// recomputation. Run itself allocates the record of a step.
func TestStepsDoNotAllocate(t *testing.T) {
	c, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	micro := moe.Batch{Tokens: make([]uint32, 2*33), Rows: 2, SequenceLength: 32}
	for i := range micro.Tokens {
		micro.Tokens[i] = uint32(i*i) % uint32(c.VocabSize)
	}
	targets := int64(2 * micro.Rows * micro.SequenceLength)
	for _, recompute := range []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers} {
		d := device(t, 2)
		m, err := moe.New(c, d)
		if err != nil {
			t.Fatal(err)
		}
		m.SetRecompute(recompute)
		m.Init(1)
		o := mustOptimizer(t, defaultOptimizer(optimizer.AdamW), targets, d, m.Parameters())
		step := func() {
			m.ZeroGradients()
			for range 2 {
				if _, err := m.Backward(t.Context(), micro, moe.BackwardOptions{Targets: targets,
					Loss: moe.LossOptions{Aux: moe.AuxHF, AuxCoefficient: 0.01}}); err != nil {
					t.Fatal(err)
				}
			}
			norm, err := o.GradientNorm(t.Context())
			if err == nil {
				err = o.Step(t.Context(), 1e-3, optimizer.ClipFactor(norm, 1))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		for range 3 {
			step()
		}
		if n := alloctest.Least(step); n > 0 {
			t.Errorf("%v allocations in a step, recompute: %v", n, recompute)
		}
	}
}

// A run that recomputes is the run that does not, also if it is stopped and goes on the other way;
// it takes less memory.
func TestRunRecompute(t *testing.T) {
	longtest.SkipIfShort(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	first := testConfig(t, plan,
		"model: {preset: mula-nano, num_hidden_layers: 8}\nevaluate: {every: 0}\ncheckpoint: {every: 0}\n")
	var memory, allocated [3]int64
	for i, recompute := range []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers} {
		c := first
		c.Recompute = recompute
		if i > 0 {
			c.Output = filepath.Join(t.TempDir(), "run")
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		mustRun(t, c, Options{Report: func(s Summary) { memory[i] = s.Memory.Buffers() }})
		runtime.ReadMemStats(&after)
		allocated[i] = int64(after.TotalAlloc - before.TotalAlloc)
	}
	for i := range 2 {
		if want, got := memory[i]-memory[i+1], allocated[i]-allocated[i+1]; want <= 0 || got < want/2 {
			t.Errorf("level %d of recomputation saves %d bytes, the summary says %d", i+1, got, want)
		}
	}
	c := first
	c.Output, c.Recompute = filepath.Join(t.TempDir(), "run"), moe.RecomputeLayers
	mustRun(t, c, stopAfter(3))
	c.Recompute = moe.RecomputeNone
	mustRun(t, c, stopAfter(5))
	c.Recompute = moe.RecomputeExperts
	mustRun(t, c, Options{})
	a, _, err := checkpoint.Find(context.Background(), first.Output)
	if err != nil {
		t.Fatal(err)
	}
	b, _, err := checkpoint.Find(context.Background(), c.Output)
	if err != nil {
		t.Fatal(err)
	}
	if a.State.Weights != b.State.Weights || a.State.Step != 8 {
		t.Errorf("weights %s after %d steps, with recomputation %s after %d", a.State.Weights, a.State.Step,
			b.State.Weights, b.State.Step)
	}
	if _, err := ParseConfig([]byte("plan: p\nrecompute: all\n"), "train.yaml"); err == nil ||
		!strings.Contains(err.Error(), `recompute is "all"; allowed: none, experts, layers`) {
		t.Errorf("%v", err)
	}
}
