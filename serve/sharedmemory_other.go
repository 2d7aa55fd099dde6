//go:build !linux

package serve

import "errors"

// An area is memory of slots that another process can map. It exists only on Linux, where the other
// process cannot shrink it.
type area struct{ size int }

// TrySharedMemory returns [errors.ErrUnsupported]: batches are sent over the socket instead.
func TrySharedMemory() error { return errors.ErrUnsupported }

func newArea(_, _ int) (*area, error) { return nil, errors.ErrUnsupported }

func (a *area) slot(int) []byte { return nil }

func (a *area) back(_, _ int) error { return errors.ErrUnsupported }

func (a *area) empty() {}

func (a *area) close() {}

func (a *area) rights() []byte { return nil }
