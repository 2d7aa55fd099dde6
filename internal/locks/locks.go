// Package locks lets processes that share a directory, on one machine or several, divide work
// without a server. A lock is a file that only one process can create.
//
// The process that creates a lock holds it. The lock file names its holder, and the holder updates
// the file's modification time as long as it lives. A lock is stale as soon as its holder, if that
// ran on this machine, has ended. A lock of another machine is stale when this process has seen no
// change of the modification time for a minute. Clocks of different machines are not compared.
//
// A lock is created as a hard link to a file that already has the lock's text, so that a killed
// process leaves no lock without a holder's name. Without hard links, the file is created
// exclusively (O_EXCL) and then written.
//
// Locks save work. Correct output must not depend on them, because they can fail: a process may be
// stopped for minutes and then continue, and some file systems do not implement exclusive creation.
// So the holder checks with [Lock.Ours] that it still holds the lock before each step that readers
// can see.
package locks

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"mula/internal/atomicfile"
)

// Timing sets the intervals of heartbeats.
type Timing struct {
	Beat  time.Duration // between two heartbeats
	Stale time.Duration // without a heartbeat: the lock is stale
}

// DefaultTiming is for work of seconds to hours on file systems with high latency.
var DefaultTiming = Timing{Beat: 10 * time.Second, Stale: time.Minute}

// Suffix ends the name of a lock.
const Suffix = ".lock"

// text is the content of a lock file.
type text struct {
	atomicfile.Owner
	Nonce uint64 `json:"nonce"` // distinguishes several Sets of one process
}

// A Set holds the locks that one run acquires in a directory. It is safe for concurrent use.
type Set struct {
	dir    string
	timing Timing
	text   []byte // the content of the lock files
	source string // the file that the locks are hard links to

	mu   sync.Mutex
	held map[*Lock]bool
	seen map[string]sighting // locks of others, by path
}

// A Lock is a lock that this run holds.
type Lock struct {
	path string
	all  *Set
}

// Open prepares dir, which must exist, for locks.
func Open(dir string, timing Timing) (*Set, error) {
	ls := &Set{dir: dir, timing: timing, held: make(map[*Lock]bool), seen: make(map[string]sighting)}
	var err error
	if ls.text, err = json.Marshal(text{atomicfile.Self(), rand.Uint64()}); err != nil {
		return nil, err
	}
	ls.source = atomicfile.TempName(filepath.Join(ls.dir, runName))
	// The file appears by a rename, so that a Watch cannot see it before its text is written.
	draft := atomicfile.TempName(filepath.Join(ls.dir, "start"))
	err = os.WriteFile(draft, ls.text, 0o666)
	if err == nil {
		err = os.Rename(draft, ls.source)
	}
	if err != nil {
		os.Remove(draft)
		var at *fs.PathError
		var link *os.LinkError
		switch { // the user does not know the temporary names
		case errors.As(err, &at):
			err = at.Err
		case errors.As(err, &link):
			err = link.Err
		}
		return nil, fmt.Errorf("cannot write to %s, the folder of locks and records: %w", ls.dir, err)
	}
	return ls, nil
}

// Close removes the file that Open created. All locks must have been released before.
func (ls *Set) Close() { os.Remove(ls.source) }

// A sighting is the state of another process's lock, and the time since which it has had that
// state.
type sighting struct {
	text    string
	changed time.Time // modification time of the file
	since   time.Time // this process's monotonic clock
}

// Acquire acquires the lock at path, a file in the directory whose name ends in [Suffix]. If
// another process holds the lock, it returns nil and a description of the holder. It replaces a
// stale lock.
func (ls *Set) Acquire(path string) (l *Lock, holder string, err error) {
	for {
		err := put(ls.source, path, ls.text)
		if err == nil {
			l := &Lock{path, ls}
			ls.mu.Lock()
			ls.held[l] = true
			ls.mu.Unlock()
			return l, "", nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, "", fmt.Errorf("acquiring the lock: %w", err)
		}
		other, stale, err := ls.look(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // released meanwhile
		}
		if err != nil {
			return nil, "", fmt.Errorf("reading a lock: %w", err)
		}
		if !stale {
			return nil, holderOf(other), nil
		}
		if err := ls.breakLock(path, other); err != nil {
			return nil, "", err
		}
	}
}

// Wait is like [Set.Acquire], but waits for a lock that another process holds, until ctx is done.
// It tries again after pause and doubles the pause up to one second.
func (ls *Set) Wait(ctx context.Context, path string, pause time.Duration) (*Lock, error) {
	for {
		l, holder, err := ls.Acquire(path)
		if l != nil || err != nil {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for %s: %w", holder, context.Cause(ctx))
		case <-time.After(pause):
		}
		pause = min(pause*2, max(pause, time.Second))
	}
}

// put creates the file at path with the given content, which is also the content of the file from.
// The error is [fs.ErrExist] if path exists.
func put(from, path string, content []byte) error {
	err := os.Link(from, path)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		os.Remove(path)
	}
	return err
}

// holderOf describes the holder of a lock with that content.
func holderOf(content []byte) string {
	var t text
	if json.Unmarshal(content, &t) != nil || t.PID == 0 {
		return "another process"
	}
	return t.Owner.String()
}

// maxLock is far above the size of a lock file in bytes.
const maxLock = 4096

// look reads the lock at path and decides whether it is stale.
func (ls *Set) look(path string) (content []byte, stale bool, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, false, err
	}
	if info.Size() > maxLock {
		return nil, false, fmt.Errorf("%s is not a lock file; remove it", path)
	}
	if content, err = os.ReadFile(path); err != nil {
		return nil, false, err
	}
	var t text
	if json.Unmarshal(content, &t) == nil && t.Gone() {
		return content, true, nil
	}
	now := time.Now()
	ls.mu.Lock()
	defer ls.mu.Unlock()
	s, ok := ls.seen[path]
	if !ok || s.text != string(content) || !s.changed.Equal(info.ModTime()) {
		ls.seen[path] = sighting{string(content), info.ModTime(), now}
		return content, false, nil
	}
	return content, now.Sub(s.since) > ls.timing.Stale, nil
}

// breakLock removes a stale lock. Processes on one machine do this one at a time ([Alone]) and
// check again that the lock is still the stale one. If Alone is not supported, each process renames
// the lock to a unique name and reads it there. If the renamed lock is not the stale lock, another
// process acquired it between the check and the rename. breakLock then puts it back, unless a third
// process has acquired the lock meanwhile. In that case the holder of the lost lock finds out with
// [Lock.Ours].
func (ls *Set) breakLock(path string, stale []byte) error {
	done := Alone(ls.dir)
	defer done()
	now, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a lock that appears later belongs to another process
	}
	if err != nil {
		return fmt.Errorf("breaking a stale lock: %w", err)
	}
	if !bytes.Equal(now, stale) {
		return nil
	}
	away := atomicfile.TempName(path)
	if err := os.Rename(path, away); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("breaking a stale lock: %w", err)
	}
	defer os.Remove(away)
	got, err := os.ReadFile(away)
	if err != nil {
		return fmt.Errorf("breaking a stale lock: %w", err)
	}
	if bytes.Equal(got, stale) {
		return nil
	}
	if err := put(away, path, got); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("restoring a lock: %w", err)
	}
	return nil
}

// Ours reports whether this run still holds the lock.
func (l *Lock) Ours() bool {
	content, err := os.ReadFile(l.path)
	return err == nil && bytes.Equal(content, l.all.text)
}

// Release releases the lock. A second call does nothing.
func (l *Lock) Release() {
	l.all.mu.Lock()
	held := l.all.held[l]
	delete(l.all.held, l)
	l.all.mu.Unlock()
	if held && l.Ours() {
		os.Remove(l.path)
	}
}

// Beat sends heartbeats for the set and all held locks until ctx is done.
func (ls *Set) Beat(ctx context.Context) {
	tick := time.NewTicker(ls.timing.Beat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			ls.mu.Lock()
			held := make([]*Lock, 0, len(ls.held))
			for l := range ls.held {
				held = append(held, l)
			}
			ls.mu.Unlock()
			_ = os.Chtimes(ls.source, time.Time{}, now)
			for _, l := range held {
				// The holder notices that its lock is gone before it publishes.
				_ = os.Chtimes(l.path, time.Time{}, now)
			}
		}
	}
}

// Clean removes all locks in dir whose processes have certainly ended. Locks that it may not read
// or remove stay; acquiring such a lock returns the error.
func Clean(dir string) error {
	ls := &Set{dir: dir, timing: DefaultTiming, seen: make(map[string]sighting)}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("cleaning up: %w", err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), Suffix) || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		path := filepath.Join(dir, e.Name())
		content, stale, err := ls.look(path)
		if err == nil && stale {
			err = ls.breakLock(path, content)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	return nil
}
