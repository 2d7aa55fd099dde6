package cli

import (
	"bytes"
	"io"
	"os"
	"slices"

	"github.com/urfave/cli/v2"
)

// messages is standard error. It alone obeys -q. A write that starts with one of the kinds is a
// warning or an error. Every other write is a note or a progress line.
type messages struct {
	w      io.Writer
	quiet  bool // skip notes and progress lines
	colour bool
}

// Colours as escape sequences of terminals.
const (
	red      = "\x1b[31m"
	green    = "\x1b[32m"
	yellow   = "\x1b[33m"
	noColour = "\x1b[0m"
)

// messageKinds are the first words of warnings and errors, with their colours.
var messageKinds = []struct{ prefix, colour string }{{"warning:", yellow}, {"mula:", red}}

// statusColours are the colours of the results of checks.
var statusColours = map[string]string{"ok": green, "warning": yellow, "error": red}

// hasColour reports whether w is a terminal on which the user wants colours.
func hasColour(w io.Writer) bool { return isTerminal(w) && os.Getenv("NO_COLOR") == "" }

// statusText returns the result of a check in its colour.
func statusText(status string, colour bool) string {
	if code := statusColours[status]; code != "" && colour {
		return code + status + noColour
	}
	return status
}

func newMessages(w io.Writer) *messages { return &messages{w: w, colour: hasColour(w)} }

func (m *messages) Write(p []byte) (int, error) {
	for _, kind := range messageKinds {
		if rest, ok := bytes.CutPrefix(p, []byte(kind.prefix)); ok {
			if m.colour {
				text := slices.Concat([]byte(kind.colour), []byte(kind.prefix), []byte(noColour), rest)
				if _, err := m.w.Write(text); err != nil {
					return 0, err
				}
				return len(p), nil
			}
			return m.w.Write(p)
		}
	}
	if m.quiet {
		return len(p), nil
	}
	return m.w.Write(p)
}

// unfiltered returns the writer under w, for the output of other programs and for results on
// standard error.
func unfiltered(w io.Writer) io.Writer {
	if m, ok := w.(*messages); ok {
		return m.w
	}
	return w
}

var quietFlag = &cli.BoolFlag{Name: "quiet", Aliases: []string{"q"},
	Usage: "print results, warnings and errors, but no progress and no notes"}

// isQuiet reports whether an argument is the flag, which is also accepted before the command.
func isQuiet(arg string) bool { return arg == "-q" || arg == "--quiet" }

// obeyQuiet makes every command obey the flag.
func obeyQuiet(commands []*cli.Command) {
	for _, command := range commands {
		obeyQuiet(command.Subcommands)
		if action := command.Action; action != nil {
			command.Action = func(c *cli.Context) error {
				if m, ok := c.App.ErrWriter.(*messages); ok && c.Bool("quiet") {
					m.quiet = true
				}
				return action(c)
			}
		}
	}
}
