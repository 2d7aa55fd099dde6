// Package train trains a model on a plan: the loop, the optimizer and its schedule, checkpoints, records.
//
// [Run] is the whole of it, in this file from top to bottom. What it leaves in the run directory is described in docs/formats/run.md:
// train.yaml, metrics.jsonl, fingerprints.jsonl, tensorboard/ and checkpoints/, each of which is a Hugging Face model directory.
//
// A run that is stopped or killed at any moment and started again goes on from its newest complete checkpoint, and all its losses,
// weights, metrics (but for those about time) and fingerprints are those of a run that was never stopped, bit for bit. This is so because
// everything a step computes follows from the weights, the moments, the number of steps done and the plan; the checkpoint holds the first
// three and names the last. Results do not depend on the number of threads.
package train

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"mula/blend"
	"mula/internal/atomicfile"
	"mula/moe"
	"mula/train/tensorboard"
	"mula/xpu"
	"mula/xpu/cpu"
)

// ErrNotFinite is wrapped by the error about a loss or gradient that is infinite or not a number.
var ErrNotFinite = errors.New("not finite")

// Options are what a run needs beyond its configuration. The zero value is ready for use. The functions are called from the goroutine
// that called Run.
type Options struct {
	Version  string            // of the program, for the record
	Stop     <-chan struct{}   // when closed, the run finishes its step, saves a checkpoint and returns; nil for a run that goes to its end
	Report   func(Summary)     // called once, before memory for the model is allocated
	Progress func(Progress)    // called after every step
	Warn     func(text string) // called about what needs attention but does not end the run, such as a damaged checkpoint
}

// Progress is what has just been done.
type Progress struct {
	StepMetrics
	Steps      int64       // of the whole run
	Evaluation *Evaluation // if one followed the step
	Checkpoint string      // directory, if one was written after the step
}

// Result is the outcome of a run.
type Result struct {
	Steps      int64   // done, over all runs from step 0
	Finished   bool    // all steps are done; otherwise the run was stopped
	Resumed    string  // name of the checkpoint that this run went on from, "" if it began at step 0 or had nothing to do
	FirstLoss  float64 // of the first step, which may have been in an earlier run
	LastLoss   float64 // of the last step
	LeftOut    int64   // samples left out because of spikes; skips.yaml in the run directory names their positions
	Checkpoint string  // directory of the newest checkpoint
	Weights    string  // see WeightsHash
}

// Run trains until all steps are done or it is stopped, going on from the newest complete checkpoint in the run directory if there is one. A
// done context ends it at once, without a checkpoint.
func Run(ctx context.Context, config Config, options Options) (Result, error) {
	if err := config.Validate(); err != nil {
		return Result{}, err
	}
	plan, err := blend.ReadPlan(config.Plan)
	if err != nil {
		return Result{}, err
	}
	data, err := blend.Open(ctx, plan, blend.OpenOptions{})
	if err != nil {
		return Result{}, err
	}
	defer data.Close()
	if config, err = config.resolve(plan); err != nil {
		return Result{}, err
	}
	if err := summarize(config, plan, "").fits(machineMemory()); err != nil {
		return Result{}, err
	}
	tokenizer, err := readTokenizer(config.Tokenizer, plan)
	if err != nil {
		return Result{}, err
	}
	dir, err := openRunDir(config.Output)
	if err != nil {
		return Result{}, err
	}
	defer dir.close()
	device := cpu.New(config.Threads, config.Precision)
	defer device.Close()

	r := &run{config: config, options: options, data: data, dir: dir, device: device, tokenizer: tokenizer,
		identity: config.identity(), schedule: config.schedule(), lastSaved: -1}
	checkpoint, err := r.findCheckpoint(ctx)
	if err != nil {
		return Result{}, err
	}
	if checkpoint == nil && config.InitializeFrom != "" {
		if r.initial, err = config.initialModel(ctx, plan, r.warn); err != nil {
			return Result{}, err
		}
	}
	if options.Report != nil {
		options.Report(r.summary(checkpoint))
	}
	if plan.Tokenizer == nil {
		r.warn("the plan does not know which tokenizer made its shards, so an id beyond the model's vocabulary of %d shows only when it is met; mula check finds the largest", config.Model.VocabSize)
	}
	if checkpoint != nil && checkpoint.State.Step >= config.Steps {
		return r.result(checkpoint.Dir), nil
	}
	if config.MetricsListen != "" {
		if r.scrape, err = serveMetrics(ctx, config.MetricsListen); err != nil {
			return Result{}, err
		}
		defer r.scrape.close()
	}
	if r.peak, err = measurePeak(ctx, device, r.flopsOfRun()); err != nil {
		return Result{}, err
	}
	if err := r.prepare(checkpoint); err != nil {
		return Result{}, err
	}
	defer r.closeRecords()
	if err := r.train(ctx); err != nil {
		return Result{}, err
	}
	return r.result(r.dir.join(filepath.Join(checkpointsDir, checkpointName(r.lastSaved)))), nil
}

// A run is a training run under way.
type run struct {
	config    Config // resolved
	options   Options
	identity  map[string]string
	schedule  Schedule
	data      *blend.Data
	dir       *runDir
	device    xpu.Device
	tokenizer []byte   // content of tokenizer.json, or nil
	initial   ModelDir // the model that the run begins from; Dir is "" if weights are drawn, or come from a checkpoint

	state     State               // what a checkpoint would hold now
	resumed   string              // name of the checkpoint that the run goes on from
	lastSaved int64               // step of the newest checkpoint that state was loaded from or saved to; -1 for none
	refused   []RefusedCheckpoint // damaged ones, newer than that

	model     *moe.Model
	optimizer *Optimizer

	metrics      *recordFile
	fingerprints *recordFile
	log          *blend.LogWriter // writes to fingerprints
	hasher       blend.StepHasher
	board        *tensorboard.Writer

	peak   float64        // of the device's products, measured, in FLOP/s
	scrape *metricsServer // nil if nobody asked for it

	tokens []uint32 // of the step at hand, row by row
	rows   []row
}

// A row is where a sample of the step at hand comes from.
type row struct {
	position int64
	source   int
}

// train does the steps.
func (r *run) train(ctx context.Context) error {
	for {
		spike, err := r.trainOn(ctx)
		if err != nil || spike == nil {
			return err
		}
		if err := r.rollBack(ctx, spike); err != nil {
			return err
		}
	}
}

// trainOn does the steps up to the end of the run, or to a spike at which it has to go back.
func (r *run) trainOn(ctx context.Context) (*Spike, error) {
	batch := int64(r.config.BatchSize)
	stream, err := r.data.Stream(ctx, blend.StreamOptions{From: r.state.Cursor.Position, To: r.config.Steps * batch, BatchSize: r.config.BatchSize, Prefetch: 2})
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	for r.state.Step < r.config.Steps && !r.stopped() {
		metrics, err := r.step(ctx, stream)
		if err != nil {
			return nil, err
		}
		if metrics.Skipped != nil && r.config.Spikes.Action == SpikeRollback {
			return metrics.Skipped, nil
		}
		if err := r.record(metrics); err != nil {
			return nil, err
		}
		progress := Progress{StepMetrics: metrics, Steps: r.config.Steps}
		if due(r.state.Step, *r.config.Evaluate.Every, r.config.Steps) {
			if progress.Evaluation, err = r.evaluate(ctx); err != nil {
				return nil, err
			}
		}
		if every := *r.config.Checkpoint.Every; every > 0 && r.state.Step%every == 0 {
			if progress.Checkpoint, err = r.save(ctx); err != nil {
				return nil, err
			}
		}
		if r.scrape != nil {
			r.scrape.publish(r, metrics, progress.Evaluation)
		}
		if r.options.Progress != nil {
			r.options.Progress(progress)
		}
	}
	if r.lastSaved != r.state.Step {
		_, err = r.save(ctx)
	}
	return nil, err
}

// due says whether something that is done every so many steps is done after this one; it is done after the last one, too.
func due(stepsDone, every, steps int64) bool {
	return every > 0 && (stepsDone%every == 0 || stepsDone == steps)
}

func (r *run) stopped() bool {
	select {
	case <-r.options.Stop:
		return true
	default:
		return false
	}
}

// step trains on the next batch.
func (r *run) step(ctx context.Context, stream *blend.Stream) (StepMetrics, error) {
	start := time.Now()
	if err := r.read(stream); err != nil {
		return StepMetrics{}, err
	}
	m := StepMetrics{
		Step: r.state.Step, First: r.state.Cursor.Position, Samples: len(r.rows), Tokens: int64(len(r.rows)) * int64(r.data.SequenceLength),
		LearningRate: r.schedule.LearningRate(r.state.Step), SourceLoss: map[string]float64{}, SourceSamples: map[string]int{},
	}
	if len(r.rows) > 0 { // a step whose positions are all skipped leaves the weights alone
		if err := r.gradients(ctx, &m); err != nil {
			return StepMetrics{}, err
		}
	}
	switch {
	case m.Skipped != nil && r.config.Spikes.Action == SpikeRollback:
		return m, nil // what is left of the step is of no use
	case m.Skipped != nil:
		if err := r.skip(m.Skipped); err != nil {
			return StepMetrics{}, err
		}
	case len(r.rows) > 0:
		limit := r.config.Optimizer.Clip
		if r.config.Optimizer.ClipAfterWarmup && r.state.Step < r.schedule.Warmup {
			limit = 0
		}
		every := r.config.Log.UpdateRatioEvery
		measured := every > 0 && m.Step%every == 0
		r.optimizer.Measure(measured)
		r.optimizer.Step(m.LearningRate, clipFactor(m.GradNorm, limit))
		if measured {
			m.UpdateRatio = updateRatios(r.model.Parameters(), r.optimizer.Ratio)
		}
		if r.optimizer.CurvatureDue() {
			if err := r.curvature(ctx, m.Tokens, limit); err != nil {
				return StepMetrics{}, err
			}
		}
		if r.state.Updates == 0 {
			r.state.FirstLoss = m.Loss
		}
		r.state.LastLoss = m.Loss
		r.state.Tokens += m.Tokens
		r.state.Spikes.updated(r.config.Spikes.Window, m.Loss, m.GradNorm)
	}
	r.state.Step++
	r.state.Updates = r.optimizer.Updates
	r.state.Cursor.Position += int64(r.config.BatchSize)

	now := time.Now()
	m.Seconds, m.Time = now.Sub(start).Seconds(), timestamp(now)
	if m.Seconds > 0 { // a coarse clock may not see a step without samples pass, and JSON has no 0/0
		m.TokensPerSecond = float64(m.Tokens) / m.Seconds
		m.MFU = m.TokensPerSecond * r.config.Model.FLOPsPerToken(r.data.SequenceLength) / r.peak
	}
	return m, nil
}

// read takes the next batch from the stream.
func (r *run) read(stream *blend.Stream) error {
	record, err := stream.Next()
	if err != nil {
		return fmt.Errorf("step %d: %w", r.state.Step, err)
	}
	defer record.Release()
	batch, err := blend.NewBatch(record)
	if err != nil {
		return fmt.Errorf("step %d: %w", r.state.Step, err)
	}
	r.tokens, r.rows = r.tokens[:0], r.rows[:0]
	for i := range batch.Rows() {
		if r.state.Spikes.leavesOut(batch.Position(i)) {
			continue
		}
		r.tokens = batch.AppendTokens(r.tokens, i)
		r.rows = append(r.rows, row{batch.Position(i), batch.Source(i)})
	}
	return nil
}

// gradients computes losses and gradients of the step, and says in m.Skipped if they are a spike.
func (r *run) gradients(ctx context.Context, m *StepMetrics) error {
	err := r.backward(ctx, m)
	if err == nil {
		if m.GradNorm = r.optimizer.GradientNorm(); !finite(m.GradNorm) {
			err = r.notFinite(gradNormSpike, fmt.Errorf("the gradient is %w%s", ErrNotFinite, r.firstBadGradient()), r.rows)
		}
	}
	bad := (*notFiniteError)(nil)
	switch {
	case err == nil:
		m.Skipped = r.state.Spikes.check(r.config.Spikes, m.Loss, m.GradNorm)
	case r.config.Spikes.Action != SpikeNone && errors.As(err, &bad):
		m.Skipped = &Spike{What: bad.what, NotFinite: true}
		m.clear(bad.what)
	default:
		return err
	}
	return nil
}

// backward computes the gradients of the step, micro-batch by micro-batch, and the losses. What the model is given is what is hashed.
func (r *run) backward(ctx context.Context, m *StepMetrics) error {
	r.model.ZeroGradients()
	width := r.data.SequenceLength + 1
	options := moe.BackwardOptions{Targets: m.Tokens, Loss: moe.LossOptions{
		Aux: r.config.AuxLoss.Form, AuxCoefficient: r.config.AuxLoss.Coefficient, ZCoefficient: r.config.ZLoss.Coefficient}}
	sourceLoss := make([]float64, len(r.data.Sources))
	for first := 0; first < len(r.rows); first += r.config.MicroBatchSize {
		if err := ctx.Err(); err != nil {
			return err
		}
		rows := r.rows[first:min(first+r.config.MicroBatchSize, len(r.rows))]
		micro := moe.Batch{Tokens: r.tokens[first*width : (first+len(rows))*width], Rows: len(rows), SequenceLength: r.data.SequenceLength}
		for i := range rows {
			r.hasher.Add(micro.Tokens[i*width : (i+1)*width])
		}
		stats, err := r.model.Backward(micro, options)
		if err != nil {
			return fmt.Errorf("step %d, positions %d to %d: %w", m.Step, rows[0].position, rows[len(rows)-1].position, err)
		}
		for i, loss := range stats.RowLoss {
			if !finite(loss) {
				return r.notFinite(lossSpike, fmt.Errorf("the loss is %w", ErrNotFinite), rows[i:i+1])
			}
			m.Loss += loss
			sourceLoss[rows[i].source] += loss
			m.SourceSamples[r.data.Sources[rows[i].source].Name]++
		}
		share := float64(stats.Targets) / float64(m.Tokens)
		m.AuxLoss += stats.Aux * share
		m.ZLoss += stats.Z * share
		m.ExpertTokens = addCounts(m.ExpertTokens, stats.ExpertCounts)
		m.addEntropy(stats.RouterEntropy, share)
	}
	if !finite(m.AuxLoss) || !finite(m.ZLoss) {
		return r.notFinite(auxLossSpike, fmt.Errorf("the auxiliary loss is %w", ErrNotFinite), r.rows)
	}
	m.Loss /= float64(m.Tokens)
	for name, samples := range m.SourceSamples {
		source := slices.IndexFunc(r.data.Sources, func(s blend.Source) bool { return s.Name == name })
		m.SourceLoss[name] = sourceLoss[source] / float64(int64(samples)*int64(r.data.SequenceLength))
	}
	return nil
}

func addCounts(sum, counts [][]int64) [][]int64 {
	if sum == nil {
		for _, layer := range counts {
			sum = append(sum, slices.Clone(layer)) // counts are the model's own
		}
		return sum
	}
	for i := range counts {
		for j := range counts[i] {
			sum[i][j] += counts[i][j]
		}
	}
	return sum
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// A notFiniteError is about a loss or gradient, what of a [Spike], that is not finite.
type notFiniteError struct {
	what string
	error
}

func (e *notFiniteError) Unwrap() error { return e.error }

// notFinite completes an error that ends the run, unless it handles spikes, before the weights of this step are touched. rows are those it
// can come from.
func (r *run) notFinite(what string, err error, rows []row) error {
	var sources []string
	for _, row := range rows {
		if name := r.data.Sources[row.source].Name; !slices.Contains(sources, name) {
			sources = append(sources, name)
		}
	}
	from, to := rows[0].position, rows[len(rows)-1].position+1
	checkpoint := "there is no checkpoint yet"
	if r.lastSaved >= 0 {
		checkpoint = "the newest checkpoint is " + checkpointName(r.lastSaved)
	}
	return &notFiniteError{what, fmt.Errorf("step %d: %w, at positions %d to %d, of %s; the weights are as before the step, and %s. If the losses before it rose, the learning rate is too high. "+
		"Else look at the text with mula peek --position; to leave it out, add {from: %d, to: %d} to skips in blend.yaml, seal the plan again and set plan_change: accept",
		r.state.Step, err, from, to-1, strings.Join(sources, ", "), checkpoint, from, to)}
}

// firstBadGradient names the first tensor whose gradient is not finite.
func (r *run) firstBadGradient() string {
	for _, p := range r.model.Parameters() {
		for _, g := range p.Grad {
			if !finite(float64(g)) {
				return " in " + p.Name
			}
		}
	}
	return ""
}

// record writes what a step did to the run directory.
func (r *run) record(m StepMetrics) error {
	if err := r.log.Write(r.hasher.Step(m.Step, m.First)); err != nil {
		return err
	}
	if r.state.Spikes != nil {
		for _, back := range r.state.Spikes.Rollbacks {
			if back.LeftOut.From == m.First {
				if err := r.metrics.append(metricsLine{Step: &m.Step, Rollback: &back}); err != nil {
					return err
				}
			}
		}
	}
	if err := r.metrics.append(m); err != nil {
		return err
	}
	if m.Samples == 0 {
		return nil
	}
	scalars := []tensorboard.Scalar{
		{Tag: "train/loss", Value: m.Loss}, {Tag: "train/aux_loss", Value: m.AuxLoss}, {Tag: "train/z_loss", Value: m.ZLoss},
		{Tag: "train/grad_norm", Value: m.GradNorm}, {Tag: "train/learning_rate", Value: m.LearningRate},
		{Tag: "train/tokens_per_second", Value: m.TokensPerSecond}, {Tag: "train/mfu", Value: m.MFU},
	}
	if s := m.Skipped; s != nil && s.NotFinite {
		scalars = scalars[4:] // not all of the others have a value
	}
	for layer, entropy := range m.RouterEntropy {
		scalars = append(scalars, tensorboard.Scalar{Tag: fmt.Sprintf("router_entropy/layer_%d", layer), Value: entropy})
	}
	for _, group := range sortedKeys(m.UpdateRatio) {
		scalars = append(scalars, tensorboard.Scalar{Tag: "update_ratio/" + group, Value: m.UpdateRatio[group]})
	}
	for _, name := range sortedKeys(m.SourceLoss) {
		scalars = append(scalars, tensorboard.Scalar{Tag: "loss/" + name, Value: m.SourceLoss[name]})
	}
	return r.board.Write(m.Step, time.Now(), scalars)
}

// curvature estimates the curvature of the loss on the rows of the step that was just made, from targets that the model draws itself. They
// follow from the seed of the run and the number of the step. An estimate that is not finite is not used: the step is done, and the next one
// says what is wrong, if anything is.
func (r *run) curvature(ctx context.Context, targets int64, limit float64) error {
	r.model.ZeroGradients()
	width := r.data.SequenceLength + 1
	options := moe.BackwardOptions{Targets: targets, SampleTargets: true, SampleSeed: curvatureSeed(r.config.Seed, r.state.Step)}
	for first := 0; first < len(r.rows); first += r.config.MicroBatchSize {
		if err := ctx.Err(); err != nil {
			return err
		}
		rows := min(r.config.MicroBatchSize, len(r.rows)-first)
		micro := moe.Batch{Tokens: r.tokens[first*width : (first+rows)*width], Rows: rows, SequenceLength: r.data.SequenceLength}
		options.FirstTarget = int64(first) * int64(r.data.SequenceLength)
		if _, err := r.model.Backward(micro, options); err != nil {
			return fmt.Errorf("step %d, estimate of the curvature: %w", r.state.Step, err)
		}
	}
	norm := r.optimizer.GradientNorm()
	if !finite(norm) {
		r.warn("step %d: the estimate of the curvature is not finite and is not used", r.state.Step)
		return nil
	}
	r.optimizer.UpdateCurvature(clipFactor(norm, limit), targets)
	return nil
}

// curvatureSeed is the seed of the targets that are drawn after a step of a run of the given seed.
func curvatureSeed(seed uint64, step int64) uint64 {
	var generator rand.PCG
	generator.Seed(seed, uint64(step))
	return generator.Uint64()
}

// evaluate computes the validation loss and records it.
func (r *run) evaluate(ctx context.Context) (*Evaluation, error) {
	r.optimizer.Average(true)
	defer r.optimizer.Average(false)
	e, err := Evaluate(ctx, r.model, r.data, EvaluateOptions{Samples: r.config.Evaluate.Samples, BatchSize: r.config.MicroBatchSize})
	if err != nil {
		return nil, fmt.Errorf("evaluation after step %d: %w", r.state.Step-1, err)
	}
	if err := r.metrics.append(metricsLine{Step: &r.state.Step, Eval: &e}); err != nil {
		return nil, err
	}
	scalars := []tensorboard.Scalar{{Tag: "eval/loss", Value: e.Loss}}
	for _, name := range sortedKeys(e.SourceLoss) {
		scalars = append(scalars, tensorboard.Scalar{Tag: "eval/" + name, Value: e.SourceLoss[name]})
	}
	// At the step before, as everything that was seen up to now was: a resumed run hides the points of its first step and later.
	return &e, r.board.Write(r.state.Step-1, time.Now(), scalars)
}

// save writes a checkpoint and removes those that are no longer kept. It returns its directory.
func (r *run) save(ctx context.Context) (string, error) {
	if err := errors.Join(r.metrics.sync(), r.fingerprints.sync()); err != nil {
		return "", err
	}
	r.optimizer.Average(true)
	defer r.optimizer.Average(false)
	r.state.Weights = WeightsHash(r.model.Parameters())
	dir := r.dir.join(checkpointsDir)
	err := saveCheckpoint(ctx, dir, r.state.Step, func(dir string) error {
		if err := r.model.Save(dir, moe.SaveOptions{}); err != nil {
			return err
		}
		if err := writeGenerationConfig(filepath.Join(dir, generationFile), r.model.Config()); err != nil {
			return err
		}
		if r.tokenizer != nil {
			if err := atomicfile.WriteFile(filepath.Join(dir, tokenizerFile), r.tokenizer); err != nil {
				return err
			}
		}
		if err := r.optimizer.write(filepath.Join(dir, optimizerFile)); err != nil {
			return err
		}
		return writeJSON(filepath.Join(dir, stateFile), r.state)
	})
	if err != nil {
		if ctx.Err() == nil && r.lastSaved >= 0 {
			err = fmt.Errorf("%w; the newest complete checkpoint is %s, from which the run goes on when it is started again", err, checkpointName(r.lastSaved))
		}
		return "", err
	}
	r.lastSaved = r.state.Step
	r.refused = slices.DeleteFunc(r.refused, func(c RefusedCheckpoint) bool { return c.Checkpoint == checkpointName(r.state.Step) }) // replaced
	if err := pruneCheckpoints(dir, r.config.Checkpoint.Keep, r.backTo(), r.refused); err != nil {
		r.warn("old checkpoints could not be removed: %v", err)
	}
	r.refused = nil
	return filepath.Join(dir, checkpointName(r.state.Step)), nil
}

func (r *run) warn(format string, args ...any) {
	if r.options.Warn != nil {
		r.options.Warn(fmt.Sprintf(format, args...))
	}
}

// findCheckpoint finds the checkpoint to go on from, nil for none, checks that the run goes on as it began, and sets the state.
func (r *run) findCheckpoint(ctx context.Context) (*Checkpoint, error) {
	plan := r.data.Plan.Fingerprint()
	checkpoint, refused, err := newestCheckpoint(ctx, r.dir.join(checkpointsDir))
	r.refused = refused
	for _, c := range refused {
		r.warn("checkpoint %s is damaged and not used: %s", c.Checkpoint, c.Error)
	}
	if err != nil {
		return nil, err
	}
	if checkpoint == nil {
		r.state = r.newState()
		return nil, nil
	}
	r.state, r.lastSaved = checkpoint.State, checkpoint.State.Step
	if r.state.Spikes == nil {
		r.state.Spikes = newSpikeState(r.config.Spikes)
	}
	if err := compareIdentity(r.state.Config, r.identity); err != nil {
		return nil, fmt.Errorf("%s: %w", checkpoint.Dir, err)
	}
	if r.state.Cursor.Plan != plan && r.config.PlanChange != AcceptPlanChange {
		return nil, fmt.Errorf("%s was made with plan %.16s…, and %s is plan %.16s…; use the plan that the run began with, or set plan_change: accept to go on at position %d of the other one",
			checkpoint.Dir, r.state.Cursor.Plan, r.config.Plan, plan, r.state.Cursor.Position)
	}
	if r.state.SequenceLength != r.data.SequenceLength {
		return nil, fmt.Errorf("%s was made with samples of %d tokens, and %s has samples of %d: a run cannot change its sequence length; seal the plan with the old one, "+
			"or start a new run in another output", checkpoint.Dir, r.state.SequenceLength, r.config.Plan, r.data.SequenceLength)
	}
	if now := tokenizerHash(r.data.Plan); r.state.Tokenizer != now && r.state.Tokenizer != "" && now != "" {
		return nil, fmt.Errorf("%s was trained on ids of the tokenizer with SHA-256 %.16s…, and the shards of %s were made with %.16s…: the same ids mean other text there; "+
			"tokenize with the old one, or start a new run in another output", checkpoint.Dir, r.state.Tokenizer, r.config.Plan, now)
	}
	if want := r.state.Step * int64(r.config.BatchSize); r.state.Cursor.Position != want {
		return nil, fmt.Errorf("%s stands at position %d after %d steps of %d samples; it should be %d", checkpoint.Dir, r.state.Cursor.Position, r.state.Step,
			r.config.BatchSize, want)
	}
	if a := r.arithmetic(); a != r.state.Arithmetic {
		r.warn("%s was computed with the arithmetic of %s, and this is %s: the run goes on, but not bit for bit as it would have there", checkpoint.Name(), r.state.Arithmetic, a)
	}
	return checkpoint, nil
}

// newState is the state before the first step.
func (r *run) newState() State {
	return State{Format: checkpointFormat, Cursor: blend.Cursor{Plan: r.data.Plan.Fingerprint()}, SequenceLength: r.data.SequenceLength,
		Tokenizer: tokenizerHash(r.data.Plan), Seed: r.config.Seed, Spikes: newSpikeState(r.config.Spikes), Config: r.identity}
}

// arithmetic names what decides the last bits of a run: the device's way of rounding and the model's order of sums. Its first order was not
// named in checkpoints.
func (r *run) arithmetic() string {
	return fmt.Sprintf("%s, order of sums %d", r.device.Arithmetic(), moe.OrderOfSums)
}

// tokenizerHash is the hash of the tokenizer.json that made a plan's shards, or "" if the plan does not know it.
func tokenizerHash(p *blend.Plan) string {
	if p.Tokenizer == nil {
		return ""
	}
	return p.Tokenizer.SHA256
}

func (r *run) summary(checkpoint *Checkpoint) Summary {
	s := summarize(r.config, r.data.Plan, r.device.Name())
	if checkpoint != nil {
		s.Resumed, s.NextStep = checkpoint.Name(), checkpoint.State.Step
	}
	return s
}

func (r *run) result(checkpoint string) Result {
	return Result{Steps: r.state.Step, Finished: r.state.Step >= r.config.Steps, Resumed: r.resumed, FirstLoss: r.state.FirstLoss, LastLoss: r.state.LastLoss,
		LeftOut: r.state.Spikes.leftOut(), Checkpoint: checkpoint, Weights: r.state.Weights}
}

// prepare makes model and optimizer, as they begin or from the checkpoint, and opens the records where the checkpoint left them.
func (r *run) prepare(checkpoint *Checkpoint) error {
	model, err := moe.New(r.config.Model.Config, r.device)
	if err != nil {
		return err
	}
	model.SetRecompute(r.config.Recompute == RecomputeLayers)
	r.model = model
	if err := r.restore(checkpoint); err != nil {
		return err
	}
	if err := r.config.write(r.dir.join(configFile)); err != nil {
		return err
	}
	return r.openRecords(checkpoint, false)
}

// restore sets weights and optimizer to those of the checkpoint, or of the beginning.
func (r *run) restore(checkpoint *Checkpoint) error {
	model := r.model
	if r.optimizer == nil || checkpoint == nil {
		r.optimizer = nil // so that the new one may take its memory
		r.optimizer = NewOptimizer(r.config.Optimizer, int64(r.config.BatchSize)*int64(r.data.SequenceLength), r.device, model.Parameters())
	}
	if checkpoint == nil {
		var err error
		if r.initial.Dir != "" {
			err = model.Load(r.initial.Dir)
			for _, p := range model.Parameters() {
				if err == nil {
					err = checkFinite(r.initial.Dir, p.Name, 0, p.Weight)
				}
			}
		} else {
			model.Init(r.config.Seed)
		}
		if err != nil {
			return fmt.Errorf("initialize_from: %w", err)
		}
		if r.state.Spikes != nil && r.initial.Dir == "" {
			r.state.Spikes.Began = beganBySeed
		} else if r.state.Spikes != nil {
			r.state.Spikes.Began = WeightsHash(model.Parameters())
		}
	} else {
		if err := model.Load(checkpoint.Dir); err != nil {
			return err
		}
		if err := r.optimizer.read(filepath.Join(checkpoint.Dir, optimizerFile)); err != nil {
			return err
		}
		r.optimizer.Updates = r.state.Updates
	}
	return nil
}

// openRecords cuts what was recorded after the checkpoint, or begins the records anew. back says that this run wrote them and goes back.
func (r *run) openRecords(checkpoint *Checkpoint, back bool) (err error) {
	defer func() {
		if err != nil {
			r.closeRecords()
		}
	}()
	now := time.Now()
	plan := r.data.Plan.Fingerprint()
	oldPlan := r.state.Cursor.Plan
	r.state.Cursor.Plan, r.state.Arithmetic = plan, r.arithmetic()
	if oldPlan != plan && r.state.Spikes != nil {
		r.state.Spikes.PlanFrom = r.state.Step
	}
	if checkpoint == nil && !back {
		names, err := fs.Glob(os.DirFS(r.dir.path), asideName("*"))
		if err != nil {
			return err
		}
		for _, name := range append(names, metricsFile, fingerprintsFile, tensorboardDir) {
			if _, err := os.Lstat(r.dir.join(name)); err == nil {
				r.warn("%s is of a run that left no checkpoint; it is replaced", r.dir.join(name))
			}
			if err := os.RemoveAll(r.dir.join(name)); err != nil {
				return err
			}
		}
	}
	header, last, err := cutRecords(r.dir.join(metricsFile), r.state.Step)
	if err != nil {
		return err
	}
	if last != r.state.Step-1 {
		r.warn("%s ends with step %d, the checkpoint with step %d: what lies between is not on record", r.dir.join(metricsFile), last, r.state.Step-1)
	}
	if r.metrics, err = openRecordFile(r.dir.join(metricsFile)); err != nil {
		return err
	}
	if !header {
		record, err := r.runRecord(now)
		if err != nil {
			return err
		}
		if err := r.metrics.append(metricsLine{Run: record}); err != nil {
			return err
		}
	}

	// The log of the checkpoint's plan ends where the checkpoint stands. It may have been put aside already by a process that was killed
	// before it saved a checkpoint under the new plan, whose log then stands in its place.
	if header, last, err = r.openLog(oldPlan); err != nil {
		return err
	}
	if last != r.state.Step-1 {
		r.warn("%s ends with step %d, the checkpoint with step %d: what lies between is not on record", r.dir.join(fingerprintsFile), last, r.state.Step-1)
	}
	if oldPlan != plan {
		if header, _, err = r.openLog(plan); err != nil {
			return err
		}
	}
	if r.fingerprints, err = openRecordFile(r.dir.join(fingerprintsFile)); err != nil {
		return err
	}
	r.log = blend.ResumeLog(r.fingerprints)
	if !header {
		r.log, err = blend.NewLogWriter(r.fingerprints, blend.LogHeader{Plan: plan, SequenceLength: r.data.SequenceLength, BatchSize: r.config.BatchSize})
		if err != nil {
			return err
		}
	}

	if err := r.writeSkips(); err != nil {
		return err
	}
	if r.board, err = tensorboard.Create(r.dir.join(tensorboardDir), r.state.Step, now); err != nil {
		return err
	}
	if err := atomicfile.SyncDir(r.dir.path); err != nil { // lines on disk are of no use in a file that is not
		return err
	}
	if checkpoint == nil || back && oldPlan == plan {
		return nil
	}
	if !back {
		r.resumed = checkpoint.Name()
	}
	resumed := &ResumeRecord{Checkpoint: checkpoint.Name(), Time: timestamp(now), PeakFLOPS: r.peak, Refused: r.refused}
	if oldPlan != plan {
		resumed.OldPlan, resumed.Plan = oldPlan, plan
	}
	if oldPlan != plan && !back {
		r.warn("the plan has changed from %.16s… to %.16s…; the run goes on at position %d of the new one", oldPlan, plan, r.state.Cursor.Position)
	}
	return r.metrics.append(metricsLine{Step: &r.state.Step, Resumed: resumed})
}

// openLog makes fingerprints.jsonl the log of the given plan, up to the step at hand, or leaves none. A log is about one plan: that of another
// is put aside under the name of its plan, and comes back with it. header and last are those of [cutRecords].
func (r *run) openLog(plan string) (header bool, last int64, err error) {
	path := r.dir.join(fingerprintsFile)
	if now := planOfLog(path); now != plan {
		if now != "" {
			if err := os.Rename(path, r.dir.join(asideName(now))); err != nil {
				return false, -1, err
			}
		}
		if err := os.Rename(r.dir.join(asideName(plan)), path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, -1, err
		}
	}
	return cutRecords(path, r.state.Step)
}

// asideName is the name of the fingerprints of a plan that the run is not on.
func asideName(plan string) string { return fmt.Sprintf("fingerprints-%.16s.jsonl", plan) }

// planOfLog is the fingerprint of the plan that a log is about, "" if there is no log or its first line is not whole.
func planOfLog(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	log, err := blend.NewLogReader(f, path)
	if err != nil {
		return ""
	}
	return log.Header.Plan
}

func (r *run) closeRecords() {
	for _, f := range []*recordFile{r.metrics, r.fingerprints} {
		if f != nil {
			f.close()
		}
	}
	if r.board != nil {
		r.board.Close()
	}
}

// readTokenizer reads the tokenizer.json that goes into checkpoints and checks that it is the one of the plan.
func readTokenizer(path string, p *blend.Plan) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	hash := fmt.Sprintf("%x", sha256.Sum256(data))
	if p.Tokenizer != nil && p.Tokenizer.SHA256 != hash {
		return nil, fmt.Errorf("tokenizer %s has SHA-256 %.16s…, but the plan's shards were made by one with %.16s…; name that one, or none", path, hash, p.Tokenizer.SHA256)
	}
	return data, nil
}
