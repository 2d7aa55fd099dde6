//go:build !linux

package blockcache

import (
	"errors"
	"os"
)

// lockRange fails: locks of ranges that belong to an opening of a file are used on Linux only.
func lockRange(*os.File, int64, int64) (bool, error) { return false, errors.ErrUnsupported }

func unlockRange(*os.File, int64, int64) {}
