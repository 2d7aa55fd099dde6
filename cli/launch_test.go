package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/internal/testwait"
	"mula/train/launch"
	"mula/train/record"
)

// launchSteps are enough that a test can do something in between.
const launchSteps = 120

// launchConfig is a run that writes to a folder of the given name. One rank does more steps than
// four can do in the same time.
func launchConfig(name string, steps int, layout string) string {
	return fmt.Sprintf("output: %s\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: %d\nseed: 3\ncheckpoint: "+
		"{every: 10, keep: 2}\nevaluate: {every: 50, samples: 2}\n%s", name, steps, layout)
}

// TestLaunch supervises runs in one folder, and compares their ends with the ends of unbroken runs.
// The runs work at the same time: they wait for disks and limits more than they compute.
func TestLaunch(t *testing.T) {
	longtest.SkipIfShort(t)
	dir := prepared(t)
	mustRun(t, dir, "blend")
	whole := map[string]map[string]string{}
	for layout, steps := range map[string]int{"": launchSteps, fourRanks: fourRanksSteps} {
		name := fmt.Sprintf("whole-%d", steps)
		if err := os.WriteFile(filepath.Join(dir, "whole.yaml"), []byte(launchConfig(name, steps, layout)),
			0o644); err != nil {
			t.Fatal(err)
		}
		mustRun(t, dir, "train", "--config", "whole.yaml")
		whole[layout] = contents(t, filepath.Join(dir, name))
	}
	for name, test := range map[string]func(t *testing.T, dir string, whole map[string]string){
		"killed": launchKilled, "hang": launchHang, "stopped": launchStopped, "stopped under MPI": launchStoppedMPI,
		"hang of a rank": launchHangOfRank,
		"twice":          launchTwice,
		"evicted":        launchEvicted,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, dir, whole[""])
		})
	}
	t.Run("ranks", func(t *testing.T) { launchRanks(t, dir, whole[fourRanks]) })
	t.Run("snapshots", func(t *testing.T) { launchSnapshots(t, dir, whole[fourRanks]) })
	t.Run("hot spares", func(t *testing.T) { launchHotSpares(t, dir, whole[fourRanks]) })
	t.Run("too few hot spares", func(t *testing.T) { launchHotSparesExhausted(t, dir, whole[fourRanks]) })
	t.Run("a hot spare that dies", func(t *testing.T) { launchHotSparesRejoin(t, dir, whole[fourRanks]) })
}

// A launched run is a `mula launch` in the background.
type launched struct {
	t    *testing.T
	run  string // directory
	cmd  *exec.Cmd
	mu   sync.Mutex
	out  bytes.Buffer
	done chan struct{}
}

func (l *launched) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Write(p)
}

func (l *launched) output() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.String()
}

// start starts `mula launch`, with further flags, for a configuration in dir.
func start(t *testing.T, dir, name, config string, flags ...string) *launched {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	l := &launched{t: t, run: filepath.Join(dir, name), done: make(chan struct{})}
	l.cmd = mula(dir, append(append([]string{"launch", "--back-off", "0s"}, flags...), "--", "train", "--config",
		name+".yaml")...)
	l.cmd.Stdout, l.cmd.Stderr = l, l
	if err := l.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = l.cmd.Wait()
		close(l.done)
	}()
	t.Cleanup(func() {
		l.cmd.Process.Signal(syscall.SIGTERM)
		l.cmd.Process.Signal(syscall.SIGTERM)
		<-l.done
	})
	return l
}

// reaches waits until an attempt has completed the given number of steps, and returns the process
// of rank 0, or 0 if the run has ended before.
func (l *launched) reaches(attempt int, step int64) int {
	l.t.Helper()
	path := filepath.Join(l.run, "launch", fmt.Sprintf("attempt-%03d", attempt), "heartbeat")
	ctx := testwait.Context(l.t)
	for {
		if beat, err := record.ReadHeartbeat(filesystem.OS{}, path); err == nil &&
			beat.Section != record.SectionSetup &&
			beat.Step >= step {
			return beat.PID
		}
		select {
		case <-l.done:
			return 0
		case <-ctx.Done():
			l.t.Fatalf("attempt %d did not reach step %d:\n%s", attempt, step, l.output())
		case <-time.After(time.Millisecond):
		}
	}
}

// ends waits for the launcher and compares its exit code.
func (l *launched) ends(code int) {
	l.t.Helper()
	ctx := testwait.Context(l.t)
	select {
	case <-l.done:
	case <-ctx.Done():
		l.t.Fatalf("mula launch does not end:\n%s", l.output())
	}
	if got := l.cmd.ProcessState.ExitCode(); got != code {
		l.t.Fatalf("exit code %d, want %d:\n%s", got, code, l.output())
	}
}

// attempts are the lines of launch.jsonl.
func (l *launched) attempts() []launch.Attempt {
	l.t.Helper()
	text, err := os.ReadFile(filepath.Join(l.run, launch.RecordFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		l.t.Fatal(err)
	}
	var attempts []launch.Attempt
	for line := range bytes.Lines(text) {
		var a launch.Attempt
		if err := json.Unmarshal(line, &a); err != nil {
			l.t.Fatal(err)
		}
		attempts = append(attempts, a)
	}
	return attempts
}

// sameEnd compares the end of the run with the end of the unbroken run: checkpoint, fingerprints,
// and all results of steps.
func (l *launched) sameEnd(whole map[string]string, steps int) {
	l.t.Helper()
	got, files := contents(l.t, l.run), 0
	for path := range whole {
		if strings.HasPrefix(path, fmt.Sprintf("checkpoints/step-%08d/", steps)) {
			files++
			if got[path] != whole[path] {
				l.t.Errorf("%s differs from that of the unbroken run", path)
			}
		}
	}
	if files < 5 {
		l.t.Errorf("the last checkpoint of the unbroken run has %d files", files)
	}
	if got["fingerprints.jsonl"] != whole["fingerprints.jsonl"] {
		l.t.Error("fingerprints differ")
	}
	if a, b := computed(l.t, got["metrics.jsonl"]), computed(l.t, whole["metrics.jsonl"]); a != b ||
		strings.Count(a, "\n") != steps {
		l.t.Errorf("metrics of %d and %d steps differ", strings.Count(a, "\n"), strings.Count(b, "\n"))
	}
}

// computed returns the steps of a metrics.jsonl without their times.
func computed(t *testing.T, metrics string) string {
	t.Helper()
	var out strings.Builder
	for line := range strings.Lines(metrics) {
		var m record.StepMetrics
		if !strings.Contains(line, `"learning_rate"`) {
			continue
		}
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&out, m.Step, m.First, m.Loss, m.AuxLoss, m.GradNorm, m.SourceLoss, m.ExpertTokens)
	}
	return out.String()
}

// A run that is killed repeatedly is restarted automatically, and ends like an unbroken run.
func launchKilled(t *testing.T, dir string, whole map[string]string) {
	l := start(t, dir, "killed", launchConfig("killed", launchSteps, ""))
	kills := 0
	for i := range 3 {
		pid := l.reaches(i+1, int64(launchSteps/5*(i+1)))
		if pid == 0 || syscall.Kill(pid, syscall.SIGKILL) != nil {
			break // it was quicker
		}
		kills++
	}
	l.ends(exitDone)
	if kills == 0 {
		t.Fatalf("the run was over before it could be killed:\n%s", l.output())
	}
	attempts := l.attempts()
	if len(attempts) < 2 || len(attempts) > kills+1 {
		t.Errorf("%d attempts after %d kills", len(attempts), kills)
	}
	for i, a := range attempts[:len(attempts)-1] {
		if a.Outcome != launch.HostLost || !strings.Contains(a.Reason, "signal 9") || a.Steps == 0 {
			t.Errorf("%+v", a)
		}
		if next := attempts[i+1]; next.From > a.Step || next.From < a.Step-11 || next.From%10 != 0 {
			t.Errorf("attempt %d began at step %d, after one that came to %d with a checkpoint every 10", next.Number,
				next.From, a.Step)
		}
	}
	if last := attempts[len(attempts)-1]; last.Outcome != launch.Done || last.Step != launchSteps {
		t.Errorf("%+v", last)
	}
	if out := l.output(); !strings.Contains(out, "launch: all steps are done") || !strings.Contains(out, "attempt") ||
		!strings.Contains(out, "checkpoint.every") {
		t.Errorf("it says\n%s", out)
	}
	l.sameEnd(whole, launchSteps)
}

// A rank that stands still is noticed after the limit of its section, killed, and the run goes on.
func launchHang(t *testing.T, dir string, whole map[string]string) {
	l := start(t, dir, "hang", launchConfig("hang", launchSteps, ""), "--section-timeout",
		"setup=2m,step=5s,evaluate=30s,checkpoint=30s", "--first-timeout", "20s", "--grace", "100ms")
	// A busy machine may make the launcher end attempts before.
	attempt, pid := 1, 0
	testwait.Until(t, "a rank is at a step", func() bool {
		if _, err := os.Stat(filepath.Join(l.run, "launch", fmt.Sprintf("attempt-%03d", attempt+1))); err == nil {
			attempt++
		}
		beat, err := record.ReadHeartbeat(filesystem.OS{}, filepath.Join(l.run, "launch",
			fmt.Sprintf("attempt-%03d", attempt),
			"heartbeat"))
		if err == nil && beat.Step >= 23 { // in a step, or else in a save, whose limit is longer
			pid = beat.PID
		}
		return pid != 0
	})
	if syscall.Kill(pid, syscall.SIGSTOP) != nil {
		t.Fatalf("the run was over before it could be stopped:\n%s", l.output())
	}
	l.reaches(attempt+1, 0)
	l.ends(exitDone)
	if a := l.attempts()[attempt-1]; a.Outcome != launch.Hang || !strings.HasPrefix(a.Reason, "no progress for ") {
		t.Errorf("%+v", a)
	}
	l.sameEnd(whole, launchSteps)
}

// The report of a hang names the rank that was stopped, also if an mpiexec starts the ranks. The
// other rank answers the launcher, and waits for it in an exchange.
func launchHangOfRank(t *testing.T, dir string, _ map[string]string) {
	programs := mpiexecFlags()
	programs["tcp"] = []string{"--with", "tcp"}
	for name, flags := range programs {
		t.Run(name, func(t *testing.T) { hangOfRank(t, dir, "hang-of-rank-"+name, flags) })
	}
}

func hangOfRank(t *testing.T, dir, name string, flags []string) {
	l := start(t, dir, name, launchConfig(name, launchSteps, "layout: {expert_dp: 2}\n"), append(flags,
		"--section-timeout", "setup=2m,step=8s,evaluate=30s,checkpoint=30s", "--first-timeout", "20s", "--grace",
		"4s")...)
	// A busy machine may make the launcher end attempts before.
	attempt, folder := 0, ""
	testwait.Until(t, "a rank other than 0 is stopped", func() bool {
		next := filepath.Join(l.run, "launch", fmt.Sprintf("attempt-%03d", attempt+1))
		if _, err := os.Stat(next); err == nil {
			attempt, folder = attempt+1, next
		}
		beat, err := record.ReadHeartbeat(filesystem.OS{}, filepath.Join(folder, "heartbeat"))
		ranks := slices.DeleteFunc(l.ranks(), func(pid int) bool { return pid == beat.PID })
		return err == nil && beat.Step >= 1 && len(ranks) == 1 && syscall.Kill(ranks[0], syscall.SIGSTOP) == nil
	})
	l.reaches(attempt+1, 0)
	a := l.attempts()[attempt-1]
	if a.Outcome != launch.Hang || a.Rank == nil || *a.Rank != 1 || !strings.Contains(a.Reason, "; rank 1 on ") ||
		!strings.Contains(a.Reason, " (wrote no stacks") ||
		!strings.Contains(a.Reason, "; waiting in an exchange: 1 rank (") {
		t.Errorf("%+v", a)
	}
	answers, err := filepath.Glob(filepath.Join(folder, "answers-*"))
	if err != nil || len(answers) != 1 {
		t.Fatalf("files of answers: %q, %v", answers, err)
	}
	text, err := os.ReadFile(answers[0])
	if err != nil || !bytes.HasPrefix(text, []byte("rank 0 on ")) || !bytes.Contains(text, []byte(launch.StacksEnd)) {
		t.Errorf("%v; the answers are\n%s", err, text)
	}
}

// SIGTERM to the launcher lets the ranks save and leave; there is no other attempt, and the same
// command ends the run.
func launchStopped(t *testing.T, dir string, whole map[string]string) {
	config := launchConfig("stopped", launchSteps, "")
	l := start(t, dir, "stopped", config)
	l.reaches(1, 33)
	if err := l.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	l.ends(launch.ExitStopped)
	attempts := l.attempts()
	if len(attempts) != 1 || attempts[0].Outcome != launch.Stopped {
		t.Fatalf("%+v\n%s", attempts, l.output())
	}
	if _, err := os.Stat(filepath.Join(l.run, "checkpoints", fmt.Sprintf("step-%08d", attempts[0].Step))); err != nil {
		t.Errorf("nothing was saved at the end: %v", err)
	}
	l = start(t, dir, "stopped", config)
	l.ends(exitDone)
	if attempts := l.attempts(); len(attempts) != 2 || attempts[1].From != attempts[0].Step {
		t.Errorf("%+v", attempts)
	}
	l.sameEnd(whole, launchSteps)
}

// A SIGTERM to a rank that is not the launcher's saves and ends the attempt. The launcher starts
// the run again.
func launchEvicted(t *testing.T, dir string, whole map[string]string) {
	l := start(t, dir, "evicted", launchConfig("evicted", launchSteps, ""))
	pid := l.reaches(1, 13)
	if pid == 0 || syscall.Kill(pid, syscall.SIGTERM) != nil {
		t.Fatalf("the run was over before the signal:\n%s", l.output())
	}
	l.ends(exitDone)
	attempts := l.attempts()
	if len(attempts) != 2 || attempts[0].Outcome != launch.Evicted || attempts[1].Outcome != launch.Done ||
		attempts[1].From != attempts[0].Step {
		t.Errorf("%+v\n%s", attempts, l.output())
	}
	l.sameEnd(whole, launchSteps)
}

// A second launcher of a run is refused, and the message names the first.
func launchTwice(t *testing.T, dir string, _ map[string]string) {
	first := start(t, dir, "twice", launchConfig("twice", 200, ""))
	pid := first.reaches(1, 1)
	out, err := mula(dir, "launch", "--", "train", "--config", "twice.yaml").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != exitFailed ||
		!strings.Contains(string(out), fmt.Sprintf("process %d on", first.cmd.Process.Pid)) {
		t.Errorf("%v\n%s", err, out)
	}
	if pid == 0 {
		t.Error("the first run was over already")
	}
}

// Four ranks, with fewer steps.
const (
	fourRanks      = "layout: {expert_dp: 2, ep: 2}\n"
	fourRanksSteps = 30
)

// launchRanks kills any one of four ranks, over TCP and under what mpiexecs there are.
func launchRanks(t *testing.T, dir string, whole map[string]string) {
	ways := mpiexecFlags()
	ways["tcp"] = nil
	for name, flags := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := start(t, dir, name, launchConfig(name, fourRanksSteps, fourRanks),
				append(flags, "--hosts", "a:2,b:2,c:2", "--local-hosts")...)
			kills, random := 0, rand.New(rand.NewPCG(5, uint64(len(name))))
			times := 1 // a start under an mpiexec takes long where ranks have no core of their own
			if name == "tcp" {
				times = 3
			}
			for i := range times {
				if l.reaches(i+1, int64(5+7*i)) == 0 {
					break // it was quicker
				}
				ranks := l.ranks()
				if len(ranks) == 0 || syscall.Kill(ranks[random.IntN(len(ranks))], syscall.SIGKILL) != nil {
					break
				}
				kills++
			}
			l.ends(exitDone)
			attempts := l.attempts()
			if kills == 0 || len(attempts) < 2 {
				t.Fatalf("%d attempts after %d kills:\n%s", len(attempts), kills, l.output())
			}
			for _, a := range attempts {
				t.Logf("attempt %d on %v: %s, %s", a.Number, a.Hosts, a.Outcome, a.Reason)
			}
			l.sameEnd(whole, fourRanksSteps)
		})
	}
}

// mpiexecFlags are the flags that start ranks by the mpiexecs that this machine has.
func mpiexecFlags() map[string][]string {
	flags := map[string][]string{}
	for name, arguments := range map[string]string{"openmpi": " --allow-run-as-root --oversubscribe", "mpich": ""} {
		if _, err := exec.LookPath("mpiexec." + name); err == nil {
			flags[name] = []string{"--with", "mpiexec", "--mpiexec", "mpiexec." + name + arguments}
		}
	}
	return flags
}

// SIGTERM reaches ranks that an mpiexec has started in a way that lets them save, whatever the MPI
// library has done with their signals.
func launchStoppedMPI(t *testing.T, dir string, _ map[string]string) {
	for name, flags := range mpiexecFlags() {
		name = "stopped-" + name
		l := start(t, dir, name, launchConfig(name, launchSteps, "layout: {expert_dp: 1, ep: 2}\n"), flags...)
		l.reaches(1, 3)
		if err := l.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		l.ends(launch.ExitStopped)
		attempts := l.attempts()
		if len(attempts) != 1 || attempts[0].Outcome != launch.Stopped || attempts[0].Step >= launchSteps {
			t.Fatalf("%+v\n%s", attempts, l.output())
		}
		if _, err := os.Stat(filepath.Join(l.run, "checkpoints",
			fmt.Sprintf("step-%08d", attempts[0].Step))); err != nil {
			t.Errorf("nothing was saved at the end: %v", err)
		}
	}
}

// ranks are the processes of ranks: those below the launcher that have it that they are watched,
// and are mula.
func (l *launched) ranks() []int {
	var found []int
	heartbeat := []byte("\x00" + record.HeartbeatVariable + "=" + l.run + string(filepath.Separator))
	paths, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range paths {
		environment, _ := os.ReadFile(path)
		command, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		first, _, _ := bytes.Cut(command, []byte{0})
		if err == nil && filepath.Base(string(first)) == "mula" && bytes.Contains(append([]byte{0}, environment...),
			heartbeat) {
			found = append(found, pid)
		}
	}
	return found
}

// srunScript starts the tasks of a step on this machine, with the variables that srun sets, and
// passes signals on.
const srunScript = `#!/bin/sh
while [ "$1" != sh ]; do
	if [ "$1" = -n ]; then n=$2; fi
	shift
done
echo "$SRUN_CPUS_PER_TASK processors for each task" >&2
trap 'kill -USR1 $pids' USR1
trap 'kill -TERM $pids' TERM
i=0
while [ $i -lt $n ]; do
	SLURM_PROCID=$i SLURM_STEP_NUM_TASKS=$n SLURMD_NODENAME=127.0.0.1 "$@" &
	pids="$pids $!"
	i=$((i + 1))
done
code=0
for pid in $pids; do
	wait $pid
	c=$?
	while kill -0 $pid 2>/dev/null; do # a trap has ended the wait
		wait $pid
		c=$?
	done
	if [ $c -gt $code ]; then code=$c; fi
done
exit $code
`

// In a job of Slurm without MPI the tasks of srun are ranks that speak TCP. SIGUSR1 to the launcher
// stops them after a checkpoint.
func TestLaunchSlurm(t *testing.T) {
	longtest.SkipIfShort(t)
	dir := prepared(t)
	mustRun(t, dir, "blend")
	bin := t.TempDir()
	for name, script := range map[string]string{"srun": srunScript, "squeue": "#!/bin/sh\necho UNLIMITED\n",
		"scontrol": "#!/bin/sh\necho 'MpiDefault = none'\n"} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+string(filepath.ListSeparator)+os.Getenv("PATH"))
	t.Setenv("SLURM_JOB_ID", "12")
	t.Setenv("SLURM_JOB_NODELIST", "127.0.0.1")
	t.Setenv("SLURM_CPUS_PER_TASK", "3")
	config := func(name string) string { return launchConfig(name, fourRanksSteps, fourRanks) }
	writeFile(t, config("whole"), dir, "whole.yaml")
	mustRun(t, dir, "train", "--config", "whole.yaml")

	l := start(t, dir, "slurm", config("slurm"))
	if l.reaches(1, 3) != 0 {
		if err := l.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
	}
	l.ends(launch.ExitStopped)
	if attempts := l.attempts(); len(attempts) != 1 || attempts[0].Outcome != launch.Stopped ||
		attempts[0].With != "Slurm, tcp" {
		t.Errorf("%+v\n%s", attempts, l.output())
	}
	if !strings.Contains(l.output(), "3 processors for each task") {
		t.Errorf("srun does not get the number of processors of the job: %s", l.output())
	}
	l = start(t, dir, "slurm", config("slurm"))
	l.ends(exitDone)
	l.sameEnd(contents(t, filepath.Join(dir, "whole")), fourRanksSteps)

	// Tasks that do not get the variables of the launcher do not train.
	l = start(t, dir, "none", config("none"), "--srun", "env -i PATH="+os.Getenv("PATH")+" srun")
	l.ends(exitFailed)
	if attempts := l.attempts(); len(attempts) != 2 || !strings.Contains(l.output(), "MULA_WORLD") {
		t.Errorf("%+v\n%s", attempts, l.output())
	}

	l = start(t, dir, "mpi", launchConfig("mpi", fourRanksSteps, "layout: {expert_dp: 2, transport: mpi}\n"))
	l.ends(exitUsage)
	if !strings.Contains(l.output(), "choose a type from `srun --mpi=list`") {
		t.Errorf("%s", l.output())
	}
}

// The job scripts for PBS call the commands with their options. The script for training submits
// itself again after the launcher has stopped the run. mpiexec has the options of PALS and starts
// one process; it stops the launcher when the run has a checkpoint.
func TestPBSTemplates(t *testing.T) {
	longtest.SkipIfShort(t)
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("the scripts need bash")
	}
	dir := prepared(t)
	writeFile(t, "sequence_length: 32\nsamples: 8000000\nsources: [{name: a, shards: [shards/a]}]\n", dir,
		"blend.yaml")
	mustRun(t, dir, "blend")
	bin := t.TempDir()
	for name, script := range map[string]string{
		"qsub":  "echo qsub \"$@\" >>calls\n",
		"qstat": "printf '    job_state = R\\n'\n",
		"mpiexec": `if [ "$1" = --version ]; then
	echo "mpiexec version 1.8.0 revision 0"
	exit
fi
echo mpiexec "$@" >>calls
while case $1 in *mula) false ;; esac; do shift; done
if [ "$2" = train ]; then
	launcher=$PPID
	{
		until ls train/checkpoints/step-*/manifest.json >/dev/null 2>&1; do sleep 0.1; done
		kill -USR1 $launcher
	} &
fi
exec "$@"
`,
	} {
		writeFile(t, "#!/bin/sh\n"+script, bin, name)
		if err := os.Chmod(filepath.Join(bin, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, "node1\nnode2\n", dir, "nodes")
	writeFile(t, "output: train\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 2000000\ncheckpoint: {every: 10}\n",
		dir, "train.yaml")
	for name, value := range map[string]string{"PATH": bin + string(filepath.ListSeparator) + os.Getenv("PATH"),
		"PBS_O_WORKDIR": dir, "PBS_JOBID": "7.pbs", "PBS_NODEFILE": "nodes", "CONFIG": "train.yaml"} {
		t.Setenv(name, value)
	}
	for _, test := range []struct {
		name  string
		edits []string // pairs of texts of the script and their replacements
		code  int
		calls string // a regular expression
	}{
		{"train", nil, launch.ExitStopped, `^mpiexec --depth 8 --cpu-bind depth -n 1 --ppn 1 --hosts node1 \S*mula train ` +
			`--config train.yaml\nqsub -v CONFIG=train.yaml \S*train.pbs\n$`},
		{"tokenize", []string{"corpus/web", "docs.jsonl"}, exitDone, "^$"},
		{"index", []string{"0.7 data/web 0.3 data/code", "shards/a", "--like old/description.txt", "--tokenizer-path x",
			"1000000", "100", "10000", "1", "4096", "32"}, exitDone,
			"^mpiexec -n 2 --ppn 1 --depth 104 --cpu-bind depth mula index --for megatron "},
	} {
		script, err := os.ReadFile(filepath.Join("../examples/pbs", test.name+".pbs"))
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(bin, test.name+".pbs")
		writeFile(t, strings.NewReplacer(test.edits...).Replace(string(script)), path)
		writeFile(t, "", dir, "calls")
		job := exec.CommandContext(testwait.Context(t), bash, path)
		job.Dir = dir
		output, _ := job.CombinedOutput()
		calls, err := os.ReadFile(filepath.Join(dir, "calls"))
		if code := job.ProcessState.ExitCode(); code != test.code || err != nil ||
			!regexp.MustCompile(test.calls).Match(calls) {
			t.Errorf("%s: code %d, calls %q, %v\n%s", test.name, code, calls, err, output)
		}
	}
}

// What cannot work is not tried again.
func TestLaunchWrong(t *testing.T) {
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	for _, test := range []struct {
		name     string
		args     string
		config   string // added to train.yaml
		code     int
		says     string // a regular expression
		attempts int
	}{
		{"no command", "launch", "", exitUsage, "no command for the ranks; write it after --", 0},
		{"another command", "launch -- eval", "", exitUsage, "only train is allowed", 0},
		{"flag of train without --", "launch train --config train.yaml", "", exitUsage,
			"flag provided but not defined: --config", 0},
		{"wrong flag of train", "launch -- train --confg train.yaml", "", exitUsage,
			"flag provided but not defined: --confg", 0},
		{"no configuration", "launch -- train --config none.yaml", "", exitUsage, "none.yaml: no such file", 0},
		{"wrong field", "launch -- train", "stepps: 3\n", exitUsage, "stepps", 0},
		{"number of ranks", "launch --ranks 3 -- train", "", exitUsage, "--ranks: must be 1, .* got 3", 0},
		{"links and tcp", "launch -- train", "layout: {expert_dp: 2, transport: mpi}\n", exitUsage,
			"use --with mpiexec", 0},
		{"links and mpiexec", "launch --with mpiexec -- train", "layout: {expert_dp: 2, transport: tcp}\n", exitUsage,
			"use --with tcp", 0},
		{"section", "launch --section-timeout save=3m -- train", "", exitUsage, `unknown section "save"`, 0},
		{"limit", "launch --section-timeout step=soon -- train", "", exitUsage, "limit of step", 0},
		{"log", "launch --log blend.yaml -- train", "", exitUsage, "--log blend.yaml is a file; name a folder", 0},
		{"back-off", "launch --back-off 5 -- train", "", exitUsage,
			`must be a list of durations such as 5s,1m, got "5"`, 0},
		{"with", "launch --with ssh -- train", "", exitUsage, "allowed: auto, tcp, mpiexec, srun, pbs", 0},
		{"pbs", "launch --with pbs -- train", "", exitUsage, "PBS_NODEFILE", 0},
		{"hosts", "launch --hosts a,-b -- train", "", exitUsage, "not the name of a host", 0},
		{"spares", "launch --hosts a,b --spares 2 -- train", "", exitUsage, "at least one host must not be a spare", 0},
		{"spares without hosts", "launch --spares 2 -- train", "", exitUsage, "no hosts are named", 0},
		{"mpiexec", "launch --with mpiexec --mpiexec nowhere/mpiexec -- train", "", exitFailed, "nowhere/mpiexec", 0},
		{"no plan", "launch --back-off 0s -- train", "plan: none.json\n", exitUsage, "none.json", 1},
		{"a model that is none", "launch --back-off 0s -- train", "initialize_from: shards\n", exitFailed,
			"(?s)initialize_from.*two attempts in a row ended before their first step", 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			if err := os.RemoveAll(filepath.Join(dir, "run")); err != nil {
				t.Fatal(err)
			}
			config := "output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 12\n" + test.config
			if err := os.WriteFile(filepath.Join(dir, "train.yaml"), []byte(config), 0o644); err != nil {
				t.Fatal(err)
			}
			out, err := mula(dir, strings.Fields(test.args)...).CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != test.code || !regexp.MustCompile(test.says).Match(out) {
				t.Errorf("%v; want code %d and %q\n%s", err, test.code, test.says, out)
			}
			if got := (&launched{t: t, run: filepath.Join(dir, "run")}).attempts(); len(got) != test.attempts {
				t.Errorf("%d attempts, want %d", len(got), test.attempts)
			}
		})
	}
}

// --json prints the result alone on standard output, after what rank 0 prints there.
func TestLaunchJSON(t *testing.T) {
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	c := mula(dir, "launch", "--json", "--hosts", "a,b", "--spares", "1", "--local-hosts", "--", "train", "--json")
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	values := json.NewDecoder(&stdout)
	var run struct {
		Steps    int64 `json:"steps"`
		Finished bool  `json:"finished"`
	}
	var result launch.Result
	if err := errors.Join(values.Decode(&run), values.Decode(&result)); err != nil {
		t.Fatal(err)
	}
	if run.Steps != 12 || !run.Finished || result.Outcome != launch.Done || len(result.Attempts) != 1 ||
		result.Attempts[0].Step != 12 || result.Attempts[0].Hosts[0] != "a" || values.More() {
		t.Errorf("%+v, %+v", run, result)
	}
}
