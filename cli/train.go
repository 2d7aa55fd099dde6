package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"mula/moe"
	"mula/train"
)

func trainCommand() *cli.Command {
	return &cli.Command{
		Name:  "train",
		Usage: "train a model on a plan; goes on from the newest complete checkpoint by itself",
		Description: "Ctrl-C or SIGTERM finish the step, save a checkpoint and exit with 0; the same command goes on from there. A second Ctrl-C\n" +
			"ends the program at once, which costs the steps since the last checkpoint and nothing else. docs/formats/config.md lists the fields\n" +
			"of the configuration, docs/formats/run.md what a run leaves behind.\n\n" +
			"Example: mula train --config train.yaml",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "config", Usage: "read the run from `FILE`", Value: "train.yaml"},
			jsonFlag,
		},
		Action: runTrain,
	}
}

func runTrain(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	config, err := train.LoadConfig(c.String("config"))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; name the run's configuration with --config (docs/formats/config.md lists its fields)", err)
	}
	if err != nil {
		return err
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()

	// The first signal ends c.Context, which stops the run after its step. From then on signals have their usual effect again.
	stopped := context.AfterFunc(c.Context, func() {
		signal.Reset(os.Interrupt, syscall.SIGTERM)
		p.line("stopping: the step is finished and a checkpoint saved; the same signal again ends the program at once")
	})
	defer stopped()

	var evaluated *train.Evaluation
	result, err := train.Run(context.WithoutCancel(c.Context), config, train.Options{
		Version: Version,
		Stop:    c.Context.Done(),
		Report:  func(s train.Summary) { printRun(p, s) },
		Warn:    func(text string) { p.line("warning: %s", text) },
		Progress: func(s train.Progress) {
			done := s.Step + 1
			if s.Evaluation != nil {
				evaluated = s.Evaluation
				p.line("after %s: validation loss %.4f", plural(done, "step"), s.Evaluation.Loss)
			}
			if s.Checkpoint != "" {
				p.line("after %s: saved %s", plural(done, "step"), filepath.ToSlash(s.Checkpoint))
			}
			left := time.Duration(float64(s.Steps-done) * s.Seconds * float64(time.Second))
			p.update(fmt.Sprintf("%s of %s steps  loss %.4f  gradient norm %.3f  learning rate %.2e  %s tokens/s  %s left", count(done),
				count(s.Steps), s.Loss, s.GradNorm, s.LearningRate, count(int64(s.TokensPerSecond)), duration(left)), 0, 0)
		},
	})
	if err != nil {
		return err
	}
	p.end()
	w := c.App.Writer
	if c.Bool("json") {
		return printJSON(w, map[string]any{
			"output": config.Output, "steps": result.Steps, "finished": result.Finished, "resumed": result.Resumed,
			"first_loss": result.FirstLoss, "last_loss": result.LastLoss, "evaluation": evaluated,
			"checkpoint": result.Checkpoint, "weights_sha256": result.Weights,
		})
	}
	state := "finished"
	if !result.Finished {
		state = "stopped; the same command goes on from here"
	}
	fmt.Fprintf(w, "%s: %s, loss %.4f at the start, %.4f at the end\n", state, plural(result.Steps, "step"), result.FirstLoss, result.LastLoss)
	fmt.Fprintf(w, "checkpoint %s\nweights    sha256 %s\n", filepath.ToSlash(result.Checkpoint), result.Weights)
	return nil
}

func printRun(p *progress, s train.Summary) {
	m := s.Config.Model
	name := m.Preset
	if preset, err := moe.Preset(name); err != nil || preset.TotalParameters() != s.Parameters {
		name += " with other sizes"
	}
	p.line("model      %s: %s parameters, %s active per token", name, count(s.Parameters), count(s.ActiveParameters))
	p.line("plan       %s", s.Plan)
	p.line("run        %s steps of %s samples, %s tokens a step, %s in all", count(s.Config.Steps), count(int64(s.Config.BatchSize)),
		count(s.TokensPerStep), tokensText(s.TotalTokens))
	p.line("work       %.4g MFLOP a token, forward and backward", s.FLOPsPerToken/1e6)
	p.line("memory     %s: weights %s, gradients %s, optimizer %s, activations %s", bytesText(s.Memory.Total()), bytesText(s.Memory.Weights),
		bytesText(s.Memory.Gradients), bytesText(s.Memory.Moments), bytesText(s.Memory.Buffers))
	p.line("device     %s", s.Device)
	if s.Resumed != "" {
		p.line("resuming   from %s: the next step is %s", s.Resumed, count(s.NextStep))
	}
}
