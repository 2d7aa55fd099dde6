//go:build unix

package cli

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
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
			text := make([]byte, 64<<10)
			n := runtime.Stack(text, true)
			for n == len(text) && n < 64<<20 { // there may be more
				text = make([]byte, 2*n)
				n = runtime.Stack(text, true)
			}
			fmt.Fprintf(w, "%s%s%s", launch.StacksBegin, text[:n], launch.StacksEnd)
		}
	}()
	return func() {
		signal.Stop(c)
		close(c)
	}
}
