package objects_test

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// A resumable is one resumable upload, as the documentation of Google Cloud Storage defines it. It
// keeps multiples of 256 KiB of each part but the last, and sometimes fewer than were sent.
type resumable struct {
	t      *testing.T
	mutex  sync.Mutex
	random *rand.Rand
	data   []byte
	done   bool
}

func (u *resumable) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	const session = "/upload/session"
	switch {
	case r.Method == http.MethodPost && r.URL.Query().Get("uploadType") == "resumable":
		u.data, u.done = nil, false
		w.Header().Set("Location", "http://"+r.Host+session)
	case r.Method == http.MethodPut && r.URL.Path == session:
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client has ended the connection
		}
		u.part(w, r.Header.Get("Content-Range"), body)
	case u.done && r.URL.Path == "/storage/v1/b/bucket/o/x":
		fmt.Fprintf(w, `{"name":"x","size":"%d","generation":"1","updated":"2026-01-01T00:00:00Z"}`, len(u.data))
	default:
		http.NotFound(w, r)
	}
}

func (u *resumable) part(w http.ResponseWriter, header string, body []byte) {
	var from, last, total int64
	final := true
	switch {
	case strings.HasPrefix(header, "bytes */"):
		from = -1
		if _, err := fmt.Sscanf(header, "bytes */%d", &total); err != nil {
			final = false
		}
	default:
		text := strings.TrimSuffix(header, "*")
		if _, err := fmt.Sscanf(text, "bytes %d-%d/%d", &from, &last, &total); err != nil {
			final = false
		}
		if last-from+1 != int64(len(body)) || !final && len(body)%(256<<10) != 0 {
			u.t.Errorf("a part of %d bytes with the range %q", len(body), header)
		}
	}
	have := int64(len(u.data))
	if from >= 0 && !u.done {
		if from > have {
			u.t.Errorf("the range %q after %d bytes", header, have)
		}
		if new := have - from; new < int64(len(body)) {
			rest := body[new:]
			if u.random.IntN(3) == 0 && len(rest) > 512<<10 {
				rest = rest[:256<<10]
			}
			u.data = append(u.data, rest...)
		}
	}
	if final && int64(len(u.data)) == total {
		u.done = true
	}
	if u.done {
		return
	}
	if len(u.data) > 0 {
		w.Header().Set("Range", fmt.Sprintf("bytes=0-%d", len(u.data)-1))
	}
	w.WriteHeader(http.StatusPermanentRedirect)
}

// An upload to Google Cloud Storage resumes at the byte that the store has.
func TestGCSUpload(t *testing.T) {
	for seed := range uint64(3) {
		u := &resumable{t: t, random: rand.New(rand.NewPCG(seed, 1))}
		server := httptest.NewServer(u)
		proxy := objectstest.NewProxy(t, server.URL)
		t.Setenv("STORAGE_EMULATOR_HOST", proxy.URL)
		faults := rand.New(rand.NewPCG(seed, 2))
		var mutex sync.Mutex
		proxy.Disturb(func(*http.Request) objectstest.Fault {
			mutex.Lock()
			defer mutex.Unlock()
			switch faults.IntN(6) {
			case 0:
				return objectstest.Fault{Lose: true}
			case 1:
				return objectstest.Fault{Status: 503}
			case 2:
				return objectstest.Fault{Drop: true}
			}
			return objectstest.Fault{}
		})
		want := make([]byte, []int{48 << 20, 40<<20 + 7, 33 << 20}[seed])
		rand.NewChaCha8([32]byte{byte(seed)}).Read(want)
		w, err := objects.Create(objects.WithPatience(t.Context(), 30*time.Second), "gs://bucket/x")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(want); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		if !u.done || !bytes.Equal(u.data, want) {
			t.Errorf("seed %d: the store has %d bytes, want %d", seed, len(u.data), len(want))
		}
		server.Close()
	}
}
