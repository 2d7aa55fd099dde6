package cpu

import "testing"

// No update touches memory behind a slice, or the test dies.
func TestUpdatesFence(t *testing.T) {
	var fences [4]*fence
	for i := range fences {
		fences[i] = newFence(t, 64)
	}
	eachVectorSet(t, func(t *testing.T) {
		for n := 1; n <= 64; n++ {
			x := updateData(1, n)
			for _, u := range updateCases {
				u.run(fences[0].last(x[0]), fences[1].last(x[1]), fences[2].last(x[2]), fences[3].last(x[3]))
			}
		}
	})
}
