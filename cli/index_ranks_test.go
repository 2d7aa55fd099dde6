package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mula/fixtures/vectors"
	"mula/internal/longtest"
	"mula/internal/testwait"
	"mula/internal/version"
)

func TestStanding(t *testing.T) {
	for _, test := range []struct {
		environment string
		want        standing
	}{
		{"", standing{0, 1, 1}},
		{"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=4", standing{3, 8, 4}},
		{"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2", standing{1, 2, 2}},
		{"PMI_RANK=1 PMI_SIZE=2", standing{1, 2, 1}},
		{"SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=11 SLURM_STEP_TASKS_PER_NODE=4(x2),3", standing{5, 11, 4}},
		{"SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_STEP_TASKS_PER_NODE=3,2,1", standing{5, 6, 3}},
		{"SLURM_PROCID=0 SLURM_NTASKS=8", standing{0, 1, 1}}, // a batch script
		{"MULA_RANK=1 MULA_WORLD=2 PMI_RANK=0 PMI_SIZE=1", standing{1, 2, 1}},
		{"PMIX_RANK=5 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_STEP_TASKS_PER_NODE=3(x2)", standing{5, 6, 3}},
		// PMIx of a shell in which srun was called
		{"PMIX_RANK=0 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6", standing{5, 6, 1}},
		{"PALS_RANKID=1", standing{0, 1, 1}},
		{"RANK=1 WORLD_SIZE=2", standing{0, 1, 1}},
		{"TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2", standing{1, 2, 2}},
		{"PMI_RANK=2 PMI_SIZE=2", standing{0, 1, 1}},
		{"PMI_RANK=x PMI_SIZE=2", standing{0, 1, 1}},
	} {
		variables := map[string]string{}
		for _, v := range strings.Fields(test.environment) {
			name, value, _ := strings.Cut(v, "=")
			variables[name] = value
		}
		if got := standingIn(func(name string) string { return variables[name] }); got != test.want {
			t.Errorf("%q: %+v, want %+v", test.environment, got, test.want)
		}
	}
}

// rank starts the command as a rank of a job.
func rank(dir string, rank, world int, args ...string) (*exec.Cmd, *bytes.Buffer) {
	c := mula(dir, args...)
	c.Env = append(os.Environ(), fmt.Sprint("MULA_RANK=", rank), fmt.Sprint("MULA_WORLD=", world))
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	return c, &out
}

// Of the ranks of a job one may be killed at any moment: the others do its work and end well, and
// the first alone speaks.
func TestIndexRanks(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	const world = 3
	dir := t.TempDir()
	words := tokenFiles(t, dir, 12, 6000)
	k := newKiller(6, func() { mustRun(t, dir, indexArguments(words, "whole")...) })
	whole := indexFiles(t, filepath.Join(dir, "whole"))
	for round := range 6 {
		var commands [world]*exec.Cmd
		var outs [world]*bytes.Buffer
		for r := range world {
			commands[r], outs[r] = rank(dir, r, world, indexArguments(words, "shared")...)
			if err := commands[r].Start(); err != nil {
				t.Fatal(err)
			}
		}
		victim := rand.IntN(world+1) - 1 // or none
		if victim >= 0 {
			time.Sleep(time.Duration(k.random.Float64() * float64(k.span)))
			commands[victim].Process.Kill()
		}
		for r, c := range commands {
			err := c.Wait()
			if r == victim {
				continue
			}
			if err != nil {
				t.Errorf("round %d, rank %d, killed was %d: %v\n%s", round, r, victim, err, outs[r])
			}
			if spoke := strings.Contains(outs[r].String(), "The framework finds the files"); spoke != (r == 0) ||
				r > 0 && outs[r].Len() > 0 {
				t.Errorf("round %d: rank %d says %q", round, r, outs[r])
			}
		}
		sameFiles(t, indexFiles(t, filepath.Join(dir, "shared")), whole)
		if t.Failed() {
			t.FailNow()
		}
		if err := os.RemoveAll(filepath.Join(dir, "shared")); err != nil {
			t.Fatal(err)
		}
	}
}

// An error of one rank ends them all with the same status.
func TestIndexRanksFail(t *testing.T) {
	t.Parallel()
	const world = 3
	dir := t.TempDir()
	words := tokenFiles(t, dir, 6, 2000)
	broken := vectors.Index([]int32{5, 6, 7, 8, 9, 10, 11, 12, 13, 14})
	binary.LittleEndian.PutUint32(broken[34+4*4:], 1<<31|5) // the length of sequence 4
	if err := os.WriteFile(filepath.Join(dir, "f3.idx"), broken, 0o644); err != nil {
		t.Fatal(err)
	}
	var commands [world]*exec.Cmd
	var outs [world]*bytes.Buffer
	for r := range world {
		commands[r], outs[r] = rank(dir, r, world, indexArguments(words, "cache")...)
		if err := commands[r].Start(); err != nil {
			t.Fatal(err)
		}
	}
	said := 0
	for r, c := range commands {
		var exit *exec.ExitError
		if err := c.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("rank %d: %v", r, err)
		}
		if strings.Contains(outs[r].String(), "sequence 4 has the length -") {
			said++
		}
	}
	if said == 0 || !strings.Contains(outs[0].String(), "sequence 4") {
		t.Errorf("%d ranks say what is wrong; the first says %q", said, outs[0])
	}
}

// Ranks that mpiexec starts on an empty cache share the work, whichever MPI it is of.
func TestIndexUnderMPI(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	words := tokenFiles(t, dir, 6, 2000)
	mustRun(t, dir, indexArguments(words, "whole")...)
	whole := indexFiles(t, filepath.Join(dir, "whole"))
	for _, launcher := range []string{"mpiexec.openmpi --allow-run-as-root --oversubscribe -n", "mpiexec.mpich -n"} {
		words, ranks := words, strings.Fields(launcher)
		if _, err := exec.LookPath(ranks[0]); err != nil {
			t.Logf("%s is not installed", ranks[0])
			continue
		}
		for _, n := range []string{"2", "4"} {
			c := exec.Command(ranks[0], append(append(ranks[1:len(ranks):len(ranks)], n, "mula"),
				indexArguments(words, "shared")...)...)
			c.Dir = dir
			out, err := c.CombinedOutput()
			if err != nil {
				t.Fatalf("%s %s: %v\n%s", launcher, n, err, out)
			}
			if times := strings.Count(string(out), "The framework finds the files"); times != 1 {
				t.Errorf("%s %s: %d ranks speak: %s", launcher, n, times, out)
			}
			sameFiles(t, indexFiles(t, filepath.Join(dir, "shared")), whole)
			if err := os.RemoveAll(filepath.Join(dir, "shared")); err != nil {
				t.Fatal(err)
			}
		}
	}
}

const testSecret = "a secret of tests"

// startWorker starts a worker, and gives its address and a way to end it.
func startWorker(t *testing.T) (address string, c *exec.Cmd) {
	t.Helper()
	c = mula(t.TempDir(), "index", "serve", "127.0.0.1:0")
	c.Env = append(os.Environ(), secretVariable+"="+testSecret)
	pipe, err := c.StderrPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(pipe)
	if !lines.Scan() {
		t.Fatal("the worker says nothing")
	}
	address = strings.TrimPrefix(lines.Text(), "waiting for builds at ")
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for lines.Scan() {
			t.Logf("worker %s: %s", address, lines.Text())
		}
	}()
	t.Cleanup(func() {
		c.Process.Signal(os.Interrupt)
		<-drained
		if err := c.Wait(); err != nil && c.ProcessState.ExitCode() >= 0 { // unless it was killed
			t.Errorf("the worker ends with %v", err)
		}
	})
	return address, c
}

// Workers share a build with who asks them; one that is killed is no loss.
func TestIndexWorkers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	words := tokenFiles(t, dir, 12, 6000)
	k := newKiller(7, func() { mustRun(t, dir, indexArguments(words, "whole")...) })
	whole := indexFiles(t, filepath.Join(dir, "whole"))
	a, _ := startWorker(t)
	for round, kill := range []bool{false, true} {
		b, second := startWorker(t)
		cache := fmt.Sprint("shared", round)
		c := mula(dir, append(indexArguments(words, cache), "--workers", a+","+b)...)
		c.Env = append(os.Environ(), secretVariable+"="+testSecret)
		var out bytes.Buffer
		c.Stdout, c.Stderr = &out, &out
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		if kill {
			// Not before it has begun, which is to be told from the proof that it has seen.
			testwait.Until(t, "the workers have begun",
				func() bool { return exists(filepath.Join(dir, cache, ".mula")) })
			time.Sleep(time.Duration(k.random.Float64() * float64(k.span)))
			second.Process.Kill()
		}
		if err := c.Wait(); err != nil && !strings.Contains(out.String(), "worker "+b) {
			// it was killed before it had begun
			t.Errorf("round %d: %v\n%s", round, err, out.String())
		} else if err != nil {
			mustRun(t, dir, indexArguments(words, cache)...)
		}
		sameFiles(t, indexFiles(t, filepath.Join(dir, cache)), whole)
	}
}

func TestIndexWorkersRefuse(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	words := tokenFiles(t, dir, 2, 500)
	address, _ := startWorker(t)
	for _, test := range []struct {
		secret, want string
		args         []string
		code         int
	}{
		{"another secret of tests", "check that MULA_SECRET is the same", []string{"--workers", address}, 1},
		{"short", "at least 16 characters", []string{"--workers", address}, 2},
		{testSecret, "worker 127.0.0.1:1", []string{"--workers", "127.0.0.1:1"}, 1},
		{testSecret, "--seq-length", []string{"--workers", address, "--seq-length", "0"}, 2},
	} {
		c := mula(dir, append(indexArguments(words, "cache"), test.args...)...)
		c.Env = append(os.Environ(), secretVariable+"="+test.secret)
		out, err := c.CombinedOutput()
		if code := c.ProcessState.ExitCode(); err == nil || code != test.code ||
			!strings.Contains(string(out), test.want) {
			t.Errorf("%v with %q: exit %d, %s", test.args, test.secret, code, out)
		}
	}
	for _, address := range []string{"127.0.0.1:0", ":0"} {
		c := mula(dir, "index", "serve", address)
		c.Env = append(os.Environ(), secretVariable+"=")
		if out, err := c.CombinedOutput(); err == nil || c.ProcessState.ExitCode() != 2 ||
			!strings.Contains(string(out), secretVariable) {
			t.Errorf("serving at %s without a secret: %v, %s", address, err, out)
		}
	}
}

// talk lets a request meet a worker, with changes to what is sent.
func talk(t *testing.T, secret string, req workerRequest) error {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	s := &workerServer{secret: []byte(testSecret), told: func(string, ...any) {}, places: make(chan struct{}, 1)}
	ended := make(chan error, 1)
	go func() { ended <- s.serve(ctx, l) }()
	conn, _, err := askWorker(t.Context(), l.Addr().String(), []byte(secret), req)
	if err == nil {
		conn.Close()
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	return err
}

// A worker refuses what is not of its version, or about a folder that it does not see as the caller
// does, and says so.
func TestWorkerChecks(t *testing.T) {
	dir := t.TempDir()
	proof := filepath.Join(dir, "cache", ".mula", "proof")
	if err := errors.Join(os.MkdirAll(filepath.Dir(proof), 0o755), os.WriteFile(proof, []byte("text"),
		0o644)); err != nil {
		t.Fatal(err)
	}
	good := workerRequest{Version: version.String(), Dir: dir, Rank: 1, Size: 2, Proof: proof, Text: "text"}
	for _, test := range []struct {
		want   string
		secret string
		change func(*workerRequest)
	}{
		{"", testSecret, func(*workerRequest) {}},
		{"use one version", testSecret, func(r *workerRequest) { r.Version = "0.0.1" }},
		{"cannot open the working directory", testSecret,
			func(r *workerRequest) { r.Dir = filepath.Join(dir, "missing") }},
		{"does not see the same " + filepath.Join(dir, "cache"), testSecret,
			func(r *workerRequest) { r.Text = "other" }},
		{"does not see the same", testSecret, func(r *workerRequest) { r.Proof += "x" }},
		{secretVariable, testSecret + "x", func(*workerRequest) {}},
	} {
		req := good
		test.change(&req)
		if err := talk(t, test.secret, req); (err == nil) != (test.want == "") || err != nil &&
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v", test.want, err)
		}
	}
}
