package cli

import (
	"strings"

	"github.com/urfave/cli/v2"

	"mula/internal/localpath"
	"mula/internal/objects"
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

// mayBeURLs are the flags that name files which mula also reads from or writes to object stores, by
// command. An entry of the command "" is for all commands that have the flag.
var mayBeURLs = map[string]map[string]bool{
	"":              {"plan": true, "shards": true},
	"mula eval":     {"model": true},
	"mula export":   {"model": true, "output": true},
	"mula generate": {"model": true},
	"mula import":   {"from": true, "output": true},
	"mula blend":    {"output": true, "amend": true},
	"mula tokenize": {"output": true},
	"mula index": {"cache": true, "root": true, "data-path": true, "train-data-path": true, "valid-data-path": true,
		"test-data-path": true},
	"mula index verify": {"root": true},
}

// operandsMayBeURLs are the commands whose operands are plans, documents or folders of index files,
// which may be in object stores.
var operandsMayBeURLs = map[string]bool{"mula index verify": true, "mula plan show": true, "mula plan diff": true,
	"mula tokenize": true, "mula tokenizer train": true}

// checkPath returns an error if a value is a URL, or has one among its words. If urls is set, it
// returns an error only if a URL's scheme is unknown.
func checkPath(value string, urls bool) error {
	url := func(word string) bool {
		return objects.IsURL(word) && !strings.HasPrefix(strings.ToLower(word), "file:")
	}
	if !urls {
		return localpath.CheckWords(value)
	}
	if url(value) {
		return objects.Check(value)
	}
	for _, word := range strings.Fields(value) {
		err := localpath.CheckWords(word)
		if url(word) {
			err = objects.Check(word)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// notOperands are the commands whose operands are not paths: a prompt, and a command that checks
// its own flags and operands.
var notOperands = map[string]bool{"mula generate": true, "mula launch": true}

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
			if err := checkPath(value, mayBeURLs[""][name] || mayBeURLs[c.Command.HelpName][name]); err != nil {
				return usagef("--%s: %v", name, err)
			}
		}
	}
	if notOperands[c.Command.HelpName] {
		return nil
	}
	for _, operand := range c.Args().Slice() {
		if err := checkPath(operand, operandsMayBeURLs[c.Command.HelpName]); err != nil {
			return usagef("%v", err)
		}
	}
	return nil
}
