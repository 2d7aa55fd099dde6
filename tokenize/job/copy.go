package job

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"mula/internal/objects"
	"mula/shards/formats"
)

// incompleteSuffix is the ending of an object that exists while a job copies its shards.
const incompleteSuffix = ".incomplete"

// maxManifest is the maximum size of a shard's manifest.
const maxManifest = 64 << 20

// startCopies checks that the store can be written before documents are read.
func (o *Options) startCopies(ctx context.Context) error {
	if o.Copy == "" {
		return nil
	}
	text := "mula tokenize copies shards to this prefix. At the end of the job this object is removed.\n"
	if err := objects.WriteFile(ctx, o.Copy+incompleteSuffix, []byte(text)); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// finishCopies copies the shards of a complete job that the store does not have.
func (o *Options) finishCopies(ctx context.Context, list []ShardFile) error {
	if o.Copy == "" {
		return nil
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for _, s := range list {
		group.Go(func() error { return o.copyShard(groupCtx, s) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := objects.Remove(ctx, o.Copy+incompleteSuffix); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// copyShard copies the files of a shard to the store, the manifest last, unless the store has the
// same shard. An earlier manifest is removed first, so that a shard with a manifest is complete.
func (o *Options) copyShard(ctx context.Context, s ShardFile) error {
	if o.Copy == "" {
		return nil
	}
	l := formats.Of(o.Layout)
	manifest, marker := l.At(s.Prefix, l.Manifest), l.At(s.Prefix, l.Marker)
	text, err := os.ReadFile(manifest)
	if err != nil {
		return err
	}
	var files []string
	add := func(path string) {
		if _, err := os.Stat(path); err == nil && path != manifest && path != marker && !slices.Contains(files, path) {
			files = append(files, path)
		}
	}
	for name := range s.Files {
		add(l.FilePath(s.Prefix, name))
	}
	for _, ending := range l.Endings() {
		if ending != "" {
			add(l.At(s.Prefix, ending))
		}
	}
	files = append(files, marker)
	to := func(path string) string {
		return o.Copy + strings.TrimPrefix(filepath.ToSlash(path), filepath.ToSlash(o.Output))
	}
	before, _, err := objects.ReadFile(ctx, to(manifest), maxManifest)
	switch {
	case err == nil && bytes.Equal(before, text) && sameSizes(ctx, files, to):
		return nil
	case err == nil:
		if err := objects.Remove(ctx, to(manifest)); err != nil {
			return fmt.Errorf("output: %w", err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("output: %w", err)
	}
	for _, path := range files {
		if err := upload(ctx, path, to(path)); err != nil {
			return fmt.Errorf("copying %s: %w", path, err)
		}
	}
	if err := objects.WriteFile(ctx, to(manifest), text); err != nil {
		return fmt.Errorf("copying %s: %w", manifest, err)
	}
	return nil
}

// sameSizes reports whether the store has objects with the sizes of the files.
func sameSizes(ctx context.Context, files []string, to func(string) string) bool {
	for _, path := range files {
		here, err := os.Stat(path)
		there, err2 := objects.Stat(ctx, to(path))
		if err != nil || err2 != nil || here.Size() != there.Size {
			return false
		}
	}
	return true
}

func upload(ctx context.Context, path, address string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return objects.Upload(ctx, address, f)
}
