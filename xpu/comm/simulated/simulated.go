// Package simulated connects ranks that are goroutines of one process, and computes the time that
// their messages would need on a machine of many hosts.
//
// # Simulated time
//
// Each rank has a clock. A message of n bytes occupies its sender, and then its receiver, for
// Message + n/Rate seconds of its [Link]. It may be in transit for Delay seconds between the two. A
// rank sends one message at a time, and receives one at a time, and can do both at the same time
// (the one-port model of R. Hockney, "The communication challenge for MPP", 1994). A rank that
// receives waits until its messages have arrived. [Compute] advances the clock of a rank.
//
// Ranks of a host do not disturb each other: Rate is a rank's share of the host's network.
// Operations that [comm.Comm.Start] runs in the background do not disturb the messages of the rank
// in the foreground.
//
// Times depend only on the network, its seed and the calls of the ranks. They do not depend on the
// order in which goroutines run, if all calls have a context of [World.Context].
package simulated

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"mula/xpu/comm"
	"mula/xpu/comm/pairwise"
)

// A Link is the connection between two ranks.
type Link struct {
	Message float64 // seconds that a message occupies its sender and its receiver, besides its bytes
	Delay   float64 // seconds that a message is in transit, occupying neither
	Rate    float64 // bytes per second of a rank
}

// A Network describes hosts and their connections.
type Network struct {
	Hosts           []string // name of the host of each rank
	Inside, Between Link     // between ranks of a host, and of two hosts

	// Each message and each call of [Compute] takes longer by a share. The shares are drawn evenly
	// from 0 to Noise.
	Noise float64
	Seed  uint64

	Failures []Failure
}

// A Failure ends a rank at its first call of a transport at or after a time.
type Failure struct {
	Rank int
	At   float64 // seconds
}

// A World has the ranks of a simulation.
type World struct {
	network Network
	ranks   []*rank
}

// A rank is the state that all groups of a rank share.
type rank struct {
	clock            *clock
	world            *transport
	failsAt          float64 // seconds; negative for never
	messages, bytes  [2]atomic.Int64
	receivedMessages atomic.Int64
	receivedBytes    atomic.Int64

	mu   sync.Mutex
	free [][]pull // memory of earlier calls
}

// Counts counts the messages of a rank to other ranks.
type Counts struct {
	MessagesInside, MessagesBetween int64 // sent
	BytesInside, BytesBetween       int64
	Received, ReceivedBytes         int64
}

// New returns a world of one rank for each entry of network.Hosts.
func New(network Network) *World {
	n := len(network.Hosts)
	if n == 0 {
		panic("simulated: a network without ranks")
	}
	w := &World{network: network, ranks: make([]*rank, n)}
	members := make([]int, n)
	for r := range w.ranks {
		members[r] = r
		w.ranks[r] = &rank{failsAt: -1}
		w.ranks[r].clock = &clock{world: w, rank: r}
	}
	for _, f := range network.Failures {
		w.ranks[f.Rank].failsAt = f.At
	}
	for r, t := range w.newGroup(members).ranks {
		w.ranks[r].world = t
	}
	return w
}

// Transport returns the transport of a rank in the group of all ranks.
func (w *World) Transport(rank int) comm.Transport { return w.ranks[rank].world }

// Context returns a context whose calls advance the clock of a rank.
func (w *World) Context(ctx context.Context, rank int) context.Context {
	return comm.WithClock(ctx, w.ranks[rank].clock)
}

// Time returns the time of a rank's clock, in seconds. The rank makes no call at the same time.
func (w *World) Time(rank int) float64 { return w.ranks[rank].clock.now }

// Counts returns the messages of a rank since the start, in all groups.
func (w *World) Counts(rank int) Counts {
	r := w.ranks[rank]
	return Counts{r.messages[0].Load(), r.messages[1].Load(), r.bytes[0].Load(), r.bytes[1].Load(),
		r.receivedMessages.Load(), r.receivedBytes.Load()}
}

// Compute advances the clock of a context of [World.Context] by a number of seconds, and by noise.
func Compute(ctx context.Context, seconds float64) {
	if c, ok := comm.ClockOf(ctx).(*clock); ok {
		c.now += seconds * c.noise()
	}
}

// A clock is a [comm.Clock].
type clock struct {
	world *World
	rank  int
	now   float64
	busy  []interval // newest times at which the rank receives messages, in order, with gaps between them

	stream, draws uint64 // of random numbers
	forks         uint64
}

// An interval of time.
type interval struct{ begin, end float64 }

// mostIntervals is the number of intervals that a clock keeps. A message that was sent before the
// first of them is received as if the rank had received messages all the time until then.
const mostIntervals = 32

func (c *clock) Fork() comm.Clock {
	c.forks++
	return &clock{world: c.world, rank: c.rank, now: c.now, busy: slices.Clone(c.busy),
		stream: mix(c.stream + c.forks)}
}

func (c *clock) Join(other comm.Clock) {
	o := other.(*clock)
	c.now = max(c.now, o.now)
	if n := len(o.busy); n > 0 && (len(c.busy) == 0 || c.busy[len(c.busy)-1].end < o.busy[n-1].end) {
		c.busy = append(c.busy[:0], o.busy...)
	}
}

// receive waits for a message that arrives at a time and occupies the rank for a number of seconds.
// The rank receives it in the first gap between other messages that is long enough, because it may
// ask for messages in another order than they arrive.
func (c *clock) receive(sent, cost float64) {
	i := len(c.busy)
	for i > 0 && c.busy[i-1].end > sent {
		i--
	}
	begin := sent // in the gap before interval i, or later
	if i == 0 && len(c.busy) == mostIntervals {
		begin = max(begin, c.busy[0].end)
		i++
	}
	for ; i < len(c.busy) && c.busy[i].begin < begin+cost; i++ {
		begin = max(begin, c.busy[i].end)
	}
	end := begin + cost
	switch {
	case i > 0 && c.busy[i-1].end == begin:
		c.busy[i-1].end = end
	default:
		if len(c.busy) == mostIntervals {
			c.busy = slices.Delete(c.busy, 0, 1)
			i--
		}
		c.busy = slices.Insert(c.busy, i, interval{begin, end})
	}
	c.now = max(c.now, end)
}

// noise returns the factor of the next duration.
func (c *clock) noise() float64 {
	if c.world.network.Noise == 0 {
		return 1
	}
	c.draws++
	bits := mix(mix(mix(c.world.network.Seed+uint64(c.rank))+c.stream) + c.draws)
	return 1 + c.world.network.Noise*float64(bits>>11)/(1<<53)
}

// mix is the output function of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// A group is the state that the ranks of a group share.
type group struct {
	world   *World
	members []int // ranks in the world
	ranks   []*transport
	waiting atomic.Int32 // ranks that wait for messages
	leaving atomic.Bool  // some rank has left

	mu     sync.Mutex
	err    error         // why the group is unusable
	broken chan struct{} // closed with err
	parts  []*group
	split  *meeting // in progress; nil for none
}

func (w *World) newGroup(members []int) *group {
	g := &group{world: w, members: members, ranks: make([]*transport, len(members)), broken: make(chan struct{})}
	for r, member := range members {
		t := &transport{group: g, state: w.ranks[member], own: w.ranks[member].clock, wake: make(chan struct{}, 1)}
		t.Group = pairwise.NewGroup("simulated", r, len(members), t)
		g.ranks[r] = t
	}
	return g
}

// fail makes the group, and all groups split off from it, unusable. The first error is kept.
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

// A transport is the end of a rank in a group.
type transport struct {
	pairwise.Group
	group *group
	state *rank
	own   *clock // for calls whose context has no clock
	clock *clock // of the call in progress
	parts []*transport
	wake  chan struct{} // receives a token when the call in progress can end

	mu     sync.Mutex
	pulls  []pull // messages of the call in progress, by sender once they are posted
	posted bool   // other ranks may fill pulls
	open   int    // pulls that are not filled
	early  []letter
	failed error // of the call in progress
	left   atomic.Bool
}

// A pull is a message that a call receives.
type pull struct {
	letter
	filled bool
}

// A letter is a message: in transit with a copy of its data, or expected with memory for it.
type letter struct {
	from int32
	op   pairwise.Operation
	data []byte
	sent float64 // when it reaches the receiver, if the receiver is free
	cost float64 // seconds that it occupies the receiver
}

func (t *transport) Name() string { return "simulated" }

// Begin starts a call.
func (t *transport) Begin(ctx context.Context) error {
	select {
	case <-t.group.broken:
		return t.group.err
	default:
	}
	if t.left.Load() {
		return t.gone(t.Rank())
	}
	if ctx.Err() != nil {
		return t.giveUp(ctx)
	}
	if t.clock, _ = comm.ClockOf(ctx).(*clock); t.clock == nil {
		t.clock = t.own
	}
	if s := t.state; s.failsAt >= 0 && t.clock.now >= s.failsAt {
		s.world.Close()
		return fmt.Errorf("simulated: rank %d failed at %g s", s.world.Rank(), s.failsAt)
	}
	return nil
}

// giveUp ends the group because of a done context.
func (t *transport) giveUp(ctx context.Context) error {
	t.group.fail(fmt.Errorf("simulated: rank %d of %d gave up: %w: %w", t.Rank(), t.Size(), ctx.Err(),
		comm.ErrPeerLost))
	return ctx.Err()
}

// gone is the error about a rank that has left.
func (t *transport) gone(rank int) error {
	return fmt.Errorf("simulated: rank %d of %d has left: %w", rank, t.Size(), comm.ErrPeerLost)
}

// Push sends data to another rank.
func (t *transport) Push(to int, op pairwise.Operation, data []byte) {
	if !t.posted && len(t.pulls) > 0 {
		t.post()
	}
	n, c := &t.group.world.network, t.clock
	link, between := n.Inside, 0
	if n.Hosts[t.group.members[t.Rank()]] != n.Hosts[t.group.members[to]] {
		link, between = n.Between, 1
	}
	cost := (link.Message + float64(len(data))/link.Rate) * c.noise()
	l := letter{from: int32(t.Rank()), op: op, data: data, sent: c.now + link.Delay, cost: cost}
	c.now += cost
	t.state.messages[between].Add(1)
	t.state.bytes[between].Add(int64(len(data)))
	t.group.ranks[to].deliver(l)
}

// deliver fills the pull for a message, or keeps a copy of the message.
func (t *transport) deliver(l letter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.posted {
		if i, found := t.find(l.from); found && !t.pulls[i].filled {
			t.fill(&t.pulls[i], l)
			return
		}
	}
	if len(l.data) > 0 {
		l.data = slices.Clone(l.data)
	}
	t.early = append(t.early, l)
}

// find returns the number of the pull from a rank. The caller has locked mu.
func (t *transport) find(from int32) (int, bool) {
	return slices.BinarySearchFunc(t.pulls, from, func(p pull, from int32) int { return cmp.Compare(p.from, from) })
}

// fill completes a pull with a message. The caller has locked mu.
func (t *transport) fill(p *pull, l letter) {
	switch {
	case p.op != l.op:
		t.end(fmt.Errorf("simulated: rank %d receives %s from rank %d, but expects %s", t.Rank(), l.op, l.from,
			p.op))
	case len(p.data) != len(l.data):
		t.end(fmt.Errorf("simulated: rank %d sends %d bytes to rank %d, which expects %d", l.from, len(l.data),
			t.Rank(), len(p.data)))
	default:
		copy(p.data, l.data)
		p.sent, p.cost, p.filled = l.sent, l.cost, true
		if t.open--; t.open == 0 {
			t.awake()
		}
	}
}

// end ends the call in progress with an error. The caller has locked mu.
func (t *transport) end(err error) {
	if t.failed == nil {
		t.failed = err
	}
	t.awake()
}

// awake wakes the rank, which may not sleep yet.
func (t *transport) awake() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// Pull receives data from another rank.
func (t *transport) Pull(from int, op pairwise.Operation, data []byte) {
	if t.pulls == nil {
		t.pulls = t.state.take()
	}
	t.pulls = append(t.pulls, pull{letter: letter{from: int32(from), op: op, data: data}})
}

// take returns memory for pulls, and put returns the memory.
func (r *rank) take() []pull {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.free)
	if n == 0 {
		return nil
	}
	pulls := r.free[n-1]
	r.free = r.free[:n-1]
	return pulls
}

func (r *rank) put(pulls []pull) {
	clear(pulls)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free = append(r.free, pulls[:0])
}

// post lets other ranks fill the pulls of the call in progress.
func (t *transport) post() {
	byRank := func(a, b pull) int { return cmp.Compare(a.from, b.from) }
	if !slices.IsSortedFunc(t.pulls, byRank) {
		slices.SortFunc(t.pulls, byRank)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.posted, t.open, t.failed = true, len(t.pulls), nil
	kept := t.early[:0]
	for _, l := range t.early {
		if i, found := t.find(l.from); found && !t.pulls[i].filled && t.failed == nil {
			t.fill(&t.pulls[i], l)
		} else {
			kept = append(kept, l)
		}
	}
	clear(t.early[len(kept):])
	if t.early = kept; len(kept) == 0 {
		t.early = nil
	}
}

// Wait waits for the messages of the call in progress.
func (t *transport) Wait(ctx context.Context) error {
	if len(t.pulls) == 0 {
		return nil
	}
	if !t.posted {
		t.post()
	}
	g := t.group
	g.waiting.Add(1)
	if g.leaving.Load() {
		t.mu.Lock()
		for _, p := range t.pulls {
			if !p.filled && g.ranks[p.from].left.Load() && t.open > 0 {
				t.end(t.gone(int(p.from)))
			}
		}
		t.mu.Unlock()
	}
	canceled := false
	for {
		t.mu.Lock()
		done := t.open == 0 || t.failed != nil
		t.mu.Unlock()
		if done {
			break
		}
		select {
		case <-t.wake:
			continue
		case <-g.broken:
		case <-ctx.Done():
			canceled = true
		}
		break
	}
	g.waiting.Add(-1)

	t.mu.Lock()
	pulls, open, err := t.pulls, t.open, t.failed
	t.pulls, t.posted = nil, false
	select {
	case <-t.wake: // of this call
	default:
	}
	t.mu.Unlock()
	defer t.state.put(pulls)
	switch {
	case open == 0 && err == nil:
		t.receive(pulls)
		return nil
	case t.left.Load():
		return t.gone(t.Rank())
	case err != nil:
		return g.fail(err)
	}
	select {
	case <-g.broken:
		return g.err
	default:
	}
	if !canceled {
		return errors.New("simulated: a wait ended without a reason")
	}
	return t.giveUp(ctx)
}

// receive advances the clock to the end of the last of the messages, and counts them.
func (t *transport) receive(pulls []pull) {
	c, bytes := t.clock, 0
	slices.SortFunc(pulls, func(a, b pull) int {
		return cmp.Or(cmp.Compare(a.sent, b.sent), cmp.Compare(a.from, b.from))
	})
	for i := range pulls {
		c.receive(pulls[i].sent, pulls[i].cost)
		bytes += len(pulls[i].data)
	}
	t.state.receivedMessages.Add(int64(len(pulls)))
	t.state.receivedBytes.Add(int64(bytes))
}

func (t *transport) Send(ctx context.Context, to int, data []byte) error {
	if err := t.Begin(ctx); err != nil {
		return err
	}
	t.Push(to, pairwise.Send, data)
	return nil
}

// A meeting is a split in progress.
type meeting struct {
	arrived int
	votes   []vote
	time    float64       // of the last rank that arrived
	done    chan struct{} // closed when all ranks have arrived
}

// A vote is the part of a rank in a split.
type vote struct {
	present    bool
	color, key int
	part       *transport
}

// Split returns the rank's transport in its new group. No message is sent. In simulated time, all
// ranks wait for the last one.
func (t *transport) Split(ctx context.Context, color, key int) (comm.Transport, error) {
	if err := t.Begin(ctx); err != nil {
		return nil, err
	}
	g := t.group
	g.mu.Lock()
	if g.leaving.Load() {
		for r := range g.ranks {
			if g.ranks[r].left.Load() {
				g.mu.Unlock()
				return nil, g.fail(t.gone(r))
			}
		}
	}
	if g.split == nil {
		g.split = &meeting{votes: make([]vote, t.Size()), done: make(chan struct{})}
	}
	m := g.split
	m.votes[t.Rank()] = vote{present: true, color: color, key: key}
	m.time = max(m.time, t.clock.now)
	if m.arrived++; m.arrived == t.Size() {
		g.split = nil
		g.divide(m)
		close(m.done)
	}
	g.mu.Unlock()
	select {
	case <-m.done:
	case <-g.broken:
	case <-ctx.Done():
	}
	select {
	case <-m.done:
	default:
		select {
		case <-g.broken:
			return nil, g.err
		default:
			return nil, t.giveUp(ctx)
		}
	}
	t.clock.now = max(t.clock.now, m.time)
	part := m.votes[t.Rank()].part
	if part == nil {
		return nil, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	part.own = t.clock.Fork().(*clock)
	t.parts = append(t.parts, part)
	return part, nil
}

// divide creates the groups of a split. The caller has locked mu.
func (g *group) divide(m *meeting) {
	colors := map[int][]int{}
	for r, v := range m.votes {
		if v.color >= 0 {
			colors[v.color] = append(colors[v.color], r)
		}
	}
	for _, ranks := range colors {
		slices.SortStableFunc(ranks, func(a, b int) int { return cmp.Compare(m.votes[a].key, m.votes[b].key) })
		members := make([]int, len(ranks))
		for i, r := range ranks {
			members[i] = g.members[r]
		}
		part := g.world.newGroup(members)
		g.parts = append(g.parts, part)
		for i, r := range ranks {
			m.votes[r].part = part.ranks[i]
		}
	}
}

func (t *transport) Close() error {
	if t.left.Swap(true) {
		return nil
	}
	t.mu.Lock()
	t.end(t.gone(t.Rank())) // a call in another goroutine
	parts := t.parts
	t.mu.Unlock()
	for _, part := range parts {
		part.Close()
	}
	g := t.group
	g.leaving.Store(true)
	g.mu.Lock()
	missing := g.split != nil && !g.split.votes[t.Rank()].present
	g.mu.Unlock()
	if missing {
		g.fail(t.gone(t.Rank()))
	}
	if g.waiting.Load() == 0 {
		return nil
	}
	for _, other := range g.ranks {
		other.mu.Lock()
		if other.posted {
			if i, found := other.find(int32(t.Rank())); found && !other.pulls[i].filled {
				other.end(other.gone(t.Rank()))
			}
		}
		other.mu.Unlock()
	}
	return nil
}
