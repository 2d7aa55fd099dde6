package objects_test

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// A hub answers as the Hugging Face hub's HTTP layout is documented: small files are sent by the
// hub, and large ones by a server of content, to which it redirects. Lists have pages.
type hub struct {
	t     *testing.T
	self  string // its address for clients
	mutex sync.Mutex
	files map[string][]byte
	blobs map[string][]byte // of the server of content
}

const (
	hubToken = "hf_hidden"
	hubLarge = 1000
	hubPage  = 4
)

func (h *hub) put(name string, data []byte) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.files[name] = data
	h.blobs[fmt.Sprintf("%x", sha256.Sum256(data))] = data
}

func (h *hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	if blob, ok := strings.CutPrefix(r.URL.Path, "/content/"); ok {
		if r.Header.Get("Authorization") != "" || r.URL.Query().Get("signature") == "" {
			h.t.Errorf("the request for content has the hub's token, or no signature: %v", r.Header)
		}
		w.Header().Set("ETag", `"another"`)
		http.ServeContent(w, r, "x.bin", time.Time{}, bytes.NewReader(h.blobs[blob]))
		return
	}
	if r.Header.Get("Authorization") != "Bearer "+hubToken {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if name, ok := strings.CutPrefix(r.URL.Path, "/datasets/owner/name/resolve/main/"); ok {
		data, ok := h.files[name]
		if !ok {
			w.Header().Set("X-Error-Code", "EntryNotFound")
			http.Error(w, "Entry not found", http.StatusNotFound)
			return
		}
		w.Header().Set("X-Repo-Commit", strings.Repeat("0", 40))
		if len(data) < hubLarge {
			w.Header().Set("ETag", `"`+gitHash(data)+`"`)
			http.ServeContent(w, r, "x.bin", time.Time{}, bytes.NewReader(data))
			return
		}
		sum := fmt.Sprintf("%x", sha256.Sum256(data))
		w.Header().Set("X-Linked-Etag", `"`+sum+`"`)
		w.Header().Set("X-Linked-Size", strconv.Itoa(len(data)))
		http.Redirect(w, r, h.self+"/content/"+sum+"?signature=hidden-signature", http.StatusFound)
		return
	}
	folder, ok := strings.CutPrefix(r.URL.Path, "/api/datasets/owner/name/tree/main")
	if !ok {
		w.Header().Set("X-Error-Code", "RepoNotFound")
		w.WriteHeader(http.StatusNotFound)
		return
	}
	h.list(w, r, strings.TrimPrefix(folder+"/", "/"))
}

func gitHash(data []byte) string {
	return fmt.Sprintf("%x", sha1.Sum(append(fmt.Appendf(nil, "blob %d\x00", len(data)), data...)))
}

func (h *hub) list(w http.ResponseWriter, r *http.Request, folder string) {
	type entry struct {
		Type string         `json:"type"`
		OID  string         `json:"oid"`
		Size int            `json:"size"`
		Path string         `json:"path"`
		LFS  map[string]any `json:"lfs,omitempty"`
	}
	recursive := r.URL.Query().Get("recursive") == "true"
	var entries []entry
	folders := make(map[string]bool)
	for name, data := range h.files {
		below, ok := strings.CutPrefix(name, folder)
		if !ok {
			continue
		}
		for dir := path.Dir(below); dir != "."; dir = path.Dir(dir) {
			folders[folder+dir] = true
		}
		if !recursive && strings.Contains(below, "/") {
			continue
		}
		e := entry{Type: "file", Path: name, Size: len(data), OID: gitHash(data)}
		if len(data) >= hubLarge {
			e.LFS = map[string]any{"oid": fmt.Sprintf("%x", sha256.Sum256(data)), "size": len(data)}
		}
		entries = append(entries, e)
	}
	if len(entries) == 0 && len(folders) == 0 {
		w.Header().Set("X-Error-Code", "EntryNotFound")
		w.WriteHeader(http.StatusNotFound)
		return
	}
	for dir := range folders {
		if recursive || path.Dir(dir)+"/" == folder {
			entries = append(entries, entry{Type: "directory", Path: dir})
		}
	}
	slices.SortFunc(entries, func(a, b entry) int { // folders first
		if a.Type != b.Type {
			return strings.Compare(a.Type, b.Type)
		}
		return strings.Compare(a.Path, b.Path)
	})
	from, _ := strconv.Atoi(r.URL.Query().Get("cursor"))
	to := min(from+hubPage, len(entries))
	if to < len(entries) {
		w.Header().Set("Link", fmt.Sprintf(`<%s%s?recursive=%t&cursor=%d>; rel="next"`, h.self, r.URL.EscapedPath(),
			recursive, to))
	}
	json.NewEncoder(w).Encode(entries[from:to])
}

func TestHub(t *testing.T) {
	h := &hub{t: t, files: make(map[string][]byte), blobs: make(map[string][]byte)}
	server := httptest.NewServer(h)
	defer server.Close()
	proxy := objectstest.NewProxy(t, server.URL)
	h.self = proxy.URL
	t.Setenv("HF_ENDPOINT", proxy.URL)
	t.Setenv("HF_TOKEN", hubToken)
	objectstest.Run(t, objectstest.Place{URL: "hf://datasets/owner/name/", Proxy: proxy, List: true, Put: h.put,
		Keeps: true, Secrets: []string{hubToken, "hidden-signature"}})

	h.put("data/x", []byte("content"))
	for _, address := range []string{"hf://datasets/owner/name@main/data/x", "hf://datasets/owner/name/data/x"} {
		if data, _, err := objects.ReadFile(t.Context(), address, 100); err != nil || string(data) != "content" {
			t.Errorf("%s: %q, %v", address, data, err)
		}
	}
	ctx := objects.WithPatience(t.Context(), 3*time.Second)
	for address, want := range map[string]string{
		"hf://datasets/owner":                                   "hf://datasets/OWNER/NAME",
		"hf://owner/name/x":                                     "hf://datasets/OWNER/NAME",
		"hf://datasets/owner/name@refs/convert/parquet/x":       "404",
		"hf://datasets/other/name/x":                            "404",
		"hf://datasets/owner/name@0123456789abcdef/data/x.json": "404",
	} {
		if _, err := objects.Stat(ctx, address); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", address, err, want)
		}
	}
	t.Setenv("HF_TOKEN", "")
	t.Setenv("HF_HOME", t.TempDir())
	if _, err := objects.Stat(ctx, "hf://datasets/owner/name/data/x"); err == nil ||
		!strings.Contains(err.Error(), "HF_TOKEN") || !errors.Is(err, fs.ErrPermission) {
		t.Errorf("without a token: %v", err)
	}
}
