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
	"runtime"
	"strings"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/locks"
	"mula/internal/machine"
	"mula/internal/mapping"
	"mula/internal/sharedlib"
	"mula/internal/usercache"
	"mula/serve"
	"mula/train/launch"
	"mula/xpu"
	"mula/xpu/comm/mpi"
	"mula/xpu/cpu"
	"mula/xpu/onednn"
	"mula/xpu/opencl"
)

// A Clock reads the time.
type Clock interface {
	Wall() time.Time
	Monotonic() time.Duration
}

// Usage is the free space of a file system. Inodes is 0 if the file system does not count them.
type Usage struct {
	FreeBytes, Inodes, FreeInodes int64
	Device                        uint64 // the file system's number
}

// A File is open for writing.
type File interface {
	io.WriteCloser
	Sync() error
}

// Files are the operations of a file system that mula uses.
type Files interface {
	MkdirTemp(dir string) (string, error)
	Mkdir(path string) error
	RemoveAll(path string) error
	Create(path string) (File, error) // fails if the file exists
	Read(path string) ([]byte, error) // from the disk if the system can drop its copy
	Rename(from, to string) error
	Link(from, to string) error
	Stat(path string) (fs.FileInfo, error)
	Chmod(path string, mode fs.FileMode) error
	Chtimes(path string, at time.Time) error
	SyncDir(path string) error
	Lock(path string) (io.Closer, error)
	Map(path string) (data []byte, release func() error, err error)
	Usage(path string) (Usage, error)
}

// An Environment is the machine as the checks see it.
type Environment struct {
	Files        Files
	Clock        Clock
	After        func(time.Duration) <-chan time.Time // for time limits
	Getenv       func(string) string
	LookPath     func(string) (string, error)
	Kernels      func(xpu.Precision) (name string, lacks []string)
	Threads      func() (threads, processors int)
	Memory       func() (total, available int64)
	Limits       func() machine.Limits
	InfiniBand   func() bool
	SharedMemory func() error
	CacheFolder  func() (string, error)
	CacheSize    func(folder string) (int64, error)
	MPI          func(under mpi.Family) (mpi.Library, error)
	MPIExec      func(ctx context.Context, program string) (launch.Kind, error)
	SlurmMPI     func(ctx context.Context) string
	OpenCL       func() ([]string, error)
	OneDNN       func() (string, error)
	Python       func(ctx context.Context) (version string, err error)
	Deadline     func(ctx context.Context) (time.Time, string, error)
}

// System is the environment of this process.
func System() *Environment {
	return &Environment{
		Files: osFiles{}, Clock: systemClock{time.Now()}, After: time.After, Getenv: os.Getenv,
		LookPath:     exec.LookPath,
		Kernels:      func(p xpu.Precision) (string, []string) { return cpu.Kernels(p), cpu.Lacks(p) },
		Threads:      func() (int, int) { return runtime.GOMAXPROCS(0), runtime.NumCPU() },
		Memory:       func() (int64, int64) { return machine.TotalMemory(), machine.AvailableMemory() },
		Limits:       machine.ReadLimits,
		InfiniBand:   func() bool { found, _ := filepath.Glob("/sys/class/infiniband/*"); return len(found) > 0 },
		SharedMemory: serve.TrySharedMemory,
		CacheFolder:  func() (string, error) { return usercache.Folder() },
		CacheSize:    cacheSize,
		MPI:          mpi.Find,
		MPIExec: func(ctx context.Context, program string) (launch.Kind, error) {
			return launch.DetectMPI(ctx, []string{program})
		},
		SlurmMPI: func(ctx context.Context) string { return launch.SlurmMPI(ctx, []string{"srun"}, os.Getenv) },
		OpenCL:   findOpenCL, OneDNN: findOneDNN, Python: findPython,
		Deadline: func(ctx context.Context) (time.Time, string, error) {
			return launch.Deadline(ctx, os.Getenv, time.Now())
		},
	}
}

// cacheSize returns the size of all files below a folder, 0 if it does not exist.
func cacheSize(folder string) (total int64, err error) {
	err = filepath.WalkDir(folder, func(_ string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil || e.IsDir() {
			return err
		}
		if info, err := e.Info(); err == nil {
			total += info.Size()
		}
		return nil
	})
	return total, err
}

func findOpenCL() ([]string, error) {
	if runtime.GOOS != "linux" {
		return nil, sharedlib.ErrMissing
	}
	devices, err := opencl.Devices()
	var names []string
	for _, d := range devices {
		names = append(names, d.String())
	}
	return names, err
}

func findOneDNN() (string, error) {
	d, err := onednn.New(1, xpu.FP32)
	if err != nil {
		return "", err
	}
	defer d.Close()
	name, _, _ := strings.Cut(d.Name(), ",")
	return name, nil
}

// pythonTime is the longest time that an import of the client takes, from a slow network file
// system.
const pythonTime = 30 * time.Second

func findPython(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, pythonTime)
	defer cancel()
	program, err := exec.LookPath("python3")
	if err != nil {
		return "", fmt.Errorf("%w: %w", sharedlib.ErrMissing, err)
	}
	cmd := exec.CommandContext(ctx, program, "-c", "import mula; print(mula.__version__)")
	cmd.Dir = "/" // a folder named mula in the current folder is not the client
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		lines := strings.Split(strings.TrimSpace(string(exit.Stderr)), "\n")
		last := lines[len(lines)-1]
		if strings.Contains(last, "No module named 'mula'") {
			return "", sharedlib.ErrMissing
		}
		return "", fmt.Errorf("import mula: %s", last)
	}
	return strings.TrimSpace(string(out)), err
}

type systemClock struct{ start time.Time }

func (c systemClock) Wall() time.Time          { return time.Now().Round(0) }
func (c systemClock) Monotonic() time.Duration { return time.Since(c.start) }

type osFiles struct{}

func (osFiles) MkdirTemp(dir string) (string, error) { return os.MkdirTemp(dir, ".mula-doctor-*.tmp") }
func (osFiles) Mkdir(path string) error              { return os.Mkdir(path, 0o755) }
func (osFiles) RemoveAll(path string) error          { return os.RemoveAll(path) }
func (osFiles) Create(path string) (File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
}
func (osFiles) Read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	dropCache(f)
	return io.ReadAll(f)
}
func (osFiles) Rename(from, to string) error              { return os.Rename(from, to) }
func (osFiles) Link(from, to string) error                { return os.Link(from, to) }
func (osFiles) Stat(path string) (fs.FileInfo, error)     { return os.Stat(path) }
func (osFiles) Chmod(path string, mode fs.FileMode) error { return os.Chmod(path, mode) }
func (osFiles) Chtimes(path string, at time.Time) error   { return os.Chtimes(path, at, at) }
func (osFiles) SyncDir(path string) error                 { return atomicfile.SyncDir(path) }
func (osFiles) Lock(path string) (io.Closer, error)       { return locks.Hold(path) }
func (osFiles) Usage(path string) (Usage, error)          { return usage(path) }
func (osFiles) Map(path string) ([]byte, func() error, error) {
	f, err := mapping.Open(path)
	return f.Data, f.Close, err
}
