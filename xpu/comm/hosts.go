package comm

import (
	"context"
	"fmt"
	"slices"
	"unsafe"
)

// hosts has the hosts of a group's ranks. Exchanges with several hosts have two levels. On every
// host, each rank relays for an equal part of the group's ranks, in their order: the ranks of a
// host first collect what they send to a rank at its relay, and the relay sends it in one message.
// A gather takes the opposite route. So a rank of n ranks on b hosts, a on each, sends at most
// a-1 + b messages instead of n-1.
type hosts struct {
	of    []int   // number of each rank's host
	ranks [][]int // of each host, in ascending order
	own   int     // number of this rank's host
	index int     // of this rank on its host

	sums, counts partialSums // of floating-point numbers, and of integers
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

// SetHosts sets the name of the host of each rank; all ranks set the same. With several hosts of
// several ranks, exchanges then have two levels: inside a host and between hosts. No result changes
// by a bit. Without SetHosts, all ranks are on one host.
func (c *Comm) SetHosts(names []string) {
	if len(names) != c.Size() {
		panic(fmt.Sprintf("comm: %d hosts for %d ranks", len(names), c.Size()))
	}
	h := &hosts{of: make([]int, len(names))}
	number := map[string]int{}
	for rank, name := range names {
		n, known := number[name]
		if !known {
			n = len(h.ranks)
			number[name], h.ranks = n, append(h.ranks, nil)
		}
		if rank == c.Rank() {
			h.own, h.index = n, len(h.ranks[n])
		}
		h.of[rank], h.ranks[n] = n, append(h.ranks[n], rank)
	}
	c.hosts = h
	c.divideSums()
}

// divideSums sets the partial sums of the hosts.
func (c *Comm) divideSums() {
	h := c.hosts
	if h == nil {
		return
	}
	n := len(h.of)
	unit := 1 // ranks of a partial sum of floating-point numbers: the largest undivided stage
	for _, size := range c.stages {
		if divided := slices.ContainsFunc(h.ranks, func(ranks []int) bool {
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
	h.sums, h.counts = partialSums{first: []int{0}, place: make([]int, n/unit)}, partialSums{first: []int{0}}
	for host, ranks := range h.ranks {
		for i := 0; i < len(ranks); i += unit {
			h.sums.place[ranks[i]/unit] = h.sums.first[host] + i/unit
		}
		h.sums.size = append(h.sums.size, unit)
		h.sums.first = append(h.sums.first, h.sums.first[host]+len(ranks)/unit)
		h.counts.size, h.counts.first = append(h.counts.size, len(ranks)), append(h.counts.first, host+1)
		h.counts.place = append(h.counts.place, host)
	}
	for _, size := range c.stages {
		switch {
		case size < unit:
			h.sums.below = append(h.sums.below, size)
		case size > unit:
			h.sums.beyond = append(h.sums.beyond, size/unit)
		}
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

// exchange sends c.send[r] to every rank r and fills c.recv[r]. It counts the bytes, and clears
// both slices for the next exchange.
func (c *Comm) exchange(ctx context.Context, o Operation) error {
	for r, data := range c.send {
		c.count(o, r, len(data))
	}
	err := c.transport.AllToAll(ctx, c.send, c.recv)
	clear(c.send)
	clear(c.recv)
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
func allGatherByHosts[E Element](ctx context.Context, c *Comm, o Operation, x []E, bounds []int) error {
	h, rank := c.hosts, c.Rank()
	for host := range h.ranks {
		if to := h.relay(host, rank); to != rank {
			c.send[to] = piece(x, bounds, rank)
		}
	}
	first, end := h.relayed(h.index)
	for r := first; r < end; r++ {
		if r != rank {
			c.recv[r] = piece(x, bounds, r)
		}
	}
	if err := c.exchange(ctx, o); err != nil {
		return err
	}
	for i, r := range h.ranks[h.own] {
		if r != rank {
			from, to := h.relayed(i)
			c.send[r], c.recv[r] = bytesOf(x[bounds[first]:bounds[end]]), bytesOf(x[bounds[from]:bounds[to]])
		}
	}
	return c.exchange(ctx, o)
}

// reduceScatterByHosts adds the terms inside each host, as far as the order of sums allows, and
// then the partial sums of the hosts.
func reduceScatterByHosts[N Number](ctx context.Context, c *Comm, o Operation, x []N, bounds []int) error {
	h, n, rank := c.hosts, c.Size(), c.Rank()
	sums := &h.sums
	if _, halves := any(x).([]BF16); !halves && N(1)/2 == 0 {
		sums = &h.counts
	}
	a, partial := len(h.ranks[h.own]), sums.first[h.own+1]-sums.first[h.own] // of this host
	total := sums.first[len(h.ranks)]
	longest := longestPart(bounds)
	step := segment / size[N]()
	for at := 0; at < longest; at += step {
		part := func(r int) []N {
			return x[min(bounds[r]+at, bounds[r+1]):min(bounds[r]+at+step, bounds[r+1])]
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
			parts := x[bounds[from]:bounds[to]]
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
			c.send[r], c.recv[r] = bytesOf(parts), bytesOf(terms[i*mine:(i+1)*mine])
		}
		if err := c.exchange(ctx, o); err != nil {
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
				c.send[q] = bytesOf(parts)
			}
		}
		for host := range h.ranks {
			if from := h.relay(host, rank); from != rank {
				c.recv[from] = bytesOf(received[sums.first[host]*own : sums.first[host+1]*own])
			}
		}
		if err := c.exchange(ctx, o); err != nil {
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
		c.send[r], c.recv[r] = bytesOf(own[from:to]), bytesOf(lengths[i*width:(i+1)*width])
	}
	if err := c.exchange(ctx, OpAllToAll); err != nil {
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
			c.send[r], c.recv[r] = bytesOf(parts), bytesOf(relayed[at:end])
		}
		at = end
	}
	if err := c.exchange(ctx, OpAllToAll); err != nil {
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
			c.send[q] = bytesOf(parts)
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
			c.recv[from] = bytesOf(into)
		} else {
			copy(into, kept)
		}
	}
	if err := c.exchange(ctx, OpAllToAll); err != nil {
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
				c.send[to] = data
			}
		case distance >= step && distance < 2*step:
			c.recv[at(distance-step)] = data
		}
		if err := c.exchange(ctx, OpBroadcast); err != nil {
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
