package estimate

import (
	"fmt"
	"math"
	"strings"

	"mula/internal/chart"
	"mula/internal/quantity"

	"mula/xpu/comm"
)

// A Curve is the scaling of a run with one scheme.
type Curve struct {
	Scheme Scheme  `json:"optimizer"`
	Points []Point `json:"points"`
}

// Colours of parts and curves. Readers with red-green colour blindness can distinguish them (M.
// Okabe and K. Ito, "Color Universal Design", 2008). Curves also have different dashes.
var (
	curveColours = map[Scheme]string{EPSO: "#0072b2", SO: "#d55e00", Unsharded: "#5b5b5b"}
	curveDashes  = map[Scheme]string{EPSO: "", SO: "7 4", Unsharded: "2 3"}
	// of [Parts]
	partColours = []string{"#0072b2", "#f0e442", "#56b4e9", "#cc79a7", "#a6761d", "#8a6fb0", "#c8c8c8", "#d55e00",
		"#009e73", "#222222", "#e69f00"}
)

// Chart draws estimates of one model on one machine with different schemes. It returns a
// self-contained SVG image with the parts of each step time. If there are curves, a chart of
// efficiency by number of ranks is above it.
func Chart(results []*Result, curves []Curve) []byte {
	const width, left, right = 860.0, 70.0, 150.0
	var d chart.Drawing
	r := results[0]
	l := r.Layout
	y := 24.0
	d.Text("title", 14, y, chart.Start, fmt.Sprintf("%s on %s", r.Model, r.Machine.Name))
	y += 18
	d.Text("note", 14, y, chart.Start, fmt.Sprintf("ep %d, pp %d, micro-batches of %d × %d tokens, dispatch %s, "+
		"recompute %s; bytes of %s", l.Size(comm.EP), l.Size(comm.PP), l.microBatch(), l.SequenceLength,
		l.Dispatch, l.Recompute, r.Trainer.Name))
	y += 15
	d.Text("note", 14, y, chart.Start,
		"An estimate. The output of mula estimate lists the assumptions and their effect on the result.")
	y += 30
	if len(curves) > 0 {
		y = efficiency(&d, r, curves, y, left, width-right) + 46
	}
	y = steps(&d, results, y, left, width-right)
	image := chart.Drawing{Width: width, Height: y}
	image.Add("<style>text{font:12px sans-serif;fill:#222}.title{font-size:16px;font-weight:bold}" +
		".head{font-weight:bold}.note{fill:#666;font-size:11px}.grid{stroke:#ddd}" +
		".base{stroke:#888}path,polyline{fill:none}</style>")
	image.Add(`<rect width="%s" height="%s" fill="#fff"/>`, width, y)
	image.WriteString(d.String())
	return []byte(image.Image(r.Model+": step time and scaling", fmt.Sprintf(
		` xmlns="http://www.w3.org/2000/svg" width="%s" height="%s"`, chart.Number(width), chart.Number(y))) + "\n")
}

// efficiency draws the curves below y, and returns their lower edge.
func efficiency(d *chart.Drawing, r *Result, curves []Curve, y, left, right float64) float64 {
	const height = 230.0
	low := 1.0
	for _, c := range curves {
		for _, p := range c.Points {
			low = min(low, p.Efficiency)
		}
	}
	first, last := curves[0].Points[0].Ranks, curves[0].Points[len(curves[0].Points)-1].Ranks
	mark := r.Model == "mula-220b-a10b" && r.Machine.Name == Aurora.Name && first <= publishedFrom &&
		last >= publishedTo
	if mark {
		low = min(low, publishedScaling)
	}
	step := 0.02
	for _, s := range []float64{0.05, 0.1, 0.2, 0.5} {
		if (1-low)/step > 6 {
			step = s
		}
	}
	bottom := max(0, math.Floor((low-1e-9)/step)*step)
	batch := fmt.Sprintf("every data rank has %s per step", sequences(r.Layout.Sequences()))
	if last > first && curves[0].Points[0].BatchSize == curves[0].Points[len(curves[0].Points)-1].BatchSize {
		batch = fmt.Sprintf("all ranks together have %s per step", sequences(r.Layout.BatchSize))
	}
	d.Text("head", 14, y, chart.Start, fmt.Sprintf("Tokens per second and rank, relative to %s ranks; %s",
		quantity.Grouped(first), batch))
	top := y + 16
	at := (&chart.Axis{Lo: 1, Hi: bottom, From: top, To: top + height}).At
	x := chart.Axis{Lo: float64(first), Hi: float64(last), From: left, To: right, Log: true}
	across := func(ranks int) float64 {
		if last == first {
			return left
		}
		return x.At(float64(ranks))
	}
	for i := range int(math.Round((1-bottom)/step)) + 1 {
		e := 1 - float64(i)*step
		d.Line("grid", left, at(e), right, at(e))
		d.Text("", left-8, at(e)+4, chart.End, quantity.FixedPercent(e, 0))
	}
	for _, p := range curves[0].Points {
		d.Line("base", across(p.Ranks), top+height, across(p.Ranks), top+height+5)
		d.Text("", across(p.Ranks), top+height+19, chart.Middle, quantity.Grouped(p.Ranks))
	}
	d.Line("base", left, top+height, right, top+height)
	d.Text("", (left+right)/2, top+height+36, chart.Middle, "ranks")
	labels := make([]float64, len(curves)) // y of the curves' names, in the order of the curves' ends, a line apart
	for i, c := range curves {
		labels[i] = at(c.Points[len(c.Points)-1].Efficiency) + 4
		for j := range i {
			if gap := labels[i] - labels[j]; math.Abs(gap) < 15 {
				labels[i] = labels[j] + math.Copysign(15, gap)
			}
		}
	}
	for i, c := range curves {
		var points []string
		for _, p := range c.Points {
			points = append(points, chart.Number(across(p.Ranks))+","+chart.Number(at(p.Efficiency)))
			d.Add(`<circle cx="%s" cy="%s" r="3" fill="%s"><title>%s</title></circle>`, across(p.Ranks), at(p.Efficiency),
				curveColours[c.Scheme], fmt.Sprintf("%s at %d ranks: %.1f %%", c.Scheme, p.Ranks, 100*p.Efficiency))
		}
		d.Add(`<polyline points="%s" stroke="%s" stroke-width="2" stroke-dasharray="%s"/>`,
			strings.Join(points, " "), curveColours[c.Scheme], curveDashes[c.Scheme])
		d.Text("", right+12, labels[i], chart.Start, fmt.Sprintf("%s %.1f %%", c.Scheme,
			100*c.Points[len(c.Points)-1].Efficiency))
	}
	if mark {
		for _, at := range [][2]float64{{across(publishedTo), at(publishedScaling)}, {right - 168, top + 14}} {
			d.Add(`<polygon points="%s,%s %s,%s %s,%s %s,%s" fill="#222"/>`, at[0],
				at[1]-6, at[0]+6, at[1], at[0], at[1]+6, at[0]-6, at[1])
		}
		d.Text("", right-156, top+18, chart.Start, "published: around 90 %")
	}
	return top + height + 36
}

// steps draws the step of each result as a bar of its parts, and returns the lower edge.
func steps(d *chart.Drawing, results []*Result, y, left, right float64) float64 {
	longest := 0.0
	for _, r := range results {
		longest = max(longest, r.StepTime)
	}
	ranks := results[0].Layout.Ranks()
	d.Text("head", 14, y, chart.Start, fmt.Sprintf("Seconds of a step at %s ranks (expert_dp %d)",
		quantity.Grouped(ranks), results[0].Layout.Size(comm.ExpertDP)))
	y += 14
	x := left
	for i, p := range Parts() { // the legend
		used := false
		for _, r := range results {
			used = used || p.Of(r.Time) > 0
		}
		if !used {
			continue
		}
		width := 32 + 6.5*float64(len(p.Name))
		if x+width > right+130 {
			x, y = left, y+16
		}
		d.Add(`<rect x="%s" y="%s" width="11" height="11" fill="%s"/>`, x, y,
			partColours[i])
		d.Text("", x+15, y+10, chart.Start, p.Name)
		x += width
	}
	y += 24
	for _, r := range results {
		x := left
		d.Text("", left-8, y+17, chart.End, string(r.Layout.Optimizer))
		for i, p := range Parts() {
			w := p.Of(r.Time) / longest * (right - left)
			if w > 0 {
				d.Add(`<rect x="%s" y="%s" width="%s" height="24" fill="%s"><title>%s</title></rect>`, x, y, max(w, 0.1),
					partColours[i], fmt.Sprintf("%s: %.4g s", p.Name, p.Of(r.Time)))
			}
			x += w
		}
		d.Text("", x+10, y+17, chart.Start, fmt.Sprintf("%.3g s, MFU %.1f %%", r.StepTime, 100*r.MFU))
		y += 34
	}
	return y + 10
}

// sequences returns a number of sequences with its unit.
func sequences(n int) string {
	if n == 1 {
		return "1 sequence"
	}
	return quantity.Grouped(n) + " sequences"
}
