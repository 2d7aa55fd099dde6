package audit

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"

	"mula/internal/quantity"
)

// report returns a generated report with the given numbers of sources, shards and findings.
func report(sources, shards, findings int) *Report {
	r := &Report{SequenceLength: 100}
	for i := range sources {
		s := Source{Name: fmt.Sprintf("src-%d<&\"", i), Shards: 3, Tail: 10,
			Repeats: Repeats{Tokens: 5, Worst: Repeat{Document: -1}}}
		for n := range int64(40) {
			s.Lengths.add(n * n * int64(i+1))
		}
		s.Lengths.finish()
		r.Sources = append(r.Sources, s)
	}
	for i := range shards {
		r.Shards = append(r.Shards, Shard{Path: fmt.Sprintf("dir/shard-%d", i), Layout: "megatron", Compared: i%2 == 0,
			Verified: i%4 == 0})
	}
	for i := range findings {
		r.Findings = append(r.Findings, Finding{Level: []Level{Note, Warning, Error}[i%3], Path: "<p>",
			Message: fmt.Sprintf("message %d", i)})
	}
	return r
}

func render(t *testing.T, r *Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := r.WritePage(&b, "Check of <plan>"); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// The page has what the report has, refers to nothing outside, and is well-formed whatever the
// names are; its charts' bars have the heights of the shares.
func TestPage(t *testing.T) {
	page := render(t, report(3, 5, 7))
	if page != render(t, report(3, 5, 7)) {
		t.Error("the same report gives another page")
	}
	for _, want := range []string{"Check of &lt;plan&gt;", "src-2&lt;&amp;&#34;", "dir/shard-4", "DIFFER",
		"2 errors, 2 warnings, 3 notes", "in no window", "<code>&lt;p&gt;</code>: message 5"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	if outside := regexp.MustCompile(`(?i)((src|href)=|url\(|@import|<script|https?:)`).FindString(page); outside != "" {
		t.Errorf("the page has %q", outside)
	}
	if first, last := strings.Index(page, "message 2<"), strings.Index(page, "message 0<"); first < 0 || first > last {
		t.Error("errors do not come before notes")
	}
	charts := regexp.MustCompile(`(?s)<svg.*?</svg>`).FindAllString(page, -1)
	if len(charts) != 3 {
		t.Fatalf("%d charts", len(charts))
	}
	for i, svg := range charts {
		d := xml.NewDecoder(strings.NewReader(svg))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("chart %d: %v", i, err)
			}
		}
		r := report(3, 0, 0).Sources[2-i] // the longest first
		bars := regexp.MustCompile(`<rect class="documents" x="[^"]*" y="([0-9.]+)" width="[^"]*" height="([0-9.]+)"><title>([0-9,]+) to`).FindAllStringSubmatch(svg, -1)
		if len(bars) != len(r.Lengths.Octaves) {
			t.Fatalf("chart %d: %d bars for %d octaves", i, len(bars), len(r.Lengths.Octaves))
		}
		perShare := 0.0
		for k, o := range r.Lengths.Octaves {
			var y, height float64
			fmt.Sscan(bars[k][1]+" "+bars[k][2], &y, &height)
			if bars[k][3] != quantity.Grouped(o.From) || y < 0 || height <= 0 || y+height < 169.8 || y+height > 170.2 {
				t.Errorf("chart %d: bar %v of %+v", i, bars[k], o)
			}
			if scale := height / float64(o.Documents); k > 0 && (scale < perShare*0.9 || scale > perShare*1.1) {
				t.Errorf("chart %d: bar %v of %+v is %.2f high for a document, the one before %.2f", i, bars[k], o,
					scale, perShare)
			} else {
				perShare = scale
			}
		}
	}
}

// With any number of findings, a browser can show the page, which has a note about skipped
// findings.
func TestPageIsBounded(t *testing.T) {
	page := render(t, report(100, 20_000, 9000))
	if len(page) > 1<<20 || strings.Count(page, "<svg") != maxFigures {
		t.Errorf("%d bytes, %d charts", len(page), strings.Count(page, "<svg"))
	}
	for _, want := range []string{"8500 more;", "19000 more;", "The 24 sources with the most tokens; 76 more"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	if empty := render(t, &Report{Sources: []Source{{Name: "x"}}}); !strings.Contains(empty, "<p>None.</p>") ||
		strings.Contains(empty, "<svg") || strings.Contains(empty, "in no window") {
		t.Error("a report of nothing")
	}
}
