package moe

import (
	"fmt"
	"math"

	"mula/xpu"
)

// ropeTable holds the rotations of the first positions: cosine and sine of position·θ^(-2j/D) for j
// < D/2, or of scaled frequencies.
type ropeTable struct {
	cos, sin xpu.Tensor // [positions, D/2]
}

// extend makes the table cover the given number of positions. It rounds where transformers does:
// the frequency and its product with the position are float32. For far positions this matters more
// than the precision of the cosine.
func (r *ropeTable) extend(dev xpu.Memory, c Config, positions int) (err error) {
	half := c.ropeSize() / 2
	have := 0
	if r.cos.Present() {
		have = r.cos.Dim(0)
	}
	if positions <= have {
		return nil
	}
	positions = min(max(positions, 2*have), c.MaxPositions)
	r.free(dev)
	if r.cos, err = dev.New(xpu.Float32, positions, half); err == nil {
		r.sin, err = dev.New(xpu.Float32, positions, half)
	}
	if err != nil {
		r.free(dev)
		return fmt.Errorf("rotations of %d positions: %w", positions, err)
	}
	cos, sin := make([]float32, positions*half), make([]float32, positions*half)
	frequencies, factor := c.frequencies()
	for j, frequency := range frequencies {
		for p := range positions {
			angle := float64(float32(p) * frequency)
			cos[p*half+j], sin[p*half+j] = float32(math.Cos(angle))*factor, float32(math.Sin(angle))*factor
		}
	}
	dev.Write(r.cos, cos)
	dev.Write(r.sin, sin)
	return nil
}

// windowRope reports whether layers with a window have another rotary embedding, without scaling.
func (c Config) windowRope() bool {
	return c.family().windowsUnscaled && c.RopeScaling.kind() != "default"
}

// extendRope makes the model's tables cover the given number of positions.
func (m *Model) extendRope(positions int) error {
	if err := m.rope.extend(m.dev, m.cfg, positions); err != nil || !m.cfg.windowRope() {
		return err
	}
	c := m.cfg
	c.RopeScaling = RopeScaling{}
	return m.windowRope.extend(m.dev, c, positions)
}

// rotations returns the table of a layer.
func (m *Model) rotations(l *layer) *ropeTable {
	if l.window > 0 && m.cfg.windowRope() {
		return &m.windowRope
	}
	return &m.rope
}

func (r *ropeTable) free(dev xpu.Memory) {
	dev.Release(r.cos)
	dev.Release(r.sin)
	*r = ropeTable{}
}
