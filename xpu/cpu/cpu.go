// Package cpu implements [xpu.Device] on the machine's processor, and the element-wise functions
// that a transformer needs in addition to matrix products. [Host] implements everything but the
// products, for devices that use the processor with other products.
//
// # Kernel sets
//
// "avx512" (AVX-512F) and "avx2" (AVX2 and FMA) are assembly for amd64. "go" runs everywhere, and
// is the only set with the build tag purego. For products of [xpu.BF16] there is also "avx512_bf16"
// (AVX512_BF16 and AVX-512BW), whose multiply-adds have two terms; the other sets round the packed
// operands and then compute as in fp32. [New] chooses the best set that the processor and the
// operating system support. A process measures once whether avx512_bf16 or avx512 is faster.
//
// # Bits
//
// An element of a product is Σ over blocks of 256 terms of Σ over the terms of the block. Within a
// block it is one chain of fused multiply-adds from zero, in ascending order; then one addition per
// block to C. Nothing else affects it, so avx512 and avx2 compute the same bits for every number of
// threads, grouping of rows and position of the element. The functions on vectors have a fixed
// order of operations in the same way. [xpu.Layers] sums over tokens in min(T, 64) parts, each in
// ascending order of the tokens, and then adds the parts in ascending order. The gradients of keys
// and values are summed by blocks of 64 queries, starting with the last block, and within a block
// by heads. The set go does the same operations without fusing and rounds every product. Its bits
// are the same on every architecture, and differ from the bits of the assembly.
//
// In bf16 operands are rounded first, blocks have 512 terms, and a multiply-add whose result is
// denormal returns zero; the additions to C are as in fp32. The instruction VDPBF16PS does the same
// with a pair of terms (Intel's manual; AMD's Zen 4 matches to the bit), so avx512_bf16, avx512 and
// avx2 compute the same bits. The set go keeps denormal results.
package cpu

import (
	"fmt"
	"slices"

	"mula/internal/freelist"
	"mula/xpu"
)

// Device computes on the processor, with a pool of threads that run until [Host.Close]. It is safe
// for use by several goroutines at once; each calling goroutine works on its own command, together
// with the shared workers of the pool. The device keeps its scratch memory: about 530 KiB for each
// thread (860 if bf16 is rounded in float32), up to 16 MiB for each concurrent product, and the
// scratch memory of its [Host]. Products that are rounded to BFloat16 need 672 bytes a column for
// each thread.
type Device struct {
	*Host
	kernels        *kernelSet
	precision      xpu.Precision
	packedElements int // bound on the shared copy of op(B) of one call
	products       freelist.List[product]
	scratch        freelist.List[scratch]
}

var _ xpu.Device = (*Device)(nil)

// New returns a device with the given number of threads, including the caller's; 0 means
// runtime.GOMAXPROCS(0). Products have operands of the given precision.
func New(threads int, precision xpu.Precision) *Device {
	if threads < 0 {
		panic(fmt.Sprintf("cpu: New: invalid number of threads %d", threads))
	}
	if !slices.Contains(xpu.Precisions(), string(precision)) {
		panic(fmt.Sprintf("cpu: New: unknown precision %q", precision))
	}
	d := newDevice(kernelsFor(precision)[0], threads)
	d.precision = precision
	return d
}

func newDevice(k *kernelSet, threads int) *Device {
	d := &Device{kernels: k, precision: k.precision, packedElements: packedElements}
	d.Host = NewHost(threads, d)
	return d
}

// Name returns for example "cpu avx512, 2 threads", or with [xpu.BF16] "cpu avx512_bf16, bf16, 2
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

// Arithmetic returns "cpu fma" for the assembly kernel sets, which agree to the bit. For the set go
// it includes the architecture, as in "cpu go arm64", because Go fuses a product and a sum on some
// architectures. [xpu.BF16] adds the suffix " bf16".
func (d *Device) Arithmetic() string { return "cpu " + d.kernels.arithmetic }

// Precision returns the precision given to [New].
func (d *Device) Precision() xpu.Precision { return d.precision }
