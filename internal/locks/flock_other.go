//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package locks

import "errors"

// Alone does nothing on this system.
func Alone(string) (done func()) { return func() {} }

func hold(descriptor) error { return errors.ErrUnsupported }

func unlock(descriptor) {}
