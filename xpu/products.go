package xpu

// Products are matrix products, of complete matrices and of groups of rows (the experts of a
// mixture).
type Products interface {
	// MatMul computes C = op(A)·op(B), or C += op(A)·op(B) with accumulate. op(A) is m×k: A itself,
	// or with transA the transpose of A, which is then stored k×m. op(B) is k×n: B itself, or with
	// transB the transpose of B, stored n×k. lda, ldb and ldc are the leading dimensions of A, B
	// and C as stored. With k = 0 the product is zero.
	//
	// For weights W stored [out, in], the usual three products are
	//
	//	Y  = X·Wᵀ   MatMul(false, true, tokens, out, in, x, in, w, in, y, out, false)
	//	dX = dY·W   MatMul(false, false, tokens, in, out, dy, out, w, in, dx, in, false)
	//	dW += dYᵀ·X  MatMul(true, false, out, in, tokens, dy, out, x, in, dw, in, true)
	MatMul(transA, transB bool, m, n, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int,
		accumulate bool)

	// GroupedMatMul multiplies groups of rows, each by its own matrix: the first counts[0] rows of
	// A by the first matrix of b, the next counts[1] rows by the second, and so on. A is rows × k
	// and C is rows × n, without gaps between rows; each matrix of b is k×n, or n×k with transB,
	// one after the other without gaps. C is overwritten, or with accumulate added to. An empty
	// group costs nothing. There is one count for each group; counts are not negative and add up to
	// rows.
	GroupedMatMul(counts []int32, rows int, transB bool, n, k int, a, b, c []float32, accumulate bool)

	// GroupedWeightGrad computes, for every group g of counts[g] rows, the g-th matrix of db =
	// A_gᵀ·dC_g, or += A_gᵀ·dC_g with accumulate. A is rows × m, dC is rows × n and each matrix of
	// db is m×n, all without gaps. With a = X and dc = dY it computes the gradient of weights
	// stored [in, out], with a = dY and dc = X of weights stored [out, in]. For an empty group the
	// product is zero; with accumulate its matrix is not touched. The counts are as in
	// GroupedMatMul.
	GroupedWeightGrad(counts []int32, rows, m, n int, a, dc, db []float32, accumulate bool)
}
