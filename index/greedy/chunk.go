package greedy

import (
	"context"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
)

// The number of samples of a piece. Pieces are long, so that the work done once per lane is a small
// fraction of the total. That work is mainly guessing and comparing states, and takes time in
// proportion to the number of groups. For few groups, a piece also fits a core's cache.
const (
	chunkSteps      = 1 << 20
	chunkStepsFew   = 1 << 18 // of blends of fewer than crowd groups
	chunkStepsLeast = 1 << 14 // of short blends, to have work for every thread
)

// patience is how many searches of all groups join makes before it abandons a guess.
const patience = 1 << 12

// A chunk is a range of a blend that is computed from a guess.
type chunk struct {
	t       int64 // its first step
	dataset []int16
	sample  []int64
	first   *state // the state that it started from
	last    *state // the state that it ended in
}

// An engine computes chunks, several lanes at a time. It is not safe for concurrent use.
type engine struct {
	g     *groups
	heats *[lanes]heat
	lane  [lanes]*lane
	from  [columns]*state
	now   [columns]*state

	differ   []int32   // scratch of join
	vertical *vertical // nil if there are too many datasets
}

func newEngine(g *groups) *engine {
	e := &engine{g: g, heats: newHeats()}
	for i := range e.lane {
		e.lane[i] = newLane(g)
	}
	for i := range e.from {
		e.from[i], e.now[i] = g.newState(), g.newState()
	}
	if g.n <= few && !g.multi {
		e.vertical = newVertical(g)
	}
	return e
}

// compute fills a chunk and its states.
func (e *engine) compute(c *chunk) {
	if e.vertical != nil {
		e.vertically(c)
		return
	}
	n := len(c.dataset)
	bounds := [lanes + 1]int{lanes: n}
	for i := 1; i < lanes; i++ {
		bounds[i] = n * i / lanes &^ 15
	}
	for i, l := range e.lane {
		t := c.t + int64(bounds[i])
		e.g.guess(e.from[i], t)
		e.now[i].copyFrom(e.from[i])
		l.begin(e.now[i], t, c.dataset[bounds[i]:bounds[i+1]], c.sample[bounds[i]:bounds[i+1]])
	}
	c.first.copyFrom(e.from[0])
	e.advance(lanes)
	c.last.copyFrom(e.now[0])
	for i := 1; i < lanes; i++ {
		e.join(c.last, e.from[i], e.now[i], c.t+int64(bounds[i]), c.dataset[bounds[i]:bounds[i+1]],
			c.sample[bounds[i]:bounds[i+1]])
	}
}

// advance runs the first lanes to their ends.
func (e *engine) advance(n int) {
	for {
		var running [lanes]bool
		some := false
		for i, l := range e.lane[:n] {
			running[i] = l.enter(&e.heats[i])
			some = some || running[i]
		}
		if !some {
			return
		}
		race(e.heats, e.g.fused, e.g.apart, e.g.multi)
		for i, l := range e.lane[:n] {
			if running[i] {
				l.leave(&e.heats[i])
			}
		}
	}
}

// join corrects a range of the blend that was computed from a guessed state first and ended in
// last. now is the true state before the range; join changes it to the true state after the range.
// A step is a function of t and the state: once the true and the guessed state agree, they and the
// samples agree until the end.
//
// Until then most groups have equal counts in both. If the guessed blend's winner is such a group,
// it also wins against all such groups in the true blend, and is compared only with the groups that
// differ. Those are few, but may persist: a group of tiny weight with a wrong guess stays wrong
// until it is drawn.
func (e *engine) join(now, first, last *state, t int64, dataset []int16, sample []int64) {
	g := e.g
	equal := func(i int) bool { return now.c[i] == first.c[i] && now.turn[i] == first.turn[i] }
	differ := e.differ[:0]
	for i := range now.turn {
		if !equal(i) {
			differ = append(differ, int32(i))
		}
	}
	searches := 0
	for k := 0; k < len(dataset); k++ {
		if len(differ) == 0 {
			now.copyFrom(last)
			break
		}
		if searches == patience {
			e.alone(now, t+int64(k), dataset[k:], sample[k:])
			break
		}
		x := stepX(t + int64(k))
		guessed := g.of[dataset[k]]
		winner := guessed
		if len(differ) > 16 || slices.Contains(differ, guessed) {
			i, _ := g.pick(now, x)
			winner = int32(i)
			searches++
		} else {
			best := g.errorOf(int(winner), x, now.c[winner])
			for _, i := range differ {
				if v := g.errorOf(int(i), x, now.c[i]); v > best || v == best && g.next(now, int(i)) < g.next(now,
					int(winner)) {
					best, winner = v, i
				}
			}
			if winner == guessed {
				g.take(first, int(winner))
				g.take(now, int(winner))
				continue
			}
		}
		dataset[k], sample[k] = g.next(now, int(winner)), int64(now.c[winner])
		g.take(first, int(guessed))
		g.take(now, int(winner))
		for _, i := range [2]int32{guessed, winner} {
			at := slices.Index(differ, i)
			switch {
			case at < 0 && !equal(int(i)):
				differ = append(differ, i)
			case at >= 0 && equal(int(i)):
				differ = slices.Delete(differ, at, at+1)
			}
		}
	}
	e.differ = differ
}

// run computes n steps.
func (p *problem) run(ctx context.Context, n int64, pool *semaphore.Weighted, threads int, emit Emit) ([]int64, error) {
	if emit == nil {
		return nil, errNoEmit
	}
	if n == 0 {
		return make([]int64, len(p.weights)), nil
	}
	if !p.steady() {
		return p.runPlain(ctx, n, pool, emit)
	}
	threads = max(threads, 1)
	g := p.group()
	steps := p.steps
	if steps == 0 {
		steps = chunkSteps
		if g.n < crowd {
			steps = chunkStepsFew
		}
		steps = min(steps, max((n+int64(threads)-1)/int64(threads), chunkStepsLeast))
	}
	count := (n + steps - 1) / steps
	threads = int(min(int64(threads), count))

	group, ctx := errgroup.WithContext(ctx)
	// Chunks start in order, each with a free buffer, and are passed on through the channel of
	// their slot. There are as many slots as buffers, so no two chunks share a slot.
	buffers := int64(threads + 2)
	free := make(chan *chunk, buffers)
	turns := make([]chan *chunk, buffers)
	for i := range turns {
		free <- &chunk{dataset: make([]int16, min(steps, n)), sample: make([]int64, min(steps, n)), first: g.newState(),
			last: g.newState()}
		turns[i] = make(chan *chunk, 1)
	}
	var (
		mu   sync.Mutex
		next int64 // next chunk to start
	)
	begin := func() (*chunk, int64, error) {
		mu.Lock()
		defer mu.Unlock()
		if next == count {
			return nil, 0, nil
		}
		select {
		case c := <-free:
			k := next
			next++
			return c, k, nil
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
	computing := func(f func()) error {
		if pool != nil {
			if err := pool.Acquire(ctx, 1); err != nil {
				return err
			}
			defer pool.Release(1)
		}
		f()
		return ctx.Err()
	}
	for range threads {
		group.Go(func() error {
			e := newEngine(g)
			for {
				c, k, err := begin()
				if err != nil || c == nil {
					return err
				}
				c.t = k * steps
				size := int(min(steps, n-c.t))
				c.dataset, c.sample = c.dataset[:size], c.sample[:size]
				if err := computing(func() { e.compute(c) }); err != nil {
					return err
				}
				turns[k%buffers] <- c
			}
		})
	}
	now := g.newState()
	group.Go(func() error {
		e := newEngine(g)
		for k := range count {
			var c *chunk
			select {
			case c = <-turns[k%buffers]:
			case <-ctx.Done():
				return ctx.Err()
			}
			if err := computing(func() { e.join(now, c.first, c.last, c.t, c.dataset, c.sample) }); err != nil {
				return err
			}
			if err := emit(c.t, c.dataset, c.sample); err != nil {
				return err
			}
			free <- c
		}
		return nil
	})
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return g.counts(now), nil
}

// runPlain computes n steps directly by the rule.
func (p *problem) runPlain(ctx context.Context, n int64, pool *semaphore.Weighted, emit Emit) ([]int64, error) {
	counts := make([]float64, len(p.weights))
	const steps = 1 << 14
	dataset, sample := make([]int16, min(n, steps)), make([]int64, min(n, steps))
	for t := int64(0); t < n; t += steps {
		k := min(steps, n-t)
		if pool != nil {
			if err := pool.Acquire(ctx, 1); err != nil {
				return nil, err
			}
		} else if err := ctx.Err(); err != nil {
			return nil, err
		}
		p.plain(counts, t, dataset[:k], sample[:k])
		if pool != nil {
			pool.Release(1)
		}
		if err := emit(t, dataset[:k], sample[:k]); err != nil {
			return nil, err
		}
	}
	return p.counts(counts), nil
}

func (p *problem) counts(c []float64) []int64 {
	counts := make([]int64, len(c))
	for d, v := range c {
		if v == gone {
			v = p.limits[d]
		}
		counts[d] = int64(v)
	}
	return counts
}
