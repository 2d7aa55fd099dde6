//go:build linux || darwin || freebsd

package doctor

import "golang.org/x/sys/unix"

func usage(path string) (Usage, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		return Usage{}, err
	}
	var info unix.Stat_t
	if err := unix.Stat(path, &info); err != nil {
		return Usage{}, err
	}
	return Usage{int64(s.Bavail) * int64(s.Bsize), int64(s.Files), int64(s.Ffree), uint64(info.Dev)}, nil
}
