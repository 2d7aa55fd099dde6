package train

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"mula/blend"
	"mula/internal/filesystem"
	"mula/internal/machine"
	"mula/internal/strictyaml"
	"mula/moe"
	"mula/shards/verifier"
	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/devices"
	"mula/train/optimizer"
	"mula/train/rundir"
	"mula/train/samples"
	"mula/train/spikes"
	"mula/xpu"
	"mula/xpu/comm"
)

// open opens the data and the device, and on the first rank the run directory and the tokenizer.
func (r *run) open(ctx context.Context) (err error) {
	r.takeKept()
	if r.data == nil {
		if err := r.openData(ctx); err != nil {
			return err
		}
	}
	plan := r.data.Plan
	if r.config, err = r.config.resolve(plan); err != nil {
		return err
	}
	r.batch.rows = samples.NewRows(plan.SequenceLength, plan.Traits().Padded, r.config.Attention)
	if err := summarize(r.config, plan, nil).fits(machine.TotalMemory(), r.ranks.OnHost()); err != nil {
		return err
	}
	if err := r.openDevice(ctx); err != nil {
		return err
	}
	if r.leads() {
		if r.start.tokenizer, err = readTokenizer(r.config.Tokenizer, plan); err != nil {
			return err
		}
		openDir := rundir.Open
		if r.options.DryRun {
			openDir = rundir.Inspect
		}
		if r.dir, err = openDir(r.options.files, r.config.Output); err != nil {
			return err
		}
	} else {
		r.dir = &rundir.Dir{Path: r.config.Output, FS: filesystem.Default(r.options.files)}
	}
	return nil
}

// openData opens the plan.
func (r *run) openData(ctx context.Context) error {
	plan, err := r.config.ReadPlan()
	if err != nil {
		return err
	}
	options := blend.OpenOptions{Waiting: func(message string) { r.warn("%s", message) }, Reverify: -1}
	if s := r.config.ReverifySeconds; s > 0 {
		options.Reverify = time.Duration(s) * time.Second
	}
	if options.Verify, err = verifier.Parse(r.config.Verify); err != nil {
		return err
	}
	if v := options.Verify; v != nil && r.options.ranksHere > 1 && !r.leads() {
		options.Verify = nil // the first rank verifies for all ranks in this process
	} else if v != nil && r.options.ranksHere <= 1 {
		v.Rank, v.World = r.ranks.Rank(), r.ranks.Ranks()
	}
	options.Unsurveyed = !r.leads() // the first rank looks at all shards
	if r.data, err = blend.Open(ctx, plan, options); err != nil {
		return err
	}
	if plan.Provisional() && r.leads() && (options.Verify == nil || !options.Verify.Complete) {
		r.warn("%s is provisional: shards without a manifest were sampled, not hashed. Complete it with `mula blend "+
			"--complete %s`, now or later, or with `verify: complete`; the run resumes with the complete plan",
			r.config.Plan, r.config.Plan)
	}
	return nil
}

// openDevice opens the device that the first rank has chosen. It fails if the device has too little
// memory.
func (r *run) openDevice(ctx context.Context) (err error) {
	number, onHost := r.ranks.NumberOnHost(), r.ranks.OnHost()
	options := devices.Options{Threads: r.ranks.Threads(r.config.Threads, r.options.ranksHere),
		Precision: r.config.Precision,
		Number:    number, Ranks: onHost}
	if r.takeDevice(options) {
		return r.fitsDevice()
	}
	sharing := onHost
	if f := r.options.newDevice; f != nil {
		r.device, err = f(r.ranks.Rank(), options.Threads, options.Precision)
	} else {
		if r.leads() {
			if r.start.device, r.start.deviceWhy, err = devices.Choose(ctx, r.config.Device); err != nil {
				return err
			}
		}
		r.device, sharing, err = devices.Open(ctx, r.start.device, options)
	}
	if err != nil {
		return err
	}
	r.opened = openedDevice{options, sharing}
	return r.fitsDevice()
}

// fitsDevice returns an error if the run needs more than the memory of its device.
func (r *run) fitsDevice() error {
	return summarize(r.config, r.data.Plan, r.device).fitsDevice(r.device.Capacity(), r.opened.sharing)
}

// readTokenizer reads the tokenizer.json for checkpoints and compares it with the plan's tokenizer.
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
		return nil, fmt.Errorf("tokenizer %s has SHA-256 %.16s…, but the plan's shards were made with %.16s…; name "+
			"that tokenizer, or remove the field", path, hash, p.Tokenizer.SHA256)
	}
	return data, nil
}

// sameRun returns an error if ranks have different plans, configurations or arithmetic, because
// their weights would differ.
func (r *run) sameRun(ctx context.Context) error {
	type what struct {
		Plan, Arithmetic string
		Fields           map[string]string
	}
	own := what{r.data.Plan.Fingerprint(), r.deviceArithmetic(), strictyaml.Fields(r.config)}
	for _, name := range []string{"plan", "output", "tokenizer", "initialize_from", "threads", "metrics_listen"} {
		// may differ between machines
		delete(own.Fields, name)
	}
	first := own
	if err := collective.Broadcast(ctx, r.ranks.World(), &first); err != nil {
		return err
	}
	var err error
	switch {
	case own.Plan != first.Plan:
		err = fmt.Errorf("this rank has plan %.16s…, but rank 0 has plan %.16s…; use the same file on all ranks",
			own.Plan, first.Plan)
	case own.Arithmetic != first.Arithmetic:
		err = fmt.Errorf("this rank has the arithmetic of %s, but rank 0 has the arithmetic of %s; run on machines of "+
			"one kind", own.Arithmetic, first.Arithmetic)
	}
	for _, name := range slices.Sorted(maps.Keys(first.Fields)) {
		if err == nil && own.Fields[name] != first.Fields[name] {
			err = fmt.Errorf("this rank has %s %s, but rank 0 has %s; use the same train.yaml on all ranks", name,
				own.Fields[name], first.Fields[name])
		}
	}
	return collective.Agree(ctx, r.ranks.World(), err)
}

// resumeFrom sets the state to the state of a checkpoint, or to the state before the first step. It
// returns an error if the run cannot resume from the checkpoint.
func (r *run) resumeFrom(saved *checkpoint.Checkpoint) error {
	if saved == nil {
		r.state = r.newState()
		return nil
	}
	if r.state = saved.State; !saved.IsSnapshot() {
		r.history.saved = saved.State.Step
	}
	if r.state.Spikes == nil {
		r.state.Spikes = spikes.NewState(r.config.Spikes)
	}
	if err := r.state.CheckConfig(r.config.identity(), strictyaml.OldNames(&Config{})); err != nil {
		return fmt.Errorf("%s: %w", saved.Dir, err)
	}
	if err := saved.CheckPlan(r.data.Plan, r.config.Plan, r.config.PlanChange == acceptPlanChange); err != nil {
		return err
	}
	if want := r.state.Step * int64(r.config.BatchSize); r.state.Cursor.Position != want {
		return fmt.Errorf("%s has position %d after %d steps of %d samples; position %d is expected", saved.Dir,
			r.state.Cursor.Position, r.state.Step, r.config.BatchSize, want)
	}
	if a := r.arithmetic(); a != r.state.Arithmetic {
		r.warn("%s was computed with the arithmetic of %s, and this device has %s; the run continues, but its last "+
			"bits will differ", saved.Name(), r.state.Arithmetic, a)
	}
	return nil
}

// newState is the state before the first step.
func (r *run) newState() checkpoint.State {
	return checkpoint.State{Cursor: blend.Cursor{Plan: r.data.Plan.Fingerprint()},
		SequenceLength: r.data.SequenceLength,
		Tokenizer:      r.data.Plan.TokenizerHash(), Seed: r.config.Seed, Spikes: spikes.NewState(r.config.Spikes),
		Config: r.config.identity()}
}

// arithmetic describes what determines the last bits of a run: the device's rounding, the model's
// order of sums, and the layout of several ranks. Checkpoints of the model's first order do not
// have the order.
func (r *run) arithmetic() string {
	text := r.deviceArithmetic()
	if s := r.ranks.Shape; s.Size(comm.Data) > 1 { // pipeline stages do not change the result
		text += fmt.Sprintf(", dp %d, ep %d", s.Size(comm.ExpertDP), s.Size(comm.EP))
		if tp := s.Size(comm.TP); tp > 1 {
			text += fmt.Sprintf(", tp %d", tp)
		}
		if cp := r.config.Layout.CP; cp > 1 {
			text += fmt.Sprintf(", cp %d", cp)
		}
		text += r.config.Layout.orderOfSums()
	}
	if r.config.Layout.Norm == reduceNorms {
		text += ", exact norms"
	}
	return text
}

// deviceArithmetic is the part of arithmetic that the device determines. Blocks of logits of a
// processor's size are not named, so that earlier checkpoints of processors have the same text.
func (r *run) deviceArithmetic() string {
	text := fmt.Sprintf("%s, order of sums %d", r.device.Arithmetic(), moe.OrderOfSums)
	if n := r.config.logitsTokens(r.device); n != moe.LogitsTokens(r.config.Model.VocabSize, 0, 0) {
		text += fmt.Sprintf(", logits in blocks of %d", n)
	}
	return text
}

func (r *run) summary(saved *checkpoint.Checkpoint) Summary {
	s := summarize(r.config, r.data.Plan, r.device)
	s.DeviceWhy = r.start.deviceWhy
	s.Scratch = devices.ScratchBytes(r.start.device, r.device, r.config.Model.Config, r.data.SequenceLength)
	if r.ranks.Ranks() > 1 {
		s.Transport = r.ranks.World().Name()
	}
	if saved != nil {
		s.Resumed, s.NextStep = saved.Name(), saved.State.Step
	}
	return s
}

// measure measures the peak of one device, for the remaining steps. All ranks use the same peak.
func (r *run) measure(ctx context.Context) error {
	n, length := float64(r.ranks.Ranks()), r.data.SequenceLength
	tokens := float64(r.config.Steps-r.state.Step) * (float64(r.config.BatchSize) * float64(length))
	peak, err := devices.MeasurePeak(ctx, r.device, tokens*r.config.Model.FLOPsPerToken(length)/n)
	r.start.peak = peak * n
	return err
}

// restore sets the weights and the optimizer to the checkpoint, or to their initial state. An error
// for which [checkpoint.IsDamage] is true leaves them undefined, and an older checkpoint can be
// restored.
func (r *run) restore(ctx context.Context, saved *checkpoint.Checkpoint) error {
	world := r.ranks.World()
	r.replicas.Begin() // other weights
	if r.optimizer == nil || saved == nil {
		r.optimizer.Free() // before the new optimizer allocates memory
		r.optimizer = nil
		if err := r.newOptimizer(ctx); err != nil {
			return err
		}
	}
	if saved == nil {
		return r.initialize(ctx)
	}
	if err := checkpoint.NewShard(r.model, r.optimizer).Load(ctx, world, saved); err != nil {
		return err
	}
	r.optimizer.Updates = r.state.Updates
	if r.device.Precision().Weights() == xpu.Float32 {
		return nil
	}
	return r.optimizer.WriteWeights(ctx) // an averaging optimizer saves a model of other weights
}

// initialize sets the weights to random weights, or to the weights of initialize_from.
func (r *run) initialize(ctx context.Context) error {
	model, world := r.model, r.ranks.World()
	var err error
	if r.start.initial.Dir != "" {
		err = r.start.initial.Load(ctx, model)
		var buffer, weight []float32
		for _, p := range model.Parameters() {
			if err == nil {
				weight, err = xpu.Numbers(ctx, r.device, p.Weight, &buffer)
			}
			if err == nil {
				err = moe.CheckFinite(r.start.initial.Dir, p.Name, 0, weight)
			}
		}
		if err != nil {
			err = fmt.Errorf("initialize_from: %w", err)
		}
		if collective.IsBroken(err) {
			return err
		}
	} else {
		model.Init(r.config.Seed)
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return err
	}
	r.optimizer.ReadWeights()
	if r.state.Spikes != nil && r.start.initial.Dir == "" {
		r.state.Spikes.Began = spikes.BeganBySeed
	} else if r.state.Spikes != nil {
		r.state.Spikes.Began, err = checkpoint.NewShard(model, r.optimizer).WeightsHash(ctx, world)
	}
	return err
}

// newOptimizer creates the optimizer in its initial state.
func (r *run) newOptimizer(ctx context.Context) error {
	c, targets := r.config.Optimizer, int64(r.config.BatchSize)*int64(r.data.SequenceLength)
	r.sharding = optimizer.NewSharding(r.ranks.Mesh, r.ranks.Nested, r.config.Layout.Optimizer,
		c.Name.NeedsWholeTensors(), r.config.Layout.sent(), r.device, r.model.Parameters(), r.model.Buckets())
	r.sharding.ReducesSums = r.config.Layout.Norm == reduceNorms
	sizes := make([]int, len(r.tensors))
	r.sharding.Slices = make([]int, len(r.tensors))
	for i, t := range r.tensors {
		if moe.Trained(t.Name) {
			sizes[i] = int(t.Elements())
		}
		if tp := r.ranks.Size(comm.TP); tp > 1 && r.config.Model.Sliced(t.Name) >= 0 {
			r.sharding.Slices[i] = tp
		}
	}
	var err error
	r.optimizer, err = optimizer.NewSharded(ctx, c, targets, r.device, r.model.Parameters(), sizes, r.sharding)
	return err
}
