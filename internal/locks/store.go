package locks

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"path"
	"sync"
	"time"

	"mula/internal/objects"
)

// A store has locks that are objects. A stale lock is not removed but replaced by an object that
// names no holder, and that by the next holder's lock: a store can replace an object on the
// condition that it has not changed, but not every store can remove one on this condition.
type store struct {
	ctx  context.Context // of requests
	dir  string
	text text

	mu   sync.Mutex
	held map[string]*claim
}

// A claim is the last state of a lock that this process knows to hold.
type claim struct {
	turn  chan struct{} // has a value while one goroutine sends requests about the claim
	info  objects.Info
	beats int
}

// begin waits for the turn of this goroutine. It reports whether that came before the end of ctx.
func (c *claim) begin(ctx context.Context) bool {
	select {
	case c.turn <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (c *claim) end() { <-c.turn }

// noHolder is the content of an object in place of a stale lock.
const noHolder = "{}\n"

func (s *store) open() error { return nil }

func (s *store) close() {}

func (s *store) create(path string) error {
	content, was, err := objects.ReadFile(s.ctx, path, maxLock)
	if err == nil && string(content) != noHolder {
		return fs.ErrExist
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var info objects.Info
	if err == nil {
		info, err = objects.Replace(s.ctx, path, s.text.content(), was)
	} else {
		info, err = objects.WriteNew(s.ctx, path, s.text.content())
	}
	if errors.Is(err, objects.ErrChanged) || errors.Is(err, fs.ErrExist) {
		return fs.ErrExist
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[path] = &claim{turn: make(chan struct{}, 1), info: info}
	return nil
}

func (s *store) read(path string) (content []byte, changed time.Time, err error) {
	content, _, err = objects.ReadFile(s.ctx, path, maxLock)
	if err == nil && string(content) == noHolder {
		err = fs.ErrNotExist
	}
	return content, changed, err
}

func (s *store) free(path string, stale []byte) error {
	now, was, err := objects.ReadFile(s.ctx, path, maxLock)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Equal(now, stale) {
		return nil
	}
	if err == nil {
		_, err = objects.Replace(s.ctx, path, []byte(noHolder), was)
	}
	if errors.Is(err, objects.ErrChanged) {
		return nil
	}
	return err
}

// discard acquires the lock and removes it: not every store can remove an object on the condition
// that it is still the stale lock.
func (s *store) discard(path string, stale []byte) error {
	err := s.free(path, stale)
	if err == nil {
		err = s.create(path)
	}
	if errors.Is(err, fs.ErrExist) {
		return nil // another process has acquired it
	}
	if err == nil {
		s.remove(path)
	}
	return err
}

// beatTime is how long a heartbeat is tried before the next one is due.
const beatTime = 10 * time.Second

func (s *store) beat(path string) {
	s.mu.Lock()
	c := s.held[path]
	s.mu.Unlock()
	if c == nil {
		return
	}
	ctx, cancel := context.WithTimeout(s.ctx, beatTime)
	defer cancel()
	if !c.begin(ctx) {
		return
	}
	defer c.end()
	c.beats++
	next := s.text
	next.Beats = c.beats
	info, err := objects.Replace(ctx, path, next.content(), c.info)
	if errors.Is(err, objects.ErrChanged) {
		// An earlier heartbeat may have arrived without a response.
		var content []byte
		content, info, err = objects.ReadFile(ctx, path, maxLock)
		if err == nil && !s.text.wrote(content) {
			return // another process holds the lock
		}
	}
	if err == nil {
		c.info = info
	}
}

// releaseTime is how long a lock is released at most, also after the end of the set's context.
const releaseTime = 10 * time.Second

func (s *store) remove(path string) {
	s.mu.Lock()
	c := s.held[path]
	delete(s.held, path)
	s.mu.Unlock()
	if c == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), releaseTime)
	defer cancel()
	// A heartbeat after the removal would create the object again if a store ignores its condition.
	if !c.begin(ctx) {
		return
	}
	defer c.end()
	content, _, err := objects.ReadFile(ctx, path, maxLock)
	if err == nil && s.text.wrote(content) {
		_ = objects.Remove(ctx, path) // a lock that stays becomes stale
	}
}

func (s *store) names() (names []string, err error) {
	for e, err := range objects.ListFolder(s.ctx, s.dir) {
		if err != nil {
			return nil, err
		}
		names = append(names, path.Base(e.URL))
	}
	return names, nil
}
