package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/goccy/go-yaml"

	"mula/blend"
	"mula/internal/atomicfile"
	"mula/internal/strictyaml"
	"mula/moe"
	"mula/train/checkpoint"
	"mula/train/optimizer"
	"mula/train/rundir"
	"mula/train/samples"
)

// resolve sets every field to its value for a run on plan p. It returns an error if a field does
// not fit the plan.
func (c Config) resolve(p *blend.Plan) (Config, error) {
	bad := func(field, format string, args ...any) (Config, error) {
		return Config{}, &strictyaml.FieldError{Field: field, Message: " " + fmt.Sprintf(format, args...)}
	}
	if err := c.Model.resolve(p.Tokenizer); err != nil {
		return Config{}, err
	}
	if p.SequenceLength > c.Model.MaxPositions {
		return bad("model.max_position_embeddings",
			"is %d, but the plan's windows have %d tokens; must be at least the window length",
			c.Model.MaxPositions, p.SequenceLength)
	}
	if c.MicroBatchSize == 0 {
		c.MicroBatchSize = min(8, c.BatchSize)
	}
	batches := p.Length() / int64(c.BatchSize)
	if c.Steps == 0 {
		c.Steps = batches
	}
	if batches == 0 {
		return bad("batch_size",
			"is %d, but the plan has %d positions, less than one step; lower batch_size, or build a longer plan",
			c.BatchSize, p.Length())
	}
	if c.Steps > batches {
		return bad("steps", "is %d, but the plan has %d positions, enough for %d steps of batch_size %d; lower "+
			"steps, or build a longer plan",
			c.Steps, p.Length(), batches, c.BatchSize)
	}
	if c.Attention == "" {
		c.Attention = samples.DefaultAttention(p.Traits().Padded)
	}
	c.Optimizer.Resolve()
	if err := c.Schedule.Resolve(c.Steps); err != nil {
		return Config{}, err
	}
	if c.AuxLoss.Form == "" {
		c.AuxLoss.Form = moe.AuxHF
		if c.Model.Architecture == moe.OLMo {
			c.AuxLoss.Form = moe.AuxNone
		}
	}
	if c.AuxLoss.Form == moe.AuxNone {
		c.AuxLoss.Coefficient = 0
	}
	if c.Checkpoint.Every == nil {
		every := min(1000, (c.Steps+9)/10)
		c.Checkpoint.Every = &every
	}
	validation := slices.ContainsFunc(p.Sources, func(s blend.Source) bool { return s.Validation > 0 })
	if c.Evaluate.Every == nil {
		var every int64
		if validation {
			every = *c.Checkpoint.Every
		}
		c.Evaluate.Every = &every
	}
	if *c.Evaluate.Every > 0 && !validation {
		return bad("evaluate.every", "is %d, but the plan has no validation split; set validation in blend.yaml and "+
			"build the plan again, or set this field to 0",
			*c.Evaluate.Every)
	}
	return c, c.Validate()
}

// resolve sets the fields whose defaults come from the plan's tokenizer. t is nil if the plan does
// not have a tokenizer.
func (m *ModelConfig) resolve(t *blend.Tokenizer) error {
	if t != nil {
		if m.VocabSize < t.Vocabulary {
			if m.given["vocab_size"] {
				return &strictyaml.FieldError{Field: "model.vocab_size", Message: fmt.Sprintf(" is %d, but the plan's "+
					"tokenizer has %d ids; must be at least the number of ids", m.VocabSize, t.Vocabulary)}
			}
			m.VocabSize = (t.Vocabulary + 63) / 64 * 64
		}
		if int64(m.EOSTokenID) != t.EOD {
			for field, id := range map[string]*int{"pad_token_id": &m.PadTokenID, "bos_token_id": &m.BOSTokenID,
				"eos_token_id": &m.EOSTokenID} {
				if !m.given[field] {
					*id = moe.NoToken
				}
			}
			if !m.given["eos_token_id"] {
				m.EOSTokenID = int(t.EOD) // -1 means none in both
			}
		}
	}
	var field *moe.FieldError
	if err := m.Config.Validate(); errors.As(err, &field) {
		return &strictyaml.FieldError{Field: "model." + field.Field, Message: " " + field.Problem}
	} else if err != nil {
		return err
	}
	return nil
}

// write writes a resolved configuration as a train.yaml of the same run. Its paths are relative to
// its directory, so that a tree of files can be moved.
func (c Config) write(path string) error {
	for _, p := range []*string{&c.Plan, &c.Output, &c.Tokenizer, &c.InitializeFrom} {
		if *p == "" {
			continue
		}
		relative, err := relativePath(filepath.Dir(path), *p)
		if err != nil {
			return fmt.Errorf("writing %s: %w", path, err)
		}
		*p = relative
	}
	data, err := yaml.Marshal(c)
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return atomicfile.WriteFile(path, append([]byte(rundir.ConfigComment), data...))
}

// relativePath returns path relative to dir, or an absolute path if there is no relative path, such
// as between Windows drives.
func relativePath(dir, path string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if path, err = filepath.Abs(path); err != nil {
		return "", err
	}
	if relative, err := filepath.Rel(dir, path); err == nil {
		return relative, nil
	}
	return path, nil
}

// free lists the fields that may change when a run resumes: they do not change what a step
// computes. The plan is in the list because its fingerprint is compared instead, and steps because
// schedule.decay_steps is compared instead: a longer run continues with the same schedule.
var free = []string{"plan", "output", "tokenizer", "initialize_from", "model.preset", "steps", "threads", "recompute",
	"device", "checkpoint.every", "checkpoint.keep",
	"evaluate.every", "evaluate.samples", "spikes.max_skips", "spikes.max_rollbacks", "log.update_ratio_every",
	"metrics_listen", "plan_change", "verify", "reverify_seconds",
	// These determine where something is computed, and the order of sums. They change at most the
	// last bits, and State.Arithmetic records them.
	"layout.expert_dp", "layout.ep", "layout.pp", "layout.tp", "layout.optimizer", "layout.dispatch", "layout.sums",
	"layout.transport", "layout.check_replicas_every"}

// before has the former values of fields that older checkpoints do not contain, as JSON text.
var before = map[string]string{"spikes.action": `"none"`, "spikes.sigma": "6", "spikes.window": "128",
	"spikes.skip_steps":      "100",
	"layout.uniform_routing": "false", "attention": `"window"`}

// identity returns the fields of a resolved configuration that determine the weights, as JSON text
// by full name. Two runs on one plan with the same identity and the same kind of device have
// bit-identical weights after the same number of steps.
func (c Config) identity() map[string]string {
	fields := strictyaml.Fields(c)
	for _, name := range free {
		delete(fields, name)
	}
	return fields
}

// currentFields returns fields by their current full names, such as "layout.expert_dp" for
// "layout.dp".
func currentFields(fields map[string]string) map[string]string {
	current := make(map[string]string, len(fields))
	for name, value := range fields {
		if now, ok := oldFields()[name]; ok {
			name = now
		}
		current[name] = value
	}
	return current
}

var oldFields = sync.OnceValue(func() map[string]string { return strictyaml.OldNames(&Config{}) })

// ofDecay lists the fields of a schedule that may change when a run resumes, if the learning rates
// of the completed steps stay the same; see [optimizer.Schedule.agrees].
var ofDecay = []string{"schedule.decay_steps", "schedule.cooldown_steps", "schedule.cooldown",
	"schedule.min_learning_rate"}

// scheduleOf returns the schedule of an identity. ok is false if a field of the schedule is missing
// or invalid.
func scheduleOf(identity map[string]string) (s optimizer.Schedule, ok bool) {
	var c Config
	for name, value := range map[string]any{"name": &c.Schedule.Name, "learning_rate": &c.Schedule.LearningRate,
		"min_learning_rate": &c.Schedule.MinLearningRate,
		"warmup_steps":      &c.Schedule.WarmupSteps, "warmup_from": &c.Schedule.WarmupFrom,
		"decay_steps":    &c.Schedule.DecaySteps,
		"cooldown_steps": &c.Schedule.CooldownSteps, "cooldown": &c.Schedule.Cooldown} {
		if text, ok := identity["schedule."+name]; ok && json.Unmarshal([]byte(text), value) != nil {
			return optimizer.Schedule{}, false
		}
	}
	if c.Schedule.WarmupSteps == nil {
		return optimizer.Schedule{}, false
	}
	return c.Schedule.Schedule(), true
}

// compareIdentity compares the identity of a checkpoint after the given number of steps with the
// identity of the configuration that resumes from it. The error lists all differences.
func compareIdentity(saved, now map[string]string, steps int64) error {
	saved = currentFields(saved)
	old, oldOK := scheduleOf(saved)
	schedule, ok := scheduleOf(now)
	agrees := oldOK && ok && old.Agrees(schedule, steps)
	var differences []string
	// Another optimizer or schedule has other fields. Their differences are not listed.
	follows := func(name string) bool {
		section, _, _ := strings.Cut(name, ".")
		was, ok := saved[section+".name"]
		return ok && was != now[section+".name"]
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		old, ok := saved[name]
		if !ok {
			old, ok = before[name]
		}
		switch {
		case old == now[name] || agrees && slices.Contains(ofDecay, name):
		case !ok && follows(name):
		case !ok:
			differences = append(differences, fmt.Sprintf("%s was not set and is now %s", name, now[name]))
		default:
			differences = append(differences, fmt.Sprintf("%s was %s and is now %s", name, old, now[name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(saved)) {
		if _, ok := now[name]; !ok && !follows(name) {
			differences = append(differences, fmt.Sprintf("%s was %s and is now not set", name, saved[name]))
		}
	}
	if differences == nil {
		return nil
	}
	hint := "restore the old values, or set another output to start a new run"
	warmup, decay := saved["schedule.warmup_steps"], saved["schedule.decay_steps"]
	switch {
	case agrees || !oldOK || !ok || old.Name != schedule.Name:
	case old.Name == optimizer.WSD && old.Warmup == schedule.Warmup && steps > min(old.Stable(), schedule.Stable()):
		hint = fmt.Sprintf("the length of schedule %s may change before its learning rate begins to fall, here up "+
			"to step %d, but the checkpoint is of step %d: to resume from an older checkpoint, move the newer ones "+
			"away; to make the run longer at schedule.min_learning_rate, set steps and keep "+
			"schedule.decay_steps at %s; otherwise %s",
			optimizer.WSD, min(old.Stable(), schedule.Stable()), steps, decay, hint)
	case (old.Name == optimizer.WSD || old.Name == optimizer.Constant) && old.Warmup != schedule.Warmup:
		hint = fmt.Sprintf("to make the run longer, set the old warm-up explicitly, as schedule.warmup_steps: %s "+
			"(its default depends on the length); otherwise %s", warmup, hint)
	case (old.Name == optimizer.Cosine || old.Name == optimizer.Linear) && old.Decay != schedule.Decay:
		hint = fmt.Sprintf("schedule %s falls from the end of the warm-up, so another length would have given the "+
			"finished steps other learning rates; to change the length of the run but not its schedule, set steps "+
			"and keep schedule.decay_steps at %s, schedule.warmup_steps at %s; otherwise %s", old.Name,
			decay, warmup, hint)
	}
	return fmt.Errorf("cannot resume: train.yaml differs from the checkpoint: %s; %s", strings.Join(differences, ", "),
		hint)
}

// initialModel returns the model that initialize_from names. It fails if the model does not match
// the resolved configuration and the plan.
func (c Config) initialModel(ctx context.Context, p *blend.Plan, warn func(string, ...any)) (checkpoint.ModelDir,
	error) {
	bad := func(err error) (checkpoint.ModelDir, error) {
		return checkpoint.ModelDir{}, fmt.Errorf("initialize_from: %w", err)
	}
	from, refused, err := checkpoint.FindModel(ctx, c.InitializeFrom)
	for _, r := range refused {
		warn("initialize_from: checkpoint %s is damaged; using an older one: %s", r.Checkpoint, r.Error)
	}
	if err != nil {
		return bad(err)
	}
	model, err := moe.ReadConfig(from.Dir)
	if err != nil {
		return bad(err)
	}
	if differences := differentFields(model, c.Model.Config); differences != nil {
		return bad(fmt.Errorf("%s is a different model than train.yaml describes: %s; write its values under model",
			from.Dir, strings.Join(differences, ", ")))
	}
	if err := from.CheckTokenizer(ctx, p); err != nil {
		return bad(err)
	}
	return from, nil
}

// differentFields names the fields that differ between the model there and the configuration here,
// if they change the model's function or are needed for the plan's windows.
func differentFields(there, here moe.Config) []string {
	// These are for initialization or for other programs, or are compared with the plan.
	free := []string{"initializer_range", "initializer_cutoff", "router_aux_loss_coef", "bos_token_id", "eos_token_id",
		"max_position_embeddings"}
	a, b := strictyaml.Fields(there), strictyaml.Fields(here)
	var differences []string
	for _, name := range slices.Sorted(maps.Keys(a)) {
		if a[name] != b[name] && !slices.Contains(free, name) {
			differences = append(differences, fmt.Sprintf("model.%s is %s in the folder and %s in train.yaml", name,
				a[name], b[name]))
		}
	}
	return differences
}
