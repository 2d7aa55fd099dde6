//go:build unix

package cli

import (
	"io"
	"os"
	"os/signal"
	"syscall"

	"mula/train/launch"
)

// stopSignals end a command in an orderly way. mpiexec and srun forward SIGUSR1, SIGUSR2 or both to
// all ranks, but kill the ranks after a SIGTERM.
var stopSignals = []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2}

// writeStacks writes the stacks of all goroutines to w at each SIGQUIT, until stop is called.
// Without it, a SIGQUIT writes them and ends the program.
func writeStacks(w io.Writer) (stop func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGQUIT)
	go func() {
		for range c {
			_ = launch.WriteStacks(w)
		}
	}()
	return func() {
		signal.Stop(c)
		close(c)
	}
}
