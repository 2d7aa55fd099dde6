package cli

import (
	"fmt"
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
