package cli

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/train"
)

func evalCommand() *cli.Command {
	return &cli.Command{
		Name:  "eval",
		Usage: "compute a model's loss and perplexity on the validation split of a plan, source by source",
		Description: "Losses are means over the targets that count: all, or of a packed plan and with --attention documents those that stand in the same\n" +
			"document as their input. Give the attention that the model was trained with.\n\n" +
			"Each loss has a 95 % confidence interval for the mean over all windows that the source holds out: Student's t times s/√n, where n of V\n" +
			"windows are read and s is the spread of their losses, times √(1−n/V); it is 0 if all are read. \"mix\" weights the sources by their\n" +
			"shares of the plan's samples. A plan whose shards another tokenizer made than the model's is refused.\n\n" +
			"Example: mula eval --model runs/base --plan plan.json --samples 256",
		Flags: []cli.Flag{
			modelFlag, planFlag, shardsFlag,
			&cli.IntFlag{Name: "samples", Usage: "validation windows of each source, spread evenly (0: all)"},
			&cli.IntFlag{Name: "batch-size", Usage: "windows at once in memory", Value: 8},
			&cli.StringFlag{Name: "attention",
				Usage: "window or documents, as in train.yaml (default: documents for packed plans, else window)"},
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
	attention := train.Attention(c.String("attention"))
	if attention != "" && attention != train.WindowAttention && attention != train.DocumentAttention {
		return usagef("--attention is %q; it must be %s or %s", attention, train.WindowAttention,
			train.DocumentAttention)
	}
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
	e, err := train.Evaluate(c.Context, m, data, train.EvaluateOptions{Samples: c.Int("samples"),
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
