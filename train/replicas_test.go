package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/estimate"
	"mula/train/record"
	"mula/xpu/comm"
	"mula/xpu/discrete"
)

// flipWeight changes the lowest bit of a weight of one rank before a step: in the first bucket of
// its kind that the rank updates, or does not update.
func flipWeight(t testing.TB, r *run, kind comm.Axes, owned bool) {
	for _, b := range r.model.Buckets() {
		if b.Holders() != kind {
			continue
		}
		at, offset := -1, 0
		for _, p := range b.Parameters {
			number := slices.Index(r.model.Parameters(), p)
			begin, end, _ := r.optimizer.Owned(number)
			switch {
			case at >= 0:
			case owned && begin < end:
				at = offset + begin
			case !owned && begin > 0 || !owned && begin == end:
				at = offset
			case !owned && end < p.Weight.Elements():
				at = offset + end
			}
			offset += p.Weight.Elements()
		}
		if at < 0 {
			continue // the rank owns all of the bucket, or nothing
		}
		weight := b.Weight.Floats()[at : at+1]
		weight[0] = math.Float32frombits(math.Float32bits(weight[0]) ^ 1)
		return
	}
	t.Errorf("rank %d owns all weights, or none", r.ranks.Rank())
}

// I3: in every scheme, a weight that differs in one step from its replicas is found at the next
// comparison, even if its owner has overwritten or sent it since. The error names the rank of the
// minority.
func TestI3Replicas(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, test := range []struct {
		layout LayoutConfig
		rank   int
		kind   comm.Axes // the ranks with the same weights
		want   string
	}{
		{LayoutConfig{DP: 2, EP: 2}, 1, comm.Data, "rank 1 on"},
		{LayoutConfig{DP: 4, EP: 1}, 3, comm.Replicas, "rank 3 on"},
		{LayoutConfig{DP: 3, EP: 1, PP: 2}, 3, comm.Data, "rank 3 on"}, // compared with the replicas of its stage
		{LayoutConfig{DP: 3, EP: 1, PP: 2}, 3, comm.Replicas, "2 of 3 ranks agree"},
		{LayoutConfig{DP: 2, EP: 2}, 3, comm.Replicas, "no majority"},
		{LayoutConfig{DP: 3, EP: 1, TP: 2}, 4, comm.Slices, "rank 4 on"},
	} {
		for _, scheme := range schemes {
			for _, owned := range []bool{false, true} {
				if scheme == estimate.Unsharded && !owned {
					continue // every rank updates all
				}
				if scheme == estimate.SO && test.layout.TP > 1 {
					continue // refused
				}
				l := test.layout
				t.Run(fmt.Sprintf("%d,%d,%d,%d/rank %d/%s/%s/owned %v", l.DP, l.PP, l.EP, l.TP, test.rank,
					test.kind.GroupName(), scheme, owned), func(t *testing.T) {
					t.Parallel()
					l.Optimizer = scheme
					c := ranksConfig(t, plan, l,
						"model: {preset: mula-nano, model_type: qwen3_moe, hidden_size: 16, "+
							"intermediate_size: 8, num_experts: 4}\nbatch_size: 12\nsteps: 8\nevaluate: {every: 0}\n")
					c.Layout.CheckReplicasEvery = 4
					_, err := Run(context.Background(), c, Options{atStep: func(r *run) {
						if r.ranks.Rank() == test.rank && r.state.Step == 5 {
							flipWeight(t, r, test.kind, owned)
						}
					}})
					if err == nil || !strings.Contains(err.Error(), test.want) ||
						!strings.Contains(err.Error(), "step 5: ") || !collective.Shared(err) {
						t.Error(err)
					}
					failures := readLines(t, filepath.Join(c.Output, record.FailuresFile))
					if len(failures) != 1 || failures[0]["kind"] != record.FailureReplica ||
						failures[0]["step"] != json.Number("7") {
						t.Errorf("failures %v", failures)
					}
				})
			}
		}
	}
}

// No checkpoint has weights that were computed with a wrong copy: replicas are compared before each
// checkpoint, and the run resumes from the previous checkpoint to the weights of an unbroken run.
// Without comparisons the run ends with other weights and no error.
func TestReplicasCheckpoint(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, every := range []int64{1000, 0} {
		c := ranksConfig(t, plan, LayoutConfig{DP: 3, EP: 1, Optimizer: estimate.EPSO},
			crashConfig+"batch_size: 12\nsteps: 8\ncheckpoint: {every: 2}\nevaluate: {every: 0}\n")
		c.Layout.CheckReplicasEvery = every
		undisturbed := c
		undisturbed.Output += "-undisturbed"
		want := mustRun(t, undisturbed, Options{})
		flipped := false
		r, err := Run(context.Background(), c, Options{atStep: func(r *run) {
			if r.ranks.Rank() == 1 && r.state.Step == 4 {
				flipWeight(t, r, comm.Data, false)
				flipped = true
			}
		}})
		if !flipped {
			t.Fatal("no weight was changed")
		}
		if every == 0 {
			if err != nil || r.Weights == want.Weights {
				t.Errorf("without comparisons: %v; weights %.16s…, %.16s… undisturbed", err, r.Weights, want.Weights)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), "rank 1 on ") || !strings.Contains(err.Error(), "step 4: ") {
			t.Errorf("comparing every %d steps: %v", every, err)
		}
		names, err := os.ReadDir(filepath.Join(c.Output, checkpoint.DirName))
		if err != nil || slices.ContainsFunc(names, func(e os.DirEntry) bool { return e.Name() > checkpoint.Name(4) }) {
			t.Errorf("checkpoints %v, %v", names, err)
		}
		if r := mustRun(t, c, Options{}); r.Weights != want.Weights || r.Resumed != checkpoint.Name(4) {
			t.Errorf("from %s: weights %.16s…, %.16s… undisturbed", r.Resumed, r.Weights, want.Weights)
		}
	}
}

// A weight that is another one on the device of one rank is found.
func TestReplicasApart(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, scheme := range schemes {
		for _, kind := range []comm.Axes{comm.Data, comm.Replicas} {
			c := testConfig(t, plan,
				crashConfig+fmt.Sprintf("layout: {expert_dp: 4, optimizer: %s, check_replicas_every: 2}\n", scheme))
			o := onDiscrete(Options{}, func(int, *discrete.Device) {})
			o.atStep = func(r *run) {
				if r.ranks.Rank() == 2 && r.state.Step == 2 {
					flipWeight(t, r, kind, true)
				}
			}
			if _, err := Run(context.Background(), c, o); !collective.Shared(err) ||
				!strings.Contains(fmt.Sprint(err), "rank 2 on ") ||
				!strings.Contains(err.Error(), "3 of 4 ranks agree") {
				t.Errorf("%s: %v", scheme, err)
			}
		}
	}
}
