package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/foreign"
	"mula/train/foreign/deepspeed"
	"mula/train/foreign/megatron"
	"mula/train/optimizer"
)

// A Framework is a framework whose checkpoints [ModelDir.Export] writes.
type Framework string

// The frameworks.
const (
	DeepSpeed Framework = "deepspeed" // a universal checkpoint
	Megatron  Framework = "megatron"  // a distributed checkpoint of Megatron core, torch_dist
)

// ExportOptions are the options of [ModelDir.Export].
type ExportOptions struct {
	Framework Framework
	// DeepSpeed's model is of transformers 4, which has a parameter for each matrix of an expert.
	// Transformers 5 has a parameter for a matrix of all experts of a layer.
	SeparateExperts bool
	ExpertParallel  bool // Megatron's ranks have different experts; see [megatron.WriteOptions]
	// called after every chunk with the number of weights and moments; may be nil
	Progress func(done, total int64)
}

// An Exported describes a checkpoint that [ModelDir.Export] has written.
type Exported struct {
	Checkpoint string   `json:"checkpoint"` // the exported one
	Form       string   `json:"form"`       // of the written checkpoint
	Output     string   `json:"output"`
	Step       int64    `json:"step"`
	Updates    int64    `json:"updates"` // of the optimizer
	Samples    int64    `json:"samples"` // read in these steps
	Notes      []string `json:"notes,omitempty"`
}

// Export writes the training state in a checkpoint of a run as a checkpoint of a framework: weights
// (float32 masters), AdamW's moments, and progress. output is a new folder, which appears complete
// or not at all. It has the framework's folder of the step, the file that names this folder, and
// the model's config.json and tokenizer. Export reads and writes chunks.
func (m ModelDir) Export(ctx context.Context, output string, o ExportOptions) (Exported, error) {
	if m.Checkpoint == nil {
		return Exported{}, fmt.Errorf("%s is not a checkpoint of a run, and has no moments; name a run's folder or a "+
			"checkpoint, or convert the model: mula export without --to", m.Dir)
	}
	stored, err := m.stored()
	if err != nil {
		return Exported{}, err
	}
	defer stored.Close()
	tokenizer, inspected, err := m.inspect(stored)
	if err != nil {
		return Exported{}, err
	}
	state, closeState, err := m.Checkpoint.trainingState(inspected.Config)
	if err != nil {
		return Exported{}, err
	}
	defer closeState()
	saved := m.Checkpoint.State
	result := Exported{Checkpoint: m.Checkpoint.Dir, Output: output, Step: saved.Step, Updates: saved.Updates,
		Samples: saved.Cursor.Position, Notes: inspected.Notes, Form: "DeepSpeed universal checkpoint"}
	var recipe megatron.Recipe
	if o.Framework == Megatron {
		result.Form = "Megatron core torch_dist"
		recipe, err = m.Checkpoint.recipe()
		if err == nil {
			var note string
			note, err = m.Checkpoint.otherGroups(recipe, inspected.Config)
			if note != "" {
				result.Notes = append(result.Notes, note)
			}
		}
		if err != nil {
			return result, err
		}
	}
	err = newDirectory(output, func(dir string) error {
		if err := m.writeCompanions(moe.In(dir), inspected.Config, tokenizer); err != nil {
			return err
		}
		config, err := m.readCompanion(modelConfig)
		if err == nil {
			err = atomicfile.WriteFile(filepath.Join(dir, modelConfig), config)
		}
		if err != nil {
			return err
		}
		if o.Framework == Megatron {
			return megatron.Write(ctx, dir, state, inspected.Config, megatron.WriteOptions{Recipe: recipe,
				ExpertParallel: o.ExpertParallel, Progress: o.Progress})
		}
		if !o.SeparateExperts {
			state = state.Fused(inspected.Config)
		}
		return deepspeed.Write(ctx, dir, state, o.Progress)
	})
	if err != nil {
		return result, fmt.Errorf("writing %s: %w", output, err)
	}
	if state.Settings != "" {
		decides := "the framework's configuration decides"
		if o.Framework == Megatron {
			decides = "the checkpoint has betas, eps and the schedule, and Megatron's arguments decide the rest"
		}
		result.Notes = append(result.Notes, "the run has "+state.Settings+"; "+decides)
	}
	return result, nil
}

// trainingState returns the training state of the checkpoint of a model of configuration c. close
// closes its files. The state is not for concurrent use.
func (c *Checkpoint) trainingState(config moe.Config) (s *foreign.State, close func() error, err error) {
	if name := c.setting("optimizer.name"); name != "" && name != string(optimizer.AdamW) {
		return nil, nil, fmt.Errorf("%s: optimizer.name is %s; only the state of %s can be exported; export the "+
			"model: mula export without --to", c.Dir, name, optimizer.AdamW)
	}
	if config.Architecture == moe.GPTOSS {
		return nil, nil, fmt.Errorf("%s: the parameters of a %s model have the matrices of experts transposed, which "+
			"mula does not write for other frameworks; export the model: mula export without --to", c.Dir,
			config.Architecture)
	}
	tensors := config.Tensors()
	for _, t := range tensors {
		if !moe.Trained(t.Name) {
			return nil, nil, fmt.Errorf("%s: %s is updated without an optimizer, and the checkpoints of other "+
				"frameworks have no place for it; export the model: mula export without --to", c.Dir, t.Name)
		}
	}
	weights, err := safetensors.OpenDirectory(filesystem.OS{}, c.Dir)
	if err != nil {
		return nil, nil, err
	}
	r := &stateReader{checkpoint: c, weights: weights, files: map[string]*safetensors.File{}}
	if err := r.find(config, tensors); err != nil {
		return nil, nil, errors.Join(err, r.close())
	}
	s = &foreign.State{Form: "mula", Dir: c.Dir, Step: c.State.Step, Updates: c.State.Updates,
		Samples: c.State.Cursor.Position, Settings: c.settings()}
	for i, t := range tensors {
		s.Parameters = append(s.Parameters, foreign.Parameter{Name: t.Name, Shape: t.Shape,
			Read: func(kind foreign.Kind, dst []float32, first int64) error {
				return r.read(i, t.Name, kind, dst, first)
			}})
	}
	return s, r.close, nil
}

// setting returns the value of a field of the run's configuration as text, or "".
func (c *Checkpoint) setting(name string) string {
	var v any
	if json.Unmarshal([]byte(c.State.Config[name]), &v) != nil || v == nil {
		return ""
	}
	return fmt.Sprint(v)
}

// recipe returns the settings of the run's next updates.
func (c *Checkpoint) recipe() (megatron.Recipe, error) {
	var r megatron.Recipe
	for name, value := range map[string]any{"batch_size": &r.BatchSize, "optimizer.betas": &r.Betas,
		"optimizer.eps": &r.Epsilon, "optimizer.weight_decay": &r.WeightDecay} {
		if err := json.Unmarshal([]byte(c.State.Config[name]), value); err != nil {
			return r, fmt.Errorf("%s: %s has no valid %s: %w", c.Dir, stateFile, name, err)
		}
	}
	var ok bool
	if r.Schedule, ok = scheduleOf(c.State.Config); !ok {
		return r, fmt.Errorf("%s: %s has no valid schedule", c.Dir, stateFile)
	}
	return r, nil
}

// otherGroups returns a note about a parameter whose settings in the run are not Megatron core's,
// or "". Megatron core applies no weight decay to tensors with one axis.
func (c *Checkpoint) otherGroups(r megatron.Recipe, config moe.Config) (string, error) {
	o := optimizer.Config{WeightDecay: &r.WeightDecay}
	if text, ok := c.State.Config["optimizer.groups"]; ok {
		if err := json.Unmarshal([]byte(text), &o.Groups); err != nil {
			return "", fmt.Errorf("%s: %s has no valid optimizer.groups: %w", c.Dir, stateFile, err)
		}
	}
	settings := o.Settings()
	for _, t := range config.Tensors() {
		got, want := settings[o.GroupOf(t.Name, t.Shape)], settings[0]
		if len(t.Shape) == 1 {
			want.WeightDecay = 0
		}
		if got != want {
			return fmt.Sprintf("%s has weight decay %v and a factor of %v on the learning rate in the run, and %v and "+
				"%v in Megatron core, which applies no weight decay to norms and biases", t.Name, got.WeightDecay,
				got.RateScale, want.WeightDecay, want.RateScale), nil
		}
	}
	return "", nil
}

// settings describes the run's optimizer.
func (c *Checkpoint) settings() string {
	text := ""
	for _, name := range []string{"optimizer.betas", "optimizer.eps", "optimizer.weight_decay", "optimizer.groups",
		"optimizer.clip", "schedule.name", "schedule.learning_rate"} {
		if value := c.State.Config[name]; value != "" {
			if text != "" {
				text += ", "
			}
			text += name + " " + value
		}
	}
	return text
}

// A stateReader reads the training state of a checkpoint.
type stateReader struct {
	checkpoint *Checkpoint
	weights    *safetensors.Directory
	shard      Shard                        // the tensors of the model, and the names of their state
	masters    bool                         // the state has the weights
	ranges     [][][]placedRange            // by tensor and state, in ascending order
	files      map[string]*safetensors.File // open
}

// find finds all ranges of the state.
func (r *stateReader) find(config moe.Config, tensors []safetensors.Tensor) error {
	c := r.checkpoint
	path := objects.Join(c.Dir, optimizerFile)
	var index stateIndex
	if _, single := c.manifest.Files[optimizerFile]; single {
		f, err := r.open(optimizerFile)
		if err != nil {
			return err
		}
		index.WeightMap = map[string]string{}
		for _, t := range f.Tensors() {
			index.WeightMap[t.Name] = optimizerFile
		}
	} else {
		path = objects.Join(c.Dir, optimizerIndexFile)
		if err := c.manifest.read(filesystem.OS{}, c.Dir, optimizerIndexFile, &index); err != nil {
			return err
		}
	}
	r.masters = slices.ContainsFunc(r.weights.Tensors(), func(t safetensors.Tensor) bool {
		return t.DType == safetensors.BF16
	})
	r.shard = Shard{config: config, tensors: tensors}
	for range tensors {
		names := []string{foreign.Names[foreign.ExpAvg], foreign.Names[foreign.ExpAvgSq]}
		if r.masters {
			names = append(names, optimizer.Master)
		}
		r.shard.states = append(r.shard.states, names)
		r.ranges = append(r.ranges, make([][]placedRange, len(names)))
	}
	ranges, err := r.shard.parse(index)
	if err == nil {
		err = r.shard.check(ranges)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, p := range ranges {
		r.ranges[p.tensor][p.state] = append(r.ranges[p.tensor][p.state], p)
	}
	for _, states := range r.ranges {
		for _, list := range states {
			slices.SortFunc(list, func(a, b placedRange) int { return a.begin - b.begin })
		}
	}
	return nil
}

// maxOpen limits the files of a [stateReader] that are open at a time. Each rank writes one.
const maxOpen = 64

// open opens a file of the checkpoint.
func (r *stateReader) open(name string) (*safetensors.File, error) {
	if f := r.files[name]; f != nil {
		return f, nil
	}
	if len(r.files) >= maxOpen {
		if err := r.closeFiles(); err != nil {
			return nil, err
		}
	}
	f, err := safetensors.Open(objects.Join(r.checkpoint.Dir, name))
	if err == nil {
		r.files[name] = f
	}
	return f, err
}

// read reads elements of tensor i.
func (r *stateReader) read(i int, name string, kind foreign.Kind, dst []float32, first int64) error {
	state := int(kind) - int(foreign.ExpAvg)
	if kind == foreign.Weights {
		if !r.masters {
			return r.weights.Float32(dst, name, first)
		}
		state = len(r.ranges[i]) - 1
	}
	for _, p := range r.ranges[i][state] {
		if first >= int64(p.end) {
			continue
		}
		n := min(len(dst), p.end-int(first))
		f, err := r.open(p.file)
		if err == nil {
			err = f.Float32(dst[:n], r.shard.rangeName(p.tensorRange), first-int64(p.begin))
		}
		if err != nil {
			return err
		}
		if dst, first = dst[n:], first+int64(n); len(dst) == 0 {
			break
		}
	}
	return nil
}

func (r *stateReader) closeFiles() error {
	var errs []error
	for _, f := range r.files {
		errs = append(errs, f.Close())
	}
	clear(r.files)
	return errors.Join(errs...)
}

func (r *stateReader) close() error { return errors.Join(r.weights.Close(), r.closeFiles()) }
