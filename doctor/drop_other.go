//go:build !linux

package doctor

import "os"

func dropCache(*os.File) {}
