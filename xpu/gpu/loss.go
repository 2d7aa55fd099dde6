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
		c.launch("draw_targets", c.rows(n), c.writes(x.Targets), logits, integer(width), unsigned(mix64(x.Seed)),
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

// mix64 is the finaliser of SplitMix64.
func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
