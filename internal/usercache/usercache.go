// Package usercache names the folder in which mula keeps files that it can compute again.
package usercache

import (
	"os"
	"path/filepath"
)

// Folder returns the path of mula's folder, or of a part of it, in the user's folder for caches:
// XDG_CACHE_HOME, or .cache in HOME. It creates nothing.
func Folder(parts ...string) (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(append([]string{base, "mula"}, parts...)...), nil
}
