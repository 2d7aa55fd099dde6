package documents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/internal/flatbuffer"
)

const (
	// maxArrowBody is the maximum size of a record batch, and of a decompressed buffer in it.
	maxArrowBody = 2 << 30
	// maxArrowMeta is the maximum size of the metadata of a batch or of a file's footer.
	maxArrowMeta = 256 << 20
)

// limited is an allocator that rejects sizes that no valid file needs.
type limited struct{ memory.Allocator }

func (l limited) Allocate(size int) []byte {
	if size < 0 || size > maxArrowBody {
		panic(advise("a buffer has %d bytes, and the limit is %d MiB; write smaller record batches", size,
			maxArrowBody>>20))
	}
	return l.Allocator.Allocate(size)
}

func (l limited) Reallocate(size int, b []byte) []byte {
	if size < 0 || size > maxArrowBody {
		panic(advise("a buffer has %d bytes, and the limit is %d MiB; write smaller record batches", size,
			maxArrowBody>>20))
	}
	return l.Allocator.Reallocate(size, b)
}

func arrowOptions() []ipc.Option {
	return []ipc.Option{
		ipc.WithAllocator(limited{memory.NewGoAllocator()}), ipc.WithDictionaryDeltas(true),
	}
}

// guarded calls a function of the library, which follows the offsets in a file unchecked and panics
// on many invalid files.
func guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			if a, ok := p.(advice); ok {
				err = a
				return
			}
			err = fmt.Errorf("the file is damaged: %v", p)
		}
	}()
	return f()
}

// An arrowBlock is the position of a record batch in a file.
type arrowBlock struct {
	start int64
	meta  int64 // bytes of its metadata
	body  int64
}

func (k arrowBlock) end() int64 { return k.start + k.meta + k.body }

// readArrowFooter reads the positions of a file's record batches and dictionaries (format/File.fbs
// of Apache Arrow).
func readArrowFooter(file io.ReaderAt, size int64) (batches, dictionaries []arrowBlock, err error) {
	const magic = "ARROW1"
	var tail [10]byte
	if size < int64(len(magic)+2+len(tail)) {
		return nil, nil, io.ErrUnexpectedEOF
	}
	if _, err := file.ReadAt(tail[:], size-int64(len(tail))); err != nil {
		return nil, nil, err
	}
	if string(tail[4:]) != magic {
		return nil, nil, fmt.Errorf("an Arrow file must end with %q, but this file ends with %q: %w", magic, tail[4:],
			io.ErrUnexpectedEOF)
	}
	length := int64(int32(binary.LittleEndian.Uint32(tail[:])))
	end := size - int64(len(tail)) - length
	if length <= 0 || length > maxArrowMeta || end < int64(len(magic)+2) {
		return nil, nil, fmt.Errorf("the end of the file says that its metadata has %d bytes, but the file has %d "+
			"bytes", length, size)
	}
	b := make([]byte, length)
	if _, err := file.ReadAt(b, end); err != nil {
		return nil, nil, err
	}
	footer, err := flatbuffer.Root(b)
	if err != nil {
		return nil, nil, errors.New("dictionary list of the file is damaged")
	}
	if dictionaries, err = arrowBlocks(footer, 2, end); err != nil {
		return nil, nil, fmt.Errorf("dictionary %w", err)
	}
	if batches, err = arrowBlocks(footer, 3, end); err != nil {
		return nil, nil, fmt.Errorf("record batch %w", err)
	}
	for i := 1; i < len(batches); i++ {
		if batches[i].start < batches[i-1].end() {
			return nil, nil, fmt.Errorf("record batch %d starts before the end of the previous one", i)
		}
	}
	return batches, dictionaries, nil
}

// arrowBlocks reads a list of blocks before end, field n of a footer.
func arrowBlocks(footer flatbuffer.Table, n uint32, end int64) ([]arrowBlock, error) {
	vector, err := footer.Vector(n, 24)
	if err != nil {
		return nil, errors.New("list of the file is damaged")
	}
	blocks := make([]arrowBlock, vector.Len())
	for i := range blocks {
		v := vector.Bytes()[24*i:]
		k := arrowBlock{int64(binary.LittleEndian.Uint64(v)), int64(int32(binary.LittleEndian.Uint32(v[8:]))),
			int64(binary.LittleEndian.Uint64(v[16:]))}
		if k.start < 8 || k.start > end || k.meta < 8 || k.meta > end-k.start || k.body < 0 ||
			k.body > end-k.start-k.meta {
			return nil, fmt.Errorf("%d is outside of the file", i)
		}
		blocks[i] = k
	}
	return blocks, nil
}

// rowsOf reads the number of rows of a record batch (format/Message.fbs).
func (k arrowBlock) rowsOf(file io.ReaderAt) (int64, error) {
	meta, err := readArrowMeta(io.NewSectionReader(file, k.start, k.meta))
	if err != nil {
		return 0, err
	}
	message, err := flatbuffer.Root(meta)
	if err != nil {
		return 0, errArrowMeta
	}
	header, ok, err := message.Child(2)
	if err != nil || !ok {
		return 0, errArrowMeta
	}
	rows, err := header.Number(0, 8, 0)
	if err != nil || int64(rows) < 0 {
		return 0, errArrowMeta
	}
	return int64(rows), nil
}

// arrowReader reads the documents of record batches, of a file or of a stream.
type arrowReader struct {
	r       *Reader
	columns [2]arrowPath
	batch   int64 // the number of the current batch
	rec     arrow.RecordBatch
	values  [2]arrowValues
	at      int64 // the next row of rec
	first   int64 // row of the file at which rec starts
	base    int64 // row of the file at which the piece starts

	stream *ipc.Reader

	// for a file: the record batches up to the end of the piece; nil for a stream
	blocks []arrowBlock
	size   int64 // of the file
	whole  bool  // the piece ends with the file
}

// An arrowPath is the path of a column: its index among the fields, and the indices in nested
// structs. It is nil if the column does not exist.
type arrowPath []int

func newArrowFileReader(r *Reader, file *source) (rowReader, error) {
	a := &arrowReader{r: r, size: file.size, batch: r.piece.Start - 1}
	bad := func(err error) error {
		return r.broken(0, 0, inMetadata("Arrow", err))
	}
	batches, dictionaries, err := readArrowFooter(file, a.size)
	if err != nil {
		return nil, bad(err)
	}
	last := r.piece.End
	if last < 0 {
		last = int64(len(batches))
	}
	if r.piece.Start < 0 || r.piece.Start > last || last > int64(len(batches)) {
		return nil, fmt.Errorf("reading %s: expected record batches %[3]d to %[4]d, but the file has %[2]d; the file "+
			"changed after it was split; start again",
			r.piece.File, len(batches), r.piece.Start, last)
	}
	a.blocks = append([]arrowBlock{}, batches[:last]...)
	a.whole = last == int64(len(batches))
	for i, block := range a.blocks[:r.piece.Start] {
		n, err := block.rowsOf(file)
		if err != nil {
			return nil, bad(fmt.Errorf("record batch %d: %w", i, err))
		}
		a.base += n
	}
	a.first = a.base
	// The schema is at the start, as in a stream.
	from := []io.Reader{io.NewSectionReader(file, 8, a.size-8)}
	for _, k := range append(dictionaries, a.blocks[r.piece.Start:]...) {
		from = append(from, io.NewSectionReader(file, k.start, k.meta+k.body))
	}
	if err := a.open(&arrowMessages{from: from}); err != nil {
		return nil, err
	}
	r.hashRange(file, a.bound(r.piece.Start), a.bound(last))
	return a, nil
}

// bound returns the first byte of a record batch. For the first batch, it returns the start of the
// file, and after the last batch of the piece, the end of that batch.
func (a *arrowReader) bound(batch int64) int64 {
	switch {
	case batch == 0:
		return 0
	case batch < int64(len(a.blocks)):
		return a.blocks[batch].start
	case a.whole:
		return a.size
	}
	return a.blocks[batch-1].end()
}

func newArrowStreamReader(r *Reader) (rowReader, error) {
	a := &arrowReader{r: r, batch: -1}
	// a file contains a stream between its magic strings
	if head, err := r.in.Peek(8); err == nil && string(head[:6]) == "ARROW1" {
		r.in.Discard(8)
	}
	return a, a.open(&arrowMessages{stream: r.in})
}

// open reads the schema.
func (a *arrowReader) open(messages *arrowMessages) error {
	err := guarded(func() (err error) {
		a.stream, err = ipc.NewReaderFromMessageReader(messages, arrowOptions()...)
		return err
	})
	if err != nil {
		return a.r.broken(0, 0, fmt.Errorf("reading the schema of the Arrow file: %w", err))
	}
	if err := a.find(a.stream.Schema()); err != nil {
		return a.r.broken(0, 0, err)
	}
	return nil
}

// find finds the columns of the text and the id.
func (a *arrowReader) find(schema *arrow.Schema) error {
	paths := a.r.scanner.paths
	texts := arrowTexts(nil, nil, schema.Fields())
	text := findArrow(schema.Fields(), paths[textField])
	if text == nil {
		return noText(paths, texts)
	}
	if t := typeOfArrow(schema.Fields(), text); !isArrowText(t) {
		return wrongText(paths, t.String(), texts)
	}
	id := findArrow(schema.Fields(), paths[idField])
	if id == nil && a.r.o.ID != "" {
		return noID(paths, texts)
	}
	if id != nil {
		if t := typeOfArrow(schema.Fields(), id); !isArrowText(t) && !arrow.IsInteger(storage(t).ID()) {
			return wrongID(paths, t.String())
		}
	}
	a.columns = [2]arrowPath{textField: text, idField: id}
	return nil
}

// findArrow finds a column.
func findArrow(fields []arrow.Field, path []string) arrowPath {
	for i, f := range fields {
		if f.Name != path[0] {
			continue
		}
		if len(path) == 1 {
			return arrowPath{i}
		}
		if s, ok := f.Type.(*arrow.StructType); ok {
			if rest := findArrow(s.Fields(), path[1:]); rest != nil {
				return append(arrowPath{i}, rest...)
			}
		}
		return nil
	}
	return nil
}

// arrowTexts adds the first columns that could be the text to found.
func arrowTexts(found, path []string, fields []arrow.Field) []string {
	for _, f := range fields {
		path := append(path[:len(path):len(path)], f.Name)
		if s, ok := f.Type.(*arrow.StructType); ok {
			found = arrowTexts(found, path, s.Fields())
		} else if isArrowText(f.Type) && len(found) < 20 {
			found = append(found, joinPath(path))
		}
	}
	return found
}

func typeOfArrow(fields []arrow.Field, path arrowPath) arrow.DataType {
	t := fields[path[0]].Type
	for _, i := range path[1:] {
		t = t.(*arrow.StructType).Field(i).Type
	}
	return t
}

// storage returns the storage type of an extension type.
func storage(t arrow.DataType) arrow.DataType {
	for {
		e, ok := t.(arrow.ExtensionType)
		if !ok {
			return t
		}
		t = e.StorageType()
	}
}

func isArrowText(t arrow.DataType) bool {
	t = storage(t)
	if d, ok := t.(*arrow.DictionaryType); ok {
		t = storage(d.ValueType)
	}
	switch t.ID() {
	case arrow.STRING, arrow.LARGE_STRING, arrow.BINARY, arrow.LARGE_BINARY, arrow.STRING_VIEW, arrow.BINARY_VIEW:
		return true
	}
	return false
}

// advance moves to the next record batch that has rows. It returns false after the last.
func (a *arrowReader) advance() (bool, error) {
	for a.rec == nil || a.at >= a.rec.NumRows() {
		if a.rec != nil {
			a.first += a.rec.NumRows()
			a.rec = nil
		}
		a.batch++
		a.at = 0
		if err := a.r.ctx.Err(); err != nil {
			return false, a.r.stopped(err)
		}
		if a.blocks != nil {
			a.r.read.Store(a.bound(a.batch) - a.bound(a.r.piece.Start))
			if a.batch >= int64(len(a.blocks)) {
				return false, nil
			}
		}
		err := guarded(func() error {
			if !a.stream.Next() {
				return a.stream.Err()
			}
			a.rec = a.stream.RecordBatch()
			return a.bind()
		})
		if err != nil {
			a.rec = nil
			return false, a.r.broken(a.first-a.base+1, a.first,
				fmt.Errorf("row %d, at the start of record batch %d: %w",
					a.first, a.batch, err))
		}
		if a.rec == nil && a.blocks != nil {
			return false, a.r.broken(a.first-a.base+1, a.first, fmt.Errorf("row %d: record batch %d is missing",
				a.first, a.batch))
		}
		if a.rec == nil {
			return false, nil
		}
	}
	return true, nil
}

// bind sets up a.values for a.rec.
func (a *arrowReader) bind() (err error) {
	for i, path := range a.columns {
		if a.values[i] = (arrowValues{}); path == nil {
			continue
		}
		column := a.rec.Column(path[0])
		for _, child := range path[1:] {
			if err := a.values[i].under(column, a.rec.NumRows()); err != nil {
				return err
			}
			column = unwrap(column).(*array.Struct).Field(child)
		}
		if err := a.values[i].under(column, a.rec.NumRows()); err != nil {
			return err
		}
		if a.values[i].value, err = valuesOf(column); err != nil {
			return err
		}
	}
	return nil
}

// arrowValues returns the values of a column of a record batch.
type arrowValues struct {
	levels []arrow.Array // the column and its enclosing structs that have nulls
	value  func(i int) ([]byte, error)
}

// under adds an array whose nulls are nulls of the column too.
func (v *arrowValues) under(column arrow.Array, rows int64) error {
	if int64(column.Len()) < rows {
		return fmt.Errorf("a column has %d values, but the batch has %d rows", column.Len(), rows)
	}
	if bitmap := column.NullBitmapBytes(); len(bitmap) > 0 {
		if column.Data().Offset()+column.Len() > 8*len(bitmap) {
			return errors.New("the validity bitmap of a column has fewer bits than the column has values")
		}
		v.levels = append(v.levels, column)
	}
	return nil
}

// at returns a value, nil if it is null.
func (v *arrowValues) at(i int) ([]byte, error) {
	if v.value == nil {
		return nil, nil
	}
	for _, level := range v.levels {
		if level.IsNull(i) {
			return nil, nil
		}
	}
	return v.value(i)
}

func unwrap(column arrow.Array) arrow.Array {
	for {
		e, ok := column.(array.ExtensionArray)
		if !ok {
			return column
		}
		column = e.Storage()
	}
}

var errArrowOffsets = errors.New("a value is outside of its buffer, so the file is damaged")

// valuesOf returns the non-null values of an array.
func valuesOf(column arrow.Array) (func(i int) ([]byte, error), error) {
	column = unwrap(column)
	switch c := column.(type) {
	case *array.String, *array.Binary:
		return slices32(column.Data()), nil
	case *array.LargeString, *array.LargeBinary:
		return slices64(column.Data()), nil
	case *array.StringView, *array.BinaryView:
		return views(column.Data()), nil
	case *array.Dictionary:
		words := unwrap(c.Dictionary())
		if bitmap := words.NullBitmapBytes(); len(bitmap) > 0 && words.Data().Offset()+words.Len() > 8*len(bitmap) {
			return nil, errors.New("the validity bitmap of a dictionary has fewer bits than the dictionary has values")
		}
		index, err := integers(c.Indices())
		if err != nil {
			return nil, err
		}
		word, err := valuesOf(words)
		if err != nil {
			return nil, err
		}
		return func(i int) ([]byte, error) {
			k, _ := index(i)
			if k < 0 || k >= int64(words.Len()) {
				return nil, fmt.Errorf("index %d is out of range for a dictionary of %d values", k, words.Len())
			}
			if words.IsNull(int(k)) {
				return nil, nil
			}
			return word(int(k))
		}, nil
	}
	number, err := integers(column)
	if err != nil {
		return nil, err
	}
	var spelt []byte
	return func(i int) ([]byte, error) {
		v, unsigned := number(i)
		if unsigned {
			spelt = strconv.AppendUint(spelt[:0], uint64(v), 10)
		} else {
			spelt = strconv.AppendInt(spelt[:0], v, 10)
		}
		return spelt, nil
	}, nil
}

// integers returns the values of an array of integers, whose length the library has checked.
func integers(column arrow.Array) (func(i int) (v int64, unsigned bool), error) {
	switch c := column.(type) {
	case *array.Int8:
		return func(i int) (int64, bool) { return int64(c.Value(i)), false }, nil
	case *array.Int16:
		return func(i int) (int64, bool) { return int64(c.Value(i)), false }, nil
	case *array.Int32:
		return func(i int) (int64, bool) { return int64(c.Value(i)), false }, nil
	case *array.Int64:
		return func(i int) (int64, bool) { return c.Value(i), false }, nil
	case *array.Uint8:
		return func(i int) (int64, bool) { return int64(c.Value(i)), true }, nil
	case *array.Uint16:
		return func(i int) (int64, bool) { return int64(c.Value(i)), true }, nil
	case *array.Uint32:
		return func(i int) (int64, bool) { return int64(c.Value(i)), true }, nil
	case *array.Uint64:
		return func(i int) (int64, bool) { return int64(c.Value(i)), true }, nil
	}
	return nil, fmt.Errorf("a column has the unsupported type %s", column.DataType())
}

// bytesOf returns the contents of a buffer, which may be missing.
func bytesOf(data arrow.ArrayData, buffer int) []byte {
	if b := data.Buffers()[buffer]; b != nil {
		return b.Bytes()
	}
	return nil
}

// between returns a range of a buffer, not nil.
func between(values []byte, start, end int64) ([]byte, error) {
	if start < 0 || end < start || end > int64(len(values)) {
		return nil, errArrowOffsets
	}
	if start == end {
		return []byte{}, nil
	}
	return values[start:end:end], nil
}

func slices32(data arrow.ArrayData) func(i int) ([]byte, error) {
	offsets, values, first := arrow.Int32Traits.CastFromBytes(bytesOf(data, 1)), bytesOf(data, 2), data.Offset()
	return func(i int) ([]byte, error) {
		if i += first; i+1 >= len(offsets) {
			return nil, errArrowOffsets
		}
		return between(values, int64(offsets[i]), int64(offsets[i+1]))
	}
}

func slices64(data arrow.ArrayData) func(i int) ([]byte, error) {
	offsets, values, first := arrow.Int64Traits.CastFromBytes(bytesOf(data, 1)), bytesOf(data, 2), data.Offset()
	return func(i int) ([]byte, error) {
		if i += first; i+1 >= len(offsets) {
			return nil, errArrowOffsets
		}
		return between(values, offsets[i], offsets[i+1])
	}
}

func views(data arrow.ArrayData) func(i int) ([]byte, error) {
	headers, first := arrow.ViewHeaderTraits.CastFromBytes(bytesOf(data, 1)), data.Offset()
	return func(i int) ([]byte, error) {
		if i += first; i >= len(headers) || headers[i].Len() < 0 {
			return nil, errArrowOffsets
		}
		h := &headers[i]
		if h.IsInline() {
			return append([]byte{}, h.InlineBytes()...), nil
		}
		k := 2 + int64(h.BufferIndex())
		if k < 2 || k >= int64(len(data.Buffers())) {
			return nil, errArrowOffsets
		}
		return between(bytesOf(data, int(k)), int64(h.BufferOffset()), int64(h.BufferOffset())+int64(h.Len()))
	}
}

func (a *arrowReader) next() (Document, error) {
	r := a.r
	ok, err := a.advance()
	if err != nil {
		return Document{}, err
	}
	if !ok {
		return Document{}, r.finish()
	}
	i := int(a.at)
	a.at++
	r.start = a.first + int64(i)
	r.number = r.start - a.base + 1
	r.lines = r.number
	text, err := a.values[textField].at(i)
	var id []byte
	if err == nil {
		id, err = a.values[idField].at(i)
	}
	if err != nil {
		return Document{}, r.broken(r.number, r.start, fmt.Errorf("row %d (record batch %d): %w", r.start, a.batch,
			err))
	}
	return r.rowDocument(text, id)
}

func (a *arrowReader) skip(row int64) error {
	for {
		ok, err := a.advance()
		if err != nil || !ok || a.first > row {
			return err
		}
		if a.at = min(a.rec.NumRows(), row+1-a.first); a.at < a.rec.NumRows() {
			return nil
		}
	}
}
