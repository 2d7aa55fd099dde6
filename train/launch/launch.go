// Package launch supervises the ranks of a training run: it starts them, sees that they make
// progress, and brings the run back when one of them dies, hangs or is found to compute wrongly, on
// the same hosts or on spare ones.
//
// [Run] is the whole of it: attempt after attempt, each of which a [Starter] starts, until the run
// is done, is stopped, or goes on failing. What is done about a failure depends on what it is
// ([Outcome]); most failures of large runs are of a kind that another host would not have avoided,
// and are not blamed on one. Retries are counted since the last progress, so that a run of months
// is not ended by its tenth failure.
//
// docs/guides/launch.md describes the behaviour, docs/formats/run.md the files: the record
// launch.jsonl, and the heartbeat by which rank 0 says what it is doing.
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

	"mula/train"
)

// Options describe a supervised run.
type Options struct {
	Output string  // run directory: what is locked, and where launch.jsonl and failures.jsonl are
	Log    string  // folder of the output of ranks; "" = Output/launch
	Start  Starter // starts the ranks of an attempt
	Ranks  int
	// in order of preference; those that Ranks does not need are spares. None: this machine,
	// whatever happens to it
	Hosts []Host

	// Shrink is asked when the hosts that are left have room for so many ranks only. It returns
	// with how many the run can go on, and what the environment of the ranks must have for that.
	// Nil: the run does not go on with fewer.
	Shrink func(room int) (ranks int, environment []string, err error)

	Limits   Limits
	Retries  int   // attempts that may fail one after the other without progress
	Progress int64 // steps beyond those ever reached that count as progress; at least 1
	// wait before the first retry without progress, the second, …; the last stands for all later
	// ones. None: no wait
	BackOff []time.Duration
	Grace   time.Duration // from SIGTERM to SIGKILL, for ranks that are to end

	BlameExpiry time.Duration // failures.jsonl keeps a host out of use for so long; 0 is for ever
	ForgetBlame bool          // use all hosts again, whatever failures.jsonl says

	Deadline time.Time // when the machine is taken away; zero: never
	// so long before the Deadline the run is stopped, but at most half the time until then; longer
	// if its checkpoints take longer
	Margin time.Duration

	// of the user or the scheduler: the first stops the run after a checkpoint; a second SIGINT or
	// SIGTERM kills it
	Signals <-chan os.Signal
	Notice  func(text string) // called with what people should know at once, from the goroutine of Run
}

// Outcome is how an attempt ended.
type Outcome string

// The outcomes.
const (
	Done          Outcome = "done"          // all ranks left with 0
	Stopped       Outcome = "stopped"       // by a signal or ahead of the deadline; saved, and not tried again
	Configuration Outcome = "configuration" // the ranks refuse what they were asked for (exit code 2): not tried again
	// a rank was killed by somebody else, its host could not be reached, or failures.jsonl names it
	HostLost Outcome = "host"
	Hang     Outcome = "hang" // no progress within the limit of a section
	// a rank got a SIGTERM from elsewhere; all ranks have saved, and the run is tried again
	Evicted Outcome = "evicted"
	Failed  Outcome = "failed" // anything else
)

// Exit codes of a supervised run, those of mula train among them.
const (
	ExitDone          = 0
	ExitFailed        = 1
	ExitConfiguration = 2
	ExitStopped       = 3
	ExitHang          = 124 // as timeout(1)
)

// Result is how a supervised run ended.
type Result struct {
	Outcome  Outcome   `json:"outcome"`
	Code     int       `json:"code"` // exit code
	Reason   string    `json:"reason"`
	Attempts []Attempt `json:"attempts"` // of this call
	Excluded []string  `json:"excluded"` // hosts that are not used any more
	Advice   *Advice   `json:"checkpoint_advice,omitempty"`
}

// Intervals of the supervisor.
const (
	lookEvery   = 500 * time.Millisecond // at the heartbeat
	cascadeWait = 5 * time.Second        // for the other ranks to leave by themselves after one has died
)

// Run supervises a run until it is done, is stopped, or cannot go on; Result.Reason says why. An
// error is returned if there was nothing to supervise: the run directory is another launcher's, a
// file cannot be written, or a starter cannot start anything.
func Run(ctx context.Context, o Options) (Result, error) {
	if o.Log == "" {
		o.Log = filepath.Join(o.Output, "launch")
	}
	if o.Ranks < 1 {
		return Result{}, fmt.Errorf("%d ranks; there must be at least 1", o.Ranks)
	}
	lock, err := lockRun(o.Output)
	if err != nil {
		return Result{}, err
	}
	defer lock.Close()
	record, number, err := openRecord(filepath.Join(o.Output, RecordFile))
	if err != nil {
		return Result{}, err
	}
	defer record.Close()
	failures, err := openFailures(filepath.Join(o.Output, failuresFile))
	if err != nil {
		return Result{}, err
	}
	s := &supervisor{Options: o, hosts: newPool(o.Hosts), watch: newWatch(o.Limits), failures: failures, number: number,
		record: record}
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

// A supervisor is a supervised run under way.
type supervisor struct {
	Options
	hosts    *pool
	watch    *watch
	failures *failureLog
	record   *os.File
	number   int // of the last attempt, over all launchers of the run
	attempts []Attempt

	stopping    bool      // the run was asked to stop
	interrupted bool      // by SIGINT or SIGTERM
	killed      bool      // by these twice
	environment []string  // of the ranks, from Shrink
	furthest    int64     // steps done by the attempt that came furthest
	counted     int64     // furthest when the failures were last set to 0
	failed      int       // attempts in a row, without progress
	stuck       int       // attempts in a row that ended before their first step was done
	wrong       *Failure  // the newest failure about wrong values: of one host, or of the run
	deadline    time.Time // zero for none, or if it has brought about the stop already
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
		if err := appendRecord(s.record, attempt); err != nil {
			return Result{}, err
		}
		s.attempts = append(s.attempts, attempt)
		end := s.judge(attempt)
		if end != nil {
			return *end, nil
		}
		wait := s.backOff()
		s.Notice(fmt.Sprintf("attempt %d: %s; the next one begins in %s", attempt.Number, attempt.Reason, wait))
		if err := s.wait(ctx, wait); err != nil {
			return Result{}, err
		}
		if s.stopping {
			return Result{Outcome: Stopped, Code: ExitStopped, Reason: "stopped while waiting for the next attempt; " +
				"run the " +
				"same command to resume from the newest checkpoint"}, nil
		}
	}
}

// place says on which host each rank runs next; with fewer ranks, if that is needed and possible.
func (s *supervisor) place() ([]string, error) {
	hosts, room := s.hosts.place(s.Ranks)
	if hosts != nil {
		return hosts, nil
	}
	lost := fmt.Sprintf("%d ranks do not fit on the hosts that are left, which have room for %d: %s", s.Ranks, room,
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

// attempt starts the ranks and watches them until the last has left.
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
	environment := append([]string{train.HeartbeatVariable + "=" + beats}, s.environment...)
	if os.Getenv("GOTRACEBACK") == "" {
		// A Go program that panics leaves with 2, the code of a wrong configuration; so it aborts
		// instead.
		environment = append(environment, "GOTRACEBACK=crash")
	}
	job, err := s.Start.Start(ctx, Ranks{Hosts: hosts, Dir: dir, Environment: environment})
	if err != nil {
		return a, fmt.Errorf("starting the ranks: %w", err)
	}
	w := &attemptWatch{s: s, job: job}
	s.watch.begin(time.Now())
	if err := w.run(ctx, beats); err != nil {
		return a, err
	}
	a.End = time.Now()
	a.beat(w.last)
	s.classify(&a, w)
	return a, nil
}

// makeFolder makes the folder of the next attempt. That of an attempt that is not in the record,
// because its launcher was killed, has a heartbeat that says nothing about this one, and its ranks
// may still be writing it: its number is left out.
func (s *supervisor) makeFolder() (string, error) {
	if err := os.MkdirAll(s.Log, 0o755); err != nil {
		return "", err
	}
	for {
		s.number++
		dir := filepath.Join(s.Log, fmt.Sprintf("attempt-%03d", s.number))
		if err := os.Mkdir(dir, 0o755); !errors.Is(err, fs.ErrExist) {
			return dir, err
		}
	}
}

// An attemptWatch is what is seen of the ranks of an attempt.
type attemptWatch struct {
	s   *supervisor
	job Job

	last      train.Heartbeat
	exits     []Exit    // before the launcher ended anything
	ended     bool      // the launcher has told the ranks to end, or has killed them
	hang      *overdue  // why, if they hung
	firstDied time.Time // when the first rank failed
	killAt    time.Time // when those that are left are killed; zero for never
}

// run returns when all ranks have left.
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
			if w.ended {
				break
			}
			w.exits = append(w.exits, e)
			if !e.fine() && w.firstDied.IsZero() {
				w.firstDied = time.Now()
			}
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
	beat, err := train.ReadHeartbeat(beats)
	if l := w.last; err == nil && (beat.Time != l.Time || beat.Section != l.Section || beat.Step != l.Step ||
		beat.Ended != l.Ended) {
		w.last = beat
		w.s.watch.see(beat, now)
	}
}

// act does what is due at a moment.
func (w *attemptWatch) act(now time.Time) {
	s := w.s
	switch {
	case !w.killAt.IsZero():
		if !now.Before(w.killAt) {
			w.job.Kill()
			// once more, for those that were just being started or are behind a remote shell that
			// has lost its host
			w.killAt = now.Add(s.Grace)
		}
	case !w.firstDied.IsZero():
		if now.Sub(w.firstDied) >= cascadeWait {
			w.end(now)
		}
	case s.watch.overdue(now) != nil:
		w.hang = s.watch.overdue(now)
		s.Notice(w.hang.String() + ": all ranks are ended")
		w.end(now)
	case !s.deadline.IsZero() && !now.Before(s.stopTime()):
		s.deadline = time.Time{}
		if !s.stopping {
			s.Notice(fmt.Sprintf("the time on this machine ends at %s: the run is stopped",
				s.Deadline.Format(time.TimeOnly)))
			s.stopping = true
			w.job.Stop()
		}
	}
}

// end ends the ranks that are left, by SIGTERM and after a while by SIGKILL.
func (w *attemptWatch) end(now time.Time) {
	w.ended = true
	w.job.End()
	w.killAt = now.Add(w.s.Grace)
}

// stopTime is when a run with a deadline is stopped: so that a step and twice the longest save fit
// in.
func (s *supervisor) stopTime() time.Time {
	margin := max(s.Margin, 2*s.watch.longest[train.SectionCheckpoint]+s.watch.longest[train.SectionStep])
	return s.Deadline.Add(-margin)
}

// signalled handles a signal to the launcher. w is nil between attempts. Ranks are killed by the
// second SIGINT or SIGTERM alone: schedulers send SIGUSR1 some time before they send SIGTERM, and
// the ranks may still be saving then.
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

// backOff is the wait before the next attempt.
func (s *supervisor) backOff() time.Duration {
	if len(s.BackOff) == 0 {
		return 0
	}
	return s.BackOff[max(min(s.failed, len(s.BackOff))-1, 0)]
}

// exclude takes hosts out of use that failures.jsonl blames from earlier launches.
func (s *supervisor) exclude() error {
	since := time.Time{}
	if s.BlameExpiry > 0 {
		since = time.Now().Add(-s.BlameExpiry)
	}
	found := blamed(s.failures.old, since)
	if s.ForgetBlame && len(found) > 0 {
		s.Notice("all hosts are used again: --forget-blame")
		return forgive(s.failures.path, "", "--forget-blame")
	}
	for _, f := range found {
		if s.hosts.lose(f.Host, f.String()) {
			s.Notice(fmt.Sprintf("host %s is not used: %s (%s; --forget-blame uses it again)", f.Host, f,
				s.failures.path))
		}
	}
	return nil
}

// advice is what the durations seen say about the interval of checkpoints; nil if they do not say
// enough.
func (s *supervisor) advice() *Advice {
	var seconds float64
	failures := 0
	for _, a := range s.attempts {
		seconds += a.End.Sub(a.Start).Seconds()
		if a.Outcome == HostLost || a.Outcome == Hang || a.Outcome == Failed {
			failures++
		}
	}
	saves, steps := s.watch.spent(train.SectionCheckpoint), s.watch.spent(train.SectionStep)
	if failures == 0 || saves.Times == 0 || steps.Times == 0 {
		return nil
	}
	return advise(saves.Seconds/float64(saves.Times), seconds/float64(failures), steps.Seconds/float64(steps.Times))
}
