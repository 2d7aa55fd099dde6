package report

import (
	"fmt"
	"html/template"
	"strings"
)

// A shareChart draws the share of each source in every range of steps, as bands that add up to 1.
type shareChart struct {
	label         string
	width, height float64
	names         []string
	edges         []float64   // the first steps of columns, and the end of the last column
	shares        [][]float64 // column × name; a column adds up to 1, or to 0 without samples
	planned       []float64   // by name; nil: none
	marks         []mark
}

func (c *shareChart) svg() template.HTML {
	if len(c.shares) == 0 || len(c.names) == 0 {
		return ""
	}
	// The label of a band is next to the last column with samples.
	last := c.shares[len(c.shares)-1]
	for i := len(c.shares) - 1; i >= 0 && sum(last) == 0; i-- {
		last = c.shares[i]
	}
	labels := make([]endLabel, len(c.names))
	right := 0.0
	below := 0.0
	for i, name := range c.names {
		labels[i] = endLabel{text: cut(name) + " " + percent(last[i], nil), name: name,
			at: point{c.edges[len(c.edges)-1], below + last[i]/2}, colour: i}
		below += last[i]
		right = max(right, 24+textWidth*float64(len([]rune(labels[i].text))))
	}
	d := newDrawing(c.label, c.width, max(c.height, float64(lineHeight*len(labels)+marginTop+marginFoot)))
	y := newAxis(0, 1, d.height-marginFoot, marginTop, 5, false)
	for i, v := range y.ticks {
		y.labels[i] = percent(v, y.ticks)
	}
	left := d.yAxis(y, "share of samples drawn", d.width-right)
	x := newStepAxis(c.edges[0], c.edges[len(c.edges)-1], left, d.width-right, int((d.width-right-left)/75))
	base := make([]float64, len(c.shares))
	for i, name := range c.names {
		top := make([]float64, len(c.shares))
		for j := range c.shares {
			top[j] = base[j] + c.shares[j][i]
		}
		d.add(`<path class="band %s" d="%s"><title>%s</title></path>`, fillClass(i), c.band(base, top, x, y), esc(name))
		base = top
	}
	if c.planned != nil {
		below := 0.0
		var path strings.Builder
		for _, p := range c.planned[:len(c.planned)-1] {
			below += p
			fmt.Fprintf(&path, "M%s %sH%s", num(x.from), num(y.at(below)), num(x.to))
		}
		d.add(`<path class="border" d="%s"/>`, path.String())
	}
	d.xAxis(x, "")
	d.marks(c.marks, x)
	d.endLabels(labels, x, y)
	return d.end()
}

// band outlines the area between two step curves: to the right along the top, back along the
// bottom.
func (c *shareChart) band(bottom, top []float64, x, y *axis) string {
	var b strings.Builder
	n := len(top)
	fmt.Fprintf(&b, "M%s %s", num(x.at(c.edges[0])), num(y.at(top[0])))
	for j := range n {
		if j > 0 && num(y.at(top[j])) != num(y.at(top[j-1])) {
			fmt.Fprintf(&b, "H%sV%s", num(x.at(c.edges[j])), num(y.at(top[j])))
		}
	}
	fmt.Fprintf(&b, "H%sV%s", num(x.at(c.edges[n])), num(y.at(bottom[n-1])))
	for j := n - 1; j > 0; j-- {
		if num(y.at(bottom[j])) != num(y.at(bottom[j-1])) {
			fmt.Fprintf(&b, "H%sV%s", num(x.at(c.edges[j])), num(y.at(bottom[j-1])))
		}
	}
	fmt.Fprintf(&b, "H%sZ", num(x.at(c.edges[0])))
	return b.String()
}

func sum(values []float64) float64 {
	var s float64
	for _, v := range values {
		s += v
	}
	return s
}
