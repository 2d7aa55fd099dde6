package numpy

import (
	"math"
	"math/bits"
)

// Source is a generator for shuffles: [RandomState] or [Generator].
type Source interface {
	Uint32() uint32
	Uint64() uint64
	Interval(max uint64) uint64

	// partners draws the positions with which a shuffle swaps positions i, i-1, … down to 1, and
	// returns how many it wrote: at least one if i > 0 and len(dst) >= drawRoom, at most len(dst).
	// It consumes exactly the draws for these.
	partners(dst []uint32, i uint32) int
}

// interval is numpy's random_interval (legacy-distributions.c and distributions.c).
func interval(src Source, max uint64) uint64 {
	if max == 0 {
		return 0
	}
	mask := uint64(1)<<bits.Len64(max) - 1
	for {
		var v uint64
		if max > math.MaxUint32 {
			v = src.Uint64()
		} else {
			v = uint64(src.Uint32())
		}
		if v &= mask; v <= max {
			return v
		}
	}
}

// skip draws the partners of a shuffle of n elements.
func skip(src Source, n int64) {
	i := n - 1
	for ; i > math.MaxUint32; i-- {
		src.Interval(uint64(i))
	}
	var unused [partnerBatch]uint32
	for i > 0 {
		i -= int64(src.partners(unused[:], uint32(i)))
	}
}

const (
	partnerBatch = 4096 // partners drawn at a time
	drawRoom     = 16   // the minimum free space in dst that draw uses
)

// draw turns 32-bit draws into the partners of positions i, i-1, … down to 1, i > 0. It returns how
// many draws it has used, and how many partners it wrote. It stops when the draws are used up, or
// when less than drawRoom of dst is free.
func draw(words, dst []uint32, i uint32) (used, done int) {
	for used < len(words) && i > 0 && len(dst)-done >= drawRoom {
		mask := uint32(1)<<bits.Len32(i) - 1
		least := mask>>1 + 1 // the last position with this mask
		// In bulk, while the mask is the same. More steps at a time, or fewer positions, make more
		// words ambiguous.
		n := min(len(words)-used, len(dst)-done, int(i-least), max(64, int(min(mask>>6, blockWords)))) &^ 15
		if n > 0 {
			k := accept(words[used:used+n], dst[done:], mask, i)
			used += n
			done += k
			i -= uint32(k)
			continue
		}
		for range 16 {
			v := words[used] & mask
			used++
			if v <= i {
				dst[done] = v
				done++
				i--
			}
			if used == len(words) || i < least || i == 0 {
				break
			}
		}
	}
	return used, done
}

// acceptGo writes the words, masked, that are accepted as partners of positions i, i-1, …, and
// returns their number. It requires i >= len(words), len(dst) >= len(words), and a mask that
// applies to all these positions. len(words) is a multiple of 16.
func acceptGo(words, dst []uint32, mask, i uint32) int {
	dst = dst[:len(words)]
	n, above := 0, uint64(i)+1
	for _, w := range words {
		v := w & mask
		dst[n] = v
		// branch-free, because the branch would be unpredictable
		accepted := (uint64(v) - above) >> 63
		n += int(accepted)
		above -= accepted
	}
	return n
}
