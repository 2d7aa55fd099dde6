package moe

import (
	"fmt"
	"math"

	"mula/xpu"
)

// ropeTable holds the rotations of the first positions: cosine and sine of position·θ^(-2j/D) for j
// < D/2.
type ropeTable struct {
	cos, sin []float32 // [positions, D/2]
}

// extend makes the table cover the given number of positions. It rounds where transformers does:
// the frequency and its product with the position are float32. For far positions this matters more
// than the precision of the cosine.
func (r *ropeTable) extend(dev xpu.Memory, c Config, positions int) (err error) {
	half := c.HeadDim() / 2
	have := len(r.cos) / half
	if positions <= have {
		return nil
	}
	positions = min(max(positions, 2*have), c.MaxPositions)
	r.free(dev)
	if r.cos, err = dev.Floats(positions * half); err == nil {
		r.sin, err = dev.Floats(positions * half)
	}
	if err != nil {
		r.free(dev)
		return fmt.Errorf("rotations of %d positions: %w", positions, err)
	}
	for j := range half {
		exponent := float32(2*j) / float32(c.HeadDim())
		frequency := 1 / float32(math.Pow(float64(float32(c.RopeTheta)), float64(exponent)))
		for p := range positions {
			angle := float64(float32(p) * frequency)
			r.cos[p*half+j], r.sin[p*half+j] = float32(math.Cos(angle)), float32(math.Sin(angle))
		}
	}
	dev.ToDevice(r.cos)
	dev.ToDevice(r.sin)
	return nil
}

func (r *ropeTable) free(dev xpu.Memory) {
	freeMemory(dev, r.cos)
	freeMemory(dev, r.sin)
	*r = ropeTable{}
}
