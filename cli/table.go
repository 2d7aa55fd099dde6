package cli

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"mula/internal/quantity"
)

// table prints rows under a heading. Numbers are aligned right, and text left.
type table struct {
	heading []string
	rows    [][]string
}

// noNumber are cells that are allowed in a column of numbers.
var noNumber = map[string]bool{"": true, "-": true, "none": true, "paused": true}

func newTable(heading ...string) *table { return &table{heading: heading} }

func (t *table) row(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		switch v := c.(type) {
		case string:
			row[i] = v
		case int:
			row[i] = quantity.Grouped(int64(v))
		case int64:
			row[i] = quantity.Grouped(v)
		case float64:
			row[i] = fmt.Sprintf("%.4g", v)
		default:
			row[i] = fmt.Sprint(v)
		}
	}
	t.rows = append(t.rows, row)
}

func (t *table) write(w io.Writer) {
	width := make([]int, len(t.heading))
	numeric := make([]bool, len(t.heading))
	for i, h := range t.heading {
		width[i] = utf8.RuneCountInString(h)
		numeric[i] = len(t.rows) > 0
	}
	for _, row := range t.rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
			numeric[i] = numeric[i] && (noNumber[cell] || strings.ContainsAny(cell[:1], "-+.0123456789"))
		}
	}
	for _, row := range append([][]string{t.heading}, t.rows...) {
		var b strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i > 0 {
				b.WriteString("  ")
			}
			if numeric[i] {
				b.WriteString(pad + cell)
			} else {
				b.WriteString(cell + pad)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
}
