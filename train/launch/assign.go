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
	"time"

	"mula/train/collective"
	"mula/xpu/comm"
	"mula/xpu/comm/tcp"
)

// assignVariable names the environment variable with the file descriptor from which a process of a
// run with hot spares reads its assignments.
const assignVariable = "MULA_ASSIGN_FD"

// rejoinLimit is the time in which the launcher must form a new group of ranks after a process has
// lost another rank, and in which the ranks must join it. The connection to a host without power
// ends after about as long on all hosts.
const rejoinLimit = time.Minute

// An Assignment makes a process a rank of a new group. It is a line of JSON.
type Assignment struct {
	Generation int    `json:"generation"` // of the group, from 1; the group of the start has 0
	Rank       int    `json:"rank"`
	Address    string `json:"address"` // of rank 0
	Secret     string `json:"secret"`
}

var (
	// errReassigned is the cause of the end of a context of [Assignments.context].
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
	enter func(Assignment) error

	mu       sync.Mutex
	newest   Assignment
	current  int // generation of the environment
	released bool
	changed  chan struct{} // closed and replaced after a change of newest or released
}

// OpenAssignments returns the assignments of this process, or nil in a run without hot spares. The
// process enters a group by the environment variables from which [tcp.FromEnvironment] reads its
// rank.
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
	return NewAssignments(os.NewFile(uintptr(fd), assignVariable), os.Getenv(tcp.RankVariable) == "",
		Assignment.setEnvironment), nil
}

// NewAssignments returns the assignments of a process, and reads them until the end of r. spare is
// true if the process starts without a rank. enter makes the process a rank of a new group, before
// it joins the group.
func NewAssignments(r io.ReadCloser, spare bool, enter func(Assignment) error) *Assignments {
	a := &Assignments{spare: spare, enter: enter, changed: make(chan struct{})}
	go func() {
		defer r.Close()
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			var next Assignment
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

// Run calls train for the first group of ranks, and again for each later group, until train returns
// nil or an error other than a [LostRankError]. A hot spare first waits for a rank, and Run returns
// nil if the run does not need it. waiting is called with the error before the process waits for
// the next group. ctx ends when the user ends the process.
func (a *Assignments) Run(ctx context.Context, waiting func(err error), train func() error) error {
	if a.IsSpare() && a.next(ctx) != nil {
		return nil
	}
	for {
		err := train()
		var lost *LostRankError
		if a == nil || !errors.As(err, &lost) {
			return err
		}
		waiting(err)
		limited, cancel := context.WithTimeout(ctx, rejoinLimit)
		next := a.next(limited)
		cancel()
		if next != nil {
			return lost.Err // the launcher restarts the run
		}
	}
}

// A LostRankError means that a process has lost another rank, and can join a new group.
type LostRankError struct{ Err error }

func (e *LostRankError) Error() string { return e.Err.Error() }
func (e *LostRankError) Unwrap() error { return e.Err }

// Join calls join, which joins the group of this process. If the group cannot be formed, and the
// process can join a later group, the error is a [LostRankError].
func (a *Assignments) Join(parent context.Context, join func(context.Context) (*comm.Comm, error)) (
	*comm.Comm, error) {
	ctx, cancel := a.context(parent, true)
	defer cancel()
	later := a.Generation() > 0
	if later {
		var end context.CancelFunc
		ctx, end = context.WithTimeout(ctx, rejoinLimit)
		defer end()
	}
	world, err := join(ctx)
	if err != nil && parent.Err() == nil && (later || ctx.Err() != nil) {
		err = &LostRankError{err} // for example, another rank died meanwhile
	}
	return world, err
}

// Train calls train with a context that ends when the launcher assigns a rank in a later group to
// this process. If this process has lost another rank, Train closes the group and returns a
// [LostRankError].
func (a *Assignments) Train(parent context.Context, world *comm.Comm, train func(context.Context) error) error {
	ctx, cancel := a.context(parent, false)
	defer cancel()
	err := train(ctx)
	if a == nil || err == nil || collective.Shared(err) || !errors.Is(err, comm.ErrPeerLost) && ctx.Err() == nil {
		return err
	}
	world.Close()
	return &LostRankError{err}
}

// next waits until the launcher assigns a rank in a later group to this process, and enters it. It
// returns errReleased if there is no such group, or the cause of the end of ctx.
func (a *Assignments) next(ctx context.Context) error {
	for {
		a.mu.Lock()
		next, released, changed := a.newest, a.released, a.changed
		if next.Generation > a.current {
			a.current = next.Generation
			a.mu.Unlock()
			return a.enter(next)
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

// setEnvironment sets the environment of the process to the assignment.
func (a Assignment) setEnvironment() error {
	return errors.Join(os.Setenv(tcp.RankVariable, strconv.Itoa(a.Rank)), os.Setenv(tcp.AddressVariable, a.Address),
		os.Setenv(tcp.SecretVariable, a.Secret), os.Setenv(tcp.GenerationVariable, strconv.Itoa(a.Generation)))
}

// context returns a context that ends, with the cause errReassigned, when the launcher assigns a
// rank in a later group to this process. While the process joins its group, the context also ends,
// with the cause errReleased, when the launcher forms no further group.
func (a *Assignments) context(parent context.Context, joining bool) (context.Context, context.CancelFunc) {
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
