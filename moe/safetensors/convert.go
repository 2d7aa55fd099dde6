package safetensors

import (
	"encoding/binary"
	"math"
)

// Decode converts elements of type d, little-endian, to float32. The conversion is exact. src has
// the bytes of len(dst) elements.
func Decode(dst []float32, src []byte, d DType) {
	switch d {
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case BF16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		}
	case F16:
		for i := range dst {
			dst[i] = fromHalf(binary.LittleEndian.Uint16(src[2*i:]))
		}
	}
}

// Encode converts float32 to elements of type d, rounding to nearest, ties to even.
func Encode(dst []byte, src []float32, d DType) {
	switch d {
	case F32:
		for i, v := range src {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
	case BF16:
		for i, v := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], toBF16(v))
		}
	case F16:
		for i, v := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], toHalf(v))
		}
	}
}

// beyond returns the index of the first finite number that rounds to an infinity of type d, or -1.
func beyond(src []float32, d DType) int {
	var limit float32
	switch d {
	case BF16:
		limit = 0x1.ffp+127 // half a unit beyond the largest number, 0x1.fep+127
	case F16:
		limit = 65520 // half a unit beyond the largest number, 65504
	default:
		return -1
	}
	for i, v := range src {
		if (v >= limit || v <= -limit) && v-v == 0 {
			return i
		}
	}
	return -1
}

func toBF16(v float32) uint16 {
	bits := math.Float32bits(v)
	if v != v {
		return uint16(bits>>16) | 0x40 // rounding could turn a NaN into an infinity: make it a quiet NaN instead
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// fromHalf converts an IEEE 754 binary16 number: 1 sign bit, 5 of exponent with bias 15, 10 of
// fraction.
func fromHalf(h uint16) float32 {
	sign, exponent, fraction := uint32(h>>15)<<31, uint32(h>>10&31), uint32(h&0x3ff)
	switch exponent {
	case 0: // zero or subnormal: fraction · 2^-24
		v := float32(fraction) * (1.0 / (1 << 24))
		return math.Float32frombits(math.Float32bits(v) | sign)
	case 31: // infinity or NaN
		return math.Float32frombits(sign | 0xff<<23 | fraction<<13)
	}
	return math.Float32frombits(sign | (exponent+127-15)<<23 | fraction<<13)
}

func toHalf(v float32) uint16 {
	bits := math.Float32bits(v)
	sign := uint16(bits >> 31 << 15)
	magnitude := bits & (1<<31 - 1)
	switch {
	case magnitude > 0xff<<23: // NaN: a quiet NaN with the payload bits that fit
		return sign | 0x7e00 | uint16(magnitude>>13&0x3ff)
	case magnitude >= 0x477ff000: // 65520 and above round to infinity
		return sign | 0x7c00
	case magnitude < 0x38800000: // below 2^-14, the smallest normal half: a multiple of 2^-24
		scaled := math.Float32frombits(magnitude) * (1 << 24) // exact: a power of two, no overflow
		return sign | uint16(math.RoundToEven(float64(scaled)))
	}
	rounded := magnitude + 0xfff + magnitude>>13&1
	return sign | uint16((rounded-(127-15)<<23)>>13)
}
