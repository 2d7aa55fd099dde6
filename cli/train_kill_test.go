package cli

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"mula/internal/longtest"
	"mula/internal/testwait"
	"mula/xpu/opencl"
)

// metricsIn reads what metrics.jsonl of a run has but for what depends on when and where the run
// took place: lines about resuming, times, speeds.
func metricsIn(t *testing.T, run string) (lines []map[string]any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(run, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for text := range bytes.Lines(data) {
		var line map[string]any
		if err := json.Unmarshal(text, &line); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if line["resumed"] != nil {
			continue
		}
		header, _ := line["run"].(map[string]any)
		for _, fields := range []map[string]any{line, header} {
			for _, name := range []string{"seconds", "tokens_per_second", "mfu", "time", "rank_seconds",
				"slow_ranks", "slowest_ranks", "started", "peak_flops", "device"} {
				delete(fields, name)
			}
		}
		lines = append(lines, line)
	}
	return lines
}

// stepsIn counts the steps on record in a run that may be under way.
func stepsIn(run string) int {
	data, _ := os.ReadFile(filepath.Join(run, "metrics.jsonl"))
	return bytes.Count(data, []byte(`"learning_rate"`))
}

// writeFile writes a file of a test.
func writeFile(t *testing.T, text string, path ...string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(path...), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A run that handles spikes ends with the weights and metrics of an unbroken run, wherever it is
// killed: before a spike, at it, and after it.
func TestKilledSpikes(t *testing.T) {
	longtest.SkipIfShort(t)
	for seed, test := range []struct{ name, spikes string }{
		{"skip", "{action: skip, sigma: 1.5, window: 4, max_skips: 40}"},
		{"rollback", "{action: rollback, sigma: 2, window: 4, skip_steps: 3, max_rollbacks: 40}"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			const steps = 30
			dir := prepared(t)
			mustRun(t, dir, "blend")
			run, whole := filepath.Join(dir, "run"), filepath.Join(dir, "whole")
			writeFile(t, fmt.Sprintf("output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: %d\nseed: "+
				"3\nthreads: 1\nschedule: {warmup_steps: 2, learning_rate: 3e-3}\n"+
				"checkpoint: {every: 3, keep: 2}\nevaluate: {every: 10, samples: 2}\nspikes: %s\n", steps,
				test.spikes), dir, "train.yaml")
			k := newKiller(uint64(5+seed), func() { mustRun(t, dir, "train") })
			if err := os.Rename(run, whole); err != nil {
				t.Fatal(err)
			}
			final := fmt.Sprintf("checkpoints/step-%08d/", steps)
			want, wantMetrics := contents(t, whole), metricsIn(t, whole)
			spikes := 0
			for _, line := range wantMetrics {
				if line["skipped"] != nil || line["rollback"] != nil {
					spikes++
				}
			}
			if spikes < 2 || want["skips.yaml"] == "" {
				t.Fatalf("the run had %d spikes: it says nothing", spikes)
			}
			compare := func() {
				t.Helper()
				got := contents(t, run)
				for _, name := range []string{final + "model.safetensors", final + "optimizer.safetensors",
					final + "state.json", "fingerprints.jsonl", "skips.yaml"} {
					if want[name] == "" || got[name] != want[name] {
						t.Errorf("%s differs after kills", name)
					}
				}
				if diff := cmp.Diff(wantMetrics, metricsIn(t, run)); diff != "" {
					t.Errorf("metrics differ after kills (-want +got):\n%s", diff)
				}
			}
			const enough = 6
			after := 0 // kills after the first spike
			for try := 0; k.inTime < enough && try < 4*enough; try++ {
				before := k.inTime
				k.kill(t, dir, "train")
				if _, err := os.Stat(filepath.Join(run, "skips.yaml")); err == nil && k.inTime > before {
					after++
				}
				if _, err := os.Stat(filepath.Join(run, final)); err == nil {
					compare()
					if err := os.RemoveAll(run); err != nil {
						t.Fatal(err)
					}
				}
			}
			mustRun(t, dir, "train")
			compare()
			t.Logf("%d spikes, %d kills, %d of them after the first spike", spikes, k.inTime, after)
			if k.inTime < enough/2 {
				t.Errorf("only %d kills came before the end", k.inTime)
			}
		})
	}
}

// On an OpenCL device a run keeps what it promises, as a process: killed there at a random step it
// goes on on the processor, and the other way round, with a warning and along the losses of the
// processor; and a signal ends it after the step.
func TestTrainOpenCL(t *testing.T) {
	longtest.SkipIfShort(t)
	if devices, err := opencl.Devices(); len(devices) == 0 {
		t.Skip(err)
	}
	cache := t.TempDir() // what is compiled is the test's own, and compiled once
	t.Setenv("XDG_CACHE_HOME", cache)
	t.Setenv("POCL_CACHE_DIR", cache)
	// What this test holds are processes: killed, stopped, resumed. Optimized, PoCL takes twenty
	// seconds more; TestDevice of xpu/gpu has optimized kernels.
	t.Setenv("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")
	dir := prepared(t)
	mustRun(t, dir, "blend")
	configure := func(name, device string, steps int) {
		writeFile(t, fmt.Sprintf("output: %s\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: %d\nseed: "+
			"3\ndevice: %s\nthreads: 1\nschedule: {decay_steps: 50, warmup_steps: 5}\n"+
			"checkpoint: {every: 5}\nevaluate: {every: 0}\n", name, steps, device), dir, name+".yaml")
	}
	losses := func(run string) map[string]float64 {
		all := map[string]float64{}
		for _, line := range metricsIn(t, run) {
			if loss, ok := line["loss"].(float64); ok {
				all[fmt.Sprint(line["step"])] = loss
			}
		}
		return all
	}
	const steps = 50
	configure("whole", "cpu", steps)
	mustRun(t, dir, "train", "--config", "whole.yaml")
	want := losses(filepath.Join(dir, "whole"))
	if len(want) != steps {
		t.Fatalf("%d steps", len(want))
	}
	random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	for _, devices := range [][2]string{{"opencl", "cpu"}, {"cpu", "opencl"}} {
		name := "from-" + devices[0]
		run := filepath.Join(dir, name)
		configure(name, devices[0], steps)
		step := 8 + random.IntN(30)
		for try := 0; ; try++ {
			c := mula(dir, "train", "--config", name+".yaml")
			var out bytes.Buffer
			c.Stdout, c.Stderr = &out, &out
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- c.Wait() }()
			err := io.EOF // while it has not ended
			testwait.Until(t, "the step is done", func() bool {
				select {
				case err = <-ended:
				default:
				}
				return err != io.EOF || stepsIn(run) >= step
			})
			if err == io.EOF {
				time.Sleep(time.Duration(random.Int64N(int64(5 * time.Millisecond)))) // anywhere in the next step
				c.Process.Kill()
				err = <-ended
			}
			if c.ProcessState.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
				break
			}
			if err != nil || try == 5 {
				t.Fatalf("%s was not killed at step %d: %v\n%s", name, step, err, out.String())
			}
			if err := os.RemoveAll(run); err != nil { // it was faster
				t.Fatal(err)
			}
		}
		configure(name, devices[1], steps)
		out := mustRun(t, dir, "train", "--config", name+".yaml")
		for _, text := range []string{"resuming   from step-", "was computed with the arithmetic of " + devices[0],
			"but its last bits will differ", "finished: 50 steps"} {
			if !strings.Contains(out, text) {
				t.Errorf("%s, killed at step %d and resumed on %s, does not say %q:\n%s", name, step, devices[1], text,
					out)
			}
		}
		got := losses(run)
		if !slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want))) {
			t.Fatalf("%s, killed at step %d: %d steps on record", name, step, len(got))
		}
		apart := 0.0
		for at, loss := range want {
			apart = max(apart, math.Abs(got[at]-loss)/loss)
		}
		t.Logf("%s, killed at step %d: losses are apart from the processor's by %.2g", name, step, apart)
		if !(apart < 1e-4) {
			t.Errorf("%s, killed at step %d: losses are apart from the processor's by %.2g", name, step, apart)
		}
	}

	configure("stopped", "opencl", 200)
	run := filepath.Join(dir, "stopped")
	c := mula(dir, "train", "--config", "stopped.yaml")
	messages, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "three steps are done", func() bool { return stepsIn(run) >= 3 })
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	said := 0 // steps on record when the process has said that it stops
	var text strings.Builder
	for lines := bufio.NewScanner(messages); lines.Scan(); {
		if text.WriteString(lines.Text() + "\n"); strings.Contains(lines.Text(), "stopping: finishing the step") {
			said = stepsIn(run)
		}
	}
	if err := c.Wait(); c.ProcessState.ExitCode() != exitStopped || said == 0 {
		t.Fatalf("stopped: %v\n%s", err, text.String())
	}
	done := stepsIn(run)
	if _, err := os.Stat(filepath.Join(run, fmt.Sprintf("checkpoints/step-%08d", done))); err != nil || done > said+1 {
		t.Errorf("%d steps were done when the run was told to stop, and %d at its end; %v", said, done, err)
	}
}
