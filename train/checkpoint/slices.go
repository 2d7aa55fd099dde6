package checkpoint

import (
	"context"
	"fmt"
	"slices"

	"mula/moe"
	"mula/train/collective"
	"mula/xpu"
	"mula/xpu/comm"
)

// Slices of tensors. A checkpoint has complete tensors of weights, and ranges of complete tensors
// of the state. Ranks that share a matrix ([comm.TP]) therefore exchange their slices before a save
// and after a load:
//
//   - Weights: one rank of all gets the complete tensor, and writes it.
//   - State of a slice of rows: it is a range of the complete tensor.
//   - State of a slice of columns: the ranks own the same elements of their slices. Each gets an
//     equal part of the rows that these elements fill, with all columns. The elements of other
//     rows, at both ends, stay where they are; each of these two pieces is a range.
//
// So a rank writes and reads at most three ranges of a tensor of the state.

// A heldSlice is a slice of a tensor that a rank has. The ranges of heldTensor are ranges of the
// slice.
type heldSlice struct {
	heldTensor
	moe.Slice
}

// A rowExchange exchanges rows of a matrix between ranks that have columns of it: all rows from
// first on, which bounds divides among the ranks.
type rowExchange struct {
	group  *comm.Comm
	width  int   // columns of each rank
	bounds []int // rows of each rank
}

// own returns the rows of this rank.
func (x rowExchange) own() (from, to int) {
	return x.bounds[x.group.Rank()], x.bounds[x.group.Rank()+1]
}

// scaled returns the bounds of rows as bounds of elements of a slice.
func (x rowExchange) scaled() []int {
	bounds := make([]int, len(x.bounds))
	for r, row := range x.bounds {
		bounds[r] = (row - x.bounds[0]) * x.width
	}
	return bounds
}

// even returns bounds of n equal pieces of a size.
func even(n, size int) []int {
	bounds := make([]int, n+1)
	for r := range bounds {
		bounds[r] = r * size
	}
	return bounds
}

// interleave calls visit for each row of this rank and each rank's columns of it: the first element
// in the complete rows, and in an order rank by rank.
func (x rowExchange) interleave(visit func(complete, byRank int)) {
	from, to := x.own()
	n := x.group.Size()
	for r := range n {
		for row := range to - from {
			visit((row*n+r)*x.width, (r*(to-from)+row)*x.width)
		}
	}
}

// complete returns the complete rows of this rank, given its columns of all rows.
func (x rowExchange) complete(ctx context.Context, columns []float32) ([]float32, error) {
	from, to := x.own()
	received := make([]float32, (to-from)*x.width*x.group.Size())
	err := comm.AllToAll(ctx, x.group, columns, x.scaled(), received, even(x.group.Size(), (to-from)*x.width))
	if err != nil {
		return nil, err
	}
	rows := make([]float32, len(received))
	x.interleave(func(complete, byRank int) { copy(rows[complete:complete+x.width], received[byRank:]) })
	return rows, nil
}

// divide is the inverse of complete.
func (x rowExchange) divide(ctx context.Context, rows, columns []float32) error {
	from, to := x.own()
	sent := make([]float32, len(rows))
	x.interleave(func(complete, byRank int) { copy(sent[byRank:byRank+x.width], rows[complete:]) })
	return comm.AllToAll(ctx, x.group, sent, even(x.group.Size(), (to-from)*x.width), columns, x.scaled())
}

// A slicePart is a range of a slice of columns: elements of an incomplete row, complete rows, and
// elements of an incomplete row. Each may be empty. A range without a complete row is the last
// piece, and may have elements of two rows.
type slicePart struct {
	rowExchange
	slice      moe.Slice
	begin      int // in the slice
	head, tail int // end of the first elements, and begin of the last ones
}

// partOf returns the range of a slice of columns from begin on, with n elements. The ranks of the
// group call it with the same range.
func (s Shard) partOf(h heldSlice, begin, n int) slicePart {
	width := s.tensors[h.index].Shape[1] / h.Ranks
	p := slicePart{rowExchange{group: s.tensor, width: width}, h.Slice, begin, begin, begin}
	first, last := (begin+width-1)/width, (begin+n)/width
	if first < last {
		p.head, p.tail = first*width, last*width
	} else {
		last = first
	}
	for r := range h.Ranks + 1 {
		p.bounds = append(p.bounds, first+(last-first)*r/h.Ranks)
	}
	return p
}

// stretches divides a range of a slice into ranges of the complete tensor, of the given values:
// incomplete rows of the slice, and complete rows. Some may be empty.
func (p slicePart) stretches(name string, head, rows, tail []float32) []stretch {
	at := func(element int) int { // in the complete tensor
		return element/p.width*p.width*p.slice.Ranks + p.slice.Rank*p.width + element%p.width
	}
	of := func(begin int, values []float32) stretch { return stretch{name, begin, xpu.Of(values, len(values))} }
	from, _ := p.own()
	var all []stretch
	for _, s := range []stretch{of(at(p.begin), head), of(from*p.width*p.slice.Ranks, rows)} {
		if s.values.Elements() > 0 {
			all = append(all, s)
		}
	}
	for begin, rest := p.tail, tail; len(rest) > 0; {
		n := min(len(rest), p.width-begin%p.width)
		all = append(all, of(at(begin), rest[:n]))
		begin, rest = begin+n, rest[n:]
	}
	return all
}

// joined returns a shard that has no slices, but complete tensors and ranges of them on some ranks,
// for saving; without the state only weights. All ranks call it. An error is a
// [collective.BrokenError].
func (s Shard) joined(ctx context.Context, state bool) (Shard, error) {
	if len(s.slices) == 0 {
		return s, nil
	}
	s.held = slices.Clone(s.held)
	for _, h := range s.slices {
		joined, err := s.join(ctx, h, state)
		if err != nil {
			return s, &collective.BrokenError{Err: fmt.Errorf("joining slices of %s: %w", s.tensors[h.index].Name, err)}
		}
		s.held = append(s.held, joined)
	}
	return s.sorted(), nil
}

// sorted returns a shard without slices, whose tensors are in ascending order.
func (s Shard) sorted() Shard {
	s.slices = nil
	slices.SortStableFunc(s.held, func(a, b heldTensor) int { return a.index - b.index })
	return s
}

// join returns the ranges of a complete tensor that this rank writes. Only one rank has the
// weights.
func (s Shard) join(ctx context.Context, h heldSlice, state bool) (heldTensor, error) {
	joined := heldTensor{index: h.index, onlyRanges: true}
	if s.alike.Rank() == h.index%s.alike.Size() {
		writer := h.index / s.alike.Size() % h.Ranks
		var err error
		if joined.weight, err = s.joinWeights(ctx, h, writer); err != nil {
			return joined, err
		}
		joined.onlyRanges = s.tensor.Rank() != writer
	}
	for _, w := range h.write {
		n := w.values.Elements()
		switch {
		case !state || n == 0:
			continue
		case h.Axis == 0:
			joined.write = append(joined.write, h.rows(w))
			continue
		}
		var buffer []float32
		values, err := xpu.Numbers(ctx, s.device, w.values, &buffer)
		if err != nil {
			return joined, err
		}
		p := s.partOf(h, w.begin, n)
		rows, err := p.complete(ctx, values[p.head-p.begin:p.tail-p.begin])
		if err != nil {
			return joined, err
		}
		joined.write = append(joined.write, p.stretches(w.name, values[:p.head-p.begin], rows,
			values[p.tail-p.begin:])...)
	}
	return joined, nil
}

// rows returns a range of a slice of rows as a range of the complete tensor.
func (h heldSlice) rows(w stretch) stretch {
	w.begin += h.Rank * h.weight.Elements()
	return w
}

// joinWeights gives one of the ranks that have slices the complete weights. Other ranks get an
// absent tensor.
func (s Shard) joinWeights(ctx context.Context, h heldSlice, writer int) (xpu.Tensor, error) {
	var buffer []float32
	own, err := xpu.Numbers(ctx, s.device, h.weight.Flat(), &buffer)
	if err != nil {
		return xpu.Tensor{}, err
	}
	x := rowExchange{group: s.tensor, width: 1, bounds: make([]int, h.Ranks+1)} // rows as one column
	if h.Axis == 1 {
		x.width = s.tensors[h.index].Shape[1] / h.Ranks
	}
	for r := writer; r < h.Ranks; r++ {
		x.bounds[r+1] = len(own) / x.width
	}
	var weights []float32
	if h.Axis == 0 {
		if s.tensor.Rank() == writer {
			weights = make([]float32, len(own)*h.Ranks)
		}
		err = comm.AllToAll(ctx, s.tensor, own, x.scaled(), weights, even(h.Ranks, len(weights)/h.Ranks))
	} else {
		weights, err = x.complete(ctx, own)
	}
	if err != nil || s.tensor.Rank() != writer {
		return xpu.Tensor{}, err
	}
	return xpu.Of(weights, len(weights)), nil
}

// joinedForLoad returns a shard that has no slices, but ranges of complete tensors, for loading,
// and a function that divides the loaded ranges into slices. All ranks call it after the load. Its
// error is a [collective.BrokenError].
func (s Shard) joinedForLoad() (joined Shard, divide func(context.Context) error) {
	var after []func(context.Context) error
	s.held = slices.Clone(s.held)
	for _, h := range s.slices {
		joined := heldTensor{index: h.index}
		for _, w := range h.read {
			n := w.values.Elements()
			switch {
			case n == 0:
				continue
			case h.Axis == 0:
				joined.read = append(joined.read, h.rows(w))
				continue
			}
			p := s.partOf(h, w.begin, n)
			from, to := p.own()
			columns, rows := make([]float32, n), make([]float32, (to-from)*p.width*h.Ranks)
			joined.read = append(joined.read, p.stretches(w.name, columns[:p.head-p.begin], rows,
				columns[p.tail-p.begin:])...)
			after = append(after, func(ctx context.Context) error {
				if err := p.divide(ctx, rows, columns[p.head-p.begin:p.tail-p.begin]); err != nil {
					return &collective.BrokenError{Err: fmt.Errorf("dividing %s into slices: %w",
						s.tensors[h.index].Name, err)}
				}
				s.set(w.values, columns)
				return nil
			})
		}
		s.held = append(s.held, joined)
	}
	return s.sorted(), func(ctx context.Context) error {
		for _, f := range after {
			if err := f(ctx); err != nil {
				return err
			}
		}
		return nil
	}
}
