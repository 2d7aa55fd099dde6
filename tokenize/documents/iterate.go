package documents

import (
	"context"
	"io"
	"iter"
)

// ReadDocuments reads the documents of inputs in their order, one input after the other. Lines are
// counted from the start of each input, and a document without an id gets its [DefaultID].
//
// An unusable document yields a [*DocumentError]. Iteration then continues with the next document,
// so that the caller can count the error and continue. Iteration ends after an error of kind
// [BadStream], and after any other error (a file that cannot be opened, ctx). The number of
// documents that are missing is then unknown.
func ReadDocuments(ctx context.Context, inputs []string, o Options) iter.Seq2[Document, error] {
	return func(yield func(Document, error) bool) {
		names := BaseNames(inputs)
		for i, input := range inputs {
			if !readInput(ctx, input, names[i], o, yield) {
				return
			}
		}
	}
}

// readInput yields the documents of one input. It reports whether to continue with the next input.
func readInput(ctx context.Context, input, name string, o Options, yield func(Document, error) bool) bool {
	r, err := Open(ctx, Piece{File: input, End: -1}, o)
	if err != nil {
		yield(Document{}, err)
		return false
	}
	defer r.Close()
	for {
		doc, err := r.Next()
		if err == io.EOF {
			return true
		}
		if err == nil && doc.ID == "" {
			doc.ID = DefaultID(name, doc.Line)
		}
		if !yield(doc, err) || err != nil && !recoverable(err) {
			return false
		}
	}
}
