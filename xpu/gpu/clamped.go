package gpu

import "mula/xpu"

// ClampedSwiGLU computes SwiGLU with clamps; see [xpu.Layers].
func (d *Device) ClampedSwiGLU(act, gateUp, weight xpu.Tensor, clamp xpu.Clamp) {
	xpu.CheckClampedSwiGLU(act, gateUp, weight)
	c := d.begin()
	defer c.end()
	to, halves := c.stores(act)
	c.launch("clamped_swiglu", c.rows(act.Dim(0)), to, typed(c.reads(gateUp)), c.reads(weight), integer(act.Dim(1)),
		number(float64(clamp.Limit)), number(float64(clamp.Alpha)), halves)
}

// ClampedSwiGLUGrad computes the gradients of [Device.ClampedSwiGLU]; see [xpu.Layers].
func (d *Device) ClampedSwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor, clamp xpu.Clamp) {
	xpu.CheckClampedSwiGLUGrad(gateUp, act, dact, weight, dweight)
	c := d.begin()
	defer c.end()
	grad := c.writes(gateUp)
	again, halves := c.stores(act)
	c.launch("clamped_swiglu_grad", c.rows(act.Dim(0)), typed(grad), again, c.reads(dact), c.reads(weight),
		c.writes(dweight), integer(act.Dim(1)), number(float64(clamp.Limit)), number(float64(clamp.Alpha)), halves)
}
