//go:build !unix

package cli

import (
	"io"
	"os"
	"syscall"
)

var stopSignals = []os.Signal{os.Interrupt, syscall.SIGTERM}

func writeStacks(io.Writer) (stop func()) { return func() {} }
