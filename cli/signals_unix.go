//go:build unix

package cli

import (
	"os"
	"syscall"
)

// stopSignals end a command in an orderly way. mpiexec and srun forward SIGUSR1, SIGUSR2 or both to
// all ranks, but kill the ranks after a SIGTERM.
var stopSignals = []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2}
