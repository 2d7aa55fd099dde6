package gpu

import (
	"fmt"
	"strings"

	"mula/xpu"
)

// Sizes of nvidia_attention.cl.
const (
	tensorOwn        = 64 // queries or keys of a work-group: OWN
	tensorOwnWarps   = 4  // WARPS
	pieceNumbers     = 8  // numbers of a piece of 16 bytes
	attendTensorFile = "nvidia_attention.cl"
)

// attendPieces returns the pieces of a packed row of a head, if an attention is computed on tensor
// cores: with one query after the other from the first on, and heads that fit into local memory.
func (d *Device) attendPieces(a xpu.Attention) int {
	h := a.Heads()
	if d.matrixFile() != nvidiaFile || a.First != 0 || h.Capacity != h.Length {
		return 0
	}
	for _, pieces := range tensorPieces {
		if h.Size <= pieces*pieceNumbers {
			return pieces
		}
	}
	return 0
}

var tensorPieces = []int{4, 8, 16}

// attendTensorOptions returns the options of nvidia_attention.cl.
func (d *Device) attendTensorOptions(pieces int, grad bool) string {
	options := fmt.Sprintf("%s -DPIECES=%d", d.shape.emulate, pieces)
	if grad {
		options += " -DGRAD"
	}
	return strings.TrimSpace(options)
}

// packHeads rounds and packs rows of a head's size that follow each other.
func (c *command) packHeads(x xpu.Tensor, size, pieces int) argument {
	rows, width := x.Elements()/size, pieces*pieceNumbers
	to := c.take(rows * width / 2)
	c.pack(to, operand{c.reads(x), 1, size}, 1, 0, rows, size, width, 1)
	return to
}

// launchTensors launches an attention kernel for all blocks of rows of the given heads.
func (c *command) launchTensors(kernel string, h xpu.Heads, heads, pieces int, args ...argument) {
	items := tensorOwnWarps
	if c.d.shape.emulate == "" {
		items *= tensorLanes
	}
	c.launchVariant(variant{attendTensorFile, c.d.attendTensorOptions(pieces, kernel != "nvidia_attend"), kernel},
		groups(items, over(h.Length, tensorOwn), heads, h.Rows), args...)
}

// attendTensors computes attention on tensor cores.
func (c *command) attendTensors(a xpu.Attention, context argument, pieces int) {
	h := a.Heads()
	c.launchTensors("nvidia_attend", h, h.Heads, pieces, context, c.writes(a.LSE),
		c.packHeads(a.Q, h.Size, pieces), c.packHeads(a.K, h.Size, pieces), c.packHeads(a.V, h.Size, pieces),
		c.reads(a.Begin), integer(h.Length), integer(h.Heads/h.KVHeads), integer(h.Size))
}

// attendTensorsGrad computes its gradients. The gradients of queries are first, because their
// kernel also stores Σ dO·O of each query.
func (c *command) attendTensorsGrad(a xpu.Attention, dcontext, dqkv, dk, dv xpu.Tensor, pieces int) {
	h := a.Heads()
	delta, lse, begin := c.take(a.LSE.Elements()), c.reads(a.LSE), c.reads(a.Begin)
	q, k, v := c.packHeads(a.Q, h.Size, pieces), c.packHeads(a.K, h.Size, pieces), c.packHeads(a.V, h.Size, pieces)
	down := c.packHeads(dcontext, h.Size, pieces)
	length, share, size := integer(h.Length), integer(h.Heads/h.KVHeads), integer(h.Size)
	c.launchTensors("nvidia_grad_queries", h, h.Heads, pieces, c.writes(dqkv), delta, c.reads(dcontext),
		c.wide(a.Context), lse, q, k, v, down, begin, length, share, size, integer(dqkv.Dim(1)))
	c.launchTensors("nvidia_grad_keys", h, h.KVHeads, pieces, c.writes(dk), c.writes(dv), delta, lse, q, k, v, down,
		begin, length, share, size)
}
