//go:build amd64 || arm64

package signals

import (
	"os/signal"
	"slices"
	"syscall"
	"testing"
)

// handler returns the address of the handler of a signal.
func handler(s syscall.Signal) uint64 {
	var a action
	getAction(s, &a)
	return a[0]
}

// What a library takes over comes back, but nothing that Go has changed itself.
func TestRestore(t *testing.T) {
	h := Keep()
	goHandler := handler(syscall.SIGWINCH)
	if taken := h.Taken(); len(taken) > 0 {
		t.Fatalf("taken before anybody took them: %v", taken)
	}
	signal.Ignore(syscall.SIGUSR2)
	defer signal.Reset(syscall.SIGUSR2)
	foreign := h.kept[syscall.SIGUSR1]
	foreign[0] += 16 // is never called
	setAction(syscall.SIGWINCH, &foreign)
	if taken := h.Taken(); !slices.Equal(taken, []syscall.Signal{syscall.SIGWINCH}) {
		t.Errorf("taken: %v", taken)
	}
	h.RestoreIfFaults()
	if handler(syscall.SIGWINCH) != foreign[0] {
		t.Error("SIGWINCH came back although SIGSEGV was not taken")
	}
	h.Restore()
	if got := handler(syscall.SIGWINCH); got != goHandler {
		t.Errorf("SIGWINCH has the handler %#x, want %#x", got, goHandler)
	}
	if got := handler(syscall.SIGUSR2); got != 1 {
		t.Errorf("SIGUSR2, which is ignored, has the handler %#x", got)
	}
}

// SIGSEGV is tested for all signals.
func TestRestoreIfFaults(t *testing.T) {
	h := Keep()
	foreign := h.kept[syscall.SIGSEGV]
	foreign[0] += 16
	setAction(syscall.SIGWINCH, &foreign)
	setAction(syscall.SIGSEGV, &foreign)
	h.RestoreIfFaults()
	if taken := h.Taken(); len(taken) > 0 || handler(syscall.SIGSEGV) != h.kept[syscall.SIGSEGV][0] {
		t.Errorf("still taken: %v", taken)
	}
}
