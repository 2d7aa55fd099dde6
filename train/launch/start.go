package launch

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
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

// Start starts the ranks. It fails if the program of a local rank, or the remote shell, cannot be
// started.
func (p *Processes) Start(_ context.Context, r Ranks) (Job, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	var listener *os.File // at the address of rank 0
	common := append(slices.Clone(r.Environment), tcp.SizeVariable+"="+strconv.Itoa(len(r.Hosts)))
	if len(r.Hosts) > 1 {
		if first := r.Hosts[0]; !p.AllLocal && (first == localhost || first == "127.0.0.1") {
			if i := slices.IndexFunc(r.Hosts, func(h string) bool { return !isLocal(h) }); i >= 0 {
				return nil, fmt.Errorf("rank 0 runs on %s, which is not this machine from %s; use a name of this "+
					"machine that the other hosts can resolve", first, r.Hosts[i])
			}
		}
		meeting, l, err := meetingPoint(r.Hosts[0], p.Port, p.AllLocal)
		if err != nil {
			return nil, err
		}
		common = append(common, meeting...)
		if l != nil && canPassFiles && os.Getenv(tcp.ListenVariable) == "" {
			listener, err = l.File()
		}
		if l != nil {
			l.Close() // listener is a duplicate
		}
		if err != nil {
			return nil, err
		}
	}
	if listener != nil {
		// Rank 0 has inherited the socket. If it dies, the socket is closed.
		defer listener.Close()
	}
	j := newProcessJob(len(r.Hosts))
	for rank, host := range r.Hosts {
		environment := slices.Clone(common)
		if len(r.Hosts) > 1 {
			environment = append(environment, tcp.RankVariable+"="+strconv.Itoa(rank))
		}
		if host != localhost {
			environment = append(environment, hostVariable+"="+host)
		}
		out, err := openOutput(rankLog(r.Dir, rank), rank, p.Output)
		if err != nil {
			j.Kill()
			return nil, err
		}
		local := p.AllLocal || isLocal(host)
		var cmd *exec.Cmd
		if local {
			cmd = exec.Command(p.Command[0], p.Command[1:]...)
			if rank == 0 && listener != nil {
				cmd.ExtraFiles = []*os.File{listener}
				environment = append(environment, tcp.ListenFDVariable+"=3") // the first of ExtraFiles
			}
			cmd.Env = append(os.Environ(), environment...)
		} else {
			cmd = exec.Command(p.RemoteShell[0], append(slices.Clone(p.RemoteShell[1:]), host, shellLine(p.Agent))...)
		}
		if err := j.start(cmd, Exit{Rank: rank, Host: host}, out, !local, agentOrder{Dir: dir, Command: p.Command,
			Environment: environment}); err != nil {
			out.close()
			j.Kill()
			return nil, err
		}
	}
	j.all()
	return j, nil
}

// canPassFiles reports whether a child process can inherit a socket.
const canPassFiles = runtime.GOOS != "windows"

// meetingPoint returns the environment with which ranks find each other over TCP: the address of
// rank 0, which runs on host, and a new secret. See rankZero for the listener.
func meetingPoint(host string, port int, allLocal bool) ([]string, *net.TCPListener, error) {
	address, listener, err := rankZero(host, port, allLocal)
	if err != nil {
		return nil, nil, err
	}
	secret := make([]byte, 16)
	rand.Read(secret)
	return []string{tcp.AddressVariable + "=" + address, tcp.SecretVariable + "=" + hex.EncodeToString(secret)},
		listener, nil
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
	exits chan Exit
	wait  sync.WaitGroup

	mu        sync.Mutex
	processes []*process
}

// A process is a process of a job.
type process struct {
	cmd    *exec.Cmd
	orders chan []byte // lines for an agent; nil for a local rank
	pipe   io.Closer   // for orders
	cut    bool        // the pipe is closed
	ended  bool
}

func newProcessJob(ranks int) *processJob { return &processJob{exits: make(chan Exit, ranks)} }

// start starts a process of the job. An agent reads its order from its standard input, which stays
// open, because its end would end the rank.
func (j *processJob) start(cmd *exec.Cmd, e Exit, out *rankOutput, remote bool, order agentOrder) error {
	cmd.Stdout, cmd.Stderr = out.stdout, out.stderr
	cmd.WaitDelay = 2 * time.Second // a child process that survives the rank may keep its output open
	leadGroup(cmd)
	p := &process{cmd: cmd}
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
	if err := cmd.Start(); err != nil {
		if p.orders != nil {
			close(p.orders)
		}
		return err
	}
	j.mu.Lock()
	j.processes = append(j.processes, p)
	j.mu.Unlock()
	j.wait.Go(func() {
		_ = cmd.Wait() // the state has the error, or it concerns the pipes of a process that has exited
		j.mu.Lock()
		p.ended = true
		if p.orders != nil {
			close(p.orders)
		}
		j.mu.Unlock()
		out.close()
		j.exits <- exitOf(e, cmd.ProcessState, remote)
	})
	return nil
}

// all records that all processes have been started.
func (j *processJob) all() {
	go func() {
		j.wait.Wait()
		close(j.exits)
	}()
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

// A rankOutput copies the output of a rank to the rank's file and to the launcher's output. In the
// launcher's output, the output of rank 0 is unchanged, and each line of another rank follows the
// number of the rank.
type rankOutput struct {
	file           *os.File
	stdout, stderr io.Writer
	lines          []*prefixed
}

func openOutput(path string, rank int, out Output) (*rankOutput, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	o := &rankOutput{file: f}
	if rank <= 0 {
		o.stdout, o.stderr = tee{f, out.Stdout}, tee{f, out.Stderr}
		return o, nil
	}
	for range 2 {
		o.lines = append(o.lines, &prefixed{w: out.Stderr, prefix: fmt.Sprintf("[%d] ", rank)})
	}
	o.stdout, o.stderr = tee{f, o.lines[0]}, tee{f, o.lines[1]}
	return o, nil
}

func (o *rankOutput) close() {
	for _, l := range o.lines {
		l.flush()
	}
	o.file.Close()
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
