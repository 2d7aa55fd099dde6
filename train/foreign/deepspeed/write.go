package deepspeed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/internal/pickle"
	"mula/moe/safetensors"
	"mula/moe/torchfile"
	"mula/train/foreign"
)

// version is the version of DeepSpeed whose form of a universal checkpoint [Write] writes.
const version = "0.19.8"

// groups is the number of groups of parameters in optimizer_state.pt. DeepSpeed loads as many
// groups as the file and its optimizer both have. The groups of the file are empty, so that its
// optimizer keeps its settings.
const groups = 256

// Write writes a universal checkpoint of a state into the folder dir: a folder global_stepN, and
// latest_universal, which is the last file. It writes tensors in chunks. progress gets the number
// of values that are written, and of all values; it may be nil.
//
// DeepSpeed 0.19.8 loads the checkpoint with load_universal and every stage of ZeRO. It gets the
// weights and moments of a parameter from zero/NAME, by the name in the model's named_parameters().
// It gets the number of updates from step.pt (ZeRO 1 and 2) or from optimizer_state.pt (ZeRO 3),
// and its own progress from the model-states file, whose name depends on the stage.
func Write(ctx context.Context, dir string, s *foreign.State, progress func(done, total int64)) error {
	if s.NoMoments != nil {
		return s.NoMoments
	}
	tag := fmt.Sprintf("global_step%d", s.Step)
	root := filepath.Join(dir, tag)
	zero := filepath.Join(root, "zero")
	if err := os.MkdirAll(zero, 0o755); err != nil {
		return err
	}
	done, total := int64(0), int64(0)
	for _, p := range s.Parameters {
		total += p.Elements() * int64(len(foreign.Names))
	}
	var folders []string
	for _, p := range s.Parameters {
		folder := filepath.Join(zero, p.Name)
		if err := os.Mkdir(folder, 0o755); err != nil {
			return err
		}
		for kind, name := range foreign.Names {
			values := &torchfile.Contents{DType: safetensors.F32, Shape: p.Shape,
				Each: func(put func([]float32) error) error {
					return s.Each(ctx, p, foreign.Kind(kind), 0, p.Elements(), func(chunk []float32) error {
						if err := put(chunk); err != nil {
							return err
						}
						if done += int64(len(chunk)); progress != nil {
							progress(done, total)
						}
						return nil
					})
				}}
			content := pickle.DictOf("param", values, "cat_dim", 0)
			if err := torchfile.WriteFile(filepath.Join(folder, name+".pt"), content); err != nil {
				return err
			}
		}
		err := torchfile.WriteFile(filepath.Join(folder, "step.pt"), torchfile.Scalar(float32(s.Updates)))
		if err != nil {
			return err
		}
		folders = append(folders, folder)
	}
	for name, content := range map[string]pickle.Value{
		filepath.Join("zero", "optimizer_state.pt"): optimizerState(s),
		"mp_rank_00_model_states.pt":                progressOf(s), // ZeRO 1 and 2
		"zero_pp_rank_0_mp_rank_00_model_states.pt": progressOf(s), // ZeRO 3
	} {
		if err := torchfile.WriteFile(filepath.Join(root, name), content); err != nil {
			return err
		}
	}
	var errs []error
	for _, folder := range append(folders, zero, root, dir) {
		errs = append(errs, atomicfile.SyncDir(folder))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return atomicfile.WriteFile(filepath.Join(dir, "latest_universal"), []byte(tag))
}

// optimizerState returns the content of optimizer_state.pt. ZeRO 3 gives the number of updates
// there to all groups of parameters: the same object. So it is a number, as in FusedAdam and
// DeepSpeedCPUAdam. A tensor, as in torch.optim.AdamW, would be increased once for each group.
func optimizerState(s *foreign.State) pickle.Value {
	var empty []pickle.Value
	for range groups {
		empty = append(empty, &pickle.Dict{})
	}
	updates := pickle.DictOf(0, pickle.DictOf("step", s.Updates))
	return pickle.DictOf(
		"ds_version", version,
		"param_groups", &pickle.List{Items: empty},
		"optimizer_state_dict", pickle.DictOf("state", updates, "param_groups", &pickle.List{Items: empty[:1]}),
	)
}

// progressOf returns the content of a model-states file. The state of DeepSpeed's schedules of the
// learning rate is the number of updates, counted from 0.
func progressOf(s *foreign.State) pickle.Value {
	return pickle.DictOf(
		"module", &pickle.Dict{}, // not read
		"lr_scheduler", pickle.DictOf("last_batch_iteration", s.Updates-1),
		"global_steps", s.Step,
		"global_samples", s.Samples,
		"skipped_steps", 0,
		"dp_world_size", 1,
		"mp_world_size", 1,
		"ds_version", version,
	)
}
