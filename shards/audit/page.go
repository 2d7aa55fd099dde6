package audit

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

var (
	//go:embed page.html
	pageHTML string
	//go:embed page.css
	pageCSS string

	page = template.Must(template.New("page").Parse(pageHTML))
)

// What a page shows at most, so that its size does not grow with the data.
const (
	maxFindings = 500
	maxFigures  = 24
	maxRows     = 1000
)

// A document is what the template shows.
type document struct {
	Title, Sum                  string
	Style                       template.CSS
	Findings                    []shownFinding
	MoreFindings                int
	SourceHeading, ShardHeading []string
	Sources, Shards             []row
	Figures                     []figure
	MoreFigures, MoreShards     int
}

type shownFinding struct{ Level, Where, Message string }

type row struct {
	Name  string
	Cells []string
}

type figure struct {
	Name, Text string
	Chart      template.HTML
}

// WritePage renders the report as one HTML page that needs nothing beside it: tables, findings, and for each source the lengths of its documents on a
// logarithmic scale. It follows the reader's light or dark setting. The same report gives the same bytes.
func (r *Report) WritePage(w io.Writer, title string) error {
	doc := document{Title: title, Style: template.CSS(pageCSS)}
	levels := map[Level]int{}
	for _, f := range r.Findings {
		levels[f.Level]++
	}
	var tokens, documents int64
	for _, s := range r.Sources {
		tokens += s.Lengths.Tokens
		documents += s.Lengths.Documents
	}
	doc.Sum = fmt.Sprintf("%s tokens in %s documents and %d shards; %d errors, %d warnings, %d notes.", grouped(tokens), grouped(documents), len(r.Shards),
		levels[Error], levels[Warning], levels[Note])
	order := map[Level]int{Error: 0, Warning: 1, Note: 2}
	findings := slices.Clone(r.Findings)
	slices.SortStableFunc(findings, func(a, b Finding) int { return cmp.Compare(order[a.Level], order[b.Level]) })
	for _, f := range findings[:min(len(findings), maxFindings)] {
		doc.Findings = append(doc.Findings, shownFinding{string(f.Level), cmp.Or(f.Path, f.Source), f.Message})
	}
	doc.MoreFindings = max(0, len(findings)-maxFindings)

	doc.SourceHeading = []string{"source", "shards", "documents", "tokens", "mean", "median", "90 %", "99 %", "longest", "repetitive"}
	if r.SequenceLength > 0 {
		doc.SourceHeading = append(doc.SourceHeading, "in no window")
	}
	for _, s := range r.Sources {
		l := s.Lengths
		cells := []string{grouped(s.Shards), grouped(l.Documents), grouped(l.Tokens), grouped(int64(math.Round(l.Mean))), grouped(l.Median),
			grouped(l.P90), grouped(l.P99), grouped(l.Longest), share(s.Repeats.Tokens, l.Tokens)}
		if r.SequenceLength > 0 {
			cells = append(cells, share(s.Tail, l.Tokens))
		}
		doc.Sources = append(doc.Sources, row{s.Name, cells})
	}
	doc.ShardHeading = []string{"shard", "layout", "type", "documents", "tokens", "longest", "empty", "largest id", "different ids", "hashes"}
	for _, s := range r.Shards[:min(len(r.Shards), maxRows)] {
		doc.Shards = append(doc.Shards, row{s.Path, []string{s.Layout, s.DType, grouped(s.Documents), grouped(s.Tokens), grouped(s.Longest), grouped(s.EmptyDocuments),
			grouped(int64(s.MaxID)), grouped(s.DistinctIDs), s.Hashes()}})
	}
	doc.MoreShards = max(0, len(r.Shards)-maxRows)

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
			text := fmt.Sprintf("%s documents, %s tokens", grouped(s.Lengths.Documents), grouped(s.Lengths.Tokens))
			doc.Figures = append(doc.Figures, figure{s.Name, text, s.Lengths.chart(s.Name, last)})
		}
	}
	var out bytes.Buffer
	if err := page.Execute(&out, doc); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	if _, err := out.WriteTo(w); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	return nil
}

// Hashes says in a word what comparing the shard's files came to.
func (s *Shard) Hashes() string {
	switch {
	case s.Verified:
		return "equal"
	case s.Compared:
		return "DIFFER"
	}
	return "none"
}

// grouped writes a number with its thousands apart.
func grouped(n int64) string {
	text := strconv.FormatInt(n, 10)
	for at := len(text) - 3; at > 0 && text[at-1] != '-'; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}

// column is the place of a length in the charts: 0 for none, then one for each octave.
func column(length int64) int { return bits.Len64(uint64(length)) }

// Sizes of a chart in units of the drawing, which is scaled to the width of its place.
const (
	chartWidth, chartHeight = 560.0, 210.0
	chartLeft, chartTop     = 44.0, 8.0
	chartFoot               = 40.0
)

// chart draws the shares of documents and tokens by octaves of length, up to column last.
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
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %.0f %.0f" role="img" aria-label="%s">`, chartWidth, chartHeight, template.HTMLEscapeString("lengths of documents of "+name))
	for v := 0.0; v <= top+1e-9; v += step {
		class := "grid"
		if v == 0 {
			class = "base"
		}
		y := base - high(v)
		fmt.Fprintf(&b, `<line class="%s" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/><text x="%.1f" y="%.1f" text-anchor="end">%.0f %%</text>`,
			class, chartLeft, chartWidth, y, y, chartLeft-5, y+4, 100*v)
	}
	every := 1 // columns from one label to the next
	for float64(every)*wide < 34 {
		every++
	}
	for c := 0; c <= last; c++ {
		from := int64(0)
		if c > 0 {
			from = 1 << (c - 1)
		}
		if c%every == 0 {
			fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`, at(float64(c)+0.5), base+16, powerOfTwo(from))
		}
	}
	fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="middle">tokens in a document, from this power of two on (log scale)</text>`,
		(chartLeft+chartWidth)/2, chartHeight-5)
	for _, o := range l.Octaves {
		c := float64(column(o.From))
		for i, bar := range []struct {
			class string
			share float64
			text  string
		}{
			{"documents", part(o.Documents, l.Documents), grouped(o.Documents) + " documents"},
			{"tokens", part(o.Tokens, l.Tokens), grouped(o.Tokens) + " tokens"},
		} {
			to := max(0, 2*o.From-1)
			fmt.Fprintf(&b, `<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="%.1f"><title>%s to %s tokens: %s, %s</title></rect>`,
				bar.class, at(c+0.1+0.4*float64(i)), base-high(bar.share), 0.38*wide, high(bar.share), grouped(o.From), grouped(to), bar.text, percent(bar.share))
		}
	}
	if l.Median > 0 {
		c := float64(column(l.Median))
		x := at(c + math.Log2(float64(l.Median)) - (c - 1))
		fmt.Fprintf(&b, `<line class="median" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"><title>median: %s tokens</title></line>`,
			x, x, chartTop, base, grouped(l.Median))
	}
	b.WriteString("</svg>")
	return template.HTML(b.String())
}

func part(n, of int64) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

// powerOfTwo writes a power of two, or 0, briefly.
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
