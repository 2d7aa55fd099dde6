// Package local connects ranks that are goroutines of one process.
package local

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"mula/xpu/comm"
)

// New returns the transports of a group of the given size, one for each rank. Each transport is for
// one goroutine.
func New(size int) []comm.Transport {
	if size < 1 {
		panic(fmt.Sprintf("local: invalid group size %d", size))
	}
	g := newGroup(size)
	transports := make([]comm.Transport, size)
	for r := range transports {
		transports[r] = newTransport(g, r)
	}
	return transports
}

// A group is the state that its ranks share: a gate at which they meet, and the data that each
// offers.
type group struct {
	size int

	mu      sync.Mutex
	arrived int             // at the gate
	open    []chan struct{} // one for each rank: receives a token when all have arrived
	gone    chan struct{}   // closed with err
	err     error           // why some ranks will not arrive
	failed  chan struct{}   // closed when a rank got an error: no two ranks can communicate any more
	broken  bool            // failed is closed
	parts   []*group        // split off

	brought []offer // one for each rank; the owner sets it before the gate, others read it after
	boxes   []box   // [from·size + to]
}

// An offer is the data that a rank offers to the others, in memory of its caller. Readers hold the
// read lock while they copy. A rank that gives up during an exchange withdraws its offer before it
// returns, since its caller may then write to that memory.
type offer struct {
	mu sync.RWMutex
	content
}

// content is the content of an offer.
type content struct {
	pieces     [][]byte
	own        []byte // instead of pieces: the same for all
	color, key int
	part       *group // for Split: created by the lowest rank of a color
	withdrawn  bool
}

// A box holds the data that one rank sent to another and that was not yet received.
type box struct {
	mu      sync.Mutex
	letters [][]byte
	closed  bool          // nothing more will come
	changed chan struct{} // receives a token on every change
}

func newGroup(size int) *group {
	g := &group{
		size: size, open: make([]chan struct{}, size), gone: make(chan struct{}), failed: make(chan struct{}),
		brought: make([]offer, size),
		boxes:   make([]box, size*size),
	}
	for r := range g.open {
		g.open[r] = make(chan struct{}, 1)
	}
	for i := range g.boxes {
		g.boxes[i].changed = make(chan struct{}, 1)
	}
	return g
}

// end prevents the group, and all groups split off from it, from meeting again; the first error is
// kept. After a failure, unlike after a rank that just leaves, no rank receives anything any more.
func (g *group) end(err error, failure bool) error {
	g.mu.Lock()
	if g.err == nil {
		g.err = err
		close(g.gone)
	}
	if failure && !g.broken {
		g.broken = true
		close(g.failed)
	}
	err, parts := g.err, g.parts
	g.mu.Unlock()
	for _, p := range parts {
		p.end(err, failure)
	}
	return err
}

type transport struct {
	*group
	rank  int
	left  chan struct{} // closed by Close
	mine  []*transport  // groups split off; guarded by mu
	leave sync.Once
}

func newTransport(g *group, rank int) *transport {
	return &transport{group: g, rank: rank, left: make(chan struct{})}
}

// giveUp ends the group because of a done context.
func (l *transport) giveUp(ctx context.Context) error {
	l.end(fmt.Errorf("local: rank %d of %d gave up: %w: %w", l.rank, l.size, ctx.Err(), comm.ErrPeerLost), true)
	return ctx.Err()
}

func (l *transport) Name() string { return "local" }
func (l *transport) Rank() int    { return l.rank }
func (l *transport) Size() int    { return l.size }

// meet returns when all ranks have called it.
func (l *transport) meet(ctx context.Context) error {
	l.mu.Lock()
	if l.err != nil {
		l.mu.Unlock()
		return l.end(l.err, true)
	}
	if ctx.Err() != nil {
		l.mu.Unlock()
		return l.giveUp(ctx)
	}
	if l.arrived++; l.arrived == l.size {
		l.arrived = 0
		for r, open := range l.open {
			if r != l.rank {
				open <- struct{}{}
			}
		}
		l.mu.Unlock()
		return nil
	}
	l.mu.Unlock()
	select {
	case <-l.open[l.rank]:
		return nil
	case <-l.gone:
	case <-ctx.Done():
	}
	select {
	case <-l.open[l.rank]: // both are ready: all had arrived
		return nil
	default:
	}
	select {
	case <-l.gone:
		return l.end(l.err, true)
	default:
		return l.giveUp(ctx)
	}
}

// show sets this rank's offer to c. It waits for ranks that still copy from the previous offer.
func (l *transport) show(c content) {
	o := &l.brought[l.rank]
	o.mu.Lock()
	defer o.mu.Unlock()
	o.content = c
}

// look calls take with a rank's offer, after the gate. It returns an error if that rank has given
// up since.
func (l *transport) look(from int, take func(c *content) error) error {
	o := &l.brought[from]
	o.mu.RLock()
	defer o.mu.RUnlock()
	if o.withdrawn {
		return fmt.Errorf("local: rank %d of %d has given up: %w", from, l.size, comm.ErrPeerLost)
	}
	return take(&o.content)
}

// exchange offers c to the other ranks, calls take for every rank once all offers are visible, and
// returns when all ranks have finished taking, or no rank will read any more.
func (l *transport) exchange(ctx context.Context, c content, take func(from int, c *content) error) (err error) {
	l.show(c)
	defer func() {
		if err != nil {
			l.show(content{withdrawn: true})
		}
	}()
	if err := l.meet(ctx); err != nil {
		return err
	}
	for r := range l.size {
		if err := l.look(r, func(c *content) error { return take(r, c) }); err != nil {
			return l.end(err, true)
		}
	}
	return l.meet(ctx)
}

func (l *transport) AllToAll(ctx context.Context, send, recv [][]byte) error {
	if len(send) != l.size || len(recv) != l.size {
		panic(fmt.Sprintf("local: %d and %d pieces for %d ranks", len(send), len(recv), l.size))
	}
	return l.exchange(ctx, content{pieces: send}, func(from int, c *content) error {
		if c.pieces == nil {
			return l.confused(from)
		}
		return l.copy(recv[from], c.pieces[l.rank], from)
	})
}

func (l *transport) AllGather(ctx context.Context, own []byte, all [][]byte) error {
	if len(all) != l.size {
		panic(fmt.Sprintf("local: %d pieces for %d ranks", len(all), l.size))
	}
	return l.exchange(ctx, content{own: own}, func(from int, c *content) error {
		if c.pieces != nil {
			return l.confused(from)
		}
		return l.copy(all[from], c.own, from)
	})
}

func (l *transport) Broadcast(ctx context.Context, root int, data []byte) error {
	return l.exchange(ctx, content{own: data}, func(from int, c *content) error {
		if c.pieces != nil {
			return l.confused(from)
		}
		if from != root || l.rank == root {
			return nil
		}
		return l.copy(data, c.own, from)
	})
}

func (l *transport) confused(from int) error {
	return fmt.Errorf("local: ranks %d and %d call different methods", from, l.rank)
}

func (l *transport) copy(dst, src []byte, from int) error {
	if len(dst) != len(src) {
		return fmt.Errorf("local: rank %d sends %d bytes to rank %d, which expects %d", from, len(src), l.rank,
			len(dst))
	}
	if unsafe.SliceData(dst) != unsafe.SliceData(src) { // otherwise other ranks may be reading it
		copy(dst, src)
	}
	return nil
}

func (l *transport) Barrier(ctx context.Context) error { return l.meet(ctx) }

// known returns the error of a group that failed or that this rank left.
func (l *transport) known() error {
	select {
	case <-l.failed:
		return l.err
	case <-l.left:
		return l.err
	default:
		return nil
	}
}

func (l *transport) Send(ctx context.Context, to int, data []byte) error {
	if err := l.known(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return l.giveUp(ctx)
	}
	b := &l.boxes[l.rank*l.size+to]
	b.mu.Lock()
	b.letters = append(b.letters, slices.Clone(data))
	b.mu.Unlock()
	b.poke()
	return nil
}

func (b *box) poke() {
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

func (l *transport) Recv(ctx context.Context, from int, data []byte) error {
	b := &l.boxes[from*l.size+l.rank]
	for {
		b.mu.Lock()
		var letter []byte
		arrived, closed := len(b.letters) > 0, b.closed
		if arrived {
			letter, b.letters = b.letters[0], b.letters[1:]
		}
		b.mu.Unlock()
		switch {
		case arrived:
			if err := l.copy(data, letter, from); err != nil {
				return l.end(err, true)
			}
			return nil
		case closed:
			return l.end(fmt.Errorf("local: rank %d of %d has left: %w", from, l.size, comm.ErrPeerLost), true)
		}
		select {
		case <-b.changed:
		case <-l.failed:
			return l.err
		case <-l.left:
			return l.err
		case <-ctx.Done():
			if err := l.known(); err != nil { // both are ready
				return err
			}
			return l.giveUp(ctx)
		}
	}
}

func (l *transport) Split(ctx context.Context, color, key int) (comm.Transport, error) {
	l.show(content{color: color, key: key})
	if err := l.meet(ctx); err != nil {
		return nil, err
	}
	var members []int
	keys := make([]int, l.size)
	for r := range l.size {
		if err := l.look(r, func(c *content) error {
			if keys[r] = c.key; color >= 0 && c.color == color {
				members = append(members, r)
			}
			return nil
		}); err != nil {
			return nil, l.end(err, true)
		}
	}
	if len(members) > 0 && members[0] == l.rank {
		part := newGroup(len(members))
		l.mu.Lock()
		l.parts = append(l.parts, part)
		err := l.err
		l.mu.Unlock()
		if err != nil {
			part.end(err, true)
		}
		l.show(content{color: color, key: key, part: part})
	}
	if err := l.meet(ctx); err != nil {
		return nil, err
	}
	if len(members) == 0 {
		return nil, l.meet(ctx)
	}
	var part *group
	if err := l.look(members[0], func(c *content) error { part = c.part; return nil }); err != nil {
		return nil, l.end(err, true)
	}
	slices.SortStableFunc(members, func(a, b int) int { return cmp.Compare(keys[a], keys[b]) })
	own := newTransport(part, slices.Index(members, l.rank))
	l.mu.Lock()
	l.mine = append(l.mine, own)
	l.mu.Unlock()
	return own, l.meet(ctx)
}

func (l *transport) Close() error {
	l.leave.Do(func() {
		l.mu.Lock()
		mine := l.mine
		l.mu.Unlock()
		for _, part := range mine {
			part.Close()
		}
		l.end(fmt.Errorf("local: rank %d of %d has left: %w", l.rank, l.size, comm.ErrPeerLost), false)
		for to := range l.size {
			b := &l.boxes[l.rank*l.size+to]
			b.mu.Lock()
			b.closed = true
			b.mu.Unlock()
			b.poke()
		}
		close(l.left)
	})
	return nil
}
