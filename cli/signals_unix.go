//go:build unix

package cli

import (
	"os"
	"syscall"
)

// stopSignals end a command in an orderly way. An mpiexec and srun pass SIGUSR1, SIGUSR2 or both on
// to all ranks, where they would kill them at a SIGTERM.
var stopSignals = []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2}
