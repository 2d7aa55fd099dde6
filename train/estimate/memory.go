package estimate

import (
	"slices"

	"mula/moe"
	"mula/train/pipeline"
	"mula/xpu"
	"mula/xpu/comm"
)

// Memory is the memory of a rank, in bytes, without the scratch memory of its device.
type Memory struct {
	Weights   int64 `json:"weights"`
	Gradients int64 `json:"gradients"`
	Optimizer int64 `json:"optimizer"` // state of the weights that the rank owns
	// activations that the backward pass needs, and scratch memory for a layer and for logits
	Activations int64 `json:"activations"`
	Exchange    int64 `json:"exchange"`   // communication buffers
	Checkpoint  int64 `json:"checkpoint"` // copy of weights and state that is written in the background
	// files of two snapshots in the memory of the rank's host, while the newer one is written
	Snapshots int64 `json:"snapshots,omitempty"`

	HostOnly int64 `json:"-"` // the part that a device with its own memory does not hold
}

// Total is the sum of all fields.
func (m Memory) Total() int64 {
	return m.Weights + m.Gradients + m.Optimizer + m.Activations + m.Exchange + m.Checkpoint + m.Snapshots
}

// OnDevice is the part that a device with its own memory holds.
func (m Memory) OnDevice() int64 { return m.Total() - m.HostOnly }

// Buffers is the memory of activations and communication.
func (m Memory) Buffers() int64 { return m.Activations + m.Exchange }

// Model is the memory of weights, gradients and optimizer state.
func (m Memory) Model() int64 { return m.Weights + m.Gradients + m.Optimizer }

// RankMemory returns the memory of a rank of the stage that needs the most.
func RankMemory(c moe.Config, l Layout, t Trainer) Memory {
	var most Memory
	for i := range l.Size(comm.PP) {
		if m := StageMemory(c, l, t, i); m.Total() > most.Total() {
			most = m
		}
	}
	return most
}

// StageMemory returns the memory of a rank of stage i, the mean over the ranks of the stage: the
// shards of the optimizer's state differ by a few blocks.
func StageMemory(c moe.Config, l Layout, t Trainer, i int) Memory {
	s := stages(c, l)[i]
	n := s.Elements()
	m := Memory{
		Weights: n * int64(t.Weights), Gradients: n * int64(t.accumulated()),
	}
	m.Optimizer = stateBytes(c, l, t, s, i)
	tokens := int64(l.microBatch()) * int64(l.rowTokens())
	hidden := tokens * int64(c.HiddenSize) * int64(t.Activations)
	// micro-batches, of all groups of layers, between their forward and backward pass
	inFlight := pipeline.InFlight(i, l.Size(comm.PP), l.VirtualStages, l.MicroBatches())
	if t.Own { // counted exactly
		sums := SumBytes(c, l, t, i)
		if l.Background {
			m.Checkpoint = over(savedBytes(c, t), int64(l.Ranks()))
		}
		if n := int64(l.SnapshotCopies); n > 0 {
			m.Snapshots = 2 * n * over(snapshotBytes(c, t), int64(l.Ranks()))
		}
		m.Exchange = sums + t.HostScratch + stageBytes(c, l, t, i) + roundedBytes(c, l, t, s)
		m.HostOnly = sums + t.HostScratch + m.Checkpoint + m.Snapshots
		pass := c.Memory(moe.Pass{Rows: l.microBatch(), SequenceLength: l.SequenceLength,
			SequenceRanks: l.sequenceRanks(), Recompute: l.Recompute, Activations: l.Activations,
			Documents: l.Documents, Jitter: true, LogitsTokens: l.LogitsTokens, Shape: l.Shape,
			Dispatch: l.Dispatch, Stage: i, VirtualStages: l.VirtualStages, InFlight: inFlight})
		m.Activations, m.HostOnly = pass.Buffers, m.HostOnly+pass.OnHost
		return m
	}
	saved, scratch := activations(c, l, i)
	rotation := int64(l.SequenceLength) * int64(c.HeadDim()) // for each position
	m.Activations = int64(t.Activations) * (int64(inFlight)*tokens*saved + tokens*scratch + rotation)
	if s.Head {
		m.Activations += int64(t.Activations) * min(tokens, int64(moe.LogitsTokens(c.VocabSize, 0,
			0))) * int64(c.VocabSize)
	}
	switch {
	case l.Size(comm.EP) > 1 && l.Dispatch == moe.AllGather:
		m.Exchange += 2 * int64(l.Size(comm.EP)) * hidden // tokens of all ranks, and this rank's results for them
	case l.Size(comm.EP) > 1:
		m.Exchange += int64(2 * float64(hidden) * c.ExpectedCopies(l.Dispatch, l.Size(comm.EP))) // sent, and received
	}
	return m
}

// stateBytes returns the memory of the optimizer's state and scratch on a rank of stage i. Ranks
// may differ by a few blocks.
func stateBytes(c moe.Config, l Layout, t Trainer, s Stage, i int) int64 {
	if t.TensorState == nil {
		return t.Scratch + int64(float64(t.State)*Stepped(s, l)+0.5)
	}
	tp := l.Size(comm.TP)
	var replicated, experts, sliced int64
	for _, tensor := range c.StageTensors(i, l.Size(comm.PP), l.VirtualStages) {
		if !moe.Trained(tensor.Name) {
			continue
		}
		perWeight := t.TensorState(tensor.Name, tensor.Shape)
		if t.Master {
			perWeight += masterBytes
		}
		switch bytes := tensor.Elements() * int64(perWeight); {
		case moe.OfExpert(tensor.Name):
			experts += bytes
		case tp > 1 && c.Sliced(tensor.Name) >= 0:
			sliced += bytes
		default:
			replicated += bytes
		}
	}
	// ranks that share the update of an expert weight, of a replicated weight, and of a slice
	replicas, data, slices := 1, 1, 1
	switch l.Optimizer {
	case SO:
		replicas, data, slices = l.Size(comm.Replicas), l.Size(comm.ExpertDP), l.Size(comm.ExpertDP)
	case EPSO:
		replicas, data, slices = l.Size(comm.Replicas), l.Size(comm.Data), l.Size(comm.Slices)
	}
	return t.Scratch + over(replicated, int64(data)) + over(over(experts, int64(l.Size(comm.EP))), int64(replicas)) +
		over(over(sliced, int64(tp)), int64(slices))
}

// savedBytes returns the size of a model's weights and their state in a checkpoint, as float32.
func savedBytes(c moe.Config, t Trainer) (bytes int64) {
	for _, tensor := range c.Tensors() {
		perWeight := 4 + t.State
		if !moe.Trained(tensor.Name) {
			perWeight = 4
		} else if t.TensorState != nil {
			state := t.TensorState(tensor.Name, tensor.Shape)
			if t.MomentBytes > 0 {
				state = state / t.MomentBytes * 4
			}
			perWeight = 4 + state
			if t.Master || t.Averages {
				perWeight += masterBytes
			}
		}
		bytes += tensor.Elements() * int64(perWeight)
	}
	return bytes
}

// snapshotBytes returns the size of the weights and the state of a model in the files of a
// snapshot, which are as in a checkpoint, without the headers of the files. A run with several
// hosts also sends as many bytes to other hosts for each snapshot.
func snapshotBytes(c moe.Config, t Trainer) int64 {
	bytes := savedBytes(c, t)
	for _, tensor := range c.Tensors() {
		if moe.Trained(tensor.Name) {
			bytes -= tensor.Elements() * int64(4-t.Weights)
		}
	}
	return bytes
}

// stageBytes returns the size of the buffers for hidden states that stage i receives and sends, and
// of the first and the last stage also for embeddings; see [PipelineTraffic].
func stageBytes(c moe.Config, l Layout, t Trainer, i int) int64 {
	if l.Size(comm.PP) == 1 {
		return 0
	}
	matrices := 2
	if i == 0 || i == l.Size(comm.PP)-1 {
		matrices += c.PredictionLayers
	}
	return int64(matrices) * int64(l.microBatch()) * int64(l.rowTokens()) * int64(c.HiddenSize) * int64(t.Activations)
}

// roundedBytes returns the size of the buffer for the rounded gradients of a bucket.
func roundedBytes(c moe.Config, l Layout, t Trainer, s Stage) int64 {
	if t.accumulated() == t.Gradients || l.DataRanks() == 1 {
		return 0
	}
	most, _ := s.end(c)
	most = max(most, s.PerLayer)
	if l.Size(comm.Replicas) > 1 {
		most = max(most, s.divided())
	}
	if l.Size(comm.Slices) > 1 {
		most = max(most, s.slices)
	}
	return int64(t.Gradients) * most
}

// divided returns the number of weights of the rank's own experts of a layer.
func (s Stage) divided() int64 { return s.Divided / int64(max(1, s.ExpertLayers)) }

// end returns the number of weights in the largest bucket outside of the layers, with the embedding
// or the head, and how many of them are the final norm's.
func (s Stage) end(c moe.Config) (weights, norm int64) {
	n, vocabulary := s.Replicated-s.inLayers, int64(c.VocabSize)*int64(c.HiddenSize)
	if n == 0 {
		return 0, 0
	}
	return vocabulary + n%vocabulary, n % vocabulary
}

// SumBytes returns the size of the buffers in which a rank of a stage sums gradients, over all its
// groups (each is an [comm.Comm]). It is the maximum over the ranks of the stage.
func SumBytes(c moe.Config, l Layout, t Trainer, stage int) int64 {
	s := stages(c, l)[stage]
	h, q := int64(c.HiddenSize), int64(c.QueryWidth())
	vocabulary := int64(c.VocabSize) * h
	// tensor: elements of the largest tensor; norm: elements of the final norm
	type bucket struct{ elements, tensor, norm int64 }
	var layers []bucket // without experts
	tp := int64(l.Size(comm.TP))
	sliced := bucket{elements: s.slices}
	for _, i := range c.StageLayers(stage, l.Size(comm.PP), l.VirtualStages) {
		elements, expert := c.LayerParameters(i)
		all, most := c.SlicedWeights(i, int(tp))
		elements, sliced.tensor = elements-all, max(sliced.tensor, most/tp)
		largest := h * int64(max(1, c.QueryRank, c.KVRank+c.RotatedSize)) // of latent attention
		if tp == 1 {
			largest = h * q
		}
		switch {
		case expert > 0:
			largest = max(largest, h*int64(c.Experts))
		case tp == 1:
			largest = max(largest, h*int64(c.ActiveWidth(i)))
		}
		if b := (bucket{elements, largest, 0}); !slices.Contains(layers, b) {
			layers = append(layers, b)
		}
	}
	experts, end := bucket{s.divided(), h * int64(c.IntermediateSize), 0}, bucket{}
	if n, norm := s.end(c); n > 0 {
		end = bucket{n, vocabulary, norm}
	}
	replicated := append(layers, end)
	// of returns the buffer size of a group. Each of its ranks owns a part of every bucket: an
	// equal part, or complete blocks or tensors.
	of := func(g comm.Axes, even bool, buckets ...bucket) int64 {
		ranks := l.Size(g)
		if ranks == 1 || g == comm.Slices && l.Size(comm.TP) == 1 {
			return 0
		}
		var part int64
		for _, b := range buckets {
			own := over(b.elements, int64(ranks))
			if unit := b.tensor; !even && unit > 0 {
				if !t.Whole {
					unit = min(unit, xpu.BlockSize)
				}
				own = min(b.elements, over(over(b.elements-b.norm, int64(ranks)), unit)*unit+b.norm)
			}
			part = max(part, own)
		}
		if a := l.inHost(g, l.perHost); a > 1 && a < ranks {
			return comm.SumMemoryByHosts(ranks, a, a/l.partialSum(g, a), int(part), t.Gradients)
		}
		return comm.SumMemory(ranks, int(part), t.Gradients)
	}
	switch l.Optimizer {
	case Unsharded:
		return of(comm.Data, true, replicated...) + of(comm.Replicas, true, experts) + of(comm.Slices, true, sliced)
	case SO:
		within, across := l.nested()
		if across == comm.Replicas {
			return of(within, true, replicated...) + of(across, false, append(replicated, experts)...)
		}
		return of(within, true, replicated...) + of(comm.EP, true, sliced) +
			of(across, false, append(replicated, sliced)...) + of(comm.Replicas, false, experts)
	}
	return of(comm.Data, false, replicated...) + of(comm.Replicas, false, experts) + of(comm.Slices, false, sliced)
}

// over returns n/by, rounded up.
func over(n, by int64) int64 { return (n + by - 1) / by }

// activations returns how many numbers a rank of stage i saves per token for the backward pass, in
// all layers of the group with the most, and how many more it needs per token as scratch, the most
// of a layer, if the router uses all experts equally. Both count allocations of package moe.
// Attention scores are not included: the device computes them in blocks.
func activations(c moe.Config, l Layout, i int) (saved, scratch int64) {
	for _, group := range c.StageGroups(i, l.Size(comm.PP), l.VirtualStages) {
		of := int64(0) // the group
		for layer := group.From; layer < group.To; layer++ {
			n, more := layerActivations(c, l, layer)
			of, scratch = of+n, max(scratch, more)
		}
		saved = max(saved, of)
	}
	return saved, scratch
}

func layerActivations(c moe.Config, l Layout, layer int) (saved, scratch int64) {
	h, width, heads := int64(c.HiddenSize), int64(c.ActiveWidth(layer)), int64(c.Heads)
	q, kv := int64(c.QueryWidth()), int64(c.KVWidth())
	attention := (q + 2*kv) + q + h + heads + 4 // projections, context and residual stream; sums of softmax and norms
	products := 2 * width
	scratch = 3*h + q + max(h, q) + (q + 2*kv) + 4*kv + 2*width + 6
	input := h
	if c.HasExperts(layer) {
		rows := int64(c.ExpertsPerToken)       // outputs of experts per token
		input += int64(c.Experts) + 4*rows + 1 // numbers that the router saves
		scratch += 2*rows*h + int64(c.Experts) + rows
	}
	if layer >= c.Layers { // its output, and norms; inputs of the projection, and gradients of heads' inputs
		input += h + 3
		scratch += 3*h + int64(c.PredictionLayers+1)*h
		if l.Size(comm.PP) == 1 { // tokens; their embeddings
			input, scratch = input+1, scratch+h
		} else { // embeddings from the first stage
			input += h
		}
	}
	switch l.Recompute {
	case moe.RecomputeExperts:
		return input + attention, scratch + products
	case moe.RecomputeLayers:
		return input, scratch + attention + products
	}
	return input + attention + products, scratch
}
