//go:build unix

package launch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// playPALS plays the mpiexec of PALS on this machine: options, signals, messages and exit codes, as
// HPE's published client has them (cray/pals.py of craycli).
func playPALS(arguments []string) {
	n, each, hosts := 0, 0, []string(nil)
	for len(arguments) > 1 && strings.HasPrefix(arguments[0], "-") {
		switch value := arguments[1]; arguments[0] {
		case "-n":
			n, _ = strconv.Atoi(value)
		case "--ppn":
			each, _ = strconv.Atoi(value)
		case "--hosts":
			hosts = strings.Split(value, ",")
		default:
			fmt.Fprintf(os.Stderr, "mpiexec: unrecognized option '%s'\n", arguments[0])
			os.Exit(1)
		}
		arguments = arguments[2:]
	}
	if slices.Contains(hosts, "dead") {
		fmt.Fprintln(os.Stderr, "mpiexec: host dead: connection refused")
		os.Exit(1)
	}
	if len(hosts)*each < n {
		fmt.Fprintln(os.Stderr, "mpiexec: not enough hosts")
		os.Exit(1)
	}
	ranks := make([]*exec.Cmd, n)
	all := func(s syscall.Signal) {
		for _, r := range ranks {
			r.Process.Signal(s)
		}
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1,
		syscall.SIGUSR2)
	for i := range ranks {
		r := exec.Command(arguments[0], arguments[1:]...)
		r.Env = append(os.Environ(), fmt.Sprintf("PALS_RANKID=%d", i), fmt.Sprintf("PMI_RANK=%d", i),
			fmt.Sprintf("PMI_SIZE=%d", n), hostVariable+"="+hosts[i/each])
		r.Stdout, r.Stderr = os.Stdout, os.Stderr
		if err := r.Start(); err != nil {
			fmt.Fprintln(os.Stderr, "mpiexec:", err)
			os.Exit(1)
		}
		ranks[i] = r
	}
	go func() {
		for s := range signals {
			all(s.(syscall.Signal))
		}
	}()
	var mu sync.Mutex
	var done sync.WaitGroup
	code := 0
	for i, r := range ranks {
		done.Go(func() {
			err := r.Wait()
			mu.Lock()
			defer mu.Unlock()
			var exit *exec.ExitError
			if !errors.As(err, &exit) {
				return
			}
			what, this := fmt.Sprintf("exited with code %d", exit.ExitCode()), exit.ExitCode()
			if status := exit.Sys().(syscall.WaitStatus); status.Signaled() {
				what, this = fmt.Sprintf("died from signal %d", status.Signal()), 128+int(status.Signal())
			}
			fmt.Fprintf(os.Stderr, "%s: rank %d %s\n", hosts[i/each], i, what)
			if code == 0 {
				code = this
				if os.Getenv("PALS_ABORT_ON_FAILURE") == "1" {
					all(syscall.SIGTERM)
				}
			}
		})
	}
	done.Wait()
	os.Exit(code)
}

// pals starts ranks with the played PALS.
func pals(command []string, out Output) Starter {
	return &MPI{Kind: PALS, Program: []string{command[2], "pals"}, Command: command, Output: out}
}

// A rank that is killed under PALS is named, and its host is replaced.
func TestPALSKilled(t *testing.T) {
	dir := t.TempDir()
	first := func(rank, does string) string {
		return "on " + rank + " once " + dir + "/" + rank + " meet " + dir + " 3 " + does
	}
	p := newPlay(t, "on 0 beat step 1 "+first("0", "sleep ")+first("1", "sleep ")+first("2", "kill ")+
		"on 0 environment exit 0", pals)
	result := p.run(t)
	a := result.Attempts[0]
	if result.Code != ExitDone || len(result.Attempts) != 2 || a.Outcome != HostLost ||
		a.Blamed != "b" || *a.Rank != 2 || a.Reason != "rank 2 on b was killed by signal 9 (killed)" ||
		strings.Join(result.Attempts[1].Hosts, "") != "aac" {
		t.Errorf("%+v\n%s", result, p.stderr.String())
	}
	if !strings.Contains(p.stdout.String(), "host a ") {
		t.Errorf("standard output %q", p.stdout.String())
	}
}

// mpiexec does not say which host is dead. The launcher finds it.
func TestPALSDeadHost(t *testing.T) {
	p := newPlay(t, "exit 0", pals)
	p.Hosts, p.ProbeLimit = []Host{{"b", 1}, {"dead", 1}, {"c", 1}, {"d", 1}}, time.Minute
	result := p.run(t)
	if result.Code != ExitDone || len(result.Attempts) != 2 || result.Attempts[0].Blamed != "dead" ||
		!strings.Contains(result.Attempts[0].Reason, "host dead starts no process: ") ||
		!strings.Contains(result.Attempts[0].Reason, "connection refused") ||
		strings.Join(result.Attempts[1].Hosts, "") != "bcd" {
		t.Errorf("%+v\n%s", result, p.stderr.String())
	}
}

// A wrong configuration ends the run, and a stop reaches the ranks.
func TestPALSEnds(t *testing.T) {
	p := newPlay(t, "on 1 exit 2 on 0 sleep on 2 sleep", pals)
	if result := p.run(t); result.Outcome != Configuration || len(result.Attempts) != 1 {
		t.Errorf("%+v\n%s", result, p.stderr.String())
	}
	t.Run("stopped", func(t *testing.T) {
		p := newPlay(t, "wait", pals)
		signals := make(chan os.Signal, 1)
		p.Signals = signals
		go func() {
			await(t, "all ranks wait", func() bool { return strings.Count(p.stderr.String(), "waiting\n") == 3 })
			signals <- syscall.SIGTERM
		}()
		if result := p.run(t); result.Outcome != Stopped || result.Code != ExitStopped {
			t.Errorf("%+v\n%s", result, p.stderr.String())
		}
	})
}

// Messages of PALS on Aurora and Polaris, as issues and logs of their users quote them.
func TestPALSSays(t *testing.T) {
	const here, there = "x4213c4s7b0n0.hsn.cm.aurora.alcf.anl.gov", "x4417c3s5b0n0.hsn.cm.aurora.alcf.anl.gov"
	for _, test := range []struct {
		said string
		code int
		want string
	}{
		{there + ": rank 2 died from signal 9\n" + here + ": rank 0 died from signal 15\n", 137,
			"rank 2 on x4417c3s5b0n0 was killed by signal 9 (killed)"},
		{here + ": rank 0 exited with code 1\n" + there + ": rank 3 died from signal 11 and dumped core\n", 1,
			"rank 3 on x4417c3s5b0n0 was killed by signal 11 (segmentation fault)"},
		{here + ": rank 0 exited with code 134\n" + here + ": rank 1 died from signal 15\n", 134,
			"rank 0 on x4213c4s7b0n0 was killed by signal 6 (aborted)"},
		{here + ": rank 1 exited with code 2\n", 2, "rank 1 on x4213c4s7b0n0 exited with code 2"},
		{here + ": rank 1 died from signal 11\n" + there + ": shepherd died from signal 9\n", 139,
			"host x4417c3s5b0n0 cannot be reached: its shepherd was killed, according to PALS"},
		{there + ": rank 2 died from signal 9\n" + here + ": shepherd died from signal 15\n", 137,
			"rank 2 on x4417c3s5b0n0 was killed by signal 9 (killed)"},
		{"loss: rank 1 died from signal 9 (the output of a rank)\n" + here + ": rank 1 exited with code 2\n", 2,
			"rank 1 on x4213c4s7b0n0 exited with code 2"},
		{"", 143, "a rank was killed by signal 15 (terminated)"},
	} {
		e := Exit{Rank: -1, Code: test.code}
		(&MPI{Kind: PALS}).cause(&e, test.said,
			[]string{"x4213c4s7b0n0", "x4213c4s7b0n0", "x4417c3s5b0n0", "x4417c3s5b0n0"})
		if e.String() != test.want {
			t.Errorf("%q: %q, want %q", test.said, e, test.want)
		}
	}
}

func TestDetectPALS(t *testing.T) {
	program(t, "mpiexec", `[ "$*" = --version ] && echo "mpiexec version 1.8.0 revision 0123abc"`)
	if kind, err := DetectMPI(t.Context(), []string{"mpiexec", "--cpu-bind", "depth"}); err != nil || kind != PALS {
		t.Errorf("%q, %v", kind, err)
	}
}
