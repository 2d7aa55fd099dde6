package estimate

import (
	"math"

	"mula/moe"
	"mula/xpu"
)

// Time is how long a step takes on the slowest rank, in seconds, by part. Nothing is assumed to
// happen beside anything else: what overlaps makes a step shorter than this.
type Time struct {
	Compute   float64 `json:"compute"`   // forward and backward, what is computed again included
	Dispatch  float64 `json:"dispatch"`  // tokens to their experts and back
	Stages    float64 `json:"stages"`    // hidden states from stage to stage
	Bubble    float64 `json:"bubble"`    // waiting for the first and the last micro-batches of other stages
	Gradients float64 `json:"gradients"` // sums over ranks
	Votes     float64 `json:"votes"`     // what all ranks learn of each other, the norm of the gradients included
	Update    float64 `json:"update"`    // of the weights that the rank owns
	Weights   float64 `json:"weights"`   // from their owners
}

// Passes is the time of forward and backward passes, OptimizerStep the time of gradients, update
// and weights, Step the time of a whole step.
func (t Time) Passes() float64        { return t.Compute + t.Dispatch + t.Stages + t.Bubble }
func (t Time) OptimizerStep() float64 { return t.Gradients + t.Update + t.Weights }
func (t Time) Step() float64          { return t.Passes() + t.Votes + t.OptimizerStep() }

// A Part is a part of a step.
type Part struct {
	Name string
	Of   func(Time) float64 // its seconds
}

// Parts lists the parts of a step in their order.
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

// A place is where the ranks of a group are.
type place struct {
	inNode  int // ranks of the group in one node
	nodes   int // nodes with ranks of the group
	sharing int // ranks of a node, which use its network at the same time
	network float64
}

// place finds the ranks of a group. Ranks fill one node after the other.
func (m *Machine) place(l Layout, g Group) place {
	perNode := int(m.RanksPerNode.Value)
	n := l.size(g)
	var inNode int
	switch g {
	case Experts:
		inNode = min(l.EP, perNode)
	case Replicas:
		inNode = min(l.DP, max(1, perNode/(l.PP*l.EP)))
	case Data:
		inNode = min(l.EP, perNode) * min(l.DP, max(1, perNode/(l.PP*l.EP)))
	case World:
		inNode = min(n, perNode)
	case Pipeline:
		inNode = min(l.PP, max(1, perNode/l.EP))
	}
	return place{inNode, (n + inNode - 1) / inNode, min(perNode, l.Ranks()), m.network(l.Ranks())}
}

// network is how many bytes a second a node of a run can send to other nodes. If the run has more
// nodes than a group of the network, the other end of a message is in another group as often as
// chance has it, and what leaves the group has its own limit.
func (m *Machine) network(ranks int) float64 {
	nodes := math.Ceil(float64(ranks) / m.RanksPerNode.Value)
	rate := m.Network.Value
	if in := m.NodesPerGroup.Value; in > 0 && nodes > in {
		groups := math.Ceil(nodes / in)
		rate = min(rate, m.GlobalNetwork.Value/(1-1/groups))
	}
	return rate * m.NetworkEfficiency.Value
}

// seconds is how long the ranks of a group take for an exchange, of which each sends so many bytes
// in so many calls.
//
// Reductions and gathers go in two stages. First those of a node divide a vector of z bytes among
// them, each sending z·(a-1)/a; then each exchanges its part, z/a, with the other nodes, while the
// others of its node do the same with theirs: z/a·(b-1)/b on a share of the node's network. An
// exchange of all with all sends to each as much, and so do reductions and gathers that are flat.
func (m *Machine) seconds(p place, e Exchange, flat bool) float64 {
	link := m.NodeLink.Value * m.NodeEfficiency.Value
	outside := p.network / float64(p.sharing)
	a, b, n := float64(p.inNode), float64(p.nodes), float64(e.Ranks)
	var inside, across float64
	messages := float64(e.Calls) * (a - 1 + b - 1)
	switch {
	case flat || e.Operation == xpu.OpAllToAll || e.Operation == xpu.OpSend:
		inside = e.PerRank() * (a - 1) / (n - 1)
		across = e.PerRank() - inside
	default:
		z := e.PerRank() * n / (n - 1)
		inside, across = z*(a-1)/a, z/a*(b-1)/b
	}
	if flat && e.Operation != xpu.OpSend {
		messages = float64(e.Calls) * (n - 1)
	}
	if e.Operation == xpu.OpAllReduce {
		messages *= 2
	}
	return inside/link + across/outside + messages*m.Latency.Value
}

// flops is the work of a stage for one token, in a forward and backward pass, and what
// recomputation adds to it. Attention counts in full.
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

// update is how many bytes an update moves between a rank and its memory for each weight: it reads
// the gradient, and reads and writes the state; a weight is written, and read unless the state has
// a copy of it.
func (t Trainer) update() float64 {
	moved := t.Gradients + 2*t.State + t.Weights
	if !t.Master {
		moved += t.Weights
	}
	return float64(moved)
}
