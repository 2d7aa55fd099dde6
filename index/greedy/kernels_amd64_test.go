//go:build !purego

package greedy

import (
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"
)

// TestLayout compares structures with the offsets in the assembly.
func TestLayout(t *testing.T) {
	var h heat
	var v vertical
	for _, c := range []struct {
		name      string
		got, want uintptr
	}{
		{"heat.w", unsafe.Offsetof(h.w), 0}, {"heat.c", unsafe.Offsetof(h.c), 320}, {"heat.best",
			unsafe.Offsetof(h.best), 640},
		{"heat.won", unsafe.Offsetof(h.won), 768}, {"heat.x", unsafe.Offsetof(h.x), 832}, {"heat.left",
			unsafe.Offsetof(h.left), 1088},
		{"heat.size", unsafe.Offsetof(h.size), 1408}, {"heat", unsafe.Sizeof(h), 1792},
		{"vertical.w", unsafe.Offsetof(v.w), 512}, {"vertical.t", unsafe.Offsetof(v.t), 576}, {"vertical.index",
			unsafe.Offsetof(v.index), 640},
		{"vertical.turn", unsafe.Offsetof(v.turn), 704}, {"vertical", unsafe.Sizeof(v), 1472},
	} {
		if c.got != c.want {
			t.Errorf("%s is at or has %d bytes, want %d", c.name, c.got, c.want)
		}
	}
}

// TestKernels compares the assembly with Go on numbers with many ties.
func TestKernels(t *testing.T) {
	if !vectors {
		t.Skip("this processor does not run the assembly")
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 2000 {
		fused, turns := round&1 != 0, round&2 != 0
		apart := fused && round&4 != 0
		n := 8 * (1 + rng.IntN(20))
		x := float64(1 + rng.IntN(10000))
		w, c := make([]float64, n), make([]float64, n)
		for i := range w {
			w[i] = rng.Float64()
			if round&8 != 0 {
				w[i] = float64(rng.IntN(5)) / 7
			}
			c[i] = float64(int(w[i]*x) + rng.IntN(3) - 1)
			if rng.IntN(10) == 0 {
				w[i], c[i] = 0, gone
			}
		}

		best, at, equal := argmax(w, c, x, fused)
		wantBest, wantAt, wantEqual := argmaxGo(w, c, x, fused)
		if best != wantBest || at != wantAt || equal != wantEqual {
			t.Fatalf("argmax: %v %d %d, want %v %d %d", best, at, equal, wantBest, wantAt, wantEqual)
		}

		tau := rng.Float64()*2.5 - 1
		room := 1 + rng.IntN(n)
		type list struct {
			w, c  []float64
			place []int32
			n     int
		}
		newList := func() *list {
			return &list{w: make([]float64, room+2*spare), c: make([]float64, room+2*spare),
				place: make([]int32, room+2*spare)}
		}
		a, b := newList(), newList()
		a.n = sift(a.w, a.c, a.place, room, w, c, x, tau, fused, apart)
		b.n = siftGo(b.w, b.c, b.place, room, w, c, x, tau, fused, apart)
		if a.n > room != (b.n > room) {
			t.Fatalf("sift: %d, want %d, room for %d", a.n, b.n, room)
		}
		if b.n <= room {
			if a.n != b.n || !slices.Equal(a.w[:a.n], b.w[:a.n]) || !slices.Equal(a.place[:a.n], b.place[:a.n]) ||
				!slices.Equal(a.c[:a.n+spare], b.c[:a.n+spare]) {
				t.Fatalf("sift: %+v, want %+v", a, b)
			}
		}

		heats, want := newHeats(), newHeats()
		for l := range heats {
			h := &heats[l]
			n := h.enter(w, c, x+16, tau, fused, apart)
			for n > slots {
				tau += 0.1
				n = h.enter(w, c, x+16, tau, fused, apart)
			}
			h.x = x + float64(l)
			for i := range h.size {
				h.size[i] = float64(1 + rng.IntN(3))
				h.left[i] = float64(1 + rng.IntN(int(h.size[i])))
			}
		}
		*want = *heats
		race(heats, fused, apart, turns)
		raceGo(want, fused, apart, turns)
		for l := range heats {
			if heats[l].best != want[l].best {
				t.Fatalf("race: best %v, want %v", heats[l].best, want[l].best)
			}
			for k, won := range heats[l].won {
				if won != want[l].won[k] && want[l].best[k] > -1e299 {
					t.Fatalf("race: step %d won by %b, want %b", k, won, want[l].won[k])
				}
			}
		}
	}
}

// TestDescend compares the vertical kernel with Go, and checks that it writes its columns only.
func TestDescend(t *testing.T) {
	if !vectors {
		t.Skip("this processor does not run the assembly")
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, kind := range kinds {
		for datasets := 1; datasets <= few; datasets++ {
			for _, fused := range []bool{false, true} {
				p := newProblem(weightsOf(kind, datasets, rng), nil, fused)
				g := &groups{n: datasets, weights: append(p.weights, make([]float64, few-datasets)...)}
				v := newVertical(g)
				for j := range columns {
					v.t[j] = float64(j * rng.IntN(1000))
					for i := range datasets {
						v.c[i][j] = float64(int(p.weights[i] * v.t[j]))
					}
				}
				want := *v
				const stride, rows = 40, 4
				run := func(v *vertical, descend func(*vertical, []int16, []int64, int, int, bool, bool)) ([]int16,
					[]int64) {
					dataset, sample := make([]int16, columns*stride), make([]int64, columns*stride)
					for i := range dataset {
						dataset[i], sample[i] = -7, -7
					}
					descend(v, dataset, sample, stride, rows, fused, fused && datasets&1 != 0)
					return dataset, sample
				}
				dataset, sample := run(v, descend)
				wantDataset, wantSample := run(&want, descendGo)
				if !slices.Equal(dataset, wantDataset) || !slices.Equal(sample, wantSample) || v.c != want.c ||
					v.t != want.t {
					t.Fatalf("%s, %d datasets, fused=%v: another result than Go's", kind, datasets, fused)
				}
			}
		}
	}
}
