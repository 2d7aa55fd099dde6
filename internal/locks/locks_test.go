package locks

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/testwait"
)

var quick = Timing{Beat: 20 * time.Millisecond, Stale: 200 * time.Millisecond}

// deadOwner is a process of this machine that has ended: an earlier one with this one's id.
func deadOwner() atomicfile.Owner {
	o := atomicfile.Self()
	o.Started++
	return o
}

func writeLock(t *testing.T, dir string, o atomicfile.Owner) (path string, content []byte) {
	t.Helper()
	content, err := json.Marshal(text{Owner: o, Nonce: 1})
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
	ls, err := Open(t.Context(), nil, dir, quick)
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
			os.Remove(a.at.(*directory).source)
			os.Remove(b.at.(*directory).source)
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
	if _, err := b.Wait(ctx, path, time.Millisecond); !errors.Is(err, context.Canceled) ||
		!strings.Contains(err.Error(), "waiting for process") {
		t.Error(err)
	}
	time.AfterFunc(5*time.Millisecond, l.Release)
	m, err := b.Wait(t.Context(), path, time.Millisecond)
	if err != nil || !m.Ours() || l.Ours() {
		t.Fatal(m, err)
	}
	m.Release()
}

// A lock whose time of change moves is not stale, however long it is held; one whose time stands
// still is, once it was seen so for long enough. How long that is, is told to the one who looks by
// setting back since when it has seen the lock so.
func TestStale(t *testing.T) {
	dir := t.TempDir()
	a, b := open(t, dir), open(t, dir)
	b.timing = DefaultTiming
	path := filepath.Join(dir, "unit"+Suffix)
	l, _, err := a.Acquire(path)
	if err != nil {
		t.Fatal(err)
	}
	looked := func(ago time.Duration) {
		t.Helper()
		s, ok := b.seen[path]
		if !ok {
			t.Fatal("what was looked at is not remembered")
		}
		s.since = time.Now().Add(-ago)
		b.seen[path] = s
	}
	refused := func(when string) {
		t.Helper()
		if m, _, err := b.Acquire(path); m != nil || err != nil || !l.Ours() {
			t.Fatalf("%s: %v, %v; the holder has it: %v", when, m, err, l.Ours())
		}
	}
	refused("looked at for the first time")
	at := time.Now()
	for range 3 {
		looked(2 * DefaultTiming.Stale)
		at = at.Add(time.Second)
		if err := os.Chtimes(path, time.Time{}, at); err != nil { // a sign of life
			t.Fatal(err)
		}
		refused("after a sign of life")
	}
	looked(DefaultTiming.Stale / 2)
	refused("without a sign of life for half the time")
	looked(2 * DefaultTiming.Stale)
	m, _, err := b.Acquire(path)
	if m == nil || err != nil || !m.Ours() || l.Ours() {
		t.Fatalf("without a sign of life for long: %v, %v; the first has it still: %v", m, err, l.Ours())
	}
}

// Beat gives signs of life for the locks that are held, again and again, and for no others.
func TestBeat(t *testing.T) {
	dir := t.TempDir()
	ls := open(t, dir)
	os.Remove(ls.at.(*directory).source) // or all locks were one file
	changed := func(l *Lock) time.Time {
		t.Helper()
		info, err := os.Stat(l.path)
		if err != nil {
			t.Fatal(err)
		}
		return info.ModTime()
	}
	take := func(name string) *Lock {
		t.Helper()
		l, _, err := ls.Acquire(filepath.Join(dir, name+Suffix))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	a, b, other := take("a"), take("b"), &Lock{filepath.Join(dir, "other"), nil}
	if err := os.WriteFile(other.path, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	beating := make(chan struct{})
	go func() { defer close(beating); ls.Beat(ctx) }()
	long := time.Now().Add(-time.Hour)
	for round := range 2 {
		for _, l := range []*Lock{a, b, other} {
			if err := os.Chtimes(l.path, time.Time{}, long); err != nil {
				t.Fatal(err)
			}
		}
		for _, l := range []*Lock{a, b} {
			testwait.Until(t, "a sign of life", func() bool { return changed(l).After(long.Add(time.Minute)) })
		}
		if changed(other).After(long.Add(time.Minute)) {
			t.Errorf("round %d: a sign of life for what is not held", round)
		}
	}
	stop()
	<-beating
}

// Who finds that the stale lock has become another leaves it alone.
func TestBreakLeavesAnother(t *testing.T) {
	dir := t.TempDir()
	path, before := writeLock(t, dir, atomicfile.Self())
	locks := &directory{fsys: filesystem.OS{}, path: dir}
	if err := locks.free(path, []byte("the stale one")); err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the lock holds %q, %v; want %q", after, err, before)
	}
	if err := locks.free(path, before); err != nil {
		t.Fatal(err)
	}
	if err := locks.free(path, before); err != nil {
		t.Errorf("breaking what another has broken: %v", err)
	}
	leaves(t, dir)
}

// Of many that find the same stale lock, one gets it.
func TestBreakers(t *testing.T) {
	dead := deadOwner()
	for round := range 50 {
		dir := t.TempDir()
		path, _ := writeLock(t, dir, dead)
		var got atomic.Int64
		var g sync.WaitGroup
		for range 8 {
			g.Go(func() {
				ls, err := Open(t.Context(), nil, dir, quick)
				if err != nil {
					t.Error(err)
					return
				}
				defer ls.Close()
				if round%2 == 1 { // as if there were no hard links
					os.Remove(ls.at.(*directory).source)
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
	path, _ := writeLock(t, dir, deadOwner())
	if err := os.Rename(path, filepath.Join(dir, "dead"+Suffix)); err != nil {
		t.Fatal(err)
	}
	writeLock(t, dir, atomicfile.Self())
	if err := Clean(t.Context(), nil, dir); err != nil {
		t.Fatal(err)
	}
	leaves(t, dir, "unit"+Suffix)
	if err := os.Truncate(path, maxLock+1); err != nil {
		t.Fatal(err)
	}
	if _, _, err := open(t, dir).Acquire(path); err == nil || !strings.Contains(err.Error(),
		"is not a lock file; remove it") {
		t.Errorf("a file that is no lock: %v", err)
	}
}

func TestOpenWithoutDirectory(t *testing.T) {
	if _, err := Open(t.Context(), nil, filepath.Join(t.TempDir(), "missing"), quick); err == nil ||
		strings.Contains(err.Error(), atomicfile.TempSuffix) {
		t.Errorf("%v", err)
	}
}

// A Watch never sees a set whose file has no text yet: the file appears by a rename.
func TestWatchSeesCompleteSets(t *testing.T) {
	dir, self := t.TempDir(), atomicfile.Self().String()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 2000 {
			set, err := Open(t.Context(), nil, dir, quick)
			if err != nil {
				t.Error(err)
				return
			}
			set.Close()
		}
	}()
	for w := NewWatch(dir, quick); ; {
		names, err := w.Processes()
		if err != nil {
			t.Fatal(err)
		}
		if len(names) > 1 || len(names) == 1 && names[0] != self {
			t.Fatalf("saw %q, want only %q", names, self)
		}
		select {
		case <-done:
			return
		default:
		}
	}
}
