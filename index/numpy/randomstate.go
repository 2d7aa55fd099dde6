package numpy

// RandomState is numpy.random.RandomState(seed): the Mersenne Twister MT19937 (Matsumoto and
// Nishimura, 1998), seeded by init_genrand. It is not safe for concurrent use. Copying the value
// copies the generator.
type RandomState struct {
	// state is the twister's state, followed by a copy of its first vector of 16 words, so that the
	// recurrence reads ahead without wrapping.
	state [blockWords + 16]uint32
	block [blockWords]uint32 // the outputs of this state
	next  int                // the first unused output
}

// The parameters of MT19937.
const (
	blockWords = 624 // words of state, and of output between two passes over the state
	twistShift = 397
	upperBit   = 0x80000000
	twistBits  = 0x9908b0df
)

// NewRandomState returns RandomState(seed) at the start of its sequence.
func NewRandomState(seed uint32) *RandomState {
	r := &RandomState{next: blockWords}
	for i := range r.state[:blockWords] {
		r.state[i] = seed
		seed = 1812433253*(seed^seed>>30) + uint32(i) + 1
	}
	return r
}

// Uint32 returns the next 32 bits of the sequence.
func (r *RandomState) Uint32() uint32 {
	if r.next == blockWords {
		r.refill()
	}
	r.next++
	return r.block[r.next-1]
}

// Uint64 returns the next 64 bits: two draws of 32, the high half first.
func (r *RandomState) Uint64() uint64 {
	high := r.Uint32()
	return uint64(high)<<32 | uint64(r.Uint32())
}

// Interval draws a number between 0 and max, both included, like numpy's random_interval: the draw
// is masked to the bits of max and repeated until it does not exceed max. A draw has 32 bits, or 64
// if max is above 2³²-1. For max = 0 nothing is drawn.
func (r *RandomState) Interval(max uint64) uint64 { return interval(r, max) }

// Skip advances the generator by the draws of a shuffle of n elements.
func (r *RandomState) Skip(n int64) { skip(r, n) }

// refill computes the next block of outputs.
func (r *RandomState) refill() {
	twist(&r.state, &r.block)
	r.next = 0
}

func (r *RandomState) partners(dst []uint32, i uint32) int {
	done := 0
	for i > 0 && len(dst)-done >= drawRoom {
		if r.next == blockWords {
			r.refill()
		}
		used, n := draw(r.block[r.next:], dst[done:], i)
		r.next += used
		done += n
		i -= uint32(n)
	}
	return done
}

// twistGo computes the next state and writes its tempered outputs.
func twistGo(state *[blockWords + 16]uint32, block *[blockWords]uint32) {
	next := func(a, b, shifted uint32) uint32 {
		y := a&upperBit | b&^upperBit
		return shifted ^ y>>1 ^ -(y&1)&twistBits
	}
	const wrap = blockWords - twistShift
	for k := range wrap {
		state[k] = next(state[k], state[k+1], state[k+twistShift])
	}
	copy(state[blockWords:], state[:16])
	for k := wrap; k < blockWords; k++ {
		state[k] = next(state[k], state[k+1], state[k-wrap])
	}
	for k, y := range state[:blockWords] {
		y ^= y >> 11
		y ^= y << 7 & 0x9d2c5680
		y ^= y << 15 & 0xefc60000
		block[k] = y ^ y>>18
	}
}
