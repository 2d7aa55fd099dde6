package safetensors

import (
	"math"
	"testing"
)

// halfValue is the value of a binary16 or bfloat16 number from its definition, for finite numbers.
func halfValue(h uint16, exponentBits, fractionBits int) float64 {
	exponent := int(h>>fractionBits) & (1<<exponentBits - 1)
	fraction := int(h) & (1<<fractionBits - 1)
	bias := 1<<(exponentBits-1) - 1
	v := math.Ldexp(float64(fraction), 1-bias-fractionBits)
	if exponent > 0 {
		v = math.Ldexp(float64(1<<fractionBits+fraction), exponent-bias-fractionBits)
	}
	if h>>15 == 1 {
		v = -v
	}
	return v
}

// All numbers of 16 bits decode to their value and encode back to their bits; NaN stays NaN.
func TestEvery16BitNumber(t *testing.T) {
	for _, format := range []struct {
		d                  DType
		exponent, fraction int
		infinity, quiet    uint16
	}{{F16, 5, 10, 0x7c00, 0x0200}, {BF16, 8, 7, 0x7f80, 0x0040}} {
		for i := range 1 << 16 {
			h := uint16(i)
			src := []byte{byte(h), byte(h >> 8)}
			var v [1]float32
			Decode(v[:], src, format.d)
			back := make([]byte, 2)
			Encode(back, v[:], format.d)
			got := uint16(back[0]) | uint16(back[1])<<8
			magnitude := h &^ 0x8000
			switch {
			case magnitude > format.infinity:
				if v[0] == v[0] || got != h|format.quiet {
					t.Fatalf("%s %04x (NaN): decodes to %v, encodes to %04x", format.d, h, v[0], got)
				}
			case magnitude == format.infinity:
				if !math.IsInf(float64(v[0]), 1-2*int(h>>15)) || got != h {
					t.Fatalf("%s %04x (infinity): decodes to %v, encodes to %04x", format.d, h, v[0], got)
				}
			default:
				want := halfValue(h, format.exponent, format.fraction)
				if float64(v[0]) != want || math.Signbit(float64(v[0])) != (h>>15 == 1) || got != h {
					t.Fatalf("%s %04x: decodes to %v, want %v; encodes to %04x", format.d, h, v[0], want, got)
				}
			}
		}
	}
}

// Encoding takes the nearest number, and of two equally near ones the even.
func TestRounding(t *testing.T) {
	for _, format := range []struct {
		d                  DType
		exponent, fraction int
		infinity           uint16
	}{{F16, 5, 10, 0x7c00}, {BF16, 8, 7, 0x7f80}} {
		code := func(v float32) uint16 {
			var b [2]byte
			Encode(b[:], []float32{v}, format.d)
			return uint16(b[0]) | uint16(b[1])<<8
		}
		for h := uint16(0); h < format.infinity-1; h++ {
			low, high := halfValue(h, format.exponent, format.fraction), halfValue(h+1, format.exponent,
				format.fraction)
			// exact: float32 has more digits, and bfloat16's smallest half is a float32
			middle := float32(low + (high-low)/2)
			if float64(middle) != low+(high-low)/2 {
				continue
			}
			even := h + h&1
			below, above := math.Nextafter32(middle, 0), math.Nextafter32(middle, math.MaxFloat32)
			if code(middle) != even || code(below) != h || code(above) != h+1 || code(-middle) != even|0x8000 {
				t.Fatalf("%s between %04x and %04x: %v → %04x, %v → %04x, %v → %04x", format.d, h, h+1, below,
					code(below), middle, code(middle), above, code(above))
			}
		}
		// Beyond the largest finite number by half a unit begins infinity.
		largest := format.infinity - 1
		unit := halfValue(largest, format.exponent, format.fraction) - halfValue(largest-1, format.exponent,
			format.fraction)
		border := float32(halfValue(largest, format.exponent, format.fraction) + unit/2)
		if code(border) != format.infinity || code(math.Nextafter32(border, 0)) != largest {
			t.Errorf("%s: %v → %04x, just below → %04x", format.d, border, code(border),
				code(math.Nextafter32(border, 0)))
		}
	}
}
