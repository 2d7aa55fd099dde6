package documents

import (
	"bytes"
	"fmt"
	"io"
	"unicode/utf8"
)

var (
	errCutArray  = fmt.Errorf("the file ends inside its array: %w", io.ErrUnexpectedEOF)
	errCutObject = fmt.Errorf("the file ends inside an object: %w", io.ErrUnexpectedEOF)
)

// An extent finds the end of a JSON value that starts with a brace or bracket, over any number of
// buffers. It examines only strings and braces; [lineScanner] validates the rest.
type extent struct {
	depth   int
	text    bool // in a string
	escaped bool // after a backslash in it
}

// pass consumes the value's bytes in b. It returns their number, and whether the value ends with
// them.
func (e *extent) pass(b []byte) (n int, ended bool) {
	for at := 0; at < len(b); {
		if e.escaped {
			e.escaped = false
			at++
			continue
		}
		if e.text {
			at += indexSpecial(b[at:])
			if at == len(b) {
				break
			}
			switch b[at] {
			case '"':
				e.text = false
			case '\\':
				e.escaped = true
			}
			at++
			continue
		}
		switch b[at] {
		case '"':
			e.text = true
		case '{', '[':
			e.depth++
		case '}', ']':
			if e.depth--; e.depth <= 0 {
				return at + 1, true
			}
		}
		at++
	}
	return len(b), false
}

// startJSON skips the bracket at the start of an array of objects.
func (r *Reader) startJSON() error {
	r.line = 1
	c, err := r.passSpace()
	if c == '[' && err == nil {
		r.array = true
		r.offset++
		_, err = r.in.Discard(1)
	}
	return err
}

// passSpace advances to the next byte that is not white space and returns it; -1 at the end of the
// file.
func (r *Reader) passSpace() (int, error) {
	for {
		b, err := r.buffered()
		if len(b) == 0 {
			return -1, err
		}
		rest := bytes.TrimLeft(b, " \t\r\n")
		n := len(b) - len(rest)
		r.line += int64(bytes.Count(b[:n], []byte{'\n'}))
		r.offset += int64(n)
		r.in.Discard(n)
		if len(rest) > 0 {
			return int(rest[0]), nil
		}
	}
}

// nextJSON returns the next object of JSON, which may extend over several lines.
func (r *Reader) nextJSON() (Document, error) {
	c, err := r.passSpace()
	if err != nil {
		return Document{}, err
	}
	switch {
	case r.array && c == ']':
		r.offset++
		r.in.Discard(1)
		if c, err = r.passSpace(); err == nil && c != -1 {
			err = r.stray(c, "after the end of the array")
		}
		if err != nil {
			return Document{}, err
		}
		return Document{}, r.finish()
	case !r.array && c == -1:
		return Document{}, r.finish()
	case c == -1:
		return Document{}, r.broken(r.line, r.offset, errCutArray)
	case r.array && r.values > 0:
		if c != ',' {
			return Document{}, r.stray(c, "instead of a comma or the end of the array")
		}
		r.offset++
		r.in.Discard(1)
		if c, err = r.passSpace(); err != nil {
			return Document{}, err
		}
	}
	if c != '{' {
		return Document{}, r.stray(c, "instead of an object")
	}
	r.values++
	object, err := r.readObject()
	if err != nil {
		return Document{}, err
	}
	return r.document(object)
}

// readObject returns the object that starts at the next byte, valid until the next call, and
// advances past it. r.start and r.number are its position.
func (r *Reader) readObject() ([]byte, error) {
	r.start, r.number = r.offset, r.line
	r.dropLong()
	var e extent
	for long := false; ; {
		b, err := r.buffered()
		if err != nil {
			return nil, err
		}
		if len(b) == 0 {
			return nil, r.broken(r.number, r.offset, errCutObject)
		}
		n, ended := e.pass(b)
		r.line += int64(bytes.Count(b[:n], []byte{'\n'}))
		r.offset += int64(n)
		length := r.offset - r.start
		if length > int64(r.o.MaxLine) {
			long, r.long = true, r.long[:0]
		}
		object := b[:n]
		if !long && (!ended || len(r.long) > 0) {
			r.addLong(object)
			object = r.long
		}
		r.in.Discard(n) // b stays in the buffer until the next read
		if ended {
			r.lines = r.line - 1
			if long {
				return nil, r.tooLong("object", length)
			}
			return object, nil
		}
	}
}

// stray is the error of an unexpected byte between objects. The data after it cannot be divided
// into objects.
func (r *Reader) stray(c int, where string) error {
	found := fmt.Sprintf("%q", rune(c))
	switch {
	case c == -1:
		found = "the end of the file"
	case c >= utf8.RuneSelf:
		found = fmt.Sprintf("the byte 0x%02x", c)
	}
	return r.faultAt(r.line, r.offset, BadStream, fmt.Errorf("malformed JSON: found %s %s; the rest of the file "+
		"cannot be read; repair the file", found, where))
}

// skipJSON advances past the object that starts at offset.
func (r *Reader) skipJSON(offset, lines int64) error {
	if err := r.discardTo(offset); err != nil {
		return err
	}
	if _, err := r.readObject(); err != nil && !recoverable(err) {
		return err
	}
	r.values, r.lines, r.line = 1, lines, lines+1
	return nil
}
