package cli

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"mula/xpu/tcp"
)

// ranksTime is what a run of several processes may take before it counts as one that hangs.
const ranksTime = 3 * time.Minute

// A rankStarter starts the ranks of `mula ARGS` in a folder, as one command or as several.
type rankStarter struct {
	name  string
	start func(ctx context.Context, dir string, ranks int, args ...string) []*exec.Cmd
}

// rankStarters are the ways to have ranks that this machine has.
func rankStarters(t *testing.T) []rankStarter {
	all := []rankStarter{
		{"local", func(ctx context.Context, dir string, _ int, args ...string) []*exec.Cmd {
			c := exec.CommandContext(ctx, "mula", args...)
			c.Dir = dir
			return []*exec.Cmd{c}
		}},
		{"tcp", func(ctx context.Context, dir string, ranks int, args ...string) []*exec.Cmd {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			address := l.Addr().String()
			l.Close()
			var commands []*exec.Cmd
			for rank := range ranks {
				c := exec.CommandContext(ctx, "mula", args...)
				c.Dir = dir
				c.Env = append(os.Environ(), tcp.RankVariable+fmt.Sprint("=", rank), tcp.SizeVariable+fmt.Sprint("=", ranks), tcp.AddressVariable+"="+address, tcp.SecretVariable+"=between us")
				commands = append(commands, c)
			}
			return commands
		}},
	}
	for _, m := range []struct {
		command string
		args    []string
	}{{"mpiexec.openmpi", []string{"--allow-run-as-root", "--oversubscribe"}}, {"mpiexec.mpich", nil}} {
		if _, err := exec.LookPath(m.command); err != nil {
			t.Logf("no %s on this machine: ranks are not tried under it (apt-get install mpich openmpi-bin)", m.command)
			continue
		}
		all = append(all, rankStarter{m.command, func(ctx context.Context, dir string, ranks int, args ...string) []*exec.Cmd {
			c := exec.CommandContext(ctx, m.command, append(append(append([]string{}, m.args...), "-n", fmt.Sprint(ranks), "mula"), args...)...)
			c.Dir = dir
			return []*exec.Cmd{c}
		}})
	}
	return all
}

// run runs all ranks to their end, and returns what they have printed and the exit codes of the commands.
func (s rankStarter) run(t *testing.T, dir string, ranks int, args ...string) (string, []int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), ranksTime)
	defer cancel()
	commands := s.start(ctx, dir, ranks, args...)
	outputs := make([]bytes.Buffer, len(commands))
	for i, c := range commands {
		c.Stdout, c.Stderr = &outputs[i], &outputs[i]
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
	}
	var text strings.Builder
	var codes []int
	for i, c := range commands {
		c.Wait()
		text.Write(outputs[i].Bytes())
		codes = append(codes, c.ProcessState.ExitCode())
	}
	if ctx.Err() != nil {
		t.Fatalf("%s: ranks hang:\n%s", s.name, text.String())
	}
	return text.String(), codes
}

// Ranks of one process, processes over TCP, and both MPIs leave the same files, byte for byte, and only the first rank speaks.
func TestTrainLinks(t *testing.T) {
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	for _, test := range []struct {
		ranks  int
		layout string
		once   string
	}{
		{2, "{dp: 1, ep: 2}", "layout     2 ranks"},
		{4, "{dp: 2, ep: 2, optimizer: so}", "layout     4 ranks"},
		{2, "{dp: 1, pp: 2}", "pipeline   2 stages, micro-batches a step: 1; stages wait 50 % of the time: there are fewer"},
		{4, "{dp: 2, pp: 2}\nattention: documents", "attention  stays within documents"},
	} {
		ranks, layout := test.ranks, test.layout
		config := fmt.Sprintf("output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 20\ncheckpoint: {every: 0}\nevaluate: {every: 10, samples: 3}\nthreads: 1\nlayout: %s\n", layout)
		if err := os.WriteFile(filepath.Join(dir, "train.yaml"), []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
		var want map[string]string
		for _, s := range rankStarters(t) {
			if err := os.RemoveAll(filepath.Join(dir, "run")); err != nil {
				t.Fatal(err)
			}
			out, codes := s.run(t, dir, ranks, "train")
			for _, code := range codes {
				if code != 0 {
					t.Fatalf("%d ranks, %s: exit codes %v\n%s", ranks, s.name, codes, out)
				}
			}
			for _, once := range []string{"memory     ", test.once, "finished: 20 steps", "weights    sha256"} {
				if strings.Count(out, once) != 1 {
					t.Errorf("%d ranks, %s: %q is not there once:\n%s", ranks, s.name, once, out)
				}
			}
			got := contents(t, filepath.Join(dir, "run", "checkpoints", "step-00000020"))
			got[fingerprints] = contents(t, filepath.Join(dir, "run"))[fingerprints]
			if want == nil {
				want = got
				continue
			}
			if len(got) != len(want) {
				t.Errorf("%d ranks, %s: %d files, and %d of local ranks", ranks, s.name, len(got), len(want))
			}
			for name, content := range want {
				if got[name] != content {
					t.Errorf("%d ranks, %s: %s differs from that of local ranks", ranks, s.name, name)
				}
			}
		}
	}
}

const fingerprints = "fingerprints.jsonl"

// What is wrong with a run is said once, with exit code 1 of all ranks, or 2 where the configuration is wrong.
func TestTrainLinksErrors(t *testing.T) {
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	for _, test := range []struct {
		config, want string
		code         int
	}{
		{"layout: {dp: 4}\n", "layout is dp · ep = 4 · 1 = 4 ranks, but 2 were started; possible: {dp: 2, ep: 1}, {dp: 1, ep: 2}", 2},
		{"layout: {dp: 2}\nsteps: 1000000\n", "train.yaml: steps is 1000000, but the plan has", 2},
		{"layout: {dp: 2}\ninitialize_from: shards\n", "initialize_from: ", 1},
	} {
		config := "output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\n" + test.config
		if err := os.WriteFile(filepath.Join(dir, "train.yaml"), []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, s := range rankStarters(t)[1:] {
			out, codes := s.run(t, dir, 2, "train")
			for _, code := range codes {
				if code != test.code {
					t.Errorf("%s, %q: exit codes %v, want %d\n%s", s.name, test.config, codes, test.code, out)
				}
			}
			if strings.Count(out, test.want) != 1 {
				t.Errorf("%s, %q: %q is not there once:\n%s", s.name, test.config, test.want, out)
			}
		}
	}
}

// A signal to one of the ranks stops all of them after the step, with a checkpoint, and the run goes on to the weights of one that was not stopped.
// SIGKILL of one ends the others.
func TestTrainRankSignals(t *testing.T) {
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	config := "output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 200\ncheckpoint: {every: 0}\nevaluate: {every: 0}\nlayout: {dp: 2, ep: 2}\nthreads: 1\n"
	if err := os.WriteFile(filepath.Join(dir, "train.yaml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	mustRun(t, dir, "train")
	whole := contents(t, filepath.Join(dir, "run"))
	if err := os.RemoveAll(filepath.Join(dir, "run")); err != nil {
		t.Fatal(err)
	}
	processes := rankStarters(t)[1]
	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		ctx, cancel := context.WithTimeout(context.Background(), ranksTime)
		defer cancel()
		commands := processes.start(ctx, dir, 4, "train")
		outputs := make([]bytes.Buffer, len(commands))
		for i, c := range commands {
			c.Stdout, c.Stderr = &outputs[i], &outputs[i]
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
		}
		steps := func() int {
			data, _ := os.ReadFile(filepath.Join(dir, "run/metrics.jsonl"))
			return bytes.Count(data, []byte(`"learning_rate"`))
		}
		for before := steps(); steps() < before+3 && ctx.Err() == nil; {
			time.Sleep(time.Millisecond)
		}
		if err := commands[2].Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		for i, c := range commands {
			c.Wait()
			text, code := outputs[i].String(), c.ProcessState.ExitCode()
			switch {
			case ctx.Err() != nil:
				t.Fatalf("%v: rank %d hangs:\n%s", sig, i, text)
			case sig == syscall.SIGTERM && (code != 0 || strings.Contains(text, "stopped; the same command goes on from here") != (i == 0)):
				t.Errorf("%v: rank %d has exit code %d:\n%s", sig, i, code, text)
			case sig == syscall.SIGKILL && i != 2 && (code != 1 || !strings.Contains(text, fmt.Sprintf("mula: rank %d on ", i))):
				t.Errorf("%v of rank 2: rank %d has exit code %d:\n%s", sig, i, code, text)
			}
		}
		if checkpoints, err := filepath.Glob(filepath.Join(dir, "run/checkpoints/step-*")); err != nil || len(checkpoints) != 1 {
			t.Fatalf("%v: checkpoints %v, %v", sig, checkpoints, err)
		}
	}
	mustRun(t, dir, "train")
	got := contents(t, filepath.Join(dir, "run"))
	for name, content := range whole {
		if strings.HasPrefix(name, "checkpoints/") || name == fingerprints {
			if got[name] != content {
				t.Errorf("%s differs after a stop and a kill", name)
			}
		}
	}
}
