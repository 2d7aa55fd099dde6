//go:build unix

package launch

import (
	"os/exec"
	"syscall"
)

// leadGroup makes a command the leader of its own process group. The terminal's Ctrl-C then reaches
// only the launcher, and a signal to the group reaches all processes that the command starts.
func leadGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	endWithParent(cmd.SysProcAttr)
}

// signalGroup sends a signal to the group that a process leads. The group may be gone already.
func signalGroup(pid int, s syscall.Signal) { _ = syscall.Kill(-pid, s) }

// signalProcess sends a signal to a process alone.
func signalProcess(pid int, s syscall.Signal) { _ = syscall.Kill(pid, s) }

// stopSignal is the signal that asks ranks under an mpiexec to stop. mpiexec forwards it to the
// ranks; a SIGTERM would make mpiexec end them. MPICH does not forward SIGUSR2. Open MPI forwards
// both, but its hwloc may load an OpenCL whose LLVM handles SIGUSR1.
func (k Kind) stopSignal() syscall.Signal {
	if k == OpenMPI {
		return syscall.SIGUSR2
	}
	return syscall.SIGUSR1
}
