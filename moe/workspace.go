package moe

// A pass over tokens needs two kinds of buffers: what the backward pass reads of each layer's forward pass (saved), and room for the layer
// at hand, shared by all layers. The first are a flight's, the others the workspace's. They are cut from arenas that grow to the largest pass
// seen and serve every later one.

// logitsFloats bounds the buffer of logits: as many tokens are taken at a time as fit, and at least logitsTokens.
const (
	logitsFloats = 1 << 22
	logitsTokens = 256
)

// passShape says which buffers a pass needs.
type passShape struct {
	rows, s   int
	keys      int       // largest number of keys that a query attends to: s, or the capacity of a cache
	train     bool      // backward follows: every layer is saved
	recompute Recompute // with train; RecomputeNone without
	logits    bool      // logits are computed block by block
	layers    int       // that this model holds
	last      bool      // the final norm and the head are here
	elsewhere bool      // the rows of experts are not this rank's tokens: a dispatch has the buffers for them
}

// saved is what the backward pass reads of one layer. Without a backward pass all layers share one. What recomputation gives again, they and
// all flights share. The routing is always kept: the choice of experts is never made twice.
type saved struct {
	x0       []float32 // [T, H] input of the layer
	attended           // of RecomputeLayers
	gateUp   []float32 // [R, 2I], of RecomputeExperts and RecomputeLayers; the backward pass puts the gradient in its place
	routing
}

// attended is what the attention leaves, and the statistics of the norm behind it.
type attended struct {
	mean1, rstd1 []float32 // [T] of the first norm
	qkv          []float32 // [T, H+2GD] projections, before norm, clip and rotation
	rq, rk       []float32 // [T] of the q and k norms
	ctx          []float32 // [T, H] result of the attention, before its output projection
	lse          []float32 // [rows, A, S] logsumexp of the scores
	x1           []float32 // [T, H] residual stream after the attention
	mean2, rstd2 []float32 // [T] of the second norm
}

// routing is what a router decided. A dense layer has none.
type routing struct {
	probs   []float32 // [T, E] the router's distribution
	zlse    []float32 // [T] logsumexp of the router's logits
	weight  []float32 // [R] routing weight of a row
	chosen  []int32   // [T, K] experts of a token, largest weight first
	rowOf   []int32   // [T, K] rows of a token in expert order
	tokenOf []int32   // [R] token of a row
	counts  []int     // [E] rows of each expert
}

func (st *saved) norm1(l *layer) norm { return norm{l.norm1, st.x0, st.mean1, st.rstd1} }
func (st *saved) norm2(l *layer) norm { return norm{l.norm2, st.x1, st.mean2, st.rstd2} }

// A flight is a batch under way: what its forward pass leaves for its backward pass. Where layers are stages of a pipeline, several are
// under way at once. L is the number of layers that this model holds.
type flight struct {
	shape passShape
	arena arena
	batch Batch
	waits bool // StageForward is over, and StageBackward is to come

	saved   []saved   // [L], or one without a backward pass
	ids     []int32   // [T] input tokens
	xL      []float32 // [T, H] output of the last layer
	meanL   []float32 // [T]
	rstdL   []float32 // [T]
	probSum []float64 // [L, E] sum over tokens of the router's distribution
	z       []float64 // [L] sum over tokens of the squared logsumexp
	entropy []float64 // [L] mean over tokens of the entropy of the router's distribution
	counts  [][]int64 // [L][E] for Stats
	sums    routerSums

	ways   []ways        // [L] of a dispatch
	memory []layerMemory // of each layer; without a backward pass the first is of all
}

type workspace struct {
	shape passShape
	arena arena

	*flight         // the one at hand
	latest  *flight // the one whose forward pass was the last
	common  saved   // what of saved is shared by all layers and flights

	targets []int32   // [T] target tokens
	ce      []float64 // [T] cross entropy of each target
	rowLoss []float64 // [rows] for Stats

	h         []float32 // [T, H] a normalised input
	q         []float32 // [rows, A, S, D]
	k, v      []float32 // [rows, G, S, D]
	scores    []float32 // [rows·G, scoreSize] scores of one head of each group, [queryBlock, keys]
	scoreSize int
	router    []float32 // [T, E] the router's logits; in the backward pass their gradient
	gathered  []float32 // [R, H] inputs of the experts
	act       []float32 // [R, I]
	expert    []float32 // [R, H] outputs of the experts; in the backward pass gradients of and by them
	logits    []float32 // [logitsRows, V]
	psum      []float64 // [parts, E+2] partial sums for probSum, z and entropy

	dx      []float32 // [T, H] gradient of the residual stream
	dh      []float32 // [T, H] gradient of h
	dk, dv  []float32 // like k
	dscores []float32 // like scores
	dqkv    []float32 // [T, H+2GD]
	dact    []float32 // [R, I]
	dweight []float32 // [R] gradient of a routing weight
	slope   []float32 // [E] derivative of the load-balancing loss by a probability
	partial []float32 // [parts, H+GD] partial sums of the gradients of norm weights

	logitsRows int
}

// plan makes the buffers for a pass of the given shape and takes f at hand. What a flight holds stays while its shape does; the contents of
// all else are undefined.
func (w *workspace) plan(c Config, f *flight, shape passShape) {
	if w.shape != shape {
		var need arena
		w.cut(c, shape, &need)
		w.arena.grow(need)
		w.cut(c, shape, &w.arena)
		w.shape, w.latest = shape, nil
	}
	if f.shape != shape {
		var need arena
		f.cut(c, shape, &need)
		f.arena.grow(need)
		f.cut(c, shape, &f.arena)
		f.shape = shape
	}
	for i := range f.saved {
		st := &f.saved[i]
		if shape.recompute.attention() {
			st.attended = w.common.attended
		}
		if shape.recompute.experts() {
			st.gateUp = w.common.gateUp
		}
	}
	w.flight = f
}

// expertRows is the number of rows of the feed-forward products.
func (p passShape) expertRows(c Config) int {
	switch {
	case p.elsewhere:
		return 0
	case c.moe():
		return p.rows * p.s * c.ExpertsPerToken
	}
	return p.rows * p.s
}

// cut takes all buffers of a flight from a.
func (f *flight) cut(c Config, p passShape, a *arena) {
	a.reset()
	t, r, pairs, h := p.rows*p.s, p.expertRows(c), p.rows*p.s*c.ExpertsPerToken, c.HiddenSize
	layers := 1
	if p.train {
		layers = p.layers
	}
	if cap(f.saved) < layers {
		f.saved = make([]saved, layers)
	}
	f.saved = f.saved[:layers]
	for i := range f.saved {
		st := &f.saved[i]
		*st = saved{x0: a.f32(t * h)}
		if !p.recompute.attention() {
			st.attended.cut(c, p, a)
		}
		if !p.recompute.experts() {
			st.gateUp = p.gateUp(c, a)
		}
		if c.moe() {
			st.routing = routing{
				probs: a.f32(t * c.Experts), zlse: a.f32(t), weight: a.f32(r),
				chosen: a.i32(pairs), rowOf: a.i32(pairs), tokenOf: a.i32(r), counts: a.ints(c.Experts),
			}
		}
	}
	f.ids = a.i32(t)
	if p.last {
		f.xL, f.meanL, f.rstdL = a.f32(t*h), a.f32(t), a.f32(t)
	}
	if c.moe() {
		f.probSum, f.z, f.entropy = a.f64(p.layers*c.Experts), a.f64(p.layers), a.f64(p.layers)
	}
}

// gateUp takes the buffer of that name from a.
func (p passShape) gateUp(c Config, a *arena) []float32 {
	return a.f32(p.expertRows(c) * 2 * c.IntermediateSize)
}

// cut takes the buffers from a.
func (k *attended) cut(c Config, p passShape, a *arena) {
	t, h := p.rows*p.s, c.HiddenSize
	*k = attended{
		mean1: a.f32(t), rstd1: a.f32(t),
		qkv: a.f32(t * c.qkvWidth()), rq: a.f32(t), rk: a.f32(t),
		ctx: a.f32(t * h), lse: a.f32(t * c.Heads),
		x1: a.f32(t * h), mean2: a.f32(t), rstd2: a.f32(t),
	}
}

// cut takes the buffers that all flights share from a.
func (w *workspace) cut(c Config, p passShape, a *arena) {
	a.reset()
	w.common = saved{}
	t, s := p.rows*p.s, p.s
	h, kv, ffn, r := c.HiddenSize, c.kvWidth(), c.IntermediateSize, p.expertRows(c)
	if p.recompute.attention() {
		w.common.attended.cut(c, p, a)
	}
	if p.recompute.experts() {
		w.common.gateUp = p.gateUp(c, a)
	}
	w.targets, w.ce, w.rowLoss = a.i32(t), a.f64(t), a.f64(p.rows)
	w.h = a.f32(t * h)
	w.q, w.k, w.v = a.f32(t*h), a.f32(t*kv), a.f32(t*kv)
	w.scoreSize = min(queryBlock, s) * p.keys
	w.scores = a.f32(p.rows * c.KVHeads * w.scoreSize)
	w.act = a.f32(r * ffn)
	if c.moe() {
		w.router, w.gathered, w.expert = a.f32(t*c.Experts), a.f32(r*h), a.f32(r*h)
		w.psum = a.f64(parts * (c.Experts + 2))
	}
	if p.logits {
		w.logitsRows = min(t, max(logitsFloats/c.VocabSize, logitsTokens))
		w.logits = a.f32(w.logitsRows * c.VocabSize)
	}
	if p.train {
		w.dx, w.dh = a.f32(t*h), a.f32(t*h)
		w.dk, w.dv = a.f32(t*kv), a.f32(t*kv)
		w.dscores = a.f32(p.rows * c.KVHeads * w.scoreSize)
		w.dqkv, w.dact = a.f32(t*c.qkvWidth()), a.f32(r*ffn)
		w.partial = a.f32(parts * (h + kv))
		if c.moe() {
			w.dweight, w.slope = a.f32(r), a.f32(c.Experts)
		}
	}
}

// An arena hands out slices of memory that it keeps. One without memory only counts what is asked for.
type arena struct {
	floats  []float32
	doubles []float64
	int32s  []int32
	words   []int

	nFloats, nDoubles, nInt32s, nWords int
}

func (a *arena) reset() { a.nFloats, a.nDoubles, a.nInt32s, a.nWords = 0, 0, 0, 0 }

// grow gives a at least the memory that need has counted. What it held before is lost.
func (a *arena) grow(need arena) {
	extend(&a.floats, need.nFloats)
	extend(&a.doubles, need.nDoubles)
	extend(&a.int32s, need.nInt32s)
	extend(&a.words, need.nWords)
}

func extend[E any](memory *[]E, n int) {
	if n > len(*memory) {
		*memory = nil // so that the collector may take it before the new one is made
		*memory = make([]E, n)
	}
}

// bytes is the size of what has been handed out.
func (a *arena) bytes() int64 {
	return 4*int64(a.nFloats+a.nInt32s) + 8*int64(a.nDoubles+a.nWords)
}

func (a *arena) f32(n int) []float32 { return cutFrom(a.floats, &a.nFloats, n) }
func (a *arena) f64(n int) []float64 { return cutFrom(a.doubles, &a.nDoubles, n) }
func (a *arena) i32(n int) []int32   { return cutFrom(a.int32s, &a.nInt32s, n) }
func (a *arena) ints(n int) []int    { return cutFrom(a.words, &a.nWords, n) }

// cutFrom takes the next n elements of memory. They start on a cache line if memory does, so that no two buffers share one.
func cutFrom[E any](memory []E, used *int, n int) []E {
	lo := *used
	*used += (n + 15) &^ 15
	if memory == nil {
		return nil
	}
	return memory[lo : lo+n : lo+n]
}

// Memory is the number of bytes that a model of a configuration occupies, by use.
type Memory struct {
	Weights   int64
	Gradients int64
	Buffers   int64 // activations and scratch of one pass
}

// Total is the sum of all.
func (m Memory) Total() int64 { return m.Weights + m.Gradients + m.Buffers }

// A Pass is a call of [Model.Backward], or of both halves of one on a stage of a pipeline, as far as memory depends on it.
type Pass struct {
	Rows           int
	SequenceLength int
	Recompute      Recompute // empty means RecomputeNone

	ExpertRanks int // ranks that share the experts; 0 and 1 are the whole model
	Dispatch    Dispatch

	Stage, Stages int // see [Parallel]
	InFlight      int // batches under way at once at most; 0 means 1
}

// Memory says what [Model.Backward] needs. Where ranks share the experts, it counts on balanced routing: each rank gets as many tokens as
// [Config.ExpectedCopies] says, and T·K rows for its experts. What a rank has got of a layer it keeps for the backward pass, or with
// recomputation gets again. The buffers grow with the largest number that is seen. The state of an optimizer comes on top, and the scratch
// of the device: see [mula/xpu/cpu.Device].
func (c Config) Memory(p Pass) Memory {
	stage := stageOf(c, p.Stage, p.Stages)
	shape := passShape{rows: p.Rows, s: p.SequenceLength, keys: p.SequenceLength, train: true, recompute: p.Recompute, logits: stage.last,
		layers: stage.layers, last: stage.last, elsewhere: p.ExpertRanks > 1}
	var shared, flights arena
	new(workspace).cut(c, shape, &shared)
	new(flight).cut(c, shape, &flights)
	n, buffers := 4*stage.parameters(c, c.Experts/max(1, p.ExpertRanks)), shared.bytes()+int64(max(1, p.InFlight))*flights.bytes()
	if p.ExpertRanks > 1 {
		buffers += c.dispatchMemory(p)
	}
	return Memory{Weights: n, Gradients: n, Buffers: buffers}
}
