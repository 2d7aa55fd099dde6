//go:build amd64 || arm64

package mpi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"

	"mula/internal/launchers"
	"mula/internal/signals"
	"mula/xpu/comm"
)

// A process is this process in MPI. MPI is initialized and finalized once.
type process struct {
	*library
	name     string
	finalize chan chan error // to the thread that initialized MPI
	sending  atomic.Int64    // sends without a waiting call
	dirty    atomic.Bool     // some operation will never end
}

var begun atomic.Bool

// Init returns this process's transport in the world of its mpiexec. It can be called once. Closing
// the transport finalizes MPI, and returns when all ranks do so; a rank that exits without it ends
// the whole job. A done ctx stops Init before MPI is initialized, but not while MPI waits for other
// ranks.
func Init(ctx context.Context) (comm.Transport, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !begun.CompareAndSwap(false, true) {
		return nil, errors.New("mpi: Init is called twice")
	}
	handlers := signals.Keep()
	defer handlers.Restore()
	lib, err := open()
	if err != nil {
		return nil, err
	}
	version, err := lib.version()
	if err != nil {
		return nil, err
	}
	p := &process{library: lib, name: "mpi, " + version, finalize: make(chan chan error)}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // MPI must be finalized by the thread that initialized it
		if err := p.begin(); err != nil {
			started <- err
			return
		}
		started <- nil
		done := <-p.finalize
		done <- p.check(p.library.finalize(), "MPI_Finalize")
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p.transport(p.world)
}

// begin initializes MPI and checks that it is usable.
func (p *process) begin() error {
	r := newResults()
	if err := p.check(p.initThread(0, 0, threadMultiple, r.address(&r.number)), "MPI_Init_thread"); err != nil {
		return err
	}
	if r.number < threadMultiple {
		return fmt.Errorf("mpi: %s (%s) supports thread level %d, but mula needs MPI_THREAD_MULTIPLE; build or "+
			"configure it with threads", p.name, p.path, r.number)
	}
	if err := p.check(p.setErrorHandler(p.world, p.errorsReturn), "MPI_Comm_set_errhandler"); err != nil {
		return err
	}
	if err := p.check(p.commSize(p.world, r.address(&r.number)), "MPI_Comm_size"); err != nil {
		return err
	}
	for _, l := range launchers.All {
		if !l.MPI {
			continue
		}
		if n, err := strconv.Atoi(os.Getenv(l.Size)); l.Size != "" && err == nil && n != int(r.number) {
			return fmt.Errorf("mpi: this is one of %d processes (%s), but %s (%s) sees a world of %d; set %s to the "+
				"library of this mpiexec",
				n, l.Size, p.name, p.path, r.number, LibraryVariable)
		}
		if n, err := strconv.Atoi(os.Getenv(l.Rank)); err == nil && n > 0 && r.number == 1 {
			return fmt.Errorf("mpi: %s has started this process as rank %d (%s), but %s (%s) sees a world of 1; "+
				"name the MPI library of %s in %s",
				l.Name, n, l.Rank, p.name, p.path, l.Name, LibraryVariable)
		}
	}
	return nil
}

var errLeft = fmt.Errorf("mpi: this rank has left the group: %w", comm.ErrPeerLost)

// end finalizes MPI, unless an operation will never end.
func (p *process) end(failed bool) error {
	for pause := newPause(); p.sending.Load() > 0 && !pause.longerThan(farewellTime); {
		pause.wait()
	}
	if failed || p.dirty.Load() || p.sending.Load() > 0 {
		return nil // MPI would wait forever; exiting without MPI_Finalize ends the other ranks
	}
	done := make(chan error)
	p.finalize <- done
	return <-done
}

// transport returns the transport of a communicator.
func (p *process) transport(comm handle) (*transport, error) {
	r := newResults()
	if err := p.check(p.commRank(comm, r.address(&r.number)), "MPI_Comm_rank"); err != nil {
		return nil, err
	}
	rank := int(r.number)
	if err := p.check(p.commSize(comm, r.address(&r.number)), "MPI_Comm_size"); err != nil {
		return nil, err
	}
	return newTransport(p, comm, rank, int(r.number)), nil
}
