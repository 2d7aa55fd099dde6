//go:build !linux || !(amd64 || arm64)

package signals

import "syscall"

// Handlers is empty on this system.
type Handlers struct{}

// Keep returns empty Handlers.
func Keep() *Handlers { return new(Handlers) }

// Taken returns nil.
func (h *Handlers) Taken() []syscall.Signal { return nil }

// Restore does nothing.
func (h *Handlers) Restore() {}

// RestoreIfFaults does nothing.
func (h *Handlers) RestoreIfFaults() {}
