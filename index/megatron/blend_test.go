package megatron

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"mula/index/python"
)

func TestParseBlend(t *testing.T) {
	for _, c := range []struct {
		words    []string
		prefixes []string
		weights  []float64
		err      string // a part of it
	}{
		{words: []string{"a"}, prefixes: []string{"a"}},
		{words: []string{"a", "b"}, prefixes: []string{"a", "b"}},
		{words: []string{"a", "b", "c"}, prefixes: []string{"a", "b", "c"}},
		{words: []string{"1", "a"}, prefixes: []string{"a"}, weights: []float64{1}},
		{words: []string{"30", "a", "70", "b"}, prefixes: []string{"a", "b"}, weights: []float64{30, 70}},
		{words: []string{"1_0", "a", ".5", "b"}, prefixes: []string{"a", "b"}, weights: []float64{10, 0.5}},
		{words: []string{"1e-3", " a\x1c", "+2", "b "}, prefixes: []string{"a", "b"}, weights: []float64{0.001, 2}},
		{words: []string{"inf", "a", "nan", "b"}, prefixes: []string{"a", "b"}, weights: []float64{math.Inf(1),
			math.NaN()}},
		{words: []string{"1", "a", "2"}, prefixes: []string{"1", "a", "2"}}, // an odd number is never a list of pairs
		{words: []string{"a", "1", "b", "2"}, prefixes: []string{"a", "1", "b", "2"}},
		{words: []string{"x", "a", "2", "b"}, err: "word 3 of the list of token files, \"2\", is a weight, but word 1"},
		{words: []string{"1", "a", "x", "b", "3", "c"},
			err: "word 5 of the list of token files, \"3\", is a weight, but word 3"},
		{words: []string{"1", "a", "2", "b", "x", "c"}, err: "would silently treat all 6 words as prefixes"},
		{words: []string{"1", "a", "x", "b"}, err: "1.idx"},
		{words: nil, err: "empty"},
		{words: []string{"1", " "}, err: "word 2 of the list of token files is blank"},
	} {
		b, err := ParseBlend(c.words)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("ParseBlend(%q): %v; want an error with %q", c.words, err, c.err)
			}
			continue
		}
		same := slices.EqualFunc(b.Weights, c.weights, func(a, b float64) bool { return a == b || a != a && b != b })
		if err != nil || !slices.Equal(b.Prefixes, c.prefixes) || !same || (b.Weights == nil) != (c.weights == nil) {
			t.Errorf("ParseBlend(%q) = %v, error %v", c.words, b, err)
		}
	}
}

func TestBlendCheck(t *testing.T) {
	newest, err := ProfileNamed("core-0.19")
	if err != nil {
		t.Fatal(err)
	}
	oldest, err := ProfileNamed("core-0.4")
	if err != nil {
		t.Fatal(err)
	}
	many := Blend{Prefixes: make([]string, maxDatasets+1)}
	for i := range many.Prefixes {
		many.Prefixes[i] = fmt.Sprint("p", i)
	}
	most := Blend{Prefixes: many.Prefixes[:maxDatasets]}
	ab := []string{"a", "b"}
	for _, c := range []struct {
		b    Blend
		p    Profile
		want string // "" if it is fine
	}{
		{Blend{}, newest, "no prefixes"},
		{Blend{Prefixes: ab, Weights: []float64{1}}, newest, "1 weights for 2 prefixes"},
		{Blend{Prefixes: []string{""}}, newest, "prefix 1 is empty"},
		{many, newest, "at most 32766"},
		{most, newest, ""},
		{Blend{Prefixes: ab, Weights: []float64{0, 1}}, newest, "the weight of a is 0.0"},
		{Blend{Prefixes: ab, Weights: []float64{1e-320, 1e300}}, newest, "negligible compared to"},
		{Blend{Prefixes: ab, Weights: []float64{0, 1}}, profileNamed(t, "core-0.6"), ""},
		{Blend{Prefixes: ab, Weights: []float64{0, 1}}, oldest, "the weight of a is 0.0"},
		{Blend{Prefixes: ab, Weights: []float64{-1, 2}}, newest, "the weight of a is -1.0"},
		{Blend{Prefixes: ab, Weights: []float64{1, math.Inf(1)}}, newest, "the weight of b is inf"},
		{Blend{Prefixes: ab, Weights: []float64{1, math.NaN()}}, newest, "the weight of b is nan"},
		{Blend{Prefixes: ab, Weights: []float64{0, 0}}, oldest, "sum to 0.0"},
		{Blend{Prefixes: ab, Weights: []float64{1e308, 1e308}}, newest, "sum to inf"},
		{Blend{Prefixes: ab}, oldest, "needs a weight"},
		{Blend{Prefixes: ab}, newest, ""},
		{Blend{Prefixes: ab[:1]}, oldest, ""},
	} {
		err := c.b.check(c.p, "the blend")
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%.60v: %v; want %q", c.b, err, c.want)
		}
	}
}

// The shares equal the results of megatron-core 0.16.1's _get_size_per_split_per_dataset and, with
// a single ceil, of int(math.ceil(n*w*1.005)).
func TestShares(t *testing.T) {
	newest, _ := ProfileNamed("core-0.13")
	old, _ := ProfileNamed("core-0.10")
	for _, c := range []struct {
		profile Profile
		surplus float64
		weights []float64
		n       int64
		samples []int64
		size    int64
	}{
		{newest, 0.005, []float64{0.5, 0.2, 0.3}, 300, []int64{151, 61, 91}, 300}, // spec 13 A
		{newest, 0, []float64{0.5, 0.2, 0.3}, 300, []int64{150, 60, 90}, 300},
		{newest, 0.005, []float64{0.5, 0.2, 0.3}, 0, []int64{0, 0, 0}, 0},
		{newest, 0.005, []float64{1. / 3, 1. / 3, 1. / 3}, 100, []int64{35, 35, 35}, 102},
		{old, 99, []float64{0.5, 0.2, 0.3}, 300, []int64{151, 61, 91}, 303},
		{old, 99, []float64{1. / 3, 1. / 3, 1. / 3}, 100, []int64{34, 34, 34}, 102},
	} {
		config := Config{Profile: c.profile, Surplus: c.surplus}
		got, err := config.shares(c.weights, c.n)
		if err != nil || !slices.Equal(got.samples, c.samples) || got.size != c.size {
			t.Errorf("%s, %v of %d: %v of %d, error %v; want %v of %d", c.profile, c.weights, c.n, got.samples,
				got.size, err, c.samples, c.size)
		}
	}
	config := Config{Profile: newest}
	if _, err := config.shares([]float64{1}, 1<<62); err == nil {
		t.Error("2^62 samples are counted")
	}
}

// A list of words is parsed as in Megatron, or refused. This is a second implementation of the rule
// of get_blend_from_list.
func FuzzParseBlend(f *testing.F) {
	f.Add("30 a 70 b")
	f.Add("1 a x b")
	f.Add("a 1 b")
	f.Add("nan a 1_0 b")
	f.Fuzz(func(t *testing.T, text string) {
		words := strings.Fields(text)
		b, err := ParseBlend(words)
		first, numbers := true, 0
		for i, word := range words {
			if _, ok := python.ParseFloat(word); ok && i%2 == 0 {
				numbers++
			} else if i == 0 {
				first = false
			}
		}
		switch {
		case len(words) == 0:
			if err == nil {
				t.Fatal("an empty list is accepted")
			}
		case len(words)%2 == 1, numbers == 0:
			blank := slices.ContainsFunc(words, func(w string) bool { return strip(w) == "" })
			if !blank && (err != nil || b.Weights != nil || len(b.Prefixes) != len(words)) {
				t.Fatalf("%q: %v, %v", words, b, err)
			}
		case numbers == len(words)/2:
			if err == nil && (len(b.Weights) != numbers || len(b.Prefixes) != numbers) {
				t.Fatalf("%q: %v", words, b)
			}
		default:
			if err == nil {
				t.Fatalf("%q is a mixture (it begins with a weight: %v), but read as %v", words, first, b)
			}
		}
	})
}
