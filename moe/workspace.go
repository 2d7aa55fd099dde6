package moe

import (
	"fmt"

	"mula/xpu"
	"mula/xpu/comm"
)

// A pass over T tokens of a rank needs two kinds of buffers: the values of each layer's forward
// pass that the backward pass reads (saved), and working memory for the current layer, shared by
// all layers. The former belong to a flight, the latter to the workspace. They are allocated from
// arenas that grow to the largest pass so far and serve all later passes. All buffers are device
// memory unless their comment says that they are on the host.
//
// If n ranks share matrices, the products of the attention, of a dense feed-forward block and of
// shared experts are over the tokens of all of them, T' = n·T, and A, G, D (a width) and W are the
// sizes of a rank's slices. Otherwise T' is T.

// LogitsTokens returns the number of tokens in a block of logits of a vocabulary. Gradients of the
// head are sums over blocks, so it determines bits. rows and capacity are the ProductRows and the
// Capacity of the device; 0 and 0 mean a processor.
//
// A block has 2²² logits or rows tokens, if these are more. On a device with its own memory, rows
// is halved until such a block takes at most 1/32 of it, but not below 256.
func LogitsTokens(vocabulary, rows int, capacity int64) int {
	const floats, tokens = 1 << 22, 256
	for capacity > 0 && rows > tokens && 4*int64(rows)*int64(vocabulary) > capacity/32 {
		rows /= 2
	}
	return max(floats/vocabulary, tokens, rows)
}

// passShape determines the buffers that a pass needs.
type passShape struct {
	rows, s   int       // s is this rank's tokens of a row
	ranks     int       // ranks that share each row
	tensor    int       // ranks of [comm.TP], which share each row and the matrices of a layer
	parts     int       // of the queries of a row, in which different ranks compute the attention
	train     bool      // backward follows: every layer is saved
	recompute Recompute // also without train, so that both kinds of passes use the same memory
	logits    int       // tokens of a block of logits; 0 without logits
	from      int       // number of this model's first layer
	layers    int       // number of layers in this model that the pass computes

	predictions int       // of these, layers of multi-token prediction, the last ones
	predicts    bool      // the pass includes layers of multi-token prediction, of any stage
	first       bool      // these layers are the model's first, after the embedding
	last        bool      // these layers are the model's last, before the final norm and the head
	elsewhere   bool      // expert rows are not this rank's tokens: a dispatch has their buffers
	documents   bool      // attention stays within documents
	jitter      bool      // the inputs of layers with experts have noise
	rounded     xpu.DType // of the activations that SetActivations names
}

// saved holds the values of one layer that the backward pass reads. Without a backward pass all
// layers share one. Recomputed values are shared by all layers and flights. The routing is always
// kept, because experts are chosen only once. A layer without experts has no routing.
type saved struct {
	x0       xpu.Tensor // [T, H] input of the layer
	attended            // shared with RecomputeLayers
	gateUps             // shared with RecomputeExperts and RecomputeLayers
	routing  xpu.Routing

	sharedScore xpu.Tensor // [T, 1] of a layer whose shared experts have a gate

	// With a norm after the feed-forward block: [T, H] its input, and [T] its statistic.
	y2, rstdY2 xpu.Tensor
}

// gateUps hold the gate and up projections of a layer's feed-forward block. The backward pass
// overwrites them with their gradients. A layer uses one of the tensors, so they share memory.
type gateUps struct {
	gateUp xpu.Tensor // [R, 2I] of the experts
	dense  xpu.Tensor // [T', 2D] of a layer without experts
	shared xpu.Tensor // [T', 2W] of shared experts, in its own memory; absent without them
}

// attended holds the results of the attention, and the statistics of the norm after it.
type attended struct {
	mean1, rstd1 xpu.Tensor  // [T] of the norm of the attention; means with LayerNorm only
	qkv          xpu.Tensor  // [T', AD+2GD] projections, before norm, clip and rotation
	latent       latentSaved // instead of qkv
	rq, rk       xpu.Tensor  // [T'·norms] of the q and k norms
	ctx          xpu.Tensor  // [T', AD] result of the attention, before its output projection
	// [rows·S', A'D] the same of the heads of [wholeHeads]; absent if ranks do not exchange heads
	wholeCtx     xpu.Tensor
	lse          xpu.Tensor // [rows, A, S] or [rows, A', S'] logsumexp of the scores
	y1           xpu.Tensor // [T, H] input of a norm after the output projection; otherwise absent
	x1           xpu.Tensor // [T, H] residual stream after the attention
	mean2, rstd2 xpu.Tensor // [T] of a norm before the feed-forward block
}

// A flight is a batch under way: the results of its forward pass that its backward pass needs. A
// pipeline stage has several flights. L is the number of layers in this model, or in its largest
// group of layers.
type flight struct {
	shape passShape
	arena arena
	group int   // of layers; see [Model.SelectLayers]
	batch Batch // complete rows
	own   Batch // this rank's inputs of batch
	waits bool  // between StageForward and StageBackward

	saved []saved    // [L], or one without a backward pass
	ids   xpu.Tensor // [T] input tokens
	row0  xpu.Tensor // [T'] zeros: each token's row of a bias, a table of one row
	order xpu.Tensor // [T] 0, 1, and so on: each token's row, if shared experts have a gate
	keys  firstKeys
	// [T] number of each input in the step; absent without noise
	numbers xpu.Tensor
	xL      xpu.Tensor // [T, H] output of the last layer that is not of multi-token prediction
	meanL   xpu.Tensor // [T]
	rstdL   xpu.Tensor // [T]

	predicted []predictedTokens // of each layer of multi-token prediction of the pass

	// Of the layers with experts, on the host. M is their number.
	routers []xpu.RouterStats // [M]
	entropy []float64         // [M] mean over tokens of the entropy of the router's distribution
	lost    []float64         // [M] dropped choices of experts, as a fraction of all
	counts  [][]int64         // [M][E] the counts of routers, for Stats
	sums    routerSums

	ways   []ways        // [M] of a dispatch
	memory []layerMemory // of each layer with experts; without a backward pass all layers use the first
}

type workspace struct {
	shape passShape
	arena arena
	need  arena // counts the memory of a pass

	*flight         // the current flight
	latest  *flight // the flight of the latest forward pass
	common  saved   // the buffers of saved that all layers and flights share

	targets xpu.Tensor // [T] target tokens
	ce      []float64  // [T] cross entropy of each target, on the host
	rowLoss []float64  // [rows] for Stats, on the host

	h        xpu.Tensor // [T, H] a normalised input
	q        xpu.Tensor // [rows, A, S, D], of T' tokens
	k, v     xpu.Tensor // [rows, G, S, D]
	router   xpu.Tensor // [T, E] the router's logits; in the backward pass their gradient
	gathered xpu.Tensor // [R, H] inputs of the experts
	act      xpu.Tensor // [R, I]
	denseAct xpu.Tensor // [T', D] of a layer without experts, in the memory of act
	expert   xpu.Tensor // [R, H] outputs of the experts; in the backward pass their gradients
	logits   xpu.Tensor // [logitsRows, V]

	heads  wholeHeads // if ranks share rows without sharing matrices
	all    allTokens  // if ranks share matrices
	latent latentSpace

	dx xpu.Tensor // [T, H] gradient of the residual stream
	dh xpu.Tensor // [T, H] gradient of h
	// [T, H] gradient of the input of a norm after a block; with a residual multiplier, the output
	// of a block and its gradient
	dy     xpu.Tensor
	dctx   xpu.Tensor // [T', AD] gradient of ctx, in the memory of dh
	dk, dv xpu.Tensor // like k
	dqkv   xpu.Tensor // [T', AD+2GD]; [T', AD] with latent attention
	dact   xpu.Tensor // [R, I]
	// [T', D] of a layer without experts, in the memory of dact
	denseDact xpu.Tensor
	// [T', W] of shared experts
	sharedAct, sharedDact xpu.Tensor
	sharedGate            sharedGateSpace
	predictionSpace
	dweight xpu.Tensor // [R] gradient of a routing weight
	slopes  xpu.Tensor // [M, rows, E] derivatives of the load-balancing loss by a probability

	logitsRows int

	// on the host
	ints      []int32   // [T], or [T, K]
	floats    []float32 // [M, rows, E]
	rowCounts []int64   // [M, rows, E] tokens of each expert, for AuxSequence; [n, rows, E] for drops
	dropped   []bool    // [T, K]
	probs     []float32 // [T, E] on a discrete device, for AuxSequence
	scoreSums []float32 // [T] the same
}

// plan allocates the buffers for a pass of the given shape and makes f the current flight. The
// contents of f are kept as long as its shape does not change; all other contents are undefined.
func (w *workspace) plan(dev xpu.Device, c Config, f *flight, shape passShape) error {
	if w.shape != shape {
		w.cut(c, shape, &w.need)
		w.shape, w.latest = passShape{}, nil // the buffers from the arena are no longer valid
		if err := w.arena.grow(dev, &w.need); err != nil {
			return fmt.Errorf("%d bytes of buffers for a pass over %d rows of %d tokens: %w", w.need.bytes(),
				shape.rows, shape.s, err)
		}
		w.cut(c, shape, &w.arena)
		w.shape = shape
	}
	if f.shape != shape {
		f.cut(c, shape, &w.need)
		f.shape = passShape{}
		if err := f.arena.grow(dev, &w.need); err != nil {
			return fmt.Errorf("%d bytes of activations of a pass over %d rows of %d tokens: %w", w.need.bytes(),
				shape.rows, shape.s, err)
		}
		f.cut(c, shape, &f.arena)
		f.shape = shape
	}
	for i := range f.saved {
		st := &f.saved[i]
		if shape.recompute.attention() {
			st.attended = w.common.attended
		}
		if shape.recompute.experts() {
			st.gateUps = w.common.gateUps
		}
	}
	w.flight = f
	return nil
}

// newFlight makes a flight through at most the given number of layers with experts, without memory.
func newFlight(c Config, expertLayers int) *flight {
	f := &flight{}
	if c.moe() {
		f.sums, f.routers = make(routerSums, 2*c.Experts+2), make([]xpu.RouterStats,
			expertLayers)
		for i := range f.routers {
			f.routers[i].Counts = make([]int64, c.Experts)
			f.counts = append(f.counts, f.routers[i].Counts)
		}
	}
	return f
}

// tokens returns the number of tokens of a pass, T.
func (p passShape) tokens() int { return p.rows * p.s }

// blockTokens returns the number of tokens of the products whose matrices ranks share, T'.
func (p passShape) blockTokens() int { return p.tokens() * p.tensor }

// contextRanks returns the number of ranks that share each row and have the same slices: n of
// context parallelism.
func (p passShape) contextRanks() int { return p.ranks / p.tensor }

// headRanks returns the number of ranks that divide the heads of the attention: h.
func (p passShape) headRanks() int { return p.contextRanks() / p.parts }

// queries returns the number of queries of a row in the attention of this rank: S'.
func (p passShape) queries() int { return p.s * p.ranks / p.parts }

// expertRows returns the number of rows of the experts' products.
func (p passShape) expertRows(c Config) int {
	if p.elsewhere {
		return 0
	}
	return p.tokens() * c.ExpertsPerToken
}

// cut allocates all buffers of a flight from a.
func (f *flight) cut(c Config, p passShape, a *arena) {
	a.reset()
	t, r, k, h := p.tokens(), p.expertRows(c), c.ExpertsPerToken, c.HiddenSize
	layers, together := 1, p.layers // layers of an element of saved
	if p.train {
		layers, together = p.layers, 1
	}
	if cap(f.saved) < layers {
		f.saved = make([]saved, layers)
	}
	f.saved = f.saved[:layers]
	for i := range f.saved {
		st := &f.saved[i]
		sparse, dense := p.kinds(c, i, together)
		*st = saved{x0: a.f32(t, h)}
		if !p.recompute.attention() {
			st.attended.cut(c, p, a)
		}
		if !p.recompute.experts() {
			st.gateUps.cut(c, p, a, sparse, dense)
		}
		if c.family().postNorm {
			st.y2, st.rstdY2 = a.f32(t, h), a.f32(t)
		}
		if sparse {
			st.routing = xpu.Routing{Probs: a.f32(t, c.Experts), LSE: a.f32(t), Weight: a.f32(r),
				Chosen: a.i32(t, k), RowOf: a.i32(t, k), TokenOf: a.i32(r), Counts: a.i32(c.Experts),
				RouterKind: c.routerKind()}
			if c.family().shared.gated() {
				st.sharedScore = a.f32(t, 1)
			}
		}
	}
	f.ids, f.row0 = a.i32(t), xpu.Tensor{}
	if c.hasQKVBias() || c.family().shared.gated() {
		f.row0 = a.i32(p.blockTokens())
	}
	if f.order = (xpu.Tensor{}); c.family().shared.gated() {
		f.order = a.i32(t)
	}
	f.keys.cut(c, p, a)
	if f.numbers = (xpu.Tensor{}); p.jitter {
		f.numbers = a.i32(t)
	}
	if p.last {
		f.xL, f.rstdL = a.f32(t, h), a.f32(t)
		if !c.family().rms {
			f.meanL = a.f32(t)
		}
	}
	f.cutPredictions(c, p, a)
	if c.moe() {
		n := len(c.ExpertLayers(p.from, p.from+p.layers))
		f.routers, f.counts, f.entropy = f.routers[:n], f.counts[:n], a.f64(n)
		if f.lost = nil; c.ExpertCapacity > 0 {
			f.lost = a.f64(n)
		}
		for i := range f.routers {
			f.routers[i].Probs = a.f64(c.Experts)
		}
	}
}

// kinds reports whether n layers, from layer i of this model on, include layers with experts, and
// layers without.
func (p passShape) kinds(c Config, i, n int) (sparse, dense bool) {
	experts := len(c.ExpertLayers(p.from+i, p.from+i+n))
	return experts > 0, experts < n
}

// cut allocates the buffers of layers of the given kinds from a.
func (g *gateUps) cut(c Config, p passShape, a *arena, sparse, dense bool) {
	g.gateUp, g.dense = p.feedForward(c, a, p.rounded, 2, sparse, dense)
	if g.shared = (xpu.Tensor{}); sparse && c.SharedSize > 0 {
		g.shared = a.of(p.rounded, p.blockTokens(), 2*c.SharedSize)
	}
}

// feedForward allocates rows of `each` numbers for each intermediate element: of the experts
// (sparse), and of layers without experts (dense).
func (p passShape) feedForward(c Config, a *arena, dtype xpu.DType, each int, sparse, dense bool) (ofExperts,
	ofDense xpu.Tensor) {
	r, t := 0, 0
	if sparse {
		r = p.expertRows(c)
	}
	if dense {
		t = p.blockTokens()
	}
	views := a.either(dtype, [2][2]int{{r, each * c.IntermediateSize}, {t, each * c.denseWidth()}})
	return views[0], views[1]
}

// cut allocates the buffers from a.
func (k *attended) cut(c Config, p passShape, a *arena) {
	t, all, h := p.tokens(), p.blockTokens(), c.HiddenSize
	*k = attended{
		rstd1: a.f32(t), ctx: a.of(p.rounded, all, c.ContextWidth()),
		lse: a.f32(p.rows, c.Heads/p.headRanks(), p.queries()), x1: a.f32(t, h),
	}
	if c.latent() {
		k.latent.cut(c, p, a)
	} else {
		k.qkv = a.of(p.rounded, all, c.qkvWidth())
	}
	if !c.family().postNorm {
		k.rstd2 = a.f32(t)
	}
	if n := p.headRanks(); n > 1 {
		k.wholeCtx = a.f32(all*n, c.QueryWidth()/n)
	}
	if qNorm, kNorm := c.qkNormWidths(); qNorm > 0 {
		k.rq, k.rk = a.f32(all*(c.QueryWidth()/qNorm)), a.f32(all*(c.KVWidth()/kNorm))
	}
	if !c.family().rms {
		k.mean1, k.mean2 = a.f32(t), a.f32(t)
	}
	if c.family().postNorm {
		k.y1 = a.f32(t, h)
	}
}

// cut allocates the buffers that all flights share from a.
func (w *workspace) cut(c Config, p passShape, a *arena) {
	a.reset()
	w.common = saved{}
	t, all := p.tokens(), p.blockTokens()
	h, r := c.HiddenSize, p.expertRows(c)
	sparse, dense := p.kinds(c, 0, p.layers)
	heads := func(n int) xpu.Tensor { return a.f32(p.rows, n, p.s*p.tensor, c.HeadDim()) }
	if p.recompute.attention() {
		w.common.attended.cut(c, p, a)
	}
	if p.recompute.experts() {
		w.common.gateUps.cut(c, p, a, sparse, dense)
	}
	w.targets, w.ce, w.rowLoss = a.i32(t), a.f64(t), a.f64(p.rows)
	w.h = a.f32(t, h)
	w.q, w.k, w.v = heads(c.Heads), heads(c.KVHeads), heads(c.KVHeads)
	w.heads.cut(c, p, a)
	w.all.cut(c, p, a)
	if c.latent() {
		w.latent.cut(c, p, a)
	}
	w.act, w.denseAct = p.feedForward(c, a, xpu.Float32, 1, sparse, dense)
	if sparse {
		if c.SharedSize > 0 {
			w.sharedAct = a.f32(all, c.SharedSize)
		}
		if c.family().shared.gated() {
			w.sharedGate.cut(p, a)
		}
		w.router, w.gathered, w.expert = a.f32(t, c.Experts), a.f32(r, h), a.f32(r, h)
	}
	if p.logits > 0 {
		w.logitsRows = min(t, p.logits)
		w.logits = a.f32(w.logitsRows, c.VocabSize)
	}
	w.predictionSpace.cut(c, p, a)
	if c.ResidualMultiplier != 0 || p.train && c.family().postNorm {
		w.dy = a.f32(t, h)
	}
	if p.train {
		w.dx = a.f32(t, h)
		if both := a.f32(max(t*h, all*c.ContextWidth())); both.Present() {
			w.dh = both.Rows(0, t*h).Reshape(t, h)
			w.dctx = both.Rows(0, all*c.ContextWidth()).Reshape(all, c.ContextWidth())
		}
		w.dk, w.dv = heads(c.KVHeads), heads(c.KVHeads)
		if c.latent() {
			w.dqkv = a.f32(all, c.QueryWidth())
		} else {
			w.dqkv = a.f32(all, c.qkvWidth())
		}
		w.dact, w.denseDact = p.feedForward(c, a, xpu.Float32, 1, sparse, dense)
		if sparse {
			if c.SharedSize > 0 {
				w.sharedDact = a.f32(all, c.SharedSize)
			}
			w.dweight = a.f32(r)
			w.slopes = a.f32(len(c.ExpertLayers(p.from, p.from+p.layers)), max(1, p.rows), c.Experts)
		}
	}
}

// Memory is the number of bytes that a model needs, by use.
type Memory struct {
	Weights   int64
	Gradients int64
	Buffers   int64 // activations and working memory of one pass
	OnHost    int64 // part of Buffers in host memory: exchanges of [Parallel.Sequence] and [comm.TP]
}

// Total returns the sum of weights, gradients and buffers.
func (m Memory) Total() int64 { return m.Weights + m.Gradients + m.Buffers }

// A Pass describes a call of [Model.Backward], or of StageForward and StageBackward on a pipeline
// stage, as far as its memory depends on it.
type Pass struct {
	Rows           int
	SequenceLength int       // of complete rows
	SequenceRanks  int       // ranks of [Parallel.Heads]; 0 means 1
	Recompute      Recompute // empty means RecomputeNone
	Activations    xpu.DType // see [Model.SetActivations]
	Documents      bool      // attention is restricted to documents; see [Batch]
	Jitter         bool      // batches have [Batch.Jitter], as in training
	LogitsTokens   int       // of the device, see [LogitsTokens]; 0 means a processor's

	Shape    comm.Shape // of the mesh; the zero value is one rank
	Dispatch Dispatch
	Stage    int // of the pipeline
	// groups of layers of the stage, as in [Parallel]; 0 means 1
	VirtualStages int
	// maximum number of batches under way, of all groups of layers; 0 means 1
	InFlight int
}

// Memory returns the memory that [Model.Backward] needs. If ranks share the experts, it assumes
// balanced routing: each rank receives the number of tokens given by [Config.ExpectedCopies], and
// T·K rows for its experts. A rank keeps the tokens received in a layer for the backward pass, or
// with recomputation receives them again. The buffers grow with the largest number of tokens
// received. Almost all of these bytes are device memory. The state of an optimizer and the device's
// scratch memory are not included: see [mula/xpu/cpu.Device].
func (c Config) Memory(p Pass) Memory {
	experts, groups := p.Shape.Size(comm.EP), stagesOf(c, p.Stage, p.Shape.Size(comm.PP), p.VirtualStages)
	tensor := p.Shape.Size(comm.TP)
	cp := max(1, p.SequenceRanks)
	ranks, parts := cp*tensor, c.sequenceParts(cp, tensor)
	c = c.sliced(tensor)
	shape := passShape{rows: p.Rows, s: p.SequenceLength / ranks, ranks: ranks, tensor: tensor, parts: parts,
		train: true, recompute: p.Recompute, elsewhere: c.dispatches(experts), documents: p.Documents,
		jitter: p.Jitter && c.RouterJitter > 0, rounded: p.Activations}
	logits := p.LogitsTokens
	if logits == 0 {
		logits = LogitsTokens(c.VocabSize, 0, 0)
	}
	var n, sharedBytes, flightBytes int64 // buffers serve all groups
	for _, s := range groups {
		shape.from, shape.layers, shape.first, shape.last, shape.logits = s.from, s.layers, s.first, s.last, 0
		if s.last {
			shape.logits, shape.predictions = logits, c.PredictionLayers
		}
		var shared, flights arena
		new(workspace).cut(c, shape, &shared)
		newFlight(c, mostExpertLayers(c, groups)).cut(c, shape, &flights)
		n += 4 * s.parameters(c, c.Experts/experts)
		sharedBytes, flightBytes = max(sharedBytes, shared.bytes()), max(flightBytes, flights.bytes())
	}
	buffers := sharedBytes + int64(max(1, p.InFlight))*flightBytes
	rotations := 2 * 4 * int64(p.SequenceLength*c.ropeSize()/2)
	if buffers += rotations; c.windowRope() {
		buffers += rotations
	}
	onHost := int64(0)
	if shape.contextRanks() > 1 { // sent and received, on the rank with the most
		width := 2 * c.KVWidth() * parts
		if shape.headRanks() > 1 {
			width += c.QueryWidth()
		}
		onHost = 2 * 4 * int64(shape.blockTokens()*width)
	}
	if tensor > 1 {
		onHost += comm.SumMemory(tensor, shape.tokens()*c.HiddenSize, 4)
		if p.Rows > 1 {
			onHost += 4 * int64(shape.blockTokens()*c.HiddenSize) // tokens in the order of the ranks
		}
	}
	if c.dispatches(experts) {
		buffers += c.dispatchMemory(p, shape.tokens())
	}
	biases := int64(0) // of routers
	if c.HasBiases() {
		biases = 4 * int64(c.Experts*len(c.StageExpertLayers(p.Stage, p.Shape.Size(comm.PP), p.VirtualStages)))
	}
	return Memory{Weights: n + biases, Gradients: n, Buffers: buffers + onHost, OnHost: onHost}
}
