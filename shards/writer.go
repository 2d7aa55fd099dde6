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
)

// lengthChunk is the number of document lengths in one piece of Writer.lengths, so that the list
// grows without being copied.
const lengthChunk = 1 << 16

// A Writer makes a shard: x.bin, x.docs.arrow, x.sums, x.json and x.idx. Until [Writer.Close] has
// succeeded nothing of it stands under a final name. It is not safe for use by several goroutines.
//
// A Writer streams; in memory it holds four bytes a document, for the .idx file, four bytes a block
// of 16 KiB of x.bin, for its sum, and one batch of x.docs.arrow. Corpora beyond some 10^9
// documents are better split into several shards for that reason.
type Writer struct {
	prefix string
	dtype  DType
	info   TokenizerInfo
	ids    int64 // every id is below it

	bin, idx, docs, sums *atomicfile.Hashed
	origins              *OriginWriter
	blocks               sums32 // of bin

	lengths   [][]int32
	documents int64
	tokens    int64

	err      error // the first failure; nothing is written after it
	done     bool
	manifest *Manifest
}

// Create starts a shard whose files will have the given prefix, which ends like none of them; their
// directory must exist. An older shard of that prefix is replaced by [Writer.Close]; a file x.json
// that is no manifest is not, but refused. info goes into the manifest; if its VocabSize is not 0,
// ids at and beyond it are refused.
func Create(prefix string, dtype DType, info TokenizerInfo) (*Writer, error) {
	return create(prefix, dtype, info, memory.NewGoAllocator())
}

func create(prefix string, dtype DType, info TokenizerInfo, mem memory.Allocator) (_ *Writer, err error) {
	if !dtype.valid() {
		return nil, fmt.Errorf("creating shard %s: tokens cannot be %s, only uint16 or int32", prefix, dtype)
	}
	if info.VocabSize < 0 || int64(info.VocabSize) > dtype.limit() {
		return nil, fmt.Errorf("creating shard %s: a vocabulary of %d ids does not fit %s", prefix, info.VocabSize,
			dtype)
	}
	if base := filepath.Base(prefix); prefix == "" || base == "." || base == ".." ||
		os.IsPathSeparator(prefix[len(prefix)-1]) {
		return nil, fmt.Errorf("creating shard: %q is not a prefix for the names of files", prefix)
	}
	for _, ext := range []string{binExt, idxExt, docsExt, sumsExt, manifestExt} {
		if strings.HasSuffix(prefix, ext) {
			return nil, fmt.Errorf("creating shard: %s ends like one of the files of a shard; give the prefix of "+
				"all of them, without %s", prefix, ext)
		}
	}
	// x.json may well be documents, from which this shard is to be made.
	if _, err := ReadManifest(prefix + manifestExt); err != nil {
		return nil, fmt.Errorf("creating shard %s would replace a file of another kind: %w", prefix, err)
	}
	w := &Writer{prefix: prefix, dtype: dtype, info: info, ids: dtype.limit(),
		blocks: sums32{block: make([]byte, 0, sumsBlock)}}
	if info.VocabSize > 0 {
		w.ids = int64(info.VocabSize)
	}
	defer func() {
		if err != nil {
			w.Abort()
		}
	}()
	if w.bin, err = atomicfile.CreateHashed(prefix + binExt); err != nil {
		return nil, err
	}
	if w.docs, err = atomicfile.CreateHashed(prefix + docsExt); err != nil {
		return nil, err
	}
	if w.origins, err = NewOriginWriter(w.docs.Buffer, mem); err != nil {
		return nil, fmt.Errorf("writing %s: %w", prefix+docsExt, err)
	}
	return w, nil
}

// Append adds a document, as one sequence. An id beyond the vocabulary or an origin that cannot be
// kept is refused, and the shard is as it was before; after any other error it can only be aborted.
func (w *Writer) Append(tokens []uint32, origin DocumentOrigin) error {
	if w.err != nil {
		return w.err
	}
	if w.done {
		return fmt.Errorf("writing %s: the shard was closed before", w.prefix)
	}
	if len(tokens) > math.MaxInt32 {
		return fmt.Errorf("writing %s: a document of %d tokens, an MMIDIDX index holds at most 2^31-1", w.prefix,
			len(tokens))
	}
	if err := origin.Check(); err != nil {
		return fmt.Errorf("writing %s: %w", w.prefix, err)
	}
	if largest(tokens) >= w.ids {
		i := slices.IndexFunc(tokens, func(id uint32) bool { return int64(id) >= w.ids })
		return fmt.Errorf("writing %s: token %d of the document is %d, ids end at %d", w.prefix, i, tokens[i], w.ids-1)
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
		encode(w.blocks.block[start:], part, w.dtype)
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

// largest is the largest of ids, and -1 if there are none.
func largest(ids []uint32) int64 {
	if len(ids) == 0 {
		return -1
	}
	var a, b, c, d uint32 // four of them, so that one comparison need not wait for the one before
	for ; len(ids) >= 4; ids = ids[4:] {
		a, b, c, d = max(a, ids[0]), max(b, ids[1]), max(c, ids[2]), max(d, ids[3])
	}
	for _, id := range ids {
		a = max(a, id)
	}
	return int64(max(a, b, c, d))
}

// encode writes ids as they lie in x.bin. dst has the bytes that they take.
func encode(dst []byte, ids []uint32, dtype DType) {
	le := binary.LittleEndian
	if dtype == UInt16 {
		for ; len(ids) >= 4 && len(dst) >= 8; ids, dst = ids[4:], dst[8:] { // in one store
			le.PutUint64(dst,
				uint64(uint16(ids[0]))|uint64(uint16(ids[1]))<<16|uint64(uint16(ids[2]))<<32|uint64(uint16(ids[3]))<<48)
		}
		for i, id := range ids {
			le.PutUint16(dst[2*i:], uint16(id))
		}
		return
	}
	for ; len(ids) >= 2 && len(dst) >= 8; ids, dst = ids[2:], dst[8:] {
		le.PutUint64(dst, uint64(ids[0])|uint64(ids[1])<<32)
	}
	for i, id := range ids {
		le.PutUint32(dst[4*i:], id)
	}
}

// Close finishes the shard. All files are on disk under temporary names before the first gets its
// own; then an older x.idx is removed, .bin, .docs.arrow, .sums and .json are published, and .idx
// last: [Open] wants it, so it never sees parts of two shards. If Close fails, a shard that stood
// there before is either untouched or without its .idx.
func (w *Writer) Close() error {
	if w.done {
		return fmt.Errorf("writing %s: the shard was closed before", w.prefix)
	}
	defer w.Abort() // whatever is still under a temporary name
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

// Manifest is the manifest of the shard after [Writer.Close] has succeeded, and nil before.
func (w *Writer) Manifest() *Manifest { return w.manifest }

// sealedManifest is x.json under its temporary name.
type sealedManifest struct {
	file    *atomicfile.File
	content *Manifest
}

// finish completes the files and brings them to disk.
func (w *Writer) finish() (_ *sealedManifest, err error) {
	if err := w.origins.Close(); err != nil {
		return nil, fmt.Errorf("writing %s: %w", w.prefix+docsExt, err)
	}
	if _, err := w.bin.Buffer.Write(w.blocks.end()); err != nil {
		return nil, err
	}
	if w.sums, err = atomicfile.CreateHashed(w.prefix + sumsExt); err != nil {
		return nil, err
	}
	if _, err := w.sums.Buffer.Write(encodeSums(w.tokens*int64(w.dtype.Size()), w.blocks.sums)); err != nil {
		return nil, err
	}
	if w.idx, err = atomicfile.CreateHashed(w.prefix + idxExt); err != nil {
		return nil, err
	}
	if err := w.writeIndex(w.idx.Buffer); err != nil {
		return nil, err
	}
	m := &Manifest{
		Format: manifestFormat, DType: w.dtype.String(), Tokens: w.tokens, Documents: w.documents, Tokenizer: w.info,
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
	f, err := m.Seal(w.prefix + manifestExt)
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
	header[17] = byte(w.dtype)
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

// publish gives the sealed files their names.
func (w *Writer) publish(manifest *sealedManifest) (err error) {
	defer manifest.file.Abort()
	dir := filepath.Dir(w.prefix)
	if err := atomicfile.Remove(w.prefix + idxExt); err != nil {
		return fmt.Errorf("replacing shard: %w", err)
	}
	// Even if there was none: a killed process may have removed it without coming to this.
	if err := atomicfile.SyncDir(dir); err != nil {
		return err
	}
	files := []*atomicfile.File{w.bin.File, w.docs.File, w.sums.File, manifest.file, w.idx.File}
	renamed := 0
	defer func() {
		if err != nil { // without its .idx the rest is of no use to anybody
			for _, f := range files[:renamed] {
				os.Remove(f.Path())
			}
		}
	}()
	for _, f := range files {
		if f == w.idx.File { // the others are on disk under their names before it
			if err := atomicfile.SyncDir(dir); err != nil {
				return err
			}
		}
		if err := f.Rename(); err != nil {
			return err
		}
		renamed++
	}
	return atomicfile.SyncDir(dir)
}

// Abort gives the shard up and removes what was written. After [Writer.Close] it does nothing, so
// it can be deferred right after [Create].
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
