package cli

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/term"

	"mula/internal/quantity"
)

// progress shows the progress of long work on standard error: a line that is rewritten on a
// terminal, or else a line every [progressInterval].
type progress struct {
	w        io.Writer
	terminal bool
	start    time.Time

	mu   sync.Mutex
	last time.Time
	open bool // a line on the terminal is unfinished
}

const (
	progressInterval = 10 * time.Second
	terminalInterval = 200 * time.Millisecond
)

func newProgress(w io.Writer) *progress {
	now := time.Now()
	return &progress{w: w, terminal: isTerminal(w), start: now, last: now}
}

func isTerminal(w io.Writer) bool {
	w = unfiltered(w)
	if o, ok := w.(*output); ok {
		w = o.w
	}
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
}

// update shows text if the last line is old enough. The remaining time is computed from done and
// total, which have the same unit. A total of 0 means unknown.
func (p *progress) update(text string, done, total float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	interval := progressInterval
	if p.terminal {
		interval = terminalInterval
	}
	if now.Sub(p.last) < interval {
		return
	}
	p.last = now
	if total > 0 && done > 0 && done <= total {
		left := time.Duration(float64(now.Sub(p.start)) * (total - done) / done)
		text = fmt.Sprintf("%3.0f %%  %s  %s left", 100*done/total, text, quantity.Duration(left))
	}
	p.print(text)
}

func (p *progress) print(text string) {
	if !p.terminal {
		fmt.Fprintln(p.w, text)
		return
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s", text)
	p.open = true
}

// line replaces the progress line by a permanent line.
func (p *progress) line(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	fmt.Fprintf(p.w, format+"\n", args...)
}

// end removes the progress line.
func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
}

func (p *progress) clear() {
	if p.open {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.open = false
	}
}
