package gpu

import (
	"math"

	"mula/xpu"
)

// CrossEntropy computes cross entropies of targets and their gradient; see [xpu.Layers]. It
// computes losses in float32.
func (d *Device) CrossEntropy(x xpu.CrossEntropy) {
	xpu.CheckCrossEntropy(x)
	n, width := x.Logits.Dim(0), x.Logits.Dim(1)
	if n == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	logits := c.reads(x.Logits)
	if x.Sample {
		c.launch("draw_targets", c.rows(n), c.writes(x.Targets), logits, integer(width), unsigned(xpu.Mix64(x.Seed)),
			unsigned(x.First))
	}
	if x.Scale != 0 {
		logits = c.writes(x.Logits)
	}
	loss := c.result(n, func(words []uint32) {
		for i, w := range words {
			x.Loss[i] = float64(math.Float32frombits(w))
		}
	})
	c.launch("cross_entropy", c.rows(n), loss, logits, c.reads(x.Targets), integer(width), number(x.Scale))
}

// Jitter multiplies elements by random numbers; see [xpu.Layers].
func (d *Device) Jitter(x xpu.Tensor, j xpu.Jitter) {
	xpu.CheckJitter(x, j)
	if x.Dim(0) == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	c.launch("jitter", c.rows(x.Dim(0)), c.writes(x), c.reads(j.Numbers), integer(x.Dim(1)),
		number(float64(j.Epsilon)), unsigned(xpu.Mix64(j.Seed)))
}
