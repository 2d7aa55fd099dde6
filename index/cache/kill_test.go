package cache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"mula/internal/filesystem/faultfs"
	"mula/internal/locks"
	"mula/internal/longtest"
)

// The environment that makes the test binary a process that builds a directory.
const (
	childDir   = "MULA_CACHE_TEST_DIR"
	childUnits = "MULA_CACHE_TEST_UNITS"
)

// rounds is how often the tests with processes repeat themselves; the promise is about 100.
var rounds = longtest.Rounds(6, 100)

func child(dir string) {
	n, err := strconv.Atoi(os.Getenv(childUnits))
	if err == nil {
		units := testUnits(n, "x", nil)
		if os.Getpid()%2 == 0 { // some divide the units, some do not
			units = inParts(units)
		}
		_, err = Run(context.Background(), dir, units, Options{Threads: 2, Resume: true, Together: true,
			FS: faultfs.New(nil), timing: &timing{
				locks.Timing{Beat: time.Second, Stale: time.Minute}, time.Millisecond, 20 * time.Millisecond,
				5 * time.Millisecond}})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func startChild(t *testing.T, dir string, units int) (*exec.Cmd, *strings.Builder) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	c := exec.Command(exe)
	c.Env = append(os.Environ(), childDir+"="+dir, fmt.Sprintf("%s=%d", childUnits, units), "GOMAXPROCS=2")
	c.Stderr = &out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c, &out
}

// checkRecords compares the state directory with the state directory of one build.
func checkRecords(t *testing.T, dir, like string) {
	t.Helper()
	got, want := contents(t, filepath.Join(dir, StateDir)), contents(t, filepath.Join(like, StateDir))
	for name, text := range want {
		if got[name] != text {
			t.Errorf("%s: record is %q, want %q", name, got[name], text)
		}
	}
}

// Eight processes that start on one empty directory write the files of one process. A reader sees
// only complete units at any time.
func TestEightProcesses(t *testing.T) {
	longtest.SkipIfShort(t)
	n := 6
	like := t.TempDir()
	mustRun(t, like, testUnits(n, "x", nil), Options{Resume: true})
	for round := range rounds {
		dir := filepath.Join(t.TempDir(), "cache")
		var g sync.WaitGroup
		done := make(chan struct{})
		for range 8 {
			c, out := startChild(t, dir, n)
			g.Go(func() {
				if err := c.Wait(); err != nil {
					t.Errorf("round %d: %v: %s", round, err, out)
				}
			})
		}
		go func() { g.Wait(); close(done) }()
		for running := true; running; {
			select {
			case <-done:
				running = false
			case <-time.After(5 * time.Millisecond):
				checkReader(t, dir, n, "x")
			}
		}
		checkComplete(t, dir, n, "x")
		checkRecords(t, dir, like)
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
		os.RemoveAll(dir)
	}
}

// A build that is killed repeatedly at random moments ends with the bytes of an unbroken build, and
// leaves no other files.
func TestKill(t *testing.T) {
	longtest.SkipIfShort(t)
	n := 40
	like := t.TempDir()
	begin := time.Now()
	c, out := startChild(t, like, n)
	if err := c.Wait(); err != nil {
		t.Fatal(err, out)
	}
	span := max(time.Since(begin), 1)
	killed, dir := 0, ""
	for round := range rounds {
		if dir == "" {
			dir = filepath.Join(t.TempDir(), "cache")
		}
		// One process alone, or two processes: one is killed and the other continues.
		victim, out := startChild(t, dir, n)
		var other, otherOut = (*exec.Cmd)(nil), (*strings.Builder)(nil)
		if round%3 == 2 {
			other, otherOut = startChild(t, dir, n)
		}
		// Builds take longer or shorter as other work on the machine comes and goes, and shorter
		// where one goes on: the span follows.
		time.Sleep(time.Duration(rand.Int64N(int64(span))))
		victim.Process.Kill()
		if err := victim.Wait(); err != nil {
			killed++
			span = span * 12 / 10
		} else {
			span = span * 6 / 10
			if s := out.String(); s != "" {
				t.Errorf("round %d: %s", round, s)
			}
		}
		checkReader(t, dir, n, "x")
		if other == nil && round%2 == 0 {
			continue // the next process resumes from here
		}
		if other == nil {
			other, otherOut = startChild(t, dir, n)
		}
		if err := other.Wait(); err != nil {
			t.Fatalf("round %d: %v: %s", round, err, otherOut)
		}
		// What the killed one left is removed by a run that starts after its end.
		mustRun(t, dir, testUnits(n, "x", nil), Options{Resume: true})
		checkComplete(t, dir, n, "x")
		checkRecords(t, dir, like)
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
		os.RemoveAll(dir)
		dir = ""
	}
	t.Logf("%d of %d processes were killed before their end", killed, rounds)
	if killed < rounds/4 {
		t.Errorf("only %d of %d processes were killed before their end", killed, rounds)
	}
}
