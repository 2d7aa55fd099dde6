package cli

import (
	"embed"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/train"
)

// The library completes commands and flags, but not values and files, and differently in each
// shell. These scripts ask the program for the candidates of a word, so that all shells offer the
// same candidates.

//go:embed completion
var completionScripts embed.FS

// completionFiles are the scripts, by shell.
var completionFiles = map[string]string{"bash": "mula.bash", "zsh": "mula.zsh", "fish": "mula.fish",
	"powershell": "mula.ps1"}

var completionShells = []string{"bash", "zsh", "fish", "powershell"}

// completeWord is the first operand of the call with which a script asks for candidates. The
// command's words follow; the last one is the word to complete.
const completeWord = "__complete"

func completionCommand() *cli.Command {
	c := &cli.Command{
		Name:  "completion",
		Usage: "print a script that completes commands, flags, their values and files in a shell",
		Description: "bash:        source <(mula completion bash)\n\nzsh:         source <(mula completion zsh)\n\n" +
			"fish:        mula completion fish | source\n\n" +
			"PowerShell:  mula completion powershell | Out-String | Invoke-Expression\n\n" +
			"Example: mula completion bash > ~/.local/share/bash-completion/completions/mula",
	}
	for _, shell := range completionShells {
		c.Subcommands = append(c.Subcommands, &cli.Command{
			Name:        shell,
			Usage:       "print the script for " + shell,
			Description: "Example: mula completion " + shell + " > " + completionFiles[shell],
			Action: func(c *cli.Context) error {
				if err := noOperands(c); err != nil {
					return err
				}
				text, err := completionScripts.ReadFile("completion/" + completionFiles[shell])
				if err != nil {
					return err
				}
				_, err = c.App.Writer.Write(text)
				return err
			},
		})
	}
	return c
}

// A completer collects the candidates of a word.
type completer struct {
	word  string // the word to complete, or its part after = or a comma
	whole string // the text before that part in the word
	lines []string
	files bool
}

func (c *completer) add(candidate, usage string) {
	if strings.HasPrefix(candidate, c.word) {
		usage, _, _ = strings.Cut(usage, "\n")
		c.lines = append(c.lines, c.whole+candidate+"\t"+usage)
	}
}

// complete prints the candidates of the last of words: the line "files" or "words", which reports
// whether files are candidates, and a line for each other candidate, with a tab and its
// description.
func complete(app *cli.App, words []string, w io.Writer) error {
	c := &completer{word: strings.TrimSpace(words[len(words)-1])}
	c.find(app, words[:len(words)-1])
	mode := "words"
	if c.files {
		mode = "files"
	}
	_, err := fmt.Fprintln(w, strings.Join(append([]string{mode}, c.lines...), "\n"))
	return err
}

func (c *completer) find(app *cli.App, before []string) {
	top := &cli.Command{Name: "mula", Subcommands: app.Commands, Flags: append(app.Flags, cli.VersionFlag)}
	command, path := top, "mula"
	operands, help, needs := 0, false, ""
	for i, word := range before {
		switch name := strings.TrimLeft(word, "-"); {
		case needs != "" && word == "=": // bash splits words at =
		case needs != "":
			needs = ""
		case word == "--":
			if path != "mula launch" {
				c.files = true
				return
			}
			command, path, operands = top, "mula", 0
		case strings.HasPrefix(word, "-") && word != "-":
			if !strings.Contains(word, "=") && takesValue(command, name) {
				needs = name
			}
		default:
			next := slices.IndexFunc(command.Subcommands, func(s *cli.Command) bool { return s.HasName(word) })
			switch {
			case operands > 0 || next < 0:
				operands++
			case command == top && word == "help" && i == 0:
				help = true
			default:
				command = command.Subcommands[next]
				path += " " + command.Name
			}
		}
	}
	if needs != "" {
		if c.word == "=" {
			c.word = ""
		}
		c.values(command, path, needs)
		return
	}
	if name, value, ok := strings.Cut(c.word, "="); ok && strings.HasPrefix(name, "-") {
		c.word, c.whole = value, name+"="
		c.values(command, path, strings.TrimLeft(name, "-"))
		return
	}
	if strings.HasPrefix(c.word, "-") {
		for _, f := range command.Flags {
			usage := ""
			if d, ok := f.(cli.DocGenerationFlag); ok {
				usage = d.GetUsage()
			}
			if v, ok := f.(cli.VisibleFlag); ok && v.IsVisible() {
				c.add("--"+f.Names()[0], usage)
			}
		}
		return
	}
	if operands == 0 {
		for _, s := range command.Subcommands {
			if !s.Hidden {
				c.add(s.Name, s.Usage)
			}
		}
	}
	c.files = command != top && len(command.Subcommands) == 0 && !help
}

// values adds the values of a flag, or files.
func (c *completer) values(command *cli.Command, path, name string) {
	for _, f := range command.Flags {
		if !slices.Contains(f.Names(), name) {
			continue
		}
		if set, ok := valuesOf(path, f); ok {
			if i := strings.LastIndex(c.word, ","); i >= 0 && set.list {
				c.word, c.whole = c.word[i+1:], c.whole+c.word[:i+1]
			}
			for _, v := range set.names() {
				c.add(v, "")
			}
			c.files = set.file
			return
		}
		switch f.(type) {
		case *cli.StringFlag, *cli.StringSliceFlag:
			c.files = !notPaths[f.Names()[0]]
		case *cli.GenericFlag: // --set
			for _, field := range train.ConfigFields() {
				c.add(field+"=", "")
			}
		}
		return
	}
}
