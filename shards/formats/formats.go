// Package formats writes and reads shards of any layout. It maps layouts to their packages and
// detects the layout of the shard at a path. docs/formats/layouts.md describes the files.
package formats

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/filesystem"
	"mula/internal/suggest"
	"mula/shards"
	"mula/shards/datatrove"
	"mula/shards/dolma"
	"mula/shards/fms"
	"mula/shards/layout"
	"mula/shards/mds"
)

// Options are settings of some layouts. The zero value has the defaults of the layouts' frameworks.
type Options struct {
	// Width is the size of an id on disk in bytes: 2 or 4, for dolma also 1. 0 means the
	// framework's choice for the vocabulary, or 4 for an unknown vocabulary. For fms it is always
	// 4.
	Width         int
	SizeLimit     int64  // MDS: maximum size of a file in bytes; 0: 64 MiB
	Compression   string // MDS: "" or "zstd"
	TokenizerName string // datatrove: name or path of the tokenizer in x.ds.metadata; "": its SHA-256

	FS filesystem.FS // the file system of the shard; nil = the machine's
}

// Hints describe the files of a shard without a manifest.
type Hints = layout.Hints

// layouts lists all layouts with their names and the suffix of the marker file, without which a
// shard is incomplete. The marker of MDS is in a folder.
var layouts = []struct {
	layout  shards.Layout
	name    string
	marker  string
	endings []string // suffixes of the other files
}{
	{shards.Megatron, "megatron", ".idx", []string{".bin"}},
	{shards.Dolma, "dolma", ".npy", []string{".csv.gz"}},
	{shards.Datatrove, "datatrove", ".ds", []string{".ds.index", ".ds.metadata"}},
	{shards.FMS, "fms", ".arrow", nil},
	{shards.MDS, "mds", "/index.json", []string{"/mula.json"}},
}

// ParseLayout returns the layout with the given name: megatron, dolma, datatrove, fms or mds.
func ParseLayout(name string) (shards.Layout, error) {
	for _, l := range layouts {
		if l.name == name {
			return l.layout, nil
		}
	}
	text := fmt.Sprintf("unknown layout %q; allowed: %s", name, strings.Join(Names(), ", "))
	if best := suggest.Nearest(name, Names()); best != "" {
		text += fmt.Sprintf("; did you mean %q?", best)
	}
	return "", fmt.Errorf("%s", text)
}

// Names returns the names of all layouts.
func Names() []string {
	var names []string
	for _, l := range layouts {
		names = append(names, l.name)
	}
	return names
}

// Name returns the name of a layout for [ParseLayout].
func Name(l shards.Layout) string {
	for _, known := range layouts {
		if known.layout == l {
			return known.name
		}
	}
	return string(l)
}

// Width returns the size of an id in bytes that the layout's framework chooses for a vocabulary of
// vocabSize ids. A vocabSize of 0 means unknown.
func Width(l shards.Layout, vocabSize int) int {
	switch {
	case l == shards.FMS:
		return 4
	case l == shards.Dolma:
		return shards.SmallestDType(vocabSize, shards.UInt8).Size()
	case l == shards.Megatron && vocabSize > 0:
		return shards.DTypeFor(vocabSize).Size()
	}
	return shards.SmallestDType(vocabSize, shards.UInt16).Size() // the default of the other layouts
}

// NoEmpty returns the reason why a document of a layout must have tokens, or "" if it may be empty.
func NoEmpty(l shards.Layout) string {
	switch l {
	case shards.Datatrove:
		return datatrove.NoEmpty
	case shards.MDS:
		return mds.NoEmpty
	}
	return ""
}

// Create creates a shard. prefix starts the names of its files; for MDS it is their folder, which
// Create creates in an existing folder. Close replaces an existing shard of the same layout. A
// shard of another layout with the same prefix is an error.
func Create(l shards.Layout, prefix string, info shards.TokenizerInfo, o Options) (shards.DocumentWriter, error) {
	if l != shards.MDS {
		for _, other := range layouts[:len(layouts)-1] { // these layouts share the manifest
			if _, err := os.Lstat(prefix + other.marker); other.layout != l && err == nil {
				return nil, fmt.Errorf("creating shard %s: %s belongs to a shard of layout %s, whose manifest would "+
					"be replaced; choose another prefix, or remove that shard",
					prefix, prefix+other.marker, other.name)
			}
		}
	}
	width := o.Width
	switch l {
	case shards.Dolma:
		return made(dolma.Create(o.FS, prefix, info, width))
	case shards.Datatrove:
		return made(datatrove.Create(o.FS, prefix, info, width, o.TokenizerName))
	case shards.FMS:
		if width != 0 && width != 4 {
			return nil, fmt.Errorf("creating shard %s: ids of layout fms have 4 bytes, not %d", prefix, width)
		}
		return made(fms.Create(o.FS, prefix, info))
	case shards.MDS:
		return made(mds.Create(prefix, info, mds.Options{Width: width, SizeLimit: o.SizeLimit,
			Compression: o.Compression, FS: o.FS}))
	case shards.Megatron:
		if width == 0 {
			width = Width(l, info.VocabSize)
		}
		dtype, ok := map[int]shards.DType{2: shards.UInt16, 4: shards.Int32}[width]
		if !ok {
			return nil, fmt.Errorf("creating shard %s: ids of layout megatron have 2 or 4 bytes, not %d", prefix,
				width)
		}
		return made(shards.CreateOn(o.FS, prefix, dtype, info))
	}
	return nil, fmt.Errorf("creating shard %s: unknown layout %q", prefix, string(l))
}

// made returns the result of Create. After an error it returns a nil interface, not an interface
// that holds a nil pointer.
func made[W shards.DocumentWriter](w W, err error) (shards.DocumentWriter, error) {
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Open opens the shard at path, which is a prefix, one of its files, or a folder of MDS. It detects
// the layout from the files.
func Open(path string, h Hints) (shards.DocumentReader, error) {
	l, prefix, err := Detect(path)
	if err != nil {
		return nil, err
	}
	var r shards.DocumentReader
	switch l {
	case shards.Dolma:
		r, err = dolma.Open(prefix, h)
	case shards.Datatrove:
		r, err = datatrove.Open(prefix, h)
	case shards.FMS:
		r, err = fms.Open(prefix)
	case shards.MDS:
		r, err = mds.Open(prefix, h)
	default:
		r, err = openMegatron(prefix)
	}
	if err != nil {
		return nil, err // r would be an interface that holds a nil pointer
	}
	return r, nil
}

// FilePath returns the path of a file by its name in the manifest of the shard with the given
// prefix.
func FilePath(l shards.Layout, prefix, name string) string {
	switch {
	case l == shards.MDS:
		return mds.FileName(prefix, name)
	case l == shards.Megatron && name == "docs":
		return prefix + ".docs.arrow"
	}
	return prefix + "." + name
}

// Detect returns the layout and the prefix of the shard at path, which may have any form that
// [Open] accepts.
func Detect(path string) (shards.Layout, string, error) {
	info, err := os.Stat(path)
	isFile := err == nil && !info.IsDir()
	if isFile && strings.HasSuffix(path, ".mds") || filepath.Base(path) == "index.json" ||
		filepath.Base(path) == "mula.json" {
		return shards.MDS, filepath.Dir(path), nil
	}
	if isFile {
		if l, prefix, ok := byName(path); ok {
			return l, prefix, nil
		}
	}
	var found []int
	var looked []string
	for i, l := range layouts {
		marker := path + filepath.FromSlash(l.marker)
		looked = append(looked, marker)
		if info, err := os.Stat(marker); err == nil && !info.IsDir() {
			found = append(found, i)
		}
	}
	switch len(found) {
	case 0:
		if l, prefix, ok := byName(path); ok { // the file does not exist: opening it returns a better error
			return l, prefix, nil
		}
		for _, l := range layouts {
			for _, ending := range l.endings {
				if _, err := os.Stat(path + filepath.FromSlash(ending)); err == nil {
					return "", "", fmt.Errorf("%s has no %s, which is written last: the shard was never finished; "+
						"write it again",
						path+filepath.FromSlash(ending), path+filepath.FromSlash(l.marker))
				}
			}
		}
		if inside := shardsIn(path); len(inside) > 0 {
			return "", "", fmt.Errorf("no shard at %s, which is a folder; name the shards in it: %s", path,
				strings.Join(inside, ", "))
		}
		return "", "", fmt.Errorf("no shard at %s: looked for %s", path, strings.Join(looked, ", "))
	case 1:
		return layouts[found[0]].layout, path, nil
	}
	var names []string
	for _, i := range found {
		names = append(names, path+filepath.FromSlash(layouts[i].marker))
	}
	return "", "", fmt.Errorf("%s is the prefix of several shards; name one of their files: %s", path,
		strings.Join(names, ", "))
}

// shardsIn returns the files and folders that name the shards in a folder, or the first of them if
// there are many.
func shardsIn(folder string) []string {
	const most = 5
	var found []string
	entries, _ := os.ReadDir(folder) // an unreadable folder has no shards to name
	for _, e := range entries {
		path := filepath.Join(folder, e.Name())
		for _, l := range layouts {
			shard := strings.HasSuffix(path, l.marker) && !e.IsDir() && !strings.HasSuffix(path, ".docs"+l.marker)
			if l.layout == shards.MDS {
				info, err := os.Stat(path + filepath.FromSlash(l.marker))
				shard = err == nil && !info.IsDir()
			}
			if !shard {
				continue
			}
			if len(found) == most {
				return append(found, "…")
			}
			found = append(found, path)
		}
	}
	return found
}

// byName returns layout and prefix for the name of one of a shard's files.
func byName(path string) (shards.Layout, string, bool) {
	for _, l := range layouts {
		for _, ending := range slices.Concat([]string{l.marker}, l.endings) {
			if prefix, ok := strings.CutSuffix(path, filepath.FromSlash(ending)); ok && filepath.Base(prefix) != "." &&
				prefix != "" && !strings.HasSuffix(prefix, ".docs") {
				return l.layout, prefix, true
			}
		}
	}
	return "", "", false
}
