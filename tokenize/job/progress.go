package job

import (
	"context"
	"sync"
	"time"
)

// Progress is the progress of the job: the work that all of its processes have completed, and the
// work in progress in this process.
type Progress struct {
	Documents int64 // encoded
	Skipped   int64 // by this process
	Tokens    int64
	TextBytes int64 // UTF-8 bytes of the documents
	InputRead int64 // compressed bytes read from the inputs
	InputKept int64 // of these, bytes that were complete when this process started
	InputSize int64 // of all inputs, or -1 if one of them is not a regular file

	// Large is the number of documents of 4 MiB or more that this process is encoding. They are
	// included in the numbers above when they are complete.
	Large      int64
	LargeBytes int64

	Shards  int    // number of written shards
	Waiting string // the process that this process waits for, if it has no work
}

// largeDocument is the size from which a document is reported while it is encoded, which takes a
// good part of a second.
const largeDocument = 4 << 20

const progressInterval = 250 * time.Millisecond

// A meter calls Options.Progress.
type meter struct {
	p      *process
	mu     sync.Mutex // calls do not overlap
	kept   int64
	holder string
}

// wait records that this process waits for another.
func (m *meter) wait(holder string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holder = holder
}

// run reports four times a second.
func (m *meter) run(ctx context.Context) {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			m.show()
		}
	}
}

func (m *meter) show() {
	if m.p.o.Progress == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.p.reckon()
	now.InputKept = m.kept
	if now.Waiting == "" {
		now.Waiting = m.holder
	}
	m.p.o.Progress(now)
}

// reckon adds up the complete work and the work in progress.
func (p *process) reckon() Progress {
	s := Progress{InputSize: p.f.d.size(), Skipped: p.skips.Load(), Large: p.live.large.Load(),
		LargeBytes: p.live.largeBytes.Load()}
	p.live.mu.Lock()
	defer p.live.mu.Unlock()
	p.unitQueue.mu.Lock()
	defer p.unitQueue.mu.Unlock()
	idle := true
	// A long line can extend over parts in which no line starts. They are complete at once, but
	// count only when the part in which the line starts is complete.
	reached := false // the previous part is complete
	for u := range p.unitQueue.units {
		unit := &p.unitQueue.units[u]
		parts := p.f.d.Units[u]
		if unit.stage == complete {
			t := unit.sum
			s.Documents += t.Documents
			s.Tokens += t.Tokens
			s.TextBytes += t.TextBytes
			for n, bytes := range p.shares[u] {
				begins := parts[n].Start == 0 || n < len(unit.record.Parts) && unit.record.Parts[n].Lines > 0
				if reached = reached || begins; reached {
					s.InputRead += bytes
				}
			}
			continue
		}
		reached = false
		l := p.live.units[u]
		if l == nil {
			continue
		}
		idle = false
		s.Documents += l.documents.Load()
		s.Tokens += l.tokens.Load()
		s.TextBytes += l.text.Load()
		l.mu.Lock()
		for _, bytes := range p.shares[u][:l.part] {
			s.InputRead += bytes
		}
		if l.part < len(p.shares[u]) {
			read := l.read
			if p.f.d.Inputs[p.f.d.Units[u][l.part].Input].Size >= 0 {
				read = min(read, p.shares[u][l.part])
			}
			s.InputRead += read
		}
		l.mu.Unlock()
	}
	if idle && p.unitQueue.prefix < p.unitQueue.until {
		s.Waiting = p.unitQueue.holder
	}
	p.shardQueue.mu.Lock()
	defer p.shardQueue.mu.Unlock()
	writing := false
	for _, stage := range p.shardQueue.stages {
		if stage == complete {
			s.Shards++
		}
		writing = writing || stage == ours
	}
	if idle && !writing && s.Waiting == "" {
		s.Waiting = p.shardQueue.holder
	}
	return s
}

// share divides the inputs' sizes: for each unit the bytes of its parts. Pieces of an input have
// about the same size.
func share(d *description) [][]int64 {
	pieces, number := make([]int64, len(d.Inputs)), make([]int64, len(d.Inputs))
	for _, u := range d.Units {
		for _, p := range u {
			pieces[p.Input]++
		}
	}
	shares := make([][]int64, len(d.Units))
	for n, u := range d.Units {
		for _, p := range u {
			size, of, i := max(d.Inputs[p.Input].Size, 0), pieces[p.Input], number[p.Input]
			number[p.Input]++
			shares[n] = append(shares[n], size/of*(i+1)+size%of*(i+1)/of-size/of*i-size%of*i/of)
		}
	}
	return shares
}
