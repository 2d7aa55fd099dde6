package doctor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"mula/internal/launchers"
	"mula/internal/quantity"
	"mula/internal/sharedlib"
	"mula/train/launch"
	"mula/xpu/comm/mpi"
	"mula/xpu/onednn"
	"mula/xpu/opencl"
)

const (
	// clockStep is more than a clock that is slewed moves while the checks run.
	clockStep = 100 * time.Millisecond
	// largeCache is several times the limit of the part that has one (256 MB of shard facts).
	largeCache = 2 << 30
	// soon is less than a checkpoint and a restart take.
	soon = 5 * time.Minute
)

// earliest is before every version of mula: a clock that is behind it was never set.
var earliest = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

var libraryChecks = []check{
	{"MPI", "", checkMPI, false},
	{"MPI launcher", "", checkLauncher, false},
	{"OpenCL", "", checkOpenCL, false},
	{"oneDNN", "", checkOneDNN, false},
	{"Python client", "", checkPython, false},
}

var clockChecks = []check{{"wall clock", "", checkWall, false}, {"steps", "", checkSteps, false}}

var cacheChecks = []check{{"cache folder", "", checkCache, false}}

var jobChecks = []check{{"scheduler", "", checkScheduler, false}, {"launcher", "", checkRank, false}}

// absent is the result for a library that cannot be used. variable is the environment variable that
// names its file.
func (p *probe) absent(name, variable, purpose, install string, err error) Result {
	if named := p.Getenv(variable); variable != "" && named != "" {
		return failure("correct or unset "+variable, "%s=%s: %v", variable, named, err)
	}
	switch missing := errors.Is(err, sharedlib.ErrMissing); {
	case missing && p.required(name):
		return failure(install, "not installed")
	case missing:
		return ok("not installed (optional; for %s; %s)", purpose, install)
	case p.required(name):
		return failure(install, "%v", err)
	}
	return warning(install, "%v", err)
}

// mpiexec returns the family of the mpiexec on the PATH, "" if there is none.
func (p *probe) mpiexec(ctx context.Context) (mpi.Family, error) {
	program, err := p.LookPath("mpiexec")
	if err != nil {
		return "", nil
	}
	switch kind, err := p.MPIExec(ctx, program); {
	case err != nil:
		return "", err
	case kind == launch.OpenMPI:
		return mpi.OpenMPI, nil
	default:
		return mpi.MPICH, nil
	}
}

func checkMPI(ctx context.Context, p *probe) Result {
	family, _ := p.mpiexec(ctx) // the next line reports the error
	l, err := p.MPI(family)
	if err != nil {
		return p.absent("mpi", mpi.LibraryVariable, "ranks over MPI", "apt install openmpi-bin or mpich", err)
	}
	return ok("%s (%s)", l.Version, filepath.Base(l.File))
}

func checkLauncher(ctx context.Context, p *probe) Result {
	const install = "install the mpiexec of the MPI library, or use mula launch --with tcp"
	_, noSrun := p.LookPath("srun")
	srun := ""
	if noSrun == nil {
		srun = "srun with --mpi=" + p.SlurmMPI(ctx)
	}
	family, err := p.mpiexec(ctx)
	switch {
	case err != nil:
		return warning(install, "%v", err)
	case family == "" && srun != "":
		return ok("%s; no mpiexec", srun)
	case family == "" && p.required("mpi"):
		return failure(install, "neither mpiexec nor srun")
	case family == "":
		return ok("neither mpiexec nor srun (optional; mula launch starts ranks over TCP)")
	}
	text := "mpiexec of " + string(family)
	if srun != "" {
		text += ", " + srun
	}
	l, err := p.MPI(family)
	switch {
	case err != nil:
		return warning("name its library in "+mpi.LibraryVariable, "%s, and no MPI library", text)
	case l.Family != family:
		return warning(fmt.Sprintf("name the library of this mpiexec in %s, or put the mpiexec of %s first on the PATH",
			mpi.LibraryVariable, l.Family), "%s does not fit %s", text, l.Version)
	}
	return ok("%s", text)
}

func checkOpenCL(_ context.Context, p *probe) Result {
	names, err := p.OpenCL()
	if len(names) == 0 {
		return p.absent("opencl", opencl.LibraryVariable, "GPUs", "apt install ocl-icd-libopencl1 and the GPU's driver",
			err)
	}
	text := strings.Join(names, "; ")
	if err != nil {
		return warning("update or remove the driver that fails", "%s; and %v", text, err)
	}
	return ok("%s", text)
}

func checkOneDNN(_ context.Context, p *probe) Result {
	name, err := p.OneDNN()
	if err != nil {
		return p.absent("onednn", onednn.LibraryVariable, "device: onednn", "apt install libdnnl2 or libdnnl3", err)
	}
	return ok("%s", name)
}

func checkPython(ctx context.Context, p *probe) Result {
	version, err := p.Python(ctx)
	if err != nil {
		return p.absent("python", "", "import mula", "pip install ./clients/python", err)
	}
	return ok("mula %s", version)
}

func checkWall(_ context.Context, p *probe) Result {
	if now := p.Clock.Wall(); now.Before(earliest) {
		return failure("set the clock (chrony, ntpd)", "%s: never set", now.UTC().Format(time.DateTime))
	}
	return ok("%s", p.Clock.Wall().UTC().Format("2006-01-02 15:04:05 UTC"))
}

func checkSteps(_ context.Context, p *probe) Result {
	ticks := p.Clock.Monotonic() - p.ticks
	step := p.Clock.Wall().Sub(p.started) - ticks
	switch {
	case ticks < 0:
		return failure("use another clock source of the kernel", "the monotonic clock moved back by %v", -ticks)
	case step.Abs() > clockStep:
		return warning("let chrony or ntpd slew the clock instead of setting it", "the clock was set by %v meanwhile",
			step.Round(time.Millisecond))
	}
	return ok("none in %v", ticks.Round(10*time.Millisecond))
}

// existing is the folder, or the closest folder above it that exists.
func (e *Environment) existing(folder string) string {
	for {
		if _, err := e.Files.Stat(folder); err == nil || folder == filepath.Dir(folder) {
			return folder
		}
		folder = filepath.Dir(folder)
	}
}

func checkCache(_ context.Context, p *probe) Result {
	folder, err := p.CacheFolder()
	const remedy = "set XDG_CACHE_HOME to a folder that this user may write; " +
		"without it, plans of many shards open slowly"
	if err != nil {
		return warning(remedy, "none: %v", err)
	}
	temp, err := p.Files.MkdirTemp(p.existing(folder))
	if err != nil {
		return warning(remedy, "%s cannot be written: %v", folder, reason(err))
	}
	p.Files.RemoveAll(temp)
	n, err := p.CacheSize(folder)
	switch {
	case err != nil:
		return warning(remedy, "%v", err)
	case n > largeCache:
		return warning("remove the folder while no mula runs", "%s has %s", folder, size(n))
	}
	return ok("%s, %s", folder, quantity.Bytes(n))
}

func checkScheduler(ctx context.Context, p *probe) Result {
	var seen []string
	for _, s := range [][2]string{{"Slurm job", "SLURM_JOB_ID"}, {"PBS job", "PBS_JOBID"},
		{"Kubernetes at", "KUBERNETES_SERVICE_HOST"}} {
		if value := p.Getenv(s[1]); value != "" {
			seen = append(seen, s[0]+" "+value)
		}
	}
	if len(seen) == 0 {
		return ok("no Slurm, PBS or Kubernetes")
	}
	text := strings.Join(seen, ", ")
	end, why, err := p.Deadline(ctx)
	left := end.Sub(p.Clock.Wall())
	switch {
	case err != nil:
		return failure("set --walltime of mula launch", "%s: %v", text, err)
	case why != "":
		return warning("set --walltime of mula launch", "%s: %s", text, why)
	case end.IsZero():
		return ok("%s", text)
	case left < soon:
		return warning("start a new job", "%s ends in %v", text, left.Round(time.Second))
	}
	return ok("%s, ends in %v", text, left.Round(time.Minute))
}

func checkRank(_ context.Context, p *probe) Result {
	process, found := launchers.FindIn(p.Getenv)
	switch {
	case !found:
		return ok("started alone")
	case process.Launcher.Rank == "SLURM_PROCID" && process.Size > 1:
		return warning("use srun --mpi=pmi2 or --mpi=pmix, or mula launch",
			"rank %d of %d by srun without PMI: mula train refuses", process.Rank, process.Size)
	}
	return ok("rank %d of %d by %s", process.Rank, process.Size, process.Launcher.Name)
}
