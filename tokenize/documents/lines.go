package documents

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// startLines advances to the first line of a piece: the line after the first line feed of its
// bytes, or the first line of the file.
func (r *Reader) startLines() error {
	if r.piece.Start == 0 {
		return nil
	}
	found, err := r.passLine(r.piece.End)
	if !found && r.offset == r.piece.End {
		r.offset++ // the line extends beyond the end, so no line starts in the piece
	}
	return err
}

// passLine advances past the next line feed. If there is none before end or the end of the file, it
// advances to a byte at or after end, or to the end of the file. end -1 means the end of the file.
func (r *Reader) passLine(end int64) (found bool, err error) {
	for r.offset < end || end < 0 {
		b, err := r.buffered()
		if err != nil || len(b) == 0 {
			return false, err
		}
		n := bytes.IndexByte(b, '\n') + 1
		found := n > 0
		if !found {
			n = len(b)
		}
		r.in.Discard(n)
		r.offset += int64(n)
		if found {
			return true, nil
		}
	}
	return false, nil
}

// readLine returns the next line of the piece with its line feed, valid until the next call, and
// advances past it. r.start and r.number are its position. A line above the limit is skipped and
// returned as an error.
func (r *Reader) readLine() ([]byte, error) {
	// the file's first line, which a byte order mark may push beyond the end of a small piece
	first := r.piece.Start == 0 && r.lines == 0
	if r.piece.End >= 0 && r.offset > r.piece.End && !first {
		return nil, r.finish()
	}
	r.start, r.number = r.offset, r.lines+1
	r.dropLong()
	for {
		part, err := r.in.ReadSlice('\n')
		r.offset += int64(len(part))
		length := r.offset - r.start
		if err != nil && err != bufio.ErrBufferFull && err != io.EOF {
			return nil, r.broken(r.number, r.offset, err)
		}
		if err == io.EOF && length == 0 {
			return nil, r.finish()
		}
		whole := err == nil || err == io.EOF
		if whole {
			r.lines++
		} else if err := r.ctx.Err(); err != nil {
			return nil, r.stopped(err)
		}
		if content := length - int64(len(part)-len(bytes.TrimSuffix(part,
			[]byte("\n")))); content > int64(r.o.MaxLine) {
			r.long = r.long[:0]
			if whole {
				return nil, r.tooLong("line", content)
			}
			continue
		}
		if whole && len(r.long) == 0 {
			return part, nil
		}
		r.addLong(part)
		if whole {
			return r.long, nil
		}
	}
}

// nextLine returns the document of the next line that is not blank.
func (r *Reader) nextLine() (Document, error) {
	for {
		line, err := r.readLine()
		if err != nil {
			return Document{}, err
		}
		if len(line) == 0 || line[0] <= ' ' && len(bytes.TrimLeft(line, " \t\r\n")) == 0 {
			if err := r.ctx.Err(); err != nil {
				return Document{}, r.stopped(err)
			}
			continue
		}
		if r.format == Text {
			return r.textDocument(bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r")))
		}
		return r.document(line)
	}
}

// skipLine advances past the line that contains a byte.
func (r *Reader) skipLine(offset, lines int64) error {
	if err := r.discardTo(offset); err != nil {
		return err
	}
	r.lines = lines
	_, err := r.passLine(-1)
	return err
}

// nextFile returns the document that is the whole file.
func (r *Reader) nextFile() (Document, error) {
	r.next = func() (Document, error) { return Document{}, r.finish() }
	for {
		b, err := r.buffered()
		if err != nil {
			return Document{}, err
		}
		if len(b) == 0 {
			break
		}
		r.offset += int64(len(b))
		r.lines += int64(bytes.Count(b, []byte{'\n'}))
		if r.offset <= int64(r.o.MaxLine) {
			r.addLong(b)
		}
		r.in.Discard(len(b))
	}
	if r.offset > int64(r.o.MaxLine) {
		return Document{}, r.tooLong("file", r.offset)
	}
	defer r.dropLong()
	return r.textDocument(r.long)
}

// textDocument returns a document of a text in temporary memory.
func (r *Reader) textDocument(text []byte) (Document, error) {
	if len(text) == 0 {
		return Document{}, r.faultAt(r.number, r.start, Empty, errors.New("the file is empty"))
	}
	if at := InvalidUTF8(text); at < len(text) {
		return Document{}, r.faultAt(r.number, r.start+int64(at), BadUTF8, errors.New("the text is not UTF-8"))
	}
	return r.own(nil, text), nil
}
