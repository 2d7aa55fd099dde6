package numpy

// Sum returns numpy.sum of a contiguous float64 vector: pairwise summation, in blocks of up to 128
// elements with eight running sums, as in numpy since 1.9
// (numpy/_core/src/umath/loops_utils.h.src). The order of the additions determines the last bits of
// the result.
func Sum(a []float64) float64 {
	n := len(a)
	switch {
	case n == 0:
		return 0
	case n < 8:
		s := a[0]
		for _, v := range a[1:] {
			s += v
		}
		return s
	case n <= 128:
		r := [8]float64(a)
		i := 8
		for ; i+8 <= n; i += 8 {
			for j := range r {
				r[j] += a[i+j]
			}
		}
		s := ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
		for ; i < n; i++ {
			s += a[i]
		}
		return s
	}
	half := n / 2
	half -= half % 8
	return Sum(a[:half]) + Sum(a[half:])
}

// Normalize divides every weight by the [Sum] of the weights, like Megatron-LM's normalize.
func Normalize(w []float64) []float64 {
	out := make([]float64, len(w))
	sum := Sum(w)
	for i, v := range w {
		out[i] = v / sum
	}
	return out
}
