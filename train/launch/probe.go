package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sync/errgroup"
)

// A prober is a [Starter] that can find out which hosts do not start processes.
type prober interface {
	// probe starts a short process on each of the hosts. It returns the hosts on which that fails
	// or takes longer than limit, and why.
	probe(ctx context.Context, hosts []string, limit time.Duration) map[string]error
}

// probe looks for hosts that do not start processes. It does so after an attempt that ended before
// its first step, or for which no rank is known to be the cause, if no host is blamed or the
// attempt hung. If only some hosts fail, it takes them out of use and blames the first. If all
// fail, the cause is not a host.
func (s *supervisor) probe(ctx context.Context, a *Attempt) {
	p, ok := s.Start.(prober)
	if !ok || s.ProbeLimit <= 0 || s.stopping || a.Outcome != Failed && a.Outcome != Hang ||
		a.Steps > 0 && a.Rank != nil && *a.Rank >= 0 || a.Outcome == Failed && a.Blamed != "" || a.genuine != "" {
		return
	}
	hosts := slices.Compact(slices.Clone(a.Hosts))
	if len(hosts) < 2 {
		return // the program may be the cause as well
	}
	s.Notice(fmt.Sprintf("attempt %d: %s; starting a process on each host to find unfit hosts", a.Number, a.Reason))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := make(chan map[string]error, 1)
	go func() { answer <- p.probe(ctx, hosts, s.ProbeLimit) }()
	var found map[string]error
	select {
	case found = <-answer:
	case signal := <-s.Signals:
		s.signalled(nil, signal)
		cancel()
		<-answer
	}
	if ctx.Err() != nil || len(found) == 0 || len(found) == len(hosts) {
		return
	}
	for _, host := range hosts {
		if why := found[host]; why != nil {
			s.hosts.lose(host, "it starts no process: "+why.Error())
			s.Notice(fmt.Sprintf("host %s starts no process: %v", host, why))
			if a.Outcome != HostLost {
				a.Outcome, a.Blamed, a.unreachable = HostLost, host, true
				a.Reason += fmt.Sprintf("; host %s starts no process: %v", host, why)
			}
		}
	}
}

// probe starts the agent on the remote hosts.
func (p *Processes) probe(ctx context.Context, hosts []string, limit time.Duration) map[string]error {
	dir, err := os.Getwd()
	if err != nil {
		return nil
	}
	order, err := json.Marshal(agentOrder{Dir: dir, Command: []string{p.Command[0], "--version"}})
	if err != nil {
		return nil
	}
	remote := slices.DeleteFunc(slices.Clone(hosts), func(h string) bool { return p.AllLocal || isLocal(h) })
	return tryEach(ctx, remote, 64, func(host string) error {
		words := append(slices.Clone(p.RemoteShell), host, shellLine(p.Agent))
		_, err := answer(ctx, limit, string(order)+"\n", words)
		return err
	})
}

// probe starts the program of the ranks on all hosts, and if that fails, on each host alone. MPICH
// 4.0's mpiexec may be killed by SIGPIPE if a process ends at once, so it takes a second.
func (m *MPI) probe(ctx context.Context, hosts []string, limit time.Duration) map[string]error {
	on := func(hosts ...string) error {
		probe := *m
		probe.Command = []string{"sh", "-c", `"$0" --version && sleep 1`, m.Command[0]}
		arguments, err := probe.arguments(Ranks{Hosts: hosts})
		if err != nil {
			return err
		}
		_, err = answer(ctx, limit, "", append(slices.Clone(m.Program), arguments...))
		return err
	}
	if on(hosts...) == nil {
		return nil
	}
	return tryEach(ctx, hosts, 16, func(host string) error { return on(host) })
}

// tryEach calls try for each host, some at a time. It calls it again after an error, except
// [errNoAnswer]. It returns the errors.
func tryEach(ctx context.Context, hosts []string, atATime int, try func(host string) error) map[string]error {
	failed := map[string]error{}
	var mu sync.Mutex
	var tries errgroup.Group
	tries.SetLimit(atATime)
	for _, host := range hosts {
		tries.Go(func() error {
			err := try(host)
			if err != nil && ctx.Err() == nil && !errors.Is(err, errNoAnswer) {
				err = try(host)
			}
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed[host] = err
			}
			return nil
		})
	}
	_ = tries.Wait() // no try returns an error
	return failed
}

var errNoAnswer = errors.New("no answer")

// answer returns the standard output of a program, without white space around it. The program has
// limited time. Its standard input is line, and stays open. An error has the last line of its
// standard error that has a letter.
func answer(ctx context.Context, limit time.Duration, line string, words []string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%w within %s", errNoAnswer, limit))
	defer cancel()
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	cmd.WaitDelay = time.Second
	leadGroup(cmd)
	cmd.Cancel = func() error {
		signalGroup(cmd.Process.Pid, syscall.SIGKILL)
		return nil
	}
	var out, said tail
	cmd.Stdout, cmd.Stderr = &out, &said
	in, err := cmd.StdinPipe() // which Wait closes
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	go func() { _, _ = in.Write([]byte(line)) }() // if the program has ended, Wait reports it
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		lines := strings.Split(said.String(), "\n")
		for _, line := range slices.Backward(lines) {
			if strings.ContainsFunc(line, unicode.IsLetter) {
				return "", fmt.Errorf("%s: %w: %s", words[0], err, strings.TrimSpace(line))
			}
		}
		return "", fmt.Errorf("%s: %w", words[0], err)
	}
	return strings.TrimSpace(out.String()), nil
}
