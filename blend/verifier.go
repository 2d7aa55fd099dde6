package blend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"mula/shards"
	"mula/shards/facts"
)

// VerifyOptions are the options of the verification of complete files: in the background, they are
// compared with the hashes in the plan while samples are read.
//
// The verification runs on one thread with the lowest priority for processor and disk, and ends
// with [Data.Close]. Its results are stored in the user's cache directory. An unchanged file is not
// verified again for a week. A file that changes in place, by size or modification time, is
// verified again within about [OpenOptions.Reverify].
//
// The next record of a stream (package [mula/blend/stream]), and [Data.Tokens] for the damaged
// shard, return an error that names file, bytes and documents. If a shard has sums of blocks
// (x.sums), no damaged token is ever returned, because blocks are compared when they are first
// read; the verification finds the damage before the run reads it. A file without sums is trusted
// until it has been verified. With First, it is not used before.
type VerifyOptions struct {
	Rank, World int   // of the processes that read the same files, this one verifies part Rank; World 0: 1
	Rate        int64 // maximum bytes read per second; 0: 256 MiB, below 0: no limit
	// verify shards and index files without sums before their first use
	First bool
}

// oldVerify maps old words of [ParseVerify] to the current words.
var oldVerify = map[string]string{"reads": "on-read", "behind": "background", "first": "upfront"}

// CurrentVerify returns the current name of an old word for [ParseVerify], and all other words
// unchanged.
func CurrentVerify(name string) string { return cmp.Or(oldVerify[name], name) }

const (
	verifyOnRead     = "on-read"
	verifyBackground = "background"
	verifyUpfront    = "upfront"
)

// VerifyNames lists the names that [ParseVerify] accepts.
func VerifyNames() []string { return []string{verifyOnRead, verifyBackground, verifyUpfront} }

// ParseVerify returns the options for "on-read" (nil, the default of [Open]), "background" or
// "upfront" ([VerifyOptions.First]).
func ParseVerify(name string) (*VerifyOptions, error) {
	switch CurrentVerify(name) {
	case verifyOnRead:
		return nil, nil
	case verifyBackground:
		return &VerifyOptions{}, nil
	case verifyUpfront:
		return &VerifyOptions{First: true}, nil
	}
	return nil, fmt.Errorf("must be on-read (blocks that have sums), background (also complete files, in the "+
		"background) or upfront (as background, and files without sums before use), got %q", name)
}

// VerifyProgress is the progress of the verification of complete files.
type VerifyProgress struct {
	Files, OfFiles int   // shards and index files: this process's part, and files that readers waited for
	Bytes, Total   int64 // read, and to read; without files that were verified recently
	Err            error // the first damage
}

const (
	verifyRate   = 256 << 20
	verifyWrites = 30 * time.Second // between writes of the cache of shard facts
)

// The states of a verified file.
const (
	unverified int32 = iota
	verified
	damaged
)

// A verifier compares complete files with their hashes in the background.
type verifier struct {
	d      *Data
	o      VerifyOptions
	ctx    context.Context
	cancel context.CancelFunc
	ended  chan struct{}

	all     []*checked
	shards  [][]*checked // by source and shard
	order   []*checked   // index files
	files   []orderFile  // the same files
	damage  atomic.Pointer[error]
	awaited chan *checked // sent by readers

	mu       sync.Mutex
	progress VerifyProgress
}

// A checked is a file, or a shard, and the state of its verification.
type checked struct {
	source, shard int // -1: file
	file          int // index in files
	state         atomic.Int32
	known         chan struct{} // closed when state is no longer unverified
	err           error         // set if state is damaged
	stamps        facts.Stamps  // when it was verified; used only by the verifier's goroutine
	counted       bool
}

// startVerifier starts the verification of d.
func startVerifier(d *Data, o VerifyOptions) (*verifier, error) {
	if o.World == 0 {
		o.World = 1
	}
	if o.World < 0 || o.Rank < 0 || o.Rank >= o.World {
		return nil, fmt.Errorf("cannot verify as rank %d of %d; rank must be at least 0 and below world", o.Rank,
			o.World)
	}
	if o.Rate == 0 {
		o.Rate = verifyRate
	}
	v := &verifier{d: d, o: o, ended: make(chan struct{}), awaited: make(chan *checked),
		shards: make([][]*checked, len(d.Sources))}
	v.files = d.order.files()
	for i := range v.files {
		v.order = append(v.order, v.add(-1, -1, i))
	}
	for i := range d.Sources {
		for k := range d.Sources[i].Shards {
			v.shards[i] = append(v.shards[i], v.add(i, k, -1))
		}
	}
	v.ctx, v.cancel = context.WithCancel(context.Background())
	go func() {
		defer close(v.ended)
		v.run()
	}()
	return v, nil
}

func (v *verifier) add(source, shard, file int) *checked {
	c := &checked{source: source, shard: shard, file: file, known: make(chan struct{})}
	v.all = append(v.all, c)
	return c
}

// stop cancels the verification and waits for its goroutine.
func (v *verifier) stop() {
	v.cancel()
	<-v.ended
}

// run verifies files: first the files that readers wait for, then this process's part.
func (v *verifier) run() {
	runtime.LockOSThread() // never unlocked: the thread, with its low priority, ends with the goroutine
	lowestPriority()
	l := facts.Open()
	defer l.Close()
	written := time.Now()
	var share, mine []*checked // this process's part; the files in it that are not verified yet
	var again <-chan time.Time
	if v.d.reverify > 0 {
		ticker := time.NewTicker(v.d.reverify)
		defer ticker.Stop()
		again = ticker.C
	}
	for i := v.o.Rank; i < len(v.all); i += v.o.World {
		c := v.all[i]
		share = append(share, c)
		if s, trusted := v.stamps(c); trusted && l.VerifiedAt(v.path(c), s) {
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
		before, trusted := v.stamps(c)
		if !trusted || !l.VerifiedAt(v.path(c), before) {
			err := v.verify(c)
			if v.ctx.Err() != nil {
				return
			}
			if err != nil {
				v.settle(c, err)
				continue
			}
			if now, ok := v.stamps(c); trusted && ok && now == before {
				l.NoteVerified(v.path(c), before, v.factsOf(c))
			}
		}
		if trusted {
			c.stamps = before
		}
		v.settle(c, nil)
		if time.Since(written) > verifyWrites || len(mine) == 0 {
			l.Close()
			written = time.Now()
		}
	}
}

// verifyChanged verifies files again that have changed in place, by their size or modification
// time. It reads no other file. Replaced files are ignored, because reads continue from the opened
// files.
func (v *verifier) verifyChanged(share []*checked) {
	for _, c := range share {
		if c.state.Load() != verified || c.stamps == (facts.Stamps{}) {
			continue
		}
		now, trusted := v.stamps(c)
		if !trusted || now == c.stamps || !now.SameFiles(c.stamps) {
			continue
		}
		v.mu.Lock()
		v.progress.Total += v.bytes(c)
		v.mu.Unlock()
		err := v.verify(c)
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
func (v *verifier) count(c *checked) {
	if c.counted {
		return
	}
	c.counted = true
	v.mu.Lock()
	defer v.mu.Unlock()
	v.progress.OfFiles++
	v.progress.Total += v.bytes(c)
}

// bytes returns the approximate number of bytes to read.
func (v *verifier) bytes(c *checked) int64 {
	if c.file >= 0 {
		return v.files[c.file].bytes
	}
	sh := v.d.Sources[c.source].Shards[c.shard]
	return sh.Tokens*int64(sh.DType.Size()) + 20*sh.Documents // and the ends of the .idx
}

// settle sets the result of a file.
func (v *verifier) settle(c *checked, err error) {
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

// path returns the file's key in the cache of shard facts: the prefix of a shard, or the path of
// another file.
func (v *verifier) path(c *checked) string {
	path := ""
	if c.file >= 0 {
		path = v.files[c.file].path
	} else {
		path = v.d.ShardPath(c.source, c.shard)
	}
	if absolute, err := absolutePath(path); err == nil {
		return absolute
	}
	return path
}

// stamps returns the current stamps of a file.
func (v *verifier) stamps(c *checked) (s facts.Stamps, trusted bool) {
	if c.file < 0 {
		return facts.StampsOf(v.path(c))
	}
	return facts.FileStamps(v.path(c))
}

// factsOf returns the facts of a verified file.
func (v *verifier) factsOf(c *checked) facts.Facts {
	if c.file >= 0 {
		return facts.Facts{}
	}
	f, sh := v.d.facts[c.source][c.shard], v.d.Sources[c.source].Shards[c.shard]
	f.Bin, f.Index = sh.Bin, sh.Index
	return f
}

// verify reads a file, or the files of a shard. It uses reads instead of a mapping, so that a slow
// disk blocks only this goroutine.
func (v *verifier) verify(c *checked) error {
	pace := v.pace()
	if c.file >= 0 {
		f := v.files[c.file]
		hash, _, err := shards.HashFile(v.ctx, v.path(c), pace)
		if err == nil && hash != *f.sha256 {
			err = fmt.Errorf("%s has changed since the plan was built: SHA-256 of %s is %.16s…, was %.16s…; restore "+
				"it, or build a new plan",
				f.of, filepath.Base(f.path), hash, *f.sha256)
		}
		return err
	}
	s, err := v.d.open(c.source, c.shard) // opened again, because the shelf may close its own at any time
	if err != nil {
		return err
	}
	defer s.Close()
	want := v.d.Sources[c.source].Shards[c.shard]
	for _, f := range []struct{ ending, hash string }{{".bin", want.Bin}, {".idx", want.Index}} {
		hash, _, err := shards.HashFile(v.ctx, s.Prefix()+f.ending, pace)
		if err != nil {
			return fmt.Errorf("source %q: %w", v.d.Sources[c.source].Name, err)
		}
		if hash == f.hash {
			continue
		}
		if s.Manifest() != nil {
			if err := s.Verify(v.ctx, pace); err != nil { // names the damaged bytes
				return fmt.Errorf("source %q: %w", v.d.Sources[c.source].Name, err)
			}
		}
		return v.d.changed(c.source, c.shard, "SHA-256 of its %s file is %.16s…, was %.16s…", f.ending, hash, f.hash)
	}
	return nil
}

// pace returns a function that counts bytes read, and sleeps to limit the rate.
func (v *verifier) pace() func(int64) {
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

// admit waits, if necessary, until a shard may be read. sums tells whether the shard has sums.
func (v *verifier) admit(ctx context.Context, source, shard int, sums bool) error {
	if v.o.First {
		for _, c := range v.order {
			if err := v.await(ctx, c); err != nil {
				return err
			}
		}
		if !sums {
			return v.await(ctx, v.shards[source][shard])
		}
	}
	if c := v.shards[source][shard]; c.state.Load() == damaged {
		return c.err
	}
	return nil
}

// await waits for the result of a file.
func (v *verifier) await(ctx context.Context, c *checked) error {
	awaited := v.awaited
	for {
		switch c.state.Load() {
		case verified:
			return nil
		case damaged:
			return c.err
		}
		select {
		case awaited <- c: // the verifier verifies it next
			awaited = nil
		case <-c.known:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-v.ctx.Done():
			return errClosed
		}
	}
}

var errClosed = errors.New("the plan's data was closed")

// damage returns the first damage that the verification has found, or nil.
func (d *Data) damage() error {
	if d.verifier == nil {
		return nil
	}
	if err := d.verifier.damage.Load(); err != nil {
		return *err
	}
	return nil
}

// Verification returns the progress of the verification of complete files, if [OpenOptions.Verify]
// is set.
func (d *Data) Verification() VerifyProgress {
	if d.verifier == nil {
		return VerifyProgress{}
	}
	d.verifier.mu.Lock()
	defer d.verifier.mu.Unlock()
	p := d.verifier.progress
	p.Err = d.damage()
	return p
}
