// Package fms writes and reads the token files of fms-fsdp: x.arrow is an Arrow file with one
// record batch per document. The package encodes and decodes Arrow's metadata without Arrow's
// library. The metadata of all batches is equal except for four numbers, so that writing a document
// allocates nothing, and invalid offsets in a damaged file are errors. docs/formats/layouts.md
// describes every byte.
package fms

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/shards"
	"mula/shards/layout"
)

// Suffixes of a shard's files. fms-fsdp reads every file whose suffix contains "arrow" as a file of
// tokens, so the file of origins has another suffix.
const (
	arrowExt    = ".arrow"
	docsName    = "docs.feather"
	docsExt     = "." + docsName
	sumsName    = "sums"
	sumsExt     = "." + sumsName
	manifestExt = ".json"
)

// tokensColumn is the name of the only column.
const tokensColumn = "tokens"

// maxDocuments is the maximum number of documents of a file: the footer has 24 bytes for each
// document, and its size is a signed 32-bit number.
const maxDocuments = (1<<31 - 1 - 1024) / blockSize

// Layout is the layout of fms-fsdp.
var Layout = layout.Layout{
	ID: id, Name: "fms", Users: "fms-fsdp", Shape: "PREFIX.arrow, and a line in ../meta/*counts*.csv",
	Marker: arrowExt, Manifest: manifestExt, Sums: sumsExt, Origins: docsExt,
	IDs: arrowExt, Types: []shards.DType{shards.UInt32},
	Create:      create,
	Open:        func(prefix string, _ layout.Hints) (shards.DocumentReader, error) { return open(prefix) },
	CheckOutput: ownFolder,
	Published:   published,
}

const id shards.Layout = "fms"

// create creates the shard x.arrow, x.docs.feather, x.sums, x.json. In memory it holds four bytes
// per document, for the footer of x.arrow.
func create(l *layout.Layout, s layout.Settings) (shards.DocumentWriter, error) {
	return l.NewWriter(s, nil, func(files *shards.FileSet) (shards.Encoder, error) {
		out, err := files.CreateIDs("arrow")
		if err != nil {
			return nil, err
		}
		_, err = out.Write(appendMessage([]byte(arrowMagic+"\x00\x00"), headerSchema, 24, schema))
		return &encoder{out: out, message: appendMessage(nil, headerRecordBatch, 28, batch)}, err
	})
}

// ownFolder returns an error if the folder of a new shard has files that fms-fsdp would read as
// shards, because "arrow" is in their extension.
func ownFolder(prefix string) error {
	folder := filepath.Dir(prefix)
	if folder == "." {
		return nil
	}
	others, err := fs.Glob(os.DirFS(folder), "*.docs.arrow")
	if err != nil || len(others) == 0 {
		return err
	}
	return fmt.Errorf("%s describes the documents of another shard, and fms-fsdp would read it as a "+
		"shard; write fms shards into a separate folder", filepath.Join(folder, others[0]))
}

// published updates the file of counts of the folder of a prefix.
func published(ctx context.Context, fsys filesystem.FS, prefix string) (string, error) {
	dir := objects.Dir(prefix)
	if dir == "." || objects.IsURL(dir) && strings.Count(dir, "/") < 3 { // the bucket is no folder
		return "", nil
	}
	return writeCounts(ctx, fsys, dir)
}

// Parts of Arrow's metadata as flatbuffers; see [flatbuffer.Table]. Positions are relative to the
// flatbuffer, in which each part starts at byte 36. Values that are 0 here and set for each
// document are marked with (set).
var (
	// schema has one field, tokens: uint32. Its table is at byte 44.
	schema = slices.Concat(
		// 36: list of fields of the schema: size, size of the table, endianness (absent: little),
		// fields
		u16s(8, 8, 0, 4),
		u32s(8, 4),  // 44: the schema: back to 36; its fields at 52
		u32s(1, 20), // 52: one field, at 76
		// 60: list of fields of a field: …, name, nullable, kind of type, type, dictionary (left
		// out), children
		u16s(16, 20, 4, 16, 17, 8, 0, 12),
		// 76: the field: back to 60; name at 96, type at 120, children at 108; nullable, an int
		u32s(16, 16, 36, 20, 1|typeInt<<8),
		u32s(6), []byte("tokens\x00\x00"), // 96: its name
		u32s(0),          // 108: no children
		u16s(6, 8, 4, 0), // 112: list of fields of a type int: …, bits, signed (absent: unsigned)
		u32s(8, 32),      // 120: the type: back to 112; 32 bits
	)
	// batch is a record batch of one column. Its table is at byte 48.
	batch = slices.Concat(
		u16s(10, 20, 8, 4, 16, 0), // 36: list of fields of a record batch: …, length, nodes, buffers
		// 48: the record batch: back to 36; nodes at 68; length (set); buffers at 92
		u32s(12, 16, 0, 0, 28),
		u32s(1, 0, 0, 0, 0), // 68: one node: length (set), no nulls
		// 88: padding; two buffers: no map of nulls, the values from 0 on, their size (set)
		u32s(0, 2, 0, 0, 0, 0, 0, 0, 0, 0),
	)
)

// Offsets of the numbers that are set for each document, from the start of the message (four bytes
// of ones and the size).
const (
	setBody   = 8 + 24  // u64, size of the body
	setLength = 8 + 56  // u64
	setNode   = 8 + 72  // u64, length again
	setSize   = 8 + 120 // u64, bytes of the values
)

const (
	headerSchema    = 1
	metadataVersion = 4 // version 5 of Arrow's metadata
)

// appendMessage appends a message to dst: four bytes of ones, the size of the flatbuffer, and the
// flatbuffer, whose root is the table of the message. header is the distance of the table of
// content from byte 20.
func appendMessage(dst []byte, kind byte, header uint32, content []byte) []byte {
	dst = append(dst, u32s(math.MaxUint32, uint32(36+len(content)))...)
	dst = append(dst, u32s(16)...) // 0: the root
	// 4: list of fields of a message: …, version, kind of header, header, size of the body
	dst = append(dst, u16s(12, 20, 16, 18, 4, 8)...)
	dst = append(dst, u32s(12, header, 0, 0)...)   // 16: the message: back to 4; the header; size of the body (set)
	dst = append(dst, metadataVersion, 0, kind, 0) // 32
	return append(dst, content...)
}

// appendFooter appends the flatbuffer of the footer up to the list of count record batches.
func appendFooter(dst []byte, count uint32) []byte {
	dst = append(dst, u32s(16)...) // 0: the root
	// 4: list of fields of a footer: …, version, schema, dictionaries (absent), record batches
	dst = append(dst, u16s(12, 16, 12, 4, 0, 8)...)
	// 16: the footer: back to 4; the schema at 44, record batches at 132; padding
	dst = append(dst, u32s(12, 24, 108, metadataVersion, 0)...)
	dst = append(dst, schema...)          // 36
	return append(dst, u32s(0, count)...) // 128: padding; record batches
}

func u16s(list ...uint16) (out []byte) {
	for _, v := range list {
		out = binary.LittleEndian.AppendUint16(out, v)
	}
	return out
}

func u32s(list ...uint32) (out []byte) {
	for _, v := range list {
		out = binary.LittleEndian.AppendUint32(out, v)
	}
	return out
}

// lengthChunk is the number of lengths in one chunk of encoder.lengths. Chunks let the list grow
// without copying.
const lengthChunk = 1 << 16

type encoder struct {
	out     *shards.IDFile // its file keeps its first error
	message []byte         // the message of a record batch
	lengths [][]uint32
	scratch []byte
}

func (e *encoder) Append(tokens []uint32, _ shards.DocumentOrigin) error {
	last := len(e.lengths) - 1
	if last >= 0 && last*lengthChunk+len(e.lengths[last]) == maxDocuments {
		return fmt.Errorf("more than %d documents need a footer that Arrow cannot read; divide them "+
			"into several shards", maxDocuments)
	}
	if last < 0 || len(e.lengths[last]) == lengthChunk {
		e.lengths = append(e.lengths, make([]uint32, 0, lengthChunk))
		last++
	}
	e.lengths[last] = append(e.lengths[last], uint32(len(tokens)))
	n := uint64(len(tokens))
	binary.LittleEndian.PutUint64(e.message[setBody:], uint64(bodySize(uint32(n))))
	binary.LittleEndian.PutUint64(e.message[setLength:], n)
	binary.LittleEndian.PutUint64(e.message[setNode:], n)
	binary.LittleEndian.PutUint64(e.message[setSize:], 4*n)
	if _, err := e.out.Write(e.message); err != nil {
		return err
	}
	if err := e.out.Append(tokens, shards.UInt32); err != nil {
		return err
	}
	if n%2 == 1 {
		_, err := e.out.Write(padding)
		return err
	}
	return nil
}

var padding = make([]byte, 4)

// bodySize returns the size in bytes of the body of a record batch of n ids, a multiple of 8.
func bodySize(n uint32) int64 { return (4*int64(n) + 7) &^ 7 }

func (e *encoder) Finish() error {
	count := uint32(0)
	for _, chunk := range e.lengths {
		count += uint32(len(chunk))
	}
	start := int64(len(arrowMagic)+2) + int64(len(appendMessage(nil, headerSchema, 24, schema)))
	b := e.out
	b.Write(u32s(math.MaxUint32, 0)) // the end of the messages
	footer := appendFooter(nil, count)
	b.Write(footer)
	for _, chunk := range e.lengths {
		for _, n := range chunk {
			block := binary.LittleEndian.AppendUint64(e.scratch[:0], uint64(start))
			block = binary.LittleEndian.AppendUint64(block, uint64(len(e.message)))
			block = binary.LittleEndian.AppendUint64(block, uint64(bodySize(n)))
			b.Write(block)
			e.scratch = block
			start += int64(len(e.message)) + bodySize(n)
		}
	}
	b.Write(u32s(uint32(len(footer)) + blockSize*count))
	_, err := io.WriteString(b, arrowMagic) // b keeps the error of an earlier write
	return err
}
