package blend

import (
	"context"
	"fmt"
	"iter"
	"math/bits"
	"sort"
)

// A Block has the samples at consecutive positions. Its slices are valid until the next Block.
type Block struct {
	First   int64   // first position
	Sources []int32 // by position: index in Plan.Sources
	Windows []int64 // by position: number among all windows of the source
}

// blockLength is the maximum number of positions in a Block. The arrays of a Block fit in the
// second-level cache, and each of 2,000 sources still has several positions.
const blockLength = 1 << 16

// Positions lists the samples at positions [from, to) in blocks. It includes skipped positions;
// Plan.Skips lists them. The samples are the same as from [Plan.Locate], at a fraction of the cost:
// the tree distributes a whole block at once, and each source computes its windows in one call. It
// ends with an error if the positions are not in the plan, or if ctx is cancelled.
func (p *Plan) Positions(ctx context.Context, from, to int64) iter.Seq2[Block, error] {
	return func(yield func(Block, error) bool) {
		if from < 0 || to < from || to > p.length {
			yield(Block{}, fmt.Errorf("positions [%d, %d) are not all in the plan, which has %d positions", from, to,
				p.length))
			return
		}
		if p.Megatron != nil {
			p.readPositions(ctx, from, to, yield)
			return
		}
		l := &lister{plan: p}
		for from < to {
			if err := context.Cause(ctx); err != nil {
				yield(Block{}, err)
				return
			}
			j := sort.Search(len(p.schedule)-1, func(j int) bool { return p.schedule[j+1].start > from })
			n := min(to-from, blockLength)
			if j+1 < len(p.schedule) {
				n = min(n, p.schedule[j+1].start-from)
			}
			if !yield(l.list(&p.schedule[j], from, int(n)), nil) {
				return
			}
			from += n
		}
	}
}

// readPositions is Positions for an order that is read from index files.
func (p *Plan) readPositions(ctx context.Context, from, to int64, yield func(Block, error) bool) {
	if p.order == nil && from < to {
		_, err := p.Locate(from)
		yield(Block{}, err)
		return
	}
	n := min(to-from, blockLength)
	b := Block{from, make([]int32, n), make([]int64, n)}
	for ; b.First < to; b.First += n {
		n = min(to-b.First, blockLength)
		b.Sources, b.Windows = b.Sources[:n], b.Windows[:n]
		err := context.Cause(ctx)
		if err == nil {
			err = p.order.positions(&b)
		}
		if err != nil {
			yield(Block{}, err)
			return
		}
		if !yield(b, nil) {
			return
		}
	}
}

// A lister computes blocks. It reuses their memory.
type lister struct {
	plan    *Plan
	sources []int32
	windows []int64
	drawn   []int64 // the windows of one source, in its order
	// Indices in the block, by node of the tree. The positions of a node are a range of one of the
	// two lists; the positions of its children are the same range of the other.
	places [2][]uint16
}

// list computes the block of n positions from first on, all in one stage.
func (l *lister) list(st *schedule, first int64, n int) Block {
	if cap(l.sources) < n {
		l.sources, l.windows, l.drawn = make([]int32, n), make([]int64, n), make([]int64, n)
		for i := range l.places {
			l.places[i] = make([]uint16, n)
		}
	}
	l.sources, l.windows = l.sources[:n], l.windows[:n]
	for i := range n {
		l.places[0][i] = uint16(i)
	}
	l.descend(st, st.tree.root, uint64(first-st.start), 0, n, 0)
	return Block{first, l.sources, l.windows}
}

// descend distributes the indices [from, to) of places[side] below a node. They are the node's
// positions y, y+1, ….
func (l *lister) descend(st *schedule, id int32, y uint64, from, to, side int) {
	if from == to {
		return
	}
	if id < 0 {
		source := ^id
		drawn := l.drawn[:to-from]
		l.plan.Sources[source].order.Fill(drawn, st.base[source]+int64(y))
		if src := &l.plan.Sources[source]; src.parts != nil {
			for i, training := range drawn {
				drawn[i] = src.window(training)
			}
		}
		for i, place := range l.places[side][from:to] {
			l.sources[place], l.windows[place] = source, drawn[i]
		}
		return
	}
	// The remainder of y·a/s decides between left and right. Each position adds a to it.
	e := &st.tree.nodes[id]
	hi, lo := bits.Mul64(y, e.left)
	q, rest := bits.Div64(hi, lo, e.sum)
	hi, lo = bits.Mul64(y+uint64(to-from), e.left)
	end, _ := bits.Div64(hi, lo, e.sum)
	middle := from + int(end-q)
	in, out := l.places[side][from:to], l.places[1-side]
	left, right := out[from:middle], out[middle:to]
	// There is no branch on the direction of a position: each is written to both sides, and one of
	// the two is overwritten.
	need, nl, nr := e.sum-e.left, 0, 0
	for _, place := range in {
		less, borrow := bits.Sub64(rest, need, 0) // borrow is 1 for positions that go right
		rest = less + e.sum&-borrow
		if nl < len(left) {
			left[nl] = place
		}
		if nr < len(right) {
			right[nr] = place
		}
		nl += int(1 - borrow)
		nr += int(borrow)
	}
	l.descend(st, e.leftNode, q, from, middle, 1-side)
	l.descend(st, e.rightNode, y-q, middle, to, 1-side)
}
