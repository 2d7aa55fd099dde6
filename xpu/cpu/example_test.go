package cpu_test

import (
	"fmt"

	"mula/xpu"
	"mula/xpu/cpu"
)

// A linear layer of two outputs and three inputs on two tokens, Y = X·Wᵀ.
func Example() {
	dev := cpu.New(1, xpu.FP32)
	defer dev.Close()
	x := []float32{
		1, 2, 3,
		4, 5, 6,
	}
	w := []float32{
		1, 0, -1,
		2, 2, 2,
	}
	y := make([]float32, 2*2)
	dev.MatMul(xpu.Of(y, 2, 2), xpu.Of(x, 2, 3), xpu.Of(w, 2, 3).T(), xpu.MatMulOptions{})
	fmt.Println(y)
	// Output: [-2 12 -2 30]
}

// The softmax of a row, in place.
func ExampleExpSum() {
	row := []float32{1, 2, 3}
	sum := cpu.ExpSum(row, row, cpu.Max(row))
	cpu.Scale(row, 1/sum)
	fmt.Printf("%.3f\n", row)
	// Output: [0.090 0.245 0.665]
}
