// Package xpu is what mula asks of a machine that computes: memory, products of matrices, and the
// other operations of a decoder and its training. A sub-package implements [Device] for one kind of
// machine; [mula/xpu/cpu] is the one that is always there.
//
// All numbers are float32 and all matrices row-major: element (i, j) of a matrix x with leading
// dimension ld is x[i*ld+j].
//
// # Precision
//
// A device computes products in one [Precision] for all its life. With [BF16] every element of A
// and B of a product is rounded to bfloat16 before it is multiplied; in memory it stays float32. A
// product of two bfloat16 numbers is exact in float32; the sums and C are float32.
//
// # Determinism
//
// The bits of a result depend on the operands of that result alone: not on Threads, not on how rows
// are grouped, not on the rows or columns computed beside it. Row i of a product is the same, bit
// for bit, whether it was computed alone or among thousands. Sums over tokens are taken in an order
// that follows from the sizes alone. Bits may differ between kinds of devices and between the
// kernel sets of one kind; [Device.Arithmetic] says which agree. Of a NaN this holds only as far as
// that it is one: its sign and payload are not promised.
//
// # Aliasing and errors
//
// The result must not overlap an operand; operands may overlap each other. A slice that is too
// short for the sizes given, a negative size or a leading dimension below the row length is a
// mistake of the caller and panics before anything is written.
package xpu

// Precision is the precision of the operands of products.
type Precision string

// The precisions of products.
const (
	// FP32 takes operands as they are.
	FP32 Precision = "fp32"

	// BF16 rounds operands to bfloat16, the upper half of a float32: to the nearest, ties to even.
	// What is beyond the largest bfloat16 becomes infinite, a NaN stays a NaN, and a denormal
	// number becomes zero of its sign.
	BF16 Precision = "bf16"
)

// Precisions lists the precisions.
func Precisions() []string { return []string{string(FP32), string(BF16)} }

// A Device computes. The commands of [Memory], [Products] and [Layers] may be given by several
// goroutines at once, but no two may write, or one read and one write, the same memory.
type Device interface {
	Memory
	Products
	Layers

	// Name says what computes, for logs and for the record of a run: kind, kernel set and threads,
	// as in "cpu avx512, 2 threads".
	Name() string

	// Precision is that of the operands of products.
	Precision() Precision

	// Arithmetic names the way of rounding, as in "cpu fma". Devices with the same one give the
	// same bits.
	Arithmetic() string

	// Threads is the number of workers of Parallel, the caller included.
	Threads() int

	// Parallel calls f(0), …, f(n-1), each once, on workers of the host, and returns when all have
	// returned. The calls may run in any order and at the same time; each should be worth some
	// microseconds. f may itself call any method of the device.
	Parallel(n int, f func(i int))

	// Close stops the device after what it is at. A method called after Close panics.
	Close()
}
