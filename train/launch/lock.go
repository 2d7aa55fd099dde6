package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"mula/internal/atomicfile"
)

// lockFile is the name of the file in a run directory that the launcher of the run has locked. It says who that is.
const lockFile = ".launch.lock"

var errLocked = errors.New("locked by another process")

// lockRun makes the run directory if need be and locks it for this launcher, until the file is closed or the process ends.
func lockRun(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	switch err := tryLock(f); {
	case errors.Is(err, errLocked):
		defer f.Close()
		var first atomicfile.Owner
		who := "another process"
		if text, err := io.ReadAll(io.LimitReader(f, 4096)); err == nil && json.Unmarshal(text, &first) == nil && first.PID != 0 {
			who = first.String()
		}
		return nil, fmt.Errorf("%s launches %s already; wait for it, stop it, or choose another output", who, dir)
	case err != nil:
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", f.Name(), err)
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
