package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"mula/internal/filesystem"
	"mula/internal/testwait"
	"mula/train/launch"
	"mula/train/record"
)

// hotSparesConfig is a run of four ranks with a snapshot after each step.
func hotSparesConfig(t *testing.T, name string) string {
	return strings.Replace(launchConfig(name, fourRanksSteps, fourRanks), "{every: 10, keep: 2}",
		fmt.Sprintf("{every: 3, keep: 2, background: true, snapshot_every: 1, snapshot_dir: %s}", t.TempDir()), 1)
}

// reachesGroup waits until the ranks have done steps after a number of replacements. It returns the
// process of rank 0, or 0 if the run has ended.
func (l *launched) reachesGroup(generation int, step int64) int {
	l.t.Helper()
	path := filepath.Join(l.run, "launch", "attempt-001", "heartbeat")
	pid := 0
	testwait.Until(l.t, fmt.Sprintf("group %d has done %d steps", generation, step), func() bool {
		select {
		case <-l.done:
			return true
		default:
		}
		beat, err := record.ReadHeartbeat(filesystem.OS{}, path)
		if err == nil && beat.Generation == generation && beat.Section != record.SectionSetup && beat.Step >= step {
			pid = beat.PID
		}
		return pid != 0
	})
	return pid
}

// rankOf returns the rank with which a process started, "" for a hot spare.
func rankOf(pid int) string {
	environment, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	for variable := range bytes.SplitSeq(environment, []byte{0}) {
		if rank, ok := bytes.CutPrefix(variable, []byte("MULA_RANK=")); ok {
			return string(rank)
		}
	}
	return ""
}

// withRank returns the process that started with a rank, or 0.
func (l *launched) withRank(rank string) int {
	for _, pid := range l.ranks() {
		if rankOf(pid) == rank {
			return pid
		}
	}
	return 0
}

func (l *launched) kill(pid int) {
	l.t.Helper()
	if pid == 0 || syscall.Kill(pid, syscall.SIGKILL) != nil {
		l.t.Fatalf("the run was over before process %d could be killed:\n%s", pid, l.output())
	}
}

// Hot spares take over from ranks that are killed, rank 0 and a spare among them. The other
// processes stay, and the run ends like an unbroken one.
func launchHotSpares(t *testing.T, dir string, whole map[string]string) {
	l := start(t, dir, "hot", hotSparesConfig(t, "hot"), "--hosts", "a:2,b:2,c:2", "--local-hosts", "--hot-spares", "1")
	l.reachesGroup(0, 4)
	stays := []int{l.withRank("1"), l.withRank("3")}
	l.kill(l.withRank("2"))
	l.kill(l.reachesGroup(1, 9)) // rank 0
	l.kill(l.reachesGroup(2, 14))
	l.reachesGroup(3, 19)
	if now := []int{l.withRank("1"), l.withRank("3")}; !slices.Equal(now, stays) || slices.Contains(now, 0) {
		t.Errorf("ranks 1 and 3 were processes %v, and are %v", stays, now)
	}
	l.ends(exitDone)
	attempts := l.attempts()
	if len(attempts) != 1 || len(attempts[0].Replaced) != 3 || attempts[0].Outcome != launch.Done {
		t.Fatalf("%+v\n%s", attempts, l.output())
	}
	for i, ranks := range [][]int{{2}, {0}, {0}} {
		r := attempts[0].Replaced[i]
		if !slices.Equal(r.Ranks, ranks) || r.From < r.Step-1 || r.From > r.Step+1 || r.Setup <= 0 ||
			!strings.Contains(r.Reason, "was killed by signal 9") {
			t.Errorf("%+v", r)
		}
	}
	for _, text := range []string{"a hot spare on c takes over rank 2", "finished: 30 steps"} {
		if !strings.Contains(l.output(), text) {
			t.Errorf("the output has no %q:\n%s", text, l.output())
		}
	}
	l.sameEnd(whole, fourRanksSteps)
}

// If more ranks die than spares wait, the launcher restarts the run with new processes, and new
// spares.
func launchHotSparesExhausted(t *testing.T, dir string, whole map[string]string) {
	l := start(t, dir, "exhausted", hotSparesConfig(t, "exhausted"), "--hot-spares", "1")
	l.reachesGroup(0, 4)
	first, second := l.withRank("0"), l.withRank("3")
	l.kill(first)
	l.kill(second)
	l.reaches(2, 10)
	l.kill(l.withRank("1"))
	l.ends(exitDone)
	attempts := l.attempts()
	if len(attempts) != 2 || attempts[0].Outcome != launch.HostLost || len(attempts[1].Replaced) != 1 ||
		attempts[1].From < attempts[0].Step-1 {
		t.Fatalf("%+v\n%s", attempts, l.output())
	}
	if text := "no hot spare takes over: 2 dead, and 1 waiting"; !strings.Contains(l.output(), text) {
		t.Errorf("the output has no %q:\n%s", text, l.output())
	}
	l.sameEnd(whole, fourRanksSteps)
}

// A spare that dies while it joins the others is replaced by the next spare.
func launchHotSparesRejoin(t *testing.T, dir string, whole map[string]string) {
	l := start(t, dir, "rejoin", hotSparesConfig(t, "rejoin"), "--hot-spares", "2")
	l.reachesGroup(0, 4)
	spares := slices.DeleteFunc(l.ranks(), func(pid int) bool { return rankOf(pid) != "" })
	slices.Sort(spares)
	if len(spares) != 2 {
		t.Fatalf("processes %v are spares:\n%s", spares, l.output())
	}
	if err := syscall.Kill(spares[0], syscall.SIGSTOP); err != nil { // it cannot join
		t.Fatal(err)
	}
	l.kill(l.withRank("1"))
	testwait.Until(t, "the first spare takes over", func() bool {
		return strings.Contains(l.output(), "takes over rank 1")
	})
	time.Sleep(10 * time.Millisecond) // the others are joining; the result does not depend on it
	l.kill(spares[0])
	l.ends(exitDone)
	attempts := l.attempts()
	if len(attempts) != 1 || len(attempts[0].Replaced) != 2 || !slices.Equal(attempts[0].Replaced[1].Ranks, []int{1}) {
		t.Fatalf("%+v\n%s", attempts, l.output())
	}
	l.sameEnd(whole, fourRanksSteps)
}

// Hot spares are refused where no process can take over from a rank.
func TestHotSparesRefused(t *testing.T) {
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	config := launchConfig("refused", 2, "layout: {expert_dp: 2}\n")
	if err := os.WriteFile(filepath.Join(dir, "two.yaml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	for flags, want := range map[string]string{
		"--with mpiexec":                 "--hot-spares needs ranks that mula launch starts itself, but --with is mpiexec",
		"--ranks 1":                      "--hot-spares needs several ranks",
		"--hosts a:1,b:1 --local-hosts":  "--hot-spares is 1, but the hosts have 2 slots, and 2 are ranks",
		"--hot-spares -1 --with mpiexec": "--hot-spares is -1; it must be",
	} {
		arguments := append([]string{"launch", "--hot-spares", "1"}, strings.Fields(flags)...)
		out, err := mula(dir, append(arguments, "--", "train", "--config", "two.yaml")...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v, and it says %q, not %q", flags, err, out, want)
		}
	}
}
