package blockcache

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// remote is a file in memory that counts and fails its reads.
type remote struct {
	data  []byte
	reads atomic.Int64 // bytes
	fail  func(off int64) error
}

func (r *remote) ReadAt(ctx context.Context, p []byte, off int64) error {
	if r.fail != nil {
		if err := r.fail(off); err != nil {
			return err
		}
	}
	if off+int64(len(p)) > int64(len(r.data)) {
		return errors.New("beyond the end")
	}
	r.reads.Add(int64(len(p)))
	copy(p, r.data[off:])
	return nil
}

func newRemote(size int) *remote {
	data := make([]byte, size)
	rand.NewChaCha8([32]byte{byte(size)}).Read(data)
	return &remote{data: data}
}

func open(t testing.TB, dir string, limit int64) *Cache {
	t.Helper()
	c, err := openCache(dir, limit)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// read returns an error unless the blocks [from, end) are right.
func read(f *File, r *remote, from, end int64) error {
	p := make([]byte, min(end*Block, f.size)-from*Block)
	if err := f.ReadBlocks(context.Background(), p, from); err != nil {
		return err
	}
	if !bytes.Equal(p, r.data[from*Block:][:len(p)]) {
		return errors.New("wrong bytes")
	}
	return nil
}

// Every block is fetched once, by whatever reads, openings and goroutines.
func TestBlocksAreFetchedOnce(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		sub, err := os.MkdirTemp(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(sub)
		r := newRemote(rapid.IntRange(1, 40*Block).Draw(t, "size"))
		c, err := openCache(sub, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		f := c.File("x", int64(len(r.data)), r)
		defer func() { f.Close() }()
		seen := map[int64]bool{}
		for range rapid.IntRange(1, 8).Draw(t, "reads") {
			from := rapid.Int64Range(0, f.blocks()-1).Draw(t, "from")
			end := rapid.Int64Range(from+1, f.blocks()).Draw(t, "end")
			var g sync.WaitGroup
			for range 3 {
				g.Go(func() {
					if err := read(f, r, from, end); err != nil {
						t.Error(err)
					}
				})
			}
			g.Wait()
			for b := from; b < end; b++ {
				seen[b] = true
			}
			if rapid.Bool().Draw(t, "again") {
				f.Close()
				f = c.File("x", int64(len(r.data)), r)
			}
		}
		want := int64(0)
		for b := range seen {
			want += min(Block, f.size-b*Block)
		}
		if got := r.reads.Load(); got != want {
			t.Errorf("%d bytes were fetched, want %d", got, want)
		}
	})
}

// A block that does not match its sum is fetched again: damage, and blocks without their bytes, as
// after a crash between the writes.
func TestDamagedBlocksAreFetchedAgain(t *testing.T) {
	c := open(t, t.TempDir(), 1<<30)
	r := newRemote(10*Block + 5)
	f := c.File("x", int64(len(r.data)), r)
	defer f.Close()
	if err := read(f, r, 0, 11); err != nil {
		t.Fatal(err)
	}
	if _, err := f.disk.WriteAt(make([]byte, Block), 3*Block); err != nil {
		t.Fatal(err)
	}
	if _, err := f.disk.WriteAt([]byte{r.data[10*Block+4] ^ 1}, 10*Block+4); err != nil {
		t.Fatal(err)
	}
	before := r.reads.Load()
	for range 2 {
		if err := read(f, r, 0, 11); err != nil {
			t.Fatal(err)
		}
	}
	if got := r.reads.Load() - before; got != Block+5 {
		t.Errorf("%d bytes were fetched again, want the two damaged blocks", got)
	}
}

func TestAFileWithAnotherTrailerIsReplaced(t *testing.T) {
	c := open(t, t.TempDir(), 1<<30)
	r := newRemote(2 * Block)
	if err := os.WriteFile(c.path("x", blocksEnding), make([]byte, 100_000), 0o600); err != nil {
		t.Fatal(err)
	}
	f := c.File("x", int64(len(r.data)), r)
	defer f.Close()
	for range 2 {
		if err := read(f, r, 0, 2); err != nil {
			t.Fatal(err)
		}
	}
	if r.reads.Load() != 2*Block {
		t.Errorf("%d bytes were fetched", r.reads.Load())
	}
}

// An error of the source reaches all waiting readers, and a later read succeeds.
func TestErrorsOfTheSource(t *testing.T) {
	c := open(t, t.TempDir(), 1<<30)
	r := newRemote(4 * Block)
	broken := errors.New("broken")
	r.fail = func(off int64) error { return broken }
	f := c.File("x", int64(len(r.data)), r)
	defer f.Close()
	var g sync.WaitGroup
	for range 4 {
		g.Go(func() {
			if err := read(f, r, 0, 4); !errors.Is(err, broken) {
				t.Errorf("error %v", err)
			}
		})
	}
	g.Wait()
	r.fail = nil
	if err := read(f, r, 0, 4); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.File("y", 1, r).ReadBlocks(ctx, make([]byte, 1), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := f.ReadBlocks(context.Background(), make([]byte, 7), 0); err == nil {
		t.Error("a part of a block was read")
	}
}

// Fetch does not wait for blocks that another goroutine fetches. A read waits for them.
func TestFetchDoesNotWait(t *testing.T) {
	c := open(t, t.TempDir(), 1<<30)
	r := newRemote(4 * Block)
	started, proceed := make(chan struct{}), make(chan struct{})
	r.fail = func(off int64) error {
		if off == Block {
			close(started)
			<-proceed
		}
		return nil
	}
	f := c.File("x", int64(len(r.data)), r)
	defer f.Close()
	var g sync.WaitGroup
	g.Go(func() {
		if err := f.Fetch(context.Background(), Block, 2*Block); err != nil {
			t.Error(err)
		}
	})
	<-started
	if err := f.Fetch(context.Background(), 0, f.size); err != nil {
		t.Error(err)
	}
	if r.reads.Load() != 3*Block {
		t.Errorf("%d bytes were fetched, want the other blocks", r.reads.Load())
	}
	g.Go(func() {
		if err := read(f, r, 0, 4); err != nil {
			t.Error(err)
		}
	})
	close(proceed)
	g.Wait()
	if r.reads.Load() != 4*Block {
		t.Errorf("%d bytes were fetched, want each block once", r.reads.Load())
	}
}

// Without a usable folder, reads are right and each is fetched.
func TestFolderThatCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 1<<30)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	r := newRemote(3 * Block)
	f := c.File("x", int64(len(r.data)), r)
	defer f.Close()
	for range 2 {
		if err := read(f, r, 0, 3); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Fetch(context.Background(), 0, f.size); err != nil {
		t.Error(err)
	}
	if r.reads.Load() != 6*Block {
		t.Errorf("%d bytes were fetched", r.reads.Load())
	}
	if err := Failure(); err != nil {
		t.Errorf("before the default cache is open: %v", err)
	}
	opened.Store(c)
	defer opened.Store(nil)
	if err := Failure(); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), dir) {
		t.Errorf("%v; want the folder and the reason", err)
	}
}

// Processes (here two caches) share a folder that is much smaller than the data. Its files stay
// below the limit, and all reads are right.
func TestTrim(t *testing.T) {
	dir := t.TempDir()
	const limit = 8 << 20
	remotes := []*remote{newRemote(6<<20 + 1), newRemote(5 << 20), newRemote(7 << 20)}
	var g sync.WaitGroup
	for process := range 2 {
		c := open(t, dir, limit)
		g.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(process)))
			for range 400 {
				k := random.IntN(len(remotes))
				r := remotes[k]
				f := c.File(string(rune('a'+k)), int64(len(r.data)), r)
				from := random.Int64N(f.blocks())
				if err := read(f, r, from, min(f.blocks(), from+random.Int64N(30)+1)); err != nil {
					t.Error(err)
				}
				f.Close()
			}
			if _, err := c.Whole(context.Background(), "w", 1<<20, remotes[0], nil); err != nil {
				t.Error(err)
			}
			for !c.trimming.CompareAndSwap(false, true) { // a trim may still run
			}
			c.trim()
		})
	}
	g.Wait()
	var bytes int64
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range listExtents(filepath.Join(dir, e.Name()), info) {
			bytes += x.bytes
		}
	}
	if bytes > limit {
		t.Errorf("the folder has blocks with %d bytes", bytes)
	}
}

func TestWhole(t *testing.T) {
	c := open(t, t.TempDir(), 1<<30)
	r := newRemote(9<<20 + 3)
	wrong := errors.New("wrong hash")
	size := int64(len(r.data))
	refuse := func(string) error { return wrong }
	if _, err := c.Whole(context.Background(), "x", size, r, refuse); !errors.Is(err, wrong) {
		t.Errorf("error %v", err)
	}
	var g sync.WaitGroup
	for range 3 {
		g.Go(func() {
			path, err := c.Whole(context.Background(), "x", size, r, nil)
			if err != nil {
				t.Error(err)
				return
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, r.data) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	}
	g.Wait()
	if r.reads.Load() != 2*size {
		t.Errorf("%d bytes were fetched; want %d for each check", r.reads.Load(), size)
	}
	path := c.path("x", wholeEnding)
	for _, damage := range []func() error{
		func() error { return os.Truncate(path, size-1) },
		func() error { return os.Truncate(path, 0) },
		func() error {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err == nil {
				_, err = f.WriteAt([]byte{r.data[5] ^ 1}, 5)
				f.Close()
			}
			return err
		},
		func() error { return os.Remove(sumPath(path)) },
		func() error { return os.WriteFile(sumPath(path), []byte("x"), 0o600) },
	} {
		before := r.reads.Load()
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := c.Whole(context.Background(), "x", size, r, nil); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, r.data) {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
		}
		if got := r.reads.Load() - before; got != size {
			t.Errorf("%d bytes were fetched after a damage, want %d", got, size)
		}
	}
	left, _ := filepath.Glob(filepath.Join(c.dir, "*"+tempEnding))
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func BenchmarkReadBlocks(b *testing.B) {
	c := open(b, b.TempDir(), 1<<30)
	r := newRemote(64 << 20)
	f := c.File("x", int64(len(r.data)), r)
	defer f.Close()
	if err := f.Fetch(context.Background(), 0, f.size); err != nil {
		b.Fatal(err)
	}
	p := make([]byte, Block)
	b.SetBytes(Block)
	for i := int64(0); b.Loop(); i++ {
		if err := f.ReadBlocks(context.Background(), p, i*2654435761%f.blocks()); err != nil {
			b.Fatal(err)
		}
	}
}
