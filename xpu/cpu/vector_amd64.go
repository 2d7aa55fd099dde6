//go:build !purego

package cpu

// vectorSet is the kernel set of the functions on vectors. They call the assembly by name, not
// through variables, so that buffers can stay on the stack.
var vectorSet = kernelSets()[0]

func expSum(lanes *[16]float32, dst, x []float32, shift float32) {
	switch vectorSet {
	case &avx512Kernels:
		expSumAVX512(lanes, &dst[0], &x[0], int64(len(dst)), shift)
	case &avx2Kernels:
		expSumAVX2(lanes, &dst[0], &x[0], int64(len(dst)), shift)
	default:
		expSumGo(lanes, dst, x, shift)
	}
}

func swiglu(dst, gate, up []float32) {
	switch vectorSet {
	case &avx512Kernels:
		swigluAVX512(&dst[0], &gate[0], &up[0], int64(len(dst)))
	case &avx2Kernels:
		swigluAVX2(&dst[0], &gate[0], &up[0], int64(len(dst)))
	default:
		swigluGo(dst, gate, up)
	}
}

func swigluGrad(dGate, dUp, gate, up, dOut []float32) {
	switch vectorSet {
	case &avx512Kernels:
		swigluGradAVX512(&dGate[0], &dUp[0], &gate[0], &up[0], &dOut[0], int64(len(dGate)))
	case &avx2Kernels:
		swigluGradAVX2(&dGate[0], &dUp[0], &gate[0], &up[0], &dOut[0], int64(len(dGate)))
	default:
		swigluGradGo(dGate, dUp, gate, up, dOut)
	}
}

func dot(lanes *[32]float32, x, y []float32) {
	switch vectorSet {
	case &avx512Kernels:
		dotAVX512(lanes, &x[0], &y[0], int64(len(x)))
	case &avx2Kernels:
		dotAVX2(lanes, &x[0], &y[0], int64(len(x)))
	default:
		dotGo(lanes, x, y)
	}
}

func addScaled(dst, x, y []float32, a float32) {
	switch vectorSet {
	case &avx512Kernels:
		addScaledAVX512(&dst[0], &x[0], &y[0], int64(len(dst)), a)
	case &avx2Kernels:
		addScaledAVX2(&dst[0], &x[0], &y[0], int64(len(dst)), a)
	default:
		addScaledGo(dst, x, y, a)
	}
}

func scale(x []float32, a float32) {
	switch vectorSet {
	case &avx512Kernels:
		scaleAVX512(&x[0], int64(len(x)), a)
	case &avx2Kernels:
		scaleAVX2(&x[0], int64(len(x)), a)
	default:
		scaleGo(x, a)
	}
}

func mulScaled(dst, w, x []float32, a float32) {
	switch vectorSet {
	case &avx512Kernels:
		mulScaledAVX512(&dst[0], &w[0], &x[0], int64(len(dst)), a)
	case &avx2Kernels:
		mulScaledAVX2(&dst[0], &w[0], &x[0], int64(len(dst)), a)
	default:
		mulScaledGo(dst, w, x, a)
	}
}

func addProduct(dst, x, y []float32, a float32) {
	switch vectorSet {
	case &avx512Kernels:
		addProductAVX512(&dst[0], &x[0], &y[0], int64(len(dst)), a)
	case &avx2Kernels:
		addProductAVX2(&dst[0], &x[0], &y[0], int64(len(dst)), a)
	default:
		addProductGo(dst, x, y, a)
	}
}

func softmaxGrad(dx, y, dy []float32, shift float32) {
	switch vectorSet {
	case &avx512Kernels:
		softmaxGradAVX512(&dx[0], &y[0], &dy[0], int64(len(dx)), shift)
	case &avx2Kernels:
		softmaxGradAVX2(&dx[0], &y[0], &dy[0], int64(len(dx)), shift)
	default:
		softmaxGradGo(dx, y, dy, shift)
	}
}

func rotateHalves(dst, x, cos, sin []float32, half int, scale, turn float32) {
	switch vectorSet {
	case &avx512Kernels:
		rotateAVX512(&dst[0], &x[0], &cos[0], &sin[0], int64(len(cos)), int64(half), scale, turn)
	case &avx2Kernels:
		rotateAVX2(&dst[0], &x[0], &cos[0], &sin[0], int64(len(cos)), int64(half), scale, turn)
	default:
		rotateGo(dst, x, cos, sin, half, scale, turn)
	}
}

func sumSquares(lanes *[16]float64, x []float32) {
	switch vectorSet {
	case &avx512Kernels:
		sumSquaresAVX512(lanes, &x[0], int64(len(x)))
	case &avx2Kernels:
		sumSquaresAVX2(lanes, &x[0], int64(len(x)))
	default:
		sumSquaresGo(lanes, x)
	}
}

func maximum(lanes *[32]float32, x []float32) {
	switch vectorSet {
	case &avx512Kernels:
		maximumAVX512(lanes, &x[0], int64(len(x)))
	case &avx2Kernels:
		maximumAVX2(lanes, &x[0], int64(len(x)))
	default:
		maximumGo(lanes, x)
	}
}

//go:noescape
func expSumAVX512(lanes *[16]float32, dst, x *float32, n int64, shift float32)

//go:noescape
func expSumAVX2(lanes *[16]float32, dst, x *float32, n int64, shift float32)

//go:noescape
func swigluAVX512(dst, gate, up *float32, n int64)

//go:noescape
func swigluAVX2(dst, gate, up *float32, n int64)

//go:noescape
func swigluGradAVX512(dGate, dUp, gate, up, dOut *float32, n int64)

//go:noescape
func swigluGradAVX2(dGate, dUp, gate, up, dOut *float32, n int64)

//go:noescape
func dotAVX512(lanes *[32]float32, x, y *float32, n int64)

//go:noescape
func dotAVX2(lanes *[32]float32, x, y *float32, n int64)

//go:noescape
func addScaledAVX512(dst, x, y *float32, n int64, a float32)

//go:noescape
func addScaledAVX2(dst, x, y *float32, n int64, a float32)

//go:noescape
func scaleAVX512(x *float32, n int64, a float32)

//go:noescape
func scaleAVX2(x *float32, n int64, a float32)

//go:noescape
func mulScaledAVX512(dst, w, x *float32, n int64, a float32)

//go:noescape
func mulScaledAVX2(dst, w, x *float32, n int64, a float32)

//go:noescape
func addProductAVX512(dst, x, y *float32, n int64, a float32)

//go:noescape
func addProductAVX2(dst, x, y *float32, n int64, a float32)

//go:noescape
func softmaxGradAVX512(dx, y, dy *float32, n int64, shift float32)

//go:noescape
func softmaxGradAVX2(dx, y, dy *float32, n int64, shift float32)

//go:noescape
func rotateAVX512(dst, x, cos, sin *float32, n, half int64, scale, turn float32)

//go:noescape
func rotateAVX2(dst, x, cos, sin *float32, n, half int64, scale, turn float32)

//go:noescape
func sumSquaresAVX512(lanes *[16]float64, x *float32, n int64)

//go:noescape
func sumSquaresAVX2(lanes *[16]float64, x *float32, n int64)

//go:noescape
func maximumAVX512(lanes *[32]float32, x *float32, n int64)

//go:noescape
func maximumAVX2(lanes *[32]float32, x *float32, n int64)
