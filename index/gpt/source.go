package gpt

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"mula/internal/localpath"
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

// Locate returns the path of a token file's prefix on this machine. Relative prefixes are relative
// to root; "" is the working directory.
func Locate(root, prefix string) string {
	if filepath.IsAbs(prefix) || root == "" {
		return prefix
	}
	return filepath.Join(root, prefix)
}

// OpenTokens opens the .idx file of a prefix. If the file does not exist, the error suggests the
// cause. If a .bin file exists, its size must match the .idx, so that a damaged or wrong .idx
// cannot cause an index of terabytes. If it does not exist, the .idx is not checked.
func OpenTokens(root, prefix string) (*shards.Index, error) {
	for _, ending := range []string{".idx", ".bin"} {
		if strings.HasSuffix(prefix, ending) {
			return nil, fmt.Errorf("%s: remove %s from the prefix; the frameworks append the extension, and the "+
				"prefix is part of the hash in the file names", prefix, ending)
		}
	}
	if err := localpath.Check(prefix); err != nil {
		return nil, err
	}
	file, err := shards.OpenIndex(Locate(root, prefix))
	switch {
	case err == nil:
		bin := Locate(root, prefix) + ".bin"
		info, err := os.Stat(bin)
		if want := file.Elements() * int64(file.DType().Size()); err == nil && info.Size() != want {
			file.Close()
			return nil, fmt.Errorf("%s: expected %d bytes by %s, found %d: %w", bin, want, file.Path(), info.Size(),
				shards.ErrCorrupt)
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
