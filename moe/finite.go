package moe

import (
	"errors"
	"fmt"
	"slices"

	"mula/xpu"
	"mula/xpu/cpu"
)

// ErrNotFinite is wrapped by errors about a loss, gradient or weight that is NaN or Inf.
var ErrNotFinite = errors.New("NaN or Inf")

// Finite reports whether all values of x are finite: then the sum of their squares is, too.
func Finite(x []float32) bool {
	sum := 0.0
	for part := range slices.Chunk(x, xpu.BlockSize) {
		sum += cpu.SumSquares(part)
	}
	return sum-sum == 0
}

// CheckFinite returns an error if a weight is not finite. weights are the elements from first of a
// tensor of the model in dir.
func CheckFinite(dir, tensor string, first int64, weights []float32) error {
	for i, v := range weights {
		if v-v != 0 {
			return fmt.Errorf("%s: %w: element %d of %s is %v; the weights are damaged, or training diverged", dir,
				ErrNotFinite, first+int64(i), tensor, v)
		}
	}
	return nil
}
