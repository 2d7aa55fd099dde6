package job

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
	"mula/internal/filesystem/sharedfs"
	"mula/internal/locks"
	"mula/internal/longtest"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/internal/simulation"
)

// The simulated cluster has three hosts. Four workers run the same job, in a folder that the hosts
// share, or in an object store. docs/reference/cluster.md describes it.
const (
	clusterHosts   = 3
	clusterWorkers = 4 // worker w runs on host w modulo the number of hosts
	clusterFolder  = "/cluster/tokens"
	clusterWork    = "/work" // on the disk of each host
	// clusterLimit is the virtual time in which the job must end.
	clusterLimit = 24 * time.Hour
)

// A clusterFault is a kind of event.
type clusterFault int

const (
	killWorker   clusterFault = iota // SIGKILL of a worker, which is started again
	loseHost                         // a host loses power, and returns later
	freezeWorker                     // SIGSTOP of a worker, and SIGCONT later
	killAll                          // SIGKILL of all workers
	failWrites                       // writes of a host fail for some time
	fillDisk                         // all disks are full for some time
	slowDisk                         // operations and requests of a host take 100 times longer for some time
	folderFaults                     // the number of kinds for a shared folder

	storeFails    clusterFault = iota - 1 // requests of a host fail now and then for some time
	loseStore                             // a host cannot reach the store for some time
	clusterFaults                         // the number of kinds for an object store
)

// A clusterEvent is a fault at a virtual time.
type clusterEvent struct {
	At     time.Duration
	Fault  clusterFault
	Target int           // number of a worker or a host
	Length time.Duration // of faults that end
}

// what describes the event without its time.
func (e clusterEvent) what() string {
	text := fmt.Sprintf([...]string{
		killWorker: "worker %d is killed", loseHost: "host-%d loses power", freezeWorker: "worker %d is stopped",
		killAll: "all workers are killed%.0d", failWrites: "writes of host-%d fail", fillDisk: "all disks are full%.0d",
		slowDisk: "host-%d is slow", storeFails: "requests of host-%d fail now and then",
		loseStore: "host-%d cannot reach the store",
	}[e.Fault], e.Target)
	if e.Length > 0 {
		text += fmt.Sprintf(" for %s", e.Length)
	}
	return text
}

func (e clusterEvent) String() string { return fmt.Sprintf("%12s  %s", e.At, e.what()) }

// doubleClaim is the planted bug.
const doubleClaim = "double-claim"

// clusterSettings are drawn from the seed.
type clusterSettings struct {
	Store, Shuffle bool
	Stale          time.Duration // age of the attributes of a shared folder
}

func (s clusterSettings) String() string {
	if s.Store {
		return fmt.Sprintf("object store, shuffled %t", s.Shuffle)
	}
	return fmt.Sprintf("shared folder, shuffled %t, attributes stale for up to %s", s.Shuffle, s.Stale)
}

// clusterSchedule draws the settings and the events of a seed.
func clusterSchedule(seed uint64) (clusterSettings, []clusterEvent) {
	random := rand.New(rand.NewPCG(seed, 1))
	settings := clusterSettings{Store: random.IntN(2) == 0, Shuffle: random.IntN(3) == 0,
		Stale: []time.Duration{0, 3 * time.Second, 30 * time.Second}[random.IntN(3)]}
	kinds := int(folderFaults)
	if settings.Store {
		kinds = int(clusterFaults)
	}
	events := make([]clusterEvent, 1+random.IntN(6))
	for i := range events {
		e := clusterEvent{At: time.Duration(random.Int64N(int64(8 * time.Second))),
			Fault: clusterFault(random.IntN(kinds))}
		if random.IntN(3) == 0 { // after the first restarts
			e.At *= 15
		}
		switch e.Fault {
		case killWorker, freezeWorker:
			e.Target = random.IntN(clusterWorkers)
		case killAll, fillDisk:
		default:
			e.Target = random.IntN(clusterHosts)
		}
		switch e.Fault {
		case killWorker, killAll:
		case freezeWorker:
			e.Length = time.Duration(1+random.IntN(180)) * time.Second
		default:
			e.Length = time.Duration(1+random.IntN(60)) * time.Second
		}
		events[i] = e
	}
	slices.SortFunc(events, func(a, b clusterEvent) int { return int(a.At - b.At) })
	return settings, events
}

// A clusterReference is a job and the files that one process writes for it.
type clusterReference struct {
	options Options
	files   map[string]string
}

// clusterReferences returns the job in order, and the shuffled one.
func clusterReferences(t *testing.T) (references [2]clusterReference) {
	dir := t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Workers: 1, PieceBytes: 700,
		OnError: Skip, ShardTokens: 500, tuning: tuning{segment: 900}}
	random := rand.New(rand.NewPCG(9, 9))
	for file := range 3 {
		var text strings.Builder
		for line := range 14 {
			if line == 5 {
				text.WriteString("{\"text\":\"\"}\n")
				continue
			}
			word := fmt.Sprintf("w%d ", random.IntN(1000))
			fmt.Fprintf(&text, "{\"text\":%q}\n", strings.Repeat(word, 1+random.IntN(20)))
		}
		name := filepath.Join(dir, fmt.Sprintf("part-%d.jsonl", file))
		if err := os.WriteFile(name, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		o.Inputs = append(o.Inputs, name)
	}
	for i := range references {
		o.Shuffle, o.ShuffleSeed = i == 1, uint64(i)
		references[i] = clusterReference{o, local(t, o)}
	}
	return references
}

// A cluster is a simulation in progress.
type cluster struct {
	reference clusterReference
	settings  clusterSettings
	events    []clusterEvent
	plant     string
	seed      uint64
	output    string

	server *sharedfs.Server
	store  *objectstest.Memory
	hosts  []*clusterHost

	mu        sync.Mutex
	processes [clusterWorkers]*clusterProcess // that run
	fullUntil time.Time
	problems  []string
	began     time.Time
	trace     func(text string)
}

// A clusterHost is a machine.
type clusterHost struct {
	*sharedfs.Host
	disk *sharedfs.Host // of the machine
	// until these times, the host is without power, its writes fail, it is slow, its requests fail,
	// and it does not reach the store
	down, failing, slow, flaky, cut time.Time
}

// A clusterProcess is a worker from its start to its end.
type clusterProcess struct {
	c      *cluster
	worker int
	start  int // number of earlier starts
	host   *clusterHost
	killed chan struct{} // closed when it is dead
	cancel context.CancelFunc

	frozen time.Time // it is stopped until then

	mu    sync.Mutex
	count map[uint64]uint64 // of equal operations
}

var (
	errProcessKilled = errors.New("the process was killed")
	errUnreachable   = errors.New("no route to the store")
)

// simulateCluster runs a schedule. It returns what is wrong, and the virtual time of the job. It
// must be called in a bubble of synctest.
func simulateCluster(ctx context.Context, references [2]clusterReference, seed uint64, events []clusterEvent,
	plant string, trace func(text string)) (problems []string, took time.Duration) {
	settings, _ := clusterSchedule(seed)
	c := &cluster{reference: references[0], settings: settings, events: events, plant: plant, seed: seed,
		output: clusterFolder + "/x", server: sharedfs.New(seed), began: time.Now(), trace: trace}
	if settings.Shuffle {
		c.reference = references[1]
	}
	c.server.Stale = settings.Stale
	for i := range clusterHosts {
		c.hosts = append(c.hosts, &clusterHost{Host: c.server.Host(fmt.Sprint("host-", i)),
			disk: sharedfs.New(seed).Host("disk")})
	}
	look := c.look()
	err := filesystem.MkdirAll(look, clusterFolder, 0o755)
	if err == nil {
		err = errors.Join(look.SyncDir("/"), look.SyncDir(filepath.Dir(clusterFolder)))
	}
	if settings.Store && err == nil {
		c.store, err = objectstest.NewMemory()
	}
	if err != nil {
		return []string{err.Error()}, 0
	}
	if settings.Store {
		c.output = c.store.URL + "tokens/x"
	}
	ctx, cancel := context.WithTimeout(ctx, clusterLimit)
	defer cancel()
	var faults, workers sync.WaitGroup
	faults.Go(func() { c.play(ctx) })
	for w := range clusterWorkers {
		workers.Go(func() { c.work(ctx, w) })
	}
	workers.Wait()
	took = time.Since(c.began)
	if ctx.Err() != nil {
		c.problem("the job did not end within %s", clusterLimit)
	}
	cancel()
	faults.Wait()
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

// failed reports whether there is a problem.
func (c *cluster) failed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.problems) > 0
}

// work starts a worker until the job is complete, as a scheduler does that starts failed tasks
// again.
func (c *cluster) work(ctx context.Context, worker int) {
	random := rand.New(rand.NewPCG(c.seed, uint64(100+worker)))
	pause := time.Duration(random.Int64N(int64(3 * time.Second)))
	for start := 0; ; start++ {
		h := c.hosts[worker%clusterHosts]
		c.mu.Lock()
		pause = max(pause, time.Until(h.down)+time.Second)
		c.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		c.mu.Lock()
		down, over := time.Now().Before(h.down), c.allOver()
		c.mu.Unlock()
		if down {
			continue
		}
		if c.failed() {
			return
		}
		p := &clusterProcess{c: c, worker: worker, start: start, host: h, killed: make(chan struct{}),
			count: map[uint64]uint64{}}
		c.log("worker %d starts", worker)
		err := p.run(ctx)
		select {
		case <-p.killed:
			pause = time.Duration(random.Int64N(int64(30 * time.Second)))
			continue
		default:
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			c.log("worker %d: the job is complete", worker)
			return
		}
		c.log("worker %d: %v", worker, err)
		if over || !injected(err) {
			c.problem("worker %d fails without a fault: %v", worker, err)
			return
		}
		pause = time.Minute
	}
}

// injected reports whether an error is the effect of a fault.
func injected(err error) bool {
	for _, fault := range []error{syscall.EIO, syscall.ENOSPC, errUnreachable, objectstest.ErrDropped,
		objectstest.ErrLost} {
		if errors.Is(err, fault) {
			return true
		}
	}
	return strings.Contains(err.Error(), "503 Service Unavailable") ||
		strings.Contains(err.Error(), "500 Internal Server Error")
}

// allOver reports whether all faults have ended. The caller has locked mu.
func (c *cluster) allOver() bool {
	for _, e := range c.events {
		if time.Since(c.began) <= e.At+e.Length {
			return false
		}
	}
	return true
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
		c.checkDone()
	}
}

func (c *cluster) happen(e clusterEvent) {
	until := time.Now().Add(e.Length)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e.Fault {
	case killWorker:
		c.processes[e.Target].kill()
	case killAll:
		for _, p := range c.processes {
			p.kill()
		}
	case freezeWorker:
		if p := c.processes[e.Target]; p != nil {
			p.frozen = until
		}
	case failWrites:
		c.hosts[e.Target].failing = until
	case slowDisk:
		c.hosts[e.Target].slow = until
	case fillDisk:
		c.fullUntil = until
	case storeFails:
		c.hosts[e.Target].flaky = until
	case loseStore:
		c.hosts[e.Target].cut = until
	case loseHost:
		h := c.hosts[e.Target]
		h.down = until
		for _, p := range c.processes {
			if p != nil && p.host == h {
				p.kill()
			}
		}
		h.Crash()
		h.disk.Crash()
	}
}

// kill ends a process. The caller has locked c.mu.
func (p *clusterProcess) kill() {
	if p == nil {
		return
	}
	select {
	case <-p.killed:
	default:
		close(p.killed)
		p.cancel()
	}
}

// run works on the job.
func (p *clusterProcess) run(ctx context.Context) error {
	c := p.c
	ctx, p.cancel = context.WithCancel(ctx)
	defer p.cancel()
	c.mu.Lock()
	c.processes[p.worker] = p
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.processes[p.worker] = nil
	}()
	o := c.reference.options
	o.Output, o.Rejects = c.output, c.output+".rejects.jsonl"
	if c.settings.Store {
		o.Work, o.FS = fmt.Sprintf("%s/%d", clusterWork, p.worker), p.host.disk.Process(p.before)
		if err := filesystem.MkdirAll(o.FS, clusterWork, 0o755); err != nil {
			return err
		}
		answered := func() error { return p.wait(p.draw("answer", 20*time.Millisecond)) }
		ctx = objects.WithNetwork(ctx, objects.Network{RoundTripper: c.store.Transport(p.request, answered),
			Random: func(n time.Duration) time.Duration { return p.draw("pause", n) }})
	} else {
		o.FS = p.host.Process(p.before)
		if c.plant == doubleClaim {
			o.FS = &claimFS{FS: o.FS, claimed: map[string]string{}}
		}
		o.tuning.lockFS = o.FS
	}
	_, err := Run(ctx, o)
	return err
}

// wait passes the time of some work. It returns an error if the process is dead. A stopped process
// does not return before it goes on.
func (p *clusterProcess) wait(work time.Duration) error {
	c := p.c
	c.mu.Lock()
	if time.Now().Before(p.host.slow) {
		work *= 100
	}
	c.mu.Unlock()
	for work > 0 {
		timer := time.NewTimer(work)
		select {
		case <-p.killed:
			timer.Stop()
			return errProcessKilled
		case <-timer.C:
		}
		c.mu.Lock()
		work = time.Until(p.frozen)
		c.mu.Unlock()
	}
	select {
	case <-p.killed:
		return errProcessKilled
	default:
		return nil
	}
}

// draw returns a random time below n. It depends on the operation and on the number of equal
// operations before it, and not on the order in which goroutines run.
func (p *clusterProcess) draw(operation string, n time.Duration) time.Duration {
	h := fnv.New64a()
	fmt.Fprint(h, p.c.seed, " ", p.worker, " ", p.start, " ", operation)
	key := h.Sum64()
	p.mu.Lock()
	p.count[key]++
	count := p.count[key]
	p.mu.Unlock()
	return time.Duration(rand.NewPCG(key, count).Uint64() % uint64(n))
}

// stable returns the name of a file without its random parts.
func stable(name string) string {
	final, _, _ := atomicfile.Temporary(name)
	base := path.Base(final)
	if strings.HasPrefix(base, "process-") {
		base = "process"
	}
	return base
}

// before precedes each file operation of the process.
func (p *clusterProcess) before(op faultfs.Op, name string) error {
	most := 10 * time.Millisecond * clusterWorkers
	if op == faultfs.Read || op == faultfs.Stat || p.c.settings.Store {
		most /= 8
	}
	if err := p.wait(p.draw(string(op)+" "+stable(name), most) + time.Duration(1+p.worker)); err != nil {
		return err
	}
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	now := time.Now()
	switch {
	case op.Reads():
	case now.Before(p.host.failing):
		return syscall.EIO
	case op == faultfs.Write && now.Before(p.c.fullUntil):
		return syscall.ENOSPC
	}
	return nil
}

// request precedes each request of the process.
func (p *clusterProcess) request(r *http.Request) (f objectstest.Fault, err error) {
	what := r.Method + " " + stable(r.URL.Path)
	if err := p.wait(p.draw(what, 60*time.Millisecond) + time.Duration(1+p.worker)); err != nil {
		return f, err
	}
	p.c.mu.Lock()
	now := time.Now()
	cut, flaky := now.Before(p.host.cut), now.Before(p.host.flaky)
	p.c.mu.Unlock()
	switch {
	case cut:
		return f, errUnreachable
	case !flaky:
		return f, nil
	}
	return objectstest.RandomFault(func(n int64) int64 { return int64(p.draw("fault "+what, time.Duration(n))) }), nil
}

// look returns the file system as a new host sees it.
func (c *cluster) look() filesystem.FS { return c.server.Host("checks").Process(nil) }

// found returns the files of the output, and whether the job is complete.
func (c *cluster) found() (files map[string]string, done bool, err error) {
	files = map[string]string{}
	if c.settings.Store {
		ctx := objects.WithNetwork(context.Background(), c.store.Network())
		folder := objects.Dir(c.output) + "/"
		for e, err := range objects.List(ctx, folder) {
			if err != nil {
				return nil, false, err
			}
			data, _, err := objects.ReadFile(ctx, e.URL, 1<<20)
			if err != nil {
				return nil, false, err
			}
			files[strings.TrimPrefix(e.URL, folder)] = string(data)
		}
	} else {
		look := c.look()
		for _, folder := range []string{"", "x" + FolderSuffix} {
			entries, err := look.ReadDir(path.Join(clusterFolder, folder))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, false, err
			}
			for _, e := range entries {
				name := path.Join(folder, e.Name())
				if e.IsDir() || strings.HasSuffix(name, atomicfile.TempSuffix) {
					continue
				}
				data, err := filesystem.ReadFile(look, path.Join(clusterFolder, name))
				if err != nil {
					return nil, false, err
				}
				files[name] = string(data)
			}
		}
	}
	job := "x" + FolderSuffix + "/"
	done = json.Valid([]byte(files[job+doneName]))
	maps.DeleteFunc(files, func(name, _ string) bool {
		file, ok := strings.CutPrefix(name, job)
		return ok && (strings.HasSuffix(file, locks.Suffix) || file == descriptionName || file == doneName)
	})
	return files, done, nil
}

// checkDone checks the output if the job is complete.
func (c *cluster) checkDone() {
	files, done, err := c.found()
	if err != nil {
		c.problem("%v", err)
	}
	if done {
		c.compare(files, false)
	}
}

// checkEnd checks the output after all hosts have lost power.
func (c *cluster) checkEnd() {
	if c.failed() {
		return
	}
	for _, h := range c.hosts {
		h.Crash()
	}
	files, done, err := c.found()
	if err == nil && !done {
		err = errors.New("the workers have ended, and the job is not complete")
	}
	if err != nil {
		c.problem("%v", err)
		return
	}
	c.compare(files, true)
}

// compare compares the output with the reference. At the end, there are no other files outside of
// the job's folder. In the folder, names of records that were removed may return after a loss of
// power. The next call of Run removes them.
func (c *cluster) compare(files map[string]string, end bool) {
	for _, name := range slices.Sorted(maps.Keys(c.reference.files)) {
		want := c.reference.files[name]
		if got, ok := files[name]; !ok {
			c.problem("%s of the complete job is missing", name)
		} else if got != want {
			c.problem("%s of the complete job has %d bytes, which differ from the %d bytes of one process", name,
				len(got), len(want))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if _, ok := c.reference.files[name]; !ok && end && !strings.Contains(name, "/") {
			c.problem("the complete job has left %s", name)
		}
	}
}

// claimFS is the file system of a process with the bug double-claim: if another process has the
// lock of a shard, this process believes that it has the lock, too, and it does not see the record
// of the shard.
type claimFS struct {
	filesystem.FS
	mu      sync.Mutex
	claimed map[string]string // the file with the text of this process, by lock
}

// claim returns the file with the text of a lock that this process claimed twice.
func (f *claimFS) claim(name string) (source string, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	source, ok = f.claimed[name]
	return source, ok
}

// Link implements [filesystem.FS].
func (f *claimFS) Link(from, to string) error {
	err := f.FS.Link(from, to)
	if errors.Is(err, fs.ErrExist) && strings.HasPrefix(path.Base(to), "shard-") {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.claimed[to] = from
		return nil
	}
	return err
}

// OpenFile implements [filesystem.FS].
func (f *claimFS) OpenFile(name string, flag int, perm fs.FileMode) (filesystem.File, error) {
	if source, ok := f.claim(name); ok {
		name = source
	}
	lock := strings.TrimSuffix(name, ".json") + locks.Suffix
	if _, ok := f.claim(lock); ok && flag == os.O_RDONLY {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return f.FS.OpenFile(name, flag, perm)
}

// Remove implements [filesystem.FS].
func (f *claimFS) Remove(name string) error {
	if _, ok := f.claim(name); ok {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.claimed, name)
		return nil
	}
	return f.FS.Remove(name)
}

// jobSimulation returns the simulation of tokenize jobs.
func jobSimulation(t *testing.T) *simulation.Simulation[clusterEvent] {
	objectstest.SetMemory(t)
	references := clusterReferences(t)
	return &simulation.Simulation[clusterEvent]{
		Plants: []string{doubleClaim},
		Schedule: func(seed uint64) (string, []clusterEvent) {
			settings, events := clusterSchedule(seed)
			return settings.String(), events
		},
		Run: func(ctx context.Context, seed uint64, events []clusterEvent, plant string, trace func(string)) (
			[]string, time.Duration) {
			return simulateCluster(ctx, references, seed, events, plant, trace)
		},
	}
}

// TestSimulateCluster simulates a few seeds. make simulate-cluster simulates one and prints its
// events, or many.
func TestSimulateCluster(t *testing.T) {
	s := jobSimulation(t)
	usual := 6
	if testing.Short() {
		usual = 2
	}
	s.Test(t, longtest.Rounds(usual, 500))
}

// The simulation finds a double claim of a shard.
func TestSimulateClusterPlants(t *testing.T) {
	if longtest.Rounds(0, 1) == 0 {
		t.Skip("a long test; run make test-long")
	}
	jobSimulation(t).Finds(t, doubleClaim, 2000)
}
