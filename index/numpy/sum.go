package numpy

// Sum is numpy.sum of a contiguous vector of doubles: pairwise summation, in blocks of up to 128
// elements with eight running sums, as numpy does it since 1.9
// (numpy/_core/src/umath/loops_utils.h.src). The order of the additions decides the last bits of
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

// Normalize divides every weight by their [Sum], as Megatron-LM's normalize does.
func Normalize(w []float64) []float64 {
	out := make([]float64, len(w))
	sum := Sum(w)
	for i, v := range w {
		out[i] = v / sum
	}
	return out
}
