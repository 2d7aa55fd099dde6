//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package locks

import (
	"errors"
	"os"
)

// Alone does nothing on this system.
func Alone(string) (done func()) { return func() {} }

func hold(*os.File) error { return errors.ErrUnsupported }

func unlock(*os.File) {}
