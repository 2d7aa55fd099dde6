//go:build !purego

#include "textflag.h"

// SWAP swaps elements of size bytes, which MOV moves.
#define SWAP(MOV, size) \
	LEAQ (SI)(AX*size), R10; \
	LEAQ (DI)(R8*4), R8; \
	LEAQ (DI)(CX*4), DI; \
	LEAQ (R8)(CX*4), R8; \
	NEGQ CX; \
	JZ done; \
loop: \
	MOVL (R8)(CX*4), R11; \
	MOVL (DI)(CX*4), R9; \
	PREFETCHT0 (SI)(R11*size); \
	MOV (SI)(R9*size), R12; \
	MOV (R10), R13; \
	MOV R13, (SI)(R9*size); \
	MOV R12, (R10); \
	SUBQ $size, R10; \
	INCQ CX; \
	JNZ loop; \
done: \
	RET

// func swap32AVX512(a *uint32, i int, partners *uint32, count, ahead int)
// Swaps a[i] and a[partners[0]], a[i-1] and a[partners[1]], …, touching partners[q+ahead] meanwhile.
TEXT ·swap32AVX512(SB), NOSPLIT, $0-40
	MOVQ a+0(FP), SI
	MOVQ i+8(FP), AX
	MOVQ partners+16(FP), DI
	MOVQ count+24(FP), CX
	MOVQ ahead+32(FP), R8
	SWAP(MOVL, 4)

// func swap64AVX512(a *uint64, i int, partners *uint32, count, ahead int)
TEXT ·swap64AVX512(SB), NOSPLIT, $0-40
	MOVQ a+0(FP), SI
	MOVQ i+8(FP), AX
	MOVQ partners+16(FP), DI
	MOVQ count+24(FP), CX
	MOVQ ahead+32(FP), R8
	SWAP(MOVQ, 8)
