package train

import (
	"fmt"
	"math"
	"runtime"
	"strconv"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/cpu"
)

// blockSize is the number of elements that are updated, or whose squares are summed, as one piece of work. The blocks of a tensor start
// at its first element, so they are the same for every number of threads, and so are all results.
const blockSize = 1 << 16

// measureSize is the number of elements whose old weights are kept at a time where changes are measured. It divides blockSize.
const measureSize = 1 << 12

type block struct {
	tensor     int
	begin, end int
}

// An Optimizer updates the weights of a model from their gradients, in float32, block by block on all workers of a device. What tells one
// optimizer from another is its rule; optimizer_NAME.go has that of each name. Results do not depend on the number of threads.
type Optimizer struct {
	Updates int64 // updates done, t

	rule       rule
	device     xpu.Device
	parameters []*moe.Parameter
	state      [][]stateTensor // of each parameter
	blocks     []block
	sums       []float64 // one for each block
	averaged   bool      // see Average

	measuring, measured bool
	before, change      []float64 // sums of squares, one for each block: of the weights, of what was added to them
	ratios              []ratio   // one for each parameter

	updateOne, sumOne, averageOne, restoreOne func(i int) // made once, so that a step allocates nothing
}

// A stateTensor is what an optimizer keeps for one parameter, element by element.
type stateTensor struct {
	name   string // in optimizer.safetensors, after the parameter's name and a dot
	values []float32
}

type ratio struct{ update, weight float64 }

// A rule is how an optimizer changes weights. Its methods are given the optimizer that it belongs to.
type rule interface {
	// state names the tensors that are kept for a parameter, as the state of the reference implementation does.
	state(p *moe.Parameter) []string

	// begin starts update o.Updates, counted from 1. It may change state and gradients.
	begin(o *Optimizer, learningRate, gradScale float64)

	// update changes elements begin to end of the weights of parameter p. It is called on several goroutines at once.
	update(o *Optimizer, p, begin, end int)
}

// A scalarRule is a rule that keeps numbers, too, which go into the metadata of optimizer.safetensors.
type scalarRule interface {
	scalars() map[string]*float64
}

// An averagingRule is a rule whose weights to evaluate with are not those it trains.
type averagingRule interface {
	// average sets dst, elements begin to end of parameter p, to the weights to evaluate with.
	average(o *Optimizer, dst []float32, p, begin, end int)
}

// NewOptimizer returns the optimizer that a resolved configuration describes, at its beginning. targets is the number of targets of a full
// step.
func NewOptimizer(config OptimizerConfig, targets int64, device xpu.Device, parameters []*moe.Parameter) *Optimizer {
	o := &Optimizer{device: device, parameters: parameters}
	switch config.Name {
	case SophiaG:
		o.rule = newSophiaG(config, targets)
	case Muon:
		o.rule = newMuon(config, device, parameters)
	case Lamb:
		o.rule = newLamb(config, parameters)
	case ADOPT:
		o.rule = newADOPT(config)
	case Lion:
		o.rule = newLion(config)
	case ScheduleFreeAdamW:
		o.rule = newScheduleFreeAdamW(config)
	default:
		o.rule = newAdamW(config)
	}
	for i, p := range parameters {
		var tensors []stateTensor
		for _, name := range o.rule.state(p) {
			tensors = append(tensors, stateTensor{name, make([]float32, len(p.Weight))})
		}
		o.state = append(o.state, tensors)
		for begin := 0; begin < len(p.Weight); begin += blockSize {
			o.blocks = append(o.blocks, block{i, begin, min(begin+blockSize, len(p.Weight))})
		}
	}
	o.sums = make([]float64, len(o.blocks))
	o.before, o.change, o.ratios = make([]float64, len(o.blocks)), make([]float64, len(o.blocks)), make([]ratio, len(parameters))
	o.updateOne, o.sumOne = o.updateBlock, o.sumBlock
	o.averageOne, o.restoreOne = o.averageBlock, o.restoreBlock
	return o
}

// GradientNorm returns the Euclidean norm of all gradients as one vector: squares are summed in float64 within each block, and the blocks
// in their order. It is not finite exactly when some gradient is not: the squares of finite float32 values cannot overflow a float64.
func (o *Optimizer) GradientNorm() float64 {
	o.device.Parallel(len(o.blocks), o.sumOne)
	var sum float64
	for _, s := range o.sums {
		sum += s
	}
	return math.Sqrt(sum)
}

func (o *Optimizer) sumBlock(i int) {
	b := o.blocks[i]
	o.sums[i] = cpu.SumSquares(o.parameters[b.tensor].Grad[b.begin:b.end])
}

// clipFactor returns what gradients of the given norm are multiplied with so that their norm is at most limit: limit/(norm + 1e-6), at
// most 1, as torch.nn.utils.clip_grad_norm_ has it. A limit of 0 means that nothing is clipped.
func clipFactor(norm, limit float64) float64 {
	if limit == 0 {
		return 1
	}
	return min(1, limit/(norm+1e-6))
}

// Step multiplies the gradients with gradScale, which clipping may have made smaller than 1, and updates all weights. What the gradients
// are afterwards is not defined.
func (o *Optimizer) Step(learningRate, gradScale float64) {
	o.Updates++
	o.rule.begin(o, learningRate, gradScale)
	o.device.Parallel(len(o.blocks), o.updateOne)
	o.measured = o.measuring
	if !o.measured {
		return
	}
	clear(o.ratios)
	for i, b := range o.blocks {
		o.ratios[b.tensor].update += o.change[i]
		o.ratios[b.tensor].weight += o.before[i]
	}
}

func (o *Optimizer) updateBlock(i int) {
	b := o.blocks[i]
	if !o.measuring {
		o.rule.update(o, b.tensor, b.begin, b.end)
		return
	}
	var old [measureSize]float32
	var before, change float64
	for begin := b.begin; begin < b.end; begin += measureSize {
		end := min(begin+measureSize, b.end)
		weight := o.parameters[b.tensor].Weight[begin:end]
		kept := old[:copy(old[:], weight)]
		before += cpu.SumSquares(kept)
		o.rule.update(o, b.tensor, begin, end)
		cpu.AddScaled(kept, weight, -1, kept)
		change += cpu.SumSquares(kept)
	}
	o.before[i], o.change[i] = before, change
}

// Measure says whether the next steps measure how much they change each parameter, until it is called again. It costs a second look at the
// weights while they are in the cache, and changes no result.
func (o *Optimizer) Measure(on bool) { o.measuring = on }

// Ratio returns the Euclidean norms of what the last step added to a parameter, weight decay included, and of its weights before. Both are
// 0 if the step was not measured.
func (o *Optimizer) Ratio(parameter int) (update, weight float64) {
	if !o.measured {
		return 0, 0
	}
	r := o.ratios[parameter]
	return math.Sqrt(r.update), math.Sqrt(r.weight)
}

// CurvatureDue reports whether [Optimizer.UpdateCurvature] is to be called after the update that was just made: with SophiaG after every
// hessian_every-th.
func (o *Optimizer) CurvatureDue() bool {
	s, ok := o.rule.(*sophiaG)
	return ok && o.Updates%s.every == 0
}

// UpdateCurvature updates the estimate of the Hessian from gradients of the mean cross entropy of targets that were drawn from the model's own
// distribution, that many of them, multiplied with gradScale. See [SophiaG].
func (o *Optimizer) UpdateCurvature(gradScale float64, targets int64) {
	o.rule.(*sophiaG).updateHessian(o, gradScale, targets)
}

// Average with true replaces the weights by those to evaluate with and to save, and with false puts back those to train on, bit for bit.
// For all optimizers but [ScheduleFreeAdamW] they are the same. Between the two calls the gradients hold the weights to train on.
func (o *Optimizer) Average(on bool) {
	if _, ok := o.rule.(averagingRule); !ok || on == o.averaged {
		return
	}
	o.averaged = on
	if on {
		o.device.Parallel(len(o.blocks), o.averageOne)
	} else {
		o.device.Parallel(len(o.blocks), o.restoreOne)
	}
}

func (o *Optimizer) averageBlock(i int) {
	b := o.blocks[i]
	p := o.parameters[b.tensor]
	copy(p.Grad[b.begin:b.end], p.Weight[b.begin:b.end])
	o.rule.(averagingRule).average(o, p.Weight[b.begin:b.end], b.tensor, b.begin, b.end)
}

func (o *Optimizer) restoreBlock(i int) {
	b := o.blocks[i]
	p := o.parameters[b.tensor]
	copy(p.Weight[b.begin:b.end], p.Grad[b.begin:b.end])
}

// saved lists what optimizer.safetensors holds for a parameter: its state, and the weights to train on if they are not those of the model
// that is saved.
func (o *Optimizer) saved(parameter int) []stateTensor {
	tensors := o.state[parameter]
	if _, ok := o.rule.(averagingRule); ok {
		p := o.parameters[parameter]
		weights := p.Weight
		if o.averaged {
			weights = p.Grad
		}
		tensors = append([]stateTensor{{"y", weights}}, tensors...)
	}
	return tensors
}

// metadata is the text of the numbers that the rule keeps, nil if it keeps none. It reads back to the same bits.
func (o *Optimizer) metadata() map[string]string {
	r, ok := o.rule.(scalarRule)
	if !ok {
		return nil
	}
	text := map[string]string{}
	for name, value := range r.scalars() {
		text[name] = strconv.FormatFloat(*value, 'g', -1, 64)
	}
	return text
}

// setMetadata is the inverse of metadata.
func (o *Optimizer) setMetadata(text map[string]string) error {
	r, ok := o.rule.(scalarRule)
	if !ok {
		return nil
	}
	for name, value := range r.scalars() {
		x, err := strconv.ParseFloat(text[name], 64)
		if err != nil || !finite(x) {
			return fmt.Errorf("its metadata has %q for %s, which is not a number", text[name], name)
		}
		*value = x
	}
	return nil
}

// optimizerBytes is the memory that the state of an optimizer takes for a model, scratch included, on so many threads; 0 as for [cpu.New].
func optimizerBytes(config OptimizerConfig, m moe.Config, threads int) int64 {
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	n := m.TotalParameters()
	switch config.Name {
	case Muon:
		return muonBytes(m, threads)
	case Lion:
		return 4 * n
	}
	return 8 * n
}
