package greedy

import (
	"math"
	"math/bits"
)

const (
	slots = 32 // groups that compete within a slice
	usual = 26 // groups that should: room for some more, and enough that a winner is among them
	slice = 16 // steps for which the competitors are chosen at once
	lanes = 4  // chunks that one goroutine computes side by side
	spare = 8  // elements of a vector: what kernels may write behind the end
)

// A heat is one slice of one lane: the competitors in, who won each step out. Its layout is known
// to the assembly.
type heat struct {
	w, c  [slots + spare]float64 // competitors; empty slots have count gone
	best  [slice]float64         // the largest error of each step
	won   [slice]uint32          // the slots that have it, one bit each
	x     float64                // of the first step; it grows by 1 a step
	_     [7]float64
	place [slots + spare]int32 // where each competitor came from
	_     [32]byte

	// If groups have several members: how many of a competitor have its count, and how many there
	// are.
	left, size [slots + spare]float64

	used int // slots from here on have count gone
	_    [7]int
}

func newHeats() *[lanes]heat {
	heats := new([lanes]heat)
	for i := range heats {
		heats[i].used = slots
	}
	return heats
}

// raceGo runs all heats. The slot that wins, or the first of several, goes on with a count larger
// by 1. If turns, that is so only when no member is left, and all of several that tie go on: what
// follows is void then. If apart, slot 0 is not fused.
func raceGo(heats *[lanes]heat, fused, apart, turns bool) {
	for l := range heats {
		h := &heats[l]
		n := slots
		for n > 0 && h.c[n-1] == gone {
			n--
		}
		x := h.x
		for k := range slice {
			best, won := math.Inf(-1), uint32(0)
			for i := range n {
				e := errorOf(h.w[i], x, h.c[i], fused && !(apart && i == 0))
				if e > best {
					best, won = e, 0
				}
				if e == best {
					won |= 1 << i
				}
			}
			if !turns {
				h.c[bits.TrailingZeros32(won)]++
			}
			for i := range n {
				if !turns || won>>i&1 == 0 {
					continue
				}
				if h.left[i]--; h.left[i] == 0 {
					h.left[i] = h.size[i]
					h.c[i]++
				}
			}
			h.best[k], h.won[k] = best, won
			x++
		}
	}
}

// enter fills the slots with the groups whose error at x is above tau and returns how many they
// are; more than slots are too many. If apart, the first group always gets slot 0.
func (h *heat) enter(w, c []float64, x, tau float64, fused, apart bool) int {
	n := sift(h.w[:], h.c[:], h.place[:], slots, w, c, x, tau, fused, apart)
	for i := n; i < h.used; i++ {
		h.c[i] = gone
	}
	h.used = min(n+spare, slots)
	return n
}

// siftGo copies the groups whose error at x is above tau, and, if apart, the first one, to toW and
// toC, and where they came from to place. It returns how many they are, and gives up above room.
// What it writes may be followed by up to two vectors of others; the first vector has count gone.
// len(w) is a multiple of 8.
func siftGo(toW, toC []float64, place []int32, room int, w, c []float64, x, tau float64, fused, apart bool) int {
	n := 0
	for i, v := range w {
		if errorOf(v, x, c[i], fused) > tau || apart && i == 0 {
			if n == room {
				return n + 1
			}
			toW[n], toC[n], place[n] = v, c[i], int32(i)
			n++
		}
	}
	for i := n; i < n+spare; i++ {
		toW[i], toC[i] = 0, gone
	}
	return n
}

// argmaxGo returns the largest error at x, the first that has it, and how many have it.
func argmaxGo(w, c []float64, x float64, fused bool) (best float64, at, equal int) {
	best = math.Inf(-1)
	for i, v := range w {
		if e := errorOf(v, x, c[i], fused); e > best {
			best, at, equal = e, i, 1
		} else if e == best {
			equal++
		}
	}
	return best, at, equal
}

// Kernels returns the instruction set of the package's kernels on this machine: "avx512" or "go".
func Kernels() string {
	if vectors {
		return "avx512"
	}
	return "go"
}
