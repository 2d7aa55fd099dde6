// Package launch supervises the ranks of a training run. It starts the ranks and watches their
// progress. When a rank dies, hangs or computes wrong values, it restarts the run on the same hosts
// or on spare hosts.
//
// [Run] makes attempts, which a [Starter] starts, until the run is done, is stopped, or fails
// repeatedly. The reaction to a failure depends on its [Outcome]. Most failures of large runs would
// also occur on another host, and Run blames no host for them. Retries are counted since the last
// progress, so a run of months does not end at its tenth failure.
//
// docs/guides/launch.md describes the behaviour. docs/formats/run.md describes the files: the
// record launch.jsonl, and the heartbeat with which rank 0 reports what it is doing.
package launch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"mula/internal/filesystem"
	"mula/train/record"
)

// Options describe a supervised run.
type Options struct {
	Output string        // run directory, which is locked; it has launch.jsonl and failures.jsonl
	FS     filesystem.FS // of Output and Log; nil: the machine's
	Log    string        // folder for the output of ranks; "" = Output/launch
	Start  Starter       // starts the ranks of an attempt
	Ranks  int
	// in order of preference; hosts that Ranks does not need are spares. None: this machine, also
	// after failures
	Hosts []Host

	// Shrink is called if the remaining hosts have slots for fewer ranks only. It returns the
	// number of ranks with which the run can continue, and variables for their environment. Nil:
	// the run does not continue with fewer ranks.
	Shrink func(room int) (ranks int, environment []string, err error)

	Limits   Limits
	Retries  int   // attempts in a row that may fail without progress
	Progress int64 // steps beyond the furthest step so far that count as progress; at least 1
	// wait before the first retry without progress, the second, …; the last value is for all later
	// retries. None: no wait
	BackOff []time.Duration
	Grace   time.Duration // time between the SIGTERM and the SIGKILL for a rank

	// after an attempt that ended before its first step, the time for a host to start a process;
	// a host that does not is out of use. 0: hosts are not probed
	ProbeLimit time.Duration

	// number of processes that wait to take over from ranks that die, without a restart; fewer if
	// the hosts have too few slots. The [Starter] must be a [Processes]
	HotSpares int

	// number of times that the run may be stopped and restarted to replace the host of a slow rank
	// by a spare; 0: never. See [HasSpare]
	ReplaceSlow int

	BlameExpiry time.Duration // time for which failures.jsonl keeps a host out of use; 0: forever
	ForgetBlame bool          // use all hosts, also hosts that failures.jsonl blames

	Deadline time.Time // when the scheduler ends the job; zero: never
	// time between the stop of the run and the Deadline, at most half the time until the Deadline;
	// longer if the checkpoints take longer
	Margin time.Duration

	// signals of the user or the scheduler: the first stops the run after a checkpoint; a second
	// SIGINT or SIGTERM kills it
	Signals <-chan os.Signal
	Notice  func(text string) // called with messages for the user, from the goroutine of Run
}

// Outcome is how an attempt ended.
type Outcome string

// The outcomes.
const (
	Done    Outcome = "done"    // all ranks exited with 0
	Stopped Outcome = "stopped" // by a signal or before the deadline; saved, and not retried
	// the ranks reject the configuration or the flags (exit code 2); not retried
	Configuration Outcome = "configuration"
	// another process killed a rank, its host could not be reached, or failures.jsonl names it
	HostLost Outcome = "host"
	Hang     Outcome = "hang" // no progress within the limit of a section
	// another process sent a SIGTERM to a rank; all ranks have saved, and the run is retried
	Evicted Outcome = "evicted"
	// stopped after a checkpoint, because a rank was slow and a spare replaces its host; retried
	Slow   Outcome = "slow"
	Failed Outcome = "failed" // any other failure
)

// Exit codes of a supervised run. They include the exit codes of mula train.
const (
	ExitDone          = 0
	ExitFailed        = 1
	ExitConfiguration = 2
	ExitStopped       = 3
	ExitHang          = 124 // as timeout(1)
)

// Result describes the end of a supervised run.
type Result struct {
	Outcome  Outcome   `json:"outcome"`
	Code     int       `json:"code"` // exit code
	Reason   string    `json:"reason"`
	Attempts []Attempt `json:"attempts"` // of this call
	Excluded []string  `json:"excluded"` // hosts that are out of use
	Advice   *Advice   `json:"checkpoint_advice,omitempty"`
}

// Intervals of the supervisor.
const (
	lookEvery   = 500 * time.Millisecond // between two reads of the heartbeat
	cascadeWait = 5 * time.Second        // for the other ranks to exit on their own after one has died
)

// Run supervises a run until it is done, is stopped, or cannot continue. Result.Reason has the
// reason. Run returns an error if another launcher has the run directory, if a file cannot be
// written, or if the starter cannot start the ranks.
func Run(ctx context.Context, o Options) (Result, error) {
	if o.Log == "" {
		o.Log = filepath.Join(o.Output, "launch")
	}
	if o.Ranks < 1 {
		return Result{}, fmt.Errorf("%d ranks; at least 1 is required", o.Ranks)
	}
	o.FS = filesystem.Default(o.FS)
	lock, err := lockRun(o.FS, o.Output)
	if err != nil {
		return Result{}, err
	}
	defer lock.Close()
	log, number, err := openRecord(o.FS, filepath.Join(o.Output, RecordFile))
	if err != nil {
		return Result{}, err
	}
	defer log.Close()
	failures, err := openFailures(o.FS, filepath.Join(o.Output, record.FailuresFile))
	if err != nil {
		return Result{}, err
	}
	s := &supervisor{Options: o, hosts: newPool(o.Hosts), watch: newWatch(o.Limits), failures: failures, number: number,
		log: log, replaced: map[int]string{}}
	if s.Notice == nil {
		s.Notice = func(string) {}
	}
	if err := s.exclude(); err != nil {
		return Result{}, err
	}
	result, err := s.run(ctx)
	result.Attempts, result.Excluded, result.Advice = s.attempts, s.hosts.lostNames(), s.advice()
	return result, err
}

// A supervisor is a supervised run in progress.
type supervisor struct {
	Options
	hosts    *pool
	watch    *watch
	failures *failureLog
	log      filesystem.File
	number   int // of the last attempt, counted over all launchers of the run
	attempts []Attempt

	stopping    bool            // the run was asked to stop
	interrupted bool            // by SIGINT or SIGTERM
	killed      bool            // by a second SIGINT or SIGTERM
	environment []string        // of the ranks, from Shrink
	furthest    int64           // largest number of steps done by an attempt
	counted     int64           // furthest when failed was last set to 0
	failed      int             // failures in a row without progress between them
	idle        int             // attempts in a row without progress
	stuck       int             // attempts in a row that ended before their first step was done
	wrong       *record.Failure // the newest failure with wrong values: of one host, or of the run
	replaced    map[int]string  // hosts of slow ranks that were replaced, by rank
	deadline    time.Time       // zero for none, or if the run is already stopped for it
}

// run does the attempts.
func (s *supervisor) run(ctx context.Context) (Result, error) {
	s.deadline = s.Deadline
	if !s.deadline.IsZero() {
		// else a job that is shorter than the margin would stop at once, and a chain of such jobs
		// would never end
		s.Margin = min(s.Margin, max(0, time.Until(s.deadline)/2))
	}
	for {
		hosts, err := s.place()
		if err != nil {
			return Result{Outcome: HostLost, Code: ExitFailed, Reason: err.Error()}, nil
		}
		attempt, err := s.attempt(ctx, hosts)
		if err != nil {
			return Result{}, err
		}
		if err := appendRecord(s.log, attempt); err != nil {
			return Result{}, err
		}
		s.attempts = append(s.attempts, attempt)
		end := s.judge(attempt)
		if end != nil {
			return *end, nil
		}
		wait := s.backOff()
		s.Notice(fmt.Sprintf("attempt %d: %s; the next attempt starts in %s", attempt.Number, attempt.Reason, wait))
		if err := s.wait(ctx, wait); err != nil {
			return Result{}, err
		}
		if s.stopping {
			return Result{Outcome: Stopped, Code: ExitStopped, Reason: "stopped while waiting for the next attempt; " +
				"run the same command to resume from the newest checkpoint"}, nil
		}
	}
}

// place chooses the host of each rank of the next attempt. It reduces the number of ranks if that
// is necessary and possible.
func (s *supervisor) place() ([]string, error) {
	hosts, room := s.hosts.place(s.Ranks)
	if hosts != nil {
		return hosts, nil
	}
	lost := fmt.Sprintf("%d ranks do not fit on the remaining hosts, which have slots for %d: %s", s.Ranks, room,
		s.hosts.lostText())
	if s.Shrink == nil {
		return nil, fmt.Errorf("%s. Name more hosts, repair these hosts and use them again with --forget-blame, or "+
			"allow fewer ranks with --elastic", lost)
	}
	if room == 0 {
		return nil, fmt.Errorf("%s. Name more hosts, or repair these hosts and use them again with --forget-blame",
			lost)
	}
	ranks, environment, err := s.Shrink(room)
	if err != nil {
		return nil, fmt.Errorf("%s, and the run cannot continue with fewer ranks: %w", lost, err)
	}
	s.Notice(fmt.Sprintf("%s. The run continues with %d ranks", lost, ranks))
	s.Ranks, s.environment = ranks, environment
	hosts, _ = s.hosts.place(ranks)
	return hosts, nil
}

// attempt starts the ranks and watches them until the last rank exits.
func (s *supervisor) attempt(ctx context.Context, hosts []string) (Attempt, error) {
	dir, err := s.makeFolder()
	if err != nil {
		return Attempt{}, err
	}
	a := Attempt{Number: s.number, With: s.Start.Name(), Hosts: hosts, Start: time.Now()}
	beats, err := filepath.Abs(filepath.Join(dir, "heartbeat"))
	if err != nil {
		return a, err
	}
	// These files exist before a host looks for them. On a network file system, a host that has not
	// found a file may not see it for a minute after another host has made it.
	for _, path := range []string{beats, filepath.Join(dir, askFile)} {
		if err := filesystem.WriteFile(s.FS, path, nil, 0o644); err != nil {
			return a, err
		}
	}
	environment := append([]string{record.HeartbeatVariable + "=" + beats,
		stallVariable + "=" + s.Limits.stall().String()}, s.environment...)
	if os.Getenv("GOTRACEBACK") == "" {
		// A Go program that panics exits with 2, the code for a wrong configuration. This makes it
		// abort instead.
		environment = append(environment, "GOTRACEBACK=crash")
	}
	ranks := Ranks{Hosts: hosts, Dir: dir, Environment: environment}
	if s.HotSpares > 0 && s.Ranks > 1 { // with one rank, no other rank has the state in memory
		ranks.Spares = s.hosts.free(hosts, s.HotSpares)
	}
	job, err := s.Start.Start(ctx, ranks)
	if err != nil {
		return a, fmt.Errorf("starting the ranks: %w", err)
	}
	w := &attemptWatch{s: s, job: job, dir: dir, hosts: hosts}
	if len(ranks.Spares) > 0 {
		hot, ok := job.(assigner)
		if !ok {
			job.Kill()
			return a, fmt.Errorf("hot spares need ranks that mula launch starts itself, not by %s", a.With)
		}
		w.hot = newHotSpares(hot, ranks)
	}
	s.watch.begin(time.Now())
	if err := w.run(ctx, beats); err != nil {
		return a, err
	}
	a.End = time.Now()
	a.beat(w.stepped)
	if w.hot != nil && len(w.hot.replaced) > 0 {
		a.Replaced = w.hot.replaced
		a.From, a.Setup, a.Steps = w.first.From, w.first.Spent[record.SectionSetup].Seconds, a.Step-w.first.From
	}
	s.classify(&a, w)
	s.probe(ctx, &a)
	return a, nil
}

// makeFolder makes the folder of the next attempt. It skips the number of an attempt that is not in
// the record because its launcher was killed: its ranks may still be writing the heartbeat.
func (s *supervisor) makeFolder() (string, error) {
	if err := filesystem.MkdirAll(s.FS, s.Log, 0o755); err != nil {
		return "", err
	}
	for {
		s.number++
		dir := filepath.Join(s.Log, fmt.Sprintf("attempt-%03d", s.number))
		if err := s.FS.Mkdir(dir, 0o755); !errors.Is(err, fs.ErrExist) {
			return dir, err
		}
	}
}

// An attemptWatch is the state of the ranks of an attempt.
type attemptWatch struct {
	s     *supervisor
	job   Job
	dir   string   // of the attempt
	hosts []string // of each rank

	hot     *hotSpares       // nil without hot spares
	last    record.Heartbeat // of the current group of ranks
	stepped record.Heartbeat // the last one after the setup, also of an earlier group
	first   record.Heartbeat // the first one after the setup

	exits     []Exit    // before the launcher ended any rank; with hot spares, of the current group
	ended     bool      // the launcher has told the ranks to end, or has killed them
	hang      *overdue  // why, if they hung
	answersBy time.Time // when the launcher ends ranks that hang
	slowSeen  bool      // a rank was slow; its host is replaced or stays
	replaced  *int      // the run was stopped because this rank was slow
	report    hangReport
	firstDied time.Time // when the first rank failed
	killAt    time.Time // when the remaining ranks are killed; zero for never
}

// run returns when all ranks have exited.
func (w *attemptWatch) run(ctx context.Context, beats string) error {
	s := w.s
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	exits, done := w.job.Exits(), ctx.Done()
	for exits != nil {
		select {
		case e, open := <-exits:
			if !open {
				exits = nil
				break
			}
			if !w.exited(&e) || w.ended {
				break
			}
			w.exits = append(w.exits, e)
			if !e.fine() && w.firstDied.IsZero() {
				w.firstDied = time.Now()
			}
		case <-w.decisions():
			w.replace(beats)
		case signal := <-s.Signals:
			s.signalled(w, signal)
		case now := <-tick.C:
			w.look(beats, now)
			w.act(now)
		case <-done:
			w.job.Kill()
			w.ended, done, w.killAt = true, nil, time.Now().Add(s.Grace)
		}
	}
	w.look(beats, time.Now())
	return ctx.Err()
}

// look reads the heartbeat.
func (w *attemptWatch) look(beats string, now time.Time) {
	beat, err := record.ReadHeartbeat(w.s.FS, beats)
	generation := 0
	if w.hot != nil {
		generation = w.hot.generation
	}
	if err == nil && beat.Generation != generation {
		return // of the group before
	}
	if l := w.last; err == nil && (beat.Time != l.Time || beat.Section != l.Section || beat.Step != l.Step ||
		beat.Ended != l.Ended) {
		w.last = beat
		w.s.watch.see(beat, now)
		if beat.Section == record.SectionSetup {
			return
		}
		w.stepped = beat
		if w.first.Section == "" {
			w.first = beat
		}
		if generation > 0 {
			r := &w.hot.replaced[len(w.hot.replaced)-1]
			r.From, r.Setup = beat.From, beat.Spent[record.SectionSetup].Seconds
		}
	}
}

// act does the actions that are due.
func (w *attemptWatch) act(now time.Time) {
	s := w.s
	switch {
	case !w.killAt.IsZero():
		if !now.Before(w.killAt) {
			w.job.Kill()
			// again, for ranks that were being started, or whose remote shell has lost its host
			w.killAt = now.Add(s.Grace)
		}
	case !w.firstDied.IsZero():
		if now.Sub(w.firstDied) >= cascadeWait {
			w.end(now)
		}
	case w.hang != nil:
		if !now.Before(w.answersBy) {
			// before the end: Open MPI continues stopped ranks, which then answer
			w.report = describeHang(s.FS, w.dir, s.Ranks, w.hosts)
			w.end(now)
		}
	case s.watch.overdue(now) != nil:
		w.hang = s.watch.overdue(now)
		s.Notice(w.hang.String() + "; ending all ranks, which write their stacks to " + w.dir)
		if err := askRanks(s.FS, w.dir); err != nil {
			s.Notice(fmt.Sprintf("the ranks cannot be asked for their stacks: %v", err))
		}
		w.job.Stacks()
		w.answersBy = now.Add(s.Limits.stall()/asksPerStall + answerTime)
	case w.last.Slow != nil && w.last.Ended == record.NotEnded && s.ReplaceSlow > 0 && !s.stopping &&
		!w.slowSeen:
		s.replaceSlow(w, *w.last.Slow)
	case !s.deadline.IsZero() && !now.Before(s.stopTime()):
		s.deadline = time.Time{}
		if !s.stopping {
			s.Notice(fmt.Sprintf("the job ends at %s; stopping the run",
				s.Deadline.Format(time.TimeOnly)))
			s.stopping = true
			w.job.Stop()
		}
	}
}

// replaceSlow stops the run after a checkpoint if a spare can replace the host of a slow rank. The
// next attempt then does not use the host.
func (s *supervisor) replaceSlow(w *attemptWatch, rank int) {
	if rank >= len(w.hosts) {
		return
	}
	host := w.hosts[rank]
	what := fmt.Sprintf("rank %d on %s is slow", rank, host)
	before, again := s.replaced[rank]
	w.slowSeen = true
	switch {
	case again && before != host:
		s.Notice(fmt.Sprintf("%s, as it was on %s, so the hosts are not the cause; the run continues", what, before))
	case len(s.replaced) >= s.ReplaceSlow:
		s.Notice(fmt.Sprintf("%s; the run continues, because --replace-slow allows %d", what, s.ReplaceSlow))
	case !s.hosts.replaceable(host, s.Ranks):
		s.Notice(what + ", and no spare can replace the host; the run continues")
	default:
		s.replaced[rank] = host
		s.hosts.lose(host, what)
		s.Notice(what + "; the run stops after a checkpoint, and a spare replaces the host")
		w.replaced = &rank
		w.job.Stop()
	}
}

// end ends the remaining ranks with SIGTERM, and later with SIGKILL.
func (w *attemptWatch) end(now time.Time) {
	w.ended = true
	w.job.End()
	w.killAt = now.Add(w.s.Grace)
}

// stopTime returns the time at which a run with a deadline is stopped. A step and twice the longest
// save fit between the stop and the deadline.
func (s *supervisor) stopTime() time.Time {
	margin := max(s.Margin, 2*s.watch.longest[record.SectionCheckpoint]+s.watch.longest[record.SectionStep])
	return s.Deadline.Add(-margin)
}

// signalled handles a signal to the launcher. w is nil between attempts. Only a second SIGINT or
// SIGTERM kills ranks: schedulers send SIGUSR1 some time before SIGTERM, and the ranks may still be
// saving then.
func (s *supervisor) signalled(w *attemptWatch, signal os.Signal) {
	first, again := !s.stopping, s.interrupted
	s.stopping = true
	s.interrupted = s.interrupted || signal == os.Interrupt || signal == syscall.SIGTERM
	switch {
	case w == nil:
	case first:
		s.Notice("stopping: the ranks finish their step and save; a second SIGTERM or Ctrl-C kills them")
		w.job.Stop()
	case again && (signal == os.Interrupt || signal == syscall.SIGTERM):
		if !s.killed {
			s.Notice("killing all ranks")
		}
		s.killed, w.ended = true, true
		w.job.Kill()
		w.killAt = time.Now().Add(s.Grace)
	}
}

// wait waits before the next attempt. A signal ends it.
func (s *supervisor) wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case signal := <-s.Signals:
		s.signalled(nil, signal)
	case <-ctx.Done():
		return ctx.Err()
	}
	if !s.deadline.IsZero() && !time.Now().Before(s.stopTime()) {
		s.stopping = true
	}
	return nil
}

// backOff is the wait before the next attempt. There is none after progress.
func (s *supervisor) backOff() time.Duration {
	if len(s.BackOff) == 0 || s.idle == 0 {
		return 0
	}
	return s.BackOff[min(s.idle, len(s.BackOff))-1]
}

// exclude takes hosts out of use that failures.jsonl blames for failures of earlier launches.
func (s *supervisor) exclude() error {
	since := time.Time{}
	if s.BlameExpiry > 0 {
		since = time.Now().Add(-s.BlameExpiry)
	}
	found := blamed(s.failures.old, since)
	if s.ForgetBlame && len(found) > 0 {
		s.Notice("all hosts are used again: --forget-blame")
		return forgive(s.FS, s.failures.path, "", "--forget-blame")
	}
	for _, f := range found {
		if s.hosts.lose(f.Host, f.String()) {
			s.Notice(fmt.Sprintf("host %s is not used: %s (%s; --forget-blame uses it again)", f.Host, f,
				s.failures.path))
		}
	}
	return nil
}

// advice returns the advice for the interval of checkpoints, or nil without enough measurements.
func (s *supervisor) advice() *Advice {
	var seconds float64
	failures := 0
	for _, a := range s.attempts {
		seconds += a.End.Sub(a.Start).Seconds()
		if a.Outcome == HostLost || a.Outcome == Hang || a.Outcome == Failed {
			failures++
		}
		failures += len(a.Replaced)
	}
	saves, steps := s.watch.spent(record.SectionCheckpoint), s.watch.spent(record.SectionStep)
	if failures == 0 || saves.Times == 0 || steps.Times == 0 {
		return nil
	}
	return advise(saves.Seconds/float64(saves.Times), seconds/float64(failures), steps.Seconds/float64(steps.Times))
}
