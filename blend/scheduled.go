package blend

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sort"

	"mula/blend/mixture"
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
		tree, err := mixture.NewTree(st.Weights)
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
	plan        *Plan
	sources     []int32
	windows     []int64
	drawn       []int64 // the windows of one source, in its order
	distributor mixture.Distributor
}

// list computes the block of n positions from first on, all in one stage.
func (l *lister) list(st *schedule, first int64, n int) Block {
	if cap(l.sources) < n {
		l.sources, l.windows, l.drawn = make([]int32, n), make([]int64, n), make([]int64, n)
	}
	l.sources, l.windows = l.sources[:n], l.windows[:n]
	l.distributor.Distribute(st.tree, first-st.start, n, func(source int, k int64, indices []uint16) {
		src, drawn := &l.plan.Sources[source], l.drawn[:len(indices)]
		src.order.Fill(drawn, st.base[source]+k)
		if src.parts != nil {
			for i, training := range drawn {
				drawn[i] = src.window(training)
			}
		}
		for i, at := range indices {
			l.sources[at], l.windows[at] = int32(source), drawn[i]
		}
	})
	return Block{first, l.sources, l.windows}
}
