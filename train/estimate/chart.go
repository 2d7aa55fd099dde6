package estimate

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"

	"mula/internal/quantity"
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
	partColours = []string{"#0072b2", "#56b4e9", "#8a6fb0", "#c8c8c8", "#d55e00", "#009e73", "#222222", "#e69f00"}
)

// A svg collects the elements of one image. Text is 12 units high.
type svg struct {
	strings.Builder
}

func (d *svg) line(x1, y1, x2, y2 float64, class string) {
	fmt.Fprintf(d, `<path class="%s" d="M%s %sL%s %s"/>`+"\n", class, coordinate(x1), coordinate(y1), coordinate(x2),
		coordinate(y2))
}

func (d *svg) text(x, y float64, anchor, class, text string) {
	fmt.Fprintf(d, `<text class="%s" x="%s" y="%s" text-anchor="%s">%s</text>`+"\n", class, coordinate(x),
		coordinate(y), anchor, html.EscapeString(text))
}

func coordinate(v float64) string { return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64) }

// Chart draws estimates of one model on one machine with different schemes. It returns a
// self-contained SVG image with the parts of each step time. If there are curves, a chart of
// efficiency by number of ranks is above it.
func Chart(results []*Result, curves []Curve) []byte {
	const width, left, right = 860.0, 70.0, 150.0
	var d svg
	r := results[0]
	l := r.Layout
	y := 24.0
	d.text(14, y, "start", "title", fmt.Sprintf("%s on %s", r.Model, r.Machine.Name))
	y += 18
	d.text(14, y, "start", "note", fmt.Sprintf("ep %d, pp %d, micro-batches of %d × %d tokens, dispatch %s, "+
		"recompute %s; bytes of %s", l.EP, l.PP, l.microBatch(), l.SequenceLength,
		l.Dispatch, l.Recompute, r.Trainer.Name))
	y += 15
	d.text(14, y, "start", "note",
		"An estimate. The output of mula estimate lists the assumptions and their effect on the result.")
	y += 30
	if len(curves) > 0 {
		y = d.efficiency(r, curves, y, left, width-right) + 46
	}
	y = d.steps(results, y, left, width-right)
	return []byte(fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %s %s" width="%s" height="%s" role="img" aria-label="%s">`+"\n", coordinate(width), coordinate(y),
		coordinate(width), coordinate(y), html.EscapeString(r.Model+": step time and scaling")) +
		"<style>text{font:12px sans-serif;fill:#222}.title{font-size:16px;font-weight:bold}.head{font-weight:bold}" +
		".note{fill:#666;font-size:11px}" +
		".grid{stroke:#ddd}.base{stroke:#888}path,polyline{fill:none}</style>\n" +
		fmt.Sprintf(`<rect width="%s" height="%s" fill="#fff"/>`+"\n", coordinate(width), coordinate(y)) + d.String() +
		"</svg>\n")
}

// efficiency draws the curves below y, and returns their lower edge.
func (d *svg) efficiency(r *Result, curves []Curve, y, left, right float64) float64 {
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
	d.text(14, y, "start", "head", fmt.Sprintf("Tokens per second and rank, relative to %s ranks; %s",
		quantity.Grouped(first), batch))
	top := y + 16
	at := func(e float64) float64 { return top + (1-e)/(1-bottom)*height }
	across := func(ranks int) float64 {
		if last == first {
			return left
		}
		return left + math.Log(float64(ranks)/float64(first))/math.Log(float64(last)/float64(first))*(right-left)
	}
	for i := range int(math.Round((1-bottom)/step)) + 1 {
		e := 1 - float64(i)*step
		d.line(left, at(e), right, at(e), "grid")
		d.text(left-8, at(e)+4, "end", "", fmt.Sprintf("%.0f %%", 100*e))
	}
	for _, p := range curves[0].Points {
		d.line(across(p.Ranks), top+height, across(p.Ranks), top+height+5, "base")
		d.text(across(p.Ranks), top+height+19, "middle", "", quantity.Grouped(p.Ranks))
	}
	d.line(left, top+height, right, top+height, "base")
	d.text((left+right)/2, top+height+36, "middle", "", "ranks")
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
			points = append(points, coordinate(across(p.Ranks))+","+coordinate(at(p.Efficiency)))
			fmt.Fprintf(d,
				`<circle cx="%s" cy="%s" r="3" fill="%s"><title>%s at %d ranks: %.1f %%</title></circle>`+"\n",
				coordinate(across(p.Ranks)), coordinate(at(p.Efficiency)),
				curveColours[c.Scheme], c.Scheme, p.Ranks, 100*p.Efficiency)
		}
		fmt.Fprintf(d, `<polyline points="%s" stroke="%s" stroke-width="2" stroke-dasharray="%s"/>`+"\n",
			strings.Join(points, " "), curveColours[c.Scheme], curveDashes[c.Scheme])
		d.text(right+12, labels[i], "start", "", fmt.Sprintf("%s %.1f %%", c.Scheme,
			100*c.Points[len(c.Points)-1].Efficiency))
	}
	if mark {
		for _, at := range [][2]float64{{across(publishedTo), at(publishedScaling)}, {right - 168, top + 14}} {
			fmt.Fprintf(d, `<polygon points="%s,%s %s,%s %s,%s %s,%s" fill="#222"/>`+"\n", coordinate(at[0]),
				coordinate(at[1]-6), coordinate(at[0]+6), coordinate(at[1]),
				coordinate(at[0]), coordinate(at[1]+6), coordinate(at[0]-6), coordinate(at[1]))
		}
		d.text(right-156, top+18, "start", "", "published: around 90 %")
	}
	return top + height + 36
}

// steps draws the step of each result as a bar of its parts, and returns the lower edge.
func (d *svg) steps(results []*Result, y, left, right float64) float64 {
	longest := 0.0
	for _, r := range results {
		longest = max(longest, r.StepTime)
	}
	ranks := results[0].Layout.Ranks()
	d.text(14, y, "start", "head", fmt.Sprintf("Seconds of a step at %s ranks (expert_dp %d)", quantity.Grouped(ranks),
		results[0].Layout.DP))
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
		fmt.Fprintf(d, `<rect x="%s" y="%s" width="11" height="11" fill="%s"/>`+"\n", coordinate(x), coordinate(y),
			partColours[i])
		d.text(x+15, y+10, "start", "", p.Name)
		x += 32 + 6.5*float64(len(p.Name))
	}
	y += 24
	for _, r := range results {
		x := left
		d.text(left-8, y+17, "end", "", string(r.Layout.Optimizer))
		for i, p := range Parts() {
			w := p.Of(r.Time) / longest * (right - left)
			if w > 0 {
				fmt.Fprintf(d,
					`<rect x="%s" y="%s" width="%s" height="24" fill="%s"><title>%s: %.4g s</title></rect>`+"\n",
					coordinate(x), coordinate(y), coordinate(max(w, 0.1)), partColours[i],
					p.Name, p.Of(r.Time))
			}
			x += w
		}
		d.text(x+10, y+17, "start", "", fmt.Sprintf("%.3g s, MFU %.1f %%", r.StepTime, 100*r.MFU))
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
