package moe

// Shared experts (https://arxiv.org/abs/2401.06066, section 3.2) process all tokens, without a
// router. They are one network of width [Config.SharedSize], whose output is added to the output of
// the experts. All ranks that share the experts hold it.

// sharedBlock is the place of shared experts in a layer's feed-forward block.
const sharedBlock = ".shared_experts."

// validateShared returns an error if the width of shared experts does not fit the family.
func (c Config) validateShared(bad func(field, format string, args ...any) error) error {
	switch n := c.SharedSize; {
	case n != 0 && !c.family().shared:
		return bad("shared_expert_intermediate_size", "is %d; it must be 0, because a %s model has no shared experts",
			n, c.Architecture)
	case n < 0 || n > maxWidth || c.family().shared && (n == 0 || n%c.IntermediateSize != 0):
		return bad("shared_expert_intermediate_size", "is %d; it must be a multiple of intermediate_size %d, up to %d",
			n, c.IntermediateSize, maxWidth)
	}
	return nil
}

// sharedExperts reads the number of shared experts.
func (f *hfFields) sharedExperts(c *Config) {
	if !c.family().shared {
		return
	}
	n := f.size("n_shared_experts")
	if len(f.problems) == 0 && (n < 1 || n > maxExperts) {
		f.fail("n_shared_experts is %d; it must be between 1 and %d", n, maxExperts)
	}
	c.SharedSize = n * c.IntermediateSize
}

func (l *layer) hasShared() bool { return l.sharedGateUp.w.Present() }

// sharedNetwork returns the network of a layer's shared experts.
func (m *Model) sharedNetwork(l *layer, st *saved) network {
	return network{l.sharedGateUp, l.sharedDown, st.shared, m.ws.sharedAct, m.ws.sharedDact}
}
