package index

import (
	"encoding/json"
	"math"
	"os"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// vectors reads testdata/order_v1.json, which order_v1.py made from the format page alone. It is
// frozen: a change would change the meaning of every plan.
func vectors(t *testing.T) (v struct {
	Keys []struct {
		Seed  uint64
		Name  string
		Epoch int64
		Key   uint64
	}
	Permutations []struct {
		N, Key uint64
		First  []uint64
		Last   uint64
	}
}) {
	t.Helper()
	data, err := os.ReadFile("testdata/order_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Keys) == 0 || len(v.Permutations) == 0 {
		t.Fatal("no vectors")
	}
	return v
}

func TestFrozenVectors(t *testing.T) {
	v := vectors(t)
	for _, k := range v.Keys {
		if got := Key(k.Seed, k.Name, k.Epoch); got != k.Key {
			t.Errorf("key of (%d, %q, %d): %d, want %d", k.Seed, k.Name, k.Epoch, got, k.Key)
		}
	}
	for _, f := range v.Permutations {
		p := newPermutation(f.N, f.Key)
		for i, want := range f.First {
			if got := p.At(uint64(i)); got != want {
				t.Errorf("n=%d key=%d: %d goes to %d, want %d", f.N, f.Key, i, got, want)
			}
		}
		if got := p.At(f.N - 1); got != f.Last {
			t.Errorf("n=%d key=%d: the last goes to %d, want %d", f.N, f.Key, got, f.Last)
		}
	}
}

func TestOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(1, 200).Draw(t, "windows")
		if rapid.Bool().Draw(t, "large") {
			n = rapid.Int64Range(smallest-2, 1<<40).Draw(t, "windows")
		}
		o := NewOrder(rapid.Uint64().Draw(t, "seed"), "source", n)
		k := rapid.Int64Range(0, math.MaxInt64).Draw(t, "k")
		epoch, window := o.At(k)
		if epoch != k/n || window < 0 || window >= n {
			t.Fatalf("sample %d of %d windows: epoch %d, window %d", k, n, epoch, window)
		}
		if back := o.Inverse(epoch, window); back != k {
			t.Fatalf("sample %d: window %d of epoch %d is sample %d", k, window, epoch, back)
		}
	})
}

// Every epoch holds every window once, and no two epochs in the same order. Readers in any order
// and at the same time see the same.
func TestEpochs(t *testing.T) {
	const n, epochs = 500, 6
	o := NewOrder(1, "wiki", n)
	want := make([]int64, n*epochs)
	for k := range want {
		_, want[k] = NewOrder(1, "wiki", n).At(int64(k))
	}
	for e := range epochs {
		seen := make([]bool, n)
		same := 0
		for i := range n {
			w := want[e*n+i]
			if seen[w] {
				t.Fatalf("epoch %d has window %d twice", e, w)
			}
			seen[w] = true
			if e > 0 && w == want[i] {
				same++
			}
		}
		if same > 10 {
			t.Errorf("epochs 0 and %d agree at %d of %d places", e, same, n)
		}
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range want {
				k := i
				if g%2 == 1 {
					k = (i * 1013) % len(want) // 1013 is prime to the length: visits all
				}
				epoch, w := o.At(int64(k))
				if w != want[k] || epoch != int64(k/n) || o.Inverse(epoch, w) != int64(k) {
					t.Errorf("sample %d: window %d, want %d", k, w, want[k])
					return
				}
			}
		})
	}
	wg.Wait()
}
