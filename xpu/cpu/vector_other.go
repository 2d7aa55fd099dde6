//go:build !amd64 || purego

package cpu

// vectorSet is the kernel set of the functions on vectors.
var vectorSet = &goKernels

func expSum(lanes *[16]float32, dst, x []float32, shift float32) { expSumGo(lanes, dst, x, shift) }
func swiglu(dst, gate, up []float32)                             { swigluGo(dst, gate, up) }
func swigluGrad(dGate, dUp, gate, up, dOut []float32)            { swigluGradGo(dGate, dUp, gate, up, dOut) }
func dot(lanes *[32]float32, x, y []float32)                     { dotGo(lanes, x, y) }
func addScaled(dst, x, y []float32, a float32)                   { addScaledGo(dst, x, y, a) }
func scale(x []float32, a float32)                               { scaleGo(x, a) }
func mulScaled(dst, w, x []float32, a float32)                   { mulScaledGo(dst, w, x, a) }
func addProduct(dst, x, y []float32, a float32)                  { addProductGo(dst, x, y, a) }
func softmaxGrad(dx, y, dy []float32, shift float32)             { softmaxGradGo(dx, y, dy, shift) }
func rotateHalves(dst, x, cos, sin []float32, half int, scale, turn float32) {
	rotateGo(dst, x, cos, sin, half, scale, turn)
}
func sumSquares(lanes *[16]float64, x []float32) { sumSquaresGo(lanes, x) }
func maximum(lanes *[32]float32, x []float32)    { maximumGo(lanes, x) }
