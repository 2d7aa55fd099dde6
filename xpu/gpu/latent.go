package gpu

import "mula/xpu"

// SplitLatent splits projections of latent attention into heads; see [mula/xpu.Layers].
func (d *Device) SplitLatent(l xpu.LatentHeads) {
	xpu.CheckSplitLatent(l)
	s := l.Sizes()
	if s.Tokens() == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	c.launch("split_latent", c.rows(s.Tokens()), c.writes(l.Q), c.writes(l.K), c.writes(l.V), c.reads(l.Queries),
		c.reads(l.KeysValues), c.reads(l.Rotated), c.reads(l.Cos), c.reads(l.Sin), integer(s.Length),
		integer(s.Heads.Heads), integer(s.Size), integer(s.Plain), integer(s.Turned), integer(s.Values),
		integer(l.First), integer(s.Capacity), flag(l.Interleaved), number(float64(l.Scale)))
}

// JoinLatent computes the gradients of the projections; see [mula/xpu.Layers].
func (d *Device) JoinLatent(l xpu.LatentHeads, dq, dk, dv xpu.Tensor) {
	xpu.CheckJoinLatent(l, dq, dk, dv)
	s := l.Sizes()
	if s.Tokens() == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	c.launch("join_latent", c.rows(s.Tokens()), c.writes(l.Queries), c.writes(l.KeysValues), c.writes(l.Rotated),
		c.reads(dq), c.reads(dk), c.reads(dv), c.reads(l.Cos), c.reads(l.Sin), integer(s.Length),
		integer(s.Heads.Heads), integer(s.Size), integer(s.Plain), integer(s.Turned), integer(s.Values),
		flag(l.Interleaved), number(float64(l.Scale)))
}

// CopyColumns copies columns; see [mula/xpu.Layers].
func (d *Device) CopyColumns(dst, x xpu.Tensor) {
	xpu.CheckCopyColumns(dst, x)
	if dst.Dim(0) == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	stride, _, _ := dst.Stored()
	strideX, _, _ := x.Stored()
	c.launch("copy_columns", c.rows(dst.Dim(0)), c.writes(dst), c.reads(x), integer(dst.Dim(1)), integer(x.Dim(1)),
		integer(stride), integer(strideX))
}
