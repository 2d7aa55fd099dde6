package gpu

import "mula/xpu"

// Sizes of attention.cl.
const (
	attendOwn   = 16              // queries or keys per work-item on a CPU: OWN
	attendTile  = 32              // the other operand's keys or queries at a time on a CPU: TILE
	attendSide  = 64              // queries and keys per work-group on a GPU: SIDE
	attendItems = 256             // work-items per group on a GPU
	attendShare = 2*16*68 + 64*68 // numbers in a group's local memory on a GPU: chunk and weight
)

// attendOptions returns the options of attention.cl on a GPU for heads of the given size. On GPUs
// with matrix instructions it requests 256 registers, as the sums of keys and values do not fit
// into 128.
func (d *Device) attendOptions(size int) string {
	options := "-DPANELS=1"
	if size > attendSide {
		options = "-DPANELS=2"
	}
	if d.device.MatrixInstructions() {
		options += " -cl-intel-256-GRF-per-thread"
	}
	return options
}

// attend launches an attention kernel with its local memory for each group. On a CPU each query or
// key of a work-item has the given numbers of vectors of a head's size and of tiles of weights.
func (c *command) attend(kernel string, h xpu.Heads, heads, vectors, weights int, args ...argument) {
	if c.d.shape.processor {
		args = append(args, local((vectors*h.Size+weights*attendTile)*attendOwn))
		c.launch(kernel, groups(1, over(h.Length, attendOwn), heads, h.Rows), args...)
		return
	}
	args = append(args, local(attendShare))
	groupColumns, blocks := attendSide, over(h.Length, attendSide)
	if h.Size > attendSide {
		groupColumns *= 2
	}
	c.launchVariant(variant{"attention.cl", c.d.attendOptions(h.Size), kernel},
		groups(attendItems, blocks, heads, h.Rows*over(h.Size, groupColumns)), args...)
}

// Attend computes attention; see [mula/xpu.Layers].
func (d *Device) Attend(a xpu.Attention) {
	xpu.CheckAttend(a)
	h := a.Heads()
	if h.Tokens() == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	context, round := c.narrow(a.Context)
	defer round()
	if pieces := d.attendPieces(a); pieces > 0 {
		c.attendTensors(a, context, pieces)
		return
	}
	if depth := d.attendDepth(a); depth > 0 {
		c.attendMatrix(a, context, depth)
		return
	}
	c.attend("attend", h, h.Heads, 4, 1, context, c.writes(a.LSE), c.reads(a.Q), c.reads(a.K),
		c.reads(a.V),
		c.reads(a.Begin), integer(h.Length), integer(h.Heads/h.KVHeads), integer(h.Size), integer(a.First),
		integer(h.Capacity))
}

// AttendGrad computes the gradients of an attention. The gradients of queries are computed first,
// because their kernel also stores Σ dO·O of each query.
func (d *Device) AttendGrad(a xpu.Attention, dcontext, dqkv, dk, dv xpu.Tensor) {
	xpu.CheckAttendGrad(a, dcontext, dqkv, dk, dv)
	h := a.Heads()
	if h.Tokens() == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	if pieces := d.attendPieces(a); pieces > 0 {
		c.attendTensorsGrad(a, dcontext, dqkv, dk, dv, pieces)
		return
	}
	if depth := d.attendDepth(a); depth > 0 {
		c.attendMatrixGrad(a, dcontext, dqkv, dk, dv, depth)
		return
	}
	delta := c.take(a.LSE.Elements())
	share, size := integer(h.Heads/h.KVHeads), integer(h.Size)
	length, first, capacity := integer(h.Length), integer(a.First), integer(h.Capacity)
	c.attend("attend_grad_queries", h, h.Heads, 7, 2, c.writes(dqkv), delta, c.reads(dcontext),
		c.wide(a.Context), c.reads(a.LSE),
		c.reads(a.Q), c.reads(a.K), c.reads(a.V), c.reads(a.Begin), length, share, size, first,
		capacity, integer(dqkv.Dim(1)))
	h.Length += a.First // the number of keys
	c.attend("attend_grad_keys", h, h.KVHeads, 8, 2, c.writes(dk), c.writes(dv), delta, c.reads(dcontext),
		c.reads(a.LSE),
		c.reads(a.Q), c.reads(a.K), c.reads(a.V), c.reads(a.Begin), length, share, size, first,
		capacity)
}
