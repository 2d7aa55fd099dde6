//go:build !unix

package train

import (
	"errors"
	"os"
)

func tryLock(*os.File) error { return errors.ErrUnsupported }
