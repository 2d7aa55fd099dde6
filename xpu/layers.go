package xpu

import (
	"encoding/binary"
	"math/bits"
)

// Layers are what a decoder and its training need beside products. T is the number of tokens of a
// pass, rows × length; R the number of rows of the experts, for each token one for each expert that
// it has chosen. Results overlap no operand unless it is said.
//
// The length of one slice gives T, R or n, as each method says; the others may be longer, and what
// is beyond is not touched. With no tokens a method has nothing to do, and slices may be empty;
// host results are set all the same. Slices of slices are read before a method returns; host
// results must not be used before Wait. What ids, rows and targets hold is not checked: numbers
// beyond what they number are a mistake whose outcome is not defined.
type Layers interface {
	// Zero sets x to zero, Copy sets dst to x, and Add sets dst to x + y; dst may be x. All slices
	// have one length.
	Zero(x []float32)
	Copy(dst, x []float32)
	Add(dst, x, y []float32)

	// Embed sets row t of dst [T, width] to row ids[t] of table [·, width]. T is len(ids).
	Embed(dst, table []float32, ids []int32, width int)

	// EmbedGrad adds row t of dx [T, width] to row ids[t] of dtable, for all t whose id is not
	// skip, of each row of dtable in ascending order of t. The host's side of ids is the same. T is
	// len(ids).
	EmbedGrad(dtable, dx []float32, ids []int32, width int, skip int32)

	// Normalize writes the norm of the rows of x [T, Width] to h. It sets the statistics of n, or
	// with known uses those that are there. T is len(x)/Width, without a rest.
	Normalize(h, x []float32, n Norm, known bool)

	// NormGrad adds the gradient that comes through a norm of x, dh, to dx, and that of its weight
	// to dweight, which is empty if n has none. It may spoil dh. It uses the statistics that
	// Normalize has set. T is len(x)/Width, without a rest; dweight has Width elements.
	//
	// With r = RStd and y = w·x·r: dx = r·w·dy - x·(r³/Width)·Σ w·dy·x, dw = Σ dy·x·r. Without
	// weight, y = (x-mean)·r: dx = r·(dy - mean(dy) - y·mean(dy·y)).
	NormGrad(dx, dh, x []float32, n Norm, dweight []float32)

	// SplitHeads takes projections apart into heads: norm, clipping, rotation. Queries are
	// multiplied by Size^(-1/2). T is Rows·Length here and in what follows about heads.
	SplitHeads(p Projections)

	// JoinHeads takes the gradients of heads back to the projections, in dqkv [T, Width]: those of
	// queries are there already, in place of the queries, those of keys and values are in dk and dv
	// [Rows, KVHeads, Length, Size]. It adds the gradients of the norms' weights to dqWeight and
	// dkWeight, which are empty if there are none. Where clipping took effect the gradient is zero.
	// p is that of SplitHeads, with First = 0; its Q, K and V are not read, RQ and RK are those
	// that SplitHeads has set.
	JoinHeads(p Projections, dqkv, dk, dv, dqWeight, dkWeight []float32)

	// Attend sets Context and LSE: causal attention of the queries over the keys up to their own,
	// from Begin on, with the scores q·k as they are.
	Attend(a Attention)

	// AttendGrad computes the gradients of an attention with First = 0 and Capacity = Length from
	// dcontext, that of Context: of the queries in dqkv [T, Width], in place of the queries alone,
	// of keys and values in dk and dv, which are laid out as they. They are set, not added to;
	// Context and LSE are those that Attend has set.
	//
	//	P = exp(S - lse), dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P ∘ (dP - Σ dO·O), dQ = dS·K, dK = dSᵀ·Q
	AttendGrad(a Attention, dcontext, dqkv, dk, dv []float32)

	// Route turns the logits [T, Experts] of the router into its distribution, sets Probs and LSE,
	// and chooses experts: Chosen and Counts. Of equal probabilities the expert with the lower
	// number is chosen first. With uniform, the j-th choice of token t is (t·PerToken + j) modulo
	// Experts. stats are host results, set and not added to; they must be there, with room for all
	// experts. T is len(LSE); of r, RowOf, TokenOf and Weight are not used.
	Route(r Routing, logits []float32, uniform bool, stats *RouterStats)

	// SortRows numbers the choices of all tokens by expert and, within an expert, by token: it sets
	// RowOf, TokenOf and Weight from Chosen, Counts and Probs. R is len(Chosen), and T is
	// R/PerToken.
	SortRows(r Routing)

	// RouteGrad sets dlogits [T, Experts] to the gradient of the router's logits: with G_i the
	// slope of expert i, and if i was chosen the gradient dweight [R] of that row's routing weight,
	// dz_i = p_i·(G_i - Σ p_j·G_j) + zFactor·lse·p_i. T is len(LSE); of r, Counts, TokenOf and
	// Weight are not used, and RowOf may be any numbering of the choices that is dweight's.
	RouteGrad(r Routing, dlogits, slope, dweight []float32, zFactor float64)

	// GatherRows sets row r of dst [R, width] to row tokenOf[r] of x. R is len(tokenOf).
	GatherRows(dst, x []float32, tokenOf []int32, width int)

	// SumRows sets row t of dst [T, width] to that of x plus the rows rowOf[t·perToken], … of y,
	// added up in this order; without x to their sum. dst may be x. T is len(rowOf)/perToken,
	// without a rest.
	SumRows(dst, x, y []float32, rowOf []int32, perToken, width int)

	// SwiGLU sets row r of act [·, width] to silu(gate)·up·weight[r], where row r of gateUp [·,
	// 2·width] is gate, then up. An empty weight is 1. R is len(act)/width, without a rest.
	SwiGLU(act, gateUp, weight []float32, width int)

	// SwiGLUGrad takes the gradient of row r of what SwiGLU gave, dact, to that of gate and up, in
	// place of gateUp. It sets act again as SwiGLU does, and with weights dweight[r] to the
	// gradient of weight[r]; without them dweight is not used. It may spoil dact. R is
	// len(act)/width, without a rest.
	SwiGLUGrad(gateUp, act, dact, weight, dweight []float32, width int)

	// CrossEntropy computes the cross entropies of targets. n is len(Targets). A negative target is
	// left out: its loss is 0, and so is its gradient.
	CrossEntropy(c CrossEntropy)

	// SumSquares sets sums, host results, to the sums of squares of the blocks of all stretches:
	// each is cut from its beginning into blocks of [BlockSize] elements, the last of which may be
	// shorter. A sum is finite exactly when all elements are.
	SumSquares(stretches [][]float32, sums []float64)

	// Checksums sets sums, host results, to the [Checksum] of each block of all stretches, cut as
	// SumSquares cuts them. Every device gives the same bits.
	Checksums(stretches [][]float32, sums []uint64)

	// AdamW updates weights and moments. before and change are host results, or both empty: for
	// each block, as SumSquares has them, the sum of squares of the weights before and of what was
	// added to them.
	AdamW(rule AdamW, stretches []Moments, before, change []float64)
}

// BlockSize is the number of elements whose squares are added up as one. The blocks of a stretch
// follow from it alone, and so do all sums.
const BlockSize = 1 << 16

// Blocks is the number of blocks that stretches are cut into.
func Blocks(stretches [][]float32) (n int) {
	for _, x := range stretches {
		n += (len(x) + BlockSize - 1) / BlockSize
	}
	return n
}

// ChecksumKey is the constant of [Checksum]: 2^64 divided by the golden ratio, made odd.
const ChecksumKey = 0x9E3779B97F4A7C15

// Checksum is a checksum of the bits of at most [BlockSize] numbers. The numbers are taken four at
// a time as two little-endian words of 64 bits, padded with zeros. Words a and b of the i-th four,
// from 0, add the lower half xor the upper half of the 128-bit product (a xor
// (2i+1)·[ChecksumKey])·(b xor (2i+2)·[ChecksumKey]) to the sum, which is taken modulo 2^64. A
// difference of any kind, signs and order included, is missed with a chance of about 2^-64.
func Checksum(x []float32) uint64 {
	data := bytesOf(x)
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
	Width   int
	Epsilon float64
	Weight  []float32 // [Width] or empty
	Mean    []float32 // [T] statistic of a LayerNorm; an RMSNorm's is empty
	RStd    []float32 // [T] statistic: the inverse root
}

// Heads is the shape of an attention.
type Heads struct {
	Rows, Length   int // T = Rows·Length
	Heads, KVHeads int // of queries; of keys and values, which Heads/KVHeads heads of queries after each other share
	Size           int // of a head, even
}

// Width is that of the projections of a token: queries, keys, values.
func (h Heads) Width() int { return (h.Heads + 2*h.KVHeads) * h.Size }

// Projections are the projections of tokens and the heads made of them. Elements j and j+Size/2 of
// a head are rotated together, as in transformers.
type Projections struct {
	Heads
	QKV     []float32 // [T, Width]
	QWeight []float32 // [Heads·Size] weight of an RMSNorm over all queries of a token; empty for none
	KWeight []float32 // [KVHeads·Size] the same of the keys
	Epsilon float64
	// [T] inverse roots of those norms; SplitHeads sets them, or with Known uses them; empty
	// without the weight
	RQ, RK   []float32
	Known    bool
	Clip     float64   // bound of queries, keys (after the norm) and values; 0 for none
	Cos, Sin []float32 // [positions, Size/2] rotation of a position
	First    int       // position of the first token of each row
	Capacity int       // room for positions in K and V
	Q        []float32 // [Rows, Heads, Length, Size]
	K, V     []float32 // [Rows, KVHeads, Capacity, Size], of which positions from First on are written
}

// An Attention is an attention over heads.
type Attention struct {
	Heads
	Q        []float32 // [Rows, Heads, Length, Size]
	K, V     []float32 // [Rows, KVHeads, Capacity, Size]
	First    int       // position of the first query of each row
	Capacity int
	// [Rows, Length] position of the first key that a query sees, at most its own, ascending in
	// each row; empty: 0
	Begin   []int32
	Context []float32 // [T, Heads·Size]
	LSE     []float32 // [Rows, Heads, Length] logsumexp of the scores
}

// Routing is what a router has decided about tokens.
type Routing struct {
	Experts, PerToken int
	Probs             []float32 // [T, Experts]
	LSE               []float32 // [T] logsumexp of the logits
	Chosen            []int32   // [T, PerToken] largest probability first
	Counts            []int32   // [Experts] rows of each expert
	RowOf             []int32   // [T, PerToken] rows of a token, in the order of its choices
	TokenOf           []int32   // [R] token of a row
	Weight            []float32 // [R] probability of a row's choice
}

// RouterStats are sums over the tokens of a pass.
type RouterStats struct {
	Probs   []float64 // [Experts] of the router's distribution
	Counts  []int64   // [Experts] of choices
	LSE2    float64   // of the squared logsumexp
	Entropy float64   // of the distribution's entropy, in nats
}

// CrossEntropy is a block of logits with their targets.
type CrossEntropy struct {
	Width int // of the vocabulary
	// [n, Width]; with a Scale other than 0 the gradient of Scale·loss takes their place, otherwise
	// they are spoilt
	Logits  []float32
	Targets []int32   // [n], or negative
	Loss    []float64 // [n] a host result: logsumexp(logits) - logits[target]
	Scale   float64

	// With Sample the targets are drawn from the distribution of the logits, by number Seed and
	// First + row, and written to Targets, on the device's side, but for those that are negative,
	// which stay. Devices of another arithmetic may draw others.
	Sample bool
	Seed   uint64
	First  uint64
}

// AdamW is an update by AdamW. With g the gradient times GradScale, t = Step from 1, m̂ =
// m/(1-β₁ᵗ), v̂ = v/(1-β₂ᵗ):
//
//	p ← p·(1 - LearningRate·WeightDecay); m ← β₁m + (1-β₁)g; v ← β₂v + (1-β₂)g²; p ← p - LearningRate·m̂/(√v̂ + Epsilon)
//
// and then p ← p·(1 - DecayAfter). Loshchilov and Hutter 2019 (arXiv 1711.05101), in the order of
// torch.optim.AdamW.
type AdamW struct {
	LearningRate, Beta1, Beta2, Epsilon, WeightDecay float64
	Step                                             int64
	GradScale                                        float64
	// share of the weights that goes after the update; LearningRate·WeightDecay goes before
	DecayAfter float64
}

// Moments are a stretch of weights and what AdamW keeps of them, all of one length.
type Moments struct{ Weight, Grad, M, V []float32 }
