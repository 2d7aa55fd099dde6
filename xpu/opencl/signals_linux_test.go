//go:build amd64 || arm64

package opencl

import (
	"os"
	"os/signal"
	"syscall"
	"testing"

	"mula/internal/testwait"
)

// Go has its signal handlers back after every call of a driver.
func TestSignals(t *testing.T) {
	newBench(t, someDevice(t))
	if taken := handlers().Taken(); len(taken) > 0 {
		t.Errorf("taken: %v", taken)
	}
	for _, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGINT, syscall.SIGTERM} {
		heard := make(chan os.Signal, 1)
		signal.Notify(heard, s)
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Fatal(err)
		}
		select {
		case <-heard:
		case <-testwait.Context(t).Done():
			t.Errorf("%v is not heard", s)
		}
		signal.Stop(heard)
	}
}
