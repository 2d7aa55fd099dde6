package main

import (
	"bytes"
	"fmt"
	"go/format"
	"log"
	"strings"
)

// updates are the optimizer updates that treat each element separately, by name. This table is the
// only definition of their arithmetic: the generator writes the Go, AVX2, AVX-512 and OpenCL forms.
// A new update is an entry here, and a type in xpu/updates.go that computes its constants.
//
// An update reads and writes the vectors of an element through registers 0 to 5. Constant i of
// [xpu.Update] is k(i).
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
	{"move", func(e emitter) {
		const g, w = register(0), register(1)
		e.gradient(g)
		e.load(w, weight)
		e.mul(w, w, k(1))
		e.mulAdd(w, g, k(2), w)
		e.store(w, weight)
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
		e.load(v, second)
		averageSquare(e, next, g, v, 1, 2)
		e.store(next, second)
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
	s.WriteString(")\n\nvar updateKernels = map[string]updateKernel{\n")
	for _, update := range updates {
		s.i("%q: %sUpdate,", update.name, update.name)
	}
	s.WriteString("}\n\nfunc updateGo(which updateKernel, w, grad, a, b []float32, k *updateConstants) {\n" +
		"\tgrad, a, b = grad[:len(w)], a[:len(w)], b[:len(w)]\n\tswitch which {\n")
	for _, update := range updates {
		s.i("case %sUpdate:", update.name)
		s.i("%sGo(w, grad, a, b, k)", update.name)
	}
	s.WriteString("\t}\n}\n")
	for _, update := range updates {
		body := &text{language: goLanguage}
		update.body(body)
		fmt.Fprintf(s, "\nfunc %sGo(w, grad, a, b []float32, k *updateConstants) {\n\tfor i := range w {\n%s\t}\n}\n",
			update.name, body.Bytes())
	}
	return formatted(s.Bytes())
}

// A language is how a text emitter writes the operations of an update: formats with the operands in
// the order of the emitter's methods, results first.
type language struct {
	declare, assign string // of a register: its name, the value
	constant        string // its number
	vectors         [4]string
	product         string   // rounded
	load            string   // of a vector; a gradient and the state may be bfloat16
	store           []string // the vector, the register
	old, next       string   // variables for the weight before and after the update; empty: it is in memory
	sqrt, min, max  string
}

// goLanguage is Go, for one element. A product is converted to float32, because the compiler may
// otherwise fuse it with an addition.
var goLanguage = language{
	declare: "%s := %s\n", assign: "%s = %s\n", constant: "k[%d]",
	vectors: [4]string{weight: "w[i]", gradient: "grad[i]", first: "a[i]", second: "b[i]"},
	product: "float32(%s * %s)", load: "%s",
	store: []string{"%[2]s = normal(%[2]s)\n", "%[1]s = %[2]s\n"},
	sqrt:  "squareRoot(%s)", min: "atMost(%s, %s)", max: "atLeast(%s, %s)",
}

// openCL is OpenCL C, for the lanes of a work-item. base.cl turns the fusing of products off.
var openCL = language{
	declare: "\t\t\tlanes %s = %s;\n", assign: "\t\t\t%s = %s;\n", constant: "k%d",
	vectors: [4]string{weight: "weight", gradient: "grad", first: "m", second: "v"},
	product: "%s * %s", load: "load_numbers(%[1]s, %[1]s_bf16, k, end)",
	store: []string{"\t\t\tstore_numbers(%[1]s, %[1]s_bf16, k, end, %[2]s);\n"}, old: "old", next: "next",
	sqrt: "sqrt(%s)", min: "at_most(%s, %s)", max: "at_least(%s, %s)",
}

// text writes an update in a programming language.
type text struct {
	bytes.Buffer
	language
	set  [6]bool // registers that have a value
	uses [4]bool // vectors
}

func (e *text) name(x operand) string {
	if c, ok := x.(k); ok {
		return fmt.Sprintf(e.constant, int(c))
	}
	return fmt.Sprintf("r%d", int(x.(register)))
}

func (e *text) memory(v vector) string {
	e.uses[v] = true
	return e.vectors[v]
}

func (e *text) let(dst register, value string) {
	form := e.assign
	if !e.set[dst] {
		form, e.set[dst] = e.declare, true
	}
	fmt.Fprintf(e, form, e.name(dst), value)
}

func (e *text) times(a, b string) string { return fmt.Sprintf(e.product, a, b) }

func (e *text) gradient(dst register) {
	e.let(dst, e.times(fmt.Sprintf(e.language.load, e.memory(gradient)), e.name(k(0))))
}

func (e *text) load(dst register, from vector) {
	if from == weight && e.old != "" {
		e.let(dst, e.old)
		return
	}
	e.let(dst, fmt.Sprintf(e.language.load, e.memory(from)))
}

func (e *text) store(src register, to vector) {
	if to == weight && e.next != "" {
		fmt.Fprintf(e, e.assign, e.next, e.name(src))
		return
	}
	for _, form := range e.language.store {
		fmt.Fprintf(e, form, e.memory(to), e.name(src))
	}
}

func (e *text) mul(dst register, a, b operand) { e.let(dst, e.times(e.name(a), e.name(b))) }
func (e *text) div(dst register, a, b operand) { e.let(dst, e.name(a)+" / "+e.name(b)) }
func (e *text) sub(dst register, a, b operand) { e.let(dst, e.name(a)+" - "+e.name(b)) }

func (e *text) mulAdd(dst register, a, b, c operand) {
	e.let(dst, e.times(e.name(a), e.name(b))+" + "+e.name(c))
}

func (e *text) mulSub(dst register, a, b, c operand) {
	e.let(dst, e.times(e.name(a), e.name(b))+" - "+e.name(c))
}

func (e *text) sqrt(dst register, a operand) { e.let(dst, fmt.Sprintf(e.language.sqrt, e.name(a))) }

func (e *text) atMost(x register, bound operand) {
	e.let(x, fmt.Sprintf(e.min, e.name(x), e.name(bound)))
}

func (e *text) atLeast(x register, bound operand) {
	e.let(x, fmt.Sprintf(e.max, e.name(x), e.name(bound)))
}

// updateOpenCL returns updates.cl, with one kernel for each update. It has the operations of the Go
// form, in the same order.
func updateOpenCL() []byte {
	var s bytes.Buffer
	s.WriteString("// Code generated by xpu/cpu/gen. DO NOT EDIT.\n\n" +
		"#include \"squares.cl\"\n#include \"stretches.cl\"\n\n" +
		"// Updates of weights in stretches; each group has length weights. before and change, if they are\n" +
		"// given, are the sums of the squares of the weights and of the changes: [groups, 3].\n")
	for _, update := range updates {
		body := &text{language: openCL}
		update.body(body)
		var locate, advance []string
		for v, used := range body.uses {
			if name := openCL.vectors[v]; used || vector(v) == weight {
				if vector(v) == weight {
					locate = append(locate, "LOCATE("+name+")")
					advance = append(advance, fmt.Sprintf("%s += s[%d] + begin", name, v))
					continue
				}
				locate = append(locate, "LOCATE_TYPED("+name+")")
				advance = append(advance, fmt.Sprintf("%[1]s = MOVE(%[1]s, %[1]s_bf16, s[%[2]d] + begin)", name, v))
			}
		}
		fmt.Fprintf(&s, updateKernelText, update.name, strings.Join(locate, ", "), strings.Join(advance, ", "),
			body.Bytes())
	}
	return s.Bytes()
}

const updateKernelText = `
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void update_%s(MEMORY(float, weight), TYPED(void, grad), TYPED(void, m), TYPED(void, v),
	MEMORY(float, before), MEMORY(float, change), MEMORY(const long, table), const int stretches, const int length,
	const float k0, const float k1, const float k2, const float k3, const float k4,
	const float k5, const float k6, const float k7, const float k8, const float k9, const float keep)
{
	%s, LOCATE(table);
	local float part[GROUP];
	const global long *s = stretch_of(table, stretches);
	const long begin = length * ((long)get_group_id(0) - s[FIRST_GROUP]);
	const int end = min((long)length, s[ELEMENTS] - begin);
	%s;
	squares allBefore = {0, 0, 0}, allChange = {0, 0, 0};
	for (int i = LANES * ITEM; i < end; i += AT_A_TIME) {
		squares someBefore = {0, 0, 0}, someChange = {0, 0, 0};
		for (int k = i; k < min(end, i + AT_A_TIME); k += LANES * GROUP) {
			const lanes old = load_lanes(weight, k, end, 0);
			lanes next = old;
%s			next *= keep;
			store_lanes(weight, k, end, next);
			if (GIVEN(before)) {
				add_square(&someBefore, old);
				add_square(&someChange, next - old);
			}
		}
		add_squares(&allBefore, someBefore);
		add_squares(&allChange, someChange);
	}
	if (GIVEN(before)) {
		LOCATE(before), LOCATE(change);
		store_squares(before + 3 * get_group_id(0), allBefore, part);
		store_squares(change + 3 * get_group_id(0), allChange, part);
	}
}
`

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
