// Package comm is the communication of the ranks of a run. [Comm] computes sums, gathers and
// exchanges for a group of ranks, and counts bytes. A [Transport] transfers the bytes: between
// goroutines, over TCP, or with an MPI library.
package comm

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"mula/xpu/cpu"
)

// An Element is an element type that a [Comm] can send. All ranks of a group have the same byte
// order.
type Element interface {
	~uint8 | ~uint16 | ~int32 | ~uint32 | ~int64 | ~uint64 | ~float32 | ~float64
}

// A BF16 has the bits of a bfloat16 number, the upper half of a float32.
type BF16 uint16

// A Number is an element type that a [Comm] can sum.
type Number interface {
	~int64 | ~float32 | ~float64 | BF16
}

// A Comm is a group of ranks that compute together: it sums, gathers and exchanges numbers over a
// [Transport], and counts the bytes that this rank sends. All ranks must call the functions of this
// package that have a Comm parameter in the same order, like the methods of a Transport.
//
// # The order of sums
//
// Each element is summed over the ranks in its own type, in ascending order of the ranks. With
// [Comm.SetInner](n) there are two stages: first the sum over each n consecutive ranks, then the
// sum of these sums. The result depends on nothing else: not on the transport, on the hosts, on the
// division of a vector among ranks or on timing. With [Comm.SetFast], a transport that is a
// [Summer] chooses the order of float32 sums.
//
// Numbers of [BF16] are added in float32, in the same order. The result of each stage is rounded
// once, as defined by [mula/xpu.BF16], so that hosts and groups can send the results of stages.
type Comm struct {
	transport Transport
	stages    []int  // sizes of the inner stages of sums
	fast      Summer // nil: sums in the fixed order
	hosts     *hosts // nil: one host

	sent, received []Piece   // of the next exchange of two levels
	send, recv     [][]byte  // of each rank, for exchanges with all ranks; nil before the first
	lengths        []int64   // for all-to-alls of two levels
	scratch        []float64 // for reductions and relays: bytes, aligned for every Number
	traffic        [operations]traffic

	mu     sync.Mutex
	queue  chan *Pending // of Start; nil before the first
	last   Clock         // of the last operation of the queue; nil without simulated time
	ended  chan struct{} // closed when the goroutine of the queue has ended
	closed bool
}

// An Operation is a kind of communication.
type Operation int

// The operations whose bytes are counted.
const (
	OpAllReduce Operation = iota
	OpReduceScatter
	OpAllGather
	OpAllToAll
	OpBroadcast
	OpSend
	operations
)

func (o Operation) String() string {
	return [...]string{"all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send"}[o]
}

// Traffic counts the bytes that a rank sent to the other ranks of a group. With one host, a
// broadcast counts the root's bytes once for every other rank, whatever their route, and a
// reduction of z bytes, evenly split over n ranks, counts z·(n-1)/n, and twice that if all ranks
// get the result: the minimum that an algorithm can send. With two levels, the bytes that a rank
// relays count again.
type Traffic struct {
	Operation Operation
	Calls     int64
	Inside    int64 // bytes sent to ranks of the same host
	Between   int64 // bytes sent to other hosts
}

// Bytes is the number of bytes sent to all ranks.
func (t Traffic) Bytes() int64 { return t.Inside + t.Between }

type traffic struct{ calls, inside, between atomic.Int64 }

// New returns a group that uses the transport; Close closes the transport.
func New(transport Transport) *Comm {
	return &Comm{transport: transport}
}

// Name returns the name of the transport; see [Transport].
func (c *Comm) Name() string { return c.transport.Name() }

// Rank returns this rank's index in the group, from 0.
func (c *Comm) Rank() int { return c.transport.Rank() }

// Size returns the number of ranks.
func (c *Comm) Size() int { return c.transport.Size() }

// SetInner sets the sizes of the inner stages of sums, in ranks. Each size must divide the next
// one, and the last one the number of ranks. See the order of sums.
func (c *Comm) SetInner(sizes ...int) {
	c.stages = c.stages[:0]
	last := 1
	for _, n := range append(sizes, c.Size()) {
		if n < 1 || n%last != 0 {
			panic(fmt.Sprintf("comm: inner stages of %v ranks do not divide %d ranks", sizes, c.Size()))
		}
		if n > last && n < c.Size() {
			c.stages = append(c.stages, n)
		}
		last = n
	}
	c.divideSums()
}

// SetFast lets the transport choose the order of float32 sums, if it is a [Summer]; otherwise it
// has no effect.
func (c *Comm) SetFast(fast bool) {
	c.fast = nil
	if fast {
		c.fast, _ = c.transport.(Summer)
	}
}

// Split creates groups like [Transport.Split]. The new group has no inner stage, and is fast if
// this group is. With a negative color the result is nil.
func (c *Comm) Split(ctx context.Context, color, key int) (*Comm, error) {
	transport, err := c.transport.Split(ctx, color, key)
	if err != nil || transport == nil {
		return nil, err
	}
	part := New(transport)
	part.SetFast(c.fast != nil)
	return part, nil
}

// Barrier returns when all ranks have called it.
func (c *Comm) Barrier(ctx context.Context) error {
	defer waitsOf(ctx).begin().end()
	return c.transport.Barrier(ctx)
}

// begin counts a call of an operation, and the time until the end of the result.
func (c *Comm) begin(ctx context.Context, o Operation) wait {
	c.traffic[o].calls.Add(1)
	return waitsOf(ctx).begin()
}

// Close leaves this group and all groups split off from it. Started operations that have not ended
// get an error; none is running when Close returns. Close may be called again, and on a nil Comm.
func (c *Comm) Close() error {
	if c == nil {
		return nil
	}
	err := c.transport.Close()
	c.mu.Lock()
	if !c.closed && c.queue != nil {
		close(c.queue)
	}
	c.closed = true
	ended := c.ended
	c.mu.Unlock()
	if ended != nil {
		<-ended
	}
	return err
}

// Traffic lists what this rank sent since the group was created or ResetTraffic was called, by
// operation.
func (c *Comm) Traffic() []Traffic {
	all := make([]Traffic, operations)
	for i := range all {
		t := &c.traffic[i]
		all[i] = Traffic{Operation(i), t.calls.Load(), t.inside.Load(), t.between.Load()}
	}
	return all
}

// ResetTraffic sets all counts to zero.
func (c *Comm) ResetTraffic() {
	for i := range c.traffic {
		c.traffic[i].calls.Store(0)
		c.traffic[i].inside.Store(0)
		c.traffic[i].between.Store(0)
	}
}

// AllToAll sends send[sendBounds[r]:sendBounds[r+1]] to every rank r, and fills
// recv[recvBounds[r]:recvBounds[r+1]] with the elements that rank r sends. Both bounds have one
// entry more than there are ranks.
func AllToAll[E Element](ctx context.Context, c *Comm, send []E, sendBounds []int, recv []E, recvBounds []int) error {
	checkBounds(c, len(send), cut(sendBounds))
	checkBounds(c, len(recv), cut(recvBounds))
	defer c.begin(ctx, OpAllToAll).end()
	if c.twoLevels() {
		return allToAllByHosts(ctx, c, send, sendBounds, recv, recvBounds)
	}
	c.prepareDirect()
	for r := range c.send {
		c.send[r], c.recv[r] = piece(send, cut(sendBounds), r), piece(recv, cut(recvBounds), r)
	}
	return c.exchangeDirect(ctx, OpAllToAll)
}

// AllGather copies each rank r's x[bounds[r]:bounds[r+1]] to the same range of x on all ranks.
func AllGather[E Element](ctx context.Context, c *Comm, x []E, bounds []int) error {
	defer c.begin(ctx, OpAllGather).end()
	return allGather(ctx, c, OpAllGather, x, cut(bounds))
}

func allGather[E Element](ctx context.Context, c *Comm, o Operation, x []E, bounds bounds) error {
	checkBounds(c, len(x), bounds)
	if c.twoLevels() {
		return allGatherByHosts(ctx, c, o, x, bounds)
	}
	c.prepareDirect()
	for r := range c.recv {
		c.recv[r] = piece(x, bounds, r)
		c.count(o, r, len(piece(x, bounds, c.Rank())))
	}
	defer clear(c.recv)
	return c.transport.AllGather(ctx, c.recv[c.Rank()], c.recv)
}

// ReduceScatter replaces this rank's part of x, x[bounds[Rank()]:bounds[Rank()+1]], with its sum
// over all ranks. The rest of x is undefined afterwards.
func ReduceScatter[N Number](ctx context.Context, c *Comm, x []N, bounds []int) error {
	defer c.begin(ctx, OpReduceScatter).end()
	return reduceScatter(ctx, c, OpReduceScatter, x, cut(bounds))
}

// SumMemory returns the number of bytes that this rank keeps for sums and relays of the group; see
// [SumMemory] and [SumMemoryByHosts].
func (c *Comm) SumMemory() int64 { return 8 * int64(len(c.scratch)) }

// segment is the number of bytes of a sum that two ranks exchange at a time: few enough to add them
// while they are in a cache, and enough to make the latency of an exchange negligible.
const segment = 1 << 20

// SumMemory returns the number of bytes that a rank of a group of the given number of ranks keeps
// for sums, if its own part has at most `part` elements of `size` bytes and the ranks are on one
// host.
func SumMemory(ranks, part, size int) int64 {
	return (int64(ranks)*int64(min(segment/size, part)*size) + 7) &^ 7
}

// SumMemoryByHosts is [SumMemory] for sums of two levels: each host has the given number of ranks,
// and sends the given number of partial sums. The parts of all ranks have `part` elements.
func SumMemoryByHosts(ranks, onHost, partial, part, size int) int64 {
	own, relayed := min(segment/size, part), (ranks+onHost-1)/onHost
	packed := 0
	if part > own {
		packed = ranks
	}
	if partial > 1 {
		packed = max(packed, partial*relayed)
	}
	return (int64(onHost*relayed+packed+ranks/onHost*partial)*int64(own*size) + 7) &^ 7
}

func reduceScatter[N Number](ctx context.Context, c *Comm, o Operation, x []N, bounds bounds) error {
	checkBounds(c, len(x), bounds)
	n, rank := c.Size(), c.Rank()
	if n == 1 {
		return nil
	}
	if floats, ok := any(x).([]float32); ok && c.fast != nil {
		for r := range n {
			c.count(o, r, len(piece(x, bounds, r)))
		}
		return c.fast.Sum(ctx, floats[bounds.at(0):bounds.at(n)])
	}
	if c.twoLevels() {
		return reduceScatterByHosts(ctx, c, o, x, bounds)
	}
	longest := bounds.longest(n)
	step := segment / size[N]()
	if need := int(SumMemory(n, bounds.at(rank+1)-bounds.at(rank), size[N]()) / 8); need > len(c.scratch) {
		c.scratch = make([]float64, need)
	}
	c.prepareDirect()
	for at := 0; at < longest; at += step {
		part := func(r int) []N {
			return x[min(bounds.at(r)+at, bounds.at(r+1)):min(bounds.at(r)+at+step, bounds.at(r+1))]
		}
		own := part(rank)
		parts := unsafe.Slice((*N)(unsafe.Pointer(unsafe.SliceData(c.scratch))), n*len(own))
		for r := range n {
			c.send[r] = bytesOf(part(r))
			c.recv[r] = bytesOf(parts[r*len(own) : (r+1)*len(own)])
		}
		// This rank's own part is added directly from x.
		c.send[rank], c.recv[rank] = nil, nil
		if err := c.exchangeDirect(ctx, o); err != nil {
			return err
		}
		total := addUp(summands[N]{values: parts, each: len(own), own: rank, ownValues: own}, n, c.stages)
		if rank != 0 {
			copy(own, total)
		}
	}
	return nil
}

// AllReduce replaces x on all ranks with its sum over all ranks.
func AllReduce[N Number](ctx context.Context, c *Comm, x []N) error {
	n, bounds := c.Size(), evenly(len(x), c.Size())
	defer c.begin(ctx, OpAllReduce).end()
	if err := reduceScatter(ctx, c, OpAllReduce, x, bounds); err != nil {
		return err
	}
	if _, ok := any(x).([]float32); ok && c.fast != nil { // the transport has summed all of x
		for r := range n {
			c.count(OpAllReduce, r, len(piece(x, bounds, c.Rank())))
		}
		return nil
	}
	return allGather(ctx, c, OpAllReduce, x, bounds)
}

// Broadcast copies the root's x to all ranks.
func Broadcast[E Element](ctx context.Context, c *Comm, root int, x []E) error {
	defer c.begin(ctx, OpBroadcast).end()
	if c.twoLevels() {
		return broadcastByHosts(ctx, c, root, bytesOf(x))
	}
	for r := range c.Size() {
		if c.Rank() == root {
			c.count(OpBroadcast, r, len(bytesOf(x)))
		}
	}
	return c.transport.Broadcast(ctx, root, bytesOf(x))
}

// Send sends x to another rank, which must call [Recv] for len(x) elements. It does not wait for
// Recv.
func Send[E Element](ctx context.Context, c *Comm, to int, x []E) error {
	checkPeer(c, to)
	defer c.begin(ctx, OpSend).end()
	c.count(OpSend, to, len(bytesOf(x)))
	return c.transport.Send(ctx, to, bytesOf(x))
}

// Recv fills x with the elements that another rank sends with [Send].
func Recv[E Element](ctx context.Context, c *Comm, from int, x []E) error {
	checkPeer(c, from)
	defer waitsOf(ctx).begin().end()
	return c.transport.Recv(ctx, from, bytesOf(x))
}

// prepareDirect allocates an entry for each rank, for exchanges with all ranks.
func (c *Comm) prepareDirect() {
	if c.send == nil {
		c.send, c.recv = make([][]byte, c.Size()), make([][]byte, c.Size())
	}
}

// exchangeDirect sends c.send[r] to every rank r and fills c.recv[r]. It counts the bytes, and
// clears both slices for the next exchange.
func (c *Comm) exchangeDirect(ctx context.Context, o Operation) error {
	for r, data := range c.send {
		c.count(o, r, len(data))
	}
	err := c.transport.AllToAll(ctx, c.send, c.recv)
	clear(c.send)
	clear(c.recv)
	return err
}

// A Pending is an operation that was started.
type Pending struct {
	f     func() error
	waits *Waits
	done  chan struct{}
	err   error

	caller, own Clock // of the caller of Start, and of f; nil without simulated time
}

// Start runs f, which uses this group, in the background, after all operations started before. f
// gets ctx, but without its [Waits]. Nothing else may use the group until the last of them has
// ended.
func (c *Comm) Start(ctx context.Context, f func(ctx context.Context) error) *Pending {
	background, waits := uncounted(ctx)
	p := &Pending{waits: waits, done: make(chan struct{}), caller: ClockOf(ctx)}
	if p.caller != nil {
		p.own = p.caller.Fork()
		background = WithClock(background, p.own)
	}
	p.f = func() error { return f(background) }
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		p.err = fmt.Errorf("an operation was started on a group that rank %d has left", c.Rank())
		close(p.done)
		return p
	}
	if c.queue == nil {
		queue, ended := make(chan *Pending, 1024), make(chan struct{})
		c.queue, c.ended = queue, ended
		go func() {
			defer close(ended)
			for p := range queue {
				if p.own != nil && c.last != nil {
					p.own.Join(c.last)
				}
				p.err = p.f()
				c.last = p.own
				close(p.done)
			}
		}()
	}
	c.queue <- p
	return p
}

// Wait returns when the operation has ended, with its error.
func (p *Pending) Wait() error {
	defer p.waits.begin().end()
	<-p.done
	if p.own != nil {
		p.caller.Join(p.own)
	}
	return p.err
}

// summands are the terms of sums, one after the other.
type summands[N Number] struct {
	values    []N
	each      int   // elements of a term
	place     []int // of each term in values; nil: in order
	own       int   // the term that is elsewhere, in ownValues; -1: none
	ownValues []N
}

func (s summands[N]) term(k int) []N {
	if k == s.own {
		return s.ownValues
	}
	if s.place != nil {
		k = s.place[k]
	}
	return s.values[k*s.each : (k+1)*s.each]
}

// sumBlock is the number of elements that are added at a time, so that sums are still in the
// first-level cache when the next term is added.
const sumBlock = 2048

// addUp returns the sum of n terms, in stages of the given sizes, each a multiple of the one
// before. The sum is in the memory of the first term; the other terms are undefined afterwards.
func addUp[N Number](s summands[N], n int, stages []int) []N {
	for lo := 0; lo < s.each; lo += sumBlock {
		hi := min(lo+sumBlock, s.each)
		for stage, inner := 0, 1; stage <= len(stages); stage++ {
			size := n
			if stage < len(stages) {
				size = stages[stage]
			}
			for first := 0; first < n; first += size {
				total := s.term(first)[lo:hi]
				if halves, ok := any(total).([]BF16); ok {
					addHalves(halves, any(s).(summands[BF16]), first, size, inner, lo)
					continue
				}
				for k := first + inner; k < first+size; k += inner {
					add(total, s.term(k)[lo:hi])
				}
			}
			inner = size
		}
	}
	return s.term(0)
}

// addHalves adds a block of the terms first+inner, first+2·inner, … below first+size to total,
// which is the block from element lo of term first, in float32, and rounds the sum.
func addHalves(total []BF16, s summands[BF16], first, size, inner, lo int) {
	var sums, terms [sumBlock]float32
	sum, term := sums[:len(total)], terms[:len(total)]
	cpu.Widen(sum, bitsOf(total))
	for k := first + inner; k < first+size; k += inner {
		cpu.Widen(term, bitsOf(s.term(k)[lo:][:len(total)]))
		add(sum, term)
	}
	cpu.BF16(bitsOf(total), sum)
}

func bitsOf(x []BF16) []uint16 {
	return unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(x))), len(x))
}

// add adds src to dst, element by element.
func add[N Number](dst, src []N) {
	src = src[:len(dst)]
	if floats, ok := any(dst).([]float32); ok { // the most frequent case: gradients
		n := addMany(floats, any(src).([]float32))
		dst, src = dst[n:], src[n:]
	}
	for i, v := range src {
		dst[i] += v
	}
}

func size[E Element]() int { return int(unsafe.Sizeof(*new(E))) }

func bytesOf[E Element](x []E) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*size[E]())
}

// bounds divides a vector among the ranks of a group. Rank r has the elements from at(r) to
// at(r+1).
type bounds struct {
	each            []int // of each rank, and the end of the last part; nil: an even division
	elements, ranks int   // of an even division
}

func cut(each []int) bounds { return bounds{each: each} }

func evenly(elements, ranks int) bounds { return bounds{elements: elements, ranks: ranks} }

func (b bounds) at(r int) int {
	if b.each == nil {
		return b.elements * r / b.ranks
	}
	return b.each[r]
}

// longest returns the number of elements of the longest part of n ranks.
func (b bounds) longest(n int) (longest int) {
	if b.each == nil {
		return (b.elements + n - 1) / n
	}
	for r := range n {
		longest = max(longest, b.each[r+1]-b.each[r])
	}
	return longest
}

// piece returns the part of x that belongs to rank r, as bytes.
func piece[E Element](x []E, bounds bounds, r int) []byte {
	return bytesOf(x[bounds.at(r):bounds.at(r+1)])
}

func checkBounds(c *Comm, n int, bounds bounds) {
	if bounds.each == nil && bounds.ranks > 0 {
		return
	}
	each := bounds.each
	ok := len(each) == c.Size()+1 && each[0] >= 0 && each[c.Size()] <= n
	for r := 0; ok && r < c.Size(); r++ {
		ok = each[r] <= each[r+1]
	}
	if !ok {
		panic(fmt.Sprintf("comm: bounds %v do not fit %d elements and %d ranks", each, n, c.Size()))
	}
}

func checkPeer(c *Comm, r int) {
	if r < 0 || r >= c.Size() || r == c.Rank() {
		panic(fmt.Sprintf("comm: invalid message between ranks %d and %d of %d", c.Rank(), r, c.Size()))
	}
}
