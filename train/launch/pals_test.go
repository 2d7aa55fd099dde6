//go:build unix

package launch

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"mula/train/launch/palstest"
)

// pals starts ranks with the stand-in of PALS, on hosts that are this machine.
func pals(t *testing.T) func(command []string, out Output) Starter {
	shell := filepath.Join(t.TempDir(), "shell")
	if err := os.WriteFile(shell, []byte("#!/bin/sh\nhost=$1\nshift\n[ $host != dead ] || exit 255\n"+
		hostVariable+"=$host exec sh -c \"$*\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return func(command []string, out Output) Starter {
		return &MPI{Kind: PALS, Program: []string{"env", palstest.ShellVariable + "=" + shell, command[2], "pals"},
			Command: command, Output: out}
	}
}

// A rank that is killed under PALS is named, and its host is replaced.
func TestPALSKilled(t *testing.T) {
	dir := t.TempDir()
	first := func(rank, does string) string {
		return "on " + rank + " once " + dir + "/" + rank + " meet " + dir + " 3 " + does
	}
	p := newPlay(t, "on 0 beat step 1 "+first("0", "sleep ")+first("1", "sleep ")+first("2", "kill ")+
		"on 0 environment exit 0", pals(t))
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

// PALS names the host on which it cannot start the ranks.
func TestPALSDeadHost(t *testing.T) {
	p := newPlay(t, "exit 0", pals(t))
	p.Hosts = []Host{{"b", 1}, {"dead", 1}, {"c", 1}, {"d", 1}}
	result := p.run(t)
	if result.Code != ExitDone || len(result.Attempts) != 2 || result.Attempts[0].Blamed != "dead" ||
		!strings.HasPrefix(result.Attempts[0].Reason, "host dead cannot be reached: launch failed on b: ") ||
		strings.Join(result.Attempts[1].Hosts, "") != "bcd" {
		t.Errorf("%+v\n%s", result, p.stderr.String())
	}
}

// PALS does not name the first host. The launcher finds it.
func TestPALSDeadFirstHost(t *testing.T) {
	p := newPlay(t, "exit 0", pals(t))
	p.Hosts, p.ProbeLimit = []Host{{"dead", 1}, {"b", 1}, {"c", 1}, {"d", 1}}, time.Minute
	result := p.run(t)
	if result.Code != ExitDone || len(result.Attempts) != 2 || result.Attempts[0].Blamed != "dead" ||
		!strings.Contains(result.Attempts[0].Reason, "host dead starts no process: ") ||
		strings.Join(result.Attempts[1].Hosts, "") != "bcd" {
		t.Errorf("%+v\n%s", result, p.stderr.String())
	}
}

// A wrong configuration ends the run, and a stop reaches the ranks.
func TestPALSEnds(t *testing.T) {
	p := newPlay(t, "on 1 exit 2 on 0 sleep on 2 sleep", pals(t))
	if result := p.run(t); result.Outcome != Configuration || len(result.Attempts) != 1 {
		t.Errorf("%+v\n%s", result, p.stderr.String())
	}
	t.Run("stopped", func(t *testing.T) {
		p := newPlay(t, "wait", pals(t))
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
		{"launch failed on " + here + ": Couldn't forward RPC launch(ab751d77-e80a-4c54-b1c2-4e881f7e8c90) to " +
			"child " + there + ": Resource temporarily unavailable\n", 127, "host x4417c3s5b0n0 cannot be " +
			"reached: launch failed on " + here + ": Couldn't forward RPC " +
			"launch(ab751d77-e80a-4c54-b1c2-4e881f7e8c90) to child " + there + ": Resource temporarily unavailable"},
		{"ping failed on x4213c4s7b0n0: No reply from x4417c3s5b0n0.hostmgmt2417.cm.aurora.alcf.anl.gov after 87s\n" +
			here + ": rank 0 exited with code 1\n", 1, "host x4417c3s5b0n0 cannot be reached: ping failed on " +
			"x4213c4s7b0n0: No reply from x4417c3s5b0n0.hostmgmt2417.cm.aurora.alcf.anl.gov after 87s"},
		{"ping RPC timeout from x4417c3s5b0n0.hostmgmt2417.cm.aurora.alcf.anl.gov after 120s\n" +
			here + ": rank 0 died from signal 9\n", 137, "host x4417c3s5b0n0 cannot be reached: ping RPC " +
			"timeout from x4417c3s5b0n0.hostmgmt2417.cm.aurora.alcf.anl.gov after 120s"},
		{"launch failed on x4309c4s0b0n0: Requested GPU 0.0 in FLAT mode\n", 1, "a rank exited with code 1"},
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
