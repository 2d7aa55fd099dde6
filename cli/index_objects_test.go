package cli

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// An order of OLMo-core in a store that fails now and then has the bytes of the local file. It is
// kept by a second command and verified, and another order of its name is not replaced.
func TestIndexOLMoStore(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("tokens.npy", make([]byte, 2*8*100_000), 0o644); err != nil {
		t.Fatal(err)
	}
	store := objectstest.S3(t)
	index := func(folder string, more ...string) (code int, stdout, stderr string) {
		return call(t, append([]string{"index", "--for", "olmo", "--paths", "tokens.npy", "--seq-length", "8", "--seed",
			"1", "--cache", folder}, more...)...)
	}
	if code, _, stderr := index("local"); code != exitDone {
		t.Fatalf("exit %d, %s", code, stderr)
	}
	names, err := filepath.Glob("local/*")
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	want, err := os.ReadFile(names[0])
	if err != nil {
		t.Fatal(err)
	}
	store.Proxy.Disturb(objectstest.Repeat(3, map[int64]objectstest.Fault{
		1: {Status: http.StatusServiceUnavailable}, 2: {Cut: 1000}}))
	url := store.URL + "orders/" + filepath.Base(names[0])
	for _, says := range []string{"an order of 100,000 samples", "The file was already complete."} {
		if code, stdout, stderr := index(store.URL+"orders", "--work", "work"); code != exitDone ||
			!strings.Contains(stdout, says) {
			t.Fatalf("exit %d, %s%s", code, stdout, stderr)
		}
		if got, _, err := objects.ReadFile(t.Context(), url, 1<<30); err != nil || string(got) != string(want) {
			t.Errorf("%d bytes, want %d, %v", len(got), len(want), err)
		}
	}
	if code, stdout, stderr := call(t, "index", "verify", store.URL+"orders"); code != exitDone ||
		!strings.Contains(stdout, "1 of 1 set equal, byte for byte; written by OLMo-core") {
		t.Errorf("verify: exit %d, %s%s", code, stdout, stderr)
	}
	store.Proxy.Disturb(nil)
	want[len(want)/2] ^= 1
	if err := objects.WriteFile(t.Context(), url, want); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := index(store.URL+"orders", "--work", "work"); code != exitFailed ||
		!strings.Contains(stderr, url+": position 50000 ") {
		t.Errorf("another order: exit %d, %s", code, stderr)
	}
	if code, stdout, stderr := call(t, "index", "verify", store.URL+"orders"); code != exitFailed ||
		!strings.Contains(stdout, url+": position 50000 ") {
		t.Errorf("verify another order: exit %d, %s%s", code, stdout, stderr)
	}
	if code, _, stderr := call(t, "index", "verify", store.URL+"empty"); code != exitFailed ||
		!strings.Contains(stderr, store.URL+"empty holds no index files") {
		t.Errorf("verify an empty folder: exit %d, %s", code, stderr)
	}
	if left, err := os.ReadDir("work"); err != nil || len(left) > 0 {
		t.Errorf("left in the local folder: %v, %v", left, err)
	}
}
