package index

import (
	"math/bits"
	"sync"
)

// smallest is the number of indices from which a permutation is computed index by index. Below it a Feistel network has too few bits a
// half to mix well (on five indices it misses the uniform distribution over their 120 orders by far), and a table is small.
const smallest = 1 << 16

// The constants of order version 1. They are part of the format: a plan means something else with any other value.
const (
	golden = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio: the step of splitmix64, and the first multiplier of the round function
	second = 0xd6e8feb86659fd93 // the second multiplier of the round function; also mixes the size into the key
	rounds = 6
)

// splitmix64 steps the state and gives the next value of the generator of Steele, Lea and Flood ("Fast splittable pseudorandom number
// generators", OOPSLA 2014), with the constants of its public-domain C version.
func splitmix64(state *uint64) uint64 {
	*state += golden
	z := *state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// A Permutation is a keyed bijection on [0, n), invertible, the same on every machine. It is safe for concurrent use.
//
// From 65,536 indices on it is a balanced Feistel network with cycle walking, of which nothing is stored but six round keys. Below, it is
// a Fisher–Yates shuffle held as a table of 2 bytes an index (and as much again once [Permutation.Inverse] is used).
//
// It shuffles well; it hides nothing. Do not use it as a cipher.
type Permutation struct {
	n uint64

	// the network, for n ≥ smallest
	half uint // bits in each half of an index
	keys [rounds]uint64

	// the table, for n < smallest
	table       []uint16
	inverse     []uint16
	inverseOnce sync.Once
}

// NewPermutation returns the permutation of [0, n) that key selects.
func NewPermutation(n, key uint64) *Permutation {
	if n >= smallest {
		return newNetwork(n, key)
	}
	p := &Permutation{n: n, table: make([]uint16, n)}
	state := key ^ n*second
	for i := range p.table {
		p.table[i] = uint16(i)
	}
	for i := len(p.table) - 1; i > 0; i-- {
		j := draw(&state, uint64(i))
		p.table[i], p.table[j] = p.table[j], p.table[i]
	}
	return p
}

// newNetwork returns the Feistel network for [0, n), n at least 1. Half an index has half of the bits that n − 1 needs, rounded up.
func newNetwork(n, key uint64) *Permutation {
	p := &Permutation{n: n, half: (uint(max(2, bits.Len64(n-1))) + 1) / 2}
	state := key ^ n*second
	for i := range p.keys {
		p.keys[i] = splitmix64(&state)
	}
	return p
}

// draw gives a number of [0, last], each as likely as any other: the low bits of the generator, drawn again while they exceed last. Fewer
// than two draws are needed on average, and no product wider than a word, which a port to another language may lack.
func draw(state *uint64, last uint64) uint64 {
	mask := uint64(1)<<bits.Len64(last) - 1
	for {
		if v := splitmix64(state) & mask; v <= last {
			return v
		}
	}
}

// Len is n, the number of indices.
func (p *Permutation) Len() uint64 { return p.n }

// At is the image of i, which must be below n.
func (p *Permutation) At(i uint64) uint64 {
	if p.n < smallest {
		return uint64(p.table[i])
	}
	return p.walk(i)
}

// walk sends an index through the network until its image is below n.
func (p *Permutation) walk(i uint64) uint64 {
	// Half the bits rounded up can number up to 4n indices. An image at or beyond n is sent through the network again: following the
	// cycle of a bijection from inside [0, n) leads back there, after fewer than 4 steps on average.
	mask := uint64(1)<<p.half - 1
	for {
		l, r := i>>p.half, i&mask
		for _, k := range &p.keys {
			l, r = r, l^p.round(r, k)
		}
		if i = l<<p.half | r; i < p.n {
			return i
		}
	}
}

// Inverse is the index whose image is j, which must be below n.
func (p *Permutation) Inverse(j uint64) uint64 {
	if p.n < smallest {
		p.inverseOnce.Do(func() {
			p.inverse = make([]uint16, len(p.table))
			for i, v := range p.table {
				p.inverse[v] = uint16(i)
			}
		})
		return uint64(p.inverse[j])
	}
	return p.walkBack(j)
}

// walkBack is the inverse of walk.
func (p *Permutation) walkBack(j uint64) uint64 {
	mask := uint64(1)<<p.half - 1
	for {
		l, r := j>>p.half, j&mask
		for q := rounds - 1; q >= 0; q-- {
			l, r = r^p.round(l, p.keys[q]), l
		}
		if j = l<<p.half | r; j < p.n {
			return j
		}
	}
}

// round is the round function: half bits out of half bits and a key, from the top of a product, where multiplication mixes best.
func (p *Permutation) round(r, k uint64) uint64 {
	t := (r ^ k) * golden
	t ^= t >> 32
	t *= second
	return t >> (64 - p.half)
}
