package shards

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// ErrNoDocuments is wrapped by [Shard.DocumentIDs] for a shard without x.docs.arrow, such as a
// shard that Megatron wrote.
var ErrNoDocuments = errors.New("the shard has no origins of its documents")

// MaxOriginLength is the maximum length in bytes of an id and of a file name in x.docs.arrow. It
// keeps a batch of the file within the range of Arrow's 32-bit offsets.
const MaxOriginLength = 4096

// DocumentOrigin is the source of a document: its id, file and line.
type DocumentOrigin struct {
	ID   string
	File string
	Line int64 // from 1
}

// Check returns an error if x.docs.arrow cannot hold the origin: a text has more than
// [MaxOriginLength] bytes or is not UTF-8.
func (o DocumentOrigin) Check() error {
	for _, f := range []struct{ name, value string }{{"id", o.ID}, {"file name", o.File}} {
		if len(f.value) > MaxOriginLength {
			return fmt.Errorf("the %s of the document has %d bytes; a shard can store at most %d", f.name, len(f.value),
				MaxOriginLength)
		}
		if !utf8.ValidString(f.value) {
			return fmt.Errorf("the %s of the document, %q, is not UTF-8", f.name, f.value)
		}
	}
	return nil
}

// documentBatch is the number of documents in each record batch of x.docs.arrow except the last. It
// is part of the format: document d is row d mod documentBatch of batch d div documentBatch.
const documentBatch = 1 << 16

// documentSchema is the schema of x.docs.arrow.
var documentSchema = arrow.NewSchema([]arrow.Field{
	{Name: "id", Type: arrow.BinaryTypes.String},
	{Name: "file", Type: arrow.BinaryTypes.String},
	{Name: "line", Type: arrow.PrimitiveTypes.Int64},
}, nil)

// maxBatchBytes is the maximum size of a record batch in the file. A batch with the longest ids and
// names is well below it.
const maxBatchBytes = 1 << 30

// An originWriter writes x.docs.arrow for a shard of any layout.
type originWriter struct {
	file    *ipc.FileWriter
	mem     memory.Allocator
	builder *array.RecordBuilder
	rows    int
}

// newOriginWriter starts the file on w. It allocates the memory of one batch from mem until
// [originWriter.Release].
func newOriginWriter(w io.Writer, mem memory.Allocator) (*originWriter, error) {
	file, err := ipc.NewFileWriter(w, ipc.WithSchema(documentSchema), ipc.WithZstd(), ipc.WithAllocator(mem))
	if err != nil {
		return nil, err
	}
	return &originWriter{file: file, mem: mem, builder: array.NewRecordBuilder(mem, documentSchema)}, nil
}

// Append adds the origin of the next document. The origin must have passed [DocumentOrigin.Check].
func (w *originWriter) Append(o DocumentOrigin) error {
	w.builder.Field(0).(*array.StringBuilder).Append(o.ID)
	w.builder.Field(1).(*array.StringBuilder).Append(o.File)
	w.builder.Field(2).(*array.Int64Builder).Append(o.Line)
	if w.rows++; w.rows == documentBatch {
		return w.flush()
	}
	return nil
}

func (w *originWriter) flush() error {
	if w.rows == 0 {
		return nil
	}
	batch := w.builder.NewRecordBatch()
	defer batch.Release()
	w.rows = 0
	return w.file.Write(batch)
}

// Close writes the last batch and the footer.
func (w *originWriter) Close() error {
	return errors.Join(w.flush(), w.file.Close())
}

// Release frees the memory.
func (w *originWriter) Release() { w.builder.Release() }

// Documents reads x.docs.arrow, the origins of a shard's documents. It is safe for concurrent use
// until its shard is closed.
type Documents struct {
	path string
	rows int64

	mu     sync.Mutex // guards the fields below
	file   *os.File
	reader *ipc.FileReader
	batch  arrow.RecordBatch // the batch that was used last
	number int               // index of batch
}

// DocumentIDs opens x.docs.arrow once; the shard closes it. DocumentIDs first hashes the file and
// compares it with the manifest, because a damaged length in an Arrow file can request more memory
// than exists. This takes a second or two per gigabyte, and stops if ctx is done. If the file does
// not exist, the error wraps [ErrNoDocuments].
func (s *Shard) DocumentIDs(ctx context.Context) (*Documents, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.origins != nil {
		return s.origins, nil
	}
	path := s.prefix + docsExt
	if s.manifest == nil && s.remote == nil {
		if _, err := os.Stat(path); err == nil {
			return nil, fmt.Errorf("%s cannot be verified without the manifest %s, which has its hash; restore it",
				path,
				s.ManifestPath())
		}
	}
	var want FileInfo
	if s.manifest != nil {
		if s.manifest.Foreign() {
			return nil, fmt.Errorf("%w: another program wrote %s", ErrNoDocuments, s.prefix)
		}
		want = s.manifest.Files["docs"]
	}
	if s.remote != nil {
		local, err := s.remote.local(ctx, path, want)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: %w", ErrNoDocuments, err)
		}
		if err != nil {
			return nil, err
		}
		path = local
	}
	d, err := OpenDocuments(ctx, path, want, s.Documents())
	if err != nil {
		return nil, err
	}
	s.origins = d
	return d, nil
}

// OpenDocuments opens the x.docs.arrow of a shard of any layout with the given number of documents.
// want is the file's entry in the shard's manifest. Otherwise it works like [Shard.DocumentIDs].
// The caller closes the result.
func OpenDocuments(ctx context.Context, path string, want FileInfo, documents int64) (*Documents, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrNoDocuments, err)
	}
	if err != nil {
		return nil, err
	}
	d := &Documents{path: path, rows: documents, file: f}
	if err = verifyFile(ctx, f, path, want, nil); err == nil {
		err = d.open(memory.NewGoAllocator())
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return d, nil
}

// open reads the footer.
func (d *Documents) open(mem memory.Allocator) (err error) {
	defer d.recovered(&err)
	r, err := ipc.NewFileReader(d.file, ipc.WithAllocator(mem), ipc.WithBodySizeLimit(maxBatchBytes))
	if err != nil {
		return d.corrupt("%w", err)
	}
	if !r.Schema().Equal(documentSchema) {
		err = d.corrupt("the columns are %v, want id, file and line", r.Schema().Fields())
	} else if want := (d.rows + documentBatch - 1) / documentBatch; int64(r.NumRecords()) != want {
		err = d.corrupt("%d batches, but the shard's %d documents need %d", r.NumRecords(), d.rows, want)
	}
	if err != nil {
		r.Close()
		return err
	}
	d.reader = r
	return nil
}

// Origin returns the origin of document doc, counted from 0.
func (d *Documents) Origin(doc int64) (_ DocumentOrigin, err error) {
	if doc < 0 || doc >= d.rows {
		return DocumentOrigin{}, fmt.Errorf("%s: document %d is out of range [0, %d)", d.path, doc, d.rows)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.recovered(&err)
	if n := int(doc / documentBatch); d.batch == nil || d.number != n {
		batch, err := d.load(n)
		if err != nil {
			return DocumentOrigin{}, err
		}
		if d.batch != nil {
			d.batch.Release()
		}
		d.batch, d.number = batch, n
	}
	row := int(doc % documentBatch)
	return DocumentOrigin{
		// Clone: the strings must not refer to the memory of the batch.
		ID:   strings.Clone(d.batch.Column(0).(*array.String).Value(row)),
		File: strings.Clone(d.batch.Column(1).(*array.String).Value(row)),
		Line: d.batch.Column(2).(*array.Int64).Value(row),
	}, nil
}

// Find returns all documents with the given id, in ascending order. It reads the whole file.
func (d *Documents) Find(ctx context.Context, id string) (docs []int64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.recovered(&err)
	for n := range d.reader.NumRecords() {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("searching %s: %w", d.path, err)
		}
		batch, err := d.load(n)
		if err != nil {
			return nil, err
		}
		ids := batch.Column(0).(*array.String)
		for row := range ids.Len() {
			if ids.Value(row) == id {
				docs = append(docs, int64(n)*documentBatch+int64(row))
			}
		}
		batch.Release()
	}
	return docs, nil
}

// load reads batch n and checks its number of rows.
func (d *Documents) load(n int) (arrow.RecordBatch, error) {
	batch, err := d.reader.RecordBatchAt(n)
	if err != nil {
		return nil, d.corrupt("batch %d: %w", n, err)
	}
	want := min(d.rows-int64(n)*documentBatch, documentBatch)
	for _, column := range batch.Columns() {
		if int64(column.Len()) != want || column.NullN() != 0 {
			err = d.corrupt("batch %d has %d rows with %d nulls, want %d rows without nulls", n, column.Len(),
				column.NullN(), want)
		}
	}
	if err != nil {
		batch.Release()
		return nil, err
	}
	return batch, nil
}

func (d *Documents) corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %w: %w", d.path, fmt.Errorf(format, args...), ErrCorrupt)
}

// recovered converts a panic into an error. Arrow's reader does not check every offset that it
// follows.
func (d *Documents) recovered(err *error) {
	if p := recover(); p != nil {
		*err = d.corrupt("invalid internal offsets: %v", p)
	}
}

// Close closes the file. No other method may run during or after Close.
func (d *Documents) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.batch != nil {
		d.batch.Release()
		d.batch = nil
	}
	return errors.Join(d.reader.Close(), d.file.Close())
}
