package main

import (
	"bytes"
	"fmt"
	"go/format"
	"log"
)

// updates are the optimizer updates that treat each element by itself, by name. This table is the
// only definition of their arithmetic: the generator writes the Go, AVX2 and AVX-512 forms. A new
// update is an entry here, and a type in xpu/cpu/optimizer.go that computes its constants.
//
// An update reads and writes the vectors of an element through registers 0 to 5. Constant i of
// updateConstants is k(i).
var updates = []struct {
	name string
	body func(e emitter)
}{
	{"adamw", func(e emitter) {
		u, q := moments(e)
		e.mul(u, u, k(6))
		e.div(u, u, q)
		decay(e, u)
	}},
	{"lion", func(e emitter) {
		const g, m, u, next = register(0), register(1), register(2), register(3)
		e.gradient(g)
		e.load(m, first)
		average(e, u, g, m, 1, 2)
		average(e, next, g, m, 3, 4)
		e.store(next, first)
		e.mul(u, k(7), u)
		clamp(e, u)
		move(e, u)
	}},
	{"sophia", func(e emitter) {
		const g, m, u, h = register(0), register(1), register(2), register(3)
		e.gradient(g)
		e.load(m, first)
		average(e, u, g, m, 1, 2)
		e.store(u, first)
		e.load(h, second)
		e.mulAdd(h, k(3), h, k(4))
		e.div(u, u, h)
		clamp(e, u)
		move(e, u)
	}},
	{"adopt", func(e emitter) {
		const g, v, d, u, m, next = register(0), register(1), register(2), register(3), register(4), register(5)
		e.gradient(g)
		e.load(v, second)
		e.sqrt(d, v)
		e.atLeast(d, k(7))
		e.div(d, g, d)
		clamp(e, d)
		e.load(m, first)
		average(e, u, d, m, 1, 2)
		e.store(u, first)
		averageSquare(e, next, g, v, 3, 4)
		e.store(next, second)
		move(e, u)
	}},
	{"lamb", func(e emitter) {
		const w = register(0)
		u, q := moments(e)
		e.mul(u, u, k(6))
		e.div(u, u, q)
		e.load(w, weight)
		e.mulAdd(u, w, k(5), u)
		e.store(u, gradient)
	}},
	{"muon", func(e emitter) {
		const g, m, u, next = register(0), register(1), register(2), register(3)
		e.gradient(g)
		e.load(m, first)
		average(e, u, g, m, 1, 2)
		e.store(u, first)
		average(e, next, g, u, 3, 4)
		e.store(next, gradient)
	}},
	{"scheduleFree", func(e emitter) {
		const g, v, q, y, z = register(0), register(1), register(2), register(3), register(4)
		e.gradient(g)
		e.load(v, second)
		averageSquare(e, q, g, v, 3, 4)
		e.store(q, second)
		e.sqrt(q, q)
		e.mulAdd(q, k(8), q, k(7))
		e.div(g, g, q)
		e.load(y, weight)
		e.mulAdd(g, y, k(5), g) // u
		e.load(z, first)
		e.sub(v, z, y)
		e.mulAdd(y, v, k(1), y)
		e.mulAdd(y, g, k(2), y)
		e.mulAdd(z, g, k(6), z)
		e.store(y, weight)
		e.store(z, first)
	}},
	{"averageSquares", func(e emitter) {
		const g, v, next = register(0), register(1), register(2)
		e.gradient(g)
		e.load(v, first)
		averageSquare(e, next, g, v, 1, 2)
		e.store(next, first)
	}},
}

// average sets dst = x·k(rest) + old·k(decay).
func average(e emitter, dst, x, old register, decay, rest int) {
	e.mul(dst, x, k(rest))
	e.mulAdd(dst, old, k(decay), dst)
}

// averageSquare sets dst = x²·k(rest) + old·k(decay).
func averageSquare(e emitter, dst, x, old register, decay, rest int) {
	e.mul(dst, x, x)
	e.mul(dst, dst, k(rest))
	e.mulAdd(dst, old, k(decay), dst)
}

// clamp limits x to the range of constants 9 and 8. NaN stays NaN.
func clamp(e emitter, x register) {
	e.atMost(x, k(8))
	e.atLeast(x, k(9))
}

// moments updates the moments of AdamW and LAMB. Register u holds the first moment, and q the root
// of the second, times k(8), plus k(7).
func moments(e emitter) (u, q register) {
	const g, m, v = register(0), register(1), register(2)
	u, q = 3, 4
	e.gradient(g)
	e.load(m, first)
	average(e, u, g, m, 1, 2)
	e.store(u, first)
	e.load(v, second)
	averageSquare(e, q, g, v, 3, 4)
	e.store(q, second)
	e.sqrt(q, q)
	e.mulAdd(q, k(8), q, k(7))
	return u, q
}

// move sets weight = weight·k(5) - u·k(6), using register 0.
func move(e emitter, u register) {
	e.mul(u, u, k(6))
	decay(e, u)
}

// decay sets weight = weight·k(5) - u, using register 0.
func decay(e emitter, u register) {
	const w = register(0)
	e.load(w, weight)
	e.mulSub(w, k(5), w, u)
	e.store(w, weight)
}

// An operand is a register or a constant.
type operand interface{ isOperand() }

type (
	register int
	k        int // constant
)

func (register) isOperand() {}
func (k) isOperand()        {}

// A vector is an operand of an update in memory.
type vector int

const (
	weight vector = iota
	gradient
	first  // the first state tensor
	second // the second state tensor
)

// An emitter writes the operations of an update on one element, or on one register of elements.
type emitter interface {
	gradient(dst register)                // dst = gradient · constant 0
	load(dst register, from vector)       // dst = from
	store(src register, to vector)        // to = src, with denormal numbers as 0
	mul(dst register, a, b operand)       // dst = a·b
	div(dst register, a, b operand)       // dst = a/b
	sub(dst register, a, b operand)       // dst = a - b
	mulAdd(dst register, a, b, c operand) // dst = a·b + c; dst is b or c
	mulSub(dst register, a, b, c operand) // dst = a·b - c; dst is b
	sqrt(dst register, a operand)         // dst = √a
	atMost(x register, bound operand)     // x = min(x, bound), or NaN
	atLeast(x register, bound operand)    // x = max(x, bound), or NaN
}

// updateAssembly returns optimizer_amd64.s. Denormal numbers are read and written as zero: the
// moments of a weight without gradients would otherwise become denormal and remain so, and each
// would cost a hundred times an ordinary update.
func updateAssembly() []byte {
	s := file()
	for _, v := range []isa{avx512, avx2} {
		for _, update := range updates {
			name := update.name + v.suffix()
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
					update.body(assembly{s, v, i * v.bytes})
				}
			})
			s.i("LDMXCSR saved-8(SP)")
			s.ret()
		}
	}
	return s.Bytes()
}

// assembly writes an update of one vector register of elements, at an offset in bytes.
type assembly struct {
	*source
	isa
	at int
}

func (e assembly) name(x operand) string {
	if c, ok := x.(k); ok {
		return e.r(6 + int(c))
	}
	return e.r(int(x.(register)))
}

func (e assembly) memory(v vector) string {
	return fmt.Sprintf("%d(%s)(AX*4)", e.at, [...]string{weight: "DI", gradient: "SI", first: "DX", second: "BX"}[v])
}

func (e assembly) gradient(dst register) {
	e.i("VMULPS %s, %s, %s", e.memory(gradient), e.name(k(0)), e.name(dst))
}
func (e assembly) load(dst register, from vector) { e.i("VMOVUPS %s, %s", e.memory(from), e.name(dst)) }
func (e assembly) store(src register, to vector)  { e.i("VMOVUPS %s, %s", e.name(src), e.memory(to)) }

func (e assembly) mul(dst register, a, b operand) {
	e.i("VMULPS %s, %s, %s", e.name(a), e.name(b), e.name(dst))
}

func (e assembly) div(dst register, a, b operand) {
	e.i("VDIVPS %s, %s, %s", e.name(b), e.name(a), e.name(dst))
}

func (e assembly) sub(dst register, a, b operand) {
	e.i("VSUBPS %s, %s, %s", e.name(b), e.name(a), e.name(dst))
}

func (e assembly) mulAdd(dst register, a, b, c operand) {
	switch dst {
	case c:
		e.i("VFMADD231PS %s, %s, %s", e.name(a), e.name(b), e.name(dst))
	case b:
		e.i("VFMADD213PS %s, %s, %s", e.name(c), e.name(a), e.name(dst))
	default:
		log.Panicf("mulAdd(%v, %v, %v, %v): the result must be b or c", dst, a, b, c)
	}
}

func (e assembly) mulSub(dst register, a, b, c operand) {
	if dst != b {
		log.Panicf("mulSub(%v, %v, %v, %v): the result must be b", dst, a, b, c)
	}
	e.i("VFMSUB213PS %s, %s, %s", e.name(c), e.name(a), e.name(dst))
}

func (e assembly) sqrt(dst register, a operand) { e.i("VSQRTPS %s, %s", e.name(a), e.name(dst)) }

// If an operand is NaN, VMINPS and VMAXPS return the operand that they have first here.
func (e assembly) atMost(x register, bound operand) {
	e.i("VMINPS %s, %s, %s", e.name(x), e.name(bound), e.name(x))
}

func (e assembly) atLeast(x register, bound operand) {
	e.i("VMAXPS %s, %s, %s", e.name(x), e.name(bound), e.name(x))
}

// generatedGo is the head of a generated Go file.
const generatedGo = "// Code generated by xpu/cpu/gen. DO NOT EDIT.\n\n"

// formatted returns Go text in the form of gofmt.
func formatted(text []byte) []byte {
	out, err := format.Source(text)
	if err != nil {
		log.Panicf("%v in:\n%s", err, text)
	}
	return out
}

// updateGo returns optimizer_kernels.go: the updates by number, and their Go forms, which do the
// operations of the assembly in the same order but round each of them.
func updateGo() []byte {
	s := new(source)
	s.WriteString(generatedGo + "package cpu\n\n// The updates of xpu/cpu/gen/optimizer.go.\nconst (\n")
	for i, update := range updates {
		kind := ""
		if i == 0 {
			kind = " updateKernel = iota"
		}
		s.i("%sUpdate%s", update.name, kind)
	}
	s.WriteString(")\n\nfunc updateGo(which updateKernel, w, grad, a, b []float32, k *updateConstants) {\n" +
		"\tgrad, a, b = grad[:len(w)], a[:len(w)], b[:len(w)]\n\tswitch which {\n")
	for _, update := range updates {
		s.i("case %sUpdate:", update.name)
		s.i("%sGo(w, grad, a, b, k)", update.name)
	}
	s.WriteString("\t}\n}\n")
	for _, update := range updates {
		body := &goText{source: new(source)}
		update.body(body)
		fmt.Fprintf(s, "\nfunc %sGo(w, grad, a, b []float32, k *updateConstants) {\n\tfor i := range w {\n%s\t}\n}\n",
			update.name, body.Bytes())
	}
	return formatted(s.Bytes())
}

// goText writes an update of one element in Go. A product is converted to float32, because the
// compiler may otherwise fuse it with an addition.
type goText struct {
	*source
	set [6]bool // registers that have a value
}

func (e *goText) name(x operand) string {
	if c, ok := x.(k); ok {
		return fmt.Sprintf("k[%d]", c)
	}
	return fmt.Sprintf("r%d", x.(register))
}

func (e *goText) assign(dst register, format string, args ...any) {
	operator := "="
	if !e.set[dst] {
		operator, e.set[dst] = ":=", true
	}
	e.i("%s %s "+format, append([]any{e.name(dst), operator}, args...)...)
}

func (e *goText) memory(v vector) string {
	return [...]string{weight: "w[i]", gradient: "grad[i]", first: "a[i]", second: "b[i]"}[v]
}

func (e *goText) gradient(dst register) { e.assign(dst, "float32(%s * k[0])", e.memory(gradient)) }

func (e *goText) load(dst register, from vector) { e.assign(dst, "%s", e.memory(from)) }

func (e *goText) store(src register, to vector) {
	e.assign(src, "normal(%s)", e.name(src))
	e.i("%s = %s", e.memory(to), e.name(src))
}

func (e *goText) mul(dst register, a, b operand) {
	e.assign(dst, "float32(%s * %s)", e.name(a), e.name(b))
}

func (e *goText) div(dst register, a, b operand) { e.assign(dst, "%s / %s", e.name(a), e.name(b)) }
func (e *goText) sub(dst register, a, b operand) { e.assign(dst, "%s - %s", e.name(a), e.name(b)) }

func (e *goText) mulAdd(dst register, a, b, c operand) {
	e.assign(dst, "float32(%s * %s) + %s", e.name(a), e.name(b), e.name(c))
}

func (e *goText) mulSub(dst register, a, b, c operand) {
	e.assign(dst, "float32(%s * %s) - %s", e.name(a), e.name(b), e.name(c))
}

func (e *goText) sqrt(dst register, a operand) { e.assign(dst, "squareRoot(%s)", e.name(a)) }

func (e *goText) atMost(x register, bound operand) {
	e.assign(x, "atMost(%s, %s)", e.name(x), e.name(bound))
}

func (e *goText) atLeast(x register, bound operand) {
	e.assign(x, "atLeast(%s, %s)", e.name(x), e.name(bound))
}

// updateDispatch returns optimizer_amd64.go, which calls the assembly by name: see vectorSet.
func updateDispatch() []byte {
	var s bytes.Buffer
	s.WriteString(generatedGo + "//go:build !purego\n\npackage cpu\n\n" +
		"// updateSixteens runs an update on vectors of a multiple of 16 elements.\n" +
		"func updateSixteens(which updateKernel, w, grad, a, b []float32, k *updateConstants) {\n" +
		"n := int64(len(w))\nswitch vectorSet {\n")
	for _, v := range []isa{avx512, avx2} {
		fmt.Fprintf(&s, "case &%sKernels:\nswitch which {\n", map[isa]string{avx512: "avx512", avx2: "avx2"}[v])
		for _, update := range updates {
			fmt.Fprintf(&s, "case %sUpdate:\n%s%s(&w[0], &grad[0], &a[0], &b[0], n, k)\n", update.name, update.name,
				v.suffix())
		}
		s.WriteString("}\n")
	}
	s.WriteString("default:\nupdateGo(which, w, grad, a, b, k)\n}\n}\n")
	for _, v := range []isa{avx512, avx2} {
		for _, update := range updates {
			fmt.Fprintf(&s, "\n//go:noescape\nfunc %s%s(w, grad, a, b *float32, n int64, k *updateConstants)\n",
				update.name, v.suffix())
		}
	}
	return formatted(s.Bytes())
}
