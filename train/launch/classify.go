package launch

import (
	"fmt"
	"slices"
	"syscall"

	"mula/train"
)

// An Exit is the end of a rank, or of a program that stands for all of them, such as mpiexec.
type Exit struct {
	Rank        int            // -1 if it is not known which
	Host        string         // "" if it is not known which
	Code        int            // exit code, if Signal is 0
	Signal      syscall.Signal // that ended it; 0 for none
	Shell       bool           // it is the remote shell to the host that has ended, on this machine
	Note        string         // what else is known about the cause; "" for nothing
	Unreachable bool           // the rank could not be started, or was lost, because its host does not answer
}

func (e Exit) fine() bool {
	return !e.Unreachable && e.Signal == 0 && (e.Code == ExitDone || e.Code == ExitStopped)
}

// String is the sentence about it.
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
		return fmt.Sprintf("host %s cannot be reached", e.Host)
	case e.Shell:
		who = fmt.Sprintf("the remote shell to %s, on this machine,", e.Host)
	}
	text := fmt.Sprintf("%s left with exit code %d", who, e.Code)
	if e.Signal != 0 {
		text = fmt.Sprintf("%s was ended by signal %d (%v)", who, int(e.Signal), e.Signal)
	}
	if e.Note != "" {
		text += ": " + e.Note
	}
	return text
}

// weight orders exits by how much they say about the cause of a failure: those of less weight
// follow from others. A rank whose peer has died leaves with an error, often before it is seen that
// the peer is dead, and an mpiexec ends the other ranks with SIGTERM.
func (e Exit) weight() int {
	switch {
	case e.fine():
		return 0
	case e.Unreachable:
		return 5
	case e.Shell: // whatever ended it: the rank follows
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

// cause is the exit that the others follow from: the first of those with the greatest weight. It is
// nil if there is none.
func cause(exits []Exit) *Exit {
	var first *Exit
	for i, e := range exits {
		if first == nil || e.weight() > first.weight() {
			first = &exits[i]
		}
	}
	return first
}

// classify says how an attempt ended, whose fault it was, and keeps it in mind for the hosts' next
// use.
func (s *supervisor) classify(a *Attempt, w *attemptWatch) {
	failures := s.failures.read()
	first := cause(w.exits)
	switch {
	case s.killed:
		a.Outcome, a.Reason = Stopped, "killed by a second signal"
	case w.last.Ended == train.EndedDone: // whatever ranks do that are taking leave
		a.Outcome, a.Reason = Done, "all steps are done"
	case s.stopping && (w.last.Ended == train.EndedStopped || w.last.Ended == train.EndedTerminated):
		a.Outcome, a.Reason = Stopped, "stopped after a checkpoint"
	case w.hang != nil: // although ranks that were ended for it may have saved and left as stopped ones do
		a.Outcome, a.Reason = Hang, w.hang.String()
	case w.last.Ended == train.EndedStopped && !w.ended:
		a.Outcome, a.Reason = Stopped, "a signal to the ranks stopped the run after a checkpoint"
	case first == nil:
		a.Outcome, a.Reason = Failed, "the ranks left without a word"
	case !first.fine():
		s.blame(a, *first, failures)
	case w.last.Ended == train.EndedTerminated ||
		slices.ContainsFunc(w.exits, func(e Exit) bool { return e.Code == ExitStopped }):
		a.Outcome, a.Reason = Evicted,
			"a rank got a SIGTERM that is not the launcher's, and the run stopped after a checkpoint"
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

// blame completes an attempt that a rank has ended.
func (s *supervisor) blame(a *Attempt, e Exit, failures []Failure) {
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
	case e.Signal == syscall.SIGABRT || e.Shell: // a program's own decision, or this machine's
		a.Outcome = Failed
	case e.Signal != 0:
		a.Outcome, a.Blamed = HostLost, e.Host
		s.hosts.suspect(e.Host)
	case e.Code == ExitConfiguration:
		a.Outcome = Configuration
	default:
		a.Outcome = Failed
		if len(failures) > 0 { // a rank has said what was wrong, and the others may have followed it
			f := failures[0]
			a.Reason, a.Rank, a.Blamed = f.String(), &f.Rank, f.Host
			s.hosts.suspect(f.Host)
		}
	}
}

// blameFor completes an attempt that wrong values have ended. A failure that comes again at the
// same step is the run's own: the bits of a run do not depend on the host.
func (s *supervisor) blameFor(a *Attempt, f Failure) {
	a.Outcome, a.Reason, a.Rank = Failed, f.String(), &f.Rank
	advice := "The learning rate is too high, or it is the data"
	if f.Kind == kindReplica {
		advice = "It is the machine, or an error in mula"
	}
	before := s.wrong
	if before != nil && f.repeats(*before) {
		a.genuine = advice
		switch {
		case f.damning() && f.Host != before.Host:
			a.Reason += fmt.Sprintf("; so it was on %s: it is not the hosts", before.Host)
			for _, host := range []string{before.Host, f.Host} {
				s.hosts.forgive(host)
				if err := forgive(s.failures.path, host, "the same failure on two hosts"); err != nil {
					s.Notice(fmt.Sprintf("host %s stays blamed: %v", host, err))
				}
			}
		default:
			a.Reason += "; so it was in an earlier attempt"
		}
		return
	}
	if !f.damning() {
		s.hosts.suspect(f.Host) // of a run of one rank: another host may do better
		return
	}
	a.Outcome, a.Blamed = HostLost, f.Host
	s.hosts.lose(f.Host, f.String())
}

// firstWrong is the first failure about wrong values.
func firstWrong(failures []Failure) *Failure {
	for _, f := range failures {
		if f.damning() || f.Kind == kindDiverged {
			return &f
		}
	}
	return nil
}

// judge counts an attempt, and returns the end of the run if there is no other attempt.
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
	code := ExitFailed
	if a.Outcome == Hang {
		code = ExitHang
	}
	if s.stopping {
		return end(code, "%s, while it was being stopped; run the same command to resume from the newest checkpoint",
			a.Reason)
	}
	if a.genuine != "" {
		return end(code, "%s. %s: see what the rank printed, in %s", a.Reason, a.genuine, s.Log)
	}
	switch {
	case a.Steps > 0:
		s.stuck = 0
	case !a.unreachable && a.Outcome != Evicted: // these say nothing about the run
		s.stuck++
	}
	if s.stuck >= 2 {
		return end(code, "%s; that is the second attempt in a row that ended before its first step was done, so "+
			"another one would, too: see what the ranks printed, in %s", a.Reason, s.Log)
	}
	s.furthest = max(s.furthest, a.Step)
	if s.furthest-s.counted >= max(s.Progress, 1) {
		s.counted, s.failed = s.furthest, 0
	}
	if s.failed++; s.failed > s.Retries {
		return end(code, "%s; that is failure %d without progress, and --retries is %d", a.Reason, s.failed, s.Retries)
	}
	return nil
}

// beat takes what the heartbeat says into the record of the attempt.
func (a *Attempt) beat(h train.Heartbeat) {
	if h.Section == "" || h.Section == train.SectionSetup {
		return
	}
	a.From, a.Step, a.Steps, a.Setup = h.From, h.Step, h.Step-h.From, h.Spent[train.SectionSetup].Seconds
}
