package locks

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/atomicfile"
)

// runName is what the name of a [Set]'s file is made of.
const runName = "run"

// A Watch looks at who works in a directory, for one that takes no locks there. It may be used for
// directories that cannot be written to.
type Watch struct{ set *Set }

// NewWatch is a Watch on dir, which need not exist yet.
func NewWatch(dir string, timing Timing) *Watch {
	return &Watch{&Set{dir: dir, timing: timing, seen: make(map[string]sighting)}}
}

// Processes names those that have a [Set] of the directory open, whether they hold a lock at the
// moment or not, each once, in order. That one on another machine gives no sign of life any more is
// known only after calls over some time. The error wraps [fs.ErrNotExist] where there is no such
// directory.
func (w *Watch) Processes() ([]string, error) {
	entries, err := os.ReadDir(w.set.dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "."+runName+".") || !strings.HasSuffix(e.Name(), atomicfile.TempSuffix) {
			continue
		}
		content, stale, err := w.set.look(filepath.Join(w.set.dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // it ended this moment
		}
		if err != nil {
			return nil, err
		}
		if !stale {
			names = append(names, holderOf(content))
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}
