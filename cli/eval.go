package cli

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/urfave/cli/v2"

	"mula/train"
)

func evalCommand() *cli.Command {
	return &cli.Command{
		Name:        "eval",
		Usage:       "compute a model's loss on the validation split of a plan, source by source",
		Description: "Example: mula eval --model runs/base --plan plan.json --samples 256",
		Flags: []cli.Flag{
			modelFlag, planFlag, shardsFlag,
			&cli.IntFlag{Name: "samples", Usage: "validation windows of each source, spread evenly (0: all)"},
			&cli.IntFlag{Name: "batch-size", Usage: "windows at once in memory", Value: 8},
			threadsFlag, jsonFlag,
		},
		Action: runEval,
	}
}

func runEval(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	if err := needFlags(c, "model"); err != nil {
		return err
	}
	if err := atMost(c, maxThreads, "threads"); err != nil {
		return err
	}
	if c.Int("samples") < 0 || c.Int("batch-size") < 1 || c.Int("batch-size") > 1<<16 {
		return usagef("--samples must not be negative, and --batch-size must be from 1 to 65,536")
	}
	data, err := openPlan(c)
	if err != nil {
		return err
	}
	defer data.Close()
	m, device, _, err := openModel(c)
	if err != nil {
		return err
	}
	defer device.Close()
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	e, err := train.Evaluate(c.Context, m, data, train.EvaluateOptions{Samples: c.Int("samples"), BatchSize: c.Int("batch-size"),
		Progress: func(done, total int64) {
			p.update(fmt.Sprintf("%s of %s windows", count(done), count(total)), float64(done), float64(total))
		}})
	if err != nil {
		return err
	}
	p.end()
	if c.Bool("json") {
		return printJSON(c.App.Writer, e)
	}
	t := newTable("source", "targets", "loss", "perplexity")
	var targets int64
	for _, name := range slices.Sorted(maps.Keys(e.SourceLoss)) {
		targets += e.SourceTargets[name]
		t.row(name, e.SourceTargets[name], fmt.Sprintf("%.4f", e.SourceLoss[name]), fmt.Sprintf("%.2f", math.Exp(e.SourceLoss[name])))
	}
	t.row("all", targets, fmt.Sprintf("%.4f", e.Loss), fmt.Sprintf("%.2f", math.Exp(e.Loss)))
	t.write(c.App.Writer)
	return nil
}
