package xpu

import (
	"encoding/binary"
	"math"
	"math/bits"
	"unsafe"
)

// Layers are the operations of a decoder and its training other than products. T is the number of
// tokens of a pass, rows × length. R is the number of expert rows: one for each token and each of
// its chosen experts. Results must not overlap an operand unless the method allows it.
//
// Operands have exactly the documented shapes, without gaps. Without tokens a method does nothing,
// but host results are still set. Slices of tensors are read before a method returns. Host results
// must not be used before Wait. The values of ids, rows and targets are not checked: an index out
// of range is an error of the caller with an undefined effect.
//
// Numbers are Float32. Weights that are only read may be BFloat16: the table of Embed, and the
// weights of norms. So may the operands of Zero, both operands of Copy, and the operands of
// Checksums and SumSquares.
//
// Gradients of weights may be BFloat16: dtable, dweight, dqWeight, dkWeight, and Grad of an Update
// that does not replace it. A command that adds to such a gradient computes the sum over its tokens
// in float32, from zero, in the order in which it adds to a gradient of Float32. It adds this sum
// to the gradient once, and rounds the result as defined by [BF16].
//
// On processors, activations may be BFloat16: dst of Embed, gateUp, QKV and Context, x of
// GroupedBias and dy of GroupedBiasGrad. Numbers that are read are converted to float32. Results
// are computed in float32 and rounded once.
type Layers interface {
	// Zero sets x to zero, Copy sets dst to x, and Add sets dst to x + y; dst may be x. All have
	// the same shape. Copy rounds to a dst of BFloat16 as defined by [BF16].
	Zero(x Tensor)
	Copy(dst, x Tensor)
	Add(dst, x, y Tensor)

	// Combine sets the matrix dst [m, n] to a·x + b·y, or without y to a·x. If c is not 0, the
	// matrix must be square, and c is then added to its diagonal. dst may be x, but not y.
	Combine(dst, x, y Tensor, a, b, c float32)

	// Embed sets row t of dst [T, width] to row ids[t] of table [·, width].
	Embed(dst, table, ids Tensor)

	// EmbedGrad adds row t of dx [T, width] to row ids[t] of dtable, for all t whose id is not
	// skip, in ascending order of t for each row of dtable.
	EmbedGrad(dtable, dx, ids Tensor, skip int32)

	// Jitter multiplies the elements of x [T, width] by random numbers: element i of row t by
	// j.Factor(Numbers[t], i), with the same bits on every device.
	Jitter(x Tensor, j Jitter)

	// Normalize writes the norm of the rows of x [T, width] to h. It sets the statistics of n, or
	// with known uses the existing values.
	Normalize(h, x Tensor, n Norm, known bool)

	// NormGrad adds the gradient of x to dx and the gradient of the norm's weight to dweight, given
	// dh, the gradient of the norm's output. dweight is absent if n has no weight. NormGrad may
	// overwrite dh. It uses the statistics that Normalize set.
	//
	// With r = RStd and y = w·x·r: dx = r·w·dy - x·(r³/width)·Σ w·dy·x, dw = Σ dy·x·r. Without
	// weight, y = (x-mean)·r: dx = r·(dy - mean(dy) - y·mean(dy·y)).
	NormGrad(dx, dh, x Tensor, n Norm, dweight Tensor)

	// SplitHeads splits projections into heads: norm, clipping, rotation. Queries are multiplied by
	// [Projections.QueryScale].
	SplitHeads(p Projections)

	// JoinHeads computes the gradients of the projections in dqkv [T, Width] from the gradients of
	// the heads. The gradients of queries are in dqkv already, in the columns of the queries; the
	// gradients of keys and values are in dk and dv [Rows, KVHeads, Length, Size]. JoinHeads adds
	// the gradients of the norms' weights to dqWeight and dkWeight, which are absent if there are
	// no weights. The gradient is zero where clipping took effect. p is the argument of SplitHeads,
	// with First = 0 and a capacity of Length. Its Q, K and V are not read, and its RQ and RK are
	// the values that SplitHeads set, or read.
	JoinHeads(p Projections, dqkv, dk, dv, dqWeight, dkWeight Tensor)

	// SumHeads sets sums [2, T] to the parts that these projections add to sums over the columns of
	// a norm over all heads: row 0 for the queries of each token, row 1 for its keys. Without dqkv
	// and dk, they are sums of squares. With them, they are Σ w·dy·x, where x is a projection and
	// dy the gradient of its norm; dqkv and dk are the arguments of JoinHeads, and are not changed.
	// p is as in JoinHeads. It has both weights, and one norm for all queries and for all keys of a
	// token. RQ and RK are read only with dqkv, and Means is not used.
	SumHeads(sums Tensor, p Projections, dqkv, dk Tensor)

	// SplitLatent splits the projections of a latent attention into heads: rotation, and zeros
	// where a head is larger. Queries are multiplied by Scale.
	SplitLatent(l LatentHeads)

	// JoinLatent is the way back: it sets Queries, KeysValues and Rotated of l to the gradients of
	// those projections, given the gradients of the heads: dq [T, Heads·Size], and dk and dv [Rows,
	// Heads, Length, Size]. Of Rotated it is the sum over heads in their order. l has First = 0 and
	// a capacity of Length. Its Q, K and V are not read.
	JoinLatent(l LatentHeads, dq, dk, dv Tensor)

	// CopyColumns sets each row of dst [N, ·] to the first columns of the row of x [N, ·], and to
	// zero in the columns that x does not have. The rows of both may have gaps.
	CopyColumns(dst, x Tensor)

	// Attend sets Context and LSE: causal attention of each query over the keys from Begin to its
	// own position, with the scores q·k unscaled.
	Attend(a Attention)

	// AttendGrad computes the gradients of an attention from dcontext, the gradient of Context. The
	// gradients of the queries are written to the first Heads·Size columns of dqkv [T, Width] or
	// [T, Heads·Size]. The gradients of keys and values, sums over these queries, are written to dk
	// and dv, with the layout of K and V, for the positions up to the last query's. They are set,
	// not added to. Later positions are not written. Context and LSE are the values that Attend
	// set.
	//
	//	P = exp(S - lse), dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P ∘ (dP - Σ dO·O), dQ = dS·K, dK = dSᵀ·Q
	AttendGrad(a Attention, dcontext, dqkv, dk, dv Tensor)

	// AddSinks adds a sink to each head of queries of an attention that Attend has computed: one
	// more score without a value (https://arxiv.org/abs/2309.17453;
	// https://arxiv.org/abs/2508.10925, section 2.2). sinks [Heads] may be BFloat16. With lse' =
	// log(exp(lse) + exp(sink)), it multiplies Context by exp(lse - lse') and sets LSE to lse'.
	// Begin of a is not used.
	//
	// AttendGrad with the results of AddSinks computes the gradients of queries, keys and values.
	AddSinks(a Attention, sinks Tensor)

	// SinksGrad adds the gradient of sinks to dsinks [Heads], which may be BFloat16, given
	// dcontext, the gradient of Context. Context and LSE are the results of AddSinks.
	//
	//	dsink = -Σ exp(sink - lse')·Σ dO·O, over the queries of a head
	SinksGrad(a Attention, sinks, dcontext, dsinks Tensor)

	// Route converts the router's logits [T, Experts] into its scores, Probs and LSE, and chooses
	// the experts with the largest scores, plus Bias, in the token's groups: Chosen and Counts. Of
	// equal experts, and of equal groups, the lower index is chosen first. With uniform, the j-th
	// choice of token t is (t·PerToken + j) modulo Experts. stats are host results, set and not
	// added to; they are required, with space for all experts. RowOf, TokenOf and Weight of r are
	// not used.
	Route(r Routing, logits Tensor, uniform bool, stats *RouterStats)

	// SortRows orders the choices of all tokens by expert and, within an expert, by token: it sets
	// RowOf, TokenOf and Weight from Chosen, Counts and Probs.
	SortRows(r Routing)

	// RouteGrad sets dlogits [T, Experts] to the gradient of the router's logits. slope is
	// [Experts], or [S, Experts] for S ranges of T/S consecutive tokens. Let a_i be the slope of
	// expert i, in the token's range, and g_i the gradient of the score of a chosen expert, 0 for
	// other experts. Without Renormalize, g is Scale times the gradient dweight [R] of that row's
	// routing weight. With it, a routing weight is w = Scale·p/s, where s is a sum over the token's
	// choices, and g is (Scale·dweight - Σ w·dweight) / s; if s is LeastSum, it is Scale·dweight /
	// s. With a softmax and G = a + g, the result is dz_i = p_i·(G_i - Σ p_j·G_j) +
	// zFactor·lse·p_i. With a sigmoid, the slopes are derivatives by p/Σp, and dz_i = p_i·(1 -
	// p_i)·(g_i + (a_i - Σ a_j·p_j/Σp)/Σp); zFactor must be 0. Bias has no gradient. Counts,
	// TokenOf and Weight of r are not used, and RowOf may be any numbering of the choices that
	// matches dweight.
	RouteGrad(r Routing, dlogits, slope, dweight Tensor, zFactor float64)

	// GatherRows sets row r of dst [R, width] to row tokenOf[r] of x [·, width].
	GatherRows(dst, x, tokenOf Tensor)

	// SumRows sets row t of dst [T, width] to row t of x plus the rows rowOf[t, 0], … of y
	// [·, width], added in this order; without x to the sum of those rows. dst may be x. rowOf is
	// [T, PerToken].
	SumRows(dst, x, y, rowOf Tensor)

	// SwiGLU sets row r of act [R, width] to silu(gate)·up·weight[r]. Row r of gateUp [R, 2·width]
	// is gate, then up. An absent weight means 1.
	SwiGLU(act, gateUp, weight Tensor)

	// SwiGLUGrad computes the gradients of gate and up from dact, the gradient of SwiGLU's result,
	// and overwrites gateUp with them. It sets act again like SwiGLU, and with weights dweight[r]
	// to the gradient of weight[r]; without weights dweight is not used. SwiGLUGrad may overwrite
	// dact.
	SwiGLUGrad(gateUp, act, dact, weight, dweight Tensor)

	// ClampedSwiGLU is SwiGLU with the formula of gpt-oss: gate is clamped to at most Limit,
	// up to ±Limit, and act is gate·σ(Alpha·gate)·(up + 1)·weight[r].
	ClampedSwiGLU(act, gateUp, weight Tensor, c Clamp)

	// ClampedSwiGLUGrad is SwiGLUGrad of ClampedSwiGLU. The gradient is zero where the clamp has
	// changed a number.
	ClampedSwiGLUGrad(gateUp, act, dact, weight, dweight Tensor, c Clamp)

	// GroupedBias adds row g of bias [groups, width] to each row of x [R, width] in group g, or
	// with weight [R] weight[r] times that row. bias may be BFloat16. The groups are consecutive
	// rows, as many as counts [groups], which are not negative and add up to R.
	GroupedBias(x, bias, weight, counts Tensor)

	// GroupedBiasGrad adds the gradient of bias to dbias [groups, width], the sum over a group's
	// rows of dy [R, width], with weight of weight[r]·dy. It then also adds the gradient of weight
	// to dweight [R], the products of rows of dy with their bias. dbias and bias may be BFloat16.
	// Without weight, bias and dweight are not used.
	GroupedBiasGrad(dbias, dy, bias, weight, dweight, counts Tensor)

	// CrossEntropy computes the cross entropies of targets. A negative target is ignored: its loss
	// and its gradient are 0.
	CrossEntropy(c CrossEntropy)

	// SumSquares sets sums, host results, to the sums of squares of the blocks of all stretches.
	// Each stretch is cut from its start into blocks of [BlockSize] elements; its last block may be
	// shorter. A sum is finite exactly when all elements are.
	SumSquares(stretches []Tensor, sums []float64)

	// Checksums sets sums, host results, to the [Checksum] of each block of all stretches, with the
	// blocks of SumSquares. Every device computes the same bits.
	Checksums(stretches []Tensor, sums []uint64)

	// Update updates weights and optimizer state. It changes gradients only if u replaces them.
	// before and change are host results, or both empty. For each block, with the blocks of
	// SumSquares, before is the sum of squares of the weights before the update, and change the sum
	// of squares of the change.
	Update(u Update, stretches []Moments, before, change []float64)
}

// BlockSize is the number of elements of a block for SumSquares. The blocks of a stretch, and
// therefore all sums, depend on the stretch alone.
const BlockSize = 1 << 16

// Blocks returns the number of blocks in all stretches.
func Blocks(stretches []Tensor) (n int) {
	for _, x := range stretches {
		n += (x.Elements() + BlockSize - 1) / BlockSize
	}
	return n
}

// ChecksumKey is the constant of [Checksum]: 2^64 divided by the golden ratio, rounded to an odd
// number.
const ChecksumKey = 0x9E3779B97F4A7C15

// Checksum returns a checksum of the bits of at most [BlockSize] numbers. Each 16 bytes form two
// little-endian words of 64 bits, padded with zeros. Words a and b of the i-th 16 bytes, from 0,
// add the lower half xor the upper half of the 128-bit product (a xor (2i+1)·[ChecksumKey])·(b xor
// (2i+2)·[ChecksumKey]) to the sum, modulo 2^64. Any difference, including signs and order, is
// missed with a probability of about 2^-64.
func Checksum[E float32 | uint16](x []E) uint64 {
	data := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), int(unsafe.Sizeof(*new(E)))*len(x))
	key := uint64(ChecksumKey)
	keyA, keyB, sum := key, 2*key, uint64(0)
	for ; len(data) >= 16; data = data[16:] {
		high, low := bits.Mul64(binary.LittleEndian.Uint64(data)^keyA, binary.LittleEndian.Uint64(data[8:])^keyB)
		sum += high ^ low
		keyA += 2 * key
		keyB += 2 * key
	}
	if len(data) > 0 {
		var last [16]byte
		copy(last[:], data)
		high, low := bits.Mul64(binary.LittleEndian.Uint64(last[:])^keyA, binary.LittleEndian.Uint64(last[8:])^keyB)
		sum += high ^ low
	}
	return sum
}

// A Norm is an RMSNorm, y = w·x·(mean x² + ε)^(-1/2), or without weight a LayerNorm, y = (x - mean
// x)·(variance x + ε)^(-1/2).
type Norm struct {
	Epsilon float64
	Weight  Tensor // [width] or absent
	Mean    Tensor // [T] statistic of a LayerNorm; not used by an RMSNorm
	RStd    Tensor // [T] statistic: the inverse root
}

// Heads is the shape of an attention.
type Heads struct {
	Rows, Length   int // T = Rows·Length
	Heads, KVHeads int // query heads; key/value heads, each shared by Heads/KVHeads consecutive query heads
	Size           int // size of a head, even
	Capacity       int // number of positions of keys and values
}

// Width returns the width of a token's projections: queries, keys, values.
func (h Heads) Width() int { return (h.Heads + 2*h.KVHeads) * h.Size }

// Tokens returns the number of tokens.
func (h Heads) Tokens() int { return h.Rows * h.Length }

// headsOf returns the shape of heads, given queries and keys.
func headsOf(q, k Tensor) Heads {
	return Heads{Rows: q.shape[0], Length: q.shape[2], Heads: q.shape[1], KVHeads: k.shape[1], Size: q.shape[3],
		Capacity: k.shape[2]}
}

// Projections are the projections of tokens and the heads computed from them. Of the first r
// elements of a head of queries or keys, elements j and j+r/2 are rotated together, or with
// Interleaved elements 2j and 2j+1. The elements from r on are not rotated.
type Projections struct {
	QKV Tensor // [T, Width]
	// weight of an RMSNorm: [Heads·Size] over all queries of a token, or [Size] over each head of
	// queries; absent for none
	QWeight Tensor
	KWeight Tensor // [KVHeads·Size] or [Size], the same for the keys
	Epsilon float64
	// [T·norms of a token] inverse roots of these norms, set by SplitHeads, or read if Known is
	// set; not used without the weight
	RQ, RK Tensor
	Known  bool
	// [2, T] if the norms are over more columns than these, for JoinHeads: for each token, the mean
	// of w·dy·x over all columns of the norm of queries, and of keys. See SumHeads.
	Means       Tensor
	Clip        float64 // bound of queries, keys (after the norm) and values; 0 for none
	Cos, Sin    Tensor  // [positions, r/2] rotation of a position; r is at most Size
	Interleaved bool
	Scale       float64 // factor of queries; 0: Size^(-1/2)
	First       int     // position of the first token of each row
	Q           Tensor  // [Rows, Heads, Length, Size]
	K, V        Tensor  // [Rows, KVHeads, Capacity, Size]; positions from First on are written
}

// Heads returns the shape of the heads.
func (p Projections) Heads() Heads { return headsOf(p.Q, p.K) }

// QueryScale returns the factor of queries.
func (p Projections) QueryScale() float64 {
	if p.Scale != 0 {
		return p.Scale
	}
	return 1 / math.Sqrt(float64(p.Heads().Size))
}

// Turned returns the number of rotated elements of a head.
func (p Projections) Turned() int { return 2 * p.Cos.shape[1] }

// Norms returns the number of norms of a token's queries, and of its keys: 1, or one for each head.
func (p Projections) Norms() (q, k int) {
	h := p.Heads()
	norms := func(weight Tensor, heads int) int {
		if weight.Present() && weight.Elements() == h.Size {
			return heads
		}
		return 1
	}
	return norms(p.QWeight, h.Heads), norms(p.KWeight, h.KVHeads)
}

// LatentHeads are the projections of multi-head latent attention
// (https://arxiv.org/abs/2405.04434, section 2.1) and the heads computed from them. A head of
// queries and keys has p elements without rotation, then r rotated elements, which all heads of
// keys share. A value has v elements. Elements j and j+r/2 of the rotated elements of a head are
// rotated together.
type LatentHeads struct {
	Queries    Tensor // [T, Heads·(p+r)]
	KeysValues Tensor // [T, Heads·(p+v)] of each head p elements of its key, then its value
	Rotated    Tensor // [T, r] of the keys
	// Elements j and j+r/2 are elements 2j and 2j+1 of the r elements in Queries and in Rotated.
	Interleaved bool
	Cos, Sin    Tensor  // [positions, r/2] rotation of a position
	Scale       float32 // factor of queries
	First       int     // position of the first token of each row
	// The heads, of a size of at least p+r and v; other elements are zero. Q is [Rows, Heads,
	// Length, Size]. K and V are [Rows, Heads, Capacity, Size]; positions from First on are
	// written.
	Q, K, V Tensor
}

// LatentSizes is the shape of a latent attention.
type LatentSizes struct {
	Heads
	Plain, Turned, Values int // p, r and v of [LatentHeads]
}

// Sizes returns the shape.
func (l LatentHeads) Sizes() LatentSizes {
	s := LatentSizes{Heads: headsOf(l.Q, l.K), Turned: 2 * l.Cos.shape[1]}
	s.Plain = l.Queries.shape[1]/s.Heads.Heads - s.Turned
	s.Values = l.KeysValues.shape[1]/s.Heads.Heads - s.Plain
	return s
}

// An Attention is an attention over heads.
type Attention struct {
	Q     Tensor // [Rows, Heads, Length, Size]
	K, V  Tensor // [Rows, KVHeads, Capacity, Size]
	First int    // position of the first query of each row
	// [Rows, Length] first key position that a query attends to, at most its own position,
	// ascending in each row; absent: 0
	Begin   Tensor
	Context Tensor // [T, Heads·Size]
	LSE     Tensor // [Rows, Heads, Length] logsumexp of the scores
}

// Heads returns the shape of the heads.
func (a Attention) Heads() Heads { return headsOf(a.Q, a.K) }

// Routing is a router's choice of experts for tokens.
type Routing struct {
	Probs   Tensor // [T, Experts] scores: the softmax of a token's logits, or their sigmoids
	LSE     Tensor // [T] logsumexp of the logits; with Sigmoid the sum of the scores
	Chosen  Tensor // [T, PerToken] experts of a token, the largest score plus bias first
	Counts  Tensor // [Experts] rows of each expert
	RowOf   Tensor // [T, PerToken] rows of a token, in the order of its choices
	TokenOf Tensor // [R] token of a row
	Weight  Tensor // [R] routing weight of a row: the score of its choice, renormalised and scaled

	RouterKind
}

// A RouterKind is how a router scores and chooses experts, and weights its choices. The zero value
// chooses the largest of all softmax probabilities, which are also the routing weights.
type RouterKind struct {
	Sigmoid bool   // scores are sigmoids of the logits instead of their softmax
	Bias    Tensor // [Experts] added to the scores for the choice only; absent: zero

	// With Groups above 1, the experts are that number of groups of consecutive experts of equal
	// size. A token chooses its experts in the TopGroups best groups. The value of a group is the
	// largest of its scores plus biases, or with SumOfTwo the sum of the two largest. TopGroups
	// groups must have at least PerToken experts, and with SumOfTwo a group at least two.
	Groups, TopGroups int
	SumOfTwo          bool

	// Renormalize divides routing weights by their sum over a token's choices. With Sigmoid, 1e-20
	// is added to the sum, as in DeepSeek-V3. A sum below LeastSum is replaced by it.
	Renormalize bool
	LeastSum    float32 // 0 without Renormalize
	Scale       float32 // factor of routing weights, after Renormalize; 0 means 1
}

// Factor returns the factor of routing weights.
func (k RouterKind) Factor() float32 {
	if k.Scale == 0 {
		return 1
	}
	return k.Scale
}

// A Clamp has the constants of ClampedSwiGLU.
type Clamp struct{ Limit, Alpha float32 }

// RouterStats are sums over the tokens of a pass. The distribution of a token is the softmax of its
// logits; with Sigmoid it is the scores divided by their sum.
type RouterStats struct {
	Probs   []float64 // [Experts] sum of the distributions
	Counts  []int64   // [Experts] number of choices
	LSE2    float64   // sum of the squared logsumexp; with Sigmoid 0
	Entropy float64   // sum of the distribution's entropy, in nats
}

// A Jitter has random factors of the elements of rows, uniform from 1-Epsilon to 1+Epsilon.
type Jitter struct {
	Numbers Tensor // [T] of Int32: the number of each row, not negative
	Epsilon float32
	Seed    uint64
}

// Factor returns the factor of an element of a row with the given number. It depends on the seed,
// the number and the index of the element alone: it is 1 + Epsilon·u for output number·2³² +
// element of the random number generator SplitMix64 (Steele, Lea and Flood 2014) whose state is the
// finalised seed. The highest 24 bits of the output are (u+1)·2²³.
func (j Jitter) Factor(number int32, element int) float32 {
	z := Mix64(Mix64(j.Seed) + (uint64(uint32(number))<<32+uint64(element)+1)*0x9e3779b97f4a7c15)
	u := float32(z>>40)*0x1p-23 - 1 // exact
	return 1 + float32(j.Epsilon*u)
}

// Mix64 is the finaliser of SplitMix64.
func Mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// CrossEntropy is a block of logits with their targets.
type CrossEntropy struct {
	// [n, size of the vocabulary]; with a Scale other than 0 they are overwritten with the gradient
	// of Scale·loss, otherwise their contents are undefined afterwards
	Logits  Tensor
	Targets Tensor    // [n], or negative
	Loss    []float64 // [n] a host result: logsumexp(logits) - logits[target]
	Scale   float64

	// With Sample the targets are drawn from the distribution of the logits, with the random
	// numbers Seed and First + row, and written to Targets on the device's side. Negative targets
	// are kept. Devices with another Arithmetic may draw other targets.
	Sample bool
	Seed   uint64
	First  uint64
}
