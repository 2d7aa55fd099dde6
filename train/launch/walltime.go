package launch

import (
	"fmt"
	"strconv"
	"time"
)

// Deadline is when the scheduler takes the machine away, as far as its environment says: SLURM_JOB_END_TIME is a moment, in seconds since 1970;
// PBS_WALLTIME is a number of seconds, which are counted from now, as if the job had just begun. It is zero if neither is set.
func Deadline(getenv func(string) string, now time.Time) (time.Time, error) {
	for _, name := range []string{"SLURM_JOB_END_TIME", "PBS_WALLTIME"} {
		text := getenv(name)
		if text == "" {
			continue
		}
		seconds, err := strconv.ParseInt(text, 10, 64)
		if err != nil || seconds < 0 || seconds > 1<<40 {
			return time.Time{}, fmt.Errorf("%s is %q, which is not a number of seconds; say when the run must be stopped with --walltime", name, text)
		}
		if name == "PBS_WALLTIME" {
			return now.Add(time.Duration(min(seconds, 1<<32)) * time.Second), nil
		}
		return time.Unix(seconds, 0), nil
	}
	return time.Time{}, nil
}
