// Package optimizer updates the weights of a model. It has the update rules, their settings, the
// schedules of the learning rate, groups of parameters, and the division of the update among ranks.
package optimizer

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"mula/moe"
	"mula/train/collective"
	"mula/train/estimate"
	"mula/xpu"
)

// blockSize is the number of elements of a block, the unit of updates and of sums of squares. The
// blocks of a tensor start at its first element, so the results do not depend on the number of
// threads.
const blockSize = xpu.BlockSize

type block struct {
	tensor     int
	begin, end int
}

// stateChunk is the largest number of elements in a chunk of device memory for the state of several
// parameters.
const stateChunk = 1 << 26

// An Optimizer updates the weights of a model from their gradients, in float32, block by block.
// Each NAME.go has one update rule. All rules run on the device, and their state is in device
// memory, like weights and gradients. Results do not depend on the number of threads.
type Optimizer struct {
	Updates int64 // updates done, t

	spec       *spec
	rule       rule
	device     xpu.Device
	parameters []*moe.Parameter
	sharding   *Sharding
	// float32 weights of each parameter in the range that this rank owns: the model's weights, or
	// masters of bfloat16 weights
	weights   []xpu.Tensor
	state     [][]StateTensor // state of each parameter in the range that this rank owns
	memory    []xpu.Tensor    // device memory of this optimizer
	group     []int           // index in settings of each parameter
	settings  []GroupSetting
	blocks    []block      // blocks that this rank owns; other slices per block have the same order
	gradients []xpu.Tensor // gradients that this rank owns, by parameter
	sums      []float64
	averaged  bool // see Average

	updates []groupUpdate  // of parameters whose elements are updated separately, by group
	tensors []tensorUpdate // of parameters that are updated as complete tensors

	// For all blocks of the whole model, in the order of its tensors.
	first []int     // number of the first block of each tensor, and last the number of all blocks
	all   []float64 // summands over all blocks

	measuring, measured bool
	before, change      []float64 // sums of squares for each block: of the weights, and of their change
	ratios              []ratio   // for each tensor of the whole model; not with ReducesSums
	// with ReducesSums: squares of the norms of the update and of the weights, for each of
	// classes
	groupUpdates, groupWeights []float64

	averaging [2][]float32 // weights and first state of the parameter that Average averages

	averageOne func(i int) // created once, so that a step does not allocate
}

// A groupUpdate is the update of parameters of a group, each element separately.
type groupUpdate struct {
	group   int
	moments []xpu.Moments
	blocks  []int        // numbers of its blocks
	results [2][]float64 // host results: before and change of these blocks
}

// A tensorUpdate is the update of a parameter as a complete tensor, with the blocks [first, end).
type tensorUpdate struct {
	parameter  int
	moments    []xpu.Moments // one
	first, end int
}

// A StateTensor is a tensor of an optimizer's state for one parameter, with a value for each
// element.
type StateTensor struct {
	Name   string     // in optimizer.safetensors, after the parameter's name and a dot
	Values xpu.Tensor // of one dimension
}

type ratio struct{ update, weight float64 }

// An spec describes an optimizer. Each file NAME.go registers one.
type spec struct {
	defaults Config // the fields that the optimizer uses, with the defaults of the reference implementation

	// state names the state tensors of a parameter as the reference implementation does. They are
	// float32, or with [Config.Moments] bfloat16.
	state func(name string, shape []int) []string

	// whole reports whether an update of a parameter needs the complete tensor, which ranks cannot
	// divide by elements; nil: none does. The rule is then a [tensorRule], and a [elementRule] if
	// other parameters exist.
	whole func(name string, shape []int) bool

	slices estimate.SliceUpdate // exchanges for the update of slices

	averages bool // the rule is an [averagingRule]

	// scratch returns the bytes of memory for intermediate results; nil: none
	scratch func(m moe.Config, threads, tp int) (device, host int64)

	check func(c Config, s ScheduleConfig) []error // finds settings that the optimizer does not support; nil: none
	rule  func(config Config, targets int64, o *Optimizer) (rule, error)
}

func (s *spec) needsWhole(name string, shape []int) bool {
	return s.whole != nil && s.whole(name, shape)
}

var specs = map[Name]*spec{}

// register adds an optimizer. The result lets a declaration call it.
func register(name Name, s spec) struct{} {
	specs[name] = &s
	return struct{}{}
}

// Names returns the sorted names of the optimizers.
func Names() []string {
	var names []string
	for name := range specs {
		names = append(names, string(name))
	}
	slices.Sort(names)
	return names
}

// defaults returns the default of every field that an optimizer uses.
func defaults() map[Name]Config {
	defaults := make(map[Name]Config)
	for name, s := range specs {
		defaults[name] = s.defaults
	}
	return defaults
}

// A rule is the update rule of an optimizer, which its methods get as an argument.
type rule interface {
	// begin starts update o.Updates, counted from 1. It may change state and gradients of
	// parameters that are updated as complete tensors.
	begin(ctx context.Context, o *Optimizer, learningRate, gradScale float64) error
}

// An elementRule updates some parameters, each element separately.
type elementRule interface {
	rule

	// update returns the current update of a group.
	update(s GroupSetting) xpu.Update
}

// A tensorRule updates some parameters as complete tensors: begin replaces their gradients with the
// directions of the update.
type tensorRule interface {
	rule

	// move returns the current move of a parameter along its direction.
	move(o *Optimizer, parameter int) xpu.Move
}

// A scalarRule also has scalar state, which is stored in the metadata of optimizer.safetensors.
type scalarRule interface {
	scalars() map[string]*float64
}

// An averagingRule evaluates with other weights than the training weights.
type averagingRule interface {
	// average replaces weights by the weights for evaluation. state is the same range of the first
	// state tensor.
	average(o *Optimizer, weights, state []float32)
}

// New returns the optimizer of a resolved configuration, in its initial state, for
// parameters in device memory. targets is the number of targets of a full step. It fails if the
// device has too little memory for the optimizer's state.
func New(config Config, targets int64, device xpu.Device, parameters []*moe.Parameter) (*Optimizer,
	error) {
	sizes := make([]int, len(parameters))
	for i, p := range parameters {
		sizes[i] = p.Weight.Elements()
	}
	o, err := newOptimizer(config, targets, device, parameters, newSingleSharding(device, parameters))
	if err != nil {
		return nil, err
	}
	o.countBlocks(sizes)
	return o, nil
}

func newOptimizer(config Config, targets int64, device xpu.Device, parameters []*moe.Parameter,
	s *Sharding) (*Optimizer, error) {
	o := &Optimizer{device: device, parameters: parameters, sharding: s}
	o.divide(config)
	o.spec = specs[config.Name]
	if o.spec == nil {
		return nil, fmt.Errorf("unknown optimizer %q; allowed: %s", config.Name, strings.Join(Names(), ", "))
	}
	var err error
	o.rule, err = o.spec.rule(config, targets, o)
	if err == nil {
		err = o.makeState(stateChunk, config.moments())
	}
	if err != nil {
		o.Free()
		return nil, fmt.Errorf("memory for the optimizer: %w", err)
	}
	o.sums = make([]float64, len(o.blocks))
	o.before, o.change = make([]float64, len(o.blocks)), make([]float64, len(o.blocks))
	o.averageOne = o.averageBlock
	return o, nil
}

// divide assigns the parameters to groups.
func (o *Optimizer) divide(config Config) {
	o.settings, o.group = config.Settings(), make([]int, len(o.parameters))
	for i, p := range o.parameters {
		o.group[i] = config.GroupOf(p.Name, p.Shape)
	}
}

// makeState allocates the state of all parameters and lists their updates. It also allocates the
// masters of bfloat16 weights. moments is the type of the state.
// Memory is allocated in chunks of at most most elements; a larger parameter has its own chunk.
func (o *Optimizer) makeState(most int, moments xpu.DType) error {
	// elements of each state tensor of a parameter, aligned to cache lines
	each := func(i int) int {
		low, high, _ := o.Owned(i)
		return (high - low + 15) &^ 15
	}
	room := func(i int, dtype xpu.DType) int {
		p, tensors := o.parameters[i], 0
		if dtype == moments {
			tensors = len(o.spec.state(p.Name, p.Shape))
		}
		if dtype == xpu.Float32 && hasMaster(p) {
			tensors++
		}
		return tensors * each(i)
	}
	updates := make([]groupUpdate, len(o.settings))
	// device memory for the next parameters
	chunks := map[xpu.DType]xpu.Tensor{xpu.Float32: xpu.Of(nil, 0), xpu.BFloat16: xpu.OfHalves(nil, 0)}
	for i, p := range o.parameters {
		low, high, _ := o.Owned(i)
		for _, dtype := range []xpu.DType{xpu.Float32, xpu.BFloat16} {
			n := room(i, dtype)
			if n == 0 || chunks[dtype].Elements() > 0 {
				continue
			}
			for next := i + 1; next < len(o.parameters) && n+room(next, dtype) <= most; next++ {
				n += room(next, dtype)
			}
			var err error
			if chunks[dtype], err = o.newTensor(dtype, n); err != nil {
				return err
			}
		}
		next := func(dtype xpu.DType) xpu.Tensor {
			chunk := chunks[dtype]
			chunks[dtype] = chunk.Rows(each(i), chunk.Elements())
			return chunk.Rows(0, high-low)
		}
		weight, grad := o.model(i), p.Grad.Flat().Rows(low, high)
		if hasMaster(p) {
			weight = next(xpu.Float32)
		}
		o.weights = append(o.weights, weight)
		var tensors []StateTensor
		for _, name := range o.spec.state(p.Name, p.Shape) {
			tensors = append(tensors, StateTensor{name, next(moments)})
		}
		o.state = append(o.state, tensors)
		if low == high {
			continue
		}
		o.gradients = append(o.gradients, grad)
		m := xpu.Moments{Weight: weight, Grad: grad, M: tensors[0].Values}
		if len(tensors) > 1 {
			m.V = tensors[1].Values
		}
		first := len(o.blocks)
		for begin := low; begin < high; begin += blockSize {
			o.blocks = append(o.blocks, block{i, begin, min(begin+blockSize, high)})
		}
		if o.spec.needsWhole(p.Name, p.Shape) {
			o.tensors = append(o.tensors, tensorUpdate{i, []xpu.Moments{m}, first, len(o.blocks)})
			continue
		}
		update := &updates[o.group[i]]
		update.moments = append(update.moments, m)
		for b := first; b < len(o.blocks); b++ {
			update.blocks = append(update.blocks, b)
		}
	}
	for group, u := range updates {
		if n := len(u.blocks); n > 0 {
			u.group, u.results = group, [2][]float64{make([]float64, n), make([]float64, n)}
			o.updates = append(o.updates, u)
		}
	}
	return nil
}

// model returns the weights of the model that this rank owns, of a parameter.
func (o *Optimizer) model(parameter int) xpu.Tensor {
	begin, end, _ := o.Owned(parameter)
	return o.parameters[parameter].Weight.Flat().Rows(begin, end)
}

// hasMaster reports whether the optimizer keeps float32 weights of a parameter.
func hasMaster(p *moe.Parameter) bool { return p.Weight.DType() == xpu.BFloat16 }

// ReadWeights sets the masters of bfloat16 weights to the model's weights, which the caller has
// set.
func (o *Optimizer) ReadWeights() {
	for i, p := range o.parameters {
		if hasMaster(p) {
			o.device.Copy(o.weights[i], o.model(i))
		}
	}
}

// WriteWeights sets the model's weights to the rounded masters of their owners. All ranks call it.
func (o *Optimizer) WriteWeights(ctx context.Context) error {
	for i, p := range o.parameters {
		if hasMaster(p) {
			o.device.Copy(o.model(i), o.weights[i])
		}
	}
	return o.sharding.gatherWeights(ctx)
}

// newTensor allocates device memory for the life of the optimizer.
func (o *Optimizer) newTensor(dtype xpu.DType, n int) (xpu.Tensor, error) {
	x, err := o.device.New(dtype, n)
	if err == nil {
		o.memory = append(o.memory, x)
	}
	return x, err
}

// Free releases the optimizer's device memory. The optimizer is unusable afterwards. The receiver
// may be nil.
func (o *Optimizer) Free() {
	if o == nil {
		return
	}
	for _, x := range o.memory {
		o.device.Release(x)
	}
	o.memory = nil
}

// NewSharded is [NewOptimizer] for one of several ranks, which all call it. sizes has the
// number of elements of each tensor of the whole model.
func NewSharded(ctx context.Context, config Config, targets int64, device xpu.Device,
	parameters []*moe.Parameter, sizes []int, s *Sharding) (*Optimizer, error) {
	o, err := newOptimizer(config, targets, device, parameters, s)
	if err == nil {
		err = s.allocate()
		o.memory = append(o.memory, s.half)
	}
	if err := collective.Agree(ctx, s.mesh.World(), err); err != nil {
		o.Free()
		return nil, err
	}
	o.countBlocks(sizes)
	if s.ReducesSums {
		return o, nil
	}
	return o, s.countBlocks(ctx, o.blocks, parameters, o.first)
}

// countBlocks numbers the blocks of the whole model.
func (o *Optimizer) countBlocks(sizes []int) {
	o.first = make([]int, len(sizes)+1)
	for i, n := range sizes {
		o.first[i+1] = o.first[i] + blocksOf(n)
		if slices := o.sharding.slicesOf(i); slices > 0 {
			o.first[i+1] = o.first[i] + slices*blocksOf(n/slices)
		}
	}
	o.ratios = make([]ratio, len(sizes))
	if o.sharding.mesh.Ranks() > 1 {
		o.all = make([]float64, o.first[len(sizes)])
	}
}

// Parameters returns the parameters of this rank.
func (o *Optimizer) Parameters() []*moe.Parameter { return o.parameters }

// StateNames returns the names of the tensors that a checkpoint has for a parameter, besides its
// weights.
func (o *Optimizer) StateNames(name string, shape []int) []string {
	names := o.spec.state(name, shape)
	if own := o.weightsName(); own != "" {
		names = append([]string{own}, names...)
	}
	return names
}

// weightsName returns the name of the weights in optimizer.safetensors, or "" if the saved model
// has them.
func (o *Optimizer) weightsName() string {
	switch {
	case o.spec.averages:
		return TrainedWeights
	case slices.ContainsFunc(o.parameters, hasMaster):
		return Master
	}
	return ""
}

// Owned returns the range of a parameter that this rank updates, which may be empty. parameter is
// the number among this rank's parameters. writer is true on one of the ranks that own the same
// range.
func (o *Optimizer) Owned(parameter int) (begin, end int, writer bool) {
	r := o.sharding.owned[parameter]
	return r.begin, r.end, r.writer
}

// everywhere gathers a number for each block of the whole model on all ranks, in the order of the
// tensors. own has the numbers of this rank's blocks. The result is valid until the next call.
func (o *Optimizer) everywhere(ctx context.Context, own []float64) ([]float64, error) {
	if o.sharding.mesh.Ranks() == 1 {
		return own, nil
	}
	return o.all, o.sharding.gatherSums(ctx, own, o.all)
}

// GradientNorm returns the Euclidean norm of the gradients of the whole model. Squares are summed
// in float64 within each block, then over the blocks in the order of the model's tensors, or
// exactly with [Sharding.ReducesSums], so all ranks get the same bits. The norm is non-finite if
// and only if some gradient is: the squares of finite float32 values cannot overflow a float64.
func (o *Optimizer) GradientNorm(ctx context.Context) (float64, error) {
	o.device.SumSquares(o.gradients, o.sums)
	if err := o.device.Wait(ctx); err != nil {
		return 0, err
	}
	if o.sharding.ReducesSums {
		sums, err := o.sharding.reduceSums(ctx, o.blocks, 1, func(int) int { return 0 }, o.sums)
		if err != nil {
			return 0, err
		}
		return math.Sqrt(sums[0]), nil
	}
	sums, err := o.everywhere(ctx, o.sums)
	if err != nil {
		return 0, err
	}
	var sum float64
	for _, s := range sums {
		sum += s
	}
	return math.Sqrt(sum), nil
}

// ClipFactor returns the factor that clips gradients of the given norm to limit: limit/(norm +
// 1e-6), at most 1, as in torch.nn.utils.clip_grad_norm_. A limit of 0 means no clipping.
func ClipFactor(norm, limit float64) float64 {
	if limit == 0 {
		return 1
	}
	return min(1, limit/(norm+1e-6))
}

// Step multiplies the gradients by gradScale, which is below 1 after clipping, and updates all
// weights. Each weight is updated by the ranks that own it and sent to the others. Of bfloat16
// weights, the owner updates a float32 master, which it rounds once. Step leaves the gradients
// undefined.
func (o *Optimizer) Step(ctx context.Context, learningRate, gradScale float64) error {
	if err := o.update(ctx, learningRate, gradScale); err != nil {
		return err
	}
	if err := o.WriteWeights(ctx); err != nil {
		return err
	}
	o.measured = o.measuring
	if !o.measured {
		return nil
	}
	if n := len(classes); o.sharding.ReducesSums {
		sums, err := o.sharding.reduceSums(ctx, o.blocks, n, func(parameter int) int {
			return slices.Index(classes, TensorGroup(o.parameters[parameter].Name))
		}, o.change, o.before)
		if err == nil {
			o.groupUpdates, o.groupWeights = sums[:n], sums[n:]
		}
		return err
	}
	clear(o.ratios)
	sums, err := o.everywhere(ctx, o.change)
	if err != nil {
		return err
	}
	for i := range o.ratios {
		for _, s := range sums[o.first[i]:o.first[i+1]] {
			o.ratios[i].update += s
		}
	}
	if sums, err = o.everywhere(ctx, o.before); err != nil {
		return err
	}
	for i := range o.ratios {
		for _, s := range sums[o.first[i]:o.first[i+1]] {
			o.ratios[i].weight += s
		}
	}
	return nil
}

// update updates the weights that this rank owns.
func (o *Optimizer) update(ctx context.Context, learningRate, gradScale float64) error {
	o.Updates++
	if err := o.rule.begin(ctx, o, learningRate, gradScale); err != nil {
		return err
	}
	for _, u := range o.tensors {
		var before, change []float64
		if o.measuring {
			before, change = o.before[u.first:u.end], o.change[u.first:u.end]
		}
		o.device.Update(o.rule.(tensorRule).move(o, u.parameter).Update(), u.moments, before, change)
	}
	for i := range o.updates {
		u := &o.updates[i]
		update := o.rule.(elementRule).update(o.settings[u.group])
		if o.measuring {
			o.device.Update(update, u.moments, u.results[0], u.results[1])
		} else {
			o.device.Update(update, u.moments, nil, nil)
		}
	}
	if !o.measuring {
		return nil
	}
	if err := o.device.Wait(ctx); err != nil {
		return err
	}
	for _, u := range o.updates {
		for i, b := range u.blocks {
			o.before[b], o.change[b] = u.results[0][i], u.results[1][i]
		}
	}
	return nil
}

// Measure sets whether the following steps measure the change of each parameter. Measuring reads
// the weights twice and changes no result.
func (o *Optimizer) Measure(on bool) { o.measuring = on }

// Ratio returns two Euclidean norms for a tensor, given by its number in the whole model: the norm
// of the last step's change, weight decay included, and the norm of the weights before it. Both are
// 0 if the step was not measured, or with [Sharding.ReducesSums].
func (o *Optimizer) Ratio(tensor int) (update, weight float64) {
	if !o.measured {
		return 0, 0
	}
	r := o.ratios[tensor]
	return math.Sqrt(r.update), math.Sqrt(r.weight)
}

// CurvatureDue reports whether [Optimizer.UpdateCurvature] must be called after the last update:
// with SophiaG after every hessian_every-th update.
func (o *Optimizer) CurvatureDue() bool {
	s, ok := o.rule.(*sophiaG)
	return ok && o.Updates%s.every == 0
}

// UpdateCurvature updates the estimate of the Hessian. The gradients are of the mean cross entropy
// of targets drawn from the model's own distribution. targets is their number, and the gradients
// are multiplied by gradScale. See [SophiaG].
func (o *Optimizer) UpdateCurvature(gradScale float64, targets int64) {
	o.rule.(*sophiaG).updateHessian(o, gradScale, targets)
}

// Average(true) replaces the weights by the averaged weights, for evaluation and checkpoints.
// Average(false) restores the training weights, bit for bit. Only [ScheduleFreeAdamW] has averaged
// weights. Between the two calls the gradients hold the training weights. Only Average(true) can
// fail.
func (o *Optimizer) Average(ctx context.Context, on bool) error {
	if !o.spec.averages || on == o.averaged {
		return nil
	}
	o.averaged = on
	if !on {
		for _, p := range o.parameters {
			o.device.Copy(p.Weight, p.Grad)
		}
		return nil
	}
	for _, p := range o.parameters { // also parameters of other owners
		o.device.Copy(p.Grad, p.Weight)
	}
	var buffers [2][]float32
	for i := range o.parameters {
		weight := o.model(i)
		if weight.Elements() == 0 {
			continue
		}
		o.averaging[0] = xpu.HostBuffer(weight, &buffers[0])
		err := o.device.Read(ctx, o.averaging[0], o.weights[i])
		if err == nil {
			o.averaging[1], err = xpu.Numbers(ctx, o.device, o.state[i][0].Values, &buffers[1])
		}
		if err != nil {
			return err
		}
		o.device.Parallel((weight.Elements()+blockSize-1)/blockSize, o.averageOne)
		xpu.SetNumbers(o.device, weight, o.averaging[0])
	}
	o.averaging = [2][]float32{}
	return o.sharding.gatherWeights(ctx)
}

// averageBlock averages the i-th block of a parameter.
func (o *Optimizer) averageBlock(i int) {
	weights, state := o.averaging[0], o.averaging[1]
	begin, end := i*blockSize, min((i+1)*blockSize, len(weights))
	o.rule.(averagingRule).average(o, weights[begin:end], state[begin:end])
}

// Saved lists the tensors of optimizer.safetensors for the range of a parameter that this rank
// owns: its state, and the float32 training weights if the saved model does not have them.
func (o *Optimizer) Saved(parameter int) []StateTensor {
	tensors, name := o.state[parameter], o.weightsName()
	if name == "" {
		return tensors
	}
	weights := o.weights[parameter]
	if p := o.parameters[parameter]; o.averaged && !hasMaster(p) {
		begin, end, _ := o.Owned(parameter)
		weights = p.Grad.Flat().Rows(begin, end)
	}
	return append([]StateTensor{{name, weights}}, tensors...)
}

// Metadata returns the rule's scalars as text, or nil without scalars. Reading the text restores
// the same bits.
func (o *Optimizer) Metadata() map[string]string {
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

// SetMetadata is the inverse of metadata.
func (o *Optimizer) SetMetadata(text map[string]string) error {
	r, ok := o.rule.(scalarRule)
	if !ok {
		return nil
	}
	for name, value := range r.scalars() {
		x, err := strconv.ParseFloat(text[name], 64)
		if err != nil || !isFinite(x) {
			return fmt.Errorf("metadata %q of %s is not a number", text[name], name)
		}
		*value = x
	}
	return nil
}

// TrainedWeights is the tensor of the optimizer's state with the training weights, if they differ
// from the saved model.
const TrainedWeights = "y"

// Master is the tensor of the optimizer's state with the float32 masters of bfloat16 weights, if
// there is no TrainedWeights.
const Master = "master"

func isFinite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
