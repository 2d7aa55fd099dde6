package blockcache

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"testing"
)

// counted counts the requests of a source.
type counted struct {
	*remote
	requests atomic.Int64
}

func (c *counted) ReadAt(ctx context.Context, p []byte, off int64) error {
	c.requests.Add(1)
	return c.remote.ReadAt(ctx, p, off)
}

// A model counts the requests and bytes of a cache that removes blocks all the time.
func TestModel(t *testing.T) {
	remotes := []*remote{newRemote(3<<20 + 5), newRemote(5 << 20), newRemote(4<<20 - 7)}
	for seed := range uint64(6) {
		random := rand.New(rand.NewPCG(seed, 0))
		limit := Longest + random.Int64N(6<<20)
		c := open(t, t.TempDir(), limit)
		now := uint32(0)
		c.now = func() uint32 { now += refresh + 1; return now } // so that the cache knows the order of all uses
		c.spawn = func(f func()) { f() }
		m := NewModel(limit)
		var files []*File
		var sources []*counted
		for i, r := range remotes {
			sources = append(sources, &counted{remote: &remote{data: r.data}})
			files = append(files, c.File(string(rune('a'+i)), int64(len(r.data)), sources[i]))
			defer files[i].Close()
		}
		for range 40 {
			i := random.IntN(len(files))
			f, path := files[i], c.path(string(rune('a'+i)), blocksEnding)
			from := random.Int64N(f.blocks())
			end := min(f.blocks(), from+1+random.Int64N(200))
			last := min(end*Block, f.size)
			if random.IntN(2) == 0 {
				if err := f.Fetch(context.Background(), from*Block+3, last); err != nil {
					t.Fatal(err)
				}
				m.Fetch(path, f.size, from*Block+3, last)
			} else {
				if err := read(f, remotes[i], from, end); err != nil {
					t.Fatal(err)
				}
				m.Read(path, f.size, from*Block, last)
			}
		}
		const size = 3 << 20
		for range 2 {
			if _, err := c.Whole(context.Background(), "w", size, sources[1], nil); err != nil {
				t.Fatal(err)
			}
			m.Whole("w", size)
		}
		var requests, bytes, all int64
		for _, r := range sources {
			requests, bytes, all = requests+r.requests.Load(), bytes+r.reads.Load(), all+int64(len(r.data))
		}
		if m.Requests != requests || m.Bytes != bytes {
			t.Errorf("seed %d: the model has %d requests and %d bytes, the cache %d and %d", seed, m.Requests, m.Bytes,
				requests, bytes)
		}
		if m.Bytes > all+size && m.Again == 0 {
			t.Errorf("seed %d: %d bytes of files with %d, and none was fetched again", seed, m.Bytes, all)
		}
	}
}
