package tokenize

import (
	"bytes"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"mula/internal/longtest"
)

// cutWords are the lengths of the words that a cutter cuts.
func cutWords(c *cutter, s []byte) []int {
	out := []int{}
	for c.begin(s); c.more(); {
		_, ends, word := c.next()
		from := 0
		for ; ends != 0; ends &= ends - 1 {
			end := bits.TrailingZeros64(ends)
			out = append(out, end-from)
			from = end
		}
		if len(word) > 0 {
			out = append(out, len(word))
		}
	}
	return out
}

// compareCutters compares cutting many bytes at a time with cutting word by word.
func compareCutters(t *testing.T, cutters map[string]*cutter, s []byte) {
	t.Helper()
	for name, c := range cutters {
		want := wordsOf(c.classes, c.split.first, s)
		eachInstructionSet(t, func(t *testing.T) {
			got := cutWords(c, s)
			if slices.Equal(got, want) {
				return
			}
			i, at := 0, 0
			for ; i < min(len(got), len(want)) && got[i] == want[i]; i++ {
				at += got[i]
			}
			t.Fatalf("%s of %q: the lengths of words from byte %d, %q, are %v, want %v", name, s, at,
				s[max(0, at-20):min(len(s), at+80)], got[i:min(len(got), i+4)], want[i:min(len(want), i+4)])
		})
	}
}

func goldenCutters(t testing.TB) map[string]*cutter {
	out := map[string]*cutter{}
	for name, split := range goldenSplitters(t) {
		out[name] = newCutter(pinnedClasses(), split)
	}
	return out
}

func TestCutters(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	cutters := goldenCutters(t)
	for range longtest.Rounds(1500, 200000) {
		var s []byte
		for range r.IntN(30) {
			s = append(s, randomText(r)...)
			s = append(s, bytes.Repeat([]byte(pieces[r.IntN(len(pieces))]), r.IntN(1+r.IntN(80)))...)
		}
		compareCutters(t, cutters, s)
	}
}

// TestCuttersChunks has texts of several chunks.
func TestCuttersChunks(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	cutters := goldenCutters(t)
	for range longtest.Rounds(30, 3000) {
		var s []byte
		for size := r.IntN(4 * maskedTextBytes); len(s) < size; {
			s = append(s, randomText(r)...)
			if r.IntN(50) == 0 {
				s = append(s, bytes.Repeat([]byte(pieces[r.IntN(len(pieces))]), r.IntN(2000))...)
			}
		}
		compareCutters(t, cutters, s)
	}
}

func FuzzCutters(f *testing.F) {
	for _, p := range pieces {
		f.Add([]byte(p + p))
	}
	cutters := goldenCutters(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		compareCutters(t, cutters, bytes.ToValidUTF8(b, nil))
	})
}

func BenchmarkCut(b *testing.B) {
	for name, c := range goldenCutters(b) {
		for language, s := range benchmarkTexts {
			b.Run(name+"/"+language, func(b *testing.B) {
				text := bytes.Repeat([]byte(s), 1<<16/len(s))
				b.SetBytes(int64(len(text)))
				for b.Loop() {
					for c.begin(text); c.more(); {
						c.next()
					}
				}
			})
		}
	}
}
