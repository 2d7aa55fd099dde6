// Package report renders the metrics of training runs as one self-contained HTML page.
//
// The page loads no other files: it contains its styles and charts (SVG), and a content security
// policy forbids everything else. JavaScript is optional and shows values at the pointer. The page
// follows the browser's light or dark setting and can be printed. The input is the files that
// package train writes. The same runs and options produce the same bytes.
//
// The size of the page does not grow with the length of a run: curves are thinned to the resolution
// of a screen, and thinned raw values keep every spike. Memory does not grow with the steps, which
// are merged to at most 8,192 spans while the file is read. It grows with the evaluations, resumes,
// rollbacks and skipped steps.
package report

import (
	_ "embed"
	"fmt"
	"io"
	"strings"

	"mula/internal/page"
)

var (
	//go:embed page.html
	pageHTML string
	//go:embed page.css
	pageCSS string
	//go:embed page.js
	pageJS string

	pages = page.New(page.Layout{Command: "mula report", Body: pageHTML, Style: pageCSS, Script: pageJS,
		HeatSteps: heatSteps})
)

// Options of [Write].
type Options struct {
	Title  string // heading of the page; default: the names of the runs
	Reload int    // seconds after which a browser reloads the page, whose file may have changed; 0: never
}

// document is the data of the template.
type document struct {
	Summary summary
	Configs *summary // differences of the configurations; nil for a single run, or without configurations
	Loss    []page.Figure
	Keys    []page.Key // the colours of runs, if there are several
	Runs    []section
}

// A section is the part of the page about one run.
type section struct {
	Name    string
	Notes   []string
	Sources []sourceRow
	Figures []group
	Config  []configRow
}

// A group is a row of figures under a heading.
type group struct {
	Title   string
	Figures []page.Figure
}

// Write renders the runs as one HTML page. The loss curves of all runs share a chart. Each run has
// a section with the other charts.
func Write(w io.Writer, opts Options, runs ...*Run) error {
	if len(runs) == 0 {
		return fmt.Errorf("report: no run given")
	}
	names := distinctNames(runs)
	doc := document{
		Summary: summarise(names, runs),
		Configs: differences(names, runs),
		Loss:    lossFigures(names, runs),
	}
	head := page.Head{Title: opts.Title, Reload: opts.Reload}
	if head.Title == "" {
		head.Title = "Training report: " + strings.Join(names, ", ")
	}
	for i, run := range runs {
		if len(runs) > 1 {
			doc.Keys = append(doc.Keys, page.Key{Class: fillClass(i), Name: names[i]})
		}
		doc.Runs = append(doc.Runs, sectionOf(names[i], run))
	}
	return pages.Write(w, head, doc)
}

// distinctNames returns the names of the runs, with numbers for directories of the same name.
func distinctNames(runs []*Run) []string {
	names := make([]string, len(runs))
	taken := make(map[string]bool)
	for i, run := range runs {
		name := run.Name
		for n := 2; taken[name]; n++ {
			name = fmt.Sprintf("%s (%d)", run.Name, n)
		}
		taken[name] = true
		names[i] = name
	}
	return names
}
