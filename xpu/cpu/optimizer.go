package cpu

import (
	"math"

	"mula/xpu"
)

// updateConstants are the constants of an update, in the order in which the assembly reads them.
type updateConstants [xpu.UpdateConstants]float32

// An updateKernel is the number of an update in xpu/cpu/gen/optimizer.go.
type updateKernel int

// update runs a kernel on vectors of any length. v is empty for rules that do not use it.
func update(u *xpu.Update, weight, grad, m, v []float32) {
	which, ok := updateKernels[u.Rule]
	if !ok {
		panic("cpu: unknown update rule " + u.Rule)
	}
	k := (*updateConstants)(&u.Constants)
	n := len(weight) &^ 15
	second := v
	if len(v) == 0 {
		second = m
	}
	if n > 0 {
		updateSixteens(which, weight[:n], grad[:n], m[:n], second[:n], k)
	}
	if n == len(weight) {
		return
	}
	var x [4][16]float32
	copy(x[0][:], weight[n:])
	copy(x[1][:], grad[n:])
	copy(x[2][:], m[n:])
	copy(x[3][:], second[n:])
	updateSixteens(which, x[0][:], x[1][:], x[2][:], x[3][:], k)
	copy(weight[n:], x[0][:])
	copy(grad[n:], x[1][:])
	copy(m[n:], x[2][:])
	if len(v) > 0 {
		copy(v[n:], x[3][:])
	}
}

// atMost returns the smaller of x and bound, or NaN if x is NaN.
func atMost(x, bound float32) float32 {
	if x > bound {
		return bound
	}
	return x
}

// atLeast returns the larger of x and bound, or NaN if x is NaN.
func atLeast(x, bound float32) float32 {
	if x < bound {
		return bound
	}
	return x
}

// squareRoot returns the root of x, rounded once.
func squareRoot(x float32) float32 { return float32(math.Sqrt(float64(x))) }

// normal returns x, or 0 if x is denormal.
func normal(x float32) float32 {
	if x > -0x1p-126 && x < 0x1p-126 {
		return 0
	}
	return x
}
