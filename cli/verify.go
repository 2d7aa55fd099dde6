package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend"
)

// errDiffer makes `mula verify` exit with 1 after it has said how the logs differ.
var errDiffer = errors.New("the runs did not see the same batches")

func verifyCommand() *cli.Command {
	return &cli.Command{
		Name:      "verify",
		Usage:     "compare two fingerprint logs, and name the first step that differs",
		ArgsUsage: "A B",
		Description: "A and B are logs of `mula hash` or a run's fingerprints.jsonl (or the run's folder). The logs of the ranks of one run are\n" +
			"given as one operand, separated by commas; their set hashes are added up. Exits with 1 if the logs differ. A run with `spikes`\n" +
			"leaves out data: against its plan it differs from the first step left out on; skips.yaml in its folder names the positions.\n\n" +
			"Example: mula verify expected.jsonl runs/base",
		Flags:  []cli.Flag{jsonFlag},
		Action: runVerify,
	}
}

// openLog opens the log, or the logs of all ranks, that an operand names.
func openLog(operand string) (steps blend.Steps, header blend.LogHeader, done func(), err error) {
	var files []*os.File
	done = func() {
		for _, f := range files {
			f.Close()
		}
	}
	var readers []*blend.LogReader
	for _, path := range strings.Split(operand, ",") {
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			path = filepath.Join(path, "fingerprints.jsonl")
		}
		f, err := os.Open(path)
		if err != nil {
			return nil, header, done, fmt.Errorf("opening a fingerprint log: %w", err)
		}
		files = append(files, f)
		r, err := blend.NewLogReader(f, path)
		if err != nil {
			return nil, header, done, err
		}
		readers = append(readers, r)
	}
	steps, header, err = blend.Combine(readers)
	return steps, header, done, err
}

func runVerify(c *cli.Context) error {
	if c.NArg() != 2 {
		return usagef("two logs are needed: see `%s --help`", c.Command.HelpName)
	}
	a, headerA, doneA, err := openLog(c.Args().Get(0))
	defer doneA()
	if err != nil {
		return err
	}
	b, headerB, doneB, err := openLog(c.Args().Get(1))
	defer doneB()
	if err != nil {
		return err
	}
	r, err := blend.Compare(a, b, headerA, headerB)
	if err != nil {
		return err
	}
	same := r.Kind == blend.NoDifference
	w := c.App.Writer
	if c.Bool("json") {
		out := map[string]any{"same_batches": same, "same_plan": r.SamePlan, "first_step": r.First, "equal_steps": r.Equal, "order_compared": r.Ordered}
		if !same {
			out["difference"], out["step"], out["a"], out["b"] = r.Kind.String(), r.Step, r.A, r.B
		}
		if err := printJSON(w, out); err != nil {
			return err
		}
	} else {
		if !r.SamePlan {
			fmt.Fprintf(w, "plans differ: %s and %s\n", headerA.Plan, headerB.Plan)
		}
		switch {
		case same && r.Ordered:
			fmt.Fprintf(w, "same batches: yes; %s steps from step %s on, the same samples in the same order\n", count(r.Equal), count(r.First))
		case same:
			fmt.Fprintf(w, "same batches: yes; %s steps from step %s on, the same samples (logs of ranks do not prove the order)\n", count(r.Equal), count(r.First))
		default:
			fmt.Fprintf(w, "same batches: no; %s equal steps, then step %s: %s\n", count(r.Equal), count(r.Step), r.Kind)
			fmt.Fprintf(w, "`mula peek --step %d --batch-size %d` shows what the plan has there\n", r.Step, headerA.BatchSize)
			if (r.A.Samples == 0) != (r.B.Samples == 0) && r.Kind == blend.SamplesDiffer {
				empty := c.Args().Get(0)
				if r.B.Samples == 0 {
					empty = c.Args().Get(1)
				}
				fmt.Fprintf(w, "%s has no samples in this step: a run with `spikes` leaves out data and names it in its skips.yaml; `mula hash` of the plan\n"+
					"sealed with these skips gives the batches that the run was trained on\n", empty)
			}
		}
	}
	if !same {
		return errDiffer
	}
	return nil
}
