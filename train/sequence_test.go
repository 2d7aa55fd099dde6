package train

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"mula/blend/fingerprint"
	"mula/internal/longtest"
	"mula/moe"
	"mula/train/estimate"
	"mula/train/group"
	"mula/xpu/comm"
)

// sequenceConfig is a run whose losses do not depend on the division of tokens among ranks.
func sequenceConfig(t testing.TB, plan string, l LayoutConfig, more string) Config {
	t.Helper()
	return ranksConfig(t, plan, l, "aux_loss: {form: sequence}\n"+more)
}

// Models with fewer key and value heads than ranks that share a sequence.
const (
	oneKeyHead = "model: {preset: auroragpt-7b, vocab_size: 512, hidden_size: 32, intermediate_size: 96, " +
		"num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 1}\n"
	twoKeyHeads = "model: {preset: mula-nano, model_type: qwen3_moe, num_hidden_layers: 2, " +
		"num_key_value_heads: 2, sliding_window: 5}\n"
)

// Runs whose ranks share sequences consume the samples of one rank, and have its losses and
// gradients up to rounding. Schemes and pipeline stages change no bit.
func TestSequenceLayouts(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	layouts := []LayoutConfig{{DP: 2, EP: 1, CP: 2, Optimizer: estimate.EPSO}, {DP: 2, EP: 1, CP: 2, PP: 2},
		{DP: 2, EP: 1, CP: 2, Optimizer: estimate.Unsharded}, {DP: 2, EP: 2, CP: 2}, {DP: 1, EP: 4, CP: 4},
		{DP: 2, EP: 2, CP: 4, Optimizer: estimate.SO}, {DP: 2, EP: 2, CP: 4}}
	for attention, layouts := range map[string][]LayoutConfig{
		"":                                     layouts,
		"attention: documents\n":               layouts,
		twoKeyHeads + "attention: documents\n": append(layouts[4:], LayoutConfig{DP: 4, EP: 2, CP: 8}),
		twoKeyHeads + "attention: window\n": {{DP: 4, EP: 1, CP: 4}, {DP: 4, EP: 1, CP: 4, PP: 2},
			{DP: 4, EP: 1, CP: 4, Optimizer: estimate.Unsharded}},
	} {
		plan := makePlan(t, t.TempDir(), "plan.json", "")
		one := mustRunRanks(t, sequenceConfig(t, plan, LayoutConfig{}, attention), Options{})
		same := map[string]runOutcome{} // by the layout without stages and scheme
		for _, l := range layouts {
			got := mustRunRanks(t, sequenceConfig(t, plan, l, attention), Options{})
			for name, most := range map[string]float64{"loss": 1e-6, "grad_norm": 1e-5, "samples": 0, "tokens": 0,
				"aux_loss":  1e-6,
				"eval.loss": 1e-6, "eval.mix_loss": 1e-6, "eval.margin": 1e-4, "update_ratio.norms": 1e-4} {
				if d := apart(t, one.lines, got.lines, name); d > most {
					t.Errorf("%+v, %s: %s differs from one rank's by %v, at most %v is allowed", l, attention, name, d,
						most)
				}
			}
			if a, b := logOf(t, one), logOf(t, got); a != b {
				t.Errorf("%+v, %s: fingerprints differ from one rank's", l, attention)
			}
			l.PP, l.Optimizer = 0, ""
			if other, ok := same[l.String()]; !ok {
				same[l.String()] = got
			} else if other.Weights != got.Weights {
				t.Errorf("%+v, %s: weights differ with the scheme or the stages", l, attention)
			}
		}
	}
}

// Groups of layers of pipeline stages change no bit, and send the bytes of the estimate: of tokens
// to their experts, and of heads between ranks that share sequences.
func TestSequenceGroups(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	path := makePlan(t, t.TempDir(), "plan.json", "")
	plan := mustPlan(t, path)
	const dense = ", model_type: qwen3_moe, dense_layers: '0,3', dense_intermediate_size: 48"
	for _, test := range []struct {
		layout LayoutConfig
		more   string // of the model
	}{{LayoutConfig{DP: 2, EP: 1, CP: 2}, ""}, {LayoutConfig{DP: 1, EP: 2, CP: 2}, ""},
		{LayoutConfig{DP: 1, EP: 2}, ""}, {LayoutConfig{DP: 1, EP: 2}, dense},
		{LayoutConfig{DP: 4, EP: 1, CP: 4}, ", num_key_value_heads: 2"}} {
		l := test.layout
		for _, recompute := range []moe.Recompute{moe.RecomputeNone, moe.RecomputeLayers} {
			config := func(l LayoutConfig) Config {
				c := sequenceConfig(t, path, l, fmt.Sprintf("steps: 3\nrecompute: %s\nmicro_batch_size: 2\n"+
					"model: {preset: mula-nano, num_hidden_layers: 4%s}\nevaluate: {every: 0}\n", recompute, test.more))
				c.Layout.Dispatch = moe.AllGather // whose bytes do not depend on the routing
				return c
			}
			want, groups := mustRun(t, config(l), Options{}), l
			groups.PP, groups.VirtualStages = 2, 2
			c := config(groups)
			var mu sync.Mutex
			sent := map[estimate.Purpose]int64{}
			got := mustRun(t, c, Options{ended: func(r *group.Group) {
				mu.Lock()
				defer mu.Unlock()
				for _, o := range r.Group(comm.EP).Traffic() {
					sent[estimate.ForDispatch] += o.Bytes()
				}
				sent[estimate.ForSequences] += r.Sequence.Traffic()[comm.OpAllToAll].Bytes()
			}})
			if got.Weights != want.Weights || got.LastLoss != want.LastLoss {
				t.Errorf("%+v, recompute %s: weights %.16s… and loss %v, want %.16s… and %v", l, recompute, got.Weights,
					got.LastLoss, want.Weights, want.LastLoss)
			}
			in, err := c.EstimateInput(plan, simulatedMachine())
			if err != nil {
				t.Fatal(err)
			}
			r, err := estimate.Compute(in)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range r.Traffic { // of a stage; both have as many layers, and as many with experts
				if e.Purpose == estimate.ForDispatch ||
					e.Purpose == estimate.ForSequences && e.Operation == comm.OpAllToAll {
					sent[e.Purpose] -= c.Steps * e.Total * int64(c.Layout.Ranks()/e.Ranks)
				}
			}
			for purpose, bytes := range sent {
				if bytes != 0 {
					t.Errorf("%+v, recompute %s: %d bytes more of %s than the estimate", l, recompute, bytes, purpose)
				}
			}
		}
	}
}

// logOf returns the fingerprints of a run.
func logOf(t testing.TB, o runOutcome) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(o.Checkpoint)), fingerprint.LogFile))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A run resumes with the same bits, and with another number of ranks a sequence.
func TestSequenceResumes(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, test := range []struct {
		model string
		cp    int
		to    []int
	}{{"aux_loss: {form: sequence}\n", 2, []int{2, 1}}, {oneKeyHead, 4, []int{4, 2}}} {
		layout := LayoutConfig{DP: test.cp, EP: 1, CP: test.cp}
		more := test.model + "steps: 6\nrecompute: layers\n"
		whole := mustRunRanks(t, ranksConfig(t, plan, layout, more), Options{})
		for _, cp := range test.to {
			c := ranksConfig(t, plan, layout, more+"checkpoint: {every: 3}\n")
			mustRun(t, c, stopAfter(3))
			c.Layout.CP = cp
			got, want := mustRunRanks(t, c, Options{}), 1e-6
			if cp == test.cp {
				want = 0
			}
			if want == 0 && got.Weights != whole.Weights {
				t.Errorf("the resumed run has weights %.16s, want %.16s", got.Weights, whole.Weights)
			}
			if d := apart(t, whole.lines, got.lines, "loss"); d > want {
				t.Errorf("resumed with %d instead of %d ranks a sequence: losses differ by %v", cp, test.cp, d)
			}
		}
	}
}

// A rank whose batch is damaged ends the run, and the ranks that share its sequences do not wait
// for it.
func TestSequenceFails(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, l := range []LayoutConfig{{DP: 2, EP: 1, CP: 2}, {DP: 2, EP: 1, CP: 2, PP: 2}} {
		_, err := Run(t.Context(), sequenceConfig(t, plan, l, "steps: 3\n"), Options{
			badTokens: func(rank int, step int64) bool { return rank == 1 && step == 1 }})
		if err == nil || !strings.Contains(err.Error(), "beyond the model's vocabulary") {
			t.Errorf("%+v: %v", l, err)
		}
	}
}

// The rank that computes values that are not finite is named, although they spread to the ranks
// that share its rows.
func TestSequenceNotFinite(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	t.Setenv("MULA_HOST", "node-7")
	for bad := range 8 {
		more, cp := "steps: 8\nevaluate: {every: 0}\n", 2
		if bad >= 4 { // the keys of a part go to later parts, and their gradients to earlier ones
			more, cp = more+oneKeyHead, 4
		}
		c := ranksConfig(t, plan, LayoutConfig{DP: 4, EP: 1, CP: cp, Optimizer: estimate.Unsharded}, more)
		c.Layout.CheckReplicasEvery = 0
		_, err := Run(t.Context(), c, Options{BeforeSum: func(rank int, step int64, b moe.Bucket) error {
			if rank == bad%4 && step == 4 && !b.Divided {
				b.Weight.Floats()[0] = float32(math.NaN())
			}
			return nil
		}})
		if want := fmt.Sprintf("rank %d on node-7: step 5: the loss is", bad%4); !errors.Is(err, moe.ErrNotFinite) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// Wrong numbers of ranks a sequence are refused with the field's name.
func TestSequenceConfig(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for more, want := range map[string]string{
		"layout: {expert_dp: 2, cp: 3}":                "layout.cp is 3; must divide layout.expert_dp · layout.ep = 2 · 1 = 2",
		"layout: {expert_dp: 4, cp: 2}\nbatch_size: 7": "batch_size is 7; must be a multiple of 2",
		"layout: {expert_dp: 2, cp: 0}":                "layout.cp",
	} {
		c, err := ParseConfig([]byte("plan: "+plan+"\noutput: "+t.TempDir()+"/run\nsteps: 2\n"+
			"schedule: {learning_rate: 0.001}\nmodel: {preset: mula-nano}\n"+more+"\n"), "train.yaml")
		if err == nil {
			_, err = Run(t.Context(), c, Options{})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", more, err, want)
		}
	}
}
