package greedy

import (
	"math"
	"math/bits"
)

// A lane computes a range of a blend. Lanes advance in slices of 16 steps. A slice considers only
// the competitors in its heat.
//
// The other groups can neither win nor tie: a group is excluded from a slice if its error at the
// slice's last x is at most tau. Errors do not decrease as x grows (errorOf) and fall only when the
// group is taken, so the error is at most tau at each step of the slice. A step counts only if its
// winner's error is above tau; otherwise the lane discards the rest of the slice and makes the step
// by an exact search. The same holds for groups that are not on the shortlist, with theta <= tau in
// place of tau. So tau, theta and everything that chooses them are guesses. Bad guesses cost time,
// but never change the result.
type lane struct {
	g       *groups
	s       *state
	t, end  int64   // the next step, and the one after the last
	dataset []int16 // of the range
	sample  []int64
	done    int // finished steps of the range

	tau  float64 // of the current slice
	aim  float64 // the desired tau
	unit float64 // approximate distance between the errors of two groups

	list *shortlist // nil if there are few groups
}

func newLane(g *groups) *lane {
	l := &lane{g: g, unit: 1 / float64(g.n)}
	if g.n >= crowd {
		l.list = newShortlist(g)
	}
	return l
}

// begin prepares the lane for steps t to t+len(dataset) from the state s.
func (l *lane) begin(s *state, t int64, dataset []int16, sample []int64) {
	l.s, l.t, l.end = s, t, t+int64(len(dataset))
	l.dataset, l.sample, l.done = dataset, sample, 0
	_, level := l.g.pick(s, stepX(t))
	l.aim = level - 10*l.unit
	if l.list != nil {
		l.list.until = 0
	}
}

// candidates returns the weights and counts of the groups for the next slice, and an upper bound of
// all other errors in it.
func (l *lane) candidates() (w, c []float64, theta float64) {
	if l.list == nil {
		return l.g.weights, l.s.c, math.Inf(-1)
	}
	return l.list.w[:l.list.n], l.list.c[:l.list.n], l.list.theta
}

// groupAt returns the group at an index of the candidates.
func (l *lane) groupAt(place int) int {
	if l.list != nil {
		return int(l.list.group[place])
	}
	return place
}

// enter fills the heat for the next slice. It returns false when the lane is at its end.
func (l *lane) enter(h *heat) bool {
	for l.t < l.end {
		if l.list != nil {
			l.list.refresh(l.s, l.t, l.aim)
		}
		w, c, theta := l.candidates()
		last := stepX(l.t + slice - 1)
		for try := range 4 {
			l.tau = max(theta, l.aim)
			n := h.enter(w, c, last, l.tau, l.g.fused, l.g.apart)
			if n > slots {
				l.aim = l.tau + float64(int(8)<<try)*l.unit
				continue
			}
			if n == 0 {
				break
			}
			// A slice removes 16 groups and adds about as many. So a different tau would have
			// selected the right number, and will next time.
			l.aim = l.tau + 0.8*float64(n-usual)*l.unit
			h.x = stepX(l.t)
			if l.g.multi {
				l.turns(h, n)
			}
			return true
		}
		l.exact() // crowded or empty
	}
	return false
}

// leave takes the proven results of a heat.
func (l *lane) leave(h *heat) {
	n := int(min(slice, l.end-l.t))
	if l.t == 0 {
		n = 1 // steps 0 and 1 have the same x
	}
	proven := 0
	for proven < n && h.best[proven] > l.tau {
		proven++
	}
	var done int
	if l.g.multi {
		done = l.leaveGroups(h, proven)
	} else {
		done = l.leaveSingles(h, proven)
	}
	l.t += int64(done)
	l.done += done
	if done == proven && proven < n {
		l.exact()
	}
}

// leaveSingles takes up to n proven steps if every group is one dataset, and returns how many it
// took. It stops after a dataset that leaves, because the kernel continues to let it compete. If
// several slots tie, the first slot has the lowest dataset, and the kernel counts that slot.
func (l *lane) leaveSingles(h *heat, n int) int {
	c, limits := l.s.c, l.g.limits
	dataset, sample := l.dataset[l.done:][:n], l.sample[l.done:][:n]
	if l.list == nil {
		for k := range dataset {
			g := h.place[bits.TrailingZeros32(h.won[k])]
			v := c[g]
			dataset[k], sample[k] = int16(g), int64(v)
			c[g] = v + 1
			if v+1 == limits[g] {
				c[g] = gone
				return k + 1
			}
		}
		return n
	}
	listed, groups := l.list.c, l.list.group
	for k := range dataset {
		place := h.place[bits.TrailingZeros32(h.won[k])]
		g, v := groups[place], listed[place]
		dataset[k], sample[k] = int16(g), int64(v)
		listed[place], c[g] = v+1, v+1
		if v+1 == limits[g] {
			listed[place], c[g] = gone, gone
			return k + 1
		}
	}
	return n
}

// turns sets the progress of the groups of the n slots.
func (l *lane) turns(h *heat, n int) {
	for i, place := range h.place[:n] {
		g := l.groupAt(int(place))
		size := l.g.size(g)
		h.left[i], h.size[i] = float64(size-l.s.turn[g]), float64(size)
	}
}

// leaveGroups takes up to n proven steps, and returns how many it took. It stops after a group that
// leaves, and after a tie, because the kernel has counted differently.
func (l *lane) leaveGroups(h *heat, n int) int {
	c := l.s.c
	for k, won := range h.won[:n] {
		place := int(h.place[bits.TrailingZeros32(won)])
		tie := won&(won-1) != 0
		if tie {
			place = l.tied(h, won)
		}
		g := l.groupAt(place)
		l.dataset[l.done+k], l.sample[l.done+k] = l.g.next(l.s, g), int64(c[g])
		l.g.take(l.s, g)
		if l.list != nil {
			l.list.c[place] = c[g]
		}
		if tie || c[g] == gone {
			return k + 1
		}
	}
	return n
}

// tied returns the index of the winning group with the lowest next member.
func (l *lane) tied(h *heat, won uint32) int {
	at, lowest := 0, int16(math.MaxInt16)
	for ; won != 0; won &= won - 1 {
		place := int(h.place[bits.TrailingZeros32(won)])
		if d := l.g.next(l.s, l.groupAt(place)); d <= lowest {
			at, lowest = place, d
		}
	}
	return at
}

// exact makes a step by a search among the candidates, or, if none of them has an error above
// theta, among all groups.
func (l *lane) exact() {
	x := stepX(l.t)
	if l.list == nil {
		g, best := l.g.pick(l.s, x)
		l.missed(best)
		l.take(g)
		return
	}
	w, c, theta := l.candidates()
	best, at, equal := l.g.largest(w, c, x)
	if !(best > theta) {
		l.list.missed()
		g, best := l.g.pick(l.s, x)
		l.missed(best)
		l.emit(g)
		return
	}
	l.missed(best)
	if equal > 1 {
		var lowest int16 = math.MaxInt16
		for i := range c {
			if c[i] == gone {
				continue
			}
			if g := l.groupAt(i); l.g.errorOf(g, x, c[i]) == best {
				if d := l.g.next(l.s, g); d <= lowest {
					at, lowest = i, d
				}
			}
		}
	}
	l.take(at)
}

// missed lowers the aim after a step whose winner's error was below it.
func (l *lane) missed(best float64) { l.aim = min(l.aim, best-10*l.unit) }

// take emits a sample of the group at an index of the candidates.
func (l *lane) take(place int) {
	g := l.groupAt(place)
	l.emit(g)
	if l.list != nil {
		l.list.c[place] = l.s.c[g]
	}
}

// emit emits a sample of group g.
func (l *lane) emit(g int) {
	l.dataset[l.done], l.sample[l.done] = l.g.next(l.s, g), int64(l.s.c[g])
	l.g.take(l.s, g)
	l.t++
	l.done++
}
