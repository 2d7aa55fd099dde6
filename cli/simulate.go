package cli

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/blend/simulate"
	"mula/internal/atomicfile"
	"mula/internal/page"
	"mula/internal/quantity"
)

func simulateCommand() *cli.Command {
	return &cli.Command{
		Name:  "simulate",
		Usage: "estimate the storage load of a plan, and show its shuffle and mixture statistics",
		Description: "Statistics of the order, and the requests of the reader of object stores, are counted from the " +
			"plan. Times come from a simple storage model, whose figures are assumptions:\n" +
			"docs/reference/simulate.md has the formulas, the kinds of storage and the format of a storage file.\n\n" +
			"Example: mula simulate --plan plan.json --nodes 64 --ranks-per-node 8 --batch-size 1024 --step-time " +
			"0.9 --storage parallel-fs --report simulate.html",
		Flags: []cli.Flag{
			planFlag, shardsFlag,
			&cli.IntFlag{Name: "nodes", Aliases: []string{"N"}, Usage: "number of nodes that read the plan",
				Value: 1},
			&cli.IntFlag{Name: "ranks-per-node", Usage: "ranks per node", Value: 1},
			&cli.IntFlag{Name: "batch-size", Aliases: []string{"B"}, Usage: "samples per step, over all ranks",
				DefaultText: "the multiple of the ranks nearest to 512"},
			&cli.Float64Flag{Name: "step-time", Usage: "compute time of a step, in `SECONDS`",
				DefaultText: "unknown: no check whether storage keeps up"},
			&cli.Float64Flag{Name: "tokens-per-second", Usage: "instead of --step-time: compute `T` tokens/s on all " +
				"nodes together",
				DefaultText: "unknown"},
			&cli.StringFlag{Name: "storage",
				Usage: "model the storage local-nvme, parallel-fs or object-store, or the `FILE` that ends in .yaml",
				Value: simulate.Kinds[0].Name},
			fromFlag, toFlag,
			&cli.Int64Flag{Name: "samples", Usage: "examine at most `N` samples one by one",
				Value: simulate.DefaultSamples},
			&cli.BoolFlag{Name: "plan-only",
				Usage: "use only the plan, without shards; omit document statistics"},
			&cli.StringFlag{Name: "report", Usage: "write an HTML page with tables and charts to `FILE`"},
			jsonFlag,
		},
		Action: runSimulate,
	}
}

func runSimulate(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	o, err := simulateOptions(c)
	if err != nil {
		return err
	}
	if path := c.String("report"); path != "" {
		if err := notInput(path, c.String("plan"), c.String("storage")); err != nil {
			return err
		}
	}
	var plan *blend.Plan
	if c.Bool("plan-only") {
		if c.IsSet("shards") {
			return usagef("--plan-only reads no shards; remove --shards")
		}
		plan, err = readPlan(c.String("plan"))
		if err == nil && !plan.Traits().Windows {
			return usagef("--plan-only: the order of this plan, %q, is in index files, which must be read; "+
				"remove the flag", plan.OrderVersion())
		}
	} else if o.Data, err = openPlanWith(c, blend.OpenOptions{Unread: true}); err == nil {
		defer o.Data.Close()
		plan = o.Data.Plan
	}
	if err != nil {
		return err
	}
	if err := notInput(c.String("report"), plan.Files()...); err != nil {
		return err
	}
	if err := oneFile(c.String("report"), pageKind); err != nil {
		return err
	}
	if rate := c.Float64("tokens-per-second"); rate > 0 {
		o.StepTime = float64(o.BatchSize) * float64(plan.SequenceLength) / rate
	}
	if o.From, o.To, err = positions(c, plan, o.BatchSize); err != nil {
		return err
	}
	if o.From == o.To {
		return usagef("--from is %d, the end of the positions to read; nothing is left to simulate", o.From)
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	o.Progress = func(what string, done, total int64) { p.update(what, float64(done), float64(total)) }
	report, err := simulate.Run(c.Context, plan, o)
	if err != nil {
		return err
	}
	p.end()
	if path := c.String("report"); path != "" {
		var page bytes.Buffer
		if err := report.WritePage(&page, "Simulation of "+filepath.ToSlash(c.String("plan"))); err != nil {
			return err
		}
		if err := atomicfile.WriteFile(path, page.Bytes()); err != nil {
			return err
		}
		fmt.Fprintf(c.App.ErrWriter, "wrote %s\n", filepath.ToSlash(path))
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, report)
	}
	printSimulation(c.App.Writer, report)
	return nil
}

// simulateOptions are the options that do not depend on the plan.
func simulateOptions(c *cli.Context) (simulate.Options, error) {
	o := simulate.Options{Nodes: c.Int("nodes"), RanksPerNode: c.Int("ranks-per-node"), BatchSize: c.Int("batch-size"),
		StepTime: c.Float64("step-time"),
		Samples:  c.Int64("samples")}
	const mostRanks = 1 << 24
	if o.Nodes < 1 || o.RanksPerNode < 1 || o.Nodes > mostRanks/o.RanksPerNode {
		return o, usagef("--nodes is %d and --ranks-per-node %d; each must be at least 1, and the ranks at most %s",
			o.Nodes, o.RanksPerNode, quantity.Grouped(mostRanks))
	}
	world := o.Nodes * o.RanksPerNode
	if !c.IsSet("batch-size") {
		o.BatchSize = max(1, 512/world) * world
	}
	if o.BatchSize < 1 || o.BatchSize > 1<<30 || o.BatchSize%world != 0 {
		return o, usagef("--batch-size is %d; it must be a multiple of the %s, and at most %s", o.BatchSize,
			quantity.Plural(int64(world), "rank"), quantity.Grouped(1<<30))
	}
	if o.Samples < 1 || o.Samples > 1<<26 {
		return o, usagef("--samples is %d; it must be from 1 to %s", o.Samples, quantity.Grouped(1<<26))
	}
	if c.IsSet("step-time") && c.IsSet("tokens-per-second") {
		return o, usagef("--step-time and --tokens-per-second exclude each other; use one of them")
	}
	for _, name := range []string{"step-time", "tokens-per-second"} {
		if v := c.Float64(name); c.IsSet(name) && !(v > 0 && v < 1e18) {
			return o, usagef("--%s is %g; it must be above 0", name, v)
		}
	}
	var err error
	if name := c.String("storage"); strings.EqualFold(filepath.Ext(name), ".yaml") {
		o.Storage, err = simulate.LoadStorage(name)
		warnAbout(c, o.Storage)
	} else if o.Storage, err = simulate.StorageByName(name); err != nil {
		err = usagef("--storage: %s", err)
	}
	return o, err
}

// printSimulation prints the report as tables and lines.
func printSimulation(w io.Writer, r *simulate.Report) {
	fmt.Fprintf(w, "%s of %d from position %d; storage %s (assumed figures: docs/reference/simulate.md)\n\n",
		quantity.Plural(r.Steps, "step"), r.BatchSize, r.From, r.Reading.Storage.Name)
	for i, t := range []page.Table{r.ReadingTable(), r.StoreTable(), r.MixtureTable(), r.ShuffleTable(),
		r.RepeatsTable()} {
		if i > 0 {
			fmt.Fprintln(w)
		}
		out := newTable(t.Heading...)
		for _, row := range t.Rows {
			cells := make([]any, len(row))
			for k, cell := range row {
				cells[k] = cell
			}
			out.row(cells...)
		}
		out.write(w)
	}
	if len(r.Findings) > 0 {
		fmt.Fprintln(w)
	}
	for _, f := range r.Findings {
		if f.Source != "" {
			fmt.Fprintf(w, "%s: %s: %s\n", statusText(string(f.Level), hasColour(w)), f.Source, f.Message)
		} else {
			fmt.Fprintf(w, "%s: %s\n", statusText(string(f.Level), hasColour(w)), f.Message)
		}
	}
}
