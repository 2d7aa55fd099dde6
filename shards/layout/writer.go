// Package layout has the common code of the layout packages below shards: ids in arrays without a
// header, and the files of one shard, which are written together and published in order.
package layout

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
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

// Description describes a layout and a shard for [NewWriter].
type Description struct {
	FS       filesystem.FS // where the files are; nil = the machine's
	Layout   shards.Layout
	Prefix   string
	DType    shards.DType // unsigned, of 1, 2 or 4 bytes
	Info     shards.TokenizerInfo
	Name     func(prefix, name string) string // path of a file by its name in the manifest
	Folder   string                           // folder of the files, which is created; "" if the folder must exist
	Manifest string                           // path of the manifest
	// the marker: the file that is published last. Readers treat a shard without it as incomplete
	Marker string
	// the file like x.docs.arrow, or "" if the layout stores complete origins itself
	Origins string
	Sums    string                   // the file with the sums of the files of [Files.CreateIDs]; "" is [SumsName]
	NoEmpty string                   // why a document must have tokens, or "" if it may be empty
	Stale   func() ([]string, error) // files of an older shard that the new one does not replace; may be nil
}

// A Writer is the [shards.DocumentWriter] of all layouts except Megatron's.
type Writer struct {
	d       Description
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

// TypeFor returns the unsigned type with width bytes, 1, 2 or 4. For a width of 0 it returns the
// smallest type for the vocabulary, as [shards.SmallestDType].
func TypeFor(prefix string, width, vocabSize int, least shards.DType) (shards.DType, error) {
	switch width {
	case 0:
		return shards.SmallestDType(vocabSize, least), nil
	case 1, 2, 4:
		return shards.Unsigned(width), nil
	}
	return "", fmt.Errorf("creating shard %s: ids cannot have %d bytes; use 1, 2 or 4", prefix, width)
}

// NewWriter creates a shard. begin creates the encoder, which creates the layout's files.
func NewWriter(d Description, begin func(*Files) (Encoder, error)) (_ shards.DocumentWriter, err error) {
	if d.Info.VocabSize < 0 || int64(d.Info.VocabSize) > d.DType.IDs() {
		return nil, fmt.Errorf("creating shard %s: a vocabulary of %d ids does not fit %s", d.Prefix, d.Info.VocabSize,
			d.DType)
	}
	m, err := shards.ReadManifest(d.Manifest)
	if err != nil {
		return nil, fmt.Errorf("creating shard %s would replace a file of another kind: %w", d.Prefix, err)
	}
	if m != nil && m.Layout != d.Layout {
		return nil, fmt.Errorf("creating shard %s: %s belongs to a shard of another layout, which it would replace "+
			"in part; choose another prefix, or remove that shard", d.Prefix, d.Manifest)
	}
	w := &Writer{d: d, ids: d.DType.IDs()}
	if d.Info.VocabSize > 0 {
		w.ids = int64(d.Info.VocabSize)
	}
	w.files.disk = atomicfile.On(d.FS)
	w.files.path = func(name string) string { return d.Name(d.Prefix, name) }
	w.files.sumsName = cmp.Or(d.Sums, SumsName)
	defer func() {
		if err != nil {
			w.Abort()
		}
	}()
	if d.Folder != "" {
		switch err := w.files.disk.FS().Mkdir(d.Folder, 0o777); {
		case err == nil:
			w.madeFolder = true
		case !errors.Is(err, fs.ErrExist):
			return nil, fmt.Errorf("creating shard %s: %w", d.Prefix, err)
		}
	}
	if w.encoder, err = begin(&w.files); err != nil {
		return nil, err
	}
	if d.Origins != "" {
		h, err := w.files.Create(d.Origins)
		if err != nil {
			return nil, err
		}
		if w.origins, err = shards.NewOriginWriter(h.Buffer, memory.NewGoAllocator()); err != nil {
			return nil, fmt.Errorf("writing %s: %w", w.files.path(d.Origins), err)
		}
	}
	return w, nil
}

// CheckPrefix returns an error if prefix cannot start the names of files, or ends like one of the
// shard's files.
func CheckPrefix(prefix string, endings ...string) error {
	if base := filepath.Base(prefix); prefix == "" || base == "." || base == ".." ||
		os.IsPathSeparator(prefix[len(prefix)-1]) {
		return fmt.Errorf("creating shard: %q is not a prefix for the names of files", prefix)
	}
	for _, ending := range endings {
		if strings.HasSuffix(prefix, ending) {
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
		return fmt.Errorf("writing %s: the shard is already closed", w.d.Prefix)
	}
	if len(tokens) > math.MaxInt32 {
		return fmt.Errorf("writing %s: a document has %d tokens; at most 2^31-1 are supported", w.d.Prefix,
			len(tokens))
	}
	if len(tokens) == 0 && w.d.NoEmpty != "" {
		return fmt.Errorf("writing %s: document %q (%s:%d) has no tokens: %s; remove empty documents", w.d.Prefix,
			origin.ID, origin.File, origin.Line, w.d.NoEmpty)
	}
	if err := origin.Check(); err != nil {
		return fmt.Errorf("writing %s: %w", w.d.Prefix, err)
	}
	for i, id := range tokens {
		if int64(id) >= w.ids {
			return fmt.Errorf("writing %s: token %d of the document is %d; the largest id is %d", w.d.Prefix, i, id,
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
			return fmt.Errorf("writing %s: %w", w.files.path(w.d.Origins), err)
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
		return fmt.Errorf("writing %s: the shard is already closed", w.d.Prefix)
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
			return fmt.Errorf("writing %s: %w", w.files.path(w.d.Origins), err)
		}
	}
	m := &shards.Manifest{Layout: w.d.Layout, DType: w.d.DType, Tokens: w.tokens, Documents: w.documents,
		Tokenizer: w.d.Info,
		Files:     make(map[string]shards.FileInfo, len(w.files.list))}
	for _, p := range w.files.list {
		if err := p.finish(); err != nil {
			return err
		}
		m.Files[p.name] = p.info
	}
	sealed, err := m.Seal(w.files.disk, w.d.Manifest)
	if err != nil {
		return err
	}
	defer sealed.Abort()
	var stale []string
	if w.d.Stale != nil {
		if stale, err = w.d.Stale(); err != nil {
			return fmt.Errorf("replacing shard: %w", err)
		}
	}
	if w.madeFolder {
		if err := w.files.disk.SyncDir(filepath.Dir(w.d.Folder)); err != nil {
			return err
		}
	}
	if err := w.files.publish(w.d.Marker, stale, sealed); err != nil {
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
		os.Remove(w.d.Folder) // only if it is empty
	}
	if w.origins != nil {
		w.origins.Release()
	}
}
