package cpu

import (
	"math"
	"sync"

	"mula/xpu"
)

// Attention is divided into independent groups, one for each row of the batch and key head. A group
// processes its blocks of queries one after the other, and in each block the heads that read its
// keys, so that the scores of a block never leave the cache. Only the logsumexp of each query's
// scores is kept; the gradient recomputes the scores from it. The products of a group are called
// within the loop over groups: if there are groups for all workers, each product runs on one
// worker.

// queryBlock is the number of queries whose attention scores a group holds at a time. It determines
// the order in which the gradients of keys and values are summed, and therefore the last bits of a
// result.
const queryBlock = 64

// A scoreStack is memory for scores: buffers of the same size. Each worker uses one buffer while it
// works on a group.
type scoreStack struct {
	mu     sync.Mutex
	memory []float32
	free   []int
	size   int
}

// reset allocates n buffers of the given size.
func (s *scoreStack) reset(n, size int) {
	s.size = size
	room(&s.memory, n*size)
	for i := range room(&s.free, n) {
		s.free[i] = i
	}
}

func (s *scoreStack) take() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(s.free) - 1
	i := s.free[last]
	s.free = s.free[:last]
	return i
}

func (s *scoreStack) put(i int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, i)
}

// at returns buffer i.
func (s *scoreStack) at(i int) []float32 { return s.memory[i*s.size:][:s.size] }

// attention is an [xpu.Attention] in host memory.
type attention struct {
	xpu.Heads
	Q, K, V, Context, LSE []float32
	halves                []uint16 // Context of BFloat16, instead of Context
	Begin                 []int32
	First                 int
}

func attentionOf(a xpu.Attention) attention {
	context, halves := numbers(a.Context)
	return attention{a.Heads(), a.Q.Floats(), a.K.Floats(), a.V.Floats(), context, a.LSE.Floats(), halves,
		a.Begin.Ints(), a.First}
}

// keys returns the number of keys up to the last query's own key.
func (a *attention) keys() int { return a.First + a.Length }

// rounding returns the number of elements that a group needs to convert the given number of rows of
// Context, 0 for float32.
func (a *attention) rounding(rows int) int {
	if a.halves == nil {
		return 0
	}
	return rows * a.Size
}

// Attend computes causal attention; see [xpu.Layers].
func (h *Host) Attend(x xpu.Attention) {
	xpu.CheckAttend(x)
	a := attentionOf(x)
	t := h.begin(operands{attention: a})
	defer t.end()
	queries := min(queryBlock, a.Length)
	t.scores.reset(h.Threads(), queries*a.keys()+a.rounding(queries))
	// Threads share the groups of heads with the same keys, or the heads of the groups if these are
	// too few.
	groups, share := a.Rows*a.KVHeads, a.Heads.Heads/a.KVHeads
	if groups < h.Threads() {
		t.parts = share
	} else {
		t.parts = 1
	}
	t.split(groups*t.parts, func(t *task, _, lo, hi int) {
		piece := t.scores.take()
		each := t.attention.Heads.Heads / t.attention.KVHeads / t.parts
		for i := lo; i < hi; i++ {
			t.attendHeads(i/t.parts, i%t.parts*each, each, t.scores.at(piece))
		}
		t.scores.put(piece)
	})
}

// AttendGrad computes the gradients of an attention; see [xpu.Layers].
func (h *Host) AttendGrad(x xpu.Attention, dcontext, dqkv, dk, dv xpu.Tensor) {
	xpu.CheckAttendGrad(x, dcontext, dqkv, dk, dv)
	a := attentionOf(x)
	t := h.begin(operands{attention: a, x: dcontext.Floats(), dst: dqkv.Floats(), y: dk.Floats(), z: dv.Floats(),
		width: dqkv.Dim(1)})
	defer t.end()
	t.scores.reset(h.Threads(), 2*min(queryBlock, a.Length)*a.keys()+a.rounding(1))
	t.split(a.Rows*a.KVHeads, func(t *task, _, lo, hi int) {
		piece := t.scores.take()
		scores := t.scores.at(piece)
		half := min(queryBlock, t.attention.Length) * t.attention.keys()
		for group := lo; group < hi; group++ {
			t.attendGroupGrad(group, scores[:half], scores[half:][:half], scores[2*half:])
		}
		t.scores.put(piece)
	})
}

// A scoreBlock is the scores of some queries of one head, for the keys from the first key that one
// of them sees up to the last query's own key.
type scoreBlock struct {
	row, head int
	first, n  int     // queries: position of the first in the pass, and their number
	begins    []int32 // [n] part of the attention's Begin, or empty
	begin     int     // position of the first key
	past      int     // number of keys in the block before the first query's own key
	keys      int     // past + n
	q         []float32
	k, v      []float32
}

// visible returns the range of keys, [from, to), that query i may read: its own key and the keys
// before it, from its Begin on.
func (b *scoreBlock) visible(i int) (from, to int) {
	if len(b.begins) > 0 {
		from = int(b.begins[i]) - b.begin
	}
	return from, b.past + i + 1
}

// block returns the scores of the queries from position first on, for one head of a group.
func (t *task) block(group, head, first int) scoreBlock {
	a := &t.attention
	d, s, heads := a.Size, a.Length, a.Heads.Heads
	share := heads / a.KVHeads
	b := scoreBlock{row: group / a.KVHeads, head: group%a.KVHeads*share + head, first: first,
		n: min(queryBlock, s-first)}
	if len(a.Begin) > 0 {
		b.begins = a.Begin[b.row*s+first:][:b.n]
		b.begin = int(b.begins[0])
	}
	b.past = a.First + first - b.begin
	b.keys = b.past + b.n
	at := (group*a.Capacity + b.begin) * d
	b.k, b.v = a.K[at:][:b.keys*d], a.V[at:][:b.keys*d]
	b.q = a.Q[((b.row*heads+b.head)*s+first)*d:][:b.n*d]
	return b
}

// rowsOf returns a matrix whose rows start stride elements apart in x.
func rowsOf(x []float32, rows, columns, stride int) xpu.Tensor {
	return xpu.Of(x, len(x)).Strided(rows, columns, stride)
}

// attendHeads computes Context and LSE for the queries of n heads of a group, from head `from` of
// the group on.
func (t *task) attendHeads(group, from, n int, scores []float32) {
	a, m := &t.attention, t.host.multiplier
	d, s, heads := a.Size, a.Length, a.Heads.Heads
	width := heads * d
	var sums [queryBlock]float32
	for first := 0; first < s; first += queryBlock {
		for head := from; head < from+n; head++ {
			b := t.block(group, head, first)
			m.MatMul(xpu.Of(scores, b.n, b.keys), xpu.Of(b.q, b.n, d), xpu.Of(b.k, b.keys, d).T(), xpu.MatMulOptions{})
			lse := a.LSE[(b.row*heads+b.head)*s+first:][:b.n]
			for i := range b.n {
				row := scores[i*b.keys:][:b.keys]
				from, to := b.visible(i)
				visible := row[from:to]
				top := Max(visible)
				sums[i] = ExpSum(visible, visible, top)
				clear(row[:from])
				clear(row[to:])
				lse[i] = top + float32(math.Log(float64(sums[i])))
			}
			at, context, stride := (b.row*s+first)*width+b.head*d, scores[b.n*b.keys:], d
			if a.halves == nil {
				context, stride = a.Context[at:], width
			}
			m.MatMul(rowsOf(context, b.n, d, stride), xpu.Of(scores, b.n, b.keys), xpu.Of(b.v, b.keys, d),
				xpu.MatMulOptions{})
			for i, sum := range sums[:b.n] {
				row := context[i*stride:][:d]
				Scale(row, 1/sum)
				if a.halves != nil {
					BF16(a.halves[at+i*width:][:d], row)
				}
			}
		}
	}
}

// attendGroupGrad computes the gradients of the group's queries, keys and values from the gradient
// of Context. wide has space for a converted row of Context. The last block reads all keys, so its
// dK and dV start the sums; if queries do not see all keys before them, the sums start from zero.
func (t *task) attendGroupGrad(group int, scores, dscores, wide []float32) {
	a, m := &t.attention, t.host.multiplier
	d, s, heads, width := a.Size, a.Length, a.Heads.Heads, t.width
	contextWidth := heads * d
	dk, dv := t.y[group*a.Capacity*d:][:a.keys()*d], t.z[group*a.Capacity*d:][:a.keys()*d]
	more := len(a.Begin) > 0
	if more {
		clear(dk)
		clear(dv)
	}
	for first := (s - 1) / queryBlock * queryBlock; first >= 0; first -= queryBlock {
		for head := range heads / a.KVHeads {
			b := t.block(group, head, first)
			at := (b.row*s+first)*contextWidth + b.head*d
			do := t.x[at:]
			m.MatMul(xpu.Of(scores, b.n, b.keys), xpu.Of(b.q, b.n, d), xpu.Of(b.k, b.keys, d).T(), xpu.MatMulOptions{})
			m.MatMul(xpu.Of(dscores, b.n, b.keys), rowsOf(do, b.n, d, contextWidth), xpu.Of(b.v, b.keys, d).T(),
				xpu.MatMulOptions{})
			lse := a.LSE[(b.row*heads+b.head)*s+first:][:b.n]
			for i := range b.n {
				from, to := b.visible(i)
				p, dp := scores[i*b.keys:][:b.keys], dscores[i*b.keys:][:b.keys]
				ExpSum(p[from:to], p[from:to], lse[i])
				context := wide
				if a.halves == nil {
					context = a.Context[at+i*contextWidth:][:d]
				} else {
					Widen(context, a.halves[at+i*contextWidth:][:d])
				}
				SoftmaxGrad(dp[from:to], p[from:to], dp[from:to], Dot(do[i*contextWidth:][:d], context))
				clear(p[:from])
				clear(p[to:])
				clear(dp[:from])
				clear(dp[to:])
			}
			m.MatMul(rowsOf(t.dst[(b.row*s+first)*width+b.head*d:], b.n, d, width), xpu.Of(dscores, b.n, b.keys),
				xpu.Of(b.k, b.keys, d), xpu.MatMulOptions{})
			m.MatMul(xpu.Of(dk[b.begin*d:], b.keys, d), xpu.Of(dscores, b.n, b.keys).T(), xpu.Of(b.q, b.n, d),
				xpu.MatMulOptions{Accumulate: more})
			m.MatMul(xpu.Of(dv[b.begin*d:], b.keys, d), xpu.Of(scores, b.n, b.keys).T(),
				rowsOf(do, b.n, d, contextWidth), xpu.MatMulOptions{Accumulate: more})
			more = true
		}
	}
}
