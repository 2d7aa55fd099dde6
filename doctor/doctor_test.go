package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"mula/internal/longtest"
	"mula/internal/machine"
	"mula/internal/sharedlib"
	"mula/internal/testwait"
	"mula/train/launch"
	"mula/xpu"
	"mula/xpu/comm/mpi"
)

// A fakeClock advances only where a test does it.
type fakeClock struct {
	now   time.Time
	ticks time.Duration
}

func (c *fakeClock) Wall() time.Time          { return c.now }
func (c *fakeClock) Monotonic() time.Duration { return c.ticks }

// faults are files of the system, with functions that replace single operations.
type faults struct {
	osFiles
	clock                                *fakeClock
	sync, create, stat, write, read      time.Duration
	exclusive, foldCase, shared          bool
	mkdir, rename, link, chtimes, chmods error
	longName, mmap, lock, dir            error
	before                               func(path string)
	modified                             time.Duration
	usage                                map[string]Usage
}

type slowFile struct {
	File
	f *faults
}

// Sync does not wait for the disk.
func (s slowFile) Sync() error { s.f.clock.ticks += s.f.sync; return nil }
func (s slowFile) Write(p []byte) (int, error) {
	s.f.clock.ticks += s.f.write
	return s.File.Write(p)
}

func (f *faults) MkdirTemp(dir string) (string, error) {
	if f.mkdir != nil {
		return "", &fs.PathError{Op: "mkdir", Path: dir, Err: f.mkdir}
	}
	return f.osFiles.MkdirTemp(dir)
}

func (f *faults) Create(path string) (File, error) {
	f.clock.ticks += f.create
	if f.before != nil {
		f.before(path)
	}
	if f.longName != nil && len(filepath.Base(path)) > 200 {
		return nil, f.longName
	}
	if f.exclusive {
		os.Remove(path)
	}
	file, err := f.osFiles.Create(path)
	return slowFile{file, f}, err
}

func (f *faults) Read(path string) ([]byte, error) {
	f.clock.ticks += f.read
	return f.osFiles.Read(path)
}

func (f *faults) Rename(from, to string) error {
	if f.rename != nil {
		return f.rename
	}
	return f.osFiles.Rename(from, to)
}

func (f *faults) Link(from, to string) error {
	if f.link != nil {
		return f.link
	}
	return f.osFiles.Link(from, to)
}

// info has another time than the file.
type info struct {
	fs.FileInfo
	at time.Time
}

func (i info) ModTime() time.Time { return i.at }

func (f *faults) Stat(path string) (fs.FileInfo, error) {
	f.clock.ticks += f.stat
	if f.foldCase {
		path = filepath.Join(filepath.Dir(path), strings.ToLower(filepath.Base(path)))
	}
	found, err := f.osFiles.Stat(path)
	if err == nil && filepath.Base(path) == "clock" {
		return info{found, f.clock.now.Add(f.modified)}, nil
	}
	return found, err
}

func (f *faults) Chtimes(path string, at time.Time) error {
	if f.chtimes != nil {
		return f.chtimes
	}
	return f.osFiles.Chtimes(path, at)
}

func (f *faults) Chmod(path string, mode fs.FileMode) error {
	if f.chmods != nil {
		return f.chmods
	}
	return f.osFiles.Chmod(path, mode)
}

func (f *faults) SyncDir(path string) error {
	if f.dir != nil {
		return f.dir
	}
	return f.osFiles.SyncDir(path)
}

type noLock struct{}

func (noLock) Close() error { return nil }

func (f *faults) Lock(path string) (io.Closer, error) {
	if f.lock != nil || f.shared {
		return noLock{}, f.lock
	}
	return f.osFiles.Lock(path)
}

func (f *faults) Map(path string) ([]byte, func() error, error) {
	if f.mmap != nil {
		return nil, nil, f.mmap
	}
	return f.osFiles.Map(path)
}

func (f *faults) Usage(path string) (Usage, error) {
	if u, ok := f.usage[path]; ok {
		return u, nil
	}
	return Usage{1 << 40, 1 << 30, 1 << 30, 1}, nil
}

// healthy is an environment in which every check is ok.
func healthy(t *testing.T) (*Environment, *faults) {
	t.Helper()
	clock := &fakeClock{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	f := &faults{clock: clock, usage: map[string]Usage{}}
	limits := machine.Limits{AddressSpace: machine.Unlimited, LockedMemory: machine.Unlimited, OpenFiles: 1 << 20,
		Processes: 1 << 20, Mappings: 1 << 20, GroupMemory: machine.Unlimited, GroupFree: machine.Unlimited,
		GroupThreads: machine.Unlimited}
	cache := t.TempDir()
	return &Environment{
		Files: f, Clock: clock, After: func(time.Duration) <-chan time.Time { return nil },
		Getenv:       func(string) string { return "" },
		LookPath:     func(string) (string, error) { return "", exec.ErrNotFound },
		Kernels:      func(xpu.Precision) (string, []string) { return "avx512", nil },
		Threads:      func() (int, int) { return 8, 8 },
		Memory:       func() (int64, int64) { return 64 << 30, 32 << 30 },
		Limits:       func() machine.Limits { return limits },
		InfiniBand:   func() bool { return false },
		SharedMemory: func() error { return nil },
		CacheFolder:  func() (string, error) { return cache, nil },
		CacheSize:    cacheSize,
		MPI:          func(mpi.Family) (mpi.Library, error) { return mpi.Library{}, sharedlib.ErrMissing },
		MPIExec:      func(context.Context, string) (launch.Kind, error) { return launch.OpenMPI, nil },
		SlurmMPI:     func(context.Context) string { return "none" },
		OpenCL:       func() ([]string, error) { return nil, sharedlib.ErrMissing },
		OneDNN:       func() (string, error) { return "", sharedlib.ErrMissing },
		Python:       func(context.Context) (string, error) { return "", sharedlib.ErrMissing },
		Deadline:     func(context.Context) (time.Time, string, error) { return time.Time{}, "", nil },
	}, f
}

// examine returns the lines of a run over one folder, by name. The folder must be empty afterwards.
func examine(t *testing.T, e *Environment, require ...string) map[string]Line {
	t.Helper()
	folder := t.TempDir()
	lines := map[string]Line{}
	err := Run(context.Background(), e, Options{Folders: []string{folder}, Require: require}, func(g Group) {
		for _, l := range g.Lines {
			if lines[l.Name].Name != "" {
				t.Errorf("two lines have the name %s", l.Name)
			}
			lines[l.Name] = l
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
	return lines
}

func TestHealthy(t *testing.T) {
	e, _ := healthy(t)
	lines := examine(t, e)
	for _, l := range lines {
		if l.Status != OK || l.Finding == "" || l.Remedy != "" {
			t.Errorf("%+v", l)
		}
	}
	all := 0
	for _, checks := range [][]check{processorChecks, memoryChecks, folderChecks, libraryChecks, clockChecks,
		cacheChecks, jobChecks} {
		all += len(checks)
	}
	if len(lines) != all {
		t.Errorf("%d lines of %d checks", len(lines), all)
	}
	for _, c := range folderChecks {
		if c.needed == "" {
			t.Errorf("%s does not name the part of mula that needs it", c.name)
		}
	}
}

// Every check reports a fault that is planted for it, with a remedy.
func TestFaults(t *testing.T) {
	longtest.SkipIfShort(t)
	limit := func(change func(*machine.Limits)) func(*Environment, *faults) {
		return func(e *Environment, _ *faults) {
			l := e.Limits()
			change(&l)
			e.Limits = func() machine.Limits { return l }
		}
	}
	variable := func(values map[string]string) func(*Environment, *faults) {
		return func(e *Environment, _ *faults) { e.Getenv = func(name string) string { return values[name] } }
	}
	found := func(e *Environment) { e.LookPath = func(name string) (string, error) { return "/bin/" + name, nil } }
	folder := func(u Usage) func(*Environment, *faults) {
		return func(e *Environment, f *faults) { f.usage = nil; e.Files = allUsage{f, u} }
	}
	unsupported := error(syscall.ENOTSUP)
	tests := []struct {
		name    string
		status  Status
		finding string // a part
		plant   func(*Environment, *faults)
	}{
		{"kernels", Warning, "no assembly", func(e *Environment, _ *faults) {
			e.Kernels = func(xpu.Precision) (string, []string) { return "go", []string{"AVX2"} }
		}},
		{"cores", Warning, "8 threads share 1.5", limit(func(l *machine.Limits) { l.GroupCPUs = 1.5 })},
		{"memory", Error, "100 MB available", func(e *Environment, _ *faults) {
			e.Memory = func() (int64, int64) { return 64e9, 100e6 }
		}},
		{"memory", Warning, "1.00 GB free", limit(func(l *machine.Limits) { l.GroupMemory, l.GroupFree = 3e9, 1e9 })},
		{"address space", Error, "3.00 GB", limit(func(l *machine.Limits) { l.AddressSpace = 3e9 })},
		{"address space", Warning, "9.00 GB", limit(func(l *machine.Limits) { l.AddressSpace = 9e9 })},
		{"locked memory", Warning, "InfiniBand", func(e *Environment, f *faults) {
			limit(func(l *machine.Limits) { l.LockedMemory = 1 << 16 })(e, f)
			e.InfiniBand = func() bool { return true }
		}},
		{"open files", Warning, "1,024", limit(func(l *machine.Limits) { l.OpenFiles = 1024 })},
		{"open files", Error, "20", limit(func(l *machine.Limits) { l.OpenFiles = 20 })},
		{"threads", Warning, "100", limit(func(l *machine.Limits) { l.GroupThreads = 100 })},
		{"threads", Error, "10", limit(func(l *machine.Limits) { l.Processes = 10 })},
		{"mappings", Warning, "30,000", limit(func(l *machine.Limits) { l.Mappings = 30_000 })},
		{"shared batches", Warning, "operation not permitted", func(e *Environment, _ *faults) {
			e.SharedMemory = func() error { return syscall.EPERM }
		}},
		{"/dev/shm", Warning, "67.1 MB", func(_ *Environment, f *faults) {
			f.usage["/dev/shm"] = Usage{64 << 20, 9, 9, 2}
		}},
		{"write", Error, "read-only", func(_ *Environment, f *faults) { f.mkdir = syscall.EROFS }},
		{"write", Error, "may not write", func(_ *Environment, f *faults) { f.mkdir = syscall.EACCES }},
		{"write", Error, "no space left", func(_ *Environment, f *faults) { f.mkdir = syscall.ENOSPC }},
		{"write", Error, "not a folder", func(_ *Environment, f *faults) { f.mkdir = syscall.ENOTDIR }},
		{"space", Error, "1.00 MB", folder(Usage{1e6, 9e9, 9e9, 1})},
		{"space", Warning, "5 inodes", folder(Usage{1e12, 9e9, 5, 1})},
		{"exclusive create", Error, "created again", func(_ *Environment, f *faults) { f.exclusive = true }},
		{"rename", Error, "not supported", func(_ *Environment, f *faults) { f.rename = unsupported }},
		{"hard links", Warning, "not supported", func(_ *Environment, f *faults) { f.link = unsupported }},
		{"file locks", Error, "function not implemented", func(_ *Environment, f *faults) { f.lock = syscall.ENOSYS }},
		{"file locks", Error, "two processes", func(_ *Environment, f *faults) { f.shared = true }},
		{"fsync", Warning, "100ms", func(_ *Environment, f *faults) { f.sync = 100 * time.Millisecond }},
		{"fsync", Error, "invalid argument", func(_ *Environment, f *faults) { f.dir = syscall.EINVAL }},
		{"mmap", Error, "no such device", func(_ *Environment, f *faults) { f.mmap = syscall.ENODEV }},
		{"file times", Error, "cannot be set", func(_ *Environment, f *faults) { f.chtimes = syscall.EPERM }},
		{"file clock", Warning, "5s", func(_ *Environment, f *faults) { f.modified = 5 * time.Second }},
		{"file clock", Error, "abandoned", func(_ *Environment, f *faults) { f.modified = -30 * time.Hour }},
		{"long names", Warning, "too long", func(_ *Environment, f *faults) { f.longName = syscall.ENAMETOOLONG }},
		{"case of names", Warning, "any case", func(_ *Environment, f *faults) { f.foldCase = true }},
		{"permissions", Warning, "cannot be set", func(_ *Environment, f *faults) { f.chmods = syscall.EPERM }},
		{"create latency", Warning, "30ms", func(_ *Environment, f *faults) { f.create = 30 * time.Millisecond }},
		{"stat latency", Warning, "6ms", func(_ *Environment, f *faults) { f.stat = 6 * time.Millisecond }},
		{"write speed", Warning, "10.5 MB/s", func(_ *Environment, f *faults) { f.write = 100 * time.Millisecond }},
		{"read speed", Warning, "33.6 MB/s", func(_ *Environment, f *faults) { f.read = time.Second }},
		{"MPI", Error, "MULA_MPI_LIB=/x", variable(map[string]string{mpi.LibraryVariable: "/x"})},
		{"MPI", Warning, "undefined symbol", func(e *Environment, _ *faults) {
			e.MPI = func(mpi.Family) (mpi.Library, error) { return mpi.Library{}, errors.New("undefined symbol") }
		}},
		{"MPI launcher", Warning, "no MPI library", func(e *Environment, _ *faults) { found(e) }},
		{"MPI launcher", Warning, "does not fit MPICH 4", func(e *Environment, _ *faults) {
			found(e)
			e.MPI = func(mpi.Family) (mpi.Library, error) {
				return mpi.Library{Version: "MPICH 4", Family: mpi.MPICH},
					nil
			}
		}},
		{"OpenCL", Warning, "no driver", func(e *Environment, _ *faults) {
			e.OpenCL = func() ([]string, error) { return nil, errors.New("no driver") }
		}},
		{"oneDNN", Error, "MULA_ONEDNN_LIB=/x", variable(map[string]string{"MULA_ONEDNN_LIB": "/x"})},
		{"Python client", Warning, "numpy", func(e *Environment, _ *faults) {
			e.Python = func(context.Context) (string, error) { return "", errors.New("no module numpy") }
		}},
		{"wall clock", Error, "1970", func(_ *Environment, f *faults) { f.clock.now = time.Unix(0, 0) }},
		{"steps", Warning, "1h0m0s", func(e *Environment, f *faults) {
			e.Python = func(context.Context) (string, error) {
				f.clock.now = f.clock.now.Add(time.Hour)
				return "1", nil
			}
		}},
		{"steps", Error, "moved back", func(e *Environment, f *faults) {
			e.Python = func(context.Context) (string, error) { f.clock.ticks -= time.Hour; return "1", nil }
		}},
		{"cache folder", Warning, "HOME", func(e *Environment, _ *faults) {
			e.CacheFolder = func() (string, error) { return "", errors.New("HOME is not set") }
		}},
		{"cache folder", Warning, "3.00 GB", func(e *Environment, _ *faults) {
			e.CacheSize = func(string) (int64, error) { return 3e9, nil }
		}},
		{"scheduler", Warning, "ends in 1m0s", func(e *Environment, f *faults) {
			variable(map[string]string{"SLURM_JOB_ID": "7"})(e, f)
			e.Deadline = func(context.Context) (time.Time, string, error) {
				return f.clock.now.Add(time.Minute), "", nil
			}
		}},
		{"launcher", Warning, "without PMI",
			variable(map[string]string{"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"})},
	}
	planted := map[string]bool{}
	for _, test := range tests {
		planted[test.name] = true
		t.Run(fmt.Sprint(test.name, " ", test.finding), func(t *testing.T) {
			e, f := healthy(t)
			test.plant(e, f)
			l := examine(t, e)[test.name]
			if l.Status != test.status || !strings.Contains(l.Finding, test.finding) || l.Remedy == "" {
				t.Errorf("%+v, want %s with %q", l, test.status, test.finding)
			}
		})
	}
	e, _ := healthy(t)
	for name := range examine(t, e) {
		if !planted[name] {
			t.Errorf("no fault is planted for %s", name)
		}
	}
}

// allUsage has the same free space everywhere.
type allUsage struct {
	*faults
	u Usage
}

func (a allUsage) Usage(string) (Usage, error) { return a.u, nil }

func TestRequire(t *testing.T) {
	e, _ := healthy(t)
	lines := examine(t, e, Libraries...)
	for _, name := range []string{"MPI", "MPI launcher", "OpenCL", "oneDNN", "Python client"} {
		if l := lines[name]; l.Status != Error || l.Remedy == "" {
			t.Errorf("%s: %+v", name, l)
		}
	}
}

// An interrupted run removes its temporary folder.
func TestInterrupt(t *testing.T) {
	e, f := healthy(t)
	ctx, cancel := context.WithCancel(context.Background())
	used := false
	f.before = func(path string) {
		if filepath.Base(path) == "sync3" {
			used = true
			cancel()
		}
	}
	folder := t.TempDir()
	err := Run(ctx, e, Options{Folders: []string{folder}}, func(Group) {})
	if left, _ := os.ReadDir(folder); !used || !errors.Is(err, context.Canceled) || len(left) > 0 {
		t.Errorf("%v, left %v", err, left)
	}
}

// Without folders, the current folder and the cache folder are checked; the second one shortly if
// it is on the same file system.
func TestDefaultFolders(t *testing.T) {
	e, _ := healthy(t)
	t.Chdir(t.TempDir())
	e.CacheFolder = func() (string, error) { return filepath.Join(t.TempDir(), "not", "yet"), nil }
	sizes := []int{}
	err := Run(context.Background(), e, Options{}, func(g Group) {
		if strings.HasPrefix(g.Title, "Folder ") {
			sizes = append(sizes, len(g.Lines))
		}
	})
	if err != nil || len(sizes) != 2 || sizes[0] != len(folderChecks) || sizes[1] != len(sameFolderChecks) {
		t.Errorf("%v, %v", sizes, err)
	}
}

// A file system that does not respond is an error, and Run ends.
func TestHung(t *testing.T) {
	for operation, name := range map[string]string{"usage": "access", "mkdir": "write",
		"exclusive": "exclusive create", "remove": "", "cache": "cache folder"} {
		t.Run(operation, func(t *testing.T) {
			e, _ := healthy(t)
			expired, server := make(chan time.Time), make(chan struct{})
			e.After = func(time.Duration) <-chan time.Time { return expired }
			var once sync.Once
			block := func() { once.Do(func() { expired <- time.Time{}; <-server }) }
			folder := t.TempDir()
			var removed atomic.Int32
			e.Files = hungFiles{e.Files, block, operation, folder, &removed}
			if operation == "cache" {
				e.CacheSize = func(string) (int64, error) { block(); return 0, nil }
			}
			var lines []Line
			err := Run(context.Background(), e, Options{Folders: []string{folder}}, func(g Group) {
				lines = append(lines, g.Lines...)
			})
			if err != nil {
				t.Fatal(err)
			}
			found := name == ""
			for _, l := range lines {
				failed := l.Status == Error && strings.HasPrefix(l.Finding, "no answer within ") && l.Remedy != ""
				if failed != (l.Name == name) {
					t.Errorf("%+v, want an error in %q", l, name)
				}
				found = found || failed
			}
			if !found || lines[len(lines)-1].Name != "launcher" {
				t.Errorf("no line %q in %+v", name, lines)
			}
			close(server)             // the file system recovers
			if operation != "usage" { // then no temporary folder is made
				waitForRemoval(t, folder, &removed)
			}
		})
	}
}

// The end of the context ends a check that hangs.
func TestHungStop(t *testing.T) {
	e, _ := healthy(t)
	ctx, stop := context.WithCancel(context.Background())
	server, folder := make(chan struct{}), t.TempDir()
	var removed atomic.Int32
	e.Files = hungFiles{e.Files, func() { stop(); <-server }, "mkdir", folder, &removed}
	err := Run(ctx, e, Options{Folders: []string{folder}}, func(Group) {})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	close(server) // the file system recovers, and the check that Run left creates its folder
	waitForRemoval(t, folder, &removed)
}

// waitForRemoval waits until the temporary folder of the checks has been removed. A check that hung
// removes it after the file system has recovered, and Run does not wait for that.
func waitForRemoval(t *testing.T, folder string, removed *atomic.Int32) {
	t.Helper()
	testwait.Until(t, "the temporary folder is removed", func() bool { return removed.Load() == 1 })
	left, err := os.ReadDir(folder)
	if err != nil || len(left) != 0 {
		t.Errorf("%d files left, %v", len(left), err)
	}
}

// hungFiles block in one operation.
type hungFiles struct {
	Files
	block   func()
	in      string // the operation, or the name of the file that is created
	folder  string
	removed *atomic.Int32 // the number of folders removed from folder
}

func (f hungFiles) Usage(path string) (Usage, error) {
	if f.in == "usage" && path == f.folder {
		f.block()
	}
	return f.Files.Usage(path)
}

func (f hungFiles) MkdirTemp(dir string) (string, error) {
	if f.in == "mkdir" && dir == f.folder {
		f.block()
	}
	return f.Files.MkdirTemp(dir)
}

func (f hungFiles) Create(path string) (File, error) {
	if f.in == filepath.Base(path) {
		f.block()
	}
	return f.Files.Create(path)
}

func (f hungFiles) RemoveAll(path string) error {
	inFolder := filepath.Dir(path) == f.folder
	if f.in == "remove" && inFolder {
		f.block()
	}
	err := f.Files.RemoveAll(path)
	if inFolder {
		f.removed.Add(1)
	}
	return err
}
