//go:build unix

package palstest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// A flock is the ranks of a shepherd.
type flock struct {
	program *Program
	mu      sync.Mutex // of the other members
	out     *json.Encoder
	ranks   map[int]*exec.Cmd
	streams map[int]*os.File // PMI of the ranks
}

// run starts the ranks of the host with a number, for the mpiexec at an address. It ends with the
// connection, and kills the ranks then.
func (f *flock) run(address, number string) error {
	host, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	f.out = json.NewEncoder(conn)
	defer f.signal(syscall.SIGKILL)
	f.tell(message{Kind: ready, Host: host})
	for in := json.NewDecoder(bufio.NewReader(conn)); ; {
		var m message
		if in.Decode(&m) != nil {
			return nil // mpiexec has ended
		}
		switch m.Kind {
		case start:
			for _, rank := range m.Order.Ranks {
				if err := f.start(rank, m.Order); err != nil {
					return err
				}
			}
		case forward:
			f.signal(syscall.Signal(m.Signal))
		case ping:
			f.tell(message{Kind: ping})
		case pmi:
			f.mu.Lock()
			_, _ = fmt.Fprintln(f.streams[m.Rank], m.Line) // the rank may have ended
			f.mu.Unlock()
		}
	}
}

// tell sends a message to mpiexec. If the connection has ended, the shepherd ends.
func (f *flock) tell(m message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_ = f.out.Encode(m)
}

// start starts a rank.
func (f *flock) start(rank int, o *order) error {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	syscall.CloseOnExec(pair[0])
	syscall.CloseOnExec(pair[1])
	own, theirs := os.NewFile(uintptr(pair[0]), "PMI"), os.NewFile(uintptr(pair[1]), "PMI")
	defer theirs.Close()
	cmd := exec.Command(o.Command[0], o.Command[1:]...)
	cmd.Dir = o.Dir
	cmd.Env = append(append(os.Environ(), o.Environment...), fmt.Sprintf("PALS_RANKID=%d", rank),
		fmt.Sprintf("PMI_RANK=%d", rank), fmt.Sprintf("PMI_SIZE=%d", o.Size), "PMI_FD=3") // the first of ExtraFiles
	cmd.Stdout, cmd.Stderr = f.program.Stdout, f.program.Stderr
	cmd.ExtraFiles = []*os.File{theirs}
	if err := cmd.Start(); err != nil {
		own.Close()
		return err
	}
	f.mu.Lock()
	f.ranks[rank], f.streams[rank] = cmd, own
	f.mu.Unlock()
	go func() {
		for in := bufio.NewReader(own); ; {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			f.tell(message{Kind: pmi, Rank: rank, Line: strings.TrimSuffix(line, "\n")})
		}
	}()
	go func() {
		_ = cmd.Wait() // the state has the error
		status := cmd.ProcessState.Sys().(syscall.WaitStatus)
		e := &exitStatus{Code: status.ExitStatus()}
		if status.Signaled() {
			e = &exitStatus{Signal: int(status.Signal())}
		}
		f.mu.Lock()
		delete(f.ranks, rank)
		f.mu.Unlock()
		f.tell(message{Kind: exited, Rank: rank, Exit: e})
	}()
	return nil
}

// signal sends a signal to all ranks.
func (f *flock) signal(s syscall.Signal) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, cmd := range f.ranks {
		_ = cmd.Process.Signal(s) // the rank may have ended
	}
}
