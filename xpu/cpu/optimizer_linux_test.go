package cpu

import (
	"testing"

	"mula/xpu/devicetest"
)

// No update touches memory behind a slice, or the test dies.
func TestUpdatesFence(t *testing.T) {
	var fences [4]*fence
	for i := range fences {
		fences[i] = newFence(t, 64)
	}
	eachVectorSet(t, func(t *testing.T) {
		for n := 1; n <= 64; n++ {
			x := updateData(1, n)
			for _, u := range devicetest.UpdateCases {
				var fenced [4][]float32
				for v := range x {
					fenced[v] = fences[v].last(x[v])
				}
				runUpdate(u, fenced)
			}
		}
	})
}
