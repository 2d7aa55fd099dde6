package cpu

import (
	"sync"
	"sync/atomic"

	"mula/internal/freelist"
)

// pool is a fixed number of goroutines that help others with their loops. The owner of a loop works
// on it until all its calls are started, and then waits only for running calls. Nested loops
// therefore cannot deadlock.
type pool struct {
	size    int // number of workers
	workers sync.WaitGroup

	mu     sync.Mutex
	wake   sync.Cond // a loop was opened, or closed was set
	open   []*loop   // loops that may have calls left
	free   freelist.List[loop]
	closed bool
}

// loop is one call of run.
type loop struct {
	f       func(int)
	n       int64
	next    atomic.Int64 // the next call to start
	helpers int          // number of workers in the loop, guarded by pool.mu
	left    sync.Cond    // the last helper has left
}

func newPool(size int) *pool {
	p := &pool{size: size}
	p.wake.L = &p.mu
	for range size {
		p.workers.Go(p.work)
	}
	return p
}

func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.wake.Broadcast()
	p.workers.Wait()
}

// run calls f(0), …, f(n-1) and returns when all have returned.
func (p *pool) run(n int, f func(int)) {
	if n <= 0 {
		return
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		panic("cpu: the device was used after Close")
	}
	if n == 1 || p.size == 0 {
		p.mu.Unlock()
		for i := range n {
			f(i)
		}
		return
	}
	l := p.free.Get()
	l.f, l.n, l.left.L = f, int64(n), &p.mu
	l.next.Store(0)
	p.open = append(p.open, l)
	p.mu.Unlock()
	for range min(n-1, p.size) {
		p.wake.Signal()
	}
	defer p.finish(l) // also if f panics: workers may be in the loop
	l.carryOut()
}

// finish waits for the helpers of l.
func (p *pool) finish(l *loop) {
	l.next.Store(l.n)
	p.mu.Lock()
	for i, o := range p.open {
		if o == l {
			last := len(p.open) - 1
			p.open[i], p.open[last] = p.open[last], nil
			p.open = p.open[:last]
			break
		}
	}
	for l.helpers > 0 {
		l.left.Wait()
	}
	p.mu.Unlock()
	l.f = nil
	p.free.Put(l)
}

func (l *loop) carryOut() {
	for {
		i := l.next.Add(1) - 1
		if i >= l.n {
			return
		}
		l.f(int(i))
	}
}

// work is the main loop of a worker.
func (p *pool) work() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		l := p.unfinished()
		if l == nil {
			if p.closed {
				return
			}
			p.wake.Wait()
			continue
		}
		l.helpers++
		p.mu.Unlock()
		l.carryOut()
		p.mu.Lock()
		if l.helpers--; l.helpers == 0 {
			l.left.Signal()
		}
	}
}

// busy reports whether a loop has calls left to start: then every worker has work.
func (p *pool) busy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unfinished() != nil
}

// unfinished returns an open loop with calls left, the youngest first, because it may be part of an
// older one.
func (p *pool) unfinished() *loop {
	for i := len(p.open) - 1; i >= 0; i-- {
		if l := p.open[i]; l.next.Load() < l.n {
			return l
		}
	}
	return nil
}
