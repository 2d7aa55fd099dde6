package optimizer

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"mula/internal/strictyaml"
	"mula/moe"
	"mula/train/estimate"
	"mula/xpu"
)

// Config describes the optimizer. An unset field gets the optimizer's default when the run
// starts. A field that the optimizer does not use must be unset.
type Config struct {
	Name    Name      `yaml:"name"`            // default "adamw"
	Betas   []float64 `yaml:"betas,omitempty"` // β₁ and β₂
	Epsilon *float64  `yaml:"eps,omitempty"`
	// for all parameters without a group, including norms and embeddings
	WeightDecay *float64  `yaml:"weight_decay,omitempty"`
	Decay       DecayForm `yaml:"decay,omitempty"`
	Moments     string    `yaml:"moments,omitempty"` // type of the moments in memory: fp32 or bf16

	// Of SophiaG.
	Rho          *float64 `yaml:"rho,omitempty"`
	HessianEvery *int64   `yaml:"hessian_every,omitempty"` // updates between two estimates

	// Of Muon. Betas and Epsilon apply to the parameters that Muon leaves to AdamW.
	Momentum           *float64           `yaml:"momentum,omitempty"`
	Nesterov           *bool              `yaml:"nesterov,omitempty"`
	NewtonSchulzSteps  *int64             `yaml:"ns_steps,omitempty"`
	AdjustLearningRate AdjustLearningRate `yaml:"adjust_lr_fn,omitempty"`

	// Of ScheduleFreeAdamW. The weight of an update in the average is its number to this power
	R             *float64 `yaml:"r,omitempty"`
	WeightLRPower *float64 `yaml:"weight_lr_power,omitempty"` // times the largest learning rate so far to this power

	Clip            float64 `yaml:"clip"`              // maximum norm of the whole gradient; 0 = no clipping
	ClipAfterWarmup bool    `yaml:"clip_after_warmup"` // clip only after the warm-up, as Optimus does

	Groups []ParameterGroup `yaml:"groups,omitempty"` // parameters with other settings; default none
}

// Name names an optimizer. Each file NAME.go has a name, and the optimizer's
// formulas, paper and reference implementation.
type Name string

// DecayForm is the place of weight decay in an AdamW update.
type DecayForm string

// The forms of weight decay; see [AdamW].
const (
	DecayTorch   DecayForm = "torch"   // before the update, as torch.optim.AdamW does; default
	DecayOptimus DecayForm = "optimus" // after the update, as Optimus does
)

// AdjustLearningRate is the factor on the learning rate of an m×n matrix in a [Muon] update.
type AdjustLearningRate string

// The adjustments of the learning rate, named as in torch.optim.Muon.
const (
	// 0.2·√max(m, n), so that updates are as large as AdamW's; default
	AdjustMatchRMSAdamW AdjustLearningRate = "match_rms_adamw"
	AdjustOriginal      AdjustLearningRate = "original" // √max(1, m/n)
)

// ScheduleConfig describes the learning rate; see [Schedule]. A field that the schedule does not
// use must be unset.
type ScheduleConfig struct {
	Name         ScheduleName `yaml:"name"` // default "cosine"
	LearningRate float64      `yaml:"learning_rate"`
	// default: a tenth of learning_rate for cosine, 0 for linear and wsd
	MinLearningRate *float64 `yaml:"min_learning_rate,omitempty"`
	// default: a tenth of decay_steps (of steps for constant), at most 2500
	WarmupSteps *int64     `yaml:"warmup_steps"`
	WarmupFrom  WarmupFrom `yaml:"warmup_from"`
	// step at which the minimum is reached; 0 = default: steps
	DecaySteps int64 `yaml:"decay_steps"`
	// the last steps of decay_steps, in which wsd decays; default: a fifth of decay_steps, or the
	// steps after the warm-up if they are fewer
	CooldownSteps *int64       `yaml:"cooldown_steps,omitempty"`
	Cooldown      CooldownForm `yaml:"cooldown,omitempty"`
}

// ScheduleName names a schedule.
type ScheduleName string

// The schedules; see [Schedule].
const (
	Cosine   ScheduleName = "cosine"
	Linear   ScheduleName = "linear"
	WSD      ScheduleName = "wsd" // warm-up, stable, decay
	Constant ScheduleName = "constant"
)

// scheduleFields has the optional fields of each schedule. Only the value of cooldown is a default;
// the other defaults depend on other fields.
var scheduleFields = map[ScheduleName]ScheduleConfig{
	Cosine:   {MinLearningRate: new(0.0)},
	Linear:   {MinLearningRate: new(0.0)},
	WSD:      {MinLearningRate: new(0.0), CooldownSteps: new(int64(0)), Cooldown: CooldownOneMinusSqrt},
	Constant: {},
}

// CooldownForm is the curve of the learning rate in the cooldown of [WSD].
type CooldownForm string

// The forms of a cooldown; see [Schedule].
const (
	CooldownOneMinusSqrt CooldownForm = "1-sqrt" // default
	CooldownLinear       CooldownForm = "linear"
)

// WarmupFrom is the learning rate at the start of the warm-up.
type WarmupFrom string

// The starts of a warm-up.
const (
	WarmupFromZero WarmupFrom = "zero" // OLMoE, torchtitan; default
	WarmupFromMin  WarmupFrom = "min"  // at min_learning_rate, as Optimus does
)

// Resolve sets the unset fields that the optimizer uses to their defaults.
func (c *Config) Resolve() {
	if len(c.Groups) == 0 {
		c.Groups = nil // as if the file did not have the field
	}
	defaults := specs[c.Name].defaults
	own := optionalFields(reflect.ValueOf(&defaults).Elem())
	for i, f := range optionalFields(reflect.ValueOf(c).Elem()) {
		if !f.value.IsZero() || own[i].value.IsZero() {
			continue
		}
		switch value := own[i].value; value.Kind() {
		case reflect.Pointer: // a copy, because all configurations share the defaults
			f.value.Set(reflect.New(value.Type().Elem()))
			f.value.Elem().Set(value.Elem())
		case reflect.Slice:
			f.value.Set(reflect.AppendSlice(reflect.Zero(value.Type()), value))
		default:
			f.value.Set(value)
		}
	}
}

// Resolve sets every field that the schedule uses to its value for a run with the given number of
// steps. It returns an error if the fields contradict each other.
func (c *ScheduleConfig) Resolve(steps int64) error {
	length := steps
	if c.Name != Constant {
		if c.DecaySteps == 0 {
			c.DecaySteps = steps
		}
		length = c.DecaySteps
	}
	if c.WarmupSteps == nil {
		c.WarmupSteps = new(min(2500, length/10))
	}
	if *c.WarmupSteps > length {
		field := "schedule.decay_steps"
		if c.Name == Constant {
			field = "steps"
		}
		return &strictyaml.FieldError{Field: "schedule.warmup_steps", Message: fmt.Sprintf(" is %d, but %s is %d, so "+
			"schedule.learning_rate would never be reached; lower the first or raise the second",
			*c.WarmupSteps, field, length)}
	}
	if c.MinLearningRate == nil && c.Name != Constant {
		c.MinLearningRate = new(0.0)
		if c.Name == Cosine {
			*c.MinLearningRate = c.LearningRate / 10
		}
	}
	if c.Name != WSD {
		return nil
	}
	if c.Cooldown == "" {
		c.Cooldown = CooldownOneMinusSqrt
	}
	left := length - *c.WarmupSteps
	if left == 0 {
		return &strictyaml.FieldError{Field: "schedule.warmup_steps",
			Message: fmt.Sprintf(" is %d, which leaves no steps of "+
				"schedule.decay_steps for the cooldown; lower the first or raise the second", length)}
	}
	if c.CooldownSteps == nil {
		c.CooldownSteps = new(min(max(1, length/5), left))
	}
	if *c.CooldownSteps > left {
		return &strictyaml.FieldError{Field: "schedule.cooldown_steps",
			Message: fmt.Sprintf(" is %d, but schedule.warmup_steps of %d leaves %d of schedule.decay_steps; lower "+
				"one of the first two or raise the last", *c.CooldownSteps, *c.WarmupSteps, left)}
	}
	return nil
}

// Schedule returns the schedule of resolved settings.
func (c ScheduleConfig) Schedule() Schedule {
	s := Schedule{Name: c.Name, Peak: c.LearningRate, Warmup: *c.WarmupSteps,
		Decay: c.DecaySteps}
	if c.MinLearningRate != nil {
		s.Min = *c.MinLearningRate
	}
	if c.CooldownSteps != nil {
		s.Cooldown, s.CooldownForm = *c.CooldownSteps, c.Cooldown
	}
	if c.WarmupFrom == WarmupFromMin {
		s.Start = s.Min
	}
	return s
}

// Foreign returns an error about a field that the optimizer does not use, or nil.
func (c Config) Foreign() error {
	return foreignField("optimizer.", c.Name, c, defaults())
}

// Foreign returns an error about a field that the schedule does not use, or nil.
func (c ScheduleConfig) Foreign() error {
	return foreignField("schedule.", c.Name, c, scheduleFields)
}

// Check returns errors about settings that the optimizer does not support.
func (c Config) Check(schedule ScheduleConfig) []error {
	if spec := specs[c.Name]; spec != nil && spec.check != nil {
		return spec.check(c, schedule)
	}
	return nil
}

// moments returns the type of the moments in memory.
func (c Config) moments() xpu.DType {
	if c.Moments == xpu.BFloat16.String() {
		return xpu.BFloat16
	}
	return xpu.Float32
}

// MomentBytes returns the bytes of an element of the optimizer's state in memory.
func (c Config) MomentBytes() int { return c.moments().Bytes() }

// NeedsWholeTensors reports whether an update needs complete tensors, which ranks cannot divide by
// elements. Ranks of [mula/xpu/comm.TP] still divide their matrices: see [Name.SliceUpdate].
// Their gradients must be float32, because updates are computed in their memory.
func (n Name) NeedsWholeTensors() bool {
	spec := specs[n]
	return spec != nil && spec.whole != nil
}

// Averages reports whether evaluation uses averages of the weights; see [Optimizer.Average].
func (n Name) Averages() bool { return specs[n].averages }

// State returns the number of tensors in the state of a parameter.
func (n Name) State(parameter string, shape []int) int { return len(specs[n].state(parameter, shape)) }

// SliceUpdate returns what ranks that share matrices exchange for an update.
func (n Name) SliceUpdate() estimate.SliceUpdate { return specs[n].slices }

// ScratchBytes returns the bytes of device memory and of host memory for intermediate results, on
// one of tp ranks that share matrices.
func (n Name) ScratchBytes(m moe.Config, threads, tp int) (device, host int64) {
	if scratch := specs[n].scratch; scratch != nil {
		return scratch(m, threads, tp)
	}
	return 0, 0
}

// foreignField returns an error that names a field which is set although the optimizer or schedule
// does not use it. fields has the fields that each optimizer or schedule uses.
func foreignField[N ~string, C any](prefix string, name N, config C, fields map[N]C) error {
	own, ok := fields[name]
	if !ok {
		return nil
	}
	for i, f := range optionalFields(reflect.ValueOf(&config).Elem()) {
		if f.value.IsZero() || !optionalFields(reflect.ValueOf(&own).Elem())[i].value.IsZero() {
			continue
		}
		var others []string
		for other, c := range fields {
			if !optionalFields(reflect.ValueOf(&c).Elem())[i].value.IsZero() {
				others = append(others, string(other))
			}
		}
		slices.Sort(others)
		return &strictyaml.FieldError{Field: prefix + f.name,
			Message: fmt.Sprintf(" is %v, but %s has no such setting; the "+
				"setting belongs to %s", reflect.Indirect(f.value), name, strings.Join(others, ", "))}
	}
	return nil
}

// An optionalField is a field that not every optimizer or schedule has.
type optionalField struct {
	name  string
	value reflect.Value
}

func optionalFields(v reflect.Value) []optionalField {
	var fields []optionalField
	for i := range v.NumField() {
		// Every optimizer has groups.
		if name, options, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ","); options == "omitempty" &&
			name != "groups" {
			fields = append(fields, optionalField{name, v.Field(i)})
		}
	}
	return fields
}

// ListText formats a list as YAML.
func ListText(list []float64) string {
	texts := make([]string, len(list))
	for i, x := range list {
		texts[i] = strconv.FormatFloat(x, 'g', -1, 64)
	}
	return "[" + strings.Join(texts, ", ") + "]"
}
