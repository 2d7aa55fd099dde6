// Package xpu is what mula asks of a machine that computes: products of matrices, whole and by groups of rows (the experts of a
// mixture), and loops that run on all its workers. A sub-package implements [Device] for one kind of machine; [mula/xpu/cpu] is the one
// that is always there.
//
// All numbers are float32 and all matrices row-major: element (i, j) of a matrix x with leading dimension ld is x[i*ld+j].
//
// # Precision
//
// A device computes products in one [Precision] for all its life. With [BF16] every element of A and B of a product is rounded to bfloat16
// before it is multiplied; in memory it stays float32. A product of two bfloat16 numbers is exact in float32; the sums and C are float32.
//
// # Determinism
//
// The bits of a result depend on the operands of that result alone: not on Threads, not on how rows are grouped, not on the rows or
// columns computed beside it. Row i of a product is the same, bit for bit, whether it was computed alone or among thousands. Bits may
// differ between kinds of devices and between the kernel sets of one kind; [Device.Arithmetic] says which agree. Of a NaN this holds only as
// far as that it is one: its sign and payload are not promised.
//
// # Aliasing and errors
//
// The result must not overlap an operand; operands may overlap each other. A slice that is too short for the sizes given, a negative size
// or a leading dimension below the row length is a mistake of the caller and panics before anything is written.
package xpu

// Precision is the precision of the operands of products.
type Precision string

// The precisions of products.
const (
	// FP32 takes operands as they are.
	FP32 Precision = "fp32"

	// BF16 rounds operands to bfloat16, the upper half of a float32: to the nearest, ties to even. What is beyond the largest bfloat16
	// becomes infinite, a NaN stays a NaN, and a denormal number becomes zero of its sign.
	BF16 Precision = "bf16"
)

// A Device computes. Its methods may be called by several goroutines at once, also from within the function given to Parallel.
type Device interface {
	// Name says what computes, for logs and for the record of a run: kind, kernel set and threads, as in "cpu avx512, 2 threads".
	Name() string

	// Precision is that of the operands of products.
	Precision() Precision

	// Arithmetic names the way of rounding, as in "cpu fma". Devices with the same one give the same bits.
	Arithmetic() string

	// Threads is the number of workers, the caller of a method included.
	Threads() int

	// MatMul computes C = op(A)·op(B), or C += op(A)·op(B) with accumulate. op(A) is m×k: A itself, or with transA the transpose of A,
	// which is then stored k×m. op(B) is k×n: B itself, or with transB the transpose of B, stored n×k. lda, ldb and ldc are the leading
	// dimensions of A, B and C as stored. With k = 0 the product is zero.
	//
	// For weights W stored [out, in], the usual three products are
	//
	//	Y  = X·Wᵀ   MatMul(false, true, tokens, out, in, x, in, w, in, y, out, false)
	//	dX = dY·W   MatMul(false, false, tokens, in, out, dy, out, w, in, dx, in, false)
	//	dW += dYᵀ·X  MatMul(true, false, out, in, tokens, dy, out, x, in, dw, in, true)
	MatMul(transA, transB bool, m, n, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int, accumulate bool)

	// GroupedMatMul multiplies groups of rows, each by its own matrix: the first counts[0] rows of A by b[0], the next counts[1] rows by
	// b[1], and so on. A is Σcounts × k and C is Σcounts × n, without gaps between rows; b[g] is k×n, or n×k with transB, without gaps. C
	// is overwritten, or with accumulate added to. A group of no rows costs nothing, and its b[g] may be nil.
	GroupedMatMul(counts []int, transB bool, n, k int, a []float32, b [][]float32, c []float32, accumulate bool)

	// GroupedWeightGrad computes for every group g of counts[g] rows db[g] = A_gᵀ·dC_g, or db[g] += A_gᵀ·dC_g with accumulate. A is
	// Σcounts × m, dC is Σcounts × n and db[g] is m×n, all without gaps. With a = X and dc = dY it gives the gradient of weights stored
	// [in, out], with a = dY and dc = X of weights stored [out, in]. For a group of no rows the product is zero; with accumulate its db[g]
	// is not touched and may be nil. The db[g] must not overlap each other.
	GroupedWeightGrad(counts []int, m, n int, a, dc []float32, db [][]float32, accumulate bool)

	// Parallel calls f(0), …, f(n-1), each once, on the workers of the device, and returns when all have returned. The calls may run in any
	// order and at the same time; each should be worth some microseconds. f may itself call any method of the device.
	Parallel(n int, f func(i int))

	// Close stops the workers after what they are at. A method called after Close panics.
	Close()
}
