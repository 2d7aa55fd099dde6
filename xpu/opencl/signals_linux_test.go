//go:build amd64 || arm64

package opencl

import (
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"
)

// Signals are Go's after everything that a driver does, whatever it takes over on the way.
func TestSignals(t *testing.T) {
	newBench(t, someDevice(t))
	for s := 1; s <= signals; s++ {
		var now action
		if getAction(syscall.Signal(s), &now); now[0] > 1 && now[0] != kept[syscall.SIGSEGV][0] {
			t.Errorf("signal %d has the handler %#x", s, now[0])
		}
	}
	for _, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGINT, syscall.SIGTERM} {
		heard := make(chan os.Signal, 1)
		signal.Notify(heard, s)
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Fatal(err)
		}
		select {
		case <-heard:
		case <-time.After(time.Minute):
			t.Errorf("%v is not heard", s)
		}
		signal.Stop(heard)
	}
}

// What a library takes over comes back, but nothing that Go has changed itself.
func TestRestoreSignals(t *testing.T) {
	keepSignals()
	signal.Ignore(syscall.SIGUSR2)
	defer signal.Reset(syscall.SIGUSR2)
	foreign := kept[syscall.SIGUSR1]
	foreign[0] += 16 // is never called
	setAction(syscall.SIGWINCH, &foreign)
	restoreSignals()
	var winch, usr2 action
	getAction(syscall.SIGWINCH, &winch)
	getAction(syscall.SIGUSR2, &usr2)
	if winch[0] != kept[syscall.SIGWINCH][0] {
		t.Errorf("SIGWINCH has the handler %#x, want %#x", winch[0], kept[syscall.SIGWINCH][0])
	}
	if usr2[0] != 1 {
		t.Errorf("SIGUSR2, which is ignored, has the handler %#x", usr2[0])
	}
}
