package moe

import (
	"errors"
	"fmt"
	"math"

	"mula/xpu"
)

// OrderOfSums numbers the ways in which this package has put operations in order: with one device, versions with the same number give the
// same bits. It goes up when a change of the forward or backward pass changes a last bit.
const OrderOfSums = 2

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

// bind cuts the weights into tensors, and makes parameters of them, which take their names and shapes from the list of [Config.tensors].
func (m *Model) bind() {
	c := m.cfg
	h, kv, ffn := c.HiddenSize, c.kvWidth(), c.IntermediateSize
	at := 0
	take := func(n int) tensor {
		t := tensor{m.weights[at : at+n : at+n], m.grads[at : at+n : at+n]}
		at += n
		return t
	}
	list := c.tensors()
	parameter := func(t tensor) tensor {
		next := list[len(m.params)]
		m.params = append(m.params, &Parameter{Name: next.Name, Shape: next.Shape, Weight: t.w, Grad: t.g})
		return t
	}
	norm := func(n int) tensor {
		if !c.moe() {
			return tensor{}
		}
		return parameter(take(n))
	}
	m.embed = parameter(take(c.VocabSize * h))
	m.layers = make([]layer, c.Layers)
	for i := range m.layers {
		l := &m.layers[i]
		l.norm1 = norm(h)
		l.qkv = take(c.qkvWidth() * h)
		parameter(l.qkv.rows(0, h, h))
		parameter(l.qkv.rows(h, kv, h))
		parameter(l.qkv.rows(h+kv, kv, h))
		l.qNorm, l.kNorm = norm(h), norm(kv)
		l.out = parameter(take(h * h))
		l.norm2 = norm(h)
		experts := 1
		if c.moe() {
			experts = c.Experts
			l.router = parameter(take(experts * h))
		}
		l.gateUp = take(experts * 2 * ffn * h)
		l.down = take(experts * h * ffn)
		for e := range experts {
			both, down := l.gateUp.rows(e, 1, 2*ffn*h), l.down.rows(e, 1, h*ffn)
			l.gateUpW, l.gateUpG = append(l.gateUpW, both.w), append(l.gateUpG, both.g)
			l.downW, l.downG = append(l.downW, down.w), append(l.downG, down.g)
			parameter(both.rows(0, ffn, h))
			parameter(both.rows(ffn, ffn, h))
			parameter(down)
		}
	}
	m.norm = norm(h)
	m.head = m.embed
	if !c.TieEmbeddings {
		m.head = parameter(take(c.VocabSize * h))
	}
}

// rows is the piece of a matrix with the given number of columns that starts at row first and has n rows.
func (t tensor) rows(first, n, columns int) tensor {
	lo, hi := first*columns, (first+n)*columns
	return tensor{t.w[lo:hi:hi], t.g[lo:hi:hi]}
}
