package main

import (
	"math"
	"os"
	"strings"
	"testing"

	"mula/moe"
)

// The products have the FLOPs that `mula estimate` counts, besides attention and the router.
func TestFLOPs(t *testing.T) {
	for _, s := range steps {
		c, err := moe.Preset(s.model)
		if err != nil {
			t.Fatal(err)
		}
		all, err := s.kernels()
		if err != nil {
			t.Fatal(err)
		}
		got := 0.0
		for _, k := range all {
			if !strings.HasPrefix(k.name, "attention") && !strings.HasPrefix(k.name, "router") {
				got += k.count * k.flops
			}
		}
		scores := 12 * float64(c.Layers*s.sequence*c.QueryWidth())
		want := float64(s.tokens*s.passes) * (c.FLOPsPerToken(s.sequence) - scores)
		if math.Abs(got/want-1) > 1e-9 {
			t.Errorf("%s: the products have %g FLOPs, want %g", s.name, got, want)
		}
	}
}

// A kernel is bound by FLOPs or by bytes, and a product with few work-groups is slower.
func TestSeconds(t *testing.T) {
	for _, test := range []struct {
		name            string
		k               kernel
		floor, expected float64
	}{
		{"bytes", kernel{count: 2, bytes: bandwidth, flops: peak / 2}, 2, 2 * bandwidth / bandwidthRate},
		{"bytes, the first without reading", kernel{count: 3, bytes: bandwidth, firsts: 1, unread: bandwidth / 4}, 2.75,
			2.75 * bandwidth / bandwidthRate},
		{"FLOPs", kernel{count: 1, flops: peak}, 1, peak / measured},
		{"few work-groups", kernel{count: 1, flops: peak, occupancy: 0.25}, 1, 4 * peak / measured},
		{"other instructions", kernel{count: 1, flops: peak, ceiling: 0.5}, 1, 2},
		{"vector engines", kernel{count: 1, flops: vectorPeak, vector: true}, 1, vectorPeak / vectorRate},
	} {
		floor, expected := test.k.seconds()
		if math.Abs(floor-test.floor) > 1e-9 || math.Abs(expected-test.expected) > 1e-9 {
			t.Errorf("%s: %g and %g seconds, want %g and %g", test.name, floor, expected, test.floor, test.expected)
		}
	}
}

// The page has the tables that the program computes.
func TestPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/roofline.md")
	if err != nil {
		t.Fatal(err)
	}
	text, err := tables()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), tableBegin+text+tableEnd) {
		t.Error("the tables differ; run go run ./benchmarks/roofline -table docs/reference/roofline.md")
	}
}
