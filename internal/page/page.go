// Package page makes HTML pages that need nothing beside them: styles, charts (SVG) and the script,
// if there is one, are inside, and a content security policy forbids the rest. They follow the
// reader's light or dark setting, and print. The same content gives the same bytes.
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

// A Layout is what all pages of one command have.
type Layout struct {
	Command string // the command, as in "mula check"; with --json it has what a page leaves out
	// template of what is below the heading; it may use "findings", "table", "figures" and
	// "figure", of the types of this package
	Body      string
	Style     string // after that of all pages and the colours
	Script    string // empty: none
	HeatSteps int    // colours of heat maps on each side of the neutral one: classes h0 to h(2·HeatSteps); 0: none
}

// A Template makes pages of one layout.
type Template struct {
	style  template.CSS
	script template.JS
	hash   string // of the script
	frame  *template.Template
}

// New reads a layout. It panics if the body is no template: layouts are part of the program.
func New(l Layout) *Template {
	t := &Template{style: template.CSS(colours(l.HeatSteps) + style + l.Style), script: template.JS(l.Script)}
	if l.Script != "" {
		hash := sha256.Sum256([]byte(l.Script))
		t.hash = base64.StdEncoding.EncodeToString(hash[:])
	}
	t.frame = template.Must(template.New("page").Funcs(template.FuncMap{"command": func() string { return l.Command }}).Parse(frame))
	template.Must(t.frame.New("body").Parse(l.Body))
	return t
}

// A Head is what a page says of itself.
type Head struct {
	Title  string // and heading
	Reload int    // seconds after which a browser loads the page again; 0: never
}

// Write writes a page with that content of its body.
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

// Findings are what "findings" shows.
type Findings struct {
	List []Finding
	More int // left out
}

// A Finding is a sentence about what was found.
type Finding struct {
	Level   string // error, warning or note
	Where   string // a source or a file; may be empty
	Message string
}

// A Table is text in rows, whose first cells name them: what "table" shows.
type Table struct {
	Heading []string
	Rows    [][]string
	More    int // rows left out
}

// Cut leaves out rows beyond the first most.
func (t Table) Cut(most int) Table {
	more := max(0, len(t.Rows)-most)
	t.Rows, t.More = t.Rows[:len(t.Rows)-more], t.More+more
	return t
}

// A Figure is a chart with its heading and a sentence on what it shows: what "figure" shows, and
// "figures" several of; these leave out those without a chart.
type Figure struct {
	Title, Text string
	Keys        []Key
	Chart       template.HTML
}

// A Key says what a colour stands for.
type Key struct{ Class, Name string }
