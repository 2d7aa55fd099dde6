package blend

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"mula/shards"
)

// A Document is one document of a plan's shards.
type Document struct {
	Source, Shard int    // index of the source in the plan, of the shard in the source
	Number        int64  // in the shard, from 0
	First         int64  // its first token in the shard
	Tokens        int64  // number of tokens, including the end-of-document token
	ID            string // empty, like File, if the shard has no record of its documents' origins
	File          string // input file
	Line          int64  // line in File, from 1; 0 if unknown
}

// A Part is the part of a document that a window holds.
type Part struct {
	Document
	From, To int // tokens [From, To) of the window, which has L+1 tokens
}

// Peek returns the sample at a position and the parts of documents in its window, in order. For a
// skipped position, it returns the sample that would be there. The first Peek into a shard reads
// the complete list of document origins; see [shards.Shard.DocumentIDs].
func (d *Data) Peek(ctx context.Context, position int64) (Sample, []Part, error) {
	s, err := d.Locate(position)
	if err != nil {
		return s, nil, err
	}
	parts, err := d.Parts(ctx, s)
	return s, parts, err
}

// Parts lists the parts of documents in a sample's window. Empty documents are not in any window.
func (d *Data) Parts(ctx context.Context, s Sample) ([]Part, error) {
	segments, err := d.order.segments(nil, s)
	if err != nil {
		return nil, err
	}
	var parts []Part
	at := int64(0) // in the sample
	err = d.over(s.Source, segments, func(shard *shards.Shard, g segment) error {
		end := g.token + g.length
		for span, err := range shard.Spans(g.token, end) {
			if err != nil {
				return fmt.Errorf("source %q: %w", d.Sources[s.Source].Name, err)
			}
			document, err := d.document(ctx, shard, s.Source, g.shard, span)
			if err != nil {
				return err
			}
			parts = append(parts, Part{document, int(at + max(span.First, g.token) - g.token),
				int(at + min(span.End, end) - g.token)})
		}
		at += g.length
		return nil
	})
	if err != nil {
		return nil, err
	}
	return parts, nil
}

// document looks up the origin of a document.
func (d *Data) document(ctx context.Context, s *shards.Shard, source, shard int, span shards.Span) (Document, error) {
	doc := Document{Source: source, Shard: shard, Number: span.Document, First: span.First,
		Tokens: span.End - span.First}
	origins, err := s.DocumentIDs(ctx)
	if errors.Is(err, shards.ErrNoDocuments) {
		return doc, nil
	}
	if err != nil {
		return doc, err
	}
	origin, err := origins.Origin(span.Document)
	if err != nil {
		return doc, err
	}
	doc.ID, doc.File, doc.Line = origin.ID, origin.File, origin.Line
	return doc, nil
}

// A Use describes how a plan uses a window.
type Use int

// The uses of a window.
//   - Drawn: at a position.
//   - SkippedOver: at a position that the plan skips.
//   - HeldOut: for validation.
//   - NotReached: the plan ends before it draws the window.
//   - NoWindow: the document is in no window, because it is empty or after the last complete window
//     of its shard.
const (
	Drawn Use = iota
	SkippedOver
	HeldOut
	NotReached
	NoWindow
)

// String describes the use.
func (u Use) String() string {
	switch u {
	case Drawn:
		return "drawn"
	case SkippedOver:
		return "skipped"
	case HeldOut:
		return "validation"
	case NotReached:
		return "not reached by the plan"
	case NoWindow:
		return "in no window"
	}
	return fmt.Sprintf("Use(%d)", int(u))
}

// An Occurrence is the part of a document in one window, and the window's use.
type Occurrence struct {
	Part   // From and To are 0 with NoWindow
	Use    Use
	Sample Sample // Position is -1 unless Use is Drawn or SkippedOver
}

// Where finds every position of the plan that reads a token of a document with this id. For each
// such document, occurrences are ordered by window in stored order, then by epoch, which is also
// the order of positions. A window that the plan never draws has one occurrence, whose Use says
// why. A document in no window has one occurrence, too. No occurrence therefore means that no shard
// has the id. Shards without a record of document ids cannot be searched. If none of the other
// shards has the id, Where fails and counts the shards that could not be searched.
func (d *Data) Where(ctx context.Context, id string) iter.Seq2[Occurrence, error] {
	return func(yield func(Occurrence, error) bool) {
		found := false
		unsearched, first := 0, ""
		for i := range d.Sources {
			for k := range d.Sources[i].Shards {
				documents, err := d.find(ctx, i, k, id)
				if errors.Is(err, shards.ErrNoDocuments) {
					if unsearched++; first == "" {
						first = d.ShardPath(i, k)
					}
					continue
				}
				if err != nil {
					yield(Occurrence{}, fmt.Errorf("source %q: %w", d.Sources[i].Name, err))
					return
				}
				for _, doc := range documents {
					found = true
					for o, err := range d.order.occurrences(ctx, doc) {
						if !yield(o, err) || err != nil {
							return
						}
					}
				}
			}
		}
		if !found && unsearched > 0 {
			yield(Occurrence{}, fmt.Errorf("document %q was not found, but %d shards cannot be searched, because they "+
				"have no .docs.arrow with document ids; the first is %s", id, unsearched, first))
		}
	}
}

// find lists the documents of a shard that have an id.
func (d *Data) find(ctx context.Context, source, shard int, id string) ([]Document, error) {
	s, err := d.pool.Acquire(d.firsts[source] + shard)
	if err != nil {
		return nil, err
	}
	defer d.pool.Release(d.firsts[source] + shard)
	origins, err := s.DocumentIDs(ctx)
	if err != nil {
		return nil, err
	}
	numbers, err := origins.Find(ctx, id)
	if err != nil {
		return nil, err
	}
	var found []Document
	for _, number := range numbers {
		var span shards.Span
		err := s.Guard(func() (err error) {
			span, err = s.Span(number)
			return err
		})
		if err != nil {
			return nil, err
		}
		doc, err := d.document(ctx, s, source, shard, span)
		if err != nil {
			return nil, err
		}
		found = append(found, doc)
	}
	return found, nil
}
