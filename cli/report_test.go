package cli

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mula/internal/testwait"
)

// growingHead and growingStep are the beginning of a metrics.jsonl, and one step of it.
const growingHead = `{"run":{"format":1,"model":{},"sources":["go"],"sequence_length":8,"batch_size":1,"steps":2,"started":"2026-09-01T08:00:00Z"}}` + "\n"

func growingStep(n string) string {
	return `{"step":` + n + `,"samples":1,"tokens":8,"loss":5,"source_loss":{"go":5},"source_samples":{"go":1}}` + "\n"
}

// A report is drawn while the run writes, again and again, and for the last time when the run has
// done its steps. A page is always whole.
func TestReportWatch(t *testing.T) {
	dir := t.TempDir()
	metrics, page := filepath.Join(dir, "run", "metrics.jsonl"), filepath.Join(dir, "out", "page.html")
	for _, path := range []string{metrics, page} {
		if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(metrics, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	first, second := growingStep("0"), growingStep("1")
	write(growingHead + first + second[:20])
	ctx, cancel := context.WithCancel(testwait.Context(t))
	defer cancel()
	done := make(chan error)
	watch := func(ctx context.Context, seconds string) {
		done <- newApp(strings.NewReader(""), new(bytes.Buffer), new(bytes.Buffer)).RunContext(ctx,
			[]string{"mula", "report", "--watch", seconds, "--output", page, filepath.Dir(metrics)})
	}
	go watch(ctx, "1")
	const refresh = `<meta http-equiv="refresh" content="1">`
	waitFor := func(what string, ok func(page string) bool) {
		t.Helper()
		for ctx.Err() == nil {
			data, err := os.ReadFile(page)
			if err == nil && !strings.HasSuffix(strings.TrimSpace(string(data)), "</html>") {
				t.Fatalf("half a page: %s", data)
			}
			if err == nil && ok(string(data)) {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
		t.Fatalf("the page never has %s", what)
	}
	waitFor("the first step and the broken line", func(p string) bool {
		return strings.Contains(p, refresh) && strings.Contains(p, "<td>1 of 2</td>") &&
			strings.Contains(p, "is cut off after 20 bytes")
	})
	write("") // for a moment
	write(growingHead + first + second)
	waitFor("both steps", func(p string) bool {
		return !strings.Contains(p, refresh) &&
			strings.Contains(p, "<td>2</td>")
	})
	if err := <-done; err != nil {
		t.Error(err)
	}

	// Ctrl-C ends it with a page that does not load itself again.
	write(growingHead + first)
	running, stop := context.WithCancel(ctx)
	go watch(running, "600")
	waitFor("one step again", func(p string) bool { return strings.Contains(p, `content="600"`) })
	stop()
	if err := <-done; err != nil {
		t.Errorf("stopped: %v", err)
	}
	if data, err := os.ReadFile(page); err != nil || strings.Contains(string(data), "refresh") ||
		!strings.Contains(string(data), "<td>1 of 2</td>") {
		t.Errorf("stopped: the page is %s, %v", data, err)
	}
}

// One run drawn twice would be two lines of one colour under one name.
func TestReportTwice(t *testing.T) {
	dir := t.TempDir()
	err := newApp(strings.NewReader(""), new(bytes.Buffer), new(bytes.Buffer)).Run([]string{"mula", "report",
		"--output", filepath.Join(dir, "page.html"), dir, dir + "/"})
	if err == nil || !strings.Contains(err.Error(), dir+" is named twice") {
		t.Errorf("error %v", err)
	}
}
