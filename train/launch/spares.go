package launch

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"mula/train/record"
)

// An assigner is a [Job] with hot spares: processes that wait until they become ranks. The
// processes have numbers in the order of their start. The ranks of the start have the first ones,
// and [Exit.Process] names them.
type assigner interface {
	Job
	// Assign tells processes that they are the ranks, in this order, of a new group. Processes with
	// a rank in the group before keep it. generation counts the groups from 0, the group of the
	// start.
	Assign(generation int, processes []int) error
	// AddSpare starts one more hot spare, and returns its number.
	AddSpare(host string) (int, error)
	// Release tells all processes that no new group follows. Hot spares then exit, and so do ranks
	// that have lost another rank.
	Release()
}

const (
	// exits of the other ranks of a host follow the first one within this time
	gatherExits = 50 * time.Millisecond
	// After an error that all ranks have, they exit within this time. None of them is replaced.
	gatherErrors = 500 * time.Millisecond
	// mostBarren is the number of replacements in a row without a step between them
	mostBarren = 3
)

// A Replacement is a new group of ranks in which hot spares have replaced dead ranks.
type Replacement struct {
	Time   time.Time `json:"time"` // when the launcher saw the first exit
	Reason string    `json:"reason"`
	Ranks  []int     `json:"ranks"` // that died
	Lost   []string  `json:"lost"`  // their hosts
	Hosts  []string  `json:"hosts"` // of the spares that replaced them
	Step   int64     `json:"step"`  // steps done before, including steps that were lost then
	From   int64     `json:"from"`  // steps done in the state from which the new group resumed
	// from the start of rank 0 in the new group to its first step; 0 if it did no step
	Setup float64 `json:"setup_seconds"`
}

// hotSpares are the processes of an attempt with hot spares.
type hotSpares struct {
	job        assigner
	generation int
	processes  []int // of each rank
	alive      []bool
	waiting    []hotSpare
	decide     *time.Timer // for the replacement of dead ranks
	deciding   bool
	released   bool
	barren     int   // replacements since the last step
	reached    int64 // steps done when barren was last set
	failures   []record.Failure
	replaced   []Replacement
}

// A hotSpare is a process that waits for a rank.
type hotSpare struct {
	process int
	host    string
}

func newHotSpares(job assigner, ranks Ranks) *hotSpares {
	h := &hotSpares{job: job, decide: time.NewTimer(0), reached: -1}
	h.decide.Stop()
	for rank := range ranks.Hosts {
		h.processes, h.alive = append(h.processes, rank), append(h.alive, true)
	}
	for i, host := range ranks.Spares {
		h.waiting = append(h.waiting, hotSpare{len(ranks.Hosts) + i, host})
	}
	return h
}

// exited records the exit of a process. It sets the rank of the process, and reports whether the
// process was a rank.
func (h *hotSpares) exited(e *Exit) bool {
	if e.Rank = slices.Index(h.processes, e.Process); e.Rank >= 0 {
		h.alive[e.Rank] = false
		return true
	}
	h.waiting = slices.DeleteFunc(h.waiting, func(s hotSpare) bool { return s.process == e.Process })
	return false
}

// dead returns the ranks that have exited.
func (h *hotSpares) dead() (ranks []int) {
	for rank, alive := range h.alive {
		if !alive {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

func (h *hotSpares) release() {
	if !h.released {
		h.released = true
		h.job.Release()
	}
}

// exited handles the exit of a process, and reports whether it was a rank.
func (w *attemptWatch) exited(e *Exit) bool {
	h := w.hot
	if h == nil {
		return true
	}
	if !h.exited(e) {
		if !h.released && !w.ended && !w.s.stopping && w.replaced == nil {
			w.s.Notice("a hot spare ended before it was needed: " + e.String())
		}
		return false
	}
	wait := gatherErrors
	if e.Signal != 0 || e.Unreachable {
		wait = gatherExits
	}
	switch {
	case len(h.dead()) == len(h.alive):
		h.release()
		if w.killAt.IsZero() { // hot spares that do not exit, because they are stopped
			w.killAt = time.Now().Add(w.s.Grace)
		}
	case h.released || w.ended || e.fine():
	case !h.deciding || wait == gatherExits:
		h.deciding = true
		h.decide.Reset(wait)
	}
	return true
}

// decisions returns a channel that receives when dead ranks are to be replaced.
func (w *attemptWatch) decisions() <-chan time.Time {
	if w.hot == nil {
		return nil
	}
	return w.hot.decide.C
}

// replace replaces the dead ranks by hot spares. If that is not possible, all ranks exit, and the
// next attempt restarts the run.
func (w *attemptWatch) replace(beats string) {
	s, h := w.s, w.hot
	h.deciding = false
	w.look(beats, time.Now())
	h.failures = append(h.failures, s.failures.read()...)
	why := w.irreplaceable()
	if why == "" {
		why = w.assign()
	}
	if why != "" && !h.released {
		if !w.ended {
			s.Notice(fmt.Sprintf("%s; no hot spare takes over: %s", cause(w.exits), why))
		}
		h.release()
	}
}

// irreplaceable returns the reason why hot spares cannot replace the dead ranks, or "".
func (w *attemptWatch) irreplaceable() string {
	s, h := w.s, w.hot
	if w.stepped.Step > h.reached {
		h.barren = 0
	}
	dead, wrong := len(h.dead()), firstWrong(h.failures)
	switch {
	case s.stopping || s.killed || w.replaced != nil:
		return "the run is being stopped"
	case w.ended || w.hang != nil || h.released:
		return "all ranks are being ended"
	case w.last.Ended != record.NotEnded || slices.ContainsFunc(w.exits, Exit.fine):
		return "the run has ended"
	case wrong != nil:
		return wrong.String()
	case slices.ContainsFunc(w.exits, func(e Exit) bool { return e.Signal == 0 && e.Code == ExitConfiguration }):
		return "the configuration or the command line is invalid"
	case h.generation == 0 && w.stepped.Section == "":
		return "the run was before its first step"
	case dead == len(h.alive):
		return "all ranks are dead"
	case dead > len(h.waiting):
		return fmt.Sprintf("%d dead, and %d waiting", dead, len(h.waiting))
	case h.barren >= mostBarren:
		return fmt.Sprintf("%d replacements in a row were without a step", h.barren)
	}
	return ""
}

// assign forms a new group. It returns the reason if that fails.
func (w *attemptWatch) assign() string {
	s, h := w.s, w.hot
	r := Replacement{Time: w.firstDied, Reason: cause(w.exits).String(), Ranks: h.dead(), Step: w.stepped.Step}
	processes, hosts := slices.Clone(h.processes), slices.Clone(w.hosts)
	for i, rank := range r.Ranks {
		r.Lost = append(r.Lost, hosts[rank])
		processes[rank], hosts[rank] = h.waiting[i].process, h.waiting[i].host
		r.Hosts = append(r.Hosts, hosts[rank])
	}
	if err := h.job.Assign(h.generation+1, processes); err != nil {
		return err.Error()
	}
	for _, e := range w.exits {
		s.suspectAfter(e, h.failures)
	}
	h.generation++
	h.processes, w.hosts, h.waiting = processes, hosts, h.waiting[len(r.Ranks):]
	for _, rank := range r.Ranks {
		h.alive[rank] = true
	}
	h.barren++
	h.reached, h.failures, h.replaced = w.stepped.Step, nil, append(h.replaced, r)
	w.exits, w.firstDied = nil, time.Time{}
	s.watch.begin(time.Now())
	w.last = record.Heartbeat{}
	s.Notice(fmt.Sprintf("%s; a hot spare on %s takes over %s", r.Reason,
		strings.Join(slices.Compact(slices.Clone(r.Hosts)), ", "), rankList(r.Ranks)))
	for range r.Ranks {
		w.addSpare()
	}
	return ""
}

// rankList formats ranks, as in "rank 3" or "ranks 0, 2".
func rankList(ranks []int) string {
	text := strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
	if len(ranks) == 1 {
		return "rank " + text
	}
	return "ranks " + text
}

// addSpare starts a hot spare on a free slot, if there is one.
func (w *attemptWatch) addSpare() {
	used := slices.Clone(w.hosts)
	for _, spare := range w.hot.waiting {
		used = append(used, spare.host)
	}
	for _, host := range w.s.hosts.free(used, 1) {
		process, err := w.hot.job.AddSpare(host)
		if err != nil {
			w.s.Notice(fmt.Sprintf("no further hot spare on %s: %v", host, err))
			return
		}
		w.hot.waiting = append(w.hot.waiting, hotSpare{process, host})
	}
}

// suspectAfter records on which host a replaced rank died.
func (s *supervisor) suspectAfter(e Exit, failures []record.Failure) {
	switch {
	case e.Unreachable:
		s.hosts.lose(e.Host, e.String())
	case e.Shell: // caused by this machine
	case e.Signal != 0 || slices.ContainsFunc(failures, func(f record.Failure) bool { return f.Rank == e.Rank }):
		s.hosts.suspect(e.Host)
	}
}
