package fms

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
	"strings"

	"mula/internal/flatbuffer"
	"mula/internal/mapping"
	"mula/shards"
	"mula/shards/layout"
)

// Field numbers in Arrow's metadata (format/File.fbs, Schema.fbs, Message.fbs of Apache Arrow), and
// type numbers.
const (
	footerSchema, footerBatches                                = 1, 3
	schemaEndianness, schemaFields                             = 0, 1
	fieldName, fieldTypeType, fieldType                        = 0, 2, 3
	fieldDictionary, fieldChildren                             = 4, 5
	intBits, intSigned                                         = 0, 1
	messageHeaderType, messageHeader, messageBody              = 1, 2, 3
	batchLength, batchNodes, batchBuffers, batchCompression    = 0, 1, 2, 3
	headerRecordBatch                                          = 3
	typeNull, typeInt, typeFloat, typeBinary, typeUtf8         = 1, 2, 3, 4, 5
	typeBool, typeDecimal, typeDate, typeTime, typeTimestamp   = 6, 7, 8, 9, 10
	typeList, typeStruct, typeFixedBinary, typeDuration        = 12, 13, 15, 18
	typeLargeBinary, typeLargeUtf8, typeLargeList, typeFixList = 19, 20, 21, 16
)

const (
	arrowMagic = "ARROW1"
	tailSize   = 4 + len(arrowMagic)
	// size of a record batch's entry in the footer: position, size of the metadata, padding, size
	// of the body
	blockSize = 24
	maxDepth  = 16
)

// A reader reads one shard. It implements [shards.DocumentReader].
type reader struct {
	prefix   string
	path     string // path of x.arrow
	file     mapping.File
	manifest *shards.Manifest
	sums     *shards.Sums // nil if the shard has no sums
	blocks   []byte       // footer entries of the record batches, blockSize bytes each
	count    int64        // number of record batches
	node     uint32       // index of the column tokens among the nodes of a batch
	buffer   uint32       // index of its first buffer
	dtype    shards.DType
}

// open opens the shard with the given prefix, an Arrow file in which each record batch is a
// document. It reads ids from the column tokens, integers of 8 to 64 bits.
func open(prefix string) (_ *reader, err error) {
	r := &reader{prefix: prefix, path: prefix + arrowExt}
	if r.file, err = mapping.Open(r.path); err != nil {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	if r.manifest, err = layout.ReadManifest(prefix+manifestExt, id); err != nil {
		return nil, err
	}
	var sumsErr error
	r.sums, sumsErr = shards.OpenSums(prefix+sumsExt, r.manifest, sumsName, int64(len(r.file.Data)))
	if err := layout.Unchanged(r.path, r.file.Info); err != nil {
		return nil, err
	}
	if err := mapping.Guard(r.checkFooter); err != nil {
		return nil, err
	}
	if err := mapping.Guard(r.readFooter); err != nil {
		return nil, err
	}
	if sumsErr != nil { // reported last: errors about the file are more helpful
		return nil, sumsErr
	}
	if m := r.manifest; m != nil && m.Documents != r.Documents() {
		return nil, layout.Differs(prefix+manifestExt, "documents", m.Documents, r.Documents())
	}
	return r, nil
}

func (r *reader) corrupt(at int64, format string, args ...any) error {
	return fmt.Errorf("%s: byte %d: %w: %w", r.path, at, fmt.Errorf(format, args...), shards.ErrCorrupt)
}

// footerBlocks returns the position of the list of record batches in a file that mula wrote. Only
// the size of the footer and the magic follow the list. The position is negative if the manifest
// has more documents than the file can list.
func (r *reader) footerBlocks() int64 {
	if r.manifest.Documents > maxDocuments {
		return -1
	}
	return int64(len(r.file.Data)) - int64(tailSize) - blockSize*r.manifest.Documents
}

// checkFooter compares the blocks that contain the footer with their sums.
func (r *reader) checkFooter() error {
	if r.sums == nil {
		return nil
	}
	from := max(0, r.footerBlocks()-int64(len(appendFooter(nil, 0))))
	err := r.sums.Check(0, r.file.Data, from, int64(len(r.file.Data)))
	if err == nil {
		return nil
	}
	ctx := context.Background() // finding the documents may take as long as reading the shard once
	origins, originsErr := layout.OpenOrigins(ctx, r.prefix+docsExt, docsName, r.manifest)
	if originsErr != nil { // without origins, the message has only the numbers
		origins = new(layout.Origins)
	}
	defer origins.Close()
	return r.damaged(ctx, err, origins)
}

// damaged adds the documents to an error about damage. A document needs its record batch and its
// entry in the footer.
func (r *reader) damaged(ctx context.Context, err error, origins *layout.Origins) error {
	return r.sums.Damage(ctx, err, r.path, func(yield func(shards.DocumentBytes, error) bool) {
		size, list := int64(len(r.file.Data)), r.footerBlocks()
		if list < 0 {
			yield(shards.DocumentBytes{}, fmt.Errorf("%s has %d documents, too many for %d bytes",
				r.prefix+manifestExt, r.manifest.Documents, size))
			return
		}
		for n := range r.manifest.Documents {
			told := shards.ByteSpan{First: list + blockSize*n, End: list + blockSize*(n+1)}
			if !yield(shards.DocumentBytes{Document: n, Bytes: told}, nil) {
				return
			}
			start, meta, body := batchAt(r.file.Data[told.First:])
			if within(start, meta, body, size) &&
				!yield(shards.DocumentBytes{Document: n, Bytes: shards.ByteSpan{First: start,
					End: start + meta + body}}, nil) {
				return
			}
		}
	}, origins.Of)
}

// batchAt decodes the footer entry of a record batch: its start, and the sizes of its metadata and
// body in bytes.
func batchAt(block []byte) (start, meta, body int64) {
	le := binary.LittleEndian
	return int64(le.Uint64(block)), int64(int32(le.Uint32(block[8:]))), int64(le.Uint64(block[16:]))
}

// within reports whether a record batch can be at this position in a file of size bytes.
func within(start, meta, body, size int64) bool {
	return start >= 0 && meta >= 8 && body >= 0 && start <= size-meta && body <= size-meta-start
}

// readFooter locates the record batches and the column.
func (r *reader) readFooter() error {
	data := r.file.Data
	size := int64(len(data))
	if len(data) < len(arrowMagic)+2+tailSize {
		return r.corrupt(0, "a file of %d bytes is too small for an Arrow file", size)
	}
	tail := data[len(data)-tailSize:]
	if string(tail[4:]) != arrowMagic {
		return r.corrupt(size-int64(len(arrowMagic)), "the file does not end as an Arrow file does: it was cut "+
			"short, or has another format (Arrow streams are not supported)")
	}
	length := int64(binary.LittleEndian.Uint32(tail))
	start := size - int64(tailSize) - length
	if start < int64(len(arrowMagic)) {
		return r.corrupt(size-int64(tailSize), "a footer of %d bytes does not fit a file of %d", length, size)
	}
	footer := data[start : start+length]
	t, err := flatbuffer.Root(footer)
	if err != nil {
		return r.corrupt(start, "%w", err)
	}
	blocks, err := t.Vector(footerBatches, blockSize)
	if err != nil {
		return r.corrupt(start, "%w", err)
	}
	r.blocks, r.count = blocks.Bytes(), int64(blocks.Len())
	schema, ok, err := t.Child(footerSchema)
	if err == nil && !ok {
		err = errors.New("no schema")
	}
	if err == nil {
		err = r.readSchema(schema)
	}
	if err != nil {
		return r.corrupt(start, "%w", err)
	}
	return nil
}

// readSchema locates the column tokens.
func (r *reader) readSchema(schema flatbuffer.Table) error {
	if endianness, err := schema.Number(schemaEndianness, 2, 0); err != nil || endianness != 0 {
		return errors.Join(errors.New("big-endian numbers are not supported"), err)
	}
	fields, err := schema.Vector(schemaFields, 4)
	if err != nil {
		return err
	}
	budget := 1 << 12 // maximum number of fields
	for i := range fields.Len() {
		field, err := fields.Table(i)
		if err != nil {
			return err
		}
		name, err := field.Text(fieldName)
		if err != nil {
			return err
		}
		if name == tokensColumn {
			return r.readType(field)
		}
		nodes, buffers, err := extent(field, maxDepth, &budget)
		if err != nil {
			return fmt.Errorf("column %q: %w", name, err)
		}
		r.node += nodes
		r.buffer += buffers
	}
	return fmt.Errorf("no column %q", tokensColumn)
}

// readType reads the type of the column tokens.
func (r *reader) readType(field flatbuffer.Table) error {
	kind, err := field.Number(fieldTypeType, 1, 0)
	if err != nil {
		return err
	}
	of, ok, err := field.Child(fieldType)
	if err != nil {
		return err
	}
	if _, dictionary, err := field.Child(fieldDictionary); err != nil || dictionary || kind != typeInt || !ok {
		return errors.Join(fmt.Errorf("the column %q must have one integer per row", tokensColumn), err)
	}
	bits, err1 := of.Number(intBits, 4, 0)
	signed, err2 := of.Number(intSigned, 1, 0)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if bits != 8 && bits != 16 && bits != 32 && bits != 64 {
		return fmt.Errorf("the column %q has integers of %d bits; want 8, 16, 32 or 64", tokensColumn, bits)
	}
	r.dtype = shards.Unsigned(int(bits / 8))
	if signed != 0 {
		r.dtype = shards.DType(strings.TrimPrefix(string(r.dtype), "u"))
	}
	return nil
}

// extent returns the number of nodes and buffers that a column has in a record batch.
func extent(field flatbuffer.Table, depth int, budget *int) (nodes, buffers uint32, err error) {
	if *budget--; depth == 0 || *budget < 0 {
		return 0, 0, errors.New("fields are nested too deeply")
	}
	kind, err := field.Number(fieldTypeType, 1, 0)
	if err != nil {
		return 0, 0, err
	}
	if _, dictionary, err := field.Child(fieldDictionary); err != nil || dictionary {
		return 1, 2, err
	}
	nodes = 1
	switch kind {
	case typeNull:
	case typeStruct, typeFixList:
		buffers = 1
	case typeInt, typeFloat, typeBool, typeDecimal, typeDate, typeTime, typeTimestamp, typeFixedBinary, typeDuration,
		typeList, typeLargeList:
		buffers = 2
	case typeBinary, typeUtf8, typeLargeBinary, typeLargeUtf8:
		buffers = 3
	default:
		return 0, 0, fmt.Errorf("type %d is not supported before the column %[2]q; move its column after %[2]q", kind,
			tokensColumn)
	}
	children, err := field.Vector(fieldChildren, 4)
	if err != nil {
		return 0, 0, err
	}
	for i := range children.Len() {
		child, err := children.Table(i)
		if err != nil {
			return 0, 0, err
		}
		n, b, err := extent(child, depth-1, budget)
		if err != nil {
			return 0, 0, err
		}
		nodes, buffers = nodes+n, buffers+b
	}
	return nodes, buffers, nil
}

// Manifest returns the content of x.json, or nil.
func (r *reader) Manifest() *shards.Manifest { return r.manifest }

// Summed reports whether ids are checked with sums when they are read.
func (r *reader) Summed() bool { return r.sums != nil }

// DType returns the type of the column.
func (r *reader) DType() shards.DType { return r.dtype }

// Documents returns the number of record batches.
func (r *reader) Documents() int64 { return r.count }

// Tokens returns the number of tokens from the manifest, -1 without a manifest.
func (r *reader) Tokens() int64 {
	if r.manifest == nil {
		return -1
	}
	return r.manifest.Tokens
}

// Close closes the files.
func (r *reader) Close() error {
	err := r.file.Close()
	if r.sums != nil {
		err = errors.Join(err, r.sums.Close())
	}
	return err
}

// All implements [shards.DocumentReader]. At the end it compares the numbers of documents and
// tokens with the file of counts that fms-fsdp reads, if that file lists the shard.
func (r *reader) All(ctx context.Context) iter.Seq2[shards.TokenDocument, error] {
	return func(yield func(shards.TokenDocument, error) bool) {
		tokens, ended := int64(0), false
		err := r.all(ctx, func(doc shards.TokenDocument) bool {
			tokens += int64(len(doc.Tokens))
			ended = !yield(doc, nil)
			return !ended
		})
		if err == nil && !ended {
			err = compareCounts(r.prefix, r.count, tokens)
		}
		if err != nil {
			yield(shards.TokenDocument{}, err)
		}
	}
}

// all passes documents to yield until it returns false.
func (r *reader) all(ctx context.Context, yield func(shards.TokenDocument) bool) error {
	origins, err := layout.OpenOrigins(ctx, r.prefix+docsExt, docsName, r.manifest)
	if err != nil {
		return err
	}
	defer origins.Close()
	var doc shards.TokenDocument
	total := int64(0)
	for n := range r.count {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := mapping.Guard(func() (err error) {
			doc.Tokens, err = r.document(ctx, doc.Tokens[:0], n, origins)
			r.file.Probe()
			return err
		})
		if err != nil {
			return err
		}
		total += int64(len(doc.Tokens))
		if doc.Origin, err = origins.Next(); err != nil {
			return err
		}
		if !yield(doc) {
			return nil
		}
	}
	if m := r.manifest; m != nil && m.Tokens != total {
		return layout.Differs(r.prefix+manifestExt, "tokens", m.Tokens, total)
	}
	return nil
}

// document appends the ids of document n.
func (r *reader) document(ctx context.Context, dst []uint32, n int64, origins *layout.Origins) ([]uint32, error) {
	start, meta, body := batchAt(r.blocks[n*blockSize:])
	if size := int64(len(r.file.Data)); !within(start, meta, body, size) {
		return dst, r.corrupt(start, "document %d, with %d bytes of metadata and %d of body, does not fit a file "+
			"of %d bytes", n, meta,
			body, size)
	}
	if err := r.sums.Check(0, r.file.Data, start, start+meta+body); err != nil {
		return dst, r.damaged(ctx, err, origins)
	}
	first, rows, err := r.column(r.file.Data[start:start+meta], body)
	if err != nil {
		return dst, r.corrupt(start, "document %d: %w", n, err)
	}
	return r.ids(dst, start+meta+first, rows)
}

// column locates the ids of a record batch from its metadata. It returns the offset of the first id
// in the body and the number of ids.
func (r *reader) column(metadata []byte, body int64) (first, rows int64, err error) {
	// The message starts with four bytes of ones and the size; in files from before version 0.15,
	// with the size alone.
	head := metadata[4:]
	if binary.LittleEndian.Uint32(metadata) == math.MaxUint32 {
		head = metadata[8:]
	}
	t, err := flatbuffer.Root(head)
	if err != nil {
		return 0, 0, err
	}
	kind, err := t.Number(messageHeaderType, 1, 0)
	if err != nil {
		return 0, 0, err
	}
	batch, ok, err := t.Child(messageHeader)
	if err != nil {
		return 0, 0, err
	}
	if kind != headerRecordBatch || !ok {
		return 0, 0, fmt.Errorf("a message of kind %d; want a record batch", kind)
	}
	if _, compressed, err := batch.Child(batchCompression); err != nil || compressed {
		return 0, 0, errors.Join(errors.New("buffers are compressed, which fms-fsdp does not support; write the file "+
			"without compression"), err)
	}
	nodes, err := batch.Vector(batchNodes, 16)
	if err != nil {
		return 0, 0, err
	}
	if int(r.node) >= nodes.Len() {
		return 0, 0, fmt.Errorf("the record batch has %d columns, fewer than the schema", nodes.Len())
	}
	node := nodes.Bytes()[16*r.node:]
	length, nulls := int64(binary.LittleEndian.Uint64(node)), int64(binary.LittleEndian.Uint64(node[8:]))
	buffers, err := batch.Vector(batchBuffers, 16)
	if err != nil {
		return 0, 0, err
	}
	if int(r.buffer)+1 >= buffers.Len() {
		return 0, 0, fmt.Errorf("the record batch has %d buffers, fewer than the schema", buffers.Len())
	}
	values := buffers.Bytes()[16*(r.buffer+1):]
	offset, size := int64(binary.LittleEndian.Uint64(values)), int64(binary.LittleEndian.Uint64(values[8:]))
	width := int64(r.dtype.Size())
	if nulls != 0 || length < 0 || offset < 0 || size < 0 || offset > body || size > body-offset ||
		length > size/width {
		return 0, 0, fmt.Errorf("invalid column: %d ids with %d nulls in %d bytes at offset %d of a body of %d bytes",
			length, nulls, size,
			offset, body)
	}
	return offset, length, nil
}

// ids appends count numbers that start at byte at of the file to dst. The file must have them all.
func (r *reader) ids(dst []uint32, at, count int64) ([]uint32, error) {
	width, before := int64(r.dtype.Size()), len(dst)
	dst, err := r.dtype.AppendChecked(dst, r.file.Data[at:at+count*width])
	if err != nil {
		return dst, r.corrupt(at+int64(len(dst)-before)*width, "%w", err)
	}
	return dst, nil
}
