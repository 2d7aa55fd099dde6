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
	"mula/shards"
)

// An Encoder writes the documents of one layout into [Files]. Documents that reach it were checked.
type Encoder interface {
	// Append writes a document.
	Append(tokens []uint32, origin shards.DocumentOrigin) error
	// Finish writes what comes after the last document. Files that it has not finished are finished
	// after it.
	Finish() error
}

// Description is what [NewWriter] has to know of a layout and a shard.
type Description struct {
	Layout   shards.Layout
	Prefix   string
	Width    Width
	Info     shards.TokenizerInfo
	Name     func(prefix, name string) string // of a file by its name in the manifest
	Folder   string                           // that the files are in, if it is to be made; "" if it must exist
	Manifest string                           // path of the manifest
	// the file that is published last: without it nobody takes the shard for complete
	Marker string
	// the file like x.docs.arrow, or "" if the layout has another place for all of an origin
	Origins string
	Sums    string                   // the file of sums of what [Files.CreateIDs] begins; "" is [SumsName]
	NoEmpty string                   // why a document must have tokens, or "" if it need not
	Stale   func() ([]string, error) // files of an older shard that the new one does not replace; may be nil
}

// A Writer is the [shards.DocumentWriter] of all layouts but Megatron's.
type Writer struct {
	d       Description
	encoder Encoder
	ids     int64 // every id is below it
	files   Files
	origins *shards.OriginWriter

	documents, tokens int64
	err               error // the first failure; nothing is written after it
	done              bool
	madeFolder        bool
	manifest          *shards.Manifest
}

// NewWriter starts a shard. begin makes the encoder; it begins the layout's files.
func NewWriter(d Description, begin func(*Files) (Encoder, error)) (_ shards.DocumentWriter, err error) {
	if !d.Width.Valid() {
		return nil, fmt.Errorf("creating shard %s: ids of %d bytes; they have 1, 2 or 4", d.Prefix, d.Width)
	}
	if d.Info.VocabSize < 0 || int64(d.Info.VocabSize) > d.Width.IDs() {
		return nil, fmt.Errorf("creating shard %s: a vocabulary of %d ids does not fit %s", d.Prefix, d.Info.VocabSize,
			d.Width)
	}
	m, err := shards.ReadManifest(d.Manifest)
	if err != nil {
		return nil, fmt.Errorf("creating shard %s would replace a file of another kind: %w", d.Prefix, err)
	}
	if m != nil && m.Layout != d.Layout {
		return nil, fmt.Errorf("creating shard %s: %s belongs to a shard of another layout, which it would replace "+
			"in part: choose another prefix, or remove that shard", d.Prefix, d.Manifest)
	}
	w := &Writer{d: d, ids: d.Width.IDs()}
	if d.Info.VocabSize > 0 {
		w.ids = int64(d.Info.VocabSize)
	}
	w.files.path = func(name string) string { return d.Name(d.Prefix, name) }
	w.files.sumsName = cmp.Or(d.Sums, SumsName)
	defer func() {
		if err != nil {
			w.Abort()
		}
	}()
	if d.Folder != "" {
		switch err := os.Mkdir(d.Folder, 0o777); {
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

// CheckPrefix refuses what cannot be the beginning of the names of files, and what ends like one of
// them.
func CheckPrefix(prefix string, endings ...string) error {
	if base := filepath.Base(prefix); prefix == "" || base == "." || base == ".." ||
		os.IsPathSeparator(prefix[len(prefix)-1]) {
		return fmt.Errorf("creating shard: %q is not a prefix for the names of files", prefix)
	}
	for _, ending := range endings {
		if strings.HasSuffix(prefix, ending) {
			return fmt.Errorf("creating shard: %s ends like one of the files of a shard; give the prefix of all of "+
				"them, without %s", prefix, ending)
		}
	}
	return nil
}

// Append is as [shards.DocumentWriter] says.
func (w *Writer) Append(tokens []uint32, origin shards.DocumentOrigin) error {
	if w.err != nil {
		return w.err
	}
	if w.done {
		return fmt.Errorf("writing %s: the shard was closed before", w.d.Prefix)
	}
	if len(tokens) > math.MaxInt32 {
		return fmt.Errorf("writing %s: a document of %d tokens, a shard holds at most 2^31-1 each", w.d.Prefix,
			len(tokens))
	}
	if len(tokens) == 0 && w.d.NoEmpty != "" {
		return fmt.Errorf("writing %s: document %q (%s:%d) has no tokens: %s; leave such documents out", w.d.Prefix,
			origin.ID, origin.File, origin.Line, w.d.NoEmpty)
	}
	if err := origin.Check(); err != nil {
		return fmt.Errorf("writing %s: %w", w.d.Prefix, err)
	}
	for i, id := range tokens {
		if int64(id) >= w.ids {
			return fmt.Errorf("writing %s: token %d of the document is %d, ids end at %d", w.d.Prefix, i, id, w.ids-1)
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

// Close brings all files to disk under temporary names, removes an older marker, and publishes the
// marker last. If it fails, a shard that stood there before is untouched or without its marker.
func (w *Writer) Close() error {
	if w.done {
		return fmt.Errorf("writing %s: the shard was closed before", w.d.Prefix)
	}
	defer w.Abort() // whatever is still under a temporary name
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
	m := &shards.Manifest{Layout: w.d.Layout, DType: w.d.Width.String(), Tokens: w.tokens, Documents: w.documents,
		Tokenizer: w.d.Info,
		Files:     make(map[string]shards.FileInfo, len(w.files.list))}
	for _, p := range w.files.list {
		if err := p.finish(); err != nil {
			return err
		}
		m.Files[p.name] = p.info
	}
	sealed, err := m.Seal(w.d.Manifest)
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
		if err := atomicfile.SyncDir(filepath.Dir(w.d.Folder)); err != nil {
			return err
		}
	}
	if err := w.files.publish(w.d.Marker, stale, sealed); err != nil {
		return err
	}
	w.manifest, w.madeFolder = m, false
	return nil
}

// Manifest is the manifest after [Writer.Close] has succeeded, and nil before.
func (w *Writer) Manifest() *shards.Manifest { return w.manifest }

// Abort gives the shard up and removes what was written. After [Writer.Close] it does nothing.
func (w *Writer) Abort() {
	if w.done {
		return
	}
	w.done = true
	w.files.abort()
	if w.madeFolder {
		os.Remove(w.d.Folder) // if nothing is in it
	}
	if w.origins != nil {
		w.origins.Release()
	}
}
