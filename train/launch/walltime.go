package launch

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// askLimit is how long a program of the scheduler may take to answer. The run starts without the
// answer then.
const askLimit = 10 * time.Second

// Deadline returns when the scheduler ends this job, as its environment or squeue says; zero if
// there is no limit. In order: SLURM_JOB_END_TIME, in seconds since 1970; squeue, for versions of
// Slurm without this variable (before 23.02); PBS_WALLTIME of Torque, in seconds from now, as if
// the job had just begun. The warning says why the end of a job is not known; "" for none.
func Deadline(ctx context.Context, getenv func(string) string, now time.Time) (at time.Time, warning string,
	err error) {
	seconds := func(name string, limit int64) (int64, error) {
		n, err := strconv.ParseInt(getenv(name), 10, 64)
		if err != nil || n < 0 {
			return 0, fmt.Errorf("%s is %q, which is not a number of seconds; say when the run must be stopped with "+
				"--walltime", name, getenv(name))
		}
		return min(n, limit), nil
	}
	job := getenv("SLURM_JOB_ID")
	switch {
	case getenv("SLURM_JOB_END_TIME") != "":
		n, err := seconds("SLURM_JOB_END_TIME", 1<<40)
		if err != nil {
			return time.Time{}, "", err
		}
		return time.Unix(n, 0), "", nil
	case job != "":
		left, err := ask(ctx, "squeue", "--noheader", "--jobs="+job, "--format=%L")
		if err == nil && left == "UNLIMITED" {
			return time.Time{}, "", nil
		}
		var d time.Duration
		if err == nil {
			d, err = slurmDuration(left)
		}
		if err != nil {
			return time.Time{}, fmt.Sprintf("Slurm does not say when job %s ends (%v); set --walltime, so that the "+
				"run is stopped before", job, err), nil
		}
		return now.Add(d), "", nil
	case getenv("PBS_WALLTIME") != "":
		n, err := seconds("PBS_WALLTIME", 1<<32)
		if err != nil {
			return time.Time{}, "", err
		}
		return now.Add(time.Duration(n) * time.Second), "", nil
	case getenv("PBS_JOBID") != "":
		return time.Time{}, "PBS does not say when the job ends (only Torque sets PBS_WALLTIME); set --walltime, so " +
			"that the run is stopped before", nil
	}
	return time.Time{}, "", nil
}

// slurmDuration reads a time as Slurm writes it: days-hours:minutes:seconds, of which the first two
// may be missing.
func slurmDuration(text string) (time.Duration, error) {
	invalid := fmt.Errorf("squeue says %q", text)
	days, clock, hasDays := strings.Cut(text, "-")
	if !hasDays {
		days, clock = "0", text
	}
	parts := append([]string{days}, strings.Split(clock, ":")...)
	if len(parts) == 3 {
		parts = []string{days, "0", parts[1], parts[2]}
	}
	if len(parts) != 4 {
		return 0, invalid
	}
	var total time.Duration
	for i, unit := range []time.Duration{24 * time.Hour, time.Hour, time.Minute, time.Second} {
		n, err := strconv.ParseUint(parts[i], 10, 16)
		if err != nil {
			return 0, invalid
		}
		total += time.Duration(n) * unit
	}
	return total, nil
}

// ask returns what a program of the scheduler prints, without white space around it.
func ask(ctx context.Context, program string, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, askLimit, fmt.Errorf("no answer within %s", askLimit))
	defer cancel()
	cmd := exec.CommandContext(ctx, program, arguments...)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return "", fmt.Errorf("%s: %w", program, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// SlurmMPI returns the type of MPI with which an srun, a program and arguments, starts a step: that
// of its option --mpi, else SLURM_MPI_TYPE, else Slurm's default. It is "none" if nothing says it.
func SlurmMPI(ctx context.Context, srun []string, getenv func(string) string) string {
	if mpi := option(srun, "--mpi"); mpi != "" {
		return mpi
	}
	if mpi := getenv("SLURM_MPI_TYPE"); mpi != "" {
		return mpi
	}
	if config, err := ask(ctx, "scontrol", "show", "config"); err == nil {
		for line := range strings.Lines(config) {
			if name, value, _ := strings.Cut(line, "="); strings.TrimSpace(name) == "MpiDefault" &&
				strings.TrimSpace(value) != "" {
				return strings.TrimSpace(value)
			}
		}
	}
	return "none"
}

// option returns the value of an option in arguments, "" if it is not there.
func option(arguments []string, name string) string {
	for i, argument := range arguments {
		if value, ok := strings.CutPrefix(argument, name+"="); ok {
			return value
		}
		if argument == name && i+1 < len(arguments) {
			return arguments[i+1]
		}
	}
	return ""
}
