// Package cache builds a directory of files that are made in units: the files of one data set, and
// a marker that says they are there.
//
// Several processes, on one machine or on several that share the directory, may build one directory
// at once and share the work by units. Locks ([locks]) only spare work: should one fail, two
// processes write the same bytes under temporary names and rename them, one after the other. A
// reader may use a unit as soon as its marker is there. What a kill leaves, and what the next run
// makes of it, is written down in publish.go.
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
	"mula/internal/locks"
	"mula/internal/quantity"
)

// StateDir is the folder inside the built directory that holds locks, and for each unit its
// settings and sizes. The trainers that read the directory do not look there.
const StateDir = ".mula"

const (
	// publishers is how many finished units may be on their way to the disk at once. Each waits for
	// several fsyncs in a row, which file systems with a journal carry out for all that wait at the
	// same moment; and each holds a handful of open files.
	publishers = 64

	// checkers is how many units are looked at at once before the work starts: on a network file
	// system every look is a round trip.
	checkers = 16

	// chunkEvents is how much may be written to a unit's files between two events.
	chunkEvents = 64 << 20
)

// Unit is a set of files that become usable together.
type Unit struct {
	Name   string   // for progress and messages
	Files  []string // the names of the data files in the directory, in the order in which they get them
	Marker string   // the name of the file that appears after them, by which readers know that they are there

	MarkerText []byte // what is in the marker

	// Settings is JSON: what the contents of the files depend on although their names do not tell.
	// A unit that was built with other settings is built anew.
	Settings json.RawMessage

	// Expect is about how many bytes the files will have, for the total of progress until Sizes was
	// asked; 0 if unknown.
	Expect int64

	// Sizes returns the exact size of each of Files. It may be costly: it is asked only for units
	// that are built, or that another program seems to have built.
	Sizes func(ctx context.Context) ([]int64, error)

	// Parts, if not nil, are the files that are computed together, as places in Files; every file
	// is in one part. A unit of several parts may be built by several processes at once, a part
	// each. One process builds its parts one after the other, in order.
	Parts [][]int

	// Build writes the files: every byte of each, in any order, from any number of goroutines, all
	// of which have ended when it returns. files[i] is nil when the file is there already, and for
	// all files of other parts than the one to be built. Different units are built at the same
	// time.
	Build func(ctx context.Context, files []io.WriterAt) error
}

// Options are the choices of [Run].
type Options struct {
	// Threads is how many units are built at once; at least 1. A Build that itself takes part in
	// bounding the processor's load waits there, not here.
	Threads int

	// Resume keeps what is complete. Otherwise all is built anew, except for what another process
	// finishes while this one runs.
	Resume bool

	// Together says that this process is one of a group that was started to build the same units:
	// the ranks of a job. The first error of any of them, other than that it was told to stop, then
	// ends all of them, with an error that says whose it was.
	Together bool

	// Progress, if not nil, is told what happens. Calls do not overlap; a slow one holds up the
	// work.
	Progress func(Event)

	timing *timing // for tests; nil = defaultTiming
}

// timing is how often things are looked at.
type timing struct {
	locks.Timing
	poll, maxPoll time.Duration // between looks at what others hold: at first, at most
	watch         time.Duration // between looks at what others have completed, and at whether they have failed
}

var defaultTiming = timing{locks.DefaultTiming, 50 * time.Millisecond, 2 * time.Second, time.Second}

// Stage is what has become of a unit.
type Stage int

// The stages of a unit. Done, Kept and Foreign are final.
const (
	Waiting    Stage = iota // another process holds it: Event.Holder
	Building                // its files are being computed and written
	Publishing              // they are brought to disk and get their names
	Done                    // it was built by this run
	Kept                    // it was complete, or another process has completed it
	Foreign                 // it was complete, and made by another program
)

var stageNames = [...]string{"waiting", "building", "publishing", "done", "kept", "foreign"}

func (s Stage) String() string {
	if s < 0 || int(s) >= len(stageNames) {
		return fmt.Sprintf("Stage(%d)", int(s))
	}
	return stageNames[s]
}

// Event is a step of a unit, and where the whole run is.
type Event struct {
	Unit   string // Unit.Name
	Stage  Stage
	Holder string // at Waiting: who has it, for a message

	Finished, Units int // units at a final stage, and all
	// bytes of data files written or found complete, and of all; Total is exact once all sizes are
	// known
	Bytes, Total int64
}

// Summary counts units by what became of them, and what was written.
type Summary struct {
	Built   int   // by this run
	Kept    int   // complete before
	Shared  int   // completed by another process while this run was on
	Foreign int   // complete, and not made by mula
	Bytes   int64 // written to data files
}

// Add adds what another run did.
func (s *Summary) Add(o Summary) {
	s.Built += o.Built
	s.Kept += o.Kept
	s.Shared += o.Shared
	s.Foreign += o.Foreign
	s.Bytes += o.Bytes
}

// Run builds units in dir, which is made if need be, except those that are complete: the marker
// holds its text, each file has its exact size, and the settings kept from building it are the
// unit's. Where no settings were kept, another program made the unit: it is kept too and counted as
// Foreign.
//
// The first error ends the run and is returned with the name of its unit; units complete by then
// stay. ctx ends it as well. Two units with a file in common are refused. That another process has
// meanwhile built one of the units with other settings is an error.
func Run(ctx context.Context, dir string, units []Unit, o Options) (Summary, error) {
	r, err := newRun(dir, units, o)
	if err != nil {
		return Summary{}, err
	}
	err = r.run(ctx)
	if full := errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT); full && r.total > 0 {
		err = fmt.Errorf("%w; all files of this build in %s take about %s", err, dir, quantity.Bytes(r.total))
	}
	if n := r.summary.Built; err != nil && n > 0 { // they stay: another process may use them by now
		err = fmt.Errorf("%w; %d of %d sets were finished before and remain in %s, where the next build with their "+
			"settings keeps them", err, n, len(units), dir)
	}
	return r.summary, err
}

// A run is one call of [Run].
type run struct {
	dir, state string
	o          Options
	timing     timing
	units      []*unit
	dirSync    syncer // of dir
	stateSync  syncer // of state
	locks      *locks.Set
	met        atomic.Bool // another process at work on one of the units

	mu       sync.Mutex // guards what follows, and calls of o.Progress
	summary  Summary
	finished int
	bytes    int64
	total    int64
}

// A unit with what a run knows of it.
type unit struct {
	Unit
	before  os.FileInfo    // its record when the run began, nil if it had none
	total   int64          // its share of run.total
	jobs    atomic.Int64   // of this run, from before they are built until what has become of them is counted
	written []atomic.Int64 // by file
	counted int64          // its share of run.bytes; guarded by run.mu
	ended   bool           // it has come to a final stage; guarded by run.mu
	first   bool           // it was not looked at before
	waits   bool           // the last event said that it waits
	since   time.Time      // of which on it waits; zero if it does not
}

func newRun(dir string, units []Unit, o Options) (*run, error) {
	r := &run{dir: dir, state: filepath.Join(dir, StateDir), o: o, timing: defaultTiming}
	if o.timing != nil {
		r.timing = *o.timing
	}
	if r.o.Threads < 1 {
		return nil, fmt.Errorf("building %s: %d threads; at least 1 is needed", dir, o.Threads)
	}
	taken := make(map[string]string)
	for i := range units {
		u := &unit{Unit: units[i], total: units[i].Expect, first: true, written: make([]atomic.Int64,
			len(units[i].Files))}
		for _, name := range append([]string{u.Marker}, u.Files...) {
			if name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
				return nil, fmt.Errorf("%s: %q is no name for a file in %s", u.Name, name, dir)
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
	return r, nil
}

// checkParts makes the one part of a unit that has none, and refuses parts that are no division of
// the files.
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

// compact removes the blanks of a JSON text; nothing at all becomes null.
func compact(text json.RawMessage) (json.RawMessage, error) {
	if len(text) == 0 {
		return json.RawMessage("null"), nil
	}
	var b bytes.Buffer
	err := json.Compact(&b, text)
	return b.Bytes(), err
}

func (r *run) run(ctx context.Context) error {
	if info, err := os.Stat(r.dir); err == nil && !info.IsDir() {
		return fmt.Errorf("%s is a file and cannot be the directory of the cache: name another", r.dir)
	}
	left, err := r.survey(ctx)
	if err != nil {
		return err
	}
	if len(left) == 0 {
		_ = r.clean() // no matter: a complete directory may be one that this process must not write to
		return nil
	}
	if err := r.prepare(); err != nil {
		return err
	}
	if r.locks, err = locks.Open(r.state, r.timing.Timing); err != nil {
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
			return other // else this process has failed by itself, at the same moment
		}
		if r.o.Together && told.Err() == nil {
			r.noteFailure(err)
		}
		return err
	}
	if r.o.Together {
		_ = os.Remove(r.failurePath()) // of a group before; one that is left is older than whoever comes to look
	}
	return nil
}

// rounds builds what is left.
func (r *run) rounds(ctx context.Context, left []*unit) (err error) {
	// One round goes over what is left and does what no other process has in hand.
	pause := r.timing.poll
	for {
		before := len(left)
		if left, err = r.round(ctx, left); err != nil {
			return err
		}
		if len(left) == 0 {
			return r.undisturbed(ctx)
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

// undisturbed makes sure at the end that no unit was built anew with other settings after this run
// was done with it. Of two processes that are told different things about one directory, each
// builds what the other has built; without this look both would end well, with a directory of which
// one part was built so and one part otherwise. As it is, the one that ends last finds out.
func (r *run) undisturbed(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(checkers)
	for _, u := range r.units {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			rec, info, err := r.readRecord(u)
			if err == nil && info != nil && (rec == nil || !rec.of(u)) {
				err = fmt.Errorf("another process has built it with other settings in the meantime, so that %s is "+
					"of no use to either: "+
					"give each a directory of its own, or run this again when the other has ended", r.dir)
			}
			return unitError(u, err)
		})
	}
	return g.Wait()
}

// survey looks at all units before anything is written, and returns those that are not complete.
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
				u.before, _ = os.Stat(r.recordPath(u))
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

// prepare makes the directories.
func (r *run) prepare() error {
	if err := os.MkdirAll(r.state, 0o777); err != nil {
		return fmt.Errorf("making the directory: %w", err)
	}
	// What is in the state directory must not vanish with its own entry in a crash.
	if err := r.dirSync.sync(); err != nil {
		return err
	}
	return r.clean()
}

// clean removes what killed processes left.
func (r *run) clean() error {
	for _, dir := range []string{r.dir, r.state} {
		if _, err := atomicfile.Clean(dir); err != nil {
			return err
		}
	}
	return locks.Clean(r.state)
}

// round tries each unit once. It returns those that other processes hold, and those that were lost
// to another process on the way.
func (r *run) round(ctx context.Context, units []*unit) (left []*unit, err error) {
	// Buffered for all: nobody waits to send.
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

// skip reports whether a unit needs no work, and counts it if so, or leaves that to the job of this
// run that may have completed it; otherwise it says what there is.
func (r *run) skip(ctx context.Context, u *unit) (bool, findings, error) {
	f, err := r.inspect(ctx, u)
	if err != nil || !f.complete {
		return false, f, err
	}
	if u.jobs.Load() > 0 { // it may be this run that has completed it: the end of the job tells
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

// lockPath is that of the lock of a unit's part. That of the unit is held while something of it is
// published; a unit of one part needs no other.
func (r *run) lockPath(u *unit, part int) string {
	name := u.Marker
	if len(u.Parts) > 1 {
		name = fmt.Sprintf("%s.part%d", name, part)
	}
	return filepath.Join(r.state, name+locks.Suffix)
}

// try builds the parts of a unit that are neither complete nor held by another process, and gives
// each to publish. Unless the unit is complete, or its one part is with publish, it goes to again.
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
			// The holder gives it back last: a complete unit needs no waiting for that.
			if ok, _, err := r.skip(ctx, u); err != nil {
				return err
			} else if ok {
				break // unless it has not been counted, there is nothing left to do
			}
			now := time.Now()
			if u.since.IsZero() {
				u.since = now
			}
			// Where work is shared, somebody holds something at any time: only a long wait is worth
			// a word.
			if !u.waits && now.Sub(u.since) > r.timing.Beat/5 {
				u.waits = true
				r.event(u, Waiting, holder)
			}
			continue
		}
		u.waits, u.since = false, time.Time{}
		ok, f, err := r.skip(ctx, u) // once more, now that nobody changes it any more
		if err != nil || ok {
			l.Release()
			if err == nil && !r.hasEnded(u) {
				again <- u
			}
			return err
		}
		if f.has(u.Parts[part]) && !f.has(u.all()) {
			l.Release() // another part is what the unit waits for
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
	again <- u // for a look at whether it is complete; not if it has ended by then
	return nil
}

// all are the places of a unit's files.
func (u *unit) all() (list []int) {
	for _, part := range u.Parts {
		list = append(list, part...)
	}
	return list
}

// hasEnded says whether nothing is left to be done about a unit.
func (r *run) hasEnded(u *unit) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return u.ended
}

// build computes the files of a part that are missing, under temporary names.
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
		m, err := atomicfile.CreateImage(filepath.Join(r.dir, name), j.sizes[i])
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

// sizes asks a unit for the sizes of its files.
func (r *run) sizes(ctx context.Context, u *unit) ([]int64, error) {
	sizes, err := u.Sizes(ctx)
	if err == nil && len(sizes) != len(u.Files) {
		err = fmt.Errorf("%d sizes for %d files", len(sizes), len(u.Files))
	}
	return sizes, err
}

// finish publishes a part of a unit, or gives it up if another process has taken it over.
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

// resize replaces what was expected of a unit's size.
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

// end says that a unit has come to a final stage, unless that has been said; count enters it in the
// summary.
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

// event brings the counts up to date and tells Progress.
func (r *run) event(u *unit, s Stage, holder string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tell(u, s, holder)
}

// tell is event for who has locked r.mu.
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
	file  int // place in the unit's files
}

func (c *counted) WriteAt(p []byte, off int64) (int, error) {
	n, err := c.image.WriteAt(p, off)
	now := c.u.written[c.file].Add(int64(n))
	if now/chunkEvents != (now-int64(n))/chunkEvents {
		c.r.event(c.u, Building, "")
	}
	return n, err
}
