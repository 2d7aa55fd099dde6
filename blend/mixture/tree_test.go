package mixture

import (
	"math"
	"math/big"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// weightsGen draws weights of all shapes: equal, random, spread over twelve orders of magnitude,
// Fibonacci (the deepest tree there is), many.
func weightsGen(t *rapid.T) []uint64 {
	n := rapid.IntRange(1, 60).Draw(t, "sources")
	if rapid.IntRange(0, 19).Draw(t, "many") == 0 {
		n = 2000
	}
	kind := rapid.SampledFrom([]string{"equal", "small", "any", "spread", "fibonacci", "extreme"}).Draw(t, "kind")
	seed := rapid.Uint64().Draw(t, "seed")
	random := func() uint64 { seed = seed*6364136223846793005 + 1442695040888963407; return seed >> 11 }
	w := make([]uint64, n)
	a, b := uint64(1), uint64(1)
	for i := range w {
		switch kind {
		case "equal":
			w[i] = 1
		case "small":
			w[i] = random()%10 + 1
		case "any":
			w[i] = random()%(1<<50) + 1
		case "spread":
			w[i] = uint64(math.Pow(10, float64(random()%1200)/100)) + 1
		case "fibonacci":
			w[i] = a
			if a < 1<<40 {
				a, b = b, a+b
			}
		case "extreme":
			w[i] = 1
			if i == 0 {
				w[i] = 1e12
			}
		}
		if n > 1 && random()%8 == 0 {
			w[i] = 0
		}
	}
	if slices.Max(w) == 0 {
		w[n/2] = 1
	}
	return w
}

// After any number of positions each source has had its share, to within the bound, and the bound
// is below 3.36.
func TestDeviation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := weightsGen(t)
		tree, err := NewTree(w)
		if err != nil {
			t.Fatal(err)
		}
		bound := tree.Bound()
		if !(bound >= 0 && bound < 3.36) {
			t.Fatalf("bound %v", bound)
		}
		var sum uint64
		for _, x := range w {
			sum += x
		}
		ratio := new(big.Rat)
		ratio.SetFloat64(bound)
		limit := ratio.Mul(ratio, new(big.Rat).SetFrac(new(big.Int).SetUint64(sum), big.NewInt(1)))
		for _, n := range []int64{0, 1, 2, 3, rapid.Int64Range(0, 1000).Draw(t, "n"), rapid.Int64Range(0, 1<<60).Draw(t,
			"large n"), int64(min(sum, 1<<60))} {
			counts := tree.Counts(n)
			var total int64
			for i, c := range counts {
				total += c
				// |c·sum − n·w| ≤ bound·sum
				d := new(big.Int).Mul(big.NewInt(c), new(big.Int).SetUint64(sum))
				d.Sub(d, new(big.Int).Mul(big.NewInt(n), new(big.Int).SetUint64(w[i]))).Abs(d)
				if new(big.Rat).SetInt(d).Cmp(limit) > 0 {
					t.Fatalf("after %d positions source %d has %d, its share is %g; the bound is %g", n, i, c,
						float64(n)*float64(w[i])/float64(sum), bound)
				}
			}
			if total != n {
				t.Fatalf("the counts of %d positions add up to %d", n, total)
			}
		}
	})
}

// Going along the positions, every source's samples come one after the other, the counts say how
// many it had, and Inverse leads back.
func TestTreeSteps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := weightsGen(t)
		tree, err := NewTree(w)
		if err != nil {
			t.Fatal(err)
		}
		start := int64(0)
		if rapid.Bool().Draw(t, "far") {
			start = rapid.Int64Range(0, 1<<60-1000).Draw(t, "start")
		}
		counts := tree.Counts(start)
		for y := start; y < start+300; y++ {
			source, k := tree.At(y)
			if w[source] == 0 {
				t.Fatalf("position %d goes to source %d, which rests", y, source)
			}
			if k != counts[source] {
				t.Fatalf("position %d is sample %d of source %d, want %d", y, k, source, counts[source])
			}
			counts[source]++
			if back, ok := tree.Inverse(source, k); !ok || back != y {
				t.Fatalf("sample %d of source %d is at position %d %v, want %d", k, source, back, ok, y)
			}
		}
		if got := tree.Counts(start + 300); !slices.Equal(got, counts) {
			t.Fatalf("counts at %d: %v, want %v", start+300, got, counts)
		}
	})
}

// The inverse of a sample before position 2^60 is found. For other samples, the inverse is correct
// or reports that it is unknown.
func TestTreeInverseOfAnySample(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := weightsGen(t)
		tree, err := NewTree(w)
		if err != nil {
			t.Fatal(err)
		}
		source := rapid.IntRange(0, len(w)-1).Draw(t, "source")
		k := rapid.Int64Range(-1, math.MaxInt64).Draw(t, "k")
		y, ok := tree.Inverse(source, k)
		if !ok {
			if k >= 0 && tree.Counts(1 << 60)[source] > k {
				t.Fatalf("sample %d of source %d comes before 2^60, but was not found", k, source)
			}
			return
		}
		if s, i := tree.At(y); s != source || i != k {
			t.Fatalf("sample %d of source %d: position %d holds sample %d of source %d", k, source, y, i, s)
		}
	})
}

// The bounds that docs/formats/plan.md gives as examples.
func TestBoundExamples(t *testing.T) {
	squares := make([]uint64, 2000)
	for i := range squares {
		squares[i] = uint64(i*i + 1)
	}
	for _, v := range []struct {
		weights []uint64
		want    float64
	}{{[]uint64{1, 1}, 0.5}, {[]uint64{1, 1, 1, 1, 1, 1, 1}, 0.964}, {squares, 2.001}, {[]uint64{7}, 0}} {
		tree, err := NewTree(v.weights)
		if err != nil {
			t.Fatal(err)
		}
		if got := tree.Bound(); math.Abs(got-v.want) > 0.001 {
			t.Errorf("%d weights: %v, want %v", len(v.weights), got, v.want)
		}
	}
}

func TestTreeRefuses(t *testing.T) {
	for name, w := range map[string][]uint64{
		"none":     {},
		"resting":  {0, 0},
		"too much": {1 << 61, 1 << 61, 1},
		"overflow": {math.MaxUint64, 2},
	} {
		if _, err := NewTree(w); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if tree, err := NewTree([]uint64{1 << 61, 1 << 61}); err != nil {
		t.Error(err)
	} else if s, k := tree.At(math.MaxInt64); s < 0 || k != math.MaxInt64/2 {
		t.Errorf("the last position is sample %d of source %d", k, s)
	}
}

// The tie-breaks are part of the order: leaves before inner nodes, in the order of sources, the
// first taken to the right.
func TestTreeTies(t *testing.T) {
	for _, v := range []struct {
		weights []uint64
		want    []int
	}{
		// 0 is taken first and goes right; floor(0.5) is 0, so the right comes first
		{[]uint64{1, 1}, []int{0, 1, 0, 1}},
		{[]uint64{1, 1, 1}, []int{2, 0, 1, 2, 0, 1}},    // 0 and 1 join; 2 is lighter than the pair and goes right
		{[]uint64{2, 1, 1}, []int{0, 1, 0, 2}},          // 1 and 2 join to 2; the leaf 0 of equal weight is taken first
		{[]uint64{1, 0, 3}, []int{0, 2, 2, 2, 0, 2, 2}}, // 1 rests
	} {
		tree, err := NewTree(v.weights)
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for y := range v.want {
			s, _ := tree.At(int64(y))
			got = append(got, s)
		}
		if !slices.Equal(got, v.want) {
			t.Errorf("weights %v: %v, want %v", v.weights, got, v.want)
		}
	}
}

// At multiplies where the definition divides. The two agree where the product is close to a whole
// number, which is where it could go wrong.
func TestTreeByDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sum := rapid.SampledFrom([]uint64{2, 3, 7, 1000, 1 << 20, 1<<31 - 1, 1 << 33, 1<<45 + 59, 1<<62 - 57,
			1 << 62}).Draw(t, "sum")
		left := rapid.Uint64Range((sum+1)/2, sum-1).Draw(t, "left")
		if rapid.Bool().Draw(t, "lopsided") {
			left = sum - rapid.Uint64Range(1, min(sum/2, 5)).Draw(t, "right")
		}
		// the heavier one, or the later of two equals, is the left child
		tree, err := NewTree([]uint64{sum - left, left})
		if err != nil {
			t.Fatal(err)
		}
		at := rapid.Uint64Range(0, 1<<60).Draw(t, "y")
		if whole := new(big.Int).Div(new(big.Int).Mul(new(big.Int).SetUint64(at), new(big.Int).SetUint64(sum)),
			new(big.Int).SetUint64(left)); whole.IsUint64() && rapid.Bool().Draw(t, "near a step") {
			at = min(whole.Uint64(), 1<<62) // where floor(y·a/s) rises
		}
		share := func(y uint64) uint64 {
			product := new(big.Int).Mul(new(big.Int).SetUint64(y), new(big.Int).SetUint64(left))
			return product.Div(product, new(big.Int).SetUint64(sum)).Uint64()
		}
		for y := at - min(at, 3); y < at+3; y++ {
			wantSource, want := 0, y-share(y)
			if share(y+1) > share(y) {
				wantSource, want = 1, share(y)
			}
			if source, k := tree.At(int64(y)); source != wantSource || uint64(k) != want {
				t.Fatalf("weights %d and %d: position %d is sample %d of source %d, want %d of %d", sum-left, left, y,
					k, source, want, wantSource)
			}
		}
	})
}

func BenchmarkTree(b *testing.B) {
	for _, n := range []int{7, 100, 2000} {
		b.Run(map[int]string{7: "7", 100: "100", 2000: "2000"}[n], func(b *testing.B) {
			w := make([]uint64, n)
			for i := range w {
				w[i] = uint64(i*i*977+1) << 10
			}
			tree, err := NewTree(w)
			if err != nil {
				b.Fatal(err)
			}
			x := uint64(1)
			for b.Loop() {
				x = x*6364136223846793005 + 1442695040888963407
				s, k := tree.At(int64(x >> 34))
				sink += int64(s) + k
			}
		})
	}
}

var sink int64
