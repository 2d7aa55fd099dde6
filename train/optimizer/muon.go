package optimizer

import (
	"context"
	"errors"
	"math"
	"strings"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/cpu"
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
	onHost:  orthogonalized,
	whole:   true,
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
// ‖·‖ is the Frobenius norm. The device computes the products for X in its precision. For m > n the
// factors have the other order, so that A is the smaller square. The host computes the rest of X,
// and b. The device updates the parameters of AdamW.
//
// Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Reference: torch.optim.Muon of torch
// 2.15.0, which computes X in bfloat16.
type muon struct {
	config       Config
	device       xpu.Device
	rest         *adamW
	inside       []bool    // which parameters are orthogonalized
	large, small []int     // orthogonalized parameters, by size
	norms        []float64 // ‖u‖² of each parameter
	scale        []float64 // η·s of each parameter
	keep         []float32 // 1 − η·λ of each group
	momentum     xpu.Update

	largeScratch *muonScratch
	scratch      chan *muonScratch // one for each worker
	failed       []error           // of each small matrix
	ctx          context.Context   // of the current update

	momentumOne, smallOne func(i int)
}

// muonLarge is the smallest number of elements of a matrix that uses all workers. Smaller matrices
// are orthogonalized in parallel.
const muonLarge = 1 << 20

// muonScratch is the scratch memory for the orthogonalization of one matrix: another matrix of its
// shape, and two squares, in device memory. Its functions are created once, so that a step does not
// allocate.
type muonScratch struct {
	x, a, b xpu.Tensor   // memory
	buffers [3][]float32 // for X, A and the polynomial on the host, if it does not share memory

	// Of the current matrix, on the host.
	u, first   []float32 // the input; the initial X, which may be u
	factor     float32
	square     []float32 // A
	polynomial []float32
	side       int // of both

	beginOne, polynomialOne func(i int)
}

// newMuon prepares for the matrices that the optimizer's rank owns.
func newMuon(config Config, o *Optimizer) (*muon, error) {
	device, parameters := o.device, o.parameters
	r := &muon{config: config, device: device, rest: newAdamW(config), inside: make([]bool, len(parameters)),
		norms: make([]float64, len(parameters)),
		scale: make([]float64, len(parameters))}
	for i, p := range parameters {
		_, end, _ := o.Owned(i)
		r.inside[i] = orthogonalized(p.Name, p.Shape) && end > 0
		if r.inside[i] && p.Weight.Elements() >= muonLarge {
			r.large = append(r.large, i)
		} else if r.inside[i] {
			r.small = append(r.small, i)
		}
	}
	var err error
	if r.large != nil {
		if r.largeScratch, err = newMuonScratch(o, r.large); err != nil {
			return nil, err
		}
	}
	n := min(device.Threads(), len(r.small))
	r.scratch, r.failed = make(chan *muonScratch, n), make([]error, len(r.small))
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
func newMuonScratch(o *Optimizer, matrices []int) (*muonScratch, error) {
	var elements, side int
	for _, i := range matrices {
		p := o.parameters[i]
		elements, side = max(elements, p.Weight.Elements()), max(side, min(p.Shape[0], p.Shape[1]))
	}
	s := new(muonScratch)
	var errs [3]error
	s.x, errs[0] = o.newTensor(xpu.Float32, elements)
	s.a, errs[1] = o.newTensor(xpu.Float32, side*side)
	s.b, errs[2] = o.newTensor(xpu.Float32, side*side)
	s.beginOne, s.polynomialOne = s.beginPiece, s.polynomialPiece
	return s, errors.Join(errs[:]...)
}

// beginPiece sets a piece of the first X to u times the factor.
func (s *muonScratch) beginPiece(i int) {
	low, high := i*blockSize, min((i+1)*blockSize, len(s.u))
	copy(s.first[low:high], s.u[low:high])
	cpu.Scale(s.first[low:high], s.factor)
}

// polynomialPiece replaces a piece of A² by aI + bA + cA². One more product is the next X.
func (s *muonScratch) polynomialPiece(i int) {
	low, high := i*blockSize, min((i+1)*blockSize, len(s.polynomial))
	cpu.Scale(s.polynomial[low:high], 2.0315)
	cpu.Axpy(s.polynomial[low:high], -4.775, s.square[low:high])
	diagonal := s.side + 1
	for j := (low + diagonal - 1) / diagonal * diagonal; j < high; j += diagonal {
		s.polynomial[j] += 3.4445
	}
}

// orthogonalized reports whether a parameter is a matrix of a layer, except for routers.
func orthogonalized(name string, shape []int) bool {
	return len(shape) == 2 && strings.HasPrefix(name, "model.layers.") && !strings.HasSuffix(name, ".gate.weight")
}

func (r *muon) update(s GroupSetting) xpu.Update { return r.rest.update(s) }

// begin replaces the gradients of the matrices by X.
func (r *muon) begin(ctx context.Context, o *Optimizer, learningRate, gradScale float64) error {
	if err := r.rest.begin(ctx, o, learningRate, gradScale); err != nil {
		return err
	}
	r.ctx = ctx
	r.keep = r.keep[:0]
	for _, s := range o.settings {
		r.keep = append(r.keep, float32(1-learningRate*s.RateScale*s.WeightDecay))
	}
	r.momentum = xpu.Muon{Momentum: *r.config.Momentum, Nesterov: *r.config.Nesterov, GradScale: gradScale}.Update()
	if r.smallOne == nil {
		r.momentumOne = func(i int) {
			i = o.byHost[i]
			b := o.blocks[i]
			h := o.host[b.tensor]
			u := h.grad[b.begin:b.end]
			cpu.Update(r.momentum, h.weight[b.begin:b.end], u, o.hostState(b.tensor, 0, b.begin, b.end), nil)
			o.sums[i] = cpu.SumSquares(u)
		}
		r.smallOne = func(i int) {
			s := <-r.scratch
			r.failed[i] = r.orthogonalize(r.ctx, o, r.small[i], s, false)
			r.scratch <- s
		}
	}
	o.device.Parallel(len(o.byHost), r.momentumOne)
	clear(r.norms)
	for _, i := range o.byHost {
		r.norms[o.blocks[i].tensor] += o.sums[i]
	}
	for _, i := range r.large {
		if err := r.orthogonalize(ctx, o, i, r.largeScratch, true); err != nil {
			return err
		}
	}
	o.device.Parallel(len(r.small), r.smallOne)
	if err := errors.Join(r.failed...); err != nil {
		return err
	}
	for i, p := range o.parameters {
		if !r.inside[i] {
			continue
		}
		rows, columns, rate := float64(p.Shape[0]), float64(p.Shape[1]), learningRate*o.settings[o.group[i]].RateScale
		if r.config.AdjustLearningRate == AdjustOriginal {
			r.scale[i] = rate * math.Sqrt(max(1, rows/columns))
		} else {
			r.scale[i] = rate * 0.2 * math.Sqrt(max(rows, columns))
		}
	}
	return nil
}

// orthogonalize replaces u, which is in the memory of a parameter's gradient on the host, by X. If
// parallel is set, it uses all workers.
func (r *muon) orthogonalize(ctx context.Context, o *Optimizer, parameter int, s *muonScratch, parallel bool) error {
	p, u := o.parameters[parameter], o.host[parameter].grad
	m, n := p.Shape[0], p.Shape[1]
	pieces := func(elements int, f func(i int)) {
		count := (elements + blockSize - 1) / blockSize
		if parallel {
			r.device.Parallel(count, f)
			return
		}
		for i := range count {
			f(i)
		}
	}
	grad := p.Grad.Reshape(m, n)
	x, y := grad, s.x.Rows(0, m*n).Reshape(m, n)
	if *r.config.NewtonSchulzSteps%2 == 1 {
		x, y = y, x // so that the last X is in the right memory
	}
	s.u, s.first, s.factor = u, xpu.HostBuffer(x, &s.buffers[0]), float32(1/max(math.Sqrt(r.norms[parameter]), 1e-7))
	pieces(m*n, s.beginOne)
	xpu.SetNumbers(r.device, x, s.first)
	s.side = min(m, n)
	square := s.a.Rows(0, s.side*s.side).Reshape(s.side, s.side)
	polynomial := s.b.Rows(0, s.side*s.side).Reshape(s.side, s.side)
	for range *r.config.NewtonSchulzSteps {
		if m <= n {
			r.device.MatMul(square, x, x.T(), xpu.MatMulOptions{})
		} else {
			r.device.MatMul(square, x.T(), x, xpu.MatMulOptions{})
		}
		r.device.MatMul(polynomial, square, square, xpu.MatMulOptions{})
		var err error
		if s.square, err = xpu.Numbers(ctx, r.device, square, &s.buffers[1]); err != nil {
			return err
		}
		if s.polynomial, err = xpu.Numbers(ctx, r.device, polynomial, &s.buffers[2]); err != nil {
			return err
		}
		pieces(len(s.polynomial), s.polynomialOne)
		xpu.SetNumbers(r.device, polynomial, s.polynomial)
		if m <= n {
			r.device.MatMul(y, polynomial, x, xpu.MatMulOptions{})
		} else {
			r.device.MatMul(y, x, polynomial, xpu.MatMulOptions{})
		}
		x, y = y, x
	}
	return r.device.Read(ctx, u, grad)
}

func (r *muon) updateHost(o *Optimizer, p, begin, end int) {
	weight := o.host[p].weight[begin:end]
	cpu.Scale(weight, r.keep[o.group[p]])
	cpu.Axpy(weight, float32(-r.scale[p]), o.host[p].grad[begin:end])
}

// muonScratchBytes returns the bytes of Muon's scratch memory for a model and a number of threads.
func muonScratchBytes(m moe.Config, threads int) int64 {
	h, q, kv, ffn := m.HiddenSize, m.QueryWidth(), m.KVWidth(), m.IntermediateSize
	var elements, side [2]int64 // of small and of large matrices
	for _, s := range [][2]int{{q, h}, {kv, h}, {ffn, h}, {m.DenseSize, h}} {
		n, k := int64(s[0])*int64(s[1]), 0
		if n >= muonLarge {
			k = 1
		}
		elements[k], side[k] = max(elements[k], n), max(side[k], int64(min(s[0], s[1])))
	}
	scratch := func(k int) int64 { return 4 * (elements[k] + 2*side[k]*side[k]) }
	return scratch(0)*int64(threads) + scratch(1)
}
