//go:build !purego

package cpu

// updateSixteens runs a kernel on vectors of a multiple of 16 elements. It calls the assembly by
// name; see vectorSet.
func updateSixteens(which updateKernel, w, grad, a, b []float32, k *updateConstants) {
	n := int64(len(w))
	switch vectorSet {
	case &avx512Kernels:
		switch which {
		case adamwUpdate:
			adamwAVX512(&w[0], &grad[0], &a[0], &b[0], n, k)
		case lionUpdate:
			lionAVX512(&w[0], &grad[0], &a[0], &b[0], n, k)
		case sophiaUpdate:
			sophiaAVX512(&w[0], &grad[0], &a[0], &b[0], n, k)
		case adoptUpdate:
			adoptAVX512(&w[0], &grad[0], &a[0], &b[0], n, k)
		case lambUpdate:
			lambAVX512(&w[0], &grad[0], &a[0], &b[0], n, k)
		case muonUpdate:
			muonAVX512(&w[0], &grad[0], &a[0], &b[0], n, k)
		case scheduleFreeUpdate:
			scheduleFreeAVX512(&w[0], &grad[0], &a[0], &b[0], n, k)
		case averageSquares:
			averageSquaresAVX512(&w[0], &grad[0], &a[0], &b[0], n, k)
		}
	case &avx2Kernels:
		switch which {
		case adamwUpdate:
			adamwAVX2(&w[0], &grad[0], &a[0], &b[0], n, k)
		case lionUpdate:
			lionAVX2(&w[0], &grad[0], &a[0], &b[0], n, k)
		case sophiaUpdate:
			sophiaAVX2(&w[0], &grad[0], &a[0], &b[0], n, k)
		case adoptUpdate:
			adoptAVX2(&w[0], &grad[0], &a[0], &b[0], n, k)
		case lambUpdate:
			lambAVX2(&w[0], &grad[0], &a[0], &b[0], n, k)
		case muonUpdate:
			muonAVX2(&w[0], &grad[0], &a[0], &b[0], n, k)
		case scheduleFreeUpdate:
			scheduleFreeAVX2(&w[0], &grad[0], &a[0], &b[0], n, k)
		case averageSquares:
			averageSquaresAVX2(&w[0], &grad[0], &a[0], &b[0], n, k)
		}
	default:
		updateGo(which, w, grad, a, b, k)
	}
}

//go:noescape
func adamwAVX512(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func lionAVX512(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func sophiaAVX512(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func adoptAVX512(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func lambAVX512(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func muonAVX512(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func scheduleFreeAVX512(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func averageSquaresAVX512(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func adamwAVX2(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func lionAVX2(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func sophiaAVX2(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func adoptAVX2(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func lambAVX2(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func muonAVX2(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func scheduleFreeAVX2(w, grad, a, b *float32, n int64, k *updateConstants)

//go:noescape
func averageSquaresAVX2(w, grad, a, b *float32, n int64, k *updateConstants)
