package train

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mula/blend/fingerprint"
	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
	"mula/internal/filesystem/sharedfs"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/moe"
	"mula/train/checkpoint"
	"mula/train/launch"
	"mula/train/record"
	"mula/train/rundir"
	"mula/train/votes"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
)

// The simulated cluster has two hosts with two ranks each, and two spares. It runs the trainer, the
// launcher and their files; docs/reference/cluster.md describes it.
const (
	clusterRanks  = 4
	clusterHosts  = 4 // the last two are spares
	clusterSpares = 2
	clusterOutput = "/cluster/run"
	clusterCopies = "run" // in the bucket of the store
	clusterSteps  = 8
	// clusterLimit is the virtual time in which a run must end.
	clusterLimit = 24 * time.Hour
)

// A clusterFault is a kind of event.
type clusterFault int

const (
	killRank      clusterFault = iota // SIGKILL of a rank
	loseHost                          // a host loses power, and returns later
	freezeHost                        // the processes of a host stop until they are killed
	nanHost                           // a host computes NaN from then on
	flipBit                           // a bit of a weight changes once
	badRead                           // a rank reads wrong token ids once
	deviceError                       // the device of a rank reports an error once
	evictRank                         // SIGTERM of a rank
	killJob                           // the scheduler kills the launcher and all ranks
	failWrites                        // writes of a host fail for some time
	fillDisk                          // the disk is full for some time
	slowDisk                          // operations and requests of a host take 100 times longer for some time
	clusterFaults                     // the number of kinds

	// Of runs with copies of their checkpoints in an object store.
	storeFails // requests of a host fail now and then for some time
	loseStore  // a host cannot reach the store for some time
	loseFiles  // the job is killed, and the files of the run are lost

	// Of runs with hot spares.
	killSpare   // SIGKILL of a hot spare that waits
	killJoining // SIGKILL of a rank, and then of the hot spare that takes over
	killSaving  // SIGKILL of a rank after it has begun to write a checkpoint
	killAll     // SIGKILL of all ranks
	freezeRank  // a rank stops until it is killed
	freezeSpare // a hot spare that waits stops until it is killed
	disconnect  // a rank loses its connections to the other ranks
)

// A clusterEvent is a fault at a virtual time.
type clusterEvent struct {
	At     time.Duration
	Fault  clusterFault
	Target int           // number of a rank or a host
	Length time.Duration // of faults that end; else the delay of a part of the fault
}

// what describes the event without its time.
func (e clusterEvent) what() string {
	text := fmt.Sprintf([...]string{
		killRank: "rank %d is killed", loseHost: "host-%d loses power", freezeHost: "the ranks of host-%d stop",
		nanHost: "host-%d computes NaN from now on", flipBit: "a bit of a weight of rank %d changes",
		badRead: "rank %d reads wrong ids", deviceError: "the device of rank %d reports an error",
		evictRank: "rank %d gets a SIGTERM", killJob: "the job is killed%.0d",
		failWrites: "writes of host-%d fail", fillDisk: "the disk is full%.0d", slowDisk: "host-%d has slow files",
		storeFails: "requests of host-%d fail now and then", loseStore: "host-%d cannot reach the store",
		loseFiles: "the job is killed, and the files of the run are lost%.0d",
		killSpare: "hot spare %d is killed", killJoining: "rank %d is killed, and its hot spare after",
		killSaving: "rank %d will be killed when it has written a checkpoint for", killAll: "all ranks are killed%.0d",
		freezeRank: "rank %d stops", freezeSpare: "hot spare %d stops",
		disconnect: "rank %d loses its connections",
	}[e.Fault], e.Target)
	switch {
	case e.Fault == killJoining || e.Fault == killSaving:
		text += " " + e.Length.String()
	case e.Length > 0:
		text += fmt.Sprintf(" for %s", e.Length)
	}
	return text
}

func (e clusterEvent) String() string { return fmt.Sprintf("%12s  %s", e.At, e.what()) }

// A clusterPlant is a bug that a simulation adds to the product, to show that the checks find it.
type clusterPlant int

const (
	noPlant       clusterPlant = iota
	lostSync                   // files of the optimizer's state are not synced
	manifestFirst              // a checkpoint is published before the content of its tensors is written
	trustOneRank               // the vote of a step ignores the errors of all ranks but the first
	oldWeights                 // a rank on a spare host resumes with the weights of an earlier step
	staleSpare                 // a hot spare that takes over has the weights of an earlier step
	keptWeights                // a rank that joins a new group keeps the weights of the last one
	clusterPlants              // the number of plants
)

func (p clusterPlant) String() string {
	return [...]string{noPlant: "none", lostSync: "lost-sync", manifestFirst: "manifest-first",
		trustOneRank: "trust-one-rank", oldWeights: "old-weights", staleSpare: "stale-spare",
		keptWeights: "kept-weights"}[p]
}

// clusterSettings are drawn from the seed.
type clusterSettings struct {
	Background, Split bool  // checkpoints in the background; experts that ranks share
	SnapshotEvery     int64 // steps between snapshots in the memory of the hosts; 0: none
	Copies            bool  // of checkpoints, in an object store
	HotSpares         int
	Stale             time.Duration
}

// clusterSchedule draws the settings and the events of a seed.
func clusterSchedule(seed uint64) (clusterSettings, []clusterEvent) {
	random := rand.New(rand.NewPCG(seed, 1))
	settings := clusterSettings{Background: random.IntN(2) == 0, Split: random.IntN(2) == 0,
		Stale: []time.Duration{0, 3 * time.Second, 30 * time.Second}[random.IntN(3)]}
	if rand.New(rand.NewPCG(seed, 2)).IntN(2) == 0 {
		settings.SnapshotEvery = 1
	}
	events := make([]clusterEvent, 1+random.IntN(5))
	for i := range events {
		e := clusterEvent{At: time.Duration(random.Int64N(int64(12 * time.Second))),
			Fault: clusterFault(random.IntN(int(clusterFaults)))}
		if random.IntN(3) == 0 { // after the first retries
			e.At *= 4
		}
		switch e.Fault {
		case killRank, flipBit, badRead, deviceError, evictRank:
			e.Target = random.IntN(clusterRanks)
		case killJob, fillDisk:
		default:
			e.Target = random.IntN(clusterHosts)
		}
		switch e.Fault {
		case loseHost, failWrites, fillDisk, slowDisk:
			e.Length = time.Duration(1+random.IntN(60)) * time.Second
		}
		events[i] = e
	}
	random = rand.New(rand.NewPCG(seed, 3))
	if settings.Copies = random.IntN(4) == 0; settings.Copies {
		for range 1 + random.IntN(2) {
			e := clusterEvent{At: time.Duration(random.Int64N(int64(20 * time.Second)))}
			switch e.Fault = storeFails + clusterFault(random.IntN(3)); e.Fault {
			case storeFails, loseStore:
				e.Target = random.IntN(clusterHosts)
				e.Length = time.Duration(1+random.IntN(60)) * time.Second
			}
			events = append(events, e)
		}
	}
	if random = rand.New(rand.NewPCG(seed, 4)); random.IntN(4) == 0 {
		events = settings.drawHotSpares(random, events)
	}
	slices.SortStableFunc(events, func(a, b clusterEvent) int { return int(a.At - b.At) })
	return settings, events
}

// A clusterReference is the run of a configuration without faults, on the files of the machine.
type clusterReference struct {
	config       Config
	weights      map[int64]string // hash after each number of steps
	fingerprints []byte
	losses       map[int64]float64
}

// clusterReferences makes the references: for tokens of all ranks with all experts, and with shared
// experts.
func clusterReferences(t testing.TB) (references [2]clusterReference) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for i, layout := range []string{"expert_dp: 4, ep: 1", "expert_dp: 2, ep: 2"} {
		c := testConfig(t, plan, fmt.Sprintf("%sbatch_size: 4\nmicro_batch_size: 1\nsteps: %d\nevaluate: {every: 0}\n"+
			"checkpoint: {every: 1, keep: 100}\nlayout: {%s, check_replicas_every: 4}\nlog: {update_ratio_every: 0}\n",
			crashConfig, clusterSteps, layout))
		stop := make(chan struct{})
		close(stop)
		mustRun(t, c, Options{Stop: stop}) // for the checkpoint of step 0
		mustRun(t, c, Options{})
		r := clusterReference{config: c, weights: map[int64]string{}}
		for _, name := range checkpointsIn(t, c.Output) {
			saved, _, err := checkpoint.Find(t.Context(), filepath.Join(c.Output, checkpoint.DirName, name))
			if err != nil {
				t.Fatal(err)
			}
			r.weights[saved.State.Step] = saved.State.Weights
		}
		var err error
		if r.fingerprints, err = os.ReadFile(filepath.Join(c.Output, fingerprint.LogFile)); err != nil {
			t.Fatal(err)
		}
		if r.losses, err = clusterLosses(filesystem.OS{}, c.Output); err != nil {
			t.Fatal(err)
		}
		references[i] = r
	}
	return references
}

// clusterLosses reads the losses of a run, and checks that each step has one line.
func clusterLosses(fsys filesystem.FS, output string) (map[int64]float64, error) {
	text, err := filesystem.ReadFile(fsys, filepath.Join(output, rundir.MetricsFile))
	if err != nil {
		return nil, err
	}
	losses := map[int64]float64{}
	for line := range bytes.Lines(text) {
		var m struct {
			Step *int64
			Loss *float64
		}
		if err := json.Unmarshal(line, &m); err != nil {
			return nil, fmt.Errorf("%s: %w: %q", rundir.MetricsFile, err, line)
		}
		if m.Step == nil || m.Loss == nil {
			continue
		}
		if *m.Step != int64(len(losses)) {
			return nil, fmt.Errorf("%s has step %d after %d steps", rundir.MetricsFile, *m.Step, len(losses))
		}
		losses[*m.Step] = *m.Loss
	}
	return losses, nil
}

// A cluster is a simulation in progress.
type cluster struct {
	reference clusterReference
	settings  clusterSettings
	events    []clusterEvent
	plant     clusterPlant
	seed      uint64

	server  *sharedfs.Server
	store   *objectstest.Memory
	hosts   []*clusterHost
	late    *lateWrites
	stopJob context.CancelFunc

	mu        sync.Mutex
	job       *clusterJob       // the attempt in progress
	processes []*clusterProcess // of the attempt in progress, by rank
	running   sync.WaitGroup    // processes of all attempts
	attempts  int
	lost      bool // the files were lost since the launcher was started
	ended     bool // the run is complete
	fullUntil time.Time
	flips     map[int]bool          // ranks that will change a bit of a weight
	reads     map[int]bool          // ranks that will read wrong ids
	failing   map[int]bool          // ranks whose device will report an error
	dying     map[int]time.Duration // until ranks die after they have begun to write a checkpoint
	joining   []time.Duration       // until the next hot spares that take over die
	stepped   bool                  // a rank has begun a step in the attempt in progress
	alone     bool                  // the only fault is the death of one rank after the first step
	acked     int64                 // the newest step whose checkpoint rank 0 has reported
	copied    int64                 // the newest step whose copy was complete
	earlier   map[[2]int64][][]float32
	problems  []string
	began     time.Time
	trace     func(text string)
}

// A clusterHost is a machine.
type clusterHost struct {
	*sharedfs.Host
	memory                          *sharedfs.Server // a file system that the host loses without power
	downUntil, failUntil, slowUntil time.Time
	flakyUntil, cutUntil            time.Time // its requests to the store fail
	nan                             bool      // from now on
	wrong                           bool      // it has computed wrong values
}

// A clusterProcess is a rank of an attempt, or a hot spare.
type clusterProcess struct {
	c         *cluster
	job       *clusterJob
	number    int // in the attempt
	rank      int // -1 for a hot spare that waits
	host      *clusterHost
	files     filesystem.FS
	memory    filesystem.FS
	random    *rand.Rand
	requests  *rand.Rand    // for requests to the store
	stop      chan struct{} // closed by SIGTERM or the launcher
	evicted   bool
	signalled bool
	silent    bool          // lost power or is stopped; its peers do not know
	killed    chan struct{} // closed when it is dead
	cancel    context.CancelFunc
	exit      launch.Exit // after it was killed
	reported  bool        // the launcher has its exit
	hotProcess
}

var errProcessKilled = errors.New("the process was killed")

// simulateCluster runs a schedule. It returns what is wrong, and the virtual time of the run. It
// must be called in a bubble of synctest.
func simulateCluster(ctx context.Context, references [2]clusterReference, seed uint64, settings clusterSettings,
	events []clusterEvent, plant clusterPlant, trace func(text string)) (problems []string, took time.Duration) {
	c := &cluster{reference: references[0], settings: settings, events: events, plant: plant, seed: seed,
		server: sharedfs.New(seed), flips: map[int]bool{}, reads: map[int]bool{},
		failing: map[int]bool{}, dying: map[int]time.Duration{}, earlier: map[[2]int64][][]float32{},
		began: time.Now(), trace: trace, acked: -1, copied: -1}
	if settings.Split {
		c.reference = references[1]
	}
	c.server.Stale = settings.Stale
	for i := range clusterHosts {
		c.hosts = append(c.hosts, &clusterHost{Host: c.server.Host(fmt.Sprint("host-", i)),
			memory: sharedfs.New(seed)})
	}
	c.late = &lateWrites{}
	if settings.Copies {
		var err error
		if c.store, err = objectstest.NewMemory(); err != nil {
			return []string{err.Error()}, 0
		}
	}
	ctx, cancel := context.WithTimeout(ctx, clusterLimit)
	defer cancel()
	var faults sync.WaitGroup
	faults.Go(func() { c.play(ctx) })
	c.schedule(ctx)
	took = time.Since(c.began)
	cancel()
	faults.Wait()
	c.endProcesses()
	c.checkEnd()
	return c.problems, took
}

func (c *cluster) log(format string, args ...any) {
	if c.trace != nil {
		c.trace(fmt.Sprintf("%12s  %s", time.Since(c.began), fmt.Sprintf(format, args...)))
	}
}

func (c *cluster) problem(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	c.log("WRONG: %s", text)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.problems = append(c.problems, text)
}

// schedule starts the launcher, and starts it again after it has given up, as a user does. After
// all faults, the user repairs the hosts and uses them again. Faults that no rank has met by then
// are over.
func (c *cluster) schedule(ctx context.Context) {
	launcher := c.server.Host("login")
	for launches := 0; ; launches++ {
		repaired := c.allOver()
		jobCtx, stopJob := context.WithCancel(ctx)
		var hosts []launch.Host
		c.mu.Lock()
		if repaired {
			clear(c.flips)
			clear(c.reads)
			clear(c.failing)
			clear(c.dying)
			c.joining = nil
		}
		failed := len(c.problems) > 0
		c.stopJob, c.lost = stopJob, false
		for _, h := range c.hosts {
			hosts = append(hosts, launch.Host{Name: h.Name, Slots: clusterRanks / (clusterHosts - clusterSpares)})
			if repaired {
				h.nan = false
			}
		}
		c.mu.Unlock()
		if failed {
			stopJob()
			return
		}
		limits := launch.Limits{Floor: map[record.Section]time.Duration{}, First: time.Minute, Factor: 5}
		for _, s := range record.Sections {
			limits.Floor[s] = 30 * time.Second
		}
		result, err := launch.Run(jobCtx, launch.Options{Output: clusterOutput, FS: launcher.Process(nil),
			Start: clusterStarter{c}, Ranks: clusterRanks, Hosts: hosts, Limits: limits, Retries: 5, Progress: 1,
			BackOff: []time.Duration{5 * time.Second, 20 * time.Second}, Grace: 10 * time.Second, ForgetBlame: repaired,
			HotSpares: c.settings.HotSpares, Notice: func(text string) { c.log("launcher: %s", text) }})
		killed := jobCtx.Err() != nil
		c.checkAttempts(result.Attempts)
		stopJob()
		if ctx.Err() != nil {
			c.problem("the run did not end within %s", clusterLimit)
			return
		}
		if err == nil && result.Outcome == launch.Done {
			c.log("launcher: %s", result.Reason)
			c.mu.Lock()
			c.ended = !c.lost
			c.mu.Unlock()
			if c.ended {
				return
			}
		}
		if err == nil {
			err = errors.New(result.Reason)
		}
		c.log("the launcher ends: %v", err)
		if c.mustSurvive() || repaired && !killed {
			c.problem("the run is lost: %v", err)
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Minute):
		}
	}
}

// allOver reports whether all faults have ended.
func (c *cluster) allOver() bool {
	for _, e := range c.events {
		if time.Since(c.began) <= e.At+e.Length {
			return false
		}
	}
	return true
}

// mustSurvive reports whether the launcher must finish the run without help: if hosts lose power
// and the spares replace them, or after a single fault of a rank or of a host.
func (c *cluster) mustSurvive() bool {
	power := 0
	for _, e := range c.events {
		switch e.Fault {
		case loseHost:
			power++
		case killRank, freezeHost, nanHost, flipBit, badRead, deviceError, evictRank, killSpare, killJoining,
			killSaving, killAll, freezeRank, freezeSpare, disconnect:
			if len(c.events) > 1 {
				return false
			}
		default:
			return false
		}
	}
	return power <= clusterSpares
}

// play makes the events happen.
func (c *cluster) play(ctx context.Context) {
	for _, e := range c.events {
		select {
		case <-ctx.Done():
			return
		case <-time.After(e.At - time.Since(c.began)):
		}
		c.log("EVENT: %s", e.what())
		c.happen(e)
		c.checkCheckpoint()
	}
}

func (c *cluster) happen(e clusterEvent) {
	until := time.Now().Add(e.Length)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e.Fault {
	case killRank:
		if p := c.process(e.Target); p != nil {
			c.dies(p)
		}
	case killSpare, killJoining, killSaving, killAll, freezeRank, freezeSpare, disconnect:
		c.happenHot(e)
	case evictRank:
		if p := c.process(e.Target); p != nil && !p.signalled {
			p.evicted = true
			p.signal()
		}
	case flipBit:
		c.flips[e.Target] = true
	case badRead:
		c.reads[e.Target] = true
	case deviceError:
		// Not simulated in a pass in which ranks exchange tokens.
		c.failing[e.Target] = !c.settings.Split
	case killJob:
		if c.stopJob != nil {
			c.stopJob()
		}
	case nanHost:
		c.hosts[e.Target].nan = true
	case failWrites:
		c.hosts[e.Target].failUntil = until
	case slowDisk:
		c.hosts[e.Target].slowUntil = until
	case fillDisk:
		c.fullUntil = until
	case storeFails:
		c.hosts[e.Target].flakyUntil = until
	case loseStore:
		c.hosts[e.Target].cutUntil = until
	case loseFiles:
		if c.ended {
			return
		}
		c.lost = true
		if c.stopJob != nil {
			c.stopJob()
		}
		for _, p := range c.alive() {
			p.kill(launch.Exit{Signal: syscall.SIGKILL})
		}
		c.server.Clear()
		c.acked = -1
	case freezeHost, loseHost:
		h := c.hosts[e.Target]
		if e.Fault == loseHost {
			h.downUntil = until
		}
		for _, p := range c.alive() {
			if p.host == h {
				p.silent = true
				if e.Fault == loseHost { // the remote shell notices it later
					time.AfterFunc(20*time.Second, func() {
						c.mu.Lock()
						defer c.mu.Unlock()
						p.unreachable(launch.Exit{Unreachable: true, Note: "connection timed out"})
					})
				}
			}
		}
		if e.Fault == loseHost {
			h.Crash()
			h.memory = sharedfs.New(c.seed)
		}
	}
}

// process returns a rank that is alive, or nil. The caller has locked mu.
func (c *cluster) process(rank int) *clusterProcess {
	if rank >= len(c.processes) || c.processes[rank] == nil {
		return nil
	}
	select {
	case <-c.processes[rank].killed:
		return nil
	default:
		return c.processes[rank]
	}
}

// kill ends a process. The caller has locked mu.
func (p *clusterProcess) kill(exit launch.Exit) {
	select {
	case <-p.killed:
		return
	default:
	}
	p.exit = exit
	close(p.killed)
	p.cancel()
}

// wait passes the time of some work. It returns an error if the process is dead, and does not
// return before that if the process is stopped.
func (p *clusterProcess) wait(work time.Duration) error {
	c := p.c
	c.mu.Lock()
	if time.Now().Before(p.host.slowUntil) {
		work *= 100
	}
	c.mu.Unlock()
	timer := time.NewTimer(work)
	defer timer.Stop()
	select {
	case <-p.killed:
		return errProcessKilled
	case <-timer.C:
	}
	c.mu.Lock()
	silent := p.silent
	c.mu.Unlock()
	if silent {
		<-p.killed
	}
	select {
	case <-p.killed:
		return errProcessKilled
	default:
		return nil
	}
}

// before precedes each file operation of the process. The times of ranks differ, so that the order
// of operations does not depend on the order in which goroutines run.
func (p *clusterProcess) before(op faultfs.Op, path string) error {
	c := p.c
	c.mu.Lock()
	work := p.odd(p.random.Int64N(1e7))
	p.saves(op, path)
	c.mu.Unlock()
	if op == faultfs.Read || op == faultfs.Stat {
		work /= 8
	}
	if err := p.wait(work); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	switch {
	case op.Reads():
	case now.Before(p.host.failUntil):
		return syscall.EIO
	case op == faultfs.Write && now.Before(c.fullUntil):
		return syscall.ENOSPC
	}
	return nil
}

// beforeMemory precedes each operation of the process on the file system in its host's memory.
func (p *clusterProcess) beforeMemory(op faultfs.Op, _ string) error {
	if err := p.wait(time.Duration(1+p.number) * time.Microsecond); err != nil {
		return err
	}
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	if !op.Reads() && time.Now().Before(p.host.failUntil) {
		return syscall.ENOSPC
	}
	return nil
}

// network returns the connections of the process to the store.
func (p *clusterProcess) network() objects.Network {
	draw := func(n int64) int64 {
		p.c.mu.Lock()
		defer p.c.mu.Unlock()
		return p.requests.Int64N(n)
	}
	work := func() error { return p.wait(p.odd(draw(4e7))) }
	fault := func(*http.Request) (f objectstest.Fault, err error) {
		if err := work(); err != nil {
			return f, err
		}
		p.c.mu.Lock()
		flaky, cut := time.Now().Before(p.host.flakyUntil), time.Now().Before(p.host.cutUntil)
		p.c.mu.Unlock()
		switch {
		case cut:
			return f, errors.New("no route to the store")
		case flaky:
			f = objectstest.RandomFault(draw)
		}
		return f, nil
	}
	return objects.Network{RoundTripper: p.c.store.Transport(fault, work),
		Random: func(n time.Duration) time.Duration { return time.Duration(draw(int64(n))) }}
}

// A clusterStarter is a [launch.Starter].
type clusterStarter struct{ c *cluster }

func (clusterStarter) Name() string { return "simulated" }

func (s clusterStarter) Start(_ context.Context, r launch.Ranks) (launch.Job, error) {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempts++
	if len(r.Spares) == 0 {
		c.log("attempt %d on %v", c.attempts, r.Hosts)
	} else {
		c.log("attempt %d on %v, with hot spares on %v", c.attempts, r.Hosts, r.Spares)
	}
	job := &clusterJob{c: c, attempt: c.attempts, ranks: r, exits: make(chan launch.Exit, 16*mostProcesses)}
	c.job, c.stepped = job, false
	c.processes = make([]*clusterProcess, len(r.Hosts))
	job.form(r.Hosts)
	for rank, name := range r.Hosts {
		c.processes[rank] = job.start(rank, name)
	}
	for _, name := range r.Spares {
		job.start(-1, name)
	}
	return job, nil
}

// start starts a process of the job, as a rank or, if rank is negative, as a hot spare. The caller
// has locked mu.
func (j *clusterJob) start(rank int, name string) *clusterProcess {
	c, number := j.c, len(j.processes)
	i := slices.IndexFunc(c.hosts, func(h *clusterHost) bool { return h.Name == name })
	p := &clusterProcess{c: c, job: j, number: number, rank: rank, host: c.hosts[i], stop: make(chan struct{}),
		killed: make(chan struct{})}
	stream := uint64(1 + j.attempt*clusterRanks + number)
	if len(j.ranks.Spares) > 0 {
		stream = uint64(1+j.attempt)*mostProcesses + uint64(number)
	}
	p.random = rand.New(rand.NewPCG(c.seed, stream))
	p.requests = rand.New(rand.NewPCG(^c.seed, stream))
	var ctx context.Context
	ctx, p.cancel = context.WithCancel(context.Background())
	p.files = c.planted(p.host.Process(p.before))
	p.memory = p.host.memory.Host(name).Process(p.beforeMemory)
	if p.group = j.groups[0]; len(j.ranks.Spares) > 0 {
		p.openAssignments(ctx)
	} else {
		p.comm = comm.New(p.group.world.Transport(rank))
	}
	j.processes = append(j.processes, p)
	j.alive++
	down := time.Now().Before(p.host.downUntil)
	c.running.Go(func() {
		defer p.cancel()
		if p.orders != nil {
			defer p.orders.Close()
		}
		var exit launch.Exit
		if down {
			select {
			case <-p.killed:
			case <-time.After(10 * time.Second):
			}
			exit = launch.Exit{Unreachable: true, Note: "no route to host"}
			if p.comm != nil {
				p.comm.Close()
			}
		} else {
			exit = p.run(ctx)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		p.report(exit)
	})
	return p
}

// report tells the launcher how a process ended, once. The caller has locked mu.
func (p *clusterProcess) report(exit launch.Exit) {
	if p.reported {
		return
	}
	p.reported = true
	exit.Process, exit.Rank, exit.Host = p.number, p.rank, p.host.Name
	p.job.exits <- exit
	if p.job.alive--; p.job.alive == 0 {
		close(p.job.exits)
	}
}

// run is the process. It returns how the process ended.
func (p *clusterProcess) run(ctx context.Context) launch.Exit {
	c := p.c
	var result Result
	err := p.wait(time.Second) // the start of the process
	if err == nil {
		err = p.assigned.Run(p.signals(ctx), p.waiting, func() (err error) {
			result, err = p.train(ctx)
			return err
		})
	}
	p.kept.Close()
	c.mu.Lock()
	silent := p.silent
	c.mu.Unlock()
	if silent {
		<-p.killed
	}
	if p.comm != nil {
		p.comm.Close()
	}
	select {
	case <-p.killed:
		return p.exit
	default:
	}
	switch {
	case err != nil:
		c.log("rank %d: %v", p.rank, err)
		return launch.Exit{Code: launch.ExitFailed}
	case !result.Finished && p.rank >= 0:
		return launch.Exit{Code: launch.ExitStopped}
	}
	return launch.Exit{}
}

// train trains in one group of ranks.
func (p *clusterProcess) train(ctx context.Context) (result Result, err error) {
	c := p.c
	group, err := p.assigned.Join(p.signals(ctx), p.join)
	if err != nil {
		return result, err
	}
	p.comm = group
	config := c.reference.config
	config.Output = clusterOutput
	config.Checkpoint.Every, config.Checkpoint.Keep = new(int64(2)), 2
	config.Checkpoint.Background = c.settings.Background
	if n := c.settings.SnapshotEvery; n > 0 {
		config.Checkpoint.Every, config.Checkpoint.SnapshotEvery = new(int64(4)), n
	}
	if c.settings.Copies {
		config.Checkpoint.Copies, config.Checkpoint.KeepCopies = c.store.URL+clusterCopies, 2
		ctx = objects.WithNetwork(ctx, p.network())
	}
	options := Options{World: group, ranksHere: clusterRanks, hosts: p.group.hosts, files: p.files, memory: p.memory,
		Stop:       p.stop,
		Generation: p.assigned.Generation(),
		Terminated: func() bool { c.mu.Lock(); defer c.mu.Unlock(); return p.evicted },
		newDevice: func(_, threads int, precision xpu.Precision) (xpu.Device, error) {
			return clusterDevice{cpu.New(threads, precision), p}, nil
		},
		atStep: p.atStep, BeforeSum: p.beforeSum, badTokens: p.badTokens,
		Progress: func(progress Progress) {
			if progress.Checkpoint == "" {
				return
			}
			var step int64 // in the background, earlier than the progress
			if _, err := fmt.Sscanf(filepath.Base(progress.Checkpoint), "step-%d", &step); err != nil {
				c.problem("%v", err)
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.process(p.rank) == p { // the files may be lost after it was killed
				c.acked = max(c.acked, step)
			}
		}}
	if c.plant == trustOneRank {
		options.vote = func(rank int, own *votes.Own) {
			if rank != 0 {
				own.Err = nil
			}
		}
	}
	for _, variable := range p.job.ranks.Environment {
		if path, ok := strings.CutPrefix(variable, record.HeartbeatVariable+"="); ok && p.rank == 0 {
			options.heartbeat = path
		}
	}
	if p.assigned != nil {
		options.Kept = &p.kept
	}
	ctx = p.group.world.Context(ctx, p.rank)
	err = p.assigned.Train(ctx, group, func(ctx context.Context) (err error) {
		result, err = Run(ctx, config, options)
		return err
	})
	if err == nil {
		err = p.leave(ctx)
	}
	return result, err
}

// atStep precedes each step of a rank.
func (p *clusterProcess) atStep(r *run) {
	c := p.c
	if p.wait(time.Duration(200+p.rank)*time.Millisecond) != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stepped = true
	if c.flips[p.rank] {
		delete(c.flips, p.rank)
		for _, b := range r.model.Buckets() {
			if !b.Divided {
				weight := b.Weight.Floats()[:1]
				weight[0] = math.Float32frombits(math.Float32bits(weight[0]) ^ 1)
				p.host.wrong = true
				break
			}
		}
	}
	if name := r.history.resumed; name == fmt.Sprintf("snapshot-%08d", r.state.Step) &&
		r.state.Weights != c.reference.weights[r.state.Step] {
		c.problems = append(c.problems, fmt.Sprintf("%s has weights %.16s, and the unbroken run has %.16s", name,
			r.state.Weights, c.reference.weights[r.state.Step]))
	}
	p.plantHot(r)
	if c.plant != oldWeights {
		return
	}
	key := [2]int64{int64(p.rank), r.state.Step}
	spare := slices.Index(c.hosts, p.host) >= clusterHosts-clusterSpares
	old := c.earlier[[2]int64{key[0], key[1] - 1}]
	if _, joins := c.earlier[key]; joins && spare && old != nil && r.history.resumed != "" &&
		r.history.resumed == checkpoint.Name(r.state.Step) {
		for i, parameter := range r.model.Parameters() {
			copy(parameter.Weight.Floats(), old[i])
		}
		return
	}
	var weights [][]float32
	for _, parameter := range r.model.Parameters() {
		weights = append(weights, slices.Clone(parameter.Weight.Floats()))
	}
	c.earlier[key] = weights
}

// beforeSum precedes the sum of a bucket's gradients.
func (p *clusterProcess) beforeSum(_ int, _ int64, b moe.Bucket) error {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	if p.host.nan {
		b.Grad.Floats()[0] = float32(math.NaN())
		p.host.wrong = true
	}
	return nil
}

func (p *clusterProcess) badTokens(int, int64) bool {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	bad := p.c.reads[p.rank]
	delete(p.c.reads, p.rank)
	return bad
}

// A clusterDevice is the device of a process.
type clusterDevice struct {
	xpu.Device
	p *clusterProcess
}

// Wait implements [xpu.Device].
func (d clusterDevice) Wait(ctx context.Context) error {
	c := d.p.c
	c.mu.Lock()
	fails := c.failing[d.p.rank]
	delete(c.failing, d.p.rank)
	c.mu.Unlock()
	if fails {
		return errors.New("the device reports an error")
	}
	return d.Device.Wait(ctx)
}

// A clusterJob is a [launch.Job].
type clusterJob struct {
	c         *cluster
	attempt   int
	ranks     launch.Ranks
	exits     chan launch.Exit
	processes []*clusterProcess // by number
	alive     int               // processes whose end the launcher does not know
	groups    []*clusterGroup   // by generation
}

func (j *clusterJob) Exits() <-chan launch.Exit { return j.exits }
func (j *clusterJob) Stacks()                   {}

func (j *clusterJob) each(f func(p *clusterProcess)) {
	j.c.mu.Lock()
	defer j.c.mu.Unlock()
	for _, p := range j.processes {
		f(p)
	}
}

func (j *clusterJob) Stop() { j.each((*clusterProcess).signal) }

func (j *clusterJob) End() {
	j.each(func(p *clusterProcess) {
		switch {
		case p.assigned != nil:
			p.evicted = true
			p.signal()
		case !p.silent:
			p.kill(launch.Exit{Signal: syscall.SIGTERM})
		}
	})
}

func (j *clusterJob) Kill() {
	j.each(func(p *clusterProcess) { p.kill(launch.Exit{Signal: syscall.SIGKILL}) })
}

// look returns the file system as a new host sees it.
func (c *cluster) look() filesystem.FS { return c.server.Host("checks").Process(nil) }

// checkCheckpoint checks the newest checkpoint as it is now.
func (c *cluster) checkCheckpoint() {
	dir := filepath.Join(clusterOutput, checkpoint.DirName)
	c.mu.Lock()
	acked := c.acked
	c.mu.Unlock()
	saved, refused, err := checkpoint.Newest(context.Background(), comm.NewSingle(), c.look(), dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && saved == nil && refused == nil:
		if acked >= 0 {
			c.problem("the checkpoint of step %d, which was complete, is lost", acked)
		}
	case err != nil:
		c.problem("checkpoints: %v", err)
	case len(refused) > 0:
		c.problem("checkpoint %s is a mixture: %s", refused[0].Checkpoint, refused[0].Error)
	case saved.State.Step < acked:
		c.problem("the checkpoint of step %d, which was complete, is lost; the newest is of step %d", acked,
			saved.State.Step)
	case saved.State.Weights != c.reference.weights[saved.State.Step]:
		c.problem("the checkpoint of step %d has weights %.16s, and the unbroken run has %.16s", saved.State.Step,
			saved.State.Weights, c.reference.weights[saved.State.Step])
	}
	if c.settings.Copies {
		c.checkCopies()
	}
}

// checkCopies checks the newest copy in the store.
func (c *cluster) checkCopies() {
	ctx := objects.WithNetwork(context.Background(), c.store.Network())
	store, err := checkpoint.OpenStore(c.store.URL + clusterCopies)
	step := int64(-1)
	if err == nil {
		step, err = store.Newest(ctx)
	}
	c.mu.Lock()
	copied := c.copied
	c.copied = max(copied, step)
	c.mu.Unlock()
	switch {
	case err != nil:
		c.problem("copies: %v", err)
		return
	case step < copied:
		c.problem("the copy of step %d, which was complete, is lost; the newest is of step %d", copied, step)
		return
	case step < 0:
		return
	}
	found, _, err := checkpoint.FindModel(ctx, c.store.URL+clusterCopies)
	if err != nil {
		c.problem("copies: %v", err)
	} else if state := found.Checkpoint.State; state.Step != step || state.Weights != c.reference.weights[step] {
		c.problem("the copy of step %d has step %d and weights %.16s, and the unbroken run has %.16s", step, state.Step,
			state.Weights, c.reference.weights[step])
	}
}

// checkEnd compares the finished run with the unbroken run, after all hosts have lost power.
func (c *cluster) checkEnd() {
	if len(c.problems) > 0 {
		return
	}
	c.checkBlame()
	for _, h := range c.hosts {
		h.Crash()
	}
	c.acked = clusterSteps
	if c.settings.Copies {
		c.copied = clusterSteps
	}
	c.checkCheckpoint()
	if text, err := filesystem.ReadFile(c.look(), filepath.Join(clusterOutput, fingerprint.LogFile)); err != nil {
		c.problem("%v", err)
	} else if !bytes.Equal(text, c.reference.fingerprints) {
		c.problem("the fingerprints of the trained samples are\n%sand of the unbroken run\n%s", text,
			c.reference.fingerprints)
	}
	if losses, err := clusterLosses(c.look(), clusterOutput); err != nil {
		c.problem("%v", err)
	} else if !maps.Equal(losses, c.reference.losses) {
		c.problem("the losses are %v, and of the unbroken run %v", losses, c.reference.losses)
	}
}

// checkBlame checks that no host is blamed for wrong values that it has not computed. If half of
// the replicas have the same wrong weight, no majority shows which half is wrong.
func (c *cluster) checkBlame() {
	failures, err := filesystem.ReadFile(c.look(), filepath.Join(clusterOutput, record.FailuresFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.problem("%v", err)
	}
	for line := range bytes.Lines(failures) {
		var f record.Failure
		if json.Unmarshal(line, &f) == nil && f.WrongValues() && !strings.Contains(f.Error, "no majority") &&
			!slices.ContainsFunc(c.hosts, func(h *clusterHost) bool { return h.Name == f.Host && h.wrong }) {
			c.problem("a host is blamed for wrong values that it has not computed: %s", f)
		}
	}
}
