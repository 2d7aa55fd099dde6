package simulate

import (
	"fmt"
	"html/template"
	"math"
	"strings"

	"mula/internal/chart"
)

// Sizes of a chart in units of the drawing, which is scaled to the available width. Text is 12
// units high.
const (
	chartWidth, chartHeight = 560.0, 230.0
	chartLeft, chartTop     = 70.0, 10.0
	chartFoot               = 42.0
	chartBase               = chartHeight - chartFoot // the lower end of the y axis
	chartRight              = 14.0
)

// A curve is one line of a chart. class sets its colour.
type curve struct {
	name, class string
	x, y        []float64
}

// A plot has linear axes, or a logarithmic x axis with base 2.
type plot struct {
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

// svg draws the chart. It returns "" if there is nothing to draw.
func (c *plot) svg() template.HTML {
	x0, x1, y0, y1 := math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)
	all := c.curves
	if c.band != nil {
		all = append(append([]curve(nil), all...), c.band[0], c.band[1])
	}
	for _, l := range all {
		for i, y := range l.y {
			x0, x1, y0, y1 = min(x0, l.x[i]), max(x1, l.x[i]), min(y0, y), max(y1, y)
		}
	}
	for _, b := range c.bars {
		x0, x1, y0, y1 = min(x0, 0), max(x1, 1), min(y0, b), max(y1, b)
	}
	if y0 > y1 {
		return ""
	}
	if c.fromZero {
		y0 = min(y0, 0)
	}
	if pad := (y1 - y0) * 0.05; pad > 0 {
		y1 += pad
		if y0 != 0 || !c.fromZero {
			y0 -= pad
		}
	} else {
		pad = max(1e-9, math.Abs(y1)*0.1)
		y0, y1 = y0-pad, y1+pad
	}
	if x1 <= x0 {
		if x1 = x0 + 1; c.log {
			x1 = 2 * x0
		}
	}
	x := chart.Axis{Lo: x0, Hi: x1, From: chartLeft, To: chartWidth - chartRight, Log: c.log}
	y := chart.Axis{Lo: y0, Hi: y1, From: chartBase, To: chartTop}
	d := chart.Drawing{Width: chartWidth, Height: chartHeight}
	for _, v := range chart.Ticks(y0, y1, 5) {
		d.Line("grid", x.From, y.At(v), x.To, y.At(v))
		d.Text("tick", x.From-5, y.At(v)+4, chart.End, c.yText(v))
	}
	var xs []float64
	if c.log {
		for v, every := x0, math.Pow(2, math.Ceil(math.Log2(x1/x0)/8)); v <= x1*1.0001; v *= every {
			xs = append(xs, v)
		}
	} else {
		xs = chart.Ticks(x0, x1, 6)
	}
	for _, v := range xs {
		d.Text("tick", x.At(v), chartBase+16, chart.Middle, c.xText(v))
	}
	d.Line("base", x.From, chartBase, x.To, chartBase)
	d.Text("axis", (chartLeft+chartWidth)/2, chartHeight-6, chart.Middle, c.xLabel)
	d.YLabel((chartBase+chartTop)/2, c.yLabel)
	for i, b := range c.bars {
		wide := (x.At(1) - x.At(0)) / float64(len(c.bars))
		d.Bar("f0", x.At(0)+wide*(float64(i)+0.1), y.At(b), 0.8*wide, chartBase-y.At(b), share(b))
	}
	if c.band != nil {
		path := c.band[0].path(&x, &y)
		for i := len(c.band[1].x) - 1; i >= 0; i-- {
			path += "L" + chart.Number(x.At(c.band[1].x[i])) + " " + chart.Number(y.At(c.band[1].y[i]))
		}
		d.Add(`<path class="band" d="%sZ"><title>%s</title></path>`, path, chart.Escape(c.band[0].name))
	}
	for _, m := range c.marks {
		if m >= x0 && m <= x1 {
			d.Vertical("mark", x.At(m), chartTop, chartBase, c.xText(m))
		}
	}
	for _, l := range c.curves {
		path := l.path(&x, &y)
		if len(l.x) == 1 {
			path += "h4" // make a single point visible
		}
		d.Add(`<path class="curve %s" d="%s"><title>%s</title></path>`, l.class, path, chart.Escape(l.name))
	}
	return d.Image(c.label, "")
}

// path returns the path from the first to the last point of a curve.
func (l *curve) path(x, y *chart.Axis) string {
	var b strings.Builder
	command := "M"
	for i := range l.x {
		b.WriteString(command + chart.Number(x.At(l.x[i])) + " " + chart.Number(y.At(l.y[i])))
		command = "L"
	}
	return b.String()
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
	d := chart.Drawing{Width: chartWidth, Height: chartHeight}
	for level := range paths {
		if paths[level].Len() > 0 {
			d.Add(`<path class="h%d" d="%s"/>`, level, paths[level].String())
		}
	}
	d.Text("axis", (chartLeft+chartWidth)/2, chartHeight-6, chart.Middle, "intervals of the range, first to last")
	d.Text("tick", chartLeft-5, chartTop+12, chart.End, "first")
	d.Text("tick", chartLeft-5, chartBase-2, chart.End, "last")
	d.YLabel((chartBase+chartTop)/2, "part of the source")
	return d.Image("how often each part of "+name+" is drawn along the plan", "")
}
