package train

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"mula/blend"
	"mula/internal/longtest"
	"mula/train/estimate"
	"mula/train/group"
	"mula/xpu/comm"
)

// The models of these tests. Their matrices are larger than a block of the optimizer, so that ranks
// own parts of them.
const (
	tensorDense = "model: {preset: auroragpt-7b, vocab_size: 512, hidden_size: 64, intermediate_size: 96, " +
		"num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 4}\nattention: documents\n"
	tensorExperts = "model: {preset: mula-nano, model_type: qwen3_moe, num_hidden_layers: 4, num_key_value_heads: 2, " +
		"head_dim: 24}\naux_loss: {form: sequence}\n"
	// norms over all heads
	tensorWide = "model: {preset: mula-nano, num_hidden_layers: 4}\naux_loss: {form: sequence}\n"
	// a shared expert with a gate
	tensorGate = "model: {preset: mula-nano, model_type: qwen2_moe, num_hidden_layers: 2, " +
		"shared_expert_intermediate_size: 64}\naux_loss: {form: sequence}\n"
	// latent attention, a layer without experts, and shared experts
	tensorLatents = "model: {preset: mula-nano, model_type: deepseek_v3, num_hidden_layers: 4, dense_layers: '0', " +
		"dense_intermediate_size: 48, shared_expert_intermediate_size: 32, norm_topk_prob: true, q_lora_rank: 24, " +
		"kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8, rope_interleave: true}\n" +
		"router_bias: {update_speed: 0.01}\naux_loss: {form: sequence}\n"
)

// Runs whose ranks share matrices consume the samples of one rank, and have its losses and
// gradients up to rounding. Schemes, pipeline stages and groups of layers change no bit.
func TestTensorLayouts(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for model, layouts := range map[string][]LayoutConfig{
		tensorDense: {{DP: 1, EP: 1, TP: 2}, {DP: 1, EP: 1, TP: 2, PP: 2, VirtualStages: 2},
			{DP: 2, EP: 1, TP: 2, CP: 2},
			{DP: 1, EP: 1, TP: 2, PP: 2}, {DP: 1, EP: 1, TP: 4}, {DP: 2, EP: 1, TP: 2},
			{DP: 2, EP: 1, TP: 2, Optimizer: estimate.Unsharded},
			{DP: 2, EP: 1, TP: 2, Optimizer: estimate.SO},
			{DP: 2, EP: 1, TP: 2, CP: 2, PP: 2, VirtualStages: 2}},
		tensorExperts: {{DP: 2, EP: 2, TP: 2}, {DP: 2, EP: 2, TP: 2, Optimizer: estimate.SO},
			{DP: 1, EP: 2, TP: 2}, {DP: 1, EP: 2, TP: 2, Optimizer: estimate.Unsharded},
			{DP: 1, EP: 2, TP: 2, Optimizer: estimate.SO}, {DP: 2, EP: 1, TP: 2},
			{DP: 1, EP: 2, TP: 2, PP: 2, VirtualStages: 2}},
		tensorWide: {{DP: 1, EP: 2, TP: 2}, {DP: 1, EP: 2, TP: 2, PP: 2}, {DP: 1, EP: 1, TP: 4},
			{DP: 2, EP: 1, TP: 2, Optimizer: estimate.Unsharded}, {DP: 2, EP: 1, TP: 2, CP: 2}},
		tensorGate: {{DP: 1, EP: 2, TP: 2}, {DP: 1, EP: 2, TP: 2, PP: 2}, {DP: 2, EP: 1, TP: 2}},
		tensorLatents: {{DP: 1, EP: 2, TP: 2}, {DP: 1, EP: 2, TP: 2, PP: 2}, {DP: 1, EP: 1, TP: 4},
			{DP: 2, EP: 1, TP: 2, CP: 2}, {DP: 1, EP: 2, TP: 2, PP: 2, VirtualStages: 2}},
	} {
		more := model + "steps: 4\nevaluate: {every: 2, samples: 5}\n"
		one := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, more), Options{})
		same := map[string]runOutcome{} // by the layout without stages and scheme
		for _, l := range layouts[:longtest.Rounds(min(3, len(layouts)-2), len(layouts))] {
			got := mustRunRanks(t, ranksConfig(t, plan, l, more), Options{})
			for name, most := range map[string]float64{"loss": 1e-6, "grad_norm": 1e-5, "samples": 0, "tokens": 0,
				"eval.loss": 1e-6, "update_ratio.norms": 1e-4} {
				if d := apart(t, one.lines, got.lines, name); d > most {
					t.Errorf("%+v: %s differs from one rank's by %v, at most %v is allowed", l, name, d, most)
				}
			}
			if a, b := logOf(t, one), logOf(t, got); a != b {
				t.Errorf("%+v: fingerprints differ from one rank's", l)
			}
			l.PP, l.VirtualStages, l.Optimizer = 0, 0, ""
			if other, ok := same[fmt.Sprint(l)]; !ok {
				same[fmt.Sprint(l)] = got
			} else if other.Weights != got.Weights {
				t.Errorf("%+v: weights differ with the scheme or the stages", l)
			}
		}
	}
}

// Updates that need complete matrices or their norms do the same with slices. Muon computes a
// matrix from all slices, so only the gradients differ in rounding.
func TestTensorUpdates(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	layouts := []LayoutConfig{{DP: 2, EP: 1, TP: 2, Optimizer: estimate.SO}, {DP: 2, EP: 1, TP: 2},
		{DP: 2, EP: 1, TP: 2, Optimizer: estimate.Unsharded}, {DP: 1, EP: 1, TP: 2, PP: 2}, {DP: 1, EP: 1, TP: 4}}
	for i, test := range []struct{ optimizer, model string }{
		{"{name: muon, ns_steps: 2}", tensorDense}, {"{name: lamb}", tensorDense},
		{"{name: muon}", tensorWide}, {"{name: muon}", tensorGate}, {"{name: lamb}", tensorLatents},
	} {
		if i >= longtest.Rounds(2, 5) {
			break
		}
		more := test.model + "optimizer: " + test.optimizer + "\nsteps: 4\nevaluate: {every: 0}\n"
		one := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, more), Options{})
		same := map[string]runOutcome{} // by the layout without stages and scheme
		for _, l := range layouts[:longtest.Rounds(2, len(layouts))] {
			got := mustRunRanks(t, ranksConfig(t, plan, l, more), Options{})
			for name, most := range map[string]float64{"loss": 1e-5, "grad_norm": 1e-4, "samples": 0,
				"update_ratio.attention": 1e-3} {
				if d := apart(t, one.lines, got.lines, name); d > most {
					t.Errorf("%s, %+v: %s differs from one rank's by %v, at most %v is allowed", test.optimizer, l,
						name, d, most)
				}
			}
			l.PP, l.Optimizer = 0, ""
			if other, ok := same[fmt.Sprint(l)]; !ok {
				same[fmt.Sprint(l)] = got
			} else if other.Weights != got.Weights {
				t.Errorf("%s, %+v: weights differ with the scheme or the stages", test.optimizer, l)
			}
		}
	}
}

// A run that shares matrices resumes with the same bits, and its checkpoint has the same bits after
// it was loaded and saved in other layouts. The optimizer's state of columns is divided inside
// rows.
func TestTensorResumes(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const wide = "model: {preset: auroragpt-7b, vocab_size: 512, hidden_size: 264, intermediate_size: 520, " +
		"num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 4}\n"
	more := wide + "steps: 4\nrecompute: layers\nbatch_size: 4\nevaluate: {every: 0}\n"
	layout := LayoutConfig{DP: 2, EP: 1, TP: 2}
	whole := mustRunRanks(t, ranksConfig(t, plan, layout, more), Options{})
	c := ranksConfig(t, plan, layout, more+"checkpoint: {every: 2}\n")
	from := mustRun(t, c, stopAfter(2)).Checkpoint
	first := gathered(t, from)
	layouts := []LayoutConfig{{DP: 1, TP: 4}, {DP: 1}, {DP: 2, TP: 2}, {DP: 2, CP: 2}}
	for _, l := range layouts[:longtest.Rounds(2, len(layouts))] {
		other := c
		other.Layout.DP, other.Layout.TP, other.Layout.CP = l.DP, max(1, l.TP), max(1, l.CP)
		path := reload(t, other)
		if filepath.Base(path) != filepath.Base(from) {
			t.Errorf("%+v: loaded %s, want %s", l, path, from)
		}
		compareTensors(t, fmt.Sprintf("%+v", l), first, gathered(t, path))
	}
	got := mustRunRanks(t, c, Options{})
	if got.Weights != whole.Weights {
		t.Errorf("the resumed run has weights %.16s, want %.16s", got.Weights, whole.Weights)
	}

	// So it is with state and weights of bfloat16, and with latent attention.
	for model, to := range map[string]LayoutConfig{
		tensorExperts + "precision: bf16_mixed\noptimizer: {moments: bf16}\n": {DP: 1, EP: 2, TP: 2},
		tensorLatents: {DP: 1, EP: 1, TP: 4}, tensorWide: {DP: 1, EP: 1, TP: 4},
	} {
		c = ranksConfig(t, plan, layout, model+"steps: 4\n")
		first = gathered(t, mustRun(t, c, stopAfter(1)).Checkpoint)
		c.Layout.DP, c.Layout.EP, c.Layout.TP = to.DP, to.EP, to.TP
		compareTensors(t, model, first, gathered(t, reload(t, c)))
	}
}

func compareTensors(t testing.TB, how string, want, got map[string][]float32) {
	t.Helper()
	if a, b := slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got)); !slices.Equal(a, b) {
		t.Errorf("%s: the checkpoint has the tensors %v, want %v", how, b, a)
	}
	for name, values := range want {
		if !slices.Equal(values, got[name]) {
			t.Errorf("%s: %s differs", how, name)
		}
	}
}

// A rank whose batch is damaged ends the run, and the ranks that share its matrices do not wait for
// it.
func TestTensorFails(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, l := range []LayoutConfig{{DP: 1, EP: 1, TP: 2}, {DP: 1, EP: 1, TP: 2, PP: 2}} {
		_, err := Run(t.Context(), ranksConfig(t, plan, l, tensorDense+"steps: 3\n"), Options{
			badTokens: func(rank int, step int64) bool { return rank == 1 && step == 1 }})
		if err == nil || !strings.Contains(err.Error(), "beyond the model's vocabulary") {
			t.Errorf("%+v: %v", l, err)
		}
	}
}

// Numbers of ranks that cannot share matrices are refused with the field's name.
func TestTensorConfig(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const model = "model: {preset: auroragpt-7b, vocab_size: 512, hidden_size: 64, intermediate_size: 96, " +
		"num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}\n"
	for more, want := range map[string]string{
		model + "layout: {tp: 4}\n": "layout.tp is 4, which does not divide num_key_value_heads 2",
		model + "layout: {tp: 0}\n": "layout.tp is 0",
	} {
		c, err := ParseConfig([]byte("plan: "+plan+"\noutput: "+t.TempDir()+"/run\nsteps: 2\n"+
			"schedule: {learning_rate: 0.001}\n"+more+"\n"), "train.yaml")
		if err == nil {
			_, err = Run(t.Context(), c, Options{})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", more, err, want)
		}
	}
}

// Ranks that share matrices send the bytes of the estimate: tokens, gradients, weights and votes.
func TestTensorBytes(t *testing.T) {
	const steps = 3
	path := makePlan(t, t.TempDir(), "plan.json", "")
	plan, err := blend.ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	const (
		muon = "optimizer: {name: muon}\n"
		lamb = "optimizer: {name: lamb}\n"
	)
	for _, test := range []struct {
		model string
		LayoutConfig
	}{{tensorDense, LayoutConfig{DP: 2, EP: 1, TP: 2}},
		{tensorDense + muon, LayoutConfig{DP: 2, EP: 1, TP: 2}},
		{tensorGate + lamb, LayoutConfig{DP: 1, EP: 2, TP: 2, Optimizer: estimate.Unsharded}},
		{tensorDense, LayoutConfig{DP: 2, EP: 1, TP: 2, Optimizer: estimate.Unsharded}},
		{tensorExperts, LayoutConfig{DP: 2, EP: 2, TP: 2, Optimizer: estimate.SO}},
		{tensorExperts, LayoutConfig{DP: 1, EP: 2, TP: 2}}, {tensorLatents, LayoutConfig{DP: 1, EP: 2, TP: 2}},
		{tensorWide, LayoutConfig{DP: 1, EP: 2, TP: 2}}, {tensorGate, LayoutConfig{DP: 1, EP: 2, TP: 2}}} {
		model, l := test.model, test.LayoutConfig
		more := strings.Replace(model, "update_speed: 0.01", "update_speed: 0", 1) + // the estimate does not count it
			fmt.Sprintf("steps: %d\nevaluate: {every: 0}\n", steps)
		c := ranksConfig(t, path, l, more)
		var mu sync.Mutex
		var tokens, weights, votes int64
		sum := func(groups ...*comm.Comm) (bytes int64) {
			for _, group := range groups {
				for _, operation := range group.Traffic() {
					bytes += operation.Bytes()
				}
			}
			return bytes
		}
		before := map[*comm.Comm]int64{} // the first checkpoint, at the end, exchanges slices
		mustRun(t, c, Options{
			passed: func(r *run) {
				mu.Lock()
				defer mu.Unlock()
				if group := r.ranks.Group(comm.TP); r.state.Step == steps-1 {
					before[group] = sum(group)
				}
			},
			ended: func(r *group.Group) {
				mu.Lock()
				defer mu.Unlock()
				tokens += before[r.Group(comm.TP)]
				weights += sum(r.Group(comm.Replicas), r.Group(comm.Data), r.Group(comm.Slices), r.Within)
				if c.Layout.Optimizer == estimate.SO {
					weights += sum(r.WithinTensor, r.Across)
				}
				votes += sum(r.Stage)
			}})
		in, err := c.EstimateInput(plan, estimate.Aurora)
		if err != nil {
			t.Fatal(err)
		}
		result, err := estimate.Compute(in)
		if err != nil {
			t.Fatal(err)
		}
		var wantTokens, wantUpdate, wantWeights, wantVotes int64
		for _, e := range result.Traffic {
			total := e.Total * int64(c.Layout.Ranks()/e.Ranks)
			switch {
			case e.Purpose == estimate.ForTensor:
				wantTokens += total
			case e.Purpose == estimate.ForUpdate: // of all steps but the last
				wantUpdate += total * (steps - 1)
			case e.Purpose == estimate.ForGradients || e.Purpose == estimate.ForWeights:
				wantWeights += total
			case e.Purpose == estimate.ForVotes && e.Group == comm.Data:
				wantVotes += total
			}
		}
		if tokens != steps*wantTokens+wantUpdate || weights != steps*wantWeights || votes != steps*wantVotes {
			t.Errorf("%s: %d bytes of tokens and updates, %d of gradients and weights, %d of votes; the estimate "+
				"says %d, %d, %d",
				l, tokens, weights, votes, steps*wantTokens+wantUpdate, steps*wantWeights, steps*wantVotes)
		}
	}
}
