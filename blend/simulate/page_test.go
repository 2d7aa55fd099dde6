package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strings"
	"testing"

	"mula/internal/chart"
	"mula/internal/quantity"
)

func render(t *testing.T, r *Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := r.WritePage(&b, "Simulation of <plan>"); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// parse checks that all of the page but its head is well-formed, with every element closed, and
// gives its text by path of the element.
func parse(t *testing.T, page string) map[string][]string {
	t.Helper()
	body := page[strings.Index(page, "<body>") : strings.Index(page, "</body>")+len("</body>")]
	d := xml.NewDecoder(strings.NewReader(body))
	var path []string
	texts := make(map[string][]string)
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			path = append(path, token.Name.Local)
			for _, a := range token.Attr {
				if strings.Contains(a.Value, "NaN") || strings.Contains(a.Value, "Inf") {
					t.Fatalf("%s has %s=%q", strings.Join(path, " "), a.Name.Local, a.Value)
				}
			}
			texts[token.Name.Local] = append(texts[token.Name.Local], "")
		case xml.EndElement:
			path = path[:len(path)-1]
		case xml.CharData:
			if len(path) > 0 {
				list := texts[path[len(path)-1]]
				list[len(list)-1] += string(token)
			}
		}
	}
	return texts
}

// The page has what the report has, refers to nothing outside, and is well-formed.
func TestPage(t *testing.T) {
	d := seal(t, 2, stagesAndSkips)
	r, err := Run(context.Background(), nil, Options{BatchSize: 12, Nodes: 3, StepTime: 1e-5, Storage: Kinds[2],
		Data: d})
	if err != nil {
		t.Fatal(err)
	}
	r.Findings = append(r.Findings, Finding{Warning, "a<b", "x & y"})
	page := render(t, r)
	if page != render(t, r) {
		t.Error("the same report gives another page")
	}
	if outside := regexp.MustCompile(`(?i)((src|href)=|url\(|@import|<script|https?:)`).FindString(page); outside != "" {
		t.Errorf("the page has %q", outside)
	}
	texts := parse(t, page)
	if n := len(texts["svg"]); n != 2+1+2*3 {
		t.Errorf("%d charts", n)
	}
	all := strings.Join(append(append(texts["td"], texts["th"]...), append(texts["p"], texts["li"]...)...), "\n")
	for _, want := range []string{"web", "code", "x & y", fmt.Sprintf("%.4f", r.Shuffle.Sources[0].Distance),
		quantity.Grouped(r.Shuffle.Sources[1].Pairs),
		fmt.Sprintf("%.3f", r.Sources[0].Epochs), quantity.Grouped(r.Sources[0].Tail),
		share(r.Mixture.Sources[0].Share), "126 steps", "latency 30 ms", "object-store does not keep up"} {
		if !strings.Contains(all, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	if !strings.Contains(page, "prefers-color-scheme: dark") || !strings.Contains(page, "default-src 'none'") {
		t.Error("no dark colours, or no policy")
	}
	if text, err := json.Marshal(r); err != nil || !bytes.Contains(text, []byte(`"unevenness"`)) {
		t.Errorf("%v", err) // NaN has no JSON
	}
}

// The bars of the distances and the curve next to them have the heights of the shares.
func TestChartHeights(t *testing.T) {
	c := plot{bars: []float64{0.1, 0.2, 0.3, 0.4}, fromZero: true, xText: short, yText: perCent,
		curves: []curve{{class: "s1", x: []float64{0, 1}, y: []float64{0.4, 0.1}}}}
	svg := string(c.svg())
	bars := regexp.MustCompile(`<rect class="f0" x="[0-9.]+" y="([0-9.]+)" width="[0-9.]+" height="([0-9.]+)">`).FindAllStringSubmatch(svg, -1)
	if len(bars) != 4 {
		t.Fatal(svg)
	}
	var y, h [4]float64
	for i, b := range bars {
		fmt.Sscan(b[1]+" "+b[2], &y[i], &h[i])
		if math.Abs(y[i]+h[i]-(chartHeight-chartFoot)) > 0.11 || math.Abs(h[i]-float64(i+1)*h[0]) > 0.3 {
			t.Errorf("bar %d: from %g, %g high", i, y[i], h[i])
		}
	}
	if want := fmt.Sprintf(`d="M%s %sL%s %s"`, chart.Number(chartLeft), chart.Number(y[3]), chart.Number(chartWidth-chartRight),
		chart.Number(y[0])); !strings.Contains(svg, want) {
		t.Errorf("no curve %s in %s", want, svg)
	}
	if strings.Contains(svg, "-0 ") || (&plot{}).svg() != "" {
		t.Error("a chart of nothing, or a zero with a sign")
	}
}

// The picture of the parts has each cell once, in the colour of how far it is off.
func TestHeat(t *testing.T) {
	counts := make([][]int64, 3)
	for i := range counts {
		counts[i] = make([]int64, parts)
		for k := range counts[i] {
			counts[i][k] = 100
		}
	}
	counts[1][0], counts[1][5] = 200, 0
	svg := string(heat("a<b", counts))
	cells := func(level int) int {
		m := regexp.MustCompile(fmt.Sprintf(`class="h%d" d="([^"]*)"`, level)).FindStringSubmatch(svg)
		if m == nil {
			return 0
		}
		return strings.Count(m[1], "M")
	}
	if cells(4) != 3*parts-2 || cells(0) != 1 || cells(8) != 1 || !strings.Contains(svg, "a&lt;b") {
		t.Errorf("%d as expected, %d less, %d more", cells(4), cells(0), cells(8))
	}
	long := make([][]int64, 10*heatColumns)
	for i := range long {
		long[i] = counts[0]
	}
	if n := strings.Count(string(heat("x", long)), "M"); n != heatColumns*parts {
		t.Errorf("%d cells", n)
	}
}

// With any number of findings, a browser can show the page, which has a note about skipped
// findings.
func TestPageIsBounded(t *testing.T) {
	r := &Report{}
	for i := range 3000 {
		name := fmt.Sprintf("src-%d", i)
		r.Findings = append(r.Findings, Finding{Note, name, "m"})
		r.Sources = append(r.Sources, Source{Name: name})
		r.Mixture.Sources = append(r.Mixture.Sources, SourceMixture{Name: name})
		r.Shuffle.Sources = append(r.Shuffle.Sources, SourceShuffle{Name: name})
	}
	r.Reading.Nodes, r.BatchSize = 1, 1
	page := render(t, r)
	parse(t, page)
	if len(page) > 1<<20 {
		t.Errorf("%d bytes", len(page))
	}
	for _, want := range []string{"2800 more;", "2500 more;", "The 12 sources with the most samples; 2988 more"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
}

func TestTexts(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{perSecond(2e9), "2.00 GB/s"}, {share(0.5), "50.0 %"}, {share(0.0123), "1.23 %"}, {share(1e-5),
			"0.001 %"}, {share(5.2e-7), "0.000052 %"}, {scaledShort(0), "0"}, {scaledShort(2000), "2k"},
		{Count{3, -1}.expectation(), "-"}, {Count{3, 12345.6}.expectation(), "12,346"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}
