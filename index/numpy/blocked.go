package numpy

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"
)

// The blocked shuffle exchanges random access to an array for streams. The array is cut into blocks
// that fit the second-level cache. The swap of position i with a position j of another block
// becomes a message to that block: "put this value at j, what was there belongs to i". Position i,
// which no later step touches, remembers to which block it was sent.
//
//   - A block's messages wait in its queue, in the order of the steps. They are delivered, all at once, before the block's own steps: every
//     message to a block comes from a higher position, hence from an earlier step, so the block then holds what it would have held.
//     A delivered message carries the value that its sender is to get.
//   - A position's value is fetched when all messages have been delivered. Queue and positions being in the same order, descending, the next
//     message of the queue that position i remembers is i's.
//
// A swap within a block is done at once; its result goes through the queue too, already delivered,
// so that every position has something to fetch and any content can be shuffled.
//
// The blocks are worked on in windows, from the last to the first. After a window's own steps its
// messages to lower blocks are delivered and its values fetched, so that queues hold the messages
// of one window only: one for each of its positions.
//
// Own steps follow each other, but while one thread does a block's, another can deliver to the next
// block what has been sent to it so far. Two threads therefore take turns: each delivers to a
// block, waits until the one above is done, delivers the few messages that have come since, does
// the block's own steps, and passes the turn on.

// A group is 16 messages. Groups are written past the caches, whole.
type group[T element] struct {
	at    [groupMessages]uint32 // position in the block
	value [groupMessages]T
}

// A queue is a list of chunks. They are taken from a common store: there are never more full ones
// than the window's messages fill, plus an unfinished one for each queue, so that no queue can
// overflow, whatever is drawn.
const (
	groupMessages = 16
	chunkGroups   = 64
	chunkMessages = groupMessages * chunkGroups
)

// queues holds the messages of one window, by block. A message's number is its place in the store.
type queues[T element] struct {
	groups  []group[T] // the store
	link    []uint32   // the chunk that follows a full one
	tail    []uint64   // by block: the number of its next message
	done    []uint64   // by block: the number of the next message to be delivered
	fresh   uint64     // the first chunk not yet taken
	staging []group[T] // by block: its group that is being filled
}

// clear empties the queues and gives each block its first chunk.
func (q *queues[T]) clear(blocks int) {
	q.fresh = uint64(blocks)
	for b := range blocks {
		first := uint64(b) * chunkMessages
		q.tail[b], q.done[b] = first, first
	}
}

// store copies a block's unfinished group from the staging to its place.
func (q *queues[T]) store(b int) {
	if t := q.tail[b]; t%groupMessages != 0 {
		q.groups[t/groupMessages] = q.staging[b]
	}
}

// unstore is the opposite.
func (q *queues[T]) unstore(b int) {
	if t := q.tail[b]; t%groupMessages != 0 {
		q.staging[b] = q.groups[t/groupMessages]
	}
}

// deliver delivers all messages to block b, which begins at a[0].
func (q *queues[T]) deliver(a []T, b int) {
	q.store(b)
	q.deliverTo(a, b, q.tail[b])
	q.unstore(b)
}

// deliverTo delivers those before number end, which belong to whole groups unless the last one is
// stored.
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

// sendGo does the steps of positions i, i-1, … of a block with these partners, except that it
// leaves swaps with other blocks to messages.
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

// fetchGo replaces what the elements remember by their values, from the last to the first. head
// has, by block, the number of the next message to be fetched.
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

// A plan is how a blocked shuffle is cut.
type plan struct {
	shift   uint // a block has 1<<shift elements
	window  int  // blocks in a window
	threads int
}

// blocks is a blocked shuffle under way.
type blocks[T element] struct {
	plan
	a      []T
	src    Source
	queues queues[T]
	batch  [partnerBatch]uint32
	drawn  []uint32 // partners of the next positions, from the batch

	// heads has what is to be fetched first from each queue, for each of the parts, one a thread,
	// into which the blocks of a window are divided for fetching: how far the queue was when the
	// block above the part was done.
	heads [][]uint64
}

// shuffleBlocked is Shuffle for up to 2³² elements, in blocks. It ends with emit, if that is not
// nil.
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
		// Whatever ctx has left undone is not looked at.
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

// first is the first position of block b.
func (s *blocks[T]) first(b int) int { return min(b<<s.shift, len(s.a)) }

// part is the first block of a thread's part of blocks [low, high).
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

// steps does the steps of blocks [low, high), unless ctx is done.
func (s *blocks[T]) steps(ctx context.Context, low, high int) {
	q := &s.queues
	copy(s.heads[s.threads-1], q.tail[:high])
	turns := make([]chan struct{}, s.threads)
	for i := range turns {
		turns[i] = make(chan struct{}, 1)
	}
	turns[0] <- struct{}{}
	s.parallel(func(thread int) {
		// to the thread's next block, when its last one was done; whole groups only: others still
		// fill the last one
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

// own does the steps of block b.
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

// piece fetches the values of the last piece of positions [bottom, end), and returns where it
// begins.
func (s *blocks[T]) piece(head []uint64, bottom, end int) int {
	begin := max(end-pieceElements, bottom)
	fetch(&s.queues, head, s.a[max(begin, 1):end]) // position 0 has no step
	return begin
}

// emit fetches the values of blocks [low, high) and emits them, on two threads if there are more
// than one.
func (s *blocks[T]) emit(ctx context.Context, low, high int, emit func(first int, block []T) error) error {
	head, bottom, top := s.heads[s.threads-1], s.first(low), s.first(high)
	var fetched chan int // the beginnings of pieces
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

// newQueues makes queues for so many blocks, with so many chunks, in memory.
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

// scratch is memory that stays between shuffles.
type scratch struct {
	memory  []byte
	release func()
}

// bytes is memory of so many bytes, with any content.
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
