package shards

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
)

// An Encoder writes the documents of one layout into a [FileSet]. The documents have been checked.
type Encoder interface {
	// Append writes a document.
	Append(tokens []uint32, origin DocumentOrigin) error
	// Finish writes the data after the last document. The caller finishes all files that Finish has
	// not finished.
	Finish() error
}

// WriterSettings describe a new shard and its files to [NewWriter]. Files are named by their names
// in the manifest.
type WriterSettings struct {
	FS     filesystem.FS // nil = the machine's
	Layout Layout
	Prefix string
	DType  DType
	Info   TokenizerInfo

	Path     func(name string) string // path of a file
	Endings  []string                 // endings of files that Prefix must not have
	Folder   bool                     // Prefix is the folder of the files, which is created if it does not exist
	Manifest string                   // path of the manifest
	Marker   string                   // the file that is published last; without it, readers find no shard
	Sums     string                   // the file of sums
	Origins  string                   // the file like x.docs.arrow, "" if the layout stores complete origins itself
	NoEmpty  string                   // why a document must have tokens, "" if it may be empty
	Stale    func() ([]string, error) // files of an older shard that the new one does not replace; may be nil

	memory memory.Allocator // nil = Go's
}

// A Writer writes a shard of any layout. It implements [DocumentWriter].
//
// A Writer streams. In memory it holds a block of 16 KiB of the ids, four bytes for each written
// block, one batch of origins, and what the layout needs for each document. Split a corpus of more
// than about 10^9 documents into several
type Writer struct {
	s       WriterSettings
	encoder Encoder
	ids     int64 // every id is smaller
	files   FileSet
	origins *originWriter

	documents, tokens int64
	err               error // the first error; nothing is written after it
	done              bool
	madeFolder        bool
	manifest          *Manifest
}

// NewWriter creates a shard. begin creates the encoder, which creates the layout's files.
func NewWriter(s WriterSettings, begin func(*FileSet) (Encoder, error)) (_ *Writer, err error) {
	if !s.Folder { // the layout has checked a folder
		if err := checkPrefix(s.Prefix, s.Endings); err != nil {
			return nil, err
		}
	}
	if s.Info.VocabSize < 0 || int64(s.Info.VocabSize) > s.DType.IDs() {
		return nil, fmt.Errorf("creating shard %s: a vocabulary of %d ids does not fit %s", s.Prefix, s.Info.VocabSize,
			s.DType)
	}
	m, err := ReadManifest(s.Manifest) // x.json may well be the documents for this shard
	if err != nil {
		return nil, fmt.Errorf("creating shard %s would replace a file of another kind: %w", s.Prefix, err)
	}
	if m != nil && m.Layout != s.Layout {
		return nil, fmt.Errorf("creating shard %s: %s belongs to a shard of another layout, which it would replace "+
			"in part; choose another prefix, or remove that shard", s.Prefix, s.Manifest)
	}
	w := &Writer{s: s, ids: s.DType.IDs()}
	if s.Info.VocabSize > 0 {
		w.ids = int64(s.Info.VocabSize)
	}
	w.files = FileSet{disk: atomicfile.On(s.FS), path: s.Path, sumsName: s.Sums}
	defer func() {
		if err != nil {
			w.Abort()
		}
	}()
	if s.Folder {
		switch err := w.files.disk.FS().Mkdir(s.Prefix, 0o777); {
		case err == nil:
			w.madeFolder = true
		case !errors.Is(err, fs.ErrExist):
			return nil, fmt.Errorf("creating shard %s: %w", s.Prefix, err)
		}
	}
	if w.encoder, err = begin(&w.files); err != nil {
		return nil, err
	}
	if s.Origins != "" {
		h, err := w.files.Create(s.Origins)
		if err != nil {
			return nil, err
		}
		if s.memory == nil {
			s.memory = memory.NewGoAllocator()
		}
		if w.origins, err = newOriginWriter(h.Buffer, s.memory); err != nil {
			return nil, fmt.Errorf("writing %s: %w", s.Path(s.Origins), err)
		}
	}
	return w, nil
}

// checkPrefix returns an error if prefix cannot start the names of files, or ends like one of the
// shard's files.
func checkPrefix(prefix string, endings []string) error {
	if base := filepath.Base(prefix); prefix == "" || base == "." || base == ".." ||
		os.IsPathSeparator(prefix[len(prefix)-1]) {
		return fmt.Errorf("creating shard: %q is not a prefix for the names of files", prefix)
	}
	for _, ending := range endings {
		if ending != "" && strings.HasSuffix(prefix, ending) {
			return fmt.Errorf("creating shard: %s ends like one of the files of a shard; use the prefix of all of "+
				"them, without %s", prefix, ending)
		}
	}
	return nil
}

// Append implements [DocumentWriter]. If an id is outside the vocabulary or the origin cannot be
// stored, Append returns an error and the shard is unchanged. After any other error, the writer can
// only be aborted.
func (w *Writer) Append(tokens []uint32, origin DocumentOrigin) error {
	if w.err != nil {
		return w.err
	}
	if w.done {
		return fmt.Errorf("writing %s: the shard is already closed", w.s.Prefix)
	}
	if len(tokens) > math.MaxInt32 {
		return fmt.Errorf("writing %s: a document has %d tokens; at most 2^31-1 are supported", w.s.Prefix,
			len(tokens))
	}
	if len(tokens) == 0 && w.s.NoEmpty != "" {
		return fmt.Errorf("writing %s: document %q (%s:%d) has no tokens: %s; remove empty documents", w.s.Prefix,
			origin.ID, origin.File, origin.Line, w.s.NoEmpty)
	}
	if err := origin.Check(); err != nil {
		return fmt.Errorf("writing %s: %w", w.s.Prefix, err)
	}
	if largest(tokens) >= w.ids {
		i := slices.IndexFunc(tokens, func(id uint32) bool { return int64(id) >= w.ids })
		return fmt.Errorf("writing %s: token %d of the document is %d; the largest id is %d", w.s.Prefix, i, tokens[i],
			w.ids-1)
	}
	w.err = w.append(tokens, origin)
	return w.err
}

func (w *Writer) append(tokens []uint32, origin DocumentOrigin) error {
	if err := w.encoder.Append(tokens, origin); err != nil {
		return err
	}
	if w.origins != nil {
		if err := w.origins.Append(origin); err != nil {
			return fmt.Errorf("writing %s: %w", w.s.Path(w.s.Origins), err)
		}
	}
	w.documents++
	w.tokens += int64(len(tokens))
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

// Close syncs all files under temporary names, removes an older marker, and publishes the new
// marker last. If Close fails, an older shard is either unchanged or has lost its marker.
func (w *Writer) Close() error {
	if w.done {
		return fmt.Errorf("writing %s: the shard is already closed", w.s.Prefix)
	}
	defer w.Abort() // removes files that still have temporary names
	if w.err != nil {
		return w.err
	}
	if err := w.encoder.Finish(); err != nil {
		return err
	}
	if w.origins != nil {
		if err := w.origins.Close(); err != nil {
			return fmt.Errorf("writing %s: %w", w.s.Path(w.s.Origins), err)
		}
	}
	files, err := w.files.finishAll()
	if err != nil {
		return err
	}
	m := &Manifest{Layout: w.s.Layout, DType: w.s.DType, Tokens: w.tokens, Documents: w.documents,
		Tokenizer: w.s.Info, Files: files}
	sealed, err := m.Seal(w.files.disk, w.s.Manifest)
	if err != nil {
		return err
	}
	defer sealed.Abort()
	text, err := m.encode(w.s.Manifest)
	if err != nil {
		return err
	}
	var stale []string
	if w.s.Stale != nil {
		if stale, err = w.s.Stale(); err != nil {
			return fmt.Errorf("replacing shard: %w", err)
		}
	}
	if w.madeFolder {
		if err := w.files.disk.SyncDir(filepath.Dir(w.s.Prefix)); err != nil {
			return err
		}
	}
	if err := w.files.publish(w.s.Marker, stale, sealed, text); err != nil {
		return err
	}
	w.manifest, w.madeFolder = m, false
	return nil
}

// Manifest returns the manifest after [Writer.Close] has succeeded, and nil before.
func (w *Writer) Manifest() *Manifest { return w.manifest }

// Abort discards the shard and removes its files. It does nothing after [Writer.Close], so it can
// be deferred right after [NewWriter].
func (w *Writer) Abort() {
	if w.done {
		return
	}
	w.done = true
	w.files.abort()
	if w.madeFolder {
		_ = w.files.disk.FS().Remove(w.s.Prefix) // only if it is empty
	}
	if w.origins != nil {
		w.origins.Release()
	}
}
