package shards

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/internal/filesystem"
)

// Create creates a shard in Megatron's layout: x.bin, x.docs.arrow, x.sums, x.json and x.idx, which
// is published last. The prefix must not end in a suffix of a shard's file, and its directory must
// exist. [Writer.Close] replaces an existing shard with that prefix, but Create returns an error if
// x.json exists and is not a manifest of the layout. info goes into the manifest. If info.VocabSize
// is not 0, ids at or above it are errors. In memory the writer holds four bytes per document for
// the .idx file.
func Create(prefix string, dtype DType, info TokenizerInfo) (*Writer, error) {
	return CreateOn(nil, prefix, dtype, info)
}

// CreateOn is [Create] on another file system; nil is the machine's.
func CreateOn(fsys filesystem.FS, prefix string, dtype DType, info TokenizerInfo) (*Writer, error) {
	return create(fsys, prefix, dtype, info, nil)
}

func create(fsys filesystem.FS, prefix string, dtype DType, info TokenizerInfo, mem memory.Allocator) (*Writer, error) {
	if !dtype.megatron() {
		return nil, fmt.Errorf("creating shard %s: tokens cannot have type %s; use uint16 or int32", prefix, dtype)
	}
	s := WriterSettings{FS: fsys, Prefix: prefix, DType: dtype, Info: info,
		Path: func(name string) string {
			i := slices.IndexFunc(manifestFiles, func(f manifestFile) bool { return f.name == name })
			return prefix + manifestFiles[i].ext
		},
		Endings: Files(""), Manifest: prefix + manifestExt, Marker: "idx", Sums: "sums", Origins: "docs", memory: mem}
	return NewWriter(s, func(files *FileSet) (Encoder, error) {
		bin, err := files.CreateIDs("bin")
		return &encoder{files: files, dtype: dtype, bin: bin}, err
	})
}

// lengthChunk is the number of document lengths in one chunk of encoder.lengths. Chunks let the
// list grow without copying.
const lengthChunk = 1 << 16

// An encoder writes the files of Megatron's layout.
type encoder struct {
	files     *FileSet
	dtype     DType
	bin       *IDFile
	lengths   [][]int32
	documents int64
}

// Append writes a document as one sequence.
func (e *encoder) Append(tokens []uint32, _ DocumentOrigin) error {
	if e.documents%lengthChunk == 0 {
		e.lengths = append(e.lengths, make([]int32, 0, lengthChunk))
	}
	last := len(e.lengths) - 1
	e.lengths[last] = append(e.lengths[last], int32(len(tokens)))
	e.documents++
	return e.bin.Append(tokens, e.dtype)
}

// Finish writes the .idx file.
func (e *encoder) Finish() error {
	idx, err := e.files.Create("idx")
	if err != nil {
		return err
	}
	return e.writeIndex(idx.Buffer)
}

// writeIndex writes the .idx file: each document is one sequence.
func (e *encoder) writeIndex(b *bufio.Writer) error {
	var header [idxHeaderSize]byte
	copy(header[:], idxMagic)
	binary.LittleEndian.PutUint64(header[9:], idxVersion)
	header[17] = e.dtype.Code()
	binary.LittleEndian.PutUint64(header[18:], uint64(e.documents))
	binary.LittleEndian.PutUint64(header[26:], uint64(e.documents)+1)
	if _, err := b.Write(header[:]); err != nil {
		return err
	}
	var scratch [8]byte
	put64 := func(v int64) error {
		binary.LittleEndian.PutUint64(scratch[:], uint64(v))
		_, err := b.Write(scratch[:])
		return err
	}
	for _, chunk := range e.lengths {
		for _, length := range chunk {
			binary.LittleEndian.PutUint32(scratch[:], uint32(length))
			if _, err := b.Write(scratch[:4]); err != nil {
				return err
			}
		}
	}
	start := int64(0)
	for _, chunk := range e.lengths {
		for _, length := range chunk {
			if err := put64(start); err != nil {
				return err
			}
			start += int64(length) * int64(e.dtype.Size())
		}
	}
	for d := range e.documents + 1 {
		if err := put64(d); err != nil {
			return err
		}
	}
	return nil
}
