package job

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"math"
	"math/bits"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"mula/internal/filesystem"
	"mula/shards"
)

// A shuffle is the order of the documents' keys. Documents are gathered by ranges of keys that fit
// its memory: from each segment, which is sorted, the documents in the range. It keeps the block
// lists of all segments in memory, at most about 256 blocks per segment.
type shuffle struct {
	b      *unitQueue
	memory int64 // for the documents of one iteration

	turn      chan struct{} // has a value while load runs
	forgotten atomic.Int64  // number of calls of forget
	loaded    int64         // 1 + forgotten when the fields below were loaded; 0: they are not

	segments []*sortedSegment
	weight   int64 // of all segments together
	units    int   // number of needed units
	rest     int64 // documents requested from the last of them, 0: all
}

type sortedSegment struct {
	unit, number int
	blocks       []block
	width        int
}

// load waits until all units are complete and reads their block lists.
func (s *shuffle) load(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-s.turn }()
	now := 1 + s.forgotten.Load()
	if s.loaded == now {
		return nil
	}
	s.segments, s.weight, s.units, s.rest = nil, 0, 0, 0
	left := s.b.limit
	group := s.b.f.group()
	defer group.Wait() // after an error of a unit
	var found []*sortedSegment
	for u := range s.b.units {
		record, err := s.b.unit(ctx, u)
		if err != nil {
			return err
		}
		if record == nil {
			break
		}
		s.units = u + 1
		s.rest = left
		left -= record.sum().Documents
		for n, r := range record.Segments {
			if r.Documents == 0 {
				continue
			}
			sorted := &sortedSegment{unit: u, number: n}
			found = append(found, sorted)
			group.Go(func() error {
				seg, err := s.b.f.openSegment(u, n)
				if err != nil {
					return missed(u, n, err)
				}
				seg.close()
				if seg.foot.Documents != r.Documents || seg.foot.Tokens != r.Tokens || !seg.foot.Shuffled {
					return missed(u, n, fmt.Errorf("%s: %w: it has %d documents, but its unit's record has %d",
						seg.path, errDamaged, seg.foot.Documents, r.Documents))
				}
				sorted.blocks, sorted.width = seg.foot.Blocks, seg.foot.Width
				return nil
			})
			s.weight += r.Documents*documentWeight + r.Tokens*int64(s.b.f.d.width())
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	s.segments = found
	s.loaded = now
	return nil
}

// forget makes load read the blocks again, after a segment was rewritten.
func (s *shuffle) forget() { s.forgotten.Add(1) }

func missed(u, n int, err error) error {
	if errors.Is(err, errDamaged) || errors.Is(err, fs.ErrNotExist) {
		return &missing{u, n, err}
	}
	return err
}

// A gathered document.
type gathered struct {
	meta
	unit  int
	input int
	at    int // of its ids in gathering.ids
	width int
}

// A gathering is the memory of one iteration.
type gathering struct {
	documents []gathered
	ids       []byte
	names     []byte
	reader    blockReader
}

func (s *shuffle) from(ctx context.Context, start cut, skip skipper) iter.Seq2[*spooled, error] {
	ids := skip == nil
	return func(yield func(*spooled, error) bool) {
		if err := s.load(ctx); err != nil {
			yield(nil, err)
			return
		}
		var g gathering
		if ids {
			// at once, because growing would leave as much garbage
			g.ids = make([]byte, 0, min(s.memory, s.weight))
		}
		var tokens []uint32
		d := spooled{at: start}
		for low, step := start.Key, s.step(); ; {
			high := low + step // the last key of the range
			if high < low {
				high = math.MaxUint64
			}
			fits, err := s.gather(ctx, &g, low, high, ids)
			if err != nil {
				yield(nil, err)
				return
			}
			if !fits && step > 0 {
				step /= 2
				continue
			}
			for i := range g.documents {
				m := &g.documents[i]
				if low == start.Key && compareKeys(m.key, m.input, m.offset, start.Key, start.Input, start.Offset) < 0 {
					continue
				}
				d.at = cut{Key: m.key, Input: m.input, Offset: m.offset, Documents: d.at.Documents}
				d.unit, d.meta = m.unit, m.meta
				if ids {
					tokens = shards.Unsigned(m.width).AppendDecoded(tokens[:0],
						g.ids[m.at:m.at+m.width*int(m.tokens)])
					d.tokens = tokens
				}
				if !yield(&d, nil) {
					return
				}
				d.at.Documents++
			}
			if high == math.MaxUint64 {
				return
			}
			low = high + 1
			if s.used(&g) < s.memory/2 { // a range that was shortened because of one large document
				step = min(s.step(), max(step, step<<1, 1))
			}
		}
	}
}

// step returns the length of a range of keys that probably fills three quarters of the memory.
func (s *shuffle) step() uint64 {
	want := max(s.memory/4*3, 1)
	if s.weight <= want {
		return math.MaxUint64
	}
	step, _ := bits.Div64(uint64(want), 0, uint64(s.weight))
	return step
}

func (s *shuffle) used(g *gathering) int64 {
	return int64(len(g.documents))*documentWeight + int64(len(g.ids)) + int64(len(g.names))
}

// gather collects the documents with keys from low to high, in order. fits is false if they need
// more than the memory; documents of a single key may.
func (s *shuffle) gather(ctx context.Context, g *gathering, low, high uint64, ids bool) (fits bool, err error) {
	g.documents, g.ids, g.names = g.documents[:0], g.ids[:0], g.names[:0]
	for p, err := range s.read(ctx, s.pieces(low, high), ids) {
		fits := false
		if err == nil {
			fits, err = s.add(g, p, low, high, ids)
		}
		if err != nil {
			return false, missed(p.unit, p.number, err)
		}
		if !fits {
			return false, nil
		}
	}
	slices.SortFunc(g.documents, func(a, b gathered) int {
		return compareKeys(a.key, a.input, a.offset, b.key, b.input,
			b.offset)
	})
	return true, nil
}

// add collects the documents of a piece.
func (s *shuffle) add(g *gathering, p *piece, low, high uint64, ids bool) (fits bool, err error) {
	parts := s.b.f.d.Units[p.unit]
	for n := p.first; n <= p.last; n++ {
		if err := g.reader.open(p.from, n, ids); err != nil {
			return false, err
		}
		for {
			more, err := g.reader.next()
			if err != nil {
				return false, err
			}
			if !more {
				break
			}
			m := &g.reader.current
			var stored []byte
			if ids {
				stored = g.reader.take()
			}
			if m.key < low || m.key > high || s.rest > 0 && p.unit == s.units-1 && m.ordinal >= s.rest {
				continue
			}
			if m.part >= len(parts) {
				return false, errDamaged
			}
			d := gathered{*m, p.unit, parts[m.part].Input, len(g.ids), p.width}
			g.names = append(g.names, m.id...)
			// refers to the old memory when names moves, with the same bytes
			d.id = g.names[len(g.names)-len(m.id):]
			g.ids = append(g.ids, stored...)
			g.documents = append(g.documents, d)
			if low < high && s.used(g) > s.memory {
				return false, nil
			}
		}
	}
	return true, nil
}

// Limits of reading ahead from a store: 16 pieces, of 4 MiB or one larger block.
const (
	piecesAhead = 16
	pieceBytes  = 4 << 20
)

// A piece is a run of blocks of a segment that are read together.
type piece struct {
	*sortedSegment
	first, last int
	from        *segment // that has the blocks
}

// pieces returns the blocks that can have documents with keys from low to high. From a local disk,
// a segment is one piece.
func (s *shuffle) pieces(low, high uint64) (list []piece) {
	for _, seg := range s.segments {
		// The first block that can have such a document: the last block that starts below low.
		next := max(sort.Search(len(seg.blocks), func(n int) bool { return seg.blocks[n].Key >= low })-1, 0)
		for next < len(seg.blocks) && seg.blocks[next].Key <= high {
			first, size := next, int64(0)
			for ; next < len(seg.blocks) && seg.blocks[next].Key <= high; next++ {
				size += seg.blocks[next].size(seg.width)
				if s.b.f.store != nil && size > pieceBytes && next > first {
					break
				}
			}
			list = append(list, piece{sortedSegment: seg, first: first, last: next - 1})
		}
	}
	return list
}

// read yields the pieces with their segments, which are valid until the next one. Pieces from a
// store are fetched ahead.
func (s *shuffle) read(ctx context.Context, list []piece, ids bool) iter.Seq2[*piece, error] {
	return func(yield func(*piece, error) bool) {
		ahead := 1
		if s.b.f.store != nil {
			ahead = piecesAhead
		}
		errs, memory := make([]chan error, min(ahead, len(list))), make([][]byte, ahead)
		for i := range errs {
			errs[i] = make(chan error, 1)
		}
		var fetching sync.WaitGroup
		defer fetching.Wait()
		started := 0
		for i := range list {
			for ; started < min(i+ahead, len(list)); started++ {
				n := started
				fetching.Go(func() { errs[n%ahead] <- s.open(ctx, &list[n], ids, &memory[n%ahead]) })
			}
			err := <-errs[i%ahead]
			more := yield(&list[i], err) && err == nil
			if err == nil {
				list[i].from.close()
			}
			if !more {
				return
			}
		}
	}
}

// open opens the segment of a piece. From a store it reads the blocks, with one request if ids are
// requested, and else with one for each block. memory is used again.
func (s *shuffle) open(ctx context.Context, p *piece, ids bool, memory *[]byte) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p.from = &segment{path: segmentName(s.b.f.dir, p.unit, p.number), foot: footer{Width: p.width, Shuffled: true,
		Blocks: p.blocks}}
	file, err := filesystem.Open(s.b.f.files.FS(), p.from.path)
	if err != nil {
		return err
	}
	if s.b.f.store == nil {
		p.from.file = file
		return nil
	}
	defer file.Close()
	size := int64(0)
	for i := p.first; i <= p.last; i++ {
		size += p.blocks[i].length(p.width, ids)
	}
	*memory = slices.Grow((*memory)[:0], int(size))
	rest := (*memory)[:size]
	if ids { // the blocks are side by side
		if _, err := file.ReadAt(rest, p.blocks[p.first].At); err != nil {
			return fmt.Errorf("%s: %w: %w", p.from.path, errDamaged, err)
		}
	}
	blocks := fetchedBlocks{}
	for i := p.first; i <= p.last; i++ {
		b := &p.blocks[i]
		data := rest[:b.length(p.width, ids)]
		rest = rest[len(data):]
		if !ids {
			if _, err := file.ReadAt(data, b.At); err != nil {
				return fmt.Errorf("%s: %w: %w", p.from.path, errDamaged, err)
			}
		}
		blocks[b.At] = data
	}
	p.from.file = blocks
	return nil
}

// fetchedBlocks are blocks of a segment in memory, by their positions.
type fetchedBlocks map[int64][]byte

// ReadAt reads a block from its start.
func (f fetchedBlocks) ReadAt(p []byte, off int64) (int, error) {
	n := copy(p, f[off])
	if n < len(p) {
		return n, io.ErrUnexpectedEOF
	}
	return n, nil
}

// Close does nothing.
func (f fetchedBlocks) Close() error { return nil }
