package train

import (
	"encoding/json"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"mula/train/record"
	"mula/train/rundir"
)

// The time of a rank is its own: ranks that wait for a slow rank have no more work, but wait. The
// clock is virtual, and only sleeping takes time.
func TestRankSeconds(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := ranksConfig(t, plan, LayoutConfig{DP: 2, PP: 1, EP: 2}, "steps: 4\nevaluate: {every: 0}\n")
	hosts := []string{"a", "a", "b", "c"}
	synctest.Test(t, func(t *testing.T) {
		mustRun(t, c, Options{hosts: hosts, passed: func(r *run) {
			time.Sleep(time.Second)
			if r.ranks.Rank() == 2 {
				time.Sleep(500 * time.Millisecond)
			}
		}})
	})
	steps := stepsOf(t, c.Output)
	if len(steps) != 4 {
		t.Fatalf("%d steps", len(steps))
	}
	for _, m := range steps {
		slow, waited := m.SlowestRanks, record.Seconds(0.5)
		if m.Step == 0 { // ranks wait for the votes of a step after their own vote
			waited = 0
		}
		if want := (record.RankSeconds{Compute: 4.5, Waiting: 3 * waited}); *m.RankSeconds != want {
			t.Errorf("step %d: all ranks took %+v, want %+v", m.Step, *m.RankSeconds, want)
		}
		if want := (record.SlowRank{Rank: 2, Host: "b", Median: 1, RankSeconds: record.RankSeconds{Compute: 1.5}}); len(
			slow) != 3 || slow[0] != want || slow[1].Compute != 1 || slow[1].Waiting != waited {
			t.Errorf("step %d: %+v, want %+v first", m.Step, slow, want)
		}
	}
}

// stepsOf returns the steps in the metrics of a run.
func stepsOf(t *testing.T, output string) (steps []record.StepMetrics) {
	t.Helper()
	for _, line := range readLines(t, filepath.Join(output, rundir.MetricsFile)) {
		text, err := json.Marshal(line)
		var m record.StepMetrics
		if err == nil {
			err = json.Unmarshal(text, &m)
		}
		if err != nil {
			t.Fatal(err)
		}
		if m.Time != "" {
			steps = append(steps, m)
		}
	}
	return steps
}
