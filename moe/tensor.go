package moe

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"mula/xpu"
	"mula/xpu/comm"
)

// Tensor parallelism: the n ranks of [comm.TP] share the matrices of the attention, of a dense
// feed-forward block, and of shared experts (https://arxiv.org/abs/1909.08053). Rank j has the j-th
// n-th of the heads: rows of the projections to queries, keys and values, and columns of the output
// projection. It also has the j-th n-th of the width of a block: rows of gate and up, and columns
// of down. In a latent attention, each rank has the projections to latents, and computes the
// latents of the tokens of all ranks. Norms over all heads of a token need the sums of squares of
// all ranks' heads, and in the backward pass sums of products: an all-reduce adds them. Each rank
// computes the scores of a gate of shared experts for its own tokens. An all-gather collects them,
// and a reduce-scatter adds their gradients.
//
// The ranks also share each row of a batch, and outside of these products each rank computes only
// its own tokens (https://arxiv.org/abs/2205.05198): embedding, norms, residual stream, router,
// experts, head and losses. Before the products, an all-gather collects the tokens of all ranks.
// After them, a reduce-scatter adds the ranks' products in ascending order of the ranks, and gives
// each rank its own tokens.

// A Slice is the part of a tensor that a rank of [comm.TP] holds. The zero value is the complete
// tensor.
type Slice struct {
	Axis  int // divided dimension: 0 rows, 1 columns
	Rank  int
	Ranks int // number of slices of equal size; 0: the tensor is complete
}

// Shape returns the shape of the slice of a tensor.
func (s Slice) Shape(whole []int) []int {
	shape := slices.Clone(whole)
	if s.Ranks > 0 {
		shape[s.Axis] /= s.Ranks
	}
	return shape
}

// Whole returns the shape of the complete tensor, given the shape of the slice.
func (s Slice) Whole(shape []int) []int {
	whole := slices.Clone(shape)
	if s.Ranks > 0 {
		whole[s.Axis] *= s.Ranks
	}
	return whole
}

// columns returns the number of columns of a tensor; a vector has one.
func columns(shape []int) int { return elements(shape[1:]) }

// Take copies elements of a complete tensor of the given shape to the slice. piece has the tensor's
// elements from number first on.
func (s Slice) Take(slice, piece []float32, first int, whole []int) {
	c := columns(whole)
	if s.Axis == 0 {
		begin := elements(whole) / s.Ranks * s.Rank // of the slice
		if low, high := max(first, begin), min(first+len(piece), begin+len(slice)); low < high {
			copy(slice[low-begin:], piece[low-first:high-first])
		}
		return
	}
	width := c / s.Ranks
	for row := first / c; row*c < first+len(piece); row++ {
		begin := row*c + width*s.Rank
		if low, high := max(first, begin), min(first+len(piece), begin+width); low < high {
			copy(slice[row*width+low-begin:], piece[low-first:high-first])
		}
	}
}

// Put copies the slice to its place in a complete tensor of the given shape.
func (s Slice) Put(tensor, slice []float32, whole []int) {
	if s.Axis == 0 {
		copy(tensor[len(slice)*s.Rank:], slice)
		return
	}
	all := columns(whole)
	width := all / s.Ranks
	for row := range whole[0] {
		copy(tensor[row*all+width*s.Rank:], slice[row*width:(row+1)*width])
	}
}

// Sliced returns the dimension in which ranks of [comm.TP] divide a tensor of the complete model,
// or -1 if each of them holds the complete tensor.
func (c Config) Sliced(name string) (axis int) {
	_, name, _ = strings.Cut(strings.TrimPrefix(name, "model.layers."), ".")
	switch name {
	case "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
		"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias",
		sinksName, "self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight":
		return 0
	case "self_attn.q_norm.weight", "self_attn.k_norm.weight":
		if c.HasWideNorms() {
			return 0
		}
		return -1
	case "self_attn.o_proj.weight":
		return 1
	}
	names := c.family().blockNames()
	for _, block := range []string{".", c.family().shared.block()} { // experts have other names
		switch gate, up, down := names.network(names.block + block); name {
		case gate, up:
			return 0
		case down:
			return 1
		}
	}
	return -1
}

// slice returns the part of a tensor that this rank holds.
func (p Parallel) slice(c Config, name string) Slice {
	rank, ranks := p.tensorRanks()
	axis := c.Sliced(name)
	if ranks == 1 || axis < 0 {
		return Slice{}
	}
	return Slice{Axis: axis, Rank: rank, Ranks: ranks}
}

// tensorRanks returns the number of this rank in the group [comm.TP], and the size of the group.
func (p Parallel) tensorRanks() (rank, ranks int) {
	return p.Mesh.OwnIndex(comm.TP), p.Mesh.Size(comm.TP)
}

// sliced returns a configuration with the sizes of the slices of one of n ranks of [comm.TP].
func (c Config) sliced(n int) Config {
	if n == 1 {
		return c
	}
	if !c.latent() {
		c.HeadSize = c.HeadDim()
	}
	c.Heads, c.KVHeads = c.Heads/n, c.KVHeads/n
	if !c.moe() {
		c.IntermediateSize /= n
	}
	c.DenseSize, c.SharedSize = c.DenseSize/n, c.SharedSize/n
	return c
}

// checkTensorRanks returns what prevents n ranks from sharing the matrices of a layer, or "".
func (c Config) checkTensorRanks(n int) string {
	switch {
	case n == 1:
	case c.KVHeads%n != 0:
		return fmt.Sprintf("which does not divide num_key_value_heads %d", c.KVHeads)
	case !c.moe() && c.IntermediateSize%n != 0:
		return fmt.Sprintf("which does not divide intermediate_size %d", c.IntermediateSize)
	case c.DenseSize%n != 0:
		return fmt.Sprintf("which does not divide dense_intermediate_size %d", c.DenseSize)
	case c.SharedSize%n != 0:
		return fmt.Sprintf("which does not divide shared_expert_intermediate_size %d", c.SharedSize)
	}
	return ""
}

// SlicedWeights returns the number of weights of a layer that n ranks of [comm.TP] divide, and the
// number of elements of the largest of these tensors. Both are 0 for one rank.
func (c Config) SlicedWeights(layer, n int) (all, largest int64) {
	if n == 1 {
		return 0, 0
	}
	var list tensorList
	list.layer(c, layer)
	for _, t := range list {
		if c.Sliced(t.Name) >= 0 {
			all, largest = all+t.Elements(), max(largest, t.Elements())
		}
	}
	return all, largest
}

// HasNetwork reports whether a layer has a feed-forward network that all tokens use: instead of
// experts, or shared experts. Ranks of [comm.TP] share its matrices.
func (c Config) HasNetwork(layer int) bool { return !c.HasExperts(layer) || c.SharedSize > 0 }

// allTokens are the operands of products over the tokens of all ranks of [comm.TP]; absent without
// such ranks. T' = n·T.
type allTokens struct {
	h xpu.Tensor // [T', H] input of a block
	y xpu.Tensor // [T', H] this rank's part of the output of a block, or a gradient of the output
	// [2, T'] sums over the columns of norms over all heads, of queries and of keys; absent without
	// such norms
	sums xpu.Tensor
	// [T'] scores of the gate of shared experts, and this rank's part of their gradients; absent
	// without a gate
	scores, dscores xpu.Tensor
}

// cut allocates the buffers of a pass from a.
func (w *allTokens) cut(c Config, p passShape, a *arena) {
	*w = allTokens{}
	if p.tensor > 1 {
		w.h, w.y = a.f32(p.blockTokens(), c.HiddenSize), a.f32(p.blockTokens(), c.HiddenSize)
		if c.HasWideNorms() {
			w.sums = a.f32(2, p.blockTokens())
		}
		if c.family().shared.gated() {
			w.scores = a.f32(p.blockTokens())
			if p.train {
				w.dscores = a.f32(p.blockTokens())
			}
		}
	}
}

// A collector exchanges tokens between the ranks of [comm.TP].
type collector struct {
	own, all []float32 // if the device does not share memory with the host
	ranked   []float32 // [n, rows, S, H] tokens of all ranks; unused with one row
	bounds   []int
	sums     []float32 // [2, T'] if the device does not share memory with the host
	roots    []float32 // [T'] the same
}

// ranked returns host memory for the tokens of all ranks in the order of the ranks, and the bounds
// of each rank's. With one row, that is the order of all.
func (m *Model) ranked(all []float32) (ranked []float32, bounds []int) {
	e, n := &m.collector, m.ws.shape.tensor
	ranked, bounds = all, room(&e.bounds, n+1)
	if m.ws.shape.rows > 1 {
		ranked = room(&e.ranked, len(all))
	}
	for r := range bounds {
		bounds[r] = len(all) / n * r
	}
	return ranked, bounds
}

// allInputs returns the tokens of all ranks of [comm.TP], given this rank's in ws.h. It fills and
// returns ws.all.h, and waits for the device. If matrices are not shared, it returns ws.h.
func (m *Model) allInputs(ctx context.Context) (xpu.Tensor, error) {
	return m.tokensOfAll(ctx, m.ws.h, m.ws.all.h)
}

// heldInputs returns the tensor that allInputs has returned for the same tokens.
func (m *Model) heldInputs() xpu.Tensor {
	if m.ws.shape.tensor == 1 {
		return m.ws.h
	}
	return m.ws.all.h
}

// attentionInputs returns the inputs of the attention of all ranks, given this rank's in ws.h. held
// means that allInputs has gathered no others since it gathered them.
func (m *Model) attentionInputs(ctx context.Context, held bool) (xpu.Tensor, error) {
	if held {
		return m.heldInputs(), nil
	}
	return m.allInputs(ctx)
}

// eachRun calls visit for each run of elements of all tokens that is contiguous in both orders: row
// by row, and rank by rank.
func (m *Model) eachRun(elements int, visit func(byRow, byRank, length int)) {
	p := m.ws.shape
	length := elements / (p.rows * p.tensor)
	for rank := range p.tensor {
		for row := range p.rows {
			visit((row*p.tensor+rank)*length, (rank*p.rows+row)*length, length)
		}
	}
}

// tokensOfAll returns the tokens of all ranks of [comm.TP], given this rank's: own itself if
// matrices are not shared, otherwise all, which it fills. It then waits for the device.
func (m *Model) tokensOfAll(ctx context.Context, own, all xpu.Tensor) (xpu.Tensor, error) {
	if m.ws.shape.tensor == 1 {
		return own, nil
	}
	e := &m.collector
	from, err := xpu.Numbers(ctx, m.dev, own, &e.own)
	if err != nil {
		return all, fmt.Errorf("a pass over %d rows of %d tokens: %w", m.ws.shape.rows, m.ws.shape.s, err)
	}
	found := &m.exchanger.found
	found.Made = found.Made || !found.Received && !Finite(from)
	to := xpu.HostBuffer(all, &e.all)
	ranked, bounds := m.ranked(to)
	group := m.parallel.Mesh.Group(comm.TP)
	copy(ranked[bounds[group.Rank()]:], from)
	if err := comm.AllGather(ctx, group, ranked, bounds); err != nil {
		return all, fmt.Errorf("gathering tokens of the ranks that share matrices: %w", err)
	}
	found.Received = found.Received || !found.Made && !Finite(ranked)
	if m.ws.shape.rows > 1 {
		m.eachRun(len(to), func(byRow, byRank, length int) { copy(to[byRow:byRow+length], ranked[byRank:]) })
	}
	xpu.SetNumbers(m.dev, all, to)
	return all, nil
}

// blockProduct computes out = a·b, or with opts.Accumulate adds a·b to out, where each rank of
// [comm.TP] has a part of the columns of a and of the rows of b. a has the tokens of all ranks, and
// out has this rank's. out may not alias a.
func (m *Model) blockProduct(ctx context.Context, out, a, b xpu.Tensor, opts xpu.MatMulOptions) error {
	if m.ws.shape.tensor == 1 {
		m.dev.MatMul(out, a, b, opts)
		return nil
	}
	m.dev.MatMul(m.ws.all.y, a, b, xpu.MatMulOptions{})
	return m.sumOfRanks(ctx, out, m.ws.all.y, opts)
}

// sumOfRanks sets out to the sum over the ranks of [comm.TP] of all, for this rank's tokens, or
// with opts.Accumulate adds it to out. It waits for the device and may overwrite all.
func (m *Model) sumOfRanks(ctx context.Context, out, all xpu.Tensor, opts xpu.MatMulOptions) error {
	e := &m.collector
	from, err := xpu.Numbers(ctx, m.dev, all, &e.all)
	if err != nil {
		return fmt.Errorf("a pass over %d rows of %d tokens: %w", m.ws.shape.rows, m.ws.shape.s, err)
	}
	found := &m.exchanger.found
	found.Made = found.Made || !found.Received && !Finite(from)
	ranked, bounds := m.ranked(from)
	if m.ws.shape.rows > 1 {
		m.eachRun(len(from), func(byRow, byRank, length int) { copy(ranked[byRank:byRank+length], from[byRow:]) })
	}
	group := m.parallel.Mesh.Group(comm.TP)
	if err := comm.ReduceScatter(ctx, group, ranked, bounds); err != nil {
		return fmt.Errorf("adding products of the ranks that share matrices: %w", err)
	}
	sum := ranked[bounds[group.Rank()]:bounds[group.Rank()+1]]
	found.Received = found.Received || !found.Made && !Finite(sum)
	target := out
	if opts.Accumulate {
		target = all.Rows(0, out.Dim(0))
	}
	to := xpu.HostBuffer(target, &e.own)
	copy(to, sum)
	xpu.SetNumbers(m.dev, target, to)
	if opts.Accumulate {
		m.dev.Add(out, out, target)
	}
	return nil
}

// wideRoots sets the inverse roots of norms over the heads of all ranks of [comm.TP], of queries in
// rq and of keys in rk, both [T']. p has this rank's projections.
func (m *Model) wideRoots(ctx context.Context, p xpu.Projections, rq, rk xpu.Tensor) error {
	m.dev.SumHeads(m.ws.all.sums, p, xpu.Tensor{}, xpu.Tensor{})
	sums, err := m.sumColumns(ctx)
	if err != nil {
		return err
	}
	q, k := m.cfg.qkNormWidths()
	for i, roots := range []xpu.Tensor{rq, rk} {
		to, width := xpu.HostBuffer(roots, &m.collector.roots), float64([]int{q, k}[i])
		for t := range to {
			to[t] = float32(1 / math.Sqrt(float64(sums[i*len(to)+t])/width+m.cfg.NormEps))
		}
		xpu.SetNumbers(m.dev, roots, to)
	}
	return nil
}

// wideMeans returns the means of [xpu.Projections], from the gradients of this rank's heads in
// ws.dqkv and ws.dk.
func (m *Model) wideMeans(ctx context.Context, p xpu.Projections) (xpu.Tensor, error) {
	all := m.ws.all.sums
	m.dev.SumHeads(all, p, m.ws.dqkv, m.ws.dk)
	sums, err := m.sumColumns(ctx)
	if err != nil {
		return all, err
	}
	q, k := m.cfg.qkNormWidths()
	for i, columns := range []int{q, k} {
		for t := range len(sums) / 2 {
			sums[i*len(sums)/2+t] /= float32(columns)
		}
	}
	xpu.SetNumbers(m.dev, all, sums)
	return all, nil
}

// sumColumns adds the columns of all ranks of [comm.TP] to this rank's sums in ws.all.sums, in
// ascending order of the ranks, and returns the sums in host memory.
func (m *Model) sumColumns(ctx context.Context) ([]float32, error) {
	sums, err := xpu.Numbers(ctx, m.dev, m.ws.all.sums, &m.collector.sums)
	if err != nil {
		return nil, fmt.Errorf("a pass over %d rows of %d tokens: %w", m.ws.shape.rows, m.ws.shape.s, err)
	}
	found := &m.exchanger.found
	found.Made = found.Made || !found.Received && !Finite(sums)
	if err := comm.AllReduce(ctx, m.parallel.Mesh.Group(comm.TP), sums); err != nil {
		return nil, fmt.Errorf("adding norms of the ranks that share matrices: %w", err)
	}
	found.Received = found.Received || !found.Made && !Finite(sums)
	return sums, nil
}
