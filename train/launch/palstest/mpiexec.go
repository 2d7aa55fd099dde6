//go:build unix

// Package palstest is, for tests, a stand-in for the mpiexec of PALS, HPE's launcher on machines
// such as Aurora. It is not PALS. It has options, messages, signals and exit codes of PALS, from
// HPE's published client (cray/pals.py of craycli), and from public reports of the users of Aurora
// and Polaris:
//
//   - "HOST: rank 2 died from signal 9", "HOST: rank 0 exited with code 1"
//   - "launch failed on HOST: Couldn't forward RPC launch(ID) to child HOST: Resource temporarily
//     unavailable", the same with ping, and "ping failed on HOST: No reply from HOST after 97s"
//   - "ping RPC timeout from HOST after 120s"
//
// According to the users' guide of Aurora, an application crashes or hangs after a failed ping. The
// stand-in prints the message and does nothing else.
//
// On each host it starts a shepherd with a remote shell, and the shepherd starts the ranks. PALS
// has a daemon there. All hosts are this machine, and the shepherds connect to mpiexec. The ranks
// find each other by PMI 1, as under MPICH's Hydra. PALS has another library for that.
package palstest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Variables of the stand-in.
const (
	// ShellVariable has the remote shell: a program and arguments, to which a host and a command
	// are added.
	ShellVariable = "PALS_STAND_IN_SHELL"
	// TimeoutVariable has the time after which a host that does not answer is reported. Without it,
	// the time is 120s.
	TimeoutVariable = "PALS_STAND_IN_TIMEOUT"
)

// Exit codes of mpiexec that no rank has.
const (
	wrongUsage   = 1
	launchFailed = 127
)

// rpc is the number of a remote call in messages.
const rpc = "24c93b8c-3434-4fb5-a8f0-53cff4cbbe42"

// A message is a line between mpiexec and a shepherd.
type message struct {
	Kind   kind
	Host   int         `json:",omitempty"` // the sender, set by mpiexec
	Order  *order      `json:",omitempty"`
	Rank   int         `json:",omitempty"` // with pmi and exit
	Line   string      `json:",omitempty"` // with pmi
	Exit   *exitStatus `json:",omitempty"`
	Signal int         `json:",omitempty"`
}

type kind string

const (
	ready   kind = "ready"  // from a shepherd
	start   kind = "start"  // to a shepherd
	pmi     kind = "pmi"    // from a rank, a line of the protocol PMI 1; to the rank, the answer
	exited  kind = "exited" // a rank
	forward kind = "signal" // to the ranks of a shepherd
	ping    kind = "ping"   // to a shepherd, and its answer
	lost    kind = "lost"   // the connection of a shepherd, or its remote shell before it; not sent
)

// An order has the ranks that a shepherd starts, and their command.
type order struct {
	Dir         string
	Command     []string
	Environment []string
	Ranks       []int
	Size        int
}

// An exitStatus is how a rank ended.
type exitStatus struct{ Code, Signal int }

// A Program is the program mpiexec.
type Program struct {
	Self           []string // the command that calls Run again, as a shepherd
	Stdout, Stderr io.Writer
}

// Run runs mpiexec. It returns the exit code.
func (p *Program) Run(arguments []string) int {
	switch {
	case len(arguments) == 3 && arguments[0] == "shepherd":
		f := &flock{program: p, ranks: map[int]*exec.Cmd{}, streams: map[int]*os.File{}}
		if err := f.run(arguments[1], arguments[2]); err != nil {
			fmt.Fprintln(p.Stderr, "shepherd:", err)
			return wrongUsage
		}
		return 0
	case len(arguments) == 1 && arguments[0] == "--version":
		fmt.Fprintln(p.Stdout, "mpiexec version 1.8.0 revision stand-in")
		return 0
	}
	a, command, err := options(arguments)
	if err == nil {
		a.program = p
		defer a.end()
		err = a.startShepherds()
	}
	if err != nil {
		fmt.Fprintln(p.Stderr, "mpiexec:", err)
		return wrongUsage
	}
	return a.run(command)
}

// An application is the ranks that mpiexec starts.
type application struct {
	program *Program
	n, each int
	hosts   []*host
	shell   []string
	limit   time.Duration // of silence
	events  chan message
	closed  chan struct{} // closed by end
	pmi     pmiServer
	code    int // of the first rank that failed
}

// A host is a shepherd and its ranks.
type host struct {
	name    string
	running map[int]bool // ranks
	shell   *exec.Cmd
	ended   chan struct{} // closed at the end of the shell
	lost    bool
	late    bool // has been reported
	replied time.Time

	mu   sync.Mutex
	conn net.Conn // nil before the shepherd is ready
}

// options reads the command line.
func options(arguments []string) (*application, []string, error) {
	a := &application{n: 1, each: 1, limit: 120 * time.Second, events: make(chan message, 64),
		closed: make(chan struct{}), shell: strings.Fields(os.Getenv(ShellVariable))}
	var names []string
	var err error
	for err == nil && len(arguments) > 1 && strings.HasPrefix(arguments[0], "-") {
		name, value := arguments[0], arguments[1]
		switch name {
		case "-n":
			a.n, err = strconv.Atoi(value)
		case "--ppn":
			a.each, err = strconv.Atoi(value)
		case "--hosts":
			names = strings.Split(value, ",")
		case "--depth", "--cpu-bind":
		default:
			err = fmt.Errorf("unrecognized option '%s'", name)
		}
		arguments = arguments[2:]
	}
	if text := os.Getenv(TimeoutVariable); err == nil && text != "" {
		a.limit, err = time.ParseDuration(text)
	}
	switch {
	case err != nil:
		return nil, nil, err
	case len(a.shell) == 0:
		return nil, nil, errors.New("set " + ShellVariable)
	case len(arguments) == 0 || a.n < 1 || a.each < 1 || len(names)*a.each < a.n:
		return nil, nil, errors.New("no command, or not enough hosts")
	}
	for rank := range a.n {
		if rank%a.each == 0 {
			h := &host{name: names[rank/a.each], running: map[int]bool{}, ended: make(chan struct{})}
			a.hosts = append(a.hosts, h)
		}
		a.hosts[rank/a.each].running[rank] = true
	}
	a.pmi = pmiServer{size: a.n, each: a.each, hosts: len(a.hosts), values: map[string]string{}}
	return a, arguments, nil
}

// startShepherds starts a shepherd on each host.
func (a *application) startShepherds() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() {
		<-a.closed
		listener.Close()
	}()
	for i, h := range a.hosts {
		words := append(slices.Clone(a.program.Self), "shepherd", listener.Addr().String(), strconv.Itoa(i))
		h.shell = exec.Command(a.shell[0], append(slices.Clone(a.shell[1:]), h.name, quote(words))...)
		h.shell.Stdout, h.shell.Stderr = a.program.Stdout, a.program.Stderr
		if err := h.shell.Start(); err != nil {
			close(h.ended)
			return err
		}
		go func() {
			_ = h.shell.Wait() // only the end matters
			close(h.ended)
			h.mu.Lock()
			before := h.conn == nil
			h.mu.Unlock()
			if before {
				a.send(message{Kind: lost, Host: i})
			}
		}()
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go a.receive(conn)
		}
	}()
	return nil
}

func quote(words []string) string {
	for i, word := range words {
		words[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
	}
	return strings.Join(words, " ")
}

// send passes an event to run.
func (a *application) send(m message) {
	select {
	case a.events <- m:
	case <-a.closed:
	}
}

// receive reads the messages of a shepherd.
func (a *application) receive(conn net.Conn) {
	in := json.NewDecoder(bufio.NewReader(conn))
	var m message
	if in.Decode(&m) != nil || m.Kind != ready || m.Host < 0 || m.Host >= len(a.hosts) {
		conn.Close()
		return
	}
	i := m.Host
	h := a.hosts[i]
	h.mu.Lock()
	h.conn = conn
	h.mu.Unlock()
	for {
		m.Host = i
		a.send(m)
		m = message{}
		if in.Decode(&m) != nil {
			a.send(message{Kind: lost, Host: i})
			return
		}
	}
}

// tell sends a message to the shepherd of a host. It does not wait for a host that does not read.
func (h *host) tell(m message) {
	h.mu.Lock()
	conn := h.conn
	h.mu.Unlock()
	line, err := json.Marshal(m)
	if conn == nil || h.lost || err != nil {
		return
	}
	_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = conn.Write(append(line, '\n')) // if the connection has ended, receive reports it
}

// run starts the ranks when all shepherds are ready, and returns when all ranks have ended.
func (a *application) run(command []string) int {
	dir, err := os.Getwd()
	if err != nil {
		fmt.Fprintln(a.program.Stderr, "mpiexec:", err)
		return wrongUsage
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1,
		syscall.SIGUSR2)
	tick := time.NewTicker(a.limit / 10)
	defer tick.Stop()
	began := time.Now()
	waiting := len(a.hosts)
	running := a.n
	for running > 0 {
		select {
		case s := <-signals:
			if waiting > 0 {
				return 128 + int(s.(syscall.Signal))
			}
			a.all(message{Kind: forward, Signal: int(s.(syscall.Signal))})
		case now := <-tick.C:
			for _, h := range a.hosts {
				switch {
				case waiting > 0 && h.replied.IsZero() && now.Sub(began) > a.limit:
					fmt.Fprintf(a.program.Stderr, "ping failed on %s: No reply from %s after %.0fs\n",
						a.hosts[0].name, h.name, a.limit.Seconds())
					a.failed("launch", h)
					return launchFailed
				case waiting == 0 && !h.lost && !h.late && now.Sub(h.replied) > a.limit:
					h.late = true
					fmt.Fprintf(a.program.Stderr, "ping RPC timeout from %s after %.0fs\n", h.name, a.limit.Seconds())
				}
			}
			a.all(message{Kind: ping})
		case m := <-a.events:
			h := a.hosts[m.Host]
			h.replied = time.Now()
			switch m.Kind {
			case ready:
				if waiting--; waiting == 0 {
					a.startRanks(dir, command)
				}
			case lost:
				if waiting > 0 {
					a.failed("launch", h)
					return launchFailed
				}
				a.failed("ping", h)
				h.lost = true
				running -= len(h.running)
				h.running = nil
				a.code = max(a.code, 1)
			case exited:
				delete(h.running, m.Rank)
				running--
				a.exited(h, m.Rank, *m.Exit)
			case pmi:
				for rank, line := range a.pmi.answer(m.Rank, m.Line) {
					a.hosts[rank/a.each].tell(message{Kind: pmi, Rank: rank, Line: line})
				}
			}
		}
	}
	return a.code
}

// failed reports that a host is lost. The first host has no parent.
func (a *application) failed(call string, h *host) {
	if h == a.hosts[0] {
		fmt.Fprintf(a.program.Stderr, "mpiexec: no %s on %s\n", call, h.name)
		return
	}
	fmt.Fprintf(a.program.Stderr, "%s failed on %s: Couldn't forward RPC %s(%s) to child %s: Resource temporarily "+
		"unavailable\n", call, a.hosts[0].name, call, rpc, h.name)
}

// all sends a message to all shepherds.
func (a *application) all(m message) {
	for _, h := range a.hosts {
		h.tell(m)
	}
}

func (a *application) startRanks(dir string, command []string) {
	for _, h := range a.hosts {
		o := &order{Dir: dir, Command: command, Environment: os.Environ(), Size: a.n}
		for rank := range a.n {
			if h.running[rank] {
				o.Ranks = append(o.Ranks, rank)
			}
		}
		h.replied = time.Now()
		h.tell(message{Kind: start, Order: o})
	}
}

// exited reports the end of a rank. The first failure ends the others if a variable of PALS asks
// for that.
func (a *application) exited(h *host, rank int, e exitStatus) {
	what, code := fmt.Sprintf("exited with code %d", e.Code), e.Code
	if e.Signal != 0 {
		what, code = fmt.Sprintf("died from signal %d", e.Signal), 128+e.Signal
	}
	if code == 0 {
		return
	}
	fmt.Fprintf(a.program.Stderr, "%s: rank %d %s\n", h.name, rank, what)
	if a.code == 0 {
		a.code = code
		if os.Getenv("PALS_ABORT_ON_FAILURE") == "1" {
			a.all(message{Kind: forward, Signal: int(syscall.SIGTERM)})
		}
	}
}

// end ends the shepherds, which kill their ranks, and the remote shells.
func (a *application) end() {
	close(a.closed)
	for _, h := range a.hosts {
		h.mu.Lock()
		if h.conn != nil {
			h.conn.Close()
		}
		h.mu.Unlock()
	}
	patience := time.NewTimer(2 * time.Second) // for output on its way
	defer patience.Stop()
	for _, h := range a.hosts {
		if h.shell == nil {
			continue
		}
		select {
		case <-h.ended:
			continue
		case <-patience.C:
			patience.Reset(0)
		}
		_ = h.shell.Process.Kill() // it may have ended
	}
}
