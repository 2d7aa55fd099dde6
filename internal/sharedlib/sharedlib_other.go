//go:build static || (!linux && !darwin)

package sharedlib

import (
	"fmt"
	"runtime"
)

const everything uintptr = 0

func refused() error {
	return fmt.Errorf("this build for %s opens no shared libraries; "+
		"use a build for Linux or macOS without the tag static",
		runtime.GOOS)
}

func open(string, bool) (uintptr, error) { return 0, refused() }

func symbol(uintptr, string) (uintptr, error) { return 0, refused() }
