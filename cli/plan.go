package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/internal/quantity"
	"mula/shards/verifier"
)

// Flags of the commands that read a plan.
var (
	planFlag = &cli.StringFlag{Name: "plan", Aliases: []string{"p"}, Usage: "read the plan from `FILE`",
		Value: "plan.json"}
	shardsFlag = &cli.StringFlag{Name: "shards",
		Usage: "resolve relative shard paths from `DIR` instead of the plan's folder"}
	batchSizeFlag = &cli.IntFlag{Name: "batch-size", Aliases: []string{"B"}, Usage: "samples per step, over all ranks",
		DefaultText: "none"}
	stepSizeFlag = &cli.IntFlag{Name: "batch-size", Aliases: []string{"B"},
		Usage: "samples per step, over all ranks; required", DefaultText: "none"}
	rankFlag     = &cli.IntFlag{Name: "rank", Usage: "read only the samples of this rank"}
	reverifyFlag = &cli.DurationFlag{Name: "reverify",
		Usage: "verify a block again when it is read this long after its last verification; 0: never",
		Value: blend.DefaultReverify}
	verifyFlag = &cli.StringFlag{Name: "verify",
		Usage: "when to verify checksums: `WHEN` is on-read (blocks that have sums), background (also complete " +
			"files, in the background), upfront (as background, and files without sums before use) or complete (as " +
			"background, and complete a provisional plan)", Value: "on-read"}
	worldFlag = &cli.IntFlag{Name: "world", Usage: "number of ranks; must divide the batch size", Value: 1}
)

// The positions that a command reads.
var (
	fromFlag = &cli.Int64Flag{Name: "from", Usage: "start at position `P`, a multiple of the batch size"}
	toFlag   = &cli.Int64Flag{Name: "to",
		Usage:       "stop before position `P`, a multiple of the batch size or the end of the plan",
		DefaultText: "end of the plan"}
)

func planCommand() *cli.Command {
	return &cli.Command{
		Name:  "plan",
		Usage: "show a plan, or compare two plans",
		Subcommands: []*cli.Command{
			{
				Name:      "show",
				Usage:     "print the sources and stages of a plan, and the plans that it amends",
				ArgsUsage: "[PLAN]",
				Description: "Name the plan with --plan or as the operand. No shard is opened.\n\nExample: mula " +
					"plan show plan.json",
				Flags:  []cli.Flag{planFlag, jsonFlag},
				Action: runPlanShow,
			},
			{
				Name:      "diff",
				Usage:     "show the differences between two plans, and the first position that may differ",
				ArgsUsage: "FIRST SECOND",
				Description: "Both plans have the same samples before that position. Only the plans are read: " +
					"shards, stages and skips. No shard is opened.\n\n" +
					"Example: mula plan diff plan.json plan-2.json",
				Flags:  []cli.Flag{jsonFlag},
				Action: runPlanDiff,
			},
		},
	}
}

// readPlan reads the plan in a file.
func readPlan(path string) (*blend.Plan, error) {
	if path == "" {
		return nil, usagef("--plan is empty; name the plan")
	}
	plan, err := blend.ReadPlan(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w; name the plan with --plan, or build one with `mula blend`", err)
	}
	return plan, err
}

func runPlanShow(c *cli.Context) error {
	path := c.String("plan")
	switch {
	case c.NArg() > 1:
		return usagef("unexpected %q: name one plan; see `%s --help`", c.Args().Get(1), c.Command.HelpName)
	case c.NArg() == 1 && c.IsSet("plan"):
		return usagef("unexpected %q: --plan already names the plan", c.Args().First())
	case c.NArg() == 1:
		path = c.Args().First()
	}
	plan, err := readPlan(path)
	if err != nil {
		return err
	}
	summary, parents := plan.Summary(), plan.Parents
	if parents == nil {
		parents = []blend.Parent{}
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, map[string]any{"plan": path, "fingerprint": plan.Fingerprint(),
			"provisional": plan.Provisional(), "provisional_fingerprint": plan.ProvisionalFingerprint(),
			"order_version": plan.OrderVersion(), "parents": parents,
			"summary": summary})
	}
	printSummary(c.App.Writer, summary)
	fmt.Fprintf(c.App.Writer, "\n%s: plan %s, order version %s\n", printable(path), plan.Fingerprint(),
		plan.OrderVersion())
	switch provisional := plan.ProvisionalFingerprint(); {
	case plan.Provisional():
		fmt.Fprintf(c.App.Writer, "provisional; complete it with `mula blend --complete %s`\n", printable(path))
	case provisional != "":
		fmt.Fprintf(c.App.Writer, "complete; it was the provisional plan %s\n", provisional)
	}
	printParents(c.App.Writer, "amends", parents)
	return nil
}

// printParents prints amended plans, the youngest first.
func printParents(w io.Writer, verb string, parents []blend.Parent) {
	for i := len(parents) - 1; i >= 0; i-- {
		reason := ""
		if p := parents[i]; p.Reason != "" {
			reason = ": " + p.Reason
		}
		fmt.Fprintf(w, "%s plan %.16s… from position %s%s\n", verb, parents[i].Fingerprint,
			quantity.Grouped(parents[i].At), printable(reason))
	}
}

func runPlanDiff(c *cli.Context) error {
	if c.NArg() != 2 {
		return usagef("two plans are required: see `%s --help`", c.Command.HelpName)
	}
	var plans [2]*blend.Plan
	for i, path := range c.Args().Slice() {
		var err error
		if plans[i], err = blend.ReadPlan(path); err != nil {
			return err
		}
	}
	d := blend.Diff(plans[0], plans[1])
	if c.Bool("json") {
		return printJSON(c.App.Writer, map[string]any{"first": plans[0].Fingerprint(), "second": plans[1].Fingerprint(),
			"difference": d})
	}
	w := c.App.Writer
	first, second := printable(c.Args().Get(0)), printable(c.Args().Get(1))
	fmt.Fprintf(w, "%s: plan %s, %s\n%s: plan %s, %s\n\n", first, plans[0].Fingerprint(),
		quantity.Plural(plans[0].Length(), "position"),
		second, plans[1].Fingerprint(), quantity.Plural(plans[1].Length(), "position"))
	switch d.Relation {
	case blend.SamePlan:
		fmt.Fprintln(w, "Both files have the same plan.")
		return nil
	case blend.SecondAmends:
		fmt.Fprintln(w, "The second plan amends the first:")
	case blend.FirstAmends:
		fmt.Fprintln(w, "The first plan amends the second:")
	case blend.CommonAncestor:
		fmt.Fprintf(w, "Both amend plan %.16s…:\n", d.Ancestor)
	case blend.Unrelated:
		fmt.Fprintln(w, "Neither plan amends the other.")
	}
	printParents(w, "the first amends", d.First)
	printParents(w, "the second amends", d.Second)
	switch {
	case len(d.Changes) == 0 || d.Same == min(plans[0].Length(), plans[1].Length()):
		fmt.Fprintf(w, "\nBoth have the same samples at all common positions (%s).\n",
			quantity.Grouped(d.Same))
	case d.Same == 0:
		fmt.Fprintln(w, "\nThey differ from position 0.")
	case d.Same == 1:
		fmt.Fprintln(w, "\nBoth have the same sample at position 0. They differ from position 1.")
	default:
		fmt.Fprintf(w, "\nBoth have the same samples at the first %s. They differ from position %s.\n",
			quantity.Plural(d.Same, "position"), quantity.Grouped(d.Same))
	}
	if len(d.Changes) == 0 {
		return nil
	}
	const mostSkips = 10
	t := newTable("from", "what", "change")
	var skips int64
	for _, change := range d.Changes {
		if change.What == "skips" {
			if skips++; skips > mostSkips {
				continue
			}
		}
		from := "-"
		if change.From >= 0 {
			from = quantity.Grouped(change.From)
		}
		t.row(from, change.What, printable(change.Text))
	}
	if skips > mostSkips {
		t.row("", "skips", fmt.Sprintf("and %s; --json lists all", quantity.Plural(skips-mostSkips, "further range")))
	}
	fmt.Fprintln(w)
	t.write(w)
	t = newTable("source", "first", "share", "second", "share", "change (percentage points)")
	for _, s := range d.Sources {
		t.row(printable(s.Name), s.First.Samples, quantity.FixedPercent(s.First.Share, 3), s.Second.Samples,
			quantity.FixedPercent(s.Second.Share, 3),
			fmt.Sprintf("%+.3f", 100*(s.Second.Share-s.First.Share)))
	}
	skipped := ""
	if len(plans[0].Skips)+len(plans[1].Skips) > 0 {
		skipped = ", including skipped positions"
	}
	from := d.Same
	if !plans[0].Traits().Scheduled || !plans[1].Traits().Scheduled {
		from = 0
	}
	fmt.Fprintf(w, "\npositions from %s%s:\n", quantity.Grouped(from), skipped)
	t.write(w)
	return nil
}

// openPlan opens the plan and the shards that the flags name. The caller closes the data.
func openPlan(c *cli.Context) (*blend.Data, error) { return openPlanWith(c, blend.OpenOptions{}) }

// openPlanWith is openPlan with options. The flags set the folder of the shards.
func openPlanWith(c *cli.Context, o blend.OpenOptions) (*blend.Data, error) {
	plan, err := readPlan(c.String("plan"))
	if err != nil {
		return nil, err
	}
	o.Base = c.String("shards")
	p := newProgress(c.App.ErrWriter)
	if plan.Provisional() {
		p.line("%s", provisionalNote(c.String("plan")))
	}
	o.Waiting = func(message string) { p.line("%s", message) }
	data, err := blend.Open(c.Context, plan, o)
	switch {
	case errors.Is(err, fs.ErrNotExist) && o.Base == "":
		return nil, fmt.Errorf("%s: %w; if the plan or its shards were moved, set --shards to the folder that the "+
			"plan's paths are relative to", c.String("plan"), err)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s: %w; --shards must be the folder that the plan's paths are relative to",
			c.String("plan"), err)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", c.String("plan"), err)
	}
	return data, nil
}

// ranks reads --batch-size, --rank and --world.
func ranks(c *cli.Context) (batchSize, rank, world int, err error) {
	batchSize, rank, world = c.Int("batch-size"), c.Int("rank"), c.Int("world")
	if !c.IsSet("batch-size") {
		return 0, 0, 0, usagef("--batch-size is required: see `%s --help`", c.Command.HelpName)
	}
	if _, err = blend.RecordRows(batchSize, rank, world, 0); err != nil {
		err = usagef("--batch-size, --rank, --world: %v", err)
	}
	return batchSize, rank, world, err
}

// positions reads --from and --to and checks them against the plan's steps.
func positions(c *cli.Context, plan *blend.Plan, batchSize int) (from, to int64, err error) {
	if from, to = c.Int64("from"), c.Int64("to"); to == 0 {
		to = plan.Length()
	}
	grid, err := plan.Grid(batchSize)
	if err == nil {
		err = grid.Check(from, to)
	}
	if err != nil {
		err = usagef("--batch-size %d --from %d --to %d: %v", batchSize, from, to, err)
	}
	return from, to, err
}

// verification returns the options of --verify and --reverify for opening a plan.
func verification(c *cli.Context) (o blend.OpenOptions, err error) {
	if o.Verify, err = verifier.Parse(c.String("verify")); err != nil {
		return o, usagef("--verify: %v", err)
	}
	switch o.Reverify = c.Duration("reverify"); {
	case o.Reverify < 0:
		return o, usagef("--reverify is %s; it must be at least 0", o.Reverify)
	case o.Reverify == 0:
		o.Reverify = -1
	}
	return o, nil
}
