package numpy

import (
	"context"
	"math"
	"unsafe"
)

// A Shuffler shuffles like [Shuffle], with the same result, by the fastest algorithm for the size
// of the array. It keeps its scratch memory between calls. The zero value is ready to use. A
// Shuffler is not safe for concurrent use.
type Shuffler struct {
	// Threads is the number of threads per array; 0 means 1. More than one thread helps only for
	// large arrays.
	Threads int

	memory scratch
}

// Uint32 shuffles a. If ctx is done, it stops early and returns the error of ctx; then the order of
// a and the state of src are unspecified.
func (s *Shuffler) Uint32(ctx context.Context, src Source, a []uint32) error {
	return shuffleBest(ctx, s, src, a, nil)
}

// Pairs shuffles a, whose elements are not interpreted, and passes the result to emit in
// consecutive blocks from the last to the first: block[k] is element first+k of the shuffled array.
// Every element is passed once; a small array is one block. A block is valid, and may be changed,
// during the call. The caller's goroutine makes the calls, while others prepare the next block if
// there are several threads.
//
// The contents of a afterwards are unspecified. If ctx is done or emit fails, Pairs stops early and
// returns that error; then the state of src is unspecified too.
func (s *Shuffler) Pairs(ctx context.Context, src Source, a []uint64,
	emit func(first int, block []uint64) error) error {
	return shuffleBest(ctx, s, src, a, emit)
}

// Release frees the scratch memory. The Shuffler can be used again.
func (s *Shuffler) Release() { s.memory.free() }

// shuffleBest chooses by size. If emit is not nil, it passes the result to emit at the end.
func shuffleBest[T element](ctx context.Context, s *Shuffler, src Source, a []T,
	emit func(first int, block []T) error) error {
	if len(a) > math.MaxUint32 { // positions need more than 32 bits
		if err := ctx.Err(); err != nil {
			return err
		}
		Shuffle(src, a)
	} else if p, blocked := bestPlan[T](len(a), s.Threads); blocked {
		return shuffleBlocked(ctx, src, a, p, &s.memory, emit)
	} else if err := shuffleAhead(ctx, src, a); err != nil {
		return err
	}
	if emit == nil || len(a) == 0 {
		return nil
	}
	return emit(0, a)
}

// bestPlan divides an array of n elements. blocked is false if the blocked shuffle is not the
// fastest.
func bestPlan[T element](n, threads int) (p plan, blocked bool) {
	// memory for queues, unless an eighth of the memory of all messages is more
	const queueBytes = 512 << 20
	p = plan{shift: 18, threads: max(threads, 1)}
	if unsafe.Sizeof(T(0)) == 8 {
		p.shift = 17
	}
	if n > 400<<20 {
		p.shift++
	}
	blocks := (n + 1<<p.shift - 1) >> p.shift
	all := n / groupMessages * int(unsafe.Sizeof(group[T]{}))
	// Every further window costs a pass over the elements below it; fewer windows cost memory,
	// which is slow on first use.
	budget := max(queueBytes, all/8)
	windows := max(1, (all+budget-1)/budget)
	p.window = (blocks + windows - 1) / windows
	if threads > 1 {
		return p, n >= 1<<23
	}
	return p, n >= 1<<24
}
