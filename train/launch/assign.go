package launch

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"

	"mula/xpu/comm/tcp"
)

// assignVariable names the environment variable with the file descriptor from which a process of a
// run with hot spares reads its assignments.
const assignVariable = "MULA_ASSIGN_FD"

// An assignment makes a process a rank of a new group. It is a line of JSON.
type assignment struct {
	Generation int    `json:"generation"` // of the group, from 1; the group of the start has 0
	Rank       int    `json:"rank"`
	Address    string `json:"address"` // of rank 0
	Secret     string `json:"secret"`
}

var (
	// errReassigned is the cause of the end of a context of [Assignments.Context].
	errReassigned = errors.New("the launcher has formed a new group of ranks")
	// errReleased reports that the launcher forms no further group.
	errReleased = errors.New("the launcher forms no further group of ranks")
)

// Assignments are the ranks that the launcher assigns to this process in a run with hot spares. If
// a rank dies, the launcher forms a new group: the other processes keep their ranks, and a spare
// becomes the rank that died. A nil Assignments belongs to a process without hot spares, which
// keeps its rank.
type Assignments struct {
	spare bool

	mu       sync.Mutex
	newest   assignment
	current  int // generation of the environment
	released bool
	changed  chan struct{} // closed and replaced after a change of newest or released
}

// OpenAssignments returns the assignments of this process, or nil in a run without hot spares.
func OpenAssignments() (*Assignments, error) {
	text := os.Getenv(assignVariable)
	if text == "" {
		return nil, nil
	}
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("environment variable %s is %q; it must be the number of a file descriptor from 3, "+
			"which mula launch sets", assignVariable, text)
	}
	return newAssignments(os.NewFile(uintptr(fd), assignVariable), os.Getenv(tcp.RankVariable) == ""), nil
}

// newAssignments reads assignments until the end of r.
func newAssignments(r io.ReadCloser, spare bool) *Assignments {
	a := &Assignments{spare: spare, changed: make(chan struct{})}
	go func() {
		defer r.Close()
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			var next assignment
			if json.Unmarshal(lines.Bytes(), &next) != nil {
				break // another version of the launcher
			}
			a.change(func() { a.newest = next })
		}
		a.change(func() { a.released = true })
	}()
	return a
}

func (a *Assignments) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

// IsSpare reports whether this process started as a hot spare, without a rank.
func (a *Assignments) IsSpare() bool { return a != nil && a.spare }

// Generation returns the generation of the group that this process belongs to.
func (a *Assignments) Generation() int {
	if a == nil {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.current
}

// Next waits until the launcher assigns a rank in a later group to this process. It sets the
// environment variables from which [tcp.FromEnvironment] reads the rank. It returns errReleased if
// there is no such group, or the cause of the end of ctx.
func (a *Assignments) Next(ctx context.Context) error {
	for {
		a.mu.Lock()
		next, released, changed := a.newest, a.released, a.changed
		if next.Generation > a.current {
			a.current = next.Generation
			a.mu.Unlock()
			return next.enter()
		}
		a.mu.Unlock()
		if released {
			return errReleased
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// enter sets the environment of the process to the assignment.
func (a assignment) enter() error {
	return errors.Join(os.Setenv(tcp.RankVariable, strconv.Itoa(a.Rank)), os.Setenv(tcp.AddressVariable, a.Address),
		os.Setenv(tcp.SecretVariable, a.Secret), os.Setenv(tcp.GenerationVariable, strconv.Itoa(a.Generation)))
}

// Context returns a context that ends, with the cause errReassigned, when the launcher assigns a
// rank in a later group to this process. While the process joins its group, the context also ends,
// with the cause errReleased, when the launcher forms no further group.
func (a *Assignments) Context(parent context.Context, joining bool) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	if a != nil {
		go func() {
			for {
				a.mu.Lock()
				later, released, changed := a.newest.Generation > a.current, a.released, a.changed
				a.mu.Unlock()
				switch {
				case later:
					cancel(errReassigned)
					return
				case released && joining:
					cancel(errReleased)
					return
				case released:
					return
				}
				select {
				case <-changed:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	return ctx, func() { cancel(nil) }
}
