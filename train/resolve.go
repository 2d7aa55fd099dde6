package train

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/goccy/go-yaml"

	"mula/blend"
	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/internal/strictyaml"
	"mula/moe"
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
	if n := c.Layout.CP; n > 1 && p.SequenceLength%n != 0 {
		return bad("layout.cp", "is %d; must divide the length of the plan's windows, which is %d tokens", n,
			p.SequenceLength)
	}
	if cp, tp := c.Layout.CP, c.Layout.TP; tp > 1 && p.SequenceLength%(cp*tp) != 0 {
		return bad("layout.tp", "is %d, but layout.tp · layout.cp = %d must divide the length of the plan's windows, "+
			"which is %d tokens", tp, cp*tp, p.SequenceLength)
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
			"steps, or build a longer plan", c.Steps, p.Length(), batches, c.BatchSize)
	}
	if c.Attention == "" {
		c.Attention = samples.DefaultAttention(p.Traits().Padded)
	}
	if c.Layout.Gradients == "" {
		c.Layout.Gradients = c.Precision.Weights().String()
	}
	c.Optimizer.Resolve()
	if err := c.Schedule.Resolve(c.Steps); err != nil {
		return Config{}, err
	}
	if c.AuxLoss.Form == "" {
		c.AuxLoss.Form = moe.AuxHF
		if c.Model.Dense() {
			c.AuxLoss.Form = moe.AuxNone
		}
	}
	if c.AuxLoss.Form == moe.AuxNone {
		c.AuxLoss.Coefficient = 0
	}
	if c.RouterBias.UpdateSpeed == nil && c.Model.HasBiases() {
		speed := defaultUpdateSpeed
		c.RouterBias.UpdateSpeed = &speed
	}
	if n := c.Model.PredictionLayers; n > 0 {
		if p.SequenceLength <= n {
			return bad("model.num_nextn_predict_layers", "is %d, but the plan's windows have %d tokens; must be below "+
				"the window length", n, p.SequenceLength)
		}
		if c.PredictionLoss.Coefficient == nil {
			coefficient := defaultPredictionCoefficient
			c.PredictionLoss.Coefficient = &coefficient
		}
	}
	if c.Checkpoint.Every == nil {
		every := min(1000, (c.Steps+9)/10)
		c.Checkpoint.Every = &every
	}
	if n, every := c.Checkpoint.KeepEvery, *c.Checkpoint.Every; n > 0 && (every == 0 || n%every != 0) {
		return bad("checkpoint.keep_every", "is %d and must be a multiple of checkpoint.every, which is %d; change "+
			"one of them", n, every)
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
			"build the plan again, or set this field to 0", *c.Evaluate.Every)
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
func (c Config) write(fsys filesystem.FS, path string) error {
	for _, p := range []*string{&c.Plan, &c.Output, &c.Tokenizer, &c.InitializeFrom} {
		if *p == "" || objects.IsURL(*p) {
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
	return atomicfile.On(fsys).WriteFile(path, append([]byte(rundir.ConfigComment), data...))
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
	"device", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_every", "checkpoint.writers",
	"checkpoint.background", "checkpoint.copies", "checkpoint.keep_copies", "checkpoint.snapshot_every",
	"checkpoint.snapshot_dir", "evaluate.every", "evaluate.samples", "spikes.max_skips",
	"spikes.max_rollbacks", "log.update_ratio_every", "log.expert_counts_every",
	"log.slow_factor", "log.slow_steps", "metrics_listen", "plan_change", "verify", "reverify_seconds",
	// These determine where something is computed, and the order of sums. They change at most the
	// last bits, and State.Arithmetic records them.
	"layout.expert_dp", "layout.ep", "layout.pp", "layout.virtual_stages", "layout.tp", "layout.cp",
	"layout.optimizer", "layout.dispatch", "layout.sums",
	"layout.sum_replicas", "layout.norm", "layout.transport", "layout.check_replicas_every"}

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
