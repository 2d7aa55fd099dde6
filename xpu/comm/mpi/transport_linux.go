//go:build amd64 || arm64

package mpi

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"mula/xpu/comm"
	"mula/xpu/comm/pairwise"
)

const (
	maxCount = 1 << 30 // bytes of one MPI message; larger pieces are sent in several

	tagData   = 1
	tagNotice = 2

	// farewellTime limits the wait at the end of MPI for sends without a waiting call, and the wait
	// of an abandoned call for its operations.
	farewellTime = 5 * time.Second
)

// A notice tells another rank that this rank has left or failed. On leaving it contains the number
// of messages that the two exchanged.
//
//	kind uint8 | 7 zeros | sent uint64 | pulled uint64 | sums uint64 | text
const (
	noticeLeave   = 1
	noticeFailure = 2
	noticeBytes   = 512
	noticeHead    = 32
)

// A transport is a communicator.
type transport struct {
	pairwise.Group
	process *process
	comm    handle
	world   bool

	calling sync.Mutex // held from Begin to the end of Wait
	// The call in progress: one request for each message.
	requests []byte // handles, as the library lays them out
	pieces   []piece
	active   int
	pin      runtime.Pinner
	first    error // first error of Push and Pull

	// Memory that the library writes to.
	done     int32
	flag     int32
	indices  []int32
	statuses []byte
	status   [64]byte
	notice   [noticeBytes]byte

	sent, pulled []uint64 // messages to and from each rank
	sums         uint64   // number of sums
	left         []*departure

	mu     sync.Mutex
	parts  []*transport
	ending atomic.Pointer[error] // why the group is unusable; never reset
	told   sync.Once
	shut   sync.Once
}

type piece struct {
	kind int
	peer int // the other rank of a message
	data []byte
	nth  uint64 // index among the messages of this kind to or from the peer
	live bool   // not yet ended
}

// Kinds of pieces.
const (
	sending = iota
	receiving
	summing
)

// A departure is the content of a rank's notice on leaving: the number of messages that it sent to
// this rank and received from it, and the number of sums that it took part in.
type departure struct{ sent, pulled, sums uint64 }

func newTransport(p *process, comm handle, rank, size int) *transport {
	l := &transport{process: p, comm: comm, world: comm == p.world, sent: make([]uint64, size),
		pulled: make([]uint64, size), left: make([]*departure, size)}
	l.Group = pairwise.NewGroup("mpi", rank, size, l)
	return l
}

func (l *transport) Name() string { return l.process.name }

// end sets the reason why the group is unusable, unless it is set already, and returns it.
func (l *transport) end(err error) error {
	l.ending.CompareAndSwap(nil, &err)
	return *l.ending.Load()
}

// fail ends this group and all groups split off from it with an error, and notifies the other
// ranks.
func (l *transport) fail(err error) error {
	err = l.end(err)
	l.told.Do(func() {
		text := strings.TrimSuffix(err.Error(), ": "+comm.ErrPeerLost.Error())
		for r := range l.Size() {
			if r != l.Rank() {
				l.tell(r, noticeFailure, text)
			}
		}
	})
	for _, part := range l.children() {
		part.fail(err)
	}
	return err
}

func (l *transport) children() []*transport {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.parts
}

func (l *transport) tell(to int, kind byte, text string) {
	b := make([]byte, noticeBytes)
	b[0] = kind
	if kind == noticeLeave {
		binary.LittleEndian.PutUint64(b[8:], l.sent[to])
		binary.LittleEndian.PutUint64(b[16:], l.pulled[to])
		binary.LittleEndian.PutUint64(b[24:], l.sums)
	}
	copy(b[noticeHead:], text)
	l.process.post(l.comm, to, tagNotice, b) // if it cannot be sent, the others find out anyway
}

// post sends data, which nothing else may use, without waiting for completion.
func (p *process) post(comm handle, to, tag int, data []byte) error {
	s := &single{process: p, data: data}
	s.pin.Pin(s)
	if len(data) > 0 {
		s.pin.Pin(&data[0])
	}
	if err := p.check(p.isend(addressOf(data), int32(len(data)), p.bytes, int32(to), int32(tag), comm,
		uintptr(unsafe.Pointer(&s.request))), "MPI_Isend"); err != nil {
		s.pin.Unpin()
		return err
	}
	if s.test() {
		return nil
	}
	p.sending.Add(1)
	go func() {
		for pause := newPause(); !s.test(); {
			pause.wait()
		}
		p.sending.Add(-1)
	}()
	return nil
}

// A single is one operation without a waiting call.
type single struct {
	process *process
	data    []byte
	pin     runtime.Pinner
	request uint64
	done    int32
	index   int32
	status  [64]byte
}

// test reports whether the operation has ended, successfully or not.
func (s *single) test() bool {
	at := func(p *int32) uintptr { return uintptr(unsafe.Pointer(p)) }
	code := s.process.testSome(1, uintptr(unsafe.Pointer(&s.request)), at(&s.done), at(&s.index),
		uintptr(unsafe.Pointer(&s.status)))
	if code == 0 && s.done == 0 {
		return false
	}
	s.pin.Unpin()
	return true
}

// Begin, Push, Pull and Wait implement [pairwise.Messages].
func (l *transport) Begin(ctx context.Context) error {
	l.calling.Lock()
	if err := l.ending.Load(); err != nil {
		l.calling.Unlock()
		return *err
	}
	if err := ctx.Err(); err != nil {
		l.calling.Unlock()
		return l.giveUp(ctx)
	}
	l.pieces, l.requests, l.active, l.first = l.pieces[:0], l.requests[:0], 0, nil
	return nil
}

// giveUp ends the group because of a done context.
func (l *transport) giveUp(ctx context.Context) error {
	l.fail(fmt.Errorf("mpi: rank %d gave up: %w: %w", l.Rank(), ctx.Err(), comm.ErrPeerLost))
	return ctx.Err()
}

func (l *transport) Push(to int, _ pairwise.Operation, data []byte) { l.message(sending, to, data) }

func (l *transport) Pull(from int, _ pairwise.Operation, data []byte) {
	l.message(receiving, from, data)
}

// message starts to send or receive data, in one message or several.
func (l *transport) message(kind, peer int, data []byte) {
	p, nth, what := l.process, &l.sent[peer], "MPI_Isend"
	if kind == receiving {
		nth, what = &l.pulled[peer], "MPI_Irecv"
	}
	for first := true; first || len(data) > 0; first = false {
		part := data[:min(len(data), maxCount)]
		data = data[len(part):]
		*nth++
		l.start(piece{kind, peer, part, *nth, true}, what, func(data, request uintptr) int32 {
			if kind == receiving {
				return p.irecv(data, int32(len(part)), p.bytes, int32(peer), tagData, l.comm, request)
			}
			return p.isend(data, int32(len(part)), p.bytes, int32(peer), tagData, l.comm, request)
		})
	}
}

// start starts an operation of the call in progress.
func (l *transport) start(m piece, what string, begin func(data, request uintptr) int32) {
	if l.first != nil {
		return
	}
	n := len(l.requests)
	for range l.process.handleBytes {
		l.requests = append(l.requests, 0)
	}
	if len(m.data) > 0 {
		l.pin.Pin(&m.data[0])
	}
	if l.first = l.process.check(begin(addressOf(m.data), addressOf(l.requests[n:])), what); l.first != nil {
		l.requests = l.requests[:n]
		return
	}
	l.pieces = append(l.pieces, m)
	l.active++
}

// Wait polls all messages until they have ended or will never end.
func (l *transport) Wait(ctx context.Context) error {
	defer l.calling.Unlock()
	err := l.first
	for pause := newPause(); err == nil && l.active > 0; pause.wait() {
		if err = l.test(); err != nil || l.active == 0 {
			break
		}
		if !pause.due() {
			continue
		}
		if ended := l.ending.Load(); ended != nil {
			err = *ended
		} else if err = l.listen(); err == nil { // otherwise a notice of another rank has priority over the context
			err = ctx.Err()
		}
	}
	if err == nil {
		l.pin.Unpin()
		return nil
	}
	l.abandon()
	if err == ctx.Err() {
		return l.giveUp(ctx)
	}
	return l.fail(err)
}

// test records which messages have ended.
func (l *transport) test() error {
	p, n := l.process, len(l.pieces)
	if len(l.indices) < n {
		l.indices, l.statuses = make([]int32, n), make([]byte, n*p.statusBytes)
	}
	code := p.testSome(int32(n), addressOf(l.requests), uintptr(unsafe.Pointer(&l.done)),
		uintptr(unsafe.Pointer(&l.indices[0])), addressOf(l.statuses))
	if l.done == undefined {
		l.active = 0
		return p.check(code, "MPI_Testsome")
	}
	var first error
	for i, index := range l.indices[:max(l.done, 0)] {
		m := &l.pieces[index]
		m.live = false
		l.active--
		status := l.statuses[i*p.statusBytes : (i+1)*p.statusBytes]
		var err error
		if code != 0 {
			err = p.check(int32(binary.NativeEndian.Uint32(status[p.statusErrorByte:])), "a message")
		}
		if err == nil && m.kind == receiving {
			if err = p.check(p.getCount(addressOf(status), p.bytes, uintptr(unsafe.Pointer(&l.flag))),
				"MPI_Get_count"); err == nil && int(l.flag) != len(m.data) {
				err = fmt.Errorf("%d bytes arrived", l.flag)
			}
		}
		switch {
		case err == nil:
		case m.kind == sending:
			err = fmt.Errorf("mpi: rank %d sends %d bytes to rank %d: %w", l.Rank(), len(m.data), m.peer, err)
		case m.kind == receiving:
			err = fmt.Errorf("mpi: rank %d expects %d bytes from rank %d: %w", l.Rank(), len(m.data), m.peer, err)
		}
		first = cmp.Or(first, err)
	}
	if first == nil && code != 0 {
		first = p.check(code, "MPI_Testsome")
	}
	return first
}

// listen receives notices of other ranks.
func (l *transport) listen() error {
	p := l.process
	for {
		status, at := uintptr(unsafe.Pointer(&l.status)), func(v *int32) uintptr { return uintptr(unsafe.Pointer(v)) }
		if err := p.check(p.iprobe(p.anySource, tagNotice, l.comm, at(&l.flag), status), "MPI_Iprobe"); err != nil {
			return err
		}
		if l.flag == 0 {
			break
		}
		from := int(int32(binary.NativeEndian.Uint32(l.status[p.statusSourceByte:])))
		if err := p.check(p.recv(addressOf(l.notice[:]), noticeBytes, p.bytes, int32(from), tagNotice, l.comm,
			p.ignore), "MPI_Recv"); err != nil {
			return err
		}
		if l.notice[0] == noticeFailure {
			return fmt.Errorf("mpi: rank %d gave up: %s: %w", from, strings.TrimRight(string(l.notice[noticeHead:]),
				"\x00"), comm.ErrPeerLost)
		}
		number := func(at int) uint64 { return binary.LittleEndian.Uint64(l.notice[at:]) }
		l.left[from] = &departure{number(8), number(16), number(24)}
	}
	// Messages that a rank sent before it left still arrive, and messages that it received are
	// complete.
	for r, d := range l.left {
		for _, m := range l.pieces {
			if d != nil && m.live && (m.kind == summing && m.nth > d.sums || m.peer == r &&
				(m.kind == sending && m.nth > d.pulled || m.kind == receiving && m.nth > d.sent)) {
				return fmt.Errorf("mpi: rank %d has left: %w", r, comm.ErrPeerLost)
			}
		}
	}
	return nil
}

// abandon ends the operations of the call in progress as far as possible. The library may still
// read and write the memory of the others, which stays pinned, and MPI cannot be finalized any
// more.
func (l *transport) abandon() {
	p := l.process
	for i, m := range l.pieces {
		if m.live && m.kind == receiving {
			p.cancel(addressOf(l.requests[i*p.handleBytes:]))
		}
	}
	for pause := newPause(); l.active > 0 && !pause.longerThan(farewellTime); pause.wait() {
		l.test()
		if !slices.ContainsFunc(l.pieces, func(m piece) bool { return m.live && m.kind == receiving }) &&
			pause.longerThan(farewellTime/50) {
			break
		}
	}
	if l.active > 0 {
		p.dirty.Store(true)
		lost.Lock()
		lost.calls = append(lost.calls, call{l.requests, l.pieces, l.pin})
		lost.Unlock()
		l.requests, l.pieces, l.pin = nil, nil, runtime.Pinner{}
		return
	}
	l.pin.Unpin()
}

// lost holds calls that will never end. The library may still use their memory.
var lost struct {
	sync.Mutex
	calls []call
}

type call struct {
	requests []byte
	pieces   []piece
	pin      runtime.Pinner
}

func (l *transport) Send(ctx context.Context, to int, data []byte) error {
	if err := l.Begin(ctx); err != nil {
		return err
	}
	defer l.calling.Unlock()
	data = slices.Clone(data)
	for first := true; first || len(data) > 0; first = false {
		part := data[:min(len(data), maxCount)]
		data = data[len(part):]
		l.sent[to]++
		if err := l.process.post(l.comm, to, tagData, part); err != nil {
			return l.fail(err)
		}
	}
	return nil
}

// Sum is MPI's own all-reduce.
func (l *transport) Sum(ctx context.Context, x []float32) error {
	if err := l.Begin(ctx); err != nil {
		return err
	}
	p := l.process
	l.sums++
	for len(x) > 0 {
		part := x[:min(len(x), maxCount/4)]
		x = x[len(part):]
		data := unsafe.Slice((*byte)(unsafe.Pointer(&part[0])), 4*len(part))
		l.start(piece{summing, -1, data, l.sums, true}, "MPI_Iallreduce", func(data, request uintptr) int32 {
			return p.iallreduce(p.inPlace, data, int32(len(part)), p.float, p.sum, l.comm, request)
		})
	}
	return l.Wait(ctx)
}

func (l *transport) Split(ctx context.Context, color, key int) (comm.Transport, error) {
	colors, keys, err := l.Votes(ctx, color, key)
	if err != nil {
		return nil, err
	}
	// MPI's own call cannot be cancelled, but now all ranks will make it. Colors and keys may
	// exceed the range of MPI's.
	var members []int
	for r := range colors {
		if colors[r] == color {
			members = append(members, r)
		}
	}
	slices.SortStableFunc(members, func(a, b int) int { return cmp.Compare(keys[a], keys[b]) })
	c, k := int32(undefined), int32(0)
	if color >= 0 {
		c, k = int32(slices.Min(members)), int32(slices.Index(members, l.Rank()))
	}
	p, r := l.process, newResults()
	if err := p.check(p.commSplit(l.comm, c, k, r.address(&r.handle)), "MPI_Comm_split"); err != nil {
		return nil, l.fail(err)
	}
	if color < 0 {
		return nil, nil
	}
	comm := handle(r.handle)
	if !p.openMPI {
		comm = handle(uint32(r.handle))
	}
	part, err := p.transport(comm)
	if err != nil {
		return nil, l.fail(err)
	}
	l.mu.Lock()
	l.parts = append(l.parts, part)
	l.mu.Unlock()
	if ended := l.ending.Load(); ended != nil { // fail ran before the part was added
		part.fail(*ended)
	}
	return part, nil
}

func (l *transport) Close() error {
	var err error
	l.shut.Do(func() {
		for _, part := range l.children() {
			part.Close()
		}
		failed := l.ending.Load() != nil
		if !failed {
			l.end(errLeft)
		}
		l.calling.Lock() // wait until the call in progress has ended
		defer l.calling.Unlock()
		l.told.Do(func() {
			for r := range l.Size() {
				if r != l.Rank() {
					l.tell(r, noticeLeave, "")
				}
			}
		})
		if l.world {
			if !failed {
				l.farewell()
			}
			err = l.process.end(failed)
		}
	})
	return err
}

// farewell receives the last notices of the other ranks, in all groups, before MPI is finalized:
// UCX warns about every unreceived message.
func (l *transport) farewell() {
	missing := func() bool {
		for r, d := range l.left {
			if d == nil && r != l.Rank() {
				return true
			}
		}
		return false
	}
	for pause := newPause(); missing() && !pause.longerThan(farewellTime); pause.wait() {
		if l.listen() != nil {
			break
		}
	}
	for _, part := range l.children() { // they are closed, so no call is in progress
		part.clear()
	}
}

// clear receives the pending notices in this group and the groups split off from it.
func (l *transport) clear() {
	for range l.Size() { // listen fails if the group has failed
		_ = l.listen()
	}
	for _, part := range l.children() {
		part.clear()
	}
}

// A pause is the time between two polls: first nothing, then a yield of the processor, then sleep.
type pause struct {
	n     int
	since time.Time
	sleep time.Duration
}

const (
	spins     = 50  // polls without a pause
	yields    = 200 // polls followed by a yield of the processor
	sleepMin  = 20 * time.Microsecond
	sleepMost = time.Millisecond
)

func newPause() *pause { return &pause{sleep: sleepMin} }

func (p *pause) wait() {
	p.n++
	switch {
	case p.n < spins:
	case p.n < spins+yields:
		syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)
		runtime.Gosched()
	default:
		time.Sleep(p.sleep)
		p.sleep = min(p.sleep*5/4, sleepMost)
	}
}

// due reports whether it is time to look for other events than completion.
func (p *pause) due() bool { return p.n >= spins && (p.n >= spins+yields || p.n%64 == 0) }

// longerThan reports whether more than d has passed.
func (p *pause) longerThan(d time.Duration) bool {
	if p.since.IsZero() {
		p.since = time.Now()
	}
	return time.Since(p.since) > d
}
