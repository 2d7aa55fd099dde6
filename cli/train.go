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
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/internal/version"
	"mula/moe"
	"mula/train"
	"mula/train/collective"
	"mula/train/group"
	"mula/train/launch"
	"mula/train/record"
	"mula/train/samples"
	"mula/train/trainjob"
	"mula/xpu/comm"
	"mula/xpu/comm/tcp"
)

func trainCommand() *cli.Command {
	return &cli.Command{
		Name:  "train",
		Usage: "train a model on a plan; resume from the newest complete checkpoint",
		Description: "If the run's folder has a checkpoint, the run resumes from it.\n\n" +
			"Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 finish the current step, save a checkpoint and exit with\n" +
			"code 3. The same command then resumes the run. A second Ctrl-C ends the program at once. The\n" +
			"steps since the last checkpoint are lost, and nothing else.\n\n" +
			"If layout names several ranks, they are goroutines of one process, or processes that mpiexec or\n" +
			"mula launch starts. Rank 0 prints the messages. docs/formats/config.md lists the fields of the\n" +
			"configuration, and docs/formats/run.md the files of a run.\n\n" +
			"Example: mula train --config train.yaml",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "config", Usage: "read the run's configuration from `FILE`", Value: "train.yaml"},
			setFlag(),
			&cli.BoolFlag{Name: "stop-is-success",
				Usage: "exit with 0 instead of 3 when a signal stops the run before the last step"},
			&cli.BoolFlag{Name: "dry-run",
				Usage: "check everything, print the summary of the run, and change nothing in its folder"},
			jsonFlag,
		},
		Action: runTrain,
	}
}

// setFlag is the flag --set of commands that read a train.yaml. It is not a StringSliceFlag, which
// would split a value at its commas.
func setFlag() cli.Flag {
	return &cli.GenericFlag{Name: "set", Value: &settingList{},
		Usage: "replace the value of a field of train.yaml: `FIELD=VALUE`, as in schedule.learning_rate=3e-4; may " +
			"be repeated"}
}

// A settingList has the values of --set, in their order.
type settingList []string

func (s *settingList) Set(text string) error { *s = append(*s, text); return nil }
func (s *settingList) String() string        { return strings.Join(*s, " ") }

// settings returns the values of --set.
func settings(c *cli.Context) []string { return *c.Generic("set").(*settingList) }

func runTrain(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	if err := needFlags(c, "config"); err != nil {
		return err
	}
	if c.Bool("dry-run") && c.Bool("json") {
		return usagef("--dry-run prints a summary and has no --json; remove one of them")
	}
	config, err := train.LoadConfig(c.String("config"), settings(c)...)
	if errors.Is(err, fs.ErrNotExist) {
		return usagef("%v; name the run's configuration with --config (docs/formats/config.md lists its fields)", err)
	}
	if err != nil {
		return usagef("%v", err)
	}
	if n := os.Getenv(dpVariable); n != "" { // mula launch --elastic: the number for the remaining hosts
		if config.Layout.DP, err = strconv.Atoi(n); err != nil {
			return usagef("environment variable %s: must be a whole number, as in layout.expert_dp, got %q", dpVariable,
				n)
		}
	}
	defer writeStacks(unfiltered(c.App.ErrWriter))() // of each rank
	assigned, err := launch.OpenAssignments()
	if err != nil {
		return err
	}
	p := &trainProcess{c: c, config: config, assigned: assigned}
	defer p.kept.Close()
	return p.run()
}

// A trainProcess is a process of a training run.
type trainProcess struct {
	c        *cli.Context
	config   train.Config
	assigned *launch.Assignments // nil without hot spares
	answers  *launch.Answers
	kept     train.Kept
}

// run trains, in one group of ranks after the other. A hot spare first waits for a rank.
func (t *trainProcess) run() error {
	defer func() { t.answers.Close() }()
	return t.assigned.Run(t.c.Context, func(err error) {
		fmt.Fprintf(t.c.App.ErrWriter, "waiting for a hot spare: %s\n", printable(err.Error()))
	}, func() error {
		if t.answers == nil {
			t.answers = launch.NewAnswers() // before ranks wait for each other
		}
		return t.train()
	})
}

// join connects to the other ranks of the group.
func (t *trainProcess) join(ctx context.Context) (*comm.Comm, error) {
	return group.Join(ctx, t.config.Layout.Transport, t.config.Layout.Ranks(), func(text string) {
		fmt.Fprintf(t.c.App.ErrWriter, "waiting: %s\n", printable(text))
	})
}

// train trains in one group of ranks.
func (t *trainProcess) train() error {
	c, config, answers := t.c, t.config, t.answers
	var world *comm.Comm
	err := config.Validate()
	if err == nil {
		world, err = t.assigned.Join(c.Context, t.join)
	}
	if err != nil && c.Context.Err() != nil {
		// not %w: Main would print a message without the missing ranks
		return fmt.Errorf("stopped before all ranks had connected: %v", err)
	}
	if err != nil {
		return configurationError(c, config, err)
	}
	first := world == nil || world.Rank() == 0
	messages := c.App.ErrWriter
	if !first {
		messages = io.Discard // only the first rank prints messages
	}
	printWarnings(messages, config.Warnings())
	p := newProgress(messages)
	defer p.end()

	// The first signal ends c.Context, which stops the run after its step. From then on signals
	// have their usual effect again, unless they are the business of mula launch, which passes them
	// on to processes that have got them already.
	stopped := context.AfterFunc(c.Context, func() {
		if os.Getenv(record.HeartbeatVariable) != "" || os.Getenv(tcp.RankVariable) != "" {
			signal.Ignore(stopSignals...)
			p.line("stopping: finishing the step and saving a checkpoint")
			return
		}
		signal.Reset(stopSignals...)
		p.line("stopping: finishing the step and saving a checkpoint; send the signal again to end the program at once")
	})
	defer stopped()

	var job *trainjob.Reporter
	if first && !c.Bool("dry-run") {
		warn := func(text string) { p.line("warning: %s", text) }
		if job, err = trainjob.New(context.WithoutCancel(c.Context), warn); err != nil {
			warn(err.Error())
		}
	}

	var evaluated *record.Evaluation
	var speed pace
	options := train.Options{
		Version:    version.String(),
		World:      world,
		Generation: t.assigned.Generation(),
		Stop:       c.Context.Done(),
		Terminated: func() bool {
			var cause signalError
			return errors.As(context.Cause(c.Context), &cause) && cause.signal == syscall.SIGTERM
		},
		Report: func(s train.Summary) {
			printRun(p, s)
			job.Report(trainjob.Status{Done: s.NextStep, Steps: s.Config.Steps})
		},
		Warn:          func(text string) { p.line("warning: %s", text) },
		AfterBackward: func(int, int64) { answers.Progressed() }, // Progress is called on the first rank alone
		Progress: func(s train.Progress) {
			done := s.Step + 1
			if s.Evaluation != nil {
				evaluated = s.Evaluation
				p.line("after %s: validation loss %.4f", quantity.Plural(done, "step"), s.Evaluation.Loss)
			}
			if s.Checkpoint != "" {
				p.line("after %s: saved %s", quantity.Plural(done, "step"), filepath.ToSlash(s.Checkpoint))
			}
			speed.add(time.Now(), s.StepMetrics)
			p.update(fmt.Sprintf("%s of %s steps  loss %.4f  %s", quantity.Grouped(done), quantity.Grouped(s.Steps),
				s.Loss, speed.text(s.Steps-done)), 0, 0)
			job.Report(jobStatus(s, evaluated, speed.left(s.Steps-done)))
		},
	}
	if c.Bool("dry-run") {
		summary := newProgress(io.Discard)
		if first {
			summary = newProgress(c.App.Writer) // the summary is the result
		}
		options.DryRun, options.Report = true, func(s train.Summary) { printRun(summary, s) }
	}
	if t.assigned != nil {
		options.Kept = &t.kept
	}
	if trainFault != nil {
		trainFault(&options)
	}
	var result train.Result
	err = t.assigned.Train(context.WithoutCancel(c.Context), world, func(ctx context.Context) (err error) {
		result, err = train.Run(sayCompiling(ctx, p), config, options)
		return err
	})
	job.Close()
	p.end()
	switch {
	case errors.As(err, new(*launch.LostRankError)):
		return err
	case err != nil && world != nil && collective.Shared(err):
		// All ranks wait until the message is printed: when one process of a job exits with an
		// error, the others are killed.
		err = configurationError(c, config, err)
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
		return configurationError(c, config, err) // the group is not closed, so that other ranks notice the failure
	case world != nil:
		leave(world)
	}
	if c.Bool("dry-run") {
		return nil
	}
	if err := printResult(c, config, result, evaluated, first); err != nil {
		return err
	}
	// mula launch reads the exit codes of its ranks.
	if !result.Finished && (!c.Bool("stop-is-success") || os.Getenv(record.HeartbeatVariable) != "") {
		return exitCode(exitStopped)
	}
	return nil
}

// trainFault injects a fault into a run. Only tests set it.
var trainFault func(*train.Options)

// exitStopped is the exit code of a run that a signal has stopped after a checkpoint. It is not 0,
// so that a scheduler does not count the run as done.
const exitStopped = launch.ExitStopped

// leave ends the communication with the other processes of a run, after the same result on all.
func leave(world *comm.Comm) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if world.Barrier(ctx) == nil { // else the other processes are gone
		world.Close()
	}
}

// configurationError converts an error about a field of the configuration to a usage error with
// file and line, because a retry would fail, too.
func configurationError(c *cli.Context, config train.Config, err error) error {
	if !collective.Misconfigured(err) {
		return err
	}
	if located := config.Locate(err); located.Error() != err.Error() {
		return usagef("%v", located)
	}
	return usagef("%s: %v", c.String("config"), err) // reported by another process
}

// printResult prints the result of the run, on the first rank.
func printResult(c *cli.Context, config train.Config, result train.Result, evaluated *record.Evaluation,
	first bool) error {
	if !first {
		return nil
	}
	w := c.App.Writer
	if c.Bool("json") {
		return printJSON(w, map[string]any{
			"output": config.Output, "steps": result.Steps, "finished": result.Finished, "resumed": result.Resumed,
			"first_loss": result.FirstLoss, "last_loss": result.LastLoss, "evaluation": evaluated,
			"left_out_samples": result.LeftOut,
			"checkpoint":       result.Checkpoint, "weights_sha256": result.Weights,
		})
	}
	state := "finished"
	if !result.Finished {
		state = "stopped; run the same command to resume"
	}
	fmt.Fprintf(w, "%s: %s, first loss %.4f, last loss %.4f\n", state, quantity.Plural(result.Steps, "step"),
		result.FirstLoss, result.LastLoss)
	if result.LeftOut > 0 {
		fmt.Fprintf(w, "skipped    %s because of spikes; %s lists them\n", quantity.Plural(result.LeftOut, "position"),
			filepath.ToSlash(filepath.Join(config.Output, "skips.yaml")))
	}
	fmt.Fprintf(w, "checkpoint %s\nweights    sha256 %s\n", filepath.ToSlash(result.Checkpoint), result.Weights)
	return nil
}

// A pace computes the speed and the remaining time of a run from its last steps. The time of
// evaluations and checkpoints between steps is included.
type pace struct {
	start time.Time // start of the first of the steps
	steps []pacedStep
	next  int64 // expected next step
}

type pacedStep struct {
	end    time.Time
	tokens int64
	flops  float64 // share of the machine's peak × seconds in the step
}

// paceSteps is the number of last steps for a pace.
const paceSteps = 50

// add adds a finished step. It ignores steps without samples, which take almost no time. After a
// rollback, it starts again.
func (p *pace) add(now time.Time, s record.StepMetrics) {
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

// text returns the speed, and the time for left more steps.
func (p *pace) text(left int64) string {
	var tokens int64
	var flops float64
	for _, s := range p.steps {
		tokens += s.tokens
		flops += s.flops
	}
	seconds := p.seconds()
	if !(seconds > 0) { // a coarse clock
		return ""
	}
	return fmt.Sprintf("%s tokens/s  MFU %.1f %%  %s left", quantity.Grouped(int64(float64(tokens)/seconds+0.5)),
		100*flops/seconds, quantity.Duration(p.left(left)))
}

// seconds returns the time that the last steps took.
func (p *pace) seconds() float64 { return p.steps[len(p.steps)-1].end.Sub(p.start).Seconds() }

// left returns the time for more steps.
func (p *pace) left(steps int64) time.Duration {
	return time.Duration(float64(steps) * p.seconds() / float64(len(p.steps)) * float64(time.Second))
}

// jobStatus is the state of a run after a step. evaluated is the newest evaluation, or nil.
func jobStatus(s train.Progress, evaluated *record.Evaluation, left time.Duration) trainjob.Status {
	metrics := map[string]float64{"learning_rate": s.LearningRate, "tokens_per_second": s.TokensPerSecond, "mfu": s.MFU}
	if s.Samples > 0 {
		metrics["loss"], metrics["grad_norm"] = s.Loss, s.GradNorm
	}
	if evaluated != nil {
		metrics["validation_loss"] = evaluated.Loss
	}
	return trainjob.Status{Done: s.Step + 1, Steps: s.Steps, Left: left, Metrics: metrics}
}

// fewMicroBatches returns advice for a pipeline with fewer micro-batches than stages, else "".
func fewMicroBatches(s train.Summary) string {
	l := s.Config.Layout
	if s.MicroBatches >= l.PP {
		return ""
	}
	readers := l.DP * l.EP
	if rows := s.Config.BatchSize / readers; rows >= l.PP {
		return fmt.Sprintf(": fewer micro-batches than pipeline stages; lower micro_batch_size to %d (new runs only)",
			rows/l.PP)
	}
	micro := ""
	if s.Config.MicroBatchSize > 1 {
		micro = " with micro_batch_size 1"
	}
	return fmt.Sprintf(": fewer micro-batches than pipeline stages; raise batch_size to %d or more%s (new runs "+
		"only), or lower layout.pp", readers*l.PP, micro)
}

func printRun(p *progress, s train.Summary) {
	m := s.Config.Model
	name := m.Preset
	if preset, err := moe.Preset(name); err != nil || preset.TotalParameters() != s.Parameters {
		name += " with other sizes"
	}
	p.line("model      %s: %s parameters, %s active per token", name, quantity.Grouped(s.Parameters),
		quantity.Grouped(s.ActiveParameters))
	p.line("plan       %s", s.Plan)
	p.line("run        %s steps of %s samples, %s tokens per step, %s in total", quantity.Grouped(s.Config.Steps),
		quantity.Grouped(int64(s.Config.BatchSize)),
		quantity.Grouped(s.TokensPerStep), quantity.Tokens(s.TotalTokens))
	if s.Config.Attention == samples.DocumentAttention {
		p.line("attention  within documents; targets in another document and padding are masked out of the loss")
	}
	p.line("work       %.4g MFLOP per token, forward and backward", s.FLOPsPerToken/1e6)
	for _, g := range s.Groups {
		match := "others"
		if g.Match != nil {
			match = strings.Join(g.Match, ", ")
		}
		p.line("group      %s: %d tensors, %s parameters; weight decay %g, learning rate × %g", match, g.Tensors,
			quantity.Grouped(g.Parameters), g.WeightDecay, g.LearningRateScale)
	}
	each := ""
	if l := s.Config.Layout; l.Ranks() > 1 {
		p.line("layout     %d ranks: %s; transport: %s", l.Ranks(), l, s.Transport)
		if l.PP > 1 {
			groups := ""
			if l.VirtualStages > 1 {
				groups = fmt.Sprintf(" of %d groups of layers", l.VirtualStages)
			}
			p.line("pipeline   %d stages%s, micro-batches per step: %d; stages are idle %.0f %% of the time%s",
				l.PP, groups, s.MicroBatches, 100*s.Bubble, fewMicroBatches(s))
		}
		each = " per rank"
	}
	scratch := "" // unknown for an OpenCL device
	if s.Scratch > 0 {
		scratch = fmt.Sprintf("; plus scratch memory of the device, up to %s", quantity.Bytes(s.Scratch))
	}
	p.line("memory     %s%s: weights %s, gradients %s, optimizer %s, activations %s%s",
		quantity.Bytes(s.Memory.Total()),
		each, quantity.Bytes(s.Memory.Weights),
		quantity.Bytes(s.Memory.Gradients), quantity.Bytes(s.Memory.Optimizer), quantity.Bytes(s.Memory.Buffers()),
		scratch)
	why := ""
	if s.DeviceWhy != "" {
		why = fmt.Sprintf(" (%s)", s.DeviceWhy)
	}
	p.line("device     %s%s", s.Device, why)
	if s.Resumed != "" && s.NextStep >= s.Config.Steps {
		p.line("done       all steps are in %s; raise steps to train longer", s.Resumed)
	} else if s.Resumed != "" {
		p.line("resuming   from %s; next step: %s", s.Resumed, quantity.Grouped(s.NextStep))
	} else if from := s.Config.InitializeFrom; from != "" {
		p.line("starting   with the weights of %s", filepath.ToSlash(from))
	}
}
