package simulate

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strings"
)

var (
	//go:embed page.html
	pageHTML string
	//go:embed page.css
	pageCSS string

	page = template.Must(template.New("page").Parse(pageHTML))
)

// What a page shows at most, so that its size does not grow with the plan.
const (
	maxFindings = 200
	maxRows     = 500
	maxCurves   = 8 // sources in one chart
	maxSources  = 12
)

// A document is what the template shows.
type document struct {
	Title, Sum, Plan, Order, Assumptions               string
	Style                                              template.CSS
	Findings                                           []Finding
	MoreFindings                                       int
	ReadingText, MixtureText, ShuffleText, RepeatsText string
	Reading, Mixture, Shuffle, Repeats                 Table
	ReadingFigures, MixtureFigures                     []figure
	Sources                                            []section
	MoreSources                                        int
}

// A section is the figures of one source.
type section struct {
	Title   string
	Figures []figure
}

type figure struct {
	Title, Text string
	Keys        []key
	Chart       template.HTML
}

type key struct{ Class, Name string }

// A Table is text in rows, whose first cells name them.
type Table struct {
	Heading []string
	Rows    [][]string
	More    int // rows left out
}

// WritePage renders the report as one HTML page that needs nothing beside it. It follows the reader's light or dark setting. The same report
// gives the same bytes.
func (r *Report) WritePage(w io.Writer, title string) error {
	rd := &r.Reading
	doc := document{Title: title, Style: template.CSS(pageCSS), Plan: r.Plan, Order: r.Order, Assumptions: rd.Storage.figures(),
		Findings: r.Findings[:min(len(r.Findings), maxFindings)], MoreFindings: max(0, len(r.Findings)-maxFindings)}
	doc.Sum = fmt.Sprintf("Positions %s to %s: %s steps of %s samples of %s+1 tokens, read by %s nodes (ranks of each: %s).", grouped(r.From), grouped(r.To-1),
		grouped(r.Steps), grouped(int64(r.BatchSize)), grouped(int64(r.SequenceLength)), grouped(int64(rd.Nodes)), grouped(int64(rd.RanksPerNode)))
	doc.ReadingText = fmt.Sprintf("One node, the first, was followed through %s steps: which blocks of which files its samples are in, and how long %s takes to bring them.",
		grouped(rd.Steps), rd.Storage.Name)
	doc.Reading = r.ReadingTable()
	doc.MixtureText = fmt.Sprintf("Positions were counted by source in %s intervals, one every %s steps, %s steps of each. The bound is what the plan's order keeps to; "+
		"random is the standard deviation that independent draws with the same weights would have.", grouped(int64(len(r.Mixture.Intervals))), grouped(r.Mixture.StepsOfInterval),
		grouped(r.Mixture.StepsCounted))
	doc.Mixture = r.MixtureTable().cut()
	doc.ShuffleText = fmt.Sprintf("%s samples of %s steps were looked at one by one. A pair is two samples of a source that follow each other in its order; "+
		"in brackets is what a uniform permutation of the source's windows would give.", grouped(r.Shuffle.Samples), grouped(r.Shuffle.Steps))
	if !r.Shuffle.Documents {
		doc.ShuffleText += " Nothing is said of documents: the shards were not looked at, or the order does not cut them into windows."
	}
	doc.Shuffle = r.ShuffleTable().cut()
	doc.RepeatsText = "Epochs are those of the whole plan. Windows and documents are counted in the steps that were looked at"
	if !r.Shuffle.Whole {
		doc.RepeatsText += ", which are not all of the range"
	}
	doc.RepeatsText += "; a document was read as often as samples hold a token of it, for each window that does. The tail is tokens at the ends of shards that no window has; packed samples have padding instead."
	doc.Repeats = r.RepeatsTable().cut()
	doc.ReadingFigures = rd.figures()
	largest := make([]int, len(r.Mixture.Sources)) // sources, most samples first
	for i := range largest {
		largest[i] = i
	}
	slices.SortStableFunc(largest, func(a, b int) int { return cmp.Compare(r.Mixture.Sources[b].Share, r.Mixture.Sources[a].Share) })
	doc.MixtureFigures = r.mixtureFigures(largest[:min(len(largest), maxCurves)])
	doc.MoreSources = max(0, len(largest)-maxSources)
	for _, i := range largest[:min(len(largest), maxSources)] {
		doc.Sources = append(doc.Sources, section{r.Mixture.Sources[i].Name, r.sourceFigures(i)})
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

// cut leaves out rows beyond what a page shows.
func (t Table) cut() Table {
	t.More = max(0, len(t.Rows)-maxRows)
	t.Rows = t.Rows[:len(t.Rows)-t.More]
	return t
}

// figures says what is assumed of the storage.
func (s *Storage) figures() string {
	total := "no limit of all nodes together"
	if s.TotalBandwidth > 0 {
		total = perSecond(s.TotalBandwidth) + " all nodes together"
	}
	return fmt.Sprintf("%s: latency %s, %s a node, %s, requests of %s, a cache of %s a node", s.Name, seconds(s.Latency), perSecond(s.NodeBandwidth), total,
		bytesText(s.RequestSize), bytesText(s.Cache))
}

// ReadingTable is the figures of storage, one a row.
func (r *Report) ReadingTable() Table {
	rd := &r.Reading
	t := Table{Heading: []string{"a step of a node", "value"}}
	row := func(name, format string, args ...any) {
		t.Rows = append(t.Rows, []string{name, fmt.Sprintf(format, args...)})
	}
	row("tokens of its samples", "%s", bytesText(int64(rd.TokenBytes)))
	row("asked for, in whole requests", "%s in %.4g requests", bytesText(int64(rd.WantedBytes)), rd.Wanted)
	row("read from storage, beyond the cache", "%s in %.4g requests", bytesText(int64(rd.Bytes)), rd.Requests)
	row("time to read it", "%s", seconds(rd.ReadTime))
	row("time to read it in the slowest tenth of the steps", "%s", seconds(rd.Busy.ReadTime))
	if rd.StepTime > 0 {
		row("time to compute", "%s", seconds(rd.StepTime))
		row("needed in the slowest tenth", "%s", perSecond(rd.Needed))
	}
	row("can get there", "%s", perSecond(rd.Got))
	if rd.StepTime > 0 {
		row("waits for data", "%s", seconds(rd.Waited))
		keeps := map[bool]string{true: "yes", false: "no"}[rd.KeepsUp]
		row("storage keeps up", "%s", keeps)
		kept := "no number of nodes"
		switch {
		case rd.NodesKept > 0:
			kept = grouped(rd.NodesKept) + " nodes at most"
		case rd.NodesKept < 0:
			kept = "any number of nodes"
		}
		row("it keeps up with", "%s", kept)
	}
	row("requests, all nodes, the whole range", "%s", scaled(rd.AllRequests))
	row("first batch, shards known", "%s", seconds(rd.FirstWarm))
	row("first batch, nothing known", "%s", seconds(rd.FirstCold))
	row("all windows that are drawn", "%s", bytesText(rd.DrawnBytes))
	row("cache that makes later epochs local", "%s", bytesText(rd.RepeatSize))
	return t
}

// MixtureTable has a row for each source.
func (r *Report) MixtureTable() Table {
	t := Table{Heading: []string{"source", "planned", "share", "least", "most", "largest deviation", "bound", "random", "unevenness"}}
	for _, m := range r.Mixture.Sources {
		uneven, bound := "-", "-"
		if m.Cells > 0 {
			uneven = fmt.Sprintf("%.2f", m.Unevenness)
		}
		if m.Bound > 0 {
			bound = fmt.Sprintf("%.2f", m.Bound)
		}
		t.Rows = append(t.Rows, []string{m.Name, share(m.Planned), share(m.Share), share(m.Least), share(m.Most), fmt.Sprintf("%.2f", m.Deviation), bound,
			fmt.Sprintf("%.1f", m.Random), uneven})
	}
	return t
}

// ShuffleTable has a row for each source.
func (r *Report) ShuffleTable() Table {
	t := Table{Heading: []string{"source", "pairs", "distance", "off", "parity", "side by side", "one shard", "one document", "one document, a step", "one window, a step"}}
	for _, s := range r.Shuffle.Sources {
		count := func(c Count) string { return fmt.Sprintf("%s (%s)", grouped(c.Seen), c.expectation()) }
		document := []string{"-", "-"}
		if r.Shuffle.Documents {
			document = []string{count(s.SameDocument), count(s.BatchDocument)}
		}
		apart := []string{"-", "-", "-", "-"} // of numbers that are no places, or without a pair
		if len(s.Distances) > 0 {
			apart = []string{fmt.Sprintf("%.4f", s.Distance), "-", share(s.Parity), count(s.Adjacent)}
		}
		if len(s.Uniform) > 0 {
			apart[1] = fmt.Sprintf("%+.1f", s.DistanceOff)
		}
		t.Rows = append(t.Rows, []string{s.Name, grouped(s.Pairs), apart[0], apart[1], apart[2], apart[3],
			count(s.SameShard), document[0], document[1], count(s.BatchWindow)})
	}
	return t
}

// RepeatsTable has a row for each source.
func (r *Report) RepeatsTable() Table {
	t := Table{Heading: []string{"source", "epochs", "repeats", "tail", "windows drawn (times)", "documents read (times)", "most read"}}
	for i, s := range r.Sources {
		sh := &r.Shuffle.Sources[i]
		var windows, documents []string
		for _, w := range sh.Windows {
			windows = append(windows, fmt.Sprintf("%s (%d)", grouped(w.Windows), w.Times))
		}
		for _, d := range sh.Documents {
			if d.Documents > 0 {
				documents = append(documents, fmt.Sprintf("%s (%s)", grouped(d.Documents), d.Passes))
			}
		}
		if len(windows) > 6 {
			windows = append(windows[:6:6], "…")
		}
		tail, most := "-", "-"
		if s.Packing != nil {
			tail = fmt.Sprintf("%s padding (%s)", grouped(s.Packing.Padding), share(s.Packing.Share))
		} else if s.Tail >= 0 {
			tail = fmt.Sprintf("%s (%s)", grouped(s.Tail), share(float64(s.Tail)/max(1, float64(s.Tokens))))
		}
		if sh.Most.Samples > 0 {
			most = fmt.Sprintf("%s samples", grouped(sh.Most.Samples))
		}
		t.Rows = append(t.Rows, []string{s.Name, fmt.Sprintf("%.3f", s.Epochs), grouped(s.Repeats), tail, cmp.Or(strings.Join(windows, ", "), "-"),
			cmp.Or(strings.Join(documents, ", "), "-"), most})
	}
	return t
}

func (rd *Reading) figures() []figure {
	nodes := chart{label: "what a node gets, by number of nodes", xLabel: "nodes (log scale)", yLabel: "bytes a second", log: true, fromZero: true,
		xText: scaledShort, yText: scaledShort, marks: []float64{float64(rd.Nodes)}}
	got := curve{name: "a node gets", class: "s0"}
	needed := curve{name: "a node needs", class: "s1 dash"}
	for _, p := range rd.Scaling {
		got.x, got.y = append(got.x, float64(p.Nodes)), append(got.y, p.Got)
		needed.x, needed.y = append(needed.x, float64(p.Nodes)), append(needed.y, rd.Needed)
	}
	keys := []key{{"s0", "gets"}}
	if rd.StepTime > 0 {
		nodes.curves = append(nodes.curves, needed)
		keys = append(keys, key{"s1", "needs"})
	}
	nodes.curves = append(nodes.curves, got)
	cache := chart{label: "requests that a cache of the node would answer, by its size", xLabel: "bytes of cache", yLabel: "share of the requests", fromZero: true,
		xText: scaledShort, yText: perCent, marks: []float64{float64(rd.Storage.Cache)}}
	hits := curve{name: "share of the requests that the cache answers", class: "s0"}
	for _, p := range rd.Cache {
		hits.x, hits.y = append(hits.x, float64(p.Size)), append(hits.y, p.Hits)
	}
	cache.curves = []curve{hits}
	return []figure{
		{"Bandwidth of a node", fmt.Sprintf("if each reads its own share as here; the dotted line is at %s nodes", grouped(int64(rd.Nodes))), keys, nodes.svg()},
		{"A node's cache", fmt.Sprintf("of what was used last, over the %s steps that were followed", grouped(rd.Steps)), nil, cache.svg()},
	}
}

func (r *Report) mixtureFigures(sources []int) []figure {
	c := chart{label: "share of each source along the range", xLabel: "step", yLabel: "share of the samples", fromZero: true, xText: scaledShort, yText: perCent}
	f := figure{Title: "Share of each source", Text: "thin: counted; wide and pale: what the weights ask for"}
	for k, i := range sources {
		counted := curve{name: r.Mixture.Sources[i].Name, class: fmt.Sprintf("s%d", k)}
		planned := curve{name: "planned: " + counted.name, class: counted.class + " pale"}
		for _, v := range r.Mixture.Intervals {
			total := 0.0
			for _, n := range v.Counts {
				total += float64(n)
			}
			counted.x, counted.y = append(counted.x, float64(v.Step)), append(counted.y, float64(v.Counts[i])/total)
			planned.x, planned.y = append(planned.x, float64(v.Step)), append(planned.y, v.Expected[i]/total)
		}
		c.curves = append(c.curves, planned, counted)
		f.Keys = append(f.Keys, key{counted.class, counted.name})
	}
	f.Chart = c.svg()
	return []figure{f}
}

// sourceFigures are the pictures of one source: how far its share is from the plan, how its parts are drawn, how far neighbours are apart.
func (r *Report) sourceFigures(i int) []figure {
	m, s := &r.Mixture.Sources[i], &r.Shuffle.Sources[i]
	off := chart{label: "samples of " + m.Name + " beyond what its weight asks for", xLabel: "step", yLabel: "samples more than planned", xText: scaledShort, yText: short}
	counted := curve{name: "counted", class: "s0"}
	var sides [2]curve
	random := [2]curve{{name: "two standard deviations of random draws", class: "s1 dash"}, {name: "two standard deviations of random draws", class: "s1 dash"}}
	for _, v := range r.Mixture.Intervals {
		var total float64
		for _, n := range v.Counts {
			total += float64(n)
		}
		p := v.Expected[i] / total
		x := float64(v.Step)
		counted.x, counted.y = append(counted.x, x), append(counted.y, float64(v.Counts[i])-v.Expected[i])
		for k, sign := range []float64{1, -1} {
			sides[k].x, sides[k].y = append(sides[k].x, x), append(sides[k].y, sign*v.Bound)
			random[k].x, random[k].y = append(random[k].x, x), append(random[k].y, sign*2*math.Sqrt(total*p*(1-p)))
		}
	}
	sides[0].name = "bound of the plan's order"
	off.band = &sides
	off.curves = []curve{random[0], random[1], counted}
	near := chart{label: "distance of samples of " + s.Name + " that follow each other", xLabel: "distance, in parts of the source", yLabel: "share of the pairs", fromZero: true,
		xText: short, yText: perCent, bars: s.Distances}
	if len(s.Uniform) > 0 {
		expected := curve{name: "uniform permutation", class: "s1"}
		for k, v := range s.Uniform {
			expected.x, expected.y = append(expected.x, (float64(k)+0.5)/float64(len(s.Uniform))), append(expected.y, v)
		}
		near.curves = []curve{expected}
	}
	return []figure{
		{"Share", "off what the weight asks for, by interval", []key{{"s0", "counted"}, {"band", "bound"}, {"s1", "random draws, ±2 deviations"}}, off.svg()},
		{"Parts", "of the source in stored order, each interval a column", []key{{"h0", "drawn less"}, {"h4", "as expected"}, {"h8", "more, 4 deviations"}}, heat(m.Name, m.Parts)},
		{"Neighbours", "how far samples that follow each other are apart", []key{{"bar", "counted"}, {"s1", "uniform"}}, near.svg()},
	}
}
