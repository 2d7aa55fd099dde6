package report

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"sort"
	"strings"

	"mula/internal/chart"
	"mula/internal/quantity"
)

// Sizes in units of the drawing, which is scaled to its width on the page. Text is 12 units high.
const (
	lineHeight = 14
	labelRunes = 22 // longer names are cut in labels; the tooltip has the full name
	marginTop  = 18
	marginFoot = 42
)

// A curveSeries is one line of a [lineChart].
type curveSeries struct {
	name    string
	points  []point
	colour  int  // number in the palette
	faint   bool // thin and pale, without label: raw values behind a smoothed line
	planned bool // dashed, without label: a planned value
	quiet   bool // without label
	dots    bool // points are far apart and drawn as dots
}

// A mark is a vertical line at a step where something happened to the run.
type mark struct {
	step  float64
	label string
	kind  markKind
}

// A markKind is the kind of an event: the word next to the first mark of its kind.
type markKind string

const (
	resumed    markKind = "resumed"
	skipped    markKind = "skipped"
	rolledBack markKind = "rolled back"
)

var markClass = map[markKind]string{resumed: "resume", skipped: "skip", rolledBack: "back"}

// A lineChart draws curves over steps.
type lineChart struct {
	label         string // describes the chart for screen readers
	width, height float64
	xLabel        string // default: step
	yLabel        string // quantity, with its unit
	fromZero      bool   // the y axis starts at 0
	logIfWide     bool   // the y axis is logarithmic when the values span more than two orders of magnitude
	percent       bool   // values are shares
	series        []curveSeries
	marks         []mark
	from, until   float64 // the step axis starts at from, skips earlier steps, and extends to until or further
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// svg draws the chart. It returns "" without values.
func (c lineChart) svg() template.HTML {
	x0, x1, y0, y1 := c.from, c.until, math.Inf(1), math.Inf(-1)
	series := slices.Clone(c.series)
	c.series = series
	for i := range series {
		s := &series[i]
		s.points = slices.DeleteFunc(slices.Clone(s.points), func(p point) bool { return p.x < c.from })
		for _, p := range s.points {
			if finite(p.y) {
				x1, y0, y1 = max(x1, p.x), min(y0, p.y), max(y1, p.y)
			}
		}
	}
	if y0 > y1 {
		return ""
	}
	c.marks = slices.DeleteFunc(slices.Clone(c.marks), func(m mark) bool { return m.step < c.from })
	for _, m := range c.marks {
		x1 = max(x1, m.step)
	}
	log := c.logIfWide && wideSpread(y0, y1)
	if !log {
		if c.fromZero {
			y0 = min(y0, 0)
		}
		pad := (y1 - y0) * 0.04
		if y0 != 0 || !c.fromZero {
			y0 -= pad
		}
		y1 += pad
	}
	labels := c.labels()
	d := newDrawing(c.label, c.width, max(c.height, float64(lineHeight*len(labels)+marginTop+marginFoot)))
	y := chart.NewAxis(y0, y1, d.Height-marginFoot, marginTop, int((d.Height-60)/38), log)
	if c.percent {
		for i, v := range y.Ticks {
			y.Labels[i] = percent(v, y.Ticks)
		}
	}
	yLabel := c.yLabel
	if log {
		yLabel += " (log scale)"
	}
	right := 14.0
	for _, l := range labels {
		right = max(right, 24+chart.TextWidth*float64(len([]rune(l.text))))
	}
	left := d.yAxis(y, yLabel, d.Width-right)
	x := chart.NewStepAxis(x0, x1, left, d.Width-right, int((d.Width-right-left)/75))
	d.xAxis(x, c.xLabel)
	d.hover(x, y, c.percent)
	d.marks(c.marks, x)
	for i := range c.series {
		d.curve(&c.series[i], x, y)
	}
	d.endLabels(labels, x, y)
	return d.end()
}

// wideSpread reports whether values from lo to hi span more than two orders of magnitude.
func wideSpread(lo, hi float64) bool { return lo > 0 && hi/lo > 100 }

// endLabel names a curve at its end, which is easier to read than a legend.
type endLabel struct {
	text, name string
	at         point // the end of the curve
	colour     int
	y          float64 // position of the label
}

func (c lineChart) labels() []endLabel {
	var out []endLabel
	for _, s := range c.series {
		if s.faint || s.planned || s.quiet || s.name == "" {
			continue
		}
		for _, p := range slices.Backward(s.points) {
			if finite(p.y) {
				value := quantity.Exact(p.y, 3)
				if c.percent {
					value = percent(p.y, nil)
				}
				out = append(out, endLabel{text: cut(s.name) + " " + value, name: s.name, at: p, colour: s.colour})
				break
			}
		}
	}
	return out
}

// percent formats a fraction as a percentage. The number of decimals depends on ticks, if any.
func percent(v float64, ticks []float64) string {
	decimals := 1
	if len(ticks) > 1 {
		decimals = max(0, int(math.Ceil(-math.Log10((ticks[1]-ticks[0])*100)-1e-9)))
	}
	return quantity.FixedPercent(v, min(decimals, 6))
}

func cut(name string) string {
	if r := []rune(name); len(r) > labelRunes {
		return string(r[:labelRunes-1]) + "…"
	}
	return name
}

// A drawing is a chart of a run.
type drawing struct {
	chart.Drawing
	label      string
	attributes string // of the svg element, for the script that shows values
}

func newDrawing(label string, width, height float64) *drawing {
	return &drawing{Drawing: chart.Drawing{Width: width, Height: height}, label: label}
}

func (d *drawing) end() template.HTML { return d.Image(d.label, d.attributes) }

// yAxis draws grid lines up to the right edge of the plot, their labels and the name of the axis.
// It returns the plot's left edge.
func (d *drawing) yAxis(y *chart.Axis, label string, right float64) (left float64) {
	widest := 0
	for _, l := range y.Labels {
		widest = max(widest, len([]rune(l)))
	}
	left = 30 + chart.TextWidth*float64(widest)
	for i, v := range y.Ticks {
		d.Add(`<path class="grid" d="M%s %sH%s"/><text class="tick" x="%s" y="%s" text-anchor="end">%s</text>`,
			left, y.At(v), right, left-6, y.At(v)+4, chart.Escape(y.Labels[i]))
	}
	d.YLabel((y.From+y.To)/2, label)
	return left
}

func (d *drawing) xAxis(x *chart.Axis, label string) {
	base := d.Height - marginFoot
	d.Add(`<path class="base" d="M%s %sH%s"/>`, x.From, base, x.To)
	for i, v := range x.Ticks {
		d.Add(`<path class="base" d="M%s %sv4"/><text class="tick" x="%s" y="%s" text-anchor="middle">%s</text>`,
			x.At(v), base, x.At(v), base+17, chart.Escape(x.Labels[i]))
	}
	if label == "" {
		label = "step"
	}
	d.Text("axis", (x.From+x.To)/2, base+34, chart.Middle, label)
}

// hover writes the attributes with which the script converts coordinates to values.
func (d *drawing) hover(x, y *chart.Axis, percent bool) {
	scale := "linear"
	if y.Log {
		scale = "log"
	}
	unit := ""
	if percent {
		unit = ` data-percent=""`
	}
	d.attributes = fmt.Sprintf(` data-x="%g %g %s %s" data-y="%g %g %s %s" data-scale="%s"%s`,
		x.Lo, x.Hi, chart.Number(x.From), chart.Number(x.To), y.Lo, y.Hi,
		chart.Number(y.From), chart.Number(y.To), scale, unit)
}

// marks draws the marks. The first mark of each kind has its word if the word fits.
func (d *drawing) marks(marks []mark, x *chart.Axis) {
	const room = 70 // width of a word
	named := map[markKind]bool{}
	var taken []float64
	for _, m := range marks {
		at := x.At(m.step)
		text := ""
		if !named[m.kind] && !slices.ContainsFunc(taken, func(t float64) bool { return math.Abs(t-at) < room }) {
			named[m.kind] = true
			taken = append(taken, at)
			anchor := "start"
			if at > x.To-60 {
				anchor = "end"
			}
			text = fmt.Sprintf(`<text class="tick" x="%s" y="%d" text-anchor="%s">%s</text>`, chart.Number(at), marginTop-6,
				anchor, m.kind)
		}
		d.Add(`<g class="%s"><title>%s</title><path d="M%s %dV%s"/>%s</g>`, markClass[m.kind], chart.Escape(m.label), at,
			marginTop-3, d.Height-marginFoot, text)
	}
}

func (d *drawing) curve(s *curveSeries, x, y *chart.Axis) {
	var path strings.Builder
	open, alone := false, false // within a range without gaps; with one point so far
	var last string
	finish := func() {
		if alone {
			path.WriteString("L" + last) // a line of no length is drawn as a dot
		}
		open, alone = false, false
	}
	for _, p := range s.points {
		if !finite(p.y) || y.Log && p.y <= 0 {
			finish()
			continue
		}
		at := chart.Number(x.At(p.x)) + " " + chart.Number(y.At(p.y))
		switch {
		case !open:
			path.WriteString("M" + at)
			open, alone = true, true
		case at != last:
			path.WriteString("L" + at)
			alone = false
		}
		last = at
	}
	finish()
	class := "line"
	switch {
	case s.faint:
		class = "line faint"
	case s.planned:
		class = "line planned"
	}
	name := ""
	if !s.faint && !s.planned && s.name != "" {
		name = fmt.Sprintf(` data-name="%s"`, chart.Escape(s.name))
	}
	d.Add(`<path class="%s %s"%s d="%s"/>`, class, strokeClass(s.colour, !s.planned), name, path.String())
	if !s.dots && len(s.points) > 1 {
		return
	}
	for _, p := range s.points {
		if finite(p.y) && !(y.Log && p.y <= 0) {
			d.Add(`<circle class="dot %s" cx="%s" cy="%s" r="3.5"/>`, fillClass(s.colour), x.At(p.x),
				y.At(p.y))
		}
	}
}

// endLabels writes the names of the curves next to their ends, with a line to the end. It moves
// labels that would overlap.
func (d *drawing) endLabels(labels []endLabel, x, y *chart.Axis) {
	for i := range labels {
		labels[i].y = y.At(labels[i].at.y)
	}
	spread(labels, marginTop, d.Height-marginFoot)
	for _, l := range labels {
		fromX, fromY := x.At(l.at.x), y.At(l.at.y)
		class := strokeClass(l.colour, false)
		if fromX < x.To-40 { // the curve ends early: the line must not look like a part of the curve
			class += " far"
		}
		d.Add(`<path class="leader %s" d="M%s %sL%s %s"/><text class="name" x="%s" y="%s">%s<title>%s</title></text>`,
			class, fromX+2, fromY, x.To+12, l.y, x.To+16, l.y+4, chart.Escape(l.text), chart.Escape(l.name))
	}
}

// spread moves labels apart to at least the height of a line. It keeps their order and stays
// between top and bottom.
func spread(labels []endLabel, top, bottom float64) {
	sort.SliceStable(labels, func(i, j int) bool { return labels[i].y < labels[j].y })
	for i := range labels {
		least := top
		if i > 0 {
			least = labels[i-1].y + lineHeight
		}
		labels[i].y = max(labels[i].y, least)
	}
	for i := len(labels) - 1; i >= 0; i-- {
		most := bottom
		if i < len(labels)-1 {
			most = labels[i+1].y - lineHeight
		}
		labels[i].y = min(labels[i].y, most)
	}
}
