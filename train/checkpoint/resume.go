package checkpoint

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"mula/blend"
	"mula/train/optimizer"
)

// before has the former values of fields that older checkpoints do not contain, as JSON text.
var before = map[string]string{"spikes.action": `"none"`, "spikes.sigma": "6", "spikes.window": "128",
	"spikes.skip_steps": "100", "layout.uniform_routing": "false", "attention": `"window"`,
	"layout.gradients": `"fp32"`, "activations": `"fp32"`, "optimizer.moments": `"fp32"`}

// ofDecay lists the fields of a schedule that may change when a run resumes, if the learning rates
// of the completed steps stay the same; see [optimizer.Schedule.Agrees].
var ofDecay = []string{"schedule.decay_steps", "schedule.cooldown_steps", "schedule.cooldown",
	"schedule.min_learning_rate"}

// scheduleOf returns the schedule of a configuration. ok is false if a field of the schedule is
// missing or invalid.
func scheduleOf(fields map[string]string) (s optimizer.Schedule, ok bool) {
	var c optimizer.ScheduleConfig
	for name, value := range map[string]any{"name": &c.Name, "learning_rate": &c.LearningRate,
		"min_learning_rate": &c.MinLearningRate, "warmup_steps": &c.WarmupSteps, "warmup_from": &c.WarmupFrom,
		"decay_steps": &c.DecaySteps, "cooldown_steps": &c.CooldownSteps, "cooldown": &c.Cooldown} {
		if text, ok := fields["schedule."+name]; ok && json.Unmarshal([]byte(text), value) != nil {
			return optimizer.Schedule{}, false
		}
	}
	if c.WarmupSteps == nil {
		return optimizer.Schedule{}, false
	}
	return c.Schedule(), true
}

// CheckConfig returns an error if a run cannot resume from the state, because its configuration
// would have given other weights. now is the run's value for [State.Config]. renamed has the
// current full names of fields by their former names. The error lists all differences.
func (s State) CheckConfig(now, renamed map[string]string) error {
	saved := make(map[string]string, len(s.Config))
	for name, value := range s.Config {
		if current, ok := renamed[name]; ok {
			name = current
		}
		saved[name] = value
	}
	old, oldOK := scheduleOf(saved)
	schedule, ok := scheduleOf(now)
	agrees := oldOK && ok && old.Agrees(schedule, s.Step)
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
	case old.Name == optimizer.WSD && old.Warmup == schedule.Warmup && s.Step > min(old.Stable(), schedule.Stable()):
		hint = fmt.Sprintf("the length of schedule %s may change before its learning rate begins to fall, here up "+
			"to step %d, but the checkpoint is of step %d: to resume from an older checkpoint, move the newer ones "+
			"away; to make the run longer at schedule.min_learning_rate, set steps and keep "+
			"schedule.decay_steps at %s; otherwise %s",
			optimizer.WSD, min(old.Stable(), schedule.Stable()), s.Step, decay, hint)
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

// CheckPlan returns an error if a run on a plan cannot resume from the checkpoint. path is the file
// of the plan. accept allows a plan with other samples.
func (c *Checkpoint) CheckPlan(plan *blend.Plan, path string, accept bool) error {
	now := plan.Fingerprint()
	if c.State.Cursor.Plan != now && !accept {
		shared, descends := plan.Shared(c.State.Cursor.Plan)
		switch {
		case !descends:
			return fmt.Errorf("%s was made with plan %.16s…, but %s is plan %.16s…; use the run's plan, or set "+
				"plan_change: accept to resume at position %d of the new plan",
				c.Dir, c.State.Cursor.Plan, path, now, c.State.Cursor.Position)
		case c.State.Cursor.Position > shared:
			return fmt.Errorf("%s was made with plan %.16s… up to position %d, but %s, plan %.16s…, amends "+
				"that plan from position %d on; amend it at position %d or later, or set plan_change: accept to "+
				"resume at position %d of the amended plan", c.Dir,
				c.State.Cursor.Plan, c.State.Cursor.Position, path, now, shared,
				c.State.Cursor.Position, c.State.Cursor.Position)
		}
	}
	if c.State.SequenceLength != plan.SequenceLength {
		return fmt.Errorf("%s was made with samples of %d tokens, but %s has samples of %d, and a run cannot "+
			"change its sequence length; build the plan with the old length, or start a new run in another output",
			c.Dir, c.State.SequenceLength, path, plan.SequenceLength)
	}
	if hash := plan.TokenizerHash(); c.State.Tokenizer != hash && c.State.Tokenizer != "" && hash != "" {
		return fmt.Errorf("%s was trained with the tokenizer %.16s… (SHA-256), but the shards of %s were made "+
			"with %.16s…, whose ids mean different text; tokenize with the old tokenizer, or start a new run in "+
			"another output", c.Dir, c.State.Tokenizer, path, hash)
	}
	return nil
}
