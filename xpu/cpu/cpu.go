// Package cpu is the [xpu.Device] of the machine's own processor, and the element-wise functions
// that a transformer needs beside products of matrices. [Host] is all of the device but its
// products, for devices of the processor that have others.
//
// # Kernel sets
//
// "avx512" (AVX-512F) and "avx2" (AVX2 and FMA) are assembly for amd64, "go" runs everywhere and is
// all there is with the build tag purego. For products of [xpu.BF16] there is also "avx512_bf16"
// (AVX512_BF16 and AVX-512BW), whose multiply-adds take twice as many terms a second; the others
// round what they pack and go on as in fp32. [New] takes the best that the processor and the
// operating system support.
//
// # Bits
//
// An element of a product is Σ over blocks of 256 terms of Σ over the terms of the block: in a
// block one chain of fused multiply-adds from zero, in ascending order; then one addition per block
// to what stands in C. Nothing else enters, so avx512 and avx2 give the same bits, whatever the
// number of threads, the grouping of rows and the place of the element. The functions on vectors
// keep to one order of operations in the same manner. What [xpu.Layers] sums over tokens it sums in
// min(T, 64) parts of the tokens, each in ascending order, and then the parts in ascending order;
// the gradients of keys and values by blocks of 64 queries, the last block first, and in a block by
// heads. The set go does the same operations without fusing, rounding every product; its bits are
// the same on every architecture, and differ from those of the assembly.
//
// In bf16 operands are rounded first, blocks have 512 terms, and a multiply-add whose result is
// denormal gives zero; the additions to C are those of fp32. That is what the instruction VDPBF16PS
// does with a pair of terms (Intel's manual; AMD's Zen 4 does so to the bit), so avx512_bf16,
// avx512 and avx2 give the same bits. The set go keeps denormal results.
package cpu

import (
	"fmt"

	"mula/internal/freelist"
	"mula/xpu"
)

// Device computes on the processor, with a pool of threads that live until [Host.Close]. It is safe
// for use by several goroutines at once; each of them takes part in the work it asks for, beside
// the workers of the pool, which they share. It keeps its scratch memory: some 470 KiB for each
// thread (800 where bf16 is rounded in float32), up to 16 MiB for each product that was under way
// at the same time, and that of its [Host].
type Device struct {
	*Host
	kernels        *kernelSet
	packedElements int // bound on the shared copy of op(B) of one call
	products       freelist.List[product]
	scratch        freelist.List[scratch]
}

var _ xpu.Device = (*Device)(nil)

// New returns a device of that many threads, the caller's own included; 0 stands for
// runtime.GOMAXPROCS(0). Products take operands of the given precision.
func New(threads int, precision xpu.Precision) *Device {
	if threads < 0 {
		panic(fmt.Sprintf("cpu: New: %d threads", threads))
	}
	if precision != xpu.FP32 && precision != xpu.BF16 {
		panic(fmt.Sprintf("cpu: New: precision %q", precision))
	}
	return newDevice(kernelsFor(precision)[0], threads)
}

func newDevice(k *kernelSet, threads int) *Device {
	d := &Device{kernels: k, packedElements: packedElements}
	d.Host = NewHost(threads, d)
	return d
}

// Name is for instance "cpu avx512, 2 threads", or of [xpu.BF16] "cpu avx512_bf16, bf16, 2
// threads"; see the package comment for the kernel sets.
func (d *Device) Name() string {
	name := "cpu " + d.kernels.name
	if d.Precision() != xpu.FP32 {
		name += ", " + string(d.Precision())
	}
	if d.Threads() == 1 {
		return name + ", 1 thread"
	}
	return fmt.Sprintf("%s, %d threads", name, d.Threads())
}

// Arithmetic is "cpu fma" of the assembly kernel sets, which agree to the bit, and else names the
// processor, as in "cpu go arm64": Go may fuse a product and a sum on some and not on others. Of
// [xpu.BF16] " bf16" follows.
func (d *Device) Arithmetic() string { return "cpu " + d.kernels.arithmetic }

// Precision is that given to [New].
func (d *Device) Precision() xpu.Precision { return d.kernels.precision }
