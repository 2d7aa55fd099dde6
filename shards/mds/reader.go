package mds

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"mula/shards"
	"mula/shards/layout"
)

// maxIndex is the maximum size of index.json in bytes. A file of samples needs about 600 bytes
// there.
const maxIndex = 1 << 30

// A reader reads one folder. It implements [shards.DocumentReader].
type reader struct {
	folder    string
	mark      *layout.Marked // index.json
	manifest  *shards.Manifest
	sums      *shards.Sums // sums of the files as written; nil if the folder has none
	files     []fileColumns
	documents int64
	tokens    int64
}

// fileColumns is a file of samples with the columns of its ids.
type fileColumns struct {
	file
	tokens   int // column numbers
	id       int // or -1
	idIsInt  bool
	encoding encoding
}

// open opens the folder. It reads ids from the column tokens with the encoding bytes or ndarray.
// For bytes, the hints must contain the element type. Files may be compressed with zstd or gzip.
func open(folder string, h layout.Hints) (_ *reader, err error) {
	r := &reader{folder: folder, tokens: -1}
	if r.mark, err = layout.OpenMarked(filepath.Join(folder, indexName)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	if r.manifest, err = layout.ReadManifest(filepath.Join(folder, manifestName), id); err != nil {
		return nil, err
	}
	if err := r.mark.Unchanged(); err != nil {
		return nil, err
	}
	if err := r.readIndex(h); err != nil {
		return nil, err
	}
	if m := r.manifest; m != nil {
		if m.Documents != r.documents {
			return nil, layout.Differs(filepath.Join(folder, manifestName), "documents", m.Documents, r.documents)
		}
		r.tokens = m.Tokens
	}
	sizes := make([]int64, len(r.files))
	for i := range r.files {
		sizes[i] = r.files[i].written().Bytes
	}
	var sumsErr error
	r.sums, sumsErr = shards.OpenSums(filepath.Join(folder, sumsName), r.manifest, sumsName, sizes...)
	if err := r.mark.Unchanged(); err != nil { // otherwise the files may belong to another data set
		return nil, err
	}
	if sumsErr != nil {
		return nil, sumsErr
	}
	return r, nil
}

// readIndex reads index.json, one file of samples at a time, so that a large file that is not an
// index needs little memory.
func (r *reader) readIndex(h layout.Hints) error {
	d := json.NewDecoder(io.NewSectionReader(r.mark, 0, maxIndex))
	fail := func(err error) error { return r.corrupt("byte %d: %w", d.InputOffset(), err) }
	delim := func(want json.Delim) error {
		t, err := d.Token()
		if err == nil && t != want {
			err = fmt.Errorf("%v; want %v", t, want)
		}
		return err
	}
	if err := delim('{'); err != nil {
		return fail(err)
	}
	version := 0
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return fail(err)
		}
		switch key {
		case "version":
			err = d.Decode(&version)
		case "shards":
			for err = delim('['); err == nil && d.More(); {
				var f file
				if err = d.Decode(&f); err != nil {
					break
				}
				c, err := columns(&f, h.DType)
				if err != nil {
					return fmt.Errorf("%s: file %d, %q: %w", r.mark.Name(), len(r.files), f.RawData.Basename, err)
				}
				r.files = append(r.files, c)
				r.documents += c.Samples
			}
			if err == nil {
				err = delim(']')
			}
		default:
			err = d.Decode(new(json.RawMessage))
		}
		if err != nil {
			return fail(err)
		}
	}
	if err := delim('}'); err != nil {
		return fail(err)
	}
	if version != 2 {
		return fmt.Errorf("%s: version %d is not supported; want version 2", r.mark.Name(), version)
	}
	return nil
}

// columns checks the entry of a file in index.json.
func columns(f *file, bytesOf string) (c fileColumns, err error) {
	c.file, c.id = *f, -1
	wrong := func(format string, args ...any) (fileColumns, error) {
		return c, fmt.Errorf("%w: %w", fmt.Errorf(format, args...), shards.ErrCorrupt)
	}
	n := len(f.ColumnNames)
	if f.Format != "mds" || f.Version != 2 {
		return c, fmt.Errorf("format %q of version %d is not supported; want mds of version 2", f.Format, f.Version)
	}
	if len(f.ColumnEncodings) != n || len(f.ColumnSizes) != n {
		return wrong("%d column_names, %d column_encodings, %d column_sizes", n, len(f.ColumnEncodings),
			len(f.ColumnSizes))
	}
	if f.Samples < 0 || f.Samples > 1<<30 || f.RawData.Bytes < 0 || f.RawData.Bytes > 1<<32 {
		return wrong("%d samples do not fit %d bytes", f.Samples, f.RawData.Bytes)
	}
	for _, size := range f.ColumnSizes {
		if size != nil && (*size < 0 || *size > 1<<31) {
			return wrong("invalid column size %d", *size)
		}
	}
	names := []string{f.RawData.Basename}
	if f.ZipData != nil {
		names = append(names, f.ZipData.Basename)
	}
	for _, name := range names {
		if !filepath.IsLocal(filepath.FromSlash(name)) {
			return wrong("the path %q is outside the folder", name)
		}
	}
	if c.tokens = slices.Index(f.ColumnNames, tokensColumn); c.tokens < 0 {
		return c, fmt.Errorf("no column %q among %q", tokensColumn, f.ColumnNames)
	}
	if c.encoding, err = parseTokens(f.ColumnEncodings[c.tokens], bytesOf); err != nil {
		return c, err
	}
	if c.id = slices.Index(f.ColumnNames, idColumn); c.id >= 0 {
		switch f.ColumnEncodings[c.id] {
		case "str":
		case "int":
			c.idIsInt = true
		default:
			c.id = -1
		}
	}
	return c, nil
}

// Manifest returns the content of mula.json, or nil.
func (r *reader) Manifest() *shards.Manifest { return r.manifest }

// Summed reports whether ids are checked with sums when they are read.
func (r *reader) Summed() bool { return r.sums != nil }

// DType returns the element type of the ids.
func (r *reader) DType() shards.DType {
	if len(r.files) == 0 {
		return ""
	}
	return r.files[0].encoding.value
}

// Documents returns the number of samples.
func (r *reader) Documents() int64 { return r.documents }

// Tokens returns the number of tokens from the manifest, -1 without a manifest.
func (r *reader) Tokens() int64 { return r.tokens }

// Close closes index.json and mula.sums. All opens and closes the files of samples.
func (r *reader) Close() error {
	err := r.mark.Close()
	if r.sums != nil {
		err = errors.Join(err, r.sums.Close())
	}
	return err
}

func (r *reader) corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %w: %w", r.mark.Name(), fmt.Errorf(format, args...), shards.ErrCorrupt)
}

// All implements [shards.DocumentReader].
func (r *reader) All(ctx context.Context) iter.Seq2[shards.TokenDocument, error] {
	return func(yield func(shards.TokenDocument, error) bool) {
		if err := r.all(ctx, func(doc shards.TokenDocument) bool { return yield(doc, nil) }); err != nil {
			yield(shards.TokenDocument{}, err)
		}
	}
}

// all passes documents to yield until it returns false.
func (r *reader) all(ctx context.Context, yield func(shards.TokenDocument) bool) error {
	origins, err := layout.OpenOrigins(ctx, filepath.Join(r.folder, originsName), originsName, r.manifest)
	if err != nil {
		return err
	}
	defer origins.Close()
	b := new(buffers)
	for i := range r.files {
		more, err := r.read(ctx, i, b, origins, yield)
		if err != nil || !more {
			return err
		}
	}
	return nil
}

// damaged adds the documents to an error about a damaged file of samples. read is the number of
// documents of the folder that were read before.
func (r *reader) damaged(ctx context.Context, err error, file int, read int64, origins *layout.Origins) error {
	f := &r.files[file]
	path := filepath.Join(r.folder, filepath.FromSlash(f.written().Basename))
	first := int64(0) // first document of the file
	for _, before := range r.files[:file] {
		first += before.Samples
	}
	return r.sums.Damage(ctx, err, path, func(yield func(shards.DocumentBytes, error) bool) {
		if f.ZipData != nil { // data after the damage cannot be decompressed
			for number := read; number < first+f.Samples; number++ {
				if !yield(shards.DocumentBytes{Document: number, Bytes: shards.ByteSpan{First: 0,
					End: f.ZipData.Bytes}}, nil) {
					return
				}
			}
			return
		}
		data, err := os.Open(path)
		if err != nil {
			yield(shards.DocumentBytes{}, err)
			return
		}
		defer data.Close()
		table := bufio.NewReader(io.NewSectionReader(data, 4, 4*(f.Samples+1)))
		var start, end [4]byte
		_, err = io.ReadFull(table, start[:])
		for i := int64(0); i < f.Samples && err == nil; i++ {
			if _, err = io.ReadFull(table, end[:]); err != nil {
				break
			}
			told := shards.ByteSpan{First: 4 + 4*i, End: 4 + 4*(i+2)}
			sample := shards.ByteSpan{First: int64(binary.LittleEndian.Uint32(start[:])),
				End: int64(binary.LittleEndian.Uint32(end[:]))}
			if !yield(shards.DocumentBytes{Document: first + i, Bytes: told}, nil) ||
				!yield(shards.DocumentBytes{Document: first + i, Bytes: sample}, nil) {
				return
			}
			start = end
		}
		if err != nil {
			yield(shards.DocumentBytes{}, err)
		}
	}, origins.Of)
}

// buffers are reused for all files of a folder.
type buffers struct {
	offsets []uint32
	sample  bytes.Buffer
	sizes   []int
	doc     shards.TokenDocument

	documents int64 // number of documents read so far, from all files
}

// read passes the documents of one file to yield. more is false if yield has returned false.
func (r *reader) read(ctx context.Context, file int, b *buffers, origins *layout.Origins,
	yield func(shards.TokenDocument) bool) (more bool, err error) {
	f := &r.files[file]
	in, path, close, err := r.open(ctx, file)
	if err != nil {
		return false, err
	}
	defer close()
	defer func() {
		if err != nil {
			err = r.damaged(ctx, err, file, b.documents, origins)
		}
	}()
	at := int64(0) // position in the decompressed file
	fail := func(format string, args ...any) (bool, error) {
		err := fmt.Errorf(format, args...)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("the file ends before its %d samples do", f.Samples)
		}
		return false, fmt.Errorf("%s: byte %d: %w: %w", path, at, err, shards.ErrCorrupt)
	}
	var word [4]byte
	next := func() (uint32, error) {
		_, err := io.ReadFull(in, word[:])
		at += 4
		return binary.LittleEndian.Uint32(word[:]), err
	}
	n, err := next()
	if err != nil {
		return fail("%w", err)
	}
	if int64(n) != f.Samples {
		return fail("%d samples, but %s has %d", n, r.mark.Name(), f.Samples)
	}
	b.offsets = b.offsets[:0] // grows only with the data that exists
	for range int64(n) + 1 {
		offset, err := next()
		if err != nil {
			return fail("%w", err)
		}
		if k := len(b.offsets); k > 0 && offset < b.offsets[k-1] || k == 0 && int64(offset) < 4+4*(int64(n)+1) ||
			int64(offset) > f.RawData.Bytes {
			return fail("sample %d has the invalid start %d", k, offset)
		}
		b.offsets = append(b.offsets, offset)
	}
	if end := b.offsets[n]; int64(end) != f.RawData.Bytes {
		return fail("the samples end at byte %d, but %s has a file size of %d", end, r.mark.Name(), f.RawData.Bytes)
	}
	skipped, err := io.CopyN(io.Discard, in, int64(b.offsets[0])-at)
	if at += skipped; err != nil {
		return fail("%w", err)
	}
	for i := range int(n) {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		b.sample.Reset()
		if _, err := io.CopyN(&b.sample, in, int64(b.offsets[i+1]-b.offsets[i])); err != nil {
			return fail("sample %d: %w", i, err)
		}
		if err := b.decode(f, b.sample.Bytes()); err != nil {
			return fail("sample %d: %w", i, err)
		}
		at += int64(b.sample.Len())
		if origin, err := origins.Next(); err != nil {
			return false, err
		} else if origin != (shards.DocumentOrigin{}) {
			b.doc.Origin = origin
		}
		b.documents++
		if !yield(b.doc) {
			return false, nil
		}
	}
	if _, err := in.ReadByte(); err != io.EOF {
		if err == nil {
			err = errors.New("unexpected data after the last sample")
		}
		return fail("%w", err)
	}
	return true, nil
}

// open opens a file of samples. If both the compressed and the uncompressed file exist, it opens
// the one with sums, or else the uncompressed one. It first compares a file without sums with its
// hashes in index.json.
func (r *reader) open(ctx context.Context, file int) (in *bufio.Reader, path string, close func(), err error) {
	f := &r.files[file]
	want, other := &f.RawData, f.ZipData
	if r.sums != nil && other != nil {
		want, other = other, want
	}
	path = filepath.Join(r.folder, filepath.FromSlash(want.Basename))
	data, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) && other != nil {
		want = other
		path = filepath.Join(r.folder, filepath.FromSlash(want.Basename))
		data, err = os.Open(path)
	}
	if err != nil {
		return nil, "", nil, fmt.Errorf("reading shard: %w", err)
	}
	close = func() { data.Close() }
	var from io.Reader = data
	summed := r.sums != nil && want == f.written()
	if summed {
		from = r.sums.Reader(file, data, want.Bytes)
	}
	info, err := data.Stat()
	if err == nil {
		err = r.mark.Unchanged()
	}
	switch {
	case err != nil:
	case info.Size() != want.Bytes:
		err = fmt.Errorf("%s has %d bytes, but %s has %d: %w", path, info.Size(), r.mark.Name(), want.Bytes,
			shards.ErrCorrupt)
	case !summed:
		err = r.verify(ctx, data, want)
	}
	switch {
	case err != nil:
	case want == &f.RawData:
		return bufio.NewReaderSize(from, 1<<18), path, close, nil
	case f.Compression == nil:
		err = fmt.Errorf("%s is compressed, but %s names no compression: %w", path, r.mark.Name(), shards.ErrCorrupt)
	default:
		algorithm, _, _ := strings.Cut(*f.Compression, ":")
		switch algorithm {
		case "zstd":
			var z *zstd.Decoder
			if z, err = zstd.NewReader(from, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(1<<32),
				zstd.WithDecoderMaxWindow(1<<27)); err == nil {
				return bufio.NewReaderSize(z, 1<<18), path, func() { z.Close(); data.Close() }, nil
			}
		case "gz":
			var z *gzip.Reader
			if z, err = gzip.NewReader(bufio.NewReader(from)); err == nil {
				return bufio.NewReaderSize(z, 1<<18), path, close, nil
			}
		default:
			err = fmt.Errorf("compression %q is not supported; want zstd or gz", *f.Compression)
		}
		err = fmt.Errorf("%s: %w", path, err)
	}
	close()
	return nil, "", nil, err
}

// decode decodes the document of a sample: the sizes of the variable-size columns, followed by the
// values of all columns.
func (b *buffers) decode(f *fileColumns, data []byte) error {
	b.sizes = b.sizes[:0]
	for i, fixed := range f.ColumnSizes {
		if fixed != nil && *fixed > 0 {
			b.sizes = append(b.sizes, *fixed)
			continue
		}
		if len(data) < 4 {
			return fmt.Errorf("the sample ends within the size of the column %q", f.ColumnNames[i])
		}
		b.sizes = append(b.sizes, int(binary.LittleEndian.Uint32(data)))
		data = data[4:]
	}
	b.doc.Origin = shards.DocumentOrigin{}
	for i, size := range b.sizes {
		if size > len(data) {
			return fmt.Errorf("the column %q has %d bytes, but the sample has only %d left", f.ColumnNames[i], size,
				len(data))
		}
		value := data[:size]
		data = data[size:]
		switch {
		case i == f.tokens:
			var err error
			if b.doc.Tokens, err = f.encoding.appendIDs(b.doc.Tokens[:0], value); err != nil {
				return fmt.Errorf("the column %q: %w", tokensColumn, err)
			}
		case i == f.id && !f.idIsInt:
			b.doc.Origin.ID = string(value)
		case i == f.id && size == 8:
			b.doc.Origin.ID = strconv.FormatInt(int64(binary.LittleEndian.Uint64(value)), 10)
		}
	}
	if len(data) > 0 {
		return fmt.Errorf("%d bytes follow the last column", len(data))
	}
	return nil
}
