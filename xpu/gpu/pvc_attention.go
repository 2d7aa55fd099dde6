package gpu

import (
	"fmt"

	"mula/xpu"
)

// Sizes of pvc_attention.cl.
const (
	matrixOwn        = 16 // queries or keys of a sub-group: OWN
	matrixOwnGroups  = 8  // SUBGROUP_COUNT
	headPositions    = 64 // the packed positions of a head are a multiple of this
	attendMatrixFile = "pvc_attention.cl"
)

// matrixDepths are the sizes of packed heads: DEPTH.
var matrixDepths = []int{64, 128}

// attendDepth returns the size of a packed head if an attention is computed by Ponte Vecchio's
// matrix instructions, otherwise 0. Their kernels need queries for all positions, and heads of at
// most 128 dimensions.
func (d *Device) attendDepth(a xpu.Attention) int {
	h := a.Heads()
	if d.matrixFile() != pvcFile || a.First != 0 || h.Capacity != h.Length {
		return 0
	}
	for _, depth := range matrixDepths {
		if h.Size <= depth {
			return depth
		}
	}
	return 0
}

// attendMatrixOptions returns the options of pvc_attention.cl.
func (d *Device) attendMatrixOptions(depth int) string {
	return fmt.Sprintf("%s -DDEPTH=%d", d.matrixOptions(), depth)
}

// A headPacking packs the heads of an attention for pvc_attention.cl.
type headPacking struct {
	*command
	h     xpu.Heads
	depth int
}

// steps returns the steps of the positions of a head.
func (p headPacking) steps() int {
	return over(p.h.Length, headPositions) * (headPositions / matrixStep)
}

// A headOrder describes heads in memory. A row of the batch has a number of heads. Rows, heads and
// positions are a number of elements apart.
type headOrder struct{ heads, row, head, position int }

// byHead is the order of heads whose positions are next to each other, as in queries, keys and
// values.
func (p headPacking) byHead(heads int) headOrder {
	return headOrder{heads, heads * p.h.Length * p.h.Size, p.h.Length * p.h.Size, p.h.Size}
}

// byPosition is the order of positions whose heads are next to each other, as in contexts.
func (p headPacking) byPosition() headOrder {
	width := p.h.Heads * p.h.Size
	return headOrder{p.h.Heads, p.h.Length * width, p.h.Size, width}
}

// rows packs heads as left operands whose rows are positions.
func (p headPacking) rows(x xpu.Tensor, o headOrder) argument {
	return p.left(x, o, o.position, 1, p.h.Length, p.h.Size, p.steps()*matrixStep, p.depth/matrixStep)
}

// turned packs heads as left operands whose terms are positions.
func (p headPacking) turned(x xpu.Tensor, o headOrder) argument {
	return p.left(x, o, 1, o.position, p.h.Size, p.h.Length, p.depth, p.steps())
}

func (p headPacking) left(x xpu.Tensor, o headOrder, row, term, rows, terms, packedRows, steps int) argument {
	to := p.take(p.h.Rows * o.heads * packedRows * steps * matrixStep / 2)
	p.launchFile("pvc_pack_heads_left",
		grid{[3]int{packedRows / matrixRows, over(steps, 8), p.h.Rows * o.heads}, [3]int{matrixRows, 8, 1}},
		to, p.reads(x), integer(o.heads), long(o.row), long(o.head), long(row), long(term), integer(rows),
		integer(terms), integer(steps))
	return to
}

// own packs heads as right operands.
func (p headPacking) own(x xpu.Tensor, o headOrder) argument {
	rows, steps := p.steps()*matrixStep, p.depth/matrixStep
	to := p.take(p.h.Rows * o.heads * rows * p.depth / 2)
	p.launchFile("pvc_pack_heads_right", grid{[3]int{rows / headPositions, steps, p.h.Rows * o.heads},
		[3]int{headPositions, 1, 1}},
		to, p.reads(x), integer(o.heads), long(o.row), long(o.head), long(o.position), integer(p.h.Length),
		integer(p.h.Size))
	return to
}

func (p headPacking) launchFile(kernel string, g grid, args ...argument) {
	p.launchVariant(variant{attendMatrixFile, p.d.attendMatrixOptions(p.depth), kernel}, g, args...)
}

// attend launches an attention kernel for all positions of the given heads. Each work-group has the
// given number of positions.
func (p headPacking) attend(kernel string, positions, heads int, args ...argument) {
	items := matrixOwnGroups
	if p.d.shape.emulate == "" {
		items *= matrixLanes
	}
	p.launchFile(kernel, groups(items, over(p.h.Length, positions), heads, p.h.Rows), args...)
}

// attendMatrix computes attention by matrix instructions.
func (c *command) attendMatrix(a xpu.Attention, context argument, depth int) {
	h := a.Heads()
	p := headPacking{c, h, depth}
	p.attend("pvc_attend", matrixOwn*matrixOwnGroups, h.Heads, context, c.writes(a.LSE),
		p.own(a.Q, p.byHead(h.Heads)), p.rows(a.K, p.byHead(h.KVHeads)), p.turned(a.V, p.byHead(h.KVHeads)),
		c.reads(a.Begin), integer(h.Length), integer(h.Heads/h.KVHeads), integer(h.Size), integer(p.steps()))
}

// attendMatrixGrad computes its gradients. The gradients of queries are first, because their kernel
// also stores Σ dO·O of each query.
func (c *command) attendMatrixGrad(a xpu.Attention, dcontext, dqkv, dk, dv xpu.Tensor, depth int) {
	h := a.Heads()
	p := headPacking{c, h, depth}
	queries, keys, context := p.byHead(h.Heads), p.byHead(h.KVHeads), p.byPosition()
	delta, lse, begin := c.take(a.LSE.Elements()), c.reads(a.LSE), c.reads(a.Begin)
	length, share, size, steps := integer(h.Length), integer(h.Heads/h.KVHeads), integer(h.Size), integer(p.steps())
	p.attend("pvc_grad_queries", matrixOwn*matrixOwnGroups, h.Heads, c.writes(dqkv), delta, c.reads(dcontext),
		c.wide(a.Context), lse, p.own(a.Q, queries), p.own(dcontext, context), p.rows(a.K, keys), p.turned(a.K, keys),
		p.rows(a.V, keys), begin, length, share, size, integer(dqkv.Dim(1)), steps)
	p.attend("pvc_grad_keys", matrixOwn*matrixOwnGroups/2, h.KVHeads, c.writes(dk), c.writes(dv), delta, lse,
		p.rows(a.Q, queries), p.turned(a.Q, queries), p.rows(dcontext, context), p.turned(dcontext, context),
		p.own(a.K, keys), p.own(a.V, keys), begin, length, share, size, steps)
}
