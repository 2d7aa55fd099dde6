// Package verifier compares complete files with their hashes in the background, while samples are
// read from them.
package verifier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"mula/shards/facts"
)

// Options are the options of a [Verifier].
//
// The verification runs on one thread with the lowest priority for processor and disk. Its results
// are stored in the user's cache directory (package [mula/shards/facts]). An unchanged file is not
// verified again for a week. A file that changes in place, by size or modification time, is
// verified again.
//
// If a shard has sums of blocks (x.sums), no damaged token is ever returned, because blocks are
// compared when they are first read; the verification finds the damage before the run reads it. A
// file without sums is trusted until it has been verified. With First, readers wait for it.
type Options struct {
	Rank, World int   // of the processes that read the same files, this one verifies part Rank; World 0: 1
	Rate        int64 // maximum bytes read per second; 0: 256 MiB, below 0: no limit
	// verify shards and index files without sums before their first use
	First bool
	// hash the shards that a provisional plan knows by a sample only, and complete the plan
	Complete bool
}

// oldNames maps old words of [Parse] to the current words.
var oldNames = map[string]string{"reads": "on-read", "behind": "background", "first": "upfront"}

// CurrentName returns the current name of an old word for [Parse], and all other words unchanged.
func CurrentName(name string) string { return cmp.Or(oldNames[name], name) }

const (
	nameOnRead     = "on-read"
	nameBackground = "background"
	nameUpfront    = "upfront"
	nameComplete   = "complete"
)

// Names lists the names that [Parse] accepts.
func Names() []string { return []string{nameOnRead, nameBackground, nameUpfront, nameComplete} }

// Parse returns the options for "on-read" (nil: complete files are not verified), "background",
// "upfront" ([Options.First]) or "complete" ([Options.Complete]).
func Parse(name string) (*Options, error) {
	switch CurrentName(name) {
	case nameOnRead:
		return nil, nil
	case nameBackground:
		return &Options{}, nil
	case nameUpfront:
		return &Options{First: true}, nil
	case nameComplete:
		return &Options{Complete: true}, nil
	}
	return nil, fmt.Errorf("must be on-read (blocks that have sums), background (also complete files, in the "+
		"background), upfront (as background, and files without sums before use) or complete (as background, and "+
		"complete a provisional plan), got %q", name)
}

// Progress is the progress of the verification of complete files.
type Progress struct {
	Files, OfFiles int   // shards and index files: this process's part, and files that readers waited for
	Bytes, Total   int64 // read, and to read; without files that were verified recently
	Err            error // the first damage
}

const (
	defaultRate   = 256 << 20
	writeInterval = 30 * time.Second // between writes of the cache of shard facts
)

// The states of a verified file.
const (
	unverified int32 = iota
	verified
	damaged
)

// A File is a file, or the files of a shard, for a [Verifier].
type File struct {
	Path  string // absolute: the prefix of a shard, or the path of another file
	Shard bool
	Bytes int64 // approximate number of bytes to read

	// Verify reads the files and returns the first damage, or the facts of the shard. The facts are
	// nil if not all bytes could be compared. It calls count with the number of bytes after each
	// read.
	Verify func(ctx context.Context, count func(n int64)) (*facts.Facts, error)
}

// A Verifier compares complete files with their hashes in the background.
type Verifier struct {
	o        Options
	reverify time.Duration // interval of the search for files that changed in place; 0: no search
	ctx      context.Context
	cancel   context.CancelFunc
	ended    chan struct{}

	files   []*checked
	damage  atomic.Pointer[error]
	awaited chan *checked // sent by readers

	mu       sync.Mutex
	progress Progress
}

// A checked is a file and the state of its verification.
type checked struct {
	File
	state   atomic.Int32
	known   chan struct{} // closed when state is no longer unverified
	err     error         // set if state is damaged
	stamps  facts.Stamps  // when it was verified; used only by the verifier's goroutine
	counted bool
}

// Start starts the verification of files. Files that change in place are verified again within
// about reverify, if it is not 0.
func Start(files []File, o Options, reverify time.Duration) (*Verifier, error) {
	if o.World == 0 {
		o.World = 1
	}
	if o.World < 0 || o.Rank < 0 || o.Rank >= o.World {
		return nil, fmt.Errorf("cannot verify as rank %d of %d; rank must be at least 0 and below world", o.Rank,
			o.World)
	}
	if o.Rate == 0 {
		o.Rate = defaultRate
	}
	v := &Verifier{o: o, reverify: reverify, ended: make(chan struct{}), awaited: make(chan *checked)}
	for _, f := range files {
		v.files = append(v.files, &checked{File: f, known: make(chan struct{})})
	}
	v.ctx, v.cancel = context.WithCancel(context.Background())
	go func() {
		defer close(v.ended)
		v.run()
	}()
	return v, nil
}

// Stop cancels the verification and waits for its goroutine.
func (v *Verifier) Stop() {
	v.cancel()
	<-v.ended
}

// run verifies files: first the files that readers wait for, then this process's part.
func (v *Verifier) run() {
	LowestPriority()
	l := facts.Open()
	defer l.Close()
	written := time.Now()
	var share, mine []*checked // this process's part; the files in it that are not verified yet
	var again <-chan time.Time
	if v.reverify > 0 {
		ticker := time.NewTicker(v.reverify)
		defer ticker.Stop()
		again = ticker.C
	}
	for i := v.o.Rank; i < len(v.files); i += v.o.World {
		c := v.files[i]
		share = append(share, c)
		if s, trusted := c.current(); trusted && l.VerifiedAt(c.Path, s) {
			c.stamps = s
			v.settle(c, nil)
		} else {
			mine = append(mine, c)
			v.count(c)
		}
	}
	for {
		var c *checked
		if len(mine) > 0 {
			select {
			case c = <-v.awaited:
			case <-v.ctx.Done():
				return
			default:
				c, mine = mine[0], mine[1:]
			}
		} else {
			select {
			case c = <-v.awaited:
			case <-again:
				v.verifyChanged(share)
				continue
			case <-v.ctx.Done():
				return
			}
		}
		if c.state.Load() != unverified {
			continue
		}
		v.count(c)
		before, trusted := c.current()
		if !trusted || !l.VerifiedAt(c.Path, before) {
			found, err := c.Verify(v.ctx, v.pace())
			if v.ctx.Err() != nil {
				return
			}
			if err != nil {
				v.settle(c, err)
				continue
			}
			if now, ok := c.current(); found != nil && trusted && ok && now == before {
				l.NoteVerified(c.Path, before, *found)
			}
		}
		if trusted {
			c.stamps = before
		}
		v.settle(c, nil)
		if time.Since(written) > writeInterval || len(mine) == 0 {
			l.Close()
			written = time.Now()
		}
	}
}

// LowestPriority gives the calling goroutine a thread with the lowest priority for processor and
// disk. The thread ends with the goroutine.
func LowestPriority() {
	runtime.LockOSThread() // never unlocked, so that the thread ends
	lowestPriority()
}

// verifyChanged verifies files again that have changed in place, by their size or modification
// time. It reads no other file. Replaced files are ignored, because reads continue from the opened
// files.
func (v *Verifier) verifyChanged(share []*checked) {
	for _, c := range share {
		if c.state.Load() != verified || c.stamps == (facts.Stamps{}) {
			continue
		}
		now, trusted := c.current()
		if !trusted || now == c.stamps || !now.SameFiles(c.stamps) {
			continue
		}
		v.mu.Lock()
		v.progress.Total += c.Bytes
		v.mu.Unlock()
		_, err := c.Verify(v.ctx, v.pace())
		if v.ctx.Err() != nil {
			return
		}
		if c.stamps = now; err != nil {
			c.err = err
			c.state.Store(damaged)
			v.damage.CompareAndSwap(nil, &err)
		}
	}
}

// count adds a file to the work of the progress.
func (v *Verifier) count(c *checked) {
	if c.counted {
		return
	}
	c.counted = true
	v.mu.Lock()
	defer v.mu.Unlock()
	v.progress.OfFiles++
	v.progress.Total += c.Bytes
}

// settle sets the result of a file.
func (v *Verifier) settle(c *checked, err error) {
	state := verified
	if err != nil {
		state, c.err = damaged, err
		v.damage.CompareAndSwap(nil, &err)
	}
	v.mu.Lock()
	if c.counted {
		v.progress.Files++
	}
	v.mu.Unlock()
	c.state.Store(state)
	close(c.known)
}

// current returns the current stamps of a file.
func (c *checked) current() (s facts.Stamps, trusted bool) {
	if c.Shard {
		return facts.StampsOf(c.Path)
	}
	return facts.FileStamps(c.Path)
}

// pace returns a function that counts bytes read, and sleeps to limit the rate.
func (v *Verifier) pace() func(int64) {
	began, read := time.Now(), int64(0)
	return func(n int64) {
		v.mu.Lock()
		v.progress.Bytes += n
		v.mu.Unlock()
		if read += n; v.o.Rate < 0 {
			return
		}
		ahead := time.Duration(float64(read)/float64(v.o.Rate)*float64(time.Second)) - time.Since(began)
		if ahead < time.Millisecond {
			return
		}
		select {
		case <-time.After(ahead):
		case <-v.ctx.Done():
		}
	}
}

// Damaged returns the damage of file number i that has been found so far, or nil.
func (v *Verifier) Damaged(i int) error {
	if c := v.files[i]; c.state.Load() == damaged {
		return c.err
	}
	return nil
}

// Await waits until file number i is verified, and returns its damage. The file is verified next.
func (v *Verifier) Await(ctx context.Context, i int) error {
	c, awaited := v.files[i], v.awaited
	for {
		switch c.state.Load() {
		case verified:
			return nil
		case damaged:
			return c.err
		}
		select {
		case awaited <- c:
			awaited = nil
		case <-c.known:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-v.ctx.Done():
			return ErrStopped
		}
	}
}

// ErrStopped is the error of [Verifier.Await] after [Verifier.Stop].
var ErrStopped = errors.New("the verification was stopped")

// Damage returns the first damage that the verification has found, or nil.
func (v *Verifier) Damage() error {
	if err := v.damage.Load(); err != nil {
		return *err
	}
	return nil
}

// Progress returns the progress of the verification.
func (v *Verifier) Progress() Progress {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.progress
	p.Err = v.Damage()
	return p
}
