package tcp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"mula/xpu/comm"
	"mula/xpu/comm/pairwise"
)

// The protocol of a connection: frames of a header and, for some kinds, length bytes.
//
//	channel uint64 | kind uint8 | 0, 0, 0 | length uint32
//
// A channel is a group's part of a connection. Its data frames form a stream of messages, each
// preceded by 16 bytes: operation uint8, seven zeros, length uint64. A sender is at most window
// bytes ahead of the receiver, which sends credit frames for the bytes that it consumed. Neither a
// slow receiver nor a hostile sender can therefore fill the memory, and no channel blocks another.
const (
	frameData     = iota // the next bytes of the channel's stream
	frameCredit          // length more bytes may be sent; no bytes follow
	frameLeave           // the sender has left the group: the last frame of the channel
	frameFailure         // the group is unusable at the sender; the reason follows as text
	frameFarewell        // the sender has received everything up to the world's frameLeave
	frames

	frameBytes   = 16
	messageBytes = 16
	chunk        = 128 << 10 // maximum bytes of a data frame
	window       = 512 << 10
	maxUnopened  = 64 // channels that a peer may use before this rank does
)

// farewellTime limits the wait for the other ranks to receive their data when the world ends.
const farewellTime = 5 * time.Second

// A peer is the connection to another rank of the world. One goroutine only reads and never waits
// for anything else, so that both sides of a connection can always write; another goroutine writes.
type peer struct {
	rank int // in the world
	conn net.Conn

	mu      sync.Mutex
	work    sync.Cond // wakes the writer
	streams map[uint64]*stream
	foreign int       // streams that this rank does not use yet
	control []byte    // frames that need no credit
	owing   []*stream // streams whose peer is owed credit
	ready   []*stream // streams with data to send, and credit
	err     error     // reason why nothing more is received
	closed  bool      // the connection may end when everything is written
	parted  bool      // the peer has left the world
	heard   chan struct{}
	hear    sync.Once // closes heard: the peer has received everything, or is lost
}

// A stream is one channel of a connection, in both directions.
type stream struct {
	peer      *peer
	id        uint64
	transport *transport // nil until this rank uses the channel
	dead      bool       // this rank has left the group, or it has failed

	// Incoming.
	buffer   []byte // data received before a call needed it; reused
	from     int    // start in buffer of the data not yet consumed
	head     [messageBytes]byte
	headed   int
	wanted   bool // a call waits for a message
	op       pairwise.Operation
	dst      []byte
	taken    int // number of bytes received in dst
	consumed int // consumed bytes without credit sent
	owed     bool
	left     bool  // the peer has left the group
	failure  error // the group has failed at the peer

	// Outgoing.
	queue  []message
	next   int // index in queue
	credit int
	queued bool // in ready
}

// A message is the data that one rank sends to another in one call.
type message struct {
	head      [messageBytes]byte
	data      []byte
	sent      int        // bytes sent of head and data
	transport *transport // waits until data may be reused; nil if no call waits
	last      bool       // not a message, but the end of the stream
}

func newPeer(rank int, conn net.Conn) *peer {
	p := &peer{rank: rank, conn: conn, streams: make(map[uint64]*stream), heard: make(chan struct{})}
	p.work.L = &p.mu
	return p
}

func (p *peer) String() string {
	return fmt.Sprintf("rank %d (%s)", p.rank, p.conn.RemoteAddr())
}

// stream returns the stream of a channel. The caller holds p.mu.
func (p *peer) stream(id uint64) *stream {
	s := p.streams[id]
	if s == nil {
		s = &stream{peer: p, id: id, credit: window}
		p.streams[id] = s
		p.foreign++
	}
	return s
}

func appendFrame(b []byte, id uint64, kind uint8, length int) []byte {
	b = binary.LittleEndian.AppendUint64(b, id)
	return binary.LittleEndian.AppendUint32(append(b, kind, 0, 0, 0), uint32(length))
}

// push queues a message, or returns the error of a stream that cannot send it. The caller holds
// p.mu.
func (s *stream) push(m message) error {
	switch {
	case s.dead:
		return nil // the transport has an error already
	case s.left:
		return s.gone()
	case s.peer.err != nil:
		return s.peer.err
	}
	s.queue = append(s.queue, m)
	s.schedule()
	return nil
}

// schedule puts the stream in the writer's list, if it can send something. The caller holds p.mu.
func (s *stream) schedule() {
	if !s.queued && s.next < len(s.queue) && (s.credit > 0 || s.queue[s.next].last) {
		s.queued = true
		s.peer.ready = append(s.peer.ready, s)
		s.peer.work.Signal()
	}
}

// pull sets the destination of the next message. The caller holds p.mu.
func (s *stream) pull(op pairwise.Operation, dst []byte) error {
	if s.dead {
		return nil
	}
	s.wanted, s.op, s.dst, s.taken = true, op, dst, 0
	rest, err := s.take(s.buffer[s.from:])
	if err != nil {
		return err
	}
	if s.from = len(s.buffer) - len(rest); s.from == len(s.buffer) {
		s.buffer, s.from = s.buffer[:0], 0
	}
	return s.stuck()
}

// stuck returns an error if a call waits for something that will not happen. The caller holds p.mu.
func (s *stream) stuck() error {
	waits := s.wanted
	for _, m := range s.queue[s.next:] {
		waits = waits || m.transport != nil
	}
	switch {
	case !waits || s.dead:
		return nil
	case s.failure != nil:
		return s.failure
	case s.left:
		return s.gone()
	}
	return s.peer.err
}

func (s *stream) gone() error {
	return fmt.Errorf("tcp: %v has left: %w", s.peer, comm.ErrPeerLost)
}

// take copies bytes of b to the message that is waited for, and returns the rest. The caller holds
// p.mu.
func (s *stream) take(b []byte) ([]byte, error) {
	before := len(b)
	for s.wanted && len(b) > 0 {
		if s.headed < messageBytes {
			n := copy(s.head[s.headed:], b)
			s.headed += n
			b = b[n:]
			if s.headed < messageBytes {
				continue
			}
			op, length := pairwise.Operation(s.head[0]), binary.LittleEndian.Uint64(s.head[8:])
			if op != s.op {
				return nil, fmt.Errorf("tcp: %v runs %v, but this rank runs %v", s.peer, op, s.op)
			}
			if length != uint64(len(s.dst)) {
				return nil, fmt.Errorf("tcp: %v sends %d bytes in %v, but this rank expects %d", s.peer, length, op,
					len(s.dst))
			}
		}
		n := copy(s.dst[s.taken:], b)
		s.taken += n
		b = b[n:]
		if s.taken == len(s.dst) {
			s.wanted, s.dst, s.headed = false, nil, 0
			s.transport.done()
		}
	}
	if s.consumed += before - len(b); s.consumed >= window/4 && !s.owed {
		s.owed = true
		s.peer.owing = append(s.peer.owing, s)
		s.peer.work.Signal()
	}
	return b, nil
}

// arrive processes bytes of a data frame. The caller holds p.mu.
func (s *stream) arrive(b []byte) error {
	if s.dead {
		return nil // not needed any more; the peer is notified that the group has ended
	}
	b, err := s.take(b)
	if err != nil {
		return err
	}
	if s.from > 0 && len(s.buffer)+len(b) > cap(s.buffer) {
		s.buffer, s.from = s.buffer[:copy(s.buffer, s.buffer[s.from:])], 0
	}
	s.buffer = append(s.buffer, b...)
	return nil
}

// maxLength is the maximum length of a frame, by kind.
var maxLength = [frames]int{frameData: chunk, frameCredit: window, frameFailure: maxText}

// A frameError is a violation of the protocol: the connection is unusable.
type frameError struct{ error }

// read handles what the peer sends until the connection ends.
func (p *peer) read(r *bufio.Reader) error {
	for {
		head, err := r.Peek(frameBytes)
		if err != nil {
			if len(head) > 0 {
				err = unexpected(err)
			}
			return err
		}
		id, kind, length := binary.LittleEndian.Uint64(head), head[8], int(binary.LittleEndian.Uint32(head[12:]))
		r.Discard(frameBytes)
		if kind >= frames {
			return frameError{fmt.Errorf("unknown frame kind %d", kind)}
		}
		if length > maxLength[kind] {
			return frameError{fmt.Errorf("frame of kind %d with invalid length %d", kind, length)}
		}
		p.mu.Lock()
		if p.foreign >= maxUnopened && p.streams[id] == nil {
			p.mu.Unlock()
			return frameError{fmt.Errorf("more than %d unknown channels", maxUnopened)}
		}
		s := p.stream(id)
		var broken error // error of the group
		switch kind {
		case frameData:
			if len(s.buffer)-s.from+length > window {
				p.mu.Unlock()
				return frameError{fmt.Errorf("the peer sent more than %d bytes ahead", window)}
			}
		case frameCredit:
			if s.credit+length > window {
				p.mu.Unlock()
				return frameError{fmt.Errorf("invalid credit of %d bytes on top of %d", length, s.credit)}
			}
			s.credit += length
			s.schedule()
		case frameLeave:
			if s.left {
				p.mu.Unlock()
				return frameError{errors.New("a second leave frame")}
			}
			s.left = true
			broken = s.stuck()
			if id == worldChannel {
				p.parted = true
				p.control = appendFrame(p.control, id, frameFarewell, 0)
				p.work.Signal()
			}
		case frameFarewell:
			p.hear.Do(func() { close(p.heard) })
		}
		transport := s.transport
		p.mu.Unlock()

		switch kind {
		case frameData:
			for length > 0 && broken == nil {
				if r.Buffered() == 0 {
					if _, err := r.Peek(1); err != nil {
						return unexpected(err)
					}
				}
				b, _ := r.Peek(min(length, r.Buffered()))
				p.mu.Lock()
				broken = s.arrive(b)
				transport = s.transport
				p.mu.Unlock()
				length -= len(b)
				r.Discard(len(b))
			}
			if _, err := r.Discard(length); err != nil {
				return unexpected(err)
			}
		case frameFailure:
			text := make([]byte, length)
			if _, err := io.ReadFull(r, text); err != nil {
				return unexpected(err)
			}
			broken = fmt.Errorf("tcp: %v gave up: %s: %w", p, text, comm.ErrPeerLost)
			p.mu.Lock()
			if s.failure == nil {
				s.failure = broken
			}
			transport = s.transport
			p.mu.Unlock()
		}
		if broken != nil && transport != nil {
			transport.fail(broken)
		}
	}
}

// unexpected converts the end of a connection within a frame to io.ErrUnexpectedEOF.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// lost ends all streams of the connection.
func (p *peer) lost(err error) {
	var breach frameError
	p.mu.Lock()
	if p.err == nil {
		switch {
		case p.parted:
			p.err = fmt.Errorf("tcp: %v has left: %w", p, comm.ErrPeerLost)
		case errors.As(err, &breach):
			p.err = fmt.Errorf("tcp: %v violates the protocol between ranks: %w: %w", p, err, comm.ErrPeerLost)
		default:
			p.err = fmt.Errorf("tcp: the connection to %v has ended: %w: %w", p, err, comm.ErrPeerLost)
		}
	}
	err = p.err
	var transports []*transport
	for _, s := range p.streams {
		if s.transport != nil && (!p.parted || s.stuck() != nil) {
			transports = append(transports, s.transport)
		}
	}
	p.closed = true
	p.work.Signal()
	p.mu.Unlock()
	p.conn.Close()
	p.hear.Do(func() { close(p.heard) })
	for _, l := range transports {
		l.fail(err)
	}
}

// fill appends the next frames to b, as far as they fit, and reports whether the connection is
// done. It waits for data. The caller holds p.mu.
func (p *peer) fill(b []byte) ([]byte, bool) {
	for len(p.control) == 0 && len(p.owing) == 0 && len(p.ready) == 0 {
		if p.closed {
			return b, true
		}
		p.work.Wait()
	}
	b = append(b, p.control...)
	p.control = p.control[:0]
	for _, s := range p.owing {
		b = appendFrame(b, s.id, frameCredit, s.consumed)
		s.consumed, s.owed = 0, false
	}
	p.owing = p.owing[:0]
	for len(p.ready) > 0 && len(b) < chunk {
		s := p.ready[0]
		p.ready = p.ready[:copy(p.ready, p.ready[1:])]
		b = s.fill(b, chunk-len(b))
		s.queued = false
		s.schedule()
	}
	return b, false
}

// fill appends a frame with the next data of the stream, up to room bytes. The caller holds p.mu.
func (s *stream) fill(b []byte, room int) []byte {
	start := len(b)
	b = appendFrame(b, s.id, frameData, 0)
	room = min(room, s.credit)
	for s.next < len(s.queue) && !s.queue[s.next].last && room > 0 {
		m := &s.queue[s.next]
		if m.sent < messageBytes {
			n := min(room, messageBytes-m.sent)
			b = append(b, m.head[m.sent:m.sent+n]...)
			m.sent += n
			room -= n
		}
		if m.sent >= messageBytes {
			at := m.sent - messageBytes
			n := min(room, len(m.data)-at)
			b = append(b, m.data[at:at+n]...)
			m.sent += n
			room -= n
			if m.sent == messageBytes+len(m.data) {
				if m.transport != nil {
					m.transport.done()
				}
				*m = message{}
				s.next++
			}
		}
	}
	if n := len(b) - start - frameBytes; n > 0 {
		binary.LittleEndian.PutUint32(b[start+12:], uint32(n))
		s.credit -= n
	} else {
		b = b[:start]
	}
	if s.next < len(s.queue) && s.queue[s.next].last {
		b = appendFrame(b, s.id, frameLeave, 0)
		s.next++
	}
	if s.next == len(s.queue) {
		s.queue, s.next = s.queue[:0], 0
	}
	return b
}

// write sends queued frames until the connection may end, or ends.
func (p *peer) write() error {
	b := make([]byte, 0, chunk+4096)
	for {
		p.mu.Lock()
		var done bool
		b, done = p.fill(b[:0])
		p.mu.Unlock()
		if done {
			return nil
		}
		if _, err := p.conn.Write(b); err != nil {
			return err
		}
	}
}
