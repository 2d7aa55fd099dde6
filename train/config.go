package train

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"mula/blend"
	"mula/internal/objects"
	"mula/internal/strictyaml"
	"mula/moe"
	"mula/shards/verifier"
	"mula/train/devices"
	"mula/train/estimate"
	"mula/train/group"
	"mula/train/optimizer"
	"mula/train/samples"
	"mula/train/spikes"
	"mula/xpu"
	"mula/xpu/comm"
)

// Config is the configuration of a run, as read from train.yaml. Every field has a default. A field
// that is missing in the file, or has the value marked "0 = default", is set when the run starts.
// The train.yaml in the run directory has the values used. Relative paths are relative to the
// directory of the file.
type Config struct {
	Plan      string `yaml:"plan" url:"ok"` // plan.json, as mula blend writes it; may be a URL; default "plan.json"
	Output    string `yaml:"output"`        // run directory; default "run"
	Tokenizer string `yaml:"tokenizer"`     // tokenizer.json that is copied into every checkpoint; default "": none

	// InitializeFrom names the model that supplies the initial weights: a Hugging Face directory,
	// or a run or checkpoint of mula, or a URL as in [checkpoint.FindModel]. Only the weights are
	// used. The model's configuration must equal the field model. Default "": initial weights are
	// random.
	InitializeFrom string `yaml:"initialize_from" url:"ok"`

	Model ModelConfig `yaml:"model"`

	BatchSize      int `yaml:"batch_size"`       // samples per step; default 32
	MicroBatchSize int `yaml:"micro_batch_size"` // samples computed at once; 0 = default: at most 8
	// length of the run in steps; 0 = default: all complete batches of the plan
	Steps int64 `yaml:"steps"`
	// seed of the initial weights; default 0. The order of the data has the plan's own seed
	Seed uint64 `yaml:"seed"`

	Attention samples.Attention `yaml:"attention"` // default "": documents for a packed plan, window for others

	Optimizer optimizer.Config         `yaml:"optimizer"`
	Schedule  optimizer.ScheduleConfig `yaml:"schedule"`
	AuxLoss   AuxLossConfig            `yaml:"aux_loss"`
	ZLoss     ZLossConfig              `yaml:"z_loss"`
	// only of models whose routers have correction biases
	RouterBias RouterBiasConfig `yaml:"router_bias,omitempty"`
	// only of models with layers of multi-token prediction
	PredictionLoss PredictionLossConfig `yaml:"prediction_loss,omitempty"`

	Precision xpu.Precision `yaml:"precision"` // of operands of products, weights and gradients; default "fp32"
	Device    string        `yaml:"device"`    // see [devices.New]
	Threads   int           `yaml:"threads"`   // 0 = default: GOMAXPROCS; results do not depend on the number

	// Recompute names the activations that the backward pass recomputes to save memory. Results do
	// not depend on it.
	Recompute moe.Recompute `yaml:"recompute"`
	// Activations is the type of the activations that [moe.Model.SetActivations] lists: fp32 or
	// bf16; default fp32.
	Activations string `yaml:"activations"`

	Layout LayoutConfig `yaml:"layout"`

	Checkpoint CheckpointConfig `yaml:"checkpoint"`
	Evaluate   EvaluateConfig   `yaml:"evaluate"`
	Spikes     spikes.Config    `yaml:"spikes"`
	Log        LogConfig        `yaml:"log"`

	// MetricsListen is the address, such as "127.0.0.1:9400", at which the run serves its newest
	// metrics to Prometheus; default "": the run does not serve metrics.
	MetricsListen string `yaml:"metrics_listen" url:"ok"`

	// PlanChange is the action if a checkpoint was made with another plan: "refuse" (default), or
	// "accept" to resume at the same position of the new plan.
	PlanChange PlanChange `yaml:"plan_change"`

	// Verify is the time at which mula compares the shards with the plan's hashes: "on-read"
	// (default), "background", "upfront" or "complete"; see [verifier.Parse].
	Verify string `yaml:"verify"`

	// ReverifySeconds is the age after which a verified block of a shard is verified again on its
	// next read; default 600, 0 = never.
	ReverifySeconds int64 `yaml:"reverify_seconds"`

	file *strictyaml.File // file and lines for messages; nil if no file was read
}

// ModelConfig is a preset of [moe.Presets] and the fields that differ from it, named as in a
// Hugging Face config.json.
//
// Three defaults come from the plan instead of the preset. vocab_size is the preset's value, or, if
// that is smaller, the plan's vocabulary size rounded up to a multiple of 64. eos_token_id is the
// plan's end-of-document id. bos_token_id and pad_token_id are the preset's if the preset's
// eos_token_id equals the plan's, and otherwise unset: the ids belong to the tokenizer that the
// preset was made for.
type ModelConfig struct {
	Preset     string `yaml:"preset"` // default "mula-tiny"
	moe.Config `yaml:",inline"`

	given map[string]bool // fields set in the file whose default would come from the plan
}

// AuxLossConfig describes the load-balancing loss, which is computed per micro-batch, in the form
// "sequence" per sequence, or in the form "global" over all tokens of a step.
type AuxLossConfig struct {
	// "hf", "megablocks", "sequence", "global" or "none"; default "hf", for dense models "none"
	Form        moe.AuxForm `yaml:"form"`
	Coefficient float64     `yaml:"coefficient"`
}

// ZLossConfig describes the router z-loss.
type ZLossConfig struct {
	Coefficient float64 `yaml:"coefficient"` // 0 = no z-loss
}

// RouterBiasConfig describes the updates of correction biases; see [moe.Model.UpdateBiases].
type RouterBiasConfig struct {
	UpdateSpeed *float64 `yaml:"update_speed,omitempty"` // default 0.001; 0 = no updates
}

// PredictionLossConfig describes the losses of multi-token prediction; see
// [moe.LossOptions.PredictionCoefficient].
type PredictionLossConfig struct {
	Coefficient *float64 `yaml:"coefficient,omitempty"` // default 0.3
}

// coefficient returns the coefficient, 0 without layers of multi-token prediction.
func (c PredictionLossConfig) coefficient() float64 {
	if c.Coefficient == nil {
		return 0
	}
	return *c.Coefficient
}

// defaultPredictionCoefficient is the coefficient of the first 10T tokens of DeepSeek-V3.
const defaultPredictionCoefficient = 0.3

// defaultUpdateSpeed is the speed of the first 14.3T tokens of DeepSeek-V3.
const defaultUpdateSpeed = 0.001

// LayoutConfig divides a run among ranks. A rank has a coordinate on each of four axes, and
//
//	rank = ((dp·PP + pp)·EP + ep)·TP + tp
//
// so ranks that share matrices are neighbours, and then ranks that share experts. DP·TP is the
// number of replicas of every expert, which Megatron calls the expert-data-parallel size. The
// data-parallel size is DP·EP, as in Megatron.
// Every data rank reads its own samples: rank dp·EP + ep reads that block of each step. The stages
// of a pipeline are one data rank.
type LayoutConfig struct {
	DP int `yaml:"expert_dp" was:"dp"` // expert data parallelism: replicas of every expert; default 1
	EP int `yaml:"ep"`                 // expert parallelism: ranks that share the experts of a layer; default 1
	PP int `yaml:"pp"`                 // pipeline parallelism: stages that share the layers; default 1
	// VirtualStages is the number of groups of layers of each pipeline stage (interleaved
	// pipeline); results do not depend on it; default 1.
	VirtualStages int `yaml:"virtual_stages"`
	TP            int `yaml:"tp"` // tensor parallelism: ranks that share matrices and tokens; default 1

	// CP is the number of consecutive data ranks that share each sequence (context parallelism). It
	// divides DP·EP and does not change the number of ranks; default 1.
	CP int `yaml:"cp"`

	Optimizer estimate.Scheme `yaml:"optimizer"` // default "epso"; results do not depend on it
	Dispatch  moe.Dispatch    `yaml:"dispatch"`  // exchange that sends tokens to their experts; default "alltoall"
	Sums      Sums            `yaml:"sums"`      // order of the sums of gradients over ranks; default "exact"
	// SumReplicas is the number of consecutive replicas of an expert whose gradients are summed
	// first. It must divide DP. If they are on one host, the host sends their sum instead of each
	// term; default 1.
	SumReplicas int `yaml:"sum_replicas"`

	Norm Norms `yaml:"norm"` // how ranks add the norm of the gradient; default "gather"

	// Gradients is the type of the gradients that ranks send: "fp32", or "bf16", which needs
	// bfloat16 weights and is their default.
	Gradients string `yaml:"gradients"`

	Transport group.Transport `yaml:"transport" was:"links"` // between ranks; default "auto"; results do not depend on it

	// UniformRouting sends tokens to experts in rotation and ignores the router. It is for
	// measurements, not for training.
	UniformRouting bool `yaml:"uniform_routing"`

	// CheckReplicasEvery is the number of steps between two comparisons of replicated weights. Each
	// comparison covers all steps since the last one. Ranks also compare before each checkpoint. 0
	// = never; default 1000.
	CheckReplicasEvery int64 `yaml:"check_replicas_every"`
}

// Ranks is the number of ranks of the layout.
func (l LayoutConfig) Ranks() int { return l.shape().Ranks() }

// shape returns the shape of the mesh of the ranks.
func (l LayoutConfig) shape() comm.Shape {
	return comm.NewShape(map[comm.Axes]int{comm.ExpertDP: l.DP, comm.PP: l.PP, comm.EP: l.EP,
		comm.TP: max(1, l.TP)})
}

// readers returns the number of parts into which the samples of a step are divided.
func (l LayoutConfig) readers() int { return l.shape().Size(comm.Slices) / max(1, l.CP) }

// sent returns the type of gradients that ranks send, in a resolved layout.
func (l LayoutConfig) sent() xpu.DType {
	if l.Gradients == xpu.BFloat16.String() {
		return xpu.BFloat16
	}
	return xpu.Float32
}

// activations returns the type of the activations.
func (c Config) activations() xpu.DType {
	if c.Activations == xpu.BFloat16.String() {
		return xpu.BFloat16
	}
	return xpu.Float32
}

// parallel returns the part of a model that this rank of a mesh holds.
func (l LayoutConfig) parallel(ranks *group.Group) moe.Parallel {
	return moe.Parallel{Mesh: ranks.Mesh, Sequence: ranks.Sequence, Heads: ranks.Heads, Dispatch: l.Dispatch,
		VirtualStages: l.VirtualStages, UniformRouting: l.UniformRouting}
}

// String describes the layout of several ranks, as in "expert_dp 2, ep 4, optimizer epso, dispatch
// alltoall".
func (l LayoutConfig) String() string {
	shape := l.shape()
	text := fmt.Sprintf("%s, optimizer %s", shape, l.Optimizer)
	if shape.Size(comm.EP) > 1 {
		text += ", dispatch " + string(l.Dispatch)
	}
	if l.CP > 1 {
		text += fmt.Sprintf(", %d ranks a sequence", l.CP*max(1, l.TP))
	}
	if l.VirtualStages > 1 {
		text += fmt.Sprintf(", %d groups of layers a stage", l.VirtualStages)
	}
	return text + l.orderOfSums()
}

// orderOfSums describes the order of sums over ranks, unless it is the default.
func (l LayoutConfig) orderOfSums() (text string) {
	if l.Sums == fastSums {
		text = ", fast sums"
	}
	if l.SumReplicas > 1 {
		text += fmt.Sprintf(", sums of %d replicas", l.SumReplicas)
	}
	return text
}

// Norms is the way in which ranks add the squares of the norm of the gradient, and of sizes of
// updates.
type Norms string

// The ways.
const (
	// every rank gets the sums of all blocks, and adds them in the order of the model; default
	gatherNorms Norms = "gather"
	reduceNorms Norms = "reduce" // ranks add exact sums, which are rounded once
)

// groupOptions returns the options of the groups of ranks. hosts replaces the hosts of all ranks,
// unless it is nil.
func (c *Config) groupOptions(hosts *comm.Hosts) group.Options {
	l := c.Layout
	return group.Options{Fast: l.Sums == fastSums, InnerReplicas: l.SumReplicas, SequenceRanks: l.CP,
		VirtualStages: l.VirtualStages, Embeddings: c.Model.PredictionLayers > 0,
		Nested: l.Optimizer == estimate.SO, Hosts: hosts}
}

// Sums is the order in which gradients are added over ranks.
type Sums string

// The orders of sums.
const (
	// over ep in ascending order, then over dp: the same bits with every transport; default
	exactSums Sums = "exact"
	fastSums  Sums = "fast" // in the transport's fastest order: the last bits may differ between runs
)

// CheckpointConfig sets the times of checkpoints. A run always writes one at its end and when it is
// stopped.
type CheckpointConfig struct {
	Every *int64 `yaml:"every"` // in steps; 0 = only at the end; default: a tenth of steps, at most 1000
	Keep  int    `yaml:"keep"`  // number of complete checkpoints to keep; default 3
	// in steps, a multiple of every: the models of these steps are kept for ever; 0 = none; default
	KeepEvery int64 `yaml:"keep_every"`
	Writers   int   `yaml:"writers"` // ranks that write a checkpoint at the same time; 0 = all; default
	// write checkpoints while the next steps run, from a copy in memory; the last one of a run is
	// written before the run ends
	Background bool `yaml:"background"`
	// URL of a folder in an object store, to which every checkpoint is copied; default "": none
	Copies     string `yaml:"copies" url:"ok"`
	KeepCopies int    `yaml:"keep_copies"` // number of complete copies to keep; 0 = all; default 3
	// in steps; 0 = never; default: the ranks write what a checkpoint has to the memory of their
	// hosts, so that a restart loses fewer steps
	SnapshotEvery int64 `yaml:"snapshot_every"`
	// absolute path of a folder of each host for snapshots, on a file system in memory; default "":
	// /dev/shm
	SnapshotDir string `yaml:"snapshot_dir"`
}

// EvaluateConfig sets the times at which the validation loss is computed.
type EvaluateConfig struct {
	// in steps; 0 = never; default: as often as checkpoints, or never if the plan has no validation
	// split
	Every   *int64 `yaml:"every"`
	Samples int    `yaml:"samples"` // validation windows of each source, evenly spaced over the split; default 64
}

// LogConfig sets what is recorded in addition to the values of every step.
type LogConfig struct {
	UpdateRatioEvery int64 `yaml:"update_ratio_every"` // in steps; 0 = never; default 10
	// metrics.jsonl has the number of tokens of each expert in the first steps, up to this number,
	// and then in every step that is a multiple of it; 0 = never; default 100
	ExpertCountsEvery int64 `yaml:"expert_counts_every"`

	// A rank is slow if its own work takes longer than SlowFactor times the median in SlowSteps
	// more steps than not; see [votes.SlowLimit]. Defaults 1.15 and 8; SlowSteps 0 = never.
	SlowFactor float64 `yaml:"slow_factor"`
	SlowSteps  int64   `yaml:"slow_steps"`
}

// PlanChange is the action if a checkpoint was made with another plan.
type PlanChange string

// The actions if a checkpoint was made with another plan.
const (
	refusePlanChange PlanChange = "refuse"
	acceptPlanChange PlanChange = "accept"
)

const defaultPreset = "mula-tiny"

// defaultConfig returns the configuration of an empty train.yaml: a mula-tiny model with the
// training settings of the Mula models.
func defaultConfig() Config {
	c := Config{
		Plan: "plan.json", Output: "run", BatchSize: 32,
		Optimizer: optimizer.Config{Name: optimizer.AdamW, Clip: 1},
		Schedule: optimizer.ScheduleConfig{Name: optimizer.Cosine, LearningRate: 4e-4,
			WarmupFrom: optimizer.WarmupFromZero},
		AuxLoss:   AuxLossConfig{Coefficient: 0.01},
		Precision: xpu.FP32, Device: "cpu",
		Recompute: moe.RecomputeNone, Activations: xpu.Float32.String(),
		Layout: LayoutConfig{DP: 1, EP: 1, PP: 1, VirtualStages: 1, TP: 1, Optimizer: estimate.EPSO,
			Dispatch: moe.AllToAll, Sums: exactSums, SumReplicas: 1, CP: 1, Norm: gatherNorms,
			Transport: group.Auto, CheckReplicasEvery: 1000},
		Checkpoint: CheckpointConfig{Keep: 3, KeepCopies: 3},
		Evaluate:   EvaluateConfig{Samples: 64},
		Spikes: spikes.Config{Action: spikes.None, Sigma: 6, Window: 128, LeaveOut: 100, MaxSkips: 16,
			MaxRollbacks: 10},
		Log:        LogConfig{UpdateRatioEvery: 10, ExpertCountsEvery: 100, SlowFactor: 1.15, SlowSteps: 8},
		PlanChange: refusePlanChange,
		Verify:     "on-read",

		ReverifySeconds: int64(blend.DefaultReverify / time.Second),
	}
	if err := c.Model.usePreset(defaultPreset); err != nil {
		panic(err) // the name is a constant
	}
	return c
}

func (m *ModelConfig) usePreset(name string) error {
	c, err := moe.Preset(name)
	if err != nil {
		return err
	}
	m.Preset, m.Config = name, c
	return nil
}

// LoadConfig reads a train.yaml. Each setting, such as "optimizer.clip=0.5", replaces the file's
// value of a field. Relative paths are relative to the file's directory, also in settings. Errors
// name file and line, or the setting.
func LoadConfig(path string, settings ...string) (Config, error) {
	file, err := strictyaml.Read(path)
	if err != nil {
		return Config{}, err
	}
	c, err := parseConfig(file, path, settings)
	if err != nil {
		return Config{}, err
	}
	dir := filepath.Dir(path)
	for _, p := range []*string{&c.Plan, &c.Output, &c.Tokenizer, &c.InitializeFrom} {
		if *p != "" && !filepath.IsAbs(*p) && !objects.IsURL(*p) {
			*p = filepath.Join(dir, *p)
		}
	}
	return c, nil
}

// ConfigFields returns the full names of the fields of a train.yaml, such as "layout.ep".
func ConfigFields() []string { return strictyaml.Names(&Config{}) }

// Warnings returns remarks about the file, such as old names of fields, with file and line.
func (c Config) Warnings() []string { return c.file.Warnings() }

// ParseConfig reads a configuration from the content of a train.yaml. Errors use name as the file's
// name. Paths are not changed.
func ParseConfig(data []byte, name string) (Config, error) {
	file, err := strictyaml.Parse(data, name)
	if err != nil {
		return Config{}, err
	}
	return parseConfig(file, name, nil)
}

func parseConfig(file *strictyaml.File, name string, settings []string) (Config, error) {
	overridden := file.Override(&Config{}, "--set", settings)
	if file.Empty() && overridden == nil {
		return Config{}, fmt.Errorf("%s: the file is empty; write at least one field, such as plan: plan.json",
			name)
	}
	c := defaultConfig()
	c.file = file
	var unknownPreset error
	if preset := file.Text("$.model.preset"); preset != "" { // before the fields that override it
		if err := c.Model.usePreset(preset); err != nil {
			unknownPreset = file.Errorf("$.model.preset", "model.preset: %w", err)
		}
	}
	decoded := file.Decode(&c)
	if now := verifier.CurrentName(c.Verify); now != c.Verify {
		file.Warnf("$.verify", "value %s of verify is now called %s", c.Verify, now)
		c.Verify = now
	}
	c.Model.given = map[string]bool{}
	for _, name := range []string{"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"} {
		c.Model.given[name] = file.Has("$.model." + name)
	}
	if err := strictyaml.All([]error{overridden, decoded, unknownPreset, c.Locate(c.Validate())}); err != nil {
		return Config{}, err
	}
	return c, nil
}

// ReadPlan reads the plan that the configuration names.
func (c Config) ReadPlan() (*blend.Plan, error) {
	plan, err := blend.ReadPlan(c.Plan)
	const advice = "write the path of a plan.json of mula blend, relative to the directory of train.yaml"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, &strictyaml.FieldError{Field: "plan",
			Message: fmt.Sprintf(" is %s, which does not exist; %s", c.Plan, advice),
			Cause:   err}
	case err != nil && isDirectory(c.Plan):
		return nil, &strictyaml.FieldError{Field: "plan",
			Message: fmt.Sprintf(" is %s, which is a directory; %s", c.Plan, advice),
			Cause:   err}
	}
	return plan, err
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// Locate adds file and line to an error about fields of the configuration, if the configuration
// comes from a file. It returns other errors unchanged.
func (c Config) Locate(err error) error { return c.file.Locate(err) }

// Validate returns an error that lists all invalid fields with their allowed values, or nil. Fields
// that depend on the plan are checked when a run starts.
func (c Config) Validate() error {
	plain := func(x float64) string {
		if x == math.Trunc(x) && math.Abs(x) < 1e18 {
			return strconv.FormatFloat(x, 'f', 0, 64)
		}
		return strconv.FormatFloat(x, 'g', -1, 64)
	}
	oneOf := func(field string, value any, allowed ...string) error {
		if v := fmt.Sprint(value); !slices.Contains(allowed, v) {
			return strictyaml.Invalid(field, "is %q; allowed: %s", v,
				strings.Join(slices.DeleteFunc(allowed, func(a string) bool { return a == "" }), ", "))
		}
		return nil
	}
	within := func(field string, value, low, high float64) error {
		if value >= low && value <= high { // false for NaN
			return nil
		}
		if high == math.MaxFloat64 {
			if math.IsInf(value, 0) || math.IsNaN(value) {
				return strictyaml.Invalid(field, "is %s; must be a finite number of %s or more", plain(value),
					plain(low))
			}
			return strictyaml.Invalid(field, "is %s; must be %s or more", plain(value), plain(low))
		}
		return strictyaml.Invalid(field, "is %s; must be from %s to %s", plain(value), plain(low), plain(high))
	}
	optional := func(field string, value *int64) error {
		if value == nil {
			return nil
		}
		return within(field, float64(*value), 0, maxSteps)
	}
	optionalWithin := func(field string, value *float64, low, high float64) error {
		if value == nil {
			return nil
		}
		return within(field, *value, low, high)
	}
	optionalCount := func(field string, value *int64, low, high float64) error {
		if value == nil {
			return nil
		}
		return within(field, float64(*value), low, high)
	}
	above := func(field string, value *float64) error {
		if value == nil || *value > 0 && *value <= math.MaxFloat64 {
			return nil
		}
		if math.IsInf(*value, 0) || math.IsNaN(*value) {
			return strictyaml.Invalid(field, "is %s; must be a finite number above 0", plain(*value))
		}
		return strictyaml.Invalid(field, "is %s; must be above 0", plain(*value))
	}
	const finite = math.MaxFloat64
	errs := []error{
		within("batch_size", float64(c.BatchSize), 1, 1<<20),
		within("micro_batch_size", float64(c.MicroBatchSize), 0, float64(max(1, c.BatchSize))),
		within("steps", float64(c.Steps), 0, maxSteps),
		oneOf("attention", c.Attention, append(samples.Attentions(), "")...),
		oneOf("optimizer.name", c.Optimizer.Name, optimizer.Names()...),
		c.Optimizer.Foreign(),
		optionalWithin("optimizer.eps", c.Optimizer.Epsilon, 0, finite),
		optionalWithin("optimizer.weight_decay", c.Optimizer.WeightDecay, 0, finite),
		oneOf("optimizer.moments", c.Optimizer.Moments, "", xpu.Float32.String(), xpu.BFloat16.String()),
		oneOf("optimizer.decay", c.Optimizer.Decay, "", string(optimizer.DecayTorch), string(optimizer.DecayOptimus)),
		above("optimizer.rho", c.Optimizer.Rho),
		optionalCount("optimizer.hessian_every", c.Optimizer.HessianEvery, 1, maxSteps),
		optionalWithin("optimizer.momentum", c.Optimizer.Momentum, 0, 1),
		optionalCount("optimizer.ns_steps", c.Optimizer.NewtonSchulzSteps, 1, 99),
		oneOf("optimizer.adjust_lr_fn", c.Optimizer.AdjustLearningRate, "", string(optimizer.AdjustMatchRMSAdamW),
			string(optimizer.AdjustOriginal)),
		optionalWithin("optimizer.r", c.Optimizer.R, 0, finite),
		optionalWithin("optimizer.weight_lr_power", c.Optimizer.WeightLRPower, 0, finite),
		within("optimizer.clip", c.Optimizer.Clip, 0, finite),
		oneOf("schedule.name", c.Schedule.Name, string(optimizer.Cosine), string(optimizer.Linear),
			string(optimizer.WSD), string(optimizer.Constant)),
		c.Schedule.Foreign(),
		above("schedule.learning_rate", &c.Schedule.LearningRate),
		optional("schedule.warmup_steps", c.Schedule.WarmupSteps),
		optionalCount("schedule.cooldown_steps", c.Schedule.CooldownSteps, 1, maxSteps),
		oneOf("schedule.cooldown", c.Schedule.Cooldown, "", string(optimizer.CooldownOneMinusSqrt),
			string(optimizer.CooldownLinear)),
		oneOf("schedule.warmup_from", c.Schedule.WarmupFrom, string(optimizer.WarmupFromZero),
			string(optimizer.WarmupFromMin)),
		within("schedule.decay_steps", float64(c.Schedule.DecaySteps), 0, maxSteps),
		oneOf("aux_loss.form", c.AuxLoss.Form, "", string(moe.AuxHF), string(moe.AuxMegaBlocks),
			string(moe.AuxSequence), string(moe.AuxGlobal), string(moe.AuxNone)),
		within("aux_loss.coefficient", c.AuxLoss.Coefficient, 0, finite),
		within("z_loss.coefficient", c.ZLoss.Coefficient, 0, finite),
		optionalWithin("router_bias.update_speed", c.RouterBias.UpdateSpeed, 0, 1),
		optionalWithin("prediction_loss.coefficient", c.PredictionLoss.Coefficient, 0, finite),
		oneOf("precision", c.Precision, xpu.Precisions()...),
		devices.Check(c.Device),
		within("threads", float64(c.Threads), 0, 4096),
		oneOf("recompute", c.Recompute, moe.Recomputes()...),
		oneOf("activations", c.Activations, xpu.Float32.String(), xpu.BFloat16.String()),
		within("layout.expert_dp", float64(c.Layout.DP), 1, 1<<20),
		within("layout.ep", float64(c.Layout.EP), 1, 1<<12),
		within("layout.pp", float64(c.Layout.PP), 1, 1<<10),
		oneOf("layout.optimizer", c.Layout.Optimizer, estimate.Schemes()...),
		oneOf("layout.dispatch", c.Layout.Dispatch, moe.Dispatches()...),
		oneOf("layout.gradients", c.Layout.Gradients, "", xpu.Float32.String(), xpu.BFloat16.String()),
		oneOf("layout.sums", c.Layout.Sums, string(exactSums), string(fastSums)),
		oneOf("layout.norm", c.Layout.Norm, string(gatherNorms), string(reduceNorms)),
		within("layout.tp", float64(c.Layout.TP), 1, 1<<12),
		within("layout.cp", float64(c.Layout.CP), 1, 1<<20),
		within("layout.virtual_stages", float64(c.Layout.VirtualStages), 1, 1<<10),
		within("layout.sum_replicas", float64(c.Layout.SumReplicas), 1, 1<<20),
		oneOf("layout.transport", c.Layout.Transport, string(group.Auto), string(group.Local), string(group.TCP),
			string(group.MPI)),
		within("layout.check_replicas_every", float64(c.Layout.CheckReplicasEvery), 0, maxSteps),
		optional("checkpoint.every", c.Checkpoint.Every),
		within("checkpoint.keep", float64(c.Checkpoint.Keep), 1, 1<<20),
		within("checkpoint.keep_every", float64(c.Checkpoint.KeepEvery), 0, maxSteps),
		within("checkpoint.writers", float64(c.Checkpoint.Writers), 0, 1<<20),
		checkCopies(c.Checkpoint.Copies),
		within("checkpoint.keep_copies", float64(c.Checkpoint.KeepCopies), 0, 1<<20),
		within("checkpoint.snapshot_every", float64(c.Checkpoint.SnapshotEvery), 0, maxSteps),
		checkSnapshotDir(c.Checkpoint.SnapshotDir),
		optional("evaluate.every", c.Evaluate.Every),
		within("evaluate.samples", float64(c.Evaluate.Samples), 1, 1<<30),
		oneOf("spikes.action", c.Spikes.Action, string(spikes.None), string(spikes.Skip), string(spikes.RollBack)),
		within("spikes.sigma", c.Spikes.Sigma, 1, finite),
		within("spikes.window", float64(c.Spikes.Window), 2, 1<<16),
		within("spikes.skip_steps", float64(c.Spikes.LeaveOut), 1, 1<<20),
		within("spikes.max_skips", float64(c.Spikes.MaxSkips), 0, 1<<20),
		within("spikes.max_rollbacks", float64(c.Spikes.MaxRollbacks), 0, 1<<20),
		within("log.update_ratio_every", float64(c.Log.UpdateRatioEvery), 0, maxSteps),
		within("log.expert_counts_every", float64(c.Log.ExpertCountsEvery), 0, maxSteps),
		within("log.slow_factor", c.Log.SlowFactor, 1, finite),
		within("log.slow_steps", float64(c.Log.SlowSteps), 0, maxSteps),
		oneOf("plan_change", c.PlanChange, string(refusePlanChange), string(acceptPlanChange)),
		oneOf("verify", c.Verify, verifier.Names()...),
		within("reverify_seconds", float64(c.ReverifySeconds), 0, 1<<30),
	}
	shape := c.Layout.shape()
	for _, misfit := range c.Model.Misfits(shape) {
		errs = append(errs, strictyaml.Invalid("layout."+misfit.Axis.String(), "%s", misfit.Problem))
	}
	if err := c.Model.CheckVirtualStages(shape.Size(comm.PP), c.Layout.VirtualStages); err != nil {
		errs = append(errs, strictyaml.Invalid("layout.virtual_stages", "is %d, but %v", c.Layout.VirtualStages, err))
	}
	if stages := shape.Size(comm.PP); stages > 1 && c.Model.TieEmbeddings {
		errs = append(errs,
			strictyaml.Invalid("layout.pp",
				"is %d, but model.tie_word_embeddings needs the same weights in the first and the last stage; set "+
					"layout.pp to 1, or tie_word_embeddings to false", stages))
	}
	errs = append(errs, c.checkPredictions()...)
	if n := c.Layout.SumReplicas; n > 1 && c.Layout.DP%n != 0 {
		errs = append(errs, strictyaml.Invalid("layout.sum_replicas",
			"is %d; must divide layout.expert_dp, which is %d", n, c.Layout.DP))
	}
	switch gradients := c.Layout.Gradients; {
	case c.Layout.sent() == xpu.BFloat16 && c.Precision.Weights() != xpu.BFloat16:
		errs = append(errs, strictyaml.Invalid("layout.gradients", "is %q, which needs precision: %s; allowed: %s",
			gradients, xpu.BF16Mixed, xpu.Float32))
	case gradients == xpu.Float32.String() && c.Precision.Gradients() == xpu.BFloat16:
		errs = append(errs, strictyaml.Invalid("layout.gradients", "is %q, but with precision: %s gradients are %s "+
			"in memory; allowed: %[3]s", gradients, c.Precision, xpu.BFloat16))
	}
	if c.Precision.Gradients() == xpu.BFloat16 && c.Optimizer.Name.NeedsWholeTensors() {
		errs = append(errs, strictyaml.Invalid("precision", "is %q, but %s needs float32 gradients; use %s",
			c.Precision, c.Optimizer.Name, xpu.BF16Mixed))
	}
	errs = append(errs, c.checkReaders(shape)...)
	switch rounded := c.activations() == xpu.BFloat16; {
	case rounded && c.Device == devices.OneDNN:
		errs = append(errs, strictyaml.Invalid("activations", "is %q, but the device is %q; use %s or %s",
			c.Activations, c.Device, devices.CPU, devices.OpenCL))
	case rounded && c.Layout.CP > 1:
		errs = append(errs, strictyaml.Invalid("activations", "is %q, which needs layout.cp: 1; it is %d",
			c.Activations, c.Layout.CP))
	}
	if c.Optimizer.Moments == xpu.BFloat16.String() && c.Device == devices.OneDNN {
		errs = append(errs, strictyaml.Invalid("optimizer.moments", "is %q, but the device is %q; use %s or %s",
			c.Optimizer.Moments, c.Device, devices.CPU, devices.OpenCL))
	}
	if c.Layout.UniformRouting && c.Model.Dense() {
		errs = append(errs, strictyaml.Invalid("layout.uniform_routing",
			"is true, but a dense model has no router; remove it"))
	}
	if b := c.Optimizer.Betas; b != nil && (len(b) != 2 || !(b[0] >= 0 && b[0] < 1 && b[1] >= 0 && b[1] < 1)) {
		errs = append(errs, strictyaml.Invalid("optimizer.betas", "is %s; must be two numbers from 0 to below 1",
			optimizer.ListText(b)))
	}
	errs = append(errs, c.Optimizer.Check(c.Schedule)...)
	for i, g := range c.Optimizer.Groups {
		errs = append(errs, optionalWithin(fmt.Sprintf("optimizer.groups[%d].weight_decay", i), g.WeightDecay, 0,
			finite),
			optionalWithin(fmt.Sprintf("optimizer.groups[%d].learning_rate_scale", i), g.LearningRateScale, 0, finite))
	}
	if len(c.Optimizer.Groups) > 0 && c.Model.Config.Validate() == nil {
		// an invalid model is reported when the run starts
		errs = append(errs, c.Optimizer.CheckGroups(c.Model.TrainedTensors()))
	}
	if c.Schedule.Name == optimizer.Constant && c.Schedule.DecaySteps != 0 {
		errs = append(errs, strictyaml.Invalid("schedule.decay_steps",
			"is %d, but schedule %s does not decay; remove it",
			c.Schedule.DecaySteps, optimizer.Constant))
	}
	if c.Schedule.Name == optimizer.Constant && c.Schedule.WarmupFrom != optimizer.WarmupFromZero {
		errs = append(errs, strictyaml.Invalid("schedule.warmup_from",
			"is %q, but schedule %s has no minimum; allowed: %s",
			c.Schedule.WarmupFrom, optimizer.Constant, optimizer.WarmupFromZero))
	}
	if c.Plan == "" {
		errs = append(errs, strictyaml.Invalid("plan",
			"is empty; write the path of the plan.json that mula blend wrote"))
	}
	if c.Output == "" {
		errs = append(errs, strictyaml.Invalid("output", "is empty; write the path of the run directory"))
	}
	if a := c.MetricsListen; a != "" {
		if _, port, err := net.SplitHostPort(a); err != nil || port == "" || port == "0" {
			errs = append(errs,
				strictyaml.Invalid("metrics_listen",
					"is %q; must be an address with a port, such as 127.0.0.1:9400, or \"\"", a))
		}
	}
	if low := c.Schedule.MinLearningRate; low != nil && c.Schedule.LearningRate > 0 {
		errs = append(errs, within("schedule.min_learning_rate", *low, 0, c.Schedule.LearningRate))
	}
	if form := c.AuxLoss.Form; c.Model.Dense() && form != "" && form != moe.AuxNone {
		errs = append(errs, strictyaml.Invalid("aux_loss.form",
			"is %q, but a dense model has no router to balance; allowed: none",
			form))
	}
	if z := c.ZLoss.Coefficient; c.Model.Dense() && z != 0 {
		errs = append(errs, strictyaml.Invalid("z_loss.coefficient",
			"is %v, but a dense model has no router; must be 0", z))
	}
	if z := c.ZLoss.Coefficient; c.Model.HasSigmoidRouter() && z != 0 {
		errs = append(errs, strictyaml.Invalid("z_loss.coefficient",
			"is %v, but the scores of the router of a %s model are sigmoids, without a logsumexp; must be 0", z,
			c.Model.Architecture))
	}
	if speed := c.RouterBias.UpdateSpeed; speed != nil && !c.Model.HasBiases() {
		errs = append(errs, strictyaml.Invalid("router_bias.update_speed",
			"is %v, but the router of a %s model has no correction biases; remove it", *speed, c.Model.Architecture))
	}
	var found strictyaml.FieldErrors
	for _, err := range errs {
		var field *strictyaml.FieldError
		if errors.As(err, &field) &&
			!slices.ContainsFunc(found, func(e *strictyaml.FieldError) bool { return e.Field == field.Field }) {
			found = append(found, field)
		}
	}
	switch len(found) {
	case 0:
		return nil
	case 1:
		return found[0]
	}
	return found
}

// checkPredictions checks the settings of multi-token prediction.
func (c *Config) checkPredictions() (errs []error) {
	const field = "model.num_nextn_predict_layers"
	n := c.Model.PredictionLayers
	if coefficient := c.PredictionLoss.Coefficient; coefficient != nil && n == 0 {
		errs = append(errs, strictyaml.Invalid("prediction_loss.coefficient", "is %v, but the model has no layers of "+
			"multi-token prediction; set %s, or remove the coefficient", *coefficient, field))
	}
	return errs
}

// checkReaders checks that the samples of a step can be divided among the data ranks.
func (c *Config) checkReaders(shape comm.Shape) (errs []error) {
	ranks, cp := shape.Size(comm.Slices), c.Layout.CP
	product := shape.Product(comm.Slices, "layout.")
	switch {
	case cp < 1: // reported elsewhere
	case ranks%cp != 0:
		errs = append(errs, strictyaml.Invalid("layout.cp", "is %d; must divide %s, the number of data ranks", cp,
			product))
	case cp > 1 && c.BatchSize%(ranks/cp) != 0:
		errs = append(errs, strictyaml.Invalid("batch_size", "is %d; must be a multiple of %d, the number of data "+
			"ranks, %s, divided by layout.cp = %d", c.BatchSize, ranks/cp, product, cp))
	case ranks > 1 && cp == 1 && c.BatchSize%ranks != 0:
		errs = append(errs, strictyaml.Invalid("batch_size",
			"is %d; must be a multiple of %s, the number of data ranks", c.BatchSize, product))
	}
	return errs
}

// maxSteps bounds counts of steps. A float64, and therefore many JSON readers, cannot represent
// every whole number above 2⁵³.
const maxSteps = 1 << 53
