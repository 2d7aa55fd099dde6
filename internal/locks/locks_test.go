package locks

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mula/internal/atomicfile"
)

var quick = Timing{Beat: 20 * time.Millisecond, Stale: 200 * time.Millisecond}

// deadOwner is a process of this machine that has ended.
func deadOwner(t *testing.T) atomicfile.Owner {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe, "-test.list", "^$")
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	o := atomicfile.Self()
	o.PID, o.Started = c.Process.Pid, 0
	return o
}

func writeLock(t *testing.T, dir string, o atomicfile.Owner) (path string, content []byte) {
	t.Helper()
	content, err := json.Marshal(text{o, 1})
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(dir, "unit"+Suffix)
	if err := os.WriteFile(path, content, 0o666); err != nil {
		t.Fatal(err)
	}
	return path, content
}

func open(t *testing.T, dir string) *Set {
	t.Helper()
	ls, err := Open(dir, quick)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ls.Close)
	return ls
}

// leaves fails if anything but the files named is in dir.
func leaves(t *testing.T, dir string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(names) {
		t.Fatalf("%v, %v; want %v", entries, err, names)
	}
	for i, e := range entries {
		if e.Name() != names[i] {
			t.Errorf("%v; want %v", entries, names)
		}
	}
}

func TestAcquire(t *testing.T) {
	for _, links := range []bool{true, false} {
		dir := t.TempDir()
		path := filepath.Join(dir, "unit"+Suffix)
		a, b := open(t, dir), open(t, dir)
		if !links { // as if the file system had none
			os.Remove(a.source)
			os.Remove(b.source)
		}
		l, _, err := a.Acquire(path)
		if l == nil || err != nil || !l.Ours() {
			t.Fatalf("%v, %v", l, err)
		}
		if other, holder, err := b.Acquire(path); other != nil || err != nil || holder != atomicfile.Self().String() {
			t.Errorf("%v, %q, %v", other, holder, err)
		}
		l.Release()
		l.Release()
		m, _, err := b.Acquire(path)
		if m == nil || err != nil {
			t.Fatalf("%v, %v", m, err)
		}
		if l.Release(); l.Ours() || !m.Ours() {
			t.Error("a lock that was given back is still held")
		}
		m.Release()
		a.Close()
		b.Close()
		leaves(t, dir)
	}
}

// Who waits gets the lock when it is given back, or the reason why it stopped waiting.
func TestWait(t *testing.T) {
	dir := t.TempDir()
	a, b := open(t, dir), open(t, dir)
	path := filepath.Join(dir, "unit"+Suffix)
	l, err := a.Wait(t.Context(), path, time.Millisecond)
	if err != nil || !l.Ours() {
		t.Fatal(l, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(5*time.Millisecond, cancel)
	if _, err := b.Wait(ctx, path, time.Millisecond); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "waiting for process") {
		t.Error(err)
	}
	time.AfterFunc(5*time.Millisecond, l.Release)
	m, err := b.Wait(t.Context(), path, time.Millisecond)
	if err != nil || !m.Ours() || l.Ours() {
		t.Fatal(m, err)
	}
	m.Release()
}

// A lock whose holder gives signs of life is not stale; one whose holder does not is, after a while.
func TestStale(t *testing.T) {
	dir := t.TempDir()
	a, b := open(t, dir), open(t, dir)
	path := filepath.Join(dir, "unit"+Suffix)
	l, _, err := a.Acquire(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	beating := make(chan struct{})
	go func() { defer close(beating); a.Beat(ctx) }()
	for begin := time.Now(); time.Since(begin) < 3*quick.Stale; time.Sleep(quick.Beat) {
		if m, _, err := b.Acquire(path); m != nil || err != nil {
			// Signs of life may fail to appear on a machine that is busy with other things: then the holder knows.
			if l.Ours() {
				t.Fatalf("two hold the lock, %v", err)
			}
			t.Skip("the machine gave no time to the holder")
		}
	}
	stop()
	<-beating
	deadline := time.Now().Add(time.Minute)
	for {
		m, _, err := b.Acquire(path)
		if err != nil {
			t.Fatal(err)
		}
		if m != nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the lock is never given up")
		}
		time.Sleep(quick.Beat)
	}
	if l.Ours() {
		t.Error("the lock that was taken over is still held by the first")
	}
}

// Who finds that the stale lock has become another leaves it alone.
func TestBreakLeavesAnother(t *testing.T) {
	dir := t.TempDir()
	path, before := writeLock(t, dir, atomicfile.Self())
	ls := &Set{dir: dir}
	if err := ls.breakLock(path, []byte("the stale one")); err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the lock holds %q, %v; want %q", after, err, before)
	}
	if err := ls.breakLock(path, before); err != nil {
		t.Fatal(err)
	}
	if err := ls.breakLock(path, before); err != nil {
		t.Errorf("breaking what another has broken: %v", err)
	}
	leaves(t, dir)
}

// Of many that find the same stale lock, one gets it.
func TestBreakers(t *testing.T) {
	dead := deadOwner(t)
	for round := range 50 {
		dir := t.TempDir()
		path, _ := writeLock(t, dir, dead)
		var got atomic.Int64
		var g sync.WaitGroup
		for range 8 {
			g.Go(func() {
				ls, err := Open(dir, quick)
				if err != nil {
					t.Error(err)
					return
				}
				defer ls.Close()
				if round%2 == 1 { // as if there were no hard links
					os.Remove(ls.source)
				}
				l, _, err := ls.Acquire(path)
				if err != nil {
					t.Error(err)
				}
				if l != nil {
					got.Add(1)
				}
			})
		}
		g.Wait()
		if got.Load() != 1 {
			t.Fatalf("%d have the lock", got.Load())
		}
	}
}

func TestClean(t *testing.T) {
	dir := t.TempDir()
	path, _ := writeLock(t, dir, deadOwner(t))
	if err := os.Rename(path, filepath.Join(dir, "dead"+Suffix)); err != nil {
		t.Fatal(err)
	}
	writeLock(t, dir, atomicfile.Self())
	if err := Clean(dir); err != nil {
		t.Fatal(err)
	}
	leaves(t, dir, "unit"+Suffix)
	if err := os.Truncate(path, maxLock+1); err != nil {
		t.Fatal(err)
	}
	if _, _, err := open(t, dir).Acquire(path); err == nil || !strings.Contains(err.Error(), "is no lock; remove it") {
		t.Errorf("a file that is no lock: %v", err)
	}
}

func TestOpenWithoutDirectory(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "missing"), quick); err == nil || strings.Contains(err.Error(), atomicfile.TempSuffix) {
		t.Errorf("%v", err)
	}
}
