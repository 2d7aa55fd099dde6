package launch

import (
	"fmt"
	"slices"
	"syscall"

	"mula/train/record"
)

// An Exit is the end of a rank, or of a program that runs all ranks, such as mpiexec.
type Exit struct {
	Process     int            // number in a job with hot spares, see assigner; Rank then depends on it
	Rank        int            // -1 if unknown
	Host        string         // "" if unknown
	Code        int            // exit code if Signal is 0
	Signal      syscall.Signal // that ended the process; 0 for none
	Shell       bool           // the process was the remote shell to the host, on this machine
	Note        string         // more about the cause; "" for nothing
	Unreachable bool           // the host of the rank does not answer
	Silent      bool           // the host does not report the end of its ranks
}

func (e Exit) fine() bool {
	return !e.Unreachable && !e.Silent && e.Signal == 0 && (e.Code == ExitDone || e.Code == ExitStopped)
}

// withSignal returns e with the signal that a shell or launcher reports as 128 plus its number.
func (e Exit) withSignal() Exit {
	if e.Signal == 0 && e.Code > 128 && e.Code < 128+65 {
		e.Signal, e.Code = syscall.Signal(e.Code-128), 0
	}
	return e
}

// String describes the exit.
func (e Exit) String() string {
	who := "a rank"
	if e.Rank >= 0 {
		who = fmt.Sprintf("rank %d", e.Rank)
	}
	if e.Host != "" {
		who += " on " + e.Host
	}
	switch {
	case e.Unreachable:
		who = fmt.Sprintf("host %s cannot be reached", e.Host)
		if e.Note != "" {
			who += ": " + e.Note
		}
		return who
	case e.Silent:
		return fmt.Sprintf("host %s does not report the end of its ranks, after the failure: %s", e.Host, e.Note)
	case e.Shell:
		who = fmt.Sprintf("the remote shell to %s, on this machine,", e.Host)
	}
	text := fmt.Sprintf("%s exited with code %d", who, e.Code)
	if e.Signal != 0 {
		text = fmt.Sprintf("%s was killed by signal %d (%v)", who, int(e.Signal), e.Signal)
	}
	if e.Note != "" {
		text += ": " + e.Note
	}
	return text
}

// weight orders exits by how likely they caused a failure. A rank whose peer died exits with an
// error, often before the launcher sees the peer's exit, and mpiexec ends the other ranks with
// SIGTERM.
func (e Exit) weight() int {
	switch {
	case e.fine():
		return 0
	case e.Unreachable:
		return 6
	case e.Silent:
		return 5
	case e.Shell: // the rank ends because of it
		return 4
	case slices.Contains([]syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE}, e.Signal):
		return 1
	case e.Signal != 0:
		return 4
	case e.Code == ExitConfiguration:
		return 3
	}
	return 2
}

// cause returns the exit that caused the others: the first with the greatest weight. It returns nil
// without exits.
func cause(exits []Exit) *Exit {
	var first *Exit
	for i, e := range exits {
		if first == nil || e.weight() > first.weight() {
			first = &exits[i]
		}
	}
	return first
}

// classify records how an attempt ended and which host to blame.
func (s *supervisor) classify(a *Attempt, w *attemptWatch) {
	failures := s.failures.read()
	if w.hot != nil {
		failures = append(w.hot.failures, failures...)
	}
	first := cause(w.exits)
	switch {
	case s.killed:
		a.Outcome, a.Reason = Stopped, "killed by a second signal"
	case w.last.Ended == record.EndedDone: // the exit codes of ranks that are done do not matter
		a.Outcome, a.Reason = Done, "all steps are done"
	case s.stopping && (w.last.Ended == record.EndedStopped || w.last.Ended == record.EndedTerminated):
		a.Outcome, a.Reason = Stopped, "stopped after a checkpoint"
	case w.replaced != nil && !s.stopping &&
		(w.last.Ended == record.EndedStopped || w.last.Ended == record.EndedTerminated):
		a.Outcome, a.Rank = Slow, w.replaced
		a.Blamed = w.hosts[*w.replaced]
		a.Reason = s.hosts.lost[a.Blamed] + "; the run stopped after a checkpoint, and a spare replaces the host"
	case w.hang != nil && (first == nil || !first.Unreachable && !first.Silent):
		// ranks that were told to end may have saved and exited like stopped ranks
		a.Outcome, a.Reason = Hang, w.hang.String()
		if w.report.text != "" {
			a.Reason += w.report.text
			a.Rank = &w.report.first
		}
		// The run may be the cause, so the host stays in use if no other is left.
		if host := w.report.host; s.hosts.has(host) {
			a.Blamed = host
			s.hosts.suspect(host)
		}
	case w.last.Ended == record.EndedStopped && !w.ended:
		a.Outcome, a.Reason = Stopped, "a signal to the ranks stopped the run after a checkpoint"
	case first == nil:
		a.Outcome, a.Reason = Failed, "the ranks exited without a message"
	case !first.fine():
		s.blame(a, *first, failures)
	case w.last.Ended == record.EndedTerminated ||
		slices.ContainsFunc(w.exits, func(e Exit) bool { return e.Code == ExitStopped }):
		a.Outcome, a.Reason = Evicted,
			"a rank got a SIGTERM from another process, and the run stopped after a checkpoint"
		if s.stopping {
			a.Outcome, a.Reason = Stopped, "stopped after a checkpoint"
		}
	default:
		a.Outcome, a.Reason = Done, "all steps are done"
	}
	if f := firstWrong(failures); f != nil {
		s.wrong = f
	}
}

// blame completes an attempt that the exit of a rank ended.
func (s *supervisor) blame(a *Attempt, e Exit, failures []record.Failure) {
	a.Reason, a.Rank = e.String(), &e.Rank
	if f := firstWrong(failures); f != nil {
		s.blameFor(a, *f)
		return
	}
	switch {
	case e.Unreachable:
		a.Outcome, a.Blamed = HostLost, e.Host
		a.unreachable = true
		s.hosts.lose(e.Host, e.String())
	case e.Silent:
		a.Outcome, a.Blamed = HostLost, e.Host
		s.hosts.suspect(e.Host)
	case e.Signal == syscall.SIGABRT || e.Shell: // caused by the program, or by this machine
		a.Outcome = Failed
	case e.Signal != 0:
		a.Outcome, a.Blamed = HostLost, e.Host
		s.hosts.suspect(e.Host)
	case e.Code == ExitConfiguration:
		a.Outcome = Configuration
	default:
		a.Outcome = Failed
		if len(failures) > 0 { // a rank has recorded the cause
			f := failures[0]
			a.Reason, a.Rank, a.Blamed = f.String(), &f.Rank, f.Host
			s.hosts.suspect(f.Host)
		}
	}
}

// blameFor completes an attempt that wrong values ended. A failure that repeats at the same step is
// caused by the run, because its values do not depend on the host.
func (s *supervisor) blameFor(a *Attempt, f record.Failure) {
	a.Outcome, a.Reason, a.Rank = Failed, f.String(), &f.Rank
	advice := "The learning rate is too high, or the data is at fault"
	if f.Kind == record.FailureReplica {
		advice = "The machine is at fault, or mula has a bug"
	}
	before := s.wrong
	if before != nil && f.Repeats(*before) {
		a.genuine = advice
		switch {
		case f.WrongValues() && f.Host != before.Host:
			a.Reason += fmt.Sprintf("; %s had the same failure, so the hosts are not the cause", before.Host)
			for _, host := range []string{before.Host, f.Host} {
				s.hosts.forgive(host)
				if err := forgive(s.FS, s.failures.path, host, "the same failure on two hosts"); err != nil {
					s.Notice(fmt.Sprintf("host %s stays out of use: %v", host, err))
				}
			}
		default:
			a.Reason += "; an earlier attempt had the same failure"
		}
		return
	}
	if !f.WrongValues() {
		s.hosts.suspect(f.Host) // a run of one rank may succeed on another host
		return
	}
	a.Outcome, a.Blamed = HostLost, f.Host
	s.hosts.lose(f.Host, f.String())
}

// firstWrong returns the first failure with wrong values.
func firstWrong(failures []record.Failure) *record.Failure {
	for _, f := range failures {
		if f.WrongValues() || f.Kind == record.FailureDiverged {
			return &f
		}
	}
	return nil
}

// judge counts an attempt. It returns a result if the run has no further attempt.
func (s *supervisor) judge(a Attempt) *Result {
	end := func(code int, format string, args ...any) *Result {
		return &Result{Outcome: a.Outcome, Code: code, Reason: fmt.Sprintf(format, args...)}
	}
	switch a.Outcome {
	case Done:
		return end(ExitDone, "%s", a.Reason)
	case Stopped:
		if s.killed {
			return end(ExitFailed, "%s; run the same command to resume from the newest checkpoint", a.Reason)
		}
		return end(ExitStopped, "%s; run the same command to resume", a.Reason)
	case Configuration:
		return end(ExitConfiguration,
			"%s: the configuration or the command line is invalid; see the messages in %s", a.Reason, s.Log)
	}
	s.furthest = max(s.furthest, a.Step)
	if a.Outcome == Slow && !s.stopping { // at most --replace-slow times
		return nil
	}
	code := ExitFailed
	if a.Outcome == Hang {
		code = ExitHang
	}
	if s.stopping {
		return end(code, "%s, while it was being stopped; run the same command to resume from the newest checkpoint",
			a.Reason)
	}
	if a.genuine != "" {
		return end(code, "%s. %s; see the rank's output in %s", a.Reason, a.genuine, s.Log)
	}
	switch {
	case a.Steps > 0:
		s.stuck = 0
	case !a.unreachable && a.Outcome != Evicted: // the run is not the cause
		s.stuck++
	}
	if s.stuck >= 2 {
		return end(code,
			"%s; two attempts in a row ended before their first step was done, so mula launch does not try "+
				"again; see the ranks' output in %s", a.Reason, s.Log)
	}
	s.idle++
	if s.furthest-s.counted >= max(s.Progress, 1) {
		s.counted, s.failed, s.idle = s.furthest, 0, 0
	}
	if s.failed++; s.failed > s.Retries {
		return end(code, "%s; this was failure %d without progress, and --retries is %d", a.Reason, s.failed, s.Retries)
	}
	return nil
}

// beat copies the last heartbeat after the setup into the record of the attempt.
func (a *Attempt) beat(h record.Heartbeat) {
	if h.Section == "" {
		return
	}
	a.From, a.Step, a.Steps, a.Setup = h.From, h.Step, h.Step-h.From, h.Spent[record.SectionSetup].Seconds
}
