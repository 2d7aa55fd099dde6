package cli

import (
	"github.com/urfave/cli/v2"

	"mula/internal/localpath"
)

// notPaths are the flags whose values may be URLs: addresses, commands, names and texts. The values
// of all other flags are refused if they are URLs.
var notPaths = map[string]bool{
	// texts
	"document": true, "eod": true, "id-field": true, "reason": true, "special": true, "text-field": true, "title": true,
	"flight": true, "listen": true, // addresses
	"mpiexec": true, "remote-shell": true, // commands
	"tokenizer-name": true, "tokenizer-path": true, // names that are recorded and not opened
}

// notOperands are the commands whose operands are not paths.
var notOperands = map[string]bool{"mula generate": true}

// refuseURLs makes every command refuse URLs in place of paths before it does anything.
func refuseURLs(commands []*cli.Command) {
	for _, command := range commands {
		refuseURLs(command.Subcommands)
		if action := command.Action; action != nil {
			command.Action = func(c *cli.Context) error {
				if err := localOnly(c); err != nil {
					return err
				}
				return action(c)
			}
		}
	}
}

// localOnly returns an error if a flag or operand of a command is a URL.
func localOnly(c *cli.Context) error {
	for _, f := range c.Command.Flags {
		name := f.Names()[0]
		if notPaths[name] || !c.IsSet(name) {
			continue
		}
		var values []string
		switch f.(type) {
		case *cli.StringFlag:
			values = []string{c.String(name)}
		case *cli.StringSliceFlag:
			values = c.StringSlice(name)
		}
		for _, value := range values {
			if err := localpath.CheckWords(value); err != nil {
				return usagef("--%s: %v", name, err)
			}
		}
	}
	if notOperands[c.Command.HelpName] {
		return nil
	}
	for _, operand := range c.Args().Slice() {
		err := localpath.CheckWords(operand)
		if pipe := localpath.Pipe(operand); err != nil && pipe != "" && c.Command.HelpName == "mula tokenize" {
			return usagef("%v; documents can be piped: %s", err, pipe)
		}
		if err != nil {
			return usagef("%v", err)
		}
	}
	return nil
}
