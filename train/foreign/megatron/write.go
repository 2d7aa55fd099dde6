package megatron

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"mula/internal/atomicfile"
	"mula/internal/pickle"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/moe/torchfile"
	"mula/train/foreign"
	"mula/train/optimizer"
)

// Sizes of a checkpoint that [Write] writes, unless a test sets others.
const (
	maxChunk = 1 << 24 // elements of a chunk, or a row
	maxFile  = 1 << 30 // bytes of a file, before its last chunk
)

// A Recipe has the settings of a run's next updates.
type Recipe struct {
	Betas                [2]float64 // of AdamW
	Epsilon, WeightDecay float64
	Schedule             optimizer.Schedule
	BatchSize            int64 // samples of a step
}

// WriteOptions are the options of [Write].
type WriteOptions struct {
	Recipe Recipe
	// Megatron's ranks have different experts. Then Megatron core has two optimizers, one for
	// experts, and their settings have another form in common.pt.
	ExpertParallel bool
	// called after every chunk with the number of values that are written, and of all; may be nil
	Progress func(done, total int64)

	maxChunk int   // 0: the constant
	maxFile  int64 // 0: the constant
}

// Write writes a checkpoint of the state of a model of configuration c into the folder dir: a
// folder iter_NNNNNNN, and latest_checkpointed_iteration.txt, which is the last file. It writes
// tensors in chunks.
//
// megatron-core 0.16.1 loads the checkpoint at any number of ranks, with tensor, pipeline, expert
// and data parallelism, into a model with a DistributedOptimizer. The weights of the model are the
// values of optimizer.state.param. Both names refer to the same float32 chunks, which Megatron
// rounds to the type of its model.
func Write(ctx context.Context, dir string, s *foreign.State, c moe.Config, o WriteOptions) error {
	if s.NoMoments != nil {
		return s.NoMoments
	}
	if err := checkExport(c); err != nil {
		return fmt.Errorf("%s: %w", s.Dir, err)
	}
	if o.ExpertParallel && c.Experts == 0 {
		return fmt.Errorf("%s: the model has no experts to divide among ranks", s.Dir)
	}
	matrices, err := matricesOf(s, c)
	if err != nil {
		return fmt.Errorf("%s: %w", s.Dir, err)
	}
	name := fmt.Sprintf("iter_%07d", s.Step)
	root := filepath.Join(dir, name)
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	w := &chunkWriter{dir: root, metadata: &pickle.Dict{}, storage: &pickle.Dict{},
		chunks: map[string]*pickle.List{}, progress: o.Progress,
		maxChunk: cmp.Or(o.maxChunk, maxChunk), maxFile: cmp.Or(o.maxFile, maxFile)}
	defer w.abort()
	for _, p := range s.Parameters {
		w.total += p.Elements() * int64(len(foreign.Names))
	}
	for _, m := range matrices {
		for kind := range foreign.Names {
			if err := w.matrix(ctx, s, m, foreign.Kind(kind)); err != nil {
				return err
			}
		}
	}
	if err := w.objects(objectsOf(c)); err != nil {
		return err
	}
	metadata, err := w.finish()
	if err != nil {
		return err
	}
	if err := atomicfile.WriteFile(filepath.Join(root, metadataFile), metadata); err != nil {
		return err
	}
	if err := torchfile.WriteFile(filepath.Join(root, commonFile), commonOf(s, c, o)); err != nil {
		return err
	}
	format := `{"sharded_backend": "torch_dist", "sharded_backend_version": 1, ` +
		`"common_backend": "torch", "common_backend_version": 1}`
	if err := atomicfile.WriteFile(filepath.Join(root, formatFile), []byte(format)); err != nil {
		return err
	}
	if err := errors.Join(atomicfile.SyncDir(root), atomicfile.SyncDir(dir)); err != nil {
		return err
	}
	return atomicfile.WriteFile(filepath.Join(dir, latestFile), []byte(strconv.FormatInt(s.Step, 10)))
}

// checkExport returns an error about a field of the configuration that Megatron core does not
// compute.
func checkExport(c moe.Config) error {
	if err := checkFamily(c); err != nil {
		return err
	}
	switch r := c.RopeScaling; r.Type {
	case "", "default", "dynamic": // dynamic changes nothing up to max_position_embeddings
	case "llama3":
		if r.LowFreqFactor != 1 || r.HighFreqFactor != 4 || r.OriginalMaxPositions != 8192 {
			return fmt.Errorf("rope_scaling has low_freq_factor %v, high_freq_factor %v and "+
				"original_max_position_embeddings %d; Megatron core has only 1, 4 and 8192", r.LowFreqFactor,
				r.HighFreqFactor, r.OriginalMaxPositions)
		}
	default:
		return fmt.Errorf("rope_scaling has rope_type %s; checkpoints of Megatron core are written for default and "+
			"llama3", r.Type)
	}
	if c.SlidingWindow > 0 && c.MaxWindowLayers > 0 {
		return fmt.Errorf("max_window_layers is %d; checkpoints of Megatron core are written for models with the same "+
			"sliding_window in all layers", c.MaxWindowLayers)
	}
	return nil
}

// stacked reports whether all layers have the same tensors, so that a checkpoint has one tensor for
// all of them. Megatron core calls other models non-homogeneous.
func stacked(c moe.Config) bool {
	with := len(c.ExpertLayers(0, c.Layers))
	return with == 0 || with == c.Layers
}

// A matrix is a matrix or a vector of Megatron core.
type matrix struct {
	keys   []string // names of the tensors that have it
	lead   []int    // its coordinates along the other axes of the tensors
	shape  []int    // its own
	shapes []int    // of the other axes
	parts  []part
}

// A part of a matrix is a tensor of Hugging Face.
type part struct {
	location
	foreign.Parameter
}

// matricesOf lists the matrices of a state, in the order of their first parameters.
func matricesOf(s *foreign.State, c moe.Config) ([]*matrix, error) {
	var list []*matrix
	known := map[string]*matrix{}
	for _, p := range s.Parameters {
		l, err := locate(c, p.Name, p.Shape)
		if err != nil {
			return nil, err
		}
		m := &matrix{shape: slices.Clone(p.Shape)}
		m.shape[0] = l.rows
		names := l.names[:1]
		if l.every {
			names = l.names
		}
		for _, name := range names {
			switch {
			case l.layer >= 0 && stacked(c):
				name = "decoder.layers." + name
			case l.layer >= 0:
				name = fmt.Sprintf("decoder.layers.%d.%s", l.layer, name)
			}
			m.keys = append(m.keys, name)
		}
		if l.layer >= 0 && stacked(c) {
			m.lead, m.shapes = append(m.lead, l.layer), append(m.shapes, c.Layers)
		}
		if l.expert >= 0 {
			m.lead, m.shapes = append(m.lead, l.expert), append(m.shapes, c.Experts)
		}
		id := chunkKey(m.keys[0], m.lead)
		if known[id] == nil {
			known[id] = m
			list = append(list, m)
		}
		known[id].parts = append(known[id].parts, part{l, p})
	}
	return list, nil
}

// columns returns the number of elements of a row.
func (m *matrix) columns() int {
	columns := 1
	for _, d := range m.shape[1:] {
		columns *= d
	}
	return columns
}

// each passes the elements of rows [first, end) to put.
func (m *matrix) each(ctx context.Context, s *foreign.State, kind foreign.Kind, first, end int,
	put func([]float32) error) error {
	columns := int64(m.columns())
	for row := first; row < end; {
		i := slices.IndexFunc(m.parts, func(p part) bool {
			return row%p.stride >= p.offset && row%p.stride < p.offset+p.block
		})
		if i < 0 {
			return fmt.Errorf("%s: no tensor has row %d of %s", s.Dir, row, m.keys[0])
		}
		p := m.parts[i]
		inside := row%p.stride - p.offset // of the block
		n := min(p.block-inside, end-row)
		element := int64(row/p.stride*p.block+inside) * columns
		if err := s.Each(ctx, p.Parameter, kind, element, int64(n)*columns, put); err != nil {
			return err
		}
		row += n
	}
	return nil
}

// A chunkWriter writes chunks into files, and their description.
type chunkWriter struct {
	dir    string
	file   *atomicfile.File // nil: none
	number int              // of the next file
	bytes  int64            // of file

	maxChunk int
	maxFile  int64

	metadata, storage *pickle.Dict
	chunks            map[string]*pickle.List // descriptions, by name of the tensor

	done, total int64
	progress    func(done, total int64)
}

// Write appends to the file.
func (w *chunkWriter) Write(p []byte) (int, error) {
	n, err := w.file.Write(p)
	w.bytes += int64(n)
	return n, err
}

// add appends a file of torch.save, and returns the description of its position.
func (w *chunkWriter) add(content pickle.Value) (*pickle.Object, error) {
	if w.file != nil && w.bytes >= w.maxFile {
		if err := w.publish(); err != nil {
			return nil, err
		}
	}
	name := fmt.Sprintf("__0_%d.distcp", w.number)
	if w.file == nil {
		var err error
		if w.file, err = atomicfile.Create(filepath.Join(w.dir, name)); err != nil {
			return nil, err
		}
		w.bytes = 0
	}
	first := w.bytes
	if err := torchfile.Write(w, content); err != nil {
		return nil, err
	}
	return plainObject(storageInfoClass, "relative_path", name, "offset", first, "length", w.bytes-first), nil
}

// publish completes the file.
func (w *chunkWriter) publish() error {
	err := w.file.Publish()
	w.file, w.number = nil, w.number+1
	return err
}

// abort removes an incomplete file.
func (w *chunkWriter) abort() {
	if w.file != nil {
		w.file.Abort()
	}
}

// finish completes the last file, and returns the content of .metadata.
func (w *chunkWriter) finish() ([]byte, error) {
	if err := w.publish(); err != nil {
		return nil, err
	}
	return pickle.Write(plainObject(metadataClass, "state_dict_metadata", w.metadata, "planner_data", nil,
		"storage_data", w.storage, "storage_meta", nil), nil)
}

// matrix writes the values of a kind.
func (w *chunkWriter) matrix(ctx context.Context, s *foreign.State, m *matrix, kind foreign.Kind) error {
	var names []string
	for _, key := range m.keys {
		if kind == foreign.Weights {
			names = append(names, key)
		}
		names = append(names, "optimizer.state."+stateNames[kind][0]+"."+key)
	}
	step := max(1, w.maxChunk/m.columns()) // rows
	for first := 0; first < m.shape[0]; first += step {
		end := min(first+step, m.shape[0])
		offsets := append(slices.Clone(m.lead), make([]int, len(m.shape))...)
		offsets[len(m.lead)] = first
		var sizes []int
		for range m.lead {
			sizes = append(sizes, 1)
		}
		sizes = append(append(sizes, end-first), m.shape[1:]...)
		position, err := w.add(&torchfile.Contents{DType: safetensors.F32, Shape: sizes,
			Each: func(put func([]float32) error) error {
				return m.each(ctx, s, kind, first, end, func(chunk []float32) error {
					if w.done += int64(len(chunk)); w.progress != nil {
						w.progress(w.done, w.total)
					}
					return put(chunk)
				})
			}})
		if err != nil {
			return err
		}
		for _, name := range names {
			w.describe(name, append(slices.Clone(m.shapes), m.shape...), offsets, sizes, position)
		}
	}
	return nil
}

// describe adds the description of a chunk of a float32 tensor.
func (w *chunkWriter) describe(name string, shape, offsets, sizes []int, position *pickle.Object) {
	chunks := w.chunks[name]
	if chunks == nil {
		chunks = &pickle.List{}
		w.chunks[name] = chunks
		strided := &pickle.Object{Class: layoutFunction, Args: pickle.Tuple{"torch.strided"}}
		contiguous := &pickle.Object{Class: memoryFormatClass, Args: pickle.Tuple{0}}
		properties := &pickle.Object{Class: propertiesClass, New: true,
			State: pickle.Tuple{pickle.Global("torch.float32"), strided, false, contiguous, false}}
		w.metadata.Pairs = append(w.metadata.Pairs, pickle.Pair{Key: name, Value: plainObject(tensorClass,
			"properties", properties, "size", sizeOf(shape), "chunks", chunks)})
	}
	chunks.Items = append(chunks.Items, plainObject(chunkClass, "offsets", sizeOf(offsets), "sizes", sizeOf(sizes)))
	w.place(name, sizeOf(offsets), position)
}

// place adds the position of a chunk or an object.
func (w *chunkWriter) place(name string, offsets pickle.Value, position *pickle.Object) {
	index := plainObject(indexClass, "fqn", name, "offset", offsets, "index", nil)
	w.storage.Pairs = append(w.storage.Pairs, pickle.Pair{Key: index, Value: position})
}

// objects writes objects that are None. All are the same bytes.
func (w *chunkWriter) objects(names []string) error {
	position, err := w.add(&pickle.List{Items: []pickle.Value{nil}})
	if err != nil {
		return err
	}
	for _, name := range names {
		w.metadata.Pairs = append(w.metadata.Pairs, pickle.Pair{Key: name, Value: plainObject(bytesClass)})
		w.place(name, nil, position)
	}
	return nil
}

// plainObject returns an object with attributes, whose names and values alternate.
func plainObject(class pickle.Global, attributes ...pickle.Value) *pickle.Object {
	return &pickle.Object{Class: class, New: true, State: pickle.DictOf(attributes...)}
}

// sizeOf returns a value of torch.Size.
func sizeOf(ints []int) pickle.Value {
	t := pickle.Tuple{}
	for _, n := range ints {
		t = append(t, n)
	}
	return &pickle.Object{Class: sizeClass, Args: pickle.Tuple{t}}
}

// objectsOf returns the names of the objects _extra_state of a model. Linear layers of Megatron
// core have them, and layers of Transformer Engine, for scales of FP8. A model loads only its own
// objects.
func objectsOf(c moe.Config) []string {
	names := []string{objectName("decoder.final_layernorm", nil, nil)}
	network := []string{"linear_fc1", "linear_fc2"}
	for layer := range c.Layers {
		prefix, at, of := fmt.Sprintf("decoder.layers.%d.", layer), []int(nil), []int(nil)
		if stacked(c) {
			prefix, at, of = "decoder.layers.", []int{layer}, []int{c.Layers}
		}
		for _, module := range []string{"self_attention.linear_qkv", "self_attention.linear_proj",
			"self_attention.core_attention", "self_attention.q_layernorm", "self_attention.k_layernorm",
			"pre_mlp_layernorm"} {
			names = append(names, objectName(prefix+module, at, of))
		}
		for _, module := range network {
			switch {
			case !c.HasExperts(layer):
				names = append(names, objectName(prefix+"mlp."+module, at, of))
				continue
			case c.SharedSize > 0:
				names = append(names, objectName(prefix+"mlp.shared_experts."+module, at, of))
			}
			for expert := range c.Experts {
				names = append(names, objectName(prefix+"mlp.experts.experts."+module,
					append(slices.Clone(at), expert), append(slices.Clone(of), c.Experts)))
			}
		}
	}
	return names
}

// objectName returns the name of the object of a module at coordinates along axes of sizes of. A
// module without axes has one object.
func objectName(module string, at, of []int) string {
	if len(at) == 0 {
		at, of = []int{0}, []int{1}
	}
	dotted := func(ints []int) string { return strings.ReplaceAll(strings.Trim(fmt.Sprint(ints), "[]"), " ", ".") }
	return fmt.Sprintf("%s._extra_state/shard_%s_%s", module, dotted(at), dotted(of))
}

// commonOf returns the content of common.pt, as of Megatron-LM's save_checkpoint.
func commonOf(s *foreign.State, c moe.Config, o WriteOptions) pickle.Value {
	state := func(experts bool) pickle.Value {
		return pickle.DictOf("optimizer", pickle.DictOf("param_groups", groupsOf(s, o.Recipe, experts)),
			"param_state_sharding_type", "fully_reshardable")
	}
	states := state(false)
	if o.ExpertParallel {
		states = pickle.DictOf(0, states, 1, state(true))
	}
	return pickle.DictOf(
		"args", plainObject("argparse.Namespace", argumentsOf(s, c)...),
		"checkpoint_version", 3.0,
		"iteration", s.Step,
		"optimizer", states,
		"opt_param_scheduler", schedulerOf(s, o.Recipe),
		"content_metadata", pickle.DictOf("distrib_optim_sharding_type", "fully_reshardable",
			"chained_optim_avoid_prefix", true, "singleton_local_shards", false,
			"non_homogeneous_layers", !stacked(c)),
	)
}

// groupsOf returns the groups of parameters of an optimizer. Megatron core finds its own groups by
// the first four settings, and replaces all their settings. Without max_lr and min_lr, its
// scheduler has its own. The settings are of torch's AdamW, and of FusedAdam of Apex and
// Transformer Engine.
func groupsOf(s *foreign.State, r Recipe, experts bool) *pickle.List {
	groups := &pickle.List{}
	for _, factor := range []float64{1, 0} { // matrices; norms and biases
		groups.Items = append(groups.Items, pickle.DictOf(
			"wd_mult", factor,
			"lr_mult", 1.0,
			"is_expert_parallel", experts,
			"is_decoupled_lr", false,
			"default_config", true,
			"lr", r.Schedule.LearningRate(s.Step),
			"betas", pickle.Tuple{r.Betas[0], r.Betas[1]},
			"eps", r.Epsilon,
			"weight_decay", r.WeightDecay*factor,
			"step", s.Updates,
			"bias_correction", true,
			"amsgrad", false, "maximize", false, "foreach", nil, "capturable", false, "differentiable", false,
			"fused", nil, "decoupled_weight_decay", true,
		))
	}
	return groups
}

// schedulerOf returns the state of OptimizerParamScheduler, which counts samples. mula's first step
// has the learning rate of Megatron's second step, so num_steps counts one step more.
func schedulerOf(s *foreign.State, r Recipe) pickle.Value {
	style := string(r.Schedule.Name)
	if r.Schedule.Name == optimizer.WSD {
		style = "WSD"
	}
	return pickle.DictOf(
		"max_lr", r.Schedule.Peak,
		"min_lr", r.Schedule.Min,
		"lr_warmup_steps", r.Schedule.Warmup*r.BatchSize,
		"lr_decay_steps", r.Schedule.Decay*r.BatchSize,
		"lr_decay_style", style,
		"num_steps", (s.Step+1)*r.BatchSize,
		"start_wd", r.WeightDecay,
		"end_wd", r.WeightDecay,
		"wd_incr_steps", 0,
		"wd_incr_style", "constant",
	)
}

// argumentsOf returns the arguments of Megatron-LM's run, by name. Megatron-LM can set its own from
// them (--use-checkpoint-args).
func argumentsOf(s *foreign.State, c moe.Config) []pickle.Value {
	has := func(last string) bool {
		return slices.ContainsFunc(s.Parameters, func(p foreign.Parameter) bool {
			return strings.HasSuffix(p.Name, last)
		})
	}
	width := c.IntermediateSize // of networks without experts
	if c.DenseSize > 0 {
		width = c.DenseSize
	}
	list := []pickle.Value{
		"consumed_train_samples", s.Samples,
		"no_save_rng", true,
		"tensor_model_parallel_size", 1,
		"pipeline_model_parallel_size", 1,
		"add_position_embedding", true,
		"max_position_embeddings", c.MaxPositions,
		"ffn_hidden_size", width,
		"group_query_attention", c.KVHeads != c.Heads,
		"num_query_groups", c.KVHeads,
		"add_bias_linear", false,
		"add_qkv_bias", has("q_proj.bias"),
		"qk_layernorm", has("q_norm.weight"),
		"attention_dropout", 0.0,
		"hidden_dropout", 0.0,
	}
	for _, a := range arguments(c) {
		if x, ok := a.want.(float64); ok && a.name == "rotary_base" && x == math.Trunc(x) {
			a.want = int64(x)
		}
		if a.want != nil {
			list = append(list, a.name, a.want)
		}
	}
	var window pickle.Value
	if c.SlidingWindow > 0 {
		window = pickle.Tuple{c.SlidingWindow - 1, 0}
	}
	list = append(list, "window_size", window)
	if c.Experts == 0 {
		return list
	}
	list = append(list, "moe_ffn_hidden_size", c.IntermediateSize, "moe_router_score_function", "softmax",
		"moe_router_pre_softmax", !c.NormTopK)
	if c.SharedSize > 0 {
		list = append(list, "moe_shared_expert_intermediate_size", c.SharedSize, "moe_shared_expert_gate",
			has("shared_expert_gate.weight"))
	}
	if stacked(c) {
		return append(list, "moe_layer_freq", 1)
	}
	layers := &pickle.List{}
	for layer := range c.Layers {
		with := 0
		if c.HasExperts(layer) {
			with = 1
		}
		layers.Items = append(layers.Items, with)
	}
	return append(list, "moe_layer_freq", layers)
}
