package moe

import (
	"errors"
	"fmt"
	"math"

	"mula/xpu"
	"mula/xpu/cpu"
)

// A Parameter is one weight tensor under its Hugging Face name. Weight and Grad are views into the model's memory.
type Parameter struct {
	Name   string
	Shape  []int // linear weights are [out, in]
	Weight []float32
	Grad   []float32
}

// A Model holds the weights and gradients of a configuration, and the buffers of a pass.
type Model struct {
	cfg Config
	dev xpu.Device

	alone xpu.Device // computes as dev does, on the calling goroutine alone

	weights, grads []float32 // all tensors, one after the other
	params         []*Parameter

	embed, norm, head tensor // [V, H], [H], [V, H]
	layers            []layer

	recompute bool // see SetRecompute
	rope      ropeTable
	ws        workspace
	loop      loop
	counts    [][]int64 // [L][E] for Stats
}

// A tensor is a piece of the weights and the same piece of the gradients.
type tensor struct{ w, g []float32 }

// A layer holds the tensors of one decoder layer as the products want them: q, k and v are one matrix, and so are gate and up of an expert,
// which lie gate first like gate_up_proj of transformers v5. Norms are empty in the dense architecture, the router too.
type layer struct {
	norm1, norm2   tensor // [H]
	qkv            tensor // [H+2GD, H]
	qNorm, kNorm   tensor // [H], [GD]
	out            tensor // [H, H]
	router         tensor // [E, H]
	gateUp, down   tensor // [E, 2I, H], [E, H, I]; without the first dimension if dense
	gateUpW, downW [][]float32
	gateUpG, downG [][]float32
}

// New makes a model with all weights zero; [Model.Init] or [Model.Load] gives them values. Memory for gradients is reserved but not
// touched before the first [Model.Backward].
func New(cfg Config, dev xpu.Device) (*Model, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if dev == nil {
		return nil, errors.New("moe: a model needs a device")
	}
	const most = min(math.MaxInt/8, 1<<44) // so that weights and gradients have an address, of which common processors offer 2⁴⁷
	n := cfg.TotalParameters()
	if n > most {
		return nil, fmt.Errorf("moe: %d parameters do not fit into this machine's address space; make the model smaller", n)
	}
	m := &Model{cfg: cfg, dev: dev, weights: make([]float32, n), grads: make([]float32, n)}
	m.alone = cpu.New(1, dev.Precision())
	m.loop.run = m.runPiece // kept, because a method value made for each loop would be an allocation
	if cfg.moe() {
		for range cfg.Layers {
			m.counts = append(m.counts, make([]int64, cfg.Experts))
		}
	}
	m.bind()
	return m, nil
}

// Config returns the configuration that the model was made with.
func (m *Model) Config() Config { return m.cfg }

// SetRecompute chooses what [Model.Backward] keeps of each layer between its forward and its backward pass: everything that the backward
// pass reads, or with recompute only the layer's input and its routing, the rest being computed again. The gradients are the same bits.
func (m *Model) SetRecompute(recompute bool) { m.recompute = recompute }

// Parameters lists the weight tensors, always in the same order: embedding, layer by layer, final norm, head. A tied head is the embedding
// and not listed again.
func (m *Model) Parameters() []*Parameter { return m.params }

// ZeroGradients sets all gradients to zero.
func (m *Model) ZeroGradients() {
	m.split(len(m.grads), operands{}, func(m *Model, _ *operands, _, lo, hi int) { clear(m.grads[lo:hi]) })
}

// bind cuts the weights into tensors and names them.
func (m *Model) bind() {
	c := m.cfg
	h, kv, ffn := c.HiddenSize, c.kvWidth(), c.IntermediateSize
	at := 0
	take := func(n int) tensor {
		t := tensor{m.weights[at : at+n : at+n], m.grads[at : at+n : at+n]}
		at += n
		return t
	}
	name := func(t tensor, name string, shape ...int) {
		m.params = append(m.params, &Parameter{Name: name, Shape: shape, Weight: t.w, Grad: t.g})
	}
	m.embed = take(c.VocabSize * h)
	name(m.embed, "model.embed_tokens.weight", c.VocabSize, h)
	m.layers = make([]layer, c.Layers)
	for i := range m.layers {
		l := &m.layers[i]
		prefix := fmt.Sprintf("model.layers.%d.", i)
		norm := func(n int, suffix string) tensor {
			if !c.moe() {
				return tensor{}
			}
			t := take(n)
			name(t, prefix+suffix, n)
			return t
		}
		l.norm1 = norm(h, "input_layernorm.weight")
		l.qkv = take(c.qkvWidth() * h)
		name(l.qkv.rows(0, h, h), prefix+"self_attn.q_proj.weight", h, h)
		name(l.qkv.rows(h, kv, h), prefix+"self_attn.k_proj.weight", kv, h)
		name(l.qkv.rows(h+kv, kv, h), prefix+"self_attn.v_proj.weight", kv, h)
		l.qNorm = norm(h, "self_attn.q_norm.weight")
		l.kNorm = norm(kv, "self_attn.k_norm.weight")
		l.out = take(h * h)
		name(l.out, prefix+"self_attn.o_proj.weight", h, h)
		l.norm2 = norm(h, "post_attention_layernorm.weight")
		experts := 1
		if c.moe() {
			experts = c.Experts
			l.router = take(experts * h)
			name(l.router, prefix+"mlp.gate.weight", experts, h)
		}
		l.gateUp = take(experts * 2 * ffn * h)
		l.down = take(experts * h * ffn)
		for e := range experts {
			up, down := l.gateUp.rows(e, 1, 2*ffn*h), l.down.rows(e, 1, h*ffn)
			l.gateUpW, l.gateUpG = append(l.gateUpW, up.w), append(l.gateUpG, up.g)
			l.downW, l.downG = append(l.downW, down.w), append(l.downG, down.g)
			expert := prefix + "mlp."
			if c.moe() {
				expert = fmt.Sprintf("%smlp.experts.%d.", prefix, e)
			}
			name(up.rows(0, ffn, h), expert+"gate_proj.weight", ffn, h)
			name(up.rows(ffn, ffn, h), expert+"up_proj.weight", ffn, h)
			name(down, expert+"down_proj.weight", h, ffn)
		}
	}
	if c.moe() {
		m.norm = take(h)
		name(m.norm, "model.norm.weight", h)
	}
	if c.TieEmbeddings {
		m.head = m.embed
	} else {
		m.head = take(c.VocabSize * h)
		name(m.head, "lm_head.weight", c.VocabSize, h)
	}
}

// rows is the piece of a matrix with the given number of columns that starts at row first and has n rows.
func (t tensor) rows(first, n, columns int) tensor {
	lo, hi := first*columns, (first+n)*columns
	return tensor{t.w[lo:hi:hi], t.g[lo:hi:hi]}
}
