package cache

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

// A unit's lock is the file <marker>.lock in the state directory. Who makes it, where none may be before, has the unit. It says who that
// is, and its time of change moves while the holder lives. A lock is stale at once when its holder ran on this machine and has ended, and
// otherwise when its time of change has not moved while this process watched it for a minute: no clocks of different machines are
// compared.
//
// A lock is made as a further name (a hard link) of a file in which its text already stands, so that a kill leaves no lock that does not
// say whose it is; where there are no hard links it is created exclusively and then written.
//
// Locks spare work and are not needed for right bytes. Where they can fail (a process stopped for minutes comes back; a file system
// that creates exclusively in name only), the holder looks before each step that readers can see whether the lock still says its name.

// timing is how often things are looked at.
type timing struct {
	beat          time.Duration // between signs of life
	stale         time.Duration // without a sign of life: given up
	poll, maxPoll time.Duration // between looks at what others hold: at first, at most
}

var defaultTiming = timing{beat: 10 * time.Second, stale: time.Minute, poll: 50 * time.Millisecond, maxPoll: 2 * time.Second}

// lockSuffix ends the name of a lock.
const lockSuffix = ".lock"

func (r *run) lockPath(u *unit) string { return filepath.Join(r.state, u.Marker+lockSuffix) }

// lockText is what a lock holds.
type lockText struct {
	atomicfile.Owner
	Nonce uint64 `json:"nonce"` // tells the runs of one process apart
}

// locks are those of one run.
type locks struct {
	state  string
	timing timing
	text   []byte // of all of them
	source string // the file that the locks are further names of

	mu   sync.Mutex
	held map[*lock]bool
	seen map[string]sighting // locks of others, by path
}

// A lock that this run holds.
type lock struct {
	path string
	all  *locks
}

// open makes ready for taking locks.
func (ls *locks) open() error {
	var err error
	if ls.text, err = json.Marshal(lockText{atomicfile.Self(), rand.Uint64()}); err != nil {
		return err
	}
	ls.source = atomicfile.TempName(filepath.Join(ls.state, "run"))
	if err := os.WriteFile(ls.source, ls.text, 0o666); err != nil {
		var at *fs.PathError
		if errors.As(err, &at) {
			err = at.Err // the temporary name tells nobody anything
		}
		return fmt.Errorf("%s, where locks and records are kept, cannot be written to: %w", ls.state, err)
	}
	return nil
}

// close removes what open made. All locks have been released by then.
func (ls *locks) close() { os.Remove(ls.source) }

// A sighting is a state of another's lock and since when it was seen so.
type sighting struct {
	text    string
	changed time.Time // the file's
	since   time.Time // ours, monotonic
}

// acquire takes the lock at path. It returns nil, and the holder for a message, if another has it.
func (ls *locks) acquire(path string) (*lock, string, error) {
	for {
		err := put(ls.source, path, ls.text)
		if err == nil {
			l := &lock{path, ls}
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
			return nil, holder(other), nil
		}
		if err := breakLock(path, other); err != nil {
			return nil, "", err
		}
	}
}

// put makes the file at path with the given text, which is also that of the file from; the error is [fs.ErrExist] if there is one.
func put(from, path string, text []byte) error {
	err := os.Link(from, path)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		os.Remove(path)
	}
	return err
}

// holder says who wrote a lock.
func holder(text []byte) string {
	var t lockText
	if json.Unmarshal(text, &t) != nil || t.PID == 0 {
		return "another process"
	}
	return t.Owner.String()
}

// maxLock is far above the size of a lock.
const maxLock = 4096

// look reads the lock at path and judges whether its holder is gone.
func (ls *locks) look(path string) (text []byte, stale bool, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, false, err
	}
	if info.Size() > maxLock {
		return nil, false, fmt.Errorf("%s is no lock; remove it", path)
	}
	if text, err = os.ReadFile(path); err != nil {
		return nil, false, err
	}
	var t lockText
	if json.Unmarshal(text, &t) == nil && t.Gone() {
		return text, true, nil
	}
	now := time.Now()
	ls.mu.Lock()
	defer ls.mu.Unlock()
	s, ok := ls.seen[path]
	if !ok || s.text != string(text) || !s.changed.Equal(info.ModTime()) {
		ls.seen[path] = sighting{string(text), info.ModTime(), now}
		return text, false, nil
	}
	return text, now.Sub(s.since) > ls.timing.stale, nil
}

// breakLock removes a stale lock. Of several who try at once, each renames a file away under a name of its own and looks at what it got:
// if that is not the stale lock but a new one, taken between looking and renaming, it goes back, unless yet another has been taken
// meanwhile. Then the holder of the lost one finds that out by itself.
func breakLock(path string, stale []byte) error {
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

// ours reports whether the lock still is this run's.
func (l *lock) ours() bool {
	text, err := os.ReadFile(l.path)
	return err == nil && bytes.Equal(text, l.all.text)
}

// release gives the lock back. A second call does nothing.
func (l *lock) release() {
	l.all.mu.Lock()
	held := l.all.held[l]
	delete(l.all.held, l)
	l.all.mu.Unlock()
	if held && l.ours() {
		os.Remove(l.path)
	}
}

// beat gives signs of life until ctx is done.
func (ls *locks) beat(ctx context.Context) {
	tick := time.NewTicker(ls.timing.beat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			ls.mu.Lock()
			held := make([]*lock, 0, len(ls.held))
			for l := range ls.held {
				held = append(held, l)
			}
			ls.mu.Unlock()
			for _, l := range held {
				// A lock that is gone is noticed before publishing.
				_ = os.Chtimes(l.path, time.Time{}, now)
			}
		}
	}
}

// clean removes the locks of processes that are known to be gone, also of units that are not this run's. Those that it may not read or
// remove stay: if they are of this run's units, taking them says so.
func (ls *locks) clean() error {
	entries, err := os.ReadDir(ls.state)
	if err != nil {
		return fmt.Errorf("cleaning up: %w", err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), lockSuffix) || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		path := filepath.Join(ls.state, e.Name())
		text, stale, err := ls.look(path)
		if err == nil && stale {
			err = breakLock(path, text)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	return nil
}
