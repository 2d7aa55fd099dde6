package cli

import (
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"mula/blend"
)

func checkCommand() *cli.Command {
	return &cli.Command{
		Name:  "check",
		Usage: "read every byte of a plan's shards: compare with the hashes, look for damage and odd data",
		Description: "Exits with 1 if a shard is not what the plan was sealed with, or holds ids beyond the vocabulary.\n\n" +
			"Example: mula check --plan plan.json",
		Flags: []cli.Flag{
			planFlag, shardsFlag,
			&cli.IntFlag{Name: "workers", Usage: "shards read at a time (0: as many as there are cores)"},
			jsonFlag,
		},
		Action: runCheck,
	}
}

func runCheck(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	if err := atMost(c, maxThreads, "workers"); err != nil {
		return err
	}
	data, err := openPlan(c)
	if err != nil {
		return err
	}
	defer data.Close()
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	report, err := data.Check(c.Context, blend.CheckOptions{Workers: c.Int("workers"), Progress: func(h blend.HashProgress) {
		p.update(fmt.Sprintf("%s of %s, %s", bytesText(h.Bytes), bytesText(h.Total), h.Path), float64(h.Bytes), float64(h.Total))
	}})
	if err != nil {
		return fmt.Errorf("checking: %w", err)
	}
	p.end()
	w := c.App.Writer
	if c.Bool("json") {
		if err := printJSON(w, report); err != nil {
			return err
		}
	} else {
		t := newTable("source", "shard", "tokens", "windows", "tail", "documents", "empty", "long", "longest", "largest id", "hashes")
		for _, s := range report.Shards {
			hashes := "equal"
			if !s.Verified {
				hashes = "DIFFER"
			}
			t.row(s.Source, s.Path, s.Tokens, s.Windows, s.Tail, s.Documents, s.EmptyDocuments, s.LongDocuments, s.Longest, int64(s.MaxID), hashes)
		}
		t.write(w)
		for _, f := range report.Findings {
			kind := "note"
			if f.Error {
				kind = "error"
			}
			fmt.Fprintf(w, "%s: %s: %s\n", kind, f.Path, f.Message)
		}
	}
	if report.Failed() {
		return errors.New("the shards cannot be used with this plan as they are; restore them, or seal a new plan with `mula blend`")
	}
	if !c.Bool("json") {
		fmt.Fprintf(w, "%s: every byte is what the plan was sealed with\n", plural(int64(len(report.Shards)), "shard"))
	}
	return nil
}
