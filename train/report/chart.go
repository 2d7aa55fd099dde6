package report

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// Sizes in units of the drawing, which is scaled to its width on the page. Text is 12 units high.
const (
	textWidth  = 6.7 // upper estimate of the mean width of a character
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
	y := newAxis(y0, y1, d.height-marginFoot, marginTop, int((d.height-60)/38), log)
	if c.percent {
		for i, v := range y.ticks {
			y.labels[i] = percent(v, y.ticks)
		}
	}
	yLabel := c.yLabel
	if log {
		yLabel += " (log scale)"
	}
	right := 14.0
	for _, l := range labels {
		right = max(right, 24+textWidth*float64(len([]rune(l.text))))
	}
	left := d.yAxis(y, yLabel, d.width-right)
	x := newStepAxis(x0, x1, left, d.width-right, int((d.width-right-left)/75))
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
				value := exact(p.y, 3)
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
	return strconv.FormatFloat(v*100, 'f', min(decimals, 6), 64) + " %"
}

func cut(name string) string {
	if r := []rune(name); len(r) > labelRunes {
		return string(r[:labelRunes-1]) + "…"
	}
	return name
}

// A drawing collects the elements of one SVG image.
type drawing struct {
	strings.Builder
	width, height float64
	attributes    string // of the svg element, for the script that shows values
	label         string
}

func newDrawing(label string, width, height float64) *drawing {
	return &drawing{label: label, width: width, height: height}
}

func (d *drawing) end() template.HTML {
	return template.HTML(fmt.Sprintf(`<svg class="chart" viewBox="0 0 %s %s" role="img" aria-label="%s"%s>`,
		num(d.width), num(d.height), esc(d.label), d.attributes) +
		"\n" + d.String() + "</svg>")
}

func (d *drawing) add(format string, args ...any) { fmt.Fprintf(d, format+"\n", args...) }

func esc(s string) string { return template.HTMLEscapeString(s) }

// num writes a coordinate to a tenth of a unit.
func num(v float64) string {
	s := strconv.FormatFloat(v, 'f', 1, 64)
	s = strings.TrimSuffix(s, ".0")
	if s == "-0" {
		return "0"
	}
	return s
}

// yAxis draws grid lines up to the right edge of the plot, their labels and the name of the axis.
// It returns the plot's left edge.
func (d *drawing) yAxis(y *axis, label string, right float64) (left float64) {
	widest := 0
	for _, l := range y.labels {
		widest = max(widest, len([]rune(l)))
	}
	left = 30 + textWidth*float64(widest)
	for i, v := range y.ticks {
		d.add(`<path class="grid" d="M%s %sH%s"/><text class="tick" x="%s" y="%s" text-anchor="end">%s</text>`,
			num(left), num(y.at(v)), num(right), num(left-6), num(y.at(v)+4), esc(y.labels[i]))
	}
	middle := num((y.from + y.to) / 2)
	d.add(`<text class="axis" x="12" y="%s" text-anchor="middle" transform="rotate(-90 12 %s)">%s</text>`, middle,
		middle, esc(label))
	return left
}

func (d *drawing) xAxis(x *axis, label string) {
	base := d.height - marginFoot
	d.add(`<path class="base" d="M%s %sH%s"/>`, num(x.from), num(base), num(x.to))
	for i, v := range x.ticks {
		d.add(`<path class="base" d="M%s %sv4"/><text class="tick" x="%s" y="%s" text-anchor="middle">%s</text>`,
			num(x.at(v)), num(base), num(x.at(v)), num(base+17), esc(x.labels[i]))
	}
	if label == "" {
		label = "step"
	}
	d.add(`<text class="axis" x="%s" y="%s" text-anchor="middle">%s</text>`, num((x.from+x.to)/2), num(base+34),
		esc(label))
}

// hover writes the attributes with which the script converts coordinates to values.
func (d *drawing) hover(x, y *axis, percent bool) {
	scale := "linear"
	if y.log {
		scale = "log"
	}
	unit := ""
	if percent {
		unit = ` data-percent=""`
	}
	d.attributes = fmt.Sprintf(` data-x="%g %g %s %s" data-y="%g %g %s %s" data-scale="%s"%s`,
		x.lo, x.hi, num(x.from), num(x.to), y.lo, y.hi, num(y.from), num(y.to), scale, unit)
}

// marks draws the marks. The first mark of each kind has its word if the word fits.
func (d *drawing) marks(marks []mark, x *axis) {
	const room = 70 // width of a word
	named := map[markKind]bool{}
	var taken []float64
	for _, m := range marks {
		at := x.at(m.step)
		text := ""
		if !named[m.kind] && !slices.ContainsFunc(taken, func(t float64) bool { return math.Abs(t-at) < room }) {
			named[m.kind] = true
			taken = append(taken, at)
			anchor := "start"
			if at > x.to-60 {
				anchor = "end"
			}
			text = fmt.Sprintf(`<text class="tick" x="%s" y="%d" text-anchor="%s">%s</text>`, num(at), marginTop-6,
				anchor, m.kind)
		}
		d.add(`<g class="%s"><title>%s</title><path d="M%s %dV%s"/>%s</g>`, markClass[m.kind], esc(m.label), num(at),
			marginTop-3, num(d.height-marginFoot), text)
	}
}

func (d *drawing) curve(s *curveSeries, x, y *axis) {
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
		if !finite(p.y) || y.log && p.y <= 0 {
			finish()
			continue
		}
		at := num(x.at(p.x)) + " " + num(y.at(p.y))
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
		name = fmt.Sprintf(` data-name="%s"`, esc(s.name))
	}
	d.add(`<path class="%s %s"%s d="%s"/>`, class, strokeClass(s.colour, !s.planned), name, path.String())
	if !s.dots && len(s.points) > 1 {
		return
	}
	for _, p := range s.points {
		if finite(p.y) && !(y.log && p.y <= 0) {
			d.add(`<circle class="dot %s" cx="%s" cy="%s" r="3.5"/>`, fillClass(s.colour), num(x.at(p.x)),
				num(y.at(p.y)))
		}
	}
}

// endLabels writes the names of the curves next to their ends, with a line to the end. It moves
// labels that would overlap.
func (d *drawing) endLabels(labels []endLabel, x, y *axis) {
	for i := range labels {
		labels[i].y = y.at(labels[i].at.y)
	}
	spread(labels, marginTop, d.height-marginFoot)
	for _, l := range labels {
		fromX, fromY := x.at(l.at.x), y.at(l.at.y)
		class := strokeClass(l.colour, false)
		if fromX < x.to-40 { // the curve ends early: the line must not look like a part of the curve
			class += " far"
		}
		d.add(`<path class="leader %s" d="M%s %sL%s %s"/><text class="name" x="%s" y="%s">%s<title>%s</title></text>`,
			class, num(fromX+2), num(fromY), num(x.to+12), num(l.y), num(x.to+16), num(l.y+4), esc(l.text), esc(l.name))
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
