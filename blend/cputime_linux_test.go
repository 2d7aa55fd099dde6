package blend

import (
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// processTime reports the processor time of the whole process for each iteration. The function that
// it gives ends the measurement.
func processTime(b *testing.B) func() {
	spent := func() int64 {
		var u syscall.Rusage
		if err := syscall.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return u.Utime.Nano() + u.Stime.Nano()
	}
	before := spent()
	return func() { b.ReportMetric(float64(spent()-before)/float64(b.N)/1e6, "cpu-ms/op") }
}

// cpuTime reports the processor time of a benchmark's thread for each of n things, which other
// programs on the machine do not lengthen. The function that it gives ends the measurement.
func cpuTime(b *testing.B, unit string) func(n int64) {
	runtime.LockOSThread()
	spent := func() int64 {
		var u syscall.Rusage
		if err := syscall.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
			b.Fatal(err)
		}
		return u.Utime.Nano() + u.Stime.Nano()
	}
	before := spent()
	b.ResetTimer()
	return func(n int64) {
		b.ReportMetric(float64(spent()-before)/float64(n), "cpu-ns/"+unit)
		runtime.UnlockOSThread()
	}
}
