package shards

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
)

// lengthChunk is the number of document lengths in one chunk of Writer.lengths. Chunks let the list
// grow without copying.
const lengthChunk = 1 << 16

// A Writer writes a shard: x.bin, x.docs.arrow, x.sums, x.json and x.idx. No file has its final
// name before [Writer.Close] has succeeded. It is not safe for concurrent use.
//
// A Writer streams. In memory it holds four bytes per document for the .idx file, four bytes per
// block of 16 KiB of x.bin for the sums, and one batch of x.docs.arrow. Split a corpus of more than
// about 10^9 documents into several shards.
type Writer struct {
	disk   atomicfile.Files
	prefix string
	dtype  DType
	info   TokenizerInfo
	ids    int64 // every id is smaller

	bin, idx, docs, sums *atomicfile.Hashed
	origins              *OriginWriter
	blocks               sums32 // of bin

	lengths   [][]int32
	documents int64
	tokens    int64

	err      error // the first error; nothing is written after it
	done     bool
	manifest *Manifest
}

// Create creates a shard whose files have the given prefix. The prefix must not end in a suffix of
// a shard's file, and its directory must exist. [Writer.Close] replaces an existing shard with that
// prefix, but Create returns an error if x.json exists and is not a manifest. info goes into the
// manifest. If info.VocabSize is not 0, ids at or above it are errors.
func Create(prefix string, dtype DType, info TokenizerInfo) (*Writer, error) {
	return CreateOn(nil, prefix, dtype, info)
}

// CreateOn is [Create] on another file system; nil is the machine's.
func CreateOn(fsys filesystem.FS, prefix string, dtype DType, info TokenizerInfo) (*Writer, error) {
	return create(fsys, prefix, dtype, info, memory.NewGoAllocator())
}

func create(fsys filesystem.FS, prefix string, dtype DType, info TokenizerInfo,
	mem memory.Allocator) (_ *Writer, err error) {
	if !dtype.megatron() {
		return nil, fmt.Errorf("creating shard %s: tokens cannot have type %s; use uint16 or int32", prefix, dtype)
	}
	if info.VocabSize < 0 || int64(info.VocabSize) > dtype.IDs() {
		return nil, fmt.Errorf("creating shard %s: a vocabulary of %d ids does not fit %s", prefix, info.VocabSize,
			dtype)
	}
	if base := filepath.Base(prefix); prefix == "" || base == "." || base == ".." ||
		os.IsPathSeparator(prefix[len(prefix)-1]) {
		return nil, fmt.Errorf("creating shard: %q is not a prefix for the names of files", prefix)
	}
	for _, ext := range []string{binExt, idxExt, docsExt, sumsExt, manifestExt} {
		if strings.HasSuffix(prefix, ext) {
			return nil, fmt.Errorf("creating shard: %s ends like one of the files of a shard; use the prefix of "+
				"all of them, without %s", prefix, ext)
		}
	}
	// x.json may well be the documents for this shard.
	if _, err := ReadManifest(prefix + manifestExt); err != nil {
		return nil, fmt.Errorf("creating shard %s would replace a file of another kind: %w", prefix, err)
	}
	w := &Writer{disk: atomicfile.On(fsys), prefix: prefix, dtype: dtype, info: info, ids: dtype.IDs(),
		blocks: sums32{block: make([]byte, 0, sumsBlock)}}
	if info.VocabSize > 0 {
		w.ids = int64(info.VocabSize)
	}
	defer func() {
		if err != nil {
			w.Abort()
		}
	}()
	if w.bin, err = w.disk.CreateHashed(prefix + binExt); err != nil {
		return nil, err
	}
	if w.docs, err = w.disk.CreateHashed(prefix + docsExt); err != nil {
		return nil, err
	}
	if w.origins, err = NewOriginWriter(w.docs.Buffer, mem); err != nil {
		return nil, fmt.Errorf("writing %s: %w", prefix+docsExt, err)
	}
	return w, nil
}

// Append adds a document as one sequence. If an id is outside the vocabulary or the origin cannot
// be stored, Append returns an error and the shard is unchanged. After any other error, the writer
// can only be aborted.
func (w *Writer) Append(tokens []uint32, origin DocumentOrigin) error {
	if w.err != nil {
		return w.err
	}
	if w.done {
		return fmt.Errorf("writing %s: the shard is already closed", w.prefix)
	}
	if len(tokens) > math.MaxInt32 {
		return fmt.Errorf("writing %s: a document has %d tokens; an MMIDIDX index holds at most 2^31-1", w.prefix,
			len(tokens))
	}
	if err := origin.Check(); err != nil {
		return fmt.Errorf("writing %s: %w", w.prefix, err)
	}
	if largest(tokens) >= w.ids {
		i := slices.IndexFunc(tokens, func(id uint32) bool { return int64(id) >= w.ids })
		return fmt.Errorf("writing %s: token %d of the document is %d; the largest id is %d", w.prefix, i, tokens[i],
			w.ids-1)
	}
	w.err = w.append(tokens, origin)
	return w.err
}

func (w *Writer) append(tokens []uint32, origin DocumentOrigin) error {
	if w.documents%lengthChunk == 0 {
		w.lengths = append(w.lengths, make([]int32, 0, lengthChunk))
	}
	last := len(w.lengths) - 1
	w.lengths[last] = append(w.lengths[last], int32(len(tokens)))
	w.documents++
	w.tokens += int64(len(tokens))
	for len(tokens) > 0 {
		start := len(w.blocks.block)
		part := tokens[:min(len(tokens), (sumsBlock-start)/w.dtype.Size())]
		tokens = tokens[len(part):]
		end := start + len(part)*w.dtype.Size()
		w.blocks.block = w.blocks.block[:end]
		w.dtype.Encode(w.blocks.block[start:], part)
		if end == sumsBlock {
			if _, err := w.bin.Buffer.Write(w.blocks.end()); err != nil {
				return err
			}
		}
	}
	if err := w.origins.Append(origin); err != nil {
		return fmt.Errorf("writing %s: %w", w.prefix+docsExt, err)
	}
	return nil
}

// largest returns the largest of ids, -1 for no ids.
func largest(ids []uint32) int64 {
	if len(ids) == 0 {
		return -1
	}
	var a, b, c, d uint32 // four maxima, so that comparisons do not depend on each other
	for ; len(ids) >= 4; ids = ids[4:] {
		a, b, c, d = max(a, ids[0]), max(b, ids[1]), max(c, ids[2]), max(d, ids[3])
	}
	for _, id := range ids {
		a = max(a, id)
	}
	return int64(max(a, b, c, d))
}

// Close finishes the shard. All files are synced under temporary names before the first is renamed.
// Then Close removes an older x.idx, publishes .bin, .docs.arrow, .sums and .json, and publishes
// .idx last. [Open] needs .idx, so it never sees parts of two shards. If Close fails, an older
// shard under that prefix is either unchanged or has lost its .idx.
func (w *Writer) Close() error {
	if w.done {
		return fmt.Errorf("writing %s: the shard is already closed", w.prefix)
	}
	defer w.Abort() // removes files that still have temporary names
	if w.err != nil {
		return w.err
	}
	manifest, err := w.finish()
	if err != nil {
		return err
	}
	if err := w.publish(manifest); err != nil {
		return err
	}
	w.manifest = manifest.content
	return nil
}

// Manifest returns the manifest of the shard after [Writer.Close] has succeeded, and nil before.
func (w *Writer) Manifest() *Manifest { return w.manifest }

// sealedManifest is x.json under its temporary name.
type sealedManifest struct {
	file    *atomicfile.File
	content *Manifest
}

// finish completes the files and syncs them to disk.
func (w *Writer) finish() (_ *sealedManifest, err error) {
	if err := w.origins.Close(); err != nil {
		return nil, fmt.Errorf("writing %s: %w", w.prefix+docsExt, err)
	}
	if _, err := w.bin.Buffer.Write(w.blocks.end()); err != nil {
		return nil, err
	}
	if w.sums, err = w.disk.CreateHashed(w.prefix + sumsExt); err != nil {
		return nil, err
	}
	if _, err := w.sums.Buffer.Write(encodeSums(w.tokens*int64(w.dtype.Size()), w.blocks.sums)); err != nil {
		return nil, err
	}
	if w.idx, err = w.disk.CreateHashed(w.prefix + idxExt); err != nil {
		return nil, err
	}
	if err := w.writeIndex(w.idx.Buffer); err != nil {
		return nil, err
	}
	m := &Manifest{
		Format: manifestFormat, DType: w.dtype, Tokens: w.tokens, Documents: w.documents, Tokenizer: w.info,
		Files: make(map[string]FileInfo),
	}
	for _, f := range []struct {
		name string
		file *atomicfile.Hashed
	}{{"bin", w.bin}, {"docs", w.docs}, {"sums", w.sums}, {"idx", w.idx}} {
		sum, err := f.file.Finish()
		if err != nil {
			return nil, err
		}
		m.Files[f.name] = FileInfo{f.file.Bytes(), sum}
	}
	f, err := m.Seal(w.disk, w.prefix+manifestExt)
	if err != nil {
		return nil, err
	}
	return &sealedManifest{f, m}, nil
}

// writeIndex writes the .idx file: each document is one sequence.
func (w *Writer) writeIndex(b *bufio.Writer) error {
	var header [idxHeaderSize]byte
	copy(header[:], idxMagic)
	binary.LittleEndian.PutUint64(header[9:], idxVersion)
	header[17] = w.dtype.Code()
	binary.LittleEndian.PutUint64(header[18:], uint64(w.documents))
	binary.LittleEndian.PutUint64(header[26:], uint64(w.documents)+1)
	if _, err := b.Write(header[:]); err != nil {
		return err
	}
	var scratch [8]byte
	put64 := func(v int64) error {
		binary.LittleEndian.PutUint64(scratch[:], uint64(v))
		_, err := b.Write(scratch[:])
		return err
	}
	for _, chunk := range w.lengths {
		for _, length := range chunk {
			binary.LittleEndian.PutUint32(scratch[:], uint32(length))
			if _, err := b.Write(scratch[:4]); err != nil {
				return err
			}
		}
	}
	start := int64(0)
	for _, chunk := range w.lengths {
		for _, length := range chunk {
			if err := put64(start); err != nil {
				return err
			}
			start += int64(length) * int64(w.dtype.Size())
		}
	}
	for d := range w.documents + 1 {
		if err := put64(d); err != nil {
			return err
		}
	}
	return nil
}

// publish renames the sealed files to their final names.
func (w *Writer) publish(manifest *sealedManifest) (err error) {
	defer manifest.file.Abort()
	dir := filepath.Dir(w.prefix)
	if err := w.disk.Remove(w.prefix + idxExt); err != nil {
		return fmt.Errorf("replacing shard: %w", err)
	}
	// Sync even if no x.idx was removed: a process that was killed before this sync may have
	// removed it.
	if err := w.disk.SyncDir(dir); err != nil {
		return err
	}
	files := []*atomicfile.File{w.bin.File, w.docs.File, w.sums.File, manifest.file, w.idx.File}
	renamed := 0
	defer func() {
		if err != nil { // without .idx the other files are useless
			for _, f := range files[:renamed] {
				_ = w.disk.FS().Remove(f.Path())
			}
		}
	}()
	for _, f := range files {
		if f == w.idx.File { // the other files are on disk under their final names first
			if err := w.disk.SyncDir(dir); err != nil {
				return err
			}
		}
		if err := f.Rename(); err != nil {
			return err
		}
		renamed++
	}
	return w.disk.SyncDir(dir)
}

// Abort discards the shard and removes its files. It does nothing after [Writer.Close], so it can
// be deferred right after [Create].
func (w *Writer) Abort() {
	if w.done {
		return
	}
	w.done = true
	for _, f := range []*atomicfile.Hashed{w.bin, w.docs, w.sums, w.idx} {
		if f != nil {
			f.File.Abort()
		}
	}
	if w.origins != nil {
		w.origins.Release()
	}
	w.lengths, w.blocks = nil, sums32{}
}
