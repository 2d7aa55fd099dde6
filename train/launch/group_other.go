//go:build !unix

package launch

import (
	"os"
	"os/exec"
	"syscall"
)

func leadGroup(*exec.Cmd) {}

func signalGroup(pid int, s syscall.Signal) { signalProcess(pid, s) }

func signalProcess(pid int, s syscall.Signal) {
	if s == syscall.SIGQUIT { // which must not end the process
		return
	}
	if p, err := os.FindProcess(pid); err == nil {
		_ = p.Kill()
	}
}

func (k Kind) stopSignal() syscall.Signal { return syscall.SIGTERM }

func descendants(int) []int { return nil }
