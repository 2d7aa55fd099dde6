package job

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// Processes that are cut off and resume copy every shard to the store, its manifest last.
func TestCopies(t *testing.T) {
	store := objectstest.S3(t)
	dir := t.TempDir()
	c := makeCorpus(t, 31, 4, 80, false)
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(dir, "x"), Copy: store.URL + "tokens/y", ShardTokens: 4000, PieceBytes: 1500,
		tuning: quick}
	var mutex sync.Mutex
	var written []string // in order
	watch := func(fault func(n int) objectstest.Fault) {
		written = nil
		store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
			mutex.Lock()
			defer mutex.Unlock()
			if r.Method == http.MethodPut || r.Method == http.MethodDelete {
				written = append(written, r.Method+" "+strings.TrimPrefix(r.URL.Path, "/bucket/tokens/"))
			}
			return fault(len(written))
		})
	}
	none := func(int) objectstest.Fault { return objectstest.Fault{} }
	equal := func() {
		t.Helper()
		here, err := filepath.Glob(filepath.Join(dir, "x-*"))
		if err != nil || len(here) < 12 {
			t.Fatalf("%d files, %v", len(here), err)
		}
		for _, path := range here {
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			address := store.URL + "tokens/y" + strings.TrimPrefix(path, filepath.Join(dir, "x"))
			if got, _, err := objects.ReadFile(t.Context(), address, 1<<30); err != nil || string(got) != string(want) {
				t.Errorf("%s: %d bytes, want %d: %v", address, len(got), len(want), err)
			}
		}
		found := 0
		for _, err := range objects.List(t.Context(), store.URL+"tokens/") {
			if err != nil {
				t.Fatal(err)
			}
			found++
		}
		if found != len(here) {
			t.Errorf("the store has %d objects, want %d", found, len(here))
		}
	}

	// The third to the tenth request that writes do not succeed, and then the process ends.
	ctx, cancel := context.WithCancel(objects.WithPatience(t.Context(), 1e9))
	watch(func(n int) objectstest.Fault {
		if n > 10 {
			cancel()
		}
		if n > 2 {
			return objectstest.Fault{Status: 503}
		}
		return objectstest.Fault{}
	})
	if _, err := Run(ctx, o); err == nil {
		t.Fatal("a job succeeded without its store")
	}
	cancel()
	watch(none)
	var group sync.WaitGroup
	for range 2 {
		group.Go(func() {
			if _, err := Run(t.Context(), o); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	equal()
	for _, name := range written {
		before := slices.Index(written, name)
		if shard, ok := strings.CutSuffix(strings.TrimPrefix(name, "PUT "), ".json"); ok {
			for _, ending := range []string{".bin", ".idx", ".sums", ".docs.arrow"} {
				at := slices.Index(written, "PUT "+shard+ending)
				if at > before {
					t.Errorf("%s%s was written after the manifest", shard, ending)
				}
			}
		}
	}

	watch(none)
	if s, err := Run(t.Context(), o); err != nil || !s.Before {
		t.Errorf("a complete job: %+v, %v", s, err)
	}
	if slices.ContainsFunc(written, func(name string) bool { return strings.HasPrefix(name, "PUT") }) {
		t.Errorf("a complete job has written %q", written)
	}
	// A lost object is written again, and the shard has no manifest while it is incomplete.
	if err := objects.Remove(t.Context(), store.URL+"tokens/y-00001.bin"); err != nil {
		t.Fatal(err)
	}
	watch(none)
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	equal()
	if len(written) < 5 || written[0] != "DELETE y-00001.json" || written[len(written)-2] != "PUT y-00001.json" {
		t.Errorf("written: %q", written)
	}
	o.Layout = "fms"
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "not copied") {
		t.Errorf("a layout with a common file: %v", err)
	}
	o.Layout, o.Output, o.Copy = "", filepath.Join(t.TempDir(), "x"), "https://127.0.0.1:1/x"
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "read only") {
		t.Errorf("a web server: %v", err)
	}
}
