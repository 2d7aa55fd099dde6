package simulate

import (
	"fmt"
	"html/template"
	"math"
	"strings"

	"mula/internal/page"
)

// Sizes of a chart in units of the drawing, which is scaled to the available width. Text is 12
// units high.
const (
	chartWidth, chartHeight = 560.0, 230.0
	chartLeft, chartTop     = 70.0, 10.0
	chartFoot               = 42.0
	chartRight              = 14.0
)

// A curve is one line of a chart. class sets its colour.
type curve struct {
	name, class string
	x, y        []float64
}

// A chart has linear axes, or a logarithmic x axis with base 2.
type chart struct {
	label          string // description for screen readers
	xLabel, yLabel string
	xText, yText   func(float64) string
	log            bool      // logarithmic x axis
	band           *[2]curve // the area between two curves
	bars           []float64 // heights of bars of equal width from x = 0 to 1
	curves         []curve   // drawn in order
	marks          []float64 // vertical lines
	fromZero       bool
}

// A drawing is a chart in progress: its text and the ranges of its axes.
type drawing struct {
	strings.Builder
	x0, x1, y0, y1 float64
	log            bool
}

func (d *drawing) x(v float64) float64 {
	lo, hi := d.x0, d.x1
	if d.log {
		lo, hi, v = math.Log(lo), math.Log(hi), math.Log(v)
	}
	return chartLeft + (v-lo)/(hi-lo)*(chartWidth-chartLeft-chartRight)
}

func (d *drawing) y(v float64) float64 {
	base := chartHeight - chartFoot
	return base - (v-d.y0)/(d.y1-d.y0)*(base-chartTop)
}

// svg draws the chart. It returns "" if there is nothing to draw.
func (c *chart) svg() template.HTML {
	d := &drawing{x0: math.Inf(1), x1: math.Inf(-1), y0: math.Inf(1), y1: math.Inf(-1), log: c.log}
	all := c.curves
	if c.band != nil {
		all = append(append([]curve(nil), all...), c.band[0], c.band[1])
	}
	for _, l := range all {
		for i, y := range l.y {
			d.x0, d.x1 = min(d.x0, l.x[i]), max(d.x1, l.x[i])
			d.y0, d.y1 = min(d.y0, y), max(d.y1, y)
		}
	}
	for _, b := range c.bars {
		d.x0, d.x1, d.y0, d.y1 = min(d.x0, 0), max(d.x1, 1), min(d.y0, b), max(d.y1, b)
	}
	if d.y0 > d.y1 {
		return ""
	}
	if c.fromZero {
		d.y0 = min(d.y0, 0)
	}
	if pad := (d.y1 - d.y0) * 0.05; pad > 0 {
		d.y1 += pad
		if d.y0 != 0 || !c.fromZero {
			d.y0 -= pad
		}
	} else {
		pad = max(1e-9, math.Abs(d.y1)*0.1)
		d.y0, d.y1 = d.y0-pad, d.y1+pad
	}
	if d.x1 <= d.x0 {
		if d.x1 = d.x0 + 1; c.log {
			d.x1 = 2 * d.x0
		}
	}
	fmt.Fprintf(d, `<svg viewBox="0 0 %.0f %.0f" role="img" aria-label="%s">`, chartWidth, chartHeight,
		template.HTMLEscapeString(c.label))
	base := chartHeight - chartFoot
	for _, v := range page.Ticks(d.y0, d.y1, 5) {
		fmt.Fprintf(d,
			`<line class="grid" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/><text x="%.1f" y="%.1f" text-anchor="end">%s</text>`,
			chartLeft, chartWidth-chartRight, d.y(v), d.y(v), chartLeft-5, d.y(v)+4, c.yText(v))
	}
	var xs []float64
	if c.log {
		for v, every := d.x0, math.Pow(2, math.Ceil(math.Log2(d.x1/d.x0)/8)); v <= d.x1*1.0001; v *= every {
			xs = append(xs, v)
		}
	} else {
		xs = page.Ticks(d.x0, d.x1, 6)
	}
	for _, v := range xs {
		fmt.Fprintf(d, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`, d.x(v), base+16, c.xText(v))
	}
	fmt.Fprintf(d, `<line class="base" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, chartLeft, chartWidth-chartRight,
		base, base)
	fmt.Fprintf(d, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`, (chartLeft+chartWidth)/2, chartHeight-6,
		template.HTMLEscapeString(c.xLabel))
	fmt.Fprintf(d, `<text x="12" y="%.1f" text-anchor="middle" transform="rotate(-90 12 %.1f)">%s</text>`,
		(base+chartTop)/2, (base+chartTop)/2, template.HTMLEscapeString(c.yLabel))
	for i, b := range c.bars {
		wide := (d.x(1) - d.x(0)) / float64(len(c.bars))
		fmt.Fprintf(d, `<rect class="f0" x="%.1f" y="%.1f" width="%.1f" height="%.1f"><title>%s</title></rect>`,
			d.x(0)+wide*(float64(i)+0.1), d.y(b), 0.8*wide, base-d.y(b), share(b))
	}
	if c.band != nil {
		var b strings.Builder
		for i, x := range c.band[0].x {
			fmt.Fprintf(&b, "%s%.1f %.1f", move(i), d.x(x), d.y(c.band[0].y[i]))
		}
		for i := len(c.band[1].x) - 1; i >= 0; i-- {
			fmt.Fprintf(&b, "L%.1f %.1f", d.x(c.band[1].x[i]), d.y(c.band[1].y[i]))
		}
		fmt.Fprintf(d, `<path class="band" d="%sZ"><title>%s</title></path>`, b.String(),
			template.HTMLEscapeString(c.band[0].name))
	}
	for _, m := range c.marks {
		if m >= d.x0 && m <= d.x1 {
			fmt.Fprintf(d, `<line class="mark" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"><title>%s</title></line>`,
				d.x(m), d.x(m), chartTop, base, c.xText(m))
		}
	}
	for _, l := range c.curves {
		var b strings.Builder
		for i, x := range l.x {
			fmt.Fprintf(&b, "%s%.1f %.1f", move(i), d.x(x), d.y(l.y[i]))
		}
		if len(l.x) == 1 {
			b.WriteString("h4") // make a single point visible
		}
		fmt.Fprintf(d, `<path class="curve %s" d="%s"><title>%s</title></path>`, l.class, b.String(),
			template.HTMLEscapeString(l.name))
	}
	d.WriteString("</svg>")
	return template.HTML(d.String())
}

func move(i int) string {
	if i == 0 {
		return "M"
	}
	return "L"
}

// heatSteps is the number of colours on each side of neutral. Each colour is one standard deviation
// of random draws.
const heatSteps = 4

// heatColumns is the maximum number of columns; with more intervals, several are added up.
const heatColumns = 100

// heat draws how often each part of a source was drawn in each interval. x is the interval, y the
// part, with the first windows at the top.
func heat(name string, counts [][]int64) template.HTML {
	if len(counts) == 0 {
		return ""
	}
	group := (len(counts) + heatColumns - 1) / heatColumns
	columns := (len(counts) + group - 1) / group
	wide, high := (chartWidth-chartLeft-chartRight)/float64(columns), (chartHeight-chartFoot-chartTop)/parts
	var paths [2*heatSteps + 1]strings.Builder
	for x := range columns {
		var sums [parts]int64
		var total int64
		for _, interval := range counts[x*group : min(len(counts), (x+1)*group)] {
			for k, n := range interval {
				sums[k] += n
				total += n
			}
		}
		if total == 0 {
			continue
		}
		mean := float64(total) / parts
		for k, n := range sums {
			z := (float64(n) - mean) / math.Sqrt(mean*(1-1.0/parts))
			level := int(math.Round(min(heatSteps, max(-heatSteps, z)))) + heatSteps
			fmt.Fprintf(&paths[level], "M%.1f %.1fh%.2fv%.2fh-%.2fz", chartLeft+float64(x)*wide,
				chartTop+float64(k)*high, wide, high, wide)
		}
	}
	var b strings.Builder
	base := chartHeight - chartFoot
	fmt.Fprintf(&b, `<svg viewBox="0 0 %.0f %.0f" role="img" aria-label="%s">`, chartWidth, chartHeight,
		template.HTMLEscapeString("how often each part of "+name+" is drawn along the plan"))
	for level := range paths {
		if paths[level].Len() > 0 {
			fmt.Fprintf(&b, `<path class="h%d" d="%s"/>`, level, paths[level].String())
		}
	}
	fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="middle">intervals of the range, first to last</text>`,
		(chartLeft+chartWidth)/2, chartHeight-6)
	fmt.Fprintf(&b,
		`<text x="%.1f" y="%.1f" text-anchor="end">first</text><text x="%.1f" y="%.1f" text-anchor="end">last</text>`,
		chartLeft-5, chartTop+12, chartLeft-5, base-2)
	fmt.Fprintf(&b,
		`<text x="12" y="%.1f" text-anchor="middle" transform="rotate(-90 12 %.1f)">part of the source</text></svg>`,
		(base+chartTop)/2, (base+chartTop)/2)
	return template.HTML(b.String())
}
