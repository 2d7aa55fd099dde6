//go:build unix

package launch

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mula/internal/longtest"
	"mula/train/launch/palstest"
	"mula/train/record"
	"mula/xpu/comm/tcp"
)

// actVariable makes the test binary one rank of a run, which does what the variable says, word by
// word.
const actVariable = "MULA_LAUNCH_TEST_ACT"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "agent" {
		code, err := Agent(os.Stdin, os.Stdout, os.Stderr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}
	if len(os.Args) > 1 && os.Args[1] == "pals" {
		program := palstest.Program{Self: os.Args[:2], Stdout: os.Stdout, Stderr: os.Stderr}
		os.Exit(program.Run(os.Args[2:]))
	}
	if acts := os.Getenv(actVariable); acts != "" {
		awaitStart()
		act(strings.Fields(acts))
	}
	os.Exit(m.Run())
}

// act is a rank. Its words:
//
//	say TEXT      on standard output; "complain" on standard error
//	beat SECTION STEP
//	exit CODE
//	wait          for SIGTERM or SIGUSR1, then exits with 3 like a saved run; rank 0 reports it
//	deaf          for ever, whatever signal
//	on RANK …     what follows, as far as the next "on", is for that rank
//	meet DIR N    waits until N ranks are here
//	once FILE …   what follows is for the first process that finds no FILE
//	sleep         for an hour; SIGTERM ends it
//	stop, kill    itself, by SIGSTOP or SIGKILL
//	environment   prints MULA_… and its folder
//	join          the other ranks over TCP; fails if the address of rank 0 is still free
//	pid           prints its process id on standard error
//	next          waits for a rank in the next group, and prints it on standard error
func act(words []string) {
	rank := os.Getenv("MULA_RANK")
	for _, name := range []string{"OMPI_COMM_WORLD_RANK", "PMI_RANK"} {
		if rank == "" {
			rank = os.Getenv(name)
		}
	}
	assigned, err := OpenAssignments()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(ExitFailed)
	}
	if assigned.IsSpare() {
		rank = "spare"
	}
	quit := make(chan os.Signal, 1)
	signal.Notify(quit, syscall.SIGQUIT)
	go func() {
		for range quit { // as mula train
			fmt.Fprintln(os.Stderr, "stacks of rank", rank)
		}
	}()
	mine := true
	for len(words) > 0 {
		word, arguments := words[0], words[1:]
		take := func() string {
			first := arguments[0]
			arguments = arguments[1:]
			return first
		}
		switch word {
		case "on":
			mine = take() == rank
		case "say", "complain":
			if text := take(); mine && word == "say" {
				fmt.Println(text)
			} else if mine {
				fmt.Fprintln(os.Stderr, text)
			}
		case "environment":
			if mine {
				dir, _ := os.Getwd()
				fmt.Println("world", os.Getenv("MULA_WORLD"), "host", os.Getenv("MULA_HOST"), "address",
					os.Getenv("MULA_ADDRESS"), "secret", len(os.Getenv("MULA_SECRET")), "in", dir)
			}
		case "join":
			if mine {
				joinOthers()
			}
		case "pid":
			if mine {
				fmt.Fprintln(os.Stderr, "process", os.Getpid())
			}
		case "beat":
			section, text := record.Section(take()), take()
			if mine {
				step, _ := strconv.ParseInt(text, 10, 64)
				writeBeat(record.Heartbeat{Section: section, Step: step, Generation: assigned.Generation()})
			}
		case "next":
			if !mine {
				break
			}
			if err := assigned.next(context.Background()); err != nil {
				fmt.Fprintln(os.Stderr, "no group:", err)
				os.Exit(ExitDone)
			}
			rank = os.Getenv("MULA_RANK")
			fmt.Fprintln(os.Stderr, "now", rank, "in group", assigned.Generation())
		case "exit":
			if code, _ := strconv.Atoi(take()); mine {
				os.Exit(code)
			}
		case "meet":
			dir, n := take(), take()
			if mine {
				meet(dir, "rank", rank, n)
			}
		case "once":
			if path := take(); mine {
				f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o644)
				if mine = err == nil; mine {
					f.Close()
				}
			}
		case "wait":
			if mine {
				c := make(chan os.Signal, 1)
				signal.Notify(c, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2)
				fmt.Fprintln(os.Stderr, "waiting")
				<-c
				if rank == "0" {
					writeBeat(record.Heartbeat{Section: record.SectionCheckpoint, Ended: record.EndedStopped})
				}
				os.Exit(ExitStopped)
			}
		case "deaf":
			if mine {
				signal.Ignore(syscall.SIGTERM)
				fmt.Fprintln(os.Stderr, "waiting")
				time.Sleep(time.Hour)
			}
		case "sleep":
			if mine {
				time.Sleep(time.Hour)
			}
		case "stop", "kill":
			if mine {
				self := map[string]syscall.Signal{"stop": syscall.SIGSTOP, "kill": syscall.SIGKILL}[word]
				syscall.Kill(os.Getpid(), self)
				time.Sleep(time.Hour)
			}
		default:
			fmt.Fprintln(os.Stderr, "no such word:", word)
			os.Exit(ExitFailed)
		}
		words = arguments
	}
	os.Exit(ExitDone)
}

// processManager is this rank's connection to mpiexec of MPICH.
var processManager *os.File

// awaitStart returns when mpiexec of MPICH has started all ranks. MPICH 4.0's mpiexec is killed by
// SIGPIPE if ranks end earlier: about one in 25 runs of `mpiexec.mpich -n 3 true` on a busy machine
// ends so. The ranks meet in a barrier of the protocol PMI 1, which mpiexec completes. Then they
// finalize PMI, and meet again: mpiexec also fails if a rank is killed while another one finalizes.
func awaitStart() {
	fd, err := strconv.Atoi(os.Getenv("PMI_FD"))
	if err != nil {
		return // not started by MPICH
	}
	processManager = os.NewFile(uintptr(fd), "PMI")
	answers := bufio.NewReader(processManager)
	for _, command := range []string{"init pmi_version=1 pmi_subversion=1", "barrier_in", "finalize"} {
		_, err := fmt.Fprintf(processManager, "cmd=%s\n", command)
		if err == nil {
			_, err = answers.ReadString('\n')
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "PMI: %s: %v\n", command, err)
			os.Exit(ExitFailed)
		}
	}
	meet(filepath.Dir(os.Getenv(record.HeartbeatVariable)), "started", os.Getenv("PMI_RANK"), os.Getenv("PMI_SIZE"))
}

// meet returns when n ranks have called it with the same directory and name.
func meet(dir, name, rank, n string) {
	os.WriteFile(filepath.Join(dir, name+"-"+rank), nil, 0o644)
	for met := 0; strconv.Itoa(met) != n; time.Sleep(time.Millisecond) {
		found, _ := filepath.Glob(filepath.Join(dir, name+"-*"))
		met = len(found)
	}
}

// joinOthers joins the other ranks. Rank 0 must already have its port: no other process can bind
// it.
func joinOthers() {
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(ExitFailed)
	}
	o, _, err := tcp.FromEnvironment()
	if err != nil {
		fail(err)
	}
	if l, err := net.Listen("tcp", o.Address); err == nil {
		l.Close()
		fail(fmt.Errorf("rank %d can bind %s", o.Rank, o.Address))
	}
	link, err := tcp.Join(context.Background(), o)
	if err != nil {
		fail(err)
	}
	fmt.Fprintf(os.Stdout, "rank %d of %d\n", link.Rank(), link.Size())
	link.Close()
}

func writeBeat(beat record.Heartbeat) {
	beat.PID, beat.Time = os.Getpid(), time.Now()
	body, _ := json.Marshal(beat)
	body = body[:len(body)-1]
	text := fmt.Sprintf("%-639s\n", fmt.Sprintf(`%s,"sum":%d}`, body, crc32.ChecksumIEEE(body)))
	if err := os.WriteFile(os.Getenv(record.HeartbeatVariable), []byte(text), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(ExitFailed)
	}
}

// A sharedBuffer is a writer for several processes.
type sharedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *sharedBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *sharedBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// await waits until a condition holds.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline, limited := t.Deadline()
	for ; !holds(); time.Sleep(5 * time.Millisecond) {
		if limited && time.Until(deadline) < 20*time.Second {
			t.Errorf("%s: not before the deadline of the tests", what)
			runtime.Goexit()
		}
	}
}

// A play is a run of ranks of this test binary.
type play struct {
	Options
	stdout, stderr sharedBuffer
}

// newPlay makes a run whose ranks do what the words say. Tests of processes wait more than they
// work, so they run at the same time.
func newPlay(t *testing.T, words string, start func(command []string, out Output) Starter) *play {
	t.Helper()
	t.Parallel()
	p := &play{}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p.Options = Options{Output: t.TempDir(), Ranks: 3, Hosts: []Host{{"a", 2}, {"b", 1}, {"c", 2}},
		Limits: DefaultLimits(), Grace: 100 * time.Millisecond, Retries: 3,
		Start: start([]string{"/usr/bin/env", actVariable + "=" + words, program}, Output{&p.stdout, &p.stderr})}
	return p
}

func processes(command []string, out Output) Starter {
	return &Processes{Command: command, AllLocal: true, Output: out}
}

// remotes has every rank behind a remote shell, that is a script which leaves the host out.
func remotes(t *testing.T) func(command []string, out Output) Starter {
	shell := filepath.Join(t.TempDir(), "shell")
	if err := os.WriteFile(shell,
		[]byte("#!/bin/sh\nif [ \"$1\" = unreachable ]; then echo no route >&2; exit 255; fi\nif [ \"$1\" = silent "+
			"]; then exec sleep 3600; fi\nshift\nexec sh -c \"$*\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return func(command []string, out Output) Starter {
		return &Processes{Command: command, RemoteShell: []string{shell}, Agent: []string{command[2], "agent"},
			Output: out}
	}
}

func (p *play) run(t *testing.T) Result {
	t.Helper()
	result, err := Run(t.Context(), p.Options)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range result.Attempts {
		t.Logf("attempt %d on %v: %s, %s", a.Number, a.Hosts, a.Outcome, a.Reason)
	}
	return result
}

// Many launches at the same time do not take each other's ports: rank 0 inherits the socket that
// the launcher has bound.
func TestManyLaunches(t *testing.T) {
	for i := range 24 {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			p := newPlay(t, "join", processes)
			p.Retries = 0
			if result := p.run(t); result.Code != ExitDone || len(result.Attempts) != 1 {
				t.Fatalf("%+v\n%s", result, p.stderr.String())
			}
			if out := p.stdout.String() + p.stderr.String(); !strings.Contains(out, "rank 0 of 3\n") ||
				!strings.Contains(out, "[1] rank 1 of 3\n") || !strings.Contains(out, "[2] rank 2 of 3\n") {
				t.Errorf("output %q", out)
			}
		})
	}
}

// Ranks find each other by their environment. The output of rank 0 is passed through, and the
// output of the other ranks has their number in front. All output is kept.
func TestOutput(t *testing.T) {
	for name, start := range map[string]func([]string, Output) Starter{"local": processes, "remote": remotes(t)} {
		t.Run(name, func(t *testing.T) {
			p := newPlay(t,
				"on 0 environment say zero complain zero! on 1 say one complain one! on 2 environment complain two!",
				start)
			if result := p.run(t); result.Code != ExitDone {
				t.Fatalf("%+v", result)
			}
			dir, _ := os.Getwd()
			out := p.stdout.String()
			if !strings.HasPrefix(out, "world 3 host a address ") ||
				!strings.HasSuffix(out, "secret 32 in "+dir+"\nzero\n") {
				t.Errorf("standard output %q", out)
			}
			for _, line := range []string{"zero!\n", "[1] one\n", "[1] one!\n", "[2] world 3 host b address ",
				"[2] two!\n"} {
				if !strings.Contains("\n"+p.stderr.String(), "\n"+line) {
					t.Errorf("standard error %q has no line %q", p.stderr.String(), line)
				}
			}
			log, err := os.ReadFile(filepath.Join(p.Output, "launch", "attempt-001", "rank-00001.log"))
			if err != nil || !strings.Contains(string(log), "one\n") || !strings.Contains(string(log), "one!\n") ||
				strings.Contains(string(log), "zero") {
				t.Errorf("log of rank 1: %q, %v", log, err)
			}
		})
	}
}

// A rank that is killed is seen with its host, and the others are ended, however deaf they are.
func TestKilledRank(t *testing.T) {
	for name, start := range map[string]func([]string, Output) Starter{"local": processes, "remote": remotes(t)} {
		t.Run(name, func(t *testing.T) {
			mark := filepath.Join(t.TempDir(), "mark")
			p := newPlay(t, "on 0 beat step 1 on 2 once "+mark+" kill on 1 exit 0 on 0 exit 0", start)
			result := p.run(t)
			if result.Code != ExitDone || len(result.Attempts) != 2 {
				t.Fatalf("%+v", result)
			}
			if a := result.Attempts[0]; a.Outcome != HostLost || a.Blamed != "b" || *a.Rank != 2 ||
				!strings.Contains(a.Reason, "signal 9") {
				t.Errorf("%+v", a)
			}
			if got := strings.Join(result.Attempts[1].Hosts, ""); got != "aac" {
				t.Errorf("then on %s, want aac", got)
			}
		})
	}
}

// A hot spare takes over from a rank that is killed. The other processes stay, and join the new
// group. At the end, the spare that was started since then is released.
func TestHotSpareProcesses(t *testing.T) {
	for name, start := range map[string]func([]string, Output) Starter{"local": processes, "remote": remotes(t)} {
		t.Run(name, func(t *testing.T) {
			dir, join := t.TempDir(), " join"
			if name == "remote" {
				join = "" // the names of the hosts have no address
			}
			p := newPlay(t, "on 0 beat step 7 on 0 meet "+dir+" 3 on 1 meet "+dir+" 3 on 2 meet "+dir+" 3 kill "+
				"on 0 pid next"+join+" beat step 8 on 1 pid next"+join+" on spare next"+join+" on 0 exit 0", start)
			p.HotSpares = 1
			result := p.run(t)
			if a := result.Attempts[0]; result.Code != ExitDone || len(result.Attempts) != 1 || len(a.Replaced) != 1 ||
				a.Step != 8 || strings.Join(a.Replaced[0].Hosts, "") != "c" {
				t.Fatalf("%+v\n%s", result, p.stderr.String())
			}
			errs := p.stderr.String()
			for _, line := range []string{"now 0 in group 1\n", "[1] now 1 in group 1\n", "[2] now 2 in group 1\n",
				"[spare] no group: "} {
				if !strings.Contains("\n"+errs, "\n"+line) {
					t.Errorf("standard error %q has no line %q", errs, line)
				}
			}
			if pids := processLine.FindAllString(errs, -1); len(pids) != 2 {
				t.Errorf("the ranks that stay are the processes %q", pids)
			}
			log, err := os.ReadFile(filepath.Join(p.Output, "launch", "attempt-001", "rank-00002.log"))
			if err != nil || !strings.Contains(string(log), "now 2 in group 1\n") {
				t.Errorf("log of rank 2: %q, %v", log, err)
			}
		})
	}
}

// A rank that is stopped is a hang: all ranks are killed, a deaf one and the stopped one, too.
func TestStoppedRank(t *testing.T) {
	longtest.SkipIfShort(t)
	for name, start := range map[string]func([]string, Output) Starter{"local": processes, "remote": remotes(t)} {
		t.Run(name, func(t *testing.T) {
			p := newPlay(t, "pid meet "+t.TempDir()+" 3 beat step 7 on 0 deaf on 1 stop on 2 wait", start)
			p.Limits = Limits{Floor: map[record.Section]time.Duration{record.SectionSetup: time.Hour},
				First: time.Second, Factor: 1}
			p.Retries, p.Grace = 0, 3*time.Second
			result := p.run(t)
			if !strings.Contains(p.stderr.String(), "stacks of rank 0\n") {
				t.Errorf("rank 0 wrote no stacks: %q", p.stderr.String())
			}
			if a := result.Attempts[0]; result.Outcome != Hang || result.Code != ExitHang ||
				len(result.Attempts) != 1 || a.Step != 7 || a.Blamed != "" {
				t.Errorf("%+v", result)
			}
			if pids := processLine.FindAllStringSubmatch(p.stderr.String(), -1); len(pids) != 3 {
				t.Errorf("the ranks say %q", p.stderr.String())
			} else {
				for _, pid := range pids {
					await(t, "process "+pid[1]+" is gone", func() bool { return gone(pid[1]) })
				}
			}
		})
	}
}

var processLine = regexp.MustCompile(`process (\d+)\n`)

// gone reports whether a process has ended; it may still wait for its parent to take note.
func gone(pid string) bool {
	number, _ := strconv.Atoi(pid)
	if syscall.Kill(number, 0) != nil {
		return true
	}
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	return err == nil && strings.Contains(string(stat), ") Z ")
}

// A signal to the launcher reaches the ranks, which save and exit.
func TestStop(t *testing.T) {
	for name, start := range map[string]func([]string, Output) Starter{"local": processes, "remote": remotes(t)} {
		t.Run(name, func(t *testing.T) {
			p := newPlay(t, "wait", start)
			signals := make(chan os.Signal, 1)
			p.Signals = signals
			go func() {
				await(t, "all ranks wait", func() bool { return strings.Count(p.stderr.String(), "waiting\n") == 3 })
				signals <- syscall.SIGTERM
			}()
			if result := p.run(t); result.Outcome != Stopped || result.Code != ExitStopped ||
				len(result.Attempts) != 1 {
				t.Errorf("%+v", result)
			}
		})
	}
}

// A remote shell that is killed on this machine blames no host.
func TestKilledShell(t *testing.T) {
	shell := filepath.Join(t.TempDir(), "shell")
	mark := filepath.Join(t.TempDir(), "mark")
	text := "#!/bin/sh\nif [ \"$1\" = b ] && mkdir " + mark +
		" 2>/dev/null; then kill -9 $$; fi\nshift\nexec sh -c \"$*\"\n"
	if err := os.WriteFile(shell, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	p := newPlay(t, "on 0 beat step 1 exit 0", func(command []string, out Output) Starter {
		return &Processes{Command: command, RemoteShell: []string{shell}, Agent: []string{command[2], "agent"},
			Output: out}
	})
	result := p.run(t)
	a := result.Attempts[0]
	if result.Code != ExitDone || len(result.Attempts) != 2 || a.Outcome != Failed || a.Blamed != "" ||
		strings.Join(result.Attempts[1].Hosts, "") != "aab" ||
		!strings.Contains(a.Reason, "the remote shell to b, on this machine, was killed by signal 9") {
		t.Errorf("%+v", result)
	}
}

// A host that the remote shell cannot reach is not used again.
func TestUnreachable(t *testing.T) {
	p := newPlay(t, "on 0 exit 0", remotes(t))
	p.Hosts = []Host{{"unreachable", 2}, {"b", 2}, {"c", 2}}
	result := p.run(t)
	if result.Code != ExitDone || len(result.Attempts) != 2 || result.Attempts[0].Blamed != "unreachable" ||
		strings.Join(result.Excluded, "") != "unreachable" ||
		strings.Join(result.Attempts[1].Hosts, "") != "bbc" {
		t.Errorf("%+v", result)
	}
}

// A host that accepts a connection and does nothing is replaced.
func TestSilentHostReplaced(t *testing.T) {
	longtest.SkipIfShort(t)
	p := newPlay(t, "on 0 once "+filepath.Join(t.TempDir(), "mark")+" exit 1 on 0 exit 0", remotes(t))
	p.Hosts, p.Ranks, p.ProbeLimit = []Host{{"b", 1}, {"silent", 1}, {"c", 1}}, 2, 8*time.Second
	result := p.run(t)
	if result.Code != ExitDone || len(result.Attempts) != 2 || result.Attempts[0].Blamed != "silent" ||
		!strings.Contains(result.Attempts[0].Reason, "no answer within 8s") ||
		strings.Join(result.Attempts[1].Hosts, "") != "bc" {
		t.Errorf("%+v\n%s", result, p.stderr.String())
	}
}

// A remote shell that does not end, because its host has gone silent, is killed when it has had the
// time to.
func TestSilentHost(t *testing.T) {
	longtest.SkipIfShort(t)
	p := newPlay(t, "deaf", remotes(t))
	p.Hosts, p.Ranks = []Host{{"silent", 1}}, 1
	p.Limits, p.Retries = Limits{First: time.Second, Factor: 1}, 0
	if result := p.run(t); result.Outcome != Hang || result.Code != ExitHang {
		t.Errorf("%+v", result)
	}
}

// Rank 0 on this machine cannot be found by other machines if it is only called localhost.
func TestLocalhostAmongHosts(t *testing.T) {
	p := newPlay(t, "exit 0", remotes(t))
	p.Hosts = []Host{{"localhost", 2}, {"b", 1}}
	if _, err := Run(t.Context(), p.Options); err == nil ||
		!strings.Contains(err.Error(), "use a name of this machine that the other hosts can resolve") {
		t.Errorf("%v", err)
	}
}

// When the launcher is gone, so are the ranks on other hosts.
func TestAgentAlone(t *testing.T) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	agent := exec.Command(program, "agent")
	var out sharedBuffer
	agent.Stdout, agent.Stderr = &out, &out
	in, err := agent.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	order, _ := json.Marshal(agentOrder{Dir: t.TempDir(), Command: []string{program},
		Environment: []string{actVariable + "=deaf"}})
	in.Write(append(order, '\n'))
	await(t, "the rank waits", func() bool { return strings.Contains(out.String(), "waiting") })
	in.Close()
	if err := agent.Wait(); agent.ProcessState.ExitCode() != 128+int(syscall.SIGKILL) {
		t.Errorf("%v\n%s", err, out.String())
	}
}

func TestShellLine(t *testing.T) {
	words := []string{"a b", "it's", `"$HOME"`, "", "*"}
	out, err := exec.Command("sh", "-c", "printf '%s|' "+shellLine(words)).Output()
	if want := strings.Join(words, "|") + "|"; err != nil || string(out) != want {
		t.Errorf("%q, %v; want %q", out, err, want)
	}
}

// mpiexecs returns the mpiexec programs of this machine, or skips the test if there is none.
func mpiexecs(t *testing.T) map[Kind][]string {
	t.Helper()
	found := map[Kind][]string{}
	for kind, words := range map[Kind][]string{OpenMPI: {"mpiexec.openmpi", "--oversubscribe"},
		MPICH: {"mpiexec.mpich"}} {
		if _, err := exec.LookPath(words[0]); err != nil {
			continue
		}
		if kind == OpenMPI && os.Getuid() == 0 {
			words = append(words, "--allow-run-as-root")
		}
		if got, err := DetectMPI(t.Context(), words); err != nil || got != kind {
			t.Errorf("%s is %s, %v", words[0], got, err)
		}
		found[kind] = words
	}
	if len(found) == 0 {
		t.Skip("no mpiexec.openmpi and no mpiexec.mpich here")
	}
	return found
}

// The launcher understands the messages of mpiexec about a rank that is killed, and about a rank
// that exits with an error. A stop reaches the ranks through mpiexec.
func TestMPI(t *testing.T) {
	longtest.SkipIfShort(t)
	for kind, words := range mpiexecs(t) {
		start := func(command []string, out Output) Starter {
			return &MPI{Kind: kind, Program: words, Command: command, AllLocal: true, Output: out}
		}
		t.Run(string(kind)+", killed", func(t *testing.T) {
			mark := filepath.Join(t.TempDir(), "mark")
			// If another rank has left already, or has not started yet, Open MPI does not always
			// say which rank was killed. If another rank was stopped by a signal just before, it
			// does not always end that rank.
			stays, meets := "", ""
			if kind == OpenMPI {
				meets = "meet " + t.TempDir() + " 3 "
				stays = " on 0 once " + mark + "0 " + meets + "sleep on 1 once " + mark + "1 " + meets + "sleep"
			}
			p := newPlay(t, "on 0 beat step 1"+stays+" on 2 once "+mark+"2 "+meets+"kill on 0 environment exit 0",
				start)
			result := p.run(t)
			a := result.Attempts[0]
			if result.Code != ExitDone || len(result.Attempts) != 2 || a.Outcome != HostLost ||
				!strings.Contains(a.Reason, "signal 9") {
				t.Fatalf("%+v", result)
			}
			if kind == OpenMPI && (a.Blamed != "b" || *a.Rank != 2 ||
				strings.Join(result.Attempts[1].Hosts, "") != "aac") {
				// MPICH names no rank
				t.Errorf("%+v, rank %d", a, *a.Rank)
			}
			if !strings.Contains(p.stdout.String(), "host a ") {
				t.Errorf("standard output %q", p.stdout.String())
			}
		})
		t.Run(string(kind)+", configuration", func(t *testing.T) {
			p := newPlay(t, "exit 2", start)
			if result := p.run(t); result.Outcome != Configuration || result.Code != ExitConfiguration ||
				len(result.Attempts) != 1 {
				t.Errorf("%+v", result)
			}
		})
		t.Run(string(kind)+", stopped", func(t *testing.T) {
			p := newPlay(t, "wait", start)
			signals := make(chan os.Signal, 1)
			p.Signals = signals
			go func() {
				await(t, "all ranks wait", func() bool { return strings.Count(p.stderr.String(), "waiting\n") == 3 })
				signals <- syscall.SIGTERM
			}()
			if result := p.run(t); result.Outcome != Stopped || result.Code != ExitStopped ||
				len(result.Attempts) != 1 {
				t.Errorf("%+v\n%s", result, p.stderr.String())
			}
		})
		t.Run(string(kind)+", hang", func(t *testing.T) {
			// Open MPI wakes a stopped rank before it ends it. Rank 0 then says that the run was
			// stopped.
			p := newPlay(t, "pid meet "+t.TempDir()+" 3 on 0 beat step 7 wait on 1 stop on 2 deaf", start)
			p.Limits = Limits{Floor: map[record.Section]time.Duration{record.SectionSetup: time.Hour},
				First: time.Second, Factor: 1}
			p.Retries, p.Grace = 0, 3*time.Second
			if result := p.run(t); result.Outcome != Hang || result.Code != ExitHang {
				t.Errorf("%+v", result)
			}
			if !strings.Contains(p.stderr.String(), "stacks of rank 2\n") {
				t.Errorf("rank 2 wrote no stacks: %q", p.stderr.String())
			}
			for _, pid := range processLine.FindAllStringSubmatch(p.stderr.String(), -1) {
				await(t, "process "+pid[1]+" is gone", func() bool { return gone(pid[1]) })
			}
		})
	}
}

// The command lines for machines that are not here.
func TestMPIArguments(t *testing.T) {
	r := Ranks{Hosts: []string{"n1", "n1", "n2", "n2"}, Environment: []string{"A=1", "B=2"}}
	for _, test := range []struct {
		m    MPI
		r    Ranks
		want string
	}{
		{MPI{Kind: OpenMPI}, r, "-n 4 --host n1:2,n2:2 -x A -x B mula train"},
		{MPI{Kind: MPICH}, r, "-n 4 -hosts n1:2,n2:2 mula train"},
		{MPI{Kind: Slurm}, r,
			`-n 4 --nodes=2 --distribution=arbitrary --nodelist=n1,n1,n2,n2 --kill-on-bad-exit=1 --export=ALL --overlap sh -c export MULA_HOST="$SLURMD_NODENAME"; exec "$@" sh mula train`},
		{MPI{Kind: Slurm}, Ranks{Hosts: []string{"n2", "n2", "n1"}},
			"-n 3 --nodes=2 --distribution=arbitrary --nodelist=n2,n2,n1 "},
		{MPI{Kind: Slurm, TCP: true}, r,
			`--kill-on-bad-exit=1 --export=ALL --overlap --mpi=none sh -c export MULA_HOST="$SLURMD_NODENAME" MULA_RANK="$SLURM_PROCID"; exec "$@" sh mula train`},
		{MPI{Kind: Slurm, TCP: true, Program: []string{"srun", "--mpi=pmix", "--export=A", "--exclusive"}}, r,
			`--kill-on-bad-exit=1 sh -c `},
		{MPI{Kind: MPICH}, Ranks{Hosts: []string{"localhost", "localhost"}}, "-n 2 mula train"},
		{MPI{Kind: PALS}, r, "-n 4 --ppn 2 --hosts n1,n2 mula train"},
		{MPI{Kind: PALS}, Ranks{Hosts: []string{"n1", "n1", "n2"}}, "-n 3 --ppn 2 --hosts n1,n2 mula train"},
		{MPI{Kind: PALS}, Ranks{Hosts: []string{"n1", "n2", "n2"}}, "host n2 would have 2, and host n1 has 1"},
		{MPI{Kind: PALS}, Ranks{Hosts: []string{"n1", "n1", "n2", "n3"}}, "host n2 would have 1, and host n1 has 2"},
		{MPI{Kind: OpenMPI, AllLocal: true}, r,
			"-n 2 -x A -x B env MULA_HOST=n1 mula train : -n 2 -x A -x B env MULA_HOST=n2 mula train"},
	} {
		test.m.Command = []string{"mula", "train"}
		arguments, err := test.m.arguments(test.r)
		got := strings.Join(arguments, " ")
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, test.want) {
			t.Errorf("%s on %v: %q, want %q", test.m.Kind, test.r.Hosts, got, test.want)
		}
	}
}

func TestSlurmSays(t *testing.T) {
	hosts := []string{"nid001", "nid001", "nid002", "nid002"}
	for _, test := range []struct {
		said string
		code int
		want string
	}{
		{"srun: error: nid002: task 3: Killed\nsrun: error: nid001: task 0: Exited with exit code 1\n", 137,
			"rank 3 on nid002 was killed by signal 9 (killed)"},
		{"srun: error: nid001: task 0: Exited with exit code 1\nsrun: error: nid002: task 3: Killed\nsrun: error: " +
			"nid002: task 2: Terminated\n", 1, "rank 3 on nid002 was killed by signal 9 (killed)"},
		{"srun: error: nid001: tasks 1,0: Exited with exit code 2\n", 2, "rank 1 on nid001 exited with code 2"},
		{"srun: error: nid002: task 2: Segmentation fault (core dumped)\n", 139,
			"rank 2 on nid002 was killed by signal 11 (segmentation fault)"},
		{"srun: error: nid002: task 2: Out Of Memory\n", 137,
			"rank 2 on nid002 was killed by signal 9 (killed): out of memory, according to Slurm"},
		{"slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been " +
			"killed by the cgroup out-of-memory handler.\n" +
			"srun: error: nid002: task 2: Killed\n", 137,
			"rank 2 on nid002 was killed by signal 9 (killed): out of memory, according to Slurm"},
		{"slurmstepd-nid001: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM " +
			"Killed.\n", 137,
			"a rank was killed by signal 9 (killed): out of memory, according to Slurm"},
		{"slurmstepd: error: Exceeded step memory limit at some point.\n", 1,
			"a rank exited with code 1: out of memory, according to Slurm"},
		{"slurmstepd: error: StepId=7.0 exceeded memory limit (9000 > 8000), being killed\n", 137,
			"a rank was killed by signal 9 (killed): out of memory, according to Slurm"},
		// the node of ranks 2 and 3 is lost: before Slurm knows it, and after
		{"srun: error: Task launch for StepId=12.2 failed on node nid002: Communication connection failure\n" +
			"srun: error: Application launch failed: Communication connection failure\nsrun: Job step aborted\n", 233,
			"host nid002 cannot be reached: Task launch for StepId=12.2 failed on node nid002: Communication " +
				"connection failure"},
		{"srun: error: nid001: tasks 0-1: Exited with exit code 1\nsrun: error: Node failure on nid[002-003]\n", 1,
			"host nid002 cannot be reached: Node failure on nid[002-003]"},
		{"srun: error: Task launch for StepId=12.2 failed on node nid002: Job credential expired\n", 1,
			"a rank exited with code 1"},
		{"mula: the device is out of memory\nsrun: error: nid002: task 2: Exited with exit code 1\n", 1,
			"rank 2 on nid002 exited with code 1"},
		{"", 137, "a rank was killed by signal 9 (killed)"},
		{"", 1, "a rank exited with code 1"},
	} {
		e := Exit{Rank: -1, Code: test.code}
		(&MPI{Kind: Slurm}).cause(&e, test.said, hosts)
		if e.String() != test.want {
			t.Errorf("%q: %q, want %q", test.said, e, test.want)
		}
	}
}

// srun waits for a node that does not answer. Its messages about the other nodes name it.
func TestSlurmStuck(t *testing.T) {
	hosts := []string{"nid001", "nid001", "nid002", "nid003", "nid003"}
	const lost = "srun: error: Task launch for StepId=1.1 failed on node nid002: Communication connection failure\n"
	for _, test := range []struct{ said, want string }{
		{"", ""},
		{"mula: a message of a rank\n", ""},
		{"srun: error: nid001: tasks 0-1: Exited with exit code 1\n", ""},
		{"srun: error: nid001: tasks 0-1: Exited with exit code 1\nsrun: error: nid003: task 3: Killed\n",
			"host nid002 does not report the end of its ranks, after the failure: rank 3 on nid003 was killed by " +
				"signal 9 (killed)"},
		{"srun: error: nid[001,003]: tasks 0-1,3-4: Exited with exit code 1\n", "host nid002 does not report the end " +
			"of its ranks, after the failure: rank 0 on nid[001,003] exited with code 1"},
		{"srun: error: nid[001-003]: tasks 0-4: Exited with exit code 1\n", ""},
		{"srun: error: nid[001-002]: tasks 0-2: Exited with exit code 3\n", ""}, // stopped after a checkpoint
		{lost, "host nid002 cannot be reached: Task launch for StepId=1.1 failed on node nid002: Communication " +
			"connection failure"},
	} {
		got := ""
		if e := stuck(test.said, hosts); e != nil {
			got = e.String()
		}
		if got != test.want {
			t.Errorf("%q: %q, want %q", test.said, got, test.want)
		}
	}
}

// A node dies, and srun does not end. The next attempt uses a spare.
func TestSlurmStuckAttempt(t *testing.T) {
	once := filepath.Join(t.TempDir(), "once")
	srun := filepath.Join(t.TempDir(), "srun")
	if err := os.WriteFile(srun, []byte("#!/bin/sh\n[ ! -e "+once+" ] || exit 0\n: >"+once+"\n"+
		"echo 'srun: error: a: tasks 0-1: Exited with exit code 1' >&2\nexec sleep 3600\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	p := newPlay(t, "", func(command []string, out Output) Starter {
		return &MPI{Kind: Slurm, Program: []string{srun}, Command: command, Output: out,
			patience: 100 * time.Millisecond}
	})
	result := p.run(t)
	if a := result.Attempts[0]; result.Code != ExitDone || a.Outcome != HostLost || a.Blamed != "b" ||
		len(result.Excluded) > 0 || strings.Join(result.Attempts[1].Hosts, "") != "aac" {
		t.Errorf("%+v", result)
	}
}

// What cannot be started is an error at once, and no attempt.
func TestNothingToStart(t *testing.T) {
	for _, s := range []Starter{
		&Processes{Command: []string{"/nowhere/mula"}, AllLocal: true, Output: Output{&sharedBuffer{},
			&sharedBuffer{}}},
		&MPI{Kind: OpenMPI, Program: []string{"/nowhere/mpiexec"}, Command: []string{"mula"},
			Output: Output{&sharedBuffer{}, &sharedBuffer{}}},
	} {
		_, err := Run(context.Background(), Options{Output: t.TempDir(), Ranks: 2, Start: s, Limits: DefaultLimits()})
		if err == nil || !strings.Contains(err.Error(), "/nowhere/") {
			t.Errorf("%s: %v", s.Name(), err)
		}
	}
	if _, err := DetectMPI(t.Context(), []string{"true"}); err == nil ||
		!strings.Contains(err.Error(), "is not from Open MPI") || !strings.Contains(err.Error(), "--with tcp --hosts") {
		t.Errorf("%v", err)
	}
}
