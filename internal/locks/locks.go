// Package locks lets processes that share a directory, on one machine or several, divide work
// without a server: a lock is a file that only one of them can create.
//
// Who makes a lock, where none may be before, has it. It says who that is, and its time of change
// moves while the holder lives. A lock is stale at once when its holder ran on this machine and has
// ended, and otherwise when its time of change has not moved while this process watched it for a
// minute: no clocks of different machines are compared.
//
// A lock is made as a further name (a hard link) of a file in which its text already stands, so
// that a kill leaves no lock that does not say whose it is; where there are no hard links it is
// created exclusively and then written.
//
// Locks spare work and must not be needed for right bytes. Where they can fail (a process stopped
// for minutes comes back; a file system that creates exclusively in name only), the holder looks
// before each step that readers can see whether the lock still says its name ([Lock.Ours]).
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

// Timing is how often signs of life are given and looked for.
type Timing struct {
	Beat  time.Duration // between signs of life
	Stale time.Duration // without one: the holder is given up
}

// DefaultTiming is for work of seconds to hours on file systems that may answer slowly.
var DefaultTiming = Timing{Beat: 10 * time.Second, Stale: time.Minute}

// Suffix ends the name of a lock.
const Suffix = ".lock"

// text is what a lock holds.
type text struct {
	atomicfile.Owner
	Nonce uint64 `json:"nonce"` // tells the runs of one process apart
}

// A Set is the locks that one run takes in a directory. It is safe for use by several goroutines.
type Set struct {
	dir    string
	timing Timing
	text   []byte // of all of them
	source string // the file that the locks are further names of

	mu   sync.Mutex
	held map[*Lock]bool
	seen map[string]sighting // locks of others, by path
}

// A Lock is one that this run holds.
type Lock struct {
	path string
	all  *Set
}

// Open makes ready for taking locks in dir, which must exist.
func Open(dir string, timing Timing) (*Set, error) {
	ls := &Set{dir: dir, timing: timing, held: make(map[*Lock]bool), seen: make(map[string]sighting)}
	var err error
	if ls.text, err = json.Marshal(text{atomicfile.Self(), rand.Uint64()}); err != nil {
		return nil, err
	}
	ls.source = atomicfile.TempName(filepath.Join(ls.dir, runName))
	// A Watch must not see the file before it has its text, so it appears by a rename.
	draft := atomicfile.TempName(filepath.Join(ls.dir, "start"))
	err = os.WriteFile(draft, ls.text, 0o666)
	if err == nil {
		err = os.Rename(draft, ls.source)
	}
	if err != nil {
		os.Remove(draft)
		var at *fs.PathError
		var link *os.LinkError
		switch { // the temporary names mean nothing to the user
		case errors.As(err, &at):
			err = at.Err
		case errors.As(err, &link):
			err = link.Err
		}
		return nil, fmt.Errorf("%s, where locks and records are kept, cannot be written to: %w", ls.dir, err)
	}
	return ls, nil
}

// Close removes what Open made. All locks must have been released by then.
func (ls *Set) Close() { os.Remove(ls.source) }

// A sighting is a state of another's lock and since when it was seen so.
type sighting struct {
	text    string
	changed time.Time // the file's
	since   time.Time // ours, monotonic
}

// Acquire takes the lock at path, a file in the directory whose name ends in [Suffix]. It returns
// nil, and the holder for a message, if another has it; a stale one is taken over.
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
			return nil, "", fmt.Errorf("taking the lock: %w", err)
		}
		other, stale, err := ls.look(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // given back this moment
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

// Wait is [Set.Acquire] for who needs the lock whoever has it: it looks again after pause, and less
// and less often down to once a second, until ctx is done.
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

// put makes the file at path with the given text, which is also that of the file from; the error is
// [fs.ErrExist] if there is one.
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

// holderOf says who wrote a lock.
func holderOf(content []byte) string {
	var t text
	if json.Unmarshal(content, &t) != nil || t.PID == 0 {
		return "another process"
	}
	return t.Owner.String()
}

// maxLock is far above the size of a lock.
const maxLock = 4096

// look reads the lock at path and judges whether its holder is gone.
func (ls *Set) look(path string) (content []byte, stale bool, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, false, err
	}
	if info.Size() > maxLock {
		return nil, false, fmt.Errorf("%s is no lock; remove it", path)
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

// breakLock removes a stale lock. Those who try at once on one machine do it one after the other
// ([Alone]), and look again whether it still is the stale one. Where that cannot be had, each
// renames a file away under a name of its own and looks at what it got: if that is not the stale
// lock but a new one, taken between looking and renaming, it goes back, unless yet another has been
// taken meanwhile. Then the holder of the lost one finds that out by itself.
func (ls *Set) breakLock(path string, stale []byte) error {
	done := Alone(ls.dir)
	defer done()
	now, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // whatever comes to stand there is another's
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
		return fmt.Errorf("giving back a lock: %w", err)
	}
	return nil
}

// Ours reports whether the lock still is this run's.
func (l *Lock) Ours() bool {
	content, err := os.ReadFile(l.path)
	return err == nil && bytes.Equal(content, l.all.text)
}

// Release gives the lock back. A second call does nothing.
func (l *Lock) Release() {
	l.all.mu.Lock()
	held := l.all.held[l]
	delete(l.all.held, l)
	l.all.mu.Unlock()
	if held && l.Ours() {
		os.Remove(l.path)
	}
}

// Beat gives signs of life for the set and all locks that are held, until ctx is done.
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
				// A lock that is gone is noticed before publishing.
				_ = os.Chtimes(l.path, time.Time{}, now)
			}
		}
	}
}

// Clean removes the locks in dir of processes that are known to be gone, whatever they are for.
// Those that it may not read or remove stay: taking them says so.
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
