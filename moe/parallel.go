package moe

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"mula/moe/safetensors"
	"mula/xpu/comm"
)

// A Dispatch is a method of sending the hidden states of tokens to the ranks that hold their
// experts, and the results back.
type Dispatch string

// The dispatch methods. Both compute the same bits.
const (
	// AllToAll sends a token's hidden state once to each rank that holds at least one of its
	// experts, and gets one row back from each of these ranks.
	AllToAll Dispatch = "alltoall"

	// AllGather sends all hidden states to all ranks, and sums the ranks' results with a
	// reduce-scatter. It moves more bytes, but a number that does not depend on the routing.
	AllGather Dispatch = "allgather"
)

// Dispatches lists the dispatch methods.
func Dispatches() []string { return []string{string(AllToAll), string(AllGather)} }

// Parallel describes the part of a model that a rank holds. Of n ranks in the group [comm.EP], rank
// r holds the experts [r·E/n, (r+1)·E/n) of its layers, and all their other weights. The ranks of
// [comm.TP] divide some of these; see [Slice]. Of the stages of the pipeline, the group [comm.PP],
// each holds the layers of [Config.StageGroups], the first stage also the embedding, the last stage
// the final norm and the head; see [Model.StageForward].
//
// All ranks of [comm.EP] call Forward and Backward of their models at the same time, each with its
// own batch, which may have no rows. Nothing else may use that group during these calls, not even
// work started by [BackwardOptions.Done]. If a call fails on one rank, the calls of the other ranks
// wait until their context ends or the failed rank closes its group. No rank can continue after
// that.
type Parallel struct {
	Mesh     *comm.Mesh
	Dispatch Dispatch // empty means AllToAll

	// VirtualStages is the number of groups of layers of each pipeline stage; 0 means 1.
	VirtualStages int

	// Sequence is the group of ranks that share each row of a batch; nil for none. They call
	// Forward and Backward with the same batches, at the same time. Each computes an equal range of
	// the inputs of every row, and its statistics are about these inputs. Nothing else may use the
	// group during these calls. Of several ranks of [comm.TP], all share rows.
	Sequence *comm.Comm

	// Heads has the ranks of Sequence with the same slices of matrices; nil means all ranks of
	// Sequence. They exchange heads of the attention, and keys and values.
	Heads *comm.Comm

	// UniformRouting balances the experts exactly, for benchmarks: choice j of token t is expert
	// (t·K+j) mod E, with the router's weight for it.
	UniformRouting bool
}

func (p Parallel) validate(c Config) error {
	if p.Dispatch != "" && p.Dispatch != AllToAll && p.Dispatch != AllGather {
		return fmt.Errorf("unknown dispatch %q; the choices are %q and %q", p.Dispatch, AllToAll, AllGather)
	}
	if p.Mesh == nil {
		return errors.New("a model needs a mesh; use comm.NewSingleMesh for one rank")
	}
	for _, misfit := range c.Misfits(p.Mesh.Shape) {
		return misfit
	}
	_, ranks := p.sequenceRanks()
	if tensor := p.Mesh.Size(comm.TP); ranks != p.Heads.Size()*tensor {
		return fmt.Errorf("%d ranks share each sequence, but %d share matrices, and %d exchange heads", ranks, tensor,
			p.Heads.Size())
	}
	if err := c.CheckVirtualStages(p.Mesh.Size(comm.PP), p.VirtualStages); err != nil {
		return fmt.Errorf("%d virtual stages: %w", p.VirtualStages, err)
	}
	if stages := p.Mesh.Size(comm.PP); stages > 1 && c.TieEmbeddings {
		return fmt.Errorf("%d stages cannot be used with tie_word_embeddings, because the first and the last stage "+
			"need the embedding; use 1 stage, or untie the embeddings", stages)
	}
	return nil
}

// A Misfit is an axis of a mesh whose size does not fit a model.
type Misfit struct {
	Axis    comm.Axes
	Problem string // as in "is 3, but the model has only 2 layers; lower the number of stages"
}

func (m *Misfit) Error() string { return m.Axis.String() + " " + m.Problem }

// Misfits lists the axes of a mesh whose sizes do not fit the model.
func (c Config) Misfits(shape comm.Shape) []*Misfit {
	var all []*Misfit
	misfit := func(axis comm.Axes, format string, args ...any) {
		all = append(all, &Misfit{axis, fmt.Sprintf("is %d, ", shape.Size(axis)) + fmt.Sprintf(format, args...)})
	}
	if stages := shape.Size(comm.PP); stages > 1 && c.Layers > 0 && stages > c.Layers {
		misfit(comm.PP, "but the model has only %d layers; lower the number of stages", c.Layers)
	}
	if problem := c.checkTensorRanks(shape.Size(comm.TP)); problem != "" {
		misfit(comm.TP, "%s", problem)
	}
	switch ranks := shape.Size(comm.EP); {
	case ranks > 1 && c.Dense():
		misfit(comm.EP, "but a dense model has no experts to divide; must be 1")
	case ranks > 1 && c.Experts > 0 && c.Experts%ranks != 0:
		var sizes []string
		for n := 1; n <= c.Experts; n++ {
			if c.Experts%n == 0 {
				sizes = append(sizes, fmt.Sprint(n))
			}
		}
		misfit(comm.EP, "which does not divide the %d experts of a layer; possible: %s", c.Experts,
			strings.Join(sizes, ", "))
	}
	return all
}

// CheckVirtualStages returns an error if the stages of a pipeline cannot have the given number of
// groups of layers. 0 means 1.
func (c Config) CheckVirtualStages(stages, virtual int) error {
	switch groups := stages * virtual; {
	case virtual <= 1:
		return nil
	case stages == 1:
		return errors.New("a pipeline of one stage has nothing to interleave; must be 1, or pp above 1")
	case c.Layers >= stages && groups > c.Layers: // more stages than layers are a misfit of pp
		return fmt.Errorf("the model has only %d layers for the %d groups of %d stages; at most %d", c.Layers, groups,
			stages, c.Layers/stages)
	}
	return nil
}

// Layers are consecutive layers [From, To).
type Layers struct{ From, To int }

// Count is the number of layers.
func (l Layers) Count() int { return l.To - l.From }

// StageGroups returns the groups of layers of a pipeline stage, in the order of the layers. A stage
// has virtual groups; 0 means 1. With G = stages · virtual groups, and L layers without the D
// layers of multi-token prediction, group g of the model starts with layer
//
//	min(g·(L+D)/G, L-(G-g))
//
// and is group g / stages of stage g mod stages. The groups have equally many layers, but the last
// one has all D layers of multi-token prediction, and each at least one of the L layers.
func (c Config) StageGroups(stage, stages, virtual int) []Layers {
	list := make([]Layers, max(1, virtual))
	n := stages * len(list)
	start := func(g int) int {
		if g == n {
			return c.AllLayers()
		}
		return max(g*c.Layers/n, min(g*c.AllLayers()/n, c.Layers-(n-g))) // max: more groups than layers are a misfit
	}
	for i := range list {
		g := i*stages + stage
		list[i] = Layers{start(g), start(g + 1)}
	}
	return list
}

// StageLayers returns the numbers of the layers of a pipeline stage, in ascending order.
func (c Config) StageLayers(stage, stages, virtual int) (layers []int) {
	for _, group := range c.StageGroups(stage, stages, virtual) {
		for l := group.From; l < group.To; l++ {
			layers = append(layers, l)
		}
	}
	return layers
}

// StageExpertLayers returns the layers with experts among [Config.StageLayers].
func (c Config) StageExpertLayers(stage, stages, virtual int) (layers []int) {
	for _, group := range c.StageGroups(stage, stages, virtual) {
		layers = append(layers, c.ExpertLayers(group.From, group.To)...)
	}
	return layers
}

// StageTensors returns the tensors of a pipeline stage: the tensors of its layers, for the first
// stage also the embedding, and for the last stage the tensors after the layers.
func (c Config) StageTensors(stage, stages, virtual int) []safetensors.Tensor {
	if stages == 1 {
		return c.Tensors()
	}
	var held []safetensors.Tensor
	groups := c.StageGroups(stage, stages, virtual)
	holds := func(layer int) bool {
		return slices.ContainsFunc(groups, func(l Layers) bool { return layer >= l.From && layer < l.To })
	}
	layers := false // the layers have started
	for _, t := range c.Tensors() {
		rest, ok := strings.CutPrefix(t.Name, "model.layers.")
		number, _, _ := strings.Cut(rest, ".")
		layer, err := strconv.Atoi(number)
		ok = ok && err == nil
		layers = layers || ok
		if ok && holds(layer) || !ok && !layers && stage == 0 || !ok && layers && stage == stages-1 {
			held = append(held, t)
		}
	}
	return held
}

// OfExpert reports whether a tensor of the complete model belongs to an expert; see
// [Parameter.Divided].
func OfExpert(name string) bool { return strings.Contains(name, ".experts.") }

// A stage is a group of layers that a rank holds, with the layers of multi-token prediction.
type stage struct {
	from, layers int
	first, last  bool // first holds the embedding; last holds the final norm and the head
}

// stages returns the groups of layers of this rank.
func (p Parallel) stages(c Config) []stage {
	return stagesOf(c, p.Mesh.OwnIndex(comm.PP), p.Mesh.Size(comm.PP), p.VirtualStages)
}

func stagesOf(c Config, number, stages, virtual int) []stage {
	groups := c.StageGroups(number, stages, virtual)
	list := make([]stage, len(groups))
	for i, l := range groups {
		list[i] = stage{l.From, l.Count(), i == 0 && number == 0, i == len(groups)-1 && number == stages-1}
	}
	return list
}

// expertLayers returns the layers with experts of this rank.
func (p Parallel) expertLayers(c Config) []int {
	return c.StageExpertLayers(p.Mesh.OwnIndex(comm.PP), p.Mesh.Size(comm.PP), p.VirtualStages)
}

// mostExpertLayers returns the number of layers with experts of the group that has the most.
func mostExpertLayers(c Config, groups []stage) (layers int) {
	for _, s := range groups {
		layers = max(layers, len(c.ExpertLayers(s.from, s.from+s.layers)))
	}
	return layers
}

// whole returns an error if other ranks hold parts of the model.
func (m *Model) whole(doing string) error {
	if n := m.parallel.Mesh.Size(comm.EP); n > 1 {
		return fmt.Errorf("%s: needs the complete model, but this rank holds 1/%d of the experts; open a checkpoint "+
			"instead", doing, n)
	}
	if _, n := m.parallel.tensorRanks(); n > 1 {
		return fmt.Errorf("%s: needs the complete model, but this rank holds 1/%d of some matrices; open a checkpoint "+
			"instead", doing, n)
	}
	if n := m.parallel.Mesh.Size(comm.PP); n > 1 {
		return fmt.Errorf("%s: needs the complete model, but this rank holds stage %d of %d; open a checkpoint "+
			"instead", doing, m.parallel.Mesh.OwnIndex(comm.PP), n)
	}
	return nil
}

// ExpectedCopies returns the number of other ranks that a token's hidden state is sent to in a
// layer: the mean over tokens if all sets of K experts are equally likely. With [AllToAll] it is
//
//	(n-1)·(1 - C(E-E/n, K)/C(E, K))
//
// and with [AllGather] n-1, for every choice of experts.
func (c Config) ExpectedCopies(d Dispatch, ranks int) float64 {
	none := 1.0 // probability that all K experts are on other ranks
	if d != AllGather && c.moe() {
		for j := range c.ExpertsPerToken {
			none *= max(0, float64(c.Experts-c.Experts/ranks-j)) / float64(c.Experts-j)
		}
	} else {
		none = 0
	}
	return float64(ranks-1) * (1 - none)
}

// UniformCopies returns how many of a rank's tokens are sent to rank `to` with
// [Parallel.UniformRouting].
func (c Config) UniformCopies(d Dispatch, ranks, to, tokens int) int64 {
	if d == AllGather {
		return int64(tokens)
	}
	copies, held := int64(0), c.Experts/ranks
	for t := range tokens {
		for j := range c.ExpertsPerToken {
			if (t*c.ExpertsPerToken+j)%c.Experts/held == to {
				copies++
				break
			}
		}
	}
	return copies
}

// DispatchBytes is the number of bytes that a rank sends to the other ranks that share the experts,
// as counted by [comm.Comm.Traffic].
type DispatchBytes struct {
	Pass    int64 // at the start of every pass
	Forward int64 // in the forward pass of a layer
	// when a layer's experts are recomputed: for all layers but the last one of the forward pass
	Recompute int64
	Backward  int64 // in the backward pass of a layer
}

// DispatchBytes returns the bytes that one of the ranks sends in a layer if it sends hidden states
// of its own tokens `sent` times and receives hidden states of other ranks' tokens `got` times. A
// rank of T tokens sends (n-1)·T hidden states with [AllGather], for every choice of experts, and
// about T·ExpectedCopies with [AllToAll]. A number has 4 bytes:
//
//	Forward    sent·(H + 2K) + got·H      hidden states, experts and weights; outputs
//	Recompute  sent·H                     hidden states
//	Backward   sent·H + got·(H + K)       gradients of outputs; of hidden states and weights
//
// The token counts are added to that: n-1 numbers for each Forward with AllToAll, for each Pass
// with AllGather.
func (c Config) DispatchBytes(d Dispatch, ranks int, sent, got int64) DispatchBytes {
	h, k, counts := int64(c.HiddenSize), int64(c.ExpertsPerToken), 4*int64(ranks-1)
	b := DispatchBytes{Forward: 4 * (sent*(h+2*k) + got*h), Recompute: 4 * sent * h, Backward: 4 * (sent*h + got*(h+k))}
	if d == AllGather {
		b.Pass = counts
	} else {
		b.Forward += counts
	}
	return b
}

// dispatchMemory returns the bytes of a dispatch's buffers for balanced routing of a rank's tokens.
// With [AllGather] it includes the buffers in which the group sums ([comm.SumMemory]).
func (c Config) dispatchMemory(p Pass, ownTokens int) int64 {
	n := p.Shape.Size(comm.EP)
	ranks, e, h, k, ffn := int64(n), int64(c.Experts), int64(c.HiddenSize), int64(c.ExpertsPerToken),
		int64(c.IntermediateSize)
	tokens := int64(ownTokens)
	rows, got := tokens*k, tokens*ranks
	layers := int64(mostExpertLayers(c, stagesOf(c, p.Stage, p.Shape.Size(comm.PP), p.VirtualStages)))
	if layers == 0 {
		return 0
	}
	layers *= int64(max(1, p.InFlight))
	kept := layers
	if p.Recompute.experts() {
		kept = 1
	}
	layer := 2 * rows // tokenOf, weight
	var numbers, sums int64
	if p.Dispatch == AllGather {
		sums = comm.SumMemory(n, int(tokens*(h+k)), 4)
	} else {
		if got = tokens; n > 1 {
			copies := c.ExpectedCopies(p.Dispatch, n) * float64(ranks) / float64(ranks-1)
			got = int64(math.Ceil(float64(tokens) * copies))
		}
		layer += tokens * ranks    // place
		numbers += got * (h + 3*k) // sentRows, sentChoices
	}
	layer += got * k                                       // rowOf
	numbers += got*(h+3*k) + rows*(2*h+2*ffn+1) + tokens*k // choices, back; buffers per row; tokenWeights
	numbers += layers*layer + kept*got*h
	gateUp := int64(p.Activations.Bytes()) * kept * rows * 2 * ffn
	return 4*numbers + gateUp + sums + layers*(4*(e/ranks)+8*2*(ranks+1))
}
