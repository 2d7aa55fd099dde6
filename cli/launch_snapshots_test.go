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

	"mula/train/launch"
)

// launchSnapshots kills all ranks of a host, whose memory is lost, too. The run continues on a
// spare from a snapshot of at most two steps before, as it has no checkpoint, and ends like the
// unbroken run. The memory has no snapshots left.
func launchSnapshots(t *testing.T, dir string, whole map[string]string) {
	memory := t.TempDir()
	config := strings.Replace(launchConfig("snapshots", fourRanksSteps, fourRanks), "{every: 10, keep: 2}",
		fmt.Sprintf("{every: 0, snapshot_every: 2, snapshot_dir: %s}", memory), 1)
	l := start(t, dir, "snapshots", config, "--hosts", "a:2,b:2,c:2", "--spares", "1", "--local-hosts")
	if l.reaches(1, 7) == 0 {
		t.Fatalf("the run has ended:\n%s", l.output())
	}
	killed := 0
	for _, pid := range l.ranks() {
		environment, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if bytes.Contains(environment, []byte("\x00MULA_HOST=b\x00")) && syscall.Kill(pid, syscall.SIGKILL) == nil {
			killed++
		}
	}
	lost, err := filepath.Glob(filepath.Join(memory, "*", "b"))
	if err != nil || len(lost) != 1 || killed != 2 {
		t.Fatalf("%v, host b has %q, %d ranks killed:\n%s", err, lost, killed, l.output())
	}
	if err := os.RemoveAll(lost[0]); err != nil {
		t.Fatal(err)
	}
	l.ends(exitDone)
	attempts := l.attempts()
	if len(attempts) != 2 {
		t.Fatalf("%d attempts:\n%s", len(attempts), l.output())
	}
	a, b := attempts[0], attempts[1]
	if a.Outcome != launch.HostLost || a.Blamed != "b" || b.From < max(1, a.Step-2) ||
		!slices.Equal(b.Hosts, []string{"a", "a", "c", "c"}) {
		t.Errorf("%+v, %+v", a, b)
	}
	if !strings.Contains(l.output(), fmt.Sprintf("from snapshot-%08d", b.From)) {
		t.Errorf("the snapshot of step %d is not named:\n%s", b.From, l.output())
	}
	l.sameEnd(whole, fourRanksSteps)
	if left, err := filepath.Glob(filepath.Join(memory, "*")); err != nil || len(left) > 0 {
		t.Errorf("%q are left, %v", left, err)
	}
}
