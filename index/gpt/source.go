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

// A Source tells token files apart whose datasets have one name, by what a look at the .idx file
// shows. Where the file lies is not in it: the nodes of a cluster may see it in different places.
type Source struct {
	FileSize int64  `json:"file_size"` // of the .idx file in bytes
	FileTime string `json:"file_time"` // when it was last changed
	Elements int64  `json:"elements"`  // tokens; an .idx file of other lengths may have the same size
}

// SourceOf is the source that an open .idx file is.
func SourceOf(x *shards.Index) Source {
	return Source{x.Size(), x.ModTime().UTC().Format(time.RFC3339Nano), x.Elements()}
}

// Locate is the path on this machine of a token file's prefix. A relative one is looked for in
// root, "" being the working directory.
func Locate(root, prefix string) string {
	if filepath.IsAbs(prefix) || root == "" {
		return prefix
	}
	return filepath.Join(root, prefix)
}

// OpenTokens opens the .idx file of a prefix; the error says what else may be wrong where there is
// none. A .bin file beside it must have the size that follows from it, so that a damaged or wrong
// .idx does not pass for an index of terabytes; if there is none, the .idx is taken as it is.
func OpenTokens(root, prefix string) (*shards.Index, error) {
	for _, ending := range []string{".idx", ".bin"} {
		if strings.HasSuffix(prefix, ending) {
			return nil, fmt.Errorf("%s: give the prefix without %s: the frameworks add the endings, and the prefix "+
				"is in the hash of the names", prefix, ending)
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
		return nil, fmt.Errorf("%s: %w: is the prefix right?", prefix, err)
	case root == "":
		root = "the working directory"
	}
	return nil, fmt.Errorf("%s: %w: the prefix is relative, and was looked for in %s (--root)", prefix, err, root)
}
