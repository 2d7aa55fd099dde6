package cli

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/internal/version"
)

// WriteManPages writes the man pages of mula and of all its commands to a folder, which it creates.
// Their text is the text of --help. The date may be empty.
func WriteManPages(dir, date string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("creating the folder of the man pages: %w", err)
	}
	app := newApp(strings.NewReader(""), io.Discard, io.Discard)
	top := &cli.Command{Name: "mula", Usage: app.Usage, Description: app.Description, ArgsUsage: "COMMAND",
		Flags: append([]cli.Flag{cli.VersionFlag}, app.Flags...), Subcommands: app.Commands}
	return writeManPage(dir, date, nil, top)
}

// writeManPage writes the page of a command, and the pages of its subcommands.
func writeManPage(dir, date string, above []string, c *cli.Command) error {
	words := append(above[:len(above):len(above)], c.Name)
	name := strings.Join(words, "-")
	var b strings.Builder
	request := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	request(`.TH "%s" "1" "%s" "mula %s" "mula manual"`, roff(strings.ToUpper(name)), roff(date),
		roff(version.String()))
	request(".nh\n.ad l\n.SH NAME\n%s \\- %s", roff(name), roff(c.Usage))
	request(".SH SYNOPSIS\n.nf\n.B %s\n.fi", roff(strings.TrimSpace(strings.Join(words, " ")+" "+synopsis(c))))
	text, example, _ := strings.Cut(c.Description, "Example: ")
	if text = strings.TrimSpace(text); text != "" {
		request(".SH DESCRIPTION")
		for paragraph := range strings.SplitSeq(text, "\n\n") {
			request(".PP")
			for line := range strings.SplitSeq(paragraph, "\n") {
				request("%s", roff(strings.TrimSpace(line)))
			}
		}
	}
	if len(c.Subcommands) > 0 {
		request(".SH COMMANDS")
		for _, s := range c.Subcommands {
			if !s.Hidden {
				request(".TP\n.BR %s (1)\n%s", roff(name+"-"+s.Name), roff(s.Usage))
			}
		}
	}
	category := ""
	request(".SH OPTIONS")
	for _, f := range c.Flags {
		if v, ok := f.(cli.VisibleFlag); ok && !v.IsVisible() {
			continue
		}
		if g, ok := f.(cli.CategorizableFlag); ok && g.GetCategory() != category {
			if category = g.GetCategory(); category == "" {
				category = "Other options"
			}
			request(".SS %s", roff(category))
			category = g.GetCategory()
		}
		names, usage, _ := strings.Cut(flagText(f), "\t")
		request(".TP\n.B %s\n%s", roff(strings.TrimSpace(names)), roff(strings.TrimSpace(usage)))
	}
	if example != "" {
		request(".SH EXAMPLES\n.nf")
		for line := range strings.SplitSeq(strings.TrimSpace(example), "\n") {
			request("%s", roff(strings.TrimSpace(line)))
		}
		request(".fi")
	}
	if len(above) > 0 {
		request(".SH SEE ALSO\n.BR %s (1)", roff(strings.Join(above, "-")))
	}
	path := filepath.Join(dir, name+".1")
	if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
		return fmt.Errorf("writing a man page: %w", err)
	}
	for _, s := range c.Subcommands {
		if s.Hidden {
			continue
		}
		if err := writeManPage(dir, date, words, s); err != nil {
			return err
		}
	}
	return nil
}

// synopsis returns the arguments of a command's synopsis.
func synopsis(c *cli.Command) string {
	text := c.ArgsUsage
	if text == "" && len(c.Subcommands) > 0 {
		text = "COMMAND"
	}
	if len(c.Flags) > 0 {
		text = "[OPTIONS] " + text
	}
	return text
}

// roff escapes a line of text for roff.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n", " ", `"`, `\(dq`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`,
		"~", `\(ti`).Replace(text)
	if strings.HasPrefix(text, ".") {
		text = `\&` + text
	}
	return text
}
