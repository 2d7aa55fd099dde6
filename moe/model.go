package moe

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"mula/xpu"
	"mula/xpu/comm"
)

// OrderOfSums is the version of the order of operations in this package: on one device, versions of
// mula with the same number compute the same bits. It increases when a change of the forward or
// backward pass changes a last bit.
const OrderOfSums = 2

// A Parameter is one weight tensor under its Hugging Face name. Weight and Grad are ranges of its
// bucket's memory, of this shape.
type Parameter struct {
	Name   string
	Shape  []int // linear weights are [out, in]
	Weight xpu.Tensor
	Grad   xpu.Tensor

	Index   int  // index in the list of the complete model's tensors, [Config.Tensors]
	Divided bool // it belongs to an expert, so that ranks that share the experts hold different ones

	// Slice is the part of the complete tensor. Shape, Weight and Grad are the part's.
	Slice Slice
}

// A Bucket is a contiguous range of the model's memory whose gradients are complete at the same
// time. Weight and Grad have one dimension; each is a tensor of the device's New.
type Bucket struct {
	Divided    bool // the value of its parameters' Divided
	Sliced     bool // its parameters are slices
	Weight     xpu.Tensor
	Grad       xpu.Tensor
	Parameters []*Parameter // in their order in Weight and Grad, without gaps
}

// Holders returns the group of the ranks that hold the same weights.
func (b Bucket) Holders() comm.Axes {
	switch {
	case b.Divided:
		return comm.Replicas
	case b.Sliced:
		return comm.Slices
	}
	return comm.Data
}

// A Model holds the weights and gradients of a configuration, and the buffers of a pass.
type Model struct {
	cfg      Config
	own      Config // cfg with the sizes of this rank's slices
	dev      xpu.Device
	parallel Parallel
	block    feedForwardBlock
	groups   []layerGroup // see [Parallel.VirtualStages]
	selected int          // the group that stage, layers and firstBucket describe

	// number of layers with experts in the complete model, at least 1 for means over them; see
	// [Model.meanLayers]
	expertLayers int

	params  []*Parameter
	trained []*Parameter // params without correction biases
	buckets []Bucket     // the memory of trained
	biases  xpu.Tensor   // [M, E] correction biases of M layers with experts; absent without them

	stage       stage
	layers      []layer
	predictions []prediction // layers of multi-token prediction, of the last group of the last stage
	firstBucket int          // of the group

	embed, norm, head tensor // [V, H], [H], [V, H]

	toGradients xpu.MatMulOptions // of the products of a backward pass that compute gradients of weights

	recompute   Recompute // see SetRecompute
	activations xpu.DType // see SetActivations
	rope        ropeTable
	windowRope  ropeTable // of layers with a window, if it differs
	ws          workspace
	exchanger   exchanger
	collector   collector
	loop        loop
	flights     []*flight // by slot; without pipeline stages only the first is used
}

// A layerGroup is consecutive layers, and the embedding before or the head after them.
type layerGroup struct {
	stage
	layers      []layer
	firstBucket int // in Buckets
}

// A tensor is a range of the weights and the same range of the gradients.
type tensor struct{ w, g xpu.Tensor }

// A layer holds the tensors of one decoder layer in the form that the products need: q, k and v are
// one matrix, and so are gate and up of an expert, gate first, like gate_up_proj of transformers
// v5. Weights that a family does not have are empty.
type layer struct {
	norm1, norm2 tensor        // [H]
	qkv          tensor        // [AD+2GD, H]
	qkvBias      tensor        // [AD+2GD]
	latent       latentWeights // instead of qkv
	qNorm, kNorm tensor        // [AD], [GD]; [D] of single heads
	sinks        tensor        // [A]
	out          tensor        // [H, AD]; [H, Av] with latent attention
	outBias      tensor        // [H]
	router       tensor        // [E, H]
	routerBias   tensor        // [E] added to the logits
	bias         xpu.Tensor    // [E] correction bias of the router; it has no gradient
	sharedGateUp tensor        // [2W, H] of shared experts
	sharedDown   tensor        // [H, W]
	sharedGate   tensor        // [1, H]
	gateUp, down tensor        // [E, 2I, H], [E, H, I]; without experts [2D, H], [H, D]
	gateUpBias   tensor        // [E, 2I]
	downBias     tensor        // [E, H]

	// its number among this model's layers with experts; -1 without experts
	sparse int

	window int // number of positions that a query attends to, its own included; 0: all
}

func (l *layer) hasExperts() bool { return l.sparse >= 0 }

// hasNetwork is [Config.HasNetwork].
func (l *layer) hasNetwork() bool { return !l.hasExperts() || l.hasShared() }

// New creates a complete model with all weights zero; [Model.Init] or [Model.Load] sets them. On
// the CPU, memory for gradients is reserved, but not touched before the first [Model.Backward].
func New(cfg Config, dev xpu.Device) (*Model, error) {
	return NewParallel(cfg, dev, Parallel{Mesh: comm.NewSingleMesh()})
}

// NewParallel creates a model like [New] that may hold only a part of the experts or layers.
func NewParallel(cfg Config, dev xpu.Device, p Parallel) (*Model, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if p.Sequence == nil {
		p.Sequence = comm.NewSingle()
	}
	if p.Heads == nil {
		p.Heads = p.Sequence
	}
	if err := p.validate(cfg); err != nil {
		return nil, err
	}
	if dev == nil {
		return nil, errors.New("a model needs a device")
	}
	// so that weights and gradients fit the address space, which is 2⁴⁷ bytes on common processors
	const most = min(math.MaxInt/8, 1<<44)
	own := cfg.sliced(p.Mesh.Size(comm.TP))
	groups, n := p.stages(cfg), int64(0)
	for _, s := range groups {
		n += s.parameters(own, cfg.Experts/p.Mesh.Size(comm.EP))
	}
	if n > most {
		return nil, fmt.Errorf("%d parameters exceed this machine's address space; make the model smaller", n)
	}
	m := &Model{cfg: cfg, own: own, dev: dev, parallel: p, block: newFeedForward(cfg, dev, p),
		expertLayers: max(1, len(cfg.ExpertLayers(0, cfg.AllLayers())))}
	for _, s := range groups {
		m.groups = append(m.groups, layerGroup{stage: s})
	}
	m.loop.run = m.runPiece // stored once, because a method value for each loop would be an allocation
	if err := m.bind(); err != nil {
		m.Close()
		return nil, fmt.Errorf("weights and gradients of %d parameters, %d bytes: %w", n, 8*n, err)
	}
	m.SelectLayers(0)
	return m, nil
}

// Close releases the model's device memory; the device must still be open. The model must not be
// used afterwards. Closing a device also releases the memory of its models.
func (m *Model) Close() {
	for _, b := range m.buckets {
		m.dev.Release(b.Weight)
		m.dev.Release(b.Grad)
	}
	m.dev.Release(m.biases)
	m.buckets, m.params, m.trained, m.groups, m.layers = nil, nil, nil, nil, nil
	m.rope.free(m.dev)
	m.windowRope.free(m.dev)
	m.ws.arena.free(m.dev)
	for _, f := range m.flights {
		f.arena.free(m.dev)
		for i := range f.ways {
			f.ways[i].free(m.dev)
			f.memory[i].free(m.dev)
		}
	}
	m.flights = nil
	m.block.free()
}

// Device returns the model's device.
func (m *Model) Device() xpu.Device { return m.dev }

// Config returns the model's configuration.
func (m *Model) Config() Config { return m.cfg }

// Parameters lists the weight tensors, always in the same order: embedding, layer by layer, final
// norm, head, layers of multi-token prediction. A tied head is the embedding and not listed again.
// A model that holds a part of the experts or layers lists only its own parameters, in the order
// and under the names of the complete model.
//
// Correction biases of routers are not among them, because they have no gradient; see
// [Model.Biases].
func (m *Model) Parameters() []*Parameter { return m.trained }

// Buckets divides all parameters into ranges of memory, in the order in which [Model.Backward]
// completes their gradients: for each layer of multi-token prediction, from the last to the first,
// the experts and then the rest; final norm and head; the same for each other layer; the embedding.
// A pipeline stage lists only its own buckets, of all its groups of layers. If embedding and head
// are tied, the final norm is in the bucket of the embedding. A dense layer is one bucket. If ranks
// share matrices, the slices of a layer have a bucket before the rest of the layer.
func (m *Model) Buckets() []Bucket { return m.buckets }

// ZeroGradients sets all gradients to zero, for a step without batches on this rank. Other steps
// can use [BackwardOptions.First].
func (m *Model) ZeroGradients() {
	for _, b := range m.buckets {
		m.dev.Zero(b.Grad)
	}
}

// startGradients prepares the gradients of the selected group of layers for a backward pass. In the
// first pass of a step, the products write gradients of matrices without reading them, and all
// other gradients start from zero.
//
// A sum that is negative zero stays negative zero if it is written, and becomes positive zero if it
// is added to zero. Sums start from positive zero, so they are negative zero only if all their
// terms underflow. No update of a weight depends on the sign of a zero gradient, unless the weight
// is negative zero itself.
func (m *Model) startGradients(first bool) {
	m.toGradients = xpu.MatMulOptions{Accumulate: !first}
	if !first {
		return
	}
	zero := func(all ...tensor) {
		for _, t := range all {
			if t.g.Present() {
				m.dev.Zero(t.g)
			}
		}
	}
	for i := range m.layers {
		m.layers[i].zeroSums(zero)
	}
	if m.stage.first && !m.cfg.TieEmbeddings {
		zero(m.embed)
	}
	if m.stage.last {
		for i := range m.predictions {
			p := &m.predictions[i]
			p.zeroSums(zero)
			zero(p.embeddingNorm, p.hiddenNorm, p.norm)
		}
		zero(m.norm)
		if m.ws.shape.tokens() == 0 { // without a block of logits
			zero(m.head)
		}
	}
}

// zeroSums calls zero with the tensors whose gradients no product computes.
func (l *layer) zeroSums(zero func(...tensor)) {
	zero(l.norm1, l.norm2, l.qkvBias, l.qNorm, l.kNorm, l.latent.qNorm, l.latent.kvNorm, l.sinks, l.outBias,
		l.routerBias, l.gateUpBias, l.downBias)
}

// bind allocates the weights and gradients, one range of each per bucket, cuts them into tensors,
// and creates the parameters, with names and shapes from [Config.Tensors].
func (m *Model) bind() error {
	c, own := m.cfg, m.own
	h, q, kv := c.HiddenSize, own.QueryWidth(), own.KVWidth()
	norm, bias := c.NormWeights(), 0
	if c.hasQKVBias() {
		bias = own.qkvWidth()
	}
	sinks, outBias, routerBias, expertBias := 0, 0, 0, 0 // elements; expertBias of a tensor of each expert
	if c.family().sinks {
		sinks = own.Heads
	}
	if c.hasOutBias() {
		outBias = h
	}
	if c.family().router.outBias {
		routerBias = c.Experts
	}
	if c.family().expertBias {
		expertBias = 1
	}
	sharedGate := 0 // rows
	if c.family().shared.gated() {
		sharedGate = 1
	}
	qNorm, kNorm := own.qkNormWidths()
	ownExperts := c.Experts / m.parallel.Mesh.Size(comm.EP)
	type shaped struct {
		*tensor
		shape []int
	}
	vector := func(t *tensor, n int) shaped { return shaped{t, []int{n}} }
	matrix := func(t *tensor, shape ...int) shaped { return shaped{t, shape} }
	bucket := func(kind Bucket, tensors ...shaped) (err error) { // allocates its memory
		n := 0
		for _, t := range tensors {
			n += elements(t.shape)
		}
		m.buckets = append(m.buckets, kind)
		b := &m.buckets[len(m.buckets)-1]
		if b.Weight, err = m.dev.New(m.dev.Precision().Weights(), n); err != nil {
			return err
		}
		if b.Grad, err = m.dev.New(m.dev.Precision().Gradients(), n); err != nil {
			return err
		}
		at := 0
		for _, t := range tensors {
			if size := elements(t.shape); size > 0 {
				*t.tensor = tensor{b.Weight.Rows(at, at+size).Reshape(t.shape...),
					b.Grad.Rows(at, at+size).Reshape(t.shape...)}
				at += size
			}
		}
		return nil
	}
	list, next := c.Tensors(), 0
	parameters := func(divided bool, tensors ...tensor) []*Parameter {
		var made []*Parameter
		for _, t := range tensors {
			if t.w.Present() {
				slice := m.parallel.slice(c, list[next].Name)
				shape := slice.Shape(list[next].Shape)
				made = append(made, &Parameter{Name: list[next].Name, Shape: shape, Weight: t.w.Reshape(shape...),
					Grad: t.g.Reshape(shape...), Index: next, Divided: divided, Slice: slice})
				next++
			}
		}
		m.params = append(m.params, made...)
		m.trained = append(m.trained, made...)
		return made
	}
	hold := func(held ...*Parameter) { // adds each to the last bucket of its kind
		for _, p := range held {
			i := len(m.buckets) - 1
			for m.buckets[i].Divided != p.Divided || m.buckets[i].Sliced != (p.Slice.Ranks > 0) {
				i--
			}
			m.buckets[i].Parameters = append(m.buckets[i].Parameters, p)
		}
	}

	if m.groups[0].first {
		tensors := []shaped{matrix(&m.embed, c.VocabSize, h)}
		if c.TieEmbeddings {
			tensors = append(tensors, vector(&m.norm, norm))
		}
		if err := bucket(Bucket{}, tensors...); err != nil {
			return err
		}
		m.head = m.embed
		hold(parameters(false, m.embed)...)
	}
	if sparse := len(m.parallel.expertLayers(c)); c.HasBiases() && sparse > 0 {
		var err error
		if m.biases, err = m.dev.New(xpu.Float32, sparse, c.Experts); err != nil {
			return err
		}
	}
	firstTensors, behind, at := make([]int, c.AllLayers()), 0, 1 // of each layer; of the rest after them; so far
	var of tensorList
	for i := range c.AllLayers() {
		if i == c.Layers {
			behind = at
			of = of[:0]
			of.end(c)
			at += len(of)
		}
		firstTensors[i] = at
		of = of[:0]
		of.layer(c, i)
		if i >= c.Layers {
			of.prediction(c, i)
		}
		at += len(of)
	}
	if c.PredictionLayers == 0 {
		behind = at
	}
	biased := 0 // layers with biases
	bindLayer := func(l *layer, number, sparse int) error {
		next = firstTensors[number]
		l.window, l.sparse = c.window(number), -1
		rest := []shaped{vector(&l.norm1, norm)}
		if latent := &l.latent; c.latent() {
			input := h // of queries
			if c.QueryRank > 0 {
				input = c.QueryRank
			}
			rest = append(rest, matrix(&latent.qA, c.QueryRank, h), vector(&latent.qNorm, c.QueryRank),
				matrix(&latent.q, own.Heads*c.queryElements(), input), matrix(&latent.kvA, c.KVRank+c.RotatedSize, h),
				vector(&latent.kvNorm, c.KVRank), matrix(&latent.kv, own.Heads*(c.PlainSize+c.ValueSize), c.KVRank))
		} else {
			rest = append(rest, matrix(&l.qkv, own.qkvWidth(), h), vector(&l.qkvBias, bias), vector(&l.qNorm, qNorm),
				vector(&l.kNorm, kNorm))
		}
		rest = append(rest, vector(&l.sinks, sinks), matrix(&l.out, h, own.ContextWidth()), vector(&l.outBias, outBias),
			vector(&l.norm2, norm))
		experts, ffn := 1, own.denseWidth()
		if c.HasExperts(number) {
			l.sparse, experts, ffn = sparse, ownExperts, c.IntermediateSize
			rest = append(rest, matrix(&l.router, c.Experts, h), vector(&l.routerBias, routerBias),
				matrix(&l.sharedGateUp, 2*own.SharedSize, h),
				matrix(&l.sharedDown, h, own.SharedSize), matrix(&l.sharedGate, sharedGate, h))
		} else {
			rest = append(rest, matrix(&l.gateUp, 2*ffn, h), matrix(&l.down, h, ffn))
		}
		var p *prediction
		if number >= c.Layers {
			p = &m.predictions[number-c.Layers]
			rest = append(rest, vector(&p.embeddingNorm, h), vector(&p.hiddenNorm, h), matrix(&p.projection, h, 2*h),
				vector(&p.norm, h))
		}
		if _, tensor := m.parallel.tensorRanks(); tensor > 1 {
			var sliced []shaped
			rest = slices.DeleteFunc(rest, func(t shaped) bool {
				switch t.tensor {
				case &l.qkv, &l.qkvBias, &l.sinks, &l.latent.q, &l.latent.kv, &l.out, &l.gateUp, &l.down,
					&l.sharedGateUp, &l.sharedDown:
					sliced = append(sliced, t)
					return true
				case &l.qNorm, &l.kNorm:
					if c.HasWideNorms() {
						sliced = append(sliced, t)
					}
					return c.HasWideNorms()
				}
				return false
			})
			if err := bucket(Bucket{}, rest...); err != nil {
				return err
			}
			if err := bucket(Bucket{Sliced: true}, sliced...); err != nil {
				return err
			}
		} else if err := bucket(Bucket{}, rest...); err != nil {
			return err
		}
		hold(parameters(false, l.norm1, l.latent.qA, l.latent.qNorm, l.latent.q, l.latent.kvA, l.latent.kvNorm,
			l.latent.kv, l.qkv.rows(0, q), l.qkv.rows(q, kv), l.qkv.rows(q+kv, kv),
			l.qkvBias.rows(0, q), l.qkvBias.rows(q, kv), l.qkvBias.rows(q+kv, kv), l.qNorm, l.kNorm, l.sinks, l.out,
			l.outBias, l.norm2, l.router, l.routerBias)...)
		if l.hasExperts() && m.biases.Present() {
			l.bias = m.biases.Index(biased)
			biased++
			m.params = append(m.params, &Parameter{Name: list[next].Name, Shape: list[next].Shape,
				Weight: l.bias.Reshape(list[next].Shape...), Index: next})
			next++
		}
		hold(parameters(false, l.sharedGateUp.rows(0, own.SharedSize),
			l.sharedGateUp.rows(own.SharedSize, own.SharedSize), l.sharedDown, l.sharedGate)...)
		if l.hasExperts() {
			err := bucket(Bucket{Divided: true}, matrix(&l.gateUp, experts, 2*ffn, h),
				matrix(&l.gateUpBias, experts*expertBias, 2*ffn), matrix(&l.down, experts, h, ffn),
				matrix(&l.downBias, experts*expertBias, h))
			if err != nil {
				return err
			}
		}
		before := 0 // experts of other ranks, before this rank's
		if l.hasExperts() {
			before = m.parallel.Mesh.OwnIndex(comm.EP) * experts
		}
		if l.gateUpBias.w.Present() { // in the order of tensorList.biasedExperts
			first := next
			each := func(kinds, parts int, expert func(e int) []tensor) {
				next = first + kinds*c.Experts + parts*before
				for e := range experts {
					hold(parameters(true, expert(e)...)...)
				}
			}
			halves := func(t tensor) []tensor { return []tensor{t.rows(0, ffn), t.rows(ffn, ffn)} }
			each(0, 2, func(e int) []tensor { return halves(l.gateUp.index(e)) })
			each(2, 2, func(e int) []tensor { return halves(l.gateUpBias.index(e)) })
			each(4, 1, func(e int) []tensor { return []tensor{l.down.index(e)} })
			each(5, 1, func(e int) []tensor { return []tensor{l.downBias.index(e)} })
			return nil
		}
		next += 3 * before
		var downs []*Parameter // they follow all gates and ups
		for e := range experts {
			gateUp, down := l.gateUp, l.down
			if l.hasExperts() {
				gateUp, down = gateUp.index(e), down.index(e)
			}
			hold(parameters(l.hasExperts(), gateUp.rows(0, ffn), gateUp.rows(ffn, ffn))...)
			downs = append(downs, parameters(l.hasExperts(), down)...)
		}
		hold(downs...)
		if p != nil {
			next += 3 * (c.Experts - before - experts) // after the experts of other ranks
			hold(parameters(false, p.embeddingNorm, p.hiddenNorm, p.projection, p.norm)...)
		}
		return nil
	}
	for i := range m.groups {
		g, sparse := &m.groups[i], 0
		g.layers = make([]layer, min(g.stage.layers, c.Layers-g.from))
		for k := range g.layers {
			if err := bindLayer(&g.layers[k], g.from+k, sparse); err != nil {
				return err
			}
			if g.layers[k].hasExperts() {
				sparse++
			}
		}
		g.firstBucket = len(m.buckets) // the end, before the order is reversed
	}
	next = behind // final norm and head
	last := &m.groups[len(m.groups)-1]
	switch {
	case c.TieEmbeddings:
		m.buckets[0].Parameters = append(m.buckets[0].Parameters, parameters(false, m.norm)...)
	case last.last:
		if err := bucket(Bucket{}, vector(&m.norm, norm), matrix(&m.head, c.VocabSize, h)); err != nil {
			return err
		}
		hold(parameters(false, m.norm, m.head)...)
		last.firstBucket++
	}
	if last.last {
		m.predictions = make([]prediction, c.PredictionLayers)
	}
	for k := range m.predictions {
		sparse := len(c.ExpertLayers(last.from, c.Layers+k))
		if err := bindLayer(&m.predictions[k].layer, c.Layers+k, sparse); err != nil {
			return err
		}
		last.firstBucket = len(m.buckets)
	}
	slices.Reverse(m.buckets)
	for i := range m.groups {
		m.groups[i].firstBucket = len(m.buckets) - m.groups[i].firstBucket
	}
	return nil
}

// rows returns n rows, from row first; of an empty tensor, an empty tensor.
func (t tensor) rows(first, n int) tensor {
	if !t.w.Present() {
		return tensor{}
	}
	return tensor{t.w.Rows(first, first+n), t.g.Rows(first, first+n)}
}

// index returns matrix i of a stack.
func (t tensor) index(i int) tensor { return tensor{t.w.Index(i), t.g.Index(i)} }
