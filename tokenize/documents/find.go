package documents

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/objects"
)

// Found is the result of [Find].
type Found struct {
	Inputs []string
	Names  []string // one name for each input, see [uniqueNames]
	// Unread counts the files in folders that are not inputs, by extension, such as ".xz". With
	// globs it is empty. A file without an extension counts as [NoEnding], a hidden file as
	// [Hidden], and a hidden folder, which is not searched, as [HiddenFolder].
	Unread map[string]int
}

// Keys of [Found.Unread] that are not extensions.
const (
	NoEnding     = "no ending"
	Hidden       = "hidden"
	HiddenFolder = "hidden folder"
)

// Find replaces the folders among operands by the files of documents in them, recursively, in the
// order of their names. An operand that is a file, or "-", is an input itself.
//
// An operand may be a URL of package objects. It is an object, a folder, or a pattern such as
// s3://bucket/folder/*.jsonl, in which * ? and [a-z] do not match slashes. The addresses of web
// servers are files.
//
// Without globs and with the format [Auto], files in folders are read if [hasEnding] accepts their
// name. With another format every file is read. With globs, the files that match one of them are
// read. Hidden files are read only if a glob has a dot for them. Hidden folders are never searched.
//
// A glob without a slash is compared with the name of a file. A glob with a slash is compared with
// the path of the file relative to the operand, where "**" matches any number of folders. The rest
// is as in [path.Match].
func Find(ctx context.Context, operands []string, format Format, globs []string) (*Found, error) {
	s := finder{Found: Found{Unread: make(map[string]int)}, format: format, globs: make([]glob, len(globs))}
	for i, pattern := range globs {
		if err := s.globs[i].parse(pattern); err != nil {
			return nil, err
		}
	}
	folders := false
	for _, operand := range operands {
		if operand == "-" {
			s.add(operand, operand)
			continue
		}
		if objects.IsURL(operand) {
			folder, err := s.addURL(ctx, operand)
			if err != nil {
				return nil, fmt.Errorf("input: %w", err)
			}
			folders = folders || folder
			continue
		}
		info, err := os.Stat(operand)
		if err != nil {
			return nil, fmt.Errorf("input: %w", err)
		}
		if !info.IsDir() {
			s.add(operand, filepath.Base(operand))
			continue
		}
		folders = true
		if err := s.walk(operand); err != nil {
			return nil, fmt.Errorf("input: %w", err)
		}
	}
	if len(globs) > 0 && !folders {
		return nil, fmt.Errorf("input: a glob selects files in folders, but no input is a folder; remove the glob, " +
			"or name a folder")
	}
	for _, g := range s.globs {
		if !g.used {
			return nil, fmt.Errorf("input: the glob %q matches no file in %s; a glob without a slash must match a "+
				"file's name, and a glob with a slash its path relative to the input",
				g.pattern, strings.Join(operands, ", "))
		}
	}
	s.Names = uniqueNames(s.Inputs, s.Names)
	return &s.Found, nil
}

// uniqueNames returns the names of inputs in the ids of documents that have none, see [DefaultID].
// names has a name for each input: for a file in a folder its path relative to the folder,
// otherwise the base name of the file. A name that is not unique is replaced by the input's
// complete path.
func uniqueNames(inputs, names []string) []string {
	names = slices.Clone(names)
	for changed := true; changed; {
		changed = false
		count := make(map[string]int, len(names))
		for _, name := range names {
			count[name]++
		}
		for i, name := range names {
			if whole := filepath.ToSlash(objects.Clean(inputs[i])); count[name] > 1 && name != whole {
				names[i], changed = whole, true
			}
		}
	}
	return names
}

// BaseNames returns the base names of inputs, made unique by [uniqueNames].
func BaseNames(inputs []string) []string {
	names := make([]string, len(inputs))
	for i, input := range inputs {
		names[i] = baseName(input)
	}
	return uniqueNames(inputs, names)
}

// baseName returns the last element of a path, or of a URL without its query.
func baseName(input string) string {
	if objects.IsURL(input) {
		return path.Base(objects.Clean(input))
	}
	return filepath.Base(input)
}

// A finder is the state of a [Find].
type finder struct {
	Found
	format Format
	globs  []glob
}

func (s *finder) add(input, name string) {
	s.Inputs = append(s.Inputs, input)
	s.Names = append(s.Names, name)
}

// addURL adds the objects of a URL, and reports whether it is a folder.
func (s *finder) addURL(ctx context.Context, address string) (folder bool, err error) {
	scheme, _, _ := strings.Cut(strings.ToLower(address), "://")
	web := scheme == "http" || scheme == "https"
	switch {
	case web:
		s.add(address, baseName(address))
		return false, nil
	case strings.ContainsAny(address, `*?[\`):
		found, err := objects.Glob(ctx, address)
		if !hidden(path.Base(address)) {
			found = slices.DeleteFunc(found, func(e objects.Entry) bool { return hidden(path.Base(e.URL)) })
		}
		if err == nil && len(found) == 0 {
			err = fmt.Errorf("%s: no object matches the pattern", address)
		}
		slices.SortFunc(found, asFolders)
		for _, e := range found {
			s.add(e.URL, baseName(e.URL))
		}
		return false, err
	case !strings.HasSuffix(address, "/"):
		_, err := objects.Stat(ctx, address)
		if err == nil {
			s.add(address, baseName(address))
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		for _, listErr := range objects.List(ctx, address+"/") {
			if listErr != nil {
				return false, listErr
			}
			return true, s.walkObjects(ctx, address+"/")
		}
		return false, err
	}
	return true, s.walkObjects(ctx, address)
}

// asFolders orders objects as files in folders are ordered: by the names of the folders first.
func asFolders(a, b objects.Entry) int {
	return strings.Compare(strings.ReplaceAll(a.URL, "/", "\x00"), strings.ReplaceAll(b.URL, "/", "\x00"))
}

// walkObjects adds the objects of a folder, whose URL ends with a slash.
func (s *finder) walkObjects(ctx context.Context, folder string) error {
	before, unread := len(s.Inputs), maps.Clone(s.Unread)
	var found []objects.Entry
	for e, err := range objects.List(ctx, folder) {
		if err != nil {
			return err
		}
		found = append(found, e)
	}
	slices.SortFunc(found, asFolders)
	hiddenFolders := make(map[string]bool)
	for _, e := range found {
		below := strings.TrimPrefix(e.URL, folder)
		if below == "" || strings.HasSuffix(below, "/") { // a mark that a folder exists
			continue
		}
		if top := hiddenFolder(below); top != "" {
			if !hiddenFolders[top] && len(s.globs) == 0 {
				s.Unread[HiddenFolder]++
			}
			hiddenFolders[top] = true
		} else if s.wants(below) {
			s.add(e.URL, below)
		} else if len(s.globs) == 0 {
			s.Unread[unreadKey(path.Base(below))]++
		}
	}
	if len(s.Inputs) > before || len(s.globs) > 0 {
		return nil
	}
	return s.nothing(folder, unread)
}

// hiddenFolder returns the path up to the first hidden folder, or "".
func hiddenFolder(below string) string {
	for i := range len(below) {
		if below[i] == '/' && hidden(path.Base(below[:i])) {
			return below[:i]
		}
	}
	return ""
}

// walk adds the files of a folder.
func (s *finder) walk(folder string) error {
	before, unread := len(s.Inputs), maps.Clone(s.Unread)
	root := folder + string(filepath.Separator) // for a link to a folder: the target
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if file == root || !hidden(d.Name()) {
				return nil
			}
			if len(s.globs) == 0 {
				s.Unread[HiddenFolder]++
			}
			return fs.SkipDir
		}
		below, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		below = filepath.ToSlash(below)
		wanted := s.wants(below)
		if d.Type()&fs.ModeSymlink != 0 && (wanted || !hidden(d.Name())) {
			info, err := os.Stat(file)
			if err != nil && wanted {
				return fmt.Errorf("%s is a broken link; remove it, or restore its target: %w", file,
					err)
			}
			if err == nil && info.IsDir() {
				return fmt.Errorf("%s is a link to a folder, and links in folders are not followed; name it as a "+
					"separate input, or move it away", file)
			}
		}
		if wanted {
			s.add(file, below)
		} else if len(s.globs) == 0 {
			s.Unread[unreadKey(d.Name())]++
		}
		return nil
	})
	if err != nil || len(s.Inputs) > before || len(s.globs) > 0 {
		return err
	}
	return s.nothing(folder, unread)
}

// nothing is the error of a folder without files of documents. unread is [Found.Unread] before it
// was searched.
func (s *finder) nothing(folder string, unread map[string]int) error {
	for key, n := range unread {
		s.Unread[key] -= n
	}
	if has := ListUnread(s.Unread); has != "" {
		return fmt.Errorf("no files of documents (%s) in %s, which has %s; select files with --glob, or read all "+
			"files with --input-format", Endings, folder, has)
	}
	return fmt.Errorf("no files of documents (%s) in %s", Endings, folder)
}

// wants reports whether a file in a folder is an input.
func (s *finder) wants(below string) bool {
	if len(s.globs) > 0 {
		found := false
		for i := range s.globs {
			if s.globs[i].matches(below) {
				s.globs[i].used, found = true, true
			}
		}
		return found
	}
	name := path.Base(below)
	return !hidden(name) && (s.format != Auto || hasEnding(name))
}

// hidden reports whether a file is hidden by its name, as a file is while it is being written.
func hidden(name string) bool { return strings.HasPrefix(name, ".") }

// unreadKey returns the key of a file in [Found.Unread].
func unreadKey(name string) string {
	if hidden(name) {
		return Hidden
	}
	ending := strings.ToLower(filepath.Ext(name))
	if slices.Contains(compressedEndings, ending) {
		ending = strings.ToLower(filepath.Ext(name[:len(name)-len(ending)])) + ending
	}
	if ending == "" || ending == "." {
		return NoEnding
	}
	return ending
}

// ListUnread formats [Found.Unread] as text, the most frequent extensions first. It returns "" if
// Unread is empty.
func ListUnread(unread map[string]int) string {
	const most = 10
	var endings, rest []string
	for key, n := range unread {
		if n > 0 && key != NoEnding && key != Hidden && key != HiddenFolder {
			endings = append(endings, key)
		}
	}
	slices.SortFunc(endings, func(a, b string) int {
		if unread[a] != unread[b] {
			return unread[b] - unread[a]
		}
		return strings.Compare(a, b)
	})
	var words []string
	if len(endings) > most {
		endings, rest = endings[:most], endings[most:]
	}
	for _, ending := range endings {
		words = append(words, fmt.Sprintf("%d %s", unread[ending], ending))
	}
	if others := 0; len(rest) > 0 {
		for _, ending := range rest {
			others += unread[ending]
		}
		words = append(words, fmt.Sprintf("%d with %d other extensions", others, len(rest)))
	}
	if n := unread[NoEnding]; n > 0 {
		words = append(words, fmt.Sprintf("%d without an extension", n))
	}
	if n := unread[Hidden]; n > 0 {
		words = append(words, fmt.Sprintf("%d hidden", n))
	}
	switch n := unread[HiddenFolder]; {
	case n == 1:
		words = append(words, "1 hidden folder")
	case n > 1:
		words = append(words, fmt.Sprintf("%d hidden folders", n))
	}
	return strings.Join(words, ", ")
}

// A glob selects files of a folder.
type glob struct {
	pattern  string
	elements []string // of the pattern, if it has a slash
	used     bool     // it has matched a file
}

func (g *glob) parse(pattern string) error {
	g.pattern = pattern
	if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
		return fmt.Errorf("input: the glob %q is malformed; * ? and [a-z] match characters, and a backslash "+
			"must precede any of these characters that is part of a name", pattern)
	}
	if strings.Contains(pattern, "/") {
		g.elements = strings.Split(strings.TrimPrefix(strings.TrimPrefix(pattern, "."), "/"), "/")
	}
	return nil
}

// matches reports whether a file matches, by its path relative to the folder.
func (g *glob) matches(below string) bool {
	if g.elements == nil {
		return matchName(g.pattern, path.Base(below))
	}
	return matchPath(g.elements, strings.Split(below, "/"))
}

func matchPath(pattern, names []string) bool {
	for len(pattern) > 0 && pattern[0] != "**" {
		if len(names) == 0 || !matchName(pattern[0], names[0]) {
			return false
		}
		pattern, names = pattern[1:], names[1:]
	}
	if len(pattern) == 0 {
		return len(names) == 0
	}
	if len(pattern) == 1 { // everything below
		return len(names) > 0 && !hidden(names[len(names)-1])
	}
	for skip := range names {
		if matchPath(pattern[1:], names[skip:]) {
			return true
		}
	}
	return false
}

// matchName is [path.Match], but a dot at the start of a name must be in the pattern.
func matchName(pattern, name string) bool {
	if hidden(name) && !hidden(pattern) {
		return false
	}
	ok, err := path.Match(pattern, name)
	return ok && err == nil
}
