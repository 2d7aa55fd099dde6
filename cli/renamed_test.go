package cli

import (
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"
)

// Old names on the command line become current ones, each with a warning.
func TestRenames(t *testing.T) {
	table := renameTable{
		commands: map[string]string{"plan compare": "plan diff", "look": "peek"},
		flags:    []renamedFlag{{"blend", "test", "dry-run"}, {"blend", "out", "output"}},
		values:   []renamedValue{{"serve", "verify", "soon", "upfront"}},
	}
	commands := newApp(nil, io.Discard, io.Discard).Commands
	for _, c := range []struct {
		in, want string
		warnings []string
	}{
		{"mula", "mula", nil},
		{"mula blend --output x", "mula blend --output x", nil},
		{"mula plan compare a b", "mula plan diff a b", []string{"`mula plan compare` is now called `mula plan diff`"}},
		{"mula look --position 1", "mula peek --position 1", []string{"`mula look` is now called `mula peek`"}},
		{"mula blend --test --out=x", "mula blend --dry-run --output=x",
			[]string{"flag --test is now called --dry-run", "flag --out is now called --output"}},
		{"mula blend -out x -o y", "mula blend --output x -o y", []string{"flag --out is now called --output"}},
		{"mula blend --config --test", "mula blend --config --test", nil}, // the value of --config
		{"mula blend -- --test", "mula blend -- --test", nil},
		{"mula hash --test", "mula hash --test", nil},
		{"mula serve --verify soon", "mula serve --verify upfront",
			[]string{"value soon of --verify is now called upfront"}},
		{"mula serve --verify=soon", "mula serve --verify=upfront",
			[]string{"value soon of --verify is now called upfront"}},
		{"mula serve --socket soon", "mula serve --socket soon", nil},
	} {
		got, warnings, err := table.apply(commands, strings.Fields(c.in))
		if err != nil || strings.Join(got, " ") != c.want || !slices.Equal(warnings, c.warnings) {
			t.Errorf("%s: %q, %q, %v; want %s, %q", c.in, got, warnings, err, c.want, c.warnings)
		}
	}
	if _, _, err := table.apply(commands, strings.Fields("mula blend --test --dry-run")); err == nil ||
		err.Error() != "--test and --dry-run are the same flag; give --dry-run once" {
		t.Error(err)
	}
}

// Every new name in the table exists, and no old name does.
func TestRenameTable(t *testing.T) {
	commands := newApp(nil, io.Discard, io.Discard).Commands
	find := func(name string) *cli.Command {
		list, found := commands, (*cli.Command)(nil)
		for _, word := range strings.Fields(name) {
			i := slices.IndexFunc(list, func(c *cli.Command) bool { return c.Name == word })
			if i < 0 {
				return nil
			}
			found, list = list[i], list[i].Subcommands
		}
		return found
	}
	has := func(command, flag string) bool {
		c := find(command)
		return c != nil && slices.ContainsFunc(c.Flags, func(f cli.Flag) bool {
			return slices.Contains(f.Names(),
				flag)
		})
	}
	for old, name := range renames.commands {
		if find(old) != nil || find(name) == nil {
			t.Errorf("command %s -> %s", old, name)
		}
	}
	for _, r := range renames.flags {
		if has(r.command, r.old) || !has(r.command, r.new) {
			t.Errorf("%+v", r)
		}
	}
	for _, r := range renames.values {
		if !has(r.command, r.flag) {
			t.Errorf("%+v", r)
		}
	}
}
