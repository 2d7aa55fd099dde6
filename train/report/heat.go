package report

import (
	"fmt"
	"html/template"
	"math"
	"strings"

	"mula/internal/chart"
)

// A heatMap draws numbers around 1 as colours: neutral at 1, one hue below 1 and another above. The
// scale is logarithmic, from ¼ to 4, or from 1/16 to 16 if values exceed this range.
type heatMap struct {
	label      string
	width      float64
	rowName    string          // what a row is
	row        func(i int) int // number of a row
	values     [][]float64     // row × column; NaN is left blank
	notes      []string        // one for each row, written at its end; nil: none
	noteHead   string
	titles     []string // tooltips of the rows
	xLabel     string
	xLo, xHi   float64 // numbers at the left edge of the first column and at the right edge of the last
	overSteps  bool    // columns are ranges of steps; otherwise columns are numbered from 0
	scaleLabel string
}

func (m *heatMap) svg() template.HTML {
	if len(m.values) == 0 {
		return ""
	}
	rowHeight := min(max(320/float64(len(m.values)), 7), 20)
	noteWidth := 14.0
	for _, n := range m.notes {
		noteWidth = max(noteWidth, 14+chart.TextWidth*float64(len([]rune(n))))
	}
	if m.notes != nil {
		noteWidth = max(noteWidth, 14+chart.TextWidth*float64(len([]rune(m.noteHead))))
	}
	top := 54.0
	d := newDrawing(m.label, m.width, top+rowHeight*float64(len(m.values))+marginFoot)
	left := 30 + chart.TextWidth*float64(len(fmt.Sprint(m.row(len(m.values)-1))))
	right := d.Width - noteWidth
	octaves := m.octaves()
	d.scale(left, octaves, m.scaleLabel)

	every := max(1, int(math.Ceil(13/rowHeight))) // some rows have names if rows are lower than text
	for r := range m.values {
		y := top + rowHeight*float64(r)
		title := ""
		if m.titles != nil {
			title = "<title>" + chart.Escape(m.titles[r]) + "</title>"
		}
		d.Add(`<g>%s%s`, title, m.cells(r, octaves, left, right, y, rowHeight))
		if r%every == 0 {
			d.Add(`<text class="tick" x="%s" y="%s" text-anchor="end">%d</text>`, left-6, y+rowHeight/2+4, m.row(r))
			if m.notes != nil {
				d.Add(`<text class="tick" x="%s" y="%s">%s</text>`, right+8, y+rowHeight/2+4, chart.Escape(m.notes[r]))
			}
		}
		d.Add(`</g>`)
	}
	if m.notes != nil {
		d.Add(`<text class="axis" x="%s" y="%s">%s</text>`, right+8, top-8, chart.Escape(m.noteHead))
	}
	d.YLabel(top+rowHeight*float64(len(m.values))/2, m.rowName)
	if m.overSteps {
		d.xAxis(chart.NewStepAxis(m.xLo, m.xHi, left, right, int((right-left)/75)), m.xLabel)
	} else {
		m.columnNumbers(d, left, right)
	}
	return d.end()
}

// cells draws the cells of a row. Adjacent cells of the same colour are one rectangle.
func (m *heatMap) cells(r, octaves int, left, right, y, height float64) string {
	var b strings.Builder
	row := m.values[r]
	at := func(c int) float64 { return left + (right-left)*float64(c)/float64(len(row)) }
	for c := 0; c < len(row); {
		class := heatClass(row[c], octaves)
		end := c + 1
		for end < len(row) && heatClass(row[end], octaves) == class {
			end++
		}
		if class >= 0 {
			fmt.Fprintf(&b, `<path class="h%d" d="M%s %sH%sv%sH%sz"/>`, class, chart.Number(at(c)), chart.Number(y), chart.Number(at(end)),
				chart.Number(height-0.6), chart.Number(at(c)))
		}
		c = end
	}
	return b.String()
}

// columnNumbers writes the numbers of columns below their centres.
func (m *heatMap) columnNumbers(d *drawing, left, right float64) {
	columns := len(m.values[0])
	base := d.Height - marginFoot
	every := 1
	for _, e := range []int{1, 2, 4, 8, 16, 32, 64, 128, 256} {
		every = e
		if float64(columns)/float64(e)*30 < right-left {
			break
		}
	}
	for c := 0; c < columns; c += every {
		x := left + (right-left)*(float64(c)+0.5)/float64(columns)
		d.Add(`<text class="tick" x="%s" y="%s" text-anchor="middle">%d</text>`, x, base+15, c)
	}
	d.Text("axis", (left+right)/2, base+34, chart.Middle, m.xLabel)
}

// octaves returns the extent of the scale to each side, in powers of 2.
func (m *heatMap) octaves() int {
	for _, row := range m.values {
		for _, v := range row {
			if v > 4.75 { // more than half a colour beyond the shorter scale
				return 4
			}
		}
	}
	return 2
}

// heatClass returns the number of a value's colour, or -1 for none.
func heatClass(v float64, octaves int) int {
	if math.IsNaN(v) {
		return -1
	}
	if v <= 0 {
		return 0
	}
	step := math.Round(math.Log2(v) * heatSteps / float64(octaves))
	return int(min(max(step, -heatSteps), heatSteps)) + heatSteps
}

// scale draws the key of the colours.
func (d *drawing) scale(left float64, octaves int, label string) {
	const cell, y = 15, 6
	for i := range 2*heatSteps + 1 {
		d.Add(`<path class="h%d" d="M%s %dh%dv10h-%dz"/>`, i, left+float64(i*cell), y, cell, cell)
	}
	texts := []string{"≤ ¼", "½", "1", "2", "≥ 4"}
	if octaves == 4 {
		texts = []string{"≤ 1/16", "¼", "1", "4", "≥ 16"}
	}
	for i, text := range texts {
		d.Add(`<text class="tick" x="%s" y="%d" text-anchor="middle">%s</text>`,
			left+float64(i*heatSteps/2*cell)+cell/2.0, y+24, text)
	}
	d.Add(`<text class="axis" x="%s" y="%d">%s</text>`, left+float64((2*heatSteps+1)*cell)+14, y+10, chart.Escape(label))
}
