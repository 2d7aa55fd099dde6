package numpy

import (
	"math/bits"
	"unsafe"
)

// SeedSequence returns numpy.random.SeedSequence(entropy).generate_state(n, uint64) for an entropy
// of up to 64 bits (O'Neill's seed_seq_fe).
func SeedSequence(entropy uint64, n int) []uint64 {
	const (
		multA, multB       = 0x931e8875, 0x58f38ded
		mixLeft, mixRight  = 0xca01f9dd, 0x4973f715
		initialA, initialB = 0x43b0d7e5, 0x8b51f9dd
	)
	running := uint32(initialA)
	hash := func(v uint32) uint32 {
		v ^= running
		running *= multA
		v *= running
		return v ^ v>>16
	}
	pool := [4]uint32{uint32(entropy), uint32(entropy >> 32)}
	for i := range pool {
		pool[i] = hash(pool[i])
	}
	for from := range pool {
		for to := range pool {
			if to != from {
				v := mixLeft*pool[to] - mixRight*hash(pool[from])
				pool[to] = v ^ v>>16
			}
		}
	}
	out := make([]uint64, n)
	running = initialB
	for i := range 2 * n {
		v := pool[i%4] ^ running
		running *= multB
		v *= running
		v ^= v >> 16
		out[i/2] |= uint64(v) << (i % 2 * 32)
	}
	return out
}

// uint128 is an integer modulo 2¹²⁸.
type uint128 struct{ high, low uint64 }

func (x uint128) plus(y uint128) uint128 {
	low, carry := bits.Add64(x.low, y.low, 0)
	return uint128{x.high + y.high + carry, low}
}

func (x uint128) times(y uint128) uint128 {
	high, low := bits.Mul64(x.low, y.low)
	return uint128{high + x.high*y.low + x.low*y.high, low}
}

// pcgMultiplier returns the multiplier of PCG64's linear congruential generator.
func pcgMultiplier() uint128 { return uint128{0x2360ed051fc65da4, 0x4385df649fccf645} }

// Generator is numpy.random.Generator(numpy.random.PCG64(seed)): the permuted congruential
// generator XSL-RR 128/64 (O'Neill, 2014), seeded through [SeedSequence]. It is not safe for
// concurrent use. Copying the value copies the generator.
type Generator struct {
	state     uint128 // after the block
	increment uint128
	block     [blockWords / 4][2]uint64 // outputs
	next      int                       // the first unused output
	// the high half of the last output whose low half Uint32 returned
	half   uint32
	halved bool // half is not yet used
}

// NewGenerator returns Generator(PCG64(seed)) at the start of its sequence.
func NewGenerator(seed uint64) *Generator {
	w := SeedSequence(seed, 4)
	g := &Generator{increment: uint128{w[2]<<1 | w[3]>>63, w[3]<<1 | 1}}
	g.state = g.increment.plus(uint128{w[0], w[1]}).times(pcgMultiplier()).plus(g.increment)
	g.next = 2 * len(g.block)
	return g
}

// refill computes the next block of outputs: the even-numbered and the odd-numbered outputs as two
// independent sequences with double steps, which a processor partly overlaps.
func (g *Generator) refill() {
	m := pcgMultiplier()
	wide, increment := m.times(m), g.increment.times(m).plus(g.increment)
	odd, even := g.state, g.state.times(m).plus(g.increment)
	for k := range g.block {
		odd = odd.times(wide).plus(increment)
		pair := &g.block[k]
		pair[0], pair[1] = even.output(), odd.output()
		even = even.times(wide).plus(increment)
	}
	g.state = odd
	g.next = 0
}

// output is XSL-RR: the xor of the halves, rotated by the upper six bits.
func (x uint128) output() uint64 { return bits.RotateLeft64(x.high^x.low, -int(x.high>>58)) }

// Uint64 returns the next 64 bits of the sequence. A half that [Generator.Uint32] has not returned
// yet stays for its next call.
func (g *Generator) Uint64() uint64 {
	if g.next == 2*len(g.block) {
		g.refill()
	}
	g.next++
	return g.block[(g.next-1)/2][(g.next-1)%2]
}

// Uint32 returns the next 32 bits: the low half of the next 64, then their high half.
func (g *Generator) Uint32() uint32 {
	if g.halved {
		g.halved = false
		return g.half
	}
	v := g.Uint64()
	g.half, g.halved = uint32(v>>32), true
	return uint32(v)
}

// Interval draws a number between 0 and max, both included, like [RandomState.Interval].
func (g *Generator) Interval(max uint64) uint64 { return interval(g, max) }

// Skip advances the generator by the draws of a shuffle of n elements.
func (g *Generator) Skip(n int64) { skip(g, n) }

func (g *Generator) partners(dst []uint32, i uint32) int {
	done := 0
	for i > 0 && len(dst)-done >= drawRoom {
		if g.halved {
			dst[done] = uint32(g.Interval(uint64(i)))
			done++
			i--
			continue
		}
		if g.next == 2*len(g.block) {
			g.refill()
		}
		// On a little-endian machine, the memory of the block is the sequence of halves.
		words := (*[blockWords]uint32)(unsafe.Pointer(&g.block))
		used, n := draw(words[2*g.next:], dst[done:], i)
		g.next += (used + 1) / 2
		if used%2 != 0 {
			g.half, g.halved = words[2*g.next-1], true
		}
		done += n
		i -= uint32(n)
	}
	return done
}
