//go:build !purego

#include "textflag.h"

// Messages have the layout of type group: 16 positions, then 16 values. A chunk is 1024 messages.

// func send32AVX512(a *uint32, i int, partners *uint32, count int, block, shift int, staging *byte, tail *uint64, groups *byte, fresh *uint64, link *uint32)
TEXT ·send32AVX512(SB), NOSPLIT, $0-88
	MOVQ a+0(FP), SI
	MOVQ i+8(FP), AX
	MOVQ partners+16(FP), DI
	MOVQ count+24(FP), DX
	MOVQ block+32(FP), R8
	MOVQ shift+40(FP), CX
	MOVQ staging+48(FP), R9
	MOVQ tail+56(FP), R10
	LEAQ (SI)(AX*4), R12      // &a[i]
	LEAQ (DI)(DX*4), DX       // end of partners
	MOVQ $1, R13
	SHLQ CX, R13
	DECQ R13                  // positions in a block
	CMPQ DI, DX
	JGE done
loop:
	MOVL (DI), AX             // j
	MOVL (R12), R15           // the value that goes to j
	SHRXQ CX, AX, BX          // its block
	CMPQ BX, R8
	JEQ own
send:
	MOVQ (R10)(BX*8), R11     // the number of the message
	MOVQ BX, R14
	SHLQ $7, R14
	ADDQ R9, R14              // its group, staged
	MOVL BX, (R12)            // i fetches its value there
	LEAQ 1(R11), AX
	MOVQ AX, (R10)(BX*8)
	ANDL $15, R11
	MOVL (DI), AX
	ANDL R13, AX
	MOVL AX, (R14)(R11*4)
	MOVL R15, 64(R14)(R11*4)
	CMPL R11, $15
	JEQ flush
next:
	SUBQ $4, R12
	ADDQ $4, DI
	CMPQ DI, DX
	JLT loop
done:
	SFENCE                    // makes the messages visible to other threads
	VZEROUPPER
	RET
own:
	MOVL (SI)(AX*4), R11
	MOVL R15, (SI)(AX*4)
	MOVL R11, R15
	JMP send
flush:
	MOVQ (R10)(BX*8), AX
	LEAQ -1(AX), R11
	SHRQ $4, R11
	SHLQ $7, R11
	ADDQ groups+64(FP), R11
	VMOVDQU64 (R14), Z1
	VMOVDQU64 64(R14), Z2
	VMOVNTDQ Z1, (R11)
	VMOVNTDQ Z2, 64(R11)
	TESTQ $1023, AX
	JNZ next
	MOVQ fresh+72(FP), R11    // the chunk is full: the next one
	MOVQ (R11), R14
	INCQ (R11)
	DECQ AX
	SHRQ $10, AX
	MOVQ link+80(FP), R11
	MOVL R14, (R11)(AX*4)
	SHLQ $10, R14
	MOVQ R14, (R10)(BX*8)
	JMP next

// func send64AVX512(a *uint64, i int, partners *uint32, count int, block, shift int, staging *byte, tail *uint64, groups *byte, fresh *uint64, link *uint32)
TEXT ·send64AVX512(SB), NOSPLIT, $0-88
	MOVQ a+0(FP), SI
	MOVQ i+8(FP), AX
	MOVQ partners+16(FP), DI
	MOVQ count+24(FP), DX
	MOVQ block+32(FP), R8
	MOVQ shift+40(FP), CX
	MOVQ staging+48(FP), R9
	MOVQ tail+56(FP), R10
	LEAQ (SI)(AX*8), R12
	LEAQ (DI)(DX*4), DX
	MOVQ $1, R13
	SHLQ CX, R13
	DECQ R13
	CMPQ DI, DX
	JGE done
loop:
	MOVL (DI), AX
	MOVQ (R12), R15
	SHRXQ CX, AX, BX
	CMPQ BX, R8
	JEQ own
send:
	MOVQ (R10)(BX*8), R11
	LEAQ (BX)(BX*2), R14
	SHLQ $6, R14
	ADDQ R9, R14
	MOVQ BX, (R12)
	LEAQ 1(R11), AX
	MOVQ AX, (R10)(BX*8)
	ANDL $15, R11
	MOVL (DI), AX
	ANDL R13, AX
	MOVL AX, (R14)(R11*4)
	MOVQ R15, 64(R14)(R11*8)
	CMPL R11, $15
	JEQ flush
next:
	SUBQ $8, R12
	ADDQ $4, DI
	CMPQ DI, DX
	JLT loop
done:
	SFENCE
	VZEROUPPER
	RET
own:
	MOVQ (SI)(AX*8), R11
	MOVQ R15, (SI)(AX*8)
	MOVQ R11, R15
	JMP send
flush:
	MOVQ (R10)(BX*8), AX
	LEAQ -1(AX), R11
	SHRQ $4, R11
	LEAQ (R11)(R11*2), R11
	SHLQ $6, R11
	ADDQ groups+64(FP), R11
	VMOVDQU64 (R14), Z1
	VMOVDQU64 64(R14), Z2
	VMOVDQU64 128(R14), Z3
	VMOVNTDQ Z1, (R11)
	VMOVNTDQ Z2, 64(R11)
	VMOVNTDQ Z3, 128(R11)
	TESTQ $1023, AX
	JNZ next
	MOVQ fresh+72(FP), R11
	MOVQ (R11), R14
	INCQ (R11)
	DECQ AX
	SHRQ $10, AX
	MOVQ link+80(FP), R11
	MOVL R14, (R11)(AX*4)
	SHLQ $10, R14
	MOVQ R14, (R10)(BX*8)
	JMP next

// func deliver32AVX512(block *uint32, groups *byte, count int)
TEXT ·deliver32AVX512(SB), NOSPLIT, $0-24
	MOVQ block+0(FP), SI
	MOVQ groups+8(FP), DI
	MOVQ count+16(FP), CX
group:
	SUBQ $16, CX
	JLT rest
	MOVL $4, DX
four:
	MOVL (DI), AX
	MOVL 64(DI), R8
	MOVL (SI)(AX*4), R9
	MOVL R8, (SI)(AX*4)
	MOVL R9, 64(DI)
	MOVL 4(DI), AX
	MOVL 68(DI), R8
	MOVL (SI)(AX*4), R9
	MOVL R8, (SI)(AX*4)
	MOVL R9, 68(DI)
	MOVL 8(DI), AX
	MOVL 72(DI), R8
	MOVL (SI)(AX*4), R9
	MOVL R8, (SI)(AX*4)
	MOVL R9, 72(DI)
	MOVL 12(DI), AX
	MOVL 76(DI), R8
	MOVL (SI)(AX*4), R9
	MOVL R8, (SI)(AX*4)
	MOVL R9, 76(DI)
	ADDQ $16, DI
	DECL DX
	JNZ four
	ADDQ $64, DI
	JMP group
rest:
	ADDQ $16, CX
	JZ done
one:
	MOVL (DI), AX
	MOVL 64(DI), R8
	MOVL (SI)(AX*4), R9
	MOVL R8, (SI)(AX*4)
	MOVL R9, 64(DI)
	ADDQ $4, DI
	DECQ CX
	JNZ one
done:
	RET

// func deliver64AVX512(block *uint64, groups *byte, count int)
TEXT ·deliver64AVX512(SB), NOSPLIT, $0-24
	MOVQ block+0(FP), SI
	MOVQ groups+8(FP), DI
	MOVQ count+16(FP), CX
group:
	SUBQ $16, CX
	JLT rest
	XORL DX, DX
four:
	MOVL (DI)(DX*4), AX
	MOVQ 64(DI)(DX*8), R8
	MOVQ (SI)(AX*8), R9
	MOVQ R8, (SI)(AX*8)
	MOVQ R9, 64(DI)(DX*8)
	MOVL 4(DI)(DX*4), AX
	MOVQ 72(DI)(DX*8), R8
	MOVQ (SI)(AX*8), R9
	MOVQ R8, (SI)(AX*8)
	MOVQ R9, 72(DI)(DX*8)
	MOVL 8(DI)(DX*4), AX
	MOVQ 80(DI)(DX*8), R8
	MOVQ (SI)(AX*8), R9
	MOVQ R8, (SI)(AX*8)
	MOVQ R9, 80(DI)(DX*8)
	MOVL 12(DI)(DX*4), AX
	MOVQ 88(DI)(DX*8), R8
	MOVQ (SI)(AX*8), R9
	MOVQ R8, (SI)(AX*8)
	MOVQ R9, 88(DI)(DX*8)
	ADDL $4, DX
	CMPL DX, $16
	JLT four
	ADDQ $192, DI
	JMP group
rest:
	ADDQ $16, CX
	JZ done
	XORL DX, DX
one:
	MOVL (DI)(DX*4), AX
	MOVQ 64(DI)(DX*8), R8
	MOVQ (SI)(AX*8), R9
	MOVQ R8, (SI)(AX*8)
	MOVQ R9, 64(DI)(DX*8)
	INCQ DX
	CMPQ DX, CX
	JLT one
done:
	RET

// func fetch32AVX512(last *uint32, count int, head *uint64, groups *byte, link *uint32)
TEXT ·fetch32AVX512(SB), NOSPLIT, $0-40
	MOVQ last+0(FP), SI
	MOVQ count+8(FP), CX
	MOVQ head+16(FP), R10
	MOVQ groups+24(FP), R11
	MOVQ link+32(FP), R12
	TESTQ CX, CX
	JLE done
loop:
	MOVL (SI), AX             // the queue
	MOVQ (R10)(AX*8), BX      // the number of its next message
	LEAQ 1(BX), R8
	TESTQ $1023, R8
	JZ chunk
advance:
	MOVQ R8, (R10)(AX*8)
	MOVQ BX, DX
	SHRQ $4, DX
	SHLQ $7, DX
	ADDQ R11, DX
	ANDL $15, BX
	MOVL 64(DX)(BX*4), AX
	PREFETCHT0 192(DX)        // the values of the next group
	MOVL AX, (SI)
	SUBQ $4, SI
	DECQ CX
	JNZ loop
done:
	RET
chunk:
	MOVQ BX, R8
	SHRQ $10, R8
	MOVL (R12)(R8*4), R8
	SHLQ $10, R8
	JMP advance

// func fetch64AVX512(last *uint64, count int, head *uint64, groups *byte, link *uint32)
TEXT ·fetch64AVX512(SB), NOSPLIT, $0-40
	MOVQ last+0(FP), SI
	MOVQ count+8(FP), CX
	MOVQ head+16(FP), R10
	MOVQ groups+24(FP), R11
	MOVQ link+32(FP), R12
	TESTQ CX, CX
	JLE done
loop:
	MOVQ (SI), AX
	MOVQ (R10)(AX*8), BX
	LEAQ 1(BX), R8
	TESTQ $1023, R8
	JZ chunk
advance:
	MOVQ R8, (R10)(AX*8)
	MOVQ BX, DX
	SHRQ $4, DX
	LEAQ (DX)(DX*2), DX
	SHLQ $6, DX
	ADDQ R11, DX
	ANDL $15, BX
	MOVQ 64(DX)(BX*8), AX
	PREFETCHT0 256(DX)(BX*8)  // the same slot of the next group
	MOVQ AX, (SI)
	SUBQ $8, SI
	DECQ CX
	JNZ loop
done:
	RET
chunk:
	MOVQ BX, R8
	SHRQ $10, R8
	MOVL (R12)(R8*4), R8
	SHLQ $10, R8
	JMP advance
