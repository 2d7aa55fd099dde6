package job

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
)

// A sequence is the order of the inputs: of units, segments and documents in them.
type sequence struct{ b *unitQueue }

func (q sequence) from(ctx context.Context, start cut, skip skipper) iter.Seq2[*spooled, error] {
	return func(yield func(*spooled, error) bool) {
		w := sequenceWalk{sequence: q, skip: skip, d: spooled{at: start}}
		if _, err := w.walk(ctx, yield); err != nil {
			yield(nil, err)
		}
	}
}

// A sequenceWalk is one iteration.
type sequenceWalk struct {
	sequence
	skip   skipper
	d      spooled // d.at is the start, and then the current position
	reader blockReader
	tokens []uint32
}

// walk reports whether to continue.
func (w *sequenceWalk) walk(ctx context.Context, yield func(*spooled, error) bool) (bool, error) {
	for at := &w.d.at; ; at.Unit, at.Segment, at.Document = at.Unit+1, 0, 0 {
		if at.Unit == len(w.b.units) {
			return true, nil
		}
		record, err := w.b.unit(ctx, at.Unit)
		if err != nil || record == nil {
			return true, err
		}
		for ; at.Segment < len(record.Segments); at.Segment, at.Document = at.Segment+1, 0 {
			r := record.Segments[at.Segment]
			if r.Documents == 0 || at.Document == 0 && w.skips(r.Documents, r.Tokens) {
				continue
			}
			if more, err := w.segment(ctx, r, yield); err != nil || !more {
				return more, err
			}
		}
	}
}

// skips reports whether to skip a range of documents, and counts them.
func (w *sequenceWalk) skips(documents, tokens int64) bool {
	if w.skip == nil || w.b.limit > 0 && w.d.at.Documents+documents > w.b.limit || !w.skip(documents, tokens) {
		return false
	}
	w.d.at.Documents += documents
	return true
}

// segment iterates over one segment from at.Document on.
func (w *sequenceWalk) segment(ctx context.Context, record segmentRecord, yield func(*spooled, error) bool) (bool,
	error) {
	at := &w.d.at
	fail := func(err error) (bool, error) {
		if errors.Is(err, errDamaged) || errors.Is(err, fs.ErrNotExist) {
			err = &missing{at.Unit, at.Segment, err}
		}
		return true, err
	}
	s, err := w.b.f.openSegment(at.Unit, at.Segment)
	if err != nil {
		return fail(err)
	}
	defer s.close()
	if s.foot.Documents != record.Documents || s.foot.Tokens != record.Tokens || s.foot.Shuffled {
		return fail(fmt.Errorf("%s: %w: it has %d documents, but its unit's record has %d", s.path, errDamaged,
			s.foot.Documents, record.Documents))
	}
	skip := at.Document
	for n, b := range s.foot.Blocks {
		if skip >= b.Documents {
			skip -= b.Documents
			continue
		}
		if skip == 0 && w.skips(int64(b.Documents), b.Tokens) {
			at.Document += b.Documents
			continue
		}
		if err := ctx.Err(); err != nil {
			return true, context.Cause(ctx)
		}
		if err := w.reader.open(s, n, w.skip == nil); err != nil {
			return fail(err)
		}
		for {
			more, err := w.reader.next()
			if err != nil {
				return fail(err)
			}
			if !more {
				break
			}
			if w.reader.current.part >= len(w.b.f.d.Units[at.Unit]) {
				return fail(fmt.Errorf("%s: %w: the unit has no part %d", s.path, errDamaged, w.reader.current.part))
			}
			if w.b.limit > 0 && at.Documents >= w.b.limit {
				return false, nil
			}
			var ids []byte
			if w.skip == nil {
				ids = w.reader.take()
			}
			if skip > 0 {
				skip--
				continue
			}
			if w.skip == nil {
				w.tokens = s.foot.dtype().AppendDecoded(w.tokens[:0], ids)
			}
			w.d.unit, w.d.meta, w.d.tokens = at.Unit, w.reader.current, w.tokens
			if !yield(&w.d, nil) {
				return false, nil
			}
			at.Document++
			at.Documents++
		}
	}
	return true, nil
}

// A missing is the error of a missing or damaged segment.
type missing struct {
	unit, segment int
	err           error
}

func (m *missing) Error() string { return m.err.Error() }

func (m *missing) Unwrap() error { return m.err }
