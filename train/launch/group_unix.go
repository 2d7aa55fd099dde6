//go:build unix

package launch

import (
	"os/exec"
	"syscall"
)

// leadGroup makes a command the leader of a process group of its own, so that the terminal's Ctrl-C
// reaches the launcher alone, and a signal all that the command starts.
func leadGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	endWithParent(cmd.SysProcAttr)
}

// signalGroup sends a signal to the group that a process leads. That it has left already is no
// error to anybody.
func signalGroup(pid int, s syscall.Signal) { _ = syscall.Kill(-pid, s) }

// signalProcess sends a signal to a process alone.
func signalProcess(pid int, s syscall.Signal) { _ = syscall.Kill(pid, s) }

// stopSignal is what asks ranks under an mpiexec to stop: mpiexec passes it on to them, where a
// SIGTERM would make it end them. MPICH does not pass on SIGUSR2. Open MPI passes on both, but
// hwloc, which it asks about the machine, may load an OpenCL, whose LLVM takes SIGUSR1 for itself.
func (k Kind) stopSignal() syscall.Signal {
	if k == OpenMPI {
		return syscall.SIGUSR2
	}
	return syscall.SIGUSR1
}
