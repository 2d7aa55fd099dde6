package documents

import (
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// rowDocument returns the document of a row's columns, which are nil if null. r.start and r.number
// are its position.
func (r *Reader) rowDocument(text, id []byte) (Document, error) {
	bad := func(kind Kind, err error) (Document, error) {
		e := &DocumentError{File: r.piece.File, Line: r.number, Offset: r.start, Kind: kind,
			Err: fmt.Errorf("row %d: %w", r.start, err)}
		if kind != BadID {
			e.ID = string(id)
		}
		return Document{}, e
	}
	name := r.scanner.names
	if !utf8.Valid(id) {
		return bad(BadID, fmt.Errorf("%q is not UTF-8", name[idField]))
	}
	if err := checkID(name[idField], id); err != nil {
		return bad(BadID, err)
	}
	switch {
	case text == nil:
		return bad(NoText, fmt.Errorf("%q is null", name[textField]))
	case len(text) == 0:
		return bad(Empty, fmt.Errorf("%q is empty", name[textField]))
	case len(text) > r.o.MaxLine:
		return bad(LineTooLong, fmt.Errorf("%q has %d bytes, and the limit is %d", name[textField], len(text),
			r.o.MaxLine))
	}
	if !utf8.Valid(text) {
		return bad(BadUTF8, fmt.Errorf("%q is not UTF-8 at byte %d", name[textField], InvalidUTF8(text)))
	}
	return r.own(id, text), nil
}

// hashRange hashes bytes of a file in its own goroutine, while the required columns are read with
// random access.
func (r *Reader) hashRange(file io.ReaderAt, from, to int64) {
	if r.sum == nil {
		return
	}
	r.hashed = make(chan struct{})
	go func() {
		defer close(r.hashed)
		buf := make([]byte, max(0, min(readBuffer, to-from)))
		for from < to && r.hashErr == nil && r.ctx.Err() == nil {
			n, err := file.ReadAt(buf[:min(int64(len(buf)), to-from)], from)
			r.sum.Write(buf[:n])
			if from += int64(n); err != nil && !(err == io.EOF && from == to) {
				r.hashErr = err
			}
		}
	}()
}

// waitForHash waits for the end of hashRange.
func (r *Reader) waitForHash() error {
	if r.hashed == nil {
		return nil
	}
	<-r.hashed // ends with r.ctx
	if err := r.ctx.Err(); err != nil {
		return r.stopped(err)
	}
	if errors.Is(r.hashErr, io.EOF) {
		r.hashErr = io.ErrUnexpectedEOF
	}
	if r.hashErr != nil {
		return r.broken(r.lines+1, r.start, r.hashErr)
	}
	return nil
}
