package xpu

// Products are matrix products, of complete matrices and of groups of rows (the experts of a
// mixture). An operand may be a transposed view, see [Tensor.T], and the rows of a matrix may have
// gaps. The right operand b of MatMul and GroupedMatMul may be of BFloat16.
//
// So may dst of MatMul and GroupedWeightGrad. Then the product is computed in float32, from zero.
// With Accumulate, dst is added in float32. The result is rounded once, as defined by [BF16].
//
// On processors, so may the left operand a of all products, and dst of GroupedMatMul.
type Products interface {
	// MatMul computes dst = a·b, or dst += a·b with Accumulate, of a [m, k], b [k, n] and dst
	// [m, n]. With k = 0 the product is zero. dst is not transposed.
	//
	// For weights W stored [out, in], the usual three products are
	//
	//	Y  = X·Wᵀ    MatMul(y, x, w.T(), MatMulOptions{})
	//	dX = dY·W    MatMul(dx, dy, w, MatMulOptions{})
	//	dW += dYᵀ·X  MatMul(dw, dy.T(), x, MatMulOptions{Accumulate: true})
	MatMul(dst, a, b Tensor, o MatMulOptions)

	// GroupedMatMul multiplies groups of rows, each by its own matrix: the first counts[0] rows of
	// a [rows, k] by the first matrix of b [groups, k, n], the next counts[1] rows by the second,
	// and so on. dst [rows, n] is overwritten, or with Accumulate added to. An empty group costs
	// nothing. counts [groups] are not negative and add up to rows. The operands have no gaps; b
	// may be a transposed view.
	GroupedMatMul(dst, a, b, counts Tensor, o MatMulOptions)

	// GroupedWeightGrad computes, for every group g of counts[g] rows, the g-th matrix of dst
	// [groups, m, n] = a_gᵀ·b_g, or += a_gᵀ·b_g with Accumulate, of a [rows, m] and b [rows, n].
	// With a = X and b = dY it computes the gradient of weights stored [in, out], with a = dY and
	// b = X of weights stored [out, in]. For an empty group the product is zero; with Accumulate
	// its matrix is not touched. The operands have no gaps and are not transposed. The counts are
	// as in GroupedMatMul.
	GroupedWeightGrad(dst, a, b, counts Tensor, o MatMulOptions)
}

// MatMulOptions are the options of a product.
type MatMulOptions struct {
	Accumulate bool // add the product to the result's contents
}
