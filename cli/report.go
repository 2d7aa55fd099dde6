package cli

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/atomicfile"
	"mula/internal/quantity"
	"mula/train/report"
)

func reportCommand() *cli.Command {
	return &cli.Command{
		Name:      "report",
		Usage:     "draw the metrics of one or several runs as one self-contained HTML page",
		ArgsUsage: "RUN...",
		Description: "The runs may still be in progress. Loss curves of several runs share a chart, and a table " +
			"lists the\n" +
			"differences between their train.yaml files.\n\n" +
			"Example: mula report --output report.html runs/base runs/wide\n" +
			"         mula report --watch 30 --output report.html runs/base",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "write the page to `FILE`",
				Value: "report.html"},
			&cli.StringFlag{Name: "title", Usage: "use `TEXT` as the heading of the page"},
			&cli.IntFlag{Name: "watch",
				Usage: "update the page every `SECONDS` until all runs have finished; the page in the browser " +
					"reloads itself", DefaultText: "once"},
		},
		Action: runReport,
	}
}

func runReport(c *cli.Context) error {
	if !c.Args().Present() {
		return usagef("no run is named; name the folders that `mula train` wrote (see `%s --help`)", c.Command.HelpName)
	}
	if err := needFlags(c, "output"); err != nil {
		return err
	}
	watch := c.Int("watch")
	if c.IsSet("watch") && watch < 1 {
		return usagef("--watch: must be a number of seconds, at least 1, got %d", watch)
	}
	output := c.String("output")
	named := map[string]bool{}
	for _, dir := range c.Args().Slice() {
		if dir = filepath.Clean(dir); named[dir] {
			return usagef("%s is named twice; name each run once", dir)
		}
		named[dir] = true
	}
	if err := oneFile(output, pageKind); err != nil {
		return err
	}
	finished, err := drawReport(c, output, watch)
	if err != nil {
		return err
	}
	if watch == 0 || finished {
		fmt.Fprintf(c.App.Writer, "%s: open this page in a browser\n", filepath.ToSlash(output))
		return nil
	}
	fmt.Fprintf(c.App.Writer,
		"%s: open this page in a browser; it is updated every %s until the runs have finished\n",
		filepath.ToSlash(output), quantity.Plural(int64(watch), "second"))
	tick := time.NewTicker(time.Duration(watch) * time.Second)
	defer tick.Stop()
	for !finished {
		select {
		case <-c.Context.Done():
			_, err := drawReport(c, output, 0) // the last page does not reload itself
			return err
		case <-tick.C:
		}
		// A run that is restarting may have no metrics for a moment: the page does not change until
		// the next update.
		if finished, err = drawReport(c, output, watch); err != nil {
			fmt.Fprintf(c.App.ErrWriter, "warning: %v; the page was not updated\n", err)
		}
	}
	return nil
}

// drawReport writes the page of the named runs. reload is the number of seconds after which the
// page reloads itself, 0 for never. finished reports whether all runs have done all steps; the page
// then does not reload itself.
func drawReport(c *cli.Context, output string, reload int) (finished bool, err error) {
	var runs []*report.Run
	finished = true
	for _, dir := range c.Args().Slice() {
		run, err := report.Read(dir)
		if err != nil {
			return false, err
		}
		finished = finished && run.Finished()
		runs = append(runs, run)
	}
	if finished {
		reload = 0
	}
	f, err := atomicfile.Create(output)
	if err != nil {
		return false, err
	}
	defer f.Abort()
	if err := report.Write(f, report.Options{Title: c.String("title"), Reload: reload}, runs...); err != nil {
		return false, err
	}
	return finished, f.Publish()
}
