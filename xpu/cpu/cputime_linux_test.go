package cpu

import "golang.org/x/sys/unix"

// cpuSeconds is the processor time that this process has used, on all its threads. (getrusage gives
// it in ticks on some kernels.)
func cpuSeconds() float64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return float64(t.Sec) + float64(t.Nsec)/1e9
}
