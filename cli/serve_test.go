package cli

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"mula/internal/longtest"
)

// A server is a running `mula serve`.
type server struct {
	HTTP   string `json:"http"`
	Socket string `json:"socket"`
	Flight string `json:"flight"`
	Plan   string `json:"plan"`

	t       *testing.T
	command *exec.Cmd
	stdout  *bufio.Reader
	stderr  bytes.Buffer
}

// startServer starts `mula serve` and waits until it listens.
func startServer(t *testing.T, dir string, flags ...string) *server {
	t.Helper()
	s := &server{t: t, command: mula(dir, append([]string{"serve"}, flags...)...)}
	s.command.Stderr = &s.stderr
	out, err := s.command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.command.Process.Kill(); s.command.Wait() }) // no effect after end
	s.stdout = bufio.NewReader(out)
	line, err := s.stdout.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, s)
	}
	if err != nil {
		s.command.Wait()
		t.Fatalf("%q, %v\n%s", line, err, s.stderr.String())
	}
	return s
}

// end stops the server, which must exit with 0 and have written this to standard error, and nothing
// more.
func (s *server) end(stderr string) {
	s.t.Helper()
	if err := s.command.Process.Signal(syscall.SIGTERM); err != nil {
		s.t.Fatal(err)
	}
	rest, err := io.ReadAll(s.stdout)
	if err != nil || len(rest) > 0 {
		s.t.Errorf("after the first line: %q, %v", rest, err)
	}
	if err := s.command.Wait(); err != nil || (stderr == "") != (s.stderr.Len() == 0) ||
		!strings.Contains(s.stderr.String(), stderr) {
		s.t.Errorf("the server ended with %v and said %q", err, s.stderr.String())
	}
}

// clientOf sends every request to a unix socket.
func clientOf(socket string) *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn,
		error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
}

// sum reads a stream and hashes positions and tokens.
func sum(t *testing.T, r array.RecordReader) (hash string, samples int) {
	t.Helper()
	h := sha256.New()
	for r.Next() {
		record := r.RecordBatch()
		positions := record.Column(record.Schema().FieldIndices("position")[0]).(*array.Int64)
		tokens := record.Column(record.Schema().FieldIndices("tokens")[0]).(*array.FixedSizeList)
		for i := range positions.Len() {
			fmt.Fprintln(h, positions.Value(i), tokens.ValueStr(i))
		}
		samples += positions.Len()
	}
	if err := r.Err(); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil)), samples
}

// socketFolder is a folder whose path is short enough for a socket in it.
func socketFolder(t testing.TB) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "mula")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	return folder
}

// The served stream equals the output of `mula stream`, over TCP, over the socket and over Flight.
// A SIGTERM cuts streams in progress.
func TestServe(t *testing.T) {
	longtest.SkipIfShort(t)
	dir := prepared(t)
	mustRun(t, dir, "blend")
	out, err := mula(dir, "stream", "--batch-size", "8").Output()
	if err != nil {
		t.Fatal(err)
	}
	local, err := ipc.NewReader(bytes.NewReader(out))
	if err != nil {
		t.Fatal(err)
	}
	want, samples := sum(t, local)
	local.Release()

	folder := socketFolder(t)
	socket := filepath.Join(folder, "s")
	s := startServer(t, dir, "--listen", "127.0.0.1:0", "--socket", socket, "--flight", "127.0.0.1:0")
	if s.Socket != socket || len(s.Plan) != 64 {
		t.Errorf("the first line says %+v", s)
	}
	overSocket := clientOf(socket)
	for from, client := range map[string]*http.Client{s.HTTP: {}, "http://localhost": overSocket} {
		answer, err := client.Get(from + "/v1/stream?batch_size=8&micro_batch=2")
		if err != nil {
			t.Fatal(err)
		}
		r, err := ipc.NewReader(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		if got, n := sum(t, r); got != want || n != samples || samples == 0 {
			t.Errorf("%s gives other samples than mula stream: %d and %d", from, n, samples)
		}
		r.Release()
		answer.Body.Close()
	}
	client, err := flight.NewClientWithMiddleware(strings.TrimPrefix(s.Flight, "grpc://"), nil, nil,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	in, err := client.DoGet(t.Context(), &flight.Ticket{Ticket: []byte(`{"batch_size": 8}`)})
	if err != nil {
		t.Fatal(err)
	}
	r, err := flight.NewRecordReader(in)
	if err != nil {
		t.Fatal(err)
	}
	if got, n := sum(t, r); got != want || n != samples {
		t.Errorf("Flight gives other samples than mula stream: %d and %d", n, samples)
	}
	r.Release()

	c, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET /v1/stream?batch_size=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
	buffered := bufio.NewReader(c)
	answer, err := http.ReadResponse(buffered, nil)
	if err != nil {
		t.Fatal(err)
	}
	begin := make([]byte, 64)
	if _, err := io.ReadFull(answer.Body, begin); err != nil {
		t.Fatal(err)
	}
	s.end("")
	if n, err := io.Copy(io.Discard, answer.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a stream under way ended after %d bytes with %v", n, err)
	}
	if _, err := os.Stat(socket); err == nil {
		t.Error("the socket is still there after the end")
	}
}

// Over TCP, a request without the token is refused. The socket needs no token.
func TestServeToken(t *testing.T) {
	dir := prepared(t)
	mustRun(t, dir, "blend")
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte("word\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	folder := socketFolder(t)
	s := startServer(t, dir, "--token-file", "token", "--listen", "0.0.0.0:0", "--socket", filepath.Join(folder, "s"))
	_, port, err := net.SplitHostPort(strings.TrimPrefix(s.HTTP, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	overSocket := clientOf(s.Socket)
	for _, c := range []struct {
		client      *http.Client
		from, token string
		status      int
	}{{&http.Client{}, "http://127.0.0.1:" + port, "", 401}, {&http.Client{}, "http://127.0.0.1:" + port,
		"Bearer word", 200}, {overSocket, "http://localhost", "", 200}} {
		r, err := http.NewRequest("GET", c.from+"/v1/plan", nil)
		if err != nil {
			t.Fatal(err)
		}
		if c.token != "" {
			r.Header.Set("Authorization", c.token)
		}
		answer, err := c.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != c.status {
			t.Errorf("%s with %q: %s, want %d", c.from, c.token, answer.Status, c.status)
		}
	}
	if s.HTTP != "http://127.0.0.1:"+port {
		t.Errorf("the first line names %s, where no client can be sure to reach the server", s.HTTP)
	}
	s.end("warning: the token for --listen 0.0.0.0:0 is sent unencrypted")

	s = startServer(t, dir, "--token-file", "token", "--listen", "localhost:0")
	if !strings.HasPrefix(s.HTTP, "http://localhost:") {
		t.Errorf("the first line names %s, not the host as it was given", s.HTTP)
	}
	s.end("") // no warning: the token does not leave the machine
}

// With a socket or Flight, no TCP port is opened, which every user of the machine could read from.
// Without both, a TCP port is opened.
func TestServeOpensWhatIsNamed(t *testing.T) {
	dir := prepared(t)
	mustRun(t, dir, "blend")
	folder := socketFolder(t)
	for _, c := range []struct {
		flags                []string
		http, socket, flight bool
	}{
		{[]string{"--socket", filepath.Join(folder, "s"), "--memory", "1G"}, false, true, false},
		{[]string{"--flight", "127.0.0.1:0", "--memory", "2Mi"}, false, false, true},
		{nil, true, false, false},
		{[]string{"--socket", filepath.Join(folder, "s"), "--listen", "127.0.0.1:0"}, true, true, false},
	} {
		s := startServer(t, dir, c.flags...)
		if (s.HTTP != "") != c.http || (s.Socket != "") != c.socket || (s.Flight != "") != c.flight {
			t.Errorf("mula serve %q listens at %q, %q, %q", c.flags, s.HTTP, s.Socket, s.Flight)
		}
		s.end("")
	}
}

// A shard that is damaged under a running server is named on standard error, once.
func TestServeReportsDamage(t *testing.T) {
	dir := prepared(t)
	mustRun(t, dir, "blend")
	folder := socketFolder(t)
	s := startServer(t, dir, "--socket", filepath.Join(folder, "s"))
	client := clientOf(s.Socket)
	tokens := filepath.Join(dir, "shards", "a.bin")
	text, err := os.ReadFile(tokens)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(tokens, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(bytes.Repeat([]byte{0xff}, len(text)), 0); err != nil { // ids that no tokenizer has
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		answer, err := client.Get("http://localhost/v1/stream?batch_size=8")
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
	}
	answer, err := client.Get("http://localhost/healthz")
	if err != nil {
		t.Fatal(err)
	}
	said, err := io.ReadAll(answer.Body)
	answer.Body.Close()
	if err != nil || string(said) != "{\"status\":\"damaged\"}\n" ||
		answer.StatusCode != http.StatusInternalServerError {
		t.Errorf("/healthz: %s %q, %v", answer.Status, said, err)
	}
	s.end("shards/a")
	if lines := strings.Count(s.stderr.String(), "\n"); lines != 1 {
		t.Errorf("%d lines: %q", lines, s.stderr.String())
	}
}

func TestServeWrong(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(t.TempDir(), "open")
	if err := os.WriteFile(open, []byte("word"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o640); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		says string
		code int
	}{
		{[]string{"--listen", "0.0.0.0:0"}, "--insecure", exitUsage},
		{[]string{"--listen", ":0"}, "--insecure", exitUsage},
		{[]string{"--flight", "0.0.0.0:0"}, "--insecure", exitUsage},
		{[]string{"--listen", "[::]:0"}, "--insecure", exitUsage},
		{[]string{"--listen", "8080"}, "HOST:PORT", exitUsage},
		{[]string{"--listen", ""}, "no address to listen at", exitUsage},
		{[]string{"--max-streams", "0"}, "--max-streams is 0", exitUsage},
		{[]string{"--memory", "5"}, "--memory is 5;", exitUsage},
		{[]string{"--memory", "much"}, "--memory is \"much\"", exitUsage},
		{[]string{"--memory", ""}, "--memory is empty; set a value", exitUsage},
		{[]string{"--socket", ""}, "--socket is empty; set a value", exitUsage},
		{[]string{"--flight", ""}, "--flight is empty; set a value", exitUsage},
		{[]string{"--token-file", ""}, "--token-file is empty; set a value", exitUsage},
		{[]string{"--tls-cert", "", "--tls-key", ""}, "--tls-cert is empty; set a value", exitUsage},
		{[]string{"--tls-key", ""}, "--tls-key is empty; set a value", exitUsage},
		{[]string{"--token-file", open}, "chmod 600 " + open, exitFailed},
		{[]string{"--tls-cert", "x"}, "require each other", exitUsage},
		{[]string{"--verify", "never"}, "--verify", exitUsage},
		{[]string{"--token-file", empty}, "one word", exitFailed},
		{[]string{"--token-file", empty + "x"}, "--token-file", exitFailed},
		{[]string{"--tls-cert", empty, "--tls-key", empty}, "--tls-cert", exitFailed},
		{[]string{"--plan", empty + "x"}, "mula blend", exitFailed},
		{[]string{"extra"}, "unexpected", exitUsage},
	} {
		code, stdout, stderr := call(t, append([]string{"serve"}, c.args...)...)
		if code != c.code || !strings.Contains(stderr, c.says) || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("mula serve %q: exit %d, %q%q; want exit %d and %q", c.args, code, stdout, stderr, c.code, c.says)
		}
	}
}
