package gpu

import "mula/xpu"

// Products that read matrices of bfloat16 as they are in memory; see pvc_direct.cl. Matrices of
// float32 are rounded first. Rounded weights are kept, as in pvc.go.

const directFile = "pvc_direct.cl"

// blocks2D is the extension that these kernels need.
const blocks2D = "cl_intel_subgroup_2d_block_io"

// Requirements for a matrix of bfloat16 that is read as it is, in numbers: the memory starts at a
// multiple of directStart, rows have at least directWidth numbers and are a multiple of directPitch
// apart. Rounded copies have rows of a multiple of directStart numbers.
const directStart, directWidth, directPitch = 32, 32, 8

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
	plan := c.plan(p.counts, groups, p.m)
	c.launch(kernel, c.matrixGrid(over(p.n, matrixSide*matrixColumns), pieces(groups, p.m, matrixSide*matrixRows), 1),
		typed(c.writes(p.c)), left.memory, right.memory, plan, integer(groups), integer(p.ldc), integer(p.n),
		integer(p.k), integer(left.width), integer(left.pitch), integer(right.width), integer(right.pitch),
		long(right.size), flag(p.accumulate))
	return true
}

// gradientDirect multiplies, for each group, the transpose of its rows of A by its rows of B.
func (c *command) gradientDirect(p product, groups int) {
	a, b := c.operand(p.a, p.aColumns, p.aRows, true), c.operand(p.b, p.bRows, p.bColumns, true)
	left := c.direct(a.memory, 1, 0, p.k, p.m, a.term, false, p.a)
	right := c.direct(b.memory, 1, 0, p.k, p.n, b.term, false, p.b)
	plan := c.plan(p.counts, groups, p.k)
	c.launch("pvc_gradient",
		c.matrixGrid(over(p.n, matrixSide*matrixColumns), over(p.m, matrixSide*matrixRows), groups),
		typed(c.writes(p.c)), left.memory, right.memory, plan, integer(groups), long(p.m*p.n), integer(p.ldc),
		integer(p.m), integer(p.n), integer(left.width), integer(left.pitch), integer(right.width),
		integer(right.pitch), flag(p.accumulate))
}
