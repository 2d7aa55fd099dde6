//go:build !purego

#include "textflag.h"

// Layout of a heat (kernels.go).
#define W 0
#define C 320
#define BEST 640
#define WON 768
#define X 832
#define PLACE 896
#define LEFT 1088
#define SIZE 1408
#define HEAT 1792

// E computes errors: Z = W·x - c, with a rounding after the product, and in the fused form without it.
#define E_SEPARATE(w, x, c, z) \
	VMULPD w, x, z; \
	VSUBPD c, z, z

#define E_FUSED(w, x, c, z) \
	VMOVUPD w, z; \
	VFMSUB213PD c, x, z

// E_FIRST is E_FUSED but for the elements of K5.
#define E_FIRST(w, x, c, z, t) \
	E_FUSED(w, x, c, z); \
	VMULPD w, x, t; \
	VSUBPD c, t, K5, z

// ALLMAX leaves the largest element of z in all elements of z.
#define ALLMAX(z, t) \
	VSHUFF64X2 $0x4E, z, z, t; \
	VMAXPD t, z, z; \
	VSHUFF64X2 $0xB1, z, z, t; \
	VMAXPD t, z, z; \
	VPERMILPD $0x55, z, t; \
	VMAXPD t, z, z

// DECIDE finds the largest of the errors Z21 to Z24 of one lane, records it and the slots that have it, and counts the first of them. It goes
// to tie, where all are counted, if they are several, and jumps to next.
#define DECIDE(lane, c0, c1, c2, c3, x, tie, next) \
	VMAXPD Z22, Z21, Z25; \
	VMAXPD Z24, Z23, Z26; \
	VMAXPD Z26, Z25, Z25; \
	ALLMAX(Z25, Z26); \
	VCMPPD $0, Z25, Z21, K1; \
	VCMPPD $0, Z25, Z22, K2; \
	VCMPPD $0, Z25, Z23, K3; \
	VCMPPD $0, Z25, Z24, K4; \
	VADDPD Z20, c0, K1, c0; \
	VADDPD Z20, c1, K2, c1; \
	VADDPD Z20, c2, K3, c2; \
	VADDPD Z20, c3, K4, c3; \
	VADDPD Z20, x, x; \
	VMOVSD X25, (lane*HEAT+BEST)(SI)(CX*8); \
	KUNPCKBW K1, K2, K1; \
	KUNPCKBW K3, K4, K3; \
	KUNPCKWD K1, K3, K1; \
	KMOVD K1, AX; \
	MOVL AX, (lane*HEAT+WON)(SI)(CX*4); \
	BLSRL AX, AX; \
	JNZ tie; \
next:

// UNCOUNT takes the count of all but the first of several winners back: their slots are in AX.
#define UNCOUNT(c0, c1, c2, c3, tie, next) \
tie: \
	KMOVD AX, K1; \
	KSHIFTRD $8, K1, K2; \
	KSHIFTRD $16, K1, K3; \
	KSHIFTRD $24, K1, K4; \
	VSUBPD Z20, c0, K1, c0; \
	VSUBPD Z20, c1, K2, c1; \
	VSUBPD Z20, c2, K3, c2; \
	VSUBPD Z20, c3, K4, c3; \
	JMP next

// TURN counts the winners k of one vector whose last member it was, and returns the number of members that are left.
#define TURN(left, size, c, k) \
	VMOVUPD left, Z27; \
	VCMPPD $0, Z20, Z27, k, K6; \
	VSUBPD Z20, Z27, k, Z27; \
	VMOVUPD size, K6, Z27; \
	VMOVUPD Z27, left; \
	VADDPD Z20, c, K6, c

// DECIDE_TURNS is DECIDE for groups of several members.
#define DECIDE_TURNS(lane, c0, c1, c2, c3, x) \
	VMAXPD Z22, Z21, Z25; \
	VMAXPD Z24, Z23, Z26; \
	VMAXPD Z26, Z25, Z25; \
	ALLMAX(Z25, Z26); \
	VCMPPD $0, Z25, Z21, K1; \
	VCMPPD $0, Z25, Z22, K2; \
	VCMPPD $0, Z25, Z23, K3; \
	VCMPPD $0, Z25, Z24, K4; \
	TURN((lane*HEAT+LEFT+0)(SI), (lane*HEAT+SIZE+0)(SI), c0, K1); \
	TURN((lane*HEAT+LEFT+64)(SI), (lane*HEAT+SIZE+64)(SI), c1, K2); \
	TURN((lane*HEAT+LEFT+128)(SI), (lane*HEAT+SIZE+128)(SI), c2, K3); \
	TURN((lane*HEAT+LEFT+192)(SI), (lane*HEAT+SIZE+192)(SI), c3, K4); \
	VADDPD Z20, x, x; \
	VMOVSD X25, (lane*HEAT+BEST)(SI)(CX*8); \
	KMOVB K1, (lane*HEAT+WON+0)(SI)(CX*4); \
	KMOVB K2, (lane*HEAT+WON+1)(SI)(CX*4); \
	KMOVB K3, (lane*HEAT+WON+2)(SI)(CX*4); \
	KMOVB K4, (lane*HEAT+WON+3)(SI)(CX*4)

#define LOAD(lane, c0, c1, c2, c3, x) \
	VMOVUPD (lane*HEAT+C+0)(SI), c0; \
	VMOVUPD (lane*HEAT+C+64)(SI), c1; \
	VMOVUPD (lane*HEAT+C+128)(SI), c2; \
	VMOVUPD (lane*HEAT+C+192)(SI), c3; \
	VBROADCASTSD (lane*HEAT+X)(SI), x

DATA one<>+0(SB)/8, $1.0
GLOBL one<>(SB), RODATA|NOPTR, $8
DATA gone<>+0(SB)/8, $1e300
GLOBL gone<>(SB), RODATA|NOPTR, $8
DATA lowest<>+0(SB)/8, $0xfff0000000000000
GLOBL lowest<>(SB), RODATA|NOPTR, $8
DATA count<>+0(SB)/8, $0x0000000100000000
DATA count<>+8(SB)/8, $0x0000000300000002
DATA count<>+16(SB)/8, $0x0000000500000004
DATA count<>+24(SB)/8, $0x0000000700000006
GLOBL count<>(SB), RODATA|NOPTR, $32

// ERRORS_SEPARATE leaves the errors of one lane in Z21 to Z24.
#define ERRORS_SEPARATE(lane, c0, c1, c2, c3, x) \
	E_SEPARATE((lane*HEAT+W+0)(SI), x, c0, Z21); \
	E_SEPARATE((lane*HEAT+W+64)(SI), x, c1, Z22); \
	E_SEPARATE((lane*HEAT+W+128)(SI), x, c2, Z23); \
	E_SEPARATE((lane*HEAT+W+192)(SI), x, c3, Z24)

// ERRORS_FUSED is the fused form of ERRORS_SEPARATE.
#define ERRORS_FUSED(lane, c0, c1, c2, c3, x) \
	E_FIRST((lane*HEAT+W+0)(SI), x, c0, Z21, Z25); \
	E_FUSED((lane*HEAT+W+64)(SI), x, c1, Z22); \
	E_FUSED((lane*HEAT+W+128)(SI), x, c2, Z23); \
	E_FUSED((lane*HEAT+W+192)(SI), x, c3, Z24)

// LOAD_LANES loads all lanes at SI.
#define LOAD_LANES \
	VBROADCASTSD one<>(SB), Z20; \
	LOAD(0, Z0, Z1, Z2, Z3, Z16); \
	LOAD(1, Z4, Z5, Z6, Z7, Z17); \
	LOAD(2, Z8, Z9, Z10, Z11, Z18); \
	LOAD(3, Z12, Z13, Z14, Z15, Z19); \
	XORL CX, CX

// RACE computes 16 steps of all lanes and returns. ERRORS is ERRORS_SEPARATE or ERRORS_FUSED.
#define RACE(ERRORS) \
	LOAD_LANES; \
step: \
	ERRORS(0, Z0, Z1, Z2, Z3, Z16); \
	DECIDE(0, Z0, Z1, Z2, Z3, Z16, tie0, next0); \
	ERRORS(1, Z4, Z5, Z6, Z7, Z17); \
	DECIDE(1, Z4, Z5, Z6, Z7, Z17, tie1, next1); \
	ERRORS(2, Z8, Z9, Z10, Z11, Z18); \
	DECIDE(2, Z8, Z9, Z10, Z11, Z18, tie2, next2); \
	ERRORS(3, Z12, Z13, Z14, Z15, Z19); \
	DECIDE(3, Z12, Z13, Z14, Z15, Z19, tie3, next3); \
	INCQ CX; \
	CMPQ CX, $16; \
	JLT step; \
	VZEROUPPER; \
	RET; \
	UNCOUNT(Z0, Z1, Z2, Z3, tie0, next0); \
	UNCOUNT(Z4, Z5, Z6, Z7, tie1, next1); \
	UNCOUNT(Z8, Z9, Z10, Z11, tie2, next2); \
	UNCOUNT(Z12, Z13, Z14, Z15, tie3, next3)

// RACE_TURNS is RACE for groups of several members.
#define RACE_TURNS(ERRORS) \
	LOAD_LANES; \
step: \
	ERRORS(0, Z0, Z1, Z2, Z3, Z16); \
	DECIDE_TURNS(0, Z0, Z1, Z2, Z3, Z16); \
	ERRORS(1, Z4, Z5, Z6, Z7, Z17); \
	DECIDE_TURNS(1, Z4, Z5, Z6, Z7, Z17); \
	ERRORS(2, Z8, Z9, Z10, Z11, Z18); \
	DECIDE_TURNS(2, Z8, Z9, Z10, Z11, Z18); \
	ERRORS(3, Z12, Z13, Z14, Z15, Z19); \
	DECIDE_TURNS(3, Z12, Z13, Z14, Z15, Z19); \
	INCQ CX; \
	CMPQ CX, $16; \
	JLT step; \
	VZEROUPPER; \
	RET

// func raceSeparate(heats *[lanes]heat)
TEXT ·raceSeparate(SB), NOSPLIT, $0-8
	MOVQ heats+0(FP), SI
	RACE(ERRORS_SEPARATE)

// func raceSeparateTurns(heats *[lanes]heat)
TEXT ·raceSeparateTurns(SB), NOSPLIT, $0-8
	MOVQ heats+0(FP), SI
	RACE_TURNS(ERRORS_SEPARATE)

// func raceFused(heats *[lanes]heat, apart uint64)
TEXT ·raceFused(SB), NOSPLIT, $0-16
	MOVQ heats+0(FP), SI
	MOVQ apart+8(FP), AX
	KMOVB AX, K5
	RACE(ERRORS_FUSED)

// func raceFusedTurns(heats *[lanes]heat, apart uint64)
TEXT ·raceFusedTurns(SB), NOSPLIT, $0-16
	MOVQ heats+0(FP), SI
	MOVQ apart+8(FP), AX
	KMOVB AX, K5
	RACE_TURNS(ERRORS_FUSED)

// SIFT_BEGIN sets the constants, the place CX and the number of copied elements DX.
#define SIFT_BEGIN \
	VBROADCASTSD gone<>(SB), Z2; \
	VMOVDQU count<>(SB), Y3; \
	MOVL $8, AX; \
	VPBROADCASTD AX, Y4; \
	XORL CX, CX; \
	XORL DX, DX

// SIFT_NEXT sets K1 for the errors above tau.
#define SIFT_NEXT(E) \
	VMOVUPD (SI)(CX*8), Z5; \
	VMOVUPD (BX)(CX*8), Z6; \
	E(Z5, Z0, Z6, Z7); \
	VCMPPD $0x1E, Z1, Z7, K1

// SIFT_COPY copies the elements of K1. It continues at next, and at done if there is no room.
#define SIFT_COPY(next, done) \
	KMOVB K1, AX; \
	VCOMPRESSPD.Z Z5, K1, Z5; \
	VMOVAPD Z2, Z8; \
	VCOMPRESSPD Z6, K1, Z8; \
	VPCOMPRESSD.Z Y3, K1, Y7; \
	VMOVUPD Z5, (DI)(DX*8); \
	VMOVUPD Z8, (R10)(DX*8); \
	VMOVDQU Y7, (R11)(DX*4); \
	POPCNTL AX, AX; \
	ADDQ AX, DX; \
	CMPQ DX, R9; \
	JGT done; \
	VPADDD Y4, Y3, Y3; \
	ADDQ $8, CX; \
	CMPQ CX, R8; \
	JLT next; \
	VPXORQ Z5, Z5, Z5; \
	VMOVUPD Z5, (DI)(DX*8); \
	VMOVUPD Z2, (R10)(DX*8)

// func siftSeparate(toW, toC *float64, place *int32, room int64, w, c *float64, n int64, x, tau float64) int64
TEXT ·siftSeparate(SB), NOSPLIT, $0-80
	MOVQ toW+0(FP), DI
	MOVQ toC+8(FP), R10
	MOVQ place+16(FP), R11
	MOVQ room+24(FP), R9
	MOVQ w+32(FP), SI
	MOVQ c+40(FP), BX
	MOVQ n+48(FP), R8
	VBROADCASTSD x+56(FP), Z0
	VBROADCASTSD tau+64(FP), Z1
	SIFT_BEGIN

next:
	SIFT_NEXT(E_SEPARATE)
	SIFT_COPY(next, done)

done:
	MOVQ DX, ret+72(FP)
	VZEROUPPER
	RET

// func siftFused(toW, toC *float64, place *int32, room int64, w, c *float64, n int64, x, tau float64, apart uint64) int64
TEXT ·siftFused(SB), NOSPLIT, $0-88
	MOVQ toW+0(FP), DI
	MOVQ toC+8(FP), R10
	MOVQ place+16(FP), R11
	MOVQ room+24(FP), R9
	MOVQ w+32(FP), SI
	MOVQ c+40(FP), BX
	MOVQ n+48(FP), R8
	VBROADCASTSD x+56(FP), Z0
	VBROADCASTSD tau+64(FP), Z1
	MOVQ apart+72(FP), AX
	KMOVB AX, K5
	SIFT_BEGIN

next:
	SIFT_NEXT(E_FUSED)
	KORB K5, K1, K1
	KXORB K5, K5, K5             // only the first time
	SIFT_COPY(next, done)

done:
	MOVQ DX, ret+80(FP)
	VZEROUPPER
	RET

// LARGEST leaves the largest error in all elements of Z1.
#define LARGEST(E) \
	VBROADCASTSD lowest<>(SB), Z1; \
	VMOVAPD Z1, Z2; \
	XORL CX, CX; \
	MOVQ R8, R9; \
	ANDQ $-16, R9; \
	CMPQ CX, R9; \
	JGE odd; \
pair: \
	E((SI)(CX*8), Z0, (DI)(CX*8), Z3); \
	E(64(SI)(CX*8), Z0, 64(DI)(CX*8), Z4); \
	VMAXPD Z3, Z1, Z1; \
	VMAXPD Z4, Z2, Z2; \
	ADDQ $16, CX; \
	CMPQ CX, R9; \
	JLT pair; \
odd: \
	CMPQ CX, R8; \
	JGE found; \
	E((SI)(CX*8), Z0, (DI)(CX*8), Z3); \
	VMAXPD Z3, Z1, Z1; \
found: \
	VMAXPD Z2, Z1, Z1; \
	ALLMAX(Z1, Z2)

// PLACES leaves the first place of the error Z1 in R11, and the number of its places in R10.
#define PLACES(E) \
	XORL CX, CX; \
	XORL R10, R10; \
	MOVQ $-1, R11; \
again: \
	E((SI)(CX*8), Z0, (DI)(CX*8), Z3); \
	VCMPPD $0, Z1, Z3, K1; \
	KMOVB K1, AX; \
	TESTL AX, AX; \
	JZ other; \
	POPCNTL AX, DX; \
	ADDQ DX, R10; \
	TESTQ R11, R11; \
	JGE other; \
	TZCNTL AX, AX; \
	LEAQ (CX)(AX*1), R11; \
other: \
	ADDQ $8, CX; \
	CMPQ CX, R8; \
	JLT again

// func argmaxSeparate(w, c *float64, n int64, x float64) (best float64, at, equal int64)
TEXT ·argmaxSeparate(SB), NOSPLIT, $0-56
	MOVQ w+0(FP), SI
	MOVQ c+8(FP), DI
	MOVQ n+16(FP), R8
	VBROADCASTSD x+24(FP), Z0
	LARGEST(E_SEPARATE)
	VMOVSD X1, best+32(FP)
	PLACES(E_SEPARATE)
	MOVQ R11, at+40(FP)
	MOVQ R10, equal+48(FP)
	VZEROUPPER
	RET

// func argmaxFused(w, c *float64, n int64, x float64) (best float64, at, equal int64)
TEXT ·argmaxFused(SB), NOSPLIT, $0-56
	MOVQ w+0(FP), SI
	MOVQ c+8(FP), DI
	MOVQ n+16(FP), R8
	VBROADCASTSD x+24(FP), Z0
	LARGEST(E_FUSED)
	VMOVSD X1, best+32(FP)
	PLACES(E_FUSED)
	MOVQ R11, at+40(FP)
	MOVQ R10, equal+48(FP)
	VZEROUPPER
	RET

// Layout of a vertical (vertical.go).
#define VC 0
#define VW 512
#define VT 576
#define VINDEX 640
#define VTURN 704
#define VROWS 832
#define VPICKS 1344

#define V_SEPARATE(i, c, z) \
	VMULPD.BCST (VW+8*i)(SI), Z22, z; \
	VSUBPD c, z, z

#define V_FUSED(i, c, z) \
	VBROADCASTSD (VW+8*i)(SI), z; \
	VFMSUB213PD c, Z22, z

// FIRST leaves in m, c, d the larger of the errors m and e of datasets i and i+1, its count and its number; m if they are equal.
#define FIRST(i, m, e, cm, ce, c, d) \
	VPBROADCASTQ (VINDEX+8*i)(SI), d; \
	VCMPPD $0x1E, m, e, K1; \
	VMAXPD e, m, m; \
	VBLENDMPD ce, cm, K1, c; \
	VPBROADCASTQ (VINDEX+8*i+8)(SI), K1, d

// BETTER does the same for two results of FIRST, into the first.
#define BETTER(m, c, d, m1, c1, d1) \
	VCMPPD $0x1E, m, m1, K1; \
	VMAXPD m1, m, m; \
	VMOVAPD c1, K1, c; \
	VMOVDQA64 d1, K1, d

// COUNT adds 1 to the count of dataset i where it won.
#define COUNT(i, c) \
	VPCMPEQQ.BCST (VINDEX+8*i)(SI), Z12, K1; \
	VADDPD Z9, c, K1, c

// V_LOAD brings the counts of a vertical into Z0 to Z7, its steps into Z8, and the stride times 3 into R11.
#define V_LOAD \
	VBROADCASTSD one<>(SB), Z9; \
	VMOVUPD VT(SI), Z8; \
	VMOVDQU64 VTURN(SI), Z30; \
	VMOVDQU64 (VTURN+64)(SI), Z31; \
	LEAQ (R9)(R9*2), R11; \
	VMOVUPD (VC+0)(SI), Z0; \
	VMOVUPD (VC+64)(SI), Z1; \
	VMOVUPD (VC+128)(SI), Z2; \
	VMOVUPD (VC+192)(SI), Z3; \
	VMOVUPD (VC+256)(SI), Z4; \
	VMOVUPD (VC+320)(SI), Z5; \
	VMOVUPD (VC+384)(SI), Z6; \
	VMOVUPD (VC+448)(SI), Z7

// V_PICK decides between the four pairs that FIRST left in Z10 to Z21, counts the winners, and puts them into row CX.
#define V_PICK \
	BETTER(Z10, Z11, Z12, Z13, Z14, Z15); \
	BETTER(Z16, Z17, Z18, Z19, Z20, Z21); \
	BETTER(Z10, Z11, Z12, Z16, Z17, Z18); \
	COUNT(0, Z0); \
	COUNT(1, Z1); \
	COUNT(2, Z2); \
	COUNT(3, Z3); \
	COUNT(4, Z4); \
	COUNT(5, Z5); \
	COUNT(6, Z6); \
	COUNT(7, Z7); \
	VCVTPD2QQ Z11, Z11; \
	VPMOVQW Z12, X12; \
	MOVQ CX, AX; \
	SHLQ $6, AX; \
	VMOVDQU64 Z11, VROWS(SI)(AX*1); \
	SHRQ $2, AX; \
	VMOVDQU X12, VPICKS(SI)(AX*1)

// V_TURN transposes the 8 rows: each column has its own range of sample (R8) and dataset (DI). Columns 1 and 4 start at R12 and R13,
// AX is two columns in bytes; columns 0 to 3 of the datasets pass through Z10, 4 to 7 through Z11.
#define V_TURN \
	VMOVDQU64 (VROWS+0)(SI), Z10; \
	VMOVDQU64 (VROWS+64)(SI), Z11; \
	VMOVDQU64 (VROWS+128)(SI), Z12; \
	VMOVDQU64 (VROWS+192)(SI), Z13; \
	VMOVDQU64 (VROWS+256)(SI), Z14; \
	VMOVDQU64 (VROWS+320)(SI), Z15; \
	VMOVDQU64 (VROWS+384)(SI), Z16; \
	VMOVDQU64 (VROWS+448)(SI), Z17; \
	VPUNPCKLQDQ Z11, Z10, Z18; \
	VPUNPCKHQDQ Z11, Z10, Z24; \
	VPUNPCKLQDQ Z13, Z12, Z19; \
	VPUNPCKHQDQ Z13, Z12, Z25; \
	VPUNPCKLQDQ Z15, Z14, Z20; \
	VPUNPCKHQDQ Z15, Z14, Z26; \
	VPUNPCKLQDQ Z17, Z16, Z21; \
	VPUNPCKHQDQ Z17, Z16, Z27; \
	LEAQ (R8)(R9*8), R12; \
	VSHUFF64X2 $0x88, Z19, Z18, Z10; \
	VSHUFF64X2 $0xDD, Z19, Z18, Z11; \
	VSHUFF64X2 $0x88, Z21, Z20, Z12; \
	VSHUFF64X2 $0xDD, Z21, Z20, Z13; \
	VSHUFF64X2 $0x88, Z12, Z10, Z14; \
	VSHUFF64X2 $0xDD, Z12, Z10, Z15; \
	VSHUFF64X2 $0x88, Z13, Z11, Z16; \
	VSHUFF64X2 $0xDD, Z13, Z11, Z17; \
	MOVQ R9, AX; \
	SHLQ $4, AX; \
	VMOVDQU64 Z14, (R8); \
	VMOVDQU64 Z16, (R8)(AX*1); \
	VMOVDQU64 Z15, (R8)(AX*2); \
	LEAQ (AX)(AX*2), BX; \
	VMOVDQU64 Z17, (R8)(BX*1); \
	VSHUFF64X2 $0x88, Z25, Z24, Z10; \
	VSHUFF64X2 $0xDD, Z25, Z24, Z11; \
	VSHUFF64X2 $0x88, Z27, Z26, Z12; \
	VSHUFF64X2 $0xDD, Z27, Z26, Z13; \
	VSHUFF64X2 $0x88, Z12, Z10, Z14; \
	VSHUFF64X2 $0xDD, Z12, Z10, Z15; \
	VSHUFF64X2 $0x88, Z13, Z11, Z16; \
	VSHUFF64X2 $0xDD, Z13, Z11, Z17; \
	VMOVDQU64 Z14, (R12); \
	VMOVDQU64 Z16, (R12)(AX*1); \
	VMOVDQU64 Z15, (R12)(AX*2); \
	VMOVDQU64 Z17, (R12)(BX*1); \
	VMOVDQU64 VPICKS(SI), Z10; \
	VMOVDQA64 Z10, Z11; \
	VMOVDQU64 (VPICKS+64)(SI), Z12; \
	VPERMT2W Z12, Z30, Z10; \
	VPERMT2W Z12, Z31, Z11; \
	LEAQ (DI)(R9*8), R13; \
	VMOVDQU X10, (DI); \
	VEXTRACTI32X4 $1, Z10, (DI)(R9*2); \
	VEXTRACTI32X4 $2, Z10, (DI)(R9*4); \
	VEXTRACTI32X4 $3, Z10, (DI)(R11*2); \
	VMOVDQU X11, (R13); \
	VEXTRACTI32X4 $1, Z11, (R13)(R9*2); \
	VEXTRACTI32X4 $2, Z11, (R13)(R9*4); \
	VEXTRACTI32X4 $3, Z11, (R13)(R11*2)

// V_SAVE puts the counts and steps back.
#define V_SAVE \
	VMOVUPD Z0, (VC+0)(SI); \
	VMOVUPD Z1, (VC+64)(SI); \
	VMOVUPD Z2, (VC+128)(SI); \
	VMOVUPD Z3, (VC+192)(SI); \
	VMOVUPD Z4, (VC+256)(SI); \
	VMOVUPD Z5, (VC+320)(SI); \
	VMOVUPD Z6, (VC+384)(SI); \
	VMOVUPD Z7, (VC+448)(SI); \
	VMOVUPD Z8, VT(SI)

// V_STEP adds 1 to the steps, and computes the error of the first dataset in Z10.
#define V_STEP(E) \
	VMAXPD Z9, Z8, Z22; \
	VADDPD Z9, Z8, Z8; \
	E(0, Z0, Z10)

// V_ROWS compares the first dataset with the others, and repeats from down and from row.
#define V_ROWS(E, row, down) \
	E(1, Z1, Z23); \
	FIRST(0, Z10, Z23, Z0, Z1, Z11, Z12); \
	E(2, Z2, Z13); \
	E(3, Z3, Z23); \
	FIRST(2, Z13, Z23, Z2, Z3, Z14, Z15); \
	E(4, Z4, Z16); \
	E(5, Z5, Z23); \
	FIRST(4, Z16, Z23, Z4, Z5, Z17, Z18); \
	E(6, Z6, Z19); \
	E(7, Z7, Z23); \
	FIRST(6, Z19, Z23, Z6, Z7, Z20, Z21); \
	V_PICK; \
	INCQ CX; \
	CMPQ CX, $8; \
	JLT down; \
	V_TURN; \
	ADDQ $64, R8; \
	ADDQ $16, DI; \
	DECQ R10; \
	JNZ row; \
	V_SAVE; \
	VZEROUPPER; \
	RET

// func descendSeparate(v *vertical, dataset *int16, sample *int64, stride, rows int64)
TEXT ·descendSeparate(SB), NOSPLIT, $0-40
	MOVQ v+0(FP), SI
	MOVQ dataset+8(FP), DI
	MOVQ sample+16(FP), R8
	MOVQ stride+24(FP), R9
	MOVQ rows+32(FP), R10
	V_LOAD

row:
	XORL CX, CX

down:
	V_STEP(V_SEPARATE)
	V_ROWS(V_SEPARATE, row, down)

// func descendFused(v *vertical, dataset *int16, sample *int64, stride, rows int64, apart uint64)
TEXT ·descendFused(SB), NOSPLIT, $0-48
	MOVQ v+0(FP), SI
	MOVQ dataset+8(FP), DI
	MOVQ sample+16(FP), R8
	MOVQ stride+24(FP), R9
	MOVQ rows+32(FP), R10
	MOVQ apart+40(FP), AX
	NEGQ AX                      // in all columns
	KMOVB AX, K5
	V_LOAD

row:
	XORL CX, CX

down:
	V_STEP(V_FUSED)
	VMULPD.BCST VW(SI), Z22, Z11
	VSUBPD Z0, Z11, K5, Z10
	V_ROWS(V_FUSED, row, down)
