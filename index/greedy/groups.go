package greedy

import "math"

// groups are the datasets of a blend. Datasets of bitwise equal weight and equal limit share a
// group if that is faster. The members of a group alternate in their order: of two with equal
// weight, the one with the smaller count has the larger error, or, with equal counts, the same
// error and the lower number. (Errors of counts that differ by 1 are different floats while they
// are below 2^52, and they stay far below: see steady.) So the state of a group is one count, its
// next member's, and an index of its members. It competes with its next member's error.
type groups struct {
	fused bool
	apart bool // if fused, group 0, which is then dataset 0, is not fused
	n     int  // number of groups
	// n rounded up to whole vectors; padding has weight 0 and count gone, and never wins
	padded int

	weights []float64 // padded
	limits  []float64 // the count at which a group leaves; +Inf if it never leaves

	start   []int32 // group g has members[start[g]:start[g+1]]
	members []int16 // ascending within a group
	of      []int32 // the group of a dataset
	multi   bool    // some group has several members
}

// group returns the groups of a problem. Sharing is faster if groups are large; otherwise each
// dataset is a group.
func (p *problem) group() *groups {
	if g := p.groupBy(true); len(p.weights) > few && g.n <= len(p.weights)/2 {
		return g
	}
	return p.groupBy(false)
}

func (p *problem) groupBy(shared bool) *groups {
	type key struct {
		weight uint64
		limit  float64
		own    int // the dataset if it must not share the group, or -1
	}
	byKey := make(map[key]int32, len(p.weights))
	g := &groups{fused: p.fused, apart: p.apart, of: make([]int32, len(p.weights))}
	var sizes []int32
	for d, w := range p.weights {
		k := key{math.Float64bits(w + 0), math.Inf(1), -1} // + 0 makes a negative zero positive
		if p.limits != nil {
			k.limit = p.limits[d]
		}
		if !shared || p.apart && d == 0 {
			k.own = d
		}
		id, known := byKey[k]
		if !known {
			id = int32(len(sizes))
			byKey[k] = id
			sizes = append(sizes, 0)
			g.weights = append(g.weights, w)
			g.limits = append(g.limits, k.limit)
		}
		g.of[d] = id
		sizes[id]++
	}
	g.n = len(sizes)
	g.padded = (g.n + 7) &^ 7
	g.multi = g.n < len(p.weights)
	g.weights = append(g.weights, make([]float64, g.padded-g.n)...)
	g.start = make([]int32, g.n+1)
	for i, size := range sizes {
		g.start[i+1] = g.start[i] + size
	}
	at := append([]int32(nil), g.start...)
	g.members = make([]int16, len(p.weights))
	for d, id := range g.of {
		g.members[at[id]] = int16(d)
		at[id]++
	}
	return g
}

// size returns the number of members of group i.
func (g *groups) size(i int) int32 { return g.start[i+1] - g.start[i] }

// A state is the progress of the groups of a blend: the next member of group i is number turn[i] of
// its members, with count c[i].
type state struct {
	c    []float64 // padded with gone
	turn []int32
}

func (g *groups) newState() *state {
	s := &state{c: make([]float64, g.padded), turn: make([]int32, g.n)}
	for i := g.n; i < g.padded; i++ {
		s.c[i] = gone
	}
	return s
}

func (s *state) copyFrom(o *state) {
	copy(s.c, o.c)
	copy(s.turn, o.turn)
}

// next returns the dataset of group i's next sample.
func (g *groups) next(s *state, i int) int16 { return g.members[g.start[i]+s.turn[i]] }

// take counts a sample of group i.
func (g *groups) take(s *state, i int) {
	s.turn[i]++
	if s.turn[i] < g.size(i) {
		return
	}
	s.turn[i] = 0
	s.c[i]++
	if s.c[i] == g.limits[i] {
		s.c[i] = gone
	}
}

// pick returns the exact choice at x: the group whose next member the rule takes, and its error.
func (g *groups) pick(s *state, x float64) (int, float64) {
	best, at, equal := g.largest(g.weights, s.c, x)
	if equal > 1 {
		var lowest int16 = math.MaxInt16
		for i := range g.n {
			if g.errorOf(i, x, s.c[i]) == best {
				if d := g.next(s, i); d <= lowest {
					lowest, at = d, i
				}
			}
		}
	}
	return at, best
}

// errorOf returns the error of group i.
func (g *groups) errorOf(i int, x, c float64) float64 {
	return errorOf(g.weights[i], x, c, g.fused && !(g.apart && i == 0))
}

// largest returns the largest error among weights and counts, the first that has it, and how many
// have it. Group 0, if it is apart, is the first of them.
func (g *groups) largest(w, c []float64, x float64) (best float64, at, equal int) {
	if !g.apart {
		return argmax(w, c, x, g.fused)
	}
	first := c[0]
	c[0] = gone
	best, at, equal = argmax(w, c, x, true)
	c[0] = first
	switch e := g.errorOf(0, x, first); {
	case e > best:
		return e, 0, 1
	case e == best:
		return best, 0, equal + 1
	}
	return best, at, equal
}

// counts returns the counts of the datasets.
func (g *groups) counts(s *state) []int64 {
	counts := make([]int64, len(g.of))
	for i := range g.n {
		c := s.c[i]
		if c == gone {
			c = g.limits[i]
		}
		for k, d := range g.members[g.start[i]:g.start[i+1]] {
			counts[d] = int64(c)
			if int32(k) < s.turn[i] {
				counts[d]++
			}
		}
	}
	return counts
}
