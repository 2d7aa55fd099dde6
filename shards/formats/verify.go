package formats

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"mula/shards"
)

// Verify compares files of a shard that r has open with the hashes in its manifest: the files that
// locate documents, and the files of ids unless they have sums, which are checked when the ids are
// read. It skips files that their readers hash: the origins of documents and the sums. The error
// wraps [shards.ErrCorrupt].
func Verify(ctx context.Context, r shards.DocumentReader, prefix string) error {
	m := r.Manifest()
	l := Of(m.Layout)
	s, ok := r.(interface{ Summed() bool })
	summed := ok && s.Summed()
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		path, want := l.FilePath(prefix, name), m.Files[name]
		if path == l.At(prefix, l.Sums) || l.Origins != "" && path == l.At(prefix, l.Origins) ||
			summed && l.HasIDs(name) {
			continue
		}
		if s, ok := r.(megatron); ok && name == "idx" {
			errs = append(errs, s.VerifyIndex(ctx, nil)) // more specific than the hash
			continue
		}
		sum, bytes, err := shards.HashFile(ctx, path, nil)
		if err == nil {
			err = differs(path, want, shards.FileInfo{Bytes: bytes, SHA256: sum})
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// differs returns an error if a file differs from its entry in the shard's manifest.
func differs(path string, want, found shards.FileInfo) error {
	if found == want {
		return nil
	}
	return fmt.Errorf("%s: expected %d bytes with SHA-256 %s, found %d bytes with %s; restore it or write the shard "+
		"again: %w",
		path, want.Bytes, want.SHA256, found.Bytes, found.SHA256, shards.ErrCorrupt)
}
