package doctor

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"

	"mula/internal/machine"
	"mula/internal/quantity"
	"mula/xpu"
)

const (
	// minMemory is below what a command needs for a vocabulary, buffers and Go's own memory.
	minMemory = 256 << 20
	// lowMemory holds the records of `mula serve` (1 GiB by default) and the program.
	lowMemory = 2 << 30
	// minAddressSpace is enough for Go's reservations and a few mapped shards.
	minAddressSpace = 4 << 30
	// lowOpenFiles is enough for the streams of `mula serve` (4,096 by default) and its other
	// files.
	lowOpenFiles = 4096 + 128
	// minOpenFiles is enough for one command.
	minOpenFiles = 64
	// lowThreads is enough for the threads of Go, OpenMP, an OpenCL driver and MPI on a small
	// machine.
	lowThreads = 256
	// minThreads is enough for one command.
	minThreads = 32
	// lowMappings is the kernel's default. An open shard has two or three mappings.
	lowMappings = 65530
	// lowSharedMemory is above the 64 MiB that containers get by default. Open MPI and PyTorch's
	// workers crash when it is full.
	lowSharedMemory = 128 << 20
)

var processorChecks = []check{
	{"kernels", "", checkKernels, false},
	{"cores", "", checkCores, false},
}

var memoryChecks = []check{
	{"memory", "", checkMemory, false},
	{"address space", "mapped shards", checkAddressSpace, false},
	{"locked memory", "MPI on InfiniBand", checkLockedMemory, false},
	{"open files", "mula serve, ranks over TCP", checkOpenFiles, false},
	{"threads", "all commands", checkThreads, false},
	{"mappings", "plans of many shards", checkMappings, false},
	{"shared batches", "mula serve --socket", checkSharedBatches, false},
	{"/dev/shm", "MPI ranks, PyTorch's workers", checkDevShm, false},
}

func size(n int64) string {
	if n == machine.Unlimited {
		return "unlimited"
	}
	return quantity.Bytes(n)
}

func count(n int64) string {
	if n == machine.Unlimited {
		return "unlimited"
	}
	return quantity.Grouped(n)
}

func checkKernels(_ context.Context, p *probe) Result {
	fp32, _ := p.Kernels(xpu.FP32)
	bf16, lacks := p.Kernels(xpu.BF16)
	text := fmt.Sprintf("fp32 %s, bf16 %s", fp32, bf16)
	if fp32 == "go" {
		if len(lacks) == 0 {
			return warning("use x86-64, and build without -tags purego", "%s: no assembly, about 25 times slower", text)
		}
		return warning("use a processor with "+strings.Join(lacks, ", "), "%s: no assembly, about 25 times "+
			"slower", text)
	}
	if len(lacks) > 0 {
		text += "; the processor lacks " + strings.Join(lacks, ", ")
	}
	return ok("%s", text)
}

func checkCores(_ context.Context, p *probe) Result {
	threads, processors := p.Threads()
	limit := p.Limits().GroupCPUs
	if limit == 0 {
		return ok("%d threads on %d processors, no limit of the cgroup", threads, processors)
	}
	if float64(threads) > math.Ceil(limit) {
		return warning(fmt.Sprintf("set GOMAXPROCS=%d, or raise the limit of the cgroup", int(math.Ceil(limit))),
			"%d threads share %.3g processors of the cgroup", threads, limit)
	}
	return ok("%d threads, %.3g of %d processors by the cgroup", threads, limit, processors)
}

func checkMemory(_ context.Context, p *probe) Result {
	total, available := p.Memory()
	if total == 0 {
		return ok("the system does not report its memory")
	}
	l := p.Limits()
	text := fmt.Sprintf("%s available of %s", size(available), size(total))
	least := available
	if l.GroupMemory != machine.Unlimited {
		text += fmt.Sprintf("; the cgroup has %s free of %s", size(l.GroupFree), size(l.GroupMemory))
		least = min(least, l.GroupFree)
	}
	const remedy = "stop other programs, raise the job's memory limit, or use a larger machine"
	switch {
	case least < minMemory:
		return failure(remedy, "%s", text)
	case least < lowMemory:
		return warning(remedy, "%s", text)
	}
	return ok("%s", text)
}

func checkAddressSpace(_ context.Context, p *probe) Result {
	n := p.Limits().AddressSpace
	const remedy = "run `ulimit -v unlimited`; with Slurm, set VSizeFactor=0"
	switch {
	case n < minAddressSpace:
		return failure(remedy, "%s: too small for mapped shards", size(n))
	case n < machine.Unlimited:
		return warning(remedy, "%s for the program and all mapped shards", size(n))
	}
	return ok("unlimited")
}

func checkLockedMemory(_ context.Context, p *probe) Result {
	n := p.Limits().LockedMemory
	switch {
	case n == machine.Unlimited:
		return ok("unlimited")
	case p.InfiniBand():
		return warning("run `ulimit -l unlimited`, or set memlock in /etc/security/limits.conf",
			"%s, and InfiniBand locks its buffers", size(n))
	}
	return ok("%s; this machine has no InfiniBand", size(n))
}

func checkOpenFiles(_ context.Context, p *probe) Result {
	return least(p.Limits().OpenFiles, minOpenFiles, lowOpenFiles,
		fmt.Sprintf("run `ulimit -n %d`, or set nofile in /etc/security/limits.conf", 1<<16))
}

func checkThreads(_ context.Context, p *probe) Result {
	l := p.Limits()
	return least(min(l.Processes, l.GroupThreads), minThreads, lowThreads,
		"raise `ulimit -u`, or pids.max of the cgroup")
}

func checkMappings(_ context.Context, p *probe) Result {
	return least(p.Limits().Mappings, lowMappings/64, lowMappings,
		fmt.Sprintf("as root, run `sysctl vm.max_map_count=%d`", 4*lowMappings))
}

// least judges a limit by the smallest values for an ok and for a warning.
func least(n, low, enough int64, remedy string) Result {
	switch {
	case n < low:
		return failure(remedy, "at most %s", count(n))
	case n < enough:
		return warning(remedy, "at most %s", count(n))
	}
	return ok("%s", count(n))
}

func checkSharedBatches(_ context.Context, p *probe) Result {
	err := p.SharedMemory()
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return ok("not on %s; batches are sent over the socket", runtime.GOOS)
	case err != nil:
		return warning("allow memfd_create in the container's seccomp profile; without it, batches are sent over "+
			"the socket",
			"%v", err)
	}
	return ok("sealed memory works")
}

func checkDevShm(_ context.Context, p *probe) Result {
	u, err := p.Files.Usage("/dev/shm")
	switch {
	case err != nil && runtime.GOOS != "linux":
		return ok("not on %s", runtime.GOOS)
	case err != nil:
		return warning("mount a tmpfs at /dev/shm", "%v", err)
	case u.FreeBytes < lowSharedMemory:
		return warning("docker run --shm-size=8g; in Kubernetes, mount an emptyDir with medium: Memory at /dev/shm",
			"%s free", size(u.FreeBytes))
	}
	return ok("%s free", size(u.FreeBytes))
}
