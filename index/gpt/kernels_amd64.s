//go:build !purego

#include "go_asm.h"
#include "textflag.h"

// Eight bytes 0, eight bytes 1, … eight bytes 7.
DATA steps<>+0(SB)/8, $0x0000000000000000
DATA steps<>+8(SB)/8, $0x0101010101010101
DATA steps<>+16(SB)/8, $0x0202020202020202
DATA steps<>+24(SB)/8, $0x0303030303030303
DATA steps<>+32(SB)/8, $0x0404040404040404
DATA steps<>+40(SB)/8, $0x0505050505050505
DATA steps<>+48(SB)/8, $0x0606060606060606
DATA steps<>+56(SB)/8, $0x0707070707070707
GLOBL steps<>(SB), RODATA|NOPTR, $64

// The numbers 0 … 8.
DATA count<>+0(SB)/8, $0
DATA count<>+8(SB)/8, $1
DATA count<>+16(SB)/8, $2
DATA count<>+24(SB)/8, $3
DATA count<>+32(SB)/8, $4
DATA count<>+40(SB)/8, $5
DATA count<>+48(SB)/8, $6
DATA count<>+56(SB)/8, $7
DATA count<>+64(SB)/8, $8
GLOBL count<>(SB), RODATA|NOPTR, $72

// Pairs out of two vectors of eight: the first of each, the second of each, …
DATA pairing<>+0(SB)/8, $0
DATA pairing<>+8(SB)/8, $8
DATA pairing<>+16(SB)/8, $1
DATA pairing<>+24(SB)/8, $9
DATA pairing<>+32(SB)/8, $2
DATA pairing<>+40(SB)/8, $10
DATA pairing<>+48(SB)/8, $3
DATA pairing<>+56(SB)/8, $11
DATA pairing<>+64(SB)/8, $4
DATA pairing<>+72(SB)/8, $12
DATA pairing<>+80(SB)/8, $5
DATA pairing<>+88(SB)/8, $13
DATA pairing<>+96(SB)/8, $6
DATA pairing<>+104(SB)/8, $14
DATA pairing<>+112(SB)/8, $7
DATA pairing<>+120(SB)/8, $15
GLOBL pairing<>(SB), RODATA|NOPTR, $128

// func sumLengthsAVX512(lengths *byte, n int) (sum int64, signs uint64)
TEXT ·sumLengthsAVX512(SB), NOSPLIT, $0-32
	MOVQ lengths+0(FP), SI
	MOVQ n+8(FP), CX
	VPXORQ Z2, Z2, Z2
	VPXORQ Z3, Z3, Z3
	VPXORQ Z4, Z4, Z4
	VPXORQ Z5, Z5, Z5

sum:
	VPMOVZXDQ (SI), Z0
	VPMOVZXDQ 32(SI), Z1
	VPADDQ Z0, Z2, Z2
	VPADDQ Z1, Z3, Z3
	VPORQ Z0, Z4, Z4
	VPORQ Z1, Z5, Z5
	ADDQ $64, SI
	SUBQ $16, CX
	JNZ sum
	VPADDQ Z3, Z2, Z2
	VPORQ Z5, Z4, Z4

// reduce adds the lanes of Z2 into AX and ORs the lanes of Z4 into BX.
#define REDUCE \
	VEXTRACTI64X4 $1, Z2, Y3; \
	VPADDQ Y3, Y2, Y2; \
	VEXTRACTI128 $1, Y2, X3; \
	VPADDQ X3, X2, X2; \
	VPSRLDQ $8, X2, X3; \
	VPADDQ X3, X2, X2; \
	VMOVQ X2, AX; \
	VEXTRACTI64X4 $1, Z4, Y3; \
	VPOR Y3, Y4, Y4; \
	VEXTRACTI128 $1, Y4, X3; \
	VPOR X3, X4, X4; \
	VPSRLDQ $8, X4, X3; \
	VPOR X3, X4, X4; \
	VMOVQ X4, BX

	REDUCE
	MOVQ AX, sum+16(FP)
	MOVQ BX, signs+24(FP)
	VZEROUPPER
	RET

// func fillPairsAVX512(dst *uint64, lengths *byte, n int, first, past uint64) (sum int64, signs uint64)
TEXT ·fillPairsAVX512(SB), NOSPLIT, $0-56
	MOVQ dst+0(FP), DI
	MOVQ lengths+8(FP), SI
	MOVQ n+16(FP), CX
	VPBROADCASTQ first+24(FP), Z5
	VPADDQ count<>(SB), Z5, Z5
	VPBROADCASTQ count<>+64(SB), Z6
	VPXORQ Z2, Z2, Z2
	VPXORQ Z4, Z4, Z4
	CMPQ past+32(FP), $0
	JNE past

fill:
	VPMOVZXDQ (SI), Z0
	VPADDQ Z0, Z2, Z2
	VPORQ Z0, Z4, Z4
	VPSLLQ $32, Z0, Z0
	VPORQ Z5, Z0, Z0
	VMOVDQU64 Z0, (DI)
	VPADDQ Z6, Z5, Z5
	ADDQ $32, SI
	ADDQ $64, DI
	SUBQ $8, CX
	JNZ fill
	JMP filled

past: // the same, past the caches
	VPMOVZXDQ (SI), Z0
	VPADDQ Z0, Z2, Z2
	VPORQ Z0, Z4, Z4
	VPSLLQ $32, Z0, Z0
	VPORQ Z5, Z0, Z0
	VMOVNTDQ Z0, (DI)
	VPADDQ Z6, Z5, Z5
	ADDQ $32, SI
	ADDQ $64, DI
	SUBQ $8, CX
	JNZ past
	SFENCE

filled:
	REDUCE
	MOVQ AX, sum+40(FP)
	MOVQ BX, signs+48(FP)
	VZEROUPPER
	RET

// func narrowAVX512(dst *uint32, src *uint64, n int)
TEXT ·narrowAVX512(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX

narrow:
	VMOVDQU64 (SI), Z0
	VPMOVQD Z0, (DI)
	ADDQ $64, SI
	ADDQ $32, DI
	SUBQ $8, CX
	JNZ narrow
	VZEROUPPER
	RET

// Sample rows, eight documents at a time; see rows.fill32 in kernels_amd64.go for the method.
//
// Registers: SI state, DI documents, CX how many, R8 the address that row 0 would have, R9 low-1, R10 the row at the bound of the group above;
// Z16 zero, Z17 bytes 1, Z18 steps, Z19 bytes 8, Z20 bound, Z21 S, Z22 1/S, Z23 (1 … 8)·S-x, Z24 8·S, Z25 -1, Z26 8,
// Z27 the position before the position of the first document of the group.
#define ROWS_BEGIN(width) \
	MOVQ R9, AX; \
	SHLQ $width, AX; \
	SUBQ AX, R8; \
	DECQ R9; \
	MOVQ rows_row(SI), R10; \
	VPXORQ Z16, Z16, Z16; \
	MOVQ $0x0101010101010101, AX; \
	VPBROADCASTQ AX, Z17; \
	VMOVDQU64 steps<>(SB), Z18; \
	SHLQ $3, AX; \
	VPBROADCASTQ AX, Z19; \
	VPBROADCASTQ rows_bound(SI), Z20; \
	VPBROADCASTQ rows_sequence(SI), Z21; \
	VBROADCASTSD rows_inverse(SI), Z22; \
	VPBROADCASTQ count<>+64(SB), Z26; \
	VPMULUDQ count<>+8(SB), Z21, Z23; \
	VPBROADCASTQ rows_extra(SI), Z0; \
	VPSUBQ Z0, Z23, Z23; \
	VPMULUDQ Z26, Z21, Z24; \
	VPTERNLOGQ $0xff, Z25, Z25, Z25; \
	VPBROADCASTQ rows_position(SI), Z27; \
	VPSUBQ Z26, Z27, Z27

// The group's lengths, summed up from its last document downwards; Z2 the bounds below each document, Z4 the rows there, AX the lowest of
// them, BX how many rows the group has.
#define ROWS_GROUP(most) \
	CMPQ CX, $8; \
	JLT done; \
	VMOVDQU64 -64(DI)(CX*8), Z0; \
	VPSRLQ $32, Z0, Z0; \
	VALIGNQ $1, Z0, Z16, Z1; \
	VPADDQ Z1, Z0, Z0; \
	VALIGNQ $2, Z0, Z16, Z1; \
	VPADDQ Z1, Z0, Z0; \
	VALIGNQ $4, Z0, Z16, Z1; \
	VPADDQ Z1, Z0, Z0; \
	VPSUBQ Z0, Z20, Z2; \
	VCVTQQ2PD Z2, Z4; \
	VMULPD Z22, Z4, Z4; \
	VCVTTPD2QQ Z4, Z4; \
	VMOVQ X4, AX; \
	MOVQ R10, BX; \
	SUBQ AX, BX; \
	CMPQ AX, R9; \
	JLT done; \
	CMPQ BX, $most; \
	JHI done; \
	VPBROADCASTQ X2, Z20; \
	SUBQ $8, CX; \
	MOVQ AX, R10; \
	VPBROADCASTQ X4, Z5; \
	VPSUBQ Z5, Z4, Z6; \
	VPMOVUSQB Z6, X6; \
	VPBROADCASTQ X6, Z6; \
	VPMULUDQ Z21, Z5, Z7; \
	VPADDQ Z23, Z7, Z7; \
	VMOVDQA64 Z18, Z8

// Eight rows: Z10 their offsets, Z11 their positions.
#define ROWS_EIGHT \
	VPCMPUB $2, Z8, Z6, K1; \
	VMOVDQU8.Z Z17, K1, Z9; \
	VPSADBW Z16, Z9, Z9; \
	VPADDQ Z27, Z9, Z11; \
	VPADDQ Z25, Z9, Z9; \
	VPERMQ Z2, Z9, Z10; \
	VPSUBQ Z10, Z7, Z10; \
	VPSLLQ $32, Z10, Z10; \
	MOVQ $-1, AX

#define ROWS_MORE \
	VPADDB Z19, Z8, Z8; \
	VPADDQ Z24, Z7, Z7; \
	SUBQ $8, BX

#define ROWS_END \
	VMOVQ X20, AX; \
	MOVQ AX, rows_bound(SI); \
	MOVQ R10, rows_row(SI)

// func rows32AVX512(r *rows, documents *uint64, n int, dst *uint64, low int64) (left int)
TEXT ·rows32AVX512(SB), NOSPLIT, $0-48
	MOVQ r+0(FP), SI
	MOVQ documents+8(FP), DI
	MOVQ n+16(FP), CX
	MOVQ dst+24(FP), R8
	MOVQ low+32(FP), R9
	ROWS_BEGIN(3)

group:
	ROWS_GROUP(248)
	LEAQ 8(R8)(R10*8), DX

eight:
	ROWS_EIGHT
	VPORQ Z11, Z10, Z10
	BZHIQ BX, AX, AX
	KMOVB AX, K2
	VMOVDQU64 Z10, K2, (DX)
	CMPQ BX, $8
	JGT more
	VPSUBQ Z26, Z27, Z27
	JMP group

more:
	ROWS_MORE
	ADDQ $64, DX
	JMP eight

done:
	ROWS_END
	MOVQ CX, left+40(FP)
	VZEROUPPER
	RET

// func rows64AVX512(r *rows, documents *uint64, n int, dst *[2]int64, low int64) (left int)
TEXT ·rows64AVX512(SB), NOSPLIT, $0-48
	MOVQ r+0(FP), SI
	MOVQ documents+8(FP), DI
	MOVQ n+16(FP), CX
	MOVQ dst+24(FP), R8
	MOVQ low+32(FP), R9
	ROWS_BEGIN(4)
	VMOVDQU64 pairing<>(SB), Z28
	VMOVDQU64 pairing<>+64(SB), Z29

group:
	ROWS_GROUP(120)
	MOVQ R10, DX
	SHLQ $4, DX
	LEAQ 16(R8)(DX*1), DX

eight:
	ROWS_EIGHT
	VPSRLQ $32, Z10, Z10
	VMOVDQA64 Z28, Z12
	VPERMI2Q Z10, Z11, Z12
	VMOVDQA64 Z29, Z13
	VPERMI2Q Z10, Z11, Z13
	LEAQ (BX)(BX*1), R11
	BZHIQ R11, AX, AX
	KMOVB AX, K2
	SHRQ $8, AX
	KMOVB AX, K3
	VMOVDQU64 Z12, K2, (DX)
	VMOVDQU64 Z13, K3, 64(DX)
	CMPQ BX, $8
	JGT more
	VPSUBQ Z26, Z27, Z27
	JMP group

more:
	ROWS_MORE
	ADDQ $128, DX
	JMP eight

done:
	ROWS_END
	MOVQ CX, left+40(FP)
	VZEROUPPER
	RET
