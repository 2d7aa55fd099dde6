package launch

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// askLimit is the time limit for a program of the scheduler. After it, the run starts without the
// answer.
const askLimit = 10 * time.Second

// Deadline returns the time at which the scheduler ends this job, zero without a limit. It uses, in
// this order: SLURM_JOB_END_TIME, in seconds since 1970; squeue, for versions of Slurm without this
// variable (before 23.02); PBS_WALLTIME of Torque, in seconds from now, as if the job had just
// started. warning is the reason if the end of a job is unknown, else "".
func Deadline(ctx context.Context, getenv func(string) string, now time.Time) (at time.Time, warning string,
	err error) {
	seconds := func(name string, limit int64) (int64, error) {
		n, err := strconv.ParseInt(getenv(name), 10, 64)
		if err != nil || n < 0 {
			return 0, fmt.Errorf("%s is %q, which is not a number of seconds; set the time limit of the run with "+
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
			return time.Time{}, fmt.Sprintf("the end of Slurm job %s is unknown (%v); set --walltime to stop the run "+
				"before the job ends", job, err), nil
		}
		return now.Add(d), "", nil
	case getenv("PBS_WALLTIME") != "":
		n, err := seconds("PBS_WALLTIME", 1<<32)
		if err != nil {
			return time.Time{}, "", err
		}
		return now.Add(time.Duration(n) * time.Second), "", nil
	case getenv("PBS_JOBID") != "":
		return time.Time{},
			"the end of the PBS job is unknown (only Torque sets PBS_WALLTIME); set --walltime to stop " +
				"the run before the job ends", nil
	}
	return time.Time{}, "", nil
}

// slurmDuration reads a duration of Slurm: days-hours:minutes:seconds. Days and hours may be
// missing.
func slurmDuration(text string) (time.Duration, error) {
	invalid := fmt.Errorf("squeue printed %q", text)
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

// SlurmMPI returns the MPI type with which srun, a program with its arguments, starts a step: the
// value of its option --mpi, else SLURM_MPI_TYPE, else Slurm's default. It returns "none" if all of
// these are missing.
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

// option returns the value of an option in arguments, or "" if it is missing.
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
