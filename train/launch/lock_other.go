//go:build !unix

package launch

import (
	"errors"
	"os"
)

func tryLock(*os.File) error { return errors.ErrUnsupported }
