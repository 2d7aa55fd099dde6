package blend

import (
	"context"
	"errors"
	"testing"

	"pgregory.net/rapid"
)

// Positions gives what Locate gives, whatever the stages, the range and the sizes of the sources.
func TestPositions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "sources")
		var windows []int64
		for range n {
			windows = append(windows, rapid.SampledFrom([]int64{1, 2, 9, 1000, 65_535, 65_536, 70_000,
				1_000_003}).Draw(t, "windows"))
		}
		var stages []Stage
		for range rapid.IntRange(1, 3).Draw(t, "stages") {
			st := Stage{Samples: rapid.Int64Range(1, 100_000).Draw(t, "samples"), Weights: make([]uint64, n)}
			for i := range st.Weights {
				st.Weights[i] = rapid.SampledFrom([]uint64{0, 1, 1, 3, 1000, 1 << 40}).Draw(t, "weight")
			}
			st.Weights[rapid.IntRange(0, n-1).Draw(t, "one")] = 7
			stages = append(stages, st)
		}
		p := planOf(t, windows, stages)
		from := rapid.Int64Range(0, p.Length()).Draw(t, "from")
		to := rapid.Int64Range(from, p.Length()).Draw(t, "to")
		at := from
		for b, err := range p.Positions(context.Background(), from, to) {
			if err != nil {
				t.Fatal(err)
			}
			if b.First != at || len(b.Sources) != len(b.Windows) || len(b.Sources) == 0 {
				t.Fatalf("a block of %d and %d from %d on, after %d", len(b.Sources), len(b.Windows), b.First, at)
			}
			for i := range b.Sources {
				if i%7 != 0 && i < len(b.Sources)-3 { // Locate is slow
					continue
				}
				s, err := p.Locate(at + int64(i))
				if err != nil || s.Source != int(b.Sources[i]) || s.Window != b.Windows[i] {
					t.Fatalf("position %d: window %d of source %d, want %+v, %v", at+int64(i), b.Windows[i],
						b.Sources[i], s, err)
				}
			}
			at += int64(len(b.Sources))
		}
		if at != to {
			t.Fatalf("[%d, %d) ends at %d", from, to, at)
		}
	})
}

func TestPositionsRefuses(t *testing.T) {
	p := planOf(t, []int64{10}, []Stage{{Samples: 100_000, Weights: []uint64{1}}})
	for _, r := range [][2]int64{{-1, 5}, {5, 4}, {0, 100_001}} {
		for _, err := range p.Positions(context.Background(), r[0], r[1]) {
			if err == nil {
				t.Errorf("%v: no error", r)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	blocks := 0
	var last error
	for _, err := range p.Positions(ctx, 0, 100_000) {
		last = err
		blocks++
		cancel()
	}
	if blocks != 2 || !errors.Is(last, context.Canceled) {
		t.Errorf("after cancellation: %d blocks, %v", blocks, last)
	}
}

func BenchmarkPositions(b *testing.B) {
	for _, v := range largePlans {
		b.Run(v.name, func(b *testing.B) {
			p := v.plan(b)
			end := cpuTime(b, "position")
			n := int64(0)
			for b.Loop() {
				for block, err := range p.Positions(context.Background(), 500_000_000, 504_000_000) {
					if err != nil {
						b.Fatal(err)
					}
					sink += block.Windows[0]
					n += int64(len(block.Windows))
				}
			}
			end(n)
		})
	}
}
