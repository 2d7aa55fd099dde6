package cache

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/locks"
	"mula/internal/objects"
)

// A FailedError is the error of a process of a group ([Options.Together]) that stopped because
// another process of the group failed.
type FailedError struct {
	Owner string // description of the failed process
	Text  string // its error
}

func (e *FailedError) Error() string {
	return fmt.Sprintf("stopped because %s, which was building the same files, failed: %s", e.Owner, e.Text)
}

// A failure is the note that a failing process of a group writes for the other processes. A process
// ignores notes from before its own start.
type failure struct {
	atomicfile.Owner
	Text string `json:"error"`
}

// failurePath returns the path of the note. Groups that build other units, or the same units with
// other settings, use another path.
func (r *run) failurePath() string {
	h := sha256.New()
	for _, u := range r.units {
		fmt.Fprintf(h, "%q %s\n", u.Marker, u.Settings)
	}
	return objects.Join(r.state, "failed-"+hex.EncodeToString(h.Sum(nil)[:8])+".json")
}

// noteFailure writes the note. It ignores its own errors: this process fails with err anyway.
func (r *run) noteFailure(err error) {
	var other *FailedError
	if errors.As(err, &other) {
		return
	}
	if text, e := json.Marshal(failure{atomicfile.Self(), err.Error()}); e == nil {
		_ = r.files.WriteFile(r.failurePath(), append(text, '\n'))
	}
}

// readFailure reads the note, unless the note is still the file described by before.
func (r *run) readFailure(path string, before os.FileInfo) *FailedError {
	info, err := r.files.FS().Stat(path)
	if err != nil || unchanged(info, before) {
		return nil
	}
	text, err := r.readFile(path, maxRecord)
	var f failure
	if err != nil || json.Unmarshal(text, &f) != nil {
		return nil
	}
	return &FailedError{f.Owner.String(), f.Text}
}

// watch counts the units that other processes complete as soon as they are visible. In a group, it
// also stops the run when another process has failed. It returns when ctx is done.
func (r *run) watch(ctx context.Context, stop context.CancelCauseFunc) {
	path := r.failurePath()
	before, _ := r.files.FS().Stat(path)
	tick := time.NewTicker(r.timing.watch)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if r.o.Together {
			if other := r.readFailure(path, before); other != nil {
				stop(other)
				return
			}
		}
		if r.met.Load() {
			r.countComplete(ctx)
		}
	}
}

// countComplete looks for the markers of unfinished units with a single listing of the directory.
func (r *run) countComplete(ctx context.Context) {
	entries, err := r.files.FS().ReadDir(r.dir)
	if err != nil {
		return // the code that needs the directory reports the error
	}
	there := make(map[string]bool, len(entries))
	for _, entry := range entries {
		there[entry.Name()] = true
	}
	for _, u := range r.units {
		if ctx.Err() != nil {
			return
		}
		if there[u.Marker] && !r.hasEnded(u) {
			_, _, _ = r.skip(ctx, u) // the code that builds the unit meets the error again
		}
	}
}

// Await calls open until it no longer fails with [fs.ErrNotExist], as long as other processes are
// building dir. It is for readers that need only some units of a directory. Await calls told with
// the name of a building process when it starts to wait, and again whenever that name changes.
// Await returns the error of open or of ctx.
func Await(ctx context.Context, dir string, told func(builder string), open func() error) error {
	return await(ctx, dir, defaultTiming, told, open)
}

func await(ctx context.Context, dir string, t timing, told func(builder string), open func() error) error {
	watched := locks.NewWatch(filepath.Join(dir, StateDir), t.Timing)
	last, pause := "", t.poll
	for {
		// List the builders before open: a process that ends in between has written the files that
		// open finds.
		others, err := builders(watched)
		if err != nil {
			return err
		}
		missing := open()
		if !errors.Is(missing, fs.ErrNotExist) || len(others) == 0 {
			return missing
		}
		if others[0] != last {
			last = others[0]
			told(last)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s, which is building %s: %w", last, dir, context.Cause(ctx))
		case <-time.After(pause):
		}
		pause = min(pause*3/2, t.maxPoll)
	}
}

// Builders returns the names of the processes that are building dir. dir need not exist.
func Builders(dir string) ([]string, error) {
	return builders(locks.NewWatch(filepath.Join(dir, StateDir), defaultTiming.Timing))
}

func builders(w *locks.Watch) ([]string, error) {
	names, err := w.Processes()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return names, err
}
