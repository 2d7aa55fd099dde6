//go:build !purego

#include "textflag.h"

// One vector of the recurrence: the state at SI, its successor and the word shift bytes away become the next state, in Z3 and at SI.
#define TWIST(shift) \
	VMOVDQU32 (SI), Z0; \
	VMOVDQU32 4(SI), Z1; \
	VMOVDQU32 shift(SI), Z2; \
	VMOVDQA32 Z20, Z3; \
	VPTERNLOGD $0xCA, Z1, Z0, Z3; \ // the upper bit of Z0, the others of Z1
	VPTESTMD Z21, Z1, K1; \
	VPSRLD $1, Z3, Z3; \
	VPXORD Z2, Z3, Z3; \
	VPXORD Z22, Z3, K1, Z3; \
	VMOVDQU32 Z3, (SI)

// Tempers Z3 into the block at DI, and goes on to the next vector. Ternary 0x78 is x ^ (y & z).
#define TEMPER \
	VPSRLD $11, Z3, Z4; \
	VPXORD Z4, Z3, Z3; \
	VPSLLD $7, Z3, Z4; \
	VPTERNLOGD $0x78, Z23, Z4, Z3; \
	VPSLLD $15, Z3, Z4; \
	VPTERNLOGD $0x78, Z24, Z4, Z3; \
	VPSRLD $18, Z3, Z4; \
	VPXORD Z4, Z3, Z3; \
	VMOVDQU32 Z3, (DI); \
	ADDQ $64, SI; \
	ADDQ $64, DI

// func twistAVX512(state, block *uint32)
TEXT ·twistAVX512(SB), NOSPLIT, $0-16
	MOVQ state+0(FP), SI
	MOVQ block+8(FP), DI
	MOVL $0x80000000, AX
	VPBROADCASTD AX, Z20
	MOVL $1, AX
	VPBROADCASTD AX, Z21
	MOVL $0x9908b0df, AX
	VPBROADCASTD AX, Z22
	MOVL $0x9d2c5680, AX
	VPBROADCASTD AX, Z23
	MOVL $0xefc60000, AX
	VPBROADCASTD AX, Z24
	TWIST(1588)               // 397 words ahead
	VMOVDQU32 Z3, 2496(SI)    // the copy behind the state
	TEMPER
	MOVQ $14, CX
ahead:
	TWIST(1588)
	TEMPER
	DECQ CX
	JNZ ahead
	MOVQ $24, CX
behind:
	TWIST(-908)               // 227 words back: 397 ahead, around the end
	TEMPER
	DECQ CX
	JNZ behind
	VZEROUPPER
	RET

// func acceptAVX512(words *uint32, count int, dst *uint32, mask, i uint32) (accepted int)
// Z26 holds i as it was at the beginning and Z27 the least it can become: where both agree a word's fate is certain. Others are decided
// one by one.
TEXT ·acceptAVX512(SB), NOSPLIT, $0-40
	MOVQ words+0(FP), SI
	MOVQ count+8(FP), CX
	MOVQ dst+16(FP), DI
	MOVL mask+24(FP), AX
	VPBROADCASTD AX, Z25
	MOVL i+28(FP), R8
	VPBROADCASTD R8, Z26
	MOVL R8, AX
	SUBL CX, AX
	VPBROADCASTD AX, Z27
	MOVQ DI, R13
vector:
	VPANDD (SI), Z25, Z3
	VPCMPUD $2, Z26, Z3, K1
	VPCMPUD $2, Z27, Z3, K2
	VPCOMPRESSD.Z Z3, K1, Z5
	VMOVDQU32 Z5, (DI)
	KMOVW K1, AX
	KMOVW K2, BX
	CMPL AX, BX
	JNE uncertain
next:
	POPCNTL AX, AX
	LEAQ (DI)(AX*4), DI
	SUBL AX, R8
	ADDQ $64, SI
	SUBQ $16, CX
	JNZ vector
	SUBQ R13, DI
	SHRQ $2, DI
	MOVQ DI, accepted+32(FP)
	VZEROUPPER
	RET
uncertain:
	VMOVDQU32 Z3, (DI)        // room for 16 words is there, and they are written again below
	XORL BX, AX               // the uncertain lanes; BX: those accepted
lane:
	TZCNTL AX, DX
	BZHIL DX, BX, R9
	POPCNTL R9, R9            // accepted before this lane
	MOVL R8, R10
	SUBL R9, R10              // i at this lane
	XORL R11, R11
	CMPL R10, (DI)(DX*4)
	SETCC R11                 // i >= word
	SHLXL DX, R11, R11
	ORL R11, BX
	BLSRL AX, AX
	JNZ lane
	KMOVW BX, K1
	VPCOMPRESSD.Z Z3, K1, Z5
	VMOVDQU32 Z5, (DI)
	MOVL BX, AX
	JMP next
