package moe

import "math"

// ropeTable holds the rotations of the positions seen so far: cosine and sine of position·θ^(-2j/D), j < D/2.
type ropeTable struct {
	cos, sin []float32 // [positions, D/2]
}

// extend makes the table cover so many positions. It rounds where transformers does: the frequency and its product with the position are
// float32, which matters to far positions more than the precision of the cosine.
func (r *ropeTable) extend(c Config, positions int) {
	half := c.HeadDim() / 2
	have := len(r.cos) / half
	if positions <= have {
		return
	}
	positions = min(max(positions, 2*have), c.MaxPositions)
	frequency := make([]float32, half)
	for j := range frequency {
		exponent := float32(2*j) / float32(c.HeadDim())
		frequency[j] = 1 / float32(math.Pow(float64(float32(c.RopeTheta)), float64(exponent)))
	}
	for p := have; p < positions; p++ {
		for _, f := range frequency {
			angle := float64(float32(p) * f)
			r.cos = append(r.cos, float32(math.Cos(angle)))
			r.sin = append(r.sin, float32(math.Sin(angle)))
		}
	}
}

// at returns the rotations of one position.
func (r *ropeTable) at(position, half int) (cos, sin []float32) {
	lo := position * half
	return r.cos[lo : lo+half], r.sin[lo : lo+half]
}
