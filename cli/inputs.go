package cli

import (
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/tokenize/documents"
)

// findInputs finds the document files that the operands of a command name. It lists files in
// folders that are not read on standard error.
func findInputs(c *cli.Context, format documents.Format) (*documents.Found, error) {
	operands := c.Args().Slice()
	if list := c.String("files-from"); list != "" {
		text, err := os.ReadFile(list)
		if err != nil {
			return nil, fmt.Errorf("--files-from: %w", err)
		}
		for line := range strings.Lines(string(text)) {
			if line = strings.TrimRight(line, "\r\n"); line == "" {
				continue
			}
			if err := checkPath(line, true); err != nil {
				return nil, usagef("--files-from %s: %v", list, err)
			}
			operands = append(operands, line)
		}
	}
	if len(operands) == 0 {
		return nil, usagef("no input: name files, folders or URLs of documents, or - for standard input; see "+
			"`%s --help`", c.Command.HelpName)
	}
	found, err := documents.Find(c.Context, operands, format, c.StringSlice("glob"))
	if err != nil {
		return nil, err
	}
	if unread := documents.ListUnread(found.Unread); unread != "" {
		fmt.Fprintf(c.App.ErrWriter,
			"note: not read in folders: %s; --glob selects files, --input-format reads all files\n", printable(unread))
	}
	return found, nil
}
