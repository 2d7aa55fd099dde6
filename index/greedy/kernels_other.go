//go:build !amd64 || purego

package greedy

// vectors reports whether this processor runs the assembly of this package.
const vectors = false

func race(heats *[lanes]heat, fused, apart, turns bool) { raceGo(heats, fused, apart, turns) }

func sift(toW, toC []float64, place []int32, room int, w, c []float64, x, tau float64, fused, apart bool) int {
	return siftGo(toW, toC, place, room, w, c, x, tau, fused, apart)
}

func argmax(w, c []float64, x float64, fused bool) (best float64, at, equal int) {
	return argmaxGo(w, c, x, fused)
}

func descend(v *vertical, dataset []int16, sample []int64, stride, rows int, fused, apart bool) {
	descendGo(v, dataset, sample, stride, rows, fused, apart)
}
