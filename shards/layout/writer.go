package layout

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/internal/atomicfile"
	"mula/shards"
)

// An Encoder writes the documents of one layout into [Files]. The documents have been checked.
type Encoder interface {
	// Append writes a document.
	Append(tokens []uint32, origin shards.DocumentOrigin) error
	// Finish writes the data after the last document. The caller finishes all files that Finish has
	// not finished.
	Finish() error
}

// A Writer is the [shards.DocumentWriter] of all layouts except Megatron's.
type Writer struct {
	l       *Layout
	s       Settings
	stale   func() ([]string, error)
	encoder Encoder
	ids     int64 // every id is smaller
	files   Files
	origins *shards.OriginWriter

	documents, tokens int64
	err               error // the first error; nothing is written after it
	done              bool
	madeFolder        bool
	manifest          *shards.Manifest
}

// NewWriter creates a shard. begin creates the encoder, which creates the layout's files. stale
// returns the files of an older shard that the new one does not replace; it may be nil.
func (l *Layout) NewWriter(s Settings, stale func() ([]string, error),
	begin func(*Files) (Encoder, error)) (_ shards.DocumentWriter, err error) {
	if err := l.checkPrefix(s.Prefix); err != nil {
		return nil, err
	}
	if s.Info.VocabSize < 0 || int64(s.Info.VocabSize) > s.DType.IDs() {
		return nil, fmt.Errorf("creating shard %s: a vocabulary of %d ids does not fit %s", s.Prefix, s.Info.VocabSize,
			s.DType)
	}
	manifest := l.At(s.Prefix, l.Manifest)
	m, err := shards.ReadManifest(manifest)
	if err != nil {
		return nil, fmt.Errorf("creating shard %s would replace a file of another kind: %w", s.Prefix, err)
	}
	if m != nil && m.Layout != l.ID {
		return nil, fmt.Errorf("creating shard %s: %s belongs to a shard of another layout, which it would replace "+
			"in part; choose another prefix, or remove that shard", s.Prefix, manifest)
	}
	w := &Writer{l: l, s: s, stale: stale, ids: s.DType.IDs()}
	if s.Info.VocabSize > 0 {
		w.ids = int64(s.Info.VocabSize)
	}
	w.files = Files{disk: atomicfile.On(s.FS), sumsName: l.Sums[1:],
		path: func(name string) string { return l.FilePath(s.Prefix, name) }}
	defer func() {
		if err != nil {
			w.Abort()
		}
	}()
	if l.Folder {
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
	if l.Origins != "" {
		h, err := w.files.Create(l.Origins[1:])
		if err != nil {
			return nil, err
		}
		if w.origins, err = shards.NewOriginWriter(h.Buffer, memory.NewGoAllocator()); err != nil {
			return nil, fmt.Errorf("writing %s: %w", l.At(s.Prefix, l.Origins), err)
		}
	}
	return w, nil
}

// checkPrefix returns an error if prefix cannot start the names of files, or ends like one of the
// shard's files.
func (l *Layout) checkPrefix(prefix string) error {
	if l.Folder {
		return nil // the caller has checked the folder
	}
	if base := filepath.Base(prefix); prefix == "" || base == "." || base == ".." ||
		os.IsPathSeparator(prefix[len(prefix)-1]) {
		return fmt.Errorf("creating shard: %q is not a prefix for the names of files", prefix)
	}
	for _, ending := range l.Endings() {
		if ending != "" && strings.HasSuffix(prefix, ending) {
			return fmt.Errorf("creating shard: %s ends like one of the files of a shard; use the prefix of all of "+
				"them, without %s", prefix, ending)
		}
	}
	return nil
}

// Append implements [shards.DocumentWriter].
func (w *Writer) Append(tokens []uint32, origin shards.DocumentOrigin) error {
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
	if len(tokens) == 0 && w.l.NoEmpty != "" {
		return fmt.Errorf("writing %s: document %q (%s:%d) has no tokens: %s; remove empty documents", w.s.Prefix,
			origin.ID, origin.File, origin.Line, w.l.NoEmpty)
	}
	if err := origin.Check(); err != nil {
		return fmt.Errorf("writing %s: %w", w.s.Prefix, err)
	}
	for i, id := range tokens {
		if int64(id) >= w.ids {
			return fmt.Errorf("writing %s: token %d of the document is %d; the largest id is %d", w.s.Prefix, i, id,
				w.ids-1)
		}
	}
	w.err = w.append(tokens, origin)
	return w.err
}

func (w *Writer) append(tokens []uint32, origin shards.DocumentOrigin) error {
	if err := w.encoder.Append(tokens, origin); err != nil {
		return err
	}
	if w.origins != nil {
		if err := w.origins.Append(origin); err != nil {
			return fmt.Errorf("writing %s: %w", w.l.At(w.s.Prefix, w.l.Origins), err)
		}
	}
	w.documents++
	w.tokens += int64(len(tokens))
	return nil
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
	if err := w.files.finishSums(); err != nil {
		return err
	}
	if w.origins != nil {
		if err := w.origins.Close(); err != nil {
			return fmt.Errorf("writing %s: %w", w.l.At(w.s.Prefix, w.l.Origins), err)
		}
	}
	m := &shards.Manifest{Layout: w.l.ID, DType: w.s.DType, Tokens: w.tokens, Documents: w.documents,
		Tokenizer: w.s.Info,
		Files:     make(map[string]shards.FileInfo, len(w.files.list))}
	for _, p := range w.files.list {
		if err := p.finish(); err != nil {
			return err
		}
		m.Files[p.name] = p.info
	}
	sealed, err := m.Seal(w.files.disk, w.l.At(w.s.Prefix, w.l.Manifest))
	if err != nil {
		return err
	}
	defer sealed.Abort()
	var stale []string
	if w.stale != nil {
		if stale, err = w.stale(); err != nil {
			return fmt.Errorf("replacing shard: %w", err)
		}
	}
	if w.madeFolder {
		if err := w.files.disk.SyncDir(filepath.Dir(w.s.Prefix)); err != nil {
			return err
		}
	}
	if err := w.files.publish(w.l.Marker[1:], stale, sealed); err != nil {
		return err
	}
	w.manifest, w.madeFolder = m, false
	return nil
}

// Manifest returns the manifest after [Writer.Close] has succeeded, and nil before.
func (w *Writer) Manifest() *shards.Manifest { return w.manifest }

// Abort discards the shard and removes its files. It does nothing after [Writer.Close].
func (w *Writer) Abort() {
	if w.done {
		return
	}
	w.done = true
	w.files.abort()
	if w.madeFolder {
		os.Remove(w.s.Prefix) // only if it is empty
	}
	if w.origins != nil {
		w.origins.Release()
	}
}
