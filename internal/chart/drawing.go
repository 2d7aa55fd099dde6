// Package chart draws charts as SVG images: axes with round ticks, lines, bars and texts. The
// classes of the elements are defined by the style of the page. Text is 12 units high.
package chart

import (
	"fmt"
	"html/template"
	"slices"
	"strconv"
	"strings"
)

// TextWidth is an upper estimate of the mean width of a character.
const TextWidth = 6.7

// A Drawing collects the elements of one image.
type Drawing struct {
	strings.Builder
	Width, Height float64
}

// Add writes an element. An argument of type float64 is a coordinate. It has the verb %s, and
// [Number] formats it.
func (d *Drawing) Add(format string, args ...any) {
	texts := slices.Clone(args)
	for i, a := range args {
		if v, ok := a.(float64); ok {
			texts[i] = Number(v)
		}
	}
	fmt.Fprintf(d, format+"\n", texts...)
}

// Image returns the image. label describes it for screen readers. attributes are further attributes
// of the svg element, each with a space before it.
func (d *Drawing) Image(label, attributes string) template.HTML {
	return template.HTML(fmt.Sprintf(`<svg class="chart" viewBox="0 0 %s %s" role="img" aria-label="%s"%s>`,
		Number(d.Width), Number(d.Height), Escape(label), attributes) + "\n" + d.String() + "</svg>")
}

// Line draws a straight line.
func (d *Drawing) Line(class string, x1, y1, x2, y2 float64) {
	d.Add(`<path class="%s" d="M%s %sL%s %s"/>`, class, x1, y1, x2, y2)
}

// Vertical draws a vertical line with a tooltip.
func (d *Drawing) Vertical(class string, x, top, bottom float64, title string) {
	d.Add(`<path class="%s" d="M%s %sV%s"><title>%s</title></path>`, class, x, top, bottom,
		Escape(title))
}

// Bar draws a rectangle with a tooltip.
func (d *Drawing) Bar(class string, x, y, width, height float64, title string) {
	d.Add(`<rect class="%s" x="%s" y="%s" width="%s" height="%s"><title>%s</title></rect>`, class, x, y,
		width, height, Escape(title))
}

// An Anchor is the part of a text that is at the text's position.
type Anchor string

// The anchors.
const (
	Start  Anchor = "start"
	Middle Anchor = "middle"
	End    Anchor = "end"
)

// Text writes a text.
func (d *Drawing) Text(class string, x, y float64, anchor Anchor, text string) {
	d.Add(`<text class="%s" x="%s" y="%s" text-anchor="%s">%s</text>`, class, x, y, anchor, Escape(text))
}

// YLabel writes the name of the y axis from bottom to top at the left edge, with its middle at y.
func (d *Drawing) YLabel(y float64, text string) {
	middle := Number(y)
	d.Add(`<text class="axis" x="12" y="%s" text-anchor="middle" transform="rotate(-90 12 %s)">%s</text>`, middle,
		middle, Escape(text))
}

// Escape escapes a text for HTML.
func Escape(s string) string { return template.HTMLEscapeString(s) }

// Number formats a coordinate to a tenth of a unit.
func Number(v float64) string {
	s := strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0")
	if s == "-0" {
		return "0"
	}
	return s
}
