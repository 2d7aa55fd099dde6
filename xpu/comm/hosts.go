package comm

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"unsafe"
)

// hosts has the hosts of a group's ranks. Exchanges with several hosts have two levels. On every
// host, each rank relays for an equal part of the group's ranks, in their order: the ranks of a
// host first collect what they send to a rank at its relay, and the relay sends it in one message.
// A gather takes the opposite route. So a rank of n ranks on b hosts, a on each, sends at most
// a-1 + b messages instead of n-1.
type hosts struct {
	*placement
	own   int          // number of this rank's host
	index int          // of this rank on its host
	sums  *partialSums // of floating-point numbers
}

// A placement has the hosts of the ranks of a group.
type placement struct {
	of    []int   // number of each rank's host
	ranks [][]int // of each host, in ascending order

	counts *partialSums // of integers

	mu   sync.Mutex
	sums map[string]*partialSums // of floating-point numbers, by the stages of their sums
}

// partialSums describes the sums that hosts send instead of the terms of their ranks. A partial sum
// of a host has consecutive ranks of the host. If the order of sums does not allow it, each rank is
// a partial sum of its own, and only messages are saved.
type partialSums struct {
	size   []int // ranks of each partial sum of a host
	first  []int // number of partial sums of the hosts before a host, and last of all hosts
	place  []int // place of each partial sum, in the order of sums, in the order of the hosts
	below  []int // stages within a partial sum
	beyond []int // stages of partial sums
}

// Hosts has the host of each rank of a run. Ranks that are goroutines of one process share it, so
// that memory does not grow with the square of their number.
type Hosts struct {
	names []string

	mu     sync.Mutex
	groups map[hostsKey]*placement
}

// A hostsKey identifies a group of a mesh.
type hostsKey struct {
	shape    Shape
	axes     Axes
	group    int
	first, n int // part of the group
}

// NewHosts returns the hosts with the given names, one for each rank of the world.
func NewHosts(names []string) *Hosts {
	return &Hosts{names: names, groups: map[hostsKey]*placement{}}
}

// Names returns the name of the host of each rank. The caller does not change it.
func (h *Hosts) Names() []string { return h.names }

// group returns the placement of n ranks of a rank's group, beginning with the given number.
func (h *Hosts) group(s Shape, rank int, axes Axes, first, n int) *placement {
	for _, axis := range axes.list() {
		if s.Size(axis) == 1 { // the same ranks without this axis
			axes &^= axis
		}
	}
	key := hostsKey{s, axes, s.Index(rank, World&^axes), first, n}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.groups[key] == nil {
		var names []string
		for _, member := range s.Group(rank, axes)[first : first+n] {
			names = append(names, h.names[member])
		}
		h.groups[key] = newPlacement(names)
	}
	return h.groups[key]
}

// newPlacement returns the placement of ranks on hosts with the given names.
func newPlacement(names []string) *placement {
	p := &placement{of: make([]int, len(names)), sums: map[string]*partialSums{}}
	number := map[string]int{}
	for rank, name := range names {
		n, known := number[name]
		if !known {
			n = len(p.ranks)
			number[name], p.ranks = n, append(p.ranks, nil)
		}
		p.of[rank], p.ranks[n] = n, append(p.ranks[n], rank)
	}
	p.counts = &partialSums{first: []int{0}}
	for host, ranks := range p.ranks {
		p.counts.size, p.counts.first = append(p.counts.size, len(ranks)), append(p.counts.first, host+1)
		p.counts.place = append(p.counts.place, host)
	}
	return p
}

// partialSums returns the partial sums of the hosts of floating-point numbers that are added in
// stages.
func (p *placement) partialSums(stages []int) *partialSums {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := fmt.Sprint(stages)
	if p.sums[key] == nil {
		p.sums[key] = p.divide(stages)
	}
	return p.sums[key]
}

func (p *placement) divide(stages []int) *partialSums {
	n := len(p.of)
	unit := 1 // ranks of a partial sum: the largest undivided stage
	for _, size := range stages {
		if divided := slices.ContainsFunc(p.ranks, func(ranks []int) bool {
			for i, rank := range ranks {
				if rank%size != i%size || rank/size != ranks[i-i%size]/size {
					return true
				}
			}
			return len(ranks)%size != 0
		}); !divided {
			unit = size
		}
	}
	sums := &partialSums{first: []int{0}, place: make([]int, n/unit)}
	for host, ranks := range p.ranks {
		for i := 0; i < len(ranks); i += unit {
			sums.place[ranks[i]/unit] = sums.first[host] + i/unit
		}
		sums.size = append(sums.size, unit)
		sums.first = append(sums.first, sums.first[host]+len(ranks)/unit)
	}
	for _, size := range stages {
		switch {
		case size < unit:
			sums.below = append(sums.below, size)
		case size > unit:
			sums.beyond = append(sums.beyond, size/unit)
		}
	}
	return sums
}

// SetHosts sets the name of the host of each rank; all ranks set the same. With several hosts of
// several ranks, exchanges then have two levels: inside a host and between hosts. No result changes
// by a bit. Without SetHosts, all ranks are on one host.
func (c *Comm) SetHosts(names []string) { c.place(newPlacement(names)) }

func (c *Comm) place(p *placement) {
	if len(p.of) != c.Size() {
		panic(fmt.Sprintf("comm: %d hosts for %d ranks", len(p.of), c.Size()))
	}
	own := p.of[c.Rank()]
	index, _ := slices.BinarySearch(p.ranks[own], c.Rank())
	c.hosts = &hosts{placement: p, own: own, index: index}
	c.divideSums()
}

// divideSums sets the partial sums of the hosts.
func (c *Comm) divideSums() {
	if c.hosts != nil {
		c.hosts.sums = c.hosts.partialSums(c.stages)
	}
}

// twoLevels reports whether exchanges have two levels.
func (c *Comm) twoLevels() bool {
	return c.hosts != nil && len(c.hosts.ranks) > 1 && len(c.hosts.ranks) < len(c.hosts.of)
}

// relay returns the rank of a host that relays for a rank.
func (h *hosts) relay(host, rank int) int {
	ranks := h.ranks[host]
	return ranks[rank*len(ranks)/len(h.of)]
}

// relayed returns the ranks [first, end) that the i-th rank of this rank's host relays for.
func (h *hosts) relayed(i int) (first, end int) {
	a, n := len(h.ranks[h.own]), len(h.of)
	return (i*n + a - 1) / a, ((i+1)*n + a - 1) / a
}

// sends adds a piece for another rank to the next exchange.
func (c *Comm) sends(to int, data []byte) {
	if len(data) > 0 {
		c.sent = append(c.sent, Piece{to, data})
	}
}

// receives adds a piece from another rank to the next exchange.
func (c *Comm) receives(from int, data []byte) {
	if len(data) > 0 {
		c.received = append(c.received, Piece{from, data})
	}
}

// exchange sends and receives the pieces that were added since the last exchange. It counts the
// bytes.
//
// The piece that is sent first is the own-th of n equal parts of the pieces. Ranks that send pieces
// to the same ranks have different numbers own, so that they do not all send to the same rank.
func (c *Comm) exchange(ctx context.Context, o Operation, own, n int) (err error) {
	first := own * len(c.sent) / n
	c.sent = append(c.sent, c.sent[:first]...)
	sent := c.sent[first:]
	if t, ok := c.transport.(exchanger); ok {
		for _, p := range sent {
			c.count(o, p.Rank, len(p.Data))
		}
		err = t.Exchange(ctx, sent, c.received)
	} else {
		c.prepareDirect()
		for _, p := range sent {
			c.send[p.Rank] = p.Data
		}
		for _, p := range c.received {
			c.recv[p.Rank] = p.Data
		}
		err = c.exchangeDirect(ctx, o)
	}
	clear(c.sent)
	clear(c.received)
	c.sent, c.received = c.sent[:0], c.received[:0]
	return err
}

// count counts bytes that are sent to another rank.
func (c *Comm) count(o Operation, to, bytes int) {
	switch {
	case to == c.Rank() || bytes == 0:
	case c.hosts != nil && c.hosts.of[to] != c.hosts.own:
		c.traffic[o].between.Add(int64(bytes))
	default:
		c.traffic[o].inside.Add(int64(bytes))
	}
}

// allGatherByHosts gathers a part from each rank at its relay on each host, and then the relays'
// parts inside each host.
func allGatherByHosts[E Element](ctx context.Context, c *Comm, o Operation, x []E, bounds bounds) error {
	h, rank := c.hosts, c.Rank()
	for host := range h.ranks {
		if to := h.relay(host, rank); to != rank {
			c.sends(to, piece(x, bounds, rank))
		}
	}
	first, end := h.relayed(h.index)
	for r := first; r < end; r++ {
		if r != rank {
			c.receives(r, piece(x, bounds, r))
		}
	}
	if err := c.exchange(ctx, o, rank%len(h.ranks), len(h.ranks)); err != nil {
		return err
	}
	for i, r := range h.ranks[h.own] {
		if r != rank {
			from, to := h.relayed(i)
			c.sends(r, bytesOf(x[bounds.at(first):bounds.at(end)]))
			c.receives(r, bytesOf(x[bounds.at(from):bounds.at(to)]))
		}
	}
	return c.exchange(ctx, o, h.index, len(h.ranks[h.own]))
}

// reduceScatterByHosts adds the terms inside each host, as far as the order of sums allows, and
// then the partial sums of the hosts.
func reduceScatterByHosts[N Number](ctx context.Context, c *Comm, o Operation, x []N, bounds bounds) error {
	h, n, rank := c.hosts, c.Size(), c.Rank()
	sums := h.sums
	if _, halves := any(x).([]BF16); !halves && N(1)/2 == 0 {
		sums = h.counts
	}
	a, partial := len(h.ranks[h.own]), sums.first[h.own+1]-sums.first[h.own] // of this host
	total := sums.first[len(h.ranks)]
	longest := bounds.longest(n)
	step := segment / size[N]()
	for at := 0; at < longest; at += step {
		part := func(r int) []N {
			return x[min(bounds.at(r)+at, bounds.at(r+1)):min(bounds.at(r)+at+step, bounds.at(r+1))]
		}
		elements := func(first, end int) (sum int) { // of parts of consecutive ranks
			for r := first; r < end; r++ {
				sum += len(part(r))
			}
			return sum
		}
		complete := longest <= step // the parts of consecutive ranks are then in one piece
		first, end := h.relayed(h.index)
		own, mine := len(part(rank)), elements(first, end)
		packed := 0
		if !complete {
			packed = elements(0, n)
		}
		if partial > 1 {
			packed = max(packed, partial*mine)
		}
		scratch := scratchFor[N](c, a*mine+packed+total*own)
		terms, pack, received := scratch[:a*mine], scratch[a*mine:a*mine+packed], scratch[a*mine+packed:]

		for i, r := range h.ranks[h.own] {
			from, to := h.relayed(i)
			parts := x[bounds.at(from):bounds.at(to)]
			if !complete {
				parts = pack[:0]
				for q := from; q < to; q++ {
					parts = append(parts, part(q)...)
				}
				pack = pack[len(parts):]
			}
			if r == rank {
				copy(terms[i*mine:], parts)
				continue
			}
			c.sends(r, bytesOf(parts))
			c.receives(r, bytesOf(terms[i*mine:(i+1)*mine]))
		}
		if err := c.exchange(ctx, o, h.index, a); err != nil {
			return err
		}
		width := sums.size[h.own]
		for i := range partial {
			addUp(summands[N]{values: terms[i*width*mine : (i+1)*width*mine], each: mine, own: -1}, width, sums.below)
		}

		pack = scratch[a*mine : a*mine+packed]
		begin := 0 // of the part of q
		for q := first; q < end; q++ {
			n := len(part(q))
			parts := terms[begin : begin+n]
			if partial > 1 {
				parts = pack[:0]
				for i := range partial {
					parts = append(parts, terms[i*width*mine+begin:][:n]...)
				}
				pack = pack[len(parts):]
			}
			begin += n
			if q == rank {
				copy(received[sums.first[h.own]*own:], parts)
			} else {
				c.sends(q, bytesOf(parts))
			}
		}
		for host := range h.ranks {
			if from := h.relay(host, rank); from != rank {
				c.receives(from, bytesOf(received[sums.first[host]*own:sums.first[host+1]*own]))
			}
		}
		if err := c.exchange(ctx, o, h.own, len(h.ranks)); err != nil {
			return err
		}
		partials := summands[N]{values: received, each: own, own: -1, place: sums.place}
		copy(part(rank), addUp(partials, total, sums.beyond))
	}
	return nil
}

// allToAllByHosts sends pieces to the relays of their receivers on the sender's host, with their
// lengths, and then all pieces of a host for a rank in one message.
func allToAllByHosts[E Element](ctx context.Context, c *Comm, send []E, sendBounds []int, recv []E,
	recvBounds []int) error {
	h, n, rank := c.hosts, c.Size(), c.Rank()
	local := h.ranks[h.own]
	first, end := h.relayed(h.index)
	width := end - first
	if c.lengths == nil {
		c.lengths = make([]int64, n+len(local)*width)
	}
	// of pieces to each rank; of pieces relayed from each local rank
	own, lengths := c.lengths[:n], c.lengths[n:]
	for r := range own {
		own[r] = int64(sendBounds[r+1] - sendBounds[r])
	}
	for i, r := range local {
		from, to := h.relayed(i)
		if r == rank {
			copy(lengths[i*width:], own[from:to])
			continue
		}
		c.sends(r, bytesOf(own[from:to]))
		c.receives(r, bytesOf(lengths[i*width:(i+1)*width]))
	}
	if err := c.exchange(ctx, OpAllToAll, h.index, len(local)); err != nil {
		return err
	}

	total, apart := 0, 0 // elements to relay, and elements from ranks of a host that are not neighbours
	for _, length := range lengths {
		total += int(length)
	}
	for _, ranks := range h.ranks {
		if !neighbours(ranks) {
			for _, r := range ranks {
				apart += recvBounds[r+1] - recvBounds[r]
			}
		}
	}
	scratch := scratchFor[E](c, 2*total+apart)
	relayed, pack, unordered := scratch[:total], scratch[total:2*total], scratch[2*total:]
	at := 0
	for i, r := range local {
		from, to := h.relayed(i)
		end := at
		for _, length := range lengths[i*width : (i+1)*width] {
			end += int(length)
		}
		parts := send[sendBounds[from]:sendBounds[to]]
		if r == rank {
			copy(relayed[at:end], parts)
		} else {
			c.sends(r, bytesOf(parts))
			c.receives(r, bytesOf(relayed[at:end]))
		}
		at = end
	}
	if err := c.exchange(ctx, OpAllToAll, h.index, len(local)); err != nil {
		return err
	}

	var kept []E // this rank's pieces, if it is its own relay
	for q := first; q < end; q++ {
		parts, at := pack[:0], 0
		for i := range local {
			for to, length := range lengths[i*width : (i+1)*width] {
				if first+to == q {
					parts = append(parts, relayed[at:at+int(length)]...)
				}
				at += int(length)
			}
		}
		pack = pack[len(parts):]
		if q == rank {
			kept = parts
		} else {
			c.sends(q, bytesOf(parts))
		}
	}
	rest := unordered
	for host, ranks := range h.ranks {
		into := recv[recvBounds[ranks[0]]:recvBounds[ranks[len(ranks)-1]+1]]
		if !neighbours(ranks) {
			sum := 0
			for _, r := range ranks {
				sum += recvBounds[r+1] - recvBounds[r]
			}
			into, rest = rest[:sum], rest[sum:]
		}
		if from := h.relay(host, rank); from != rank {
			c.receives(from, bytesOf(into))
		} else {
			copy(into, kept)
		}
	}
	if err := c.exchange(ctx, OpAllToAll, h.own, len(h.ranks)); err != nil {
		return err
	}
	for _, ranks := range h.ranks {
		if !neighbours(ranks) {
			for _, r := range ranks {
				unordered = unordered[copy(recv[recvBounds[r]:recvBounds[r+1]], unordered):]
			}
		}
	}
	return nil
}

// neighbours reports whether ascending ranks are consecutive.
func neighbours(ranks []int) bool { return ranks[len(ranks)-1]-ranks[0] == len(ranks)-1 }

// broadcastByHosts sends the root's data to one rank of each host, and from there to the other
// ranks of the host. Both levels are trees: in each round, each rank that has the data sends it to
// one rank that does not.
func broadcastByHosts(ctx context.Context, c *Comm, root int, data []byte) error {
	h, rank := c.hosts, c.Rank()
	count := len(h.ranks)
	first := func(host int) int { // the rank of a host that gets the data from another host
		if host == h.of[root] {
			return root
		}
		return h.ranks[host][0]
	}
	distance := (h.own - h.of[root] + count) % count // of this host from the root's
	if err := c.tree(ctx, count, distance, rank == first(h.own), data, func(distance int) int {
		return first((h.of[root] + distance) % count)
	}); err != nil {
		return err
	}
	local, most := h.ranks[h.own], 0
	for _, ranks := range h.ranks {
		most = max(most, len(ranks))
	}
	start := slices.Index(local, first(h.own))
	return c.tree(ctx, most, (h.index-start+len(local))%len(local), true, data, func(distance int) int {
		if distance >= len(local) {
			return -1
		}
		return local[(start+distance)%len(local)]
	})
}

// tree sends data from the member with distance 0 to all members, whose distances are below size.
// at returns the rank of a member, or -1 if no member has the distance. All ranks of the group call
// it.
func (c *Comm) tree(ctx context.Context, size, distance int, member bool, data []byte,
	at func(distance int) int) error {
	for step := 1; step < size; step *= 2 {
		switch {
		case !member:
		case distance < step && distance+step < size:
			if to := at(distance + step); to >= 0 {
				c.sends(to, data)
			}
		case distance >= step && distance < 2*step:
			c.receives(at(distance-step), data)
		}
		if err := c.exchange(ctx, OpBroadcast, 0, 1); err != nil {
			return err
		}
	}
	return nil
}

// scratchFor returns scratch memory for n elements.
func scratchFor[E Element](c *Comm, n int) []E {
	if need := (n*size[E]() + 7) / 8; need > len(c.scratch) {
		c.scratch = make([]float64, need)
	}
	return unsafe.Slice((*E)(unsafe.Pointer(unsafe.SliceData(c.scratch))), n)
}
