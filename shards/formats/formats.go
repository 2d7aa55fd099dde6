// Package formats has the list of all layouts. It detects the layout of the shard at a path, opens
// it, and converts shards between layouts. docs/formats/layouts.md describes the files.
package formats

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/suggest"
	"mula/shards"
	"mula/shards/datatrove"
	"mula/shards/dolma"
	"mula/shards/fms"
	"mula/shards/layout"
	"mula/shards/mds"
)

// layouts lists all layouts, in the order in which they are looked for.
var layouts = []*layout.Layout{
	&Megatron,
	&dolma.Layout,
	&datatrove.Layout,
	&fms.Layout,
	&mds.Layout,
}

// Options are settings of some layouts.
type Options = layout.Options

// Hints describe the files of a shard without a manifest.
type Hints = layout.Hints

// All returns all layouts. The caller must not modify them.
func All() []*layout.Layout { return slices.Clone(layouts) }

// Of returns the layout with an identifier, nil for an unknown identifier.
func Of(id shards.Layout) *layout.Layout {
	for _, l := range layouts {
		if l.ID == id {
			return l
		}
	}
	return nil
}

// Named returns the layout with a name.
func Named(name string) (*layout.Layout, error) {
	for _, l := range layouts {
		if l.Name == name {
			return l, nil
		}
	}
	text := fmt.Sprintf("unknown layout %q; allowed: %s", name, strings.Join(Names(), ", "))
	if best := suggest.Nearest(name, Names()); best != "" {
		text += fmt.Sprintf("; did you mean %q?", best)
	}
	return nil, fmt.Errorf("%s", text)
}

// Name returns the name of a layout for messages.
func Name(id shards.Layout) string {
	if l := Of(id); l != nil {
		return l.Name
	}
	return string(id)
}

// Names returns the names of all layouts.
func Names() []string {
	var names []string
	for _, l := range layouts {
		names = append(names, l.Name)
	}
	return names
}

// Create creates a shard. prefix starts the names of its files; in a layout of folders, it is the
// folder, which Create creates in an existing folder. Close replaces an existing shard of the same
// layout. A shard of another layout with the same prefix is an error.
func Create(l *layout.Layout, prefix string, info shards.TokenizerInfo, o Options) (shards.DocumentWriter, error) {
	for _, other := range layouts {
		if l.Folder || other.Folder || other == l { // layouts without folders share the manifest
			continue
		}
		marker := other.At(prefix, other.Marker)
		if _, err := os.Lstat(marker); err == nil {
			return nil, fmt.Errorf("creating shard %s: %s belongs to a shard of layout %s, whose manifest would "+
				"be replaced; choose another prefix, or remove that shard", prefix, marker, other.Name)
		}
	}
	return l.NewShard(prefix, info, o)
}

// Open opens the shard at path, which is a prefix, one of its files, or a folder of MDS. It detects
// the layout from the files.
func Open(path string, h Hints) (shards.DocumentReader, error) {
	l, prefix, err := Detect(path)
	if err != nil {
		return nil, err
	}
	r, err := l.Open(prefix, h)
	if err != nil {
		return nil, err // r may be an interface that holds a nil pointer
	}
	return r, nil
}

// Detect returns the layout and the prefix of the shard at path, which may have any form that
// [Open] accepts.
func Detect(path string) (*layout.Layout, string, error) {
	info, err := os.Stat(path)
	isFile := err == nil && !info.IsDir()
	if l := inFolder(path, isFile); l != nil {
		return l, filepath.Dir(path), nil
	}
	if isFile {
		if l, prefix := byName(path); l != nil {
			return l, prefix, nil
		}
	}
	var found []*layout.Layout
	var markers, looked []string
	for _, l := range layouts {
		marker := path + filepath.FromSlash(l.Marker)
		looked = append(looked, marker)
		if info, err := os.Stat(marker); err == nil && !info.IsDir() {
			found, markers = append(found, l), append(markers, marker)
		}
	}
	switch len(found) {
	case 0:
		return notFound(path, looked)
	case 1:
		return found[0], path, nil
	}
	return nil, "", fmt.Errorf("%s is the prefix of several shards; name one of their files: %s", path,
		strings.Join(markers, ", "))
}

// notFound returns the layout of a file that does not exist, because opening it returns a better
// error, or the reason why no shard is at path.
func notFound(path string, looked []string) (*layout.Layout, string, error) {
	if l, prefix := byName(path); l != nil {
		return l, prefix, nil
	}
	for _, l := range layouts {
		for _, ending := range l.Own {
			file := path + filepath.FromSlash(ending)
			if _, err := os.Stat(file); err == nil {
				return nil, "", fmt.Errorf("%s has no %s, which is written last: the shard was never finished; "+
					"write it again", file, path+filepath.FromSlash(l.Marker))
			}
		}
	}
	if inside := shardsIn(path); len(inside) > 0 {
		return nil, "", fmt.Errorf("no shard at %s, which is a folder; name the shards in it: %s", path,
			strings.Join(inside, ", "))
	}
	return nil, "", fmt.Errorf("no shard at %s: looked for %s", path, strings.Join(looked, ", "))
}

// inFolder returns the layout of a file in the folder of a shard, nil for other paths.
func inFolder(path string, isFile bool) *layout.Layout {
	for _, l := range layouts {
		if !l.Folder {
			continue
		}
		if _, ok := l.Prefix("/" + filepath.Base(path)); ok || isFile && strings.HasSuffix(path, l.PartSuffix) {
			return l
		}
	}
	return nil
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
			shard := strings.HasSuffix(path, l.Marker) && !e.IsDir() && !strings.HasSuffix(path, ".docs"+l.Marker)
			if l.Folder {
				info, err := os.Stat(l.At(path, l.Marker))
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

// byName returns layout and prefix for the name of one of a shard's files, nil for other names.
func byName(path string) (*layout.Layout, string) {
	for _, l := range layouts {
		if prefix, ok := l.Prefix(path); ok && filepath.Base(prefix) != "." && prefix != "" &&
			!strings.HasSuffix(prefix, ".docs") {
			return l, prefix
		}
	}
	return nil, ""
}
