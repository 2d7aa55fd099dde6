package index

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// growing draws a source that grows up to five times, and the numbers of its windows before and
// after each growth. Some growths fall into the same epoch, some at its very end, some before the
// first sample.
func growing(t *rapid.T, largest int64) (seed uint64, first int64, growths []Growth) {
	seed = rapid.Uint64().Draw(t, "seed")
	first = rapid.Int64Range(1, largest).Draw(t, "windows")
	total, at := first, int64(0)
	for range rapid.IntRange(0, 5).Draw(t, "growths") {
		at += rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, total/2), rapid.Just(total),
			rapid.Int64Range(0, 3*total)).Draw(t, "after")
		n := rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(1, largest)).Draw(t, "new")
		growths = append(growths, Growth{at, n})
		total += n
	}
	return seed, first, growths
}

func growingOrder(t interface{ Fatal(...any) }, seed uint64, first int64, growths []Growth, l Locality) *Order {
	o, err := NewGrowingOrder(seed, "source", first, growths, l)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// A plain list by the rules of the format page: the current epoch is a list. Its drawn places are
// kept. The rest, followed by the new windows, is permuted.
func listed(seed uint64, first int64, growths []Growth, l Locality, samples int64) (epochs, windows []int64) {
	total, number := first, 0
	for epoch := int64(0); int64(len(windows)) < samples || number < len(growths); epoch++ {
		start := int64(len(windows))
		list := listedEpoch(seed, "source", epoch, total, l)
		for ; number < len(growths) && growths[number].Sample < start+int64(len(list)); number++ {
			for range growths[number].Windows {
				list = append(list, total)
				total++
			}
			left := list[growths[number].Sample-start:]
			pool := slices.Clone(left)
			mixed := newPermutation(uint64(len(pool)), growthKey(seed, "source", int64(number)))
			for i := range left {
				left[i] = pool[mixed.At(uint64(i))]
			}
		}
		for range list {
			epochs = append(epochs, epoch)
		}
		windows = append(windows, list...)
	}
	return epochs, windows
}

// The order of a growing source equals the list, in both directions, one by one and in ranges.
func TestGrowthIsThatOfTheList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed, first, growths := growing(t, 40)
		l := drawLocality(t)
		o := growingOrder(t, seed, first, growths, l)
		epochs, windows := listed(seed, first, growths, l, 3*o.Windows())
		for k, want := range windows {
			epoch, window := o.At(int64(k))
			if epoch != epochs[k] || window != want {
				t.Fatalf("sample %d: window %d of epoch %d, want %d of %d", k, window, epoch, want, epochs[k])
			}
			if back := o.Inverse(epoch, window); back != int64(k) {
				t.Fatalf("sample %d: window %d of epoch %d is sample %d", k, window, epoch, back)
			}
			if e := o.EpochOf(int64(k)); e != epoch {
				t.Fatalf("sample %d: epoch %d, want %d", k, e, epoch)
			}
			from, length := o.Span(epoch)
			if int64(k) < from || int64(k) >= from+length || epochs[from] != epoch ||
				from > 0 && epochs[from-1] == epoch {
				t.Fatalf("sample %d of epoch %d: the epoch is [%d, %d)", k, epoch, from, from+length)
			}
			if e := o.FirstEpoch(window); e > epoch {
				t.Fatalf("window %d is drawn in epoch %d, but first in %d", window, epoch, e)
			}
		}
		from := rapid.IntRange(0, len(windows)-1).Draw(t, "from")
		got := make([]int64, rapid.IntRange(1, len(windows)-from).Draw(t, "count"))
		o.Fill(got, int64(from))
		if !slices.Equal(got, windows[from:from+len(got)]) {
			t.Fatalf("samples from %d on: %v, want %v", from, got, windows[from:from+len(got)])
		}
	})
}

// What has been drawn before a growth stays as it was; nothing is drawn twice in an epoch, and an
// epoch has every window that is known at its end.
func TestGrowthRepeatsNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed, first, growths := growing(t, 60)
		l := drawLocality(t)
		for n := range growths {
			before := growingOrder(t, seed, first, growths[:n], l)
			after := growingOrder(t, seed, first, growths[:n+1], l)
			for k := range growths[n].Sample {
				e, w := before.At(k)
				if f, v := after.At(k); e != f || w != v {
					t.Fatalf("growth %d: sample %d was window %d of epoch %d, is %d of %d", n, k, w, e, v, f)
				}
			}
		}
		o := growingOrder(t, seed, first, growths, l)
		last := int64(0)
		if len(growths) > 0 {
			last = growths[len(growths)-1].Sample
		}
		seen := map[int64]bool{}
		for k, under := int64(0), int64(0); k < last+2*o.Windows(); k++ {
			epoch, window := o.At(k)
			if epoch != under {
				if _, length := o.Span(under); epoch != under+1 || int64(len(seen)) != length {
					t.Fatalf("epoch %d drew %d of %d windows; then came epoch %d", under, len(seen), length, epoch)
				}
				clear(seen)
				under = epoch
			}
			if seen[window] {
				t.Fatalf("sample %d: window %d a second time in epoch %d", k, window, epoch)
			}
			seen[window] = true
		}
	})
}

// The same with sources far too large to list.
func TestGrowthOfLargeSources(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed, first, growths := growing(t, 1<<40)
		l := drawLocality(t)
		o := growingOrder(t, seed, first, growths, l)
		k := rapid.Int64Range(0, 1<<50).Draw(t, "k")
		if len(growths) > 0 && rapid.Bool().Draw(t, "near") {
			k = growths[rapid.IntRange(0, len(growths)-1).Draw(t, "growth")].Sample + rapid.Int64Range(0, first).Draw(t,
				"behind")
		}
		epoch, window := o.At(k)
		if back := o.Inverse(epoch, window); back != k {
			t.Fatalf("sample %d: window %d of epoch %d is sample %d", k, window, epoch, back)
		}
		if from, length := o.Span(epoch); k < from || k-from >= length || window < 0 || window >= length {
			t.Fatalf("sample %d is window %d of epoch %d, which is the %d from %d on", k, window, epoch, length, from)
		}
		got := make([]int64, 100)
		o.Fill(got, k)
		for i := range got {
			if _, want := o.At(k + int64(i)); got[i] != want {
				t.Fatalf("sample %d: window %d, want %d", k+int64(i), got[i], want)
			}
		}
	})
}

// New windows are equally frequent at every remaining place of the epoch.
func TestGrowthMixes(t *testing.T) {
	const old, fresh, drawn, trials = 40, 20, 10, 4000
	places := make([]float64, old+fresh)
	for seed := range uint64(trials) {
		o := growingOrder(t, seed, old, []Growth{{drawn, fresh}}, Locality{})
		for k := range int64(old + fresh) {
			if _, w := o.At(k); w >= old {
				places[k]++
			}
		}
	}
	const mean = trials * fresh / float64(old+fresh-drawn)
	for k, n := range places {
		switch {
		case k < drawn && n > 0:
			t.Errorf("place %d, drawn before, has a new window", k)
		case k >= drawn && (n < 0.9*mean || n > 1.1*mean): // a standard deviation is 0.02 of the mean
			t.Errorf("place %d has a new window %.0f times in %d, want about %.0f", k, n, trials, mean)
		}
	}
}

func TestGrowthRefused(t *testing.T) {
	for _, growths := range [][]Growth{{{-1, 1}}, {{5, 1}, {4, 1}}, {{0, -1}}, {{0, 1<<63 - 1}}} {
		if _, err := NewGrowingOrder(1, "a", 10, growths, Locality{}); err == nil {
			t.Errorf("growths %v were accepted", growths)
		}
	}
}

func BenchmarkGrownAt(b *testing.B) {
	growths := []Growth{{1 << 29, 1 << 20}, {1<<29 + 1000, 1 << 21}, {1<<29 + 2000, 1 << 22}}
	o := growingOrder(b, 1, 1<<30, growths, Locality{})
	b.Run("at", func(b *testing.B) {
		for k := int64(1<<29 + 3000); b.Loop(); k++ {
			o.At(k)
		}
	})
	b.Run("inverse", func(b *testing.B) {
		for w := int64(0); b.Loop(); w++ {
			o.Inverse(0, w)
		}
	})
}
