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
	case e.Signal != 0:
		return fmt.Sprintf("%s was ended by signal %d (%v)", who, int(e.Signal), e.Signal)
	}
	return fmt.Sprintf("%s left with exit code %d", who, e.Code)
}

// weight orders exits by how much they say about the cause of a failure: those of less weight follow from others. A rank whose peer has died
// leaves with an error, often before it is seen that the peer is dead, and an mpiexec ends the other ranks with SIGTERM.
func (e Exit) weight() int {
	switch {
	case e.fine():
		return 0
	case e.Unreachable:
		return 5
	case slices.Contains([]syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE}, e.Signal):
		return 1
	case e.Signal != 0:
		return 4
	case e.Code == ExitConfiguration:
		return 3
	}
	return 2
}

// cause is the exit that the others follow from: the first of those with the greatest weight. It is nil if there is none.
func cause(exits []Exit) *Exit {
	var first *Exit
	for i, e := range exits {
		if first == nil || e.weight() > first.weight() {
			first = &exits[i]
		}
	}
	return first
}

// classify says how an attempt ended, whose fault it was, and keeps it in mind for the hosts' next use.
func (s *supervisor) classify(a *Attempt, w *attemptWatch) {
	failures := s.failures.read()
	first := cause(w.exits)
	switch {
	case s.killed:
		a.Outcome, a.Reason = Stopped, "killed by a second signal"
	case w.last.Ended == train.EndedDone: // whatever ranks do that are taking leave
		a.Outcome, a.Reason = Done, "all steps are done"
	case w.last.Ended == train.EndedStopped:
		a.Outcome, a.Reason = Stopped, "stopped after a checkpoint"
	case w.hang != nil:
		a.Outcome, a.Reason = Hang, w.hang.String()
	case first == nil:
		a.Outcome, a.Reason = Failed, "the ranks left without a word"
	case !first.fine():
		s.blame(a, *first, failures)
	case slices.ContainsFunc(w.exits, func(e Exit) bool { return e.Code == ExitStopped }):
		a.Outcome, a.Reason = Stopped, "stopped after a checkpoint"
	default:
		a.Outcome, a.Reason = Done, "all steps are done"
	}
	if f := firstDamning(failures); f != nil {
		s.notFinite = f
	}
}

// blame completes an attempt that a rank has ended.
func (s *supervisor) blame(a *Attempt, e Exit, failures []Failure) {
	a.Reason, a.Rank = e.String(), &e.Rank
	if f := firstDamning(failures); f != nil {
		a.Outcome, a.Reason, a.Rank = HostLost, f.String(), &f.Rank
		if before := s.notFinite; before != nil && before.Kind == f.Kind && before.Step == f.Step && before.Host != f.Host {
			// The same on two hosts is the run's own doing: neither is to blame.
			a.Outcome, a.Reason = Failed, fmt.Sprintf("%s; so it was on %s: it is not the hosts", f, before.Host)
			s.hosts.forgive(before.Host)
			a.genuine = true
			return
		}
		a.Blamed = f.Host
		s.hosts.lose(f.Host, f.String())
		return
	}
	switch {
	case e.Unreachable:
		a.Outcome, a.Blamed = HostLost, e.Host
		a.unreachable = true
		s.hosts.lose(e.Host, e.String())
	case e.Signal == syscall.SIGABRT: // a program's own decision
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

// firstDamning is the first failure that speaks against a host.
func firstDamning(failures []Failure) *Failure {
	for _, f := range failures {
		if f.damning() {
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
			return end(ExitFailed, "%s; the same command goes on from the newest checkpoint", a.Reason)
		}
		return end(ExitStopped, "%s; the same command goes on from there", a.Reason)
	case Configuration:
		return end(ExitConfiguration, "%s, which means that what it was asked for cannot be done: see what it printed, in %s", a.Reason, s.Log)
	}
	code := ExitFailed
	if a.Outcome == Hang {
		code = ExitHang
	}
	if s.stopping {
		return end(code, "%s, while it was being stopped; the same command goes on from the newest checkpoint", a.Reason)
	}
	if a.genuine {
		return end(code, "%s. The learning rate is too high, or it is the data: see what the rank printed, in %s", a.Reason, s.Log)
	}
	switch {
	case a.Steps > 0:
		s.stuck = 0
	case !a.unreachable: // a host that does not answer says nothing about the run
		s.stuck++
	}
	if s.stuck >= 2 {
		return end(code, "%s; that is the second attempt in a row that ended before its first step was done, so another one would, too: see what the ranks printed, in %s", a.Reason, s.Log)
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
