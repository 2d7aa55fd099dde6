//go:build !unix

package batches

import (
	"errors"
	"os"
)

const controlBytes = 0

func filesOf([]byte) ([]*os.File, error) { return nil, errors.ErrUnsupported }
