// Package local links ranks that are goroutines of one process.
package local

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"mula/xpu"
)

// New returns the links of a group of the given size, one for each rank. Each is for a goroutine of its own.
func New(size int) []xpu.Link {
	if size < 1 {
		panic(fmt.Sprintf("local: a group of %d ranks", size))
	}
	g := newGroup(size)
	links := make([]xpu.Link, size)
	for r := range links {
		links[r] = &link{g, r}
	}
	return links
}

// A group is what its ranks share: a gate at which they meet, and what each has brought there.
type group struct {
	size int

	mu      sync.Mutex
	arrived int
	gate    chan struct{} // closed when all have arrived
	err     error         // why the group is of no more use
	broken  chan struct{} // closed with err
	parts   []*group      // split off

	brought []offer     // one for each rank; its owner writes it before the gate, others read it behind
	mail    []chan mail // [from·size + to]
}

// An offer is what a rank shows the others.
type offer struct {
	pieces [][]byte
	floats []float32
	color  int
	key    int
	part   *group // of Split: made by the lowest rank of a color
}

type mail struct {
	data  []byte
	taken chan error // the receiver has copied it, or says what is wrong
}

func newGroup(size int) *group {
	g := &group{size: size, gate: make(chan struct{}), broken: make(chan struct{}), brought: make([]offer, size), mail: make([]chan mail, size*size)}
	for i := range g.mail {
		g.mail[i] = make(chan mail)
	}
	return g
}

// fail makes the group, and all that were split off, of no more use, unless it is already.
func (g *group) fail(err error) error {
	g.mu.Lock()
	if g.err == nil {
		g.err = err
		close(g.broken)
	}
	err, parts := g.err, g.parts
	g.mu.Unlock()
	for _, p := range parts {
		p.fail(err)
	}
	return err
}

// meet returns when all ranks have called it.
func (g *group) meet(ctx context.Context) error {
	g.mu.Lock()
	if g.err != nil {
		defer g.mu.Unlock()
		return g.err
	}
	gate := g.gate
	if g.arrived++; g.arrived == g.size {
		g.arrived, g.gate = 0, make(chan struct{})
		close(gate)
	}
	g.mu.Unlock()
	select {
	case <-gate:
		return nil
	default:
	}
	select {
	case <-gate:
		return nil
	case <-g.broken:
		select {
		case <-gate: // both: the others had all arrived
			return nil
		default:
			return g.err
		}
	case <-ctx.Done():
		return g.fail(ctx.Err())
	}
}

type link struct {
	*group
	rank int
}

func (l *link) Name() string { return "local" }
func (l *link) Rank() int    { return l.rank }
func (l *link) Size() int    { return l.size }

// exchange shows the others what this rank has brought, runs take when all can be seen, and returns when all have taken.
func (l *link) exchange(ctx context.Context, o offer, take func() error) error {
	l.brought[l.rank] = o
	if err := l.meet(ctx); err != nil {
		return err
	}
	if err := take(); err != nil {
		return l.fail(err)
	}
	return l.meet(ctx)
}

func (l *link) AllToAll(ctx context.Context, send, recv [][]byte) error {
	if len(send) != l.size || len(recv) != l.size {
		panic(fmt.Sprintf("local: %d and %d pieces for %d ranks", len(send), len(recv), l.size))
	}
	return l.exchange(ctx, offer{pieces: send}, func() error {
		for r := range l.size {
			if err := l.copy(recv[r], l.brought[r].pieces[l.rank], r); err != nil {
				return err
			}
		}
		return nil
	})
}

func (l *link) AllGather(ctx context.Context, own []byte, all [][]byte) error {
	if len(all) != l.size {
		panic(fmt.Sprintf("local: %d pieces for %d ranks", len(all), l.size))
	}
	return l.exchange(ctx, offer{pieces: [][]byte{own}}, func() error {
		for r := range l.size {
			if err := l.copy(all[r], l.brought[r].pieces[0], r); err != nil {
				return err
			}
		}
		return nil
	})
}

func (l *link) Broadcast(ctx context.Context, root int, data []byte) error {
	return l.exchange(ctx, offer{pieces: [][]byte{data}}, func() error {
		if l.rank == root {
			return nil
		}
		return l.copy(data, l.brought[root].pieces[0], root)
	})
}

func (l *link) copy(dst, src []byte, from int) error {
	if len(dst) != len(src) {
		return fmt.Errorf("local: rank %d sends %d bytes to rank %d, which expects %d", from, len(src), l.rank, len(dst))
	}
	if unsafe.SliceData(dst) != unsafe.SliceData(src) { // else others may be reading it
		copy(dst, src)
	}
	return nil
}

func (l *link) Barrier(ctx context.Context) error { return l.meet(ctx) }

func (l *link) Send(ctx context.Context, to int, data []byte) error {
	m := mail{data, make(chan error, 1)}
	select {
	case l.mail[l.rank*l.size+to] <- m:
	case <-l.broken:
		return l.err
	case <-ctx.Done():
		return l.fail(ctx.Err())
	}
	return <-m.taken // it is being copied
}

func (l *link) Recv(ctx context.Context, from int, data []byte) error {
	select {
	case m := <-l.mail[from*l.size+l.rank]:
		err := l.copy(data, m.data, from)
		if err != nil {
			err = l.fail(err)
		}
		m.taken <- err
		return err
	case <-l.broken:
		return l.err
	case <-ctx.Done():
		return l.fail(ctx.Err())
	}
}

// Sum adds up in the order of the ranks; each rank computes one stretch of x for all.
func (l *link) Sum(ctx context.Context, x []float32) error {
	lo, hi := len(x)*l.rank/l.size, len(x)*(l.rank+1)/l.size
	sum := make([]float32, hi-lo)
	err := l.exchange(ctx, offer{floats: x}, func() error {
		for r := range l.size {
			other := l.brought[r].floats
			if len(other) != len(x) {
				return fmt.Errorf("local: rank %d adds %d numbers to the %d of rank %d", r, len(other), len(x), l.rank)
			}
			for i, v := range other[lo:hi] {
				sum[i] += v
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return l.exchange(ctx, offer{floats: sum}, func() error {
		for r := range l.size {
			copy(x[len(x)*r/l.size:], l.brought[r].floats)
		}
		return nil
	})
}

func (l *link) Split(ctx context.Context, color, key int) (xpu.Link, error) {
	l.brought[l.rank] = offer{color: color, key: key}
	if err := l.meet(ctx); err != nil {
		return nil, err
	}
	var members []int
	for r := range l.size {
		if color >= 0 && l.brought[r].color == color {
			members = append(members, r)
		}
	}
	if len(members) > 0 && members[0] == l.rank {
		part := newGroup(len(members))
		l.mu.Lock()
		l.parts = append(l.parts, part)
		err := l.err
		l.mu.Unlock()
		if err != nil {
			return nil, part.fail(err)
		}
		l.brought[l.rank].part = part
	}
	if err := l.meet(ctx); err != nil {
		return nil, err
	}
	var own xpu.Link
	if len(members) > 0 {
		part := l.brought[members[0]].part
		slices.SortStableFunc(members, func(a, b int) int { return l.brought[a].key - l.brought[b].key })
		own = &link{part, slices.Index(members, l.rank)}
	}
	return own, l.meet(ctx)
}

func (l *link) Close() error {
	l.fail(fmt.Errorf("local: rank %d of %d has left: %w", l.rank, l.size, xpu.ErrPeerLost))
	return nil
}
