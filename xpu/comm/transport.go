package comm

import (
	"context"
	"errors"
)

// ErrPeerLost is wrapped by the error of a transport whose group is unusable: a rank left, was
// killed or does not answer.
var ErrPeerLost = errors.New("a rank of the group is lost")

// A Transport transfers bytes between the ranks of a group, numbered from 0. Each sub-package
// implements one transport: [mula/xpu/comm/local] between goroutines, [mula/xpu/comm/tcp] between
// processes, [mula/xpu/comm/mpi] with an MPI library, and [mula/xpu/comm/simulated] between
// goroutines, with the time that a network would need. Computations are the task of [Comm], so that
// all transports produce the same results. [mula/xpu/comm/transporttest] tests an implementation.
//
// All ranks of a group call the same methods of their transports in the same order, except Send and
// Recv, which only the two ranks involved call. Each rank makes one call at a time. Transports
// returned by different calls of Split may be used at the same time. Buffers must not overlap.
// When a method returns, the caller may reuse its buffers. After an error the group is unusable:
// every rank that waits, now or later, gets an error too. If the context is done, a call fails with
// the context's error, and the group becomes unusable. Lengths that differ between ranks are an
// error of the caller; an implementation reports the differences that it detects.
type Transport interface {
	// Name names the transport, as in "local", "tcp" or "mpi, Open MPI 4.1.4".
	Name() string

	Rank() int
	Size() int

	// AllToAll sends send[r] to every rank r and fills recv[r] with the bytes that rank r sends to
	// this one. A rank's piece for itself is copied. Both slices have an entry for every rank;
	// empty pieces cost nothing.
	AllToAll(ctx context.Context, send, recv [][]byte) error

	// AllGather sends own to all other ranks, and fills all[r] with the bytes of rank r.
	// all[Rank()] becomes a copy of own, unless it is own.
	AllGather(ctx context.Context, own []byte, all [][]byte) error

	// Broadcast fills data with the root's data.
	Broadcast(ctx context.Context, root int, data []byte) error

	// Barrier returns when all ranks have called it.
	Barrier(ctx context.Context) error

	// Send sends data to rank to, which must call Recv with the same length. Send does not wait for
	// Recv: two ranks may both send before they receive. Data is kept in memory until it is
	// received. A rank must not send to itself.
	Send(ctx context.Context, to int, data []byte) error
	Recv(ctx context.Context, from int, data []byte) error

	// Split creates one group for each color, with the ranks ordered by key and then by rank, and
	// returns this rank's transport in its new group. All ranks call it. A rank with a negative
	// color is in no group and gets nil.
	Split(ctx context.Context, color, key int) (Transport, error)

	// Close leaves this group and all groups split off from it. Other ranks that wait for this rank
	// get [ErrPeerLost]; they can still receive the data that it sent before. A call of this rank
	// that waits in another goroutine ends with an error. Close may be called again.
	Close() error
}

// A Summer is a [Transport] that can compute sums, in whatever order is fastest.
type Summer interface {
	// Sum replaces x on all ranks with its sum over the ranks. Its bits may differ between
	// transports, runs and numbers of ranks, but not between ranks.
	Sum(ctx context.Context, x []float32) error
}

// A Piece is data for another rank, or from one.
type Piece struct {
	Rank int
	Data []byte
}

// An exchanger is a [Transport] whose cost of an exchange depends on the number of pieces, not on
// the number of ranks.
type exchanger interface {
	// Exchange is AllToAll with the pieces that are not empty, at most one for each other rank.
	Exchange(ctx context.Context, send, recv []Piece) error
}
