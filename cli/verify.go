package cli

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/internal/quantity"
	"mula/train/verify"
)

// errDiffer makes `mula verify` exit with 1 after it has printed the difference of the logs.
var errDiffer = errors.New("the logs have different batches")

func verifyCommand() *cli.Command {
	return &cli.Command{
		Name:      "verify",
		Usage:     "compare two fingerprint logs, and name the first step that differs",
		ArgsUsage: "A B",
		Description: "A and B are logs of `mula hash`, a run's fingerprints.jsonl, or a run's folder, which " +
			"includes the logs of all plans of the run.\n" +
			"A folder of logs of the Python client includes all starts and ranks of its run. Give the logs of the " +
			"ranks of one run as one operand,\n" +
			"separated by commas; their set hashes are added. Exits with 1 if the logs differ. Steps that only one " +
			"log has are listed, not compared.\n" +
			"A run with `spikes` skips data: it differs from its plan at the first skipped step, and skips.yaml in " +
			"its folder lists the positions.\n" +
			"If one log's plan amends the other's, the amendments are shown. The newest plan is taken from the " +
			"run's train.yaml, from plan.json\n" +
			"next to a log, or from --plan.\n\n" +
			"Example: mula verify expected.jsonl runs/base",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "plan", Aliases: []string{"p"},
				Usage:       "read the newest plan of the logs from `FILE`, to explain amendments between the two logs",
				DefaultText: "the run's plan, or plan.json next to a log"},
			jsonFlag,
		},
		Action: runVerify,
	}
}

func runVerify(c *cli.Context) error {
	if c.NArg() != 2 {
		return usagef("two logs are required: see `%s --help`", c.Command.HelpName)
	}
	a, err := verify.OpenLog(c.Args().Get(0))
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := verify.OpenLog(c.Args().Get(1))
	if err != nil {
		return err
	}
	defer b.Close()
	plans := append(slices.Clone(a.Plans), b.Plans...)
	file, why := c.String("plan"), "" // of the newest plan, "" if unknown
	var plan *blend.Plan
	var amended []blend.Parent
	found := 0
	if c.IsSet("plan") {
		if plan, err = blend.ReadPlan(file); err != nil {
			return err
		}
		if amended, found = verify.Amendments(plan, plans); found == 0 {
			return fmt.Errorf("%s is plan %.16s…, but the logs have neither this plan nor a plan that it amends", file,
				plan.Fingerprint())
		}
	} else if plan, file, why = verify.NewestPlan(plans, c.Args().Slice()); plan != nil {
		amended, found = verify.Amendments(plan, plans)
	}
	r, err := fingerprint.Compare(a.Steps, b.Steps, a.Header, b.Header)
	if err != nil {
		return err
	}
	same, samePlan := r.Kind == fingerprint.NoDifference, slices.Equal(a.Plans, b.Plans)
	w := c.App.Writer
	if c.Bool("json") {
		out := map[string]any{"same_batches": same, "same_plan": samePlan, "first_step": r.First,
			"equal_steps": r.Equal, "order_compared": r.Ordered}
		for key, steps := range map[string][]fingerprint.Range{"only_a": r.OnlyA, "only_b": r.OnlyB} {
			if out[key] = steps; steps == nil {
				out[key] = []fingerprint.Range{}
			}
		}
		for key, log := range map[string]*verify.Log{"plans_a": a, "plans_b": b} {
			if log.Run != nil {
				out[key] = log.Run.Spans
			}
		}
		if plan != nil {
			out["plan"] = file
			if out["amendments"] = amended; len(amended) == 0 {
				out["amendments"] = []blend.Parent{}
			}
		}
		if !same {
			out["difference"], out["step"], out["a"], out["b"] = r.Kind.String(), r.Step, r.A, r.B
		}
		if err := printJSON(w, out); err != nil {
			return err
		}
	} else {
		printComparison(w, r, a, b)
		switch {
		case samePlan && len(a.Plans) == 1:
		case plan == nil:
			fmt.Fprintln(w, "if one plan amends the other, name it with --plan FILE to list the amendments")
		default:
			if why != "" {
				fmt.Fprintf(w, "the newest plan is %s, %s\n", printable(file), printable(why))
			}
			printParents(w, fmt.Sprintf("%s: amends", printable(file)), amended)
			for _, fingerprint := range plans {
				if fingerprint != plan.Fingerprint() && plan.Has(fingerprint) {
					fmt.Fprintf(w, "%s: plan %.16s… is the same plan before it was completed\n", printable(file),
						printable(fingerprint))
					break
				}
			}
			if found < len(plans) {
				fmt.Fprintf(w, "%s does not amend all plans of the logs\n", printable(file))
			}
		}
		if !same {
			printDifference(w, file, r, a, b, amended, samePlan)
		}
	}
	if !same {
		return errDiffer
	}
	return nil
}

// printComparison prints the logs, the compared steps and the result.
func printComparison(w io.Writer, r fingerprint.Comparison, a, b *verify.Log) {
	if len(a.Plans) == 1 && len(b.Plans) == 1 && a.Plans[0] != b.Plans[0] {
		fmt.Fprintf(w, "plans differ: %s and %s\n", printable(a.Header.Plan), printable(b.Header.Plan))
	}
	for _, l := range []*verify.Log{a, b} {
		if l.Run == nil {
			continue
		}
		fmt.Fprintf(w, "%s: the run changed its plan:\n", printable(l.Name))
		for _, span := range l.Run.Spans {
			fmt.Fprintf(w, "  %s: plan %.16s…\n", numbered("step", span.Steps.From, span.Steps.To),
				printable(span.Plan))
		}
	}
	switch same := r.Kind == fingerprint.NoDifference; {
	case same && r.Ordered:
		fmt.Fprintf(w, "same batches: yes; %s from step %s, the same samples in the same order\n",
			quantity.Plural(r.Equal, "step"), quantity.Grouped(r.First))
	case same:
		fmt.Fprintf(w,
			"same batches: yes; %s from step %s, the same samples (logs of ranks do not prove the order)\n",
			quantity.Plural(r.Equal, "step"), quantity.Grouped(r.First))
	default:
		fmt.Fprintf(w, "same batches: no; %s, then step %s: %s\n", quantity.Plural(r.Equal, "equal step"),
			quantity.Grouped(r.Step), r.Kind)
	}
	begins := r.First // first step in either log
	for _, l := range []struct {
		log   *verify.Log
		steps []fingerprint.Range
	}{{a, r.OnlyA}, {b, r.OnlyB}} {
		for _, steps := range l.steps {
			begins = min(begins, steps.From)
			fmt.Fprintf(w, "not compared: %s, only in %s\n", numbered("step", steps.From, steps.To),
				printable(l.log.Name))
		}
		if l.log.Note != "" {
			fmt.Fprintf(w, "note: %s\n", printable(l.log.Note))
		}
	}
	if begins > 0 {
		fmt.Fprintf(w, "not compared: %s, in neither log\n", numbered("step", 0, begins))
	}
}

// printDifference prints how to examine the first step that differs. plan is the file of the newest
// plan, or "".
func printDifference(w io.Writer, plan string, r fingerprint.Comparison, a, b *verify.Log, amended []blend.Parent,
	samePlan bool) {
	if len(amended) > 0 {
		at := amended[0].At
		for _, p := range amended {
			at = min(at, p.At)
		}
		if step := at / int64(a.Header.BatchSize); r.Step >= step {
			fmt.Fprintf(w, "the amended plan may have other samples from position %s, in step %s\n",
				quantity.Grouped(at), quantity.Grouped(step))
		} else {
			fmt.Fprintf(w,
				"no amendment explains the difference: all samples before position %s, in step %s, are unchanged\n",
				quantity.Grouped(at), quantity.Grouped(step))
		}
	}
	if plan == "" {
		plan = "PLAN"
	}
	fmt.Fprintf(w, "`mula peek --plan %s --step %d --batch-size %d` shows the plan's samples of the "+
		"step\n", printable(plan),
		r.Step, a.Header.BatchSize)
	if (r.A.Samples == 0) != (r.B.Samples == 0) && r.Kind == fingerprint.SamplesDiffer {
		empty := a.Name
		if r.B.Samples == 0 {
			empty = b.Name
		}
		if samePlan {
			fmt.Fprintf(w, "%s has no samples in this step: a run with `spikes` skips data and lists it in "+
				"skips.yaml; build a plan with\n"+
				"these skips; `mula hash` of the new plan prints the batches of the run\n", printable(empty))
		} else {
			fmt.Fprintf(w, "%s has no samples in this step; its plan may skip the positions\n",
				printable(empty))
		}
	}
}
