//go:build !linux || !(amd64 || arm64)

package signals

import "syscall"

// Handlers are nothing here.
type Handlers struct{}

// Keep notes nothing.
func Keep() *Handlers { return new(Handlers) }

// Taken lists no signals.
func (h *Handlers) Taken() []syscall.Signal { return nil }

// Restore does nothing.
func (h *Handlers) Restore() {}

// RestoreIfFaults does nothing.
func (h *Handlers) RestoreIfFaults() {}
