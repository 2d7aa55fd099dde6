package estimate

import "math"

// A Checkpoint has the size of a checkpoint and the times in which a run writes and loads it. They
// are not in the time of a step.
type Checkpoint struct {
	Bytes int64 `json:"bytes"` // of weights and optimizer state, without headers

	// Write is the time in seconds until all ranks have written their files. Steps wait for it
	// unless checkpoint.background is set.
	Write float64 `json:"write_seconds"`

	// Load is the time in seconds until all ranks have their weights and state, if the run has the
	// layout that wrote the checkpoint. It does not include the start of processes.
	Load float64 `json:"load_seconds"`
}

// checkpoint estimates the times of a checkpoint. Each byte is written once and read once, at the
// rate of the file system or of the nodes' network, whichever is lower. At a load, readers then
// send to each rank the float32 weights that it needs. Rounds of reading and of sending do not
// overlap.
func (r *Result) checkpoint() *Checkpoint {
	m := &r.Machine
	c := &Checkpoint{Bytes: savedBytes(r.Config, r.Trainer)}
	ranks, perNode := float64(r.Layout.Ranks()), m.RanksPerNode.Value
	network := m.network(r.Layout.Ranks())
	c.Write = float64(c.Bytes) / min(m.FileSystem.Value, math.Ceil(ranks/perNode)*network)
	weights := int64(0)
	for _, s := range r.Stages {
		weights = max(weights, s.Elements())
	}
	c.Load = c.Write
	switch {
	case ranks > perNode:
		c.Load += 4 * float64(weights) * perNode / network
	case ranks > 1:
		c.Load += 4 * float64(weights) / (m.NodeLink.Value * m.NodeEfficiency.Value)
	}
	return c
}
