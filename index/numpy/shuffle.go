package numpy

import (
	"context"
	"math"
)

// Shuffle shuffles a like RandomState.shuffle and Generator.shuffle shuffle a one-dimensional
// array: for i from the last position down to 1, it swaps elements i and [Source].Interval(i). The
// draws depend only on src and len(a).
func Shuffle[T any](src Source, a []T) {
	i := len(a) - 1
	for ; i > math.MaxUint32; i-- {
		j := src.Interval(uint64(i))
		a[i], a[j] = a[j], a[i]
	}
	var batch [partnerBatch]uint32
	for i > 0 {
		for _, j := range batch[:src.partners(batch[:], uint32(i))] {
			a[i], a[j] = a[j], a[i]
			i--
		}
	}
}

// element is the type of elements that a Shuffler moves.
type element interface{ uint32 | uint64 }

// swapAhead is the number of swaps between prefetching an element and moving it: enough to hide the
// memory latency.
const swapAhead = 64

// shuffleAhead is Shuffle for up to 2³² elements. It prefetches elements several swaps ahead.
func shuffleAhead[T element](ctx context.Context, src Source, a []T) error {
	var batch [partnerBatch]uint32
	drawn, i := 0, len(a)-1 // partners in the batch, for positions i and below
	for i > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		ahead := 0
		if below := i - drawn; below > 0 {
			drawn += src.partners(batch[drawn:], uint32(below))
			ahead = min(swapAhead, drawn)
		}
		swap(a, i, batch[:drawn], ahead)
		i -= drawn - ahead
		drawn = copy(batch[:], batch[drawn-ahead:drawn])
	}
	return nil
}

// swapGo swaps a[i] and a[partners[0]], a[i-1] and a[partners[1]], and so on.
func swapGo[T element](a []T, i int, partners []uint32) {
	for _, j := range partners {
		a[i], a[j] = a[j], a[i]
		i--
	}
}
