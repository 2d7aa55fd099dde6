package index

import (
	"math/bits"
	"sync"
)

// smallest is the number of indices from which a permutation is computed index by index. For fewer
// indices, a Feistel network has too few bits per half to mix well (on five indices it is far from
// uniform over their 120 orders), and a table is small.
const smallest = 1 << 16

// The constants of order version 1. They are part of the format: any other value changes the order
// of all plans.
const (
	// 2^64 divided by the golden ratio: the step of splitmix64, and the first multiplier of the
	// round function
	golden = 0x9e3779b97f4a7c15
	second = 0xd6e8feb86659fd93 // the second multiplier of the round function; also mixes the size into the key
	rounds = 6
)

// splitmix64 advances the state and returns the next value of the generator of Steele, Lea and
// Flood ("Fast splittable pseudorandom number generators", OOPSLA 2014), with the constants of its
// public-domain C version.
func splitmix64(state *uint64) uint64 {
	*state += golden
	z := *state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// A Permutation is a keyed bijection on [0, n). It is invertible, the same on every machine, and
// safe for concurrent use.
//
// From 65,536 indices on, it is a balanced Feistel network with cycle walking, which stores only
// six round keys. Below, it is a Fisher–Yates shuffle, stored as a table of 2 bytes per index (and
// 2 more once [Permutation.Inverse] is used).
//
// It is a shuffle, not a cipher: it hides nothing.
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

// newPermutation returns the permutation of [0, n) that key selects.
func newPermutation(n, key uint64) *Permutation {
	p := new(Permutation)
	p.init(n, key)
	return p
}

func (p *Permutation) init(n, key uint64) {
	if n >= smallest {
		p.network(n, key)
		return
	}
	p.n, p.table = n, make([]uint16, n)
	state := key ^ n*second
	for i := range p.table {
		p.table[i] = uint16(i)
	}
	for i := len(p.table) - 1; i > 0; i-- {
		j := draw(&state, uint64(i))
		p.table[i], p.table[j] = p.table[j], p.table[i]
	}
}

// network sets up the Feistel network for [0, n), n at least 1. A half has half of the bits that n
// − 1 needs, rounded up.
func (p *Permutation) network(n, key uint64) {
	p.n, p.half = n, (uint(max(2, bits.Len64(n-1)))+1)/2
	state := key ^ n*second
	for i := range p.keys {
		p.keys[i] = splitmix64(&state)
	}
}

// draw returns a uniform number of [0, last]: the low bits of the generator, drawn again while they
// exceed last. It needs fewer than two draws on average, and no product wider than a word, which
// other languages may not support.
func draw(state *uint64, last uint64) uint64 {
	mask := uint64(1)<<bits.Len64(last) - 1
	for {
		if v := splitmix64(state) & mask; v <= last {
			return v
		}
	}
}

// Len returns n, the number of indices.
func (p *Permutation) Len() uint64 { return p.n }

// At returns the image of i, which must be below n.
func (p *Permutation) At(i uint64) uint64 {
	if p.n < smallest {
		return uint64(p.table[i])
	}
	return p.walk(i)
}

// walk applies the network to an index until its image is below n.
func (p *Permutation) walk(i uint64) uint64 {
	// Half the bits, rounded up, can number up to 4n indices. The network is applied again to an
	// image at or beyond n. Following the cycle of a bijection from inside [0, n) leads back to [0,
	// n), after fewer than 4 steps on average.
	for {
		if i = p.pass(i); i < p.n {
			return i
		}
	}
}

// fill sets dst to the images of consecutive indices, starting with i.
func (p *Permutation) fill(dst []int64, i uint64) {
	if p.n < smallest {
		for j, image := range p.table[i:][:len(dst)] {
			dst[j] = int64(image)
		}
		return
	}
	// Applying the network until each index is done would keep the processor from overlapping
	// indices, because the number of passes is unpredictable. So one pass is applied to all
	// indices, then another to the remaining ones, until none is left.
	var again [64]uint8
	for len(dst) > 0 {
		part := dst[:min(len(dst), len(again))]
		left := 0
		for j := range part {
			image := p.pass(i + uint64(j))
			part[j] = int64(image)
			again[left&63] = uint8(j)
			left += int(^(image-p.n)>>63) & 1 // 1 if image ≥ n: both are below 2^63
		}
		for left > 0 {
			list := again[:left]
			left = 0
			for _, j := range list {
				image := p.pass(uint64(part[j]))
				part[j] = int64(image)
				again[left&63] = j
				left += int(^(image-p.n)>>63) & 1
			}
		}
		dst, i = dst[len(part):], i+uint64(len(part))
	}
}

// pass applies the network once to an index.
func (p *Permutation) pass(i uint64) uint64 {
	mask := uint64(1)<<(p.half&63) - 1
	l, r := i>>(p.half&63), i&mask
	down := (64 - p.half) & 63
	for _, k := range &p.keys {
		l, r = r, l^mix(r^k)>>down
	}
	return l<<(p.half&63) | r
}

// Inverse returns the index whose image is j, which must be below n.
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

// round is the round function: it maps half bits and a key to half bits, from the top of a product,
// where multiplication mixes best.
func (p *Permutation) round(r, k uint64) uint64 { return mix(r^k) >> (64 - p.half) }

func mix(t uint64) uint64 {
	t *= golden
	return (t ^ t>>32) * second
}
