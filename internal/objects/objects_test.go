package objects_test

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

func TestURLs(t *testing.T) {
	for text, want := range map[string]bool{"s3://b/k": true, "x+y.z-1://": true, "://b": false, "a/b://c": false,
		"/a": false, "1x://b": false, "s3:/b": false, "": false, "Z://b": true} {
		if got := objects.IsURL(text); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	for text, want := range map[string]string{"ftp://h/x": `ftp://h/x: unknown scheme "ftp"`,
		"s3:///k": "the name after s3://", "s3://": "the name", "/x": "not a URL"} {
		if err := objects.Check(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	if err := objects.Check("S3://bucket/key"); err != nil {
		t.Error(err)
	}
	for _, test := range [][3]string{{"s3://b/x", "y/z", "s3://b/x/y/z"}, {"s3://b/", "y", "s3://b/y"},
		{"a/b", "c/d", filepath.Join("a", "b", "c", "d")}} {
		if got := objects.Join(test[0], test[1]); got != test[2] {
			t.Errorf("Join(%q, %q) is %q, want %q", test[0], test[1], got, test[2])
		}
	}
	if _, err := objects.Stat(t.Context(), "s3://bucket"); err == nil ||
		!strings.Contains(err.Error(), "names no object") {
		t.Errorf("a bucket: %v", err)
	}
}

// A folder serves files as a web server does.
type folder struct {
	dir    string
	change func(w http.ResponseWriter, r *http.Request) http.ResponseWriter // nil: unchanged
}

func (f *folder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.change != nil {
		if w = f.change(w, r); w == nil {
			return
		}
	}
	file, err := os.Open(filepath.Join(f.dir, filepath.FromSlash(r.URL.Path)))
	if err != nil {
		http.NotFound(w, r)
		return
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		panic(err)
	}
	w.Header().Set("ETag", fmt.Sprintf(`"%x-%x"`, info.ModTime().UnixNano(), info.Size()))
	http.ServeContent(w, r, "x.bin", info.ModTime(), file)
}

func (f *folder) put(t *testing.T) func(name string, data []byte) {
	return func(name string, data []byte) {
		path := filepath.Join(f.dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Error(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Error(err)
		}
	}
}

func TestWeb(t *testing.T) {
	f := &folder{dir: t.TempDir()}
	server := httptest.NewServer(f)
	defer server.Close()
	proxy := objectstest.NewProxy(t, server.URL)
	objectstest.Run(t, objectstest.Place{URL: proxy.URL + "/", Proxy: proxy, Put: f.put(t)})
}

// Credentials in a URL reach the server, and not an error.
func TestWebSecrets(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if user != "me" || password != "hidden" || r.URL.Query().Get("sig") != "secret" {
			w.WriteHeader(http.StatusTeapot)
		}
		if r.URL.Path == "/to" {
			http.Redirect(w, r, "http://127.0.0.1:1/x?sig=secret", http.StatusFound)
			return
		}
		w.WriteHeader(http.StatusForbidden)
	}))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	ctx := objects.WithPatience(t.Context(), 3*time.Second)
	for _, path := range []string{"x", "to", "%zz"} {
		_, err := objects.Stat(ctx, "http://me:hidden@"+host+"/"+path+"?sig=secret")
		if err == nil || strings.Contains(err.Error(), "hidden") || strings.Contains(err.Error(), "secret") ||
			!strings.Contains(err.Error(), host+"/"+path) || path == "x" && !strings.Contains(err.Error(), "403") {
			t.Errorf("error %q", err)
		}
	}
}

// limits hides from http.ServeContent what a request asked for.
func withoutRanges(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
	r.Header.Del("Range")
	return w
}

// Files of servers without ranges are read from the start to the end, also when connections break.
func TestWebWithoutRanges(t *testing.T) {
	f := &folder{dir: t.TempDir(), change: withoutRanges}
	server := httptest.NewServer(f)
	defer server.Close()
	proxy := objectstest.NewProxy(t, server.URL)
	want := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	f.put(t)("x", want)
	ctx := objects.WithPatience(t.Context(), time.Second)
	o, err := objects.Open(ctx, proxy.URL+"/x")
	if err != nil {
		t.Fatal(err)
	}
	cut := 400_000
	proxy.Disturb(func(r *http.Request) objectstest.Fault {
		cut += 500_000
		return objectstest.Fault{Cut: cut}
	})
	for _, from := range []int64{0, 1000} {
		cut = 400_000
		r := o.Range(ctx, from, int64(len(want))-from)
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, want[from:int64(len(want))-from]) {
			t.Errorf("from %d: %d bytes, %v", from, len(got), err)
		}
		r.Close()
	}
	proxy.Disturb(nil)
	if err := o.ReadAt(ctx, make([]byte, 10), 1000); err == nil || !strings.Contains(err.Error(), "download the file") {
		t.Errorf("a range: %v", err)
	}
	// Without a size, a version, and answers to HEAD.
	f.change = func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		if r.Method == http.MethodHead {
			w.WriteHeader(http.StatusMethodNotAllowed)
			return nil
		}
		http.NewResponseController(w).Flush()
		w.Write(want)
		return nil
	}
	if o, err = objects.Open(ctx, proxy.URL+"/x"); err != nil || o.Info() != (objects.Info{Size: -1}) {
		t.Fatalf("%+v, %v", o.Info(), err)
	}
	r := o.Reader(ctx)
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Errorf("without a size: %d bytes, %v", len(got), err)
	}
	r.Close()
	proxy.Disturb(func(*http.Request) objectstest.Fault { return objectstest.Fault{Cut: 1000} })
	r = o.Reader(ctx)
	if _, err := io.ReadAll(r); err == nil || !strings.Contains(err.Error(), "cannot be resumed") {
		t.Errorf("a broken connection without a size: %v", err)
	}
	r.Close()
}

// A host that never answered is not waited for as long as a host that did.
func TestWrongHost(t *testing.T) {
	ctx := objects.WithPatience(t.Context(), 18*time.Second)
	start := time.Now()
	_, err := objects.Stat(ctx, "http://127.0.0.1:1/x")
	if took := time.Since(start); err == nil || took > 5*time.Second || !strings.Contains(err.Error(), "refused") {
		t.Errorf("%v after %v", err, took)
	}
}

// What the store answered is in the error, also when it answers the last try too late.
func TestLateAnswer(t *testing.T) {
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) > 1 {
			<-r.Context().Done()
		}
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	defer server.Close()
	_, err := objects.Stat(objects.WithPatience(t.Context(), 3*time.Second), server.URL+"/x")
	for _, want := range []string{"no response", "503"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

func TestS3InMemory(t *testing.T) { objectstest.Run(t, objectstest.S3(t)) }

// AWS_CA_BUNDLE has the certificates of S3 servers, as in the SDK.
func TestS3Certificates(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("ETag", `"tag"`)
	}))
	defer server.Close()
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	for name, value := range map[string]string{"AWS_ENDPOINT_URL": server.URL, "AWS_ACCESS_KEY_ID": "test",
		"AWS_SECRET_ACCESS_KEY": "test", "AWS_CA_BUNDLE": ""} {
		t.Setenv(name, value)
	}
	if _, err := objects.Stat(t.Context(), "s3://bucket/x"); err == nil ||
		!strings.Contains(err.Error(), "certificate") {
		t.Errorf("an unknown certificate: %v", err)
	}
	bundle := filepath.Join(t.TempDir(), "ca.pem")
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(bundle, certificate, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_CA_BUNDLE", bundle)
	if info, err := objects.Stat(t.Context(), "s3://bucket/x"); err != nil || info.Version != "tag" {
		t.Errorf("%+v, %v", info, err)
	}
}

// With the environment of a server with the interface of S3 that runs elsewhere, such as
// conformance/objects.sh starts, its bucket is tested.
func TestS3(t *testing.T) {
	place := os.Getenv("MULA_TEST_S3")
	if place == "" {
		t.Skip("MULA_TEST_S3 is not set; conformance/objects.sh starts a server and sets it")
	}
	proxy := objectstest.NewProxy(t, os.Getenv("AWS_ENDPOINT_URL"))
	t.Setenv("AWS_ENDPOINT_URL", proxy.URL)
	objectstest.Run(t, objectstest.Place{URL: fresh(t, place), Proxy: proxy, List: true,
		Secrets: []string{os.Getenv("AWS_SECRET_ACCESS_KEY")}})
	t.Setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
	_, err := objects.Stat(t.Context(), place+"x")
	if err == nil || strings.Contains(err.Error(), "wrong-secret") || !strings.Contains(err.Error(), "403") {
		t.Errorf("a wrong key: %v", err)
	}
}

// As TestS3, for a server with the interface of Google Cloud Storage.
func TestGCS(t *testing.T) {
	place := os.Getenv("MULA_TEST_GS")
	if place == "" {
		t.Skip("MULA_TEST_GS is not set; conformance/objects.sh starts a server and sets it")
	}
	proxy := objectstest.NewProxy(t, "http://"+os.Getenv("STORAGE_EMULATOR_HOST"))
	t.Setenv("STORAGE_EMULATOR_HOST", strings.TrimPrefix(proxy.URL, "http://"))
	objectstest.Run(t, objectstest.Place{URL: fresh(t, place), Proxy: proxy, List: true,
		// fake-gcs-server finishes an upload when it is asked how many bytes it has. TestGCSUpload
		// has another server.
		Except: func(r *http.Request) bool { return r.URL.Query().Has("upload_id") }})
}

// As TestS3, for an emulator of Azure Blob Storage.
func TestAzure(t *testing.T) {
	place := os.Getenv("MULA_TEST_AZ")
	if place == "" {
		t.Skip("MULA_TEST_AZ is not set; conformance/objects.sh starts a server and sets it")
	}
	connection := os.Getenv("AZURE_STORAGE_CONNECTION_STRING")
	_, endpoint, _ := strings.Cut(connection, "BlobEndpoint=")
	u, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	proxy := objectstest.NewProxy(t, "http://"+u.Host)
	t.Setenv("AZURE_STORAGE_CONNECTION_STRING", strings.Replace(connection, "http://"+u.Host, proxy.URL, 1))
	if err := objects.CreateContainer(t.Context(), place); err != nil {
		t.Fatal(err)
	}
	_, key, _ := strings.Cut(connection, "AccountKey=")
	objectstest.Run(t, objectstest.Place{URL: fresh(t, place), Proxy: proxy, List: true, Secrets: []string{key[:20]}})
}

// fresh returns an unused folder in a place.
func fresh(t *testing.T, place string) string {
	if u, err := url.Parse(place); err != nil || u.Host == "" || !strings.HasSuffix(place, "/") {
		t.Fatalf("%q is not a URL that ends with a slash", place)
	}
	return fmt.Sprintf("%s%d/", place, time.Now().UnixNano())
}
