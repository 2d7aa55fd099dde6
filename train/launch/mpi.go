package launch

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Kind is a program that starts the ranks of a job.
type Kind string

// The kinds of programs that start ranks.
const (
	OpenMPI Kind = "Open MPI"
	MPICH   Kind = "MPICH"
	Slurm   Kind = "Slurm"
)

// DetectMPI asks an mpiexec, a program and arguments, which MPI it belongs to.
func DetectMPI(ctx context.Context, mpiexec []string) (Kind, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, mpiexec[0], "--version").CombinedOutput()
	text := string(out)
	switch {
	case strings.Contains(text, "OpenRTE") || strings.Contains(text, "Open MPI"):
		return OpenMPI, nil
	case strings.Contains(text, "HYDRA"):
		return MPICH, nil
	case err != nil:
		return "", fmt.Errorf("%s --version: %w", mpiexec[0], err)
	}
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return "", fmt.Errorf("%s is neither that of Open MPI nor MPICH's Hydra: its --version is %q; name one of those with --mpiexec", mpiexec[0], line)
}

// MPI is a [Starter] that has an mpiexec or srun start the ranks. Which rank died it reads in what that program says.
type MPI struct {
	Kind     Kind
	Program  []string // mpiexec or srun, and arguments that come first
	Command  []string // program and arguments of a rank
	AllLocal bool     // whatever a host is called, it is this machine: for tests
	Output   Output
}

// Name is that of the kind.
func (m *MPI) Name() string { return string(m.Kind) }

// Start starts the program.
func (m *MPI) Start(_ context.Context, r Ranks) (Job, error) {
	arguments, err := m.arguments(r)
	if err != nil {
		return nil, err
	}
	out, err := openOutput(filepath.Join(r.Dir, "ranks.log"), -1, m.Output)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(m.Program[0], append(slices.Clone(m.Program[1:]), arguments...)...)
	cmd.Env = append(os.Environ(), r.Environment...)
	said := &tail{}
	cmd.Stdout, cmd.Stderr = tee{out.stdout, said}, tee{out.stderr, said}
	cmd.WaitDelay = 2 * time.Second
	leadGroup(cmd)
	if err := cmd.Start(); err != nil {
		out.close()
		return nil, err
	}
	j := &programJob{cmd: cmd, stop: m.Kind.stopSignal(), exits: make(chan Exit, 1)}
	go func() {
		_ = cmd.Wait() // its error is in the state
		j.mu.Lock()
		j.ended = true
		j.mu.Unlock()
		out.close()
		e := exitOf(Exit{Rank: -1}, cmd.ProcessState, false)
		if !e.fine() {
			m.cause(&e, said.String(), r.Hosts)
		}
		j.exits <- e
		close(j.exits)
	}()
	return j, nil
}

// A run of ranks on one host.
type hostRanks struct {
	host  string
	ranks int
}

// arguments are those of the program for an attempt: how many ranks, on which hosts, with what environment, and the command.
func (m *MPI) arguments(r Ranks) ([]string, error) {
	var hosts []hostRanks
	for _, h := range r.Hosts {
		if n := len(hosts); n > 0 && hosts[n-1].host == h {
			hosts[n-1].ranks++
			continue
		}
		hosts = append(hosts, hostRanks{h, 1})
	}
	here := hosts[0].host == localhost && len(hosts) == 1
	if m.AllLocal && !here { // a part of the command for each host, which tells the ranks what it is called
		var arguments []string
		for i, h := range hosts {
			if i > 0 {
				arguments = append(arguments, ":")
			}
			arguments = append(arguments, "-n", strconv.Itoa(h.ranks))
			arguments = append(arguments, m.export(r.Environment)...)
			arguments = append(append(arguments, "env", hostVariable+"="+h.host), m.Command...)
		}
		return arguments, nil
	}
	arguments := []string{"-n", strconv.Itoa(len(r.Hosts))}
	names, rooms := make([]string, len(hosts)), make([]string, len(hosts))
	for i, h := range hosts {
		names[i], rooms[i] = h.host, fmt.Sprintf("%s:%d", h.host, h.ranks)
	}
	switch {
	case here:
	case m.Kind == OpenMPI:
		arguments = append(arguments, "--host", strings.Join(rooms, ","))
	case m.Kind == MPICH:
		arguments = append(arguments, "-hosts", strings.Join(rooms, ","))
	default:
		if slices.ContainsFunc(hosts, func(h hostRanks) bool { return h.ranks != hosts[0].ranks }) {
			return nil, fmt.Errorf("srun is given the same number of ranks for every host, not %s; choose --ranks so", strings.Join(rooms, ","))
		}
		arguments = append(arguments, "--nodes="+strconv.Itoa(len(hosts)), "--ntasks-per-node="+strconv.Itoa(hosts[0].ranks),
			"--nodelist="+strings.Join(names, ","))
	}
	if m.Kind == Slurm {
		arguments = append(arguments, "--kill-on-bad-exit=1")
	}
	return append(append(arguments, m.export(r.Environment)...), m.Command...), nil
}

// export are the arguments by which the program hands variables of its own environment to ranks on other hosts. MPICH and Slurm hand on all.
func (m *MPI) export(environment []string) []string {
	var arguments []string
	if m.Kind == OpenMPI {
		for _, e := range environment {
			name, _, _ := strings.Cut(e, "=")
			arguments = append(arguments, "-x", name)
		}
	}
	return arguments
}

// What the programs say of the rank that made them end the others: Open MPI 4.1, MPICH 4.0 (Hydra), Slurm 23.
var (
	openMPISignal = regexp.MustCompile(`process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)`)
	openMPICode   = regexp.MustCompile(`Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)`)
	mpichCode     = regexp.MustCompile(`PID \d+ RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)`)
	mpichSignal   = regexp.MustCompile(`EXIT STRING: .*\(signal (\d+)\)`)
	slurmTask     = regexp.MustCompile(`srun: error: (\S+): tasks? (\d+)[-,0-9]*: (?:Exited with exit code (\d+)|(Killed|Terminated|Aborted|Segmentation fault|Bus error))`)
)

var slurmSignals = map[string]syscall.Signal{"Killed": syscall.SIGKILL, "Terminated": syscall.SIGTERM, "Aborted": syscall.SIGABRT,
	"Segmentation fault": syscall.SIGSEGV, "Bus error": syscall.SIGBUS}

// cause completes the exit of the program by what it said about its ranks, which run on these hosts.
func (m *MPI) cause(e *Exit, said string, hosts []string) {
	number := func(text string) int { n, _ := strconv.Atoi(text); return n } // of digits
	if e.Signal == 0 && e.Code > 128 && e.Code < 128+65 {
		e.Signal, e.Code = syscall.Signal(e.Code-128), 0
	}
	switch m.Kind {
	case OpenMPI:
		if found := openMPISignal.FindStringSubmatch(said); found != nil {
			e.Rank, e.Host, e.Signal, e.Code = number(found[1]), found[2], syscall.Signal(number(found[3])), 0
		} else if found := openMPICode.FindStringSubmatch(said); found != nil {
			e.Rank, e.Signal, e.Code = number(found[1]), 0, number(found[2])
		}
	case MPICH:
		if found := mpichCode.FindStringSubmatch(said); found != nil {
			e.Host, e.Signal, e.Code = found[1], 0, number(found[2])
		}
		if found := mpichSignal.FindStringSubmatch(said); found != nil {
			e.Signal, e.Code = syscall.Signal(number(found[1])), 0
		}
	case Slurm:
		if found := slurmTask.FindStringSubmatch(said); found != nil {
			e.Host, e.Rank, e.Signal, e.Code = found[1], number(found[2]), slurmSignals[found[4]], number(found[3])
		}
	}
	if e.Rank >= 0 && e.Rank < len(hosts) {
		e.Host = hosts[e.Rank] // under the name that it has in our list
	}
}

// A tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

// tailBytes is how much a tail keeps at least.
const tailBytes = 64 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if len(t.text) > 2*tailBytes {
		t.text = append(t.text[:0], t.text[len(t.text)-tailBytes:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// A programJob is a program that stands for all ranks.
type programJob struct {
	cmd   *exec.Cmd
	stop  syscall.Signal // which it passes on to the ranks
	exits chan Exit
	mu    sync.Mutex
	ended bool
}

func (j *programJob) Exits() <-chan Exit { return j.exits }
func (j *programJob) Stop()              { j.signal(j.stop) }
func (j *programJob) End()               { j.signal(syscall.SIGTERM) }

// signal sends a signal to the program alone.
func (j *programJob) signal(s syscall.Signal) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.ended {
		signalProcess(j.cmd.Process.Pid, s)
	}
}

// Kill kills the program, and the ranks that it has started on this machine. Those on other hosts are killed by its daemons there, when they
// miss it.
func (j *programJob) Kill() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended {
		return
	}
	ranks := descendants(j.cmd.Process.Pid)
	signalGroup(j.cmd.Process.Pid, syscall.SIGKILL)
	for _, pid := range ranks {
		signalProcess(pid, syscall.SIGKILL)
	}
}
