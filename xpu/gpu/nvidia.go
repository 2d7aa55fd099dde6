package gpu

import "fmt"

// Products on tensor cores, of operands of bfloat16: two kernels round and pack operands, and one
// multiplies them; see nvidia.cl. The terms of an operand lie side by side in its packed copy, so
// one kernel multiplies operands of all forms. Packed weights are kept, as in pvc.go.

// Sizes of nvidia.cl.
const (
	turnRows      = 64  // SLAB
	turnItems     = 128 // work-items of nvidia_turn
	packTerms     = 4   // terms of a work-item of nvidia_pack
	tensorLanes   = 32  // work-items of a warp
	tensorColumns = 8   // columns of a block; it has twice as many rows
)

// tensorTerms is the number of terms of a chain on tensor cores: a multiple of all steps.
const tensorTerms = 2048

// A tensorTile is the tile of a work-group: down × across warps of high × wide blocks each, and a
// number of stages, each a step of some pieces of 16 bytes.
type tensorTile struct{ down, across, high, wide, pieces, stages int }

// largeTile needs 48 KiB of local memory, which is all that NVIDIA's OpenCL offers, and at most 128
// registers, so that a multiprocessor has two work-groups of 256 work-items. On an H100 it was the
// fastest of nine tiles.
var largeTile = tensorTile{down: 2, across: 4, high: 4, wide: 4, pieces: 4, stages: 3}

func (t tensorTile) rows() int    { return 2 * tensorColumns * t.high * t.down }
func (t tensorTile) columns() int { return tensorColumns * t.wide * t.across }
func (t tensorTile) step() int    { return pieceNumbers * t.pieces } // terms

func (t tensorTile) options() string {
	return fmt.Sprintf("-DDOWN=%d -DACROSS=%d -DHIGH=%d -DWIDE=%d -DPIECES=%d -DSTAGES=%d", t.down, t.across, t.high,
		t.wide, t.pieces, t.stages)
}

// multiplyTensors computes a product on tensor cores.
func (c *command) multiplyTensors(p product) {
	tile, a, b := c.d.shape.tile, operand{c.reads(p.a), p.aColumns, p.aRows}, operand{c.reads(p.b), p.bRows, p.bColumns}
	down, across, parts := over(p.m, tile.rows()), over(p.n, tile.columns()), 1
	if p.groupRows || p.groupSum {
		parts = p.counts.Elements()
	}
	step, steps := tile.step(), over(p.k, tile.step())
	tiles, plan := c.absent(), c.absent()
	var left, right argument
	if p.groupSum {
		steps = pieces(parts, p.k, step)
		plan = c.take(2 * (parts + 1))
		c.launch("nvidia_plan", items(parts+1), plan, c.reads(p.counts), integer(parts), integer(p.k))
		left, right = c.take(p.m*steps*step/2), c.take(p.n*steps*step/2)
		c.turn(left, a, plan, parts, 1, 0, p.m, p.k, steps)
		c.turn(right, b, plan, parts, 1, 0, p.n, p.k, steps)
	} else {
		left = c.take(p.m * steps * step / 2)
		c.pack(left, a, 1, 0, p.m, p.k, step, steps)
		var packed bool
		right, packed = c.packedWeights(p.groupRows || p.aColumns == 1,
			packedKey{term: b.term, index: b.index, groups: parts, k: p.k, n: p.n}, p.b, parts*p.n*steps*step/2)
		if !packed {
			c.pack(right, b, parts, p.stack, p.n, p.k, step, steps)
		}
	}
	if p.groupRows {
		down += parts
		tiles = c.take(4 * down)
		c.launch("tiles_of_groups", items(1), tiles, c.reads(p.counts), integer(parts), integer(tile.rows()),
			integer(p.m), integer(down))
	}
	to, warps := c.writes(p.c), tile.down*tile.across
	if c.d.shape.emulate == "" {
		warps *= tensorLanes
	}
	columns := p.n // of all matrices B
	if p.groupRows {
		columns *= parts
	}
	multiply := func(to argument, first, terms, matrices, chain, ldc int, accumulate bool) {
		c.launch("nvidia_product", groups(warps, down*across, 1, matrices), typed(to),
			left.plus(first/2*p.m), right.plus(first/2*columns), tiles, plan, integer(parts), integer(p.m),
			integer(p.n), integer(step*over(terms, step)), integer(columns), long(ldc), flag(accumulate),
			integer(chain))
	}
	switch {
	case p.groupSum:
		multiply(to, 0, p.k, parts, 0, p.ldc, p.accumulate)
	case p.groupRows:
		multiply(to, 0, p.k, 1, 0, p.ldc, p.accumulate)
	default:
		c.inChains(p, to, tensorTerms, multiply)
	}
}

// pack rounds and packs matrices of `rows` rows, the rows of A or the columns of B, in steps. They
// are `size` elements apart.
func (c *command) pack(to argument, x operand, matrices, size, rows, k, step, steps int) {
	if x.term != 1 {
		c.turn(to, x, c.absent(), 0, matrices, size, rows, k, steps)
		return
	}
	c.launch("nvidia_pack", items(matrices*rows*steps*(step/packTerms)), to, typed(x.memory),
		integer(matrices*rows), integer(rows), long(size), long(x.index), integer(k), integer(step), integer(steps))
}

// turn is pack for matrices whose rows lie side by side. A plan has the terms of groups.
func (c *command) turn(to argument, x operand, plan argument, parts, matrices, size, rows, k, steps int) {
	c.launch("nvidia_turn", groups(turnItems, over(rows, turnRows), steps, matrices), to, typed(x.memory),
		plan, integer(parts), integer(rows), long(size), long(x.term), integer(k))
}
