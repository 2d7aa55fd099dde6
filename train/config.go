package train

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"mula/internal/strictyaml"
	"mula/moe"
)

// Config is a training run as train.yaml describes it. Every field has a default; a field that the file does not have, or has with the
// value that is named "default" below, takes it when the run starts, and the file train.yaml in the run directory holds the values used.
// Relative paths are relative to the directory of the file.
type Config struct {
	Plan      string `yaml:"plan"`      // plan.json, as mula blend writes it; default "plan.json"
	Output    string `yaml:"output"`    // run directory; default "run"
	Tokenizer string `yaml:"tokenizer"` // tokenizer.json that is copied into every checkpoint; default "": none

	Model ModelConfig `yaml:"model"`

	BatchSize      int    `yaml:"batch_size"`       // samples a step; default 32
	MicroBatchSize int    `yaml:"micro_batch_size"` // samples at once in memory; 0 = default: at most 8
	Steps          int64  `yaml:"steps"`            // length of the run; 0 = default: as many whole batches as the plan holds
	Seed           uint64 `yaml:"seed"`             // of the initial weights; default 0. The order of the data has the plan's own seed

	Optimizer OptimizerConfig `yaml:"optimizer"`
	Schedule  ScheduleConfig  `yaml:"schedule"`
	AuxLoss   AuxLossConfig   `yaml:"aux_loss"`
	ZLoss     ZLossConfig     `yaml:"z_loss"`

	Precision string `yaml:"precision"` // "fp32"
	Device    string `yaml:"device"`    // "cpu"
	Threads   int    `yaml:"threads"`   // 0 = default: all that GOMAXPROCS allows; results do not depend on it

	Checkpoint CheckpointConfig `yaml:"checkpoint"`
	Evaluate   EvaluateConfig   `yaml:"evaluate"`

	// PlanChange says what happens when a checkpoint was made with another plan: "refuse" (default), or "accept" to go on at the same
	// position of the new one.
	PlanChange PlanChange `yaml:"plan_change"`
}

// ModelConfig is a preset of [moe.Presets] and fields that differ from it, under their names in a Hugging Face config.json.
//
// Three defaults come from the plan rather than from the preset. vocab_size is the preset's, or, if that is smaller, the plan's vocabulary
// rounded up to a multiple of 64. eos_token_id is the plan's end-of-document id. bos_token_id and pad_token_id are the preset's if its
// eos_token_id is the plan's, and otherwise none: the numbers belong to the tokenizer the preset was made for.
type ModelConfig struct {
	Preset     string `yaml:"preset"` // default "mula-tiny"
	moe.Config `yaml:",inline"`

	given map[string]bool // fields that the file has, of those whose default comes from the plan
}

// OptimizerConfig describes the optimizer; see [AdamW].
type OptimizerConfig struct {
	Name        string    `yaml:"name"`  // "adamw"
	Betas       []float64 `yaml:"betas"` // β₁ and β₂
	Epsilon     float64   `yaml:"eps"`
	WeightDecay float64   `yaml:"weight_decay"` // of all parameters alike, norms and embeddings included
	Decay       DecayForm `yaml:"decay"`

	Clip            float64 `yaml:"clip"`              // largest norm of all gradients together; 0 = no clipping
	ClipAfterWarmup bool    `yaml:"clip_after_warmup"` // clip only after the warm-up, as Optimus does
}

// DecayForm says where in an AdamW update the weights decay.
type DecayForm string

// The forms of weight decay; see [AdamW].
const (
	DecayTorch   DecayForm = "torch"   // before the update, as torch.optim.AdamW; default
	DecayOptimus DecayForm = "optimus" // after the update, as Optimus
)

// ScheduleConfig describes the learning rate; see [Schedule].
type ScheduleConfig struct {
	Name            string     `yaml:"name"` // "cosine"
	LearningRate    float64    `yaml:"learning_rate"`
	MinLearningRate *float64   `yaml:"min_learning_rate"` // default a tenth of learning_rate
	WarmupSteps     *int64     `yaml:"warmup_steps"`      // default a tenth of decay_steps, at most 2500
	WarmupFrom      WarmupFrom `yaml:"warmup_from"`
	DecaySteps      int64      `yaml:"decay_steps"` // the step count at which the minimum is reached; 0 = default: steps
}

// WarmupFrom says at which learning rate the warm-up starts.
type WarmupFrom string

// Where a warm-up starts.
const (
	WarmupFromZero WarmupFrom = "zero" // OLMoE, torchtitan; default
	WarmupFromMin  WarmupFrom = "min"  // at min_learning_rate: Optimus
)

// AuxLossConfig describes the load-balancing loss. It is computed over each micro-batch.
type AuxLossConfig struct {
	Form        moe.AuxForm `yaml:"form"` // "hf", "megablocks" or "none"; default "hf", for dense models "none"
	Coefficient float64     `yaml:"coefficient"`
}

// ZLossConfig describes the router z-loss.
type ZLossConfig struct {
	Coefficient float64 `yaml:"coefficient"` // 0 = no z-loss
}

// CheckpointConfig says when checkpoints are written. One is always written at the end of a run and when it is stopped.
type CheckpointConfig struct {
	Every *int64 `yaml:"every"` // steps; 0 = only at the end; default a tenth of steps, at most 1000
	Keep  int    `yaml:"keep"`  // how many complete ones stay; default 3
}

// EvaluateConfig says when the loss on the validation split is computed.
type EvaluateConfig struct {
	Every   *int64 `yaml:"every"`   // steps; 0 = never; default as often as checkpoints, or never if the plan has no validation split
	Samples int    `yaml:"samples"` // validation windows of each source, spread evenly over the split; default 64
}

// PlanChange says what happens when a checkpoint was made with another plan.
type PlanChange string

// What happens when a checkpoint was made with another plan.
const (
	RefusePlanChange PlanChange = "refuse"
	AcceptPlanChange PlanChange = "accept"
)

const defaultPreset = "mula-tiny"

// DefaultConfig returns the configuration that an empty train.yaml stands for: a mula-tiny model trained as the Mula models were.
func DefaultConfig() Config {
	c := Config{
		Plan: "plan.json", Output: "run", BatchSize: 32,
		Optimizer: OptimizerConfig{Name: "adamw", Betas: []float64{0.9, 0.95}, Epsilon: 1e-8, WeightDecay: 0.1, Decay: DecayTorch, Clip: 1},
		Schedule:  ScheduleConfig{Name: "cosine", LearningRate: 4e-4, WarmupFrom: WarmupFromZero},
		AuxLoss:   AuxLossConfig{Coefficient: 0.01},
		Precision: "fp32", Device: "cpu",
		Checkpoint: CheckpointConfig{Keep: 3},
		Evaluate:   EvaluateConfig{Samples: 64},
		PlanChange: RefusePlanChange,
	}
	if err := c.Model.usePreset(defaultPreset); err != nil {
		panic(err) // the name is ours
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

// LoadConfig reads a train.yaml. Errors name file and line.
func LoadConfig(path string) (Config, error) {
	file, err := strictyaml.Read(path)
	if err != nil {
		return Config{}, err
	}
	c, err := parseConfig(file, path)
	if err != nil {
		return Config{}, err
	}
	dir := filepath.Dir(path)
	for _, p := range []*string{&c.Plan, &c.Output, &c.Tokenizer} {
		if *p != "" && !filepath.IsAbs(*p) {
			*p = filepath.Join(dir, *p)
		}
	}
	return c, nil
}

// ParseConfig reads a configuration from the content of a train.yaml; name stands for the file in errors. Paths are left as they are.
func ParseConfig(data []byte, name string) (Config, error) {
	file, err := strictyaml.Parse(data, name)
	if err != nil {
		return Config{}, err
	}
	return parseConfig(file, name)
}

func parseConfig(file *strictyaml.File, name string) (Config, error) {
	if file.Empty() {
		return Config{}, fmt.Errorf("%s: the file is empty; it must at least name the plan, as in plan: plan.json", name)
	}
	// The preset must be known before the fields that differ from it can be read over it.
	var probe struct {
		Model struct {
			Preset *string `yaml:"preset"`
			Vocab  *int    `yaml:"vocab_size"`
			Pad    *int    `yaml:"pad_token_id"`
			BOS    *int    `yaml:"bos_token_id"`
			EOS    *int    `yaml:"eos_token_id"`
		} `yaml:"model"`
	}
	if err := file.DecodeLoosely(&probe); err != nil {
		return Config{}, err
	}
	c := DefaultConfig()
	if probe.Model.Preset != nil {
		if err := c.Model.usePreset(*probe.Model.Preset); err != nil {
			return Config{}, file.Errorf("$.model.preset", "model.preset: %w", err)
		}
	}
	if err := file.Decode(&c); err != nil {
		return Config{}, err
	}
	c.Model.given = map[string]bool{
		"vocab_size":   probe.Model.Vocab != nil,
		"pad_token_id": probe.Model.Pad != nil,
		"bos_token_id": probe.Model.BOS != nil,
		"eos_token_id": probe.Model.EOS != nil,
	}
	if err := c.Validate(); err != nil {
		if field := (*fieldError)(nil); errors.As(err, &field) {
			return Config{}, file.Errorf("$."+field.field, "%w", err)
		}
		return Config{}, fmt.Errorf("%s: %w", name, err)
	}
	return c, nil
}

// A fieldError is about the value of one field, under its full name.
type fieldError struct {
	field, message string
}

func (e *fieldError) Error() string { return e.field + e.message }

// Validate says which field has a value that is not allowed, and what is, or returns nil. What depends on the plan is checked when a run
// starts.
func (c Config) Validate() error {
	plain := func(x float64) string {
		if x == math.Trunc(x) && math.Abs(x) < 1e18 {
			return strconv.FormatFloat(x, 'f', 0, 64)
		}
		return strconv.FormatFloat(x, 'g', -1, 64)
	}
	bad := func(field, format string, args ...any) error {
		return &fieldError{field, " " + fmt.Sprintf(format, args...)}
	}
	oneOf := func(field string, value any, allowed ...string) error {
		if v := fmt.Sprint(value); !slices.Contains(allowed, v) {
			return bad(field, "is %q; allowed: %s", v, strings.Join(slices.DeleteFunc(allowed, func(a string) bool { return a == "" }), ", "))
		}
		return nil
	}
	within := func(field string, value, low, high float64) error {
		if value >= low && value <= high { // false for NaN
			return nil
		}
		if high == math.MaxFloat64 {
			return bad(field, "is %s; it must be %s or more", plain(value), plain(low))
		}
		return bad(field, "is %s; it must lie between %s and %s", plain(value), plain(low), plain(high))
	}
	optional := func(field string, value *int64) error {
		if value == nil {
			return nil
		}
		return within(field, float64(*value), 0, maxSteps)
	}
	const finite = math.MaxFloat64
	errs := []error{
		within("batch_size", float64(c.BatchSize), 1, 1<<20),
		within("micro_batch_size", float64(c.MicroBatchSize), 0, float64(c.BatchSize)),
		within("steps", float64(c.Steps), 0, maxSteps),
		oneOf("optimizer.name", c.Optimizer.Name, "adamw"),
		within("optimizer.eps", c.Optimizer.Epsilon, 0, finite),
		within("optimizer.weight_decay", c.Optimizer.WeightDecay, 0, finite),
		oneOf("optimizer.decay", c.Optimizer.Decay, string(DecayTorch), string(DecayOptimus)),
		within("optimizer.clip", c.Optimizer.Clip, 0, finite),
		oneOf("schedule.name", c.Schedule.Name, "cosine"),
		within("schedule.learning_rate", c.Schedule.LearningRate, 0, finite),
		optional("schedule.warmup_steps", c.Schedule.WarmupSteps),
		oneOf("schedule.warmup_from", c.Schedule.WarmupFrom, string(WarmupFromZero), string(WarmupFromMin)),
		within("schedule.decay_steps", float64(c.Schedule.DecaySteps), 0, maxSteps),
		oneOf("aux_loss.form", c.AuxLoss.Form, "", string(moe.AuxHF), string(moe.AuxMegaBlocks), string(moe.AuxNone)),
		within("aux_loss.coefficient", c.AuxLoss.Coefficient, 0, finite),
		within("z_loss.coefficient", c.ZLoss.Coefficient, 0, finite),
		within("threads", float64(c.Threads), 0, 4096),
		optional("checkpoint.every", c.Checkpoint.Every),
		within("checkpoint.keep", float64(c.Checkpoint.Keep), 1, 1<<20),
		optional("evaluate.every", c.Evaluate.Every),
		within("evaluate.samples", float64(c.Evaluate.Samples), 1, 1<<30),
		oneOf("plan_change", c.PlanChange, string(RefusePlanChange), string(AcceptPlanChange)),
	}
	if b := c.Optimizer.Betas; len(b) != 2 || !(b[0] >= 0 && b[0] < 1 && b[1] >= 0 && b[1] < 1) {
		errs = append(errs, bad("optimizer.betas", "is %v; it must be two numbers of 0 or more and below 1", b))
	}
	if c.Plan == "" {
		errs = append(errs, bad("plan", "is empty; it must name the plan.json that mula blend wrote"))
	}
	if c.Output == "" {
		errs = append(errs, bad("output", "is empty; it must name the run directory"))
	}
	if c.Precision != "fp32" {
		errs = append(errs, bad("precision", "is %q; this version computes in fp32 only", c.Precision))
	}
	if c.Device != "cpu" {
		errs = append(errs, bad("device", "is %q; this version computes on the cpu only", c.Device))
	}
	if low := c.Schedule.MinLearningRate; low != nil {
		errs = append(errs, within("schedule.min_learning_rate", *low, 0, c.Schedule.LearningRate))
	}
	if form := c.AuxLoss.Form; c.Model.Architecture == moe.OLMo && form != "" && form != moe.AuxNone {
		errs = append(errs, bad("aux_loss.form", "is %q, but a dense model has no router to balance; allowed: none", form))
	}
	if z := c.ZLoss.Coefficient; c.Model.Architecture == moe.OLMo && z != 0 {
		errs = append(errs, bad("z_loss.coefficient", "is %v, but a dense model has no router; it must be 0", z))
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// maxSteps bounds counts of steps: beyond 2⁵³ a float64, and so a reader of our JSON files, cannot tell neighbours apart.
const maxSteps = 1 << 53
