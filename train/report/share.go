package report

import (
	"fmt"
	"html/template"
	"strings"

	"mula/internal/chart"
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
		right = max(right, 24+chart.TextWidth*float64(len([]rune(labels[i].text))))
	}
	d := newDrawing(c.label, c.width, max(c.height, float64(lineHeight*len(labels)+marginTop+marginFoot)))
	y := chart.NewAxis(0, 1, d.Height-marginFoot, marginTop, 5, false)
	for i, v := range y.Ticks {
		y.Labels[i] = percent(v, y.Ticks)
	}
	left := d.yAxis(y, "share of samples drawn", d.Width-right)
	x := chart.NewStepAxis(c.edges[0], c.edges[len(c.edges)-1], left, d.Width-right, int((d.Width-right-left)/75))
	base := make([]float64, len(c.shares))
	for i, name := range c.names {
		top := make([]float64, len(c.shares))
		for j := range c.shares {
			top[j] = base[j] + c.shares[j][i]
		}
		d.Add(`<path class="band %s" d="%s"><title>%s</title></path>`, fillClass(i), c.band(base, top, x, y), chart.Escape(name))
		base = top
	}
	if c.planned != nil {
		below := 0.0
		var path strings.Builder
		for _, p := range c.planned[:len(c.planned)-1] {
			below += p
			fmt.Fprintf(&path, "M%s %sH%s", chart.Number(x.From), chart.Number(y.At(below)), chart.Number(x.To))
		}
		d.Add(`<path class="border" d="%s"/>`, path.String())
	}
	d.xAxis(x, "")
	d.marks(c.marks, x)
	d.endLabels(labels, x, y)
	return d.end()
}

// band outlines the area between two step curves: to the right along the top, back along the
// bottom.
func (c *shareChart) band(bottom, top []float64, x, y *chart.Axis) string {
	var b strings.Builder
	n := len(top)
	fmt.Fprintf(&b, "M%s %s", chart.Number(x.At(c.edges[0])), chart.Number(y.At(top[0])))
	for j := range n {
		if j > 0 && chart.Number(y.At(top[j])) != chart.Number(y.At(top[j-1])) {
			fmt.Fprintf(&b, "H%sV%s", chart.Number(x.At(c.edges[j])), chart.Number(y.At(top[j])))
		}
	}
	fmt.Fprintf(&b, "H%sV%s", chart.Number(x.At(c.edges[n])), chart.Number(y.At(bottom[n-1])))
	for j := n - 1; j > 0; j-- {
		if chart.Number(y.At(bottom[j])) != chart.Number(y.At(bottom[j-1])) {
			fmt.Fprintf(&b, "H%sV%s", chart.Number(x.At(c.edges[j])), chart.Number(y.At(bottom[j-1])))
		}
	}
	fmt.Fprintf(&b, "H%sZ", chart.Number(x.At(c.edges[0])))
	return b.String()
}

func sum(values []float64) float64 {
	var s float64
	for _, v := range values {
		s += v
	}
	return s
}
