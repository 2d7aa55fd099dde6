package cpu

import (
	"fmt"
	"math"
)

// The functions below run on one goroutine; a caller can divide rows with [Device.Parallel]. Like
// [New], they use the best kernel set of the machine. All slices of a call must have the same
// length, or it panics. A result may be the same slice as an operand (dst == x), but must not
// overlap one otherwise.
//
// Sums use a fixed number of lanes: element i is added to lane i modulo that number, and then the
// lanes are added in pairs, so that the bits of a result depend on its operands alone.

// Max returns the largest element of x, or -Inf if x is empty. It ignores NaN.
func Max(x []float32) float32 {
	var lanes [32]float32
	for i := range lanes {
		lanes[i] = float32(math.Inf(-1))
	}
	n := len(x) &^ 31
	if n > 0 {
		maximum(&lanes, x[:n])
	}
	m := float32(math.Inf(-1))
	for _, v := range x[n:] {
		if v > m {
			m = v
		}
	}
	for _, v := range lanes {
		if v > m {
			m = v
		}
	}
	return m
}

// ExpSum sets dst[i] = exp(x[i]-shift) and returns the sum of dst. With the largest element as
// shift, dst divided by the sum is the softmax of x. The error of the exponential of the rounded
// difference is at most 1.1 units in the last place. Above 88.72283 the result is +Inf; below
// -87.33654, where float32 would be denormal, it is 0.
func ExpSum(dst, x []float32, shift float32) float32 {
	sameLength(len(dst), len(x))
	var lanes [16]float32
	n := len(dst) &^ 15
	if n > 0 {
		expSum(&lanes, dst[:n], x[:n], shift)
	}
	if n < len(dst) {
		var in, out, ignored [16]float32
		copy(in[:], x[n:])
		expSum(&ignored, out[:], in[:], shift)
		for i, y := range out[:copy(dst[n:], out[:])] {
			lanes[i] += y
		}
	}
	return addLanes(lanes[:])
}

// SwiGLU sets dst[i] = SiLU(gate[i])·up[i], where SiLU(x) = x·σ(x) and σ(x) = 1/(1+exp(-x)).
func SwiGLU(dst, gate, up []float32) {
	sameLength(len(dst), len(gate), len(up))
	n := len(dst) &^ 15
	if n > 0 {
		swiglu(dst[:n], gate[:n], up[:n])
	}
	if n < len(dst) {
		var g, u, out [16]float32
		copy(g[:], gate[n:])
		copy(u[:], up[n:])
		swiglu(out[:], g[:], u[:])
		copy(dst[n:], out[:])
	}
}

// SwiGLUGrad is the gradient of [SwiGLU]: from the gradient dOut of its result it sets dGate[i] =
// dOut[i]·up[i]·SiLU'(gate[i]) and dUp[i] = dOut[i]·SiLU(gate[i]), where SiLU'(g) =
// σ(g)·(1+g·(1-σ(g))). dGate and dUp may be the same slices as operands.
func SwiGLUGrad(dGate, dUp, gate, up, dOut []float32) {
	sameLength(len(dGate), len(dUp), len(gate), len(up), len(dOut))
	n := len(dGate) &^ 15
	if n > 0 {
		swigluGrad(dGate[:n], dUp[:n], gate[:n], up[:n], dOut[:n])
	}
	if n < len(dGate) {
		var g, u, d [16]float32
		copy(g[:], gate[n:])
		copy(u[:], up[n:])
		copy(d[:], dOut[n:])
		swigluGrad(g[:], u[:], g[:], u[:], d[:])
		copy(dGate[n:], g[:])
		copy(dUp[n:], u[:])
	}
}

// Dot returns the sum of x[i]·y[i].
func Dot(x, y []float32) float32 {
	sameLength(len(x), len(y))
	var lanes [32]float32
	n := len(x) &^ 31
	if n > 0 {
		dot(&lanes, x[:n], y[:n])
	}
	if n < len(x) {
		var a, b [32]float32
		copy(a[:], x[n:])
		copy(b[:], y[n:])
		dot(&lanes, a[:], b[:])
	}
	return addLanes(lanes[:])
}

// Axpy adds a·x[i] to y[i].
func Axpy(y []float32, a float32, x []float32) { sumScaled(y, y, a, x) }

// sumScaled sets dst[i] = x[i] + a·y[i].
func sumScaled(dst, x []float32, a float32, y []float32) {
	sameLength(len(dst), len(x), len(y))
	n := len(dst) &^ 15
	if n > 0 {
		addScaled(dst[:n], x[:n], y[:n], a)
	}
	if n < len(dst) {
		var p, q [16]float32
		copy(p[:], x[n:])
		copy(q[:], y[n:])
		addScaled(p[:], p[:], q[:], a)
		copy(dst[n:], p[:])
	}
}

// Scale multiplies every x[i] by a.
func Scale(x []float32, a float32) {
	n := len(x) &^ 15
	if n > 0 {
		scale(x[:n], a)
	}
	scaleGo(x[n:], a)
}

// MulScaled sets dst[i] = w[i]·(a·x[i]).
func MulScaled(dst, w []float32, a float32, x []float32) {
	sameLength(len(dst), len(w), len(x))
	n := len(dst) &^ 15
	if n > 0 {
		mulScaled(dst[:n], w[:n], x[:n], a)
	}
	if n < len(dst) {
		var p, q [16]float32
		copy(p[:], w[n:])
		copy(q[:], x[n:])
		mulScaled(p[:], p[:], q[:], a)
		copy(dst[n:], p[:])
	}
}

// AddProduct adds a·(x[i]·y[i]) to dst[i].
func AddProduct(dst []float32, a float32, x, y []float32) {
	sameLength(len(dst), len(x), len(y))
	n := len(dst) &^ 15
	if n > 0 {
		addProduct(dst[:n], x[:n], y[:n], a)
	}
	if n < len(dst) {
		var d, p, q [16]float32
		copy(d[:], dst[n:])
		copy(p[:], x[n:])
		copy(q[:], y[n:])
		addProduct(d[:], p[:], q[:], a)
		copy(dst[n:], d[:])
	}
}

// SoftmaxGrad sets dx[i] = y[i]·(dy[i] - shift). If y is a softmax, dy its gradient and shift the
// sum of y[i]·dy[i], then dx is the gradient of the softmax's input.
func SoftmaxGrad(dx, y, dy []float32, shift float32) {
	sameLength(len(dx), len(y), len(dy))
	n := len(dx) &^ 15
	if n > 0 {
		softmaxGrad(dx[:n], y[:n], dy[:n], shift)
	}
	if n < len(dx) {
		var p, q [16]float32
		copy(p[:], y[n:])
		copy(q[:], dy[n:])
		softmaxGrad(p[:], p[:], q[:], shift)
		copy(dx[n:], p[:])
	}
}

// Rotate rotates the pairs (x[j], x[n+j]) by the angles whose cosines and sines are in cos and sin,
// each of length n, multiplies them by scale and writes them to dst. x and dst have the length 2n.
func Rotate(dst, x, cos, sin []float32, scale float32) { rotate(dst, x, cos, sin, scale, scale) }

// RotateBack is [Rotate] with negated angles, its transpose.
func RotateBack(dst, x, cos, sin []float32, scale float32) { rotate(dst, x, cos, sin, scale, -scale) }

func rotate(dst, x, cos, sin []float32, scale, turn float32) {
	half := len(cos)
	sameLength(half, len(sin))
	sameLength(2*half, len(dst), len(x))
	n := half &^ 15
	if n > 0 {
		rotateHalves(dst, x, cos[:n], sin[:n], half, scale, turn)
	}
	if n < half {
		var y [32]float32
		var c, s [16]float32
		copy(c[:], cos[n:])
		copy(s[:], sin[n:])
		copy(y[:16], x[n:half])
		copy(y[16:], x[half+n:])
		rotateHalves(y[:], y[:], c[:], s[:], 16, scale, turn)
		copy(dst[n:half], y[:])
		copy(dst[half+n:], y[16:])
	}
}

// SumSquares returns the sum of x[i]² in float64. Its bits are the same on every machine.
func SumSquares(x []float32) float64 {
	var lanes [16]float64
	n := len(x) &^ 15
	if n > 0 {
		sumSquares(&lanes, x[:n])
	}
	for i, v := range x[n:] {
		lanes[i] += float64(v) * float64(v)
	}
	return addLanes(lanes[:])
}

// addLanes adds 16 or 32 lanes in pairs, in place.
func addLanes[T float32 | float64](lanes []T) T {
	for n := len(lanes) / 2; n > 0; n /= 2 {
		for i, v := range lanes[n : 2*n] {
			lanes[i] += v
		}
	}
	return lanes[0]
}

// sameLength panics unless all lengths equal the first.
func sameLength(first int, others ...int) {
	for _, n := range others {
		if n != first {
			panic(fmt.Sprintf("cpu: vectors of different lengths, %d and %d", first, n))
		}
	}
}

// The Go versions of the kernels do the operations of the assembly and round each of them (see
// multiplyGo for the conversions).

// expGo returns exp(t), computed like expBody of package gen.
func expGo(t float32) float32 {
	const (
		highest, lowest = 88.72283, -87.336544
		log2e           = float32(math.Log2E)
		ln2High         = float32(0.693359375)
		ln2Low          = float32(math.Ln2 - 0.693359375)
		toInteger       = float32(3 << 22) // adding it leaves no bits below 1
	)
	switch {
	case t > highest:
		return float32(math.Inf(1))
	case t < lowest:
		return 0
	case t != t:
		return t
	}
	n := float32(float32(t*log2e)+toInteger) - toInteger
	r := t - float32(n*ln2High)
	r -= float32(n * ln2Low)
	p := float32(0.001381454)
	p = float32(p*r) + 0.008368745
	p = float32(p*r) + 0.04166839
	p = float32(p*r) + 0.16666521
	p = float32(p*r) + 0.49999994
	p = float32(float32(p*r)*r) + r
	p++
	return math.Float32frombits(math.Float32bits(p) + uint32(int32(n))<<23)
}

func expSumGo(lanes *[16]float32, dst, x []float32, shift float32) {
	x = x[:len(dst)]
	for i, v := range x {
		y := expGo(v - shift)
		dst[i] = y
		lanes[i%16] += y
	}
}

func swigluGo(dst, gate, up []float32) {
	gate, up = gate[:len(dst)], up[:len(dst)]
	for i, g := range gate {
		dst[i] = g / (1 + expGo(-g)) * up[i]
	}
}

func swigluGradGo(dGate, dUp, gate, up, dOut []float32) {
	dUp, gate, up, dOut = dUp[:len(dGate)], gate[:len(dGate)], up[:len(dGate)], dOut[:len(dGate)]
	for i, g := range gate {
		s := 1 / (1 + expGo(-g))
		u, d := up[i], dOut[i]
		gs := float32(g * s)
		dUp[i] = d * gs
		dGate[i] = float32(d*u) * (float32(gs*(1-s)) + s)
	}
}

func dotGo(lanes *[32]float32, x, y []float32) {
	for i := 0; i < len(x); i += 32 {
		a, b := x[i:][:32], y[i:][:32]
		for j := range lanes {
			lanes[j] += float32(a[j] * b[j])
		}
	}
}

func addScaledGo(dst, x, y []float32, a float32) {
	x, y = x[:len(dst)], y[:len(dst)]
	for i, v := range x {
		dst[i] = v + float32(a*y[i])
	}
}

func scaleGo(x []float32, a float32) {
	for i := range x {
		x[i] *= a
	}
}

func mulScaledGo(dst, w, x []float32, a float32) {
	w, x = w[:len(dst)], x[:len(dst)]
	for i, v := range x {
		dst[i] = w[i] * float32(a*v)
	}
}

func addProductGo(dst, x, y []float32, a float32) {
	x, y = x[:len(dst)], y[:len(dst)]
	for i, v := range x {
		dst[i] += float32(a * float32(v*y[i]))
	}
}

func softmaxGradGo(dx, y, dy []float32, shift float32) {
	y, dy = y[:len(dx)], dy[:len(dx)]
	for i, v := range y {
		dx[i] = v * (dy[i] - shift)
	}
}

func rotateGo(dst, x, cos, sin []float32, half int, scale, turn float32) {
	for j, c := range cos {
		a, b := x[j], x[half+j]
		c, s := float32(scale*c), float32(turn*sin[j])
		dst[j] = float32(a*c) - float32(b*s)
		dst[half+j] = float32(b*c) + float32(a*s)
	}
}

// rotatePairs is rotateGo for elements 2j and 2j+1. dst may be x.
func rotatePairs(dst, x, cos, sin []float32, scale, turn float32) {
	for j, c := range cos {
		a, b := x[2*j], x[2*j+1]
		c, s := float32(scale*c), float32(turn*sin[j])
		dst[2*j] = float32(a*c) - float32(b*s)
		dst[2*j+1] = float32(b*c) + float32(a*s)
	}
}

func sumSquaresGo(lanes *[16]float64, x []float32) {
	for i, v := range x {
		lanes[i%16] += float64(v) * float64(v)
	}
}

func maximumGo(lanes *[32]float32, x []float32) {
	for i, v := range x {
		if v > lanes[i%32] {
			lanes[i%32] = v
		}
	}
}
