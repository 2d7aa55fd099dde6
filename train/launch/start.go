package launch

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"mula/xpu/comm/tcp"
)

// A Starter starts the ranks of an attempt.
type Starter interface {
	Name() string // in records, such as "tcp"
	Start(ctx context.Context, r Ranks) (Job, error)
}

// Ranks are the ranks of an attempt.
type Ranks struct {
	Hosts       []string // of each rank
	Spares      []string // hosts of the hot spares; none if the starter has no [assigner]
	Environment []string // of every rank, NAME=value, in addition to the environment of the launcher
	Dir         string   // folder for their output
}

// A Job is the running ranks of an attempt. Its methods do not wait.
type Job interface {
	Exits() <-chan Exit // closed after the last exit
	Stacks()            // asks the ranks to write the stacks of their goroutines
	Stop()              // asks the ranks to finish their step, save and exit
	End()               // asks the ranks to exit now
	Kill()              // kills the ranks
}

// hostVariable names the environment variable with the name of a rank's host in the launcher's
// list. Failures are recorded under that name.
const hostVariable = "MULA_HOST"

// Output has the writers for the output of ranks. The output is also written to files in the folder
// of the attempt.
type Output struct{ Stdout, Stderr io.Writer }

// Processes is a [Starter] that starts every rank itself: as a child process on this machine, and
// with a remote shell on other hosts. The ranks use TCP.
type Processes struct {
	// program and arguments of a rank; the program's path must be absolute if there are remote
	// hosts
	Command     []string
	RemoteShell []string // program and arguments, to which a host and a command are added, as in ssh -T HOST COMMAND
	Agent       []string // program and arguments that run [Agent] on a remote host
	AllLocal    bool     // all hosts are this machine, for tests
	Port        int      // at which rank 0 listens; 0 = a free port
	Output      Output
}

// Name returns "tcp".
func (p *Processes) Name() string { return "tcp" }

// Start starts the ranks and the hot spares. It fails if the program of a local process, or the
// remote shell, cannot be started.
func (p *Processes) Start(_ context.Context, r Ranks) (Job, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	if len(r.Spares) > 0 && !canPassFiles {
		return nil, errors.New("hot spares need a system where processes inherit files; use Unix, or remove " +
			"--hot-spares")
	}
	j := newProcessJob(len(r.Hosts) + len(r.Spares))
	j.starter, j.ranks, j.dir = p, r, dir
	j.environment = append(slices.Clone(r.Environment), tcp.SizeVariable+"="+strconv.Itoa(len(r.Hosts)))
	var listener *net.TCPListener // at the address of rank 0
	var meeting []string
	address := ""
	if len(r.Hosts) > 1 {
		if err := p.reachable(r.Hosts); err != nil {
			return nil, err
		}
		if address, listener, err = rankZero(r.Hosts[0], p.Port, p.AllLocal); err != nil {
			return nil, err
		}
		meeting = meetingPoint(address)
	}
	for rank, host := range r.Hosts {
		environment := slices.Clone(meeting)
		if len(r.Hosts) > 1 {
			environment = append(environment, tcp.RankVariable+"="+strconv.Itoa(rank))
		}
		first := listener
		if rank > 0 {
			first = nil
		}
		if err := j.run(rank, host, address, first, environment); err != nil {
			j.Kill()
			return nil, err
		}
	}
	for _, host := range r.Spares {
		if _, err := j.AddSpare(host); err != nil {
			j.Kill()
			return nil, err
		}
	}
	j.all()
	return j, nil
}

// reachable returns an error if other hosts cannot reach rank 0 under the name of its host.
func (p *Processes) reachable(hosts []string) error {
	if first := hosts[0]; !p.AllLocal && (first == localhost || first == "127.0.0.1") {
		if i := slices.IndexFunc(hosts, func(h string) bool { return !isLocal(h) }); i >= 0 {
			return fmt.Errorf("rank 0 runs on %s, which is not this machine from %s; use a name of this machine "+
				"that the other hosts can resolve", first, hosts[i])
		}
	}
	return nil
}

// run starts the next process of the job: a rank, or a hot spare if rank is negative. listener
// listens at address; nil for none. run closes it, and the process inherits its socket: if it dies,
// the socket is closed.
func (j *processJob) run(rank int, host, address string, listener *net.TCPListener, environment []string) error {
	p, number := j.starter, j.count()
	environment = slices.Concat(j.environment, environment)
	if host != localhost {
		environment = append(environment, hostVariable+"="+host)
	}
	hot := len(j.ranks.Spares) > 0
	local := p.AllLocal || isLocal(host)
	if hot && local && listener == nil && rank != 0 && len(j.ranks.Hosts) > 1 {
		// The process may become rank 0.
		var err error
		if address, listener, err = rankZero(host, p.Port, p.AllLocal); err != nil {
			return err
		}
	}
	out, err := openOutput(outputLog(j.ranks.Dir, rank, number), rank, p.Output)
	if err != nil {
		return err
	}
	started := &process{host: host, out: out}
	var inherited []*os.File // from file descriptor 3
	defer func() {
		for _, f := range inherited {
			f.Close()
		}
	}()
	inherit := func(variable string, f *os.File) {
		inherited = append(inherited, f)
		environment = append(environment, variable+"="+strconv.Itoa(2+len(inherited)))
	}
	if listener != nil {
		defer listener.Close()
	}
	if local && listener != nil && canPassFiles && os.Getenv(tcp.ListenVariable) == "" {
		f, err := listener.File()
		if err != nil {
			out.close()
			return err
		}
		inherit(tcp.ListenFDVariable, f)
		if hot {
			environment = append(environment, tcp.KeepVariable+"=1")
			started.address = address
		}
	}
	var cmd *exec.Cmd
	if local {
		cmd = exec.Command(p.Command[0], p.Command[1:]...)
		if hot {
			assignments, write, err := os.Pipe()
			if err != nil {
				out.close()
				return err
			}
			inherit(assignVariable, assignments)
			started.assign = write
		}
		cmd.ExtraFiles = inherited
		cmd.Env = append(os.Environ(), environment...)
	} else {
		cmd = exec.Command(p.RemoteShell[0], append(slices.Clone(p.RemoteShell[1:]), host, shellLine(p.Agent))...)
	}
	err = j.start(cmd, started, Exit{Process: number, Rank: rank, Host: host}, !local,
		agentOrder{Dir: j.dir, Command: p.Command, Environment: environment, Assigned: hot})
	if err != nil {
		started.release()
		out.close()
	}
	return err
}

// Assign implements [assigner].
func (j *processJob) Assign(generation int, processes []int) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	var hosts []string
	for _, number := range processes {
		hosts = append(hosts, j.processes[number].host)
	}
	if err := j.starter.reachable(hosts); err != nil {
		return err
	}
	address := j.processes[processes[0]].address
	if address == "" {
		var listener *net.TCPListener
		var err error
		if address, listener, err = rankZero(hosts[0], j.starter.Port, j.starter.AllLocal); err != nil {
			return err
		}
		if listener != nil {
			listener.Close() // rank 0 has another address to bind; see MULA_LISTEN
		}
	}
	secret := newSecret()
	for rank, number := range processes {
		p := j.processes[number]
		line, err := json.Marshal(Assignment{Generation: generation, Rank: rank, Address: address, Secret: secret})
		if err != nil {
			return err
		}
		if err := p.out.become(rankLog(j.ranks.Dir, rank), rank); err != nil {
			return err
		}
		p.send(line)
	}
	return nil
}

// AddSpare implements [assigner].
func (j *processJob) AddSpare(host string) (int, error) {
	number := j.count()
	return number, j.run(-1, host, "", nil, nil)
}

// Release implements [assigner].
func (j *processJob) Release() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, p := range j.processes {
		if !p.ended {
			p.release()
		}
	}
}

// canPassFiles reports whether a child process can inherit a socket.
const canPassFiles = runtime.GOOS != "windows"

// meetingPoint returns the environment with which ranks find each other over TCP: the address of
// rank 0 and a new secret.
func meetingPoint(address string) []string {
	return []string{tcp.AddressVariable + "=" + address, tcp.SecretVariable + "=" + newSecret()}
}

// newSecret returns a random secret for the ranks of a group.
func newSecret() string {
	secret := make([]byte, 16)
	rand.Read(secret)
	return hex.EncodeToString(secret)
}

// rankZero returns the address at which rank 0 listens on a host. If mula launch chooses the port
// and the host is this machine, it also returns a listener at the address. Rank 0 should inherit
// its socket: if the launcher closed it first, another process could bind the port before rank 0.
//
// The launcher cannot bind a port of another host, and Slurm's tasks cannot inherit a socket. There
// the port may be in use. Then rank 0 fails, and the next attempt has another port.
func rankZero(host string, port int, allLocal bool) (string, *net.TCPListener, error) {
	var listener *net.TCPListener
	local, name := allLocal || host == localhost, host
	if local {
		name = loopback()
	}
	if at := strings.LastIndexByte(name, '@'); at >= 0 { // the user's name is for the remote shell
		name = name[at+1:]
	}
	switch {
	case port != 0:
	case local || isLocal(host):
		l, err := net.Listen("tcp", net.JoinHostPort(name, "0"))
		if err != nil {
			return "", nil, fmt.Errorf("looking for a free port of %s: %w", name, err)
		}
		listener = l.(*net.TCPListener)
		port = l.Addr().(*net.TCPAddr).Port
	default: // a port that is unlikely to be in use there
		n, err := rand.Int(rand.Reader, big.NewInt(10000))
		if err != nil {
			return "", nil, err
		}
		port = 20000 + int(n.Int64())
	}
	return net.JoinHostPort(name, strconv.Itoa(port)), listener, nil
}

// loopback returns a loopback address of this machine. On Linux it is a random address of
// 127.0.0.0/8, whose ports other programs rarely use.
func loopback() string {
	if runtime.GOOS != "linux" {
		return "127.0.0.1"
	}
	b := make([]byte, 3)
	rand.Read(b)
	return fmt.Sprintf("127.%d.%d.%d", b[0], b[1], 1+b[2]%254)
}

// localhost is the name of this machine if no list of hosts is given.
const localhost = "localhost"

// isLocal reports whether a host is this machine.
func isLocal(host string) bool {
	if host == localhost || host == "127.0.0.1" {
		return true
	}
	name, err := os.Hostname()
	if err != nil {
		return false
	}
	short, _, _ := strings.Cut(name, ".")
	return host == name || host == short
}

// shellLine quotes a command for a shell.
func shellLine(command []string) string {
	quoted := make([]string, len(command))
	for i, word := range command {
		quoted[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
	}
	return strings.Join(quoted, " ")
}

// A processJob is a set of processes. Each leads its own process group.
type processJob struct {
	starter     *Processes
	ranks       Ranks
	dir         string   // in which the processes run
	environment []string // of all processes
	exits       chan Exit

	mu        sync.Mutex
	processes []*process // by number
	running   int
	complete  bool // all has been called
	closed    bool // exits is closed
}

// A process is a process of a job.
type process struct {
	cmd    *exec.Cmd
	out    *rankOutput
	host   string
	orders chan []byte // lines for an agent; nil for a local process
	pipe   io.Closer   // for orders
	cut    bool        // the pipe is closed
	ended  bool

	// With hot spares.
	address string   // of the socket that a local process has inherited; "" without
	assign  *os.File // to which the assignments of a local process are written; nil without
}

// send sends an assignment to a process. If the process does not read it, it does not join the
// group, and the group is not formed within the time limit.
func (p *process) send(line []byte) {
	switch {
	case p.ended:
	case p.assign != nil:
		_ = p.assign.SetWriteDeadline(time.Now().Add(time.Second)) // pipes have deadlines
		_, _ = p.assign.Write(append(line, '\n'))
	case p.orders != nil:
		select {
		case p.orders <- line:
		default: // the remote shell has stopped reading
		}
	}
}

// release ends the assignments of a process.
func (p *process) release() {
	switch {
	case p.assign != nil:
		p.assign.Close()
		p.assign = nil
	case p.orders != nil:
		p.send([]byte(releaseOrder))
	}
}

func newProcessJob(processes int) *processJob { return &processJob{exits: make(chan Exit, processes)} }

// count returns the number of processes that were started, which is the number of the next process.
func (j *processJob) count() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.processes)
}

// start starts a process of the job. An agent reads its order from its standard input, which stays
// open, because its end would end the rank.
func (j *processJob) start(cmd *exec.Cmd, p *process, e Exit, remote bool, order agentOrder) error {
	cmd.Stdout, cmd.Stderr = &p.out.stdout, &p.out.stderr
	cmd.WaitDelay = 2 * time.Second // a child process that survives the rank may keep its output open
	leadGroup(cmd)
	p.cmd = cmd
	if remote {
		pipe, err := cmd.StdinPipe()
		if err != nil {
			return err
		}
		line, err := json.Marshal(order)
		if err != nil {
			return err
		}
		p.orders, p.pipe = make(chan []byte, 16), pipe
		p.orders <- line
		go func() {
			for line := range p.orders {
				_, _ = pipe.Write(append(line, '\n')) // if the shell has died, its exit is reported
			}
		}()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	err := error(nil)
	if j.closed {
		err = errors.New("all ranks have exited")
	} else {
		err = cmd.Start()
	}
	if err != nil {
		if p.orders != nil {
			close(p.orders)
			p.orders = nil
		}
		return err
	}
	j.processes = append(j.processes, p)
	j.running++
	go func() {
		_ = cmd.Wait() // the state has the error, or it concerns the pipes of a process that has exited
		j.mu.Lock()
		p.release()
		p.ended = true
		if p.orders != nil {
			close(p.orders)
		}
		j.mu.Unlock()
		p.out.close()
		j.exits <- exitOf(e, cmd.ProcessState, remote)
		j.mu.Lock()
		defer j.mu.Unlock()
		j.running--
		j.closeAtEnd()
	}()
	return nil
}

// all records that all ranks have been started.
func (j *processJob) all() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.complete = true
	j.closeAtEnd()
}

// closeAtEnd closes exits after the last exit. The caller holds j.mu.
func (j *processJob) closeAtEnd() {
	if j.complete && j.running == 0 && !j.closed {
		j.closed = true
		close(j.exits)
	}
}

// remoteShellFailed is the exit code of ssh if it could not reach the host or has lost the
// connection.
const remoteShellFailed = 255

// exitOf returns how a process ended. An agent reports the signal that ended its rank as shells do:
// 128 plus the number of the signal.
func exitOf(e Exit, state *os.ProcessState, remote bool) Exit {
	var status syscall.WaitStatus
	ok := false
	if state != nil {
		status, ok = state.Sys().(syscall.WaitStatus)
	}
	switch {
	case !ok:
		e.Code = ExitFailed
	case status.Signaled():
		e.Signal, e.Shell = status.Signal(), remote
	default:
		e.Code = status.ExitStatus()
	}
	if remote && e.Signal == 0 {
		e.Unreachable = e.Code == remoteShellFailed
		return e.withSignal()
	}
	return e
}

func (j *processJob) Exits() <-chan Exit { return j.exits }
func (j *processJob) Stacks()            { j.signal(syscall.SIGQUIT) }
func (j *processJob) Stop()              { j.signal(syscall.SIGTERM) }
func (j *processJob) End()               { j.signal(syscall.SIGTERM) }
func (j *processJob) Kill()              { j.signal(syscall.SIGKILL) }

// signal sends a signal to the groups of all processes that still run. The agents forward it to
// remote ranks.
func (j *processJob) signal(s syscall.Signal) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, p := range j.processes {
		switch {
		case p.ended:
		case p.orders != nil && s != syscall.SIGKILL:
			select {
			case p.orders <- strconv.AppendInt(nil, int64(s), 10):
			default: // the remote shell has stopped reading
			}
		case p.orders != nil && !p.cut:
			p.pipe.Close() // the agent then kills the rank
			p.cut = true
		default:
			// a local rank, or a remote shell that has not ended since its pipe was closed, because
			// its host does not answer
			signalGroup(p.cmd.Process.Pid, s)
		}
	}
}

// outputLog returns the file with the output of a process of an attempt. rank is negative for a hot
// spare.
func outputLog(dir string, rank, process int) string {
	if rank < 0 {
		return filepath.Join(dir, fmt.Sprintf("spare-%05d.log", process))
	}
	return rankLog(dir, rank)
}

// A rankOutput copies the output of a process to a file and to the launcher's output. In the
// launcher's output, the output of rank 0 is unchanged, and each line of another rank follows the
// number of the rank. The lines of a hot spare follow "spare".
type rankOutput struct {
	launcher       Output
	stdout, stderr switched

	mu    sync.Mutex
	file  *os.File
	lines []*prefixed
}

// A switched writer writes to another writer, which may change.
type switched struct{ to atomic.Pointer[tee] }

func (s *switched) Write(p []byte) (int, error) { return s.to.Load().Write(p) }

// openOutput opens the output of a rank, or of a hot spare if rank is negative.
func openOutput(path string, rank int, out Output) (*rankOutput, error) {
	o := &rankOutput{launcher: out}
	return o, o.become(path, rank)
}

// become writes the output of the process from now on as the output of the rank, to the file at
// path.
func (o *rankOutput) become(path string, rank int) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	var writers [2]io.Writer
	var lines []*prefixed
	switch {
	case rank == 0:
		writers = [2]io.Writer{o.launcher.Stdout, o.launcher.Stderr}
	default:
		prefix := fmt.Sprintf("[%d] ", rank)
		if rank < 0 {
			prefix = "[spare] "
		}
		for i := range writers {
			l := &prefixed{w: o.launcher.Stderr, prefix: prefix}
			writers[i], lines = l, append(lines, l)
		}
	}
	o.stdout.to.Store(&tee{f, writers[0]})
	o.stderr.to.Store(&tee{f, writers[1]})
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closeFile()
	o.file, o.lines = f, lines
	return nil
}

func (o *rankOutput) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closeFile()
	o.file, o.lines = nil, nil
}

// closeFile closes the current file. The caller holds o.mu.
func (o *rankOutput) closeFile() {
	for _, l := range o.lines {
		l.flush()
	}
	if o.file != nil {
		o.file.Close()
	}
}

// A tee writes to both writers, also if one fails: a full disk or a closed terminal must not end a
// rank.
type tee struct{ a, b io.Writer }

func (t tee) Write(p []byte) (int, error) {
	_, _ = t.a.Write(p)
	_, _ = t.b.Write(p)
	return len(p), nil
}

// maxLine is the number of bytes after which an incomplete line is written.
const maxLine = 64 << 10

// prefixed writes complete lines, each after a prefix.
type prefixed struct {
	w      io.Writer
	prefix string
	mu     sync.Mutex
	line   []byte
}

func (p *prefixed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for rest := b; len(rest) > 0; {
		end := bytes.IndexByte(rest, '\n') + 1
		if end == 0 {
			end = len(rest)
		}
		p.line, rest = append(p.line, rest[:end]...), rest[end:]
		if p.line[len(p.line)-1] == '\n' || len(p.line) >= maxLine {
			p.put()
		}
	}
	return len(b), nil
}

// put writes the line in one call, so that the lines of several ranks do not mix.
func (p *prefixed) put() {
	text := append([]byte(p.prefix), p.line...)
	if text[len(text)-1] != '\n' {
		text = append(text, '\n')
	}
	_, _ = p.w.Write(text)
	p.line = p.line[:0]
}

func (p *prefixed) flush() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.line) > 0 {
		p.put()
	}
}
