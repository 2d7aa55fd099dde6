package cli

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"mula/tokenize/documents"
)

// findInputs finds the document files that the operands of a command name. It lists files in
// folders that are not read on standard error.
func findInputs(c *cli.Context, format documents.Format) (*documents.Found, error) {
	if !c.Args().Present() {
		return nil, usagef("no input: name files or folders of documents, or - for standard input; see `%s --help`",
			c.Command.HelpName)
	}
	found, err := documents.Find(c.Args().Slice(), format, c.StringSlice("glob"))
	if err != nil {
		return nil, err
	}
	if unread := documents.ListUnread(found.Unread); unread != "" {
		fmt.Fprintf(c.App.ErrWriter,
			"note: not read in folders: %s; --glob selects files, --input-format reads all files\n", printable(unread))
	}
	return found, nil
}
