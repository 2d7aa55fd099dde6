package megatron

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mula/index/cache"
	"mula/index/rebuild"
	"mula/internal/blockcache"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/shards"
)

// TestMain keeps fetched files out of the user's cache.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "mula-megatron")
	if err != nil {
		panic(err)
	}
	os.Setenv(blockcache.FolderVariable, dir)
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// Processes that share only a store that fails now and then build the files of a local build, keep
// them, and build them again without Resume.
func TestStore(t *testing.T) {
	local := vectorConfig(t, vectorFiles(t))
	if err := build(t, local, 2); err != nil {
		t.Fatal(err)
	}
	store := objectstest.S3(t)
	objectstest.Upload(t, local.Root, "*.idx", store.URL+"tokens/")
	c := local
	c.Root, c.Cache = store.URL+"tokens", store.URL+"cache"
	run := func(resume bool) cache.Summary {
		x, err := New(t.Context(), c)
		if err != nil {
			t.Error(err)
			return cache.Summary{}
		}
		defer x.Close()
		scratch := t.TempDir()
		ctx := objects.WithPatience(t.Context(), 10*time.Second)
		s, err := x.Build(ctx, rebuild.BuildOptions{Threads: 2, Resume: resume, FS: objectfs.New(ctx, nil, scratch)})
		if err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(scratch); err != nil || len(left) > 0 {
			t.Errorf("left in the local folder: %v, %v", left, err)
		}
		return s
	}
	same := func() {
		t.Helper()
		entries, err := os.ReadDir(local.Cache)
		if err != nil {
			t.Fatal(err)
		}
		files := 0
		for _, e := range entries {
			if e.IsDir() {
				continue
			}
			files++
			want, err := os.ReadFile(filepath.Join(local.Cache, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			got, _, err := objects.ReadFile(t.Context(), c.Cache+"/"+e.Name(), 1<<30)
			if err != nil || string(got) != string(want) {
				t.Errorf("%s: %d bytes, want %d, %v", e.Name(), len(got), len(want), err)
			}
		}
		found := 0
		for _, err := range objects.ListFolder(t.Context(), c.Cache) {
			if err != nil {
				t.Fatal(err)
			}
			found++
		}
		if files != 45 || found != files {
			t.Errorf("%d local files, %d objects", files, found)
		}
	}
	random, mutex := rand.New(rand.NewPCG(1, 1)), sync.Mutex{}
	store.Proxy.Disturb(func(*http.Request) objectstest.Fault {
		mutex.Lock()
		defer mutex.Unlock()
		switch random.IntN(30) {
		case 0:
			return objectstest.Fault{Status: 503}
		case 1:
			return objectstest.Fault{Lose: true}
		}
		return objectstest.Fault{}
	})
	var sums [2]cache.Summary
	var group sync.WaitGroup
	for i := range sums {
		group.Go(func() { sums[i] = run(true) })
	}
	group.Wait()
	store.Proxy.Disturb(nil)
	for i, s := range sums {
		if n := s.Built + s.Kept + s.Shared; n != 12 {
			t.Errorf("process %d: %+v", i, s)
		}
	}
	same()
	if s := run(true); s.Kept != 12 {
		t.Errorf("again: %+v", s)
	}
	if s := run(false); s.Built != 12 {
		t.Errorf("without Resume: %+v", s)
	}
	same()
	if err := objects.Remove(t.Context(), store.URL+"cache/2919b6575c2ab8302aed2016a1b7193c-BlendedDataset-train-"+
		"dataset_index.npy"); err != nil {
		t.Fatal(err)
	}
	if s := run(true); s.Built != 1 || s.Kept != 11 {
		t.Errorf("after a file was removed: %+v", s)
	}
	same()
}

// Token files that cannot be used are named.
func TestStoreRefused(t *testing.T) {
	root := vectorFiles(t)
	store := objectstest.S3(t)
	objectstest.Upload(t, root, "*.idx", store.URL+"tokens/")
	whole, err := os.ReadFile(filepath.Join(root, "f2.idx"))
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"f1.bin": whole[:22], "short.idx": whole[:len(whole)-1]} {
		if err := objects.WriteFile(t.Context(), store.URL+"tokens/"+name, data); err != nil {
			t.Fatal(err)
		}
	}
	for words, want := range map[string]struct {
		text string
		kind error
	}{
		"1 f0 1 absent":                     {"tokens/absent.idx", fs.ErrNotExist},
		"1 f0 1 f1":                         {"tokens/f1.bin: expected", shards.ErrCorrupt},
		"1 f0 1 short":                      {"tokens/short.idx", shards.ErrCorrupt},
		"1 f0 1 " + store.URL + "other/x":   {"other/x.idx", fs.ErrNotExist},
		"1 f0 1 " + store.URL + "tokens/f0": {"", nil},
	} {
		c := vectorConfig(t, store.URL+"tokens")
		c.Blend = mustBlend(t, words)
		x, err := New(t.Context(), c)
		if err == nil {
			x.Close()
		}
		if !errors.Is(err, want.kind) || err != nil && !strings.Contains(err.Error(), want.text) {
			t.Errorf("%s: %v; want %v with %q", words, err, want.kind, want.text)
		}
	}
	c := vectorConfig(t, store.URL+"tokens")
	c.Blend = mustBlend(t, "1 f0.idx 1 f2")
	if _, err := New(t.Context(), c); err == nil || !strings.Contains(err.Error(), "remove .idx") {
		t.Errorf("a prefix with an extension: %v", err)
	}
}

// The report about a cache in a store that fails now and then equals the report about a local copy,
// whether the cache is right or damaged. Token files are in the store, or local.
func TestVerifyStore(t *testing.T) {
	root := vectorFiles(t)
	local := copyCache(t, vectorNamed(t, root, "A").Cache)
	store := objectstest.S3(t)
	objectstest.Upload(t, root, "*.idx", store.URL+"tokens/")
	objectstest.Upload(t, local, "*", store.URL+"cache/")
	ctx := objects.WithPatience(t.Context(), time.Minute)
	report := func(root string) rebuild.Report {
		t.Helper()
		r, err := Verify(ctx, store.URL+"cache", rebuild.VerifyOptions{Root: root, Threads: 2,
			FS: objectfs.New(ctx, nil, "")})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	store.Proxy.Disturb(objectstest.Repeat(29, map[int64]objectstest.Fault{
		3: {Status: http.StatusServiceUnavailable}, 11: {Cut: 100}, 19: {Lose: true}}))
	for _, root := range []string{root, store.URL + "tokens"} {
		if r := report(root); !allEqual(r) || !reflect.DeepEqual(r, verify(t, local, root)) {
			t.Errorf("token files in %s: %+v", root, r)
		}
	}
	store.Proxy.Disturb(nil)

	const train, blend = "f94a98c76b76328c9e7b19cbbaeb93e9-GPTDataset-train-",
		"2919b6575c2ab8302aed2016a1b7193c-BlendedDataset-train-"
	edit(t, filepath.Join(local, train+"sample_index.npy"), 128+8*17+4)
	edit(t, filepath.Join(local, blend+"dataset_index.npy"), 62)
	cut(t, filepath.Join(local, "9550917d92b5853d13ed9a169d7581ef-GPTDataset-train-shuffle_index.npy"), 4)
	objectstest.Upload(t, local, "*", store.URL+"cache/")
	for _, name := range []string{blend + "dataset_sample_index.npy", train + descriptionEnd} {
		remove(t, filepath.Join(local, name))
		if err := objects.Remove(t.Context(), store.URL+"cache/"+name); err != nil {
			t.Fatal(err)
		}
	}
	r := report(root)
	if want := verify(t, local, root); !reflect.DeepEqual(r, want) {
		t.Errorf("damaged: %+v; want %+v", r, want)
	}
	wrong := 0
	for _, v := range r.Verdicts {
		if v.Differs {
			wrong++
		}
	}
	if wrong != 2 || len(r.Notes) != 3 {
		t.Errorf("%d units differ: %+v", wrong, r)
	}
}

// An object that is replaced or refused while it is compared is named. Its unit is neither right
// nor wrong, although other settings than the right ones could still be compared.
func TestVerifyStoreUnreadable(t *testing.T) {
	root := vectorFiles(t)
	cache := copyCache(t, vectorNamed(t, root, "A").Cache)
	store := objectstest.S3(t)
	const unit = "f94a98c76b76328c9e7b19cbbaeb93e9-GPTDataset-train-"
	url := store.URL + "cache/" + unit + "sample_index.npy"
	for _, test := range []struct {
		says  string
		fault func() objectstest.Fault // of the first comparison
	}{
		{objects.ErrChanged.Error(), func() (none objectstest.Fault) {
			if err := objects.WriteFile(t.Context(), url, []byte("another")); err != nil {
				t.Error(err)
			}
			return none
		}},
		{"403 Forbidden", func() objectstest.Fault { return objectstest.Fault{Status: http.StatusForbidden} }},
	} {
		objectstest.Upload(t, cache, "*", store.URL+"cache/")
		var reads atomic.Int64
		store.Proxy.Disturb(func(r *http.Request) (none objectstest.Fault) {
			// the first read is of the header
			if r.Method == http.MethodGet && strings.HasSuffix(url, r.URL.Path) && reads.Add(1) == 2 {
				return test.fault()
			}
			return none
		})
		r, err := Verify(t.Context(), store.URL+"cache", rebuild.VerifyOptions{Root: root, Threads: 2,
			FS: objectfs.New(t.Context(), nil, "")})
		store.Proxy.Disturb(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range r.Verdicts {
			if wrong := v.Description == unit+descriptionEnd; v.Equal == wrong || v.Differs {
				t.Errorf("%s: %+v", test.says, v)
			} else if wrong && (!strings.Contains(v.Problem, url) || !strings.Contains(v.Problem, test.says)) {
				t.Errorf("%s; want %s: %s", v.Problem, url, test.says)
			}
		}
	}
}
