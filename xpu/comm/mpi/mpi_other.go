//go:build !linux || !(amd64 || arm64)

package mpi

import (
	"context"
	"fmt"
	"runtime"

	"mula/internal/sharedlib"
	"mula/xpu/comm"
)

// Find returns [sharedlib.ErrMissing]: MPI libraries are used on Linux only, on amd64 and arm64.
func Find(Family) (Library, error) { return Library{}, sharedlib.ErrMissing }

// Init returns an error: MPI libraries are used on Linux only, on amd64 and arm64.
func Init(context.Context) (comm.Transport, error) {
	return nil, fmt.Errorf("mpi: not on %s/%s, only on Linux with amd64 or arm64; use the transport tcp", runtime.GOOS,
		runtime.GOARCH)
}
