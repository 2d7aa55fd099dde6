package group

import (
	"runtime"
	"testing"

	"mula/xpu/comm"
)

// Ranks that run on the same processors divide them, unless a number was chosen.
func TestRanksThreads(t *testing.T) {
	t.Setenv("GOMAXPROCS", "")
	most := runtime.GOMAXPROCS(0)
	two := &comm.Mesh{Shape: comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 2})}
	for _, test := range []struct {
		threads, sharing, here, want int
		environment                  string
	}{
		{threads: 0, sharing: 1, want: most},
		{threads: 0, sharing: 2 * most, want: 1},
		{threads: 0, sharing: most, want: 1},
		{threads: 0, sharing: 2 * most, environment: "7", want: most},
		{threads: 6, sharing: 3, want: 6},
		{threads: 6, sharing: 3, here: 3, want: 2},
		{threads: 2, sharing: 3, here: 3, want: 1},
		{threads: 0, sharing: most, here: most, environment: "7", want: 1},
	} {
		t.Setenv("GOMAXPROCS", test.environment)
		if got := (&Group{Mesh: two, sharing: test.sharing}).Threads(test.threads, test.here); got != test.want {
			t.Errorf("%+v: %d threads", test, got)
		}
	}
	if got := (&Group{Mesh: comm.NewSingleMesh()}).Threads(3, 0); got != 3 {
		t.Errorf("%d threads of one rank, want 3", got)
	}
}
