package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"mula/blend"
	"mula/shards"
	"mula/tokenize"
)

// outsideInputs refuses an output in a folder that is searched for inputs: what is written there
// would be read as documents when the command is given again, to go on.
func outsideInputs(output string, args []string) error {
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
			return usagef("the output %s is inside the input folder %s, and the next run would read it as "+
				"documents; choose another output, "+
				"or name the input files instead of the folder", output, arg)
		}
	}
	return nil
}

// notInput refuses to write a command's output over one of its inputs, by whatever path or link, or
// where an input that is missing would be. Of a plan the inputs are [blend.Plan.Files], too.
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

// A kind is what files of a command's output are, by which one of them may take the place of
// another.
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
		_, err := blend.NewLogReader(bytes.NewReader(line), "")
		return err == nil
	})}
	rejectsKind = kind{"list of skipped documents", firstLine(func(line []byte) bool {
		var rejected struct{ File, Kind, Error *string }
		return json.Unmarshal(line, &rejected) == nil && rejected.File != nil && rejected.Kind != nil &&
			rejected.Error != nil
	})}
)

// begins says whether a file begins with a text, in any case.
func begins(text string) func(path string) bool {
	return func(path string) bool {
		begin, err := beginning(path, len(text))
		return err == nil && strings.EqualFold(string(begin), text)
	}
}

// firstLine says whether the first line of a file is as it must be.
func firstLine(is func(line []byte) bool) func(path string) bool {
	const longest = 1 << 20
	return func(path string) bool {
		begin, err := beginning(path, longest)
		line, _, found := bytes.Cut(begin, []byte("\n"))
		return err == nil && found && is(append(line, '\n'))
	}
}

// beginning is up to n bytes of a file.
func beginning(path string, n int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, int64(n)))
}

// notOther refuses to write a file over one of another kind, be it an input of the command or not.
// A command may be given again, and what it makes takes the place of what it has made; what else is
// there is not for it to replace.
func notOther(output string, k kind) error {
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

// oneFile refuses an output of a command that writes one file: where [notOther] does, and in a
// folder that does not exist, since a folder that is made for a mistyped path hides the mistake.
func oneFile(output string, k kind) error {
	if output == "" {
		return nil
	}
	if err := notOther(output, k); err != nil {
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

// notShard refuses to write shards where files of shards are, unless --overwrite asks for it.
// numbered is whether they are PREFIX-00000, PREFIX-00001 and so on. Of another layout
// [formats.Create] says more.
func notShard(prefix string, layout shards.Layout, numbered bool) error {
	folder, base := filepath.Split(prefix)
	if layout == shards.MDS && !numbered {
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
		if shardFiles[layout].MatchString(rest) {
			return usagef("%s already exists; replace it with --overwrite, or choose another output",
				filepath.Join(folder, e.Name()))
		}
	}
	return nil
}

// shardFiles are the names of a shard's files behind its prefix, or in its folder; of numbered
// folders the name is nothing.
var shardFiles = map[shards.Layout]*regexp.Regexp{
	shards.Megatron:  regexp.MustCompile(`^\.(bin|idx|json|sums|docs\.arrow)$`),
	shards.Dolma:     regexp.MustCompile(`^\.(npy|csv\.gz|json|sums)$`),
	shards.Datatrove: regexp.MustCompile(`^\.(ds|ds\.index|ds\.metadata|json|sums|docs\.arrow)$`),
	shards.FMS:       regexp.MustCompile(`^\.(arrow|json|sums|docs\.feather)$`),
	shards.MDS:       regexp.MustCompile(`^(|index\.json|mula\.json|mula\.sums|mula\.docs\.arrow|shard\.\d{5,}\.mds.*)$`),
}

// ownFolder refuses shards of fms-fsdp in a folder that has files which it would take for shards:
// those with "arrow" in their ending. Without a folder there is no data set.
func ownFolder(layout shards.Layout, prefix string) error {
	folder := filepath.Dir(prefix)
	if layout != shards.FMS || folder == "." {
		return nil
	}
	others, err := fs.Glob(os.DirFS(folder), "*.docs.arrow")
	if err != nil || len(others) == 0 {
		return err
	}
	return usagef("%s describes the documents of another shard, and fms-fsdp would read it as a "+
		"shard; write fms shards into a separate folder", filepath.Join(folder, others[0]))
}

// realPath is path from the root on, without links. What does not exist yet has none.
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

// reachable refuses a path that .. leads out of a folder which is not there, as nodir/../x: such a
// folder is not made, and without it no file gets the name.
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

// makeParent makes the folder that path will be in.
func makeParent(path string) error {
	if err := reachable(path); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("making the folder of %s: %w", path, err)
	}
	return nil
}
