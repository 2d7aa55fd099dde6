package moe

import (
	"errors"
	"fmt"
)

// ErrNotFinite is wrapped by errors about a loss, gradient or weight that is NaN or Inf.
var ErrNotFinite = errors.New("NaN or Inf")

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
