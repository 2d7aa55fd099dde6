package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/tokenize/documents"
)

// expandInputs returns the operands of a command, folders replaced by the files of documents below them in the order of their names.
func expandInputs(c *cli.Context) ([]string, error) {
	if !c.Args().Present() {
		return nil, usagef("no input: name files or folders of documents, or - for standard input; see `%s --help`", c.Command.HelpName)
	}
	var inputs []string
	for _, arg := range c.Args().Slice() {
		if arg == "-" {
			inputs = append(inputs, arg)
			continue
		}
		info, err := os.Stat(arg)
		if err != nil {
			return nil, fmt.Errorf("input: %w", err)
		}
		if !info.IsDir() {
			inputs = append(inputs, arg)
			continue
		}
		before := len(inputs)
		root := arg + string(filepath.Separator) // of a link to a folder: what it leads to
		err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if strings.HasPrefix(d.Name(), ".") && path != root { // hidden, or a file that is still being written
				if d.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
			if d.Type()&fs.ModeSymlink != 0 {
				info, err := os.Stat(path)
				if err != nil && documents.HasEnding(d.Name()) {
					return fmt.Errorf("%s is a link that leads nowhere; remove it, or put back what it led to: %w", path, err)
				}
				if err == nil && info.IsDir() {
					return fmt.Errorf("%s is a link to a folder, and links in folders are not followed: name it as an input of its own, or move it away", path)
				}
			}
			if !d.IsDir() && documents.HasEnding(d.Name()) {
				inputs = append(inputs, path)
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("input: %w", err)
		}
		if len(inputs) == before {
			return nil, fmt.Errorf("input: no files of documents (%s) in %s", documents.Endings, arg)
		}
	}
	return inputs, nil
}

// outsideInputs refuses an output in a folder that is searched for inputs: what is written there would be read as documents when the command is
// given again, to go on.
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
			return usagef("the output %s is in the folder of inputs %s, where the same command would read it as documents the next time; name an output elsewhere, "+
				"or the files instead of the folder", output, arg)
		}
	}
	return nil
}

// notInput refuses to write a command's output over one of its inputs, by whatever path or link, or where an input that is missing would be. Of a plan the
// inputs are [blend.Plan.Files], too.
func notInput(output string, inputs ...string) error {
	if output == "-" {
		return usagef("--output - : write to a file, or leave --output out where standard output is the default")
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

// notOtherFile refuses to write a page over a file that is no page: a report may be drawn again in its place, but what else is there is not for a report
// to replace, be it an input of the command or not.
func notOtherFile(page string) error {
	f, err := os.Open(page)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	const mark = "<!doctype html>"
	begin := make([]byte, len(mark))
	n, err := io.ReadFull(f, begin)
	if n > 0 && !strings.EqualFold(string(begin[:n]), mark) || err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return usagef("%s is there, and is no HTML page; write the page to another file", page)
	}
	return nil
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

// makeParent makes the folder that path will be in.
func makeParent(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("making the folder of %s: %w", path, err)
	}
	return nil
}
