package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// NewSingle returns a group of one rank. It needs no goroutine, and its sums, gathers and
// broadcasts copy nothing.
func NewSingle() *Comm { return New(new(single)) }

// single is the transport of a group of one rank.
type single struct {
	mu    sync.Mutex
	err   error     // why the group is unusable
	parts []*single // split off
}

func (s *single) Name() string { return "single" }
func (s *single) Rank() int    { return 0 }
func (s *single) Size() int    { return 1 }

// check returns an error if the group is unusable, or becomes unusable because the context is done.
func (s *single) check(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil && ctx.Err() != nil {
		s.err = fmt.Errorf("the only rank of the group gave up: %w: %w", ctx.Err(), ErrPeerLost)
		return ctx.Err()
	}
	return s.err
}

// copyOwn copies the only rank's data to itself.
func (s *single) copyOwn(ctx context.Context, dst, src []byte) error {
	if err := s.check(ctx); err != nil {
		return err
	}
	if len(src) != len(dst) {
		err := fmt.Errorf("rank 0 sends %d bytes to itself, but expects %d: %w", len(src), len(dst), ErrPeerLost)
		s.end(err)
		return err
	}
	if len(src) > 0 && &dst[0] != &src[0] {
		copy(dst, src)
	}
	return nil
}

func (s *single) AllToAll(ctx context.Context, send, recv [][]byte) error {
	return s.copyOwn(ctx, recv[0], send[0])
}

func (s *single) AllGather(ctx context.Context, own []byte, all [][]byte) error {
	return s.copyOwn(ctx, all[0], own)
}

func (s *single) Broadcast(ctx context.Context, _ int, _ []byte) error { return s.check(ctx) }
func (s *single) Barrier(ctx context.Context) error                    { return s.check(ctx) }

var errNoOtherRank = errors.New("a group of one rank has no other rank to exchange messages with")

func (s *single) Send(context.Context, int, []byte) error { return errNoOtherRank }
func (s *single) Recv(context.Context, int, []byte) error { return errNoOtherRank }

func (s *single) Split(ctx context.Context, color, _ int) (Transport, error) {
	if err := s.check(ctx); err != nil || color < 0 {
		return nil, err
	}
	part := new(single)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts = append(s.parts, part)
	return part, nil
}

func (s *single) Close() error {
	s.end(fmt.Errorf("the only rank has left the group: %w", ErrPeerLost))
	return nil
}

// end makes the group, and all groups split off from it, unusable. The first error is kept.
func (s *single) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	for _, part := range s.parts {
		part.end(err)
	}
}
