package moe

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/atomicfile"
	"mula/moe/safetensors"
	"mula/xpu"
)

// configName is the file of a Hugging Face model directory that describes the model.
const configName = "config.json"

// SaveOptions say how [Model.Save] writes weights.
type SaveOptions struct {
	DType     safetensors.DType // element type of the weights; empty means F32
	ShardSize int64             // bytes of weights in one file at most, several tensors permitting; 0 means one file
}

// Save writes the model as a Hugging Face directory: weights in safetensors files under the names of [Model.Parameters], and config.json,
// which comes last. dir must exist and hold no model. Files appear whole or not at all; a directory without config.json is not complete.
func (m *Model) Save(dir string, opts SaveOptions) (err error) {
	if opts.DType == "" {
		opts.DType = safetensors.F32
	}
	if opts.ShardSize < 0 {
		return fmt.Errorf("saving %s: shard size %d is negative", dir, opts.ShardSize)
	}
	for _, name := range []string{configName, safetensors.SingleName, safetensors.IndexName} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			if err == nil {
				err = fmt.Errorf("it holds %s already; save into an empty directory", name)
			}
			return fmt.Errorf("saving %s: %w", dir, err)
		}
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("saving %s: %w", dir, err)
		}
	}()
	shards := m.shards(opts)
	index := safetensors.Index{Metadata: map[string]any{"total_size": int64(len(m.weights)) * int64(opts.DType.Size())}, WeightMap: map[string]string{}}
	for i, params := range shards {
		name := safetensors.SingleName
		if len(shards) > 1 {
			name = safetensors.ShardName(i+1, len(shards))
		}
		for _, p := range params {
			index.WeightMap[p.Name] = name
		}
		if err := writeShard(filepath.Join(dir, name), params, opts.DType); err != nil {
			return err
		}
	}
	if len(shards) > 1 {
		text, err := json.MarshalIndent(index, "", "  ")
		if err != nil {
			return err
		}
		if err := atomicfile.WriteFile(filepath.Join(dir, safetensors.IndexName), append(text, '\n')); err != nil {
			return err
		}
	}
	var config strings.Builder
	if err := WriteConfigJSON(&config, m.cfg, opts.DType); err != nil {
		return err
	}
	return atomicfile.WriteFile(filepath.Join(dir, configName), []byte(config.String()))
}

// shards divides the parameters into runs that fit into files of the size asked for.
func (m *Model) shards(opts SaveOptions) [][]*Parameter {
	var shards [][]*Parameter
	size := int64(0)
	for i, p := range m.params {
		n := int64(len(p.Weight)) * int64(opts.DType.Size())
		if i == 0 || opts.ShardSize > 0 && size+n > opts.ShardSize {
			shards, size = append(shards, nil), 0
		}
		last := len(shards) - 1
		shards[last] = append(shards[last], p)
		size += n
	}
	return shards
}

func writeShard(path string, params []*Parameter, dtype safetensors.DType) error {
	file, err := atomicfile.Create(path)
	if err != nil {
		return err
	}
	defer file.Abort()
	tensors := make([]safetensors.Tensor, len(params))
	for i, p := range params {
		tensors[i] = safetensors.Tensor{Name: p.Name, DType: dtype, Shape: p.Shape}
	}
	w, err := safetensors.NewWriter(file, tensors, nil)
	if err != nil {
		return err
	}
	for _, p := range params {
		if err := w.Float32(p.Name, p.Weight); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return file.Publish()
}

// Open makes a model from a Hugging Face directory: its config.json and its weights.
func Open(dir string, dev xpu.Device) (*Model, error) {
	path := filepath.Join(dir, configName)
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cfg, err := ReadConfigJSON(f, path)
	if err != nil {
		return nil, err
	}
	d, err := safetensors.OpenDirectory(dir)
	if err != nil {
		return nil, fmt.Errorf("loading weights: %w", err)
	}
	defer d.Close()
	// No memory is asked for on the word of a config.json alone.
	stored := int64(0)
	for _, t := range d.Tensors() {
		stored += t.Elements()
	}
	if n := cfg.TotalParameters(); stored < n {
		return nil, fmt.Errorf("%s describes a model of %d weights, and the files beside it hold %d; complete them, or use the config.json that belongs to them", path, n, stored)
	}
	m, err := New(cfg, dev)
	if err != nil {
		return nil, err
	}
	if err := m.load(d, dir); err != nil {
		return nil, err
	}
	return m, nil
}

// Load reads the weights of a Hugging Face directory, in one file or several, of element type F32, F16 or BF16. Experts may be stored one
// by one, as transformers saves them, or fused as mlp.experts.gate_up_proj [E, 2I, H] and mlp.experts.down_proj [E, H, I], as transformers 5
// holds them. Every weight of the model must be there with its shape, and nothing else; that is checked before the first is read. After an
// error in reading, the weights are a mixture of old and new.
func (m *Model) Load(dir string) error {
	d, err := safetensors.OpenDirectory(dir)
	if err != nil {
		return fmt.Errorf("loading weights: %w", err)
	}
	defer d.Close()
	return m.load(d, dir)
}

func (m *Model) load(d *safetensors.Directory, dir string) error {
	type source struct {
		tensor string
		first  int64
	}
	sources := make(map[string]source, len(m.params))
	byName := make(map[string]*Parameter, len(m.params))
	for _, p := range m.params {
		byName[p.Name] = p
	}
	var unexpected, wrong []string
	for _, t := range d.Tensors() {
		pieces := []piece{{t.Name, t.Shape, 0}}
		if fused, want := m.unfuse(t); want != nil {
			if !slices.Equal(t.Shape, want) {
				wrong = append(wrong, fmt.Sprintf("%s (shape %v, want %v)", t.Name, t.Shape, want))
				continue
			}
			pieces = fused
		}
		for _, piece := range pieces {
			p := byName[piece.name]
			switch {
			case p == nil:
				unexpected = append(unexpected, t.Name)
			case sources[p.Name].tensor != "":
				wrong = append(wrong, fmt.Sprintf("%s (given by %s and by %s)", p.Name, sources[p.Name].tensor, t.Name))
			case !slices.Equal(piece.shape, p.Shape):
				wrong = append(wrong, fmt.Sprintf("%s (shape %v, want %v)", t.Name, piece.shape, p.Shape))
			default:
				sources[p.Name] = source{t.Name, piece.first}
			}
		}
	}
	var missing []string
	for _, p := range m.params {
		if sources[p.Name].tensor == "" && len(wrong) == 0 {
			missing = append(missing, p.Name)
		}
	}
	if len(unexpected)+len(wrong)+len(missing) > 0 {
		return fmt.Errorf("loading weights from %s: %w", dir, errors.Join(
			some("tensors that do not fit the configuration", wrong), some("tensors missing", missing), some("tensors unexpected", unexpected)))
	}
	for _, p := range m.params {
		s := sources[p.Name]
		if err := d.Float32(p.Weight, s.tensor, s.first); err != nil {
			return fmt.Errorf("loading weights: %w", err)
		}
	}
	return nil
}

// some is an error that names the first few of a list, nil if there are none.
func some(what string, names []string) error {
	const most = 5
	switch {
	case len(names) == 0:
		return nil
	case len(names) > most:
		return fmt.Errorf("%s: %s and %d more", what, strings.Join(names[:most], ", "), len(names)-most)
	}
	return fmt.Errorf("%s: %s", what, strings.Join(names, ", "))
}

// A piece is the part of a stored tensor, from element first, that is one parameter.
type piece struct {
	name  string
	shape []int
	first int64
}

// unfuse divides a tensor of fused experts into its parameters and says what shape it must have; for any other tensor want is nil.
func (m *Model) unfuse(t safetensors.Tensor) (pieces []piece, want []int) {
	h, ffn, e := m.cfg.HiddenSize, m.cfg.IntermediateSize, m.cfg.Experts
	prefix, last, _ := strings.Cut(t.Name, "mlp.experts.")
	matrix := int64(ffn) * int64(h)
	switch {
	case m.cfg.moe() && last == "gate_up_proj":
		want = []int{e, 2 * ffn, h}
		for i := range e {
			expert, first := fmt.Sprintf("%smlp.experts.%d.", prefix, i), 2*matrix*int64(i)
			pieces = append(pieces, piece{expert + "gate_proj.weight", []int{ffn, h}, first}, piece{expert + "up_proj.weight", []int{ffn, h}, first + matrix})
		}
	case m.cfg.moe() && last == "down_proj":
		want = []int{e, h, ffn}
		for i := range e {
			pieces = append(pieces, piece{fmt.Sprintf("%smlp.experts.%d.down_proj.weight", prefix, i), []int{h, ffn}, matrix * int64(i)})
		}
	}
	return pieces, want
}
