package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/internal/objects"
	"mula/shards/layout"
	"mula/tokenize"
)

// outsideInputs returns an error if the output is in a folder that is searched for inputs: a later
// run of the command would read the output as documents.
func outsideInputs(output string, args []string) error {
	inside := func(arg string) error {
		return usagef("the output %s is inside the input folder %s, and the next run would read it as "+
			"documents; choose another output, "+
			"or name the input files instead of the folder", output, arg)
	}
	if objects.IsURL(output) {
		for _, arg := range args {
			if strings.HasPrefix(output, strings.TrimSuffix(arg, "/")+"/") {
				return inside(arg)
			}
		}
		return nil
	}
	to, err := realPath(filepath.Dir(output))
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	for _, arg := range args {
		if info, err := os.Stat(arg); err != nil || !info.IsDir() {
			continue
		}
		from, err := realPath(arg)
		if err != nil {
			return fmt.Errorf("input: %w", err)
		}
		below, err := filepath.Rel(from, to)
		if err == nil && filepath.IsLocal(below) {
			return inside(arg)
		}
	}
	return nil
}

// notInput returns an error if the output is one of the command's inputs, also through another path
// or a link, or the path of a missing input. The files of a plan, [blend.Plan.Files], are inputs,
// too.
func notInput(output string, inputs ...string) error {
	if output == "-" {
		return usagef("--output - is not supported; name a file, or omit --output if standard output is the default")
	}
	if output == "" {
		return nil
	}
	info, missing := os.Stat(output)
	for _, input := range inputs {
		same := false
		if missing == nil {
			other, err := os.Stat(input)
			same = err == nil && os.SameFile(info, other)
		} else if filepath.Base(input) == filepath.Base(output) {
			to, err1 := realPath(output)
			from, err2 := realPath(input)
			same = err1 == nil && err2 == nil && to == from
		}
		if same {
			return usagef("%s is an input of the command; write the output to another file", output)
		}
	}
	return nil
}

// A kind is the kind of an output file. An output may replace a file of the same kind.
type kind struct {
	name string // as in "plan"
	is   func(path string) bool
}

var (
	pageKind      = kind{"HTML page", begins("<!doctype html>")}
	drawingKind   = kind{"SVG drawing", begins("<svg")}
	planKind      = kind{"plan", func(path string) bool { _, err := blend.ReadPlan(path); return err == nil }}
	tokenizerKind = kind{"tokenizer", func(path string) bool {
		_, err := tokenize.LoadWith(path, tokenize.LoadOptions{IgnoreTruncationAndPadding: true})
		return err == nil
	}}
	logKind = kind{"fingerprint log", firstLine(func(line []byte) bool {
		_, err := fingerprint.NewReader(bytes.NewReader(line), "")
		return err == nil
	})}
	rejectsKind = kind{"list of skipped documents", firstLine(func(line []byte) bool {
		var rejected struct{ File, Kind, Error *string }
		return json.Unmarshal(line, &rejected) == nil && rejected.File != nil && rejected.Kind != nil &&
			rejected.Error != nil
	})}
)

// begins returns a function that reports whether a file starts with a text, in any case.
func begins(text string) func(path string) bool {
	return func(path string) bool {
		begin, err := beginning(path, len(text))
		return err == nil && strings.EqualFold(string(begin), text)
	}
}

// firstLine returns a function that reports whether the first line of a file is valid.
func firstLine(is func(line []byte) bool) func(path string) bool {
	const longest = 1 << 20
	return func(path string) bool {
		begin, err := beginning(path, longest)
		line, _, found := bytes.Cut(begin, []byte("\n"))
		return err == nil && found && is(append(line, '\n'))
	}
}

// beginning returns up to n bytes from the start of a file.
func beginning(path string, n int) ([]byte, error) {
	if objects.IsURL(path) {
		o, err := objects.Open(context.Background(), path)
		if err != nil {
			return nil, err
		}
		begin := make([]byte, min(int64(n), o.Info().Size))
		return begin, o.ReadAt(context.Background(), begin, 0)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, int64(n)))
}

// notOther returns an error if the output exists and is of another kind. A repeated command may
// replace its own output, but no other file.
func notOther(output string, k kind) error {
	if objects.IsURL(output) {
		info, err := objects.Stat(context.Background(), output)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return fmt.Errorf("output: %w", err)
		case info.Size > 0 && !k.is(output):
			return usagef("%s already exists and is not a %s; name another object, or remove it", output, k.name)
		}
		return nil
	}
	info, err := os.Stat(output)
	switch {
	case output == "":
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return reachable(output)
	case err != nil:
		return fmt.Errorf("output: %w", err)
	case info.IsDir():
		return usagef("%s is a folder; name a file for the %s", output, k.name)
	case !info.Mode().IsRegular():
		return usagef("%s is not a regular file; name a regular file for the %s", output, k.name)
	case info.Size() == 0 || k.is(output):
		return nil
	}
	return usagef("%s already exists and is not a %s; name another file, or move it away", output, k.name)
}

// oneFile checks the output of a command that writes one file. It returns an error if [notOther]
// does, or if the folder does not exist: creating a folder for a mistyped path would hide the
// mistake.
func oneFile(output string, k kind) error {
	if output == "" {
		return nil
	}
	if err := notOther(output, k); err != nil || objects.IsURL(output) {
		return err
	}
	folder := filepath.Dir(output)
	info, err := os.Stat(folder)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return usagef("%s: the folder %s does not exist; create it with `mkdir -p %s`, or correct the path", output,
			folder, folder)
	case err != nil:
		return fmt.Errorf("output: %w", err)
	case !info.IsDir():
		return usagef("%s: %s is a file, not a folder; correct the path", output, folder)
	}
	return nil
}

// notShard returns an error if shards would replace files of shards without --overwrite. numbered
// reports whether their names are PREFIX-00000, PREFIX-00001 and so on. [formats.Create] has more
// checks for other layouts.
func notShard(prefix string, l *layout.Layout, numbered bool) error {
	folder, base := filepath.Split(prefix)
	if l.Folder && !numbered {
		folder, base = prefix, ""
	}
	entries, err := os.ReadDir(cmp.Or(folder, "."))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), base)
		if !ok {
			continue
		}
		if numbered {
			digits := len(rest) - len(strings.TrimLeft(strings.TrimPrefix(rest, "-"), "0123456789"))
			if !strings.HasPrefix(rest, "-") || digits < 1+5 {
				continue
			}
			rest = rest[digits:]
		}
		if l.Folder {
			rest = "/" + rest
		}
		if rest == "/" && numbered || l.Has(rest) {
			return usagef("%s already exists; replace it with --overwrite, or choose another output",
				filepath.Join(folder, e.Name()))
		}
	}
	return nil
}

// ownFolder returns an error if the layout's framework would mistake files next to the output for
// shards.
func ownFolder(l *layout.Layout, prefix string) error {
	if l.CheckOutput == nil {
		return nil
	}
	if err := l.CheckOutput(prefix); err != nil {
		return usagef("%v", err)
	}
	return nil
}

// realPath returns the absolute path without links. The path need not exist.
func realPath(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	real, err := filepath.EvalSymlinks(path)
	if parent := filepath.Dir(path); errors.Is(err, fs.ErrNotExist) && parent != path {
		real, err = realPath(parent)
		return filepath.Join(real, filepath.Base(path)), err
	}
	return real, err
}

// reachable returns an error if a path leaves a missing folder with .., such as nodir/../x. Such a
// folder is not created, and without it the path cannot be used.
func reachable(path string) error {
	elements := strings.Split(filepath.ToSlash(path), "/")
	for i := len(elements) - 1; i > 0; i-- {
		if elements[i] != ".." {
			continue
		}
		if _, err := os.Stat(strings.Join(elements[:i+1], "/")); err != nil {
			return usagef("%s passes through %s, which is not a folder; write the path without ..", path,
				strings.Join(elements[:i], "/"))
		}
		break
	}
	return nil
}

// makeParent creates the parent folder of path.
func makeParent(path string) error {
	if err := reachable(path); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("creating the folder of %s: %w", path, err)
	}
	return nil
}
