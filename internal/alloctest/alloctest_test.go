package alloctest

import "testing"

var kept [2]*int

func TestLeast(t *testing.T) {
	calls := 0
	for want, f := range map[float64]func(){
		0: func() {
			if calls++; calls < tries { // as a pool does that is filled
				kept[0] = new(int)
			}
		},
		2: func() { kept[0], kept[1] = new(int), new(int) },
	} {
		if got := Least(f); got != want {
			t.Errorf("%v allocations, want %v", got, want)
		}
	}
}
