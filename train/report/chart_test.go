package report

import (
	"fmt"
	"html/template"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// goldenStyle replaces the page's style, so that the golden files can be viewed alone.
const goldenStyle = `<style>svg{font:12px sans-serif;background:#fff}.line,.leader,.border{fill:none}.line{stroke:#0072b2}.s1{stroke:#d55e00}.faint{opacity:.4}.d1{stroke-dasharray:7 4}` +
	`.planned,.border{stroke-dasharray:2 4}.grid,.base,.resume path,.leader,.border{stroke:#888}.band{fill:#9cf;stroke:#fff}.f1{fill:#fc9}.f2{fill:#9c9}` +
	`.h0{fill:#1f5fa8}.h4{fill:#88a8cc}.h8{fill:#eee}.h12{fill:#d29e78}.h16{fill:#b34a00}</style>`

// golden compares a drawing with testdata/name.svg.
func golden(t *testing.T, name string, drawing template.HTML) {
	t.Helper()
	path := filepath.Join("testdata", name+".svg")
	got := strings.Replace(string(drawing), "<svg ", `<svg xmlns="http://www.w3.org/2000/svg" `, 1) + "\n"
	got = strings.Replace(got, ">\n", ">\n"+goldenStyle+"\n", 1)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("%s; if the change is meant, look at the drawing after go test -update (-want +got):\n%s", path, diff)
	}
}

func TestGolden(t *testing.T) {
	nan := math.NaN()
	golden(t, "line", (lineChart{
		label: "loss", width: 640, height: 300, yLabel: "loss (nats per token)", until: 6, marks: []mark{{2,
			"resumed before step 2 from step-00000002", resumed},
			{2.2, "step 2 skipped", skipped}, {4, "step 4 skipped", skipped}, {5, "rolled back to step 5",
				rolledBack}, {5.5, "again", rolledBack}},
		series: []curveSeries{
			{colour: 0, faint: true, points: []point{{0, 5}, {1, 3.5}, {2, 3.75}, {3, 2.5}, {4, nan}, {5, 2}}},
			{name: "training", colour: 0, points: []point{{0, 4.5}, {1, 4}, {2, 3.5}, {3, 3}, {4, nan}, {5, 2.25}}},
			{name: "a<b & c", colour: 9, points: []point{{0, 4.75}, {6, 2.25}}},
			{name: "evaluation", colour: 1, dots: true, points: []point{{3, 3.25}, {6, 2.5}}},
			{name: "plan", colour: 2, planned: true, points: []point{{0, 3}, {6, 3}}},
		},
	}).svg())
	golden(t, "log", (lineChart{
		label: "norm", width: 640, height: 300, yLabel: "norm", logIfWide: true,
		series: []curveSeries{{name: "last", points: []point{{0, 3}, {10, 0.5}, {20, 180}, {30, 0.25}}}},
	}).svg())
	golden(t, "shares", (&shareChart{
		label: "mixture", width: 640, height: 300, names: []string{"go", "docs", "books"}, edges: []float64{0, 2, 4, 6,
			8}, planned: []float64{0.5, 0.375, 0.125},
		shares: [][]float64{{0.5, 0.375, 0.125}, {0.5, 0.5, 0}, {0, 0, 0}, {0.25, 0.5, 0.25}},
	}).svg())
	golden(t, "heat", (&heatMap{
		label: "load", width: 640, rowName: "layer", row: func(i int) int { return i }, xLabel: "expert",
		scaleLabel: "× mean", noteHead: "max/mean",
		notes:  []string{"1.00×", "4.00×"},
		titles: []string{"layer 0: even", "layer 1: one expert"}, values: [][]float64{{1, 1, 1, 1}, {4, 0, nan, 0.5}},
	}).svg())
}

var coordinate = regexp.MustCompile(`[ML]([-\d.]+) ([-\d.]+)`)

// The curve drawn, read back through the scales that the page gives its script, is the curve asked
// for, to the tenth of a unit of the drawing.
func TestLineChartIsTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		positive := rapid.Bool().Draw(t, "positive")
		low := -1e4
		if positive {
			low = 1e-3
		}
		ys := rapid.SliceOfNDistinct(rapid.Float64Range(low, 1e4), 2, 50, rapid.ID).Draw(t, "y")
		s := curveSeries{name: "a"}
		for i, y := range ys {
			s.points = append(s.points, point{float64(3 * i), y})
		}
		c := lineChart{width: half, height: halfHeight, logIfWide: rapid.Bool().Draw(t, "log"),
			fromZero: rapid.Bool().Draw(t, "from zero"), series: []curveSeries{s}}
		drawing := string(c.svg())
		x, y := scale(t, drawing, "x"), scale(t, drawing, "y")
		log := strings.Contains(drawing, `data-scale="log"`)
		path := regexp.MustCompile(`data-name="a" d="([^"]*)"`).FindStringSubmatch(drawing)
		if path == nil {
			t.Fatal("no curve")
		}
		drawn := coordinate.FindAllStringSubmatch(path[1], -1)
		next := 0
		for _, p := range s.points {
			wantX := x.px(p.x, false)
			wantY := y.px(p.y, log)
			// A point that falls on the one before is not drawn again.
			for _, at := range []int{next, next - 1} {
				if at < 0 || at >= len(drawn) {
					continue
				}
				gotX, _ := strconv.ParseFloat(drawn[at][1], 64)
				gotY, _ := strconv.ParseFloat(drawn[at][2], 64)
				if math.Abs(gotX-wantX) <= 0.11 && math.Abs(gotY-wantY) <= 0.11 {
					next = at + 1
					wantX = math.NaN()
					break
				}
			}
			if !math.IsNaN(wantX) {
				t.Fatalf("point %v should be at %g %g; the path is %s", p, wantX, wantY, path[1])
			}
		}
		if next != len(drawn) {
			t.Fatalf("%d points drawn, %d asked for: %s", len(drawn), len(s.points), path[1])
		}
	})
}

type scaleData struct{ lo, hi, from, to float64 }

func scale(t *rapid.T, drawing, name string) scaleData {
	var s scaleData
	text := regexp.MustCompile(`data-` + name + `="([^"]*)"`).FindStringSubmatch(drawing)
	if text == nil {
		t.Fatalf("no scale %s", name)
	}
	if _, err := fmt.Sscan(text[1], &s.lo, &s.hi, &s.from, &s.to); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s scaleData) px(v float64, log bool) float64 {
	if log {
		return s.from + math.Log(v/s.lo)/math.Log(s.hi/s.lo)*(s.to-s.from)
	}
	return s.from + (v-s.lo)/(s.hi-s.lo)*(s.to-s.from)
}

// Labels have the order of the curves' ends, do not overlap and, if there is space, are within the
// plot.
func TestSpread(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ys := rapid.SliceOfN(rapid.Float64Range(18, 300), 1, 20).Draw(t, "ends")
		labels := make([]endLabel, len(ys))
		for i, y := range ys {
			labels[i].y, labels[i].at.y = y, y
		}
		spread(labels, 18, 18+20*lineHeight)
		for i, l := range labels {
			if i > 0 && (l.y-labels[i-1].y < lineHeight-1e-9 || l.at.y < labels[i-1].at.y) {
				t.Fatalf("labels %v", labels)
			}
			if l.y < 18-1e-9 || l.y > 18+20*lineHeight+1e-9 {
				t.Fatalf("label at %g", l.y)
			}
		}
	})
}

func TestHeatClass(t *testing.T) {
	for _, test := range []struct {
		v            float64
		octaves, cls int
	}{
		{1, 2, 8}, {1.05, 2, 8}, {0.95, 2, 8}, {2, 2, 12}, {0.5, 2, 4}, {4, 2, 16}, {100, 2, 16}, {0.25, 2, 0}, {0, 2,
			0}, {16, 4, 16}, {4, 4, 12}, {1.0 / 16, 4, 0},
		{math.NaN(), 2, -1},
	} {
		if got := heatClass(test.v, test.octaves); got != test.cls {
			t.Errorf("%g on %d octaves: %d, want %d", test.v, test.octaves, got, test.cls)
		}
	}
}
