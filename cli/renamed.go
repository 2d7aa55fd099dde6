package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

// renames lists the names of commands, flags and values that mula had before. The command line is
// rewritten before the commands read it, so help, completion and suggestions have no old names.
// Fields of configuration files have the tag was:"old" instead.
var renames = renameTable{
	flags: []renamedFlag{
		{"generate", "samples", "texts"},
		{"tokenize", "sample", "fraction"},
	},
	values: []renamedValue{
		{"stream", "verify", "reads", "on-read"},
		{"stream", "verify", "behind", "background"},
		{"stream", "verify", "first", "upfront"},
		{"serve", "verify", "reads", "on-read"},
		{"serve", "verify", "behind", "background"},
		{"serve", "verify", "first", "upfront"},
	},
}

// A renameTable lists old names. Commands are named without "mula", as "plan show".
type renameTable struct {
	commands map[string]string // new by old
	flags    []renamedFlag
	values   []renamedValue
}

// A renamedFlag is a flag of a command, without dashes.
type renamedFlag struct{ command, old, new string }

// A renamedValue is a value of a flag of a command.
type renamedValue struct{ command, flag, old, new string }

// apply returns the command line args with current names, and a warning for each old name in it.
// A command line that has the old and the new name of a flag is an error.
func (t renameTable) apply(commands []*cli.Command, args []string) (current, warnings []string, err error) {
	if len(args) < 2 {
		return args, nil, nil
	}
	rest := args[1:]
	for n := min(len(rest), 3); n > 0; n-- {
		old := strings.Join(rest[:n], " ")
		if name, ok := t.commands[old]; ok {
			warnings = append(warnings, fmt.Sprintf("`mula %s` is now called `mula %s`", old, name))
			rest = append(strings.Fields(name), rest[n:]...)
			break
		}
	}
	current = append(current, args[0])
	var command *cli.Command
	var path []string
	for len(rest) > 0 {
		i := slices.IndexFunc(commands, func(c *cli.Command) bool { return c.HasName(rest[0]) })
		if i < 0 {
			break
		}
		command, commands = commands[i], commands[i].Subcommands
		path, current, rest = append(path, command.Name), append(current, rest[0]), rest[1:]
	}
	if command == nil {
		return append(current, rest...), warnings, nil
	}
	name := strings.Join(path, " ")
	given := map[string]string{} // as the user wrote it, by the current name
	for i := 0; i < len(rest); i++ {
		arg := rest[i]
		if arg == "--" {
			return append(current, rest[i:]...), warnings, nil
		}
		if arg == "-" || !strings.HasPrefix(arg, "-") {
			current = append(current, arg)
			continue
		}
		written, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		flag := t.flag(name, written)
		other, seen := given[flag]
		if seen && other != written {
			return nil, nil, usagef("--%s and --%s are the same flag; give --%s once", other, written, flag)
		}
		given[flag] = written
		if flag != written {
			if !seen {
				warnings = append(warnings, fmt.Sprintf("flag --%s is now called --%s", written, flag))
			}
			arg = "--" + flag
			if hasValue {
				arg += "=" + value
			}
		}
		if !hasValue && takesValue(command, flag) && i+1 < len(rest) {
			current = append(current, arg)
			i++
			arg, value, hasValue = rest[i], rest[i], true
		}
		if v := t.value(name, flag, value); hasValue && v != value {
			warnings = append(warnings, fmt.Sprintf("value %s of --%s is now called %s", value, flag, v))
			arg = strings.TrimSuffix(arg, value) + v
		}
		current = append(current, arg)
	}
	return current, warnings, nil
}

// flag returns the current name of a command's flag.
func (t renameTable) flag(command, name string) string {
	for _, r := range t.flags {
		if r.command == command && r.old == name {
			return r.new
		}
	}
	return name
}

// value returns the current name of a value of a command's flag.
func (t renameTable) value(command, flag, value string) string {
	for _, r := range t.values {
		if r.command == command && r.flag == flag && r.old == value {
			return r.new
		}
	}
	return value
}

// printWarnings prints warnings, a line each.
func printWarnings(w io.Writer, warnings []string) {
	for _, text := range warnings {
		fmt.Fprintf(w, "warning: %s\n", printable(text))
	}
}

// warnAbout prints the warnings about a configuration file, such as old names of its fields.
func warnAbout(c *cli.Context, config interface{ Warnings() []string }) {
	printWarnings(c.App.ErrWriter, config.Warnings())
}
