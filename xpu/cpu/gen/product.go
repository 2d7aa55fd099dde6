package main

import "fmt"

// productAssembly is product_amd64.s: tiles and packs for products of matrices.
func productAssembly() []byte {
	s := file()
	tile(s, avx512, "tileAVX512", 14)
	tile(s, avx2, "tileAVX2", 6)
	packRows(s, avx512, "packRows32", 32)
	packRows(s, avx512, "packRows14", 14)
	packRows(s, avx2, "packRows16", 16)
	packRows(s, avx2, "packRows6", 6)
	packColumns(s, avx512, "packColumns32", 32)
	packColumns(s, avx512, "packColumns14", 14)
	packColumns(s, avx2, "packColumns16", 16)
	packColumns(s, avx2, "packColumns6", 6)
	return s.Bytes()
}

// tile writes kernelSet.tile for up to mr rows and two registers of columns. Registers: two accumulators a row from 0 on, then the row of b
// in two, then two that take the elements of a in turn.
func tile(s *source, v isa, name string, mr int) {
	s.fn(name, 64, "func "+name+"(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, add int64)")
	s.i("MOVQ rows+0(FP), DX")
	s.i("MOVQ kc+8(FP), CX")
	s.i("MOVQ a+16(FP), AX")
	s.i("MOVQ b+24(FP), BX")
	s.i("MOVQ ldb+32(FP), R8")
	s.i("MOVQ c+40(FP), DI")
	s.i("MOVQ ldc+48(FP), SI")
	s.i("MOVQ add+56(FP), R9")
	s.i("SHLQ $2, R8")
	s.i("SHLQ $2, SI")
	for rows := mr; rows > 1; rows-- {
		s.i("CMPQ DX, $%d", rows)
		s.i("JEQ rows%d", rows)
	}
	for rows := 1; rows <= mr; rows++ {
		tileRows(s, v, mr, rows)
	}
}

// tileRows writes the part of a tile for so many rows.
func tileRows(s *source, v isa, mr, rows int) {
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
			s.i("VFMADD231PS %s, %s, %s", b0, a, v.r(2*i))
			s.i("VFMADD231PS %s, %s, %s", b1, a, v.r(2*i+1))
		}
	}
	// Only the full tile is worth unrolling: the others wait for the latency of their multiply-adds.
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
	s.i("TESTQ R9, R9")
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
	s.ret()
}

// packRows writes the transposing pack of width lines, kc ≥ 4 and a multiple of 4.
//
// Lane l of register r takes 4 elements of line 4l+r, so that a transpose of 4×4 within lanes, of 4 registers, gives 4 registers of
// elements of all lines in order. Lines are read a cache line at a time (half of one with AVX2), for lines a power of two apart share few
// places in the first cache, too few to keep them all until their next 16 bytes are wanted.
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

// packStep transposes 4·quads elements of a group of lines and moves on to the next.
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
		// The same lines of the next panel, too far away for the processor to foresee.
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
	t := 4 * quads // four registers for what is half transposed
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

// packColumns writes the pack that copies panels·width elements of each of kc ≥ 1 lines, width to a panel. It goes along the lines, because
// that is how they come from memory fastest.
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
