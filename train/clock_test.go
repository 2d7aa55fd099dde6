package train

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"mula/internal/filesystem"
	"mula/train/record"
	"mula/train/rundir"
	"mula/xpu/comm"
)

// The time of a rank is its own: ranks that wait for a slow rank have no more work, but wait. The
// clock is virtual, and only sleeping takes time.
func TestRankSeconds(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := ranksConfig(t, plan, LayoutConfig{DP: 2, PP: 1, EP: 2}, "steps: 4\nevaluate: {every: 0}\n")
	hosts := comm.NewHosts([]string{"a", "a", "b", "c"})
	synctest.Test(t, func(t *testing.T) {
		mustRun(t, c, Options{hosts: hosts, AfterBackward: func(rank int, _ int64) {
			time.Sleep(time.Second)
			if rank == 2 {
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

// A rank that is delayed by 30 % is named within 20 steps, by a warning and in the metrics, and no
// longer when it is quick again. The other ranks are not. The times have noise of 5 %; the clock is
// virtual.
func TestSlowRankIsNamed(t *testing.T) {
	const from, to, steps = 12, 32, 60
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := ranksConfig(t, plan, LayoutConfig{DP: 2, PP: 1, EP: 2}, fmt.Sprintf(
		"steps: %d\nbatch_size: 4\nmicro_batch_size: 1\nevaluate: {every: 0}\nlog: {update_ratio_every: 0}\n", steps))
	c.Log.SlowSteps = defaultConfig().Log.SlowSteps
	var warnings []string
	synctest.Test(t, func(t *testing.T) {
		mustRun(t, c, Options{hosts: comm.NewHosts([]string{"a", "a", "b", "c"}),
			Warn: func(text string) { warnings = append(warnings, text) },
			AfterBackward: func(rank int, step int64) {
				rng := rand.New(rand.NewPCG(uint64(step), uint64(rank)))
				seconds := 1 + 0.05*rng.NormFloat64()
				if rank == 2 && step >= from && step < to {
					seconds *= 1.3
				}
				time.Sleep(time.Duration(seconds * float64(time.Second)))
			}})
	})
	if len(warnings) != 1 || !strings.Contains(warnings[0], "rank 2 on b is slow: ") {
		t.Errorf("warnings %q", warnings)
	}
	first, last := int64(-1), int64(-1)
	for _, m := range stepsOf(t, c.Output) {
		slow := 0
		for _, s := range m.SlowestRanks {
			if s.Slow && (s.Rank != 2 || s.Host != "b") {
				t.Errorf("step %d: rank %d on %s is slow", m.Step, s.Rank, s.Host)
			} else if s.Slow {
				slow++
			}
		}
		if slow != m.SlowRanks {
			t.Errorf("step %d: %d ranks are slow, want %d", m.Step, m.SlowRanks, slow)
		}
		if slow > 0 && first < 0 {
			first = m.Step
		}
		if slow > 0 {
			last = m.Step
		}
	}
	if first < from || first > from+20 || last < to || last > to+20 {
		t.Errorf("rank 2 is slow from step %d to step %d", first, last)
	}
}

// The heartbeat names the first slow rank. A warning names a rank each time it becomes slow, also
// if another rank is slow at that time. The list of a step has three ranks at most.
func TestWarnSlow(t *testing.T) {
	var warnings []string
	r := &run{options: Options{Warn: func(text string) { warnings = append(warnings, text) }}}
	beats := filepath.Join(t.TempDir(), "heartbeat")
	var err error
	if r.history.heartbeat, err = record.NewHeartbeat(filesystem.OS{}, beats, 0); err != nil {
		t.Fatal(err)
	}
	for i, step := range []struct {
		listed []int // slow ranks
		slow   int   // number of slow ranks
		warned []int
	}{{nil, 0, nil}, {[]int{1}, 1, []int{1}}, {[]int{2, 1}, 2, []int{2}}, {[]int{2}, 1, nil},
		{[]int{2, 1}, 2, []int{1}}, {[]int{3, 4, 5}, 5, []int{3, 4, 5}},
		{[]int{1, 2, 3}, 5, nil}, {nil, 0, nil}, {[]int{3}, 1, []int{3}}} {
		m := record.StepMetrics{SlowRanks: step.slow}
		for _, rank := range step.listed {
			m.SlowestRanks = append(m.SlowestRanks, record.SlowRank{Rank: rank, Slow: true})
		}
		m.SlowestRanks = append(m.SlowestRanks, record.SlowRank{Rank: 9})
		warnings = nil
		r.warnSlow(&m)
		r.history.heartbeat.Beat(record.SectionStep, int64(i))
		beat, err := record.ReadHeartbeat(filesystem.OS{}, beats)
		if err != nil || (beat.Slow != nil) != (step.listed != nil) ||
			beat.Slow != nil && *beat.Slow != step.listed[0] {
			t.Errorf("%d: heartbeat %+v, %v; slow ranks %v", i, beat, err, step.listed)
		}
		if len(warnings) != len(step.warned) {
			t.Fatalf("%d: warnings %q, want ranks %v", i, warnings, step.warned)
		}
		for j, rank := range step.warned {
			if !strings.Contains(warnings[j], fmt.Sprintf("rank %d on", rank)) {
				t.Errorf("%d: warnings %q, want ranks %v", i, warnings, step.warned)
			}
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
