package report

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"html"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func render(t testing.TB, runs ...*Run) string {
	t.Helper()
	var out bytes.Buffer
	if err := Write(&out, Options{}, runs...); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

var drawingPattern = regexp.MustCompile(`(?s)<svg.*?</svg>`)

// checkDrawings holds that every drawing is well-formed XML and all of its coordinates are numbers.
// It returns their number.
func checkDrawings(t testing.TB, page string) int {
	t.Helper()
	drawings := drawingPattern.FindAllString(page, -1)
	for _, d := range drawings {
		decoder := xml.NewDecoder(strings.NewReader(d))
		for {
			token, err := decoder.Token()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("%v in\n%s", err, d)
			}
			element, ok := token.(xml.StartElement)
			if !ok {
				continue
			}
			for _, a := range element.Attr {
				switch a.Name.Local {
				case "d", "x", "y", "cx", "cy", "viewBox", "data-x", "data-y":
					if strings.Contains(a.Value, "NaN") || strings.Contains(a.Value, "Inf") {
						t.Fatalf("%s=%q in <%s>", a.Name.Local, a.Value, element.Name.Local)
					}
				}
			}
		}
	}
	return len(drawings)
}

func many() simulation {
	s := quick()
	s.sources = []string{
		"dclm-baseline-filtered-2024-en", "wiki", "arxiv", "starcoder", "pes2o", `<script>alert("x")</script>`,
		"open-web-math", "algebraic-stack",
		"books", "tulu", "reddit", "Čeština",
	}
	s.weights = []float64{.4, .1, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05}
	s.layers, s.experts, s.planned = 16, 64, 1000
	return s
}

// The page stays small however long the run and large the model, and asks for nothing outside
// itself.
func TestWrite(t *testing.T) {
	one, zero, resumedOften, dense := quick(), quick(), quick(), quick()
	one.steps, one.resumes = 1, nil
	zero.steps = 0
	resumedOften.resumes = nil
	for step := 5; step < 400; step += 7 {
		resumedOften.resumes = append(resumedOften.resumes, step)
	}
	dense.layers = 0
	for _, test := range []struct {
		name     string
		s        simulation
		drawings int
		limit    int
	}{
		// loss ×2, by source ×2, mixture ×2, speed, utilization, norm, rate, update ratio,
		// auxiliary loss, experts ×5
		{"quick", quick(), 17, 300e3},
		{"one step", one, 14, 100e3}, // nothing evaluated, no second half, no map over time
		{"no step", zero, 0, 30e3},
		{"many", many(), 17, 600e3},
		{"resumed often", resumedOften, 17, 500e3},
		{"dense", dense, 12, 300e3},
		{"long", quick(), 17, 400e3},
	} {
		t.Run(test.name, func(t *testing.T) {
			run := test.s.read(t, "run")
			if test.name == "long" {
				lengthen(run, 100_000)
			}
			page := render(t, run)
			if n := checkDrawings(t, page); n != test.drawings {
				t.Errorf("%d drawings, want %d", n, test.drawings)
			}
			if len(page) > test.limit {
				t.Errorf("%d bytes, limit %d", len(page), test.limit)
			}
			for _, bad := range []string{"src=", "href=", "url(", "@import", "https:", "ZgotmplZ", "NaN"} {
				if strings.Contains(page, bad) {
					t.Errorf("the page contains %q", bad)
				}
			}
			// The namespace of SVG is a name, not an address that is asked for.
			if addresses := strings.Count(page, "http:"); addresses != strings.Count(page,
				`"http://www.w3.org/2000/svg"`) {
				t.Errorf("%d addresses in the page", addresses)
			}
			if again := render(t, run); again != page {
				t.Error("a second page of the same run differs")
			}
		})
	}
}

// lengthen repeats the steps and evaluations of a run until it has n steps.
func lengthen(run *Run, n int) {
	steps, evaluations := stepsOf(run), run.Evaluations
	for run.Done < n {
		at := run.Next
		for _, s := range steps {
			s.Step += at
			run.add(s)
		}
		for _, e := range evaluations {
			e.Step += at
			run.Evaluations = append(run.Evaluations, e)
		}
	}
}

// What users named is shown, never run.
func TestWriteEscapes(t *testing.T) {
	s := many()
	s.steps = 30
	run := s.read(t, `a"b<i>&c`)
	run.Resumes = []Resume{{Step: 3, Checkpoint: `</title><script>1</script>`}}
	run.Info.Device, run.Info.Model["model_type"], run.Info.Plan = "<img>", "</td><svg onload=1>", strings.Repeat(`"><`,
		20)
	run.Torn = "<u>"
	page := render(t, run)
	for element, want := range map[string]int{"script": 1, "i": len(s.sources), "img": 0, "u": 0} {
		if n := strings.Count(page, "<"+element+">") + strings.Count(page, "<"+element+" "); n != want {
			t.Errorf("%d elements <%s>, want %d", n, element, want)
		}
	}
	if strings.Contains(page, "<svg onload") {
		t.Error("an element came in through the model's name")
	}
	checkDrawings(t, page)
	if !strings.Contains(html.UnescapeString(page), `<script>alert("x")</script>`) {
		t.Error("the source's name is not shown")
	}
}

// The content security policy names the script that is really in the page.
func TestPolicy(t *testing.T) {
	page := render(t, quick().read(t, "run"))
	script := regexp.MustCompile(`(?s)<script>(.*)</script>`).FindStringSubmatch(page)
	if script == nil {
		t.Fatal("no script")
	}
	hash := sha256.Sum256([]byte(script[1]))
	want := "script-src 'sha256-" + base64.StdEncoding.EncodeToString(hash[:]) + "'"
	if !strings.Contains(html.UnescapeString(page), want) {
		t.Errorf("the policy does not have %s", want)
	}
}

func TestWriteRuns(t *testing.T) {
	a, b := quick(), quick()
	b.seed, b.steps = 2, 150
	b.resumes = nil
	runA, runB := a.read(t, "run"), b.read(t, "run")
	page := render(t, runA, runB)
	for _, want := range []string{`<th scope="col">run</th>`, `<th scope="col">run (2)</th>`, `<h2>run (2)</h2>`,
		">run 2.", ">run (2) 3.", "150 of 400", "1 (before step 180)"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not contain %s", want)
		}
	}
	for _, want := range []string{"<h3>Differences in train.yaml</h3>",
		"<p>Only the run directories differ.</p>"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not contain %s", want)
		}
	}
	if err := Write(io.Discard, Options{}); err == nil {
		t.Error("a report of no run")
	}
	full := errors.New("no space left on device")
	if err := Write(failingWriter{full}, Options{}, runA); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	var out bytes.Buffer
	if err := Write(&out, Options{Title: "Ablation 7"}, runA); err != nil ||
		!strings.Contains(out.String(), "<h1>Ablation 7</h1>") {
		t.Errorf("title: %v", err)
	}
}

// What differs between configurations is shown, field by field, and nothing else; a run without one
// is not compared.
func TestDifferences(t *testing.T) {
	dir := t.TempDir()
	config := func(text string) *Run {
		t.Helper()
		path := filepath.Join(dir, configFile)
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		c, err := readConfig(path)
		if err != nil {
			t.Fatal(err)
		}
		return &Run{Config: c}
	}
	a := config("output: .\nseed: 1\nschedule:\n  learning_rate: 0.0004\n  name: cosine\noptimizer: {betas: [0.9, " +
		"0.95], eps: 1e-8}\n")
	b := config("output: ..\nseed: 1\nschedule:\n  learning_rate: 0.001\n  name: cosine\noptimizer: {betas: [0.9, " +
		"0.99], eps: 1e-8, groups: [{weight_decay: 0, match: [norms, router]}]}\nz_loss: {coefficient: 0}\n")
	got := fmt.Sprint(differences([]string{"a", "b", "c"}, []*Run{a, b, {}}).Rows)
	if want := "[{optimizer.betas [{[0.9, 0.95] } {[0.9, 0.99] } {– }]} {optimizer.groups [{– } {[{match: [norms, " +
		"router], weight_decay: 0}] } {– }]} {schedule.learning_rate [{0.0004 } {0.001 } {– }]} {z_loss.coefficient " +
		"[{– } {0 } {– }]}]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if same := differences([]string{"a", "a"}, []*Run{a, a}); same == nil || len(same.Rows) != 0 {
		t.Errorf("the same: %v", same)
	}
	if alone := differences([]string{"a", "c"}, []*Run{a, {}}); alone != nil {
		t.Errorf("one configuration: %v", alone)
	}
	if c, err := readConfig(filepath.Join(dir, "none")); c != nil || err != nil {
		t.Errorf("no file: %v, %v", c, err)
	}
	path := filepath.Join(dir, configFile)
	if err := os.WriteFile(path, []byte("a: [\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := readConfig(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("damaged: %v", err)
	}
}

// Only a page that is asked to loads itself again.
func TestReload(t *testing.T) {
	run := quick().read(t, "run")
	if strings.Contains(render(t, run), "refresh") {
		t.Error("the page loads itself again")
	}
	var out bytes.Buffer
	if err := Write(&out, Options{Reload: 30}, run); err != nil ||
		!strings.Contains(out.String(), `<meta http-equiv="refresh" content="30">`) {
		t.Errorf("the page does not load itself again: %v", err)
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

func TestSummary(t *testing.T) {
	run, err := parse(strings.NewReader(headLine+step0+step1+evalLine+resumeLine+step2), "m")
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]string)
	for _, row := range summarise([]string{"r"}, []*Run{run}).Rows {
		got[row.Name] = row.Cells[0].Text
	}
	for name, want := range map[string]string{
		"parameters": "10 (6 active per token)", "steps": "3", "tokens seen": "64",
		"loss, first → last": "5.500 → 4.500", "evaluation loss": "5.000",
		"tokens/s, median": "64.00", "time in steps": "1.1 s", "resumes": "1 (before step 2)",
		"started": "2026-09-01 08:00:00 +00:00", "plan": "ab",
		"model": "4 experts", "batch": "4 samples of 8 tokens",
	} {
		if got[name] != want {
			t.Errorf("%s: %q, want %q", name, got[name], want)
		}
	}
	rows := sourceRows(run)
	want := []string{
		"{f0 go 75.00 % 87.50 % 7 +1.0 5.000 4.500 }",
		"{f1 docs 25.00 % 12.50 % 1 −1.0 7.000 7.000 6.000}",
	}
	for i, w := range want {
		if g := fmt.Sprint(rows[i]); g != w {
			t.Errorf("source %d: %s, want %s", i, g, w)
		}
	}
}
