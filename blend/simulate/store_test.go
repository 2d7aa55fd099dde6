package simulate

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"mula/blend"
	"mula/blend/plantest"
	"mula/blend/stream"
	"mula/internal/blockcache"
	"mula/internal/testwait"
	"mula/shards"
)

// A countedStore is an object store with three shards of a size. It counts requests for ranges of
// .bin.
type countedStore struct {
	dir, url        string
	requests, bytes atomic.Int64
	others          atomic.Int64 // other requests, without the plan
}

const storeLength = 512 // tokens of a window

// newCountedStore returns a store. Different seeds have different tokens, so that the cache has
// none of them.
func newCountedStore(t *testing.T, seed, size int) *countedStore {
	s := &countedStore{dir: t.TempDir()}
	for i, name := range []string{"web-0", "web-1", "code"} {
		rng := rand.New(rand.NewPCG(uint64(seed), uint64(i)))
		dtype := []shards.DType{shards.UInt16, shards.UInt16, shards.Int32}[i]
		var documents [][]uint32
		for left := size / dtype.Size(); left > 0; {
			document := make([]uint32, 1+rng.IntN(min(5000, left)))
			document[0] = uint32(rng.IntN(1000))
			left -= len(document)
			documents = append(documents, document)
		}
		plantest.Shard(t, filepath.Join(s.dir, name), dtype, 1000, documents)
	}
	files := http.FileServer(http.Dir(s.dir))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var from, to int64
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); err == nil &&
			strings.HasSuffix(r.URL.Path, ".bin") {
			s.requests.Add(1)
			s.bytes.Add(to + 1 - from)
		} else if !strings.HasSuffix(r.URL.Path, "plan.json") {
			s.others.Add(1)
		}
		files.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	s.url = server.URL
	return s
}

// seal returns the URL of a plan over the shards of the store. The plan is built from the local
// files, so that the cache stays empty.
func (s *countedStore) seal(t *testing.T, config string) string {
	plantest.Seal(t, s.dir, "plan.json", fmt.Sprintf("sequence_length: %d\nseed: 3\nsources:\n"+
		"- {name: web, shards: [web-0, web-1], weight: 0.7}\n- {name: code, shards: [code], weight: 0.3}\n%s",
		storeLength, config))
	return s.url + "/plan.json"
}

// readStore reads a plan as the ranks of one host. It calls wait after the first record of all
// ranks.
func readStore(ctx context.Context, url string, batch, ranks int, wait func()) error {
	p, err := blend.ReadPlan(url)
	if err != nil {
		return err
	}
	d, err := blend.Open(ctx, p, blend.OpenOptions{})
	if err != nil {
		return err
	}
	defer d.Close()
	var streams []*stream.Stream
	for rank := range ranks {
		s, err := stream.New(ctx, d, stream.Options{BatchSize: batch, Rank: rank, World: ranks, Hosts: 1,
			To: d.Length() / int64(batch) * int64(batch)})
		if err != nil {
			return err
		}
		defer s.Close()
		streams = append(streams, s)
	}
	for record := 0; ; record++ {
		if record == 1 {
			wait()
		}
		for _, s := range streams {
			r, err := s.Next()
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
			r.Release()
		}
	}
}

// simulateStore simulates a read of the plan by ranks of one host.
func simulateStore(t *testing.T, path string, batch, ranks int, cache int64) Store {
	p, err := blend.ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Run(context.Background(), p, Options{BatchSize: batch, Nodes: 1, RanksPerNode: ranks, Storage: Kinds[0],
		To: p.Length() / int64(batch) * int64(batch), StoreCache: cache})
	if err != nil {
		t.Fatal(err)
	}
	return r.Store
}

// near reports whether two counts differ by at most a fraction.
func near(a, b int64, fraction float64) bool {
	return float64(max(a, b)-min(a, b)) <= fraction*float64(max(a, b))
}

// The simulation counts the requests and bytes that a server counts.
func TestStoreCountsRequests(t *testing.T) {
	for i, c := range []struct {
		config       string
		batch, ranks int
	}{
		{"", 16, 1},
		{"", 12, 3},
		{"shuffle: {block: 128, group: 4}\n", 16, 1},
		{"shuffle: {block: 20, group: 8}\nskips:\n- {from: 37, to: 141}\n", 12, 3},
	} {
		s := newCountedStore(t, i, 1_200_000)
		path := s.seal(t, c.config)
		want := simulateStore(t, path, c.batch, c.ranks, 1<<30)
		opens := want.OpenRequests - int64(c.ranks-1)*3*shardRequests // the ranks of this process share open shards
		if err := readStore(t.Context(), path, c.batch, c.ranks, func() {
			testwait.Until(t, "all tokens are fetched", func() bool { return s.bytes.Load() >= want.Bytes })
		}); err != nil {
			t.Fatal(err)
		}
		if got := s.bytes.Load(); got != want.Bytes {
			t.Errorf("%+v: %d bytes, want %d", c, got, want.Bytes)
		}
		// Groups and ranks fetch at the same time. A range between two others may be fetched with
		// one of them.
		tolerance := 0.05
		if c.ranks > 1 || c.config != "" {
			tolerance = 0.2
		}
		if got := s.requests.Load(); !near(got, want.Requests, tolerance) || s.others.Load() != opens {
			t.Errorf("%+v: %d requests for tokens and %d others, want about %d and %d", c, got, s.others.Load(),
				want.Requests, opens)
		}
		if want.Again != 0 || want.CompleteBlocks != (c.config != "") {
			t.Errorf("%+v: %+v", c, want)
		}
	}
}

// storeVariable makes the test binary read the plan at the URL.
const storeVariable = "MULA_TEST_STORE"

// The cache cannot keep the blocks of a group, so only the windows are fetched, many of them again.
// Another process has such a cache.
func TestStoreWithASmallCache(t *testing.T) {
	const cache = 2 << 20
	s := newCountedStore(t, 10, 1_500_000)
	path := s.seal(t, "shuffle: {block: 64, group: 64}\n")
	ample, want := simulateStore(t, path, 16, 1, 1<<30), simulateStore(t, path, 16, 1, cache)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), storeVariable+"="+path, blockcache.FolderVariable+"="+t.TempDir(),
		fmt.Sprintf("%s=%d", blockcache.SizeVariable, cache))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got := s.bytes.Load(); got < 2*ample.Bytes || want.CompleteBlocks || !near(got, want.Bytes, 0.5) ||
		want.Again < want.Bytes/2 {
		t.Errorf("%d bytes; want about %+v, more than %+v", got, want, ample)
	}
	if got := s.requests.Load(); !near(got, want.Requests, 0.5) {
		t.Errorf("%d requests; want about %+v", got, want)
	}
}
