package locks

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
)

// A directory has locks that are files.
type directory struct {
	fsys   filesystem.FS
	path   string
	text   []byte // of the locks
	source string // the file that the locks are hard links to
}

func (d *directory) open() error {
	d.source = atomicfile.TempName(filepath.Join(d.path, runName))
	// The file appears by a rename, so that a Watch cannot see it before its text is written.
	draft := atomicfile.TempName(filepath.Join(d.path, "start"))
	err := filesystem.WriteFile(d.fsys, draft, d.text, 0o666)
	if err == nil {
		err = d.fsys.Rename(draft, d.source)
	}
	if err != nil {
		d.fsys.Remove(draft)
		var at *fs.PathError
		var link *os.LinkError
		switch { // the user does not know the temporary names
		case errors.As(err, &at):
			err = at.Err
		case errors.As(err, &link):
			err = link.Err
		}
		return fmt.Errorf("cannot write to %s, the folder of locks and records: %w", d.path, err)
	}
	return nil
}

func (d *directory) close() { d.fsys.Remove(d.source) }

func (d *directory) create(path string) error {
	if d.source == "" {
		return errors.New("the set of locks is not open") // a link to no file falls back on O_EXCL
	}
	return d.put(d.source, path, d.text)
}

// put creates the file at path with the given content, which is also the content of the file from.
// The error is [fs.ErrExist] if path exists.
func (d *directory) put(from, path string, content []byte) error {
	err := d.fsys.Link(from, path)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return err
	}
	f, err := d.fsys.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		d.fsys.Remove(path)
	}
	return err
}

func (d *directory) read(path string) (content []byte, changed time.Time, err error) {
	info, err := d.fsys.Stat(path)
	if err != nil {
		return nil, changed, err
	}
	if info.Size() > maxLock {
		return nil, changed, fmt.Errorf("%s is not a lock file; remove it", path)
	}
	content, err = filesystem.ReadFile(d.fsys, path)
	return content, info.ModTime(), err
}

// free removes a stale lock. Processes on one machine do this one at a time ([Alone]) and
// check again that the lock is still the stale one. If Alone is not supported, each process renames
// the lock to a unique name and reads it there. If the renamed lock is not the stale lock, another
// process acquired it between the check and the rename. free then puts it back, unless a third
// process has acquired the lock meanwhile. In that case the holder of the lost lock finds out with
// [Lock.Ours].
func (d *directory) free(path string, stale []byte) error {
	if _, ok := d.fsys.(filesystem.OS); ok { // a test's file system cannot lock directories
		done := Alone(d.path)
		defer done()
	}
	now, err := filesystem.ReadFile(d.fsys, path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a lock that appears later belongs to another process
	}
	if err != nil {
		return err
	}
	if !bytes.Equal(now, stale) {
		return nil
	}
	away := atomicfile.TempName(path)
	if err := d.fsys.Rename(path, away); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	defer d.fsys.Remove(away)
	got, err := filesystem.ReadFile(d.fsys, away)
	if err != nil {
		return err
	}
	if bytes.Equal(got, stale) {
		return nil
	}
	if err := d.put(away, path, got); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("restoring it: %w", err)
	}
	return nil
}

// discard frees the path. It must not create a lock: a process that is killed then would leave a
// lock without a holder.
func (d *directory) discard(path string, stale []byte) error { return d.free(path, stale) }

func (d *directory) beat(path string) {
	if path == "" {
		path = d.source
	}
	_ = d.fsys.Chtimes(path, time.Time{}, time.Now())
}

func (d *directory) remove(path string) {
	if content, err := filesystem.ReadFile(d.fsys, path); err == nil && bytes.Equal(content, d.text) {
		d.fsys.Remove(path)
	}
}

func (d *directory) names() (names []string, err error) {
	entries, err := d.fsys.ReadDir(d.path)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}
