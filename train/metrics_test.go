package train

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/blend/fingerprint"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/optimizer"
	"mula/train/record"
	"mula/train/rundir"
)

// Every tensor of every preset is in exactly one group, the group of its kind.
func TestTensorGroups(t *testing.T) {
	for _, test := range []struct {
		preset string
		want   string
	}{
		{"mula-nano", "attention:8 embedding:1 experts:48 head:1 norms:9 router:2"},
		{"mula-1b", "attention:4 embedding:1 feed_forward:3 head:1"},
	} {
		c, err := moe.Preset(test.preset)
		if err != nil {
			t.Fatal(err)
		}
		if c.Dense() {
			c.HiddenSize, c.IntermediateSize, c.Layers, c.VocabSize, c.Heads, c.KVHeads, c.PadTokenID,
				c.EOSTokenID = 16, 8, 1, 32, 2, 2, moe.NoToken, moe.NoToken
		}
		model, err := moe.New(c, device(t, 1))
		if err != nil {
			t.Fatal(err)
		}
		groups := map[string]int{}
		for _, p := range model.Parameters() {
			groups[optimizer.TensorGroup(p.Name)]++
		}
		if got := strings.Trim(strings.TrimPrefix(fmt.Sprint(groups), "map"), "[]"); got != test.want {
			t.Errorf("%s: %s, want %s", test.preset, got, test.want)
		}
	}
}

// The recorded ratios equal the ratios of the weights before and after the step. Every step has the
// balance of the experts, and some have counts.
func TestUpdateRatio(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan,
		crashConfig+"checkpoint: {every: 1, keep: 9}\nevaluate: {every: 0}\n"+
			"log: {update_ratio_every: 3, expert_counts_every: 3}\n")
	mustRun(t, c, Options{})
	for _, line := range readLines(t, filepath.Join(c.Output, rundir.MetricsFile))[1:] {
		var m record.StepMetrics
		text, _ := json.Marshal(line)
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		if counts := m.Step <= 3 || m.Step == 6; m.ExpertLoad == nil || (m.ExpertTokens != nil) != counts {
			t.Errorf("step %d: expert load %v, counts %v", m.Step, m.ExpertLoad, m.ExpertTokens)
		}
		if m.Step%3 != 0 {
			if m.UpdateRatio != nil {
				t.Errorf("step %d: %v", m.Step, m.UpdateRatio)
			}
			continue
		}
		if m.Step == 0 { // the weights before it are in no checkpoint
			continue
		}
		change, before := map[string]float64{}, map[string]float64{}
		weights := func(step int64) map[string][]float32 {
			f, err := safetensors.Open(filepath.Join(c.Output, checkpoint.DirName, checkpoint.Name(step), modelFile))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			all := map[string][]float32{}
			for _, tensor := range f.Tensors() {
				all[tensor.Name] = make([]float32, tensor.Elements())
				if err := f.Float32(all[tensor.Name], tensor.Name, 0); err != nil {
					t.Fatal(err)
				}
			}
			return all
		}
		old, now := weights(m.Step), weights(m.Step+1)
		for name := range old {
			for i, w := range old[name] {
				d := float64(now[name][i]) - float64(w)
				change[optimizer.TensorGroup(name)] += d * d
				before[optimizer.TensorGroup(name)] += float64(w) * float64(w)
			}
		}
		if len(m.UpdateRatio) != len(before) {
			t.Errorf("step %d: groups %v, want %v", m.Step, m.UpdateRatio, before)
		}
		for name, ratio := range m.UpdateRatio {
			if want := math.Sqrt(change[name] / before[name]); math.Abs(ratio-want) > 1e-5*want {
				t.Errorf("step %d: %s is %v, want %v", m.Step, name, ratio, want)
			}
		}
	}
}

// Records that someone has removed are missed, but do not end the run.
func TestRunWithoutRecords(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, crashConfig)
	mustRun(t, c, stopAfter(3))
	for _, name := range []string{rundir.MetricsFile, fingerprint.LogFile} {
		if err := os.Remove(filepath.Join(c.Output, name)); err != nil {
			t.Fatal(err)
		}
	}
	var warnings []string
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	if len(warnings) != 2 || !strings.Contains(warnings[0], rundir.MetricsFile) ||
		!strings.Contains(warnings[1], fingerprint.LogFile) {
		t.Errorf("warnings %q", warnings)
	}
	lines := readLines(t, filepath.Join(c.Output, rundir.MetricsFile))
	if lines[0]["run"] == nil || lines[1]["resumed"] == nil {
		t.Errorf("metrics begin with %v, %v", lines[0], lines[1])
	}
}

// A run directory with records but no checkpoint is of a run that was killed early: they are
// replaced, which is said.
func TestRunReplacesRecords(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, crashConfig)
	mustRun(t, c, Options{})
	if err := os.RemoveAll(filepath.Join(c.Output, checkpoint.DirName)); err != nil {
		t.Fatal(err)
	}
	warned := 0
	mustRun(t, c, Options{Warn: func(text string) {
		if strings.Contains(text, "replacing it") {
			warned++
		}
	}})
	if lines := readLines(t, filepath.Join(c.Output, fingerprint.LogFile)); warned != 3 || len(lines) != 9 {
		t.Errorf("%d warnings, %d lines", warned, len(lines))
	}
}
