package main

import (
	"fmt"
	"math"
)

// The constants of the exponential, which package cpu repeats for its Go version.
var expConstants = []struct {
	name  string
	value float32
}{
	{"log2e", math.Log2E},
	{"ln2high", 0.693359375}, // ln 2 in 10 bits, so that a multiple by an exponent is exact
	{"ln2low", math.Ln2 - 0.693359375},
	{"c0", 0.49999994}, {"c1", 0.16666521}, {"c2", 0.04166839}, {"c3", 0.008368745}, {"c4", 0.001381454},
	{"one", 1},
	{"inf", float32(math.Inf(1))},
	{"highest", 88.72283},  // the largest float32 whose exponential is finite
	{"lowest", -87.336544}, // ln 2^-126
}

// vectorAssembly returns vector_amd64.s: the functions on vectors. Each works on 16 or 32 elements
// at a time, in enough registers for them, so that both instruction sets add the same lanes.
func vectorAssembly() []byte {
	s := file()
	s.WriteString("\n// Constants, each in a full register.\n")
	for _, c := range expConstants {
		for i := 0; i < 64; i += 4 {
			fmt.Fprintf(s, "DATA %s<>+%d(SB)/4, $%#08x\n", c.name, i, math.Float32bits(c.value))
		}
		fmt.Fprintf(s, "GLOBL %s<>(SB), RODATA|NOPTR, $64\n", c.name)
	}
	for _, v := range []isa{avx512, avx2} {
		expSum(s, v)
		swiglu(s, v)
		swigluGrad(s, v)
		dot(s, v)
		addScaled(s, v)
		scale(s, v)
		mulScaled(s, v)
		addProduct(s, v)
		softmaxGrad(s, v)
		rotate(s, v)
		sumSquares(s, v)
		maximum(s, v)
	}
	return s.Bytes()
}

func (v isa) suffix() string {
	if v == avx512 {
		return "AVX512"
	}
	return "AVX2"
}

// floats returns the number of float32 in a register.
func (v isa) floats() int { return v.bytes / 4 }

// vectorFn starts a function on vectors.
func (s *source) vectorFn(v isa, name string, argumentBytes int, parameters string) {
	name += v.suffix()
	s.fn(name, argumentBytes, "func "+name+"("+parameters+")")
}

// zero clears a register.
func (s *source) zero(v isa, r int) {
	if v == avx512 {
		s.i("VPXORD Z%d, Z%d, Z%d", r, r, r)
	} else {
		s.i("VXORPS Y%d, Y%d, Y%d", r, r, r)
	}
}

// loop repeats body, which processes the given number of elements at (pointer)(AX*4), until n (in
// CX) are done.
func (s *source) loop(elements int, body func()) {
	s.i("XORQ AX, AX")
	s.i("PCALIGN $32")
	s.label("loop")
	body()
	s.i("ADDQ $%d, AX", elements)
	s.i("CMPQ AX, CX")
	s.i("JLT loop")
}

// Registers of two constants of expBody.
const highest, lowest = 14, 15

func (s *source) expSetup(v isa) {
	s.i("VMOVUPS highest<>(SB), %s", v.r(highest))
	s.i("VMOVUPS lowest<>(SB), %s", v.r(lowest))
}

// expBody replaces register t with its exponential, using registers u, n and p.
//
// exp(t) = 2ⁿ·exp(r) with n = round(t/ln 2) and |r| ≤ ln 2 / 2; exp(r) = 1 + r + r²·P(r), P of
// degree 4 fitted to the least relative error (Lawson's iteration at 4001 Chebyshev points; 0.06
// units in the last place with the coefficients rounded). 2ⁿ goes into the exponent by addition of
// integers. NaN passes through: MIN and MAX return their second source if either is NaN.
func (s *source) expBody(v isa, t, u, n, p int) {
	T, U, N, P := v.r(t), v.r(u), v.r(n), v.r(p)
	s.i("VMINPS %s, %s, %s", T, v.r(highest), U)
	s.i("VMAXPS %s, %s, %s", U, v.r(lowest), U)
	s.i("VMULPS log2e<>(SB), %s, %s", U, N)
	s.i("VCVTPS2DQ %s, %s", N, N)
	s.i("VCVTDQ2PS %s, %s", N, P)
	s.i("VFNMADD231PS ln2high<>(SB), %s, %s", P, U)
	s.i("VFNMADD231PS ln2low<>(SB), %s, %s", P, U)
	s.i("VMOVUPS c4<>(SB), %s", P)
	for _, c := range []string{"c3", "c2", "c1", "c0"} {
		s.i("VFMADD213PS %s<>(SB), %s, %s", c, U, P)
	}
	s.i("VPSLLD $23, %s, %s", N, N)
	s.i("VMULPS %s, %s, %s", U, P, P)
	s.i("VFMADD213PS %s, %s, %s", U, U, P) // (P·r)·r + r
	s.i("VADDPS one<>(SB), %s, %s", P, P)
	s.i("VPADDD %s, %s, %s", N, P, P)
	const notBelow, above = 5, 30 // predicates NLT_UQ and GT_OQ
	if v == avx512 {
		s.i("VCMPPS $%d, %s, %s, K1", notBelow, v.r(lowest), T)
		s.i("VCMPPS $%d, %s, %s, K2", above, v.r(highest), T)
		s.i("VMOVUPS.Z %s, K1, %s", P, T)
		s.i("VMOVUPS inf<>(SB), K2, %s", T)
	} else {
		s.i("VCMPPS $%d, %s, %s, %s", notBelow, v.r(lowest), T, N)
		s.i("VANDPS %s, %s, %s", N, P, P)
		s.i("VCMPPS $%d, %s, %s, %s", above, v.r(highest), T, N)
		s.i("VBLENDVPS %s, inf<>(SB), %s, %s", N, P, T)
	}
}

// expSum: dst = exp(x - shift), and lanes += dst. Lane i is register i/floats.
func expSum(s *source, v isa) {
	s.vectorFn(v, "expSum", 36, "lanes *[16]float32, dst, x *float32, n int64, shift float32")
	s.i("MOVQ lanes+0(FP), R8")
	s.i("MOVQ dst+8(FP), DI")
	s.i("MOVQ x+16(FP), SI")
	s.i("MOVQ n+24(FP), CX")
	s.i("VBROADCASTSS shift+32(FP), %s", v.r(13))
	s.expSetup(v)
	registers := 16 / v.floats()
	for i := range registers {
		s.i("VMOVUPS %d(R8), %s", i*v.bytes, v.r(8+i))
	}
	s.loop(16, func() {
		for i := range registers {
			s.i("VMOVUPS %d(SI)(AX*4), %s", i*v.bytes, v.r(4*i))
			s.i("VSUBPS %s, %s, %s", v.r(13), v.r(4*i), v.r(4*i))
			s.expBody(v, 4*i, 4*i+1, 4*i+2, 4*i+3)
			s.i("VMOVUPS %s, %d(DI)(AX*4)", v.r(4*i), i*v.bytes)
			s.i("VADDPS %s, %s, %s", v.r(4*i), v.r(8+i), v.r(8+i))
		}
	})
	for i := range registers {
		s.i("VMOVUPS %s, %d(R8)", v.r(8+i), i*v.bytes)
	}
	s.ret()
}

// swiglu: dst = gate/(1+exp(-gate))·up.
func swiglu(s *source, v isa) {
	s.vectorFn(v, "swiglu", 32, "dst, gate, up *float32, n int64")
	s.i("MOVQ up+16(FP), DX")
	s.i("MOVQ n+24(FP), CX")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ gate+8(FP), SI")
	s.expSetup(v)
	s.zero(v, 13)
	s.loop(16, func() {
		for i := range 16 / v.floats() {
			t, g := 4*i, 8+i
			s.i("VMOVUPS %d(SI)(AX*4), %s", i*v.bytes, v.r(g))
			s.i("VSUBPS %s, %s, %s", v.r(g), v.r(13), v.r(t))
			s.expBody(v, t, t+1, t+2, t+3)
			s.i("VADDPS one<>(SB), %s, %s", v.r(t), v.r(t))
			s.i("VDIVPS %s, %s, %s", v.r(t), v.r(g), v.r(t))
			s.i("VMULPS %d(DX)(AX*4), %s, %s", i*v.bytes, v.r(t), v.r(t))
			s.i("VMOVUPS %s, %d(DI)(AX*4)", v.r(t), i*v.bytes)
		}
	})
	s.ret()
}

// swigluGrad, with s = 1/(1+exp(-gate)): dUp = dOut·(gate·s) and dGate = (dOut·up)·(gate·s·(1-s) +
// s). It reads all operands of an element before it writes, because the results may be the
// operands.
func swigluGrad(s *source, v isa) {
	s.vectorFn(v, "swigluGrad", 48, "dGate, dUp, gate, up, dOut *float32, n int64")
	s.i("MOVQ dGate+0(FP), DI")
	s.i("MOVQ dUp+8(FP), BX")
	s.i("MOVQ gate+16(FP), SI")
	s.i("MOVQ up+24(FP), DX")
	s.i("MOVQ dOut+32(FP), R8")
	s.i("MOVQ n+40(FP), CX")
	s.expSetup(v)
	s.zero(v, 13)
	s.i("VMOVUPS one<>(SB), %s", v.r(12))
	s.loop(16, func() {
		for i := range 16 / v.floats() {
			at := fmt.Sprintf("%d", i*v.bytes)
			sigma, gs, w, d, g := v.r(0), v.r(1), v.r(2), v.r(3), v.r(4)
			s.i("VMOVUPS %s(SI)(AX*4), %s", at, g)
			s.i("VSUBPS %s, %s, %s", g, v.r(13), v.r(0))
			s.expBody(v, 0, 1, 2, 3)
			s.i("VADDPS %s, %s, %s", v.r(12), sigma, sigma)
			s.i("VDIVPS %s, %s, %s", sigma, v.r(12), sigma)
			s.i("VMULPS %s, %s, %s", sigma, g, gs)
			s.i("VSUBPS %s, %s, %s", sigma, v.r(12), w)
			s.i("VFMADD213PS %s, %s, %s", sigma, gs, w)
			s.i("VMOVUPS %s(R8)(AX*4), %s", at, d)
			s.i("VMULPS %s, %s, %s", d, gs, gs)
			s.i("VMULPS %s(DX)(AX*4), %s, %s", at, d, d)
			s.i("VMULPS %s, %s, %s", d, w, w)
			s.i("VMOVUPS %s, %s(BX)(AX*4)", gs, at)
			s.i("VMOVUPS %s, %s(DI)(AX*4)", w, at)
		}
	})
	s.ret()
}

// dot: lanes += x·y.
func dot(s *source, v isa) {
	s.vectorFn(v, "dot", 32, "lanes *[32]float32, x, y *float32, n int64")
	s.i("MOVQ lanes+0(FP), R8")
	s.i("MOVQ x+8(FP), SI")
	s.i("MOVQ y+16(FP), DX")
	s.i("MOVQ n+24(FP), CX")
	registers := 32 / v.floats()
	for i := range registers {
		s.i("VMOVUPS %d(R8), %s", i*v.bytes, v.r(i))
	}
	s.loop(32, func() {
		for i := range registers {
			s.i("VMOVUPS %d(SI)(AX*4), %s", i*v.bytes, v.r(8+i))
			s.i("VFMADD231PS %d(DX)(AX*4), %s, %s", i*v.bytes, v.r(8+i), v.r(i))
		}
	})
	for i := range registers {
		s.i("VMOVUPS %s, %d(R8)", v.r(i), i*v.bytes)
	}
	s.ret()
}

// addScaled: dst = x + a·y.
func addScaled(s *source, v isa) {
	s.vectorFn(v, "addScaled", 36, "dst, x, y *float32, n int64, a float32")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ x+8(FP), SI")
	s.i("MOVQ y+16(FP), DX")
	s.i("MOVQ n+24(FP), CX")
	s.i("VBROADCASTSS a+32(FP), %s", v.r(15))
	s.loop(16, func() {
		for i := range 16 / v.floats() {
			s.i("VMOVUPS %d(SI)(AX*4), %s", i*v.bytes, v.r(i))
			s.i("VFMADD231PS %d(DX)(AX*4), %s, %s", i*v.bytes, v.r(15), v.r(i))
			s.i("VMOVUPS %s, %d(DI)(AX*4)", v.r(i), i*v.bytes)
		}
	})
	s.ret()
}

// scale: x = a·x.
func scale(s *source, v isa) {
	s.vectorFn(v, "scale", 20, "x *float32, n int64, a float32")
	s.i("MOVQ x+0(FP), DI")
	s.i("MOVQ n+8(FP), CX")
	s.i("VBROADCASTSS a+16(FP), %s", v.r(15))
	s.loop(16, func() {
		for i := range 16 / v.floats() {
			s.i("VMULPS %d(DI)(AX*4), %s, %s", i*v.bytes, v.r(15), v.r(i))
			s.i("VMOVUPS %s, %d(DI)(AX*4)", v.r(i), i*v.bytes)
		}
	})
	s.ret()
}

// mulScaled: dst = w·(a·x).
func mulScaled(s *source, v isa) {
	s.vectorFn(v, "mulScaled", 36, "dst, w, x *float32, n int64, a float32")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ w+8(FP), DX")
	s.i("MOVQ x+16(FP), SI")
	s.i("MOVQ n+24(FP), CX")
	s.i("VBROADCASTSS a+32(FP), %s", v.r(15))
	s.loop(16, func() {
		for i := range 16 / v.floats() {
			s.i("VMULPS %d(SI)(AX*4), %s, %s", i*v.bytes, v.r(15), v.r(i))
			s.i("VMULPS %d(DX)(AX*4), %s, %s", i*v.bytes, v.r(i), v.r(i))
			s.i("VMOVUPS %s, %d(DI)(AX*4)", v.r(i), i*v.bytes)
		}
	})
	s.ret()
}

// addProduct: dst += a·(x·y).
func addProduct(s *source, v isa) {
	s.vectorFn(v, "addProduct", 36, "dst, x, y *float32, n int64, a float32")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ x+8(FP), SI")
	s.i("MOVQ y+16(FP), DX")
	s.i("MOVQ n+24(FP), CX")
	s.i("VBROADCASTSS a+32(FP), %s", v.r(15))
	s.loop(16, func() {
		for i := range 16 / v.floats() {
			s.i("VMOVUPS %d(SI)(AX*4), %s", i*v.bytes, v.r(i))
			s.i("VMULPS %d(DX)(AX*4), %s, %s", i*v.bytes, v.r(i), v.r(i))
			s.i("VFMADD213PS %d(DI)(AX*4), %s, %s", i*v.bytes, v.r(15), v.r(i))
			s.i("VMOVUPS %s, %d(DI)(AX*4)", v.r(i), i*v.bytes)
		}
	})
	s.ret()
}

// softmaxGrad: dx = y·(dy - shift).
func softmaxGrad(s *source, v isa) {
	s.vectorFn(v, "softmaxGrad", 36, "dx, y, dy *float32, n int64, shift float32")
	s.i("MOVQ dx+0(FP), DI")
	s.i("MOVQ y+8(FP), SI")
	s.i("MOVQ dy+16(FP), DX")
	s.i("MOVQ n+24(FP), CX")
	s.i("VBROADCASTSS shift+32(FP), %s", v.r(15))
	s.loop(16, func() {
		for i := range 16 / v.floats() {
			s.i("VMOVUPS %d(DX)(AX*4), %s", i*v.bytes, v.r(i))
			s.i("VSUBPS %s, %s, %s", v.r(15), v.r(i), v.r(i))
			s.i("VMULPS %d(SI)(AX*4), %s, %s", i*v.bytes, v.r(i), v.r(i))
			s.i("VMOVUPS %s, %d(DI)(AX*4)", v.r(i), i*v.bytes)
		}
	})
	s.ret()
}

// rotate rotates the pairs (x[j], x[half+j]), j < n: with c = scale·cos and s = turn·sin, dst[j] =
// x[j]·c - x[half+j]·s and dst[half+j] = x[half+j]·c + x[j]·s.
func rotate(s *source, v isa) {
	s.vectorFn(v, "rotate", 56, "dst, x, cos, sin *float32, n, half int64, scale, turn float32")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ x+8(FP), SI")
	s.i("MOVQ cos+16(FP), DX")
	s.i("MOVQ sin+24(FP), BX")
	s.i("MOVQ n+32(FP), CX")
	s.i("MOVQ half+40(FP), R10")
	s.i("LEAQ (SI)(R10*4), R8")
	s.i("LEAQ (DI)(R10*4), R9")
	s.i("VBROADCASTSS scale+48(FP), %s", v.r(14))
	s.i("VBROADCASTSS turn+52(FP), %s", v.r(15))
	s.loop(16, func() {
		for i := range 16 / v.floats() {
			at := fmt.Sprintf("%d", i*v.bytes)
			c, sin, a, b, lo, hi := v.r(6*i), v.r(6*i+1), v.r(6*i+2), v.r(6*i+3), v.r(6*i+4), v.r(6*i+5)
			s.i("VMULPS %s(DX)(AX*4), %s, %s", at, v.r(14), c)
			s.i("VMULPS %s(BX)(AX*4), %s, %s", at, v.r(15), sin)
			s.i("VMOVUPS %s(SI)(AX*4), %s", at, a)
			s.i("VMOVUPS %s(R8)(AX*4), %s", at, b)
			s.i("VMULPS %s, %s, %s", a, c, lo)
			s.i("VMULPS %s, %s, %s", b, c, hi)
			s.i("VFNMADD231PS %s, %s, %s", b, sin, lo)
			s.i("VFMADD231PS %s, %s, %s", a, sin, hi)
			s.i("VMOVUPS %s, %s(DI)(AX*4)", lo, at)
			s.i("VMOVUPS %s, %s(R9)(AX*4)", hi, at)
		}
	})
	s.ret()
}

// sumSquares: lanes += x², in float64, where the square of a float32 is exact.
func sumSquares(s *source, v isa) {
	s.vectorFn(v, "sumSquares", 24, "lanes *[16]float64, x *float32, n int64")
	s.i("MOVQ lanes+0(FP), R8")
	s.i("MOVQ x+8(FP), SI")
	s.i("MOVQ n+16(FP), CX")
	registers := 128 / v.bytes
	for i := range registers {
		s.i("VMOVUPD %d(R8), %s", i*v.bytes, v.r(i))
	}
	s.loop(16, func() {
		for i := range registers {
			s.i("VCVTPS2PD %d(SI)(AX*4), %s", i*v.bytes/2, v.r(8+i))
			s.i("VFMADD231PD %s, %s, %s", v.r(8+i), v.r(8+i), v.r(i))
		}
	})
	for i := range registers {
		s.i("VMOVUPD %s, %d(R8)", v.r(i), i*v.bytes)
	}
	s.ret()
}

// maximum: lanes = the larger of lanes and x. MAX returns its second source, here the lane, if x is
// NaN.
func maximum(s *source, v isa) {
	s.vectorFn(v, "maximum", 24, "lanes *[32]float32, x *float32, n int64")
	s.i("MOVQ lanes+0(FP), R8")
	s.i("MOVQ x+8(FP), SI")
	s.i("MOVQ n+16(FP), CX")
	registers := 32 / v.floats()
	for i := range registers {
		s.i("VMOVUPS %d(R8), %s", i*v.bytes, v.r(i))
	}
	s.loop(32, func() {
		for i := range registers {
			s.i("VMOVUPS %d(SI)(AX*4), %s", i*v.bytes, v.r(8+i))
			s.i("VMAXPS %s, %s, %s", v.r(i), v.r(8+i), v.r(i))
		}
	})
	for i := range registers {
		s.i("VMOVUPS %s, %d(R8)", v.r(i), i*v.bytes)
	}
	s.ret()
}
