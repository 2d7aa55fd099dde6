package optimizer

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"

	"mula/moe"
	"mula/train/estimate"
	"mula/xpu"
	"mula/xpu/comm"
)

// Muon is Muon: see muon.
const Muon Name = "muon"

var _ = register(Muon, spec{
	// the default of AdjustLearningRate lets one learning rate serve the matrices and the other
	// parameters
	defaults: Config{
		Betas: []float64{0.9, 0.95}, Epsilon: new(1e-8), WeightDecay: new(0.1), Momentum: new(0.95),
		Nesterov: new(true), NewtonSchulzSteps: new(int64(5)), AdjustLearningRate: AdjustMatchRMSAdamW,
	},
	state: func(name string, shape []int) []string {
		if orthogonalized(name, shape) {
			return []string{"momentum_buffer"}
		}
		return []string{"exp_avg", "exp_avg_sq"}
	},
	whole: orthogonalized,
	slices: estimate.SliceUpdate{Operation: comm.OpAllToAll,
		// u, and X back: float32, without the slice of the rank that computes X
		Bytes: func(name string, shape []int, ranks int) int64 {
			if !orthogonalized(name, shape) {
				return 0
			}
			return 2 * 4 * int64(shape[0]*shape[1]/ranks) * int64(ranks-1)
		}},
	scratch: muonScratchBytes,
	rule: func(config Config, _ int64, o *Optimizer) (rule, error) {
		return newMuon(config, o)
	},
})

// muon is [Muon]. The orthogonalized momentum updates the matrices of attention and of feed-forward
// layers, each expert's matrices separately. [AdamW] updates embedding, head, norms, biases and
// routers with the same learning rate, unless a group scales it. With g the gradient of an m×n
// matrix, η the learning rate, λ the weight decay and μ the momentum:
//
//	b ← μb + (1−μ)g;   u = μb + (1−μ)g with nesterov, else b
//	X = u/max(‖u‖, 1e-7);   ns_steps times  A = XXᵀ,  X ← aX + (bA + cA²)X,  a = 3.4445, b = −4.775, c = 2.0315
//	p ← p − η·λ·p;   p ← p − η·s·X
//	s = 0.2·√max(m, n)      AdjustMatchRMSAdamW (Liu et al. 2025, arXiv 2502.16982)
//	s = √max(1, m/n)        AdjustOriginal
//
// ‖·‖ is the Frobenius norm, computed like [Optimizer.GradientNorm]. The device computes the
// products for X in its precision, and everything else in float32. For m > n the factors have the
// other order, so that A is the smaller square.
//
// Ranks that share a matrix ([comm.TP]) have slices of u. The i-th matrix is orthogonalized by rank
// i modulo their number, which gets all slices, and returns the slices of X.
//
// Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Reference: torch.optim.Muon of torch
// 2.15.0, which computes X in bfloat16.
type muon struct {
	config       Config
	device       xpu.Device
	rest         *adamW
	large, small []matrix
	sliced       []matrix     // slices of matrices; the ranks of [comm.TP] have slices of the same ones
	sides        [][2]float64 // rows and columns of each complete matrix
	scale        []float64    // η·s of each parameter
	keep         []float32    // 1 − η·λ of each group

	// of all matrices; nil before the first update
	moments   []xpu.Moments
	gradients []xpu.Tensor
	sums      []float64 // sum of squares of u for each block
	norms     []float64 // ‖u‖² of each parameter

	joined *joinedMatrices // nil without slices

	largeScratch *muonScratch
	scratch      chan *muonScratch // one for each worker

	smallOne func(i int)
}

// A matrix is a parameter that is orthogonalized.
type matrix struct {
	parameter     int
	rows, columns int
	grad          xpu.Tensor // [rows, columns]
}

// joinedMatrices has the memory for a matrix whose slices other ranks have.
type joinedMatrices struct {
	scratch  *muonScratch
	grad     xpu.Tensor // the complete matrix; one dimension
	sums     []float64  // of its blocks
	complete []float32  // the same on the host
	sent     []float32  // slices of the matrices of all ranks
	received []float32  // all slices of this rank's matrix
}

// muonLarge is the smallest number of elements of a matrix that uses all workers. Smaller matrices
// are orthogonalized in parallel.
const muonLarge = 1 << 20

// muonScratch is the scratch memory for the orthogonalization of one matrix: another matrix of its
// shape, and two squares.
type muonScratch struct{ x, a, b xpu.Tensor }

// newMuon prepares for the matrices that the optimizer's rank owns.
func newMuon(config Config, o *Optimizer) (*muon, error) {
	device, parameters := o.device, o.parameters
	r := &muon{config: config, device: device, rest: newAdamW(config), norms: make([]float64, len(parameters)),
		sides: make([][2]float64, len(parameters)), scale: make([]float64, len(parameters))}
	for i, p := range parameters {
		if _, end, _ := o.Owned(i); !orthogonalized(p.Name, p.Shape) || end == 0 {
			continue
		}
		whole := p.Slice.Whole(p.Shape)
		r.sides[i] = [2]float64{float64(whole[0]), float64(whole[1])}
		m := matrix{i, p.Shape[0], p.Shape[1], p.Grad.Reshape(p.Shape...)}
		if p.Slice.Ranks > 0 {
			r.sliced = append(r.sliced, m)
		} else if p.Weight.Elements() >= muonLarge {
			r.large = append(r.large, m)
		} else {
			r.small = append(r.small, m)
		}
	}
	var err error
	if r.large != nil {
		if r.largeScratch, err = newMuonScratch(o, r.large); err != nil {
			return nil, err
		}
	}
	if r.sliced != nil {
		if r.joined, err = newJoinedMatrices(o, r.sliced); err != nil {
			return nil, err
		}
	}
	n := min(device.Threads(), len(r.small))
	r.scratch = make(chan *muonScratch, n)
	for range n {
		s, err := newMuonScratch(o, r.small)
		if err != nil {
			return nil, err
		}
		r.scratch <- s
	}
	return r, nil
}

// newMuonScratch returns scratch for each of the matrices.
func newMuonScratch(o *Optimizer, matrices []matrix) (*muonScratch, error) {
	var elements, side int
	for _, m := range matrices {
		elements, side = max(elements, m.rows*m.columns), max(side, min(m.rows, m.columns))
	}
	s := new(muonScratch)
	var errs [3]error
	s.x, errs[0] = o.newTensor(xpu.Float32, elements)
	s.a, errs[1] = o.newTensor(xpu.Float32, side*side)
	s.b, errs[2] = o.newTensor(xpu.Float32, side*side)
	return s, errors.Join(errs[:]...)
}

// newJoinedMatrices returns memory for each of the matrices with the given slices.
func newJoinedMatrices(o *Optimizer, sliced []matrix) (*joinedMatrices, error) {
	complete, elements := make([]matrix, len(sliced)), 0
	for i, m := range sliced {
		p := o.parameters[m.parameter]
		whole := p.Slice.Whole(p.Shape)
		complete[i] = matrix{rows: whole[0], columns: whole[1]}
		elements = max(elements, whole[0]*whole[1])
	}
	scratch, err := newMuonScratch(o, complete)
	if err != nil {
		return nil, err
	}
	grad, err := o.newTensor(xpu.Float32, elements)
	return &joinedMatrices{scratch, grad, make([]float64, blocksOf(elements)), make([]float32, elements),
		make([]float32, elements), make([]float32, elements)}, err
}

// orthogonalized reports whether a parameter is a matrix of a layer, except for routers and for
// gates of shared experts, whose matrix has one row.
func orthogonalized(name string, shape []int) bool {
	return len(shape) == 2 && strings.HasPrefix(name, "model.layers.") && !isRouter(name)
}

func (r *muon) update(s GroupSetting) xpu.Update { return r.rest.update(s) }

// begin replaces the gradients of the matrices with X.
func (r *muon) begin(ctx context.Context, o *Optimizer, learningRate, gradScale float64) error {
	if err := r.rest.begin(ctx, o, learningRate, gradScale); err != nil {
		return err
	}
	if r.smallOne == nil {
		blocks := 0
		for _, u := range o.tensors {
			r.moments = append(r.moments, u.moments...)
			r.gradients = append(r.gradients, u.moments[0].Grad)
			blocks += u.end - u.first
		}
		r.sums = make([]float64, blocks)
		r.smallOne = func(i int) {
			s := <-r.scratch
			r.orthogonalize(r.small[i], s)
			r.scratch <- s
		}
	}
	momentum := xpu.Muon{Momentum: *r.config.Momentum, Nesterov: *r.config.Nesterov, GradScale: gradScale}
	r.device.Update(momentum.Update(), r.moments, nil, nil)
	r.device.SumSquares(r.gradients, r.sums)
	if err := r.device.Wait(ctx); err != nil {
		return err
	}
	sums := r.sums
	for _, u := range o.tensors {
		norm := 0.0
		for _, s := range sums[:u.end-u.first] {
			norm += s
		}
		r.norms[u.parameter], sums = norm, sums[u.end-u.first:]
	}
	for _, m := range r.large {
		r.orthogonalize(m, r.largeScratch)
	}
	if r.joined != nil {
		if err := r.orthogonalizeSlices(ctx, o); err != nil {
			return err
		}
	}
	r.device.Parallel(len(r.small), r.smallOne)
	r.keep = r.keep[:0]
	for _, s := range o.settings {
		r.keep = append(r.keep, float32(1-learningRate*s.RateScale*s.WeightDecay))
	}
	for _, u := range o.tensors {
		rows, columns := r.sides[u.parameter][0], r.sides[u.parameter][1]
		rate := learningRate * o.settings[o.group[u.parameter]].RateScale
		if r.config.AdjustLearningRate == AdjustOriginal {
			r.scale[u.parameter] = rate * math.Sqrt(max(1, rows/columns))
		} else {
			r.scale[u.parameter] = rate * 0.2 * math.Sqrt(max(rows, columns))
		}
	}
	return nil
}

// orthogonalizeSlices is orthogonalize for matrices whose slices other ranks have. In each round,
// each rank of [comm.TP] orthogonalizes one of them.
func (r *muon) orthogonalizeSlices(ctx context.Context, o *Optimizer) error {
	group, j := o.sharding.mesh.Group(comm.TP), r.joined
	n, rank := group.Size(), group.Rank()
	sentBounds, receivedBounds := make([]int, n+1), make([]int, n+1)
	for round := range slices.Chunk(r.sliced, n) {
		for i := range n {
			sentBounds[i+1] = sentBounds[i]
			if i >= len(round) {
				continue
			}
			size := round[i].grad.Elements()
			sentBounds[i+1] += size
			if err := r.device.Read(ctx, j.sent[sentBounds[i]:sentBounds[i+1]], round[i].grad.Flat()); err != nil {
				return err
			}
		}
		size := sentBounds[rank+1] - sentBounds[rank] // of each slice of this rank's matrix
		for i := range n {
			receivedBounds[i+1] = receivedBounds[i] + size
		}
		sent, received := j.sent[:sentBounds[n]], j.received[:n*size]
		if err := comm.AllToAll(ctx, group, sent, sentBounds, received, receivedBounds); err != nil {
			return err
		}
		if size > 0 {
			if err := r.orthogonalizeJoined(ctx, o, round[rank].parameter, received); err != nil {
				return err
			}
		}
		if err := comm.AllToAll(ctx, group, received, receivedBounds, sent, sentBounds); err != nil {
			return err
		}
		for i, m := range round {
			r.device.Write(m.grad.Flat(), sent[sentBounds[i]:sentBounds[i+1]])
		}
	}
	return nil
}

// orthogonalizeJoined replaces all slices of u of a matrix, one after the other, with the slices of
// X.
func (r *muon) orthogonalizeJoined(ctx context.Context, o *Optimizer, parameter int, all []float32) error {
	p, j := o.parameters[parameter], r.joined
	whole, size := p.Slice.Whole(p.Shape), len(all)/p.Slice.Ranks
	of := func(rank int) (moe.Slice, []float32) {
		slice := p.Slice
		slice.Rank = rank
		return slice, all[rank*size : (rank+1)*size]
	}
	complete := j.complete[:len(all)]
	for rank := range p.Slice.Ranks {
		slice, values := of(rank)
		slice.Put(complete, values, whole)
	}
	grad, sums := j.grad.Rows(0, len(all)), j.sums[:blocksOf(len(all))]
	r.device.Write(grad, complete)
	r.device.SumSquares([]xpu.Tensor{grad}, sums)
	if err := r.device.Wait(ctx); err != nil {
		return err
	}
	r.norms[parameter] = 0
	for _, s := range sums {
		r.norms[parameter] += s
	}
	r.orthogonalize(matrix{parameter, whole[0], whole[1], grad.Reshape(whole...)}, j.scratch)
	if err := r.device.Read(ctx, complete, grad); err != nil {
		return err
	}
	for rank := range p.Slice.Ranks {
		slice, values := of(rank)
		slice.Take(values, complete, 0, whole)
	}
	return nil
}

// orthogonalize replaces u, which is in the memory of a matrix's gradient, with X.
func (r *muon) orthogonalize(matrix matrix, s *muonScratch) {
	m, n := matrix.rows, matrix.columns
	x, y := matrix.grad, s.x.Rows(0, m*n).Reshape(m, n)
	if *r.config.NewtonSchulzSteps%2 == 1 {
		x, y = y, x // so that the last X is in the right memory
	}
	none := xpu.Tensor{}
	r.device.Combine(x, matrix.grad, none, float32(1/max(math.Sqrt(r.norms[matrix.parameter]), 1e-7)), 0, 0)
	side := min(m, n)
	square := s.a.Rows(0, side*side).Reshape(side, side)
	polynomial := s.b.Rows(0, side*side).Reshape(side, side)
	for range *r.config.NewtonSchulzSteps {
		if m <= n {
			r.device.MatMul(square, x, x.T(), xpu.MatMulOptions{})
		} else {
			r.device.MatMul(square, x.T(), x, xpu.MatMulOptions{})
		}
		r.device.MatMul(polynomial, square, square, xpu.MatMulOptions{})
		r.device.Combine(polynomial, polynomial, square, 2.0315, -4.775, 3.4445)
		if m <= n {
			r.device.MatMul(y, polynomial, x, xpu.MatMulOptions{})
		} else {
			r.device.MatMul(y, x, polynomial, xpu.MatMulOptions{})
		}
		x, y = y, x
	}
}

func (r *muon) move(o *Optimizer, p int) xpu.Move {
	return xpu.Move{Keep: r.keep[o.group[p]], Scale: float32(-r.scale[p])}
}

// muonScratchBytes returns the bytes of Muon's scratch memory, on a device of the given number of
// threads and in host memory, for one of tp ranks that share matrices.
func muonScratchBytes(m moe.Config, threads, tp int) (device, host int64) {
	var elements, side [3]int64 // of small and of large matrices, and of matrices that ranks share
	for _, tensor := range m.TrainedTensors() {
		if !orthogonalized(tensor.Name, tensor.Shape) {
			continue
		}
		k := 0
		switch n := tensor.Elements(); {
		case tp > 1 && m.Sliced(tensor.Name) >= 0:
			k = 2
		case n >= muonLarge:
			k = 1
		}
		elements[k] = max(elements[k], tensor.Elements())
		side[k] = max(side[k], int64(min(tensor.Shape[0], tensor.Shape[1])))
	}
	scratch := func(k int) int64 { return 4 * (elements[k] + 2*side[k]*side[k]) }
	return scratch(0)*int64(threads) + scratch(1) + scratch(2) + 4*elements[2], 3 * 4 * elements[2]
}
