package cli

import (
	"regexp"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/internal/suggest"
)

// libraryFlag is the library's function that describes a flag in a help text.
var libraryFlag = cli.FlagStringer

func init() {
	cli.FlagStringer = flagText
}

// noDefault matches defaults that are not shown.
var noDefault = regexp.MustCompile(` \(default: (none|false|"")\)$`)

// flagText describes a flag in a help text: with the kind of its value, and with its default only
// if that is a value.
func flagText(f cli.Flag) string {
	names, usage, ok := strings.Cut(libraryFlag(f), "\t")
	if !ok {
		return names
	}
	kind := "NAME"
	switch f.(type) {
	case *cli.IntFlag, *cli.Int64Flag, *cli.Uint64Flag:
		kind = "N"
	case *cli.Float64Flag:
		kind = "NUMBER"
	case *cli.DurationFlag:
		kind = "DURATION"
	}
	words := strings.Split(names, " ")
	for i, w := range words {
		if rest, ok := strings.CutPrefix(w, "value"); ok && (rest == "" || rest == ",") {
			words[i] = kind + rest
		}
	}
	return strings.Join(words, " ") + "\t" + noDefault.ReplaceAllString(usage, "")
}

// helpCommand is `mula help`.
func helpCommand() *cli.Command {
	return &cli.Command{
		Name:        "help",
		Usage:       "show the help of mula or of a command",
		ArgsUsage:   "[COMMAND]",
		Description: "Example: mula help blend",
		Action: func(c *cli.Context) error {
			args, commands := []string{"mula"}, c.App.Commands
			for _, name := range c.Args().Slice() {
				i := slices.IndexFunc(commands, func(known *cli.Command) bool { return known.HasName(name) })
				if i < 0 {
					return unknownCommand(commands, strings.Join(args, " "), name)
				}
				args, commands = append(args, name), commands[i].Subcommands
			}
			return newApp(c.App.Reader, c.App.Writer, c.App.ErrWriter).RunContext(c.Context, append(args, "--help"))
		},
	}
}

// undefined matches the flag package's message about an unknown flag.
var undefined = regexp.MustCompile(`^flag provided but not defined: -+([^ =]+)`)

// nearFlag returns the name of the flag that err, about an unknown flag, may mean, or "".
func nearFlag(flags []cli.Flag, err error) string {
	m := undefined.FindStringSubmatch(err.Error())
	if m == nil {
		return ""
	}
	var names []string
	for _, f := range flags {
		for _, name := range f.Names() {
			if len(name) > 1 {
				names = append(names, name)
			}
		}
	}
	return suggest.Nearest(m[1], names)
}
