// Package estimate predicts the memory, compute, traffic, step time and scaling of a training run
// on many ranks. Numbers of bytes and elements are exact. Tests compare their formulas with the
// traffic of real runs. Times come from a simple model of a machine; every figure of a machine
// names its source. docs/reference/estimate.md has all formulas.
//
// The package does not import package train: it estimates models and layouts, not runs.
package estimate

import (
	"fmt"
	"slices"
	"strings"

	"mula/moe"
	"mula/train/pipeline"
	"mula/xpu"
	"mula/xpu/comm"
)

// Input describes a run to estimate.
type Input struct {
	Model     string        `json:"model"` // name
	Config    moe.Config    `json:"-"`
	Layout    Layout        `json:"layout"`
	Trainer   Trainer       `json:"trainer"`
	Precision xpu.Precision `json:"precision"` // of the operands of matrix products
	Machine   Machine       `json:"machine"`

	// Flat selects exchanges of one level, as if mula did not know the hosts: each rank exchanges
	// messages with every other rank. Only for mula.
	Flat bool `json:"flat"`
}

// Result is an estimate. Each of memory, compute and traffic is the maximum over the pipeline's
// stages.
type Result struct {
	Input

	Parameters int64   `json:"parameters"`
	Active     int64   `json:"active_parameters"`
	Stages     []Stage `json:"stages"`
	Stepped    float64 `json:"weights_updated"` // by a rank per step

	Memory Memory `json:"memory"`
	Fits   bool   `json:"fits"` // into the memory of a rank

	FLOPs    float64    `json:"flops"`          // of the model per step, mean over the ranks
	Computed float64    `json:"flops_computed"` // of the rank with the most work, including recomputation
	Traffic  []Exchange `json:"traffic"`        // of the stage with the most traffic of gradients and weights
	Received int64      `json:"votes_received"` // bytes of votes and norm, by the rank that receives most

	Checkpoint *Checkpoint `json:"checkpoint,omitempty"` // nil for other trainers, and without [Machine.FileSystem]

	Time            Time    `json:"seconds"`
	StepTime        float64 `json:"step_seconds"`
	TokensPerSecond float64 `json:"tokens_per_second"`
	MFU             float64 `json:"mfu"` // FLOPs of the model per second, as a fraction of the peak
}

// collectives returns the algorithm of the exchanges.
func (in *Input) collectives() collectives {
	switch {
	case !in.Trainer.Own:
		return assumed
	case in.Flat:
		return direct
	}
	return relayed
}

// Sent returns the number of bytes that a rank sends per step for the given purposes. Without
// purposes it returns the total.
func (r *Result) Sent(purposes ...Purpose) float64 { return sent(r.Traffic, purposes...) }

func sent(all []Exchange, purposes ...Purpose) float64 {
	sum := 0.0
	for _, e := range all {
		if len(purposes) == 0 || slices.Contains(purposes, e.Purpose) {
			sum += e.PerRank()
		}
	}
	return sum
}

// Compute estimates a run.
func Compute(in Input) (*Result, error) {
	r, err := computeSteps(in)
	if err == nil && in.Trainer.Own && in.Machine.FileSystem.Value > 0 {
		r.Checkpoint = r.checkpoint()
	}
	return r, err
}

// computeSteps is Compute without checkpoints.
func computeSteps(in Input) (*Result, error) {
	if err := in.Config.Validate(); err != nil {
		return nil, err
	}
	if in.Layout.SequenceLength > in.Config.MaxPositions {
		return nil, fmt.Errorf("sequences of %d tokens are longer than the model's max_position_embeddings, %d",
			in.Layout.SequenceLength, in.Config.MaxPositions)
	}
	if !slices.Contains(xpu.Precisions(), string(in.Precision)) {
		return nil, fmt.Errorf("precision is %q; allowed: %s", in.Precision, strings.Join(xpu.Precisions(), ", "))
	}
	if _, err := in.Machine.check(); err != nil {
		return nil, fmt.Errorf("machine %s: %w", in.Machine.Name, err)
	}
	stages, err := Stages(in.Config, in.Layout)
	if err != nil {
		return nil, err
	}
	onHosts := in.Layout
	if onHosts.LogitsTokens == 0 {
		onHosts.LogitsTokens = in.Machine.logitsTokens(in.Config.VocabSize)
	}
	if in.collectives() == relayed {
		onHosts.perHost = int(in.Machine.RanksPerNode.Value)
	}
	r := &Result{Input: in, Parameters: in.Config.TotalParameters(), Active: in.Config.ActiveParameters(),
		Stages: stages, Memory: RankMemory(in.Config, onHosts, in.Trainer)}
	c, l, m := in.Config, in.Layout, &in.Machine
	tokens := float64(l.tokens()) // of a data rank
	r.FLOPs = c.FLOPsPerToken(l.SequenceLength) * tokens / float64(l.Size(comm.PP))
	peak := m.peak(in.Precision != xpu.FP32)

	ofWorld := WorldVotes(c, l, in.Trainer)
	var slowest Time // of a micro-batch, in the stage that takes longest
	forVotes := 0.0
	for i, s := range stages {
		work, again := flops(c, l, i)
		all := work + again + countingFLOPs(c, l, in.Trainer, i)
		r.Computed = max(r.Computed, all*tokens)
		dispatch := dispatchTraffic(c, i, l, in.Trainer)
		sequences := sequenceTraffic(c, i, s, l, in.Trainer)
		tensor := tensorTraffic(c, i, l, in.Trainer)
		weights := OptimizerTraffic(s, l, in.Trainer)
		update := updateTraffic(c, i, l, in.Trainer)
		votes := slices.Concat(StageVotes(c, i, l, in.Trainer), ofWorld)
		forVotes = max(forVotes, r.seconds(votes))
		if in.Trainer.Own {
			for k := range weights {
				weights[k].Calls = buckets(c, l, i, s, weights[k].Group)
			}
		}
		if i == 0 || sent(weights) > r.Sent(ForGradients, ForWeights) {
			r.Traffic = slices.Concat(dispatch, sequences, tensor, PipelineTraffic(c, l, in.Trainer), weights, update,
				votes)
		}
		r.Stepped = max(r.Stepped, Stepped(s, l))

		micro := float64(l.MicroBatches())
		pass := Time{
			Compute:   all * float64(l.microBatch()) * float64(l.rowTokens()) / (peak * m.ComputeEfficiency.Value),
			Dispatch:  r.seconds(dispatch) / micro,
			Sequences: r.seconds(sequences) / micro,
			Tensor:    r.seconds(tensor) / micro,
			Stages:    r.seconds(PipelineTraffic(c, l, in.Trainer)) / micro,
		}
		if pass.Passes() > slowest.Passes() {
			slowest = pass
		}
		step := Time{Update: Stepped(s, l)*in.Trainer.update()/m.MemoryBandwidth.Value + r.seconds(update)}
		var gradients []bucketTimes
		for _, e := range weights {
			seconds := m.seconds(m.place(l, e.Group), e, in.collectives())
			if e.Purpose == ForGradients {
				step.Gradients += seconds
				gradients = append(gradients, s.bucketTimes(c, l, i, e, seconds))
			} else {
				step.Weights += seconds
			}
		}
		if in.Trainer.Own { // other trainers are not known to overlap
			logits := 0.0
			if s.Head {
				logits = 6 * float64(c.VocabSize) * float64(c.HiddenSize)
			}
			rate := pass.Compute / all
			step.Hidden = s.hidden(gradients, rate*logits*2/3, rate*(work*2/3+again))
			step.Gradients -= step.Hidden
		}
		if step.OptimizerStep() > r.Time.OptimizerStep() {
			r.Time = step
		}
	}
	micro := float64(l.MicroBatches())
	r.Time.Compute, r.Time.Dispatch, r.Time.Stages = micro*slowest.Compute, micro*slowest.Dispatch, micro*slowest.Stages
	r.Time.Sequences, r.Time.Tensor = micro*slowest.Sequences, micro*slowest.Tensor
	r.Time.Votes = forVotes
	r.Time.Waiting = m.waiting(r.Time.Compute, l.Ranks())
	r.Time.Bubble = pipeline.Idle(l.Size(comm.PP), l.VirtualStages, l.MicroBatches()) * slowest.Passes()
	r.StepTime = r.Time.Step()
	for rank := range l.Ranks() {
		r.Received = max(r.Received, votesReceived(c, onHosts, in.Trainer, rank))
	}
	if n := int64(l.Ranks()); in.Trainer.Own && !l.ReduceNorm { // each rank gathers the others' blocks
		r.Received += 8 * normBlocks(c, l) * (n - 1) / n
	}
	r.Fits = float64(r.Memory.Total()) <= m.Memory.Value
	r.TokensPerSecond = float64(l.BatchSize) * float64(l.SequenceLength) / r.StepTime
	r.MFU = r.FLOPs / r.StepTime / peak
	return r, nil
}

// buckets returns the number of calls in which mula exchanges the gradients or weights of stage i
// in a group. Each of these is a bucket: the experts of a layer, the rest of a layer, the
// embedding, and the final norm with the head.
func buckets(c moe.Config, l Layout, i int, s Stage, g comm.Axes) int {
	replicated, divided, sliced := s.Layers, s.ExpertLayers, 0
	if l.Size(comm.TP) > 1 {
		sliced = s.Layers
	}
	if i == 0 && (l.Size(comm.PP) > 1 || !c.TieEmbeddings) {
		replicated++
	}
	if s.Head {
		replicated++
	}
	within, across := l.nested()
	switch so := l.Optimizer == SO; {
	case so && g == within:
		return replicated
	case so && g == comm.Replicas && g == across:
		return replicated + divided
	case so && g == across:
		return replicated + sliced
	case g == comm.Replicas:
		return divided
	case g == comm.Slices, so && g == comm.EP:
		return sliced
	}
	return replicated
}

// seconds returns the total time of consecutive exchanges.
func (r *Result) seconds(exchanges []Exchange) float64 {
	sum := 0.0
	for _, e := range exchanges {
		place := r.Machine.place(r.Layout, e.Group)
		if e.Purpose == ForSequences { // consecutive ranks of the group
			place.inNode = min(e.Ranks, place.inNode)
			place.nodes = (e.Ranks + place.inNode - 1) / place.inNode
		}
		sum += r.Machine.seconds(place, e, r.collectives())
	}
	return sum
}

// A Sensitivity is the effect of an assumed figure on the result.
type Sensitivity struct {
	Figure string    `json:"figure"`
	Value  float64   `json:"value"`
	Why    string    `json:"why"`
	Less   Deviation `json:"20_percent_less"`
	More   Deviation `json:"20_percent_more"`
}

// A Deviation is the result for another value of an assumed figure.
type Deviation struct {
	StepTime   float64 `json:"step_seconds"`
	Efficiency float64 `json:"efficiency,omitempty"` // at the last point of [Scaling]
}

// Sensitivities returns, for every assumed figure of the machine, the step time if the figure is
// 20 % lower or higher. If to is not 0, it also returns the efficiency at the last point of
// [Scaling]. Efficiencies of the machine are limited to 1.
func Sensitivities(in Input, from, to int, strong bool) ([]Sensitivity, error) {
	var out []Sensitivity
	names, figures := in.Machine.fields()
	for i, f := range figures {
		if f.Kind != Assumed || f == &in.Machine.FileSystem { // checkpoints are not in the time of a step
			continue
		}
		s := Sensitivity{Figure: names[i], Value: f.Value, Why: f.Source}
		for _, change := range []struct {
			by float64
			to *Deviation
		}{{0.8, &s.Less}, {1.2, &s.More}} {
			changed := in // a copy, with the machine
			_, figures := changed.Machine.fields()
			figures[i].Value *= change.by
			if _, err := changed.Machine.check(); err != nil {
				figures[i].Value = 1
			}
			r, err := computeSteps(changed)
			if err != nil {
				return nil, err
			}
			change.to.StepTime = r.StepTime
			if to == 0 {
				continue
			}
			points, err := Scaling(changed, from, to, strong)
			if err != nil {
				return nil, err
			}
			change.to.Efficiency = points[len(points)-1].Efficiency
		}
		out = append(out, s)
	}
	return out, nil
}
