package index

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// The vectors of the reference this network was specified by. Two of them are about sizes that the
// table serves here, so the network is asked itself.
func TestNetworkVectors(t *testing.T) {
	for _, v := range []struct {
		n, key uint64
		want   []uint64
	}{
		{10, 0, []uint64{3, 6, 2, 4, 1, 0, 5, 8}},
		{10, 1, []uint64{8, 2, 4, 7, 1, 3, 5, 6}},
		{65537, 0, []uint64{58110, 61785, 31962, 46703, 44997, 39757, 49500, 39980}},
		{262145, 7, []uint64{149511, 11547, 876, 16078, 80045, 257927, 121127, 211175}},
		{993200000, 6198, []uint64{419402086, 876513207, 677714873, 511209722, 379821742, 508991536, 360152659,
			196746554}},
		{1000000000000, 42, []uint64{872364328093, 926786885424, 37431700605, 918690724434, 100158132265, 989125628634,
			55170596463, 641715110730}},
	} {
		p := new(Permutation)
		p.network(v.n, v.key)
		if v.n >= smallest {
			p = newPermutation(v.n, v.key)
		}
		var got []uint64
		for i := range v.want {
			image := p.walk(uint64(i))
			got = append(got, image)
			if back := p.walkBack(image); back != uint64(i) {
				t.Errorf("n=%d key=%d: the inverse of %d is %d, want %d", v.n, v.key, image, back, i)
			}
		}
		if !slices.Equal(got, v.want) {
			t.Errorf("n=%d key=%d: got %v, want %v", v.n, v.key, got, v.want)
		}
	}
}

func TestBijection(t *testing.T) {
	sizes := []uint64{0, 1, 2, 3, 4, 5, 7, 8, 9, 100, 1000, 4095, 4096, 4097, smallest - 1, smallest, smallest + 1,
		1<<17 - 1, 1 << 17, 262145}
	for _, n := range sizes {
		for _, key := range []uint64{0, math.MaxUint64} {
			checkBijection(t, newPermutation(n, key))
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		checkBijection(t, newPermutation(rapid.Uint64Range(0, 3000).Draw(t, "n"), rapid.Uint64().Draw(t, "key")))
	})
}

func checkBijection(t interface{ Fatalf(string, ...any) }, p *Permutation) {
	seen := make([]bool, p.Len())
	for i := range p.Len() {
		j := p.At(i)
		if j >= p.Len() || seen[j] {
			t.Fatalf("n=%d: %d goes to %d, which is out of range or taken", p.Len(), i, j)
		}
		seen[j] = true
		if back := p.Inverse(j); back != i {
			t.Fatalf("n=%d: the inverse of %d is %d, want %d", p.Len(), j, back, i)
		}
	}
}

// The network alone, at sizes too large to list.
func TestInverseOfLarge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint64Range(smallest, math.MaxUint64).Draw(t, "n")
		p := newPermutation(n, rapid.Uint64().Draw(t, "key"))
		i := rapid.Uint64Range(0, n-1).Draw(t, "i")
		j := p.At(i)
		if j >= n || p.Inverse(j) != i {
			t.Fatalf("n=%d: %d goes to %d, which goes back to %d", n, i, j, p.Inverse(j))
		}
	})
}

// Both kinds mix: every order of five is as likely as any other, and a block of consecutive indices
// holds images from everywhere.
func TestUniform(t *testing.T) {
	counts := map[[5]uint64]float64{}
	const trials = 60_000
	for key := range uint64(trials) {
		p := newPermutation(5, key)
		counts[[5]uint64{p.At(0), p.At(1), p.At(2), p.At(3), p.At(4)}]++
	}
	if z := chiSquaredZ(counts, 120, trials); len(counts) != 120 || math.Abs(z) > 5 {
		t.Errorf("%d of 120 orders of five, chi squared %+.1f standard deviations from its mean", len(counts), z)
	}
	for _, n := range []uint64{smallest - 1, smallest, 1_000_003, 993_200_000} {
		p := newPermutation(n, 6198)
		cells, pairs := map[uint64]float64{}, map[[2]uint64]float64{}
		samples := min(n-1, 100_000)
		for i := range samples {
			a, b := p.At(i)*32/n, p.At(i+1)*32/n
			cells[a]++
			pairs[[2]uint64{a, b}]++
		}
		// Without replacement the cells are more even than chance, so only the upper side is
		// suspicious for small n.
		if z := chiSquaredZ(cells, 32, float64(samples)); z > 5 {
			t.Errorf("n=%d: cells %+.1f standard deviations", n, z)
		}
		if z := chiSquaredZ(pairs, 1024, float64(samples)); z > 5 {
			t.Errorf("n=%d: pairs of neighbours %+.1f standard deviations", n, z)
		}
	}
}

// chiSquaredZ returns the distance of chi squared from its mean in standard deviations, for counts
// of equally likely cells.
func chiSquaredZ[K comparable](counts map[K]float64, cells int, total float64) float64 {
	expected := total / float64(cells)
	chi := float64(cells-len(counts)) * expected // of the cells without a count
	for _, c := range counts {
		chi += (c - expected) * (c - expected) / expected
	}
	freedom := float64(cells - 1)
	return (chi - freedom) / math.Sqrt(2*freedom)
}

func TestPermutationIsConcurrent(t *testing.T) {
	p := newPermutation(1000, 1)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { checkBijection(t, p) })
	}
	wg.Wait()
}

func BenchmarkPermutation(b *testing.B) {
	for _, n := range []uint64{60_000, 993_200_000} {
		p := newPermutation(n, 6198)
		b.Run(map[bool]string{true: "table", false: "network"}[n < smallest], func(b *testing.B) {
			var sum uint64
			for i := range b.N {
				sum += p.At(uint64(i) % n)
			}
			sink = sum
		})
	}
}

var sink uint64

// Fill gives what At gives, across the ends of epochs.
func TestFill(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		windows := rapid.SampledFrom([]int64{1, 2, 100, smallest - 1, smallest, smallest + 1, 1<<18 - 1, 1 << 18,
			1<<18 + 1, 1<<33 + 5}).Draw(t, "windows")
		o := NewOrder(rapid.Uint64().Draw(t, "seed"), "a", windows)
		k := max(0, windows*rapid.Int64Range(0, 3).Draw(t, "epoch")-rapid.Int64Range(-700, 700).Draw(t, "before"))
		got := make([]int64, rapid.IntRange(0, 1500).Draw(t, "n"))
		o.Fill(got, k)
		for i, window := range got {
			if _, want := o.At(k + int64(i)); window != want {
				t.Fatalf("%d windows, sample %d: %d, want %d", windows, k+int64(i), window, want)
			}
		}
	})
}

func BenchmarkFill(b *testing.B) {
	for _, n := range []int64{60_000, 1_000_000, 700_000_000} {
		for _, run := range []int{16, 4096} {
			b.Run(fmt.Sprint(n, "/", run), func(b *testing.B) {
				o := NewOrder(1, "a", n)
				dst := make([]int64, run)
				k := int64(0)
				for range b.N {
					o.Fill(dst, k)
					k += int64(run)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(run), "ns/window")
			})
		}
	}
}
