package numpy

import (
	"context"
	"math"
	"unsafe"
)

// A Shuffler shuffles as [Shuffle] does, with the same result, in the way that is fastest for the
// size of the array. It keeps its scratch memory between calls. The zero value is ready; it is not
// for concurrent use.
type Shuffler struct {
	// Threads is the number of threads that one array may use; 0 is 1. More than one helps large
	// arrays only.
	Threads int

	memory scratch
}

// Uint32 shuffles a. It ends early, with the error of ctx, when ctx is done; then the order of a
// and the state of src are unspecified.
func (s *Shuffler) Uint32(ctx context.Context, src Source, a []uint32) error {
	return shuffleBest(ctx, s, src, a, nil)
}

// Pairs shuffles a, whose elements are not interpreted, and hands the result to emit in consecutive
// blocks from the last to the first: block[k] is element first+k of the shuffled array. Every
// element is handed out once; a small array is one block. A block is valid, and may be changed,
// during the call. Calls are made by the caller's goroutine, while others prepare the next block if
// there are several threads.
//
// What a holds afterwards is unspecified. Pairs ends early, with the error of ctx or of emit, when
// ctx is done or emit fails; then the state of src is unspecified too.
func (s *Shuffler) Pairs(ctx context.Context, src Source, a []uint64,
	emit func(first int, block []uint64) error) error {
	return shuffleBest(ctx, s, src, a, emit)
}

// Release gives the scratch memory back. The Shuffler can be used again.
func (s *Shuffler) Release() { s.memory.free() }

// shuffleBest chooses by size. It ends with emit, if that is not nil.
func shuffleBest[T element](ctx context.Context, s *Shuffler, src Source, a []T,
	emit func(first int, block []T) error) error {
	if len(a) > math.MaxUint32 { // positions have more than 32 bits
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

// bestPlan cuts an array of n elements. It says false if the blocked shuffle is not the fastest.
func bestPlan[T element](n, threads int) (p plan, blocked bool) {
	const queueBytes = 512 << 20 // what queues may take, if that is more than an eighth of what all messages would
	p = plan{shift: 18, threads: max(threads, 1)}
	if unsafe.Sizeof(T(0)) == 8 {
		p.shift = 17
	}
	if n > 400<<20 {
		p.shift++
	}
	blocks := (n + 1<<p.shift - 1) >> p.shift
	all := n / groupMessages * int(unsafe.Sizeof(group[T]{}))
	// A window more costs a pass over what is below it; fewer cost memory, which is slow when it is
	// touched for the first time.
	budget := max(queueBytes, all/8)
	windows := max(1, (all+budget-1)/budget)
	p.window = (blocks + windows - 1) / windows
	if threads > 1 {
		return p, n >= 1<<23
	}
	return p, n >= 1<<24
}
