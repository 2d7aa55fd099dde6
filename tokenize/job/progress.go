package job

import (
	"context"
	"sync"
	"time"
)

// Progress is how far the job has come, by what all of its processes have completed and what this
// one has in work.
type Progress struct {
	Documents int64 // encoded
	Skipped   int64 // by this process
	Tokens    int64
	TextBytes int64 // UTF-8 bytes of the documents
	InputRead int64 // bytes read from the inputs, as they are compressed
	InputKept int64 // of these, bytes that were done when this process began
	InputSize int64 // of all inputs, or -1 if one of them is not a regular file

	// Documents of [largeDocument] bytes or more that this process encodes at the moment, which
	// count in the numbers above when they are done.
	Large      int64
	LargeBytes int64

	Shards  int    // written by now
	Waiting string // the process that is waited for, if this one has nothing to do
}

// largeDocument is the size from which on a document is told of while it is encoded, which takes a
// good part of a second.
const largeDocument = 4 << 20

const progressInterval = 250 * time.Millisecond

// A meter tells Options.Progress.
type meter struct {
	p      *process
	mu     sync.Mutex // calls do not overlap
	kept   int64
	holder string
}

// wait says that this process waits for another.
func (m *meter) wait(holder string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holder = holder
}

// run tells four times a second.
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

// reckon adds up what is complete and what is in work.
func (p *process) reckon() Progress {
	s := Progress{InputSize: p.f.d.size(), Skipped: p.skips.Load(), Large: p.live.large.Load(),
		LargeBytes: p.live.largeBytes.Load()}
	p.live.mu.Lock()
	defer p.live.mu.Unlock()
	p.board.mu.Lock()
	defer p.board.mu.Unlock()
	idle := true
	// A long line reaches over parts in which no line begins. They are complete at once, but count
	// only when the part is in which the line begins.
	reached := false // the part before is complete
	for u := range p.board.units {
		unit := &p.board.units[u]
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
	if idle && p.board.prefix < p.board.until {
		s.Waiting = p.board.holder
	}
	p.roll.mu.Lock()
	defer p.roll.mu.Unlock()
	writing := false
	for _, stage := range p.roll.stages {
		if stage == complete {
			s.Shards++
		}
		writing = writing || stage == ours
	}
	if idle && !writing && s.Waiting == "" {
		s.Waiting = p.roll.holder
	}
	return s
}

// share divides the inputs' sizes: for each unit the bytes of its parts. Pieces of one input are of
// about one size.
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
