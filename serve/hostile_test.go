package serve

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow/ipc"

	"mula/blend/plantest"
	"mula/shards"
)

// What a client may not ask for, and a word of the sentence that it is told.
var lies = []struct {
	path, says string
	status     int
}{
	{"/v1/stream", "batch_size is required", 400},
	{"/v1/stream?batch_size=0", "batch_size", 400},
	{"/v1/stream?batch_size=-1", "batch_size", 400},
	{"/v1/stream?batch_size=1048577", "from 1 to 1048576", 400},
	{"/v1/stream?batch_size=99999999999999999999", "batch_size", 400},
	{"/v1/stream?batch_size=8.0", "whole number", 400},
	{"/v1/stream?batch_size=8&batch_size=8", "2 times", 400},
	{"/v1/stream?batch_size=8&rank=1", "rank 1 of 1: must be from 0 to 0", 400},
	{"/v1/stream?batch_size=8&rank=8&world=8", "from 0 to 7", 400},
	{"/v1/stream?batch_size=8&world=3", "3 ranks", 400},
	{"/v1/stream?batch_size=8&world=0", "world", 400},
	{"/v1/stream?batch_size=8&world=1048577", "world", 400},
	{"/v1/stream?batch_size=8&from=4", "position 4 is not the start of a step of 8 samples; use 0 or 8", 400},
	{"/v1/stream?batch_size=8&to=500", "position 500 is not the end of a step of 8 samples; use 496 or 504", 400},
	{"/v1/stream?batch_size=8&from=608", "from 0 to 600", 400},
	{"/v1/stream?batch_size=8&from=9223372036854775807", "from", 400},
	{"/v1/stream?batch_size=8&from=1152921504606846976", "from 0 to 600", 400},
	{"/v1/stream?batch_size=8&to=601", "from 1 to 600", 400},
	{"/v1/stream?batch_size=8&from=16&to=8", "the end 8 is before the start 16", 400},
	{"/v1/stream?batch_size=8&to=0", "to is", 400},
	{"/v1/stream?batch_size=8&step=1&from=8", "cannot both be set", 400},
	{"/v1/stream?batch_size=8&step=1152921504606846976", "from 0 to 75", 400},
	{"/v1/stream?batch_size=7&step=86", "from 0 to 85", 400},
	{"/v1/stream?batch_size=8&step=99999999999999999999", "from 0 to 75", 400},
	{"/v1/stream?batch_size=8&to=0", "from 1 to 600", 400},
	{"/healthz?x=1", "has no parameters", 400},
	{"/v1/health?x=1", "has no parameters", 400},
	{"/v1/stream?batch_size=1048576&step=1099511627776", "from 0 to 0", 400},
	{"/v1/stream?batch_size=8&step=76", "from 0 to 75", 400},
	{"/v1/stream?batch_size=8&micro_batch=3", "does not divide", 400},
	{"/v1/stream?batch_size=8&micro_batch=0", "micro_batch", 400},
	{"/v1/stream?batch_size=8&micro_batch=16", "does not divide", 400},
	{"/v1/stream?batch_size=8&columns=tokens,secret", "unknown column \"secret\"", 400},
	{"/v1/stream?batch_size=8&columns=", "columns has an empty name", 400},
	{"/v1/stream?batch_size=8&columns=epoch,", "columns has an empty name", 400},
	{"/v1/stream?batch_size=8&columns=epoch,epoch", "listed twice", 400},
	{"/v1/stream?batchsize=8", "did you mean batch_size?", 400},
	{"/v1/stream?batch_size=8&%00=1", "unknown parameter", 400},
	{"/v1/stream?batch_size=%zz", "is malformed", 400},
	{"/v1/stream?batch_size=8;rank=0", "is malformed", 400},
	{"/v1/plan?x=1", "has no parameters", 400},
	{"/v1/peek", "position is required", 400},
	{"/v1/peek?position=600", "from 0 to 599", 400},
	{"/v1/peek?position=x", "position", 400},
	{"/v1/hash?step=0", "required", 400},
	{"/v1/hash?batch_size=8", "required", 400},
	{"/v1/hash?batch_size=8&step=75", "from 0 to 74", 400},
	{"/v1/hash?batch_size=0&step=0", "batch_size", 400},
	{"/v1/streams?batch_size=8", "known are", 404},
	{"/v1/stream/", "known are", 404},
	{"/../../etc/passwd", "known are", 404},
	{"/", "known are", 404},
}

func TestLies(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	for _, lie := range lies {
		status, answer := s.get(lie.path)
		text, _ := answer["error"].(string)
		if status != lie.status || !strings.Contains(text, lie.says) || strings.ContainsAny(text, "\n\r") ||
			len(text) > 300 {
			t.Errorf("%s: %d %q; want %d and %q", lie.path, status, text, lie.status, lie.says)
		}
	}
	for _, r := range []struct {
		method, body string
		status       int
	}{{"POST", "", 405}, {"HEAD", "", 405}, {"DELETE", "", 405}, {"GET", "body", 400}, {"PUT", "body", 400}} {
		request, err := http.NewRequest(r.method, "http://localhost/v1/stream?batch_size=8", strings.NewReader(r.body))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := s.client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != r.status {
			t.Errorf("%s with %q: %s, want %d", r.method, r.body, answer.Status, r.status)
		}
	}
}

// HEAD has the status and the headers of GET, and no body. A stream has no HEAD.
func TestHead(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	ask := func(method, path string) (*http.Response, string) {
		t.Helper()
		request, err := http.NewRequest(method, "http://localhost"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := s.client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer, string(body)
	}
	for path := range paths {
		if path == streamPath {
			continue
		}
		if path == "/v1/hash" {
			path += "?step=0&batch_size=8"
		}
		get, _ := ask("GET", path)
		head, body := ask("HEAD", path)
		if head.StatusCode != get.StatusCode || head.Header.Get("Content-Type") != get.Header.Get("Content-Type") ||
			body != "" {
			t.Errorf("HEAD %s: %s, %q, body %q; GET has %s, %q", path, head.Status, head.Header.Get("Content-Type"),
				body, get.Status, get.Header.Get("Content-Type"))
		}
	}
	for _, c := range []struct{ method, path, allow string }{{"HEAD", streamPath + "?batch_size=8", "GET"},
		{"POST", "/healthz", "GET, HEAD"}} {
		if answer, _ := ask(c.method, c.path); answer.StatusCode != http.StatusMethodNotAllowed ||
			answer.Header.Get("Allow") != c.allow {
			t.Errorf("%s %s: %s, allowed is %q", c.method, c.path, answer.Status, answer.Header.Get("Allow"))
		}
	}
}

// A record that is too large for the memory is refused before anything is read, with the way out.
func TestTooLargeARecord(t *testing.T) {
	s := serve(t, shards.UInt16, Options{Memory: 2 << 20})
	status, answer := s.get("/v1/stream?batch_size=65536")
	if text, _ := answer["error"].(string); status != 400 || !strings.Contains(text, "micro_batch") {
		t.Errorf("%d %q", status, text)
	}
	records, body := s.open("batch_size=65536&micro_batch=128")
	defer body.Close()
	rows := int64(0)
	for records.Next() {
		rows += records.RecordBatch().NumRows()
	}
	if records.Err() != nil || rows != positions-4-35 {
		t.Errorf("%d samples, %v", rows, records.Err())
	}
	records.Release()
}

// Bytes that are not a request close their own connection, and affect no other client.
func TestGarbage(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	rng := rand.New(rand.NewPCG(1, 2))
	random := make([]byte, 4096)
	for i := range random {
		random[i] = byte(rng.Uint32())
	}
	for _, garbage := range [][]byte{random, []byte("\r\n\r\n\r\n"), []byte("GET"), []byte("GET / HTTP/9.9\r\n\r\n"),
		[]byte("GET /v1/stream?batch_size=8 HTTP/1.1\r\n\r\n"),
		[]byte("GET /v1/plan HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
		[]byte("GET /v1/plan HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n"),
		[]byte("GET /v1/plan HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"),
		[]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), append([]byte("GET /v1/plan HTTP/1.1\r\nHost: a\r\nX: "),
			bytes.Repeat([]byte("x"), 1<<20)...)} {
		c, err := net.Dial("unix", s.socket)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(patience))
		go c.Write(garbage) // the server may hang up before it is through
		if unix, ok := c.(*net.UnixConn); ok && len(garbage) < 100 {
			defer unix.Close()
			time.AfterFunc(10*time.Millisecond, func() { unix.CloseWrite() })
		}
		answer, err := io.ReadAll(io.LimitReader(c, 1<<20))
		if bytes.Contains(answer, []byte(" 200 ")) {
			t.Errorf("%.30q: %.100q, %v", garbage, answer, err)
		}
		c.Close()
	}
	if status, _ := s.get("/v1/plan"); status != http.StatusOK {
		t.Errorf("afterwards: %d", status)
	}
}

// A thousand clients each get all of the plan, over one open plan.
func TestThousandClients(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	s.get("/v1/plan")
	before := mappings(t)
	const clients, world = 1000, 4
	var rows, failed atomic.Int64
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			c, err := net.Dial("unix", s.socket)
			if err != nil {
				failed.Add(1)
				return
			}
			defer c.Close()
			fmt.Fprintf(c, "GET /v1/stream?batch_size=100&rank=%d&world=%d HTTP/1.0\r\n\r\n", i%world, world)
			answer, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || answer.StatusCode != http.StatusOK {
				failed.Add(1)
				return
			}
			records, err := ipc.NewReader(answer.Body)
			if err != nil {
				failed.Add(1)
				return
			}
			defer records.Release()
			n := 0
			for ; records.Next(); n++ {
				rows.Add(records.RecordBatch().NumRows())
			}
			if n != positions/100 || records.Err() != nil {
				failed.Add(1)
			}
		})
	}
	all.Wait()
	if want := int64(clients / world * (positions - 4 - 35)); rows.Load() != want || failed.Load() != 0 {
		t.Errorf("%d samples, want %d; %d clients failed", rows.Load(), want, failed.Load())
	}
	s.waitFor("the streams' end", func() bool { return s.service.counts.streams.Load() == 0 })
	if after := mappings(t); after > before+8 {
		t.Errorf("%d mappings before, %d after", before, after)
	}
}

// mappings is how many parts of files this process has mapped; 0 where the system does not say.
func mappings(t testing.TB) (n int) {
	t.Helper()
	if runtime.GOOS != "linux" {
		return 0
	}
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(text, []byte(".bin\n")) + bytes.Count(text, []byte(".idx\n"))
}

// stuck opens streams without a reader, and waits until each has filled the buffers of its
// connection.
func (s *served) stuck(n int, query string) (close func()) {
	s.t.Helper()
	var list []net.Conn
	for range n {
		c, err := net.Dial("unix", s.socket)
		if err != nil {
			s.t.Fatal(err)
		}
		c.(*net.UnixConn).SetReadBuffer(4 << 10)
		fmt.Fprintf(c, "GET /v1/stream?%s HTTP/1.0\r\n\r\n", query)
		list = append(list, c)
	}
	s.waitFor("streams of clients that do not read", func() bool {
		return s.service.counts.streams.Load() == int64(n) && s.service.counts.waiting.Load() == 0
	})
	return func() {
		for _, c := range list {
			c.Close()
		}
	}
}

// Readers that stop reading hold one record each, and a second record that is read ahead if memory
// remains. They delay no other client.
func TestSlowReaders(t *testing.T) {
	const readers = 40
	s := serve(t, shards.UInt16, Options{Memory: 16 << 20})
	done := s.stuck(readers, "batch_size=1") // more records than a socket takes
	for range 5 {
		records, body := s.open("batch_size=600")
		rows := int64(0)
		for records.Next() {
			rows += records.RecordBatch().NumRows()
		}
		if records.Err() != nil || rows != positions-4-35 {
			t.Errorf("%d samples, %v", rows, records.Err())
		}
		records.Release()
		body.Close()
	}
	if c := &s.service.counts; c.completed.Load() != 5 || c.streams.Load() < readers {
		t.Errorf("%d streams came to their end, %d go on; want 5 and %d", c.completed.Load(), c.streams.Load(), readers)
	}
	done()
	s.waitFor("the end of streams that are cut", func() bool { return s.service.counts.streams.Load() == 0 })
}

// Memory that is taken is waited for, in line, and only so long; the last of a rank that comes too
// late is told.
func TestMemoryIsTaken(t *testing.T) {
	s := serve(t, shards.UInt16, Options{Memory: 1 << 20, Wait: 50 * time.Millisecond})
	var held []*Stream
	ctx := context.Background()
	request := Request{BatchSize: 8, World: 1, MicroBatch: 8}
	for {
		st, err := s.service.Open(ctx, request, 1)
		if err != nil {
			if StatusOf(err) != http.StatusServiceUnavailable || !strings.Contains(err.Error(), "--memory") {
				t.Errorf("refused with %d: %v", StatusOf(err), err)
			}
			break
		}
		if held = append(held, st); len(held) > 100 {
			t.Fatal("memory for any number of streams")
		}
	}
	if status, _ := s.get("/v1/stream?batch_size=8"); status != http.StatusServiceUnavailable {
		t.Errorf("over HTTP: %d", status)
	}
	if status, _ := s.get("/v1/plan"); status != http.StatusOK {
		t.Errorf("what needs no memory: %d", status)
	}
	if taken := s.service.counts.sendingBytes.Load(); taken > 1<<20 {
		t.Errorf("%d bytes are reserved of 1 MiB", taken)
	}
	s.service.o.Wait = patience
	waited := make(chan error, 1)
	go func() {
		st, err := s.service.Open(ctx, request, 1)
		if err == nil {
			st.Close()
		}
		waited <- err
	}()
	s.waitFor("a stream in line", func() bool { return s.service.counts.waiting.Load() == 1 })
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := s.service.Open(ended, request, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("one that goes away in line: %v", err)
	}
	held[0].Close()
	if err := <-waited; err != nil {
		t.Errorf("the one in line, when memory came free: %v", err)
	}
	for _, st := range held[1:] {
		st.Close()
	}
}

// What streams hold stays within the memory they are given, whatever they ask for and however
// little they read.
func TestMemoryIsBounded(t *testing.T) {
	const memory = 8 << 20
	s := serve(t, shards.Int32, Options{Memory: memory, Wait: time.Millisecond})
	var open []*Stream
	var most int64
	rng := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		c := &s.service.counts
		most = max(most, c.sendingBytes.Load()+c.aheadBytes.Load())
		switch k := rng.IntN(3); {
		case k == 0 || len(open) == 0:
			micro := 1 + rng.IntN(300)
			st, err := s.service.Open(context.Background(), Request{BatchSize: micro * (1 + rng.IntN(3)), World: 1,
				MicroBatch: micro}, 1+rng.IntN(4))
			if err == nil {
				open = append(open, st)
			} else if StatusOf(err) != http.StatusServiceUnavailable {
				t.Fatal(err)
			}
		case k == 1:
			i := rng.IntN(len(open))
			if _, err := open[i].Next(); err != nil && !errors.Is(err, io.EOF) &&
				StatusOf(err) != http.StatusServiceUnavailable {
				t.Fatal(err)
			}
		default:
			i := rng.IntN(len(open))
			open[i].Close()
			open = append(open[:i], open[i+1:]...)
		}
	}
	for _, st := range open {
		st.Close()
		st.Close() // is nothing more
	}
	if most > memory || most < memory/2 {
		t.Errorf("at most %d bytes were reserved of %d", most, memory)
	}
}

// A record never takes more than was reserved for it, documents of one token included.
func TestReservedIsEnough(t *testing.T) {
	dir := t.TempDir()
	plantest.Shard(t, filepath.Join(dir, "ones"), shards.UInt16, 10, slices.Repeat([][]uint32{{1}}, 5000))
	data := plantest.Open(t, plantest.Seal(t, dir, "plan.json",
		"sequence_length: 64\nseed: 1\nsources: [{name: ones, shards: [ones], weight: 1}]"))
	s := serveData(t, data, Options{})
	st, err := s.service.Open(context.Background(), Request{BatchSize: 32, World: 1, MicroBatch: 32}, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	for {
		record, err := st.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if size := sizeOf(record); size+overhead > st.held || st.held != s.service.counts.sendingBytes.Load() {
			t.Errorf("a record of %d bytes, %d reserved", size, st.held)
		}
	}
}

func TestTooManyStreams(t *testing.T) {
	s := serve(t, shards.UInt16, Options{MaxStreams: 3})
	var held []*Stream
	for range 3 {
		st, err := s.service.Open(context.Background(), Request{BatchSize: 8, World: 1, MicroBatch: 8}, 1)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, st)
	}
	for _, path := range []string{"/v1/stream?batch_size=8", "/v1/hash?batch_size=8&step=0", "/v1/peek?position=1"} {
		status, answer := s.get(path)
		if text, _ := answer["error"].(string); status != http.StatusTooManyRequests ||
			!strings.Contains(text, "--max-streams") {
			t.Errorf("%s: %d %q", path, status, text)
		}
	}
	held[1].Close()
	records, body := s.open("batch_size=600")
	for records.Next() {
	}
	if err := records.Err(); err != nil {
		t.Error(err)
	}
	records.Release()
	body.Close()
	held[0].Close()
	held[2].Close()
}

// A client that goes away in the middle leaves nothing behind, and the others go on.
func TestCutConnections(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	other, otherBody := s.open("batch_size=4")
	defer otherBody.Close()
	for range 50 {
		records, body := s.open("batch_size=4")
		records.Next()
		body.Close()
		records.Release()
	}
	s.waitFor("the end of the streams that were cut", func() bool { return s.service.counts.streams.Load() <= 1 })
	n := 0
	for ; other.Next(); n++ {
	}
	if other.Err() != nil || n != positions/4 {
		t.Errorf("the other: %d records, %v", n, other.Err())
	}
	other.Release()
}

// When the server stops, a stream ends after a record, and its client sees that it is unfinished. A
// stream without a reader is cut.
func TestStop(t *testing.T) {
	s := serve(t, shards.UInt16, Options{Grace: 100 * time.Millisecond})
	pipes := &pipes{ends: make(chan net.Conn), closed: make(chan struct{})}
	stuck := make(chan error, 1)
	go func() { stuck <- s.service.Serve(s.ctx, pipes, Access{}) }()
	far, near := net.Pipe()
	defer near.Close()
	pipes.ends <- far
	fmt.Fprintf(near, "GET /v1/stream?batch_size=1 HTTP/1.0\r\n\r\n")
	var first [1]byte
	if _, err := io.ReadFull(near, first[:]); err != nil {
		t.Fatal(err)
	} // and no more: a pipe holds nothing, so that the stream is in the middle of a record

	records, body := s.open("batch_size=1")
	defer body.Close()
	if !records.Next() {
		t.Fatal(records.Err())
	}
	s.stop()
	n := 1
	for records.Next() {
		n++
	}
	if err := records.Err(); !errors.Is(err, io.ErrUnexpectedEOF) || n >= positions {
		t.Errorf("%d records, then %v; want an unexpected end", n, err)
	}
	records.Release()
	if err := <-stuck; err != nil {
		t.Error(err)
	}
	if err := <-s.ended; err != nil {
		t.Error(err)
	}
	s.ended <- nil // for the end of the test
	if _, err := s.service.Open(context.Background(), Request{BatchSize: 8, World: 1, MicroBatch: 8},
		1); StatusOf(err) != http.StatusServiceUnavailable {
		t.Errorf("a new stream: %v", err)
	}
	answer := httptest.NewRecorder()
	s.service.Handler("").ServeHTTP(answer, httptest.NewRequest("GET", "/healthz", nil))
	if answer.Code != http.StatusServiceUnavailable {
		t.Errorf("health: %d", answer.Code)
	}
	s.service.Close() // returns, as nothing reads any more
}

// pipes is a listener whose connections hold no byte that was not read.
type pipes struct {
	ends   chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.ends:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func TestToken(t *testing.T) {
	data := openPlan(t, shards.UInt16)
	defer data.Close()
	service, err := New(context.Background(), data, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	server := httptest.NewServer(service.Handler("open sesame"))
	defer server.Close()
	for _, c := range []struct {
		path, authorization string
		status              int
	}{
		{"/v1/plan", "", 401},
		{"/v1/plan", "Bearer", 401},
		{"/v1/plan", "Bearer open", 401},
		{"/v1/plan", "Bearer open sesame ", 401},
		{"/v1/plan", "Basic open sesame", 401},
		{"/v1/plan", "Bearer open sesame", 200},
		{"/v1/plan", "bearer open sesame", 200},
		{"/v1/stream?batch_size=600", "Bearer open sesam", 401},
		{"/v1/stream?batch_size=600", "Bearer open sesame", 200},
		{"/metrics", "", 401},
		{"/nothing", "", 401},
		{"/healthz", "", 200},
		{"/v1/health", "", 401},
		{"/v1/health", "Bearer open sesame", 200},
	} {
		r, err := http.NewRequest("GET", server.URL+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if c.authorization != "" {
			r.Header["Authorization"] = []string{c.authorization}
		}
		answer, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if want := c.status; answer.StatusCode != want && strings.TrimSpace(c.authorization) == c.authorization {
			t.Errorf("%s with %q: %s, want %d", c.path, c.authorization, answer.Status, want)
		}
	}
}

// With a certificate, what goes over a connection is encrypted; who speaks in clear, or nothing
// that can be read, is not answered.
func TestTLS(t *testing.T) {
	issued := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate, and a client that trusts it
	issued.Close()
	data := openPlan(t, shards.UInt16)
	defer data.Close()
	service, err := New(context.Background(), data, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- service.Serve(ctx, l, Access{TLS: issued.TLS}) }()
	for _, clear := range []string{"GET /v1/plan HTTP/1.0\r\n\r\n", strings.Repeat("\x16\x03\x01\xff", 5000)} {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(patience))
		go io.WriteString(c, clear)
		if answer, _ := io.ReadAll(c); bytes.Contains(answer, []byte("fingerprint")) {
			t.Errorf("in clear: %q", answer)
		}
		c.Close()
	}
	client := issued.Client()
	answer, err := client.Get("https://" + l.Addr().String() + "/v1/stream?batch_size=8")
	if err != nil {
		t.Fatal(err)
	}
	records, err := ipc.NewReader(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for ; records.Next(); n++ {
	}
	if records.Err() != nil || n != positions/8 {
		t.Errorf("%d records, %v", n, records.Err())
	}
	records.Release()
	answer.Body.Close()
	client.CloseIdleConnections()
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A page in a browser whose host's name leads to this machine is not answered.
func TestForeignHost(t *testing.T) {
	data := openPlan(t, shards.UInt16)
	defer data.Close()
	service, err := New(context.Background(), data, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	for token, foreign := range map[string]int{"": 403, "word": 200} {
		server := httptest.NewServer(service.Handler(token))
		for host, want := range map[string]int{"localhost": 200, "localhost:80": 200, "LOCALHOST": 200,
			"Localhost:80": 200, "127.0.0.1:99": 200, "[::1]:99": 200, "evil.example": foreign,
			"evil.example:80":        foreign,
			"localhost.evil.example": foreign} {
			r, err := http.NewRequest("GET", server.URL+"/v1/plan", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Host = host
			r.Header.Set("Authorization", "Bearer "+token)
			answer, err := server.Client().Do(r)
			if err != nil {
				t.Fatal(err)
			}
			answer.Body.Close()
			if answer.StatusCode != want {
				t.Errorf("host %s, token %q: %s, want %d", host, token, answer.Status, want)
			}
		}
		server.Close()
	}
}

func TestListenUnix(t *testing.T) {
	dir := socketFolder(t)
	path := filepath.Join(dir, "s")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "another program listens") {
		t.Errorf("a living socket: %v", err)
	}
	l.(*unixListener).Listener.Close() // as a kill leaves it
	if l, err = ListenUnix(path); err != nil {
		t.Fatalf("a socket that was left behind: %v", err)
	}
	l.Close()
	if _, err := os.Stat(path); err == nil {
		t.Error("the socket is still there after the end")
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a file: %v", err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "precious" {
		t.Errorf("the file is now %q, %v", text, err)
	}
	long := strings.Repeat("x", maxSocketPath+1)
	if _, err := ListenUnix(long); err == nil ||
		!strings.Contains(err.Error(), fmt.Sprintf("can have only %d", maxSocketPath)) {
		t.Errorf("a path that is too long: %v", err)
	}
}

// A server that ends leaves the socket of another one alone, though it has the same path.
func TestListenUnixLeavesOthers(t *testing.T) {
	dir := socketFolder(t)
	path := filepath.Join(dir, "s")
	old, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	old.Close()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the other server's socket: %v", err)
	}
	c.Close()

	// A socket of datagrams, which answers no connection, is in use nevertheless.
	datagrams := filepath.Join(dir, "d")
	p, err := net.ListenPacket("unixgram", datagrams)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	before, err := os.Lstat(datagrams)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(datagrams); err == nil || !strings.Contains(err.Error(), "may be in use by another "+
		"program") {
		t.Errorf("a socket of datagrams: %v", err)
	}
	if after, err := os.Lstat(datagrams); err != nil || !os.SameFile(before, after) {
		t.Errorf("the socket of datagrams was replaced: %v", err)
	}
}

// fuzzPositions is the length of the plan for fuzzed requests.
const fuzzPositions = 1 << 60

// valid checks what every request that is read keeps to.
func valid(t *testing.T, r Request) {
	t.Helper()
	if r.BatchSize < 1 || r.BatchSize > maxBatchSize || r.World < 1 || r.World > maxWorld || r.BatchSize%r.World != 0 ||
		r.Rank < 0 || r.Rank >= r.World ||
		r.MicroBatch < 1 || (r.BatchSize/r.World)%r.MicroBatch != 0 || r.From < 0 || r.From > fuzzPositions ||
		r.To < 0 || r.To > fuzzPositions {
		t.Errorf("a request that cannot be: %+v", r)
	}
}

// FuzzParseQuery: no query is read as a request that cannot be, and a refusal is one sentence of
// some length.
func FuzzParseQuery(f *testing.F) {
	for _, lie := range lies {
		_, query, _ := strings.Cut(lie.path, "?")
		f.Add(query)
	}
	f.Add("batch_size=512&rank=3&world=8&step=100&micro_batch=4&columns=tokens,position&to=52000")
	f.Fuzz(func(t *testing.T, query string) {
		r, err := parseQuery(query, fuzzPositions)
		if err == nil {
			valid(t, r)
			return
		}
		if text := err.Error(); StatusOf(err) != http.StatusBadRequest || strings.ContainsAny(text, "\n\r\x00") ||
			len(text) > 2*maxRequest*4 {
			t.Errorf("%q: %d %q", query, StatusOf(err), text)
		}
	})
}

// FuzzParseJSON: the same of tickets; and what the package json reads as an object of numbers is
// read as those.
func FuzzParseJSON(f *testing.F) {
	for _, seed := range []string{`{"batch_size": 512}`, `{"batch_size": "512", "columns": ["tokens", "position"]}`,
		`{"batch_size":8,"batch_size":8}`, `{"batch_size":[[]]}`, `[]`, `{`, `{}{}`,
		`{"columns":["a,b"],"batch_size":1}`, `{"batch_size":1e3}`, `null`, `{"batch_size":8}x`, "",
		`{"batch_size":8,"rank":1,"world":4,"step":3,"to":500,"micro_batch":2}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := parseJSON(text, fuzzPositions)
		if err != nil {
			if StatusOf(err) != http.StatusBadRequest || strings.ContainsAny(err.Error(), "\n\r\x00") {
				t.Errorf("%q: %d %q", text, StatusOf(err), err)
			}
			return
		}
		valid(t, r)
		var peer map[string]any
		if err := json.Unmarshal(text, &peer); err != nil {
			t.Fatalf("%q was read, but is no JSON object: %v", text, err)
		}
		if n, ok := peer["batch_size"].(float64); ok && float64(r.BatchSize) != n {
			t.Errorf("%q: batch_size %d", text, r.BatchSize)
		}
	})
}

// FuzzRequest: whatever address is asked for, the answer is a stream that can be read, or JSON.
func FuzzRequest(f *testing.F) {
	s := serve(f, shards.UInt16, Options{Memory: 4 << 20})
	handler := s.service.Handler("")
	for _, lie := range lies {
		f.Add(lie.path)
	}
	f.Add("/v1/stream?batch_size=64&world=2&rank=1&micro_batch=8&step=2&columns=offset,source")
	f.Add("/v1/peek?position=17")
	f.Add("/v1/hash?step=0&batch_size=512")
	f.Add("/metrics")
	f.Fuzz(func(t *testing.T, address string) {
		r, err := http.NewRequest("GET", address, nil)
		if err != nil || r.URL == nil {
			return
		}
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, r)
		switch kind := answer.Header().Get("Content-Type"); kind {
		case contentType:
			records, err := ipc.NewReader(answer.Body, ipc.WithBodySizeLimit(1<<24), ipc.WithMetadataSizeLimit(1<<20))
			if err != nil {
				t.Fatalf("%q: %v", address, err)
			}
			defer records.Release()
			for records.Next() {
			}
			if records.Err() != nil {
				t.Errorf("%q: %v", address, records.Err())
			}
		case "application/json":
			if !json.Valid(answer.Body.Bytes()) || answer.Code >= 500 {
				t.Errorf("%q: %d %s", address, answer.Code, answer.Body)
			}
		default:
			if r.URL.Path != "/metrics" {
				t.Errorf("%q: %d %q", address, answer.Code, kind)
			}
		}
	})
}
