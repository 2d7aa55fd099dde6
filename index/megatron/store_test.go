package megatron

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
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

// put copies the .idx files of a folder to a store.
func put(t *testing.T, dir, url string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.idx"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := objects.WriteFile(t.Context(), url+filepath.Base(name), data); err != nil {
			t.Fatal(err)
		}
	}
}

// Processes that share only a store that fails now and then build the files of a local build, keep
// them, and build them again without Resume.
func TestStore(t *testing.T) {
	local := vectorConfig(t, vectorFiles(t))
	if err := build(t, local, 2); err != nil {
		t.Fatal(err)
	}
	store := objectstest.S3(t)
	put(t, local.Root, store.URL+"tokens/")
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
	put(t, root, store.URL+"tokens/")
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
