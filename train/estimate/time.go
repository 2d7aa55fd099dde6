package estimate

import (
	"math"

	"mula/moe"
	"mula/xpu/comm"
)

// Time is the duration of a step on the slowest rank, in seconds, by part. The parts are assumed
// not to overlap. Overlap makes a real step shorter.
type Time struct {
	Compute   float64 `json:"compute"`   // forward and backward, including recomputation
	Dispatch  float64 `json:"dispatch"`  // tokens to their experts and back
	Stages    float64 `json:"stages"`    // hidden states from stage to stage
	Bubble    float64 `json:"bubble"`    // waiting for the first and the last micro-batches of other stages
	Gradients float64 `json:"gradients"` // sums over ranks
	Votes     float64 `json:"votes"`     // state of all ranks, including the norm of the gradients
	Update    float64 `json:"update"`    // of the weights that the rank owns
	Weights   float64 `json:"weights"`   // from their owners
}

// Passes is the time of the forward and backward passes.
func (t Time) Passes() float64 { return t.Compute + t.Dispatch + t.Stages + t.Bubble }

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
		{"dispatch", func(t Time) float64 { return t.Dispatch }},
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
	sharing int // ranks that use a node's network at the same time
	network float64
}

// place returns the location of a group's ranks. Ranks fill one node after the other.
func (m *Machine) place(l Layout, g comm.Axes) place {
	perNode := int(m.RanksPerNode.Value)
	n := l.Size(g)
	var inNode int
	switch g {
	case comm.EP:
		inNode = min(l.Size(comm.EP), perNode)
	case comm.Replicas:
		inNode = min(l.Size(comm.Replicas), max(1, perNode/(l.Size(comm.PP)*l.Size(comm.EP))))
	case comm.Data:
		inNode = min(l.Size(comm.EP), perNode) * min(l.Size(comm.Replicas), max(1,
			perNode/(l.Size(comm.PP)*l.Size(comm.EP))))
	case comm.World:
		inNode = min(n, perNode)
	case comm.PP:
		inNode = min(l.Size(comm.PP), max(1, perNode/l.Size(comm.EP)))
	}
	return place{inNode, (n + inNode - 1) / inNode, min(perNode, l.Ranks()), m.network(l.Ranks())}
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

// seconds returns the duration of an exchange.
//
// Reductions and gathers have two levels: a ranks in each of b nodes. First the ranks of a node
// divide a vector of z bytes; each sends z·(a-1)/a. Then each rank exchanges its part, z/a, with
// the other nodes. It sends z/a·(b-1)/b and shares the node's network with the other ranks of the
// node. In an all-to-all, and in flat reductions and gathers, a rank sends the same amount to every
// other rank.
func (m *Machine) seconds(p place, e Exchange, flat bool) float64 {
	link := m.NodeLink.Value * m.NodeEfficiency.Value
	outside := p.network / float64(p.sharing)
	a, b, n := float64(p.inNode), float64(p.nodes), float64(e.Ranks)
	var inside, across float64
	messages := float64(e.Calls) * (a - 1 + b - 1)
	switch {
	case flat || e.Operation == comm.OpAllToAll || e.Operation == comm.OpSend:
		inside = e.PerRank() * (a - 1) / (n - 1)
		across = e.PerRank() - inside
	default:
		z := e.PerRank() * n / (n - 1)
		inside, across = z*(a-1)/a, z/a*(b-1)/b
	}
	if flat && e.Operation != comm.OpSend {
		messages = float64(e.Calls) * (n - 1)
	}
	if e.Operation == comm.OpAllReduce {
		messages *= 2
	}
	return inside/link + across/outside + messages*m.Latency.Value
}

// flops returns the FLOPs of a stage for one token in a forward and backward pass, and the
// additional FLOPs of recomputation. Attention counts in full, without the causal mask.
func flops(c moe.Config, l Layout, s Stage) (model, again float64) {
	head := 6 * float64(c.VocabSize) * float64(c.HiddenSize)
	layer := (c.FLOPsPerToken(l.SequenceLength) - head) / float64(c.Layers)
	model = float64(s.Layers) * layer
	switch l.Recompute {
	case moe.RecomputeExperts:
		again = float64(s.Layers) * 6 * float64(max(1,
			c.ExpertsPerToken)) * float64(c.HiddenSize) * float64(c.IntermediateSize)
	case moe.RecomputeLayers:
		again = model / 3
	}
	if s.Head {
		model += head
	}
	return model, again
}

// update returns the memory traffic of an update, in bytes per weight. An update reads the
// gradient, reads and writes the state, and writes the weight. It also reads the weight, unless the
// state has a copy of the weight.
func (t Trainer) update() float64 {
	moved := t.Gradients + 2*t.State + t.Weights
	if !t.Master {
		moved += t.Weights
	}
	return float64(moved)
}
