package gpu

import "mula/xpu"

// Sizes of attention.cl.
const (
	attendOwn   = 16              // queries or keys of a work-item on a processor: OWN
	attendTile  = 32              // of the others at a time there: TILE
	attendSide  = 64              // of both on a GPU: SIDE
	attendItems = 256             // work-items of a group there
	attendShare = 2*16*68 + 64*68 // numbers in local memory of a group there: chunk and weight
)

// attendOptions are those of attention.cl on a GPU for heads of that size. Where they are known, it
// asks for 256 registers, as the sums of both keys and values do not fit into 128.
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

// attend gives a kernel of attention, with its memory for each group: on a processor so many
// vectors for an element of a head and so many tiles' worth of weights, a vector for each of the
// others.
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
	if a.Rows*a.Length == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	c.attend("attend", a.Heads, a.Heads.Heads, 4, 1, c.writes(a.Context), c.writes(a.LSE), c.reads(a.Q), c.reads(a.K),
		c.reads(a.V),
		c.readsInts(a.Begin), integer(a.Length), integer(a.Heads.Heads/a.KVHeads), integer(a.Size), integer(a.First),
		integer(a.Capacity))
}

// AttendGrad computes the gradients of an attention. Those of queries come first: on the way their
// kernel leaves Σ dO·O of each query.
func (d *Device) AttendGrad(a xpu.Attention, dcontext, dqkv, dk, dv []float32) {
	xpu.CheckAttendGrad(a, dcontext, dqkv, dk, dv)
	if a.Rows*a.Length == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	delta := c.take(len(a.LSE))
	share, size := integer(a.Heads.Heads/a.KVHeads), integer(a.Size)
	c.attend("attend_grad_queries", a.Heads, a.Heads.Heads, 7, 2, c.writes(dqkv), delta, c.reads(dcontext),
		c.reads(a.Context), c.reads(a.LSE),
		c.reads(a.Q), c.reads(a.K), c.reads(a.V), c.readsInts(a.Begin), integer(a.Length), share, size,
		integer(a.Width()))
	c.attend("attend_grad_keys", a.Heads, a.KVHeads, 8, 2, c.writes(dk), c.writes(dv), delta, c.reads(dcontext),
		c.reads(a.LSE),
		c.reads(a.Q), c.reads(a.K), c.reads(a.V), c.readsInts(a.Begin), integer(a.Length), share, size)
}
