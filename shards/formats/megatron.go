package formats

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"mula/shards"
	"mula/shards/layout"
)

// Megatron is the layout of Megatron-LM, which blends read.
var Megatron = layout.Layout{
	ID: shards.Megatron, Name: "megatron", Users: "Megatron-LM, NeMo; what mula blends",
	Shape:  "PREFIX.bin, PREFIX.idx",
	Marker: ".idx", Own: []string{".bin"}, Manifest: ".json", Sums: ".sums", Origins: ".docs.arrow",
	IDs: ".bin", Types: []shards.DType{shards.UInt16, shards.Int32},
	Path: func(prefix, name string) string {
		if name == "docs" {
			name += ".arrow"
		}
		return prefix + "." + name
	},
	Choose: func(vocabSize int) shards.DType {
		if vocabSize == 0 {
			return shards.Int32
		}
		return shards.DTypeFor(vocabSize)
	},
	Create: func(_ *layout.Layout, s layout.Settings) (shards.DocumentWriter, error) {
		w, err := shards.CreateOn(s.FS, s.Prefix, s.DType, s.Info)
		if err != nil {
			return nil, err // w would be an interface that holds a nil pointer
		}
		return w, nil
	},
	Open: func(prefix string, _ layout.Hints) (shards.DocumentReader, error) { return openMegatron(prefix) },
}

// megatron is a [shards.DocumentReader] of Megatron's layout.
type megatron struct{ *shards.Shard }

func openMegatron(prefix string) (shards.DocumentReader, error) {
	s, err := shards.Open(prefix)
	if err != nil {
		return nil, err
	}
	return megatron{s}, nil
}

// All implements [shards.DocumentReader].
func (m megatron) All(ctx context.Context) iter.Seq2[shards.TokenDocument, error] {
	return func(yield func(shards.TokenDocument, error) bool) {
		if err := m.all(ctx, func(doc shards.TokenDocument) bool { return yield(doc, nil) }); err != nil {
			yield(shards.TokenDocument{}, err)
		}
	}
}

// all passes documents to yield until it returns false.
func (m megatron) all(ctx context.Context, yield func(shards.TokenDocument) bool) error {
	var origins *shards.Documents
	if m.Manifest() != nil {
		var err error
		if origins, err = m.DocumentIDs(ctx); err != nil && !errors.Is(err, shards.ErrNoDocuments) {
			return err
		}
	}
	var doc shards.TokenDocument
	next := int64(0)
	for d := range m.Documents() {
		if err := ctx.Err(); err != nil {
			return err
		}
		var span shards.Span
		err := m.Guard(func() (err error) {
			span, err = m.Span(d)
			return err
		})
		if err != nil {
			return err
		}
		if span.First != next || span.End > m.Tokens() {
			return fmt.Errorf("%s.idx: document %d has the tokens %d to %d of %d, but the previous document ends "+
				"at %d: %w",
				m.Prefix(), d, span.First, span.End, m.Tokens(), next, shards.ErrCorrupt)
		}
		next = span.End
		doc.Tokens = slices.Grow(doc.Tokens[:0], int(span.End-span.First))[:span.End-span.First]
		if err := m.Read(doc.Tokens, span.First); err != nil {
			return err
		}
		if origins != nil {
			if doc.Origin, err = origins.Origin(d); err != nil {
				return err
			}
		}
		if !yield(doc) {
			return nil
		}
	}
	if next != m.Tokens() {
		return fmt.Errorf("%s.idx: documents end at token %d of %d: %w", m.Prefix(), next, m.Tokens(),
			shards.ErrCorrupt)
	}
	return nil
}
