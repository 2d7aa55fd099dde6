package shardtest

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
)

// A Server is a web server for the files of a folder.
type Server struct {
	URL      string // of the folder, without a slash at the end
	Requests atomic.Int64
	Bytes    atomic.Int64 // of content that was sent
}

// Serve starts a web server for the files of a folder. It answers requests for ranges, and sends
// the SHA-256 of the content as ETag. The test stops it.
func Serve(t testing.TB, dir string) *Server {
	t.Helper()
	s := &Server{}
	files := http.FileServer(http.Dir(dir))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.Requests.Add(1)
		if data, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(r.URL.Path))); err == nil {
			sum := sha256.Sum256(data)
			w.Header().Set("ETag", `"`+hex.EncodeToString(sum[:8])+`"`)
		}
		files.ServeHTTP(counting{w, &s.Bytes}, r)
	}))
	t.Cleanup(server.Close)
	s.URL = server.URL
	return s
}

// counting counts the bytes of a response.
type counting struct {
	http.ResponseWriter
	bytes *atomic.Int64
}

func (c counting) Write(p []byte) (int, error) {
	c.bytes.Add(int64(len(p))) // before the client can see them
	return c.ResponseWriter.Write(p)
}
