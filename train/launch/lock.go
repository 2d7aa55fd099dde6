package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/locks"
)

// lockFile is the name of the file in a run directory that the launcher of the run has locked. It
// names the launcher's process.
const lockFile = ".launch.lock"

// lockRun creates the run directory if necessary and locks it for this launcher until the file is
// closed or the process ends.
func lockRun(fsys filesystem.FS, dir string) (*locks.File, error) {
	if err := filesystem.MkdirAll(fsys, dir, 0o755); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, lockFile)
	f, err := locks.HoldOn(fsys, path)
	if errors.Is(err, locks.ErrHeld) {
		return nil, fmt.Errorf("%s already launches %s; wait for it, stop it, or choose another output",
			holder(fsys, path), dir)
	}
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(atomicfile.Self())
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(append(text, '\n'), 0)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// holder describes the process that has a lock.
func holder(fsys filesystem.FS, path string) string {
	if f, err := filesystem.Open(fsys, path); err == nil {
		defer f.Close()
		var first atomicfile.Owner
		if text, err := io.ReadAll(io.LimitReader(f, 4096)); err == nil && json.Unmarshal(text, &first) == nil &&
			first.PID != 0 {
			return first.String()
		}
	}
	return "another process"
}
