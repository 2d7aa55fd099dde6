// Package locks lets processes that share a directory or a folder of an object store, on one
// machine or several, divide work without a server. A lock is a file or object that only one
// process can create.
//
// The process that creates a lock holds it. The lock names its holder, and the holder updates the
// file's modification time, or the number in the object, as long as it lives. A lock is stale as
// soon as its holder, if that ran on this machine, has ended. A lock of another machine is stale
// when this process has seen no change for a minute. Clocks of different machines are not compared.
//
// A lock file is created as a hard link to a file that already has the lock's text, so that a
// killed process leaves no lock without a holder's name. Without hard links, the file is created
// exclusively (O_EXCL) and then written. A lock object is created and replaced with conditions on
// its version.
//
// Locks save work. Correct output must not depend on them, because they can fail: a process may be
// stopped for minutes and then continue, and some file systems do not implement exclusive creation.
// So the holder checks with [Lock.Ours] that it still holds the lock before each step that readers
// can see.
package locks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/objects"
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
	Nonce uint64 `json:"nonce"`           // distinguishes several Sets of one process
	Beats int    `json:"beats,omitempty"` // heartbeats of a lock in a store
}

// content returns the content of a lock.
func (t text) content() []byte {
	content, err := json.Marshal(t)
	if err != nil {
		panic(err) // it always can be encoded
	}
	return content
}

// wrote reports whether the set with this text has written the content of a lock.
func (t text) wrote(content []byte) bool {
	var other text
	if json.Unmarshal(content, &other) != nil {
		return false
	}
	other.Beats = t.Beats
	return other == t
}

// A place has the locks of a set. Paths are complete.
type place interface {
	open() error // before create
	// create creates a lock with the set's text. The error is [fs.ErrExist] if there is a lock.
	create(path string) error
	// read returns the content of a lock, and when it was changed if a heartbeat does not change
	// the content.
	read(path string) (content []byte, changed time.Time, err error)
	// free makes a path free for create, unless its lock is not the stale one any more.
	free(path string, stale []byte) error
	// discard removes a stale lock, unless it is not the stale one any more. The place need not be
	// open.
	discard(path string, stale []byte) error
	// beat sends a heartbeat of a lock, or of the set if the path is "". It ignores errors: the
	// holder notices that its lock is gone before it publishes.
	beat(path string)
	// remove removes a lock if this set still holds it.
	remove(path string)
	// names returns the names of the locks, and possibly of other files.
	names() ([]string, error)
	close()
}

// A Set holds the locks that one run acquires in a directory. It is safe for concurrent use.
type Set struct {
	dir    string
	timing Timing
	text   text // of the locks, without heartbeats
	at     place

	mu   sync.Mutex
	held map[*Lock]bool
	seen map[string]sighting // locks of others, by path
}

// A Lock is a lock that this run holds.
type Lock struct {
	path string
	all  *Set
}

// Open prepares dir for locks: a directory of fsys, which must exist, or the URL of a folder of an
// object store. A nil fsys is the file system of the machine. The requests to the store end with
// ctx.
func Open(ctx context.Context, fsys filesystem.FS, dir string, timing Timing) (*Set, error) {
	ls := newSet(ctx, fsys, dir, timing, text{Owner: atomicfile.Self(), Nonce: rand.Uint64()})
	return ls, ls.at.open()
}

// newSet returns a set that cannot create locks until its place is opened.
func newSet(ctx context.Context, fsys filesystem.FS, dir string, timing Timing, t text) *Set {
	ls := &Set{dir: dir, timing: timing, text: t, held: make(map[*Lock]bool), seen: make(map[string]sighting)}
	if objects.IsURL(dir) {
		ls.at = &store{ctx: ctx, dir: dir, text: t, held: make(map[string]*claim)}
	} else {
		ls.at = &directory{fsys: filesystem.Default(fsys), path: dir, text: t.content()}
	}
	return ls
}

// Close ends the use of the set. All locks must have been released before.
func (ls *Set) Close() { ls.at.close() }

// A sighting is the state of another process's lock, and the time since which it has had that
// state.
type sighting struct {
	text    string
	changed time.Time // modification time of a file; a store has it in the text
	since   time.Time // this process's monotonic clock
}

// Acquire acquires the lock at path, a file in the directory whose name ends in [Suffix]. If
// another process holds the lock, it returns nil and a description of the holder. It replaces a
// stale lock.
func (ls *Set) Acquire(path string) (l *Lock, holder string, err error) {
	for {
		err := ls.at.create(path)
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
		if err := ls.at.free(path, other); err != nil {
			return nil, "", fmt.Errorf("breaking a stale lock: %w", err)
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

// Holder returns a description of the process that holds the lock at path, "" if none does. If the
// process is on another machine, Holder waits for its heartbeat, or until its lock is stale. It
// looks again after each pause.
func (ls *Set) Holder(ctx context.Context, path string, pause time.Duration) (string, error) {
	var first sighting
	for {
		content, stale, err := ls.look(path)
		if errors.Is(err, fs.ErrNotExist) || err == nil && stale {
			return "", nil
		}
		if err != nil {
			return "", fmt.Errorf("reading a lock: %w", err)
		}
		ls.mu.Lock()
		now := ls.seen[path]
		ls.mu.Unlock()
		var t text
		if json.Unmarshal(content, &t) == nil && t.Machine == ls.text.Machine || first != (sighting{}) && now != first {
			return holderOf(content), nil
		}
		first = now
		select {
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-time.After(pause):
		}
	}
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
	content, changed, err := ls.at.read(path)
	if err != nil {
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
	if !ok || s.text != string(content) || !s.changed.Equal(changed) {
		ls.seen[path] = sighting{string(content), changed, now}
		return content, false, nil
	}
	return content, now.Sub(s.since) > ls.timing.Stale, nil
}

// Ours reports whether this run still holds the lock.
func (l *Lock) Ours() bool {
	content, _, err := l.all.at.read(l.path)
	return err == nil && l.all.text.wrote(content)
}

// Release releases the lock. A second call does nothing.
func (l *Lock) Release() {
	l.all.mu.Lock()
	held := l.all.held[l]
	delete(l.all.held, l)
	l.all.mu.Unlock()
	if held {
		l.all.at.remove(l.path)
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
		case <-tick.C:
			ls.mu.Lock()
			held := make([]*Lock, 0, len(ls.held))
			for l := range ls.held {
				held = append(held, l)
			}
			ls.mu.Unlock()
			var beats sync.WaitGroup
			for _, l := range held {
				beats.Go(func() { ls.at.beat(l.path) })
			}
			ls.at.beat("")
			beats.Wait()
		}
	}
}

// Clean removes all locks in dir, as in [Open], whose processes have certainly ended. Locks that it
// may not read or remove stay; acquiring such a lock returns the error.
func Clean(ctx context.Context, fsys filesystem.FS, dir string) error {
	ls := newSet(ctx, fsys, dir, DefaultTiming, text{Owner: atomicfile.Self(), Nonce: rand.Uint64()})
	names, err := ls.at.names()
	if err != nil {
		return fmt.Errorf("cleaning up: %w", err)
	}
	for _, name := range names {
		if !strings.HasSuffix(name, Suffix) || strings.HasPrefix(name, ".") {
			continue
		}
		path := objects.Join(dir, name)
		content, stale, err := ls.look(path)
		if err == nil && stale {
			err = ls.at.discard(path, content)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	return nil
}
