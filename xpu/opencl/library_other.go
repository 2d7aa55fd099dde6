//go:build !linux || !(amd64 || arm64)

package opencl

import (
	"fmt"
	"runtime"
)

func openFile(string) (uintptr, error) {
	return 0, fmt.Errorf("libraries are not opened on %s/%s, only on Linux with amd64 or arm64", runtime.GOOS, runtime.GOARCH)
}

func symbol(uintptr, string) (uintptr, error) { panic("no library was opened") }
