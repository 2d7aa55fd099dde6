package objectstest

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"mula/internal/objects"
)

// A Memory is a store in this process, without connections. It has the interface of S3.
type Memory struct {
	URL string // of its bucket; ends with a slash

	handler http.Handler
}

// memoryHost is a host that does not exist.
const memoryHost = "http://memory.invalid"

// SetMemory sets the environment so that URLs of S3 are in a [Memory], until the test ends. Only
// requests with a network, see [mula/internal/objects.WithNetwork], arrive there.
func SetMemory(t testing.TB) {
	t.Helper()
	setS3(t, memoryHost)
	// The first request loads the credentials in a goroutine, which must not be in a bubble of
	// synctest: goroutines of other bubbles may wait for it.
	m, err := NewMemory()
	if err == nil {
		err = objects.WriteFile(objects.WithNetwork(t.Context(), m.Network()), m.URL+"first", nil)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// NewMemory returns an empty store.
func NewMemory() (*Memory, error) {
	backend := s3mem.New()
	err := backend.CreateBucket(bucket)
	return &Memory{"s3://" + bucket + "/", gofakes3.New(backend, gofakes3.WithHostBucket(false)).Server()}, err
}

// Transport sends requests to the store. It calls fault before each request. fault may wait, and
// its error is the error of the request. After the request it calls answered, which may do the
// same; the request has then had its effect.
func (m *Memory) Transport(fault func(*http.Request) (Fault, error), answered func() error) http.RoundTripper {
	return memoryTransport{m, fault, answered}
}

// Network returns connections to the store without faults.
func (m *Memory) Network() objects.Network {
	return objects.Network{
		RoundTripper: m.Transport(func(*http.Request) (Fault, error) { return Fault{}, nil },
			func() error { return nil }),
		Random: func(time.Duration) time.Duration { return 0 },
	}
}

// RandomFault draws a fault of a request; half of the requests have none. draw returns a random
// number below n.
func RandomFault(draw func(n int64) int64) (f Fault) {
	switch draw(12) {
	case 0:
		f.Status = http.StatusServiceUnavailable
	case 1:
		f.Status = http.StatusInternalServerError
	case 2:
		f.Drop = true
	case 3, 4:
		f.Lose = true
	case 5:
		f.Cut = 1 + int(draw(200))
	}
	return f
}

// Errors of requests to a [Memory].
var (
	ErrDropped = errors.New("the connection was closed before the request arrived")
	ErrLost    = errors.New("the connection was closed before the response arrived")
)

type memoryTransport struct {
	memory   *Memory
	fault    func(*http.Request) (Fault, error)
	answered func() error
}

// RoundTrip implements [http.RoundTripper].
func (t memoryTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		defer r.Body.Close()
	}
	f, err := t.fault(r)
	if err == nil {
		err = r.Context().Err()
	}
	switch {
	case err != nil:
		return nil, err
	case f.Drop:
		return nil, ErrDropped
	case f.Status != 0:
		return &http.Response{StatusCode: f.Status, ProtoMajor: 1, ProtoMinor: 1, Request: r, Header: http.Header{},
			Body: http.NoBody}, nil
	}
	in := r.Clone(r.Context())
	in.RequestURI = r.URL.RequestURI()
	if in.Body == nil {
		in.Body = http.NoBody
	}
	if r.ContentLength > 0 || r.Method == http.MethodPut || r.Method == http.MethodPost {
		in.Header.Set("Content-Length", strconv.FormatInt(r.ContentLength, 10))
	}
	recorder := httptest.NewRecorder()
	t.memory.handler.ServeHTTP(recorder, in)
	if err = t.answered(); err == nil {
		err = r.Context().Err()
	}
	if err != nil {
		return nil, err
	}
	if f.Lose {
		return nil, ErrLost
	}
	response := recorder.Result()
	response.Request = r
	content := recorder.Body.Bytes()
	switch {
	case r.Method == http.MethodHead:
		response.Body = http.NoBody
	case f.Cut > 0 && f.Cut < len(content):
		response.Body = io.NopCloser(io.MultiReader(bytes.NewReader(content[:f.Cut]), cutBody{}))
		response.ContentLength = int64(len(content))
	default:
		response.ContentLength = int64(len(content))
	}
	return response, nil
}

// A cutBody is the end of a response whose connection was closed.
type cutBody struct{}

func (cutBody) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }
