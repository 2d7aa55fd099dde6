package gpt

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"mula/internal/localpath"
	"mula/internal/objects"
	"mula/shards"
)

// A Source distinguishes token files whose datasets have the same name, by properties of the .idx
// file. The path is not included: nodes of a cluster may mount the file at different paths.
type Source struct {
	FileSize int64  `json:"file_size"` // of the .idx file in bytes
	FileTime string `json:"file_time"` // its modification time
	// number of tokens; an .idx file with other lengths may have the same size
	Elements int64 `json:"elements"`
}

// SourceOf returns the Source of an open .idx file.
func SourceOf(x *shards.Index) Source {
	return Source{x.Size(), x.ModTime().UTC().Format(time.RFC3339Nano), x.Elements()}
}

// Locate returns the path of a token file's prefix on this machine, or its URL. Relative prefixes
// are relative to root, which may be a URL; "" is the working directory.
func Locate(root, prefix string) string {
	if filepath.IsAbs(prefix) || objects.IsURL(prefix) || root == "" {
		return prefix
	}
	return objects.Join(root, filepath.ToSlash(prefix))
}

// fetches is how many .idx files are fetched at a time.
const fetches = 16

// FetchTokens opens the .idx files of the prefixes that are in object stores, and adds them to
// files by prefix. [OpenTokens] opens the other files.
func FetchTokens(ctx context.Context, root string, prefixes []string, files map[string]*shards.Index) error {
	var remote []string
	for _, prefix := range slices.Compact(slices.Sorted(slices.Values(prefixes))) {
		if objects.IsURL(Locate(root, prefix)) {
			remote = append(remote, prefix)
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(fetches)
	var mu sync.Mutex
	for _, prefix := range remote {
		g.Go(func() error {
			file, err := fetch(ctx, root, prefix)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			files[prefix] = file
			return nil
		})
	}
	return g.Wait()
}

// fetch opens the .idx file of a prefix in an object store. If a .bin file exists, its size must
// match.
func fetch(ctx context.Context, root, prefix string) (*shards.Index, error) {
	if err := noExtension(prefix); err != nil {
		return nil, err
	}
	url := Locate(root, prefix)
	file, err := shards.FetchIndex(ctx, url)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w; check the prefix, and --root if the prefix is relative", err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", prefix, err)
	}
	info, err := objects.Stat(ctx, url+".bin")
	if err == nil {
		err = fits(file, url+".bin", info.Size)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		file.Close()
		return nil, err
	}
	return file, nil
}

// OpenPrefix opens the .idx file of a prefix, which may be in an object store.
func OpenPrefix(ctx context.Context, root, prefix string) (*shards.Index, error) {
	if objects.IsURL(Locate(root, prefix)) {
		return fetch(ctx, root, prefix)
	}
	return OpenTokens(root, prefix)
}

// fits returns an error if a .bin file has another size than its .idx says.
func fits(file *shards.Index, bin string, size int64) error {
	if want := file.Elements() * int64(file.DType().Size()); size != want {
		return fmt.Errorf("%s: expected %d bytes by %s, found %d: %w", bin, want, file.Path(), size, shards.ErrCorrupt)
	}
	return nil
}

func noExtension(prefix string) error {
	for _, ending := range []string{".idx", ".bin"} {
		if strings.HasSuffix(prefix, ending) {
			return fmt.Errorf("%s: remove %s from the prefix; the frameworks append the extension, and the "+
				"prefix is part of the hash in the file names", prefix, ending)
		}
	}
	return nil
}

// OpenTokens opens the .idx file of a prefix. If the file does not exist, the error suggests the
// cause. If a .bin file exists, its size must match the .idx, so that a damaged or wrong .idx
// cannot cause an index of terabytes. If it does not exist, the .idx is not checked.
func OpenTokens(root, prefix string) (*shards.Index, error) {
	if err := noExtension(prefix); err != nil {
		return nil, err
	}
	if err := localpath.Check(Locate(root, prefix)); err != nil {
		return nil, err
	}
	file, err := shards.OpenIndex(Locate(root, prefix))
	switch {
	case err == nil:
		bin := Locate(root, prefix) + ".bin"
		if info, err := os.Stat(bin); err == nil {
			if err := fits(file, bin, info.Size()); err != nil {
				file.Close()
				return nil, err
			}
		}
		return file, nil
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s: %w", prefix, err)
	case filepath.IsAbs(prefix):
		return nil, fmt.Errorf("%s: %w; check the prefix", prefix, err)
	case root == "":
		root = "the working directory"
	}
	return nil, fmt.Errorf("%s: %w; the prefix is relative to %s (--root)", prefix, err, root)
}
