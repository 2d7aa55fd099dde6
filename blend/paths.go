package blend

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// absolutePath does what filepath.Abs does, with the real path of the working directory. $PWD may
// contain symbolic links, after which ".." would lead to another directory.
func absolutePath(path string) (string, error) {
	if filepath.IsAbs(path) {
		return filepath.Clean(path), nil
	}
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	if wd, err = filepath.EvalSymlinks(wd); err != nil {
		return "", err
	}
	return filepath.Join(wd, path), nil
}

// realDir resolves symbolic links in a directory, so that ".." after it leads to the real parent.
func realDir(dir string) string {
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		return real
	}
	return dir
}

// relativePath returns the path from a plan's directory to a shard, both absolute. The result is
// relative to the real directory, as [Plan.ShardPath] expects.
func relativePath(dir, shard string) string {
	way, err := filepath.Rel(dir, shard)
	if err != nil || !filepath.IsLocal(way) {
		way, err = filepath.Rel(realDir(dir), shard)
	}
	if err != nil {
		return shard // on another volume
	}
	return way
}

func escapePattern(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// realPaths caches the resolved path of each directory.
type realPaths map[string]string

// of returns the real path of a shard's .bin file, if it exists.
func (r realPaths) of(prefix string) string {
	dir, name := filepath.Split(prefix + ".bin")
	real, ok := r[dir]
	if !ok {
		real = realDir(dir)
		r[dir] = real
	}
	path := filepath.Join(real, name)
	if info, err := os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink == 0 {
		return path
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		return target
	}
	return path
}
