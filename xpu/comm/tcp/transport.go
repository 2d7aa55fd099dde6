package tcp

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"mula/xpu/comm"
	"mula/xpu/comm/pairwise"
)

const worldChannel = 0

// A transport is this rank's end of a channel.
type transport struct {
	pairwise.Group
	id      uint64
	streams []*stream // by rank in the group; nil for this one
	world   []*peer   // all connections of the process, if this is the world; closed with it
	running sync.WaitGroup

	pending atomic.Int64  // messages of the call in progress, plus 1 while the call is set up
	ready   chan struct{} // receives a token when nothing is pending
	splits  uint64

	mu    sync.Mutex
	parts []*transport // groups split off

	end   sync.Once
	ended chan struct{} // closed with err
	err   error
	shut  sync.Once
}

// newWorld returns the world's transport, which uses connections to all other ranks.
func newWorld(rank int, conns []net.Conn) *transport {
	peers := make([]*peer, len(conns))
	for r, conn := range conns {
		if r == rank {
			continue
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			tcp.SetNoDelay(true)
			tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second,
				Count: 6})
		}
		peers[r] = newPeer(r, conn)
	}
	l := open(worldChannel, rank, peers)
	l.world = peers
	for _, p := range peers {
		if p == nil {
			continue
		}
		l.running.Go(func() { p.lost(p.read(bufio.NewReaderSize(p.conn, chunk))) })
		l.running.Go(func() {
			if p.write() == nil {
				p.conn.Close()
			} // otherwise the reader sees the end of the connection too, after the peer's last data
		})
	}
	return l
}

// open returns the transport of a channel to the given peers, by rank in the group; the entry of
// this rank is nil.
func open(id uint64, rank int, peers []*peer) *transport {
	l := &transport{id: id, streams: make([]*stream, len(peers)), ready: make(chan struct{}, 1),
		ended: make(chan struct{})}
	l.Group = pairwise.NewGroup("tcp", rank, len(peers), l)
	for r, p := range peers {
		if p == nil {
			continue
		}
		p.mu.Lock()
		l.streams[r] = p.stream(id)
		p.foreign--
		p.mu.Unlock()
	}
	// As soon as one stream has the transport, the reader of that connection may end the group. It
	// then needs all streams.
	var broken error
	for _, s := range l.streams {
		if s == nil {
			continue
		}
		s.peer.mu.Lock()
		s.transport = l
		if broken == nil {
			broken = s.failure
		}
		if broken == nil {
			broken = s.peer.err
		}
		s.peer.mu.Unlock()
	}
	if broken != nil {
		l.fail(broken)
	}
	return l
}

func (l *transport) Name() string { return "tcp" }

// done records that a message has been sent or received.
func (l *transport) done() {
	if l.pending.Add(-1) == 0 {
		l.ready <- struct{}{}
	}
}

// Begin, Push, Pull and Wait implement [pairwise.Messages].
func (l *transport) Begin(ctx context.Context) error {
	select {
	case <-l.ended:
		return l.err
	default:
	}
	if ctx.Err() != nil {
		return l.giveUp(ctx)
	}
	l.pending.Store(1)
	return nil
}

func (l *transport) Push(to int, op pairwise.Operation, data []byte) {
	l.pending.Add(1)
	l.queue(to, op, message{data: data, transport: l})
}

func (l *transport) queue(to int, op pairwise.Operation, m message) {
	m.head[0] = byte(op)
	binary.LittleEndian.PutUint64(m.head[8:], uint64(len(m.data)))
	s := l.streams[to]
	s.peer.mu.Lock()
	err := s.push(m)
	s.peer.mu.Unlock()
	if err != nil {
		l.fail(err)
	}
}

func (l *transport) Pull(from int, op pairwise.Operation, data []byte) {
	l.pending.Add(1)
	s := l.streams[from]
	s.peer.mu.Lock()
	err := s.pull(op, data)
	s.peer.mu.Unlock()
	if err != nil {
		l.fail(err)
	}
}

func (l *transport) Wait(ctx context.Context) error {
	l.done()
	select {
	case <-l.ready:
		return nil
	case <-l.ended:
	case <-ctx.Done():
	}
	select {
	case <-l.ready: // both are ready
		return nil
	case <-l.ended:
		return l.err
	default:
		return l.giveUp(ctx)
	}
}

// giveUp ends the group because of a done context.
func (l *transport) giveUp(ctx context.Context) error {
	l.fail(ctx.Err())
	return ctx.Err()
}

// fail ends this group and all groups split off from it with an error, and notifies the other
// ranks.
func (l *transport) fail(err error) {
	l.stop(err, func(s *stream) {
		text := strings.TrimSuffix(err.Error(), ": "+comm.ErrPeerLost.Error())
		text = text[:min(len(text), maxText)]
		s.queue, s.next = nil, 0
		s.peer.control = append(appendFrame(s.peer.control, l.id, frameFailure, len(text)), text...)
	})
	for _, part := range l.children() {
		part.fail(err)
	}
}

func (l *transport) children() []*transport {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.parts
}

// stop ends the group on this rank, once. When it returns, the data of a call in progress is no
// longer used. last adds the final frames to each stream.
func (l *transport) stop(err error, last func(*stream)) {
	l.end.Do(func() {
		l.err = err
		for _, s := range l.streams {
			if s == nil {
				continue
			}
			s.peer.mu.Lock()
			s.dead, s.wanted, s.dst, s.buffer, s.from = true, false, nil, nil, 0
			last(s)
			s.schedule()
			s.peer.work.Signal()
			s.peer.mu.Unlock()
		}
		close(l.ended)
	})
}

func (l *transport) Send(ctx context.Context, to int, data []byte) error {
	if err := l.Begin(ctx); err != nil {
		return err
	}
	l.queue(to, pairwise.Send, message{data: slices.Clone(data)})
	return l.Wait(ctx)
}

func (l *transport) Split(ctx context.Context, color, key int) (comm.Transport, error) {
	colors, keys, err := l.Votes(ctx, color, key)
	if err != nil {
		return nil, err
	}
	l.splits++
	if color < 0 {
		return nil, nil
	}
	var members []int
	for r := range colors {
		if colors[r] == color {
			members = append(members, r)
		}
	}
	// No two groups that share a rank have the same id, and all members compute the same id without
	// communication.
	sum := sha256.Sum256(fmt.Appendf(nil, "%d/%d/%d", l.id, l.splits, members[0]))
	id := binary.LittleEndian.Uint64(sum[:]) | 1
	slices.SortStableFunc(members, func(a, b int) int { return cmp.Compare(keys[a], keys[b]) })
	peers := make([]*peer, len(members))
	rank := 0
	for i, r := range members {
		if r == l.Rank() {
			rank = i
		} else {
			peers[i] = l.streams[r].peer
		}
	}
	part := open(id, rank, peers)
	l.mu.Lock()
	l.parts = append(l.parts, part)
	l.mu.Unlock()
	select {
	case <-l.ended: // fail ran before the part was added
		part.fail(l.err)
	default:
	}
	return part, nil
}

func (l *transport) Close() error {
	l.shut.Do(func() {
		for _, part := range l.children() {
			part.Close()
		}
		orderly := false
		l.stop(fmt.Errorf("tcp: rank %d has left the group: %w", l.Rank(), comm.ErrPeerLost), func(s *stream) {
			orderly = true
			// Data of Send is still sent; data of the call in progress is not.
			kept := s.queue[:0]
			for _, m := range s.queue[s.next:] {
				if m.transport != nil {
					break
				}
				kept = append(kept, m)
			}
			s.queue, s.next = append(kept, message{last: true}), 0
		})
		if l.world != nil {
			l.leave(orderly)
		}
	})
	return nil
}

// leave ends the connections of the process when the other ranks have received the data sent to
// them. If the group has failed, orderly is false, and the other ranks do not know yet that this
// rank leaves.
func (l *transport) leave(orderly bool) {
	limit, late := time.NewTimer(farewellTime), false
	defer limit.Stop()
	for _, p := range l.world {
		if p != nil && !orderly {
			p.mu.Lock()
			p.control = appendFrame(p.control, worldChannel, frameLeave, 0)
			p.work.Signal()
			p.mu.Unlock()
		}
	}
	for _, p := range l.world {
		if p == nil {
			continue
		}
		if !late {
			select {
			case <-p.heard:
			case <-limit.C:
				late = true
			}
		}
		p.mu.Lock()
		p.closed = true
		p.work.Signal()
		p.mu.Unlock()
		if late {
			p.conn.SetDeadline(time.Unix(1, 0))
		}
	}
	l.running.Wait()
}
