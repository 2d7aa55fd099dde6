package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mula/internal/filesystem/faultfs"
	"mula/train/checkpoint"
	"mula/train/launch"
	"mula/xpu/comm"
	"mula/xpu/comm/simulated"
)

// mostProcesses is more than the number of processes of an attempt with hot spares.
const mostProcesses = 64

// spareLimit is the virtual time in which a run ends if only a hot spare has a fault. A run without
// faults takes up to 15 s, and the launcher kills a hot spare that has stopped 10 s later.
const spareLimit = 30 * time.Second

// drawHotSpares draws the settings and the events of a run with hot spares. It keeps the other
// events in half of these runs.
func (s *clusterSettings) drawHotSpares(random *rand.Rand, events []clusterEvent) []clusterEvent {
	s.HotSpares, s.SnapshotEvery = 1+random.IntN(3), random.Int64N(4)
	if random.IntN(2) == 0 {
		events = nil
	}
	soon := func() time.Duration { // of very different sizes
		return time.Duration(1 + random.Int64N(int64(time.Millisecond)<<random.IntN(12)))
	}
	for range 1 + random.IntN(3) {
		within := []time.Duration{5, 5, 5, 12}[random.IntN(4)] * time.Second // 5 s: without other faults
		e := clusterEvent{At: time.Duration(random.Int64N(int64(within))), Target: random.IntN(clusterRanks)}
		switch random.IntN(9) {
		case 0, 1: // deaths at short distance
			for range random.IntN(3) {
				events = append(events, clusterEvent{At: e.At, Fault: killRank, Target: random.IntN(clusterRanks)})
				e.At += soon()
			}
			e.Fault = killRank
		case 2:
			e.Fault = killSpare
		case 3:
			e.Fault, e.Length = killJoining, soon()
		case 4:
			e.Fault, e.Length = killSaving, soon()
		case 5:
			e.Fault, e.Target = killAll, 0
		case 6:
			e.Fault = freezeRank
		case 7:
			e.Fault = freezeSpare
		case 8:
			e.Fault = disconnect
		}
		events = append(events, e)
	}
	return events
}

// happenHot makes an event of a run with hot spares happen. The caller has locked mu.
func (c *cluster) happenHot(e clusterEvent) {
	p := c.process(e.Target)
	switch e.Fault {
	case killSpare, freezeSpare:
		p = c.spare(e.Target)
	case killAll:
		for rank := range c.processes {
			if p := c.process(rank); p != nil {
				p.kill(launch.Exit{Signal: syscall.SIGKILL})
			}
		}
		return
	case killSaving:
		c.dying[e.Target] = e.Length
		return
	}
	if p == nil {
		return
	}
	switch e.Fault {
	case freezeRank, freezeSpare:
		p.silent = true
		return
	case disconnect:
		if p.rank >= 0 {
			p.group.world.Transport(p.rank).Close()
		}
		return
	case killJoining:
		c.joining = append(c.joining, e.Length)
	}
	c.dies(p)
}

// dies kills a process. The caller has locked mu.
func (c *cluster) dies(p *clusterProcess) {
	c.alone = len(c.events) == 1 && c.stepped && !p.reported
	p.kill(launch.Exit{Signal: syscall.SIGKILL})
}

// diesAfter kills a process later. The caller has locked mu.
func (c *cluster) diesAfter(p *clusterProcess, after time.Duration) {
	time.AfterFunc(after, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.dies(p)
	})
}

// spare returns a hot spare that waits, or nil. The caller has locked mu.
func (c *cluster) spare(number int) *clusterProcess {
	waiting := slices.DeleteFunc(c.alive(), func(p *clusterProcess) bool { return slices.Contains(c.processes, p) })
	if len(waiting) == 0 {
		return nil
	}
	return waiting[number%len(waiting)]
}

// alive returns the processes of the attempt that are not killed, by number. The caller has locked
// mu.
func (c *cluster) alive() []*clusterProcess {
	if c.job == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(c.job.processes), func(p *clusterProcess) bool {
		select {
		case <-p.killed:
			return true
		default:
			return false
		}
	})
}

// endProcesses kills the processes that the launcher does not know any more, and waits for their
// goroutines.
func (c *cluster) endProcesses() {
	c.mu.Lock()
	for _, p := range c.alive() {
		p.kill(launch.Exit{Signal: syscall.SIGKILL})
	}
	c.mu.Unlock()
	c.running.Wait()
}

// A hotProcess is the part of a process that a run with hot spares needs.
type hotProcess struct {
	assigned    *launch.Assignments // nil without hot spares
	orders      *clusterPipe        // from the launcher
	interrupt   context.Context     // ends with SIGTERM
	interrupted context.CancelFunc
	group       *clusterGroup
	comm        *comm.Comm // of group; nil before the process has joined
	kept        Kept
	joins       bool        // the next step is the first one in a later group
	spare       bool        // the process was a hot spare in the group before
	last        [][]float32 // weights before the last step, for a planted bug
}

// A clusterGroup is a group of ranks.
type clusterGroup struct {
	world  *simulated.World
	hosts  *comm.Hosts
	ranks  int
	joined int
	all    chan struct{} // closed when all ranks have joined
}

// form creates the next group of ranks. The caller has locked mu.
func (j *clusterJob) form(hosts []string) {
	j.groups = append(j.groups, &clusterGroup{ranks: len(hosts), hosts: comm.NewHosts(hosts),
		all: make(chan struct{}), world: simulated.New(simulated.Network{Hosts: hosts,
			Inside: simulated.Link{Rate: 1e9}, Between: simulated.Link{Rate: 1e9}})})
}

// Assign sends its rank in a new group to each process.
func (j *clusterJob) Assign(generation int, processes []int) error {
	c := j.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if generation != len(j.groups) {
		return fmt.Errorf("generation %d follows %d", generation, len(j.groups)-1)
	}
	var hosts []string
	for _, number := range processes {
		hosts = append(hosts, j.processes[number].host.Name)
	}
	j.form(hosts)
	for rank, number := range processes {
		p := j.processes[number]
		if c.processes[rank] != p && len(c.joining) > 0 {
			c.diesAfter(p, c.joining[0])
			c.joining = c.joining[1:]
		}
		c.processes[rank] = p
		line, err := json.Marshal(launch.Assignment{Generation: generation, Rank: rank})
		if err != nil {
			return err
		}
		p.orders.send(append(line, '\n'))
	}
	return nil
}

// AddSpare starts one more hot spare.
func (j *clusterJob) AddSpare(host string) (int, error) {
	j.c.mu.Lock()
	defer j.c.mu.Unlock()
	if j.alive == 0 {
		return 0, errors.New("all ranks have exited")
	}
	return j.start(-1, host).number, nil
}

// Release tells all processes that no new group follows.
func (j *clusterJob) Release() { j.each(func(p *clusterProcess) { p.orders.Close() }) }

// openAssignments opens what the process has because of hot spares.
func (p *clusterProcess) openAssignments(ctx context.Context) {
	p.interrupt, p.interrupted = context.WithCancel(ctx)
	p.orders, p.spare = &clusterPipe{more: make(chan struct{}, 1)}, p.rank < 0
	p.assigned = launch.NewAssignments(p.orders, p.spare, p.enter)
}

// signals returns a context that ends with the first SIGTERM, and with ctx.
func (p *clusterProcess) signals(ctx context.Context) context.Context {
	if p.interrupt == nil {
		return ctx
	}
	return p.interrupt
}

// signal is a SIGTERM. The caller has locked mu.
func (p *clusterProcess) signal() {
	if p.signalled {
		return
	}
	p.signalled = true
	close(p.stop)
	if p.interrupted != nil {
		p.interrupted()
	}
}

// enter makes the process a rank of a new group.
func (p *clusterProcess) enter(a launch.Assignment) error {
	if err := p.wait(p.draw(1e6)); err != nil {
		return err
	}
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	p.rank, p.group, p.joins = a.Rank, p.job.groups[a.Generation], true
	return nil
}

// waiting precedes the wait for a new group.
func (p *clusterProcess) waiting(err error) {
	p.comm = nil
	if p.wait(p.draw(1e6)) == nil {
		p.c.log("rank %d waits for a hot spare: %v", p.rank, err)
	}
}

// join joins the group of the process.
func (p *clusterProcess) join(ctx context.Context) (*comm.Comm, error) {
	if p.assigned == nil {
		return p.comm, nil
	}
	if err := p.wait(p.draw(1e7)); err != nil {
		return nil, err
	}
	c, g := p.c, p.group
	c.mu.Lock()
	if g.joined++; g.joined == g.ranks {
		close(g.all)
	}
	c.mu.Unlock()
	select {
	case <-g.all:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-g.all:
		return comm.New(g.world.Transport(p.rank)), nil
	default:
		g.joined--
		return nil, context.Cause(ctx)
	}
}

// leave ends the communication of ranks after the same result on all.
func (p *clusterProcess) leave(ctx context.Context) error {
	if p.assigned == nil {
		return p.comm.Barrier(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_ = p.comm.Barrier(ctx) // the run is complete also if another rank dies now
	return nil
}

// odd returns a time from a random number. The times of processes differ, so that the order of
// operations does not depend on the order in which goroutines run.
func (p *clusterProcess) odd(n int64) time.Duration {
	if p.assigned == nil {
		return time.Duration(1+n)*clusterRanks + time.Duration(p.rank)
	}
	return time.Duration(1+n*clusterRanks/mostProcesses)*mostProcesses + time.Duration(p.number%mostProcesses)
}

// draw returns a random time of up to four times n nanoseconds.
func (p *clusterProcess) draw(n int64) time.Duration {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	return p.odd(p.random.Int64N(n))
}

// unreachable is the end of the remote shell to the host of the process, which has lost power. With
// hot spares, the other ranks do not notice it until the launcher forms a new group. The caller has
// locked mu.
func (p *clusterProcess) unreachable(exit launch.Exit) {
	if p.assigned == nil {
		p.kill(exit)
		return
	}
	select {
	case <-p.killed:
		return
	default:
	}
	p.report(exit)
	time.AfterFunc(30*time.Second, func() {
		p.c.mu.Lock()
		defer p.c.mu.Unlock()
		p.kill(exit)
	})
}

// saves lets the process die after it has begun to write a checkpoint, if an event asks for it. The
// caller has locked mu.
func (p *clusterProcess) saves(op faultfs.Op, path string) {
	c := p.c
	if after, ok := c.dying[p.rank]; ok && op == faultfs.Write && strings.Contains(path, "/"+checkpoint.DirName+"/") {
		delete(c.dying, p.rank)
		c.log("EVENT: rank %d will die", p.rank)
		c.diesAfter(p, after)
	}
}

// A clusterPipe has bytes that the launcher has written and a process has not read.
type clusterPipe struct {
	mu     sync.Mutex
	data   []byte
	closed bool
	more   chan struct{} // has a token after a change
}

func (p *clusterPipe) send(data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.data = append(p.data, data...)
	p.changed()
}

func (p *clusterPipe) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.changed()
	return nil
}

func (p *clusterPipe) changed() {
	select {
	case p.more <- struct{}{}:
	default:
	}
}

func (p *clusterPipe) Read(b []byte) (int, error) {
	for {
		p.mu.Lock()
		n := copy(b, p.data)
		p.data = p.data[n:]
		closed := p.closed
		p.mu.Unlock()
		if n > 0 {
			return n, nil
		}
		if closed {
			return 0, io.EOF
		}
		<-p.more
	}
}

// checkAttempts checks what hot spares promise.
func (c *cluster) checkAttempts(attempts []launch.Attempt) {
	if c.settings.HotSpares == 0 {
		return
	}
	c.mu.Lock()
	alone, count := c.alone, c.attempts
	c.mu.Unlock()
	if alone && count > 1 {
		c.problem("the death of one process has restarted the run")
	}
	if len(c.events) == 1 && (c.events[0].Fault == killSpare || c.events[0].Fault == freezeSpare) &&
		(count > 1 || time.Since(c.began) > spareLimit) {
		c.problem("the fault of a hot spare has delayed the run until %s, in %d attempts", time.Since(c.began), count)
	}
	if every := c.settings.SnapshotEvery; every > 0 && c.keepsSnapshots() {
		if lost := lostSteps(attempts, every); lost > every {
			c.problem("%d steps were lost, and there is a snapshot every %d steps", lost, every)
		}
	}
}

// lostSteps returns the most steps that a group of ranks has lost although its hosts have the
// newest snapshot.
func lostSteps(attempts []launch.Attempt, every int64) (most int64) {
	g := groupSteps{every: every, done: -1}
	for _, a := range attempts {
		if a.Steps == 0 && len(a.Replaced) == 0 {
			g.diedEarly(a.Hosts)
			continue
		}
		hosts := slices.Clone(a.Hosts)
		most = max(most, g.resumed(a.From, hosts))
		for _, r := range a.Replaced {
			g.done = r.Step
			for i, rank := range r.Ranks {
				hosts[rank] = r.Hosts[i]
			}
			if r.Setup > 0 {
				most = max(most, g.resumed(r.From, hosts))
			} else {
				g.diedEarly(hosts)
			}
		}
		g.done = a.Step
	}
	return most
}

// The check of lost steps finds steps that were lost without need, and allows for what the launcher
// cannot know.
func TestLostSteps(t *testing.T) {
	on := func(hosts string) []string { return strings.Split(hosts, "") }
	attempt := func(hosts string, from, step int64, replaced ...launch.Replacement) launch.Attempt {
		return launch.Attempt{Hosts: on(hosts), From: from, Step: step, Steps: step - from, Replaced: replaced}
	}
	for name, test := range map[string]struct {
		every    int64
		attempts []launch.Attempt
		want     int64
	}{
		"from the snapshot": {2, []launch.Attempt{attempt("aabb", 0, 5), attempt("bbcc", 4, 8)}, 1},
		"without need":      {1, []launch.Attempt{attempt("aabb", 0, 5), attempt("bbcc", 0, 8)}, 5},
		"by a hot spare": {1, []launch.Attempt{attempt("bbdd", 2, 8, launch.Replacement{Ranks: []int{0},
			Hosts: on("a"), Step: 5, From: 0, Setup: 1})}, 5},
		"other hosts": {1, []launch.Attempt{attempt("aabb", 0, 5), attempt("ccdd", 0, 8)}, 0},
		// the group on c, a and b may have written a snapshot of 6 steps
		"unseen snapshot": {3, []launch.Attempt{attempt("aabb", 0, 5, launch.Replacement{Ranks: []int{0, 2},
			Hosts: on("cc"), Step: 4, From: 3, Setup: 1}), attempt("ddaa", 0, 8)}, 1},
		// the group on b and c may have died before the snapshot of its last step
		"incomplete snapshot": {1, []launch.Attempt{attempt("aabb", 0, 4), attempt("bbcc", 3, 4),
			attempt("ccdd", 0, 8)}, 1},
		"went back, and died": {3, []launch.Attempt{attempt("aabb", 0, 5), attempt("ccdd", 0, 0),
			attempt("ddaa", 0, 8)}, 0},
		"only died": {3, []launch.Attempt{attempt("aabb", 0, 5), attempt("bbcc", 0, 0), attempt("aabb", 0, 8)}, 5},
	} {
		if got := lostSteps(test.attempts, test.every); got != test.want {
			t.Errorf("%s: %d steps, want %d", name, got, test.want)
		}
	}
}

// groupSteps follow the steps and the snapshots of one group of ranks after the other.
type groupSteps struct {
	every  int64    // steps between snapshots
	from   int64    // where the group began
	done   int64    // steps at its end; -1 before the first group
	hosts  []string // of its ranks
	stored []string // hosts with the newest snapshot that is certain to exist
	newer  []string // hosts with a newer snapshot, if there is one
}

// unseenSteps is the number of steps that ranks can do after the launcher has last read the
// heartbeat: it reads it every 0.5 s, and a step takes at least 0.2 s.
const unseenSteps = 3

// resumed begins a group at a step. It returns the number of steps that the run has lost, if the
// hosts have a snapshot.
func (g *groupSteps) resumed(from int64, hosts []string) (lost int64) {
	g.ends(from)
	if !g.lacks(hosts) {
		lost = g.done - from
	}
	g.from, g.hosts = from, slices.Clone(hosts)
	return lost
}

// diedEarly ends a group that died before its first step. If its hosts lacked files of the
// snapshot, it may have gone back to an older state before. Then all later groups go back, too.
func (g *groupSteps) diedEarly(hosts []string) {
	if g.ends(0); g.lacks(hosts) {
		*g = groupSteps{every: g.every, done: -1}
	}
}

// ends ends a group. from is the step at which a later group began, or 0.
func (g *groupSteps) ends(from int64) {
	// The snapshot of the last step may not be complete.
	if max(g.done-1, from)/g.every > g.from/g.every {
		g.stored, g.newer = g.hosts, nil
	} else if (max(g.done, from)+unseenSteps)/g.every > g.from/g.every {
		g.newer = g.hosts
	}
}

// lacks reports whether hosts may lack files of the newest snapshot. Each file is on two hosts.
func (g *groupSteps) lacks(hosts []string) bool {
	for _, stored := range [][]string{g.stored, g.newer} {
		missing := 0
		for _, host := range slices.Compact(slices.Sorted(slices.Values(stored))) {
			if !slices.Contains(hosts, host) {
				missing++
			}
		}
		if missing > 1 {
			return true
		}
	}
	return false
}

// keepsSnapshots reports whether the faults are deaths of processes, which leave a snapshot.
func (c *cluster) keepsSnapshots() bool {
	for _, e := range c.events {
		switch e.Fault {
		case killRank, evictRank, deviceError, freezeHost, storeFails, loseStore, killSpare, killJoining, killSaving,
			killAll, freezeRank, freezeSpare, disconnect:
		default:
			return false
		}
	}
	return true
}

// plantHot adds the planted bugs of runs with hot spares. The caller has locked mu.
func (p *clusterProcess) plantHot(r *run) {
	c, step := p.c, r.state.Step
	if c.plant != staleSpare && c.plant != keptWeights {
		return
	}
	var old [][]float32
	if p.joins && c.plant == staleSpare && p.spare {
		old = c.earlier[[2]int64{int64(p.rank), step - 1}]
	} else if p.joins && c.plant == keptWeights {
		old = p.last
	}
	p.joins, p.spare = false, false
	parameters := r.model.Parameters()
	for i := range old {
		copy(parameters[i].Weight.Floats(), old[i])
	}
	p.last = nil
	for _, parameter := range parameters {
		p.last = append(p.last, slices.Clone(parameter.Weight.Floats()))
	}
	if key := [2]int64{int64(p.rank), step}; c.earlier[key] == nil {
		c.earlier[key] = p.last
	}
}
