package train

import (
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/train/checkpoint"
	"mula/train/estimate"
	"mula/train/group"
	"mula/xpu/comm"
)

// The hosts of ranks change no bit of a run, for all schemes, dispatches and precisions: exchanges
// of two levels have the results of one level.
func TestHostsChangeNoBit(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for i, test := range []struct {
		layout    LayoutConfig
		sums      int
		hosts     string // of each rank
		precision string
		dispatch  moe.Dispatch
		model     string
	}{
		{layout: LayoutConfig{DP: 2, EP: 2}, hosts: "a a b b"},
		{layout: LayoutConfig{DP: 2, EP: 2}, hosts: "a b b b", precision: "bf16", dispatch: "allgather"},
		{layout: LayoutConfig{DP: 1, EP: 4}, hosts: "a a a b"},
		{layout: LayoutConfig{DP: 4, EP: 1}, sums: 2, hosts: "a a b b"},
		{layout: LayoutConfig{DP: 2, PP: 2, EP: 2}, hosts: "a a b b c c d d", precision: "bf16"},
		{layout: LayoutConfig{DP: 3, EP: 4}, hosts: "a a a a b b b b c c c c"},
		{layout: LayoutConfig{DP: 3, EP: 4}, hosts: "a b b b b b c c c c c c", dispatch: "allgather"},
		{layout: LayoutConfig{DP: 4, EP: 1, CP: 4}, hosts: "a a b b", model: twoKeyHeads},
		{layout: LayoutConfig{DP: 2, EP: 2, CP: 4}, hosts: "a b b b", model: twoKeyHeads},
	} {
		more := "steps: 2\n" + test.model
		if test.precision != "" {
			more += "precision: " + test.precision + "\n"
		}
		for _, scheme := range schemes {
			if i > 1 && scheme != estimate.EPSO {
				continue
			}
			l := test.layout
			l.Optimizer = scheme
			c := ranksConfig(t, plan, l, more)
			if l.DP == 3 {
				c.BatchSize = 12
			}
			if test.sums > 0 {
				c.Layout.SumReplicas = test.sums
			}
			if test.dispatch != "" {
				c.Layout.Dispatch = test.dispatch
			}
			want := mustRun(t, c, Options{})
			c.Output = t.TempDir()
			two := false
			got := mustRun(t, c, Options{hosts: comm.NewHosts(strings.Fields(test.hosts)), ended: func(g *group.Group) {
				if g.Rank() > 0 {
					return
				}
				for _, traffic := range g.World().Traffic() {
					two = two || traffic.Between > 0
				}
			}})
			if got.Weights != want.Weights || got.LastLoss != want.LastLoss || !two {
				t.Errorf("%d, %s: weights %.16s… with hosts %s, %.16s… with one; bytes sent between hosts: %t",
					i, scheme, got.Weights, test.hosts, want.Weights, two)
			}
		}
	}
}

// sum_replicas changes the order of sums, and the checkpoint has the order.
func TestSumReplicas(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	var weights []string
	for _, n := range []int{1, 2} {
		c := ranksConfig(t, plan, LayoutConfig{DP: 4, EP: 1}, "steps: 2\n")
		c.Layout.SumReplicas = n
		r := mustRun(t, c, Options{})
		weights = append(weights, r.Weights)
		saved, _, err := checkpoint.Find(t.Context(), r.Checkpoint)
		if err != nil {
			t.Fatal(err)
		}
		if got := saved.State.Arithmetic; strings.Contains(got, "sums of 2 replicas") != (n == 2) {
			t.Errorf("sum_replicas %d: the arithmetic is %s", n, got)
		}
	}
	if weights[0] == weights[1] {
		t.Error("the order of sums has no effect")
	}
}
