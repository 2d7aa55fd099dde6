package main

import "fmt"

// productAssembly returns product_amd64.s: tiles and packs for matrix products.
func productAssembly() []byte {
	s := file()
	tile(s, avx512, "tileAVX512", 14, false)
	tile(s, avx2, "tileAVX2", 6, false)
	tile(s, avx512, "tilePairs", 14, true)
	packRows(s, avx512, "packRows32", 32)
	packRows(s, avx512, "packRows14", 14)
	packRows(s, avx2, "packRows16", 16)
	packRows(s, avx2, "packRows6", 6)
	packColumns(s, avx512, "packColumns32", 32)
	packColumns(s, avx512, "packColumns14", 14)
	packColumns(s, avx2, "packColumns16", 16)
	packColumns(s, avx2, "packColumns6", 6)
	packPairColumns(s, "packPairColumns32", 32)
	packPairColumns(s, "packPairColumns14", 14)
	pairLines(s)
	roundPanels(s)
	roundPairs(s)
	halves(s)
	widen(s)
	return s.Bytes()
}

// Instructions of AVX512_BF16, which Go's assembler does not support. All are in the map 0F38 with
// W = 0 and 512 bits. Operands are in the order of Go's syntax, the result last.

// dotPairs is VDPBF16PS: 32-bit element i of c becomes the sum of it and the products of the
// bfloat16 elements 2i+1, then 2i, of a and b. Both steps are fused multiply-adds that round to
// nearest even, read denormal numbers as zero and make zero of denormal results.
func dotPairs(s *source, a, b, c int) { s.evex("VDPBF16PS", 2, 0x52, a, b, c) }

// toBF16 is VCVTNE2PS2BF16: the lower half of dst becomes the 16 float32 elements of low rounded to
// bfloat16 as defined by [mula/xpu.BF16], the upper half the elements of high.
func toBF16(s *source, low, high, dst int) { s.evex("VCVTNE2PS2BF16", 3, 0x72, low, high, dst) }

// evex writes an instruction of three ZMM registers: Intel's modrm.rm, vvvv and modrm.reg. pp is 2
// for the prefix F3, 3 for F2.
func (s *source) evex(name string, pp, opcode, rm, vvvv, reg int) {
	not := func(r, bit, to int) int { return (^r >> bit & 1) << to }
	code := []any{
		0x62,
		not(reg, 3, 7) | not(rm, 4, 6) | not(rm, 3, 5) | not(reg, 4, 4) | 2,
		(^vvvv&15)<<3 | 4 | pp,
		0x40 | not(vvvv, 4, 3),
		opcode,
		0xc0 | (reg&7)<<3 | rm&7,
	}
	s.i("BYTE $%#02x; BYTE $%#02x; BYTE $%#02x; BYTE $%#02x; BYTE $%#02x; BYTE $%#02x // "+name+" Z%d, Z%d, Z%d",
		append(code, rm, vvvv, reg)...)
}

// tile writes kernelSet.tile for two registers of columns: mr rows at a time, one panel of a after
// the other, and then the remaining rows. Registers: two accumulators per row from 0 on, then two
// for the row of b, then two that alternate for the elements of a. With pairs the elements of a and
// b are pairs of bfloat16.
func tile(s *source, v isa, name string, mr int, pairs bool) {
	s.fn(name, 64, "func "+name+"(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, mode int64)")
	s.i("MOVQ rows+0(FP), DX")
	s.i("MOVQ a+16(FP), AX")
	s.i("MOVQ ldb+32(FP), R8")
	s.i("MOVQ c+40(FP), DI")
	s.i("MOVQ ldc+48(FP), SI")
	s.i("MOVQ mode+56(FP), R9")
	s.i("SHLQ $2, R8")
	s.i("SHLQ $2, SI")
	if !pairs { // a flag of MXCSR, kept in place of arguments that have been read
		s.i("TESTQ $%d, R9", tileFlush)
		s.i("JZ rounding")
		s.i("STMXCSR mode+56(FP)")
		s.i("MOVQ mode+56(FP), R10")
		s.i("ORQ $0x8000, R10")
		s.i("MOVQ R10, rows+0(FP)")
		s.label("rounding")
	}
	s.label("panel")
	s.i("MOVQ kc+8(FP), CX")
	s.i("MOVQ b+24(FP), BX")
	if !pairs {
		s.i("TESTQ $%d, R9", tileFlush)
		s.i("JZ rows")
		s.i("LDMXCSR rows+0(FP)")
		s.label("rows")
	}
	s.i("CMPQ DX, $%d", mr)
	s.i("JGE rows%d", mr)
	for rows := mr - 1; rows > 1; rows-- {
		s.i("CMPQ DX, $%d", rows)
		s.i("JEQ rows%d", rows)
	}
	for rows := 1; rows <= mr; rows++ {
		tileRows(s, v, mr, rows, pairs)
	}
}

// The mode bits of a tile, as in package cpu.
const tileAdd, tileFlush = 1, 2

// tileRows writes the part of a tile for the given number of rows.
func tileRows(s *source, v isa, mr, rows int, pairs bool) {
	b0, b1 := v.r(2*mr), v.r(2*mr+1)
	s.label("rows%d", rows)
	for i := range 2 * rows {
		if v == avx512 {
			s.i("VPXORD Z%d, Z%d, Z%d", i, i, i)
		} else {
			s.i("VXORPS Y%d, Y%d, Y%d", i, i, i)
		}
	}
	s.i("MOVQ DI, R10")
	for range rows {
		s.i("PREFETCHT0 (R10)")
		s.i("PREFETCHT0 %d(R10)", 2*v.bytes-4)
		s.i("ADDQ SI, R10")
	}
	step := func(k int) {
		s.i("VMOVUPS (BX), %s", b0)
		s.i("VMOVUPS %d(BX), %s", v.bytes, b1)
		s.i("ADDQ R8, BX")
		for i := range rows {
			a := v.r(2*mr + 2 + i%2)
			s.i("VBROADCASTSS %d(AX), %s", 4*(k*mr+i), a)
			if pairs {
				dotPairs(s, 2*mr, 2*mr+2+i%2, 2*i)
				dotPairs(s, 2*mr+1, 2*mr+2+i%2, 2*i+1)
				continue
			}
			s.i("VFMADD231PS %s, %s, %s", b0, a, v.r(2*i))
			s.i("VFMADD231PS %s, %s, %s", b1, a, v.r(2*i+1))
		}
	}
	// Only the full tile is worth unrolling: the others are limited by the latency of their
	// multiply-adds.
	if rows == mr {
		s.i("SUBQ $4, CX")
		s.i("JLT rest%d", rows)
		s.i("PCALIGN $32")
		s.label("four%d", rows)
		for k := range 4 {
			step(k)
		}
		s.i("ADDQ $%d, AX", 4*4*mr)
		s.i("SUBQ $4, CX")
		s.i("JGE four%d", rows)
		s.label("rest%d", rows)
		s.i("ADDQ $4, CX")
		s.i("JZ store%d", rows)
	}
	s.label("one%d", rows)
	step(0)
	s.i("ADDQ $%d, AX", 4*mr)
	s.i("DECQ CX")
	s.i("JNZ one%d", rows)
	s.label("store%d", rows)
	if !pairs {
		s.i("TESTQ $%d, R9", tileFlush)
		s.i("JZ add%d", rows)
		s.i("LDMXCSR mode+56(FP)")
		s.label("add%d", rows)
	}
	s.i("TESTQ $%d, R9", tileAdd)
	s.i("JZ overwrite%d", rows)
	s.i("MOVQ DI, R10")
	for i := range rows {
		s.i("VADDPS (R10), %s, %s", v.r(2*i), v.r(2*i))
		s.i("VADDPS %d(R10), %s, %s", v.bytes, v.r(2*i+1), v.r(2*i+1))
		s.i("ADDQ SI, R10")
	}
	s.label("overwrite%d", rows)
	for i := range rows {
		s.i("VMOVUPS %s, (DI)", v.r(2*i))
		s.i("VMOVUPS %s, %d(DI)", v.r(2*i+1), v.bytes)
		s.i("ADDQ SI, DI")
	}
	if rows == mr { // AX and DI point to the next panel
		s.i("SUBQ $%d, DX", mr)
		s.i("JNZ panel")
	}
	s.ret()
}

// packRows writes the transposing pack of width lines, kc ≥ 4 and a multiple of 4.
//
// Lane l of register r loads 4 elements of line 4l+r, so that a 4×4 transpose within the lanes of 4
// registers results in 4 registers of elements of all lines in order. Lines are read one cache line
// at a time (half of one with AVX2): lines a power of two apart map to few sets of the first-level
// cache, too few to keep all of them until their next 16 bytes are read.
func packRows(s *source, v isa, name string, width int) {
	per := 4 * v.lanes // lines in a group
	s.fn(name, 32, "func "+name+"(dst, src *float32, kc, ld int64)")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ src+8(FP), SI")
	s.i("MOVQ kc+16(FP), R8")
	s.i("MOVQ ld+24(FP), DX")
	s.i("SHLQ $2, DX")
	s.i("LEAQ (DX)(DX*2), R9")
	s.i("IMUL3Q $%d, DX, R14", width)
	if v == avx512 && width < per {
		s.i("MOVL $%#x, AX", 1<<width-1)
		s.i("KMOVW AX, K1")
	}
	groups := (width + per - 1) / per
	s.i("MOVQ $%d, R15", groups)
	s.label("group")
	lane := []string{"R10", "R11", "R12", "R13"}[:v.lanes] // line 4l
	s.i("MOVQ SI, R10")
	for l := 1; l < v.lanes; l++ {
		s.i("LEAQ (%s)(DX*4), %s", lane[l-1], lane[l])
	}
	s.i("MOVQ DI, BX")
	s.i("MOVQ R8, CX")
	quads := v.lanes // fours of elements of a line in a step
	s.i("SUBQ $%d, CX", 4*quads)
	s.i("JLT rest")
	s.i("PCALIGN $32")
	s.label("wide")
	packStep(s, v, width, quads, lane)
	s.i("SUBQ $%d, CX", 4*quads)
	s.i("JGE wide")
	s.label("rest")
	s.i("ADDQ $%d, CX", 4*quads)
	s.i("JZ next")
	s.label("narrow")
	packStep(s, v, width, 1, lane)
	s.i("SUBQ $4, CX")
	s.i("JNZ narrow")
	s.label("next")
	s.i("LEAQ (SI)(DX*%d), SI", 8)
	if v == avx512 {
		s.i("LEAQ (SI)(DX*8), SI")
	}
	s.i("ADDQ $%d, DI", v.bytes)
	s.i("DECQ R15")
	s.i("JNZ group")
	s.ret()
}

// packStep transposes 4·quads elements of a group of lines and advances to the next.
func packStep(s *source, v isa, width, quads int, lane []string) {
	lines := min(width, 4*v.lanes)
	at := func(line int) string { // address of a line, without the displacement
		return [4]string{"(%s)", "(%s)(DX*1)", "(%s)(DX*2)", "(%s)(R9*1)"}[line%4]
	}
	in := func(q, r int) int { return 4*q + r }
	for r := range 4 {
		for l := range v.lanes {
			if 4*l+r >= lines {
				continue // the first load of the register has cleared this lane
			}
			for q := range quads {
				address := fmt.Sprintf("%d"+at(r), 16*q, lane[l])
				switch {
				case l == 0:
					s.i("VMOVUPS %s, X%d", address, in(q, r))
				case v == avx512:
					s.i("VINSERTF32X4 $%d, %s, Z%d, Z%d", l, address, in(q, r), in(q, r))
				default:
					s.i("VINSERTF128 $1, %s, Y%d, Y%d", address, in(q, r), in(q, r))
				}
			}
		}
	}
	if quads > 1 {
		// Prefetch the same lines of the next panel, which are too far away for the hardware
		// prefetcher.
		for l := range v.lanes {
			if 4*l < lines {
				s.i("LEAQ (%s)(R14*1), AX", lane[l])
			}
			for r := range 4 {
				if 4*l+r < lines {
					s.i("PREFETCHT0 "+at(r), "AX")
				}
			}
		}
	}
	t := 4 * quads // four registers for half-transposed elements
	for q := range quads {
		a, b, c, d := v.r(in(q, 0)), v.r(in(q, 1)), v.r(in(q, 2)), v.r(in(q, 3))
		t0, t1, t2, t3 := v.r(t), v.r(t+1), v.r(t+2), v.r(t+3)
		s.i("VUNPCKLPS %s, %s, %s", b, a, t0)
		s.i("VUNPCKHPS %s, %s, %s", b, a, t1)
		s.i("VUNPCKLPS %s, %s, %s", d, c, t2)
		s.i("VUNPCKHPS %s, %s, %s", d, c, t3)
		s.i("VUNPCKLPD %s, %s, %s", t2, t0, a)
		s.i("VUNPCKHPD %s, %s, %s", t2, t0, b)
		s.i("VUNPCKLPD %s, %s, %s", t3, t1, c)
		s.i("VUNPCKHPD %s, %s, %s", t3, t1, d)
		for r := range 4 {
			offset := 4 * width * (4*q + r)
			x := in(q, r)
			switch {
			case width >= 4*v.lanes:
				s.i("VMOVUPS %s, %d(BX)", v.r(x), offset)
			case v == avx512:
				s.i("VMOVUPS Z%d, K1, %d(BX)", x, offset)
			default: // 6
				s.i("VMOVUPS X%d, %d(BX)", x, offset)
				s.i("VEXTRACTF128 $1, Y%d, X%d", x, x)
				s.i("VMOVLPS X%d, %d(BX)", x, offset+16)
			}
		}
	}
	for _, p := range lane {
		s.i("ADDQ $%d, %s", 16*quads, p)
	}
	s.i("ADDQ $%d, BX", 16*quads*width)
}

// packColumns writes the pack that copies panels·width elements of each of kc ≥ 1 lines, width to a
// panel. It follows the lines, because that is the fastest order to read memory.
func packColumns(s *source, v isa, name string, width int) {
	s.fn(name, 40, "func "+name+"(dst, src *float32, kc, ld, panels int64)")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ src+8(FP), SI")
	s.i("MOVQ kc+16(FP), CX")
	s.i("MOVQ ld+24(FP), DX")
	s.i("MOVQ panels+32(FP), R8")
	s.i("SHLQ $2, DX")
	s.i("IMUL3Q $%d, CX, R9", 4*width) // bytes in a panel
	if v == avx512 && width < 16 {
		s.i("MOVL $%#x, AX", 1<<width-1)
		s.i("KMOVW AX, K1")
	}
	s.label("line")
	s.i("MOVQ SI, R10")
	s.i("MOVQ DI, R11")
	s.i("MOVQ R8, R12")
	s.label("panel")
	s.i("PREFETCHT0 (R10)(DX*8)")
	if width >= 16 {
		s.i("PREFETCHT0 %d(R10)(DX*8)", 4*width-4)
	}
	switch width {
	case 32, 16:
		s.i("VMOVUPS (R10), %s", v.r(0))
		s.i("VMOVUPS %d(R10), %s", v.bytes, v.r(1))
		s.i("VMOVUPS %s, (R11)", v.r(0))
		s.i("VMOVUPS %s, %d(R11)", v.r(1), v.bytes)
	case 14:
		s.i("VMOVUPS (R10), K1, Z0")
		s.i("VMOVUPS Z0, K1, (R11)")
	case 6:
		s.i("VMOVUPS (R10), X0")
		s.i("VMOVSD 16(R10), X1")
		s.i("VMOVUPS X0, (R11)")
		s.i("VMOVSD X1, 16(R11)")
	}
	s.i("ADDQ $%d, R10", 4*width)
	s.i("ADDQ R9, R11")
	s.i("DECQ R12")
	s.i("JNZ panel")
	s.i("ADDQ DX, SI")
	s.i("ADDQ $%d, DI", 4*width)
	s.i("DECQ CX")
	s.i("JNZ line")
	s.ret()
}

// packPairColumns writes the pack of bfloat16 pairs that copies panels·width elements of each of kc
// ≥ 1 lines: two lines become one line of pairs, the first in their upper halves. An odd last line
// is paired with zeros, negative zeros in panels of op(B).
func packPairColumns(s *source, name string, width int) {
	fmt.Fprintf(s, "\n// Two interleaved runs of 16 words, the second in the lower halves.\n")
	order := "order" + fmt.Sprint(width)
	for i := range 16 {
		fmt.Fprintf(s, "DATA %s<>+%d(SB)/4, $%#08x\n", order, 4*i, i|(16+i)<<16)
	}
	fmt.Fprintf(s, "GLOBL %s<>(SB), RODATA|NOPTR, $64\n", order)
	s.fn(name, 40, "func "+name+"(dst, src *float32, kc, ld, panels int64)")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ src+8(FP), SI")
	s.i("MOVQ kc+16(FP), CX")
	s.i("MOVQ ld+24(FP), DX")
	s.i("MOVQ panels+32(FP), R8")
	s.i("SHLQ $2, DX")
	s.i("LEAQ 1(CX), R9")
	s.i("SHRQ $1, R9")
	s.i("IMUL3Q $%d, R9, R9", 4*width) // bytes in a panel
	if width < 16 {
		s.i("MOVL $%#x, AX", 1<<width-1)
		s.i("KMOVW AX, K1")
	}
	s.i("VMOVDQU32 %s<>(SB), Z6", order)
	s.i("VPXORD Z7, Z7, Z7")
	if width == 32 {
		s.i("MOVL $0x80000000, AX")
		s.i("VPBROADCASTD AX, Z7")
	}
	// One line of pairs of all panels, from one or two lines of src.
	line := func(label string, lines int) {
		s.i("MOVQ SI, R10")
		s.i("LEAQ (SI)(DX*1), R13")
		s.i("MOVQ DI, R11")
		s.i("MOVQ R8, R12")
		s.label(label)
		if lines == 2 {
			for _, r := range []string{"R10", "R13"} {
				s.i("PREFETCHT0 (%s)(DX*8)", r)
				if width > 16 {
					s.i("PREFETCHT0 %d(%s)(DX*8)", 4*width-4, r)
				}
			}
		}
		for i := range (width + 15) / 16 {
			move := "VMOVUPS %d(%s), Z%d"
			if width < 16 {
				move = "VMOVUPS.Z %d(%s), K1, Z%d"
			}
			s.i(move, 64*i, "R10", 2*i)
			if lines == 2 {
				s.i(move, 64*i, "R13", 2*i+1)
			} else {
				s.i("VMOVUPS Z7, Z%d", 2*i+1)
			}
			toBF16(s, 2*i+1, 2*i, 4+i)
			s.i("VPERMW Z%d, Z6, Z%d", 4+i, 4+i)
			if width < 16 {
				s.i("VMOVUPS Z%d, K1, (R11)", 4+i)
			} else {
				s.i("VMOVUPS Z%d, %d(R11)", 4+i, 64*i)
			}
		}
		s.i("ADDQ $%d, R10", 4*width)
		s.i("ADDQ $%d, R13", 4*width)
		s.i("ADDQ R9, R11")
		s.i("DECQ R12")
		s.i("JNZ " + label)
	}
	s.i("SUBQ $2, CX")
	s.i("JLT last")
	s.label("line")
	line("panel", 2)
	s.i("LEAQ (SI)(DX*2), SI")
	s.i("ADDQ $%d, DI", 4*width)
	s.i("SUBQ $2, CX")
	s.i("JGE line")
	s.label("last")
	s.i("ADDQ $2, CX")
	s.i("JZ done")
	line("lastPanel", 1)
	s.label("done")
	s.ret()
}

// pairLines writes the function that converts lines of kc ≥ 1 elements to lines of bfloat16 pairs,
// the first of a pair in its upper half. Elements missing to a multiple of 32 become the float32
// with the bits of pad.
func pairLines(s *source) {
	s.fn("pairLines", 48, "func pairLines(dst, src *float32, kc, ld, lines, pad int64)")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ src+8(FP), SI")
	s.i("MOVQ kc+16(FP), R8")
	s.i("MOVQ ld+24(FP), DX")
	s.i("MOVQ lines+32(FP), R9")
	s.i("MOVQ pad+40(FP), AX")
	s.i("VPBROADCASTD AX, Z3")
	s.i("SHLQ $2, DX")
	s.i("MOVQ R8, CX") // bits of the last 32 elements that are there
	s.i("ANDQ $31, CX")
	s.i("MOVL $1, AX")
	s.i("SHLL CX, AX")
	s.i("DECL AX")
	s.i("KMOVW AX, K1")
	s.i("SHRL $16, AX")
	s.i("KMOVW AX, K2")
	store := func() {
		toBF16(s, 0, 1, 2)
		s.i("VPROLD $16, Z2, Z2")
		s.i("VMOVUPS Z2, (DI)")
		s.i("ADDQ $64, DI")
	}
	s.label("line")
	s.i("MOVQ SI, R10")
	s.i("MOVQ R8, CX")
	s.i("SUBQ $32, CX")
	s.i("JLT rest")
	s.label("whole")
	s.i("VMOVUPS (R10), Z0")
	s.i("VMOVUPS 64(R10), Z1")
	store()
	s.i("ADDQ $128, R10")
	s.i("SUBQ $32, CX")
	s.i("JGE whole")
	s.label("rest")
	s.i("ADDQ $32, CX")
	s.i("JZ next")
	s.i("VMOVUPS Z3, Z0")
	s.i("VMOVUPS Z3, Z1")
	s.i("VMOVUPS (R10), K1, Z0")
	s.i("VMOVUPS 64(R10), K2, Z1")
	store()
	s.label("next")
	s.i("ADDQ DX, SI")
	s.i("DECQ R9")
	s.i("JNZ line")
	s.ret()
}

// roundPanels writes the function that rounds n elements, a multiple of 8, to bfloat16; see
// roundBF16Go.
func roundPanels(s *source) {
	s.fn("roundAVX2", 16, "func roundAVX2(x *float32, n int64)")
	s.i("MOVQ x+0(FP), DI")
	s.i("MOVQ n+8(FP), CX")
	roundingConstants(s)
	s.label("eight")
	s.i("VMOVDQU (DI), Y0")
	roundEight(s)
	s.i("VMOVDQU Y1, (DI)")
	s.i("ADDQ $32, DI")
	s.i("SUBQ $8, CX")
	s.i("JNZ eight")
	s.ret()
}

// roundPairs writes the function that rounds n elements, a multiple of 32, to bfloat16, with
// AVX512_BF16.
func roundPairs(s *source) {
	fmt.Fprintf(s, "\n// The words of each half of a register as the upper halves of 32-bit elements.\n")
	for half := range 2 {
		for i := range 16 {
			fmt.Fprintf(s, "DATA upper%d<>+%d(SB)/4, $%#08x\n", half, 4*i, (16*half+i)<<16)
		}
		fmt.Fprintf(s, "GLOBL upper%d<>(SB), RODATA|NOPTR, $64\n", half)
	}
	s.fn("roundAVX512", 16, "func roundAVX512(x *float32, n int64)")
	s.i("MOVQ x+0(FP), DI")
	s.i("MOVQ n+8(FP), CX")
	s.i("VMOVDQU32 upper0<>(SB), Z6")
	s.i("VMOVDQU32 upper1<>(SB), Z7")
	s.i("MOVL $0xaaaaaaaa, AX")
	s.i("KMOVD AX, K1")
	s.label("some")
	s.i("VMOVUPS (DI), Z0")
	s.i("VMOVUPS 64(DI), Z1")
	toBF16(s, 0, 1, 2)
	for half := range 2 {
		s.i("VPERMW.Z Z2, Z%d, K1, Z%d", 6+half, 3+half)
		s.i("VMOVUPS Z%d, %d(DI)", 3+half, 64*half)
	}
	s.i("ADDQ $128, DI")
	s.i("SUBQ $32, CX")
	s.i("JNZ some")
	s.ret()
}

// roundingConstants sets the constants of roundEight, Y8 to Y14.
func roundingConstants(s *source) {
	for i, bits := range []uint32{0x7f800000, 0x80000000, 0x7fff, 1, 0x00400000, 0xffff0000} {
		s.i("MOVL $%#x, AX", bits)
		s.i("VMOVD AX, X%d", 8+i)
		s.i("VPBROADCASTD X%d, Y%d", 8+i, 8+i)
	}
	s.i("VPXOR Y14, Y14, Y14")
}

// roundEight rounds the elements of Y0 to Y1, and changes Y2 and Y3.
func roundEight(s *source) {
	s.i("VPSRLD $16, Y0, Y1")
	s.i("VPAND Y11, Y1, Y1")
	s.i("VPADDD Y10, Y1, Y1")
	s.i("VPADDD Y0, Y1, Y1") // rounded, if it is a normal number
	s.i("VCMPPS $3, Y0, Y0, Y2")
	s.i("VPOR Y12, Y0, Y3")
	s.i("VPBLENDVB Y2, Y3, Y1, Y1") // NaN
	s.i("VPAND Y8, Y0, Y2")
	s.i("VPCMPEQD Y14, Y2, Y2")
	s.i("VPAND Y9, Y0, Y3")
	s.i("VPBLENDVB Y2, Y3, Y1, Y1") // denormal
	s.i("VPAND Y13, Y1, Y1")
}

// halves writes the functions that round n elements to bfloat16 with two bytes each: a multiple of
// 32 with AVX-512, a multiple of 16 with AVX2.
func halves(s *source) {
	s.fn("halvesAVX512", 24, "func halvesAVX512(dst *uint16, src *float32, n int64)")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ src+8(FP), SI")
	s.i("MOVQ n+16(FP), CX")
	s.label("some")
	s.i("VMOVUPS (SI), Z0")
	s.i("VMOVUPS 64(SI), Z1")
	toBF16(s, 0, 1, 2)
	s.i("VMOVUPS Z2, (DI)")
	s.i("ADDQ $128, SI")
	s.i("ADDQ $64, DI")
	s.i("SUBQ $32, CX")
	s.i("JNZ some")
	s.ret()

	s.fn("halvesAVX2", 24, "func halvesAVX2(dst *uint16, src *float32, n int64)")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ src+8(FP), SI")
	s.i("MOVQ n+16(FP), CX")
	roundingConstants(s)
	s.label("some")
	for i := range 2 {
		s.i("VMOVDQU %d(SI), Y0", 32*i)
		roundEight(s)
		s.i("VPSRLD $16, Y1, Y%d", 4+i)
	}
	s.i("VPACKUSDW Y5, Y4, Y4") // in each half of the registers
	s.i("VPERMQ $0xd8, Y4, Y4")
	s.i("VMOVDQU Y4, (DI)")
	s.i("ADDQ $64, SI")
	s.i("ADDQ $32, DI")
	s.i("SUBQ $16, CX")
	s.i("JNZ some")
	s.ret()
}

// widen writes the function that converts n elements of bfloat16, a multiple of 16, to float32.
func widen(s *source) {
	s.fn("widenAVX2", 24, "func widenAVX2(dst *float32, src *uint16, n int64)")
	s.i("MOVQ dst+0(FP), DI")
	s.i("MOVQ src+8(FP), SI")
	s.i("MOVQ n+16(FP), CX")
	s.label("some")
	for i := range 2 {
		s.i("VPMOVZXWD %d(SI), Y%d", 16*i, i)
		s.i("VPSLLD $16, Y%d, Y%d", i, i)
		s.i("VMOVDQU Y%d, %d(DI)", i, 32*i)
	}
	s.i("ADDQ $32, SI")
	s.i("ADDQ $64, DI")
	s.i("SUBQ $16, CX")
	s.i("JNZ some")
	s.ret()
}
