package estimate

import (
	"math"
	"math/bits"

	"mula/moe"
	"mula/xpu/comm"
)

// Time is the duration of a step, in seconds, by part. Only sums of gradients overlap with another
// part, the backward pass.
type Time struct {
	Compute   float64 `json:"compute"`   // forward and backward, including recomputation
	Waiting   float64 `json:"waiting"`   // for the rank whose computation takes longest: see [Machine.waiting]
	Dispatch  float64 `json:"dispatch"`  // tokens to their experts and back
	Sequences float64 `json:"sequences"` // operands of the attention, between ranks that share sequences
	Tensor    float64 `json:"tensor"`    // tokens, between ranks that share matrices
	Stages    float64 `json:"stages"`    // hidden states from stage to stage
	Bubble    float64 `json:"bubble"`    // waiting for the first and the last micro-batches of other stages
	Gradients float64 `json:"gradients"` // sums over ranks, after the backward pass
	Votes     float64 `json:"votes"`     // state of all ranks, including the norm of the gradients
	Update    float64 `json:"update"`    // of the weights that the rank owns
	Weights   float64 `json:"weights"`   // from their owners

	// Hidden is the time of sums of gradients during the backward pass, which is not in the other
	// parts: see [Stage.hidden].
	Hidden float64 `json:"gradients_during_backward"`
}

// Passes is the time of the forward and backward passes.
func (t Time) Passes() float64 {
	return t.Compute + t.Waiting + t.Dispatch + t.Sequences + t.Tensor + t.Stages + t.Bubble
}

// OptimizerStep is the time of gradients, update and weights.
func (t Time) OptimizerStep() float64 { return t.Gradients + t.Update + t.Weights }

// Step is the time of a complete step.
func (t Time) Step() float64 { return t.Passes() + t.Votes + t.OptimizerStep() }

// A Part is a part of a step.
type Part struct {
	Name string
	Of   func(Time) float64 // in seconds
}

// Parts returns the parts of a step in order.
func Parts() []Part {
	return []Part{
		{"compute", func(t Time) float64 { return t.Compute }},
		{"slow ranks", func(t Time) float64 { return t.Waiting }},
		{"dispatch", func(t Time) float64 { return t.Dispatch }},
		{"sequences", func(t Time) float64 { return t.Sequences }},
		{"tensor", func(t Time) float64 { return t.Tensor }},
		{"between stages", func(t Time) float64 { return t.Stages }},
		{"pipeline bubble", func(t Time) float64 { return t.Bubble }},
		{"gradients", func(t Time) float64 { return t.Gradients }},
		{"norm, votes", func(t Time) float64 { return t.Votes }},
		{"update", func(t Time) float64 { return t.Update }},
		{"weights", func(t Time) float64 { return t.Weights }},
	}
}

// A place is the location of a group's ranks.
type place struct {
	inNode  int // ranks of the group in one node
	nodes   int // nodes with ranks of the group
	partial int // ranks of a partial sum; see [twoLevelBytes]
	sharing int // ranks that use a node's network at the same time
	network float64
}

// collectives is an algorithm of reductions, gathers and all-to-alls.
type collectives int

const (
	// mula's: see [twoLevelBytes]
	relayed collectives = iota
	// mula's on hosts whose names are not known: each rank sends to every other rank
	direct
	// assumed for other trainers: reductions and gathers add and gather inside a node, and then
	// between nodes; all-to-alls are direct
	assumed
)

// place returns the location of a group's ranks. Ranks fill one node after the other.
func (m *Machine) place(l Layout, g comm.Axes) place {
	perNode := int(m.RanksPerNode.Value)
	n, inNode := l.Size(g), l.inHost(g, perNode)
	return place{inNode, (n + inNode - 1) / inNode, l.partialSum(g, inNode), min(perNode, l.Ranks()),
		m.network(l.Ranks())}
}

// network returns the rate at which a node of a run can send to other nodes, in bytes/s. If the run
// has more nodes than a group of the network, messages go to random groups, and the traffic that
// leaves a group has a separate limit.
func (m *Machine) network(ranks int) float64 {
	nodes := math.Ceil(float64(ranks) / m.RanksPerNode.Value)
	rate := m.Network.Value
	if in := m.NodesPerGroup.Value; in > 0 && nodes > in {
		groups := math.Ceil(nodes / in)
		rate = min(rate, m.GlobalNetwork.Value/(1-1/groups))
	}
	return rate * m.NetworkEfficiency.Value
}

// split returns the bytes that a rank sends inside its node and to other nodes in an exchange, the
// mean over the ranks, and the number of messages.
//
// In the assumed collectives there are a ranks in each of b nodes. First the ranks of a node divide
// a vector of z bytes; each sends z·(a-1)/a. Then each rank exchanges its part, z/a, with the other
// nodes and sends z/a·(b-1)/b.
func (p place) split(e Exchange, how collectives) (inside, across, messages float64) {
	a, b, n := float64(p.inNode), float64(p.nodes), float64(e.Ranks)
	reduces := e.Operation == comm.OpReduceScatter || e.Operation == comm.OpAllReduce || e.Operation == comm.OpAllGather
	two := p.inNode > 1 && p.nodes > 1
	messages = a - 1 + b - 1
	switch {
	case e.Operation == comm.OpBroadcast: // trees
		inside, across = e.PerRank()*(n-b)/(n-1), e.PerRank()*(b-1)/(n-1)
		messages = float64(bits.Len(uint(p.inNode-1)) + bits.Len(uint(p.nodes-1)))
	case how == assumed && reduces:
		z := e.PerRank() * n / (n - 1)
		inside, across = z*(a-1)/a, z/a*(b-1)/b
	case how == relayed && two && e.Operation != comm.OpSend:
		inside, across = p.relayed(e)
		messages++ // a relay also sends to a rank of its own node
		if e.Operation == comm.OpAllToAll {
			messages += a - 1 // the lengths
		}
	default:
		inside = e.PerRank() * (a - 1) / (n - 1)
		across = e.PerRank() - inside
		if e.Operation != comm.OpSend && how != assumed {
			messages = n - 1
		}
	}
	switch {
	case e.Messages > 0:
		messages = float64(e.Messages)
	case e.Operation == comm.OpAllReduce:
		messages *= 2
	}
	return inside, across, messages * float64(e.Calls)
}

// relayed returns the bytes of [twoLevelBytes] for a rank, if all ranks have equal parts.
func (p place) relayed(e Exchange) (inside, across float64) {
	hosts, parts := make([]int, p.nodes), make([]int64, e.Ranks)
	for i := range hosts {
		hosts[i] = min(p.inNode, e.Ranks-i*p.inNode)
	}
	part := e.Total / int64(e.Ranks-1) / int64(e.Ranks)
	if e.Operation == comm.OpAllReduce {
		part /= 2
	}
	for i := range parts {
		parts[i] = part
	}
	partial := p.partial
	if e.Purpose == ForVotes { // integers, of all ranks of a host
		partial = 0
	}
	in, out := twoLevelBytes(e.Operation, hosts, partial, parts)
	return float64(in) / float64(e.Ranks), float64(out) / float64(e.Ranks)
}

// seconds returns the duration of an exchange. A rank shares the node's network with the other
// ranks of the node.
func (m *Machine) seconds(p place, e Exchange, how collectives) float64 {
	if e.most > 0 {
		e.Total = e.most * int64(e.Ranks)
	}
	inside, across, messages := p.split(e, how)
	link := m.NodeLink.Value * m.NodeEfficiency.Value
	return inside/link + across/(p.network/float64(p.sharing)) + messages*m.Latency.Value
}

// flops returns the FLOPs of stage i for one token in a forward and backward pass, and the
// additional FLOPs of recomputation and of latents, which each of the ranks that share matrices
// computes. Attention counts in full, without the causal mask. This is at least the work of the
// rank that has the last queries of a sequence; see [moe.Config.HeadRanks].
func flops(c moe.Config, l Layout, i int) (model, again float64) {
	latents := 6 * float64(c.HiddenSize) * float64(c.QueryRank+c.KVRank+c.RotatedSize) * float64(l.Size(comm.TP)-1)
	repeated := 0.0
	for _, layer := range c.StageLayers(i, l.Size(comm.PP), l.VirtualStages) {
		model += c.LayerFLOPs(layer, l.SequenceLength)
		repeated += latents
		if l.Recompute == moe.RecomputeExperts {
			again += 6 * float64(c.HiddenSize) * float64(c.ActiveWidth(layer))
		}
	}
	if l.Recompute == moe.RecomputeLayers {
		again = (model + repeated) / 3
	}
	again += repeated
	if i == l.Size(comm.PP)-1 {
		model += 6 * float64(c.VocabSize) * float64(c.HiddenSize)
	}
	return model, again
}

// waiting returns the time for which a rank waits in a step for the slowest of n ranks, if a rank
// computes for the given time on average: the expected maximum of n independent normal deviations.
// The maximum of n standard normal variables is about Φ⁻¹((n − 0.375)/(n + 0.25)) (G. Blom,
// "Statistical Estimates and Transformed Beta-Variables", 1958), within 0.03 of the expected value.
// Ranks wait once in a step, at its end.
func (m *Machine) waiting(compute float64, n int) float64 {
	p := (float64(n) - 0.375) / (float64(n) + 0.25)
	return m.Variation.Value * compute * math.Sqrt2 * math.Erfinv(2*p-1)
}

// hidden returns the part of the time of a stage's gradient exchanges that is during the backward
// pass of the last micro-batch, in seconds. backward is the time of this pass without exchanges,
// and head the part of it before the layers. Buckets are exchanged one after the other, as soon as
// the pass has completed them: the head's bucket, the buckets of each layer from the last to the
// first, and the embedding's. The layers take equally long. No gradients are exchanged while the
// pass exchanges tokens.
func (s Stage) hidden(exchanges []bucketTimes, head, backward float64) float64 {
	layer := (backward - head) / float64(s.Layers)
	finished, total := 0.0, 0.0
	add := func(ready float64, seconds func(bucketTimes) float64) {
		sum := 0.0
		for _, e := range exchanges {
			sum += seconds(e)
		}
		finished, total = max(finished, ready)+sum, total+sum
	}
	add(head, func(e bucketTimes) float64 { return e.head })
	for i := range s.Layers {
		add(head+float64(i+1)*layer, func(e bucketTimes) float64 { return e.layer })
	}
	add(backward, func(e bucketTimes) float64 { return e.embedding })
	return total - (finished - backward)
}

// bucketTimes are the seconds in which an exchange sends the gradients of the head, of each layer,
// and of the embedding.
type bucketTimes struct{ head, layer, embedding float64 }

// bucketTimes divides the time of an exchange of a stage's gradients in a group among the buckets,
// by their numbers of weights. Layers are assumed to be equal.
func (s Stage) bucketTimes(c moe.Config, l Layout, stage int, e Exchange, seconds float64) bucketTimes {
	var b bucketTimes
	total := s.Replicated // the group's weights, if it has replicated ones
	within, across := l.nested()
	switch so := l.Optimizer == SO; {
	case so && e.Group == comm.Replicas && e.Group == across:
		total += s.Divided
	case so && e.Group == across:
		total += s.Sliced
	case e.Group == comm.Replicas, e.Group == comm.Slices, so && e.Group == comm.EP && e.Group != within:
		total = 0
	}
	if total > 0 {
		vocabulary := seconds * float64(c.VocabSize) * float64(c.HiddenSize) / float64(total)
		if s.Head && (stage > 0 || !c.TieEmbeddings) {
			b.head = vocabulary
		}
		if stage == 0 {
			b.embedding = vocabulary
		}
	}
	b.layer = (seconds - b.head - b.embedding) / float64(s.Layers)
	return b
}

// countingFLOPs returns the FLOPs of stage i for one token in a forward pass that counts the
// choices of experts.
func countingFLOPs(c moe.Config, l Layout, t Trainer, i int) float64 {
	if !l.countsFirst(t) {
		return 0
	}
	l.Recompute = moe.RecomputeNone
	work, repeated := flops(c, l, i)
	if i == l.Size(comm.PP)-1 { // also of layers of multi-token prediction
		work -= float64(1+c.PredictionLayers) * 6 * float64(c.VocabSize) * float64(c.HiddenSize)
	}
	return (work + repeated) / 3
}

// update returns the memory traffic of an update, in bytes per weight. An update reads the
// gradient, reads and writes the state, and writes the weight. It also reads the weight, unless the
// state has a copy of the weight.
func (t Trainer) update() float64 {
	moved := t.accumulated() + 2*t.State + t.Weights
	if !t.Master {
		moved += t.Weights
	}
	return float64(moved)
}
