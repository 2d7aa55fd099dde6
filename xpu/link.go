package xpu

import (
	"context"
	"errors"
)

// ErrPeerLost is wrapped by the error of a link whose group can no longer work together: a rank has
// left, been killed or does not answer.
var ErrPeerLost = errors.New("a rank of the group is gone")

// A Link carries bytes between the ranks of a group, numbered from 0. A sub-package implements it
// for each way to get from one rank to another: [mula/xpu/local] between goroutines, [mula/xpu/tcp]
// between processes, [mula/xpu/mpi] by an MPI library. What is computed with the bytes is the
// business of [Comm], so that all links give the same results. [mula/xpu/linktest] checks an
// implementation.
//
// All ranks of a group call the same methods of their links in the same order, but for Send and
// Recv, which only their two ranks call; each rank calls one at a time. Links from different calls
// of Split may be used at the same time. No buffer may overlap another. A method returns when the
// caller's buffers are free for anything again. After an error the group is of no more use: every
// rank that waits, or comes to wait, gets one, too. A done context ends a call with the context's
// error, and with it the group. Lengths that do not agree between ranks are a mistake of the
// caller; an implementation reports those that it sees.
type Link interface {
	// Name says what carries the bytes, as in "local", "tcp" or "mpi, Open MPI 4.1.4".
	Name() string

	Rank() int
	Size() int

	// AllToAll sends send[r] to every rank r and fills recv[r] with what rank r sends to this one.
	// A rank's piece for itself is copied. Both have an entry for every rank; empty pieces cost
	// nothing.
	AllToAll(ctx context.Context, send, recv [][]byte) error

	// AllGather sends own to all others, and fills all[r] with what rank r has sent; all[Rank()]
	// becomes a copy of own, unless it is own.
	AllGather(ctx context.Context, own []byte, all [][]byte) error

	// Broadcast fills data with that of the root.
	Broadcast(ctx context.Context, root int, data []byte) error

	// Barrier returns when all ranks have called it.
	Barrier(ctx context.Context) error

	// Send gives data to rank to, which takes it by a Recv of the same length. It does not wait for
	// that: two ranks may both send before they receive. What has not been taken is held in memory.
	// A rank sends nothing to itself.
	Send(ctx context.Context, to int, data []byte) error
	Recv(ctx context.Context, from int, data []byte) error

	// Split makes groups of the ranks that give the same color, ordered by key and then by rank,
	// and returns the link of this rank in its group. All ranks call it. With a color below 0 a
	// rank is in no group and gets nil.
	Split(ctx context.Context, color, key int) (Link, error)

	// Close leaves the group, and all that were split off from it. The others get [ErrPeerLost]
	// when they wait for this rank; what it has sent before can still be received. A call of this
	// rank that waits in another goroutine ends with an error. It may be called again.
	Close() error
}

// A Summer is a [Link] that can add up by itself, in whatever order is quickest.
type Summer interface {
	// Sum replaces x on all ranks by its sum over them. Its bits may differ between links, runs and
	// numbers of ranks, though not between ranks.
	Sum(ctx context.Context, x []float32) error
}
