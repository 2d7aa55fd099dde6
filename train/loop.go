// Package train trains a model on a plan. It has the training loop, optimizers, learning rate
// schedules, checkpoints and records.
//
// [Run] is the training loop, in this file from top to bottom. docs/formats/run.md describes the
// files that it writes to the run directory: train.yaml, metrics.jsonl, fingerprints.jsonl,
// tensorboard/ and checkpoints/. Each checkpoint is a Hugging Face model directory.
//
// A run that was stopped or killed at any time resumes from its newest complete checkpoint. All its
// losses, weights, metrics (except for times) and fingerprints are bit-identical to an
// uninterrupted run. A step depends only on the weights, the moments, the number of steps done and
// the plan. The checkpoint has the first three, and the plan's fingerprint. Results do not depend
// on the number of threads.
package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/blend/stream"
	"mula/internal/filesystem"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/group"
	"mula/train/optimizer"
	"mula/train/pipeline"
	"mula/train/record"
	"mula/train/replicas"
	"mula/train/rundir"
	"mula/train/samples"
	"mula/train/spikes"
	"mula/train/votes"
	"mula/xpu"
	"mula/xpu/comm"
)

// Options are settings of a run that are not in its configuration. The zero value is ready for use.
// The functions are called from the goroutine that called Run.
type Options struct {
	Version string // version of the program, for the record
	// make the checks of a start and call Report, then return; the run directory does not change
	DryRun bool
	// when closed, the run finishes its step, saves a checkpoint and returns; nil: the run trains
	// to its end
	Stop <-chan struct{}
	// called before memory for the model is allocated, and again if an older checkpoint is used,
	// because the first one is damaged
	Report   func(Summary)
	Progress func(Progress) // called after every step
	// called with warnings, for example about a damaged checkpoint
	Warn func(text string)

	// Terminated reports, after Stop is closed, whether a SIGTERM was the cause. The host of this
	// rank may then shut down soon, so the heartbeat records the signal and mula launch restarts
	// the run. Nil means false.
	Terminated func() bool

	// World has the ranks of the run, including this process; see [group.Join]. If it is nil, all
	// ranks are in this process. Only rank 0 reports, keeps records and writes to the run
	// directory. All ranks must see that directory.
	World *comm.Comm

	// Kept has what an earlier call of Run in this process has kept, and gets it back if this call
	// loses another rank. Nil: nothing is kept.
	Kept *Kept

	// Generation is the number of earlier groups of ranks in this attempt of mula launch, for the
	// heartbeat.
	Generation int

	// BeforeSum is called by every rank before its gradients of a bucket are added to the other
	// ranks' gradients. Tests inject faults there. It may be called from several goroutines.
	BeforeSum func(rank int, step int64, bucket moe.Bucket) error

	// AfterBackward is called by every rank after its backward passes of a step, as a part of its
	// own work. Ranks in one process call it from several goroutines.
	AfterBackward func(rank int, step int64)

	ranksHere int // ranks that share the threads of this process; 0 means 1

	// replaces the configuration's device, for tests
	newDevice func(rank, threads int, precision xpu.Precision) (xpu.Device, error)

	// For tests, of several ranks.
	badTokens func(rank int, step int64) bool // reports whether a rank reads ids outside the model's vocabulary
	atStep    func(r *run)                    // called on every rank before a step
	late      bool                            // gradients are summed after the backward pass instead of during it
	reducing  func(bucket int)                // called on every rank before it starts the sum of a bucket's gradients
	passed    func(r *run)                    // called on every rank after the backward passes of a step
	vote      func(rank int, own *votes.Own)  // changes the vote of a rank
	ended     func(r *group.Group)            // called after the last step
	hosts     *comm.Hosts                     // of all ranks, instead of this machine
	files     filesystem.FS                   // of the run directory; nil: the machine's
	memory    filesystem.FS                   // of snapshots; nil: the machine's
	heartbeat string                          // instead of [record.HeartbeatVariable]
}

// heartbeatPath returns the path of the heartbeat, "" for none.
func (o *Options) heartbeatPath() string {
	return cmp.Or(o.heartbeat, os.Getenv(record.HeartbeatVariable))
}

// Progress describes the step that has just finished.
type Progress struct {
	record.StepMetrics
	Steps      int64              // steps of the whole run
	Evaluation *record.Evaluation // if an evaluation followed the step
	Checkpoint string             // directory of the checkpoint, if one was written after the step
}

// Result is the outcome of a run.
type Result struct {
	Steps      int64 // steps done, over all runs from step 0
	Finished   bool  // all steps are done; otherwise the run was stopped
	Terminated bool  // a SIGTERM that only ranks received stopped the run
	// name of the checkpoint that this run resumed from; "" if it started at step 0 or had no step
	// to do
	Resumed    string
	FirstLoss  float64 // loss of the first step, which may be from an earlier run
	LastLoss   float64 // loss of the last step
	LeftOut    int64   // samples skipped because of spikes; skips.yaml in the run directory has their positions
	Checkpoint string  // directory of the newest checkpoint
	Weights    string  // hash of the weights, as in the checkpoint
}

func (r Result) ended() record.Ended {
	switch {
	case r.Finished:
		return record.EndedDone
	case r.Terminated:
		return record.EndedTerminated
	}
	return record.EndedStopped
}

// Run trains until all steps are done or the run is stopped. It resumes from the newest complete
// checkpoint in the run directory, if one exists. If ctx is done, Run returns at once, without a
// checkpoint.
//
// Every rank of a run calls Run with the same configuration and gets the same result. Stopping one
// rank stops all. After an error that all ranks have (see [collective.Shared]), their group is
// still usable. After any other error the group must be closed, so that no rank waits for this one.
func Run(ctx context.Context, config Config, options Options) (result Result, err error) {
	if err := config.Validate(); err != nil {
		return Result{}, err
	}
	switch {
	case options.World == nil && config.Layout.Ranks() > 1:
		return runLocal(ctx, config, options)
	case options.World == nil:
		options.World = comm.NewSingle()
	}
	if err := config.fitsWorld(options.World.Size()); err != nil {
		return Result{}, &collective.GroupError{Err: err}
	}
	ranks, err := group.New(ctx, options.World, config.Layout.shape(), config.groupOptions(options.hosts))
	if err != nil {
		return Result{}, err
	}
	defer func() {
		if err != nil && ranks.Ranks() > 1 && !collective.Shared(err) {
			err = fmt.Errorf("rank %d on %s: %w", ranks.Rank(), ranks.Hosts[ranks.Rank()], err)
		}
	}()
	r := &run{config: config, options: options, ranks: ranks, history: history{saved: -1}}
	if !r.leads() {
		r.options.Report, r.options.Progress, r.options.Warn = nil, nil, nil
	}
	defer func() { r.close(ctx.Err() != nil || errors.Is(err, comm.ErrPeerLost)) }()
	ctx, waits := comm.CountWaits(ctx)
	r.clock = newClock(waits)
	defer func() {
		if err == nil {
			r.history.heartbeat.End(result.ended(), result.Steps)
		}
	}()
	saved, err := r.begin(ctx)
	if err != nil {
		return Result{}, err
	}
	if r.options.DryRun {
		return Result{}, nil
	}
	if saved != nil && saved.State.Step >= r.config.Steps {
		r.removeSnapshots()
		return r.result(saved.Dir), r.copyFinished(ctx, saved)
	}
	if err := r.prepare(ctx, saved); err != nil {
		return Result{}, err
	}
	if err := r.train(ctx); err != nil {
		r.recordFailures(err)
		return Result{}, err
	}
	r.removeSnapshots()
	if r.history.copies != nil {
		err = r.history.copies.wait(ctx)
	}
	if err := collective.Agree(ctx, r.ranks.World(), err); err != nil {
		return Result{}, err
	}
	if f := options.ended; f != nil {
		f(r.ranks)
	}
	return r.result(r.dir.Join(filepath.Join(checkpoint.DirName, checkpoint.Name(r.history.saved)))), nil
}

// A run is a training run in progress, on one rank.
type run struct {
	config  Config // resolved
	options Options
	data    *blend.Data
	dir     *rundir.Dir
	ranks   *group.Group
	device  xpu.Device
	opened  openedDevice // describes device

	start   start
	state   checkpoint.State // state for a checkpoint at this moment
	history history
	clock   *clock
	trainer
	batch     batch
	observers []observer // see observe

	saving   *checkpoint.Pending // checkpoint in the background; nil for none
	snapshot []float32           // memory for it
}

// start has facts that are found out once, before the first step.
type start struct {
	device    string  // name of the device, from the configuration or chosen
	deviceWhy string  // see [devices.New]; of the first rank
	peak      float64 // measured peak of the products of all ranks' devices, in FLOP/s
	tokenizer []byte  // content of tokenizer.json, or nil
	// the model of initialize_from; Dir is "" with random weights or a checkpoint, and only the
	// first rank has more than Dir
	initial checkpoint.ModelDir
}

// history has the checkpoints and the end of the run so far, and reports its progress.
type history struct {
	resumed    string                  // name of the checkpoint that the run resumed from
	saved      int64                   // step of the newest loaded or saved checkpoint; -1 for none
	copies     *copies                 // of checkpoints in an object store; nil without, and on other ranks than 0
	snapshots  *checkpoint.Snapshots   // nil without
	refused    []checkpoint.Refused    // damaged checkpoints and snapshots newer than saved
	terminated bool                    // only SIGTERMs to ranks stopped the run
	slow       map[int]bool            // ranks that are slow, and that a warning has named
	heartbeat  *record.HeartbeatWriter // nil without a file for heartbeats
}

// A trainer has the model and the optimizer, which a step changes, and the parts that compute the
// change.
type trainer struct {
	schedule  optimizer.Schedule
	model     *moe.Model
	tensors   []safetensors.Tensor // of the whole model
	optimizer *optimizer.Optimizer
	sharding  *optimizer.Sharding
	pipeline  *pipeline.Pipeline
	votes     *votes.Votes
	replicas  *replicas.Check // nil if there is nothing to compare
}

// A batch is the data of the current step.
type batch struct {
	// Of this rank.
	rows       samples.Rows
	origins    []votes.Row // of rows, without results
	passes     int         // backward passes; may exceed the number of micro-batches
	mostPasses int         // of all ranks
	before     int64       // number of rows of lower ranks, each row counted once
	pending    []reduction // of each bucket whose gradients are being summed
	experts    []int64     // [M·E] choices of each expert of this rank's M layers with experts, if they are needed

	// Of all ranks.
	samples int
	targets int64 // unmasked targets
	hasher  fingerprint.Hasher

	trained samples.Trained // samples since the last checkpoint, to read again
}

// leads reports whether this rank writes reports, records and the run directory.
func (r *run) leads() bool { return r.ranks.Rank() == 0 }

func (r *run) warn(format string, args ...any) {
	if r.options.Warn != nil {
		r.options.Warn(fmt.Sprintf(format, args...))
	}
}

func (r *run) result(saved string) Result {
	return Result{Steps: r.state.Step, Finished: r.state.Step >= r.config.Steps, Terminated: r.history.terminated,
		Resumed: r.history.resumed, FirstLoss: r.state.FirstLoss, LastLoss: r.state.LastLoss,
		LeftOut: r.state.Spikes.Excluded(), Checkpoint: saved, Weights: r.state.Weights}
}

// begin opens the data and the run directory, reports the summary, and returns the checkpoint to
// resume from, or nil.
func (r *run) begin(ctx context.Context) (*checkpoint.Checkpoint, error) {
	world := r.ranks.World()
	// Rank 0 opens the plan first, and compares all shards with it. The other ranks look at a shard
	// only when they need it.
	var err error
	if r.leads() {
		r.history.heartbeat, err = record.NewHeartbeat(filesystem.Default(r.options.files), r.options.heartbeatPath(),
			r.options.Generation)
		if err == nil {
			err = r.open(ctx)
		}
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return nil, err
	}
	if err := collective.Broadcast(ctx, world, &r.start.device); err != nil {
		return nil, err
	}
	if !r.leads() {
		err = r.open(ctx)
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return nil, err
	}
	r.schedule = r.config.Schedule.Schedule()
	if err := r.sameRun(ctx); err != nil {
		return nil, err
	}
	if err := r.openSnapshots(ctx); err != nil {
		return nil, err
	}
	saved, err := r.newest(ctx)
	if err != nil {
		return nil, err
	}
	err = r.resumeFrom(saved)
	if err == nil && saved == nil && r.config.InitializeFrom != "" && r.leads() {
		r.start.initial, err = checkpoint.FindInitial(ctx, r.config.InitializeFrom, r.config.Model.Config, r.data.Plan,
			r.warn)
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return nil, err
	}
	if err := collective.Broadcast(ctx, world, &r.start.initial.Dir); err != nil {
		return nil, err
	}
	if r.options.Report != nil {
		r.options.Report(r.summary(saved))
	}
	if r.data.Plan.Tokenizer == nil {
		r.warn("the plan does not name the tokenizer of its shards, so an id beyond the model's vocabulary of %d is "+
			"only found when it is read; mula check finds the largest id", r.config.Model.VocabSize)
	}
	return saved, nil
}

// prepare creates the model and the optimizer, in their initial state or from the checkpoint, and
// opens the records at the checkpoint's position.
func (r *run) prepare(ctx context.Context, saved *checkpoint.Checkpoint) error {
	err := r.observe(ctx)
	if err == nil && r.leads() && r.start.peak == 0 {
		err = r.measure(ctx)
	}
	if err == nil {
		r.model, err = moe.NewParallel(r.config.Model.Config, r.device, r.config.Layout.parallel(r.ranks))
	}
	if err := collective.Agree(ctx, r.ranks.World(), err); err != nil {
		return err
	}
	r.model.SetRecompute(r.config.Recompute)
	r.model.SetActivations(r.config.activations())
	r.tensors = r.model.Config().Tensors()
	r.votes = votes.New(r.ranks, r.model.Config(), r.config.Layout.VirtualStages, r.config.BatchSize,
		len(r.data.Sources))
	r.votes.Slow = votes.SlowLimit{Factor: r.config.Log.SlowFactor, Steps: r.config.Log.SlowSteps}
	r.pipeline, err = pipeline.New(r.ranks.Mesh, r.ranks.Back, r.ranks.Embeddings, r.model,
		r.data.SequenceLength)
	if err := collective.Agree(ctx, r.ranks.World(), err); err != nil {
		return err
	}
	if r.config.Layout.CheckReplicasEvery > 0 {
		r.replicas = replicas.New(r.ranks.Mesh, r.model.Buckets())
	}
	if saved, err = r.restoreNewest(ctx, saved); err != nil {
		return err
	}
	if r.leads() {
		err = r.config.write(r.dir.FS, r.dir.Join(rundir.ConfigFile))
	}
	return r.restored(ctx, saved, false, err)
}

// restoreNewest restores a checkpoint, which may be nil, or the newest one before it that is not
// damaged, and returns the restored checkpoint. A damaged snapshot may have intact copies of its
// files on other hosts.
func (r *run) restoreNewest(ctx context.Context, saved *checkpoint.Checkpoint) (*checkpoint.Checkpoint, error) {
	for {
		err := r.restore(ctx, saved)
		if !checkpoint.IsDamage(err) {
			return saved, err
		}
		if saved.IsSnapshot() && r.history.snapshots.HashFiles() {
			r.warn("%s is damaged; looking for intact copies of its files: %v", saved.Name(), err)
		} else {
			r.refuse(checkpoint.Refused{Checkpoint: saved.Name(), Error: err.Error()})
		}
		if saved, err = r.newest(ctx); err != nil {
			return nil, err
		}
		if err := collective.Agree(ctx, r.ranks.World(), r.resumeFrom(saved)); err != nil {
			return nil, err
		}
		if r.options.Report != nil {
			r.options.Report(r.summary(saved))
		}
	}
}

// refuse records damaged checkpoints, and warns of them.
func (r *run) refuse(refused ...checkpoint.Refused) {
	for _, c := range refused {
		if !slices.Contains(r.history.refused, c) {
			r.history.refused = append(r.history.refused, c)
			if checkpoint.IsSnapshotName(c.Checkpoint) {
				r.warn("%s cannot be used; using an older state: %s", c.Checkpoint, c.Error)
				continue
			}
			r.warn("checkpoint %s is damaged; using an older one: %s", c.Checkpoint, c.Error)
		}
	}
}

// restored tells the observers that the run is in the state of the checkpoint, or in its initial
// state. failed is an error of this rank.
func (r *run) restored(ctx context.Context, saved *checkpoint.Checkpoint, rollback bool, failed error) error {
	for _, o := range r.observers {
		if failed == nil {
			failed = o.restored(saved, rollback)
		}
	}
	r.takePlan()
	return collective.Agree(ctx, r.ranks.World(), failed)
}

// takePlan sets the plan, the configuration and the arithmetic of the run to the current ones.
func (r *run) takePlan() {
	plan := r.data.Plan.Fingerprint()
	if r.state.Cursor.Plan != plan && r.state.Spikes != nil {
		r.state.Spikes.PlanFrom = r.state.Step
	}
	r.state.Cursor.Plan, r.state.Config, r.state.Arithmetic = plan, r.config.identity(), r.arithmetic()
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

// trainOn does the steps up to the end of the run, or up to a spike that requires a rollback.
func (r *run) trainOn(ctx context.Context) (*spikes.Spike, error) {
	batch := int64(r.config.BatchSize)
	batches, err := stream.New(ctx, r.data, stream.Options{From: r.state.Cursor.Position, To: r.config.Steps * batch,
		BatchSize: r.config.BatchSize, Rank: r.ranks.Reader(), World: r.ranks.Readers(),
		Hosts: r.ranks.Machines(), Prefetch: 2})
	if err != nil {
		return nil, err
	}
	defer batches.Close()
	r.clock.take() // the start is not part of a step
	for r.state.Step < r.config.Steps {
		r.history.heartbeat.Beat(record.SectionStep, r.state.Step)
		if stops, err := r.ranks.Sum(ctx, r.stopped()); err != nil {
			return nil, err
		} else if stops > 0 {
			r.history.terminated = stops < stopRequested
			break
		}
		metrics, err := r.step(ctx, batches)
		if err != nil {
			return nil, err
		}
		if metrics.Skipped != nil && r.config.Spikes.Action == spikes.RollBack {
			return metrics.Skipped, nil
		}
		progress := Progress{StepMetrics: metrics, Steps: r.config.Steps}
		for _, o := range r.observers {
			if err := o.stepped(ctx, &progress); err != nil {
				return nil, err
			}
		}
	}
	if _, err := r.advanceSave(ctx, true); err != nil {
		return nil, err
	}
	if r.history.saved != r.state.Step {
		_, err = r.save(ctx, false)
	}
	return nil, err
}

// due reports whether an action with interval every is due after stepsDone steps. All actions are
// due after the last step.
func due(stepsDone, every, steps int64) bool {
	return every > 0 && (stepsDone%every == 0 || stepsDone == steps)
}

// Summands of a rank that has a reason to stop. There are fewer ranks than stopRequested.
const (
	stopTerminated = 1
	stopRequested  = 1 << 32
)

// stopped returns 0 if this rank has no reason to stop.
func (r *run) stopped() int64 {
	select {
	case <-r.options.Stop:
		if f := r.options.Terminated; f != nil && f() {
			return stopTerminated
		}
		return stopRequested
	default:
		return 0
	}
}

// step trains on the next batch.
func (r *run) step(ctx context.Context, batches *stream.Stream) (record.StepMetrics, error) {
	start := time.Now()
	if f := r.options.atStep; f != nil {
		f(r)
	}
	defer r.clock.begin(r.clock.begin(reading))
	if err := r.countRows(ctx, r.take(batches)); err != nil {
		return record.StepMetrics{}, err
	}
	r.clock.begin(computing)
	m := record.StepMetrics{
		Step: r.state.Step, First: r.state.Cursor.Position, Samples: r.batch.samples,
		Tokens:       int64(r.batch.samples) * int64(r.data.SequenceLength),
		LearningRate: r.schedule.LearningRate(r.state.Step), SourceLoss: map[string]float64{},
		SourceSamples: map[string]int{},
	}
	if r.batch.rows.Counted {
		m.Targets = new(r.batch.targets)
	}
	if m.Samples > 0 { // a step whose positions are all skipped does not change the weights
		if err := r.gradients(ctx, &m); err != nil {
			return record.StepMetrics{}, err
		}
	}
	// Before the update, which overwrites the copies of weights that this rank does not own.
	if err := r.checkReplicas(ctx, due(r.state.Step+1, r.config.Layout.CheckReplicasEvery, 0)); err != nil {
		return record.StepMetrics{}, err
	}
	switch {
	case m.Skipped != nil && r.config.Spikes.Action == spikes.RollBack:
		return m, nil // the rest of the step is not needed
	case m.Skipped != nil:
		if err := r.skip(m.Skipped); err != nil {
			return record.StepMetrics{}, err
		}
	case r.batch.targets > 0: // samples without unmasked targets do not change the weights either
		limit := r.config.Optimizer.Clip
		if r.config.Optimizer.ClipAfterWarmup && r.state.Step < r.schedule.Warmup {
			limit = 0
		}
		every := r.config.Log.UpdateRatioEvery
		measured := every > 0 && m.Step%every == 0
		r.optimizer.Measure(measured)
		if err := r.optimizer.Step(ctx, m.LearningRate, optimizer.ClipFactor(m.GradNorm, limit)); err != nil {
			return record.StepMetrics{}, fmt.Errorf("step %d: %w", m.Step, err)
		}
		if measured {
			m.UpdateRatio = r.optimizer.UpdateRatios(r.tensors)
		}
		if err := r.balance(ctx); err != nil {
			return record.StepMetrics{}, fmt.Errorf("step %d: %w", m.Step, err)
		}
		if r.optimizer.CurvatureDue() {
			if err := r.curvature(ctx, m.Tokens, r.batch.targets, limit); err != nil {
				return record.StepMetrics{}, err
			}
		}
		if r.state.Updates == 0 || r.state.FirstLoss == 0 { // 0 after Import
			r.state.FirstLoss = m.Loss
		}
		r.state.LastLoss = m.Loss
		r.state.Tokens += m.Tokens
		r.state.Spikes.Update(r.config.Spikes.Window, m.Loss, m.GradNorm)
	}
	r.state.Step++
	r.state.Updates = r.optimizer.Updates
	r.state.Cursor.Position += int64(r.config.BatchSize)

	now := time.Now()
	m.Seconds, m.Time = now.Sub(start).Seconds(), record.Timestamp(now)
	if m.Seconds > 0 { // 0 with a coarse clock and a step without samples; JSON has no 0/0
		m.TokensPerSecond = float64(m.Tokens) / m.Seconds
		m.MFU = m.TokensPerSecond * r.config.Model.FLOPsPerToken(r.data.SequenceLength) / r.start.peak
	}
	return m, nil
}

// balances reports whether steps update the correction biases of routers.
func (r *run) balances() bool {
	speed := r.config.RouterBias.UpdateSpeed
	return speed != nil && *speed > 0 && len(r.model.Biases()) > 0
}

// balance updates the correction biases of this rank's routers from the choices of the step, summed
// over the ranks that hold the same routers.
func (r *run) balance(ctx context.Context) error {
	if !r.balances() {
		return nil
	}
	experts := r.config.Model.Experts
	sums := make([]int64, len(r.model.Biases())*experts)
	copy(sums, r.batch.experts) // empty without rows
	if err := comm.AllReduce(ctx, r.ranks.Group(comm.Data), sums); err != nil {
		return &collective.BrokenError{Err: fmt.Errorf("adding the tokens of experts over ranks: %w", err)}
	}
	return r.model.UpdateBiases(ctx, slices.Collect(slices.Chunk(sums, experts)), *r.config.RouterBias.UpdateSpeed)
}

// take takes the next batch from the stream.
func (r *run) take(batches *stream.Stream) error {
	record, err := batches.Next()
	if err != nil {
		return fmt.Errorf("step %d: %w", r.state.Step, err)
	}
	defer record.Release()
	batch, err := stream.NewBatch(record)
	if err != nil {
		return fmt.Errorf("step %d: %w", r.state.Step, err)
	}
	r.batch.rows.Clear()
	r.batch.origins = r.batch.origins[:0]
	for i := range batch.Rows() {
		if r.state.Spikes.Excludes(batch.Position(i)) {
			continue
		}
		r.batch.rows.Tokens = batch.AppendTokens(r.batch.rows.Tokens, i)
		r.batch.rows.End(batch.DocumentStarts(i), batch.Length(i))
		if f := r.options.badTokens; f != nil && f(r.ranks.Rank(), r.state.Step) {
			r.batch.rows.Tokens[len(r.batch.rows.Tokens)-1] = math.MaxUint32
		}
		r.batch.origins = append(r.batch.origins,
			votes.Row{Position: batch.Position(i), Source: batch.Source(i),
				Targets: r.batch.rows.Targets[len(r.batch.origins)]})
	}
	if len(r.batch.origins) > 0 {
		r.batch.trained.Note(r.state.Step, r.batch.origins[0].Position, r.batch.rows.Row(0))
	}
	return nil
}

// countRows exchanges the numbers of rows and of unmasked targets of the current step. err is this
// rank's error in reading its rows.
func (r *run) countRows(ctx context.Context, err error) error {
	b, n := &r.batch, int64(len(r.batch.origins))
	if err != nil {
		n = -1
	}
	full := int64(r.config.BatchSize / r.ranks.Readers())
	missing, lost := r.ranks.Sum(ctx, full-n) // more than all rows if a rank has failed
	if lost != nil {
		return errors.Join(err, lost)
	}
	if missing == 0 { // the usual case, without skipped positions
		return r.fullRows(ctx, int(full))
	}
	counts, lost := r.ranks.All(ctx, n)
	if lost != nil {
		return errors.Join(err, lost)
	}
	if slices.Min(counts) < 0 {
		return collective.Agree(ctx, r.ranks.World(), err)
	}
	most := slices.Max(counts)
	if r.ranks.Size(comm.EP) > 1 { // a rank without rows still computes with its experts
		n = most
	}
	b.passes, b.mostPasses = r.microBatches(int(n)), r.microBatches(int(most))
	b.samples, b.before = 0, 0
	stage := r.ranks.Shape.Group(r.ranks.Rank(), comm.Data) // other stages have the same rows
	for reader := range r.ranks.Readers() {
		rows := counts[stage[reader*r.ranks.Sequence.Size()]]
		if reader < r.ranks.Reader() {
			b.before += rows
		}
		b.samples += int(rows)
	}
	return r.countTargets(ctx)
}

// microBatches returns the number of micro-batches of a rank's rows.
func (r *run) microBatches(rows int) int {
	return (rows + r.config.MicroBatchSize - 1) / r.config.MicroBatchSize
}

// fullRows sets the numbers of rows if every rank has all its rows.
func (r *run) fullRows(ctx context.Context, rows int) error {
	b := &r.batch
	b.passes = r.microBatches(rows)
	b.mostPasses = b.passes
	b.samples, b.before = r.config.BatchSize, int64(r.ranks.Reader()*rows)
	return r.countTargets(ctx)
}

// countTargets exchanges the numbers of unmasked targets.
func (r *run) countTargets(ctx context.Context) (err error) {
	b := &r.batch
	if b.targets = int64(b.samples) * int64(r.data.SequenceLength); !b.rows.Counted {
		return nil
	}
	own := int64(0)
	for _, row := range b.origins {
		own += row.Targets
	}
	b.targets, err = r.ranks.Sum(ctx, own)
	b.targets /= int64(r.ranks.Ranks() / r.ranks.Readers()) // ranks with the same rows
	return err
}

// gradients computes losses and gradients of the step. It sets m.Skipped if they are a spike.
func (r *run) gradients(ctx context.Context, m *record.StepMetrics) error {
	err := r.backward(ctx, m)
	if err == nil {
		if m.GradNorm, err = r.optimizer.GradientNorm(ctx); err != nil {
			return fmt.Errorf("step %d: %w", m.Step, err)
		}
		if !finite(m.GradNorm) {
			err = r.badGradient(ctx)
		}
	}
	bad := (*notFiniteError)(nil)
	switch {
	case err == nil && r.batch.targets == 0: // the gradient has only the router's losses
	case err == nil:
		m.Skipped = r.state.Spikes.Check(r.config.Spikes, m.Loss, m.GradNorm)
	case r.config.Spikes.Action != spikes.None && errors.As(err, &bad):
		m.Skipped = &spikes.Spike{What: bad.what, NotFinite: true}
		m.Clear(bad.what)
	default:
		return err
	}
	return nil
}

// backward computes the losses of the step, and its gradients summed over ranks. It hashes exactly
// the tokens that the model gets. Only rank 0 gets the metrics other than the losses.
func (r *run) backward(ctx context.Context, m *record.StepMetrics) error {
	r.votes.Rows = r.votes.Rows[:0]
	options := moe.BackwardOptions{Targets: max(1, r.batch.targets), Tokens: m.Tokens, Loss: moe.LossOptions{
		Aux: r.config.AuxLoss.Form, AuxCoefficient: r.config.AuxLoss.Coefficient,
		ZCoefficient: r.config.ZLoss.Coefficient}}
	options.Loss.PredictionCoefficient = r.config.PredictionLoss.coefficient()
	var predictions []votes.Prediction
	if r.pipeline.Last() {
		predictions = make([]votes.Prediction, r.config.Model.PredictionLayers)
	}
	err := r.sumGradients(ctx, options, func(rows []votes.Row, stats moe.Stats) {
		if len(stats.RowLoss) > 0 { // of the last layers
			for i, row := range rows {
				row.Loss, row.Hash = stats.RowLoss[i], fingerprint.SampleHash(r.batch.rows.Row(len(r.votes.Rows)))
				r.votes.Rows = append(r.votes.Rows, row)
			}
		}
		share := float64(stats.Tokens) / float64(m.Tokens)
		m.AuxLoss += stats.Aux * share
		m.ZLoss += stats.Z * share
		m.ExpertTokens = addCounts(m.ExpertTokens, stats.ExpertCounts)
		m.AddRouters(stats.RouterEntropy, stats.Dropped, share)
		for k := range stats.PredictionLoss {
			predictions[k].Loss += stats.PredictionLoss[k]
			predictions[k].Targets += stats.PredictionTargets[k]
		}
	})
	if collective.IsBroken(err) {
		return err
	}
	if r.balances() {
		r.batch.experts = slices.Concat(m.ExpertTokens...) // of this rank; rank 0 gets the sums below
	}
	parts, lost := r.joinRowLosses(ctx)
	if lost != nil {
		return lost
	}
	own := votes.Own{Err: err, Tensor: r.sharding.TakeBad(), NonFinite: r.pipeline.TakeNonFinite(parts),
		Seconds: r.clock.take(), Predictions: predictions}
	if f := r.options.vote; f != nil {
		f(r.ranks.Rank(), &own)
	}
	if err := r.votes.Exchange(ctx, m, own); err != nil {
		return err
	}
	r.clock.begin(updating)
	r.warnSlow(m)
	if !finite(m.Loss) || !finite(m.AuxLoss) || !finite(m.ZLoss) {
		if err := r.badLoss(ctx, m); err != nil {
			return err
		}
	}
	m.Loss /= float64(max(1, r.batch.targets))
	r.batch.hasher = r.votes.Hasher
	for source, sums := range r.votes.Sources {
		name := r.data.Sources[source].Name
		if sums.Samples > 0 {
			m.SourceSamples[name] += int(sums.Samples)
		}
		if sums.Targets > 0 {
			m.SourceLoss[name] = sums.Loss / float64(sums.Targets)
		}
	}
	return nil
}

// joinRowLosses adds the losses of the parts of each row that ranks share. The first of these ranks
// gets the sums, and the others have no rows to report. It returns this rank's parts; nil if it has
// complete rows.
func (r *run) joinRowLosses(ctx context.Context) ([]float64, error) {
	if r.ranks.Sequence.Size() == 1 || !r.pipeline.Last() {
		return nil, nil
	}
	rows := r.votes.Rows
	var own []float64
	for _, row := range rows {
		own = append(own, row.Loss)
	}
	sums := slices.Clone(own)
	if err := comm.AllReduce(ctx, r.ranks.Sequence, sums); err != nil {
		return nil, &collective.BrokenError{Err: fmt.Errorf("step %d: adding losses of the ranks that share "+
			"sequences: %w", r.state.Step, err)}
	}
	for i := range rows {
		rows[i].Loss = sums[i]
	}
	if r.ranks.Sequence.Rank() > 0 {
		r.votes.Rows = rows[:0]
	}
	return own, nil
}

// sumGradients computes the gradients of the step, summed over the rows of all ranks. It calls each
// after every micro-batch of this rank. During the last pass, the gradients of a bucket are summed
// over ranks while the gradients of the next buckets are computed.
//
// If a batch cannot be computed, this rank continues without rows until the end of the step, where
// all ranks exchange their errors.
func (r *run) sumGradients(ctx context.Context, options moe.BackwardOptions,
	each func(rows []votes.Row, stats moe.Stats)) error {
	if r.batch.passes == 0 { // otherwise the first pass sets the gradients
		r.model.ZeroGradients()
	}
	r.batch.pending = r.batch.pending[:0]
	r.sharding.TakeBad()
	r.pipeline.TakeNonFinite(nil)
	step := pipeline.Step{Number: r.state.Step, Rows: &r.batch.rows, MicroBatch: r.config.MicroBatchSize,
		Passes: r.batch.passes,
		Before: r.batch.before, JitterSeed: stepSeed(r.config.Seed+jitterSeeds, r.state.Step),
		Position: func(row int) int64 { return r.batch.origins[row].Position }}
	if options.Loss.Aux == moe.AuxGlobal {
		step.SumCounts, step.MostPasses = r.sumCounts, r.batch.mostPasses
	}
	if r.ranks.Ranks() > 1 && !r.options.late {
		step.Done = func(bucket int) { r.reduce(ctx, bucket) }
	}
	failed := r.pipeline.Backward(ctx, step, options,
		func(first, end int, stats moe.Stats) { each(r.batch.origins[first:end], stats) })
	if f := r.options.passed; f != nil {
		f(r)
	}
	if f := r.options.AfterBackward; f != nil {
		f(r.ranks.Rank(), r.state.Step)
	}
	if r.ranks.Ranks() == 1 || collective.IsBroken(failed) {
		return failed
	}
	for bucket := len(r.batch.pending); bucket < len(r.model.Buckets()); bucket++ {
		r.reduce(ctx, bucket)
	}
	for i, p := range r.batch.pending {
		if err := p.Wait(); err != nil {
			r.batch.pending = r.batch.pending[i:]
			return &collective.BrokenError{Err: errors.Join(failed,
				fmt.Errorf("step %d: summing gradients: %w", r.state.Step, err))}
		}
		p.transfers.Join()
	}
	r.batch.pending = r.batch.pending[:0]
	return failed
}

// sumCounts adds the tokens of each expert over all ranks of this rank's pipeline stage.
func (r *run) sumCounts(ctx context.Context, counts [][]int64) error {
	sums := slices.Concat(counts...)
	if len(sums) == 0 {
		return nil
	}
	if err := comm.AllReduce(ctx, r.ranks.Stage, sums); err != nil {
		return fmt.Errorf("adding the tokens of experts over ranks: %w", err)
	}
	for _, layer := range counts {
		sums = sums[copy(layer, sums):]
	}
	return nil
}

// A reduction is a sum of gradients over ranks, and its copies from and to the device.
type reduction struct {
	*comm.Pending
	transfers xpu.Transfers
}

// reduce starts the sum of a bucket's gradients over ranks. It waits only for the commands that the
// device has got so far, which compute these gradients.
func (r *run) reduce(ctx context.Context, bucket int) {
	if f := r.options.reducing; f != nil {
		f(bucket)
	}
	transfers := r.device.Transfers()
	pending := r.ranks.Group(comm.Data).Start(ctx, func(ctx context.Context) error {
		if f := r.options.BeforeSum; f != nil {
			if err := f(r.ranks.Rank(), r.state.Step, r.model.Buckets()[bucket]); err != nil {
				return err
			}
		}
		return r.sharding.Reduce(ctx, bucket, transfers)
	})
	r.batch.pending = append(r.batch.pending, reduction{pending, transfers})
}

func addCounts(sum, counts [][]int64) [][]int64 {
	if sum == nil {
		for _, layer := range counts {
			sum = append(sum, slices.Clone(layer)) // the model owns counts
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

// checkReplicas adds the digests of this rank's weights, which the step has used or a checkpoint
// will contain. If compare is true, it compares the digests since the last comparison with the
// digests of the replicas. All ranks call it with the same compare.
func (r *run) checkReplicas(ctx context.Context, compare bool) error {
	if r.replicas == nil {
		return nil
	}
	err := r.replicas.Add(ctx, r.device, r.state.Step)
	if err == nil && compare {
		var found *replicas.Difference
		if found, err = r.replicas.Compare(ctx); found != nil {
			return r.blame(found.Rank, record.FailureReplica, found)
		}
	}
	if err != nil {
		return fmt.Errorf("step %d: comparing replicas: %w", r.state.Step, err)
	}
	return nil
}

// curvature estimates the curvature of the loss on the rows of the last step, which have the given
// numbers of tokens and unmasked targets. It uses targets that the model draws; the run's seed and
// the step number determine them. An estimate that is not finite is ignored. If the model is at
// fault, the next step reports an error.
func (r *run) curvature(ctx context.Context, tokens, targets int64, limit float64) error {
	options := moe.BackwardOptions{Targets: targets, Tokens: tokens, SampleTargets: true,
		SampleSeed: stepSeed(r.config.Seed, r.state.Step),
		Loss:       moe.LossOptions{PredictionCoefficient: r.config.PredictionLoss.coefficient()}}
	if err := r.sumGradients(ctx, options, func([]votes.Row, moe.Stats) {}); err != nil {
		return fmt.Errorf("curvature estimate: %w", err)
	}
	norm, err := r.optimizer.GradientNorm(ctx)
	if err != nil {
		return fmt.Errorf("step %d: curvature estimate: %w", r.state.Step, err)
	}
	if !finite(norm) {
		r.warn("step %d: the curvature estimate is NaN or Inf and is not used", r.state.Step)
		return nil
	}
	r.optimizer.UpdateCurvature(optimizer.ClipFactor(norm, limit), targets)
	return nil
}

// jitterSeeds is added to the seed of a run for the noise of routers.
const jitterSeeds = 0x6a09e667f3bcc908

// stepSeed returns the seed for random numbers of a step. seed is the seed of the run, for drawing
// targets after the step.
func stepSeed(seed uint64, step int64) uint64 {
	var generator rand.PCG
	generator.Seed(seed, uint64(step))
	return generator.Uint64()
}

// save writes a checkpoint, removes old checkpoints, and returns the directory of the new
// checkpoint. In the background, it only begins to write the checkpoint; see advanceSave.
func (r *run) save(ctx context.Context, background bool) (string, error) {
	defer r.clock.begin(r.clock.begin(saving))
	r.history.heartbeat.Beat(record.SectionCheckpoint, r.state.Step)
	if err := r.checkState(ctx); err != nil {
		return "", err
	}
	err := r.optimizer.Average(ctx, true)
	if err != nil {
		return "", err
	}
	defer r.optimizer.Average(ctx, false)
	dir := r.dir.Join(checkpoint.DirName)
	shard := checkpoint.NewShard(r.model, r.optimizer)
	options := checkpoint.Options{Tokenizer: r.start.tokenizer, Writers: r.config.Checkpoint.Writers, FS: r.dir.FS}
	if background {
		r.saving, err = checkpoint.Start(ctx, r.ranks.World(), dir, r.state, shard, options, &r.snapshot)
		return "", r.notSaved(ctx, err)
	}
	if err := checkpoint.Save(ctx, r.ranks.World(), dir, &r.state, shard, options); err != nil {
		if ctx.Err() == nil && r.history.saved >= 0 {
			err = fmt.Errorf("%w; the newest complete checkpoint is %s; run the same command to resume from it", err,
				checkpoint.Name(r.history.saved))
		}
		return "", err
	}
	return r.saved(ctx, r.state), nil
}

// checkState verifies what the state of the run was computed from, before it is saved: the weights
// of replicas, and samples since the last time, which it reads again. It syncs the records.
func (r *run) checkState(ctx context.Context) error {
	if err := r.checkReplicas(ctx, true); err != nil {
		return err
	}
	err := r.batch.trained.Compare(ctx, r.data)
	for _, o := range r.observers {
		err = errors.Join(err, o.saving())
	}
	return collective.Agree(ctx, r.ranks.World(), err)
}

// notSaved returns nil and warns if a checkpoint could not be written in the background: the run
// continues, and the next checkpoint is written again. If the ranks are lost, it returns the error.
func (r *run) notSaved(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil || errors.Is(err, comm.ErrPeerLost) {
		return err
	}
	newest := "there is no older one"
	if r.history.saved >= 0 {
		newest = "the newest complete one is " + checkpoint.Name(r.history.saved)
	}
	r.warn("%v; the run continues, and %s", err, newest)
	return nil
}

// advanceSave continues a checkpoint in the background, if all ranks have done their part of it. It
// returns the directory if the checkpoint is complete. If wait is true, it waits for the end of the
// checkpoint. All ranks call it.
func (r *run) advanceSave(ctx context.Context, wait bool) (path string, err error) {
	defer r.clock.begin(r.clock.begin(saving))
	for r.saving != nil {
		if wait {
			r.history.heartbeat.Beat(record.SectionCheckpoint, r.state.Step)
		} else {
			writing := int64(1)
			if r.saving.Done() {
				writing = 0
			}
			if writing, err = r.ranks.Sum(ctx, writing); err != nil || writing > 0 {
				return "", err
			}
		}
		finished, err := r.saving.Advance(ctx, r.ranks.World())
		if err != nil || finished {
			state := r.saving.State
			r.saving.Close()
			r.saving = nil
			if err != nil {
				return "", r.notSaved(ctx, err)
			}
			return r.saved(ctx, state), nil
		}
		if !wait {
			break
		}
	}
	return "", nil
}

// saved follows a complete checkpoint: it removes old ones, and returns the directory of the new
// one.
func (r *run) saved(ctx context.Context, saved checkpoint.State) string {
	dir := r.dir.Join(checkpoint.DirName)
	r.history.saved = saved.Step
	if saved.Step == r.state.Step {
		r.state.Weights = saved.Weights
	}
	r.accept(saved.Step)
	if s := r.history.snapshots; s != nil {
		if err := s.RemoveUntil(saved.Step); err != nil {
			r.warn("old snapshots could not be removed: %v", err)
		}
	}
	if r.leads() {
		keep := checkpoint.Kept{Newest: r.config.Checkpoint.Keep, BackTo: r.backTo(),
			ModelEvery: r.config.Checkpoint.KeepEvery}
		if err := checkpoint.Prune(r.dir.FS, dir, keep, r.history.refused); err != nil {
			r.warn("old checkpoints could not be removed: %v", err)
		}
	}
	r.history.refused = nil
	path := filepath.Join(dir, checkpoint.Name(saved.Step))
	if r.history.copies != nil {
		r.history.copies.start(ctx, path)
	}
	return path
}

// close closes everything that begin and prepare have opened. If the run has lost another rank, it
// leaves the plan and the device to the next call of Run.
func (r *run) close(lost bool) {
	for _, o := range slices.Backward(r.observers) {
		o.close()
	}
	if r.saving != nil {
		r.saving.Close()
	}
	r.ranks.Close() // ends communication before the device that it uses
	if r.options.Kept != nil && lost {
		r.keep()
	}
	if r.device != nil {
		r.device.Close()
	}
	if r.dir != nil {
		r.dir.Close()
	}
	if r.data != nil {
		r.data.Close()
	}
}
