package gpu

import (
	"context"
	"encoding/binary"
	"math"

	"mula/xpu"
	"mula/xpu/opencl"
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
	var t table
	for i, x := range stretches {
		t.add(x.Elements(), squaresLength, typed(c.reads(x)))
		if i+1 == len(stretches) || !t.has(c.reads(stretches[i+1])) {
			c.launch("sum_squares", c.rows(t.groups), result, t.memory[0], c.upload(t), integer(t.stretches()),
				integer(squaresLength))
			result = result.plus(3 * t.groups)
			t = table{}
		}
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
		c.launch("checksums", c.rows(squareGroups(x.Elements())), result, typed(c.reads(x)), long(x.Elements()),
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
	memory := func(x xpu.Moments) [4]argument {
		return [4]argument{c.writes(x.Weight), typed(c.writes(x.Grad)), typed(c.writes(x.M)),
			typed(c.writes(x.V))}
	}
	var t table
	for i, x := range stretches {
		of := memory(x)
		t.add(x.Weight.Elements(), length, of[:]...)
		if i+1 < len(stretches) {
			if next := memory(stretches[i+1]); t.has(next[:]...) {
				continue
			}
		}
		args := [9 + xpu.UpdateConstants + 1]argument{t.memory[0], t.memory[1], t.memory[2], t.memory[3], resultBefore,
			resultChange, c.upload(t), integer(t.stretches()), integer(length)}
		for i, k := range u.Constants {
			args[9+i] = number(float64(k))
		}
		args[9+xpu.UpdateConstants] = number(float64(u.Keep))
		c.launch("update_"+u.Rule, c.rows(t.groups), args[:]...)
		if len(before) > 0 {
			resultBefore, resultChange = resultBefore.plus(3*t.groups), resultChange.plus(3*t.groups)
		}
		t = table{}
	}
}

// A table has stretches in the same memories, for one launch; see stretches.cl. A model with many
// experts has thousands of small weights.
type table struct {
	memory [4]argument // from their first elements on
	rows   []int64
	groups int
}

func (t *table) stretches() int { return len(t.rows) / 6 }

// add adds n elements; a group has length elements.
func (t *table) add(n, length int, memory ...argument) {
	var row [6]int64
	for i, a := range memory {
		if t.memory[i] = a; a.at != none {
			t.memory[i].at, row[i] = 0, int64(a.at)
		}
	}
	row[4], row[5] = int64(n), int64(t.groups)
	t.rows = append(t.rows, row[:]...)
	t.groups += over(n, length)
}

// has reports whether a stretch in these memories can be added.
func (t *table) has(memory ...argument) bool {
	for i, a := range memory {
		if a.buffer != t.memory[i].buffer || a.at == none != (t.memory[i].at == none) {
			return false
		}
	}
	return true
}

// upload returns the table in the device's memory. Tables are kept: a run has the same tables
// in every step.
func (c *command) upload(t table) argument {
	d := c.d
	key := make([]byte, 0, 8*len(t.rows))
	for _, n := range t.rows {
		key = binary.NativeEndian.AppendUint64(key, uint64(n))
	}
	b := d.tables[string(key)]
	if b == nil && d.err == nil {
		if len(d.tables) == maxTables {
			d.dropTables()
		}
		var err error
		if b, err = d.reserve(8 * int64(len(t.rows))); err == nil {
			if err = opencl.Write(context.Background(), d.queue, b, 0, t.rows); err != nil {
				d.unreserve(b)
			}
		}
		if err != nil {
			c.fail(err)
			return c.absent()
		}
		if d.tables == nil {
			d.tables = map[string]*opencl.Buffer{}
		}
		d.tables[string(key)] = b
	}
	if b == nil {
		return c.absent()
	}
	return argument{buffer: b}
}

// maxTables is the number of tables that are kept.
const maxTables = 1024

func (d *Device) dropTables() {
	for _, b := range d.tables {
		d.unreserve(b)
	}
	clear(d.tables)
}
