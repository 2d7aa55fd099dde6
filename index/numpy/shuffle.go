package numpy

import (
	"context"
	"math"
)

// Shuffle shuffles a as RandomState.shuffle and Generator.shuffle do with a one-dimensional array:
// for i from the last position down to 1, elements i and [Source].Interval(i) are swapped. What is
// drawn depends on len(a) only.
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

// element is what a Shuffler moves.
type element interface{ uint32 | uint64 }

// swapAhead is the number of swaps between touching an element and moving it: enough to hide what
// memory takes to answer.
const swapAhead = 64

// shuffleAhead is Shuffle for up to 2³² elements; it touches them some swaps ahead.
func shuffleAhead[T element](ctx context.Context, src Source, a []T) error {
	var batch [partnerBatch]uint32
	drawn, i := 0, len(a)-1 // partners in the batch, of positions i and below
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
