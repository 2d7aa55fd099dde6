package launch

import (
	"cmp"
	"context"
	"errors"
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

	"mula/xpu/comm/tcp"
)

// Kind is a program that starts the ranks of a job.
type Kind string

// The kinds of programs that start ranks.
const (
	OpenMPI Kind = "Open MPI"
	MPICH   Kind = "MPICH"
	PALS    Kind = "PALS" // Parallel Application Launch Service, of HPE Cray machines
	Slurm   Kind = "Slurm"
)

// palsVersion is the first line that PALS prints as its version: "mpiexec version 1.8.0 revision".
var palsVersion = regexp.MustCompile(`^mpiexec version \d`)

// DetectMPI runs mpiexec, a program with its arguments, to find out which MPI it belongs to.
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
	case palsVersion.MatchString(strings.TrimSpace(text)):
		return PALS, nil
	case err != nil:
		return "", fmt.Errorf("%s --version: %w", mpiexec[0], err)
	}
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return "", fmt.Errorf("%s is not from Open MPI, MPICH's Hydra or PALS, and mula launch supports no "+
		"other: its --version is %q. Name another program with --mpiexec, start the ranks "+
		"over ssh with --with tcp --hosts HOSTS (in a PBS job: --hosts $PBS_NODEFILE), or start them without mula "+
		"launch: %s -n RANKS mula train", mpiexec[0], line, mpiexec[0])
}

// MPI is a [Starter] that starts the ranks with mpiexec or srun. It reads in the output of that
// program which rank died.
type MPI struct {
	Kind     Kind
	TCP      bool     // Slurm: the ranks use TCP and need no PMI
	Port     int      // with TCP, the port at which rank 0 listens; 0 = a free port
	Program  []string // mpiexec or srun, and its first arguments
	Command  []string // program and arguments of a rank
	AllLocal bool     // all hosts are this machine, for tests
	Output   Output

	patience time.Duration // with a program that reports a failure and does not end; 0: 10 s
}

// Name returns the kind, and ", tcp" if the ranks use TCP.
func (m *MPI) Name() string {
	if m.TCP {
		return string(m.Kind) + ", tcp"
	}
	return string(m.Kind)
}

// Start starts the program.
func (m *MPI) Start(_ context.Context, r Ranks) (Job, error) {
	r.Environment = append(slices.Clone(r.Environment), tcp.SizeVariable+"="+strconv.Itoa(len(r.Hosts)))
	if m.TCP && len(r.Hosts) > 1 {
		if r.Hosts[0] == localhost {
			return nil, errors.New("srun without MPI needs the names of the nodes (SLURM_JOB_NODELIST); " +
				"start the run in sbatch or salloc")
		}
		address, listener, err := rankZero(r.Hosts[0], m.Port, false)
		if err != nil {
			return nil, err
		}
		if listener != nil { // a task of Slurm cannot inherit it
			listener.Close()
		}
		r.Environment = append(r.Environment, meetingPoint(address)...)
	}
	arguments, err := m.arguments(r)
	if err != nil {
		return nil, err
	}
	out, err := openOutput(filepath.Join(r.Dir, "ranks.log"), 0, m.Output) // unchanged
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(m.Program[0], append(slices.Clone(m.Program[1:]), arguments...)...)
	cmd.Env = append(os.Environ(), r.Environment...)
	switch n := os.Getenv("SLURM_CPUS_PER_TASK"); {
	case m.Kind == PALS:
		cmd.Env = append(cmd.Env, palsEnvironment...)
	case m.Kind == Slurm && n != "" && os.Getenv(cpusVariable) == "":
		cmd.Env = append(cmd.Env, cpusVariable+"="+n)
	}
	said := &tail{}
	cmd.Stdout, cmd.Stderr = tee{&out.stdout, said}, tee{&out.stderr, said}
	cmd.WaitDelay = 2 * time.Second
	leadGroup(cmd)
	if err := cmd.Start(); err != nil {
		out.close()
		return nil, err
	}
	j := &programJob{cmd: cmd, stop: m.Kind.stopSignal(), exits: make(chan Exit, 2)}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the state has the error
		close(ended)
	}()
	go func() {
		if m.Kind == Slurm {
			m.awaitStuck(ended, said, r.Hosts, j.exits)
		}
		<-ended
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

// palsEnvironment makes PALS end all ranks when one fails, pass all variables to the ranks, and
// write complete lines.
var palsEnvironment = []string{"PALS_ABORT_ON_FAILURE=1", "PALS_ENVALL=1", "PALS_LINE_BUFFER=1"}

// cpusVariable has srun's --cpus-per-task. Since version 22.05, srun ignores the value of the job.
const cpusVariable = "SRUN_CPUS_PER_TASK"

// A run of ranks on one host.
type hostRanks struct {
	host  string
	ranks int
}

// arguments returns the arguments of the program for an attempt: the number of ranks, their hosts,
// their environment, and the command.
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
	if m.AllLocal && !here { // a part of the command for each host, which passes the name of the host to the ranks
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
	rooms := make([]string, len(hosts))
	for i, h := range hosts {
		rooms[i] = fmt.Sprintf("%s:%d", h.host, h.ranks)
	}
	switch {
	case here:
	case m.Kind == OpenMPI:
		arguments = append(arguments, "--host", strings.Join(rooms, ","))
	case m.Kind == MPICH:
		arguments = append(arguments, "-hosts", strings.Join(rooms, ","))
	case m.Kind == PALS:
		names := make([]string, len(hosts))
		for i, h := range hosts {
			names[i] = h.host
			last, first := i == len(hosts)-1, hosts[0]
			if h.ranks > first.ranks || h.ranks < first.ranks && !last || slices.Contains(names[:i], h.host) {
				return nil, fmt.Errorf("PALS starts the same number of ranks on each host, and fewer only on the "+
					"last: host %s would have %d, and host %s has %d; change --hosts or --ranks", h.host, h.ranks,
					first.host, first.ranks)
			}
		}
		arguments = append(arguments, "--ppn", strconv.Itoa(hosts[0].ranks), "--hosts", strings.Join(names, ","))
	default: // the name of a node for each of its ranks; Slurm may use another order
		arguments = append(arguments, "--nodes="+strconv.Itoa(len(hosts)), "--distribution=arbitrary",
			"--nodelist="+strings.Join(r.Hosts, ","))
	}
	if m.Kind == Slurm {
		return append(arguments, m.slurmArguments()...), nil
	}
	return append(append(arguments, m.export(r.Environment)...), m.Command...), nil
}

// slurmArguments returns the arguments of srun that do not depend on hosts, and the command. A
// shell on the node passes on the rank and Slurm's name of the node, which only srun has. The
// user's own options come first and are not repeated.
func (m *MPI) slurmArguments() []string {
	arguments := []string{"--kill-on-bad-exit=1"}
	if option(m.Program, "--export") == "" {
		// a job that was submitted with --export=NONE has SLURM_EXPORT_ENV
		arguments = append(arguments, "--export=ALL")
	}
	if !slices.Contains(m.Program, "--exclusive") {
		// an earlier step with a dead node never ends, and its cores stay in use on the other nodes
		arguments = append(arguments, "--overlap")
	}
	set := "export " + hostVariable + `="$SLURMD_NODENAME"`
	if m.TCP {
		set += " " + tcp.RankVariable + `="$SLURM_PROCID"`
		if option(m.Program, "--mpi") == "" {
			arguments = append(arguments, "--mpi=none")
		}
	}
	return append(append(arguments, "sh", "-c", set+`; exec "$@"`, "sh"), m.Command...)
}

// export returns the arguments that make the program pass variables of its environment to ranks on
// other hosts. MPICH, PALS and Slurm pass all variables.
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

// Messages of the programs about the rank whose failure made them end the others: Open MPI 4.1,
// MPICH 4.0 (Hydra), PALS 1.3 to 1.8, Slurm 22.05 and 23. A shepherd is PALS's process beside
// the ranks of a host. A child in a message of PALS is a host that does not answer its parent.
var (
	openMPISignal = regexp.MustCompile(`process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)`)
	openMPICode   = regexp.MustCompile(`Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)`)
	mpichCode     = regexp.MustCompile(`PID \d+ RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)`)
	mpichSignal   = regexp.MustCompile(`EXIT STRING: .*\(signal (\d+)\)`)
	palsRank      = regexp.MustCompile(`^(\S+): (?:rank (\d+)|shepherd) (?:exited with code (\d+)|died from signal (\d+)(?: and dumped core)?)$`)
	palsHost      = regexp.MustCompile(`^(?:(?:launch|ping) failed on \S+: (?:Couldn't forward RPC \S+ to child (\S+):.*|No reply from (\S+) after .*)|ping RPC timeout from (\S+) after .*)$`)
	slurmTask     = regexp.MustCompile(`srun: error: (\S+): tasks? (\d+)[-,0-9]*: (?:Exited with exit code (\d+)|(Killed|Terminated|Aborted|Segmentation fault|Bus error|Out Of Memory))`)
	slurmNode     = regexp.MustCompile(`(?m)^srun: error: (?:Node failure on (\S+)|Task launch for .*failed on node (\S+): (?:Communication|Socket timed out).*)$`)
	slurmMemory   = regexp.MustCompile(`(?mi)^(?:srun|slurmstepd[^:\n]*): error: .*(?:out of memory|oom[-_ ]kill|exceeded .*memory limit)`)
)

var slurmSignals = map[string]syscall.Signal{"Out Of Memory": syscall.SIGKILL, "Killed": syscall.SIGKILL,
	"Terminated": syscall.SIGTERM, "Aborted": syscall.SIGABRT,
	"Segmentation fault": syscall.SIGSEGV, "Bus error": syscall.SIGBUS}

// cause completes the exit of the program with its messages about the ranks. hosts are the hosts of
// the ranks.
func (m *MPI) cause(e *Exit, said string, hosts []string) {
	number := func(text string) int { n, _ := strconv.Atoi(text); return n } // of digits
	*e = e.withSignal()
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
	case PALS:
		var exits []Exit
		for line := range strings.SplitSeq(said, "\n") {
			if found := palsHost.FindStringSubmatch(line); found != nil {
				exits = append(exits, Exit{Host: nameIn(hosts, found[1]+found[2]+found[3]), Rank: -1, Unreachable: true,
					Note: line})
			}
			found := palsRank.FindStringSubmatch(line)
			if found == nil {
				continue
			}
			exit := Exit{Host: nameIn(hosts, found[1]), Rank: -1, Signal: syscall.Signal(number(found[4])),
				Code: number(found[3])}
			switch {
			case found[2] != "":
				exit.Rank = number(found[2])
			case exit.Signal == syscall.SIGKILL:
				exit.Unreachable, exit.Note = true, "its shepherd was killed, according to PALS"
			}
			exits = append(exits, exit.withSignal())
		}
		if first := cause(exits); first != nil {
			*e = *first
		}
	case Slurm:
		exits, _ := slurmExits(said)
		if first := cause(exits); first != nil {
			*e = *first
		}
		if slurmMemory.MatchString(said) {
			e.Note = "out of memory, according to Slurm"
		}
	}
	if e.Rank >= 0 && e.Rank < len(hosts) {
		e.Host = hosts[e.Rank] // the name in our list
	}
}

// slurmExits returns the ends of tasks that srun reports, and the nodes of these tasks. A rank
// whose peer is killed often exits with an error before srun reports the peer.
func slurmExits(said string) (exits []Exit, nodes []Host) {
	for _, found := range slurmTask.FindAllStringSubmatch(said, -1) {
		rank, _ := strconv.Atoi(found[2]) // digits
		code, _ := strconv.Atoi(found[3])
		exits = append(exits, Exit{Host: found[1], Rank: rank, Signal: slurmSignals[found[4]], Code: code})
		if of, err := ParseNodeList(found[1]); err == nil { // several nodes, if their tasks end in the same way
			nodes = append(nodes, of...)
		}
	}
	if found := slurmNode.FindStringSubmatch(said); found != nil {
		if lost, err := ParseNodeList(found[1] + found[2]); err == nil && len(lost) > 0 {
			_, note, _ := strings.Cut(found[0], "error: ")
			exits = append(exits, Exit{Rank: -1, Host: lost[0].Name, Unreachable: true, Note: note})
		}
	}
	return exits, nodes
}

// awaitStuck returns when srun has ended, or when it has reported a failure and does not end,
// because a node does not answer. Slurm waits for such a node for SlurmdTimeout, 5 minutes by
// default. In the second case awaitStuck first sends an exit that names the node.
func (m *MPI) awaitStuck(ended <-chan struct{}, said *tail, hosts []string, exits chan<- Exit) {
	patience := cmp.Or(m.patience, 10*time.Second)
	tick := time.NewTicker(patience / 10)
	defer tick.Stop()
	var failed time.Time
	for {
		select {
		case <-ended:
			return
		case now := <-tick.C:
			e := stuck(said.String(), hosts)
			switch {
			case e == nil:
				failed = time.Time{}
			case failed.IsZero():
				failed = now
			case now.Sub(failed) >= patience:
				exits <- *e
				return
			}
		}
	}
}

// stuck returns the exit of the node for which srun waits, by its messages, or nil. It is the node
// that srun has lost. If srun has reported the failure of a task, it is the only node without
// reports: srun ends all tasks after a failure.
func stuck(said string, hosts []string) *Exit {
	exits, nodes := slurmExits(said)
	first := cause(exits)
	switch {
	case first == nil || first.fine():
		return nil
	case first.Unreachable:
		return first
	}
	silent := slices.DeleteFunc(slices.Compact(slices.Clone(hosts)), func(host string) bool {
		return slices.ContainsFunc(nodes, func(n Host) bool { return n.Name == host })
	})
	if len(silent) != 1 {
		return nil
	}
	return &Exit{Rank: -1, Host: silent[0], Silent: true, Note: first.String()}
}

// nameIn returns the name in hosts of the machine that a launcher calls name. The two may differ in
// their domains.
func nameIn(hosts []string, name string) string {
	short := func(name string) string { s, _, _ := strings.Cut(name, "."); return s }
	if i := slices.IndexFunc(hosts, func(h string) bool { return h != name && short(h) == short(name) }); i >= 0 &&
		!slices.Contains(hosts, name) {
		return hosts[i]
	}
	return name
}

// A tail keeps the end of the written bytes.
type tail struct {
	mu   sync.Mutex
	text []byte
}

// tailBytes is the number of bytes that a tail keeps at least.
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

// A programJob is a program that runs all ranks.
type programJob struct {
	cmd   *exec.Cmd
	stop  syscall.Signal // which it passes on to the ranks
	exits chan Exit
	mu    sync.Mutex
	ended bool
}

func (j *programJob) Exits() <-chan Exit { return j.exits }
func (j *programJob) Stop()              { j.signal(j.stop) }

// Stacks reaches only ranks on this machine, because mpiexec and srun do not pass SIGQUIT on. A
// SIGQUIT would end their daemons, so only processes of the launcher's own program get it.
func (j *programJob) Stacks() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended {
		return
	}
	own, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	for _, pid := range descendants(j.cmd.Process.Pid) {
		if program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && program == own {
			signalProcess(pid, syscall.SIGQUIT)
		}
	}
}

func (j *programJob) End() { j.signal(syscall.SIGTERM) }

// signal sends a signal to the program alone.
func (j *programJob) signal(s syscall.Signal) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.ended {
		signalProcess(j.cmd.Process.Pid, s)
	}
}

// Kill kills the program and the ranks that it has started on this machine. On other hosts, the
// program's daemons kill the ranks when they lose the program.
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
