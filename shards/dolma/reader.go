package dolma

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"strconv"

	"github.com/klauspost/compress/gzip"

	"mula/shards"
	"mula/shards/layout"
)

// npyMagic starts a file of numpy.save. The files of dolma have no header.
const npyMagic = "\x93NUMPY"

// maxRow is the maximum length of a line of x.csv.gz in bytes.
const maxRow = 1 << 20

// A reader reads one shard. It implements [shards.DocumentReader].
type reader struct {
	npy       *layout.Marked
	csvPath   string
	csv       *os.File // nil if the shard has no list of documents
	manifest  *shards.Manifest
	dtype     shards.DType
	tokens    int64
	documents int64
	eod       int64
}

// open opens the shard with the given prefix. The element type is determined by the manifest, else
// by the hints ([layout.Hints.TypeOf]), and must match the size of x.npy and the last line of
// x.csv.gz. Without x.csv.gz, documents end with the end-of-document id of the manifest or the
// hints, and ids after the last end form a document.
func open(prefix string, h layout.Hints) (_ *reader, err error) {
	r := &reader{csvPath: prefix + csvExt, documents: -1, eod: h.EOD}
	if r.npy, err = layout.OpenMarked(prefix + npyExt); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	if r.csv, err = os.Open(r.csvPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	if r.manifest, err = layout.ReadManifest(prefix+manifestExt, id); err != nil {
		return nil, err
	}
	sumsErr := r.npy.OpenSums(prefix+sumsExt, r.manifest)
	if err := r.npy.Unchanged(); err != nil {
		return nil, err
	}
	magic := make([]byte, len(npyMagic))
	if _, err := r.npy.ReadAt(magic, 0); err == nil && string(magic) == npyMagic {
		return nil, fmt.Errorf("%s starts with the header of numpy.save, which files of dolma do not have; write the "+
			"array with its method tofile", r.npy.Name())
	}
	if err := r.measure(prefix, h); err != nil {
		return nil, err
	}
	if sumsErr != nil { // reported last: errors about the ids are more helpful
		return nil, sumsErr
	}
	if r.csv == nil && r.eod < 0 && r.tokens > 0 {
		return nil, fmt.Errorf("%s has no %s with the ends of its documents; restore it, or give the "+
			"end-of-document id", r.npy.Name(), r.csvPath)
	}
	return r, nil
}

// measure determines the element type and the number of ids.
func (r *reader) measure(prefix string, h layout.Hints) (err error) {
	switch m := r.manifest; {
	case m != nil:
		if r.dtype, err = shards.ParseDType(string(m.DType)); err != nil {
			return fmt.Errorf("%s: %w: %w", prefix+manifestExt, err, shards.ErrCorrupt)
		}
		r.documents = m.Documents
		if m.Tokenizer.EOD >= 0 {
			r.eod = m.Tokenizer.EOD
		}
		if r.npy.Size != m.Tokens*int64(r.dtype.Size()) {
			return layout.Differs(prefix+manifestExt, "bytes of .npy", m.Tokens*int64(r.dtype.Size()), r.npy.Size)
		}
	default:
		ids := int64(-1)
		if r.csv != nil {
			ids = 0
			for row, err := range r.rows(context.Background()) {
				if err != nil {
					return err
				}
				ids = row.end
			}
		}
		if r.dtype, err = h.TypeOf(r.npy.Name(), r.npy.Size, ids, types); err != nil {
			return err
		}
	}
	if r.npy.Size%int64(r.dtype.Size()) != 0 {
		return fmt.Errorf("%s has %d bytes, not a multiple of the size of %s: it was cut short, or has another "+
			"type: %w",
			r.npy.Name(), r.npy.Size, r.dtype, shards.ErrCorrupt)
	}
	r.tokens = r.npy.Size / int64(r.dtype.Size())
	return nil
}

// Manifest returns the content of x.json, or nil.
func (r *reader) Manifest() *shards.Manifest { return r.manifest }

// Summed reports whether ids are checked with sums when they are read.
func (r *reader) Summed() bool { return r.npy.Summed() }

// DType returns the element type of x.npy.
func (r *reader) DType() shards.DType { return r.dtype }

// Documents returns the number of documents from the manifest, -1 without a manifest.
func (r *reader) Documents() int64 { return r.documents }

// Tokens returns the number of ids in x.npy.
func (r *reader) Tokens() int64 { return r.tokens }

// Close closes the files.
func (r *reader) Close() error {
	err := r.npy.Close()
	if r.csv != nil {
		err = errors.Join(err, r.csv.Close())
	}
	return err
}

// All implements [shards.DocumentReader].
func (r *reader) All(ctx context.Context) iter.Seq2[shards.TokenDocument, error] {
	return func(yield func(shards.TokenDocument, error) bool) {
		each := r.listed
		if r.csv == nil {
			each = r.unlisted
		}
		if err := each(ctx, func(doc shards.TokenDocument) bool { return yield(doc, nil) }); err != nil {
			yield(shards.TokenDocument{}, r.damaged(ctx, err))
		}
	}
}

// damaged adds the names of documents to an error about damaged ids.
func (r *reader) damaged(ctx context.Context, err error) error {
	var last row
	return r.npy.Damage(ctx, err, r.dtype, func(yield func(int64, error) bool) {
		if r.csv == nil {
			yield(0, fmt.Errorf("%s does not exist", r.csvPath))
			return
		}
		for row, err := range r.rows(ctx) {
			if last = row; !yield(row.end, err) {
				return
			}
		}
	}, func(int64) (shards.DocumentOrigin, error) { return last.origin, nil })
}

// listed passes the documents of x.csv.gz to yield until it returns false.
func (r *reader) listed(ctx context.Context, yield func(shards.TokenDocument) bool) error {
	ids := layout.NewIDs(r.npy, r.dtype, r.tokens)
	var doc shards.TokenDocument
	n := int64(0)
	for row, err := range r.rows(ctx) {
		if err != nil {
			return err
		}
		if row.start != ids.Next() || row.end < row.start {
			return r.corrupt("document %d (line %d) has the tokens %d to %d, but the previous document ends at %d", n,
				n+1,
				row.start, row.end, ids.Next())
		}
		if row.end > r.tokens {
			return r.corrupt("document %d (line %d) ends at token %d, but %s has %d", n, n+1, row.end, r.npy.Name(),
				r.tokens)
		}
		doc.Origin = row.origin
		if doc.Tokens, err = ids.Append(doc.Tokens[:0], row.end-row.start); err != nil {
			return err
		}
		n++
		if !yield(doc) {
			return nil
		}
	}
	if ids.Left() > 0 {
		return r.corrupt("documents end at token %d, but %s has %d; without this file, documents end with the "+
			"end-of-document id", ids.Next(), r.npy.Name(), r.tokens)
	}
	if r.documents >= 0 && r.documents != n {
		return r.corrupt("%d documents, but the manifest has %d", n, r.documents)
	}
	return nil
}

// unlisted finds documents by their end-of-document ids.
func (r *reader) unlisted(ctx context.Context, yield func(shards.TokenDocument) bool) (err error) {
	ids := layout.NewIDs(r.npy, r.dtype, r.tokens)
	var doc shards.TokenDocument
	for ids.Left() > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		if doc.Tokens, err = ids.AppendUntil(doc.Tokens[:0], r.eod); err != nil {
			return err
		}
		if !yield(doc) {
			return nil
		}
	}
	return nil
}

func (r *reader) corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %w: %w", r.csvPath, fmt.Errorf(format, args...), shards.ErrCorrupt)
}

// A row is a line of x.csv.gz.
type row struct {
	start, end int64
	origin     shards.DocumentOrigin
}

// rows yields the rows of x.csv.gz: start, end and, if present, id, file and line.
func (r *reader) rows(ctx context.Context) iter.Seq2[row, error] {
	return func(yield func(row, error) bool) {
		z, err := gzip.NewReader(bufio.NewReaderSize(io.NewSectionReader(r.csv, 0, 1<<62), 1<<16))
		if err != nil {
			yield(row{}, r.corrupt("%w", err))
			return
		}
		in := bufio.NewReaderSize(z, 1<<16)
		var text []byte // the fields of the row, concatenated
		var ends []int
		for n := int64(1); ; n++ {
			if n&1023 == 0 && ctx.Err() != nil {
				yield(row{}, ctx.Err())
				return
			}
			text, ends, err = readRow(in, text[:0], ends[:0])
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(row{}, r.corrupt("line %d: %w", n, err))
				return
			}
			record, err := parseRow(text, ends)
			if err != nil {
				yield(row{}, r.corrupt("line %d: %w", n, err))
				return
			}
			if !yield(record, nil) {
				return
			}
		}
	}
}

// parseRow parses the fields of a row. Field i ends at ends[i] of text.
func parseRow(text []byte, ends []int) (row, error) {
	field := func(i int) []byte {
		start := 0
		if i > 0 {
			start = ends[i-1]
		}
		return text[start:ends[i]]
	}
	if len(ends) != 2 && len(ends) != 5 {
		return row{}, fmt.Errorf("%d fields; want start and end, and optionally id, file and line", len(ends))
	}
	var out row
	for i, to := range []*int64{&out.start, &out.end} {
		v, err := strconv.ParseInt(string(field(i)), 10, 64)
		if err != nil || v < 0 {
			return row{}, fmt.Errorf("invalid token offset %q", field(i))
		}
		*to = v
	}
	if len(ends) == 5 {
		out.origin.ID, out.origin.File = string(field(2)), string(field(3))
		// 0 if another program wrote something else
		out.origin.Line, _ = strconv.ParseInt(string(field(4)), 10, 64)
	}
	return out, nil
}

// readRow reads a row of CSV in the default dialect of Python's csv module. It appends the
// concatenated text of the fields to text and their ends to ends. Rows end with \r, \n or both.
func readRow(in *bufio.Reader, text []byte, ends []int) ([]byte, []int, error) {
	quoted, read, fieldStart := false, false, true
	for {
		c, err := in.ReadByte()
		switch {
		case err == io.EOF && !read:
			return text, ends, io.EOF
		case err == io.EOF && quoted:
			return text, ends, errors.New("the file ends within quotes")
		case err == io.EOF:
			return text, append(ends, len(text)), nil
		case err != nil:
			return text, ends, err
		}
		read = true
		switch {
		case quoted && c == '"':
			if next, err := in.Peek(1); err == nil && next[0] == '"' {
				in.Discard(1)
				text = append(text, '"')
			} else {
				quoted = false
			}
		case quoted:
			text = append(text, c)
		case c == '"' && fieldStart:
			quoted, fieldStart = true, false
		case c == ',':
			ends = append(ends, len(text))
			fieldStart = true
		case c == '\r' || c == '\n':
			if next, err := in.Peek(1); c == '\r' && err == nil && next[0] == '\n' {
				in.Discard(1)
			}
			return text, append(ends, len(text)), nil
		default:
			text = append(text, c)
			fieldStart = false
		}
		if len(text) > maxRow || len(ends) > 16 {
			return text, ends, fmt.Errorf("row has more than %d bytes or 16 fields", maxRow)
		}
	}
}
