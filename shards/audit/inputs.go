package audit

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"mula/shards/formats"
)

// Inputs finds the shards that paths name. A path is a prefix, a file of a shard, or a folder,
// which means all shards in it and its subfolders, sorted by name. The source of a shard is its
// path without the number at the end: the source of shards/wiki-0000 is shards/wiki.
func Inputs(paths []string) ([]Input, error) {
	var inputs []Input
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil || !info.IsDir() {
			inputs = append(inputs, Input{Source: sourceOf(path), Path: path})
			continue
		}
		found, err := below(path)
		if err != nil {
			return nil, fmt.Errorf("looking for shards: %w", err)
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("%s: no shard is in this folder: found %s", path, markers())
		}
		for _, p := range found {
			inputs = append(inputs, Input{Source: sourceOf(p), Path: p})
		}
	}
	return inputs, nil
}

// below returns the prefixes of shards and the folders of MDS in a folder and its subfolders.
func below(folder string) (found []string, err error) {
	err = filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			if path != folder && (strings.HasPrefix(name, ".") ||
				strings.HasSuffix(name, ".job")) { // work folder of mula tokenize
				return filepath.SkipDir
			}
			for _, l := range formats.All() {
				if _, err := os.Stat(l.At(path, l.Marker)); l.Folder && err == nil {
					if parts, _ := filepath.Glob(filepath.Join(path, "*"+l.PartSuffix+"*")); len(parts) > 0 {
						found = append(found, path)
					}
				}
			}
			return nil
		}
		if strings.HasPrefix(name, ".") || strings.HasSuffix(name, ".docs.arrow") {
			return nil
		}
		for _, l := range formats.All() {
			prefix, ok := strings.CutSuffix(path, l.Marker)
			switch {
			case l.Folder || !ok || filepath.Base(prefix) == "":
			case l == &formats.Megatron: // named by its prefix, as everywhere
				found = append(found, prefix)
			default:
				found = append(found, path)
			}
		}
		return nil
	})
	slices.Sort(found)
	return slices.Compact(found), err
}

// markers lists the files by which shards are found.
func markers() string {
	var files, folders []string
	for _, l := range formats.All() {
		if l.Folder {
			folders = append(folders, fmt.Sprintf(", and no %s of %s", l.Marker[1:], strings.ToUpper(l.Name)))
		} else {
			files = append(files, l.Marker)
		}
	}
	return "no " + strings.Join(files, ", ") + strings.Join(folders, "")
}

var numberAtEnd = regexp.MustCompile(`([-_.]?[0-9]+)+$`)

// sourceOf returns the name of a shard without its number.
func sourceOf(path string) string {
	if _, prefix, err := detect(path); err == nil {
		path = prefix
	}
	dir, name := filepath.Split(path)
	if short := numberAtEnd.ReplaceAllString(name, ""); short != "" {
		return dir + short
	}
	return path
}
