package cli

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/train/evaluate"
	"mula/train/samples"
)

func evalCommand() *cli.Command {
	return &cli.Command{
		Name:  "eval",
		Usage: "compute a model's loss and perplexity on the validation split of a plan, by source",
		Description: "Losses are means over the unmasked targets. With --attention window all targets are unmasked. " +
			"With\n" +
			"--attention documents, and for packed plans, a target is unmasked if it is in the same document as\n" +
			"its input. Use the attention that the model was trained with.\n\n" +
			"Each loss has a 95 % confidence interval for the mean over all validation windows of the source:\n" +
			"Student's t times s/√n times √(1−n/V), where n of V windows are read and s is the standard deviation\n" +
			"of their losses. The interval is 0 if all windows are read. The row mix weights the sources by their\n" +
			"fraction of the plan's samples. The command fails if the plan's shards and the model have different\n" +
			"tokenizers.\n\n" +
			"Example: mula eval --model runs/base --plan plan.json --samples 256",
		Flags: []cli.Flag{
			modelFlag, planFlag, shardsFlag,
			&cli.IntFlag{Name: "samples", Usage: "read `N` validation windows of each source, evenly spaced (0: all)"},
			&cli.IntFlag{Name: "batch-size", Usage: "compute `N` windows at once", Value: 8},
			&cli.StringFlag{Name: "attention",
				Usage: "attend within the window or within documents, as in train.yaml (default: documents for " +
					"packed plans, else window)"},
			deviceFlag, precisionFlag, threadsFlag, jsonFlag,
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
	if err := checkComputing(c); err != nil {
		return err
	}
	if c.Int("samples") < 0 || c.Int("batch-size") < 1 || c.Int("batch-size") > 1<<16 {
		return usagef("--samples must not be negative, and --batch-size must be from 1 to 65,536")
	}
	attention := samples.Attention(c.String("attention"))
	data, err := openPlan(c)
	if err != nil {
		return err
	}
	defer data.Close()
	dir, err := findModel(c)
	if err != nil {
		return err
	}
	if err := dir.CheckTokenizer(c.Context, data.Plan); err != nil {
		return err
	}
	m, device, err := openModel(c, dir)
	if err != nil {
		return err
	}
	defer device.Close()
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	start := time.Now()
	e, err := evaluate.Model(c.Context, m, data, evaluate.Options{Samples: c.Int("samples"),
		BatchSize: c.Int("batch-size"), Attention: attention,
		Progress: func(done, total int64) {
			rate := float64(done*int64(data.SequenceLength)) / time.Since(start).Seconds()
			p.update(fmt.Sprintf("%s of %s windows  %s tokens/s", quantity.Grouped(done), quantity.Grouped(total),
				quantity.Grouped(int64(rate))), float64(done), float64(total))
		}})
	if err != nil {
		return err
	}
	p.end()
	if c.Bool("json") {
		return printJSON(c.App.Writer, e)
	}
	t := newTable("source", "targets", "loss", "± 95 %", "perplexity", "from", "to")
	row := func(name string, targets int64, loss float64, margin *float64) {
		perplexity := func(loss float64) string { return fmt.Sprintf("%.2f", math.Exp(loss)) }
		if margin == nil {
			t.row(name, targets, fmt.Sprintf("%.4f", loss), "-", perplexity(loss), "-", "-")
			return
		}
		t.row(name, targets, fmt.Sprintf("%.4f", loss), fmt.Sprintf("%.4f", *margin), perplexity(loss),
			perplexity(loss-*margin), perplexity(loss+*margin))
	}
	var targets int64
	for _, name := range slices.Sorted(maps.Keys(e.SourceLoss)) {
		targets += e.SourceTargets[name]
		var margin *float64
		if m, ok := e.SourceMargin[name]; ok {
			margin = &m
		}
		row(name, e.SourceTargets[name], e.SourceLoss[name], margin)
	}
	row("all", targets, e.Loss, e.Margin)
	row("mix", targets, e.MixLoss, e.MixMargin)
	t.write(c.App.Writer)
	return nil
}
