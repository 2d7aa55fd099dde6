package gpu

import (
	"fmt"

	"mula/xpu"
)

// Products that read matrices of bfloat16 as they are in memory; see pvc_direct.cl. Matrices of
// float32 are rounded first. Rounded weights are kept, as in pvc.go.

const directFile = "pvc_direct.cl"

// blocks2D is the extension that these kernels need.
const blocks2D = "cl_intel_subgroup_2d_block_io"

// Requirements for a matrix of bfloat16 that is read as it is, in numbers: the memory starts at a
// multiple of directStart, rows have at least directWidth numbers and are a multiple of directPitch
// apart. Rounded copies have rows of a multiple of directStart numbers.
const directStart, directWidth, directPitch = 32, 32, 8

// Work-groups of products of many rows are 8 × 4 sub-groups, which read a third less from the
// second-level cache than 4 × 4. They have 256 rows of a group, which for few rows are many unused
// ones: at tallRows rows in a group, at most an eighth.
const tallSide, tallRows = 2 * matrixSide, 2048

// A directMatrix is a matrix in memory that a kernel reads: `matrix` of pvc_direct.cl, without its
// number of rows. Matrices of groups are size numbers apart.
type directMatrix struct {
	memory             argument
	width, pitch, size int
}

// direct returns matrices for a kernel of pvc_direct.cl, whose lines are the rows in memory of
// `lines` rows and `width` columns, `stride` apart. keep means that a rounded copy is kept, of the
// tensor of.
func (c *command) direct(memory argument, matrices, size, lines, width, stride int, keep bool,
	of xpu.Tensor) directMatrix {
	if memory.bf16 && width >= directWidth && width%2 == 0 && stride%directPitch == 0 &&
		memory.at%directStart == 0 && (matrices == 1 || size%directStart == 0) {
		memory.bf16 = false // the kernel's parameter has no type
		return directMatrix{memory, width, stride, size}
	}
	pitch := directStart * over(max(1, width), directStart)
	to, rounded := c.packedWeights(keep, packedKey{index: pitch, groups: matrices, k: width, n: lines}, of,
		matrices*lines*pitch/2)
	to.at *= 2 // a kernel's ushort is half an element of scratch memory
	if !rounded {
		c.launch("pvc_round", items(matrices*lines*(pitch/matrixStep)), to, typed(memory), integer(matrices),
			integer(lines), long(size), long(stride), integer(width), integer(pitch))
	}
	return directMatrix{to, pitch, pitch, lines * pitch}
}

// multiplyDirect computes a product without packing its operands, unless A is transposed and B,
// too.
func (c *command) multiplyDirect(p product) (done bool) {
	groups := 1
	if p.counts.Present() {
		groups = p.counts.Elements()
	}
	turned := p.groupSum || p.aColumns != 1
	if p.k == 0 || turned && p.bColumns != 1 {
		return false
	}
	if turned {
		c.gradientDirect(p, groups)
		return true
	}
	a, b := c.operand(p.a, p.aColumns, p.aRows, true), c.operand(p.b, p.bRows, p.bColumns, true)
	left := c.direct(a.memory, 1, 0, p.m, p.k, a.index, false, p.a)
	kernel, lines, width, stride := "pvc_forward", p.n, p.k, b.index
	if b.term != 1 {
		kernel, lines, width, stride = "pvc_backward", p.k, p.n, b.term
	}
	right := c.direct(b.memory, groups, p.stack, lines, width, stride, true, p.b)
	to, high := c.writes(p.c), c.high(p.m/groups)
	plan := c.plan(p.counts, groups, p.m, high*matrixRows)
	c.launchDirect(kernel, high, pieces(groups, p.m, high*matrixRows), p.n, 1,
		typed(to), left.memory, right.memory, plan, integer(groups), integer(p.ldc), integer(p.n),
		integer(p.k), integer(left.width), integer(left.pitch), integer(right.width), integer(right.pitch),
		long(right.size), flag(blockWrites(to, 1, 0, p.n, p.ldc)), flag(p.accumulate))
	return true
}

// gradientDirect multiplies, for each group, the transpose of its rows of A by its rows of B.
func (c *command) gradientDirect(p product, groups int) {
	a, b := c.operand(p.a, p.aColumns, p.aRows, true), c.operand(p.b, p.bRows, p.bColumns, true)
	left := c.direct(a.memory, 1, 0, p.k, p.m, a.term, false, p.a)
	right := c.direct(b.memory, 1, 0, p.k, p.n, b.term, false, p.b)
	to, high := c.writes(p.c), c.high(p.m)
	plan := c.plan(p.counts, groups, p.k, high*matrixRows)
	c.launchDirect("pvc_gradient", high, over(p.m, high*matrixRows), p.n, groups,
		typed(to), left.memory, right.memory, plan, integer(groups), long(p.m*p.n), integer(p.ldc),
		integer(p.m), integer(p.n), integer(left.width), integer(left.pitch), integer(right.width),
		integer(right.pitch), flag(blockWrites(to, groups, p.m*p.n, p.n, p.ldc)), flag(p.accumulate))
}

// high returns the number of sub-groups from top to bottom in a work-group, for the average number
// of rows of a group.
func (c *command) high(rows int) int {
	if rows >= c.d.shape.tall {
		return tallSide
	}
	return matrixSide
}

// directOptions returns the options of pvc_direct.cl for work-groups of tallSide × 4 sub-groups.
func (d *Device) directOptions() string {
	return fmt.Sprintf("%s -DHIGH=%d", d.matrixOptions(), tallSide)
}

// launchDirect launches a kernel of pvc_direct.cl with work-groups of high × 4 sub-groups, for a
// number of bands, n columns and a number of matrices.
func (c *command) launchDirect(kernel string, high, bands, n, matrices int, args ...argument) {
	g := c.matrixGrid(high, over(n, matrixSide*matrixColumns), bands, matrices)
	if high == matrixSide {
		c.launch(kernel, g, args...)
		return
	}
	c.launchVariant(variant{directFile, c.d.directOptions(), kernel}, g, args...)
}

// blockWrites reports whether blocks with two dimensions can be written to matrices of n columns
// whose rows are ld elements apart: the matrices must start at a multiple of 64 bytes, and rows
// have at least 64 bytes and be a multiple of 16 bytes apart. Matrices are size elements apart.
func blockWrites(c argument, matrices, size, n, ld int) bool {
	bytes := 4
	if c.bf16 {
		bytes = 2
	}
	return int(c.at)*bytes%64 == 0 && (matrices == 1 || size*bytes%64 == 0) && n*bytes >= 64 && n*bytes%4 == 0 &&
		ld*bytes%16 == 0
}
