//go:build !linux && !darwin

package sharedlib

import (
	"fmt"
	"runtime"
)

const everything uintptr = 0

func refused() error {
	return fmt.Errorf("shared libraries are not opened on %s, only on Linux and macOS", runtime.GOOS)
}

func open(string, bool) (uintptr, error) { return 0, refused() }

func symbol(uintptr, string) (uintptr, error) { return 0, refused() }
