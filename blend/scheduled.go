package blend

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/bits"
	"sort"
)

// A scheduled order distributes positions among the sources of a plan by the weights of its stages,
// and draws each source epoch by epoch. It is the part that all scheduled orders have in common.
type scheduled struct{ plan *Plan }

// compileStages computes the distribution of positions among the sources.
func (m scheduled) compileStages() error {
	p := m.plan
	if len(p.Stages) == 0 {
		return errors.New("the plan has no stages")
	}
	p.totals = make([]int64, len(p.Sources))
	p.schedule = nil
	p.length = 0
	for j, st := range p.Stages {
		if st.Samples < 1 || st.Samples > maxLength-p.length {
			return fmt.Errorf("stage %d has %d samples; the limits are 1 and 2^60 in all stages", j+1, st.Samples)
		}
		if len(st.Weights) != len(p.Sources) || st.Written != nil && len(st.Written) != len(p.Sources) {
			return fmt.Errorf("stage %d has %d weights for %d sources", j+1, len(st.Weights), len(p.Sources))
		}
		tree, err := NewTree(st.Weights)
		if err != nil {
			return fmt.Errorf("stage %d: %w", j+1, err)
		}
		base := append([]int64(nil), p.totals...)
		p.schedule = append(p.schedule, schedule{p.length, tree, base})
		for s, n := range tree.Counts(st.Samples) {
			p.totals[s] += n
		}
		p.length += st.Samples
	}
	return nil
}

func (scheduled) files() []orderFile { return nil }

func (scheduled) resolve() {}

func (scheduled) close() error { return nil }

// writeFiles writes the weights as the user wrote them; the native order has no index files.
func (m scheduled) writeFiles(w *writtenPlan, _ func(string) (string, error)) error {
	for _, st := range m.plan.Stages {
		w.Stages = append(w.Stages, st.Written)
	}
	return nil
}

// stage returns the stage at a position.
func (m scheduled) stage(position int64) int {
	list := m.plan.schedule
	return sort.Search(len(list)-1, func(j int) bool { return list[j+1].start > position })
}

// draw returns the source, epoch and window at a position.
func (m scheduled) draw(position int64) (source int, epoch, window int64) {
	st := &m.plan.schedule[m.stage(position)]
	source, k := st.tree.At(position - st.start)
	src := &m.plan.Sources[source]
	epoch, window = src.order.At(st.base[source] + k)
	return source, epoch, src.window(window)
}

// position implements order.
func (m scheduled) position(source int, epoch, window int64) (position int64, ok bool) {
	s := &m.plan.Sources[source]
	training, ok := s.trainingWindow(window)
	if !ok || epoch < 0 || epoch > s.order.EpochOf(m.plan.totals[source]) {
		return 0, false
	}
	if _, length := s.order.Span(epoch); training >= length {
		return 0, false
	}
	return m.plan.position(source, s.order.Inverse(epoch, training))
}

// positions implements order.
func (m scheduled) positions(ctx context.Context, from, to int64, yield func(Block, error) bool) {
	l := &lister{plan: m.plan}
	list := m.plan.schedule
	for from < to {
		if err := context.Cause(ctx); err != nil {
			yield(Block{}, err)
			return
		}
		j := m.stage(from)
		n := min(to-from, blockLength)
		if j+1 < len(list) {
			n = min(n, list[j+1].start-from)
		}
		if !yield(l.list(&list[j], from, int(n)), nil) {
			return
		}
		from += n
	}
}

// uses lists the occurrences of a document, given the samples that hold it.
func (m scheduled) uses(ctx context.Context, doc Document, holding iter.Seq2[Occurrence, error]) iter.Seq2[Occurrence,
	error] {
	return func(give func(Occurrence, error) bool) {
		yield := func(o Occurrence) bool {
			if ctx.Err() != nil {
				give(Occurrence{}, context.Cause(ctx))
				return false
			}
			return give(o, nil)
		}
		found := false
		for o, err := range holding {
			if err != nil {
				give(Occurrence{}, err)
				return
			}
			if found = true; !m.usesOf(o, yield) {
				return
			}
		}
		if !found {
			yield(Occurrence{Part: Part{Document: doc}, Use: NoWindow, Sample: Sample{Position: -1, Source: doc.Source,
				Epoch: -1, Window: -1, Shard: doc.Shard}})
		}
	}
}

// usesOf yields an occurrence for each use of its window. It returns false if yield does.
func (m scheduled) usesOf(o Occurrence, yield func(Occurrence) bool) bool {
	src := &m.plan.Sources[o.Sample.Source]
	training, ok := src.trainingWindow(o.Sample.Window)
	if !ok {
		o.Use = HeldOut
		return yield(o)
	}
	first := src.order.FirstEpoch(training) // earlier epochs do not have a window that an amendment added
	for epoch := first; ; epoch++ {
		position, ok := m.position(o.Sample.Source, epoch, o.Sample.Window)
		if !ok {
			if epoch == first {
				o.Use = NotReached
				return yield(o)
			}
			return true
		}
		o.Use = Drawn
		o.Sample.Position, o.Sample.Epoch, o.Sample.Skipped = position, epoch, m.plan.skipped(position)
		if o.Sample.Skipped {
			o.Use = SkippedOver
		}
		if !yield(o) {
			return false
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
