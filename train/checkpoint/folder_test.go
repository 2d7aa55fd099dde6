package checkpoint

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/moe"
	"mula/train/checkpoint/checkpointtest"
)

// A large model is converted to a store with the bytes of a local directory. Its weights are sent
// in parts, and config.json appears after all other objects.
func TestConvertStore(t *testing.T) {
	ctx := t.Context()
	dir, _ := checkpointtest.Model(t, func(c *moe.Config) { c.VocabSize, c.TieEmbeddings = 67_000, true },
		map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t), "README.md": "not copied"})
	local := filepath.Join(t.TempDir(), "model")
	options := ConvertOptions{ShardSize: 17_200_000}
	want, err := ModelDir{Dir: dir}.Convert(ctx, local, options)
	if err != nil {
		t.Fatal(err)
	}
	store := objectstest.S3(t)
	url := store.URL + "models/a"
	var lock sync.Mutex
	var parts, appeared []string
	store.Proxy.Disturb(func(r *http.Request) (f objectstest.Fault) {
		lock.Lock()
		defer lock.Unlock()
		name := strings.TrimPrefix(r.URL.Path, "/bucket/models/a/")
		switch {
		case name == folderLock:
		case r.Method == http.MethodPut && r.URL.Query().Get("partNumber") != "":
			parts = append(parts, name)
		case r.Method == http.MethodPut || r.Method == http.MethodPost && r.URL.Query().Get("uploadId") != "":
			appeared = append(appeared, name)
		}
		return f
	})
	if found, err := (ModelDir{Dir: dir}).Convert(ctx, url, options); err != nil || found.Weights != want.Weights {
		t.Fatalf("%+v, %v", found, err)
	}
	if !slices.Equal(appeared, []string{"tokenizer.json", "generation_config.json", "tokenizer_config.json",
		"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
		"config.json"}) || len(parts) != 2 {
		t.Errorf("%q appeared, with the parts %q", appeared, parts)
	}
	if !maps.Equal(objectstest.Contents(t, url), checkpointtest.Files(t, local)) {
		t.Error("the model in the store differs from the local one")
	}
}

// A model is converted to a store, within it and from it, and opened there, though the store fails
// now and then.
func TestConvertUnreliableStore(t *testing.T) {
	ctx := t.Context()
	dir, m := checkpointtest.Model(t, nil, map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t)})
	local, back := filepath.Join(t.TempDir(), "model"), filepath.Join(t.TempDir(), "back")
	options := ConvertOptions{ShardSize: 500_000}
	want, err := ModelDir{Dir: dir}.Convert(ctx, local, options)
	if err != nil {
		t.Fatal(err)
	}
	store := objectstest.S3(t)
	store.Proxy.Disturb(objectstest.Repeat(23, map[int64]objectstest.Fault{
		3: {Status: http.StatusServiceUnavailable}, 6: {Drop: true}, 9: {Lose: true}, 11: {Cut: 100}}))
	if _, err := (ModelDir{Dir: dir}).Convert(ctx, store.URL+"a/", options); err != nil {
		t.Fatal(err)
	}
	from, refused, err := FindModel(ctx, store.URL+"a")
	if err != nil || refused != nil || from.Checkpoint != nil {
		t.Fatalf("%+v, %v, %v", from, refused, err)
	}
	if _, err := from.Convert(ctx, store.URL+"b", options); err != nil {
		t.Fatal(err)
	}
	found, err := from.Convert(ctx, back, options)
	if err != nil || found.Weights != want.Weights || found.Tokens != 258 {
		t.Fatalf("%+v, %v", found, err)
	}
	opened, err := from.Model(checkpointtest.Device(t, 1))
	if err != nil || checkpointtest.WeightsHash(opened.Parameters()) != checkpointtest.WeightsHash(m.Parameters()) {
		t.Errorf("opened from the store: other weights, %v", err)
	}
	store.Proxy.Disturb(nil)
	for _, got := range []map[string]string{objectstest.Contents(t, store.URL+"a"),
		objectstest.Contents(t, store.URL+"b"), checkpointtest.Files(t, back)} {
		if !maps.Equal(got, checkpointtest.Files(t, local)) {
			t.Error("a model of an unreliable store differs from the local one")
		}
	}
}

// Objects that no killed export has left are never removed or overwritten, and a failed export
// leaves nothing.
func TestConvertStoreRefuses(t *testing.T) {
	ctx := t.Context()
	dir, m := checkpointtest.Model(t, nil, nil)
	store := objectstest.S3(t)
	good := ModelDir{Dir: dir}
	for name, content := range map[string]string{"model": "config.json", "weights": "model.safetensors",
		"other": "notes.txt", "below": "step-00000001/config.json"} {
		url := store.URL + name
		if err := objects.WriteFile(ctx, objects.Join(url, content), []byte("mine")); err != nil {
			t.Fatal(err)
		}
		if _, err := good.Convert(ctx, url, ConvertOptions{}); !errors.Is(err, errExists) {
			t.Errorf("into a folder with %s: %v", content, err)
		}
		if got := objectstest.Contents(t, url); !maps.Equal(got, map[string]string{content: "mine"}) {
			t.Errorf("a folder with %s has %d objects", content, len(got))
		}
	}
	m.Parameters()[3].Weight.Floats()[5] = 1e30
	large := t.TempDir()
	if err := m.Save(ctx, large, moe.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := (ModelDir{Dir: large}).Convert(ctx, store.URL+"large", ConvertOptions{DType: "F16"}); err == nil ||
		!strings.Contains(err.Error(), "beyond the range of F16") {
		t.Errorf("a weight out of range: %v", err)
	}
	if got := objectstest.Contents(t, store.URL+"large"); len(got) > 0 {
		t.Errorf("a failed export left %d objects", len(got))
	}
}

// A folder that a process is writing is refused. A process whose lock is taken over publishes no
// further object, and removes none.
func TestConvertStoreLocked(t *testing.T) {
	ctx := t.Context()
	dir, _ := checkpointtest.Model(t, nil, map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t)})
	store := objectstest.S3(t)
	url := store.URL + "model"
	convert := func() error {
		_, err := ModelDir{Dir: dir}.Convert(ctx, url, ConvertOptions{})
		return err
	}
	var once sync.Once
	store.Proxy.Disturb(func(r *http.Request) (none objectstest.Fault) {
		if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/tokenizer.json") {
			once.Do(func() {
				if err := convert(); err == nil || !strings.Contains(err.Error(), "is writing this folder") {
					t.Errorf("while the folder is written: %v", err)
				}
				if err := objects.WriteFile(ctx, objects.Join(url, folderLock), []byte("{}")); err != nil {
					t.Error(err)
				}
			})
		}
		return none
	})
	if err := convert(); err == nil || !strings.Contains(err.Error(), "has taken it over") {
		t.Errorf("after the lock was taken over: %v", err)
	}
	got, want := slices.Sorted(maps.Keys(objectstest.Contents(t, url))), []string{folderLock, "tokenizer.json"}
	if !slices.Equal(got, want) {
		t.Errorf("objects %q, want %q", got, want)
	}
}

// A process that is killed at any request leaves no model, or a whole one. The next process that
// writes to that URL succeeds, and leaves nothing else.
func TestConvertStoreKilled(t *testing.T) {
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, _ := checkpointtest.Model(t, nil, map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t)})
	store := objectstest.S3(t)
	url := store.URL + "model"
	local := filepath.Join(t.TempDir(), "model")
	options := ConvertOptions{ShardSize: 500_000} // of the child
	if _, err := (ModelDir{Dir: dir}).Convert(t.Context(), local, options); err != nil {
		t.Fatal(err)
	}
	want := checkpointtest.Files(t, local)
	partial := 0
	for k := int64(1); ; k += 1 + k/3 {
		child := exec.Command(executable)
		child.Env = append(os.Environ(), fmt.Sprintf("%s=%d\n%s\n%s", convertEnv, 1<<30, dir, url))
		var output bytes.Buffer
		child.Stdout, child.Stderr = &output, &output
		var requests atomic.Int64
		started := make(chan struct{})
		store.Proxy.Disturb(func(*http.Request) (f objectstest.Fault) {
			<-started
			if requests.Add(1) >= k {
				child.Process.Kill()
				f.Drop = true
			}
			return f
		})
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		close(started)
		err := child.Wait()
		store.Proxy.Disturb(nil)
		if err == nil {
			if k < 20 || partial < 3 {
				t.Errorf("%d requests only; %d processes left a part of the model", k, partial)
			}
			return
		}
		if requests.Load() < k {
			t.Fatalf("request %d: %v: %s", k, err, output.Bytes())
		}
		left := objectstest.Contents(t, url)
		if left["config.json"] == "" {
			if _, _, err := FindModel(t.Context(), url); !errors.Is(err, ErrNone) {
				t.Errorf("killed at request %d: %v, want %v", k, err, ErrNone)
			}
			if len(left) > 1 {
				partial++
			}
			if _, err := (ModelDir{Dir: dir}).Convert(t.Context(), url, options); err != nil {
				t.Fatalf("after a process killed at request %d: %v", k, err)
			}
			left = objectstest.Contents(t, url)
		}
		delete(left, folderLock)
		if !maps.Equal(left, want) {
			t.Errorf("killed at request %d: the model differs from the local one", k)
		}
		for name := range objectstest.Contents(t, url) {
			if err := objects.Remove(t.Context(), objects.Join(url, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
}
