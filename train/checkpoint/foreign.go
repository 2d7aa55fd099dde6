package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/shards"
	"mula/train/foreign"
	"mula/train/foreign/deepspeed"
	"mula/train/foreign/megatron"
	"mula/train/optimizer"
)

// FindForeign finds the checkpoint of another framework at dir. It reads its model's config.json
// and tokenizer in the folder model. If model is "", it uses the first of these that has a
// config.json: the checkpoint, its parent. ok is false if dir has no such checkpoint.
func FindForeign(dir, model string) (m ModelDir, ok bool, err error) {
	if found, ok := deepspeed.Find(dir); ok {
		if m.Foreign, err = deepspeed.Open(found); err == nil {
			m.Dir, err = modelFiles(found, model)
		}
		return m, true, err
	}
	found, ok := megatron.Find(dir)
	if !ok {
		return ModelDir{}, false, nil
	}
	if m.Dir, err = modelFiles(found, model); err != nil {
		return ModelDir{}, true, err
	}
	c, err := moe.ReadConfig(filesystem.OS{}, m.Dir)
	if err == nil {
		m.Foreign, err = megatron.Open(found, c)
	}
	return m, true, err
}

// modelFiles returns the folder of the model's config.json and tokenizer, as in [FindForeign].
func modelFiles(found, model string) (string, error) {
	if model != "" {
		return model, nil
	}
	for _, dir := range []string{found, filepath.Dir(filepath.Clean(found))} {
		if _, err := os.Stat(filepath.Join(dir, modelConfig)); err == nil {
			return dir, nil
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	return "", fmt.Errorf("%s has no %s, and neither has its parent; name the folder of the model's "+
		"%s and tokenizer with --model-files", found, modelConfig, modelConfig)
}

// ImportOptions are the options of [Import].
type ImportOptions struct {
	Masters   bool                    // weights are bfloat16, and the optimizer has float32 masters
	Tokenizer []byte                  // content of tokenizer.json; nil for none
	Progress  func(done, total int64) // called after every chunk with the number of weights and moments; may be nil
}

// Import writes a checkpoint of state.Step into dir from the training state in a checkpoint of
// another framework. It reads and writes chunks. The checkpoint appears complete or not at all. An
// existing one of the same name is an error. Every value must be finite. Import sets state.Format
// and state.Weights.
func Import(ctx context.Context, dir string, from *foreign.State, c moe.Config, state *State, o ImportOptions) error {
	tensors := c.Tensors()
	weightsType, kinds := safetensors.F32, []foreign.Kind{foreign.ExpAvg, foreign.ExpAvgSq}
	names := foreign.Names
	names[foreign.Weights] = optimizer.Master
	if o.Masters {
		weightsType, kinds = safetensors.BF16, append([]foreign.Kind{foreign.Weights}, kinds...)
	}
	var values [3]*moe.Stored // by kind
	for kind := range values {
		var err error
		if values[kind], err = from.Stored(c, foreign.Kind(kind)); err != nil {
			return err
		}
	}
	var entries []safetensors.Tensor
	for i := range tensors {
		for _, kind := range kinds {
			entries = append(entries, safetensors.Tensor{Name: tensors[i].Name + "." + names[kind],
				DType: safetensors.F32, Shape: tensors[i].Shape})
		}
		tensors[i].DType = weightsType
	}
	w := &writer{Shard: Shard{config: c, tensors: tensors}, dir: dir, files: map[string]shards.FileInfo{}}
	final := filepath.Join(dir, Name(state.Step))
	if err := nothingAt(final); err != nil {
		return fmt.Errorf("%s: %w", final, err)
	}
	w.temp = filepath.Join(dir, "."+Name(state.Step)+atomicfile.TempSuffix)
	defer os.RemoveAll(w.temp) // no effect after the rename
	if err := w.begin(); err != nil {
		return err
	}

	done, total := int64(0), c.TotalParameters()*int64(1+len(kinds))
	write := func(out *safetensors.Writer, entry string, i int, kind foreign.Kind) error {
		element := int64(0)
		return values[kind].Tensor(ctx, i, func(piece []float32) error {
			if err := moe.CheckFinite(from.Dir, entry, element, piece); err != nil {
				return err
			}
			element, done = element+int64(len(piece)), done+int64(len(piece))
			if o.Progress != nil {
				o.Progress(done, total)
			}
			return out.Float32(entry, piece)
		})
	}
	err := w.writeFile(modelFile, func(file io.Writer) error {
		out, err := safetensors.NewWriter(file, tensors, nil)
		for i, t := range tensors {
			if err == nil {
				err = write(out, t.Name, i, foreign.Weights)
			}
		}
		return finishFile(out, err)
	})
	if err != nil {
		return err
	}
	err = w.writeFile(optimizerFile, func(file io.Writer) error {
		out, err := safetensors.NewWriter(file, entries, nil)
		for j, entry := range entries {
			if err == nil {
				err = write(out, entry.Name, j/len(kinds), kinds[j%len(kinds)])
			}
		}
		return finishFile(out, err)
	})
	if err == nil {
		err = w.writeOthers(o.Tokenizer)
	}
	if err != nil {
		return err
	}

	stored, err := moe.OpenStored(filesystem.OS{}, w.temp) // the weights may be rounded
	if err != nil {
		return err
	}
	defer stored.Close()
	check := newWeightsCheck(w.temp, c, nil)
	if err := stored.Each(ctx, check.add); err != nil {
		return err
	}
	state.Format, state.Weights = format, check.sum()
	return w.finish(Name(state.Step), nil, *state)
}

func finishFile(out *safetensors.Writer, err error) error {
	if err != nil {
		return err
	}
	return out.Close()
}
