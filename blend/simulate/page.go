package simulate

import (
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"mula/internal/page"
	"mula/internal/quantity"
)

var (
	//go:embed page.html
	pageHTML string
	//go:embed page.css
	pageCSS string

	pages = page.New(page.Layout{Command: "mula simulate", Body: pageHTML, Style: pageCSS, HeatSteps: heatSteps})
)

// Limits of a page, so that its size does not grow with the plan.
const (
	maxFindings = 200
	maxRows     = 500
	maxCurves   = 8 // sources in one chart
	maxSources  = 12
)

// A document is the input of the template.
type document struct {
	Sum, Plan, Order, Assumptions                      string
	Findings                                           page.Findings
	ReadingText, MixtureText, ShuffleText, RepeatsText string
	StoreText                                          string
	Reading, Store, Mixture, Shuffle, Repeats          page.Table
	ReadingFigures, MixtureFigures                     []page.Figure
	Sources                                            []section
	MoreSources                                        int
}

// A section has the figures of one source.
type section struct {
	Title   string
	Figures []page.Figure
}

// WritePage writes the report as one self-contained HTML page. The page follows the reader's light
// or dark setting. Equal reports give equal bytes.
func (r *Report) WritePage(w io.Writer, title string) error {
	rd := &r.Reading
	doc := document{Plan: r.Plan, Order: r.Order, Assumptions: rd.Storage.figures()}
	for _, f := range r.Findings[:min(len(r.Findings), maxFindings)] {
		doc.Findings.List = append(doc.Findings.List, page.Finding{Level: string(f.Level), Where: f.Source,
			Message: f.Message})
	}
	doc.Findings.More = max(0, len(r.Findings)-maxFindings)
	doc.Sum = fmt.Sprintf("Positions %s to %s: %s steps of %s samples of %s+1 tokens, read by %s nodes with "+
		"%s ranks each.", quantity.Grouped(r.From), quantity.Grouped(r.To-1),
		quantity.Grouped(r.Steps), quantity.Grouped(int64(r.BatchSize)), quantity.Grouped(int64(r.SequenceLength)),
		quantity.Grouped(int64(rd.Nodes)), quantity.Grouped(int64(rd.RanksPerNode)))
	doc.ReadingText = fmt.Sprintf("The first node was simulated for %s steps: the blocks of files that hold "+
		"its samples, and the time that %s needs to read them.",
		quantity.Grouped(rd.Steps), rd.Storage.Name)
	doc.Reading = r.ReadingTable()
	doc.StoreText = fmt.Sprintf("The requests of mula's reader of object stores, if the shards are in one: the first "+
		"node in %s steps, with a cache of %s that its ranks share.", quantity.Grouped(r.Store.Steps),
		quantity.Bytes(r.Store.CacheLimit))
	doc.Store = r.StoreTable()
	doc.MixtureText = fmt.Sprintf("Positions were counted by source in %s intervals, one every %s steps, %s steps "+
		"per interval. The bound is the guarantee of the plan's order. "+
		"Random is the standard deviation of independent draws with the same weights.",
		quantity.Grouped(int64(len(r.Mixture.Intervals))), quantity.Grouped(r.Mixture.StepsOfInterval),
		quantity.Grouped(r.Mixture.StepsCounted))
	doc.Mixture = r.MixtureTable().Cut(maxRows)
	doc.ShuffleText = fmt.Sprintf("%s samples of %s steps were examined one by one. A pair is two consecutive samples "+
		"of a source. Brackets have the expected value for a uniform permutation of the source's windows.",
		quantity.Grouped(r.Shuffle.Samples), quantity.Grouped(r.Shuffle.Steps))
	if !r.Shuffle.Documents {
		doc.ShuffleText += " Document statistics are omitted: the shards were not read, or the order has no windows."
	}
	doc.Shuffle = r.ShuffleTable().Cut(maxRows)
	doc.RepeatsText = "Epochs are of the complete plan. Windows and documents are counted in the examined steps"
	if !r.Shuffle.Whole {
		doc.RepeatsText += ", which are a part of the range"
	}
	doc.RepeatsText += ". The reads of a document are the samples with one of its tokens, divided by the windows " +
		"with one. The tail is the tokens at the ends of shards outside all windows; packed samples have padding " +
		"instead."
	doc.Repeats = r.RepeatsTable().Cut(maxRows)
	doc.ReadingFigures = rd.figures()
	largest := make([]int, len(r.Mixture.Sources)) // sources, most samples first
	for i := range largest {
		largest[i] = i
	}
	slices.SortStableFunc(largest, func(a, b int) int {
		return cmp.Compare(r.Mixture.Sources[b].Share,
			r.Mixture.Sources[a].Share)
	})
	doc.MixtureFigures = r.mixtureFigures(largest[:min(len(largest), maxCurves)])
	doc.MoreSources = max(0, len(largest)-maxSources)
	for _, i := range largest[:min(len(largest), maxSources)] {
		doc.Sources = append(doc.Sources, section{r.Mixture.Sources[i].Name, r.sourceFigures(i)})
	}
	return pages.Write(w, page.Head{Title: title}, doc)
}

// figures describes the assumptions about the storage.
func (s *Storage) figures() string {
	total := "no limit for all nodes together"
	if s.TotalBandwidth > 0 {
		total = perSecond(s.TotalBandwidth) + " for all nodes together"
	}
	return fmt.Sprintf("%s: latency %s, %s per node, %s, requests of %s, a cache of %s per node", s.Name,
		quantity.Seconds(s.Latency), perSecond(s.NodeBandwidth), total,
		quantity.Bytes(s.RequestSize), quantity.Bytes(s.Cache))
}

// ReadingTable has the figures of storage, one per row.
func (r *Report) ReadingTable() page.Table {
	rd := &r.Reading
	t := page.Table{Heading: []string{"one step of one node", "value"}}
	row := func(name, format string, args ...any) {
		t.Rows = append(t.Rows, []string{name, fmt.Sprintf(format, args...)})
	}
	row("tokens of the samples", "%s", quantity.Bytes(int64(rd.TokenBytes)))
	row("requested, in complete requests", "%s in %.4g requests", quantity.Bytes(int64(rd.WantedBytes)), rd.Wanted)
	row("read from storage, not from the cache", "%s in %.4g requests", quantity.Bytes(int64(rd.Bytes)), rd.Requests)
	row("read time", "%s", quantity.Seconds(rd.ReadTime))
	row("read time, slowest 10 % of the steps", "%s", quantity.Seconds(rd.Busy.ReadTime))
	if rd.StepTime > 0 {
		row("compute time", "%s", quantity.Seconds(rd.StepTime))
		row("required bandwidth, slowest 10 %", "%s", perSecond(rd.Needed))
	}
	row("available bandwidth, slowest 10 %", "%s", perSecond(rd.Got))
	if rd.StepTime > 0 {
		row("wait for data, mean of all steps", "%s, with %d steps read ahead", quantity.Seconds(rd.Waited), stepsAhead)
		keeps := map[bool]string{true: "yes", false: "no"}[rd.KeepsUp]
		row("storage keeps up, slowest 10 %", "%s", keeps)
		kept := "no nodes"
		switch {
		case rd.NodesKept > 0:
			kept = quantity.Grouped(rd.NodesKept) + " nodes"
		case rd.NodesKept < 0:
			kept = "no limit found"
		}
		row("scales to", "%s", kept)
	}
	row("requests, all nodes, complete range", "%s", scaled(rd.AllRequests))
	row("time to first batch, warm cache of shard facts", "%s", quantity.Seconds(rd.FirstWarm))
	row("time to first batch, cold cache", "%s", quantity.Seconds(rd.FirstCold))
	row("all windows of the plan", "%s", quantity.Bytes(rd.DrawnBytes))
	row("cache size that keeps later epochs local", "%s", quantity.Bytes(rd.RepeatSize))
	return t
}

// StoreTable has the requests to an object store, one figure per row.
func (r *Report) StoreTable() page.Table {
	st := &r.Store
	mean := func(total int64) float64 { return float64(total) / float64(st.Steps) }
	fetched := func(requests, bytes float64) string {
		return fmt.Sprintf("%s in %.4g requests", quantity.Bytes(int64(bytes)), requests)
	}
	return page.Table{Heading: []string{"object store, one node", "value"}, Rows: [][]string{
		{"tokens of the samples, one step", quantity.Bytes(int64(mean(st.TokenBytes)))},
		{"fetched, one step", fetched(mean(st.Requests), mean(st.Bytes))},
		{"bytes fetched per byte of tokens", fmt.Sprintf("%.3g", st.amplification())},
		{"fetched again after removal from the cache", share(float64(st.Again) / float64(max(1, st.Bytes)))},
		{"cache", quantity.Bytes(st.CacheLimit)},
		{"opening the shards, all steps", fetched(float64(st.OpenRequests), float64(st.OpenBytes))},
	}}
}

// MixtureTable has a row for each source.
func (r *Report) MixtureTable() page.Table {
	t := page.Table{Heading: []string{"source", "planned", "share", "min", "max", "max deviation", "bound",
		"random", "unevenness"}}
	for _, m := range r.Mixture.Sources {
		uneven, bound := "-", "-"
		if m.Cells > 0 {
			uneven = fmt.Sprintf("%.2f", m.Unevenness)
		}
		if m.Bound > 0 {
			bound = fmt.Sprintf("%.2f", m.Bound)
		}
		t.Rows = append(t.Rows, []string{m.Name, share(m.Planned), share(m.Share), share(m.Least), share(m.Most),
			fmt.Sprintf("%.2f", m.Deviation), bound,
			fmt.Sprintf("%.1f", m.Random), uneven})
	}
	return t
}

// ShuffleTable has a row for each source.
func (r *Report) ShuffleTable() page.Table {
	t := page.Table{Heading: []string{"source", "pairs", "distance", "z-score", "parity", "adjacent", "same shard",
		"same document", "same document in a step", "same window in a step"}}
	for _, s := range r.Shuffle.Sources {
		count := func(c Count) string { return fmt.Sprintf("%s (%s)", quantity.Grouped(c.Seen), c.expectation()) }
		document := []string{"-", "-"}
		if r.Shuffle.Documents {
			document = []string{count(s.SameDocument), count(s.BatchDocument)}
		}
		apart := []string{"-", "-", "-", "-"} // if window numbers are not locations, or without a pair
		if len(s.Distances) > 0 {
			apart = []string{fmt.Sprintf("%.4f", s.Distance), "-", share(s.Parity), count(s.Adjacent)}
		}
		if len(s.Uniform) > 0 {
			apart[1] = fmt.Sprintf("%+.1f", s.DistanceOff)
		}
		t.Rows = append(t.Rows, []string{s.Name, quantity.Grouped(s.Pairs), apart[0], apart[1], apart[2], apart[3],
			count(s.SameShard), document[0], document[1], count(s.BatchWindow)})
	}
	return t
}

// RepeatsTable has a row for each source.
func (r *Report) RepeatsTable() page.Table {
	t := page.Table{Heading: []string{"source", "epochs", "repeats", "tail", "windows (times read)",
		"documents (times read)", "most read"}}
	for i, s := range r.Sources {
		sh := &r.Shuffle.Sources[i]
		var windows, documents []string
		for _, w := range sh.Windows {
			windows = append(windows, fmt.Sprintf("%s (%d)", quantity.Grouped(w.Windows), w.Times))
		}
		for _, d := range sh.Documents {
			if d.Documents > 0 {
				documents = append(documents, fmt.Sprintf("%s (%s)", quantity.Grouped(d.Documents), d.Passes))
			}
		}
		if len(windows) > 6 {
			windows = append(windows[:6:6], "…")
		}
		tail, most := "-", "-"
		if s.Packing != nil {
			tail = fmt.Sprintf("%s padding (%s)", quantity.Grouped(s.Packing.Padding), share(s.Packing.Share))
		} else if s.Tail >= 0 {
			tail = fmt.Sprintf("%s (%s)", quantity.Grouped(s.Tail), share(float64(s.Tail)/max(1, float64(s.Tokens))))
		}
		if sh.Most.Samples > 0 {
			most = fmt.Sprintf("%s samples", quantity.Grouped(sh.Most.Samples))
		}
		t.Rows = append(t.Rows, []string{s.Name, fmt.Sprintf("%.3f", s.Epochs), quantity.Grouped(s.Repeats), tail,
			cmp.Or(strings.Join(windows, ", "), "-"),
			cmp.Or(strings.Join(documents, ", "), "-"), most})
	}
	return t
}

func (rd *Reading) figures() []page.Figure {
	nodes := plot{label: "bandwidth of a node, by number of nodes", xLabel: "nodes (log scale)",
		yLabel: "bytes per second",
		log:    true, fromZero: true,
		xText: scaledShort, yText: scaledShort, marks: []float64{float64(rd.Nodes)}}
	got := curve{name: "available per node", class: "s0"}
	needed := curve{name: "required per node", class: "s1 dash"}
	for _, p := range rd.Scaling {
		got.x, got.y = append(got.x, float64(p.Nodes)), append(got.y, p.Got)
		needed.x, needed.y = append(needed.x, float64(p.Nodes)), append(needed.y, rd.Needed)
	}
	keys := []page.Key{{Class: "f0", Name: "available"}}
	if rd.StepTime > 0 {
		nodes.curves = append(nodes.curves, needed)
		keys = append(keys, page.Key{Class: "f1", Name: "required"})
	}
	nodes.curves = append(nodes.curves, got)
	cache := plot{label: "cache hit rate, by cache size", xLabel: "cache size (bytes)",
		yLabel: "hit rate", fromZero: true,
		xText: scaledShort, yText: perCent, marks: []float64{float64(rd.Storage.Cache)}}
	hits := curve{name: "cache hit rate", class: "s0"}
	for _, p := range rd.Cache {
		hits.x, hits.y = append(hits.x, float64(p.Size)), append(hits.y, p.Hits)
	}
	cache.curves = []curve{hits}
	return []page.Figure{
		{Title: "Bandwidth of a node", Text: fmt.Sprintf("if all nodes read the same amount; the dotted line is "+
			"at %s nodes", quantity.Grouped(int64(rd.Nodes))), Keys: keys, Chart: nodes.svg()},
		{Title: "Cache of a node", Text: fmt.Sprintf("least recently used, over the %s simulated steps",
			quantity.Grouped(rd.Steps)), Chart: cache.svg()},
	}
}

func (r *Report) mixtureFigures(sources []int) []page.Figure {
	c := plot{label: "share of each source along the range", xLabel: "step", yLabel: "share of the samples",
		fromZero: true, xText: scaledShort, yText: perCent}
	f := page.Figure{Title: "Share of each source", Text: "thin: counted; wide and pale: planned by the weights"}
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
		f.Keys = append(f.Keys, page.Key{Class: fmt.Sprintf("f%d", k), Name: counted.name})
	}
	f.Chart = c.svg()
	return []page.Figure{f}
}

// sourceFigures returns the charts of one source: the deviation of its share, the draws of its
// parts, and the distances of consecutive samples.
func (r *Report) sourceFigures(i int) []page.Figure {
	m, s := &r.Mixture.Sources[i], &r.Shuffle.Sources[i]
	off := plot{label: "samples of " + m.Name + " above the planned number", xLabel: "step",
		yLabel: "samples above plan", xText: scaledShort, yText: short}
	counted := curve{name: "counted", class: "s0"}
	var sides [2]curve
	random := [2]curve{{name: "two standard deviations of random draws", class: "s1 dash"},
		{name: "two standard deviations of random draws", class: "s1 dash"}}
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
	near := plot{label: "distance between consecutive samples of " + s.Name,
		xLabel: "distance, as a fraction of the source", yLabel: "share of the pairs", fromZero: true,
		xText: short, yText: perCent, bars: s.Distances}
	if len(s.Uniform) > 0 {
		expected := curve{name: "uniform permutation", class: "s1"}
		for k, v := range s.Uniform {
			expected.x, expected.y = append(expected.x, (float64(k)+0.5)/float64(len(s.Uniform))), append(expected.y, v)
		}
		near.curves = []curve{expected}
	}
	return []page.Figure{
		{Title: "Share", Text: "deviation from the planned number, by interval", Chart: off.svg(),
			Keys: []page.Key{{Class: "f0", Name: "counted"}, {Class: "band", Name: "bound"},
				{Class: "f1", Name: "random draws, ±2 deviations"}}},
		{Title: "Parts", Text: "ranges of the source in stored order; one column per interval",
			Chart: heat(m.Name, m.Parts),
			Keys: []page.Key{{Class: "h0", Name: "fewer samples"}, {Class: "h4", Name: "as expected"},
				{Class: "h8", Name: "more samples, 4 deviations"}}},
		{Title: "Neighbours", Text: "distance between consecutive samples", Chart: near.svg(),
			Keys: []page.Key{{Class: "f0", Name: "counted"}, {Class: "f1", Name: "uniform"}}},
	}
}
