package moe

import (
	"errors"
	"fmt"
	"math"
	"slices"

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

	Index   int  // place in the list of the whole model's tensors, [Config.Tensors]
	Divided bool // it belongs to an expert, and ranks that share the experts hold different ones
}

// A Bucket is a contiguous stretch of the model's memory whose gradients are complete at the same time.
type Bucket struct {
	Divided    bool // as its parameters are
	Weight     []float32
	Grad       []float32
	Parameters []*Parameter // in the order in which they lie in Weight and Grad, without gaps
}

// A Model holds the weights and gradients of a configuration, and the buffers of a pass.
type Model struct {
	cfg      Config
	dev      xpu.Device
	parallel Parallel
	dispatch *dispatch // nil if no others share the experts
	stage    stage

	weights, grads []float32 // all tensors, one after the other
	params         []*Parameter
	buckets        []Bucket

	embed, norm, head tensor // [V, H], [H], [V, H]
	layers            []layer

	recompute Recompute // see SetRecompute
	rope      ropeTable
	ws        workspace
	loop      loop
	flights   []*flight // by slot; a whole model uses the first
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

// New makes a whole model with all weights zero; [Model.Init] or [Model.Load] gives them values. Memory for gradients is reserved but not
// touched before the first [Model.Backward].
func New(cfg Config, dev xpu.Device) (*Model, error) { return NewParallel(cfg, dev, Parallel{}) }

// NewParallel makes a model as [New] does, of whose experts it may hold a part.
func NewParallel(cfg Config, dev xpu.Device, p Parallel) (*Model, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := p.validate(cfg); err != nil {
		return nil, err
	}
	if dev == nil {
		return nil, errors.New("moe: a model needs a device")
	}
	const most = min(math.MaxInt/8, 1<<44) // so that weights and gradients have an address, of which common processors offer 2⁴⁷
	here := stageOf(cfg, p.Stage, p.Stages)
	n := here.parameters(cfg, cfg.Experts/p.ranks())
	if n > most {
		return nil, fmt.Errorf("moe: %d parameters do not fit into this machine's address space; make the model smaller", n)
	}
	m := &Model{cfg: cfg, dev: dev, parallel: p, stage: here, weights: make([]float32, n), grads: make([]float32, n)}
	m.loop.run = m.runPiece // kept, because a method value made for each loop would be an allocation
	if p.ranks() > 1 {
		m.dispatch = newDispatch(cfg, p)
	}
	m.bind()
	return m, nil
}

// Config returns the configuration that the model was made with.
func (m *Model) Config() Config { return m.cfg }

// Parameters lists the weight tensors, always in the same order: embedding, layer by layer, final norm, head. A tied head is the embedding
// and not listed again. A model that holds a part of the experts lists those alone, in the order and under the names of the whole model.
func (m *Model) Parameters() []*Parameter { return m.params }

// Buckets divides all parameters into stretches of memory, in the order in which [Model.Backward] completes their gradients: final norm and
// head, then layer by layer from the last to the first the experts and the rest, then the embedding; of a stage those that it holds. Where
// embedding and head are tied, the final norm is in the bucket of the embedding. A dense layer is one bucket.
func (m *Model) Buckets() []Bucket { return m.buckets }

// ZeroGradients sets all gradients to zero.
func (m *Model) ZeroGradients() {
	m.split(len(m.grads), operands{}, func(m *Model, _ *operands, _, lo, hi int) { clear(m.grads[lo:hi]) })
}

// bind cuts the weights into tensors, makes parameters of them, which take their names and shapes from the list of [Config.Tensors], and
// makes buckets of these.
func (m *Model) bind() {
	c := m.cfg
	h, kv, ffn := c.HiddenSize, c.kvWidth(), c.IntermediateSize
	norms, experts, firstExpert := 0, 1, 0
	if c.moe() {
		norms, experts = 1, c.Experts/m.parallel.ranks()
		firstExpert = m.parallel.rank() * experts
	}
	at, start := 0, 0
	take := func(n int) tensor {
		t := tensor{m.weights[at : at+n : at+n], m.grads[at : at+n : at+n]}
		at += n
		return t
	}
	list, next := c.Tensors(), 0
	perLayer := len(list) - 1 - norms // tensors
	if !c.TieEmbeddings {
		perLayer--
	}
	perLayer /= c.Layers
	parameters := func(divided bool, tensors ...tensor) []*Parameter {
		var made []*Parameter
		for _, t := range tensors {
			if len(t.w) > 0 {
				made = append(made, &Parameter{Name: list[next].Name, Shape: list[next].Shape, Weight: t.w, Grad: t.g, Index: next, Divided: divided})
				next++
			}
		}
		m.params = append(m.params, made...)
		return made
	}
	bucket := func(divided bool, held []*Parameter) { // of what has been taken since the last one
		m.buckets = append(m.buckets, Bucket{Divided: divided, Weight: m.weights[start:at:at], Grad: m.grads[start:at:at], Parameters: held})
		start = at
	}

	if m.stage.first {
		m.embed = take(c.VocabSize * h)
		m.head = m.embed
		if c.TieEmbeddings {
			m.norm = take(norms * h)
		}
		bucket(false, parameters(false, m.embed))
	}
	m.layers = make([]layer, m.stage.layers)
	for i := range m.layers {
		next = 1 + (m.stage.from+i)*perLayer
		l := &m.layers[i]
		l.norm1 = take(norms * h)
		l.qkv = take(c.qkvWidth() * h)
		l.qNorm, l.kNorm = take(norms*h), take(norms*kv)
		l.out = take(h * h)
		l.norm2 = take(norms * h)
		l.router = take(c.Experts * h)
		held := parameters(false, l.norm1, l.qkv.rows(0, h, h), l.qkv.rows(h, kv, h), l.qkv.rows(h+kv, kv, h), l.qNorm, l.kNorm, l.out, l.norm2, l.router)
		if c.moe() {
			bucket(false, held)
			held = nil
		}
		l.gateUp = take(experts * 2 * ffn * h)
		l.down = take(experts * h * ffn)
		var downs []*Parameter // they lie behind all gates and ups
		next += 3 * firstExpert
		for e := range experts {
			both, down := l.gateUp.rows(e, 1, 2*ffn*h), l.down.rows(e, 1, h*ffn)
			l.gateUpW, l.gateUpG = append(l.gateUpW, both.w), append(l.gateUpG, both.g)
			l.downW, l.downG = append(l.downW, down.w), append(l.downG, down.g)
			held = append(held, parameters(c.moe(), both.rows(0, ffn, h), both.rows(ffn, ffn, h))...)
			downs = append(downs, parameters(c.moe(), down)...)
		}
		bucket(c.moe(), append(held, downs...))
	}
	next = 1 + c.Layers*perLayer
	switch {
	case c.TieEmbeddings:
		m.buckets[0].Parameters = append(m.buckets[0].Parameters, parameters(false, m.norm)...)
	case m.stage.last:
		m.norm = take(norms * h)
		m.head = take(c.VocabSize * h)
		bucket(false, parameters(false, m.norm, m.head))
	}
	slices.Reverse(m.buckets)
}

// rows is the piece of a matrix with the given number of columns that starts at row first and has n rows.
func (t tensor) rows(first, n, columns int) tensor {
	lo, hi := first*columns, (first+n)*columns
	return tensor{t.w[lo:hi:hi], t.g[lo:hi:hi]}
}
