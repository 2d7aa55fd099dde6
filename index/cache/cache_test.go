package cache

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"mula/internal/atomicfile"
	"mula/internal/filesystem/faultfs"
	"mula/internal/locks"
	"mula/internal/longtest"
	"mula/internal/quantity"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		child(dir)
		return
	}
	goleak.VerifyTestMain(m)
}

// content returns the bytes of file k of unit u, built with settings s. One file is large enough to
// bypass the page cache, and one is empty.
func content(s string, u, k int) []byte {
	key := fmt.Sprintf("%s %d %d", s, u, k)
	if p, ok := made.Load(key); ok {
		return p.([]byte)
	}
	size := 100 + 37*u + 4096*k
	if u == 1 && k == 0 {
		size = 1<<20 + 12345
	}
	if u == 2 && k == 2 {
		size = 0
	}
	var seed [32]byte
	copy(seed[:], key)
	p := make([]byte, size)
	rand.NewChaCha8(seed).Read(p)
	made.Store(key, p)
	return p
}

var made sync.Map // what content has returned

const filesPerUnit = 3

// testUnits are n units built with settings s; built counts calls of Build.
func testUnits(n int, s string, built *atomic.Int64) []Unit {
	units := make([]Unit, n)
	for u := range units {
		units[u] = Unit{
			Name:       fmt.Sprintf("unit %d", u),
			Marker:     fmt.Sprintf("u%d-description.txt", u),
			MarkerText: fmt.Appendf(nil, "unit %d is there\n", u),
			Settings:   json.RawMessage(fmt.Sprintf(`{"s": %q}`, s)),
			Sizes: func(context.Context) ([]int64, error) {
				var sizes []int64
				for k := range filesPerUnit {
					sizes = append(sizes, int64(len(content(s, u, k))))
				}
				return sizes, nil
			},
			Build: func(ctx context.Context, files []io.WriterAt) error {
				if built != nil {
					built.Add(1)
				}
				for k, f := range files {
					if f == nil {
						continue
					}
					// From the end to the beginning, in uneven pieces.
					p := content(s, u, k)
					for end := len(p); end > 0; {
						begin := max(0, end-60001)
						if _, err := f.WriteAt(p[begin:end], int64(begin)); err != nil {
							return err
						}
						end = begin
					}
				}
				return ctx.Err()
			},
		}
		for k := range filesPerUnit {
			units[u].Files = append(units[u].Files, fmt.Sprintf("u%d-%d.npy", u, k))
		}
	}
	return units
}

// contents reads every file of dir but the state directory's.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := make(map[string]string)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		p, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out[e.Name()] = string(p)
	}
	return out
}

// wanted returns the contents of n complete units.
func wanted(n int, s string) map[string]string {
	out := make(map[string]string)
	for u, unit := range testUnits(n, s, nil) {
		out[unit.Marker] = string(unit.MarkerText)
		for k, name := range unit.Files {
			out[name] = string(content(s, u, k))
		}
	}
	return out
}

func checkComplete(t *testing.T, dir string, n int, s string) {
	t.Helper()
	got, want := contents(t, dir), wanted(n, s)
	for name, p := range want {
		if q, ok := got[name]; !ok {
			t.Errorf("%s is missing", name)
		} else if q != p {
			t.Errorf("%s has other bytes than expected", name)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("left behind: %s", name)
		}
	}
	entries, err := os.ReadDir(filepath.Join(dir, StateDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".json") || strings.HasPrefix(e.Name(), ".") {
			t.Errorf("left behind: %s", filepath.Join(StateDir, e.Name()))
		}
	}
}

// checkReader fails unless the two promises of publish.go hold for n units that may have been built
// with any of the settings.
func checkReader(t *testing.T, dir string, n int, settings ...string) {
	t.Helper()
	for u, unit := range testUnits(n, "", nil) {
		matching := func(k int) (all []string, there bool) {
			p, err := os.ReadFile(filepath.Join(dir, unit.Files[k]))
			for _, s := range settings {
				if err == nil && bytes.Equal(p, content(s, u, k)) {
					all = append(all, s)
				}
			}
			return all, err == nil
		}
		if text, err := os.ReadFile(filepath.Join(dir, unit.Marker)); err == nil {
			if !bytes.Equal(text, unit.MarkerText) {
				t.Errorf("%s: marker holds %q", unit.Name, text)
			}
			common := settings
			for k := range unit.Files {
				all, there := matching(k)
				if !there {
					t.Errorf("%s: there is a marker, but %s is missing", unit.Name, unit.Files[k])
				}
				common = slices.DeleteFunc(slices.Clone(common),
					func(s string) bool { return !slices.Contains(all, s) })
			}
			if len(common) == 0 {
				t.Errorf("%s: there is a marker, but the files are broken or a mixture", unit.Name)
			}
		}
		text, err := os.ReadFile(filepath.Join(dir, StateDir, unit.Marker+".json"))
		if err != nil {
			continue
		}
		var rec struct {
			Settings struct{ S string }
		}
		if err := json.Unmarshal(text, &rec); err != nil {
			t.Fatal(err)
		}
		for k := range unit.Files {
			if all, there := matching(k); there && !slices.Contains(all, rec.Settings.S) {
				t.Errorf("%s: the record says %q, but %s was not built with that", unit.Name, rec.Settings.S,
					unit.Files[k])
			}
		}
	}
}

func mustRun(t *testing.T, dir string, units []Unit, o Options) Summary {
	t.Helper()
	if o.Threads == 0 {
		o.Threads = 2
	}
	if o.FS == nil {
		o.FS = faultfs.New(nil)
	}
	s, err := Run(t.Context(), dir, units, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func unitBytes(n int, s string) (bytes int64) {
	for u := range n {
		for k := range filesPerUnit {
			bytes += int64(len(content(s, u, k)))
		}
	}
	return bytes
}

func TestBuildKeepAnew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	const n = 5
	var built atomic.Int64
	units := testUnits(n, "x", &built)
	if s := mustRun(t, dir, units, Options{Resume: true}); s != (Summary{Built: n, Bytes: unitBytes(n, "x")}) ||
		built.Load() != n {
		t.Fatalf("first run: %+v, %d built", s, built.Load())
	}
	checkComplete(t, dir, n, "x")
	if s := mustRun(t, dir, units, Options{Resume: true}); s != (Summary{Kept: n}) || built.Load() != n {
		t.Fatalf("second run: %+v, %d built", s, built.Load())
	}
	// Blanks in the settings' text mean nothing.
	for i := range units {
		units[i].Settings = json.RawMessage("{ \"s\"  : \"x\" }\n")
	}
	if s := mustRun(t, dir, units, Options{Resume: true}); s != (Summary{Kept: n}) {
		t.Fatalf("with blanks: %+v", s)
	}
	if s := mustRun(t, dir, units, Options{}); s.Built != n || built.Load() != 2*n {
		t.Fatalf("anew: %+v, %d built", s, built.Load())
	}
	checkComplete(t, dir, n, "x")
	if s := mustRun(t, dir, testUnits(n, "y", nil), Options{Resume: true}); s.Built != n {
		t.Fatalf("other settings: %+v", s)
	}
	checkComplete(t, dir, n, "y")
}

// Sizes, which may be costly, are asked only where something is built.
func TestSizesOnlyWhenNeeded(t *testing.T) {
	dir := t.TempDir()
	mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true})
	units := testUnits(2, "x", nil)
	for i := range units {
		units[i].Sizes = func(context.Context) ([]int64, error) { return nil, errors.New("asked") }
	}
	if s := mustRun(t, dir, units, Options{Resume: true}); s.Kept != 2 {
		t.Errorf("%+v", s)
	}
}

// What may be kept of an incomplete unit, and what must not be.
func TestWhatIsKept(t *testing.T) {
	damage := func(name string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, name), 7); err != nil {
				t.Fatal(err)
			}
		}
	}
	remove := func(names ...string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			for _, name := range names {
				if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for _, test := range []struct {
		name   string
		change func(*testing.T, string)
		files  int // written by the next run
		want   Summary
	}{
		{"marker missing", remove("u0-description.txt"), 0, Summary{Built: 1}},
		{"marker damaged", damage("u0-description.txt"), 0, Summary{Built: 1}},
		{"file missing", remove("u0-1.npy"), 1, Summary{Built: 1}},
		{"file damaged", damage("u0-2.npy"), 1, Summary{Built: 1}},
		{"record missing", remove(StateDir), 0, Summary{Foreign: 1}},
		{"record damaged", damage(StateDir + "/u0-description.txt.json"), 3, Summary{Built: 1}},
		{"record and marker missing", remove(StateDir, "u0-description.txt"), 3, Summary{Built: 1}},
		{"record and file missing", remove(StateDir, "u0-0.npy"), 3, Summary{Built: 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			mustRun(t, dir, testUnits(1, "x", nil), Options{Resume: true})
			test.change(t, dir)
			units, files := testUnits(1, "x", nil), 0
			build := units[0].Build
			units[0].Build = func(ctx context.Context, fs []io.WriterAt) error {
				for _, f := range fs {
					if f != nil {
						files++
					}
				}
				return build(ctx, fs)
			}
			s := mustRun(t, dir, units, Options{Resume: true})
			s.Bytes = 0
			if s != test.want || files != test.files {
				t.Errorf("%+v, %d files written, want %+v, %d", s, files, test.want, test.files)
			}
			if test.want.Foreign == 0 {
				checkComplete(t, dir, 1, "x")
			}
		})
	}
}

func TestForeignAnew(t *testing.T) {
	dir := t.TempDir()
	mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true})
	if err := os.RemoveAll(filepath.Join(dir, StateDir)); err != nil {
		t.Fatal(err)
	}
	if s := mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true}); s != (Summary{Foreign: 2}) {
		t.Fatalf("%+v", s)
	}
	if s := mustRun(t, dir, testUnits(2, "y", nil), Options{}); s.Built != 2 {
		t.Fatalf("%+v", s)
	}
	checkComplete(t, dir, 2, "y")
}

// A complete directory needs no right to write.
func TestReadOnly(t *testing.T) {
	dir := t.TempDir()
	mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true})
	if err := os.RemoveAll(filepath.Join(dir, StateDir)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o555); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(dir, 0o777)
	if s := mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true}); s != (Summary{Foreign: 2}) {
		t.Errorf("%+v", s)
	}
	if _, err := os.Stat(filepath.Join(dir, StateDir)); err == nil {
		t.Error("the state directory was made for nothing")
	}
}

// The error names the file that has the path of the directory.
func TestDirectoryInTheWay(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cache")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, resume := range []bool{false, true} {
		if _, err := Run(t.Context(), file, testUnits(1, "x", nil), Options{Threads: 1, Resume: resume}); err == nil ||
			!strings.Contains(err.Error(), file+" is a file") {
			t.Errorf("a file: %v", err)
		}
	}

	dir := t.TempDir()
	state := filepath.Join(dir, StateDir)
	if err := os.Mkdir(state, 0o555); err != nil {
		t.Fatal(err)
	}
	if f, err := os.Create(filepath.Join(state, "x")); err == nil {
		f.Close()
		t.Skip("this user may write everywhere")
	}
	_, err := Run(t.Context(), dir, testUnits(1, "x", nil), Options{Threads: 1, Resume: true})
	if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "cannot write to "+
		state) || strings.Contains(err.Error(), atomicfile.TempSuffix) {
		t.Errorf("a state directory that is not to be written to: %v", err)
	}
}

// Whichever operation on whichever file fails, the promises of publish.go hold afterwards, nothing
// temporary stays, and the next run ends with the same bytes. From an empty directory, from a
// complete one with other settings, and from one with some files missing.
func TestEveryFault(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	const n = 2
	starts := map[string]func(t *testing.T, dir string){
		"empty": func(*testing.T, string) {},
		"other settings": func(t *testing.T, dir string) {
			mustRun(t, dir, testUnits(n, "old", nil),
				Options{Resume: true})
		},
		"partial": func(t *testing.T, dir string) {
			mustRun(t, dir, testUnits(n, "new", nil), Options{Resume: true})
			for _, name := range []string{"u0-1.npy", "u0-description.txt", "u1-description.txt",
				StateDir + "/u1-description.txt.json"} {
				if err := os.Remove(filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
		},
	}
	for name, start := range starts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ops := 0
			for k := int64(1); ; k++ {
				dir := t.TempDir()
				start(t, dir)
				nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC}
				_, err := Run(t.Context(), dir, testUnits(n, "new", nil), Options{Threads: 2, Resume: true,
					FS: faultfs.New(nth.Fault)})
				checkReader(t, dir, n, "old", "new")
				failed := nth.Failed()
				if failed == "" {
					if err != nil {
						t.Fatal(err)
					}
					checkComplete(t, dir, n, "new")
					break
				}
				ops++
				if !errors.Is(err, syscall.ENOSPC) {
					t.Errorf("%s: error %v does not wrap ENOSPC", failed, err)
				}
				for _, d := range []string{dir, filepath.Join(dir, StateDir)} {
					entries, _ := os.ReadDir(d)
					for _, e := range entries {
						if strings.HasSuffix(e.Name(), atomicfile.TempSuffix) ||
							strings.HasSuffix(e.Name(), locks.Suffix) {
							t.Errorf("%s: left behind %s", failed, e.Name())
						}
					}
				}
				mustRun(t, dir, testUnits(n, "new", nil), Options{Resume: true})
				checkComplete(t, dir, n, "new")
				if t.Failed() {
					t.Fatalf("after a fault at operation %d: %s", k, failed)
				}
			}
			if ops < 20 {
				t.Errorf("only %d operations were seen", ops)
			}
		})
	}
}

// If a read fails, Run returns that error or does the same work without the data. Readers never
// find a unit whose files are incomplete, and the next run completes the directory.
func TestEveryReadFault(t *testing.T) {
	t.Parallel()
	const n = 2
	returned := 0
	for k := int64(1); ; k++ {
		dir := t.TempDir()
		mustRun(t, dir, testUnits(n, "old", nil), Options{Resume: true})
		nth := &faultfs.Nth{K: k, Err: syscall.EIO, Counts: func(op faultfs.Op, _ string) bool { return op.Reads() }}
		_, err := Run(t.Context(), dir, testUnits(n, "new", nil), Options{Threads: 2, Resume: true,
			FS: faultfs.New(nth.Fault)})
		checkReader(t, dir, n, "old", "new")
		if nth.Failed() == "" {
			if err != nil || returned < 10 {
				t.Errorf("got %v after %d errors; want no error and at least 10", err, returned)
			}
			return
		}
		if err == nil {
			checkComplete(t, dir, n, "new")
		} else if returned++; !errors.Is(err, syscall.EIO) {
			t.Errorf("%s failed: got %v, want EIO", nth.Failed(), err)
		}
		mustRun(t, dir, testUnits(n, "new", nil), Options{Resume: true})
		checkComplete(t, dir, n, "new")
		if t.Failed() {
			t.Fatalf("after a fault of operation %d: %s", k, nth.Failed())
		}
	}
}

// An operation that fails and all that follow fail with it, as on a full disk: promises and
// resuming as above.
func TestDiskStaysFull(t *testing.T) {
	t.Parallel()
	const n = 2
	for k := int64(1); ; k += 3 {
		dir := t.TempDir()
		mustRun(t, dir, testUnits(n, "old", nil), Options{Resume: true})
		nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC, After: true}
		units := testUnits(n, "new", nil)
		for i := range units {
			units[i].Expect = unitBytes(i+1, "new") - unitBytes(i, "new")
		}
		_, err := Run(t.Context(), dir, units, Options{Threads: 2, Resume: true, FS: faultfs.New(nth.Fault)})
		checkReader(t, dir, n, "old", "new")
		if err == nil {
			break
		}
		if want := fmt.Sprintf("; all files of this build in %s need about %s", dir,
			quantity.Bytes(unitBytes(n,
				"new"))); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q at its end", err, want)
		}
		mustRun(t, dir, testUnits(n, "new", nil), Options{Resume: true})
		checkComplete(t, dir, n, "new")
	}
}

// Data files, then the directory, then the marker, then the directory: for every unit.
func TestOrder(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var mu sync.Mutex
	var log []string
	fsys := faultfs.New(func(op faultfs.Op, path string) error {
		mu.Lock()
		defer mu.Unlock()
		if op != faultfs.Write && !op.Reads() {
			rel, _ := filepath.Rel(dir, path)
			log = append(log, string(op)+" "+rel)
		}
		return nil
	})
	const n = 40
	mustRun(t, dir, testUnits(n, "x", nil), Options{Threads: 4, Resume: true, FS: fsys})
	for u, unit := range testUnits(n, "x", nil) {
		at := func(from int, what string) int {
			i := slices.Index(log[from:], what)
			if i < 0 {
				t.Fatalf("unit %d: no %q after operation %d", u, what, from)
			}
			return from + i
		}
		record := at(0, "rename "+StateDir+"/"+unit.Marker+".json")
		synced := at(record, "sync directory "+StateDir)
		last := 0
		for _, name := range unit.Files {
			written := at(0, "sync "+name)
			last = max(last, at(max(written, synced), "rename "+name))
		}
		marker := at(at(last, "sync directory ."), "rename "+unit.Marker)
		at(marker, "sync directory .")
	}
}

func TestErrors(t *testing.T) {
	const n = 20
	for name, test := range map[string]struct {
		change func(*Unit)
		want   string
	}{
		"build": {func(u *Unit) {
			u.Build = func(context.Context, []io.WriterAt) error { return errors.New("no tokens") }
		}, "unit 7: no tokens"},
		"unwritten": {func(u *Unit) {
			u.Build = func(context.Context, []io.WriterAt) error { return nil }
		}, "u7-0.npy: only 0 of its"},
		"sizes": {func(u *Unit) {
			u.Sizes = func(context.Context) ([]int64, error) { return nil, errors.New("no index") }
		}, "unit 7: no index"},
		"number of sizes": {func(u *Unit) {
			u.Sizes = func(context.Context) ([]int64, error) { return []int64{1}, nil }
		}, "unit 7: 1 sizes for 3 files"},
		"past the end": {func(u *Unit) {
			u.Build = func(_ context.Context, files []io.WriterAt) error {
				_, err := files[0].WriteAt(make([]byte, 2), int64(len(content("x", 7, 0)))-1)
				return err
			}
		}, "exceed the file size"},
		"common file":   {func(u *Unit) { u.Files[1] = "u3-1.npy" }, "u3-1.npy belongs to unit 3"},
		"common marker": {func(u *Unit) { u.Marker = "u3-description.txt" }, "belongs to unit 3"},
		"path":          {func(u *Unit) { u.Files[1] = "../x" }, "invalid file name"},
		"hidden":        {func(u *Unit) { u.Marker = StateDir }, "invalid file name"},
		"no JSON":       {func(u *Unit) { u.Settings = json.RawMessage("{") }, "unit 7: settings: "},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			units := testUnits(n, "x", nil)
			test.change(&units[7])
			_, err := Run(t.Context(), dir, units, Options{Threads: 2, Resume: true})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("error %v, want %q", err, test.want)
			}
			checkReader(t, dir, n, "x")
			mustRun(t, dir, testUnits(n, "x", nil), Options{Resume: true})
			checkComplete(t, dir, n, "x")
		})
	}
	if _, err := Run(t.Context(), t.TempDir(), nil, Options{}); err == nil {
		t.Error("no threads were accepted")
	}
}

// Once one unit fails, the contexts of the others end.
func TestErrorCancels(t *testing.T) {
	units := testUnits(2, "x", nil)
	waiting := make(chan struct{})
	units[0].Build = func(ctx context.Context, _ []io.WriterAt) error {
		close(waiting)
		<-ctx.Done()
		return ctx.Err()
	}
	failure := errors.New("broken")
	units[1].Build = func(context.Context, []io.WriterAt) error {
		<-waiting
		return failure
	}
	if _, err := Run(t.Context(), t.TempDir(), units, Options{Threads: 2}); !errors.Is(err, failure) ||
		!strings.HasPrefix(err.Error(), "unit 1: ") {
		t.Errorf("got %v", err)
	}
}

// An error names the sets that this build left in the folder: the sets that it finished before the
// error.
func TestErrorSaysWhatRemains(t *testing.T) {
	for _, first := range []bool{true, false} {
		dir := t.TempDir()
		units := testUnits(3, "x", nil)
		finished := make(chan struct{})
		progress := func(e Event) {
			if e.Stage == Done {
				close(finished)
			}
		}
		units[2].Build = func(ctx context.Context, _ []io.WriterAt) error { // the others wait for it
			<-ctx.Done()
			return ctx.Err()
		}
		units[1].Build = func(context.Context, []io.WriterAt) error {
			if first {
				<-finished
			}
			return errors.New("refused")
		}
		if !first {
			units[0].Build = units[2].Build
		}
		_, err := Run(t.Context(), dir, units, Options{Threads: 3, Progress: progress})
		remains := "1 of 3 sets were finished before and remain in " + dir
		if err == nil || !strings.HasPrefix(err.Error(), "unit 1: refused") ||
			strings.Contains(err.Error(), remains) != first {
			t.Errorf("%v; want %q: %v", err, remains, first)
		}
	}
}

func TestCancel(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	units := testUnits(30, "x", nil)
	build := units[11].Build
	units[11].Build = func(ctx context.Context, files []io.WriterAt) error {
		cancel()
		return build(ctx, files)
	}
	if _, err := Run(ctx, dir, units, Options{Threads: 2}); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	checkReader(t, dir, 30, "x")
	mustRun(t, dir, testUnits(30, "x", nil), Options{Resume: true})
	checkComplete(t, dir, 30, "x")
}

// Progress tells each unit's stages in order, and ends with all units finished and all bytes.
func TestProgress(t *testing.T) {
	const n = 6
	dir := t.TempDir()
	mustRun(t, dir, testUnits(2, "x", nil), Options{Resume: true})
	stages := make(map[string][]Stage)
	var last Event
	units := testUnits(n, "x", nil)
	for i := range units {
		units[i].Expect = 1000
	}
	mustRun(t, dir, units, Options{Resume: true, Progress: func(e Event) {
		stages[e.Unit] = append(stages[e.Unit], e.Stage)
		if e.Finished < last.Finished || e.Bytes < last.Bytes || e.Units != n || e.Bytes > e.Total {
			t.Errorf("%+v after %+v", e, last)
		}
		last = e
	}})
	for u := range n {
		want := []Stage{Building, Publishing, Done}
		if u < 2 {
			want = []Stage{Kept}
		}
		if got := stages[fmt.Sprintf("unit %d", u)]; !slices.Equal(got, want) {
			t.Errorf("unit %d: %v, want %v", u, got, want)
		}
	}
	if all := unitBytes(n, "x"); last.Finished != n || last.Bytes != all || last.Total != all {
		t.Errorf("last event %+v, want %d units and %d bytes", last, n, all)
	}
}

// The temporary files of ended processes are removed. The files of running processes stay.
func TestClean(t *testing.T) {
	dir := t.TempDir()
	mustRun(t, dir, testUnits(1, "x", nil), Options{Resume: true})
	dead := deadOwner()
	foreign := dead
	foreign.Machine = "0000000000000000"
	name := func(o atomicfile.Owner) string {
		return fmt.Sprintf(".u0-0.npy.%s-%d-%s-abc%s", o.Machine, o.PID, strconv.FormatInt(o.Started, 36),
			atomicfile.TempSuffix)
	}
	for _, d := range []string{dir, filepath.Join(dir, StateDir)} {
		for _, o := range []atomicfile.Owner{dead, foreign, atomicfile.Self()} {
			if err := os.WriteFile(filepath.Join(d, name(o)), nil, 0o666); err != nil {
				t.Fatal(err)
			}
		}
	}
	mustRun(t, dir, testUnits(1, "x", nil), Options{Resume: true})
	for _, d := range []string{dir, filepath.Join(dir, StateDir)} {
		for o, want := range map[atomicfile.Owner]bool{dead: false, foreign: true, atomicfile.Self(): true} {
			if _, err := os.Stat(filepath.Join(d, name(o))); (err == nil) != want {
				t.Errorf("%v in %s: %v", o, d, err)
			}
		}
	}
}

// Many callers share few calls, and each is served by a call that began after its own.
func TestSyncer(t *testing.T) {
	t.Parallel()
	const callers = 200
	var clock, calls, called atomic.Int64
	var mu sync.Mutex
	begun := []int64{}
	fsys := faultfs.New(func(faultfs.Op, string) error {
		calls.Add(1)
		mu.Lock()
		begun = append(begun, clock.Add(1))
		mu.Unlock()
		for called.Load() < callers { // the first call does not end before all have called
			runtime.Gosched()
		}
		time.Sleep(2 * time.Millisecond)
		return nil
	})
	s := syncer{files: atomicfile.On(fsys), dir: t.TempDir()}
	var g sync.WaitGroup
	for range callers {
		g.Go(func() {
			before := clock.Add(1)
			called.Add(1)
			if err := s.sync(); err != nil {
				t.Error(err)
			}
			after := clock.Add(1)
			mu.Lock()
			defer mu.Unlock()
			if !slices.ContainsFunc(begun, func(b int64) bool { return before < b && b < after }) {
				t.Errorf("no call began between %d and %d", before, after)
			}
		})
	}
	g.Wait()
	if n := calls.Load(); n > callers/4 {
		t.Errorf("%d calls for %d callers", n, callers)
	}
	s.files = atomicfile.On(faultfs.FailOn(faultfs.SyncDir, s.dir, syscall.EIO))
	if err := s.sync(); !errors.Is(err, syscall.EIO) {
		t.Errorf("got %v, want EIO", err)
	}
}

// A record is made of anything without a panic.
func FuzzRecord(f *testing.F) {
	u := &unit{Unit: testUnits(1, "x", nil)[0]}
	good, err := recordText(u, []int64{1, 2, 3})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"format":1,"files":[{"size":-1},{},{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var rec record
		if json.Unmarshal(text, &rec) == nil && rec.of(u) {
			var sum uint64
			for _, file := range rec.Files {
				if file.Size < 0 {
					t.Fatal("negative size accepted")
				}
				sum += uint64(file.Size)
			}
			_ = binary.LittleEndian.AppendUint64(nil, sum)
		}
	})
}

// BenchmarkPublish is the price of 500 units of three files of 100 kB each besides computing them:
// without fsync, and with 5 ms for each fsync, as on a disk that turns.
func BenchmarkPublish(b *testing.B) {
	const n = 500
	p := make([]byte, 100_000)
	units := testUnits(n, "x", nil)
	for i := range units {
		units[i].Sizes = func(context.Context) ([]int64, error) {
			return []int64{int64(len(p)), int64(len(p)), int64(len(p))}, nil
		}
		units[i].Build = func(_ context.Context, files []io.WriterAt) error {
			for _, f := range files {
				if _, err := f.WriteAt(p, 0); err != nil {
					return err
				}
			}
			return nil
		}
	}
	for _, delay := range []time.Duration{0, 5 * time.Millisecond} {
		b.Run(fmt.Sprintf("fsync of %v", delay), func(b *testing.B) {
			fsys := faultfs.New(func(op faultfs.Op, _ string) error {
				if op == faultfs.Sync || op == faultfs.SyncDir {
					time.Sleep(delay)
				}
				return nil
			})
			for b.Loop() {
				dir := filepath.Join(b.TempDir(), "cache")
				if _, err := Run(b.Context(), dir, units, Options{Threads: 2, Resume: true, FS: fsys}); err != nil {
					b.Fatal(err)
				}
				os.RemoveAll(dir)
			}
			b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds(), "units/s")
		})
	}
}
