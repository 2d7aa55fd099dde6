// Package report renders the metrics of training runs as one self-contained HTML page.
//
// The page asks nobody for anything: styles and charts (SVG) are inside it, and a content security
// policy forbids the rest. It is read without JavaScript; the little there is shows values under
// the pointer. It follows the reader's light or dark setting, and prints. The files read are those
// that package train writes; the same runs and options give the same bytes.
//
// The size of the page does not grow with the length of a run: curves are thinned to what a screen
// can show, raw values so that every spike stays.
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
	Reload int    // seconds after which a browser loads the page again, as its file may be another by then; 0: never
}

// document is what the template shows.
type document struct {
	Summary summary
	Configs *summary // what differs between the configurations; nil for a single run, or if they are not known
	Loss    []page.Figure
	Keys    []page.Key // which colour is which run, where there are several
	Runs    []section
}

// A section is what the page shows of one run alone.
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

// Write renders the runs as one HTML page. The loss curves of all of them share a chart, the rest
// is shown run by run.
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

// distinctNames are the names of the runs, numbered where directories of the same name were given.
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
