package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"mula/internal/filesystem"
	"mula/train/record"
)

// A script performs the actions of the ranks of an attempt, in the time of the test's bubble. It
// ends all ranks.
type script func(r *scripted)

// scripted ranks are a Job and what a script does with it.
type scripted struct {
	Ranks
	t       *testing.T
	exits   chan Exit
	stopped chan struct{} // closed by Stop
	ended   chan struct{} // closed by End
	killed  chan struct{} // closed by Kill
	asked   []string      // what the launcher did, with the time since the start
	start   time.Time
	spent   map[record.Section]record.Spent
	from    int64
	end     record.Ended
	slow    *int // rank

	hot        *hotScripted // with hot spares
	generation int
}

func (r *scripted) Exits() <-chan Exit { return r.exits }
func (r *scripted) Stacks()            { r.asked = append(r.asked, "stacks") }
func (r *scripted) Stop()              { r.ask("stop", r.stopped) }
func (r *scripted) End()               { r.ask("end", r.ended) }
func (r *scripted) Kill()              { r.ask("kill", r.killed) }

func (r *scripted) ask(what string, c chan struct{}) {
	select {
	case <-c:
	default:
		r.asked = append(r.asked, fmt.Sprintf("%s at %s", what, time.Since(r.start).Round(time.Second)))
		close(c)
	}
}

// beat writes the heartbeat file as docs/formats/run.md describes it.
func (r *scripted) beat(section record.Section, step int64) {
	r.t.Helper()
	body, err := json.Marshal(record.Heartbeat{PID: 1, Section: section, Step: step, From: r.from, Time: time.Now(),
		Ended: r.end, Slow: r.slow, Spent: r.spent, Generation: r.generation})
	if err != nil {
		r.t.Fatal(err)
	}
	body = body[:len(body)-1]
	text := fmt.Sprintf("%-639s\n", fmt.Sprintf(`%s,"sum":%d}`, body, crc32.ChecksumIEEE(body)))
	for _, e := range r.Environment {
		if path, ok := strings.CutPrefix(e, "MULA_HEARTBEAT="); ok {
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				r.t.Fatal(err)
			}
		}
	}
}

// steps does steps of a second, from one number to another.
func (r *scripted) steps(from, to int64) {
	r.from = from
	for step := from; step <= to; step++ {
		r.beat(record.SectionStep, step)
		if step < to {
			time.Sleep(time.Second)
		}
	}
}

// all lets all ranks leave with a code.
func (r *scripted) all(code int) {
	for rank, host := range r.Hosts {
		r.exits <- Exit{Process: rank, Rank: rank, Host: host, Code: code}
	}
}

// rank lets a rank die of a signal, and the others with an error, as they do when they miss it.
func (r *scripted) dies(dead int, signal syscall.Signal) {
	r.exits <- Exit{Rank: dead, Host: r.Hosts[dead], Signal: signal}
	for rank, host := range r.Hosts {
		if rank != dead {
			r.exits <- Exit{Rank: rank, Host: host, Code: 1}
		}
	}
}

// A theatre plays scripts, one an attempt, the last one again and again.
type theatre struct {
	t       *testing.T
	scripts []script
	played  []*scripted
	prepare func(s *scripted) // unless nil, called before the script
}

func (th *theatre) Name() string { return "theatre" }

func (th *theatre) Start(_ context.Context, r Ranks) (Job, error) {
	for _, name := range []string{"heartbeat", askFile} { // before a host looks for them; see [supervisor.attempt]
		if _, err := os.Stat(filepath.Join(r.Dir, name)); err != nil {
			th.t.Errorf("before the ranks start: %v", err)
		}
	}
	s := &scripted{Ranks: r, t: th.t, exits: make(chan Exit, len(r.Hosts)), start: time.Now(),
		stopped: make(chan struct{}), ended: make(chan struct{}), killed: make(chan struct{})}
	play := th.scripts[min(len(th.played), len(th.scripts)-1)]
	th.played = append(th.played, s)
	if th.prepare != nil {
		th.prepare(s)
	}
	go func() {
		play(s)
		close(s.exits)
	}()
	return s, nil
}

// A probed theatre has hosts that start no process.
type probedTheatre struct {
	theatre
	dead   []string
	probes int
}

func (th *probedTheatre) probe(_ context.Context, hosts []string, _ time.Duration) map[string]error {
	th.probes++
	failed := map[string]error{}
	for _, h := range hosts {
		if slices.Contains(th.dead, h) {
			failed[h] = errors.New("no route")
		}
	}
	return failed
}

// hosts returns the hosts of each rank, attempt by attempt.
func (th *theatre) hosts() string {
	var all []string
	for _, s := range th.played {
		all = append(all, strings.Join(s.Hosts, ""))
	}
	return strings.Join(all, " ")
}

func threeHosts() []Host { return []Host{{"a", 2}, {"b", 2}, {"c", 2}} }

// schedulerSignal is SIGUSR1 on Linux. Package syscall has no SIGUSR1 on Windows.
const schedulerSignal = syscall.Signal(10)

// begin makes options for four ranks on a and b, with c to spare.
func begin(t *testing.T, th *theatre) Options {
	th.t = t
	return Options{Output: t.TempDir(), Start: th, Ranks: 4, Hosts: threeHosts(), Limits: DefaultLimits(), Retries: 3,
		Progress: 1, Grace: 10 * time.Second,
		BackOff: []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second,
			60 * time.Second}}
}

func mustRun(t *testing.T, o Options) Result {
	t.Helper()
	result, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func done(from, to int64) script {
	return func(r *scripted) { r.steps(from, to); r.all(ExitDone) }
}

func dies(from, to int64, rank int, signal syscall.Signal) script {
	return func(r *scripted) { r.steps(from, to); r.dies(rank, signal) }
}

func fails(from, to int64, code int) script {
	return func(r *scripted) { r.steps(from, to); r.all(code) }
}

// saves leaves after a checkpoint.
func saves(from, to int64, end record.Ended) script {
	return func(r *scripted) {
		r.steps(from, to)
		r.end = end
		r.beat(record.SectionCheckpoint, to)
		r.all(ExitStopped)
	}
}

func setupFails(code int) script { return func(r *scripted) { time.Sleep(time.Second); r.all(code) } }

func unreachable(host string) script {
	return func(r *scripted) {
		for rank, h := range r.Hosts {
			r.exits <- Exit{Rank: rank, Host: h, Code: 1, Unreachable: h == host}
		}
	}
}

// poisoned leaves with a failure that names a host.
func poisoned(from, step int64, rank int, kind string) script {
	return func(r *scripted) {
		r.steps(from, step)
		host := ""
		if rank >= 0 {
			host = r.Hosts[rank]
		}
		r.fail(host, rank, step, kind)
		r.all(ExitFailed)
	}
}

// fail writes a failure to failures.jsonl.
func (r *scripted) fail(host string, rank int, step int64, kind string) {
	line := fmt.Sprintf(`{"time":"2026-01-02T03:04:05Z","host":%q,"rank":%d,"step":%d,"kind":%q,"error":"the disk is full"}`+"\n", host, rank, step, kind)
	dir := filepath.Dir(filepath.Dir(r.Dir))
	f, err := os.OpenFile(filepath.Join(dir, "failures.jsonl"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err == nil {
		_, err = f.WriteString(line)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		r.t.Error(err)
	}
}

// What is done about each way to end.
func TestRun(t *testing.T) {
	for _, test := range []struct {
		name    string
		scripts []script
		change  func(*Options)
		outcome Outcome
		code    int
		hosts   string // of each rank, attempt by attempt
		reason  string // a part of it
		lost    string
		seconds float64 // that all takes, where that says something
	}{
		{name: "done", scripts: []script{done(0, 10)}, outcome: Done, code: ExitDone, hosts: "aabb",
			reason: "all steps are done", seconds: 10},
		{name: "a killed rank's host is left for a spare one", scripts: []script{dies(0, 7, 2, syscall.SIGKILL),
			done(5, 10)}, outcome: Done, code: ExitDone,
			hosts: "aabb aacc", seconds: 7 + 5},
		{name: "a suspect is used when no other is left", scripts: []script{dies(0, 7, 2, syscall.SIGKILL),
			dies(5, 9, 0, syscall.SIGSEGV), dies(7, 12, 0, syscall.SIGKILL), done(10, 20)},
			outcome: Done, code: ExitDone, hosts: "aabb aacc ccbb bbaa"},
		{name: "without hosts all is here", scripts: []script{dies(0, 7, 2, syscall.SIGKILL), done(5, 10)},
			change: func(o *Options) { o.Hosts = nil }, outcome: Done, code: ExitDone,
			hosts: strings.Repeat("localhost", 4) + " " + strings.Repeat("localhost", 4)},
		{name: "wrong configuration", scripts: []script{setupFails(ExitConfiguration)}, outcome: Configuration,
			code: ExitConfiguration, hosts: "aabb", reason: "exited with code 2"},
		{name: "wrong configuration of one rank", scripts: []script{func(r *scripted) {
			r.exits <- Exit{Rank: 1, Host: "a", Code: 1}
			r.exits <- Exit{Rank: 3, Host: "b", Code: 2}
		}}, outcome: Configuration, code: ExitConfiguration, hosts: "aabb", reason: "rank 3 on b exited with " +
			"code 2"},
		{name: "no first step, twice", scripts: []script{setupFails(ExitFailed)}, outcome: Failed, code: ExitFailed,
			hosts: "aabb aabb", reason: "two attempts in a row ended before", seconds: 1 + 5 + 1},
		{name: "no first step, but not in a row", scripts: []script{setupFails(ExitFailed),
			dies(0, 3, 1, syscall.SIGKILL), setupFails(ExitFailed), done(2, 4)}, outcome: Done,
			code: ExitDone, hosts: "aabb aabb bbcc bbcc"},
		{name: "a program that aborts blames no host", scripts: []script{dies(0, 3, 1, syscall.SIGABRT), done(2, 4)},
			outcome: Done, code: ExitDone, hosts: "aabb aabb"},
		{name: "retries without progress", scripts: []script{dies(0, 7, 3, syscall.SIGKILL), fails(5, 6, 1)},
			change: func(o *Options) { o.Hosts = nil; o.Retries = 5 }, outcome: Failed, code: ExitFailed,
			reason: "failure 6 without progress, and --retries is 5",
			hosts:  strings.TrimSpace(strings.Repeat(strings.Repeat("localhost", 4)+" ", 6)), seconds: 7 + 5*1 + 5 +
				10 + 20 + 40},
		{name: "a host that is not there is not used again", scripts: []script{unreachable("a"), unreachable("b"),
			done(0, 5)}, change: func(o *Options) { o.Ranks = 2 }, outcome: Done,
			code: ExitDone, hosts: "aa bb cc", lost: "a b"},
		{name: "too few hosts", scripts: []script{unreachable("a"), unreachable("b")}, outcome: HostLost,
			code: ExitFailed, hosts: "aabb bbcc", lost: "a b",
			reason: "4 ranks do not fit on the remaining hosts, which have slots for 2: a is out of use (host a " +
				"cannot be reached), b is"},
		{name: "fewer ranks", scripts: []script{unreachable("a"), unreachable("b"), done(0, 5)},
			change: func(o *Options) {
				o.Shrink = func(room int) (int, []string, error) {
					return room, []string{fmt.Sprintf("ROOM=%d", room)},
						nil
				}
			}, outcome: Done, code: ExitDone, hosts: "aabb bbcc cc", lost: "a b"},
		{name: "fewer ranks are not possible", scripts: []script{unreachable("a"), unreachable("b")},
			change: func(o *Options) {
				o.Shrink = func(int) (int, []string, error) { return 0, nil, errors.New("batch_size is 7") }
			}, outcome: HostLost, code: ExitFailed, hosts: "aabb bbcc", lost: "a b", reason: "cannot continue with " +
				"fewer ranks: batch_size is 7"},
		{name: "not finite on one host", scripts: []script{poisoned(0, 7, 3, "not_finite"), done(5, 10)}, outcome: Done,
			code: ExitDone, hosts: "aabb aacc", lost: "b"},
		{name: "another replica on one host", scripts: []script{poisoned(0, 7, 1, "replica_differs"), done(5, 10)},
			outcome: Done, code: ExitDone, hosts: "aabb bbcc", lost: "a"},
		{name: "not finite on two hosts at one step", scripts: []script{poisoned(0, 7, 3, "not_finite"),
			poisoned(5, 7, 3, "not_finite")}, outcome: Failed, code: ExitFailed,
			hosts: "aabb aacc", reason: "b had the same failure, so the hosts are not the cause"},
		{name: "not finite on two hosts at two steps", scripts: []script{poisoned(0, 7, 3, "not_finite"),
			poisoned(5, 9, 3, "not_finite")}, outcome: HostLost, code: ExitFailed,
			hosts: "aabb aacc", lost: "b c", reason: "4 ranks do not fit"},
		{name: "the run diverges, twice", scripts: []script{poisoned(0, 7, -1, "diverged"),
			poisoned(5, 7, -1, "diverged")}, outcome: Failed, code: ExitFailed,
			hosts: "aabb aabb",
			reason: "the run diverged at step 7: values are not finite, and no single host is their source; an " +
				"earlier attempt had the same failure. The learning rate is too high"},
		{name: "the run diverges, and then at another step", scripts: []script{poisoned(0, 7, -1, "diverged"),
			poisoned(5, 9, -1, "diverged"), done(8, 20)}, outcome: Done, code: ExitDone,
			hosts: "aabb aabb aabb"},
		{name: "the only rank diverges, and again on another host", scripts: []script{poisoned(0, 7, 0, "diverged"),
			poisoned(5, 7, 0, "diverged")}, change: func(o *Options) { o.Ranks = 1 },
			outcome: Failed, code: ExitFailed, hosts: "a b", reason: "rank 0 on b diverged at step 7"},
		{name: "not finite twice on the only host", scripts: []script{poisoned(0, 7, 3, "not_finite"),
			poisoned(5, 7, 3, "not_finite")}, change: func(o *Options) { o.Hosts = nil },
			outcome: Failed, code: ExitFailed, hosts: strings.Repeat("localhost", 4) + " " + strings.Repeat("localhost",
				4), reason: "an earlier attempt had the same failure"},
		{name: "another replica twice on the only host", scripts: []script{poisoned(0, 7, 3, "replica_differs"),
			poisoned(5, 7, 3, "replica_differs")}, change: func(o *Options) { o.Hosts = nil },
			outcome: Failed, code: ExitFailed, hosts: strings.Repeat("localhost", 4) + " " + strings.Repeat("localhost",
				4), reason: "The machine is at fault"},
		{name: "an error of one rank", scripts: []script{poisoned(0, 7, 3, "error"), done(5, 10)}, outcome: Done,
			code: ExitDone, hosts: "aabb aacc"},
		{name: "a rank that dies when all is done", scripts: []script{func(r *scripted) {
			r.steps(0, 4)
			r.end = record.EndedDone
			r.beat(record.SectionCheckpoint, 4)
			r.dies(2, syscall.SIGSEGV)
		}},
			outcome: Done, code: ExitDone, hosts: "aabb"},
		{name: "an mpiexec that forgets the exit code", scripts: []script{func(r *scripted) {
			r.steps(0, 4)
			r.end = record.EndedStopped
			r.beat(record.SectionCheckpoint, 4)
			r.exits <- Exit{Rank: -1}
		}}, outcome: Stopped, code: ExitStopped, hosts: "aabb"},
		{name: "stopped by a signal to the ranks", scripts: []script{saves(0, 4, record.EndedStopped)},
			outcome: Stopped, code: ExitStopped, hosts: "aabb", reason: "run the same command to resume"},
		{name: "a rank that is evicted", scripts: []script{saves(0, 4, record.EndedTerminated), done(4, 10)},
			outcome: Done, code: ExitDone, hosts: "aabb aabb"},
		{name: "a rank that is evicted, without a heartbeat", scripts: []script{fails(0, 4, ExitStopped), done(4, 10)},
			outcome: Done, code: ExitDone, hosts: "aabb aabb"},
		{name: "a rank that is evicted again and again", scripts: []script{saves(0, 0, record.EndedTerminated)},
			outcome: Evicted, code: ExitFailed,
			hosts: "aabb aabb aabb aabb", reason: "failure 4 without progress"},
		{name: "an agent that is killed", scripts: []script{func(r *scripted) {
			r.steps(0, 4)
			r.end = record.EndedTerminated // its rank got a SIGTERM with the death of its parent, and all have saved
			r.beat(record.SectionCheckpoint, 4)
			r.exits <- Exit{Rank: 2, Host: "b", Signal: syscall.SIGKILL}
			for _, rank := range []int{0, 1, 3} {
				r.exits <- Exit{Rank: rank, Host: r.Hosts[rank], Code: ExitStopped}
			}
		}, done(4, 10)}, outcome: Done, code: ExitDone, hosts: "aabb aacc"},
		{name: "ranks that save when the launcher ends them after a death", scripts: []script{func(r *scripted) {
			r.steps(0, 4)
			r.exits <- Exit{Rank: 2, Host: "b", Signal: syscall.SIGKILL}
			<-r.ended
			r.end = record.EndedTerminated
			r.beat(record.SectionCheckpoint, 4)
			r.all(ExitStopped)
		}, done(4, 10)}, outcome: Done, code: ExitDone, hosts: "aabb aacc"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				th := &theatre{scripts: test.scripts}
				o := begin(t, th)
				if test.change != nil {
					test.change(&o)
				}
				start := time.Now()
				result := mustRun(t, o)
				if result.Outcome != test.outcome || result.Code != test.code ||
					!strings.Contains(result.Reason, test.reason) {
					t.Errorf("outcome %s, code %d, %q; want %s, %d, %q", result.Outcome, result.Code, result.Reason,
						test.outcome, test.code, test.reason)
				}
				if got := th.hosts(); got != test.hosts {
					t.Errorf("hosts %q, want %q", got, test.hosts)
				}
				if got := strings.Join(result.Excluded, " "); got != test.lost {
					t.Errorf("lost hosts %q, want %q", got, test.lost)
				}
				if took := time.Since(start).Seconds(); test.seconds > 0 && (took < test.seconds ||
					took > test.seconds+2) {
					t.Errorf("it took %g s, want %g", took, test.seconds)
				}
				if len(result.Attempts) != len(th.played) {
					t.Errorf("%d attempts in the result, %d were made", len(result.Attempts), len(th.played))
				}
			})
		})
	}
}

// An attempt that ends before its first step, or without a known rank, has its hosts probed.
func TestProbe(t *testing.T) {
	for _, test := range []struct {
		name    string
		scripts []script
		dead    []string
		limit   time.Duration
		probes  int
		outcome Outcome
		hosts   string
		blamed  string // after the first attempt
	}{
		{"a dead host is replaced", []script{setupFails(1), done(0, 5)}, []string{"b"}, time.Minute, 1, Done,
			"aabb aacc", "b"},
		{"a spare is not probed", []script{setupFails(1), done(0, 5)}, []string{"c"}, time.Minute, 1, Done,
			"aabb aabb", ""},
		{"all hosts: no host is the cause", []script{setupFails(1)}, []string{"a", "b", "c"}, time.Minute, 2, Failed,
			"aabb aabb", ""},
		{"after a step", []script{fails(0, 3, 1), done(3, 5)}, []string{"b"}, time.Minute, 0, Done, "aabb aabb", ""},
		{"after a step, by an unknown rank", []script{func(r *scripted) {
			r.steps(0, 3)
			r.exits <- Exit{Rank: -1, Code: 255} // of mpiexec
		}, done(3, 5)}, []string{"b"}, time.Minute, 1, Done, "aabb aacc", "b"},
		{"a wrong configuration", []script{setupFails(2)}, []string{"b"}, time.Minute, 0, Configuration, "aabb", ""},
		{"no probe", []script{setupFails(1), done(0, 5)}, []string{"b"}, 0, 0, Done, "aabb aabb", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				th := &probedTheatre{theatre: theatre{scripts: test.scripts}, dead: test.dead}
				o := begin(t, &th.theatre)
				o.Start, o.ProbeLimit = th, test.limit
				result, err := Run(t.Context(), o)
				if err != nil || result.Outcome != test.outcome || th.hosts() != test.hosts ||
					th.probes != test.probes || result.Attempts[0].Blamed != test.blamed {
					t.Errorf("%+v, %v, on %s, %d probes", result, err, th.hosts(), th.probes)
				}
			})
		})
	}
}

// A run of months may fail more often than it may be retried, as long as it makes progress.
func TestRetriesCountSinceProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := &theatre{}
		for i := range int64(30) {
			th.scripts = append(th.scripts, dies(10*i, 10*i+14, int(i)%4, syscall.SIGKILL))
		}
		th.scripts = append(th.scripts, done(300, 310))
		o := begin(t, th)
		o.Progress = 10
		result := mustRun(t, o)
		if result.Outcome != Done || len(result.Attempts) != 31 {
			t.Fatalf("%s after %d attempts: %s", result.Outcome, len(result.Attempts), result.Reason)
		}
		for i, a := range result.Attempts[1:] {
			if wait := a.Start.Sub(result.Attempts[i].End); wait != 0 {
				t.Errorf("before attempt %d: %s, as if the one before had made no progress", a.Number, wait)
			}
		}
	})
	synctest.Test(t, func(t *testing.T) { // eight more steps are not the ten that count
		th := &theatre{}
		for i := range int64(30) {
			th.scripts = append(th.scripts, dies(2*i, 2*i+3, 0, syscall.SIGKILL))
		}
		o := begin(t, th)
		o.Progress = 10
		if result := mustRun(t, o); result.Code != ExitFailed || len(result.Attempts) != 4 {
			t.Errorf("code %d after %d attempts: %s", result.Code, len(result.Attempts), result.Reason)
		}
	})
}

// hangs does steps and then nothing, until it is told to end, or is killed if it does not listen.
func hangs(from, to int64, listens bool) script {
	return func(r *scripted) {
		r.steps(from, to)
		if listens {
			<-r.ended
		} else {
			<-r.killed
		}
		r.all(ExitFailed)
	}
}

// A run without progress is ended after the limit for its phase, and not before.
func TestHang(t *testing.T) {
	for _, test := range []struct {
		name   string
		script script
		asked  string
		steps  int64
	}{
		{"in a step that nobody has seen", func(r *scripted) { r.steps(0, 0); <-r.ended; r.all(1) },
			"stacks, end at 30m16s", 0},
		{"in the setup", func(r *scripted) { <-r.ended; r.all(1) }, "stacks, end at 30m16s", 0},
		{"in a step, by the floor", func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionStep: {Times: 10, Seconds: 10, Longest: 1}}
			r.steps(0, 10)
			<-r.ended
			r.all(1)
		}, "stacks, end at 5m26s", 10},
		{"in a step, by what was seen", func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionStep: {Times: 10, Seconds: 2400, Longest: 240}}
			r.steps(0, 10)
			<-r.ended
			r.all(1)
		}, "stacks, end at 20m26s", 10},
		{"in a save, after one that took 19 minutes", func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionStep: {Times: 10, Seconds: 10, Longest: 1}}
			r.steps(0, 10)
			r.beat(record.SectionCheckpoint, 10)
			time.Sleep(19 * time.Minute)
			r.spent[record.SectionCheckpoint] = record.Spent{Times: 1, Seconds: 1140, Longest: 1140}
			r.steps(10, 11)
			r.from = 0
			r.beat(record.SectionCheckpoint, 11)
			<-r.ended
			r.all(1)
		}, "stacks, end at 1h54m27s", 11}, // 10 s, 19 min, 1 s, 5 · 19 min
		// it was suspended and went on, or Open MPI sent SIGCONT with the SIGTERM
		{"in a step, and then it saves", func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionStep: {Times: 10, Seconds: 10, Longest: 1}}
			r.steps(0, 10)
			<-r.ended
			r.end = record.EndedTerminated
			r.beat(record.SectionCheckpoint, 10)
			r.all(ExitStopped)
		}, "stacks, end at 5m26s", 10},
		{"in a step, and then it saves as it does for the user", func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionStep: {Times: 10, Seconds: 10, Longest: 1}}
			r.steps(0, 10)
			<-r.ended
			r.end = record.EndedStopped
			r.beat(record.SectionCheckpoint, 10)
			r.all(ExitStopped)
		}, "stacks, end at 5m26s", 10},
		{"deaf to SIGTERM", func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionStep: {Times: 10, Seconds: 10, Longest: 1}}
			hangs(0, 10, false)(r)
		}, "stacks, end at 5m26s, kill at 5m36s", 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				th := &theatre{scripts: []script{test.script, done(0, 20)}}
				result := mustRun(t, begin(t, th))
				if got := strings.Join(th.played[0].asked, ", "); got != test.asked {
					t.Errorf("%q, want %q", got, test.asked)
				}
				if a := result.Attempts[0]; a.Outcome != Hang || a.Steps != test.steps || a.Blamed != "" {
					t.Errorf("%+v", a)
				}
				if result.Code != ExitDone || th.hosts() != "aabb aabb" {
					t.Errorf("code %d on %s: a hang speaks against no host", result.Code, th.hosts())
				}
			})
		})
	}
}

// silentRanks does steps and hangs. Then the ranks answer, except the silent ranks.
func silentRanks(from, to int64, silent ...int) script {
	return func(r *scripted) {
		r.steps(from, to)
		for rank := range r.Hosts {
			if slices.Contains(silent, rank) {
				continue
			}
			text := fmt.Sprintf("rank %d on x, process 7: waiting in AllReduce in train.(*run).step\n", rank)
			path := filepath.Join(r.Dir, fmt.Sprint(answersPrefix, rank))
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				r.t.Error(err)
			}
		}
		<-r.ended
		r.all(ExitFailed)
	}
}

// The host of the ranks for which the others wait is not used again while there is another.
func TestHangHost(t *testing.T) {
	for _, test := range []struct {
		name    string
		scripts []script
		dead    []string // start no process
		used    string
		blamed  string // in the attempts
	}{
		{"a host", []script{silentRanks(0, 10, 2, 3), done(10, 20)}, nil, "aabb aacc", "b "},
		{"a rank", []script{silentRanks(0, 10, 1), done(10, 20)}, nil, "aabb bbcc", "a "},
		{"several hosts", []script{silentRanks(0, 10, 1, 2), done(10, 20)}, nil, "aabb aabb", " "},
		{"no rank", []script{silentRanks(0, 10), done(10, 20)}, nil, "aabb aabb", " "},
		{"the run", []script{silentRanks(0, 10, 1), silentRanks(10, 20, 1), silentRanks(20, 30, 1), done(30, 40)}, nil,
			"aabb bbcc ccaa aabb", "a b c "},
		{"in the setup", []script{silentRanks(0, 0, 3), done(0, 9)}, nil, "aabb aacc", "b "},
		{"in the setup, because of a dead host", []script{silentRanks(0, 0, 3), silentRanks(0, 9, 0), done(9, 12)},
			[]string{"b"}, "aabb aacc ccaa", "b a "},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				th := &probedTheatre{theatre: theatre{scripts: test.scripts}, dead: test.dead}
				o := begin(t, &th.theatre)
				o.Start, o.ProbeLimit = th, time.Second
				result := mustRun(t, o)
				blamed := ""
				for _, a := range result.Attempts[:len(result.Attempts)-1] {
					blamed += a.Blamed + " "
				}
				if result.Code != ExitDone || th.hosts() != test.used || blamed != test.blamed ||
					!slices.Equal(result.Excluded, slices.Concat([]string{}, test.dead)) {
					t.Errorf("code %d on %s, blamed %q, excluded %q: %s", result.Code, th.hosts(), blamed,
						result.Excluded, result.Reason)
				}
			})
		})
	}
}

// A host that is lost while a run hangs is the cause.
func TestHangLost(t *testing.T) {
	for _, lost := range []Exit{{Rank: -1, Host: "b", Silent: true}, {Rank: 2, Host: "b", Unreachable: true}} {
		synctest.Test(t, func(t *testing.T) {
			th := &theatre{scripts: []script{func(r *scripted) {
				r.spent = map[record.Section]record.Spent{record.SectionStep: {Times: 10, Seconds: 10, Longest: 1}}
				r.steps(0, 10)
				time.Sleep(5*time.Minute + 3*time.Second)
				r.exits <- lost
				<-r.ended
				r.all(ExitFailed)
			}, done(10, 20)}}
			result := mustRun(t, begin(t, th))
			if a := result.Attempts[0]; result.Code != ExitDone || a.Outcome != HostLost || a.Blamed != "b" ||
				th.hosts() != "aabb aacc" || (len(result.Excluded) > 0) != lost.Unreachable {
				t.Errorf("%+v", result)
			}
		})
	}
}

// slowRank does steps. After the first one, a rank is slow. When the launcher stops the run, it
// saves.
func slowRank(from, to int64, rank int) script {
	return func(r *scripted) {
		r.from = from
		r.beat(record.SectionStep, from)
		time.Sleep(time.Second)
		r.slow = &rank
		for step := from + 1; step < to; step++ {
			r.beat(record.SectionStep, step)
			select {
			case <-r.stopped:
				r.end = record.EndedTerminated
				r.beat(record.SectionCheckpoint, step)
				r.all(ExitStopped)
				return
			case <-time.After(time.Second):
			}
		}
		r.beat(record.SectionStep, to)
		r.all(ExitDone)
	}
}

// The host of a slow rank is replaced by a spare, after a checkpoint, if the user asks for it.
func TestReplaceSlow(t *testing.T) {
	for _, test := range []struct {
		name    string
		most    int
		hosts   []Host
		scripts []script
		used    string
		notice  string // in the messages
		attempt string // reason of the first attempt
	}{
		{"not asked for", 0, threeHosts(), []script{slowRank(0, 20, 1)}, "aabb", "", "all steps are done"},
		{"a spare", 1, threeHosts(), []script{slowRank(0, 20, 1), done(2, 20)}, "aabb bbcc",
			"rank 1 on a is slow; the run stops after a checkpoint, and a spare replaces the host",
			"rank 1 on a is slow; the run stopped after a checkpoint, and a spare replaces the host"},
		{"no spare", 1, threeHosts()[:2], []script{slowRank(0, 20, 1)}, "aabb",
			"rank 1 on a is slow, and no spare can replace the host; the run continues", "all steps are done"},
		{"too often", 1, []Host{{"a", 2}, {"b", 2}, {"c", 2}, {"d", 2}}, []script{slowRank(0, 20, 1),
			slowRank(2, 20, 2)},
			"aabb bbcc", "rank 2 on c is slow; the run continues, because --replace-slow allows 1",
			"rank 1 on a is slow; the run stopped after a checkpoint, and a spare replaces the host"},
		{"twice", 2, []Host{{"a", 2}, {"b", 2}, {"c", 2}, {"d", 2}}, []script{slowRank(0, 20, 1), slowRank(2, 20, 2),
			done(4, 20)}, "aabb bbcc bbdd", "rank 2 on c is slow; the run stops after a checkpoint",
			"rank 1 on a is slow; the run stopped after a checkpoint, and a spare replaces the host"},
		{"the rank is slow everywhere", 5, []Host{{"a", 2}, {"b", 2}, {"c", 2}, {"d", 2}}, []script{slowRank(0, 20, 1),
			slowRank(2, 20, 1)}, "aabb bbcc", "rank 1 on b is slow, as it was on a, so the hosts are not the cause; " +
			"the run continues", "rank 1 on a is slow; the run stopped after a checkpoint, and a spare replaces the " +
			"host"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				th := &theatre{scripts: test.scripts}
				o := begin(t, th)
				o.Hosts, o.ReplaceSlow, o.Retries = test.hosts, test.most, 0
				var notices []string
				o.Notice = func(text string) { notices = append(notices, text) }
				result := mustRun(t, o)
				if result.Code != ExitDone || th.hosts() != test.used || result.Attempts[0].Reason != test.attempt ||
					!strings.Contains(strings.Join(notices, "\n"), test.notice) {
					t.Errorf("code %d on %s: %s\n%s", result.Code, th.hosts(), result.Attempts[0].Reason,
						strings.Join(notices, "\n"))
				}
				if a := result.Attempts[0]; len(result.Attempts) > 1 && (a.Outcome != Slow || a.Blamed != "a" ||
					*a.Rank != 1) {
					t.Errorf("%+v", a)
				}
			})
		})
	}
}

// A user who stops a run while a slow host is being replaced stops it.
func TestReplaceSlowStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signals := make(chan os.Signal, 1)
		th := &theatre{scripts: []script{func(r *scripted) {
			go func() { <-r.stopped; signals <- schedulerSignal }()
			rank := 1
			r.slow = &rank
			r.steps(0, 1)
			<-r.stopped
			time.Sleep(5 * time.Second)
			r.end = record.EndedStopped
			r.beat(record.SectionCheckpoint, 1)
			r.all(ExitStopped)
		}}}
		o := begin(t, th)
		o.ReplaceSlow, o.Signals = 1, signals
		if result := mustRun(t, o); result.Outcome != Stopped || result.Code != ExitStopped || th.hosts() != "aabb" {
			t.Errorf("%s, code %d on %s", result.Outcome, result.Code, th.hosts())
		}
	})
}

func TestHasSpare(t *testing.T) {
	for _, test := range []struct {
		hosts string
		ranks int
		want  bool
	}{{"a:2,b:2,c:2", 4, true}, {"a:2,b:2", 4, false}, {"a:2,b:2", 3, false}, {"a:1,b:2", 2, true}, {"a:4", 2, false}} {
		hosts, err := ParseHosts(test.hosts)
		if err != nil {
			t.Fatal(err)
		}
		if HasSpare(hosts, test.ranks) != test.want {
			t.Errorf("%d ranks on %s: %v", test.ranks, test.hosts, !test.want)
		}
	}
	if HasSpare(nil, 1) {
		t.Error("this machine has a spare")
	}
}

// What the first attempt took is known to the second one; and a run that hangs to the last ends as
// timeout(1) does.
func TestHangAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first := func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionStep: {Times: 10, Seconds: 10, Longest: 1}}
			hangs(0, 10, true)(r)
		}
		th := &theatre{scripts: []script{first, hangs(5, 8, true)}}
		result := mustRun(t, begin(t, th))
		if result.Outcome != Hang || result.Code != ExitHang || len(result.Attempts) != 4 {
			t.Errorf("%s, code %d after %d attempts: %s", result.Outcome, result.Code, len(result.Attempts),
				result.Reason)
		}
		for _, s := range th.played[1:] {
			if got := strings.Join(s.asked, ", "); got != "stacks, end at 5m19s" {
				t.Errorf("%q", got)
			}
		}
	})
}

// Ranks that are left when one has died get a moment to leave by themselves.
func TestCascade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := &theatre{scripts: []script{func(r *scripted) {
			r.steps(0, 5)
			r.exits <- Exit{Rank: 1, Host: "a", Code: 1} // seen first, as it happens
			r.exits <- Exit{Rank: 3, Host: "b", Signal: syscall.SIGTERM}
			r.exits <- Exit{Rank: 2, Host: "b", Signal: syscall.SIGKILL}
			<-r.ended
			r.exits <- Exit{Rank: 0, Host: "a", Signal: syscall.SIGKILL} // by us
		}, done(0, 5)}}
		result := mustRun(t, begin(t, th))
		a := result.Attempts[0]
		if a.Outcome != HostLost || a.Blamed != "b" || *a.Rank != 2 {
			t.Errorf("%+v, rank %d", a, *a.Rank)
		}
		if got := strings.Join(th.played[0].asked, ", "); got != "end at 10s" && got != "end at 11s" {
			t.Errorf("%q; want an end five seconds after the death at 5 s", got)
		}
	})
}

// Signals to the launcher stop the run, and no attempt follows.
func TestSignals(t *testing.T) {
	stops := func(saves time.Duration) script {
		return func(r *scripted) {
			r.steps(0, 3)
			select {
			case <-r.stopped:
			case <-r.killed:
			}
			select {
			case <-time.After(saves):
				r.all(ExitStopped)
			case <-r.killed:
				r.dies(0, syscall.SIGKILL)
			}
		}
	}
	for _, test := range []struct {
		name    string
		scripts []script
		at      []time.Duration // of signals: SIGUSR1 at an odd second, else SIGTERM
		outcome Outcome
		code    int
		asked   string
	}{
		{"by SIGUSR1, and again", []script{stops(time.Minute)}, []time.Duration{11 * time.Second, 21 * time.Second},
			Stopped, ExitStopped, "stop at 11s"},
		{"by SIGUSR1, and then by SIGTERM", []script{stops(time.Minute)}, []time.Duration{11 * time.Second,
			20 * time.Second}, Stopped, ExitStopped, "stop at 11s"},
		{"by SIGTERM, and then by SIGUSR1", []script{stops(time.Minute)}, []time.Duration{10 * time.Second,
			21 * time.Second}, Stopped, ExitStopped, "stop at 10s"},
		{"by SIGUSR1, and then by SIGTERM twice", []script{stops(time.Minute)}, []time.Duration{11 * time.Second,
			20 * time.Second, 30 * time.Second}, Stopped, ExitFailed,
			"stop at 11s, kill at 30s"},
		{"once", []script{stops(time.Minute)}, []time.Duration{10 * time.Second}, Stopped, ExitStopped, "stop at 10s"},
		{"twice", []script{stops(time.Minute)}, []time.Duration{10 * time.Second, 20 * time.Second}, Stopped,
			ExitFailed, "stop at 10s, kill at 20s"},
		{"at the end", []script{func(r *scripted) { r.steps(0, 30); r.all(ExitDone) }},
			[]time.Duration{29500 * time.Millisecond}, Done, ExitDone, "stop at 30s"},
		{"while it waits", []script{setupFails(1)}, []time.Duration{4 * time.Second}, Stopped, ExitStopped, ""},
		{"the ranks fail then", []script{func(r *scripted) { r.steps(0, 5); <-r.stopped; r.dies(1, syscall.SIGKILL) }},
			[]time.Duration{10 * time.Second}, HostLost, ExitFailed, "stop at 10s"},
		{"the ranks are late, and save", []script{func(r *scripted) {
			r.steps(0, 5)
			<-r.ended
			r.end = record.EndedStopped
			r.beat(record.SectionCheckpoint, 5)
			r.all(ExitStopped)
		}}, []time.Duration{10 * time.Second}, Stopped, ExitStopped, "stop at 10s, stacks, end at 30m21s"},
		{"the ranks hang then", []script{func(r *scripted) { r.steps(0, 5); <-r.ended; r.all(1) }},
			[]time.Duration{10 * time.Second}, Hang, ExitHang, "stop at 10s, stacks, end at 30m21s"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				th := &theatre{scripts: test.scripts}
				o := begin(t, th)
				signals := make(chan os.Signal)
				o.Signals = signals
				go func() {
					start := time.Now()
					for _, at := range test.at {
						time.Sleep(time.Until(start.Add(at)))
						if at%(2*time.Second) == time.Second {
							signals <- schedulerSignal
						} else {
							signals <- syscall.SIGTERM
						}
					}
				}()
				result := mustRun(t, o)
				if result.Outcome != test.outcome || result.Code != test.code || len(result.Attempts) != 1 {
					t.Errorf("%s, code %d after %d attempts: %s", result.Outcome, result.Code, len(result.Attempts),
						result.Reason)
				}
				if got := strings.Join(th.played[0].asked, ", "); got != test.asked {
					t.Errorf("%q, want %q", got, test.asked)
				}
			})
		})
	}
}

// A run is stopped ahead of the end of its time, so that a save fits in.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := &theatre{scripts: []script{func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionCheckpoint: {Times: 2, Seconds: 600, Longest: 400},
				record.SectionStep: {Times: 1, Seconds: 30, Longest: 30}}
			for step := int64(0); ; step++ {
				select {
				case <-r.stopped:
					r.all(ExitStopped)
					return
				case <-time.After(10 * time.Second):
					r.beat(record.SectionStep, step)
				}
			}
		}}}
		o := begin(t, th)
		o.Deadline, o.Margin = time.Now().Add(time.Hour), 5*time.Minute
		result := mustRun(t, o)
		if got := strings.Join(th.played[0].asked, ", "); result.Outcome != Stopped || result.Code != ExitStopped ||
			got != "stop at 46m10s" {
			// 3600 − 2·400 − 30 s
			t.Errorf("%s, code %d, %q", result.Outcome, result.Code, got)
		}
	})
}

// A job that is shorter than the margin trains for half its time.
func TestShortDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := &theatre{scripts: []script{func(r *scripted) {
			r.steps(0, 1)
			<-r.stopped
			r.end = record.EndedStopped
			r.beat(record.SectionCheckpoint, 9)
			r.all(ExitStopped)
		}}}
		o := begin(t, th)
		o.Deadline, o.Margin = time.Now().Add(4*time.Minute), 5*time.Minute
		result := mustRun(t, o)
		if got := strings.Join(th.played[0].asked, ", "); result.Code != ExitStopped || got != "stop at 2m0s" {
			t.Errorf("code %d, %q", result.Code, got)
		}
	})
}

// A context that ends kills the ranks.
func TestContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := &theatre{scripts: []script{func(r *scripted) { r.steps(0, 3); <-r.killed; r.dies(0, syscall.SIGKILL) }}}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := Run(ctx, begin(t, th)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
	})
}

// launch.jsonl has a line an attempt, numbered through all launchers; what failures.jsonl has from
// before counts.
func TestRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := &theatre{scripts: []script{func(r *scripted) {
			r.spent = map[record.Section]record.Spent{record.SectionSetup: {Times: 1, Seconds: 2.5, Longest: 2.5}}
			dies(4, 9, 2, syscall.SIGKILL)(r)
		}, saves(8, 10, record.EndedStopped)}}
		o := begin(t, th)
		mustRun(t, o)
		path := filepath.Join(o.Output, RecordFile)
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		f.WriteString(`{"attempt":3,"with":"thea`) // of a launcher that was killed
		f.Close()
		// Its ranks had ended, and said so.
		folder := filepath.Join(o.Output, "launch", "attempt-003")
		if err := os.Mkdir(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		(&scripted{Ranks: Ranks{Environment: []string{"MULA_HEARTBEAT=" + filepath.Join(folder, "heartbeat")}}, t: t,
			end: record.EndedDone}).beat(record.SectionCheckpoint, 10)
		// A rank was killed while it wrote, and another went on in its line.
		failure := `{"time":"2026-01-02T03{"time":"2026-01-02T03:04:04Z","host":"b"}` + "\n" +
			`{"time":"2026-01-02T03:04:05Z","host":"a","rank":0,"step":9,"kind":"not_finite","error":"the loss is not finite"}` + "\n"
		if err := os.WriteFile(filepath.Join(o.Output, "failures.jsonl"), []byte(failure), 0o644); err != nil {
			t.Fatal(err)
		}
		th.scripts, th.played = []script{done(10, 12)}, nil
		var notices []string
		o.Notice = func(text string) { notices = append(notices, text) }
		if result := mustRun(t, o); result.Attempts[0].Number != 4 || th.hosts() != "bbcc" ||
			strings.Join(result.Excluded, "") != "a" {
			t.Errorf("attempt %d on %s", result.Attempts[0].Number, th.hosts())
		}
		if !slices.ContainsFunc(notices,
			func(s string) bool {
				return strings.Contains(s, "host a is not used: rank 0 on a had NaN or Inf values")
			}) {
			t.Errorf("%q", notices)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var attempts []Attempt
		for line := range strings.Lines(string(text)) {
			var a Attempt
			if err := json.Unmarshal([]byte(line), &a); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			attempts = append(attempts, a)
		}
		if len(attempts) != 3 {
			t.Fatalf("%d attempts", len(attempts))
		}
		a := attempts[0]
		if a.Number != 1 || a.With != "theatre" || strings.Join(a.Hosts, "") != "aabb" || a.Outcome != HostLost ||
			a.Blamed != "b" || *a.Rank != 2 || a.From != 4 || a.Step != 9 ||
			a.Steps != 5 || a.Setup != 2.5 || a.End.Sub(a.Start) < 5*time.Second {
			t.Errorf("%+v", a)
		}
		if attempts[1].Outcome != Stopped || attempts[2].Outcome != Done {
			t.Errorf("%s, %s", attempts[1].Outcome, attempts[2].Outcome)
		}
	})
}

// Blame lasts for a time, and can be forgotten. What happened on two hosts at the same step is not
// theirs.
func TestBlame(t *testing.T) {
	line := func(age time.Duration, host, kind string, step int) string {
		return fmt.Sprintf(`{"time":%q,"host":%q,"rank":0,"step":%d,"kind":%q,"error":""}`+"\n",
			time.Now().Add(-age).Format(time.RFC3339), host, step, kind)
	}
	const day = 24 * time.Hour
	for _, test := range []struct {
		name     string
		failures func() string
		forget   bool
		lost     string
		again    string // in the next launch, without ForgetBlame
	}{
		{"new", func() string { return line(6*day, "a", "not_finite", 7) + line(6*day, "b", "replica_differs", 7) },
			false, "a b", "a b"},
		{"old", func() string { return line(8*day, "a", "not_finite", 7) + line(6*day, "b", "replica_differs", 7) },
			false, "b", "b"},
		{"forgotten", func() string { return line(day, "a", "not_finite", 7) }, true, "", ""},
		{"blamed again", func() string {
			return line(day, "a", "not_finite", 7) + line(day, "", "forgiven", 0) + line(day, "a", "not_finite", 9)
		}, false, "a", "a"},
		{"one host is forgiven", func() string {
			return line(day, "a", "not_finite", 7) + line(day, "b", "not_finite", 9) + line(day, "a", "forgiven", 0)
		}, false, "b", "b"},
		{"two hosts at the same step", func() string {
			return line(day, "a", "not_finite", 7) + line(day, "b", "not_finite", 7) + line(day, "c", "not_finite", 8)
		}, false, "c", "c"},
		{"the run", func() string {
			return line(day, "", "diverged", 7) + line(day, "a", "diverged", 7) + line(day, "a", "error", 7)
		}, false, "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := begin(t, &theatre{scripts: []script{done(0, 1)}})
				o.Ranks, o.BlameExpiry, o.ForgetBlame = 2, 7*day, test.forget
				if err := os.WriteFile(filepath.Join(o.Output, record.FailuresFile), []byte(test.failures()),
					0o644); err != nil {
					t.Fatal(err)
				}
				o.Hosts = append(o.Hosts, Host{"d", 2})
				if got := strings.Join(mustRun(t, o).Excluded, " "); got != test.lost {
					t.Errorf("excluded %q, want %q", got, test.lost)
				}
				o.ForgetBlame = false
				if got := strings.Join(mustRun(t, o).Excluded, " "); got != test.again {
					t.Errorf("excluded %q in the next launch, want %q", got, test.again)
				}
			})
		})
	}
}

// A failure on two hosts at the same step does not keep these hosts from the next launch.
func TestForgiven(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := &theatre{scripts: []script{poisoned(0, 7, 3, "not_finite"), poisoned(5, 7, 3, "not_finite")}}
		o := begin(t, th)
		mustRun(t, o)
		th.scripts, th.played = []script{done(5, 10)}, nil
		if result := mustRun(t, o); result.Code != ExitDone || th.hosts() != "aabb" {
			t.Errorf("%+v on %s", result, th.hosts())
		}
	})
}

// A second launcher of a run directory is refused, and the error names the first launcher.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	first, err := lockRun(filesystem.OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Run(t.Context(), Options{Output: dir, Ranks: 1, Start: &theatre{}})
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d on", os.Getpid())) ||
		!strings.Contains(err.Error(), dir) {
		t.Errorf("%v", err)
	}
	first.Close()
	again, err := lockRun(filesystem.OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

// Young's formula, and the sentence.
func TestInterval(t *testing.T) {
	for _, test := range []struct{ save, between, want float64 }{
		{2, 3600, 120}, {23.6, 11160, 725.78}, {5.4, 11160, 347.17}, {0.5, 100, 10}, {50, 100, 100}, {500, 100, 100},
	} {
		if got := interval(test.save, test.between); got < test.want*0.9999 || got > test.want*1.0001 {
			t.Errorf("a save of %g s, a failure every %g s: every %g s, want %g", test.save, test.between, got,
				test.want)
		}
	}
	a := advise(2, 3600, 0.5)
	if want := "a checkpoint takes 2 s, and the mean time between failures is 1h0m0s; saving every 240 steps " +
		"(checkpoint.every) " +
		"would lose the least time"; a.String() != want {
		t.Errorf("%q, want %q", a, want)
	}
	if advise(0, 3600, 1) != nil || advise(1, 0, 1) != nil || advise(1, 1, 0) != nil {
		t.Error("advice without numbers")
	}
}

// The advice describes the failures of all attempts.
func TestAdvice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spent := map[record.Section]record.Spent{record.SectionCheckpoint: {Times: 2, Seconds: 4, Longest: 3},
			record.SectionStep: {Times: 50, Seconds: 50, Longest: 1}}
		th := &theatre{scripts: []script{
			func(r *scripted) { r.spent = spent; dies(0, 50, 0, syscall.SIGKILL)(r) },
			func(r *scripted) { r.spent = spent; dies(40, 90, 0, syscall.SIGKILL)(r) },
			func(r *scripted) { r.spent = spent; done(80, 130)(r) },
		}}
		a := mustRun(t, begin(t, th)).Advice
		if a == nil || a.SaveSeconds != 2 || a.StepSeconds != 1 || a.BetweenSeconds < 75 || a.BetweenSeconds > 76 ||
			a.Every != 17 {
			// √(2·2·75)
			t.Errorf("%+v", a)
		}
		if a := mustRun(t, begin(t, &theatre{scripts: []script{done(0, 9)}})).Advice; a != nil {
			t.Errorf("of a run that did not fail: %+v", a)
		}
	})
}
