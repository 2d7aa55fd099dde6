package job

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"mula/internal/locks"
	"mula/shards/formats"
	"mula/tokenize"
	"mula/tokenize/documents"
)

// Sizes of the pipeline: a batch is closed at either of the first two.
const (
	batchBytes     = 256 << 10 // of text
	batchDocuments = 1024
	// Memory per byte of text: the byte and, at worst, a four-byte id.
	bytesInFlight = 1 + 4
	// One additional unit is read at once for this number of workers: decompression is faster than
	// encoding by about this factor.
	workersPerReader = 4
	maxReaders       = 16
	minObjectReaders = 4
)

// A batch is a run of documents that passes from the reader of a unit through a worker to the
// writer of its segments.
type batch struct {
	items  []item
	tokens []uint32
	bytes  int           // of text
	weight int64         // of the reserved memory
	done   chan struct{} // closed by the worker
}

// An item is a document of a batch, or the error in its place, or the end of a part.
type item struct {
	documents.Document
	part  int
	lines int64 // lines of the part up to and including this item
	err   error
	end   int   // of its ids in batch.tokens
	read  int64 // compressed bytes of the part that were read up to here

	partEnds bool
	sha256   string // of the part that ends
}

// refuse turns the document into an error.
func (i *item) refuse(kind documents.Kind, err error) {
	i.err = &documents.DocumentError{File: i.File, Line: i.Line, Offset: i.Offset, ID: i.ID, Kind: kind, Err: err}
}

// batches keeps the memory of written batches.
var batches = sync.Pool{New: func() any { return new(batch) }}

func newBatch() *batch {
	b := batches.Get().(*batch)
	b.done = make(chan struct{})
	return b
}

func (b *batch) recycle() {
	clear(b.items)
	b.items, b.tokens, b.bytes = b.items[:0], b.tokens[:0], 0
	if cap(b.tokens) <= 2*batchBytes { // not the batch of a very large document
		batches.Put(b)
	}
}

// encode tokenizes the documents of b.
func (b *batch) encode(encoder *tokenize.Encoder, o *Options, l *live) {
	defer close(b.done)
	for i := range b.items {
		d := &b.items[i]
		if d.err == nil && !d.partEnds {
			var err error
			before := len(b.tokens)
			large := l.begins(len(d.Text))
			b.tokens, err = encoder.Append(b.tokens, d.Text)
			if large {
				l.ends(len(d.Text))
			}
			if err != nil {
				d.refuse(documents.Unencodable, err)
			} else if n := len(b.tokens); o.AppendEOD && !(o.AddSpecialTokens && n > before && b.tokens[n-1] == o.EOD) {
				b.tokens = append(b.tokens, o.EOD)
			} else if why := formats.Of(o.Layout).NoEmpty; why != "" && n == before {
				// report it here, not when a shard is written, hours later
				d.refuse(documents.Empty, fmt.Errorf("its text has no tokens, and a document of the layout %s must "+
					"have some: %s", formats.Of(o.Layout).Name, why))
			}
		}
		d.end = len(b.tokens)
	}
}

// work encodes batches until ctx ends. It finishes the batch in progress.
func (p *process) work(ctx context.Context) {
	var encoder *tokenize.Encoder // has megabytes of memory, which a worker without work does not need
	for {
		select {
		case <-ctx.Done():
			return
		case b := <-p.toEncode:
			if encoder == nil {
				encoder = p.o.Tokenizer.NewEncoder(tokenize.EncodeOptions{Specials: p.o.Specials,
					AddSpecialTokens: p.o.AddSpecialTokens})
			}
			b.encode(encoder, p.o, &p.live)
		}
	}
}

// encodeUnits encodes one unit after the other.
func (p *process) encodeUnits(ctx context.Context) error {
	var spare *segmentWriter
	for {
		u, l, unitCtx, err := p.unitQueue.claim(ctx)
		if u < 0 || err != nil {
			return err
		}
		e := &unitEncoder{p: p, u: u, lock: l, segment: spare}
		err = e.run(unitCtx)
		spare = e.segment
		var failed *failure
		switch {
		case err == nil:
		case errors.As(err, &failed):
			p.unitQueue.fail(failed)
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		// another process has the unit, or the unit is not needed
		case errors.Is(err, errLost), unitCtx.Err() != nil:
			err = nil
		}
		if failed != nil {
			err = nil
		}
		if err == nil {
			p.unitQueue.release(u)
			p.live.drop(u)
		}
		l.Release()
		if err != nil {
			// the unit stays ours: this process does not start it again, and its counts show the
			// size of the job
			return err
		}
	}
}

// errLost means that another process assumed that this process was dead and took the work over.
var errLost = errors.New("another process has taken the work over")

func (x *failure) Error() string { return x.err.Error() }

func (x *failure) Unwrap() error { return x.err }

// A unitEncoder writes the segments of one unit.
type unitEncoder struct {
	p    *process
	u    int
	lock *locks.Lock

	segment *segmentWriter // the current segment; between segments, the previous one
	working bool           // segment is not finished
	number  int            // of the segment
	next    place
	parts   []totals // up to the current part
	done    int64    // documents
	record  unitRecord
	wanted  int64
	id      []byte // of a document
	live    *liveUnit
}

// resume finds the existing segments. It reports whether they cover the whole unit.
func (e *unitEncoder) resume() (last bool, err error) {
	for ; ; e.number++ {
		s, err := e.p.f.openSegment(e.u, e.number)
		if err != nil {
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, errDamaged) {
				break
			}
			return false, err
		}
		s.close()
		if s.foot.Rejects > 0 {
			if _, err := e.p.f.files.FS().Stat(rejectName(e.p.f.dir, e.u, e.number)); err != nil {
				break
			}
		}
		if len(s.foot.Parts) > len(e.p.f.d.Units[e.u]) || s.foot.Next.Part > len(e.p.f.d.Units[e.u]) {
			break
		}
		e.next, e.parts = s.foot.Next, s.foot.Parts
		e.note(&s.foot)
		if s.foot.Last {
			return true, nil
		}
	}
	return false, nil
}

// note adds an existing segment to the record.
func (e *unitEncoder) note(f *footer) {
	e.record.Segments = append(e.record.Segments, segmentRecord{f.Documents, f.Tokens,
		footerRejects{f.Rejects, f.RejectsSum}})
}

// run encodes the unit, from its current position, and writes its record.
func (e *unitEncoder) run(ctx context.Context) error {
	e.wanted = e.p.unitQueue.wanted(e.u)
	last, err := e.resume()
	if err != nil {
		return err
	}
	var lost totals
	for _, t := range e.parts {
		lost.Documents += t.Documents
		lost.Tokens += t.Tokens
		lost.TextBytes += t.TextBytes
	}
	e.done = lost.Documents
	e.live = e.p.live.begin(e.u, e.next.Part, lost)
	if !last && (e.wanted == 0 || e.done < e.wanted) {
		if err := e.encode(ctx); err != nil {
			if e.working {
				e.segment.abort()
			}
			return err
		}
	}
	e.record.Job, e.record.Parts = e.p.f.d.ID, e.parts
	e.record.Cut = len(e.parts) < len(e.p.f.d.Units[e.u]) || e.next.Within
	if !e.lock.Ours() {
		return errLost
	}
	if err := e.p.f.writeSealed(e.p.f.unitPath(e.u), &e.record); err != nil {
		return err
	}
	e.p.unitQueue.complete(e.u, &e.record)
	return nil
}

// encode reads the rest of the unit. One goroutine reads, the workers encode, and this goroutine
// writes.
func (e *unitEncoder) encode(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	toWrite := make(chan *batch, 4*e.p.o.Workers)
	group, readCtx := errgroup.WithContext(ctx)
	from := e.next // write advances e.next while the reader reads
	group.Go(func() error {
		defer close(toWrite)
		return e.read(readCtx, from, toWrite)
	})
	var err error
	ended := false // the requested number of documents was reached, or an error occurred
	for b := range toWrite {
		<-b.done
		if !ended {
			ended, err = e.write(b)
			if ended {
				cancel(nil)
			}
		}
		e.p.memory.Release(b.weight)
		b.recycle()
	}
	readErr := group.Wait()
	if err != nil {
		return err
	}
	if !ended && readErr != nil {
		return readErr
	}
	return e.finish(true)
}

// read sends the documents of the unit, from a position on, in batches. It shares no state with
// [unitEncoder.write] except the batches.
func (e *unitEncoder) read(ctx context.Context, from place, toWrite chan<- *batch) error {
	b := newBatch()
	send := func() error {
		// A document larger than all memory is sent alone.
		b.weight = min(int64(b.bytes)*bytesInFlight+int64(len(b.items))*documentWeight, e.p.inFlight)
		if err := e.p.memory.Acquire(ctx, b.weight); err != nil {
			return context.Cause(ctx)
		}
		select {
		case e.p.toEncode <- b:
		case <-ctx.Done():
			e.p.memory.Release(b.weight)
			return context.Cause(ctx)
		}
		toWrite <- b // the writer receives until the end
		b = newBatch()
		return nil
	}
	add := func(i item) error {
		b.items = append(b.items, i)
		b.bytes += len(i.Text)
		if b.bytes >= batchBytes || len(b.items) == batchDocuments {
			return send()
		}
		return nil
	}
	limit := sampleLimit(e.p.o.Sample)
	for n := from.Part; n < len(e.p.f.d.Units[e.u]); n++ {
		if err := e.readPart(ctx, from, n, limit, add); err != nil {
			if errors.Is(err, errEnough) {
				break
			}
			return err
		}
	}
	return send()
}

// errEnough ends reading after an error of a document: the writer decides how to handle it.
var errEnough = errors.New("enough")

// readPart sends the documents of part n, starting at from if from is in the part.
func (e *unitEncoder) readPart(ctx context.Context, from place, n int, limit uint64, add func(item) error) error {
	part := e.p.f.d.Units[e.u][n]
	in := e.p.f.d.Inputs[part.Input]
	path := e.p.o.Inputs[part.Input]
	checked := in.Version != "" // reading compares the version of every response
	if !checked {
		if err := unmodified(ctx, path, in); err != nil {
			return err
		}
	}
	r, err := documents.Open(ctx, documents.Piece{File: path, Start: part.Start, End: part.End}, e.p.o.Read)
	if err != nil {
		var bad *documents.DocumentError
		if !errors.As(err, &bad) {
			return err
		}
		if err := add(item{part: n, err: err}); err != nil {
			return err
		}
		return errEnough
	}
	defer r.Close()
	if checked && r.Version() != in.Version {
		if err := unmodified(ctx, path, in); err != nil {
			return err
		}
		return fmt.Errorf("the input %s changed and changed back; repeat the command", in.Path)
	}
	if n == from.Part && from.Within {
		if err := r.Skip(from.Offset, from.Lines); err != nil {
			return err
		}
	}
	for {
		d, err := r.Next()
		var bad *documents.DocumentError
		switch {
		case err == io.EOF:
			if !checked {
				if err := unmodified(ctx, path, in); err != nil {
					return err
				}
			}
			return add(item{part: n, lines: r.Lines(), read: r.BytesRead(), partEnds: true, sha256: r.SHA256()})
		case err == nil:
			if limit > 0 && draw(sampleSeed, part.Input, d.Offset) >= limit {
				continue
			}
		case !errors.As(err, &bad):
			return err
		case bad.Kind == documents.BadStream:
			if err := unmodified(ctx, path, in); err != nil {
				return err
			}
		}
		if err := add(item{Document: d, part: n, lines: r.Lines(), read: r.BytesRead(), err: err}); err != nil {
			return err
		}
		if bad != nil && (bad.Kind == documents.BadStream || e.p.o.OnError == Fail) {
			return errEnough
		}
	}
}

// unmodified returns an error if the input at a path has changed since the start of the job.
func unmodified(ctx context.Context, path string, in input) error {
	if in.Size < 0 {
		return nil
	}
	now, err := look(ctx, path)
	if err == nil && !now.same(in) {
		err = fmt.Errorf("the input %s changed after the job started: it had %d bytes, last modified at %s, and has "+
			"%d, modified at %s; repeat the command to continue with the new input", in.Path, in.Size, stamp(in),
			now.Size, stamp(now))
	}
	return err
}

// write adds a batch to the segments. It reports whether the unit ends here, before the end of its
// inputs.
func (e *unitEncoder) write(b *batch) (ended bool, err error) {
	if n := len(b.items); n > 0 {
		defer e.live.reached(&b.items[n-1])
	}
	start := 0
	for i := range b.items {
		d := &b.items[i]
		ids := b.tokens[start:d.end]
		start = d.end
		for len(e.parts) <= d.part {
			e.parts = append(e.parts, totals{})
		}
		t := &e.parts[d.part]
		if d.partEnds {
			t.Lines, t.SHA256 = d.lines, d.sha256
			e.next = place{Part: d.part + 1}
			continue
		}
		if !e.working {
			if err := e.begin(); err != nil {
				return true, err
			}
		}
		e.next = place{Part: d.part, Within: true, Offset: d.Offset, Lines: d.lines}
		t.Lines = d.lines
		if d.err != nil {
			if err := e.reject(d); err != nil {
				return true, err
			}
			continue
		}
		e.id = append(e.id[:0], d.ID...)
		m := meta{part: d.part, line: d.Line, offset: d.Offset, text: int64(len(d.Text)), id: e.id, ordinal: e.done}
		if e.p.f.d.Settings.Shuffle {
			m.key = draw(e.p.f.d.Settings.ShuffleSeed, e.p.f.d.Units[e.u][d.part].Input, d.Offset)
		}
		if err := e.segment.add(&m, ids); err != nil {
			return true, err
		}
		e.done++
		t.Documents++
		t.Tokens += int64(len(ids))
		t.TextBytes += m.text
		e.live.documents.Add(1)
		e.live.tokens.Add(int64(len(ids)))
		e.live.text.Add(m.text)
		if e.wanted > 0 && e.done >= e.wanted {
			return true, nil
		}
		if e.segment.full() {
			if err := e.finish(false); err != nil {
				return true, err
			}
		}
	}
	return false, nil
}

// reject skips a document if that is allowed; otherwise it ends the unit.
func (e *unitEncoder) reject(d *item) error {
	var bad *documents.DocumentError
	if !errors.As(d.err, &bad) || bad.Kind == documents.BadStream || e.p.o.OnError == Fail {
		x := &failure{unit: e.u, ordinal: e.done, part: d.part, err: d.err}
		parts := e.p.f.d.Units[e.u]
		for n := d.part - 1; n >= 0 && parts[n].Input == parts[d.part].Input; n-- {
			x.lines += e.parts[n].Lines
		}
		return x
	}
	e.p.skips.Add(1)
	return e.segment.reject(d.part, e.done, bad)
}

// begin starts a segment.
func (e *unitEncoder) begin() error {
	w, err := createSegment(e.p.f.files, segmentName(e.p.f.dir, e.u, e.number),
		rejectName(e.p.f.dir, e.u, e.number), e.p.f.d, e.segment)
	if err == nil {
		e.segment, e.working = w, true
	}
	return err
}

// finish completes the segment; last means that the unit ends with it.
func (e *unitEncoder) finish(last bool) error {
	if !e.working {
		if !last {
			return nil
		}
		if err := e.begin(); err != nil {
			return err
		}
	}
	if err := e.segment.finish(e.next, e.parts, last); err != nil {
		return err
	}
	if !e.lock.Ours() {
		return errLost
	}
	if err := e.segment.publish(); err != nil {
		return err
	}
	e.note(&e.segment.foot)
	e.working = false
	e.number++
	return nil
}

// live holds the counts of the units in progress in this process, for progress reports.
type live struct {
	mu    sync.Mutex
	units map[int]*liveUnit

	large, largeBytes atomic.Int64 // documents that are being encoded, see [Progress]
}

// begins records the start of encoding a document, and reports whether the document is large. After
// a large document, ends must be called.
func (l *live) begins(size int) (large bool) {
	if size < largeDocument {
		return false
	}
	l.large.Add(1)
	l.largeBytes.Add(int64(size))
	return true
}

func (l *live) ends(size int) {
	l.large.Add(-1)
	l.largeBytes.Add(-int64(size))
}

type liveUnit struct {
	documents, tokens, text atomic.Int64

	mu   sync.Mutex
	part int
	read int64 // compressed bytes of the part up to the last counted document
}

func (l *live) begin(u, part int, t totals) *liveUnit {
	unit := &liveUnit{part: part}
	unit.documents.Store(t.Documents)
	unit.tokens.Store(t.Tokens)
	unit.text.Store(t.TextBytes)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.units == nil {
		l.units = make(map[int]*liveUnit)
	}
	l.units[u] = unit
	return unit
}

func (l *live) drop(u int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.units, u)
}

// reached records how far the unit was read when its documents up to i were counted: the reader is
// ahead of them.
func (u *liveUnit) reached(i *item) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.part, u.read = i.part, i.read
	if i.partEnds {
		u.part, u.read = i.part+1, 0
	}
}
