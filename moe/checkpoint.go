package moe

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/moe/safetensors"
	"mula/xpu"
	"mula/xpu/comm"
)

// configName is the file of a Hugging Face model directory that describes the model.
const configName = "config.json"

// SaveOptions are the options of [Model.Save].
type SaveOptions struct {
	DType safetensors.DType // element type of the weights; empty means F32
	// maximum bytes of weights in a file (a larger tensor gets its own file); 0 means one file
	ShardSize int64
	Create    Creator // creates the files; nil: in the directory on the machine's file system
}

// A Creator creates a file of a model.
type Creator func(name string) (SavedFile, error)

// A SavedFile is a file that is being written. It appears with Publish, complete or not at all.
type SavedFile interface {
	io.Writer
	Publish() error
	Abort() // nothing after Publish
}

// In returns the Creator of files in a directory on the machine's file system.
func In(dir string) Creator {
	return func(name string) (SavedFile, error) { return atomicfile.Create(filepath.Join(dir, name)) }
}

// WriteFile writes a file.
func (c Creator) WriteFile(name string, content []byte) error {
	file, err := c(name)
	if err != nil {
		return err
	}
	defer file.Abort()
	if _, err := file.Write(content); err != nil {
		return err
	}
	return file.Publish()
}

// Save writes the model as a Hugging Face directory: weights in safetensors files under the names
// of [Model.Parameters], then config.json. dir must exist and contain no model. Every file is
// written atomically; a directory without config.json is incomplete. Save fails if the model holds
// only a part of the experts or layers.
func (m *Model) Save(ctx context.Context, dir string, opts SaveOptions) error {
	if err := m.whole("saving"); err != nil {
		return err
	}
	var buffer []float32
	return saveDirectory(dir, m.cfg, opts, func(i int, write func([]float32) error) error {
		weight, err := xpu.Numbers(ctx, m.dev, m.params[i].Weight, &buffer)
		if err != nil {
			return err
		}
		return write(weight)
	}, savedPredictions{})
}

// dtype returns the element type of the weights.
func (o SaveOptions) dtype() safetensors.DType { return cmp.Or(o.DType, safetensors.F32) }

// saveDirectory writes a model to dir. fill passes the i-th tensor, in the order of c.Tensors, to
// write, in one or more chunks.
func saveDirectory(dir string, c Config, opts SaveOptions, fill func(i int, write func([]float32) error) error,
	predictions savedPredictions) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("saving %s: %w", dir, err)
		}
	}()
	opts.DType = opts.dtype()
	if opts.ShardSize < 0 {
		return fmt.Errorf("shard size %d is negative", opts.ShardSize)
	}
	create := opts.Create
	if create == nil {
		for _, name := range []string{configName, safetensors.SingleName, safetensors.IndexName} {
			if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
				if err == nil {
					err = fmt.Errorf("%s already exists; save into an empty directory", name)
				}
				return err
			}
		}
		create = In(dir)
	}
	parts, files := c.StoredTensors(opts.DType), c.inFiles()
	var tensors []safetensors.Tensor
	for _, t := range files {
		tensors = append(tensors, safetensors.Tensor{Name: t.Name, DType: parts[t.Parts[0]].DType, Shape: t.Shape})
	}
	tensors = append(tensors, predictions.tensors...)
	total := int64(0)
	for _, t := range tensors {
		total += t.Elements() * int64(t.DType.Size())
	}
	shards := shardTensors(tensors, opts)
	index := safetensors.Index{Metadata: map[string]any{"total_size": total},
		WeightMap: map[string]string{}}
	first := 0
	for i, shard := range shards {
		name := safetensors.SingleName
		if len(shards) > 1 {
			name = safetensors.ShardName(i+1, len(shards))
		}
		for _, t := range shard {
			index.WeightMap[t.Name] = name
		}
		err := writeShard(create, name, shard,
			func(i int, write func([]float32) error) error {
				if i += first; i >= len(files) {
					return predictions.fill(i-len(files), write)
				}
				return files[i].write(fill, write)
			})
		if err != nil {
			return err
		}
		first += len(shard)
	}
	if len(shards) > 1 {
		text, err := json.MarshalIndent(index, "", "  ")
		if err != nil {
			return err
		}
		if err := create.WriteFile(safetensors.IndexName, append(text, '\n')); err != nil {
			return err
		}
	}
	var config strings.Builder
	if err := writeConfigJSON(&config, c, opts.DType, predictions.layers); err != nil {
		return err
	}
	return create.WriteFile(configName, []byte(config.String()))
}

// Tensors lists the weights of a complete model of this configuration as stored in files, in the
// order of [Model.Parameters], with element type F32. [Parameter.Index] is an index into this list.
func (c Config) Tensors() []safetensors.Tensor {
	list := tensorList{}
	list.add(embeddingName, c.VocabSize, c.HiddenSize)
	for l := range c.Layers {
		list.layer(c, l)
	}
	list.end(c)
	for l := c.Layers; l < c.AllLayers(); l++ {
		list.layer(c, l)
		list.prediction(c, l)
	}
	return list
}

// TrainedTensors is [Config.Tensors] without correction biases.
func (c Config) TrainedTensors() []safetensors.Tensor {
	return slices.DeleteFunc(c.Tensors(), func(t safetensors.Tensor) bool { return !Trained(t.Name) })
}

// StoredTensors is [Config.Tensors] with the given element type. Correction biases stay F32, as in
// transformers, and in [Ernie45MoE] the weights of routers.
func (c Config) StoredTensors(dtype safetensors.DType) []safetensors.Tensor {
	list := c.Tensors()
	for i := range list {
		if !c.alwaysFloat32(list[i].Name) {
			list[i].DType = dtype
		}
	}
	return list
}

type tensorList []safetensors.Tensor

func (list *tensorList) add(name string, shape ...int) {
	*list = append(*list, safetensors.Tensor{Name: name, DType: safetensors.F32, Shape: shape})
}

// end adds the tensors after the layers: the final norm and the head.
func (list *tensorList) end(c Config) {
	if c.family().rms {
		list.add("model.norm.weight", c.HiddenSize)
	}
	if !c.TieEmbeddings {
		list.add(headName, c.VocabSize, c.HiddenSize)
	}
}

// layer adds the tensors of a layer.
func (list *tensorList) layer(c Config, l int) {
	h, q, kv, f := c.HiddenSize, c.QueryWidth(), c.KVWidth(), c.family()
	norm1, norm2 := f.normNames()
	prefix := layerPrefix(l)
	if f.rms {
		list.add(prefix+norm1, h)
	}
	if f.latent {
		list.latentTensors(c, prefix)
	} else {
		list.add(prefix+"self_attn.q_proj.weight", q, h)
		list.add(prefix+"self_attn.k_proj.weight", kv, h)
		list.add(prefix+"self_attn.v_proj.weight", kv, h)
	}
	if c.hasQKVBias() {
		list.add(prefix+"self_attn.q_proj.bias", q)
		list.add(prefix+"self_attn.k_proj.bias", kv)
		list.add(prefix+"self_attn.v_proj.bias", kv)
	}
	if qNorm, kNorm := c.qkNormWidths(); qNorm > 0 {
		list.add(prefix+"self_attn.q_norm.weight", qNorm)
		list.add(prefix+"self_attn.k_norm.weight", kNorm)
	}
	if f.sinks {
		list.add(prefix+sinksName, c.Heads)
	}
	list.add(prefix+"self_attn.o_proj.weight", h, c.ContextWidth())
	if c.hasOutBias() {
		list.add(prefix+"self_attn.o_proj.bias", h)
	}
	if f.rms {
		list.add(prefix+norm2, h)
	}
	names := f.blockNames()
	if !c.HasExperts(l) {
		list.network(names, prefix+names.block+".", h, c.denseWidth())
		return
	}
	router := prefix + names.block + "." + names.router
	list.add(router+".weight", c.Experts, h)
	if f.router.outBias {
		list.add(router+".bias", c.Experts)
	}
	if f.router.bias {
		list.add(prefix+names.block+f.router.biasName(), f.router.biasShape(c.Experts)...)
	}
	if c.SharedSize > 0 {
		list.network(names, prefix+names.block+f.shared.block(), h, c.SharedSize)
		if f.shared.gated() {
			list.add(prefix+names.block+sharedGate, 1, h)
		}
	}
	if f.expertBias {
		list.biasedExperts(c, prefix)
		return
	}
	for e := range c.Experts {
		list.network(names, names.expert(prefix, e), h, c.IntermediateSize)
	}
}

// biasedExperts adds the tensors of a layer's experts that have biases: gate and up of all experts,
// their biases, down of all experts, and its biases, which is the order of transposed.go.
func (list *tensorList) biasedExperts(c Config, layer string) {
	names := c.family().blockNames()
	for e := range c.Experts {
		gate, up, _ := names.network(names.expert(layer, e))
		list.add(gate, c.IntermediateSize, c.HiddenSize)
		list.add(up, c.IntermediateSize, c.HiddenSize)
	}
	for e := range c.Experts {
		gate, up, _ := names.biases(names.expert(layer, e))
		list.add(gate, c.IntermediateSize)
		list.add(up, c.IntermediateSize)
	}
	for e := range c.Experts {
		_, _, down := names.network(names.expert(layer, e))
		list.add(down, c.HiddenSize, c.IntermediateSize)
	}
	for e := range c.Experts {
		_, _, down := names.biases(names.expert(layer, e))
		list.add(down, c.HiddenSize)
	}
}

// network adds the tensors of a network of the given width, whose place in the model is prefix.
func (list *tensorList) network(names blockNames, prefix string, h, width int) {
	gate, up, down := names.network(prefix)
	list.add(gate, width, h)
	list.add(up, width, h)
	list.add(down, h, width)
}

// layerPrefix is the beginning of the names of a layer's tensors.
func layerPrefix(l int) string { return fmt.Sprintf("model.layers.%d.", l) }

// Names of the tensors that are one and the same if TieEmbeddings is set.
const (
	embeddingName = "model.embed_tokens.weight"
	headName      = "lm_head.weight"
)

// shardTensors divides the tensors among files of at most opts.ShardSize bytes.
func shardTensors(tensors []safetensors.Tensor, opts SaveOptions) [][]safetensors.Tensor {
	var shards [][]safetensors.Tensor
	size := int64(0)
	for i, t := range tensors {
		n := t.Elements() * int64(t.DType.Size())
		if i == 0 || opts.ShardSize > 0 && size+n > opts.ShardSize {
			shards, size = append(shards, nil), 0
		}
		last := len(shards) - 1
		shards[last] = append(shards[last], t)
		size += n
	}
	return shards
}

func writeShard(create Creator, name string, tensors []safetensors.Tensor,
	fill func(i int, write func([]float32) error) error) error {
	file, err := create(name)
	if err != nil {
		return err
	}
	defer file.Abort()
	w, err := safetensors.NewWriter(file, tensors, nil)
	if err != nil {
		return err
	}
	for i, t := range tensors {
		if err := fill(i, func(piece []float32) error { return w.Float32(t.Name, piece) }); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return file.Publish()
}

// Open creates a model from a Hugging Face directory: its config.json and its weights.
func Open(dir string, dev xpu.Device) (*Model, error) {
	s, err := OpenStored(filesystem.OS{}, dir)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return s.Model(dev)
}

// Load reads the weights of a Hugging Face directory, in one file or several, of element type F32,
// F16 or BF16. Experts may be stored one by one, as transformers saves them, or fused as
// mlp.experts.gate_up_proj [E, 2I, H] and mlp.experts.down_proj [E, H, I], as transformers 5 holds
// them. It holds routers as mlp.gate, and this name is read for every family. The directory must
// contain exactly the weights of the model, with their shapes; if the head is tied, a copy of the
// embedding as lm_head.weight is allowed. Load checks names and shapes before it reads the first
// weight. A model that holds a part of the experts or of matrices keeps only its part. After a read
// error, the weights are a mixture of old and new.
func (m *Model) Load(fsys filesystem.FS, dir string) error {
	s, err := openStored(fsys, dir, m.cfg)
	if err != nil {
		return err
	}
	defer s.Close()
	return m.read(s)
}

// LoadTogether is [Model.Load] of all ranks of the mesh, which call it at the same time. The first
// rank that holds a weight reads it and sends it to the other ranks that hold it, so that all ranks
// together read each byte once. broken reports whether the ranks cannot communicate any more. After
// another error, only the ranks that have read know it.
func (m *Model) LoadTogether(ctx context.Context, fsys filesystem.FS, dir string) (broken bool, err error) {
	var s *Stored
	var buffer, complete []float32
	for _, p := range m.params {
		group := m.parallel.Mesh.Group(comm.Data)
		if p.Divided {
			group = m.parallel.Mesh.Group(comm.Replicas)
		}
		weight := xpu.HostBuffer(p.Weight, &buffer)
		slice, whole := weight, p.Slice.Whole(p.Shape)
		if p.Slice.Ranks > 0 {
			weight = room(&complete, elements(whole))
		}
		if group.Rank() == 0 && err == nil {
			if s == nil {
				if s, err = openStored(fsys, dir, m.cfg); err == nil {
					defer s.Close()
				}
			}
			if err == nil {
				err = s.each(p.Index, weight, func([]float32) error { return nil })
			}
		}
		if lost := comm.Broadcast(ctx, group, 0, weight); lost != nil {
			return true, errors.Join(err, lost)
		}
		if p.Slice.Ranks > 0 {
			p.Slice.Take(slice, weight, 0, whole)
		}
		xpu.SetNumbers(m.dev, p.Weight, slice)
	}
	return false, err
}

func (m *Model) read(s *Stored) error {
	var buffer []float32
	piece := make([]float32, pieceElements)
	for _, p := range m.params {
		weight := xpu.HostBuffer(p.Weight, &buffer)
		into, visit := weight, func([]float32) error { return nil }
		if first, whole := 0, p.Slice.Whole(p.Shape); p.Slice.Ranks > 0 {
			into, visit = piece, func(part []float32) error {
				p.Slice.Take(weight, part, first, whole)
				first += len(part)
				return nil
			}
		}
		if err := s.each(p.Index, into, visit); err != nil {
			return err
		}
		xpu.SetNumbers(m.dev, p.Weight, weight)
	}
	return nil
}
