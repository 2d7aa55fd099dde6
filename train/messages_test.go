package train

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
)

// What only the plan shows to be wrong with a configuration is reported with file, line and field,
// too.
func TestErrorsOfPlanHaveLines(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const head = "steps: 2\nbatch_size: 8\n"
	for text, want := range map[string]string{
		"model:\n  preset: mula-nano\n  vocab_size: 5\n": "train.yaml:5: model.vocab_size is " +
			"5, but the plan's tokenizer has",
		"model:\n  preset: mula-nano\n  max_position_embeddings: 3\n": "train.yaml:5: model.max_position_embeddings " +
			"is 3, but",
		"model:\n  preset: mula-nano\n  num_experts_per_tok: 99\n": "train.yaml:5: model.num_experts_per_tok is 99",
		"model:\n  preset: mula-nano\n\n  num_attention_heads: 5\n": "train.yaml:4: model.hidden_size 64 " +
			"is not a multiple of num_attention_heads 5",
		"model:\n  preset: mula-nano\n  num_key_value_heads: 3\n": "train.yaml:5: model.num_key_value_heads 3 " +
			"does not divide",
		"model:\n  preset: mula-nano\n  model_type: gpt2\n":           `train.yaml:5: model.model_type is "gpt2"`,
		"model: {preset: mula-nano}\n\nschedule: {warmup_steps: 5}\n": "train.yaml:5: schedule.warmup_steps is 5, but",
		"model: {preset: mula-nano}\nschedule: {name: wsd, warmup_steps: 2}\n": "train.yaml:4: schedule.warmup_steps " +
			"is 2, which leaves no steps of schedule.decay_steps",
		"model: {preset: mula-nano}\ncheckpoint: {}\n\n\nsteps_: 1\n": `train.yaml:7: unknown field "steps_"; did you mean "steps"?`,
		"model: {preset: mula-nano}\ninitialize_from: \"\"\nlayout:\n  ep: 3\n": "train.yaml:6: layout.ep is 3, " +
			"which does not divide",
		"model: {preset: mula-nano}\nmicro_batch_size: 1\nlayout: {expert_dp: 4, ep: 4}\n": "train.yaml:2: " +
			"batch_size is 8; must be a multiple of",
		"model: {preset: mula-nano}\noutput: PLAN\n": "train.yaml:4: output is PLAN, " +
			"but PLAN is a file; write the path of a directory for the run",
	} {
		text, want = strings.ReplaceAll(text, "PLAN", plan), strings.ReplaceAll(want, "PLAN", plan)
		c, err := ParseConfig([]byte(head+text), "train.yaml")
		if err == nil {
			if c.Plan = plan; !strings.Contains(text, "output:") {
				c.Output = filepath.Join(t.TempDir(), "run")
			}
			_, err = Run(context.Background(), c, Options{})
			err = c.Locate(err)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v\nwant %s", text, err, want)
		}
	}
}
