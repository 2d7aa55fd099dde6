package cache

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"mula/internal/atomicfile"
	"mula/internal/filesystem/faultfs"
	"mula/internal/locks"
	"mula/internal/longtest"
	"mula/internal/testwait"
)

// inParts are units whose first two files are one part and whose third is another.
func inParts(units []Unit) []Unit {
	for i := range units {
		units[i].Parts = [][]int{{0, 1}, {2}}
	}
	return units
}

func TestPartsRefused(t *testing.T) {
	for _, parts := range [][][]int{{{0}, {1}}, {{0, 1}, {1, 2}}, {{0, 1, 2}, {3}}, {{0, 1}, {-1}}} {
		units := testUnits(1, "x", nil)
		units[0].Parts = parts
		if _, err := Run(t.Context(), t.TempDir(), units, Options{Threads: 1}); err == nil ||
			!strings.Contains(err.Error(), "do not divide 3 files") {
			t.Errorf("%v: %v", parts, err)
		}
	}
}

// A unit that is built in parts has the bytes, the record and the intermediate states of a unit
// that is built at once. Complete parts are kept, also by a process that builds the unit at once,
// unless everything must be rebuilt.
func TestParts(t *testing.T) {
	const n = 5
	dir := t.TempDir()
	var built atomic.Int64
	s := mustRun(t, dir, inParts(testUnits(n, "x", &built)), Options{Resume: true})
	if s.Built != n || built.Load() != 2*n || s.Bytes != unitBytes(n, "x") {
		t.Errorf("%+v, %d builds", s, built.Load())
	}
	checkComplete(t, dir, n, "x")
	if s := mustRun(t, dir, testUnits(n, "x", nil), Options{Resume: true}); s.Kept != n {
		t.Errorf("in a piece: %+v", s)
	}
	for _, gone := range []string{"u0-2.npy", "u1-0.npy", "u2-description.txt"} {
		if err := os.Remove(filepath.Join(dir, gone)); err != nil {
			t.Fatal(err)
		}
	}
	built.Store(0)
	if s := mustRun(t, dir, inParts(testUnits(n, "x", &built)), Options{Resume: true}); s.Built != 3 || s.Kept != n-3 ||
		built.Load() != 2 {
		t.Errorf("after a loss: %+v, %d builds", s, built.Load())
	}
	checkComplete(t, dir, n, "x")
	built.Store(0)
	if s := mustRun(t, dir, inParts(testUnits(n, "x", &built)), Options{}); s.Built != n || built.Load() != 2*n {
		t.Errorf("anew: %+v, %d builds", s, built.Load())
	}
	checkComplete(t, dir, n, "x")
	if s := mustRun(t, dir, inParts(testUnits(n, "other", nil)), Options{Resume: true}); s.Built != n {
		t.Errorf("other settings: %+v", s)
	}
	checkComplete(t, dir, n, "other")
}

// Two runs that are at one unit at the same time take a part each.
func TestPartsAreShared(t *testing.T) {
	dir := t.TempDir()
	both := make(chan struct{})
	var inside atomic.Int64
	units := func() []Unit {
		list := inParts(testUnits(1, "x", nil))
		build := list[0].Build
		list[0].Build = func(ctx context.Context, files []io.WriterAt) error {
			if inside.Add(1) == 2 {
				close(both)
			}
			select {
			case <-both:
			case <-testwait.Context(t).Done():
				return errors.New("nobody has taken the other part")
			}
			return build(ctx, files)
		}
		return list
	}
	var g sync.WaitGroup
	var sum [2]Summary
	for i := range sum {
		g.Go(func() {
			var err error
			if sum[i], err = Run(t.Context(), dir, units(), Options{Threads: 2, Resume: true, Together: true,
				timing: quick}); err != nil {
				t.Error(err)
			}
		})
	}
	g.Wait()
	if sum[0].Built+sum[1].Built != 1 || sum[0].Shared+sum[1].Shared != 1 ||
		sum[0].Bytes+sum[1].Bytes != unitBytes(1, "x") || inside.Load() != 2 {
		t.Errorf("%+v, %d builds", sum, inside.Load())
	}
	checkComplete(t, dir, 1, "x")
}

// Whichever operation fails, a reader sees whole units only, and the next run completes them.
func TestPartsEveryFault(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	for k := int64(1); ; k++ {
		dir := t.TempDir()
		mustRun(t, dir, testUnits(1, "old", nil), Options{Resume: true})
		nth := &faultfs.Nth{K: k, Err: syscall.EIO}
		_, err := Run(t.Context(), dir, inParts(testUnits(1, "x", nil)), Options{Threads: 1, Resume: true,
			timing: quick, FS: faultfs.New(nth.Fault)})
		checkReader(t, dir, 1, "x", "old")
		if nth.Failed() == "" {
			if err != nil || k < 20 {
				t.Fatalf("%v after %d operations; want no error and at least 19", err, k-1)
			}
			return
		}
		if err != nil && !errors.Is(err, syscall.EIO) {
			t.Errorf("%s failed: got %v, want EIO or no error", nth.Failed(), err)
		}
		mustRun(t, dir, inParts(testUnits(1, "x", nil)), Options{Resume: true})
		checkComplete(t, dir, 1, "x")
		if t.Failed() {
			t.Fatalf("at operation %d", k)
		}
	}
}

// The error of one of a group ends the others, with its text; who is not of the group goes on.
func TestTogetherFails(t *testing.T) {
	dir := t.TempDir()
	building := make(chan struct{})
	slow := testUnits(2, "x", nil)
	build := slow[0].Build
	slow[0].Build = func(ctx context.Context, files []io.WriterAt) error {
		close(building)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-testwait.Context(t).Done():
		}
		return build(ctx, files)
	}
	result := make(chan error, 1)
	go func() {
		_, err := Run(t.Context(), dir, slow, Options{Threads: 1, Resume: true, Together: true, timing: quick})
		result <- err
	}()
	<-building
	broken := testUnits(2, "x", nil)
	broken[1].Build = func(context.Context, []io.WriterAt) error { return errors.New("no such luck") }
	_, err := Run(t.Context(), dir, broken, Options{Threads: 1, Resume: true, Together: true, timing: quick})
	if err == nil || !strings.Contains(err.Error(), "unit 1: no such luck") {
		t.Fatal(err)
	}
	var other *FailedError
	if err := <-result; !errors.As(err, &other) || other.Text != "unit 1: no such luck" ||
		!strings.Contains(err.Error(), atomicfile.Self().String()) {
		t.Errorf("the other ended with %v", err)
	}
	// The note belongs to a group that has ended.
	if _, err := Run(t.Context(), dir, testUnits(2, "x", nil), Options{Threads: 1, Resume: true, Together: true,
		timing: quick}); err != nil {
		t.Fatal(err)
	}
	checkComplete(t, dir, 2, "x")
	if notes, _ := filepath.Glob(filepath.Join(dir, StateDir, "failed-*")); len(notes) > 0 {
		t.Errorf("left behind: %v", notes)
	}
}

// Being told to stop is no failure: the others go on.
func TestTogetherStopped(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	units := testUnits(1, "x", nil)
	units[0].Build = func(ctx context.Context, _ []io.WriterAt) error {
		cancel()
		<-ctx.Done()
		return context.Cause(ctx)
	}
	if _, err := Run(ctx, dir, units, Options{Threads: 1, Resume: true, Together: true, timing: quick}); !errors.Is(err,
		context.Canceled) {
		t.Fatal(err)
	}
	if notes, _ := filepath.Glob(filepath.Join(dir, StateDir, "failed-*")); len(notes) > 0 {
		t.Errorf("left behind: %v", notes)
	}
}

// A unit that another process completes is counted before this process reaches it.
func TestOthersAreCounted(t *testing.T) {
	dir := t.TempDir()
	counted := make(chan struct{})
	var once sync.Once
	var elsewhere atomic.Bool
	units := testUnits(3, "x", nil)
	build := units[1].Build
	units[1].Build = func(ctx context.Context, files []io.WriterAt) error {
		// Meanwhile, another process builds the last unit.
		elsewhere.Store(true)
		if _, err := Run(ctx, dir, testUnits(3, "x", nil)[2:], Options{Threads: 1, Resume: true,
			timing: quick}); err != nil {
			return err
		}
		select {
		case <-counted:
		case <-testwait.Context(t).Done():
			return errors.New("it was not counted")
		}
		return build(ctx, files)
	}
	release := heldLock(t, dir, units[0].Marker) // this one must notice that it is not alone
	s, err := Run(t.Context(), dir, units, Options{Threads: 1, Resume: true, timing: quick, Progress: func(e Event) {
		if e.Unit == "unit 2" && e.Stage == Kept && elsewhere.Load() {
			once.Do(func() { close(counted); release() })
		}
	}})
	if err != nil || s.Shared != 1 || s.Built != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	checkComplete(t, dir, 3, "x")
}

// Who waits for one unit of a directory gets it when it is there, although others are still being
// built; without a builder there is nothing to wait for.
func TestAwait(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	open := func() error {
		_, err := os.Stat(filepath.Join(dir, "u0-description.txt"))
		return err
	}
	told := func(string) {}
	if err := await(t.Context(), dir, *quick, told, open); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("nobody builds: %v", err)
	}
	units, waits, seen := testUnits(2, "x", nil), make(chan struct{}), make(chan error, 1)
	for i, until := range []chan struct{}{waits, make(chan struct{})} {
		build := units[i].Build
		units[i].Build = func(ctx context.Context, files []io.WriterAt) error {
			select {
			case <-until:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			return build(ctx, files)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Run(ctx, dir, units, Options{Threads: 2, Resume: true, timing: quick})
	}()
	testwait.Until(t, "a run builds", func() bool {
		builders, _ := Builders(dir)
		return len(builders) > 0
	})
	go func() {
		seen <- await(t.Context(), dir, *quick, func(builder string) {
			if builder != atomicfile.Self().String() {
				t.Errorf("waits for %q", builder)
			}
			close(waits)
		}, open)
	}()
	if err := <-seen; err != nil {
		t.Error(err)
	}
	stopped, stop := context.WithCancel(t.Context())
	err := await(stopped, dir, *quick, func(string) { stop() }, func() error {
		_, err := os.Stat(filepath.Join(dir, "u1-description.txt"))
		return err
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("told to stop: %v", err)
	}
	cancel()
	<-ended
	if builders, err := Builders(dir); len(builders) > 0 || err != nil {
		t.Errorf("after its end: %v, %v", builders, err)
	}
}

// heldLock takes the lock of a unit as another process would, which lives.
func heldLock(t *testing.T, dir, marker string) (release func()) {
	t.Helper()
	state := filepath.Join(dir, StateDir)
	if err := os.MkdirAll(state, 0o777); err != nil {
		t.Fatal(err)
	}
	set, err := locks.Open(t.Context(), nil, state, quick.Timing)
	if err != nil {
		t.Fatal(err)
	}
	l, _, err := set.Acquire(filepath.Join(state, marker+locks.Suffix))
	if err != nil || l == nil {
		t.Fatal(l, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); set.Beat(ctx) }()
	return sync.OnceFunc(func() { stop(); <-ended; l.Release(); set.Close() })
}
