package main

import "fmt"

// updateKernels are the optimizer updates, by name. A body processes one register of elements at
// offset at: w is at DI, grad at SI, and the optimizer's two state tensors at DX and BX. It may use
// registers 0 to 5; constant i of updateConstants is in register 6+i.
var updateKernels = []struct {
	name string
	body func(e elements)
}{
	{"adamw", func(e elements) {
		u, q := e.moments()
		e.i("VMULPS %s, %s, %s", e.r(u), e.k(6), e.r(u))
		e.i("VDIVPS %s, %s, %s", e.r(q), e.r(u), e.r(u))
		e.decay(u)
	}},
	{"lion", func(e elements) {
		g, m, u := e.gradient(), 1, 2
		e.load(m, "DX")
		e.average(u, g, m, 1, 2)
		e.average(3, g, m, 3, 4)
		e.store(3, "DX")
		e.i("VMULPS %s, %s, %s", e.k(7), e.r(u), e.r(u))
		e.clamp(u)
		e.move(u)
	}},
	{"sophia", func(e elements) {
		g, m, u, h := e.gradient(), 1, 2, 3
		e.load(m, "DX")
		e.average(u, g, m, 1, 2)
		e.store(u, "DX")
		e.load(h, "BX")
		e.i("VFMADD213PS %s, %s, %s", e.k(4), e.k(3), e.r(h))
		e.i("VDIVPS %s, %s, %s", e.r(h), e.r(u), e.r(u))
		e.clamp(u)
		e.move(u)
	}},
	{"adopt", func(e elements) {
		g, v, d, u, m := e.gradient(), 1, 2, 3, 4
		e.load(v, "BX")
		e.i("VSQRTPS %s, %s", e.r(v), e.r(d))
		e.i("VMAXPS %s, %s, %s", e.r(d), e.k(7), e.r(d))
		e.i("VDIVPS %s, %s, %s", e.r(d), e.r(g), e.r(d))
		e.clamp(d)
		e.load(m, "DX")
		e.average(u, d, m, 1, 2)
		e.store(u, "DX")
		e.averageSquare(5, g, v, 3, 4)
		e.store(5, "BX")
		e.move(u)
	}},
	{"lamb", func(e elements) {
		w := 0
		u, q := e.moments()
		e.i("VMULPS %s, %s, %s", e.r(u), e.k(6), e.r(u))
		e.i("VDIVPS %s, %s, %s", e.r(q), e.r(u), e.r(u))
		e.load(w, "DI")
		e.i("VFMADD231PS %s, %s, %s", e.r(w), e.k(5), e.r(u))
		e.store(u, "SI")
	}},
	{"muon", func(e elements) {
		g, m, u := e.gradient(), 1, 2
		e.load(m, "DX")
		e.average(u, g, m, 1, 2)
		e.store(u, "DX")
		e.average(3, g, u, 3, 4)
		e.store(3, "SI")
	}},
	{"scheduleFree", func(e elements) {
		g, v, q, y, z := e.gradient(), 1, 2, 3, 4
		e.load(v, "BX")
		e.averageSquare(q, g, v, 3, 4)
		e.store(q, "BX")
		e.i("VSQRTPS %s, %s", e.r(q), e.r(q))
		e.i("VFMADD213PS %s, %s, %s", e.k(7), e.k(8), e.r(q))
		e.i("VDIVPS %s, %s, %s", e.r(q), e.r(g), e.r(g))
		e.load(y, "DI")
		e.i("VFMADD231PS %s, %s, %s", e.r(y), e.k(5), e.r(g)) // u
		e.load(z, "DX")
		e.i("VSUBPS %s, %s, %s", e.r(y), e.r(z), e.r(v))
		e.i("VFMADD231PS %s, %s, %s", e.r(v), e.k(1), e.r(y))
		e.i("VFMADD231PS %s, %s, %s", e.r(g), e.k(2), e.r(y))
		e.i("VFMADD231PS %s, %s, %s", e.r(g), e.k(6), e.r(z))
		e.store(y, "DI")
		e.store(z, "DX")
	}},
	{"averageSquares", func(e elements) {
		g, v := e.gradient(), 1
		e.load(v, "DX")
		e.averageSquare(2, g, v, 1, 2)
		e.store(2, "DX")
	}},
}

// optimizerAssembly returns optimizer_amd64.s. Denormal numbers are read and written as zero: the
// moments of a weight without gradients would otherwise become denormal and remain so, and each
// would cost a hundred times an ordinary update.
func optimizerAssembly() []byte {
	s := file()
	for _, v := range []isa{avx512, avx2} {
		for _, kernel := range updateKernels {
			name := kernel.name + v.suffix()
			fmt.Fprintf(s,
				"\n// func %s(w, grad, a, b *float32, n int64, k *updateConstants)\nTEXT ·%s(SB), NOSPLIT, $8-48\n",
				name, name)
			s.i("MOVQ w+0(FP), DI")
			s.i("MOVQ grad+8(FP), SI")
			s.i("MOVQ a+16(FP), DX")
			s.i("MOVQ b+24(FP), BX")
			s.i("MOVQ n+32(FP), CX")
			s.i("MOVQ k+40(FP), R8")
			const flush = 1<<15 | 1<<6 // MXCSR: flush to zero, denormals are zeros
			s.i("STMXCSR saved-8(SP)")
			s.i("MOVL saved-8(SP), R9")
			s.i("ORL $%#x, R9", flush)
			s.i("MOVL R9, flushing-4(SP)")
			s.i("LDMXCSR flushing-4(SP)")
			for i := range 10 {
				s.i("VBROADCASTSS %d(R8), %s", 4*i, v.r(6+i))
			}
			s.loop(16, func() {
				for i := range 16 / v.floats() {
					kernel.body(elements{s, v, i * v.bytes})
				}
			})
			s.i("LDMXCSR saved-8(SP)")
			s.ret()
		}
	}
	return s.Bytes()
}

// elements is one register of elements of an update being written.
type elements struct {
	*source
	isa
	at int // bytes
}

// k returns the register of constant i.
func (e elements) k(i int) string { return e.r(6 + i) }

func (e elements) load(register int, pointer string) {
	e.i("VMOVUPS %d(%s)(AX*4), %s", e.at, pointer, e.r(register))
}

func (e elements) store(register int, pointer string) {
	e.i("VMOVUPS %s, %d(%s)(AX*4)", e.r(register), e.at, pointer)
}

// gradient loads the gradient, multiplied by constant 0, into register 0.
func (e elements) gradient() int {
	e.i("VMULPS %d(SI)(AX*4), %s, %s", e.at, e.k(0), e.r(0))
	return 0
}

// average sets dst = x·k[rest] + old·k[decay].
func (e elements) average(dst, x, old, decay, rest int) {
	e.i("VMULPS %s, %s, %s", e.r(x), e.k(rest), e.r(dst))
	e.i("VFMADD231PS %s, %s, %s", e.r(old), e.k(decay), e.r(dst))
}

// averageSquare sets dst = x²·k[rest] + old·k[decay].
func (e elements) averageSquare(dst, x, old, decay, rest int) {
	e.i("VMULPS %s, %s, %s", e.r(x), e.r(x), e.r(dst))
	e.i("VMULPS %s, %s, %s", e.r(dst), e.k(rest), e.r(dst))
	e.i("VFMADD231PS %s, %s, %s", e.r(old), e.k(decay), e.r(dst))
}

// clamp limits x to the range of constants 9 and 8. NaN passes through: see expBody.
func (e elements) clamp(x int) {
	e.i("VMINPS %s, %s, %s", e.r(x), e.k(8), e.r(x))
	e.i("VMAXPS %s, %s, %s", e.r(x), e.k(9), e.r(x))
}

// moments updates the moments of AdamW and LAMB. Register u holds the first moment, and q the root
// of the second, times k[8], plus k[7].
func (e elements) moments() (u, q int) {
	g, m, v := e.gradient(), 1, 2
	u, q = 3, 4
	e.load(m, "DX")
	e.average(u, g, m, 1, 2)
	e.store(u, "DX")
	e.load(v, "BX")
	e.averageSquare(q, g, v, 3, 4)
	e.store(q, "BX")
	e.i("VSQRTPS %s, %s", e.r(q), e.r(q))
	e.i("VFMADD213PS %s, %s, %s", e.k(7), e.k(8), e.r(q))
	return u, q
}

// move sets w = w·k[5] - u·k[6], using register 0.
func (e elements) move(u int) {
	e.i("VMULPS %s, %s, %s", e.r(u), e.k(6), e.r(u))
	e.decay(u)
}

// decay sets w = w·k[5] - u, using register 0.
func (e elements) decay(u int) {
	e.load(0, "DI")
	e.i("VFMSUB213PS %s, %s, %s", e.r(u), e.k(5), e.r(0))
	e.store(0, "DI")
}
