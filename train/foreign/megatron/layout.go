package megatron

import (
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"mula/moe"
	"mula/train/foreign"
)

// families are the families whose parts Megatron core has.
var families = []moe.Architecture{moe.Llama, moe.Mistral, moe.Mixtral, moe.Qwen2, moe.Qwen3, moe.Qwen2MoE,
	moe.Qwen3MoE}

func checkFamily(c moe.Config) error {
	if !slices.Contains(families, c.Architecture) {
		return fmt.Errorf("config.json has model_type %s; checkpoints of Megatron core are supported for %v",
			c.Architecture, families)
	}
	return nil
}

// stateNames are the names of the kinds of values of an optimizer's state. The first is of
// DistributedOptimizer, the second of Float16OptimizerWithFloat16Params.
var stateNames = map[foreign.Kind][]string{foreign.Weights: {"param", "fp32_param"}, foreign.ExpAvg: {"exp_avg"},
	foreign.ExpAvgSq: {"exp_avg_sq"}}

// A location is the rows of a tensor of Megatron core that are a tensor of Hugging Face. Row r is
// row r/block*stride + offset + r%block of the matrix.
type location struct {
	// names of the tensor inside a layer, or of the model; the first that a checkpoint has counts
	names  []string
	every  bool // a written checkpoint has all names, because Megatron's kinds of layers differ
	layer  int  // -1: not in a layer
	expert int  // -1: not of an expert

	block, stride, offset int
	rows                  int // of the matrix
}

var layerName = regexp.MustCompile(`^model\.layers\.(\d+)\.(.+)$`)
var expertName = regexp.MustCompile(`^(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(.+)$`)

// Names of a module in Megatron core: with layers of Transformer Engine, which have the norm before
// a matrix, and with local layers.
var (
	attentionNorm = []string{"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"}
	networkNorm   = []string{"mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"}
)

// locate returns the location of a tensor of a model of configuration c, of Hugging Face's name and
// shape.
//
// A matrix of queries, keys and values has the heads of queries that share a head of keys, then
// this head of keys, then its head of values. fc1 has the gate, then up.
func locate(c moe.Config, name string, shape []int) (location, error) {
	l := location{layer: -1, expert: -1, block: shape[0], stride: shape[0], rows: shape[0]}
	inner := name
	if m := layerName.FindStringSubmatch(name); m != nil {
		l.layer, _ = strconv.Atoi(m[1])
		inner = m[2]
	}
	fc1, fc2 := "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
	if m := expertName.FindStringSubmatch(inner); m != nil {
		l.expert, _ = strconv.Atoi(m[1])
		inner = "mlp." + m[2]
		fc1, fc2 = "mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"
	}
	if last, shared := strings.CutPrefix(inner, "mlp.shared_expert."); shared {
		inner = "mlp." + last
		fc1, fc2 = "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"
	}
	size := c.HeadDim()
	shared := c.Heads / c.KVHeads * size // queries of a head of keys
	part := func(name string, rows, offset, group int) {
		l.names, l.block, l.offset, l.stride = []string{name}, rows, offset, group
		l.rows = shape[0] / rows * group
	}
	switch inner {
	case "model.embed_tokens.weight":
		l.names = []string{"embedding.word_embeddings.weight"}
	case "lm_head.weight":
		l.names = []string{"output_layer.weight"}
	case "model.norm.weight":
		l.names = []string{"decoder.final_layernorm.weight", "decoder.final_norm.weight"}
	case "input_layernorm.weight":
		l.names = attentionNorm
	case "post_attention_layernorm.weight":
		l.names = networkNorm
		if c.HasExperts(l.layer) {
			l.names, l.every = []string{networkNorm[1], networkNorm[0]}, true
		}
	case "self_attn.q_proj.weight", "self_attn.q_proj.bias":
		part("self_attention.linear_qkv"+inner[len("self_attn.q_proj"):], shared, 0, shared+2*size)
	case "self_attn.k_proj.weight", "self_attn.k_proj.bias":
		part("self_attention.linear_qkv"+inner[len("self_attn.q_proj"):], size, shared, shared+2*size)
	case "self_attn.v_proj.weight", "self_attn.v_proj.bias":
		part("self_attention.linear_qkv"+inner[len("self_attn.q_proj"):], size, shared+size, shared+2*size)
	case "self_attn.q_norm.weight":
		l.names = []string{"self_attention.q_layernorm.weight"}
	case "self_attn.k_norm.weight":
		l.names = []string{"self_attention.k_layernorm.weight"}
	case "self_attn.o_proj.weight":
		l.names = []string{"self_attention.linear_proj.weight"}
	case "mlp.gate.weight", "block_sparse_moe.gate.weight":
		l.names = []string{"mlp.router.weight"}
	case "mlp.shared_expert_gate.weight":
		l.names = []string{"mlp.shared_experts.gate_weight"}
	case "mlp.gate_proj.weight", "mlp.w1.weight":
		part(fc1, shape[0], 0, 2*shape[0])
	case "mlp.up_proj.weight", "mlp.w3.weight":
		part(fc1, shape[0], shape[0], 2*shape[0])
	case "mlp.down_proj.weight", "mlp.w2.weight":
		l.names = []string{fc2}
	default:
		return l, fmt.Errorf("%s has no tensor in Megatron core", name)
	}
	return l, nil
}

// padded reports whether the tensor may have more rows than the model has tokens.
func (l location) padded() bool {
	return l.names[0] == "embedding.word_embeddings.weight" || l.names[0] == "output_layer.weight"
}

// A place is a matrix in a tensor of a checkpoint, by its coordinates along the other axes.
type place struct {
	key  string
	lead []int
}

// places lists the places in which a checkpoint may have a tensor. Layers are separate tensors, or
// one tensor if all layers are equal. So are experts.
func (l location) places() []place {
	var list []place
	for _, name := range l.names {
		if l.layer < 0 {
			list = append(list, place{name, nil})
			continue
		}
		var lead []int
		names := []string{name}
		if l.expert >= 0 {
			lead = []int{l.expert}
			own := fmt.Sprintf(".experts.experts.%d.", l.expert)
			names = append(names, strings.Replace(name, ".experts.experts.", own, 1))
		}
		for i, name := range names {
			own := lead
			if i > 0 {
				own = nil
			}
			list = append(list, place{fmt.Sprintf("decoder.layers.%d.%s", l.layer, name), own},
				place{"decoder.layers." + name, slices.Concat([]int{l.layer}, own)})
		}
	}
	return list
}

// A model is the checkpoint of a model.
type model struct {
	config  moe.Config
	dir     string
	files   *files
	tensors map[string]*tensor
	used    map[string]bool // tensors of the model, without the optimizer's
}

// parameters finds all tensors of the model. The error names tensors that the checkpoint does not
// have, or that the model does not have.
func (m *model) parameters() ([]foreign.Parameter, error) {
	if err := checkFamily(m.config); err != nil {
		return nil, fmt.Errorf("%s: %w", m.dir, err)
	}
	metadata := filepath.Join(m.dir, metadataFile)
	m.used = map[string]bool{}
	known := map[string]bool{}
	var list []foreign.Parameter
	var missing []string
	for _, t := range m.config.Tensors() {
		l, err := locate(m.config, t.Name, t.Shape)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", metadata, err)
		}
		places := l.places()
		i := slices.IndexFunc(places, func(p place) bool { return m.tensors[p.key] != nil })
		if i < 0 {
			missing = append(missing, fmt.Sprintf("%s (%s)", places[0].key, t.Name))
			continue
		}
		p := places[i]
		if err := l.check(m.tensors[p.key], p.lead, t.Shape); err != nil {
			return nil, fmt.Errorf("%s: %w", metadata, err)
		}
		m.used[p.key] = true
		for _, other := range places {
			known[other.key] = known[other.key] || other.key == p.key || l.every
		}
		list = append(list, foreign.Parameter{Name: t.Name, Shape: t.Shape,
			Read: func(kind foreign.Kind, dst []float32, first int64) error {
				return m.read(l, p, t.Shape, kind, dst, first)
			}})
	}
	if missing != nil {
		return nil, fmt.Errorf("%s has no tensor %s; use the config.json of this model", metadata, some(missing))
	}
	var unknown []string
	for _, name := range slices.Sorted(maps.Keys(m.tensors)) {
		if !known[name] && !strings.HasPrefix(name, "optimizer.") && !strings.HasPrefix(name, "rng_state") &&
			!strings.Contains(name, "_extra_state") && !strings.HasPrefix(name, "rerun_state") {
			unknown = append(unknown, name)
		}
	}
	if unknown != nil {
		return nil, fmt.Errorf("%s has the tensor %s, which a %s model of config.json does not have; use the "+
			"config.json of this model", metadata, some(unknown), m.config.Architecture)
	}
	return list, nil
}

// some lists the first few names.
func some(names []string) string {
	const most = 3
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

// check compares a tensor with the shape of Hugging Face's tensor.
func (l location) check(t *tensor, lead, shape []int) error {
	want := slices.Clone(shape)
	want[0] = l.rows
	got := t.shape
	ok := len(got) == len(lead)+len(want)
	for axis := 0; ok && axis < len(lead); axis++ {
		ok = lead[axis] < got[axis]
	}
	if ok {
		got = got[len(lead):]
		ok = slices.Equal(got[1:], want[1:]) && (got[0] == want[0] || l.padded() && got[0] > want[0])
	}
	if !ok {
		text := fmt.Sprint(want)
		if l.layer >= 0 {
			text += fmt.Sprintf(" of layer %d", l.layer)
		}
		if l.expert >= 0 {
			text += fmt.Sprintf(", expert %d", l.expert)
		}
		return fmt.Errorf("%s has shape %v; config.json needs %s", t.name, t.shape, text)
	}
	return t.index(len(lead))
}

// read reads elements of Hugging Face's tensor of a shape.
func (m *model) read(l location, p place, shape []int, kind foreign.Kind, dst []float32, first int64) error {
	t := m.tensors[p.key]
	for _, name := range stateNames[kind] {
		if state := m.tensors["optimizer.state."+name+"."+p.key]; state != nil {
			t = state
			break
		} else if kind != foreign.Weights {
			return fmt.Errorf("%s has no tensor optimizer.state.%s.%s", filepath.Join(m.dir, metadataFile), name, p.key)
		}
	}
	if err := l.check(t, p.lead, shape); err != nil {
		return fmt.Errorf("%s: %w", filepath.Join(m.dir, metadataFile), err)
	}
	columns := 1
	if len(shape) == 2 {
		columns = shape[1]
	}
	for len(dst) > 0 {
		row, column := int(first/int64(columns)), int(first%int64(columns))
		n := min(len(dst), (l.block-row%l.block)*columns-column)
		if err := m.files.rows(dst[:n], t, p.lead, row/l.block*l.stride+l.offset+row%l.block, column); err != nil {
			return err
		}
		dst, first = dst[n:], first+int64(n)
	}
	return nil
}
