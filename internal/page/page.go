// Package page writes self-contained HTML pages: styles, charts (SVG) and the optional script are
// inline, and a content security policy forbids everything else. Pages follow the browser's light
// or dark setting and can be printed. The same content produces the same bytes.
package page

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"io"
)

var (
	//go:embed page.html
	frame string
	//go:embed page.css
	style string
)

// A Layout is the common part of all pages of one command.
type Layout struct {
	Command string // the command, as in "mula check"; its --json output has the rows that a page omits
	// template of the content below the heading; it may use the templates "findings", "table",
	// "figures" and "figure" with the types of this package
	Body      string
	Style     string // CSS that follows the common style and the colours
	Script    string // "" for no script
	HeatSteps int    // heat map colours on each side of the neutral colour: classes h0 to h(2·HeatSteps); 0: none
}

// A Template writes pages of one layout.
type Template struct {
	style  template.CSS
	script template.JS
	hash   string // of the script
	frame  *template.Template
}

// New parses a layout. It panics if the body is not a valid template, because layouts are part of
// the program.
func New(l Layout) *Template {
	t := &Template{style: template.CSS(colours(l.HeatSteps) + style + l.Style), script: template.JS(l.Script)}
	if l.Script != "" {
		hash := sha256.Sum256([]byte(l.Script))
		t.hash = base64.StdEncoding.EncodeToString(hash[:])
	}
	t.frame = template.Must(template.New("page").
		Funcs(template.FuncMap{"command": func() string { return l.Command }}).Parse(frame))
	template.Must(t.frame.New("body").Parse(l.Body))
	return t
}

// A Head has the metadata of a page.
type Head struct {
	Title  string // also the heading
	Reload int    // seconds after which the browser reloads the page; 0: never
}

// Write writes a page whose body template receives body.
func (t *Template) Write(w io.Writer, h Head, body any) error {
	var out bytes.Buffer
	err := t.frame.Execute(&out, struct {
		Head
		Style      template.CSS
		Script     template.JS
		ScriptHash string
		Body       any
	}{h, t.style, t.script, t.hash, body})
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	if _, err := out.WriteTo(w); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	return nil
}

// Findings is the argument of the template "findings".
type Findings struct {
	List []Finding
	More int // number of omitted findings
}

// A Finding is one problem or remark.
type Finding struct {
	Level   string // error, warning or note
	Where   string // a source or a file; may be empty
	Message string
}

// A Table is the argument of the template "table": rows of text. The first cell of a row is its
// name.
type Table struct {
	Heading []string
	Rows    [][]string
	More    int // number of omitted rows
}

// Cut omits all rows after the first most.
func (t Table) Cut(most int) Table {
	more := max(0, len(t.Rows)-most)
	t.Rows, t.More = t.Rows[:len(t.Rows)-more], t.More+more
	return t
}

// A Figure is a chart with a heading and an explanation. It is the argument of the template
// "figure". The template "figures" receives several figures and omits those without a chart.
type Figure struct {
	Title, Text string
	Keys        []Key
	Chart       template.HTML
}

// A Key is a legend entry: the class of a colour and the name of the series.
type Key struct{ Class, Name string }
