package numpy

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"
)

// The blocked shuffle replaces random access to an array by sequential access. The array is cut
// into blocks that fit the second-level cache. The swap of position i with a position j of another
// block becomes a message to that block: "store this value at j, and send the old value to i".
// Position i, which no later step changes, stores the block that it sent the message to.
//
//  - A block's messages wait in its queue, in the order of the steps. All are delivered at once,
//    before the block's own steps. Every message to a block comes from a higher position, and
//    therefore from an earlier step, so the block then has the same contents as in the plain
//    loop. A delivered message holds the value for its sender.
//  - A position's value is fetched when all messages have been delivered. Queue and positions are
//    both in descending order, so the next message of the queue that position i stores is i's.
//
// A swap within a block is executed at once. Its result goes through the queue too, already
// delivered, so that every position has a value to fetch and any content can be shuffled.
//
// The blocks are processed in windows, from the last to the first. After a window's own steps, its
// messages to lower blocks are delivered and its values are fetched. So queues hold only the
// messages of one window: one for each of its positions.
//
// Own steps are sequential, but while one thread executes a block's steps, another can deliver the
// messages for the next block that have been sent so far. Two threads therefore alternate: each
// delivers to a block, waits until the block above is done, delivers the few new messages, executes
// the block's own steps, and signals the other thread.

// A group is 16 messages. Whole groups are written with non-temporal stores.
type group[T element] struct {
	at    [groupMessages]uint32 // position in the block
	value [groupMessages]T
}

// A queue is a list of chunks from a common store. There are never more full chunks than the
// window's messages fill, plus one partial chunk for each queue, so no queue can overflow, whatever
// is drawn.
const (
	groupMessages = 16
	chunkGroups   = 64
	chunkMessages = groupMessages * chunkGroups
)

// queues holds the messages of one window, by block. A message's number is its index in the store.
type queues[T element] struct {
	groups  []group[T] // the store
	link    []uint32   // the chunk that follows a full one
	tail    []uint64   // by block: the number of its next message
	done    []uint64   // by block: the number of the next message to deliver
	fresh   uint64     // the first free chunk
	staging []group[T] // by block: the group that is being filled
}

// clear empties the queues and gives each block its first chunk.
func (q *queues[T]) clear(blocks int) {
	q.fresh = uint64(blocks)
	for b := range blocks {
		first := uint64(b) * chunkMessages
		q.tail[b], q.done[b] = first, first
	}
}

// store copies a block's partial group from the staging area to the store.
func (q *queues[T]) store(b int) {
	if t := q.tail[b]; t%groupMessages != 0 {
		q.groups[t/groupMessages] = q.staging[b]
	}
}

// unstore copies a block's partial group back to the staging area.
func (q *queues[T]) unstore(b int) {
	if t := q.tail[b]; t%groupMessages != 0 {
		q.staging[b] = q.groups[t/groupMessages]
	}
}

// deliver delivers all messages to block b, which starts at a[0].
func (q *queues[T]) deliver(a []T, b int) {
	q.store(b)
	q.deliverTo(a, b, q.tail[b])
	q.unstore(b)
}

// deliverTo delivers the messages before number end. Their groups are full, except that the last
// group may be a stored partial group.
func (q *queues[T]) deliverTo(a []T, b int, end uint64) {
	for at := q.done[b]; at != end; {
		chunk := at / chunkMessages
		n := chunkMessages - at%chunkMessages
		if chunk == end/chunkMessages {
			n = end - at
		}
		deliver(a, q.groups[at/groupMessages:(chunk+1)*chunkGroups], int(n))
		if at += n; at%chunkMessages == 0 {
			at = uint64(q.link[chunk]) * chunkMessages
		}
	}
	q.done[b] = end
}

// sendGo executes the steps of positions i, i-1, … of a block with these partners, and sends
// messages for swaps with other blocks.
func sendGo[T element](q *queues[T], a []T, i int, partners []uint32, block int, shift uint) {
	mask := uint32(1)<<shift - 1
	for _, j := range partners {
		v, to := a[i], int(j>>shift)
		if to == block {
			v, a[j] = a[j], v
		}
		a[i] = T(to)
		i--
		t := q.tail[to]
		g, slot := &q.staging[to], t%groupMessages
		g.at[slot], g.value[slot] = j&mask, v
		q.tail[to] = t + 1
		if slot < groupMessages-1 {
			continue
		}
		q.groups[t/groupMessages] = *g
		if (t+1)%chunkMessages == 0 {
			q.link[t/chunkMessages] = uint32(q.fresh)
			q.tail[to] = q.fresh * chunkMessages
			q.fresh++
		}
	}
}

// deliverGo delivers the first count messages of the groups to a block.
func deliverGo[T element](block []T, groups []group[T], count int) {
	for g := range groups {
		group := &groups[g]
		for k := range min(count, groupMessages) {
			at := group.at[k]
			group.value[k], block[at] = block[at], group.value[k]
		}
		if count -= groupMessages; count <= 0 {
			return
		}
	}
}

// fetchGo replaces the queue numbers in the elements by their values, from the last to the first.
// head holds, by block, the number of the next message to fetch.
func fetchGo[T element](q *queues[T], head []uint64, a []T) {
	for i := len(a) - 1; i >= 0; i-- {
		from := a[i]
		h := head[from]
		a[i] = q.groups[h/groupMessages].value[h%groupMessages]
		if h++; h%chunkMessages == 0 {
			h = uint64(q.link[h/chunkMessages-1]) * chunkMessages
		}
		head[from] = h
	}
}

// A plan is how a blocked shuffle is divided.
type plan struct {
	shift   uint // a block has 1<<shift elements
	window  int  // blocks in a window
	threads int
}

// blocks is the state of a blocked shuffle.
type blocks[T element] struct {
	plan
	a      []T
	src    Source
	queues queues[T]
	batch  [partnerBatch]uint32
	drawn  []uint32 // partners of the next positions, drawn in a batch

	// For fetching, the blocks of a window are divided into parts, one per thread. heads holds, for
	// each part, the position in each queue where fetching starts: the length of the queue when the
	// block above the part was done.
	heads [][]uint64
}

// shuffleBlocked is Shuffle for up to 2³² elements, in blocks. If emit is not nil, it passes the
// result to emit at the end.
func shuffleBlocked[T element](ctx context.Context, src Source, a []T, p plan, memory *scratch,
	emit func(first int, block []T) error) error {
	count := (len(a) + 1<<p.shift - 1) >> p.shift
	p.window = min(p.window, count)
	s := &blocks[T]{plan: p, a: a, src: src, queues: newQueues[T](memory, count,
		p.window<<p.shift/chunkMessages+count+1)}
	for range p.threads {
		s.heads = append(s.heads, make([]uint64, count))
	}
	for high := count; high > 0; high -= p.window {
		low := max(high-p.window, 0)
		s.queues.clear(high)
		s.steps(ctx, low, high)
		s.deliver(ctx, low)
		// If ctx is done, the array is incomplete and is not emitted.
		if err := ctx.Err(); err != nil {
			return err
		}
		if emit == nil {
			s.fetch(ctx, low, high)
			if err := ctx.Err(); err != nil {
				return err
			}
		} else if err := s.emit(ctx, low, high, emit); err != nil {
			return err
		}
	}
	return nil
}

// first returns the first position of block b.
func (s *blocks[T]) first(b int) int { return min(b<<s.shift, len(s.a)) }

// part returns the first block of a thread's part of blocks [low, high).
func (s *blocks[T]) part(thread, low, high int) int { return low + (high-low)*thread/s.threads }

// parallel runs f(0) … f(threads-1) at once.
func (s *blocks[T]) parallel(f func(thread int)) {
	var others sync.WaitGroup
	for thread := 1; thread < s.threads; thread++ {
		others.Go(func() { f(thread) })
	}
	f(0)
	others.Wait()
}

// steps executes the steps of blocks [low, high), unless ctx is done.
func (s *blocks[T]) steps(ctx context.Context, low, high int) {
	q := &s.queues
	copy(s.heads[s.threads-1], q.tail[:high])
	turns := make([]chan struct{}, s.threads)
	for i := range turns {
		turns[i] = make(chan struct{}, 1)
	}
	turns[0] <- struct{}{}
	s.parallel(func(thread int) {
		// messages to the thread's next block when its last block was done; whole groups only,
		// because other blocks still fill the last group
		var sent uint64
		for b := high - 1 - thread; b >= low; b -= s.threads {
			if b+s.threads < high {
				q.deliverTo(s.a[s.first(b):], b, sent)
			}
			<-turns[thread]
			if ctx.Err() == nil {
				s.own(b)
			}
			for part := 1; part < s.threads; part++ {
				if s.part(part, low, high) == b {
					copy(s.heads[part-1], q.tail[:high])
				}
			}
			if next := b - s.threads; next >= low {
				sent = q.tail[next] &^ (groupMessages - 1)
			}
			turns[(thread+1)%s.threads] <- struct{}{}
		}
	})
}

// own executes the steps of block b.
func (s *blocks[T]) own(b int) {
	q, first := &s.queues, s.first(b)
	q.deliver(s.a[first:], b)
	for i := s.first(b+1) - 1; i >= max(first, 1); {
		if len(s.drawn) == 0 {
			s.drawn = s.batch[:s.src.partners(s.batch[:], uint32(i))]
		}
		n := min(len(s.drawn), i-max(first, 1)+1)
		send(q, s.a, i, s.drawn[:n], b, s.shift)
		s.drawn = s.drawn[n:]
		i -= n
	}
	q.store(b)
}

// deliver delivers the messages to the blocks below high, unless ctx is done.
func (s *blocks[T]) deliver(ctx context.Context, high int) {
	s.parallel(func(thread int) {
		for b := s.part(thread+1, 0, high) - 1; b >= s.part(thread, 0, high) && ctx.Err() == nil; b-- {
			s.queues.deliver(s.a[s.first(b):], b)
		}
	})
}

// pieceElements is the number of elements that are fetched, and emitted, at a time.
const pieceElements = 1 << 15

// fetch fetches the values of blocks [low, high), unless ctx is done.
func (s *blocks[T]) fetch(ctx context.Context, low, high int) {
	s.parallel(func(thread int) {
		bottom := s.first(s.part(thread, low, high))
		for end := s.first(s.part(thread+1, low, high)); end > bottom && ctx.Err() == nil; {
			end = s.piece(s.heads[thread], bottom, end)
		}
	})
}

// piece fetches the values of the last piece of positions [bottom, end), and returns its start.
func (s *blocks[T]) piece(head []uint64, bottom, end int) int {
	begin := max(end-pieceElements, bottom)
	fetch(&s.queues, head, s.a[max(begin, 1):end]) // position 0 has no step
	return begin
}

// emit fetches the values of blocks [low, high) and emits them, on two threads if there are more
// than one.
func (s *blocks[T]) emit(ctx context.Context, low, high int, emit func(first int, block []T) error) error {
	head, bottom, top := s.heads[s.threads-1], s.first(low), s.first(high)
	var fetched chan int // the starts of pieces
	var failed atomic.Bool
	if s.threads > 1 {
		fetched = make(chan int, 8)
		go func() {
			defer close(fetched)
			for end := top; end > bottom && !failed.Load(); {
				end = s.piece(head, bottom, end)
				fetched <- end
			}
		}()
	}
	for end := top; end > bottom; {
		var begin int
		if s.threads > 1 {
			begin = <-fetched
		} else {
			begin = s.piece(head, bottom, end)
		}
		err := ctx.Err()
		if err == nil {
			err = emit(begin, s.a[begin:end])
		}
		if err != nil {
			failed.Store(true)
			if s.threads > 1 {
				for range fetched { // it ends soon
				}
			}
			return err
		}
		end = begin
	}
	return nil
}

// newQueues creates queues in memory for the given numbers of blocks and chunks.
func newQueues[T element](memory *scratch, blocks, chunks int) queues[T] {
	n := blocks + chunks*chunkGroups
	all := memory.bytes(n * int(unsafe.Sizeof(group[T]{})))
	groups := unsafe.Slice((*group[T])(unsafe.Pointer(&all[0])), n)
	return queues[T]{
		staging: groups[:blocks:blocks],
		groups:  groups[blocks:],
		link:    make([]uint32, chunks),
		tail:    make([]uint64, blocks),
		done:    make([]uint64, blocks),
	}
}

// scratch is memory that is kept between shuffles.
type scratch struct {
	memory  []byte
	release func()
}

// bytes returns n bytes of memory with arbitrary contents.
func (s *scratch) bytes(n int) []byte {
	if n > len(s.memory) {
		s.free()
		s.memory, s.release = Aligned(n)
	}
	return s.memory[:n]
}

func (s *scratch) free() {
	if s.release != nil {
		s.release()
	}
	*s = scratch{}
}
