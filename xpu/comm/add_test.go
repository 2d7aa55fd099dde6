package comm

import "testing"

// However many elements are added at a time, each is the sum of two, and its neighbours are left
// alone.
func TestAdd(t *testing.T) {
	for n := range 140 {
		for _, offset := range []int{0, 1, 3} {
			dst, src := make([]float32, n+offset+1), make([]float32, n+offset)
			for i := range dst {
				dst[i] = float32(i) * 0.3
			}
			for i := range src {
				src[i] = 1 / float32(i+1)
			}
			add(dst[offset:n+offset], src[offset:])
			for i, got := range dst {
				want := float32(i) * 0.3
				if i >= offset && i < n+offset {
					want += 1 / float32(i+1)
				}
				if got != want {
					t.Fatalf("%d elements from %d: element %d is %v, not %v", n, offset, i, got, want)
				}
			}
		}
	}
}
