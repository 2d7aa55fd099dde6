package cli

import (
	"fmt"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"mula/internal/atomicfile"
	"mula/train/report"
)

func reportCommand() *cli.Command {
	return &cli.Command{
		Name:        "report",
		Usage:       "draw the metrics of one or several runs as one self-contained HTML page",
		ArgsUsage:   "RUN...",
		Description: "Example: mula report --output report.html runs/base runs/wide",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "write the page to `FILE`", Value: "report.html"},
			&cli.StringFlag{Name: "title", Usage: "heading of the page"},
		},
		Action: runReport,
	}
}

func runReport(c *cli.Context) error {
	if !c.Args().Present() {
		return usagef("no run: name the folders that `mula train` wrote; see `%s --help`", c.Command.HelpName)
	}
	var runs []*report.Run
	for _, dir := range c.Args().Slice() {
		run, err := report.Read(dir)
		if err != nil {
			return err
		}
		runs = append(runs, run)
	}
	output := c.String("output")
	for _, dir := range c.Args().Slice() {
		if err := notInput(output, filepath.Join(dir, "metrics.jsonl")); err != nil {
			return err
		}
	}
	if err := makeParent(output); err != nil {
		return err
	}
	f, err := atomicfile.Create(output)
	if err != nil {
		return err
	}
	defer f.Abort()
	if err := report.Write(f, report.Options{Title: c.String("title")}, runs...); err != nil {
		return err
	}
	if err := f.Publish(); err != nil {
		return err
	}
	fmt.Fprintf(c.App.Writer, "%s: open it in a browser\n", filepath.ToSlash(output))
	return nil
}
