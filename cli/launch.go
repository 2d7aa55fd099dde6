package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/train"
	"mula/train/group"
	"mula/train/launch"
	"mula/train/record"
)

// The values of --with.
const (
	withAuto    = "auto"
	withTCP     = "tcp"
	withMPIExec = "mpiexec"
	withSRun    = "srun"
	withPBS     = "pbs"
)

var startWays = []string{withAuto, withTCP, withMPIExec, withSRun, withPBS}

func launchCommand() *cli.Command {
	limits := launch.DefaultLimits()
	return &cli.Command{
		Name:      "launch",
		Usage:     "run the ranks of `mula train`, and restart the run when a rank dies or hangs",
		ArgsUsage: "-- train [FLAGS]",
		Description: "The arguments after -- are the command of every rank.\n\n" +
			"If a rank is killed, a host is unreachable or the run makes no progress, mula launch stops all\n" +
			"ranks. After a wait it restarts them from the newest checkpoint, on spare hosts if needed. It does\n" +
			"not retry if the configuration is wrong or no step has ever finished. Ctrl-C, SIGTERM, SIGUSR1 and\n" +
			"SIGUSR2 let the ranks save a checkpoint and exit. A second Ctrl-C or SIGTERM kills them.\n\n" +
			"Exit codes: 0 all steps are done, 1 failed after all retries, 2 wrong usage, 3 stopped after a\n" +
			"checkpoint, 124 the last attempt hung. docs/guides/launch.md has the details.\n\n" +
			"Example: mula launch -- train --config train.yaml\n" +
			"         mula launch --hosts node1,node2,node3 --spares 1 --ranks 4 -- train --config train.yaml\n" +
			"         mula launch --with mpiexec --mpiexec 'mpiexec.mpich -bind-to core' --ranks 4 -- train\n" +
			"         mula launch --with srun --spares 2 --walltime-margin 10m -- train     (in a Slurm job)",
		Flags: []cli.Flag{
			&cli.IntFlag{Name: "ranks", Usage: "start this many `PROCESSES`",
				DefaultText: "layout.expert_dp · layout.pp · layout.ep · layout.tp, or 1 with layout.transport: local"},
			&cli.StringFlag{Name: "hosts",
				Usage: "run on `HOSTS`, such as a,b:4,c, or a file with one host per line; :4 is the host's " +
					"number of ranks",
				DefaultText: "the scheduler's hosts, or this machine"},
			&cli.IntFlag{Name: "spares", Usage: "reserve the last `N` hosts as replacements for failed hosts"},
			&cli.IntFlag{Name: "hot-spares",
				Usage: "with tcp: start `N` more processes, which take over from ranks that die, without a restart"},
			&cli.StringFlag{Name: "with",
				Usage: "start ranks with tcp (mula launch starts them itself), mpiexec, srun, or pbs (mpiexec on " +
					"the hosts of PBS_NODEFILE). auto: srun in a Slurm job, pbs in a PBS job, else " +
					"tcp", Value: withAuto},
			&cli.StringFlag{Name: "mpiexec", Value: "mpiexec",
				Usage: "run this `PROGRAM` of Open MPI, MPICH or PALS, with its first arguments"},
			&cli.StringFlag{Name: "srun",
				Usage: "run this `PROGRAM` with its first arguments, as in 'srun --mpi=pmix --cpus-per-task=16'. If " +
					"neither this flag nor Slurm's MpiDefault names an MPI type, ranks use TCP", Value: "srun"},
			&cli.StringFlag{Name: "remote-shell",
				Usage: "with tcp: run this `PROGRAM` with arguments to execute a command on another host",
				Value: "ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15"},
			&cli.IntFlag{Name: "port",
				Usage: "with tcp, and with srun without MPI: make rank 0 listen on `PORT` (0: any free port)"},
			&cli.BoolFlag{Name: "local-hosts",
				Usage: "run the ranks of all hosts on this machine (for trials)"},
			&cli.BoolFlag{Name: "elastic",
				Usage: "when hosts fail and no spare is left, continue with a smaller layout.expert_dp"},
			&cli.IntFlag{Name: "replace-slow",
				Usage: "when a rank is slow (log.slow_factor), save, and replace its host by a spare, at most `N` " +
					"times"},
			&cli.IntFlag{Name: "retries", Usage: "give up after `N` consecutive retries without progress", Value: 10},
			&cli.Int64Flag{Name: "progress-steps", Usage: "count `STEPS` new steps as progress",
				Value: 1},
			&cli.StringFlag{Name: "back-off",
				Usage: "wait for `TIMES` before the first, second, … retry without progress",
				Value: "5s,10s,20s,40s,60s"},
			&cli.StringFlag{Name: "section-timeout",
				Usage: "treat the run as hung if a section takes longer than these `LIMITS`; longer sections " +
					"already seen raise the limit",
				Value: limitsText(limits.Floor)},
			&cli.DurationFlag{Name: "first-timeout",
				Usage: "limit for the first run of a section, if it is more than --section-timeout",
				Value: limits.First},
			&cli.Float64Flag{Name: "timeout-factor",
				Usage: "allow a section `X` times the longest duration seen so far",
				Value: limits.Factor},
			&cli.DurationFlag{Name: "grace", Usage: "time between SIGTERM and SIGKILL for ranks that must stop",
				Value: 10 * time.Second},
			&cli.DurationFlag{Name: "probe-timeout",
				Usage: "after an attempt without a step, or without a known cause, replace hosts that do not start a " +
					"process in this time (0: do not look for them)",
				Value: 30 * time.Second},
			&cli.DurationFlag{Name: "walltime", Usage: "end of the machine's allocation, counted from now",
				DefaultText: "as Slurm or PBS report"},
			&cli.DurationFlag{Name: "walltime-margin",
				Usage: "stop the run this long before the allocation ends, or twice its longest save if that is more",
				Value: 5 * time.Minute},
			&cli.DurationFlag{Name: "blame-expiry",
				Usage: "avoid a host for this `TIME` after failures.jsonl blames it for wrong values (0: permanently)",
				Value: 7 * 24 * time.Hour},
			&cli.BoolFlag{Name: "forget-blame",
				Usage: "use the hosts that failures.jsonl blames again, in this launch and later ones"},
			&cli.StringFlag{Name: "log", Usage: "write the output of ranks into `DIR`",
				DefaultText: "launch in the run's folder"},
			jsonFlag,
			&cli.BoolFlag{Name: "agent", Hidden: true, Usage: "run a rank for a launcher on another host"},
		},
		Action: runLaunch,
	}
}

// limitsText writes limits as --section-timeout reads them.
func limitsText(limits map[record.Section]time.Duration) string {
	var parts []string
	for _, section := range record.Sections {
		parts = append(parts, fmt.Sprintf("%s=%s", section, strings.TrimSuffix(limits[section].String(), "0s")))
	}
	return strings.Join(parts, ",")
}

func runLaunch(c *cli.Context) error {
	if c.Bool("agent") {
		code, err := launch.Agent(c.App.Reader, c.App.Writer, unfiltered(c.App.ErrWriter))
		if err == nil && code != exitDone {
			err = exitCode(code)
		}
		return err
	}
	command, config, err := launchedTrain(c)
	if err != nil {
		return err
	}
	o, err := launchOptions(c, config, command)
	if err != nil {
		return err
	}
	if info, err := os.Stat(o.Log); o.Log != "" && err == nil && !info.IsDir() {
		return usagef("--log %s is a file; name a folder", o.Log)
	}
	p := newProgress(c.App.ErrWriter)
	o.Notice = func(text string) { p.line("launch: %s", text) }
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, stopSignals...)
	defer signal.Stop(signals)
	o.Signals = signals
	if err := c.Context.Err(); err != nil { // a signal before the launch
		return err
	}

	result, err := launch.Run(context.WithoutCancel(c.Context), o)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		err = printJSON(c.App.Writer, result)
	} else {
		printLaunch(c, result)
	}
	if err == nil && result.Code != exitDone {
		err = exitCode(result.Code)
	}
	return err
}

// printLaunch writes the result of the run to standard error. Rank 0 uses standard output.
func printLaunch(c *cli.Context, r launch.Result) {
	w := unfiltered(c.App.ErrWriter)
	fmt.Fprintf(w, "launch: %s\n", printable(r.Reason))
	if r.Advice != nil {
		fmt.Fprintf(w, "launch: %s\n", r.Advice)
	}
	if len(r.Attempts) < 2 {
		return
	}
	t := newTable("attempt", "ranks", "time", "steps", "from", "to", "outcome", "blamed")
	for _, a := range r.Attempts {
		t.row(a.Number, len(a.Hosts), quantity.Duration(a.End.Sub(a.Start)), a.Steps, a.From, a.Step, string(a.Outcome),
			a.Blamed)
	}
	t.write(w)
}

// launchedTrain returns the command of a rank and the configuration of its run.
func launchedTrain(c *cli.Context) ([]string, train.Config, error) {
	var config train.Config
	args := c.Args().Slice()
	if len(args) == 0 || args[0] != "train" {
		return nil, config, usagef("no command for the ranks; write it after --, as in `mula launch -- train " +
			"--config train.yaml` (only train is allowed)")
	}
	app := newApp(c.App.Reader, c.App.Writer, c.App.ErrWriter)
	current, warnings, err := renames.apply(app.Commands, append([]string{"mula"}, args...))
	if err != nil {
		return nil, config, err
	}
	printWarnings(c.App.ErrWriter, warnings) // the ranks get the current names, and do not warn
	args = current[1:]
	ordered, err := flagsFirst(app.Commands, current)
	if err != nil {
		return nil, config, err
	}
	// The library reads the flags. The action gets the file that they name.
	path, set := "", []string(nil)
	for _, command := range app.Commands {
		if command.Name == "train" {
			command.Action = func(c *cli.Context) error {
				path, set = c.String("config"), settings(c)
				return noOperands(c)
			}
		}
	}
	if err := app.RunContext(c.Context, ordered); err != nil {
		return nil, config, err
	}
	if path == "" {
		return nil, config, usagef("`mula %s` only prints help and cannot be launched", strings.Join(args, " "))
	}
	config, err = train.LoadConfig(path, set...)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, config, usagef("%v; name the run's configuration with --config (docs/formats/config.md lists "+
			"its fields)", err)
	}
	if err != nil {
		return nil, config, usagef("%v", err)
	}
	// Not os.Executable, which resolves links.
	program, err := exec.LookPath(os.Args[0])
	if err == nil {
		program, err = filepath.Abs(program)
	}
	return append([]string{program}, args...), config, err
}

// launchOptions reads the flags.
func launchOptions(c *cli.Context, config train.Config, command []string) (launch.Options, error) {
	o := launch.Options{
		Output: config.Output, Log: c.String("log"), Ranks: c.Int("ranks"), Retries: c.Int("retries"),
		ReplaceSlow: c.Int("replace-slow"), HotSpares: c.Int("hot-spares"), Progress: c.Int64("progress-steps"),
		Grace: c.Duration("grace"), Margin: c.Duration("walltime-margin"), BlameExpiry: c.Duration("blame-expiry"),
		ProbeLimit:  c.Duration("probe-timeout"),
		ForgetBlame: c.Bool("forget-blame"),
		Limits: launch.Limits{Floor: launch.DefaultLimits().Floor, First: c.Duration("first-timeout"),
			Factor: c.Float64("timeout-factor")},
	}
	if err := atMost(c, 1<<20, "ranks", "spares", "hot-spares", "replace-slow", "retries"); err != nil {
		return o, err
	}
	if err := atMost(c, 65535, "port"); err != nil {
		return o, err
	}
	if n := o.Progress; n < 1 {
		return o, usagef("--progress-steps: must be at least 1, got %d", n)
	}
	if x := o.Limits.Factor; !(x >= 1 && x <= 1e6) {
		return o, usagef("--timeout-factor: must be from 1 to 1e6, got %g", x)
	}
	for _, name := range []string{"first-timeout", "grace", "probe-timeout", "walltime", "walltime-margin",
		"blame-expiry"} {
		if c.Duration(name) < 0 {
			return o, usagef("--%s: must not be negative, got %s", name, c.Duration(name))
		}
	}
	var err error
	if o.Limits.Floor, err = readLimits(c.String("section-timeout"), o.Limits.Floor); err != nil {
		return o, err
	}
	if o.BackOff, err = readWaits(c.String("back-off")); err != nil {
		return o, err
	}
	if c.IsSet("walltime") {
		o.Deadline = time.Now().Add(c.Duration("walltime"))
	} else {
		var warning string
		if o.Deadline, warning, err = launch.Deadline(c.Context, os.Getenv, time.Now()); err != nil {
			return o, usagef("%v", err)
		}
		if warning != "" {
			fmt.Fprintf(unfiltered(c.App.ErrWriter), "launch: %s\n", printable(warning))
		}
	}
	with, err := startWith(c)
	if err != nil {
		return o, err
	}
	if o.Ranks == 0 {
		o.Ranks = config.Layout.Ranks()
		if config.Layout.Transport == group.Local {
			o.Ranks = 1
		}
	}
	if ranks := config.Layout.Ranks(); ranks == 1 && o.Ranks != 1 {
		return o, usagef("--ranks: must be 1, because the configuration has a layout of one rank, got %d", o.Ranks)
	} else if o.Ranks != 1 && o.Ranks != ranks {
		return o, usagef("--ranks is %d; it must be %d (expert_dp · pp · ep · tp of the configuration's layout), or 1 "+
			"for one process with all ranks", o.Ranks, ranks)
	}
	switch transport := config.Layout.Transport; {
	case transport == group.MPI && with == withTCP:
		return o, usagef("layout.transport is mpi, but --with is tcp; use --with mpiexec, srun or pbs, or set " +
			"layout.transport to auto")
	case transport == group.TCP && with != withTCP && with != withSRun:
		return o, usagef("layout.transport is tcp, but --with is %s; use --with tcp, or set layout.transport to auto",
			with)
	}
	if o.Hosts, err = launchHosts(c, with); err != nil {
		return o, err
	}
	switch spares := c.Int("spares"); {
	case len(o.Hosts) > 0:
		if o.Hosts, o.Ranks, err = launch.Distribute(o.Hosts, spares, o.Ranks); err != nil {
			return o, usagef("--hosts: %v", err)
		}
	case spares > 0:
		return o, usagef("--spares is %d, but no hosts are named; name them with --hosts", spares)
	}
	if o.ReplaceSlow > 0 && !launch.HasSpare(o.Hosts, o.Ranks) {
		return o, usagef("--replace-slow: no host is a spare; name more hosts with --hosts, or remove the flag")
	}
	if o.HotSpares > 0 {
		if err := checkHotSpares(o, with); err != nil {
			return o, err
		}
		if config.Checkpoint.SnapshotEvery == 0 {
			fmt.Fprintln(unfiltered(c.App.ErrWriter), "launch: with checkpoint.snapshot_every, hot spares would lose "+
				"fewer steps; without it, the run resumes from the newest checkpoint")
		}
	}
	if c.Bool("elastic") {
		o.Shrink = func(room int) (int, []string, error) { return shrink(config, room) }
	}
	o.Start, err = starter(c, with, config.Layout.Transport, command)
	return o, err
}

// checkHotSpares refuses --hot-spares where no process can take over from a rank.
func checkHotSpares(o launch.Options, with string) error {
	switch {
	case with != withTCP:
		return usagef("--hot-spares needs ranks that mula launch starts itself, but --with is %s; use --with tcp", with)
	case o.Ranks == 1:
		return usagef("--hot-spares needs several ranks, because the others must have the state of a rank that dies; " +
			"remove the flag, or raise --ranks")
	}
	slots := 0
	for _, h := range o.Hosts {
		slots += h.Slots
	}
	if len(o.Hosts) > 0 && slots < o.Ranks+o.HotSpares {
		return usagef("--hot-spares is %d, but the hosts have %d slots, and %d are ranks; name more hosts with "+
			"--hosts, or more slots, as in a:4", o.HotSpares, slots, o.Ranks)
	}
	return nil
}

// startWith resolves --with auto.
func startWith(c *cli.Context) (string, error) {
	with := c.String("with")
	switch {
	case with != withAuto:
		return with, nil
	case os.Getenv("SLURM_JOB_ID") != "":
		return withSRun, nil
	case os.Getenv("PBS_NODEFILE") != "":
		return withPBS, nil
	}
	return withTCP, nil
}

// launchHosts returns the hosts of --hosts or of the scheduler. No hosts means this machine.
func launchHosts(c *cli.Context, with string) ([]launch.Host, error) {
	name := c.String("hosts")
	var hosts []launch.Host
	var err error
	switch {
	case name == "" && with == withPBS:
		file := os.Getenv("PBS_NODEFILE")
		if file == "" {
			return nil, usagef("--with pbs needs the variable PBS_NODEFILE, which PBS sets in a job; otherwise name " +
				"the hosts with --hosts")
		}
		hosts, err = launch.ReadHosts(file)
	case name == "" && with == withSRun:
		hosts, err = launch.ParseNodeList(os.Getenv("SLURM_JOB_NODELIST"))
	case name == "":
		return nil, nil
	default:
		if info, e := os.Stat(name); e == nil && !info.IsDir() || strings.ContainsRune(name, filepath.Separator) {
			hosts, err = launch.ReadHosts(name)
		} else {
			hosts, err = launch.ParseHosts(name)
		}
	}
	if err != nil {
		return nil, usagef("--hosts: %v", err)
	}
	return hosts, nil
}

// starter returns the starter of the ranks.
func starter(c *cli.Context, with string, transport group.Transport, command []string) (launch.Starter, error) {
	out := launch.Output{Stdout: c.App.Writer, Stderr: unfiltered(c.App.ErrWriter)}
	local := c.Bool("local-hosts")
	if with == withTCP {
		shell := strings.Fields(c.String("remote-shell"))
		if len(shell) == 0 {
			return nil, usagef("--remote-shell is empty; name a program such as ssh")
		}
		return &launch.Processes{Command: command, RemoteShell: shell, Agent: []string{command[0], "launch", "--agent"},
			AllLocal: local,
			Port:     c.Int("port"), Output: out}, nil
	}
	name, kind := "mpiexec", launch.Slurm
	if with == withSRun {
		name = "srun"
	}
	program := strings.Fields(c.String(name))
	if len(program) == 0 {
		return nil, usagef("--%s is empty; name a program", name)
	}
	if _, err := exec.LookPath(program[0]); err != nil {
		return nil, fmt.Errorf("%w; --with tcp starts ranks without this program", err)
	}
	if with == withSRun && local {
		return nil, usagef("--local-hosts cannot be used with srun; remove it")
	}
	m := &launch.MPI{Kind: kind, Program: program, Command: command, AllLocal: local, Port: c.Int("port"), Output: out}
	var err error
	switch {
	case with != withSRun:
		m.Kind, err = launch.DetectMPI(c.Context, program)
	case transport == group.TCP:
		m.TCP = true
	default:
		m.TCP = launch.SlurmMPI(c.Context, program, os.Getenv) == "none"
	}
	if m.TCP && transport == group.MPI {
		return nil, usagef("layout.transport is mpi, but srun starts tasks without MPI here (--mpi=none); choose a " +
			"type from `srun --mpi=list`, as in --srun 'srun --mpi=pmi2', or set layout.transport to auto")
	}
	return m, err
}

// readLimits reads limits of sections, such as "step=5m,checkpoint=1h". Other limits do not change.
func readLimits(text string, limits map[record.Section]time.Duration) (map[record.Section]time.Duration, error) {
	for _, item := range strings.Split(text, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(item), "=")
		if !slices.Contains(record.Sections, record.Section(name)) {
			return nil, usagef("--section-timeout: unknown section %q; use setup, step, evaluate and checkpoint, as "+
				"in step=5m,checkpoint=1h", name)
		}
		d, err := time.ParseDuration(value)
		if err != nil || d <= 0 {
			return nil, usagef("--section-timeout: limit of %s: must be a duration such as 90s or 1h, got %q", name,
				value)
		}
		limits[record.Section(name)] = d
	}
	return limits, nil
}

// readWaits reads durations separated by commas.
func readWaits(text string) ([]time.Duration, error) {
	var waits []time.Duration
	for _, item := range strings.Split(text, ",") {
		d, err := time.ParseDuration(strings.TrimSpace(item))
		if err != nil || d < 0 {
			return nil, usagef("--back-off: must be a list of durations such as 5s,1m, got %q", item)
		}
		waits = append(waits, d)
	}
	return waits, nil
}

// shrink finds the largest layout.expert_dp with which a run fits in the room for its ranks, and
// sets it in their environment.
func shrink(config train.Config, room int) (int, []string, error) {
	each := config.Layout.Ranks() / config.Layout.DP
	for dp := min(room/each, config.Layout.DP-1); dp > 0; dp-- {
		dataRanks, cp := dp*config.Layout.EP, config.Layout.CP
		if dataRanks%cp == 0 && config.BatchSize%(dataRanks/cp) == 0 && dp%config.Layout.SumReplicas == 0 {
			return dp * each, []string{fmt.Sprintf("%s=%d", dpVariable, dp)}, nil
		}
	}
	if room < each {
		return 0, nil, fmt.Errorf("one replica of the experts needs %d ranks (layout.ep is %d)", each, config.Layout.EP)
	}
	return 0, nil, fmt.Errorf("batch_size %d cannot be divided among any smaller number of data ranks, or "+
		"layout.sum_replicas (%d) does not divide a smaller layout.expert_dp", config.BatchSize,
		config.Layout.SumReplicas)
}

// dpVariable is the environment variable that replaces layout.expert_dp for a run that has lost
// hosts.
const dpVariable = "MULA_EXPERT_DP"
