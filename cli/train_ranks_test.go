package cli

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"mula/internal/longtest"
	"mula/internal/testwait"
	"mula/xpu/comm/tcp"
)

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
			return tcpRanks(t, ctx, dir, ranks, args...)
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
		all = append(all, rankStarter{m.command, func(ctx context.Context, dir string, ranks int,
			args ...string) []*exec.Cmd {
			c := exec.CommandContext(ctx, m.command,
				append(append(append([]string{}, m.args...), "-n", fmt.Sprint(ranks), "mula"), args...)...)
			c.Dir = dir
			return []*exec.Cmd{c}
		}})
	}
	return all
}

// tcpRanks are the commands of ranks that speak TCP.
func tcpRanks(t *testing.T, ctx context.Context, dir string, ranks int, args ...string) []*exec.Cmd {
	t.Helper()
	host := "127.0.0.1"
	if runtime.GOOS == "linux" {
		// An address of this machine that no other process uses, so that the port is still free
		// when rank 0 starts.
		host = fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	var commands []*exec.Cmd
	for rank := range ranks {
		c := exec.CommandContext(ctx, "mula", args...)
		c.Dir = dir
		c.Env = append(os.Environ(), tcp.RankVariable+fmt.Sprint("=", rank), tcp.SizeVariable+fmt.Sprint("=", ranks),
			tcp.AddressVariable+"="+address, tcp.SecretVariable+"=between us")
		commands = append(commands, c)
	}
	return commands
}

// run runs all ranks to their end, and returns what they have printed and the exit codes of the
// commands.
func (s rankStarter) run(t *testing.T, dir string, ranks int, args ...string) (string, []int) {
	t.Helper()
	ctx := testwait.Context(t)
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

// A rank that waits for others that do not come says for which, when its time is over and when it
// is stopped.
func TestTrainMissingRank(t *testing.T) {
	t.Parallel()
	dir := t.TempDir() // ranks meet before they open the plan
	config := "output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 20\nlayout: {expert_dp: 2, ep: 1}\n"
	if err := os.WriteFile(filepath.Join(dir, "train.yaml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	start := func(t *testing.T, rank int, environment ...string) (*exec.Cmd, *bytes.Buffer, string) {
		c := tcpRanks(t, t.Context(), dir, 2, "train")[rank]
		c.Env = append(c.Env, environment...)
		out := new(bytes.Buffer)
		c.Stdout, c.Stderr = out, out
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		for _, v := range c.Env {
			if address, ok := strings.CutPrefix(v, tcp.AddressVariable+"="); ok {
				return c, out, address
			}
		}
		t.Fatal("no address")
		return nil, nil, ""
	}
	check := func(t *testing.T, c *exec.Cmd, out *bytes.Buffer, parts ...string) {
		t.Helper()
		c.Wait()
		if code := c.ProcessState.ExitCode(); code != exitFailed {
			t.Errorf("exit code %d:\n%s", code, out)
		}
		for _, part := range parts {
			if !strings.Contains(out.String(), part) {
				t.Errorf("%q is missing in %s", part, out)
			}
		}
	}
	t.Run("stopped", func(t *testing.T) {
		c, out, address := start(t, 0)
		testwait.Until(t, "rank 0 listens", func() bool {
			conn, err := net.Dial("tcp", address)
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		check(t, c, out, "stopped before", "rank 0 of 2", "waits for rank 1")
	})
	t.Run("time over", func(t *testing.T) {
		c, out, address := start(t, 1, tcp.JoinTimeoutVariable+"=100ms")
		check(t, c, out, "rank 1 of 2", "rank 0 at "+address, "within 100ms", tcp.JoinTimeoutVariable)
	})
	t.Run("a wrong limit", func(t *testing.T) {
		c, out, _ := start(t, 1, tcp.JoinTimeoutVariable+"=soon")
		check(t, c, out, tcp.JoinTimeoutVariable, `"soon"`)
	})
}

// Ranks of one process, processes over TCP, and both MPIs leave the same files, byte for byte, and
// only the first rank speaks.
func TestTrainLinks(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	for _, test := range []struct {
		ranks  int
		layout string
		once   string
	}{
		{2, "{expert_dp: 1, ep: 2}", "layout     2 ranks"},
		{4, "{expert_dp: 2, ep: 2, optimizer: so}", "layout     4 ranks"},
		{2, "{expert_dp: 1, pp: 2}",
			"pipeline   2 stages, micro-batches per step: 1; stages are idle 50 % of the time: fewer"},
		{4, "{expert_dp: 2, pp: 2}\nattention: documents", "attention  within documents"},
		{2, "{pp: 2, virtual_stages: 2}\nmicro_batch_size: 1",
			"pipeline   2 stages of 2 groups of layers, micro-batches per step: 4; stages are idle 11 % of the time"},
		{4, "{expert_dp: 2, ep: 2, cp: 2}", "2 ranks a sequence"},
	} {
		ranks, layout := test.ranks, test.layout
		config := fmt.Sprintf("output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 8\ncheckpoint: "+
			"{every: 0}\nevaluate: {every: 4, samples: 3}\nthreads: 1\nlayout: %s\n", layout)
		if strings.Contains(layout, "virtual_stages") { // each group needs a layer
			config = strings.Replace(config, "mula-nano", "mula-nano, num_hidden_layers: 4", 1)
		}
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
			for _, once := range []string{"memory     ", test.once, "finished: 8 steps", "weights    sha256"} {
				if strings.Count(out, once) != 1 {
					t.Errorf("%d ranks, %s: %q is not there once:\n%s", ranks, s.name, once, out)
				}
			}
			got := contents(t, filepath.Join(dir, "run", "checkpoints", "step-00000008"))
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

// What is wrong with a run is said once, with exit code 1 of all ranks, or 2 where the
// configuration is wrong.
func TestTrainLinksErrors(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	for _, test := range []struct {
		config, want string
		code         int
	}{
		{"layout: {expert_dp: 4}\n",
			"layout is expert_dp · ep = 4 · 1 = 4 ranks, but 2 were started; possible: {expert_dp: 2, ep: 1}, " +
				"{expert_dp: 1, ep: 2}", 2},
		{"layout: {expert_dp: 2}\nsteps: 1000000\n", "train.yaml:5: steps is 1000000, but the plan has", 2},
		{"layout: {expert_dp: 2}\ninitialize_from: shards\n", "initialize_from: ", 1},
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

// A signal to one of the ranks stops all of them after the step, with a checkpoint, and the run
// resumes to the weights of an unbroken run. SIGKILL of one rank ends the others.
func TestTrainRankSignals(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	config := "output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 200\ncheckpoint: {every: " +
		"0}\nevaluate: {every: 0}\nlayout: {expert_dp: 2, ep: 2}\nthreads: 1\n"
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
		ctx := testwait.Context(t)
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
		before := steps()
		testwait.Until(t, "three more steps are done", func() bool { return steps() >= before+3 })
		if err := commands[2].Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		for i, c := range commands {
			c.Wait()
			text, code := outputs[i].String(), c.ProcessState.ExitCode()
			switch {
			case ctx.Err() != nil:
				t.Fatalf("%v: rank %d hangs:\n%s", sig, i, text)
			case sig == syscall.SIGTERM && (code != exitStopped ||
				strings.Contains(text, "stopped; run the same command to resume") != (i == 0)):
				t.Errorf("%v: rank %d has exit code %d:\n%s", sig, i, code, text)
			case sig == syscall.SIGKILL && i != 2 &&
				(code != 1 || !strings.Contains(text, fmt.Sprintf("mula: rank %d on ", i))):
				t.Errorf("%v of rank 2: rank %d has exit code %d:\n%s", sig, i, code, text)
			}
		}
		if checkpoints, err := filepath.Glob(filepath.Join(dir, "run/checkpoints/step-*")); err != nil ||
			len(checkpoints) != 1 {
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

// A process that a launcher started as one of several, without a way to find the others, is
// refused. It would train the whole run alone.
func TestTrainStartedApart(t *testing.T) {
	t.Parallel()
	dir := prepared(t)
	for _, test := range []struct {
		name, config, environment, want string
	}{
		{"srun without PMI", "layout: {expert_dp: 2}\n", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2",
			"srun has started 2 processes (SLURM_STEP_NUM_TASKS), but without PMI for MPI"},
		{"srun without PMI, the other task", "layout: {expert_dp: 2}\n", "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
			"srun --mpi=pmi2 or --mpi=pmix"},
		{"a run of one rank", "", "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", "set layout.transport to local"},
		{"links mpi", "layout: {expert_dp: 2, transport: mpi}\n", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2",
			"but without PMI for MPI"},
		{"torchrun", "layout: {expert_dp: 2}\n", "TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=2",
			"torchrun has started 2 processes (WORLD_SIZE)"},
		{"another world", "layout: {expert_dp: 2, transport: local}\n", "MULA_WORLD=2",
			"mula launch has started 2 ranks (MULA_WORLD), but this rank is in a world of size 1"},
		// From here on the process may train. It fails because there is no plan.
		{"a run for each task", "layout: {transport: local}\n", "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", "plan.json"},
		{"one task", "layout: {expert_dp: 2}\n", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", "plan.json"},
		{"a batch script", "layout: {expert_dp: 2}\n", "SLURM_PROCID=0 SLURM_NTASKS=8", "plan.json"},
		{"a training cluster that is not torchrun", "layout: {expert_dp: 2}\n", "RANK=1 WORLD_SIZE=2", "plan.json"},
		{"launched as the only process", "layout: {expert_dp: 2}\n", "MULA_WORLD=1 PMI_RANK=0 PMI_SIZE=1", "plan.json"},
	} {
		name := strings.ReplaceAll(test.name, " ", "-") + ".yaml"
		writeFile(t, "output: "+test.name+"\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 2\n"+test.config, dir,
			name)
		c := mula(dir, "train", "--config", name)
		c.Env = append(os.Environ(), strings.Fields(test.environment)...)
		out, err := c.CombinedOutput()
		if err == nil || !strings.Contains(string(out), test.want) {
			t.Errorf("%s: %v\n%s", test.name, err, out)
		}
		if code := c.ProcessState.ExitCode(); test.want != "plan.json" && code != exitUsage {
			t.Errorf("%s: exit code %d", test.name, code)
		}
	}
}

// Where the MPI library does not know the launcher, the error names the launcher and the library.
// It does not propose another layout.
func TestTrainForeignLauncher(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("mpiexec.mpich"); err != nil {
		t.Skip("no mpiexec.mpich on this machine (apt-get install mpich)")
	}
	dir := prepared(t)
	writeFile(t, "output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 2\nlayout: {expert_dp: 2}\n", dir,
		"train.yaml")
	for _, test := range []struct {
		environment, want string
	}{
		{"PALS_RANKID=0", "PALS has started this process (PALS_RANKID), but mpi, MPICH"},
		{"PALS_RANKID=1", "PALS has started this process as rank 1 (PALS_RANKID), but mpi, MPICH"},
	} {
		c := mula(dir, "train")
		c.Env = append(os.Environ(), "MULA_MPI_LIB=libmpich.so.12", test.environment)
		out, err := c.CombinedOutput()
		if err == nil || !strings.Contains(string(out), test.want) || !strings.Contains(string(out), "MULA_MPI_LIB") ||
			strings.Contains(string(out), "possible") {
			t.Errorf("%s: %v\n%s", test.environment, err, out)
		}
	}
}
