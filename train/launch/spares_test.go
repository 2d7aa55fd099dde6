package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"mula/train/record"
)

// A hotTheatre is a theatre whose ranks can be replaced by hot spares.
type hotTheatre struct {
	theatre
	refuses bool // new groups
	jobs    []*hotScripted
}

// hotScripted are scripted ranks with hot spares.
type hotScripted struct {
	*scripted
	refuses  bool
	groups   chan []int // processes of new groups, for the script
	assigned []string   // all groups
	spares   []string   // hosts of spares that were added
	released chan struct{}
	next     int
}

func (th *hotTheatre) Start(ctx context.Context, r Ranks) (Job, error) {
	th.prepare = func(s *scripted) {
		if len(r.Spares) > 0 {
			s.hot = &hotScripted{scripted: s, refuses: th.refuses, groups: make(chan []int, 16),
				released: make(chan struct{}), next: len(r.Hosts) + len(r.Spares)}
		}
	}
	job, err := th.theatre.Start(ctx, r)
	if s := job.(*scripted); s.hot != nil {
		th.jobs = append(th.jobs, s.hot)
		return s.hot, err
	}
	return job, err
}

func (h *hotScripted) Assign(generation int, processes []int) error {
	if h.refuses {
		return errors.New("the address is in use")
	}
	h.assigned = append(h.assigned, fmt.Sprint(generation, processes))
	h.groups <- slices.Clone(processes)
	return nil
}

func (h *hotScripted) AddSpare(host string) (int, error) {
	h.spares = append(h.spares, host)
	h.next++
	return h.next - 1, nil
}

func (h *hotScripted) Release() { close(h.released) }

// diesAlone lets a process die of a signal. The others wait for a new group.
func (r *scripted) diesAlone(process int, host string, signal syscall.Signal) {
	r.exits <- Exit{Process: process, Host: host, Signal: signal}
}

// group waits for a new group of ranks, whose first step is after from steps.
func (r *scripted) group(from, to int64) []int {
	r.t.Helper()
	synctest.Wait()
	select {
	case processes := <-r.hot.groups:
		r.generation++
		r.spent = map[record.Section]record.Spent{record.SectionSetup: {Times: 1, Seconds: 0.25}}
		r.steps(from, to)
		return processes
	case <-r.hot.released:
		return nil
	}
}

// leave lets the processes of a group exit with 0, after the launcher has released the others.
func (r *scripted) leave(processes []int) {
	for _, p := range processes {
		r.exits <- Exit{Process: p, Host: "?"}
	}
	<-r.hot.released
}

// fall lets all ranks but one exit with an error, after they were released.
func (r *scripted) fall(dead ...int) {
	<-r.hot.released
	for rank, host := range r.Hosts {
		if !slices.Contains(dead, rank) {
			r.exits <- Exit{Process: rank, Host: host, Code: 1}
		}
	}
}

func TestHotSpares(t *testing.T) {
	for _, test := range []struct {
		name     string
		script   script
		spares   int
		change   func(*Options, *hotTheatre)
		groups   string // of the first attempt
		added    string // hosts of spares that were started
		attempts string // hosts of ranks
		notice   string
		lost     string
	}{
		{name: "a spare takes over", script: func(r *scripted) {
			r.steps(0, 7)
			r.diesAlone(2, "b", syscall.SIGKILL)
			r.leave(r.group(6, 10))
		}, groups: "1 [0 1 4 3]", added: "c", attempts: "aabb",
			notice: "rank 2 on b was killed by signal 9 (killed); a hot spare on c takes over rank 2"},
		{name: "rank 0, and then its successor", script: func(r *scripted) {
			r.steps(0, 7)
			r.diesAlone(0, "a", syscall.SIGKILL)
			r.group(6, 8)
			r.diesAlone(4, "c", syscall.SIGKILL)
			r.leave(r.group(7, 10))
		}, groups: "1 [4 1 2 3], 2 [5 1 2 3]", added: "c a", attempts: "aabb",
			notice: "rank 0 on c was killed by signal 9 (killed); a hot spare on c takes over rank 0"},
		{name: "both ranks of a host", spares: 2, script: func(r *scripted) {
			r.steps(0, 7)
			r.exits <- Exit{Process: 2, Host: "b", Unreachable: true}
			time.Sleep(gatherExits / 2)
			r.exits <- Exit{Process: 3, Host: "b", Unreachable: true}
			r.leave(r.group(6, 10))
		}, groups: "1 [0 1 4 5]", attempts: "aabb", lost: "b", notice: "takes over ranks 2, 3"},
		{name: "more deaths than spares", script: func(r *scripted) {
			r.steps(0, 7)
			r.diesAlone(2, "b", syscall.SIGKILL)
			r.diesAlone(3, "b", syscall.SIGKILL)
			r.fall(2, 3)
		}, attempts: "aabb aacc", notice: "no hot spare takes over: 2 dead, and 1 waiting"},
		{name: "a death while the new group forms", spares: 2, script: func(r *scripted) {
			r.steps(0, 7)
			r.diesAlone(2, "b", syscall.SIGKILL)
			<-r.hot.groups
			time.Sleep(time.Second)
			r.diesAlone(4, "c", syscall.SIGSEGV)
			r.generation = 1
			r.leave(r.group(6, 10))
		}, groups: "1 [0 1 4 3], 2 [0 1 5 3]", added: "b c", attempts: "aabb"},
		{name: "deaths without a step in between", spares: 2, script: func(r *scripted) {
			r.steps(0, 7)
			for i, process := range []int{2, 4, 5, 6} {
				r.diesAlone(process, []string{"b", "c", "c", "b"}[i], syscall.SIGKILL)
				time.Sleep(time.Second)
			}
			r.fall(2)
		}, groups: "1 [0 1 4 3], 2 [0 1 5 3], 3 [0 1 6 3]", added: "b c c", attempts: "aabb aacc",
			notice: "no hot spare takes over: 3 replacements in a row were without a step"},
		{name: "before the first step", script: func(r *scripted) {
			r.diesAlone(2, "b", syscall.SIGKILL)
			r.fall(2)
		}, attempts: "aabb aacc", notice: "no hot spare takes over: the run was before its first step"},
		{name: "a rank with an error of its own", script: func(r *scripted) {
			r.steps(0, 7)
			r.exits <- Exit{Process: 1, Host: "a", Code: 1}
			r.leave(r.group(6, 10))
		}, groups: "1 [0 4 2 3]", added: "a", attempts: "aabb"},
		{name: "an error of all ranks", script: func(r *scripted) {
			r.steps(0, 7)
			r.all(1)
		}, attempts: "aabb aabb"},
		{name: "wrong values", script: poisoned(0, 7, 3, "not_finite"), attempts: "aabb aacc", lost: "b"},
		{name: "wrong values of a rank that exits alone", script: func(r *scripted) {
			r.steps(0, 7)
			r.fail("b", 3, 7, "not_finite")
			r.exits <- Exit{Process: 3, Host: "b", Code: 1}
			r.fall(3)
		}, attempts: "aabb aacc", lost: "b", notice: "no hot spare takes over: rank 3 on b"},
		{name: "an invalid configuration", script: func(r *scripted) {
			r.steps(0, 7)
			r.exits <- Exit{Process: 3, Host: "b", Code: 2}
			r.fall(3)
		}, attempts: "aabb", notice: "no hot spare takes over: the configuration"},
		{name: "a spare that dies", script: func(r *scripted) {
			r.steps(0, 7)
			r.diesAlone(4, "c", syscall.SIGKILL)
			synctest.Wait()
			r.diesAlone(2, "b", syscall.SIGKILL)
			r.fall(2)
		}, attempts: "aabb aacc", notice: "a hot spare ended before it was needed: a rank on c was killed"},
		{name: "no address for the new group", script: func(r *scripted) {
			r.steps(0, 7)
			r.diesAlone(2, "b", syscall.SIGKILL)
			r.fall(2)
		}, change: func(_ *Options, th *hotTheatre) { th.refuses = true }, attempts: "aabb aacc",
			notice: "no hot spare takes over: the address is in use"},
		{name: "a rank that dies when all is done", script: func(r *scripted) {
			r.steps(0, 10)
			r.end = record.EndedDone
			r.beat(record.SectionCheckpoint, 10)
			r.diesAlone(2, "b", syscall.SIGKILL)
			<-r.hot.released
			for _, rank := range []int{0, 1, 3} {
				r.exits <- Exit{Process: rank, Host: "?"}
			}
		}, attempts: "aabb", notice: "no hot spare takes over: the run has ended"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				th := &hotTheatre{theatre: theatre{scripts: []script{test.script, nil}}}
				o := begin(t, &th.theatre)
				o.Start, o.HotSpares = th, max(1, test.spares)
				if test.change != nil {
					test.change(&o, th)
				}
				th.scripts[1] = func(r *scripted) { // without hot spares that matter
					r.steps(5, 10)
					for rank := range r.Hosts {
						r.exits <- Exit{Process: rank, Rank: rank, Host: r.Hosts[rank]}
					}
				}
				var notices []string
				o.Notice = func(text string) { notices = append(notices, text) }
				result := mustRun(t, o)
				if got := th.hosts(); got != test.attempts {
					t.Errorf("ranks on %q, want %q", got, test.attempts)
				}
				first := th.jobs[0]
				if got := strings.Join(first.assigned, ", "); got != test.groups {
					t.Errorf("groups %q, want %q", got, test.groups)
				}
				if got := strings.Join(first.spares, " "); got != test.added {
					t.Errorf("spares were added on %q, want %q", got, test.added)
				}
				if got := strings.Join(result.Excluded, " "); got != test.lost {
					t.Errorf("hosts out of use %q, want %q", got, test.lost)
				}
				if got := strings.Join(notices, "\n"); !strings.Contains(got, test.notice) {
					t.Errorf("notices %q, want %q", got, test.notice)
				}
				groups := len(first.assigned)
				if got := len(result.Attempts[0].Replaced); got != groups {
					t.Errorf("%d replacements are recorded, want %d", got, groups)
				}
				for _, r := range result.Attempts[0].Replaced {
					if len(r.Hosts) != len(r.Ranks) || slices.Contains(r.Hosts, "") {
						t.Errorf("ranks %v were replaced on hosts %q", r.Ranks, r.Hosts)
					}
				}
				if _, restarted := strings.CutPrefix(test.attempts, "aabb "); len(result.Attempts) != 1 && !restarted {
					t.Errorf("%+v", result.Attempts)
				}
			})
		})
	}
}

// A hot spare that is stopped does not exit when the ranks are done. The launcher kills it.
func TestStoppedHotSpare(t *testing.T) {
	for _, end := range []record.Ended{record.EndedDone, record.EndedTerminated} {
		synctest.Test(t, func(t *testing.T) {
			var first *scripted
			leave := func(r *scripted) {
				r.steps(0, 10)
				r.end = end
				r.beat(record.SectionCheckpoint, 10)
				code := ExitDone
				if end != record.EndedDone {
					code = ExitStopped
				}
				r.all(code)
				<-r.hot.released
			}
			th := &hotTheatre{theatre: theatre{scripts: []script{func(r *scripted) {
				first = r
				leave(r)
				<-r.killed
				r.exits <- Exit{Process: 4, Host: "c", Signal: syscall.SIGKILL}
			}, func(r *scripted) {
				end = record.EndedDone
				leave(r)
			}}}}
			o := begin(t, &th.theatre)
			o.Start, o.HotSpares, o.Grace = th, 1, 20*time.Second
			result := mustRun(t, o)
			if result.Outcome != Done || strings.Join(first.asked, ", ") != "kill at 30s" {
				t.Errorf("%s, and the launcher asked for %q", result.Reason, first.asked)
			}
		})
	}
}

// The record of a replacement has what happened, and the attempt counts its steps from its start.
func TestReplacementRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := &hotTheatre{theatre: theatre{scripts: []script{func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionSetup: {Times: 1, Seconds: 2}}
			r.steps(3, 7)
			r.diesAlone(2, "b", syscall.SIGKILL)
			r.leave(r.group(6, 10))
		}}}}
		o := begin(t, &th.theatre)
		o.Start, o.HotSpares = th, 1
		a := mustRun(t, o).Attempts[0]
		if len(a.Replaced) != 1 || a.From != 3 || a.Step != 10 || a.Steps != 7 || a.Setup != 2 || a.Outcome != Done {
			t.Fatalf("%+v", a)
		}
		r := a.Replaced[0]
		if r.Time.IsZero() || r.Step != 7 || r.From != 6 || r.Setup != 0.25 || !slices.Equal(r.Ranks, []int{2}) ||
			!slices.Equal(r.Lost, []string{"b"}) || !slices.Equal(r.Hosts, []string{"c"}) ||
			r.Reason != "rank 2 on b was killed by signal 9 (killed)" {
			t.Errorf("%+v", r)
		}
	})
}

// A process gets the newest of its assignments, and its context ends when there is a newer one.
func TestAssignments(t *testing.T) {
	for _, name := range []string{"MULA_RANK", "MULA_ADDRESS", "MULA_SECRET", "MULA_GENERATION"} {
		t.Setenv(name, "")
	}
	r, w := io.Pipe()
	a := NewAssignments(r, true, Assignment.setEnvironment)
	running, cancel := a.context(t.Context(), false)
	defer cancel()
	if a.Generation() != 0 || !a.IsSpare() || running.Err() != nil {
		t.Error("the process is not a spare that waits")
	}
	fmt.Fprintln(w, `{"generation":1,"rank":2,"address":"node:1","secret":"x"}`)
	<-running.Done()
	if cause := context.Cause(running); !errors.Is(cause, errReassigned) {
		t.Errorf("the context ends with %v", cause)
	}
	for generation := 1; generation <= 2; generation++ {
		if err := a.next(t.Context()); err != nil || a.Generation() != generation {
			t.Fatalf("generation %d, %v", a.Generation(), err)
		}
		if got := strings.Join([]string{os.Getenv("MULA_RANK"), os.Getenv("MULA_ADDRESS"),
			os.Getenv("MULA_SECRET"), os.Getenv("MULA_GENERATION")}, " "); got !=
			[]string{"", "2 node:1 x 1", "2 node:2 y 2"}[generation] {
			t.Errorf("generation %d has the environment %q", generation, got)
		}
		if generation == 1 {
			fmt.Fprintln(w, `{"generation":2,"rank":2,"address":"node:2","secret":"y"}`)
		}
	}
	running, cancel = a.context(t.Context(), false)
	defer cancel()
	joining, cancel := a.context(t.Context(), true)
	defer cancel()
	w.Close()
	<-joining.Done()
	if cause := context.Cause(joining); !errors.Is(cause, errReleased) || running.Err() != nil {
		t.Errorf("the contexts end with %v and %v", cause, running.Err())
	}
	if err := a.next(t.Context()); !errors.Is(err, errReleased) {
		t.Errorf("after the end: %v", err)
	}
}
