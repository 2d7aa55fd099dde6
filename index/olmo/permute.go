package olmo

import (
	"math/bits"
)

// Permute returns the order of n paths that OLMo-core uses if source_permutation_seed is set:
// Python's random.Random(seed).shuffle of 0, 1, …, n-1.
func Permute(seed int64, n int) []int {
	a := make([]int, n)
	for i := range a {
		a[i] = i
	}
	r := newPythonRandom(seed)
	for i := n - 1; i >= 1; i-- {
		j := r.below(uint32(i + 1))
		a[i], a[j] = a[j], a[i]
	}
	return a
}

// pythonRandom is Python's random.Random: the Mersenne Twister MT19937 of Matsumoto and Nishimura,
// seeded by their init_by_array.
type pythonRandom struct {
	state [624]uint32
	next  int
}

// newPythonRandom returns random.Random(seed): the key is the seed's absolute value in words of 32
// bits, the lowest first.
func newPythonRandom(seed int64) *pythonRandom {
	u := uint64(seed)
	if seed < 0 {
		u = -u
	}
	key := []uint32{uint32(u)}
	if high := uint32(u >> 32); high != 0 {
		key = append(key, high)
	}
	r := &pythonRandom{next: 624}
	s := &r.state
	s[0] = 19650218
	for i := 1; i < len(s); i++ {
		s[i] = 1812433253*(s[i-1]^s[i-1]>>30) + uint32(i)
	}
	i, j := 1, 0
	step := func() {
		if i++; i == len(s) {
			s[0], i = s[len(s)-1], 1
		}
	}
	for range len(s) {
		s[i] = (s[i] ^ (s[i-1]^s[i-1]>>30)*1664525) + key[j] + uint32(j)
		j = (j + 1) % len(key)
		step()
	}
	for range len(s) - 1 {
		s[i] = (s[i] ^ (s[i-1]^s[i-1]>>30)*1566083941) - uint32(i)
		step()
	}
	s[0] = 1 << 31
	return r
}

func (r *pythonRandom) uint32() uint32 {
	if r.next == len(r.state) {
		s := &r.state
		for i := range s {
			y := s[i]&(1<<31) | s[(i+1)%len(s)]&(1<<31-1)
			s[i] = s[(i+397)%len(s)] ^ y>>1 ^ -(y&1)&0x9908b0df
		}
		r.next = 0
	}
	y := r.state[r.next]
	r.next++
	y ^= y >> 11
	y ^= y << 7 & 0x9d2c5680
	y ^= y << 15 & 0xefc60000
	return y ^ y>>18
}

// below draws a uniform number from 0 … n-1: it takes as many high bits of a word as n has, until
// they are below n.
func (r *pythonRandom) below(n uint32) uint32 {
	shift := 32 - bits.Len32(n)
	for {
		if v := r.uint32() >> shift; v < n {
			return v
		}
	}
}
