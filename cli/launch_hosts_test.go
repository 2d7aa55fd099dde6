package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"mula/internal/longtest"
	"mula/moe"
	"mula/train"
	"mula/train/launch"
	"mula/train/record"
)

// delayVariable makes a host of tests slow. Its value is the name of the host and the seconds by
// which its ranks take longer for each step.
const delayVariable = "MULA_TEST_DELAY"

func delay(o *train.Options) {
	var host string
	var seconds float64
	if n, _ := fmt.Sscan(os.Getenv(delayVariable), &host, &seconds); n != 2 || host != os.Getenv("MULA_HOST") {
		return
	}
	progressed := o.AfterBackward // of every rank
	o.AfterBackward = func(rank int, step int64) {
		time.Sleep(time.Duration(seconds * float64(time.Second)))
		progressed(rank, step)
	}
}

// hostFaults are the faults of the hosts of tests.
func hostFaults(o *train.Options) {
	delay(o)
	poison(o)
}

// poisonVariable makes a host of tests compute wrongly. Its value is the name of the host, a rank
// and a step: the gradient that this rank computes there in this step is not finite. Only the
// command that tests run reads it.
const poisonVariable = "MULA_TEST_POISON"

func poison(o *train.Options) {
	var host string
	var poisonedRank int
	var poisonedStep int64
	if n, _ := fmt.Sscan(os.Getenv(poisonVariable), &host, &poisonedRank, &poisonedStep); n != 3 ||
		host != os.Getenv("MULA_HOST") {
		return
	}
	o.BeforeSum = func(rank int, step int64, b moe.Bucket) error {
		if rank == poisonedRank && step == poisonedStep && b.Divided {
			b.Grad.Floats()[len(b.Grad.Floats())/2] = float32(math.NaN())
		}
		return nil
	}
}

// TestLaunchHosts loses a host whose ranks compute numbers that are not finite, of hosts that are
// all this machine.
func TestLaunchHosts(t *testing.T) {
	longtest.SkipIfShort(t)
	dir := prepared(t)
	mustRun(t, dir, "blend")
	// Enough checkpoints are kept that what the lost host left can be looked at.
	config := func(name, layout string) string {
		return strings.Replace(launchConfig(name, fourRanksSteps, layout), "keep: 2", "keep: 4", 1)
	}
	if err := os.WriteFile(filepath.Join(dir, "whole.yaml"), []byte(config("whole", fourRanks)), 0o644); err != nil {
		t.Fatal(err)
	}
	mustRun(t, dir, "train", "--config", "whole.yaml")
	whole := contents(t, filepath.Join(dir, "whole"))

	// The spare replaces a host whose ranks are slow, and the run ends as without it.
	t.Run("slow", func(t *testing.T) {
		t.Setenv(delayVariable, "b 0.3")
		l := start(t, dir, "slow", config("slow", fourRanks), "--hosts", "a:2,b:2,c:2", "--spares", "1",
			"--local-hosts", "--replace-slow", "1")
		l.ends(exitDone)
		attempts := l.attempts()
		if len(attempts) != 2 || attempts[0].Outcome != launch.Slow || attempts[0].Blamed != "b" ||
			attempts[1].From != attempts[0].Step || attempts[0].Step >= fourRanksSteps ||
			!slices.Equal(attempts[1].Hosts, []string{"a", "a", "c", "c"}) ||
			!strings.Contains(l.output(), " on b is slow; the run stops after a checkpoint, and a spare replaces the "+
				"host") {
			t.Fatalf("%+v\n%s", attempts, l.output())
		}
		l.sameEnd(whole, fourRanksSteps)

		l = start(t, dir, "slow", config("slow", fourRanks), "--hosts", "a:2,b:2", "--local-hosts",
			"--replace-slow", "1")
		l.ends(exitUsage)
		if !strings.Contains(l.output(), "--replace-slow: no host is a spare; name more hosts with --hosts") {
			t.Error(l.output())
		}
	})

	t.Setenv(poisonVariable, "b 3 13") // between two checkpoints

	// poisoned compares the record of the two attempts with the expected failures.
	poisoned := func(t *testing.T, l *launched, hosts ...string) {
		t.Helper()
		attempts := l.attempts()
		if len(attempts) != 2 {
			t.Fatalf("%d attempts:\n%s", len(attempts), l.output())
		}
		a, b := attempts[0], attempts[1]
		if a.Outcome != launch.HostLost || a.Blamed != "b" || a.Rank == nil || *a.Rank != 3 || a.Step != 13 ||
			!slices.Equal(a.Hosts, []string{"a", "a", "b", "b"}) {
			t.Errorf("%+v", a)
		}
		if b.Outcome != launch.Done || b.From != 10 || b.Step != fourRanksSteps || !slices.Equal(b.Hosts, hosts) {
			t.Errorf("%+v", b)
		}
		text, err := os.ReadFile(filepath.Join(l.run, "failures.jsonl"))
		if err != nil || bytes.Count(text, []byte("\n")) != 1 {
			t.Fatalf("failures.jsonl: %v\n%s", err, text)
		}
		var f record.Failure
		if err := json.Unmarshal(text, &f); err != nil || f.Host != "b" || f.Rank != 3 || f.Step != 13 ||
			f.Kind != "not_finite" || !strings.Contains(f.Error, ".mlp.experts.") {
			t.Errorf("%v, %+v", err, f)
		}
		// The failed step has left nothing: the checkpoint before it equals the checkpoint of a run
		// without the failure.
		got := contents(t, l.run)
		for path := range whole {
			if strings.HasPrefix(path, "checkpoints/step-00000010/") && got[path] != whole[path] {
				t.Errorf("%s differs from that of the unbroken run", path)
			}
		}
	}

	t.Run("spare", func(t *testing.T) {
		l := start(t, dir, "spare", config("spare", fourRanks), "--hosts", "a:2,b:2,c:2", "--spares", "1",
			"--local-hosts")
		l.ends(exitDone)
		poisoned(t, l, "a", "a", "c", "c")
		l.sameEnd(whole, fourRanksSteps)

		// Who launches the run again does not get that host back.
		l = start(t, dir, "spare", config("spare", fourRanks), "--hosts", "b:2,a:2,c:2", "--local-hosts")
		l.ends(exitDone)
		if attempts := l.attempts(); len(attempts) != 3 || slices.Contains(attempts[2].Hosts, "b") ||
			!strings.Contains(l.output(), "host b is not used") {
			t.Errorf("%+v\n%s", attempts, l.output())
		}
	})

	t.Run("elastic", func(t *testing.T) {
		flags := []string{"--hosts", "a:2,b:2", "--local-hosts"}
		l := start(t, dir, "elastic", config("elastic", fourRanks), flags...)
		l.ends(exitFailed)
		if attempts := l.attempts(); len(attempts) != 1 || !strings.Contains(l.output(), "--elastic") {
			t.Fatalf("%+v\n%s", attempts, l.output())
		}
		if err := os.RemoveAll(l.run); err != nil {
			t.Fatal(err)
		}
		l = start(t, dir, "elastic", config("elastic", fourRanks), append(flags, "--elastic")...)
		l.ends(exitDone)
		poisoned(t, l, "a", "a")
		// The rest of the run equals a run of two ranks that resumes from the checkpoint.
		if err := os.CopyFS(filepath.Join(dir, "two/checkpoints/step-00000010"),
			os.DirFS(filepath.Join(l.run, "checkpoints/step-00000010"))); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "two.yaml"), []byte(config("two", "layout: {expert_dp: 1, ep: 2}\n")),
			0o644); err != nil {
			t.Fatal(err)
		}
		mustRun(t, dir, "train", "--config", "two.yaml")
		last := fmt.Sprintf("checkpoints/step-%08d", fourRanksSteps)
		got, want := contents(t, filepath.Join(l.run, last)), contents(t, filepath.Join(dir, "two", last))
		if len(got) != len(want) || len(want) < 5 {
			t.Errorf("%d files, want %d", len(got), len(want))
		}
		for path, content := range want {
			if got[path] != content {
				t.Errorf("%s differs from that of two ranks that go on from the checkpoint", path)
			}
		}
	})
}

// A run that diverges ends at its second attempt and says why. It keeps no host from the next
// launch.
func TestLaunchDiverged(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	for _, test := range []struct {
		name, layout string
		flags        []string
	}{
		{"four", fourRanks, []string{"--hosts", "a:2,b:2", "--local-hosts"}},
		{"one", "", nil},
	} {
		config := launchConfig(test.name, 12, test.layout)
		l := start(t, dir, test.name, config+"schedule: {warmup_steps: 0, learning_rate: 1e30}\n", test.flags...)
		l.ends(exitFailed)
		attempts := l.attempts()
		if len(attempts) != 2 || attempts[0].Blamed != "" ||
			!strings.Contains(l.output(), "The learning rate is too high, or the data is at fault") {
			t.Errorf("%s: %+v\n%s", test.name, attempts, l.output())
		}
		l = start(t, dir, test.name, config, test.flags...)
		l.ends(exitDone)
		if strings.Contains(l.output(), "is not used") {
			t.Errorf("%s: a host is not used:\n%s", test.name, l.output())
		}
	}
}
