package audit

import (
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"math/bits"
	"slices"
	"strconv"

	"mula/internal/chart"
	"mula/internal/page"
	"mula/internal/quantity"
)

var (
	//go:embed page.html
	pageHTML string
	//go:embed page.css
	pageCSS string

	pages = page.New(page.Layout{Command: "mula check", Body: pageHTML, Style: pageCSS})
)

// Limits of a page, so that its size does not grow with the data.
const (
	maxFindings = 500
	maxFigures  = 24
	maxRows     = 1000
)

// A document is the data for the template.
type document struct {
	Sum             string
	Findings        page.Findings
	Sources, Shards page.Table
	Figures         []page.Figure
	MoreFigures     int
}

// WritePage writes the report as a self-contained HTML page: tables, findings, and for each source
// the lengths of its documents on a logarithmic scale. The page follows the browser's light or dark
// setting. The same report produces the same bytes.
func (r *Report) WritePage(w io.Writer, title string) error {
	var doc document
	levels := map[Level]int{}
	for _, f := range r.Findings {
		levels[f.Level]++
	}
	var tokens, documents int64
	for _, s := range r.Sources {
		tokens += s.Lengths.Tokens
		documents += s.Lengths.Documents
	}
	doc.Sum = fmt.Sprintf("%s tokens in %s documents and %d shards; %d errors, %d warnings, %d notes.",
		quantity.Grouped(tokens), quantity.Grouped(documents), len(r.Shards),
		levels[Error], levels[Warning], levels[Note])
	order := map[Level]int{Error: 0, Warning: 1, Note: 2}
	findings := slices.Clone(r.Findings)
	slices.SortStableFunc(findings, func(a, b Finding) int { return cmp.Compare(order[a.Level], order[b.Level]) })
	for _, f := range findings[:min(len(findings), maxFindings)] {
		doc.Findings.List = append(doc.Findings.List, page.Finding{Level: string(f.Level),
			Where: cmp.Or(f.Path, f.Source), Message: f.Message})
	}
	doc.Findings.More = max(0, len(findings)-maxFindings)

	doc.Sources.Heading = []string{"source", "shards", "documents", "tokens", "mean", "median", "90 %", "99 %",
		"longest", "repetitive"}
	if r.SequenceLength > 0 {
		doc.Sources.Heading = append(doc.Sources.Heading, "in no window")
	}
	for _, s := range r.Sources {
		l := s.Lengths
		cells := []string{s.Name, quantity.Grouped(s.Shards), quantity.Grouped(l.Documents), quantity.Grouped(l.Tokens),
			quantity.Grouped(int64(math.Round(l.Mean))), quantity.Grouped(l.Median),
			quantity.Grouped(l.P90), quantity.Grouped(l.P99), quantity.Grouped(l.Longest), share(s.Repeats.Tokens,
				l.Tokens)}
		if r.SequenceLength > 0 {
			cells = append(cells, share(s.Tail, l.Tokens))
		}
		doc.Sources.Rows = append(doc.Sources.Rows, cells)
	}
	doc.Shards.Heading = []string{"shard", "layout", "type", "documents", "tokens", "longest", "empty", "largest id",
		"different ids", "hashes"}
	for _, s := range r.Shards[:min(len(r.Shards), maxRows)] {
		doc.Shards.Rows = append(doc.Shards.Rows, []string{s.Path, s.Layout, string(s.DType),
			quantity.Grouped(s.Documents), quantity.Grouped(s.Tokens), quantity.Grouped(s.Longest),
			quantity.Grouped(s.EmptyDocuments), quantity.Grouped(int64(s.MaxID)), quantity.Grouped(s.DistinctIDs),
			s.Hashes()})
	}
	doc.Shards.More = max(0, len(r.Shards)-maxRows)

	largest := slices.Clone(r.Sources)
	slices.SortStableFunc(largest, func(a, b Source) int { return cmp.Compare(b.Lengths.Tokens, a.Lengths.Tokens) })
	doc.MoreFigures = max(0, len(largest)-maxFigures)
	largest = largest[:min(len(largest), maxFigures)]
	last := 1 // column of the longest document
	for _, s := range largest {
		last = max(last, column(s.Lengths.Longest))
	}
	for _, s := range largest {
		if s.Lengths.Documents > 0 {
			text := fmt.Sprintf("%s documents, %s tokens", quantity.Grouped(s.Lengths.Documents),
				quantity.Grouped(s.Lengths.Tokens))
			doc.Figures = append(doc.Figures, page.Figure{Title: s.Name, Text: text, Chart: s.Lengths.chart(s.Name,
				last)})
		}
	}
	return pages.Write(w, page.Head{Title: title}, doc)
}

// Hashes returns a word for the result of comparing the shard's files.
func (s *Shard) Hashes() string {
	switch {
	case s.Verified:
		return "equal"
	case s.Compared:
		return "DIFFER"
	}
	return "none"
}

// column returns the column of a length in the charts: 0 for length 0, then one column per octave.
func column(length int64) int { return bits.Len64(uint64(length)) }

// Sizes of a chart in SVG units. The chart is scaled to the available width.
const (
	chartWidth, chartHeight = 560.0, 210.0
	chartLeft, chartTop     = 44.0, 8.0
	chartFoot               = 40.0
)

// chart draws the shares of documents and tokens by octave of length, up to column last.
func (l *Lengths) chart(name string, last int) template.HTML {
	most := 0.0
	for _, o := range l.Octaves {
		most = max(most, part(o.Documents, l.Documents), part(o.Tokens, l.Tokens))
	}
	step := 0.05
	for _, s := range []float64{0.1, 0.2, 0.25} {
		if most/step > 5 {
			step = s
		}
	}
	top := step * math.Ceil(most/step-1e-9)
	base := chartHeight - chartFoot
	wide := (chartWidth - chartLeft) / float64(last+1)
	at := func(column float64) float64 { return chartLeft + column*wide }
	high := func(share float64) float64 { return share / top * (base - chartTop) }
	d := chart.Drawing{Width: chartWidth, Height: chartHeight}
	for v := 0.0; v <= top+1e-9; v += step {
		class := "grid"
		if v == 0 {
			class = "base"
		}
		y := base - high(v)
		d.Line(class, chartLeft, y, chartWidth, y)
		d.Text("tick", chartLeft-5, y+4, chart.End, fmt.Sprintf("%.0f %%", 100*v))
	}
	every := 1 // columns from one label to the next
	for float64(every)*wide < 34 {
		every++
	}
	for c := 0; c <= last; c += every {
		from := int64(0)
		if c > 0 {
			from = 1 << (c - 1)
		}
		d.Text("tick", at(float64(c)+0.5), base+16, chart.Middle, powerOfTwo(from))
	}
	d.Text("axis", (chartLeft+chartWidth)/2, chartHeight-5, chart.Middle,
		"tokens in a document, from this power of two (log scale)")
	for _, o := range l.Octaves {
		c := float64(column(o.From))
		for i, bar := range []struct {
			class string
			share float64
			text  string
		}{
			{"documents", part(o.Documents, l.Documents), quantity.Grouped(o.Documents) + " documents"},
			{"tokens", part(o.Tokens, l.Tokens), quantity.Grouped(o.Tokens) + " tokens"},
		} {
			d.Bar(bar.class, at(c+0.1+0.4*float64(i)), base-high(bar.share), 0.38*wide, high(bar.share),
				fmt.Sprintf("%s to %s tokens: %s, %s", quantity.Grouped(o.From), quantity.Grouped(max(0, 2*o.From-1)),
					bar.text, percent(bar.share)))
		}
	}
	if l.Median > 0 {
		c := float64(column(l.Median))
		d.Vertical("median", at(c+math.Log2(float64(l.Median))-(c-1)), chartTop, base,
			fmt.Sprintf("median: %s tokens", quantity.Grouped(l.Median)))
	}
	return d.Image("lengths of documents of "+name, "")
}

func part(n, of int64) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

// powerOfTwo formats a power of two, or 0, in short form.
func powerOfTwo(n int64) string {
	for _, u := range []struct {
		size int64
		name string
	}{{1 << 40, "Ti"}, {1 << 30, "Gi"}, {1 << 20, "Mi"}, {1 << 10, "Ki"}} {
		if n >= u.size {
			return strconv.FormatInt(n/u.size, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}
