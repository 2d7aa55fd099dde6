package documents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

const (
	// maxPage is the maximum size of a decompressed Parquet page. Writers aim at 1 MiB, but keep up
	// to 1,024 rows together.
	maxPage = 1 << 30
	// columnBatch is how many values are read at once.
	columnBatch = 1024
	// columnBatchDelta is the batch size for columns whose values share prefixes. The library
	// copies the prefixes, so a batch may be larger than its page.
	columnBatchDelta = 16
)

// The Parquet reader is github.com/apache/arrow-go/v18/parquet/file, with three changes. Only the
// columns of the text and the id are read, a page at a time. Panics on damaged files are recovered,
// see guarded. Codecs that allocate the size given in a damaged file are replaced. Page checksums
// are not verified.

// exact is a codec whose output must have the size in the page header. The library's codecs for
// Snappy and Zstandard allocate the decompressed size that the compressed data declares, up to 4
// GiB and 64 GiB.
type exact struct {
	compress.Codec // for writing
	decode         func(out, body []byte) ([]byte, error)
}

func (c exact) DecodeWithError(out, body []byte) ([]byte, error) { return c.decode(out, body) }

func init() {
	register := func(name, base compress.Compression, decode func(out, body []byte) ([]byte, error)) {
		codec, err := compress.GetCodec(base)
		if err != nil {
			panic(err)
		}
		compress.RegisterCodec(name, exact{codec, decode})
	}
	register(compress.Codecs.Snappy, compress.Codecs.Snappy, func(out, body []byte) ([]byte, error) {
		n, err := snappy.DecodedLen(body)
		if err != nil {
			return nil, err
		}
		if n != len(out) {
			return nil, fmt.Errorf("the page has %d bytes after decompression, but its header says %d", n, len(out))
		}
		return snappy.Decode(out, body)
	})
	decoder, err := zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderConcurrency(0),
		zstd.WithDecoderMaxWindow(maxPage))
	if err != nil {
		panic(err)
	}
	register(compress.Codecs.Zstd, compress.Codecs.Zstd, func(out, body []byte) ([]byte, error) {
		return decoder.DecodeAll(body, out[:0:len(out)])
	})
	// not implemented by the library
	register(compress.Codecs.Lz4, compress.Codecs.Lz4Raw, hadoopLZ4)
}

// hadoopLZ4 decodes the codec LZ4 in Hadoop's framing: blocks preceded by their sizes. Some writers
// omit the sizes.
func hadoopLZ4(out, body []byte) ([]byte, error) {
	rest, at := body, 0
	for len(rest) > 0 {
		if len(rest) < 8 {
			break
		}
		size, compressed := int64(binary.BigEndian.Uint32(rest)), int64(binary.BigEndian.Uint32(rest[4:]))
		if compressed > int64(len(rest)-8) || size > int64(len(out)-at) {
			break
		}
		n, err := lz4.UncompressBlock(rest[8:8+compressed], out[at:int64(at)+size])
		if err != nil || int64(n) != size {
			break
		}
		at += n
		rest = rest[8+compressed:]
	}
	if len(rest) == 0 && at == len(out) {
		return out, nil
	}
	n, err := lz4.UncompressBlock(body, out)
	return out[:n], err
}

// A columnReader returns the values of a column of a row group in order. It is reused for later row
// groups.
type columnReader struct {
	p      *parquetReader
	column *parquetColumn
	chunk  file.ColumnChunkReader
	batch  int64

	levels []int16 // definition levels of the batch; none if the column cannot be null
	rows   int64   // of the batch
	at     int64   // the next row of the batch
	value  int     // the next non-null value of the batch
	values int

	texts   []parquet.ByteArray // memory of the library, valid until the next batch is read
	numbers []int64
	shorts  []int32
	spelt   []byte
}

// start starts a row group.
func (c *columnReader) start(group int) error {
	err := guarded(func() error { return c.open(group) })
	if err != nil {
		return fmt.Errorf("column %q: %w", c.column.name, err)
	}
	return nil
}

func (c *columnReader) open(group int) error {
	c.close()
	c.rows, c.at = 0, 0
	chunk, err := c.p.meta.file.RowGroup(group).ColumnChunk(c.column.leaf)
	if err != nil {
		return err
	}
	if codec := chunk.Compression(); codec != compress.Codecs.Uncompressed {
		if _, err := compress.GetCodec(codec); err != nil {
			return advise("the column is compressed with the codec %v, which is not supported; "+
				"write the file again with "+
				"zstd or snappy", codec)
		}
	}
	properties := parquet.NewReaderProperties(limited{memory.NewGoAllocator()})
	properties.BufferedStreamEnabled = true
	properties.BufferSize = 64 << 10
	// The memory for a page is allocated before it is read.
	properties.MaxCompressedPageSize = min(maxPage, max(parquet.DefaultMaxCompressedPageSize,
		chunk.TotalCompressedSize()))
	properties.MaxUncompressedPageSize = min(maxPage, max(parquet.DefaultMaxUncompressedPageSize,
		chunk.TotalUncompressedSize()))
	var from io.ReaderAt = c.p.source
	if o := c.p.source.object; o != nil {
		data := c.p.meta.file.RowGroups[group].Columns[c.column.leaf].MetaData
		start, size := data.DataPageOffset, data.TotalCompressedSize
		if dictionary := data.GetDictionaryPageOffset(); dictionary > 0 && dictionary < start {
			start = dictionary
		}
		from = newObjectReader(c.p.r.ctx, o, min(max(size, smallReads), maxReads), start+size)
	}
	reader, err := file.NewParquetReader(io.NewSectionReader(from, 0, c.p.size),
		file.WithMetadata(c.p.meta.file), file.WithReadProps(properties))
	if err != nil {
		return err
	}
	rows := reader.RowGroup(group)
	c.batch = columnBatch
	dictionary := false
	for _, e := range chunk.Encodings() {
		switch e {
		case parquet.Encodings.DeltaByteArray:
			c.batch = columnBatchDelta
		case parquet.Encodings.PlainDict, parquet.Encodings.RLEDict:
			dictionary = true
		}
	}
	if dictionary {
		// The library allocates as many values as the dictionary header declares.
		pages, err := rows.GetColumnPageReader(c.column.leaf)
		if err != nil {
			return err
		}
		defer pages.Close()
		if pages.Next() {
			if page, ok := pages.Page().(*file.DictionaryPage); ok &&
				int64(page.NumValues()) > int64(len(page.Data()))/4 {
				return errors.New("the dictionary has fewer values than its header says")
			}
		}
	}
	if c.chunk, err = rows.Column(c.column.leaf); err != nil {
		return err
	}
	return nil
}

func (c *columnReader) close() {
	if c.chunk != nil {
		c.chunk.Close()
		c.chunk = nil
	}
}

// next returns the next value, nil if it is null. It is valid until the next call.
func (c *columnReader) next() ([]byte, error) {
	if c.at == c.rows {
		if err := c.p.r.ctx.Err(); err != nil {
			return nil, err
		}
		if err := guarded(c.read); err != nil {
			return nil, fmt.Errorf("column %q: %w", c.column.name, err)
		}
	}
	c.at++
	if c.column.levels > 0 && c.levels[c.at-1] < c.column.levels {
		return nil, nil
	}
	if c.value >= c.values {
		return nil, fmt.Errorf("column %q: the page has fewer values than its header says", c.column.name)
	}
	c.value++
	switch c.column.kind {
	case parquet.Types.ByteArray:
		if v := c.texts[c.value-1]; v != nil {
			return v, nil
		}
		return []byte{}, nil
	case parquet.Types.Int32:
		if v := c.shorts[c.value-1]; c.column.unsigned {
			c.spelt = strconv.AppendUint(c.spelt[:0], uint64(uint32(v)), 10)
		} else {
			c.spelt = strconv.AppendInt(c.spelt[:0], int64(v), 10)
		}
	default:
		if v := c.numbers[c.value-1]; c.column.unsigned {
			c.spelt = strconv.AppendUint(c.spelt[:0], uint64(v), 10)
		} else {
			c.spelt = strconv.AppendInt(c.spelt[:0], v, 10)
		}
	}
	return c.spelt, nil
}

// read reads the next batch of values.
func (c *columnReader) read() (err error) {
	if c.levels == nil && c.column.levels > 0 {
		c.levels = make([]int16, columnBatch)
	}
	c.rows, c.at, c.value = 0, 0, 0
	switch r := c.chunk.(type) {
	case *file.ByteArrayColumnChunkReader:
		if c.texts == nil {
			c.texts = make([]parquet.ByteArray, columnBatch)
		}
		c.rows, c.values, err = r.ReadBatchInPage(c.batch, c.texts, c.levels, nil)
	case *file.Int32ColumnChunkReader:
		if c.shorts == nil {
			c.shorts = make([]int32, columnBatch)
		}
		c.rows, c.values, err = r.ReadBatchInPage(c.batch, c.shorts, c.levels, nil)
	case *file.Int64ColumnChunkReader:
		if c.numbers == nil {
			c.numbers = make([]int64, columnBatch)
		}
		c.rows, c.values, err = r.ReadBatchInPage(c.batch, c.numbers, c.levels, nil)
	}
	if err == nil {
		err = c.chunk.Err()
	}
	if err == nil && c.rows <= 0 {
		err = errors.New("there are fewer values than the row group has rows")
	}
	if err != nil {
		c.rows = 0
	}
	return err
}
