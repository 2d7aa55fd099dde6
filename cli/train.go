package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/moe"
	"mula/train"
	"mula/xpu"
	"mula/xpu/tcp"
)

func trainCommand() *cli.Command {
	return &cli.Command{
		Name:  "train",
		Usage: "train a model on a plan; goes on from the newest complete checkpoint by itself",
		Description: "Ctrl-C or SIGTERM finish the step, save a checkpoint and exit with 0; the same command goes on from there. A second Ctrl-C\n" +
			"ends the program at once, which costs the steps since the last checkpoint and nothing else. Many ranks (layout in the configuration)\n" +
			"are goroutines of one process, or processes that an mpiexec or mula launch starts; the first one reports. docs/formats/config.md lists the fields\n" +
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
	if err := needFlags(c, "config"); err != nil {
		return err
	}
	config, err := train.LoadConfig(c.String("config"))
	if errors.Is(err, fs.ErrNotExist) {
		return usagef("%v; name the run's configuration with --config (docs/formats/config.md lists its fields)", err)
	}
	if err != nil {
		return usagef("%v", err)
	}
	if n := os.Getenv(dpVariable); n != "" { // mula launch --elastic: as many as there are hosts for
		if config.Layout.DP, err = strconv.Atoi(n); err != nil {
			return usagef("%s is %q in the environment; it must be a number of replicas, as layout.dp is", dpVariable, n)
		}
	}
	world, err := train.Join(c.Context, config)
	if err != nil {
		return configurationError(c, err)
	}
	first := world == nil || world.Rank() == 0
	messages := c.App.ErrWriter
	if !first {
		messages = io.Discard // the first rank speaks for all
	}
	p := newProgress(messages)
	defer p.end()

	// The first signal ends c.Context, which stops the run after its step. From then on signals have their usual effect again, unless they are
	// the business of mula launch, which passes them on to processes that have got them already.
	stopped := context.AfterFunc(c.Context, func() {
		if os.Getenv(train.HeartbeatVariable) != "" || os.Getenv(tcp.RankVariable) != "" {
			signal.Ignore(stopSignals...)
			p.line("stopping: the step is finished and a checkpoint saved")
			return
		}
		signal.Reset(stopSignals...)
		p.line("stopping: the step is finished and a checkpoint saved; the same signal again ends the program at once")
	})
	defer stopped()

	var evaluated *train.Evaluation
	var speed pace
	options := train.Options{
		Version: Version,
		World:   world,
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
			speed.add(time.Now(), s.StepMetrics)
			p.update(fmt.Sprintf("%s of %s steps  loss %.4f  %s", quantity.Grouped(done), quantity.Grouped(s.Steps), s.Loss, speed.text(s.Steps-done)), 0, 0)
		},
	}
	if trainFault != nil {
		trainFault(&options)
	}
	result, err := train.Run(sayCompiling(context.WithoutCancel(c.Context), p), config, options)
	p.end()
	switch {
	case err != nil && world != nil && train.Shared(err):
		// Nobody leaves before the message is out: when one process of a job fails, the others are ended.
		err = configurationError(c, err)
		code := exitCode(exitFailed)
		if errors.As(err, new(*usageError)) {
			code = exitUsage
		}
		if first {
			fmt.Fprintf(c.App.ErrWriter, "mula: %s\n", printable(err.Error()))
		}
		leave(world)
		return code
	case err != nil:
		return configurationError(c, err) // the group is not closed in order: the others are to notice
	case world != nil:
		leave(world)
	}
	if err := printResult(c, config, result, evaluated, first); err != nil {
		return err
	}
	if !result.Finished && os.Getenv(train.HeartbeatVariable) != "" {
		return exitCode(exitStopped)
	}
	return nil
}

// trainFault puts a fault into a run. Only tests set it.
var trainFault func(*train.Options)

// exitStopped is the exit code of a supervised run that a signal has stopped after a checkpoint. Without a supervisor it is exitDone.
const exitStopped = 3

// leave ends the work with the other processes of a run, of which all have come to the same end.
func leave(world *xpu.Comm) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if world.Barrier(ctx) == nil { // else there is nobody to take leave of
		world.Close()
	}
}

// configurationError makes an error about a field of the configuration, which is known to be wrong from the plan or the ranks only, one of usage: trying again
// is of no use.
func configurationError(c *cli.Context, err error) error {
	if train.Misconfigured(err) {
		return usagef("%s: %v", c.String("config"), err)
	}
	return err
}

// printResult prints what has come out, on the first rank.
func printResult(c *cli.Context, config train.Config, result train.Result, evaluated *train.Evaluation, first bool) error {
	if !first {
		return nil
	}
	w := c.App.Writer
	if c.Bool("json") {
		return printJSON(w, map[string]any{
			"output": config.Output, "steps": result.Steps, "finished": result.Finished, "resumed": result.Resumed,
			"first_loss": result.FirstLoss, "last_loss": result.LastLoss, "evaluation": evaluated, "left_out_samples": result.LeftOut,
			"checkpoint": result.Checkpoint, "weights_sha256": result.Weights,
		})
	}
	state := "finished"
	if !result.Finished {
		state = "stopped; the same command goes on from here"
	}
	fmt.Fprintf(w, "%s: %s, loss %.4f at the start, %.4f at the end\n", state, plural(result.Steps, "step"), result.FirstLoss, result.LastLoss)
	if result.LeftOut > 0 {
		fmt.Fprintf(w, "left out   %s because of spikes: %s names them\n", plural(result.LeftOut, "sample"), filepath.ToSlash(filepath.Join(config.Output, "skips.yaml")))
	}
	fmt.Fprintf(w, "checkpoint %s\nweights    sha256 %s\n", filepath.ToSlash(result.Checkpoint), result.Weights)
	return nil
}

// A pace tells from the last steps of a run how fast it is and when it ends. Evaluations and checkpoints between steps take their time in it:
// tokens per second are those of the run, not of the fastest step.
type pace struct {
	start time.Time // when the first of the steps began
	steps []pacedStep
	next  int64 // step that is expected
}

type pacedStep struct {
	end    time.Time
	tokens int64
	flops  float64 // share of the machine's peak × seconds in the step
}

// paceSteps is the number of steps that a pace looks back.
const paceSteps = 50

// add adds a step that has just been done, unless it had no samples: such steps take no time, and come in flocks. When a run goes back, the
// pace begins anew.
func (p *pace) add(now time.Time, s train.StepMetrics) {
	if s.Step != p.next {
		p.steps = nil
	}
	p.next = s.Step + 1
	if s.Tokens == 0 && len(p.steps) > 0 {
		return
	}
	if len(p.steps) == 0 {
		p.start = now.Add(-time.Duration(s.Seconds * float64(time.Second)))
	}
	if len(p.steps) == paceSteps {
		p.start = p.steps[0].end
		p.steps = append(p.steps[:0], p.steps[1:]...)
	}
	p.steps = append(p.steps, pacedStep{now, s.Tokens, s.MFU * s.Seconds})
}

// text is what is known, with the time that so many steps more take.
func (p *pace) text(left int64) string {
	var tokens int64
	var flops float64
	for _, s := range p.steps {
		tokens += s.tokens
		flops += s.flops
	}
	seconds := p.steps[len(p.steps)-1].end.Sub(p.start).Seconds()
	if !(seconds > 0) { // a coarse clock
		return ""
	}
	return fmt.Sprintf("%s tokens/s  MFU %.1f %%  %s left", quantity.Grouped(int64(float64(tokens)/seconds+0.5)), 100*flops/seconds,
		duration(time.Duration(float64(left)*seconds/float64(len(p.steps))*float64(time.Second))))
}

func printRun(p *progress, s train.Summary) {
	m := s.Config.Model
	name := m.Preset
	if preset, err := moe.Preset(name); err != nil || preset.TotalParameters() != s.Parameters {
		name += " with other sizes"
	}
	p.line("model      %s: %s parameters, %s active per token", name, quantity.Grouped(s.Parameters), quantity.Grouped(s.ActiveParameters))
	p.line("plan       %s", s.Plan)
	p.line("run        %s steps of %s samples, %s tokens a step, %s in all", quantity.Grouped(s.Config.Steps), quantity.Grouped(int64(s.Config.BatchSize)),
		quantity.Grouped(s.TokensPerStep), tokensText(s.TotalTokens))
	if s.Config.Attention == train.DocumentAttention {
		p.line("attention  stays within documents; targets that begin another, and padding, do not count")
	}
	p.line("work       %.4g MFLOP a token, forward and backward", s.FLOPsPerToken/1e6)
	each := ""
	if l := s.Config.Layout; l.Ranks() > 1 {
		p.line("layout     %d ranks: %s; links: %s", l.Ranks(), l, s.Links)
		if l.PP > 1 {
			few := ""
			if s.MicroBatches < l.PP {
				few = ": there are fewer micro-batches than stages; lower micro_batch_size"
			}
			p.line("pipeline   %d stages, micro-batches a step: %d; stages wait %.0f %% of the time%s", l.PP, s.MicroBatches, 100*s.Bubble, few)
		}
		each = " a rank"
	}
	scratch := "" // of an OpenCL device it is not known
	if s.Scratch > 0 {
		scratch = fmt.Sprintf("; scratch of the device, up to %s, comes on top", bytesText(s.Scratch))
	}
	p.line("memory     %s%s: weights %s, gradients %s, optimizer %s, activations %s%s", bytesText(s.Memory.Total()), each, bytesText(s.Memory.Weights),
		bytesText(s.Memory.Gradients), bytesText(s.Memory.Moments), bytesText(s.Memory.Buffers), scratch)
	why := ""
	if s.DeviceWhy != "" {
		why = fmt.Sprintf(" (%s)", s.DeviceWhy)
	}
	p.line("device     %s%s", s.Device, why)
	if s.Resumed != "" && s.NextStep >= s.Config.Steps {
		p.line("done       all steps, in %s; to train on, raise steps", s.Resumed)
	} else if s.Resumed != "" {
		p.line("resuming   from %s: the next step is %s", s.Resumed, quantity.Grouped(s.NextStep))
	} else if from := s.Config.InitializeFrom; from != "" {
		p.line("beginning  with the weights of %s", filepath.ToSlash(from))
	}
}
