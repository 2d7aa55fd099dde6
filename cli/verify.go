package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/internal/quantity"
	"mula/train"
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

// A fingerprintLog is the log, or the logs, of an operand.
type fingerprintLog struct {
	name   string // the operand
	header blend.LogHeader
	steps  blend.Steps
	run    *blend.RunLog    // steps, of a run that has changed its plan; else nil
	client *blend.ClientLog // steps, of a folder of the Python client; else nil
	plans  []string         // of the log, or of all logs of the run, the newest first
	note   string           // note about logs that the operand does not include, or ""
	files  []*os.File
}

func (l *fingerprintLog) close() {
	if l.client != nil {
		l.client.Close()
	}
	for _, f := range l.files {
		f.Close()
	}
}

const (
	runLogName  = "fingerprints.jsonl"
	olderRunLog = "fingerprints-????????????????.jsonl" // of another plan of the run, see docs/formats/run.md
)

// openLog opens the log, or the logs of all ranks or of all plans of a run, that an operand names.
// The caller closes the log, also after an error.
func openLog(operand string) (*fingerprintLog, error) {
	l := &fingerprintLog{name: operand}
	var readers []*blend.LogReader
	open := func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("opening a fingerprint log: %w", err)
		}
		l.files = append(l.files, f)
		r, err := blend.NewLogReader(f, path)
		if err != nil {
			if _, notPlan := blend.ReadPlan(path); notPlan == nil {
				return fmt.Errorf("%s is a plan: mula hash --plan %s --batch-size B --output expected.jsonl writes "+
					"its log, and --plan %s explains amendments", path, path, path)
			}
			return err
		}
		readers = append(readers, r)
		if !slices.Contains(l.plans, r.Header.Plan) {
			l.plans = append(l.plans, r.Header.Plan)
		}
		return nil
	}
	paths := strings.Split(operand, ",")
	for _, path := range paths {
		info, err := os.Stat(path)
		folder := err == nil && info.IsDir()
		if folder {
			if ofClient, err := l.openClient(path, len(paths)); ofClient || err != nil {
				return l, err
			}
			path = filepath.Join(path, runLogName)
		}
		older, err := olderLogs(path)
		if err != nil {
			return l, err
		}
		if err := open(path); err != nil {
			if folder && len(older) > 0 && errors.Is(err, fs.ErrNotExist) {
				err = fmt.Errorf("%w; the folder has only logs of earlier plans, such as %s; start "+
					"the run again, or name that log", err, older[0])
			}
			return l, err
		}
		switch {
		case len(older) == 0:
		case !folder:
			l.note = fmt.Sprintf("%s is the log of one plan of its run; %s also has %s. Name the folder to "+
				"compare the complete run", path, filepath.Dir(path),
				plural(int64(len(older)), "older log"))
		case len(paths) > 1:
			return l, fmt.Errorf("%s has the logs of several plans of a run, and cannot be combined with "+
				"other logs; use it alone", filepath.Dir(path))
		default:
			for _, path := range older {
				if err := open(path); err != nil {
					return l, err
				}
			}
			l.run, l.header, err = blend.JoinLogs(readers)
			l.steps = l.run
			return l, err
		}
	}
	var err error
	l.steps, l.header, err = blend.Combine(readers)
	return l, err
}

// openClient opens the logs of the Python client in a folder, if it has such logs and none of `mula
// train`. operands is the number of paths of the operand.
func (l *fingerprintLog) openClient(folder string, operands int) (bool, error) {
	if _, err := os.Stat(filepath.Join(folder, runLogName)); !errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	log, header, err := blend.OpenClientLog(folder)
	switch {
	case err != nil:
		return true, err
	case log == nil:
		older, err := fs.Glob(os.DirFS(folder), olderRunLog)
		if err != nil || len(older) > 0 {
			return false, err
		}
		return true, fmt.Errorf("%s: no fingerprint log in the folder; expected %s of `mula train` or logs "+
			"of the Python client, such as 0000000000000000-batch32-rank0of1.jsonl",
			folder, runLogName)
	case operands > 1:
		return true, fmt.Errorf("%s has the Python client's logs of all ranks of a run; give it "+
			"alone", folder)
	}
	l.client, l.steps, l.header, l.plans = log, log, header, log.Plans
	return true, nil
}

// olderLogs returns the logs of earlier plans next to the newest log of a run.
func olderLogs(path string) ([]string, error) {
	if filepath.Base(path) != runLogName {
		return nil, nil
	}
	folder := filepath.Dir(path)
	names, err := fs.Glob(os.DirFS(folder), olderRunLog)
	for i := range names {
		names[i] = filepath.Join(folder, names[i])
	}
	return names, err
}

// amendments returns the amendments between the oldest and the newest of some plans. plan amends
// these plans or is one of them. found is the number of these plans among plan and its ancestors.
func amendments(plan *blend.Plan, fingerprints []string) (list []blend.Parent, found int) {
	first, last := len(plan.Parents)+1, -1
	for _, fingerprint := range fingerprints {
		at := slices.IndexFunc(plan.Parents, func(p blend.Parent) bool { return p.Fingerprint == fingerprint })
		switch {
		case fingerprint == plan.Fingerprint():
			at = len(plan.Parents)
		case at < 0:
			continue
		}
		found++
		first, last = min(first, at), max(last, at)
	}
	if first > last {
		return nil, 0
	}
	return plan.Parents[first:last], found
}

// youngestPlan finds the plan of one of the logs that amends the plans of all other logs: the plan
// that the train.yaml of a run names, or plan.json next to a log. why describes where it was found.
// plan is nil if there is no such plan, or if all logs have the same plan.
func youngestPlan(fingerprints, operands []string) (plan *blend.Plan, file, why string) {
	different := slices.Compact(slices.Sorted(slices.Values(fingerprints)))
	if len(different) < 2 {
		return nil, "", ""
	}
	for _, operand := range operands {
		for _, path := range strings.Split(operand, ",") {
			folder := filepath.Dir(path)
			if info, err := os.Stat(path); err == nil && info.IsDir() {
				folder = path
			}
			type candidate struct{ file, why string }
			candidates := []candidate{{filepath.Join(folder, "plan.json"), "which is next to the log"}}
			names := filepath.Join(folder, "train.yaml")
			if config, err := train.LoadConfig(names); err == nil {
				candidates = slices.Insert(candidates, 0, candidate{config.Plan, fmt.Sprintf("which %s names", names)})
			}
			for _, c := range candidates {
				plan, err := blend.ReadPlan(c.file)
				if err != nil {
					continue // the user has not named it
				}
				if _, found := amendments(plan, different); found == len(different) {
					return plan, c.file, c.why
				}
			}
		}
	}
	return nil, "", ""
}

func runVerify(c *cli.Context) error {
	if c.NArg() != 2 {
		return usagef("two logs are required: see `%s --help`", c.Command.HelpName)
	}
	a, err := openLog(c.Args().Get(0))
	defer a.close()
	if err != nil {
		return err
	}
	b, err := openLog(c.Args().Get(1))
	defer b.close()
	if err != nil {
		return err
	}
	plans := append(slices.Clone(a.plans), b.plans...)
	file, why := c.String("plan"), "" // of the newest plan, "" if unknown
	var plan *blend.Plan
	var amended []blend.Parent
	found := 0
	if c.IsSet("plan") {
		if plan, err = blend.ReadPlan(file); err != nil {
			return err
		}
		if amended, found = amendments(plan, plans); found == 0 {
			return fmt.Errorf("%s is plan %.16s…, but the logs have neither this plan nor a plan that it amends", file,
				plan.Fingerprint())
		}
	} else if plan, file, why = youngestPlan(plans, c.Args().Slice()); plan != nil {
		amended, found = amendments(plan, plans)
	}
	r, err := blend.Compare(a.steps, b.steps, a.header, b.header)
	if err != nil {
		return err
	}
	same, samePlan := r.Kind == blend.NoDifference, slices.Equal(a.plans, b.plans)
	w := c.App.Writer
	if c.Bool("json") {
		out := map[string]any{"same_batches": same, "same_plan": samePlan, "first_step": r.First,
			"equal_steps": r.Equal, "order_compared": r.Ordered}
		for key, steps := range map[string][]blend.Range{"only_a": r.OnlyA, "only_b": r.OnlyB} {
			if out[key] = steps; steps == nil {
				out[key] = []blend.Range{}
			}
		}
		for key, log := range map[string]*fingerprintLog{"plans_a": a, "plans_b": b} {
			if log.run != nil {
				out[key] = log.run.Spans
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
		case samePlan && len(a.plans) == 1:
		case plan == nil:
			fmt.Fprintln(w, "if one plan amends the other, name it with --plan FILE to list the amendments")
		default:
			if why != "" {
				fmt.Fprintf(w, "the newest plan is %s, %s\n", printable(file), printable(why))
			}
			printParents(w, fmt.Sprintf("%s: amends", printable(file)), amended)
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
func printComparison(w io.Writer, r blend.Comparison, a, b *fingerprintLog) {
	if len(a.plans) == 1 && len(b.plans) == 1 && a.plans[0] != b.plans[0] {
		fmt.Fprintf(w, "plans differ: %s and %s\n", printable(a.header.Plan), printable(b.header.Plan))
	}
	for _, l := range []*fingerprintLog{a, b} {
		if l.run == nil {
			continue
		}
		fmt.Fprintf(w, "%s: the run changed its plan:\n", printable(l.name))
		for _, span := range l.run.Spans {
			fmt.Fprintf(w, "  %s: plan %.16s…\n", numbered("step", span.Steps), printable(span.Plan))
		}
	}
	switch same := r.Kind == blend.NoDifference; {
	case same && r.Ordered:
		fmt.Fprintf(w, "same batches: yes; %s from step %s, the same samples in the same order\n",
			plural(r.Equal, "step"), quantity.Grouped(r.First))
	case same:
		fmt.Fprintf(w,
			"same batches: yes; %s from step %s, the same samples (logs of ranks do not prove the order)\n",
			plural(r.Equal, "step"), quantity.Grouped(r.First))
	default:
		fmt.Fprintf(w, "same batches: no; %s, then step %s: %s\n", plural(r.Equal, "equal step"),
			quantity.Grouped(r.Step), r.Kind)
	}
	begins := r.First // first step in either log
	for _, l := range []struct {
		log   *fingerprintLog
		steps []blend.Range
	}{{a, r.OnlyA}, {b, r.OnlyB}} {
		for _, steps := range l.steps {
			begins = min(begins, steps.From)
			fmt.Fprintf(w, "not compared: %s, only in %s\n", numbered("step", steps), printable(l.log.name))
		}
		if l.log.note != "" {
			fmt.Fprintf(w, "note: %s\n", printable(l.log.note))
		}
	}
	if begins > 0 {
		fmt.Fprintf(w, "not compared: %s, in neither log\n", numbered("step", blend.Range{To: begins}))
	}
}

// printDifference prints how to examine the first step that differs. plan is the file of the newest
// plan, or "".
func printDifference(w io.Writer, plan string, r blend.Comparison, a, b *fingerprintLog, amended []blend.Parent,
	samePlan bool) {
	if len(amended) > 0 {
		at := amended[0].At
		for _, p := range amended {
			at = min(at, p.At)
		}
		if step := at / int64(a.header.BatchSize); r.Step >= step {
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
		r.Step, a.header.BatchSize)
	if (r.A.Samples == 0) != (r.B.Samples == 0) && r.Kind == blend.SamplesDiffer {
		empty := a.name
		if r.B.Samples == 0 {
			empty = b.name
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
