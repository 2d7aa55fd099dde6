package gpu

import (
	"math"

	"mula/xpu"
)

// squaresLength is the number of elements whose squares one group of work-items sums; it divides
// [xpu.BlockSize]. The host adds the sums of a block.
const squaresLength = 1 << 14

// updateLength is the number of weights that a group updates if nothing is summed.
const updateLength = 1 << 11

// squareGroups returns the number of groups that sum the squares of a stretch.
func squareGroups(n int) int { return over(n, squaresLength) }

// A squareSums converts the sums of groups to sums of blocks.
type squareSums struct{ lengths []int } // lengths of the stretches

func (s *squareSums) add(n int) { s.lengths = append(s.lengths, n) }

// words returns the number of words that the groups return to the host.
func (s *squareSums) words() (n int) {
	for _, length := range s.lengths {
		n += 3 * squareGroups(length)
	}
	return n
}

// give sets the sums of blocks.
func (s *squareSums) give(sums []float64, words []uint32) {
	const scale = 0x1p160 // the square of the scale of large numbers
	next := func() float64 {
		v := math.Float32frombits(words[0])
		words = words[1:]
		return float64(v)
	}
	at := 0
	for _, length := range s.lengths {
		for begin := 0; begin < length; begin += xpu.BlockSize {
			sum := 0.0
			for range squareGroups(min(xpu.BlockSize, length-begin)) {
				large, middle, small := next(), next(), next()
				sum += large*scale + middle + small/scale
			}
			sums[at] = sum
			at++
		}
	}
}

// SumSquares sums squares; see [xpu.Layers].
func (d *Device) SumSquares(stretches []xpu.Tensor, sums []float64) {
	xpu.CheckBlocks("SumSquares", stretches, len(sums))
	var s squareSums
	for _, x := range stretches {
		s.add(x.Elements())
	}
	c := d.begin()
	defer c.end()
	result := c.result(s.words(), func(words []uint32) { s.give(sums, words) })
	for _, x := range stretches {
		c.launch("sum_squares", c.rows(squareGroups(x.Elements())), result, c.reads(x), long(x.Elements()),
			integer(squaresLength))
		result = result.plus(3 * squareGroups(x.Elements()))
	}
}

// Checksums computes the checksums of blocks; see [xpu.Layers].
func (d *Device) Checksums(stretches []xpu.Tensor, sums []uint64) {
	xpu.CheckBlocks("Checksums", stretches, len(sums))
	c := d.begin()
	defer c.end()
	var lengths []int
	words := 0
	for _, x := range stretches {
		lengths = append(lengths, x.Elements())
		words += 2 * squareGroups(x.Elements())
	}
	result := c.result(words, func(words []uint32) {
		at := 0
		for _, n := range lengths {
			for begin := 0; begin < n; begin += xpu.BlockSize {
				sums[at] = 0
				for range squareGroups(min(xpu.BlockSize, n-begin)) {
					sums[at] += uint64(words[0]) | uint64(words[1])<<32
					words = words[2:]
				}
				at++
			}
		}
	})
	for _, x := range stretches {
		c.launch("checksums", c.rows(squareGroups(x.Elements())), result, c.reads(x), long(x.Elements()),
			integer(squaresLength),
			integer(xpu.BlockSize), unsigned(xpu.ChecksumKey))
		result = result.plus(2 * squareGroups(x.Elements()))
	}
}

// Update updates weights and optimizer state; see [xpu.Layers].
func (d *Device) Update(u xpu.Update, stretches []xpu.Moments, before, change []float64) {
	xpu.CheckUpdate(u, stretches, before, change)
	c := d.begin()
	defer c.end()
	var s squareSums
	length := updateLength
	if len(before) > 0 {
		length = squaresLength
		for _, x := range stretches {
			s.add(x.Weight.Elements())
		}
	}
	resultBefore := c.result(s.words(), func(words []uint32) { s.give(before, words) })
	resultChange := c.result(s.words(), func(words []uint32) { s.give(change, words) })
	for _, x := range stretches {
		n := over(x.Weight.Elements(), length)
		args := [8 + xpu.UpdateConstants + 1]argument{c.writes(x.Weight), c.writes(x.Grad), c.writes(x.M),
			c.writes(x.V),
			resultBefore, resultChange, long(x.Weight.Elements()), integer(length)}
		for i, k := range u.Constants {
			args[8+i] = number(float64(k))
		}
		args[8+xpu.UpdateConstants] = number(float64(u.Keep))
		c.launch("update_"+u.Rule, c.rows(n), args[:]...)
		if len(before) > 0 {
			resultBefore, resultChange = resultBefore.plus(3*n), resultChange.plus(3*n)
		}
	}
}
