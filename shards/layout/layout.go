// Package layout has the common code of the layout packages below shards: the description of a
// layout, and ids in arrays without a header.
package layout

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"mula/internal/filesystem"
	"mula/shards"
)

// A Layout describes a layout of shards. Everything that the rest of the program knows about a
// layout is here: [mula/shards/formats] has a list of all layouts.
//
// Files are named by their ending, which follows the prefix of the shard: ".npy", or "/index.json"
// in a layout whose shards are folders. The name of a file in the manifest is its ending without
// the first character, unless Path says otherwise.
type Layout struct {
	ID    shards.Layout // in manifests
	Name  string        // on the command line
	Users string        // the frameworks that read the layout, for the help
	Shape string        // the files of a shard, for the help

	Folder   bool
	Marker   string   // ending of the file that is published last; without it, a shard is incomplete
	Own      []string // endings of other files from which the layout is detected
	Manifest string
	Sums     string
	Origins  string // the file like x.docs.arrow, "" if the layout stores complete origins itself
	IDs      string // ending of the files of ids; it may be a pattern of [path.Match]
	// in folders: the endings of the files of ids that mula writes, and the suffix by which files
	// of other writers are detected
	Parts      *regexp.Regexp
	PartSuffix string
	// returns the path of a file by its name in the manifest; nil: see above
	Path func(prefix, name string) string

	Types []shards.DType // element types that the layout can have, in ascending order of size
	// returns the type that the framework chooses for a vocabulary, 0 if not known; nil: the
	// smallest of Types
	Choose func(vocabSize int) shards.DType
	// name of the framework, if it derives the element type from the vocabulary alone, and would
	// misread ids of a wider type
	Derives string
	NoEmpty string // why a document must have tokens, "" if it may be empty

	Create func(l *Layout, s Settings) (shards.DocumentWriter, error)
	Open   func(prefix string, h Hints) (shards.DocumentReader, error)
	// returns an error if the framework would mistake other files next to a new shard for shards;
	// may be nil
	CheckOutput func(prefix string) error
	// updates the files of the framework about all shards in a folder, after shards with a prefix
	// were published, and returns the path of the file; may be nil
	Published func(ctx context.Context, fsys filesystem.FS, prefix string) (string, error)
}

// Settings are the settings of a new shard.
type Settings struct {
	Prefix string
	DType  shards.DType // one of [Layout.Types]
	Info   shards.TokenizerInfo
	Options
}

// Options are settings of some layouts. The zero value has the defaults of the layouts' frameworks.
type Options struct {
	FS filesystem.FS // the file system of the shard; nil = the machine's

	// Width is the size of an id on disk in bytes. 0 means the framework's choice for the
	// vocabulary, or 4 for an unknown vocabulary.
	Width         int
	SizeLimit     int64  // MDS: maximum size of a file in bytes; 0: 64 MiB
	Compression   string // MDS: "" or "zstd"
	TokenizerName string // datatrove: name or path of the tokenizer in x.ds.metadata; "": its SHA-256
}

// FilePath returns the path of a file by its name in the manifest.
func (l *Layout) FilePath(prefix, name string) string {
	if l.Path != nil {
		return l.Path(prefix, name)
	}
	return l.At(prefix, l.Marker[:1]+name)
}

// At returns the path of a file by its ending.
func (l *Layout) At(prefix, ending string) string {
	if l.Folder {
		return filepath.Join(prefix, filepath.FromSlash(ending))
	}
	return prefix + ending
}

// Endings returns the endings of all files of a shard with a fixed name, the marker first; "" for
// no file of origins.
func (l *Layout) Endings() []string {
	return append(slices.Concat([]string{l.Marker}, l.Own), l.Manifest, l.Sums, l.Origins)
}

// Prefix returns the prefix of the shard to which a path belongs by its ending. ok is false if no
// ending of Marker and Own matches.
func (l *Layout) Prefix(path string) (prefix string, ok bool) {
	for _, ending := range slices.Concat([]string{l.Marker}, l.Own) {
		if prefix, ok := strings.CutSuffix(path, filepath.FromSlash(ending)); ok {
			return prefix, true
		}
	}
	return path, false
}

// Has reports whether a shard has a file with the given ending.
func (l *Layout) Has(ending string) bool {
	return ending != "" && slices.Contains(l.Endings(), ending) || l.Parts != nil && l.Parts.MatchString(ending)
}

// HasIDs reports whether the file with a name in the manifest contains ids.
func (l *Layout) HasIDs(name string) bool {
	ok, err := path.Match(l.IDs, l.IDs[:1]+name)
	return ok && err == nil
}

// SizeOfIDs returns the size of a shard's files of ids, 0 if they do not exist.
func (l *Layout) SizeOfIDs(prefix string) (bytes int64) {
	names := []string{l.At(prefix, l.IDs)}
	if strings.Contains(l.IDs, "*") {
		names, _ = filepath.Glob(names[0])
	}
	for _, name := range names {
		if info, err := os.Stat(name); err == nil {
			bytes += info.Size()
		}
	}
	return bytes
}

// DType returns the element type that the framework chooses for a vocabulary, 0 if not known.
func (l *Layout) DType(vocabSize int) shards.DType {
	if l.Choose != nil {
		return l.Choose(vocabSize)
	}
	return shards.SmallestDType(vocabSize, l.Types...)
}

// Widen returns the smallest type of the layout with at least size bytes, or the largest type.
func (l *Layout) Widen(size int) shards.DType {
	for _, t := range l.Types {
		if t.Size() >= size {
			return t
		}
	}
	return l.Types[len(l.Types)-1]
}

// NewShard creates a shard. The prefix must not end like a file of the shard, and its folder must
// exist.
func (l *Layout) NewShard(prefix string, info shards.TokenizerInfo, o Options) (shards.DocumentWriter, error) {
	s := Settings{Prefix: prefix, DType: l.DType(info.VocabSize), Info: info, Options: o}
	if o.Width != 0 {
		i := slices.IndexFunc(l.Types, func(t shards.DType) bool { return t.Size() == o.Width })
		if i < 0 {
			return nil, fmt.Errorf("creating shard %s: ids of layout %s have %s bytes, not %d", prefix, l.Name,
				l.sizes(), o.Width)
		}
		s.DType = l.Types[i]
	}
	return l.Create(l, s)
}

// NewWriter creates a shard. begin creates the encoder, which creates the layout's files. stale
// returns the files of an older shard that the new one does not replace; it may be nil.
func (l *Layout) NewWriter(s Settings, stale func() ([]string, error),
	begin func(*shards.FileSet) (shards.Encoder, error)) (shards.DocumentWriter, error) {
	w, err := shards.NewWriter(shards.WriterSettings{FS: s.FS, Layout: l.ID, Prefix: s.Prefix, DType: s.DType,
		Info: s.Info, Path: func(name string) string { return l.FilePath(s.Prefix, name) }, Endings: l.Endings(),
		Folder: l.Folder, Manifest: l.At(s.Prefix, l.Manifest), Marker: l.Marker[1:], Sums: l.Sums[1:],
		Origins: strings.TrimPrefix(l.Origins, l.Marker[:1]), NoEmpty: l.NoEmpty, Stale: stale}, begin)
	if err != nil {
		return nil, err // w would be an interface that holds a nil pointer
	}
	return w, nil
}

// sizes lists the sizes of ids, as in "1, 2 or 4".
func (l *Layout) sizes() string {
	text := ""
	for i, t := range l.Types {
		switch {
		case i == 0:
		case i == len(l.Types)-1:
			text += " or "
		default:
			text += ", "
		}
		text += fmt.Sprint(t.Size())
	}
	return text
}
