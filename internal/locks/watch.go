package locks

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/atomicfile"
)

// runName is the base of the name of a [Set]'s file.
const runName = "run"

// A Watch lists the processes that work in a directory. It acquires no locks, and the directory may
// be read-only.
type Watch struct{ set *Set }

// NewWatch returns a Watch on dir, which need not exist yet.
func NewWatch(dir string, timing Timing) *Watch {
	return &Watch{newSet(context.Background(), nil, dir, timing, text{})}
}

// Processes returns the sorted names of all processes that have a [Set] of the directory open, even
// if they hold no lock at the moment. A process on another machine whose heartbeats stop is dropped
// only after calls over [Timing].Stale. The error wraps [fs.ErrNotExist] if the directory does not
// exist.
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
			continue // the process ended meanwhile
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
