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
	"mula/train/optimizer"
)

func TestCutRecords(t *testing.T) {
	const (
		run   = `{"run":{"format":1}}` + "\n"
		step0 = `{"step":0,"loss":1}` + "\n"
		step1 = `{"step":1,"loss":1}` + "\n"
		eval2 = `{"step":2,"eval":{"loss":1}}` + "\n"
		step2 = `{"step":2,"loss":1}` + "\n"
		again = `{"step":2,"resumed":{"checkpoint":"step-00000002"}}` + "\n"
		step3 = `{"step":3,"loss":1}` + "\n"
		back2 = `{"step":2,"rollback":{"step":5}}` + "\n"
	)
	for _, test := range []struct {
		name      string
		content   string
		stepsDone int64
		want      string
		header    bool
		last      int64
	}{
		{"nothing after the checkpoint", run + step0 + step1, 2, run + step0 + step1, true, 1},
		{"steps after it", run + step0 + step1 + step2 + step3, 2, run + step0 + step1, true, 1},
		{"an evaluation of the checkpoint's step was before it", run + step0 + step1 + eval2 + step2, 2,
			run + step0 + step1 + eval2, true, 1},
		{"and is after an earlier one", run + step0 + step1 + eval2 + step2, 1, run + step0, true, 0},
		{"a resume from the same checkpoint is written anew", run + step0 + step1 + eval2 + again + step2, 2,
			run + step0 + step1 + eval2, true, 1},
		{"a resume from an earlier one stays", run + step0 + step1 + again + step2 + step3, 3, run + step0 + step1 +
			again + step2, true, 2},
		{"a rollback belongs to the step after it", run + step0 + step1 + back2 + step2 + step3, 3,
			run + step0 + step1 + back2 + step2, true, 2},
		{"and goes with it", run + step0 + step1 + back2 + step2, 2, run + step0 + step1, true, 1},
		{"and is no step", run + step0 + back2, 3, run + step0 + back2, true, 0},
		{"an unfinished line", run + step0 + step1[:8], 2, run + step0, true, 0},
		{"an unfinished line that would be whole but for its end", run + step0 + strings.TrimSuffix(step1, "\n"), 2,
			run + step0, true, 0},
		{"an unfinished header", run[:5], 0, "", false, -1},
		{"nothing", "", 0, "", false, -1},
		{"from the beginning", run + step0 + step1, 0, run, true, -1},
		{"zeros that a crash of the machine left", run + step0 + "\x00\x00\x00\x00", 5, run + step0, true, 0},
		{"zeros with an end of line", run + step0 + "\x00\x00\x00\n\x00", 5, run + step0, true, 0},
	} {
		path := filepath.Join(t.TempDir(), metricsFile)
		if err := os.WriteFile(path, []byte(test.content), 0o644); err != nil {
			t.Fatal(err)
		}
		header, last, err := cutRecords(path, test.stepsDone)
		got, _ := os.ReadFile(path)
		if err != nil || header != test.header || last != test.last || string(got) != test.want {
			t.Errorf("%s: header %v, last %d, error %v, content\n%swant header %v, last %d, content\n%s",
				test.name, header, last, err, got, test.header, test.last, test.want)
		}
	}
	if header, last, err := cutRecords(filepath.Join(t.TempDir(), "none"), 5); header || last != -1 || err != nil {
		t.Errorf("no file: %v, %v, %v", header, last, err)
	}
	// Damage in the middle is not ours to throw away.
	path := filepath.Join(t.TempDir(), metricsFile)
	content := run + step0 + "garbage\n" + step1
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := cutRecords(path, 2); err == nil || !strings.Contains(err.Error(), path+":3:") {
		t.Errorf("garbage: %v", err)
	}
	if got, _ := os.ReadFile(path); string(got) != content {
		t.Errorf("garbage: the file is now\n%s", got)
	}
}

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
		if c.Architecture == moe.OLMo {
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

// The recorded ratios equal the ratios of the weights before and after the step.
func TestUpdateRatio(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan,
		crashConfig+"checkpoint: {every: 1, keep: 9}\nevaluate: {every: 0}\nlog: {update_ratio_every: 3}\n")
	mustRun(t, c, Options{})
	for _, line := range readLines(t, filepath.Join(c.Output, metricsFile))[1:] {
		var m StepMetrics
		text, _ := json.Marshal(line)
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
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
			f, err := safetensors.Open(filepath.Join(c.Output, checkpointsDir, checkpointName(step), modelFile))
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
		for group, ratio := range m.UpdateRatio {
			if want := math.Sqrt(change[group] / before[group]); math.Abs(ratio-want) > 1e-5*want {
				t.Errorf("step %d: %s is %v, want %v", m.Step, group, ratio, want)
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
	for _, name := range []string{metricsFile, fingerprint.LogFile} {
		if err := os.Remove(filepath.Join(c.Output, name)); err != nil {
			t.Fatal(err)
		}
	}
	var warnings []string
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	if len(warnings) != 2 || !strings.Contains(warnings[0], metricsFile) ||
		!strings.Contains(warnings[1], fingerprint.LogFile) {
		t.Errorf("warnings %q", warnings)
	}
	lines := readLines(t, filepath.Join(c.Output, metricsFile))
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
	if err := os.RemoveAll(filepath.Join(c.Output, checkpointsDir)); err != nil {
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

// Whatever the file holds, what remains is its beginning, in whole lines, and cutting again changes
// nothing.
func FuzzCutRecords(f *testing.F) {
	f.Add([]byte("{\"run\":{}}\n{\"step\":0}\n{\"step\":1,\"eval\":{}}\n{\"step\":1}\n{\"st"), int64(1))
	f.Add([]byte("{\"step\":5}\n\x00\x00"), int64(9))
	f.Add([]byte("[1]\n"), int64(0))
	f.Fuzz(func(t *testing.T, content []byte, stepsDone int64) {
		path := filepath.Join(t.TempDir(), metricsFile)
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		header, last, err := cutRecords(path, stepsDone)
		got, rerr := os.ReadFile(path)
		if rerr != nil {
			t.Fatal(rerr)
		}
		if err != nil {
			if string(got) != string(content) {
				t.Error("a file that cannot be read was changed")
			}
			return
		}
		if !strings.HasPrefix(string(content), string(got)) || len(got) > 0 && got[len(got)-1] != '\n' ||
			last >= stepsDone && last != -1 {
			t.Errorf("%q cut at %d is %q, last step %d", content, stepsDone, got, last)
		}
		header2, last2, err := cutRecords(path, stepsDone)
		again, _ := os.ReadFile(path)
		if header2 != header || last2 != last || err != nil || string(again) != string(got) {
			t.Errorf("%q cut twice at %d: %q, %v", content, stepsDone, again, err)
		}
	})
}
