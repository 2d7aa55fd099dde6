package blend

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"mula/internal/objects"
)

// sizeOf returns the size of a file or an object.
func sizeOf(ctx context.Context, path string) (int64, error) {
	if objects.IsURL(path) {
		info, err := objects.Stat(ctx, path)
		return info.Size, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// absolutePath does what filepath.Abs does, with the real path of the working directory. $PWD may
// contain symbolic links, after which ".." would lead to another directory. A URL is unchanged.
func absolutePath(path string) (string, error) {
	if objects.IsURL(path) {
		return path, nil
	}
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
	if objects.IsURL(dir) {
		return dir
	}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		return real
	}
	return dir
}

// relativePath returns the path from a plan's directory to a shard, both absolute paths or URLs.
// The result is relative to the real directory, as [Plan.ShardPath] expects. The path to a shard in
// an object store is a URL, unless the plan's directory contains the shard.
func relativePath(dir, shard string) string {
	if objects.IsURL(dir) || objects.IsURL(shard) {
		if rest, ok := strings.CutPrefix(shard, strings.TrimSuffix(dir, "/")+"/"); ok && objects.IsURL(dir) {
			return rest
		}
		return shard
	}
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

// of returns the real path of a shard's .bin file, if it exists. A URL is its own real path.
func (r realPaths) of(prefix string) string {
	if objects.IsURL(prefix) {
		return prefix + ".bin"
	}
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
