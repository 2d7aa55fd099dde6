// Package xpu defines the interface to a compute device: memory, matrix products, and the other
// operations of a decoder and its training. Each sub-package implements [Device] for one kind of
// hardware; [mula/xpu/cpu] works on every machine.
//
// All numbers are float32, but weights may be bfloat16 (see [Layers]). All matrices are row-major:
// element (i, j) of a matrix x with leading dimension ld is x[i*ld+j].
//
// # Precision
//
// A device computes all products in one [Precision]. With [BF16] every element of A and B of a
// product is rounded to bfloat16 before the multiplication; in memory it stays float32, except in a
// result that is [Tensor.AsOperand]. A product of two bfloat16 numbers is exact in float32; the
// sums and C are float32. [BF16Mixed] and [BF16Compact] compute the same bits.
//
// # Determinism
//
// The bits of a result depend on the operands of that result alone, not on Threads, on the grouping
// of rows, or on other rows or columns computed in the same call. Row i of a product has the same
// bits whether it was computed alone or among thousands. The order of sums over tokens depends on
// the sizes alone. Bits may differ between kinds of devices and between the kernel sets of one
// kind; devices with the same [Device.Arithmetic] agree. For a NaN only its being NaN is
// guaranteed, not its sign and payload.
//
// # Aliasing and errors
//
// The result must not overlap an operand; operands may overlap each other. A method panics before
// it writes anything if a slice is too short for the sizes, a size is negative or a leading
// dimension is below the row length.
package xpu

// Precision is the precision of the operands of products.
type Precision string

// The precisions of products.
const (
	// FP32 uses the operands unchanged.
	FP32 Precision = "fp32"

	// BF16 rounds operands to bfloat16, the upper half of a float32: to nearest, ties to even.
	// Numbers beyond the largest bfloat16 become infinite, a NaN stays a NaN, and a denormal number
	// becomes a zero of its sign.
	BF16 Precision = "bf16"

	// BF16Mixed is BF16 for a model whose weights are of [BFloat16] in memory.
	BF16Mixed Precision = "bf16_mixed"

	// BF16Compact is BF16Mixed for a model whose gradients are of BFloat16 in memory, too.
	BF16Compact Precision = "bf16_compact"
)

// Weights returns the type of a model's weights in memory.
func (p Precision) Weights() DType {
	if p == BF16Mixed {
		return BFloat16
	}
	return p.Gradients()
}

// Gradients returns the type of a model's gradients in memory.
func (p Precision) Gradients() DType {
	if p == BF16Compact {
		return BFloat16
	}
	return Float32
}

// Precisions lists the precisions.
func Precisions() []string {
	return []string{string(FP32), string(BF16), string(BF16Mixed), string(BF16Compact)}
}

// A Device executes the commands of [Memory], [Products] and [Layers]. Several goroutines may call
// them at once, but no two may write, or one read and one write, the same memory.
type Device interface {
	Memory
	Products
	Layers

	// Name describes the device for logs and run records: kind, kernel set and threads, as in "cpu
	// avx512, 2 threads".
	Name() string

	// Precision returns the precision of the operands of products.
	Precision() Precision

	// Arithmetic names the rounding behavior, as in "cpu fma". Devices with the same name compute
	// the same bits.
	Arithmetic() string

	// ProductRows returns the number of rows of a product that keep the complete device busy, if
	// the product has some thousand columns.
	ProductRows() int

	// Threads returns the number of workers of Parallel, including the caller.
	Threads() int

	// Parallel calls f(0), …, f(n-1) on workers of the host, and returns when all calls have
	// returned. The calls may run in any order and at the same time; each should take at least some
	// microseconds. f may call any method of the device.
	Parallel(n int, f func(i int))

	// Close stops the device after its current commands. A method called after Close panics.
	Close()
}
