//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package locks

import (
	"errors"

	"mula/internal/filesystem"
)

// Alone does nothing on this system.
func Alone(string) (done func()) { return func() {} }

func hold(filesystem.File) error { return errors.ErrUnsupported }

func unlock(filesystem.File) {}
