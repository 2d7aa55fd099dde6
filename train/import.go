package train

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"mula/blend"
	"mula/train/checkpoint"
	"mula/train/foreign"
	"mula/train/optimizer"
	"mula/train/rundir"
	"mula/xpu"
)

// An Imported describes a checkpoint that [Import] has written.
type Imported struct {
	Checkpoint string   `json:"checkpoint"`
	Step       int64    `json:"step"`     // of the run
	Updates    int64    `json:"updates"`  // of the optimizer
	Position   int64    `json:"position"` // in the plan
	Weights    string   `json:"weights_sha256"`
	Notes      []string `json:"notes,omitempty"`
}

// ImportOptions are the options of [Import].
type ImportOptions struct {
	Step     int64 // steps done of the run; -1: the steps that read the samples of the checkpoint
	Progress func(done, total int64)
}

// Import writes the first checkpoint of the run of a train.yaml, which has the training state in a
// checkpoint of another framework: weights, moments, the number of updates and the position in the
// data. `mula train` then resumes from it. The run must have no checkpoint. model is from
// [checkpoint.FindForeign].
func Import(ctx context.Context, config Config, model checkpoint.ModelDir, o ImportOptions) (result Imported,
	err error) {
	from := model.Foreign
	if err := config.Validate(); err != nil {
		return result, err
	}
	plan, err := config.ReadPlan()
	if err != nil {
		return result, err
	}
	data, err := blend.Open(ctx, plan, blend.OpenOptions{Reverify: -1})
	if err != nil {
		return result, err
	}
	defer data.Close()
	if config, err = config.resolve(plan); err != nil {
		return result, err
	}
	if name := config.Optimizer.Name; name != optimizer.AdamW {
		return result, fmt.Errorf("optimizer.name is %s, but the moments in %s are AdamW's; set optimizer.name to %s, "+
			"or use only the weights: mula import --output, and initialize_from", name, from.Dir, optimizer.AdamW)
	}
	if from.NoMoments != nil {
		return result, fmt.Errorf("%w; or use only the weights: mula import --output, and initialize_from",
			from.NoMoments)
	}
	if err := model.CheckConfig(config.Model.Config); err != nil {
		return result, err
	}
	if err := model.CheckTokenizer(ctx, plan); err != nil {
		return result, err
	}
	step, err := firstStep(from, config, o.Step)
	if err != nil {
		return result, err
	}
	tokenizer, err := readTokenizer(config.Tokenizer, plan)
	if err != nil {
		return result, err
	}
	dir, err := rundir.Open(nil, config.Output)
	if err != nil {
		return result, err
	}
	defer dir.Close()
	if saved, _, err := checkpoint.Find(ctx, config.Output); err == nil {
		return result, fmt.Errorf("%s has %s; name another output, or remove it", config.Output, saved.Name())
	} else if !errors.Is(err, checkpoint.ErrNone) {
		return result, err
	}
	r := &run{config: config, data: data}
	state := r.newState()
	state.Step, state.Updates = step, from.Updates
	state.Cursor.Position = step * int64(config.BatchSize)
	state.Tokens = state.Cursor.Position * int64(plan.SequenceLength)
	state.Arithmetic = from.Form
	if state.Spikes != nil {
		state.Spikes.Began = from.Form // no weights have this hash, so that the run cannot restart without it
	}
	err = checkpoint.Import(ctx, dir.Join(checkpoint.DirName), from, config.Model.Config, &state,
		checkpoint.ImportOptions{Masters: config.Precision.Weights() == xpu.BFloat16, Tokenizer: tokenizer,
			Progress: o.Progress})
	if err != nil {
		return result, fmt.Errorf("importing %s: %w", from.Dir, err)
	}
	result = Imported{Checkpoint: dir.Join(filepath.Join(checkpoint.DirName, checkpoint.Name(step))), Step: step,
		Updates: state.Updates, Position: state.Cursor.Position, Weights: state.Weights}
	if from.Settings != "" {
		result.Notes = append(result.Notes, "the checkpoint's optimizer has "+from.Settings+"; train.yaml decides")
	}
	return result, nil
}

// firstStep returns the number of steps of batch_size samples that have read the samples of a
// checkpoint, or want if it is not negative.
func firstStep(from *foreign.State, config Config, want int64) (int64, error) {
	batch := int64(config.BatchSize)
	step := want
	switch {
	case want >= 0:
	case from.Samples < 0:
		step = from.Step
	case from.Samples%batch != 0:
		return 0, fmt.Errorf("%s has read %d samples in %d steps, not a multiple of batch_size %d; set "+
			"batch_size to a divisor, or name the run's first step with --step", from.Dir, from.Samples,
			from.Step, batch)
	default:
		step = from.Samples / batch
	}
	if step >= config.Steps {
		return 0, fmt.Errorf("%s is at step %d, but the run has %d steps of %d samples; build a longer plan, or start "+
			"at the beginning of the plan with --step 0", from.Dir, step, config.Steps, batch)
	}
	return step, nil
}
