package greedy

import "math"

const crowd = 256 // number of groups from which a shortlist is faster

// A shortlist holds the groups that may compete within the next steps, so that a lane need not
// check all groups every 16 steps. It relates to all groups as a heat relates to the shortlist:
// excluded groups have errors of at most theta at the last step of its span.
type shortlist struct {
	g     *groups
	w, c  []float64 // of the groups on the list, padded with gone to whole vectors
	group []int32   // their numbers
	n     int       // padded

	theta float64
	depth float64 // how far theta is below the tau of its first slice
	span  int64   // number of steps that it covers
	until int64   // the first step that needs a new list
}

func newShortlist(g *groups) *shortlist {
	// With K groups and span s, the work per step is about K/s for the list and s/16 for the heats,
	// which is least at s = 4·√K.
	span := int64(4*math.Sqrt(float64(g.n))) &^ (slice - 1)
	room := g.padded + 2*spare
	return &shortlist{g: g, w: make([]float64, room), c: make([]float64, room), group: make([]int32, room),
		depth: 20 / float64(g.n), span: span}
}

// refresh computes the list for the steps from t on, unless it is still valid for the 16 steps from
// t on.
func (k *shortlist) refresh(s *state, t int64, tau float64) {
	if t+slice <= k.until {
		return
	}
	k.until = t + k.span
	k.theta = tau - k.depth
	n := sift(k.w, k.c, k.group, k.g.padded, k.g.weights, s.c, stepX(k.until-1), k.theta, k.g.fused, k.g.apart)
	k.n = max((n+7)&^7, spare)
	k.depth *= 0.99
}

// missed reports a step at which no group on the list had an error above theta.
func (k *shortlist) missed() {
	k.until = 0
	k.depth *= 1.2
}
