package launch

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// askLimit is the time limit for a program of the scheduler. After it, the run starts without the
// answer.
const askLimit = 10 * time.Second

// Deadline returns the time at which the scheduler ends this job, zero without a limit. It uses, in
// this order: SLURM_JOB_END_TIME, in seconds since 1970; squeue, for versions of Slurm without this
// variable (before 23.02); qstat of PBS; PBS_WALLTIME of Torque, in seconds from now, as if the job
// had just started. warning is the reason if the end of a job is unknown, else "".
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
			if d, err = clockDuration(left); err != nil {
				err = fmt.Errorf("squeue printed %w", err)
			}
		}
		if err != nil {
			return time.Time{}, fmt.Sprintf("the end of Slurm job %s is unknown (%v); set --walltime to stop the run "+
				"before the job ends", job, err), nil
		}
		return now.Add(d), "", nil
	case getenv("PBS_JOBID") != "":
		said, err := ask(ctx, "qstat", "-f", getenv("PBS_JOBID"))
		if err == nil {
			at, err = pbsEnd(said, now)
		}
		if err == nil {
			return at, "", nil
		}
		if getenv("PBS_WALLTIME") == "" {
			return time.Time{}, fmt.Sprintf("the end of PBS job %s is unknown (%v); set --walltime to stop the run "+
				"before the job ends", getenv("PBS_JOBID"), err), nil
		}
	}
	if getenv("PBS_WALLTIME") != "" {
		n, err := seconds("PBS_WALLTIME", 1<<32)
		if err != nil {
			return time.Time{}, "", err
		}
		return now.Add(time.Duration(n) * time.Second), "", nil
	}
	return time.Time{}, "", nil
}

// clockDuration reads a duration of a scheduler: days-hours:minutes:seconds. Days and hours may be
// missing.
func clockDuration(text string) (time.Duration, error) {
	invalid := fmt.Errorf("%q, not a duration such as 1-02:30:00", text)
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

// pbsEnd returns the end of a job from the output of qstat -f: its start and its time limit, or
// Torque's remaining seconds. It is zero for a job without a limit.
func pbsEnd(said string, now time.Time) (time.Time, error) {
	fields := map[string]string{}
	for line := range strings.Lines(said) {
		if name, value, ok := strings.Cut(line, " = "); ok {
			fields[strings.TrimSpace(name)] = strings.TrimSpace(value)
		}
	}
	if left, ok := fields["Walltime.Remaining"]; ok {
		n, err := strconv.ParseUint(left, 10, 32)
		if err != nil {
			return time.Time{}, fmt.Errorf("qstat printed Walltime.Remaining = %q", left)
		}
		return now.Add(time.Duration(n) * time.Second), nil
	}
	limit, ok := fields["Resource_List.walltime"]
	if !ok && fields["job_state"] != "" {
		return time.Time{}, nil
	}
	d, err := clockDuration(limit)
	if err != nil {
		return time.Time{}, fmt.Errorf("qstat printed as Resource_List.walltime %w", err)
	}
	start, err := time.ParseInLocation(time.ANSIC, fields["stime"], time.Local)
	if err != nil {
		return time.Time{}, fmt.Errorf("qstat printed stime = %q", fields["stime"])
	}
	return start.Add(d), nil
}

// ask returns what a program of the scheduler prints, without white space around it.
func ask(ctx context.Context, words ...string) (string, error) {
	return answer(ctx, askLimit, "", words)
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
