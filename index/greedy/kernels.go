package greedy

import (
	"math"
	"math/bits"
)

const (
	slots = 32 // maximum number of groups that compete within a slice
	// desired number: leaves capacity for a few more, and makes it likely that a winner is included
	usual = 26
	slice = 16 // steps for which the competitors are chosen at once
	lanes = 4  // chunks that one goroutine computes side by side
	spare = 8  // elements of a vector, which kernels may write past the end
)

// A heat is one slice of one lane: input is the competitors, output the winner of each step. The
// assembly depends on its layout.
type heat struct {
	w, c  [slots + spare]float64 // competitors; empty slots have count gone
	best  [slice]float64         // the largest error of each step
	won   [slice]uint32          // the slots with that error, one bit each
	x     float64                // of the first step; it grows by 1 a step
	_     [7]float64
	place [slots + spare]int32 // the index of each competitor among the candidates
	_     [32]byte

	// For groups with several members: how many members of a competitor have its count, and how
	// many members it has.
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

// raceGo runs all heats. The count of the winning slot, or of the first of several, grows by 1. If
// turns, it grows only if no member is left, and it grows for all slots that tie: the following
// steps are then invalid. If apart, slot 0 is not fused.
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

// enter fills the slots with the groups whose error at x is above tau and returns their number,
// which may exceed slots. If apart, the first group always gets slot 0.
func (h *heat) enter(w, c []float64, x, tau float64, fused, apart bool) int {
	n := sift(h.w[:], h.c[:], h.place[:], slots, w, c, x, tau, fused, apart)
	for i := n; i < h.used; i++ {
		h.c[i] = gone
	}
	h.used = min(n+spare, slots)
	return n
}

// siftGo copies the groups whose error at x is above tau, and, if apart, the first group, to toW
// and toC, and their indices to place. It returns their number, and stops above room. It may write
// up to two further vectors of arbitrary groups; the first vector after the groups has count gone.
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
