// Package cache builds a directory of files in units. A unit is the files of one data set and a
// marker file that shows that they are complete.
//
// Several processes, on one machine or on several machines that share the directory, can build a
// directory at once and divide the units between them. Locks ([locks]) only avoid duplicate work:
// if a lock fails, two processes write the same bytes under temporary names, and rename them one
// after the other. A reader may use a unit as soon as its marker exists. publish.go documents which
// files remain after a kill, and what the next run does with them.
package cache

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/locks"
	"mula/internal/objects"
	"mula/internal/quantity"
)

// StateDir is the subdirectory that holds the locks, and the settings and sizes of each unit.
// Trainers that read the directory ignore it.
const StateDir = ".mula"

const (
	// publishers is how many finished units may be synced to disk at once. Each waits for several
	// fsyncs in a row, and journaling file systems combine the fsyncs that wait at the same moment.
	// Each unit has a few open files.
	publishers = 64

	// checkers is how many units are checked at once before the work starts: on a network file
	// system every check is a round trip.
	checkers = 16

	// chunkEvents is how many bytes are written to a unit's files between two events.
	chunkEvents = 64 << 20
)

// A Unit is a set of files that become usable together.
type Unit struct {
	Name string // for progress and messages
	// the names of the data files in the directory, in the order in which they are published
	Files []string
	// the name of the file that is published last; its presence shows readers that the unit is
	// complete
	Marker string

	MarkerText []byte // the contents of the marker

	// Settings is JSON. It holds everything that affects the contents of the files but not their
	// names. A unit that was built with other settings is rebuilt.
	Settings json.RawMessage

	// Expect is the approximate total size of the files in bytes, which progress uses until Sizes
	// is called; 0 if unknown.
	Expect int64

	// Sizes returns the exact size of each of Files. The call may be expensive. It is made only for
	// units that are built, or that another program seems to have built.
	Sizes func(ctx context.Context) ([]int64, error)

	// Parts, if not nil, divides Files into groups that are computed together. The numbers are
	// indices of Files, and every file is in exactly one part. Several processes can build the
	// parts of a unit at once. One process builds its parts one after the other, in order.
	Parts [][]int

	// Build writes every byte of each file, in any order and from any number of goroutines, all of
	// which must have ended when Build returns. files[i] is nil if the file exists already or
	// belongs to another part than the one to build. Different units are built at the same time.
	Build func(ctx context.Context, files []io.WriterAt) error
}

// Options are the options of [Run].
type Options struct {
	// Threads is how many units are built at once; at least 1. A Build function may limit the
	// processor load further by waiting.
	Threads int

	// Resume keeps complete units. Without it, everything is rebuilt, except units that another
	// process completes during this run.
	Resume bool

	// Together means that this process is one of a group that builds the same units, such as the
	// ranks of a job. If a process of the group fails for any reason except cancellation, all
	// processes of the group stop with an error that names the failed process.
	Together bool

	// Progress, if not nil, receives events. Calls do not overlap. A slow call delays the work.
	Progress func(Event)

	// FS is the file system of the directory; nil = the machine's. A directory may be the URL of a
	// folder in a store if FS is an [objectfs.FS]. Locks do not use FS.
	FS filesystem.FS

	timing *timing // for tests; nil = defaultTiming
}

// timing holds the polling intervals.
type timing struct {
	locks.Timing
	// between checks of units that other processes hold: initial and maximum
	poll, maxPoll time.Duration
	// between checks for units that other processes completed, and for their failures
	watch time.Duration
}

// storeTiming is for directories in a store, where every look is a request.
var storeTiming = timing{locks.DefaultTiming, time.Second, 10 * time.Second, 5 * time.Second}

var defaultTiming = timing{locks.DefaultTiming, 50 * time.Millisecond, 2 * time.Second, time.Second}

// Stage is the state of a unit.
type Stage int

// The stages of a unit. Done, Kept and Foreign are final.
const (
	Waiting    Stage = iota // another process holds the unit: Event.Holder
	Building                // its files are being computed and written
	Publishing              // its files are being synced and renamed
	Done                    // this run built the unit
	Kept                    // the unit was complete, or another process completed it
	Foreign                 // the unit was complete, and another program built it
)

var stageNames = [...]string{"waiting", "building", "publishing", "done", "kept", "foreign"}

func (s Stage) String() string {
	if s < 0 || int(s) >= len(stageNames) {
		return fmt.Sprintf("Stage(%d)", int(s))
	}
	return stageNames[s]
}

// Event reports a stage of a unit and the progress of the whole run.
type Event struct {
	Unit   string // Unit.Name
	Stage  Stage
	Holder string // at Waiting: the process that holds the unit, for a message

	Finished, Units int // units at a final stage, and all units
	// bytes of data files written or found complete, and of all data files; Total is exact once all
	// sizes are known
	Bytes, Total int64
}

// Summary counts units by their final stage, and the bytes written.
type Summary struct {
	Built   int   // built by this run
	Kept    int   // complete before this run
	Shared  int   // completed by another process during this run
	Foreign int   // complete, and not built by mula
	Bytes   int64 // written to data files
}

// Add adds the counts of another run.
func (s *Summary) Add(o Summary) {
	s.Built += o.Built
	s.Kept += o.Kept
	s.Shared += o.Shared
	s.Foreign += o.Foreign
	s.Bytes += o.Bytes
}

// Run creates dir if necessary and builds the units that are not complete. A unit is complete if
// the marker holds its text, each file has its exact size, and the recorded settings are the
// unit's. A unit with no recorded settings was built by another program: Run keeps it too and
// counts it as Foreign.
//
// Run stops at the first error, which it returns with the name of the unit, or when ctx is done.
// Units that are complete by then are kept. Run returns an error if two units have a file in
// common, or if another process has meanwhile built one of the units with other settings.
func Run(ctx context.Context, dir string, units []Unit, o Options) (Summary, error) {
	r, err := newRun(dir, units, o)
	if err != nil {
		return Summary{}, err
	}
	err = r.run(ctx)
	if full := errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT); full && r.total > 0 {
		err = fmt.Errorf("%w; all files of this build in %s need about %s", err, dir, quantity.Bytes(r.total))
	}
	// they are kept: another process may already use them
	if n := r.summary.Built; err != nil && n > 0 {
		err = fmt.Errorf("%w; %d of %d sets were finished before and remain in %s, where the next build with the "+
			"same settings keeps them", err, n, len(units), dir)
	}
	return r.summary, err
}

// A run is one call of [Run].
type run struct {
	dir, state string
	o          Options
	timing     timing
	files      atomicfile.Files
	units      []*unit
	dirSync    syncer // of dir
	stateSync  syncer // of state
	locks      *locks.Set
	met        atomic.Bool // another process works on one of the units

	mu       sync.Mutex // guards the following fields, and calls of o.Progress
	summary  Summary
	finished int
	bytes    int64
	total    int64
}

// A unit is a Unit with the state of a run.
type unit struct {
	Unit
	before os.FileInfo // its record when the run started, nil if it had none
	total  int64       // its share of run.total
	// jobs of this run, counted from before the build until the result is recorded
	jobs    atomic.Int64
	written []atomic.Int64 // by file
	counted int64          // its share of run.bytes; guarded by run.mu
	ended   bool           // it has reached a final stage; guarded by run.mu
	first   bool           // it was not checked before
	waits   bool           // the last event was Waiting
	since   time.Time      // when the wait started; zero if it does not wait
}

func newRun(dir string, units []Unit, o Options) (*run, error) {
	r := &run{dir: dir, state: objects.Join(dir, StateDir), o: o, timing: defaultTiming,
		files: atomicfile.On(o.FS)}
	if objects.IsURL(dir) {
		r.timing = storeTiming
	}
	if o.timing != nil {
		r.timing = *o.timing
	}
	if r.o.Threads < 1 {
		return nil, fmt.Errorf("cannot build %s with %d threads; at least 1 is needed", dir, o.Threads)
	}
	taken := make(map[string]string)
	for i := range units {
		u := &unit{Unit: units[i], total: units[i].Expect, first: true, written: make([]atomic.Int64,
			len(units[i].Files))}
		for _, name := range append([]string{u.Marker}, u.Files...) {
			if name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
				return nil, fmt.Errorf("%s: invalid file name %q in %s", u.Name, name, dir)
			}
			if other, ok := taken[name]; ok {
				return nil, fmt.Errorf("%s: its file %s belongs to %s too; name every unit once", u.Name, name, other)
			}
			taken[name] = u.Name
		}
		if err := u.checkParts(); err != nil {
			return nil, fmt.Errorf("%s: %w", u.Name, err)
		}
		var err error
		if u.Settings, err = compact(u.Settings); err != nil {
			return nil, fmt.Errorf("%s: settings: %w", u.Name, err)
		}
		r.total += u.total
		r.units = append(r.units, u)
	}
	r.dirSync.dir, r.stateSync.dir = r.dir, r.state
	r.dirSync.files, r.stateSync.files = r.files, r.files
	return r, nil
}

// checkParts creates the single part of a unit without parts, and returns an error if the parts do
// not divide the files.
func (u *unit) checkParts() error {
	if len(u.Parts) < 2 {
		u.Parts = [][]int{nil}
		for i := range u.Files {
			u.Parts[0] = append(u.Parts[0], i)
		}
	}
	in := make([]bool, len(u.Files))
	for _, part := range u.Parts {
		for _, i := range part {
			if i < 0 || i >= len(in) || in[i] {
				return fmt.Errorf("the parts %v do not divide %d files", u.Parts, len(in))
			}
			in[i] = true
		}
	}
	if slices.Contains(in, false) {
		return fmt.Errorf("the parts %v do not divide %d files", u.Parts, len(in))
	}
	return nil
}

// compact removes the blanks of a JSON text. An empty text becomes null.
func compact(text json.RawMessage) (json.RawMessage, error) {
	if len(text) == 0 {
		return json.RawMessage("null"), nil
	}
	var b bytes.Buffer
	err := json.Compact(&b, text)
	return b.Bytes(), err
}

func (r *run) run(ctx context.Context) error {
	if info, err := r.files.FS().Stat(r.dir); err == nil && !info.IsDir() {
		return fmt.Errorf("%s is a file, not a cache directory; name another directory", r.dir)
	}
	left, err := r.survey(ctx)
	if err != nil {
		return err
	}
	if len(left) == 0 {
		_ = r.clean(ctx) // ignore errors: this process may have no right to write to a complete directory
		return nil
	}
	if err := r.prepare(ctx); err != nil {
		return err
	}
	if r.locks, err = locks.Open(ctx, nil, r.state, r.timing.Timing); err != nil {
		return err
	}
	defer r.locks.Close()
	told := ctx
	ctx, stop := context.WithCancelCause(ctx)
	var helpers sync.WaitGroup
	helpers.Go(func() { r.locks.Beat(ctx) })
	helpers.Go(func() { r.watch(ctx, stop) })
	defer func() {
		stop(nil)
		helpers.Wait()
	}()
	if err := r.rounds(ctx, left); err != nil {
		var other *FailedError
		if errors.As(context.Cause(ctx), &other) && (errors.Is(err, other) || errors.Is(err, context.Canceled)) {
			return other // otherwise this process itself failed at the same moment
		}
		if r.o.Together && told.Err() == nil {
			r.noteFailure(err)
		}
		return err
	}
	if r.o.Together {
		// of an earlier group; a remaining file is older than any process that checks it
		_ = r.files.Remove(r.failurePath())
	}
	return nil
}

// rounds builds the remaining units.
func (r *run) rounds(ctx context.Context, left []*unit) (err error) {
	// A round does the remaining work that no other process holds.
	pause := r.timing.poll
	for {
		before := len(left)
		if left, err = r.round(ctx, left); err != nil {
			return err
		}
		if len(left) == 0 {
			return r.checkNoOtherSettings(ctx)
		}
		if len(left) < before {
			pause = r.timing.poll
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: waiting for another process: %w", left[0].Name, context.Cause(ctx))
		case <-time.After(pause):
		}
		pause = min(pause*3/2, r.timing.maxPoll)
	}
}

// checkNoOtherSettings checks at the end that no unit was rebuilt with other settings after this
// run finished it. If two processes build the same directory with different settings, each rebuilds
// the other's units. Without this check both would succeed and leave a directory of mixed settings.
// With it, the process that ends last fails.
func (r *run) checkNoOtherSettings(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(checkers)
	for _, u := range r.units {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			rec, info, err := r.readRecord(u)
			if err == nil && info != nil && (rec == nil || !rec.of(u)) {
				err = fmt.Errorf("another process has built this unit with other settings in the meantime, so %s is "+
					"useless to both; use a separate directory for each, or run this again when the other process "+
					"has ended", r.dir)
			}
			return unitError(u, err)
		})
	}
	return g.Wait()
}

// survey checks all units before anything is written, and returns the incomplete ones.
func (r *run) survey(ctx context.Context) ([]*unit, error) {
	complete := make([]bool, len(r.units))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(checkers)
	for i, u := range r.units {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return context.Cause(ctx)
			}
			if !r.o.Resume {
				u.before, _ = r.files.FS().Stat(r.recordPath(u))
				return nil
			}
			var err error
			complete[i], _, err = r.skip(ctx, u)
			return unitError(u, err)
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var left []*unit
	for i, u := range r.units {
		u.first = false
		if !complete[i] {
			left = append(left, u)
		}
	}
	return left, nil
}

// prepare creates the directories.
func (r *run) prepare(ctx context.Context) error {
	if !objects.IsURL(r.state) {
		if err := os.MkdirAll(r.state, 0o777); err != nil {
			return fmt.Errorf("making the directory: %w", err)
		}
	}
	// The entry of the state directory must survive a crash, or its contents are lost.
	if err := r.dirSync.sync(); err != nil {
		return err
	}
	return r.clean(ctx)
}

// clean removes temporary files of killed processes.
func (r *run) clean(ctx context.Context) error {
	for _, dir := range []string{r.dir, r.state} {
		if _, err := r.files.Clean(dir); err != nil {
			return err
		}
	}
	return locks.Clean(ctx, nil, r.state)
}

// round tries each unit once. It returns the units that other processes hold, and the units that it
// lost to another process while building.
func (r *run) round(ctx context.Context, units []*unit) (left []*unit, err error) {
	// Buffered for all units, so that no send blocks.
	again := make(chan *unit, len(units))
	g, ctx := errgroup.WithContext(ctx)
	slots := make(chan struct{}, publishers)
	var next atomic.Int64
	for range min(r.o.Threads, len(units)) {
		g.Go(func() error {
			for {
				k := int(next.Add(1)) - 1
				if k >= len(units) {
					return nil
				}
				if ctx.Err() != nil {
					return unitError(units[k], context.Cause(ctx))
				}
				if err := r.try(ctx, units[k], again, func(j *job) error {
					select {
					case slots <- struct{}{}:
					case <-ctx.Done():
						j.abort()
						return context.Cause(ctx)
					}
					g.Go(func() error {
						defer func() { <-slots }()
						return unitError(j.unit, r.finish(ctx, j))
					})
					return nil
				}); err != nil {
					return unitError(units[k], err)
				}
			}
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	close(again)
	for u := range again {
		if !r.hasEnded(u) {
			left = append(left, u)
		}
	}
	return left, nil
}

func unitError(u *unit, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", u.Name, err)
}

// skip reports whether a unit needs no work. If so, it counts the unit, unless a job of this run
// may have completed it, and the job will count it. Otherwise it returns the findings.
func (r *run) skip(ctx context.Context, u *unit) (bool, findings, error) {
	f, err := r.inspect(ctx, u)
	if err != nil || !f.complete {
		return false, f, err
	}
	if u.jobs.Load() > 0 { // this run may have completed it: the job counts it at its end
		return true, f, nil
	}
	stage := Kept
	if f.foreign {
		stage = Foreign
	}
	r.resize(u, f.sizes)
	for i, size := range f.sizes {
		u.written[i].Store(size)
	}
	r.end(u, stage, func(s *Summary) {
		switch {
		case f.foreign:
			s.Foreign++
		case u.first:
			s.Kept++
		default:
			s.Shared++
		}
	})
	return true, f, nil
}

// lockPath returns the path of the lock of a unit's part. The unit's own lock is held while a part
// of it is published; a unit of one part needs no other lock.
func (r *run) lockPath(u *unit, part int) string {
	name := u.Marker
	if len(u.Parts) > 1 {
		name = fmt.Sprintf("%s.part%d", name, part)
	}
	return objects.Join(r.state, name+locks.Suffix)
}

// try builds the parts of a unit that are neither complete nor held by another process, and passes
// each to publish. The unit is sent to again, unless it is complete or its only part is being
// published.
func (r *run) try(ctx context.Context, u *unit, again chan<- *unit, publish func(*job) error) error {
	if r.hasEnded(u) {
		return nil
	}
	for part := range u.Parts {
		l, holder, err := r.locks.Acquire(r.lockPath(u, part))
		if err != nil {
			return err
		}
		if l == nil {
			r.met.Store(true)
			// The holder releases this lock last: a complete unit needs no waiting.
			if ok, _, err := r.skip(ctx, u); err != nil {
				return err
			} else if ok {
				break // unless it has not been counted, no work is left
			}
			now := time.Now()
			if u.since.IsZero() {
				u.since = now
			}
			// In shared work, some process always holds a unit: report only a long wait.
			if !u.waits && now.Sub(u.since) > r.timing.Beat/5 {
				u.waits = true
				r.event(u, Waiting, holder)
			}
			continue
		}
		u.waits, u.since = false, time.Time{}
		ok, f, err := r.skip(ctx, u) // check again under the lock
		if err != nil || ok {
			l.Release()
			if err == nil && !r.hasEnded(u) {
				again <- u
			}
			return err
		}
		if f.has(u.Parts[part]) && !f.has(u.all()) {
			l.Release() // the unit waits for another part
			continue
		}
		j, err := r.build(ctx, u, part, f, l)
		if err != nil {
			l.Release()
			return err
		}
		if err := publish(j); err != nil {
			return err
		}
	}
	again <- u // to check whether it is complete; not if it has ended by then
	return nil
}

// all returns the indices of a unit's files.
func (u *unit) all() (list []int) {
	for _, part := range u.Parts {
		list = append(list, part...)
	}
	return list
}

// hasEnded reports whether the unit needs no more work.
func (r *run) hasEnded(u *unit) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return u.ended
}

// build computes the missing files of a part under temporary names.
func (r *run) build(ctx context.Context, u *unit, part int, f findings, l *locks.Lock) (*job, error) {
	j := &job{unit: u, lock: l, findings: f, images: make([]*atomicfile.Image, len(u.Files))}
	if j.sizes == nil {
		var err error
		if j.sizes, err = r.sizes(ctx, u); err != nil {
			return nil, err
		}
	}
	u.jobs.Add(1) // until abort
	r.resize(u, j.sizes)
	for i, size := range j.sizes {
		if f.have[i] {
			u.written[i].Store(size)
		}
	}
	for _, i := range u.Parts[part] {
		if !f.have[i] {
			u.written[i].Store(0)
		}
	}
	r.event(u, Building, "")
	files, missing := make([]io.WriterAt, len(u.Files)), false
	for _, i := range u.Parts[part] {
		if f.have[i] {
			continue
		}
		name := u.Files[i]
		m, err := r.files.CreateImage(objects.Join(r.dir, name), j.sizes[i])
		if err != nil {
			j.abort()
			return nil, err
		}
		j.images[i], files[i], missing = m, &counted{m, r, u, i}, true
	}
	if missing {
		if err := u.Build(ctx, files); err != nil {
			j.abort()
			return nil, err
		}
	}
	return j, nil
}

// sizes returns the sizes of a unit's files.
func (r *run) sizes(ctx context.Context, u *unit) ([]int64, error) {
	sizes, err := u.Sizes(ctx)
	if err == nil && len(sizes) != len(u.Files) {
		err = fmt.Errorf("%d sizes for %d files", len(sizes), len(u.Files))
	}
	return sizes, err
}

// finish publishes a part of a unit, or abandons it if another process has taken it over.
func (r *run) finish(ctx context.Context, j *job) error {
	defer j.abort()
	r.event(j.unit, Publishing, "")
	complete, err := r.publish(ctx, j)
	j.lock.Release()
	if errors.Is(err, errLost) {
		return nil
	}
	if err != nil {
		return err
	}
	var bytes int64
	for i, m := range j.images {
		if m != nil {
			bytes += j.sizes[i]
		}
	}
	r.mu.Lock()
	r.summary.Bytes += bytes
	r.mu.Unlock()
	if complete {
		r.end(j.unit, Done, func(s *Summary) { s.Built++ })
	}
	return nil
}

// resize replaces the expected size of a unit.
func (r *run) resize(u *unit, sizes []int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total -= u.total
	u.total = 0
	for _, n := range sizes {
		u.total += n
	}
	r.total += u.total
}

// end reports that a unit has reached a final stage, unless that was reported before; count adds it
// to the summary.
func (r *run) end(u *unit, s Stage, count func(*Summary)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if u.ended {
		return
	}
	u.ended = true
	r.finished++
	count(&r.summary)
	r.tell(u, s, "")
}

// event updates the counts and calls Progress.
func (r *run) event(u *unit, s Stage, holder string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tell(u, s, holder)
}

// tell is event for callers that hold r.mu.
func (r *run) tell(u *unit, s Stage, holder string) {
	var n int64
	for i := range u.written {
		n += u.written[i].Load()
	}
	n = min(n, u.total)
	r.bytes += n - u.counted
	u.counted = n
	if r.o.Progress != nil {
		r.o.Progress(Event{Unit: u.Name, Stage: s, Holder: holder, Finished: r.finished, Units: len(r.units),
			Bytes: r.bytes, Total: r.total})
	}
}

// counted is a file of a unit whose written bytes are counted.
type counted struct {
	image *atomicfile.Image
	r     *run
	u     *unit
	file  int // index in the unit's files
}

func (c *counted) WriteAt(p []byte, off int64) (int, error) {
	n, err := c.image.WriteAt(p, off)
	now := c.u.written[c.file].Add(int64(n))
	if now/chunkEvents != (now-int64(n))/chunkEvents {
		c.r.event(c.u, Building, "")
	}
	return n, err
}
