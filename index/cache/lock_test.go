package cache

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem/faultfs"
	"mula/internal/locks"
	"mula/internal/testwait"
)

// deadOwner is a process of this machine that has ended: an earlier one with this one's id.
func deadOwner() atomicfile.Owner {
	o := atomicfile.Self()
	o.Started++
	return o
}

func writeLock(t *testing.T, dir string, o atomicfile.Owner) string {
	t.Helper()
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, StateDir, "u0-description.txt"+locks.Suffix)
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		t.Fatal(err)
	}
	// A new file, because the existing file may have other names.
	if err := os.WriteFile(path+".new", text, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	return path
}

// quick looks often at what other runs hold. A holder that lives is never given up, however long a
// busy machine keeps it from giving signs of life.
var quick = &timing{locks.Timing{Beat: 20 * time.Millisecond, Stale: time.Hour}, 5 * time.Millisecond,
	20 * time.Millisecond, 5 * time.Millisecond}

// impatient takes over locks soon. It is for locks without a living holder.
var impatient = &timing{locks.Timing{Beat: quick.Beat, Stale: 200 * time.Millisecond}, quick.poll, quick.maxPoll,
	quick.watch}

// A lock of another unit that only another user may read must not cause a failure.
func TestOthersLock(t *testing.T) {
	if os.Getuid() <= 0 {
		t.Skip("permissions do not bind this user")
	}
	dir := t.TempDir()
	path := writeLock(t, dir, deadOwner())
	other := filepath.Join(filepath.Dir(path), "other"+locks.Suffix)
	if err := errors.Join(os.Rename(path, other), os.Chmod(other, 0)); err != nil {
		t.Fatal(err)
	}
	if s := mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true}); s.Built != 2 {
		t.Errorf("%+v", s)
	}
}

// The lock of an ended process blocks no process.
func TestDeadLock(t *testing.T) {
	dir := t.TempDir()
	writeLock(t, dir, deadOwner())
	s := mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true, timing: quick, Progress: func(e Event) {
		if e.Stage == Waiting {
			t.Errorf("%s waits for %s", e.Unit, e.Holder)
		}
	}})
	if s.Built != 2 {
		t.Errorf("%+v", s)
	}
	checkComplete(t, dir, 2, "x")
}

// A lock without a known holder is broken when its modification time has been unchanged for long
// enough, and not before. So is an empty lock.
func TestStaleLock(t *testing.T) {
	other := atomicfile.Self()
	other.Machine, other.Host = "0000000000000000", "elsewhere"
	dir := t.TempDir()
	writeLock(t, dir, other)
	var holder string
	s := mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true, timing: impatient, Progress: func(e Event) {
		if e.Stage == Waiting {
			holder = e.Holder
		}
	}})
	if s.Built != 2 {
		t.Errorf("%+v", s)
	}
	if want := other.String(); holder != want {
		t.Errorf("waited for %q, want %q", holder, want)
	}
	checkComplete(t, dir, 2, "x")

	dir = t.TempDir()
	path := writeLock(t, dir, other)
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true, timing: impatient})
	checkComplete(t, dir, 2, "x")
}

// As long as the holder gives signs of life, others wait; what it completes is kept.
func TestLiveLock(t *testing.T) {
	dir := t.TempDir()
	release := make(chan struct{})
	slow := testUnits(2, "x", nil)
	build := slow[0].Build
	started := make(chan struct{})
	slow[0].Build = func(ctx context.Context, files []io.WriterAt) error {
		close(started)
		<-release
		return build(ctx, files)
	}
	var g sync.WaitGroup
	g.Go(func() { mustRun(t, dir, slow[:1], Options{Resume: true, timing: quick}) })
	<-started
	// The holder gives signs of life, again and again.
	lock := filepath.Join(dir, StateDir, slow[0].Marker+locks.Suffix)
	signs, last := 0, time.Time{}
	testwait.Until(t, "four signs of life", func() bool {
		if info, err := os.Stat(lock); err != nil {
			t.Fatal(err)
		} else if !info.ModTime().Equal(last) {
			signs, last = signs+1, info.ModTime()
		}
		return signs == 4
	})
	var built atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var waits, builds bool
	_, err := Run(ctx, dir, testUnits(2, "x", &built), Options{Threads: 2, Resume: true, timing: quick,
		Progress: func(e Event) {
			waits = waits || e.Unit == "unit 0" && e.Stage == Waiting
			builds = builds || e.Unit == "unit 1" && e.Stage == Done
			if waits && builds {
				cancel()
			}
		}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("while unit 0 is being built: %v", err)
	}
	if built.Load() != 1 {
		t.Errorf("%d units were built, want unit 1 alone", built.Load())
	}
	let := sync.OnceFunc(func() { close(release) })
	// A run that must rebuild everything also uses units that other processes complete while it
	// runs.
	for _, resume := range []bool{true, false} {
		s := mustRun(t, dir, testUnits(1, "x", nil), Options{Resume: resume, timing: quick, Progress: func(e Event) {
			if e.Stage == Waiting {
				let()
			}
		}})
		if resume && s != (Summary{Shared: 1}) || !resume && s.Built != 1 {
			t.Errorf("resume %v: %+v", resume, s)
		}
	}
	g.Wait()
	checkComplete(t, dir, 2, "x")
}

// Two runs that must rebuild everything at the same time share the work.
func TestAnewTogether(t *testing.T) {
	dir := t.TempDir()
	const n = 12
	mustRun(t, dir, testUnits(n, "x", nil), Options{Resume: true})
	var built atomic.Int64
	var g sync.WaitGroup
	var begun sync.WaitGroup
	begun.Add(2)
	for range 2 {
		g.Go(func() {
			units := testUnits(n, "x", &built)
			var once sync.Once
			for i, u := range units {
				units[i].Build = func(ctx context.Context, files []io.WriterAt) error {
					once.Do(func() { begun.Done(); begun.Wait() })
					return u.Build(ctx, files)
				}
			}
			mustRun(t, dir, units, Options{Threads: 1, timing: quick})
		})
	}
	g.Wait()
	if built.Load() != n {
		t.Errorf("%d units were built, want %d", built.Load(), n)
	}
	checkComplete(t, dir, n, "x")
}

// Two runs with different settings build one directory at the same time. The run that ends last
// reports that the other run built a part of the directory.
func TestOtherSettingsMeanwhile(t *testing.T) {
	dir := t.TempDir()
	units := testUnits(2, "x", nil)
	build := units[1].Build
	units[1].Build = func(ctx context.Context, files []io.WriterAt) error {
		testwait.Until(t, "the first unit is complete", func() bool {
			_, err := os.Stat(filepath.Join(dir, units[0].Marker))
			return err == nil
		})
		mustRun(t, dir, testUnits(1, "y", nil), Options{Resume: true, timing: quick})
		return build(ctx, files)
	}
	s, err := Run(t.Context(), dir, units, Options{Threads: 1, Resume: true, timing: quick})
	if err == nil || !strings.Contains(err.Error(), "other settings") || s.Built != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	if s := mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true}); s.Built != 1 || s.Kept != 1 {
		t.Errorf("then: %+v", s)
	}
	checkComplete(t, dir, 2, "x")
}

// A run whose lock is taken over while it builds does not publish that build. Here the other run
// ends without a result, so the first one builds again.
func TestLostLock(t *testing.T) {
	dir := t.TempDir()
	units := testUnits(1, "x", nil)
	build := units[0].Build
	other := atomicfile.Self()
	other.Machine = "0000000000000000"
	calls := 0
	units[0].Build = func(ctx context.Context, files []io.WriterAt) error {
		if calls++; calls == 1 {
			writeLock(t, dir, other)
		}
		return build(ctx, files)
	}
	if s := mustRun(t, dir, units, Options{Resume: true, timing: impatient}); s.Built != 1 || calls != 2 {
		t.Errorf("%+v after %d builds", s, calls)
	}
	checkComplete(t, dir, 1, "x")
}

// A run also fails if its lock was taken over while its data files were renamed: the new holder may
// be removing them.
func TestLostLockLate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	units := testUnits(1, "x", nil)
	other := atomicfile.Self()
	other.Machine = "0000000000000000"
	data, marker := filepath.Join(dir, units[0].Files[0]), filepath.Join(dir, units[0].Marker)
	var once sync.Once
	var lock string
	fsys := faultfs.New(func(op faultfs.Op, path string) error {
		switch {
		case op == faultfs.Rename && path == data:
			once.Do(func() { lock = writeLock(t, dir, other) })
		case op == faultfs.Rename && path == marker:
			if text, err := os.ReadFile(lock); err != nil || strings.Contains(string(text), other.Machine) {
				t.Errorf("published while the lock is another's: %s, %v", text, err)
			}
		}
		return nil
	})
	s := mustRun(t, dir, units, Options{Resume: true, timing: impatient, FS: fsys})
	if s.Built != 1 || lock == "" {
		t.Errorf("%d units built, want 1; lock %q, want one", s.Built, lock)
	}
	checkComplete(t, dir, 1, "x")
}
