package megatron

import (
	"strings"
	"testing"

	"mula/index/gpt"
	"mula/index/python"
)

func TestSplitMatrix(t *testing.T) {
	for _, c := range []struct{ split, want string }{
		{"969,30,1", "[[0, 0.969], [0.969, 0.999], [0.999, 1.0]]"},
		{"969, 30, 1", "[[0, 0.969], [0.969, 0.999], [0.999, 1.0]]"},
		{"99,1,0", "[[0, 0.99], [0.99, 1.0], null]"},
		{"99-1", "[[0, 0.99], [0.99, 1.0], null]"},
		{"0,1,0", "[null, [0.0, 1.0], null]"},
		{"1", "[[0, 1.0], null, null]"},
		{"0.8,.15,.05", "[[0, 0.8], [0.8, 0.9500000000000001], [0.9500000000000001, 1.0]]"},
		{"1,0,1", "[[0, 0.5], null, [0.5, 1.0]]"},
	} {
		v, err := parseSplit(c.split)
		if err != nil {
			t.Errorf("%q: %v", c.split, err)
			continue
		}
		if got := strings.Join(strings.Fields(python.Dumps(matrixValue(splitMatrix(v)))),
			""); got != strings.ReplaceAll(c.want, " ", "") {
			t.Errorf("%q: %s, want %s", c.split, got, c.want)
		}
	}
	for _, c := range []struct{ split, want string }{
		{"1,2,3,4", "4 numbers"},
		{"99,1,1e-5", "4 numbers"},
		{"0,0,0", "sums to 0.0"},
		{"", "sums to 0.0"},
		{"train", "sums to 0.0"},
		{"1.2.3,4", `invalid number "1.2.3"`},
		{".,1", `invalid number "."`},
		{strings.Repeat("9", 400), "sums to inf"},
	} {
		if _, err := parseSplit(c.split); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.20q: %v; want %q", c.split, err, c.want)
		}
	}
}

func TestDocuments(t *testing.T) {
	// Python: round(0.5) = 0, round(1.5) = 2, round(2.5) = 2.
	for _, c := range []struct {
		split string
		ns    int64
		want  [4]int64
	}{
		{"70,20,10", 40, [4]int64{0, 28, 36, 40}},
		{"1,1,0", 1, [4]int64{0, 0, 1, 1}},
		{"1,1,0", 3, [4]int64{0, 2, 3, 3}},
		{"1,1,0", 5, [4]int64{0, 2, 5, 5}},
		{"969,30,1", 100, [4]int64{0, 97, 100, 100}},
		{"969,30,1", 1 << 31, [4]int64{0, 2080911655, 2145336164, 1 << 31}},
	} {
		v, err := parseSplit(c.split)
		if err != nil {
			t.Fatal(err)
		}
		for k, s := range splitMatrix(v) {
			if !s.present {
				continue
			}
			if first, end := s.documents(c.ns); first != c.want[k] || end != c.want[k+1] {
				t.Errorf("%s of %d, split %d: %d to %d, want %v", c.split, c.ns, k, first, end, c.want)
			}
		}
	}
	// Core 0.4 rounds widths: 2 + 2 + 1 of 5, where rounded edges are at 2, 4 and 5; of 7 the
	// widths are 2, 2, 2 and one is missing.
	for _, c := range []struct {
		v    [3]float64
		ns   int64
		want [4]int64
	}{
		{[3]float64{0.4, 0.4, 0.2}, 5, [4]int64{0, 2, 4, 5}},
		{[3]float64{1. / 3, 1. / 3, 1. / 3}, 7, [4]int64{0, 3, 5, 7}},
		{[3]float64{0.5, 0.25, 0.25}, 3, [4]int64{0, 1, 2, 3}}, // widths 2, 1, 1
		{[3]float64{0.25, 0.25, 0.5}, 2, [4]int64{0, 1, 1, 2}}, // widths 0, 0, 1
	} {
		if got := gpt.SplitEdges(c.v, c.ns); got != c.want {
			t.Errorf("widths %v of %d: %v, want %v", c.v, c.ns, got, c.want)
		}
	}
}

// Whatever the text, the stretches are in order, inside the file and next to each other.
func FuzzParseSplit(f *testing.F) {
	f.Add("969, 30, 1", uint32(1000))
	f.Add("0.8,.15,.05", uint32(7))
	f.Add("1..2", uint32(7))
	f.Fuzz(func(t *testing.T, text string, ns uint32) {
		v, err := parseSplit(text)
		if err != nil {
			return
		}
		at := int64(0)
		for k, s := range splitMatrix(v) {
			if !s.present {
				continue
			}
			first, end := s.documents(int64(ns))
			if first != at || end < first || end > int64(ns) {
				t.Fatalf("%q of %d, split %d: %d to %d", text, ns, k, first, end)
			}
			at = end
		}
		if at != int64(ns) {
			t.Fatalf("%q of %d: ends at %d", text, ns, at)
		}
	})
}
