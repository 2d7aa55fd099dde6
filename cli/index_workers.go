package cli

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/urfave/cli/v2"

	"mula/index/cache"
	"mula/internal/atomicfile"
	"mula/internal/version"
)

// Workers are processes on other machines that help with a build when they are asked to: `mula
// index serve` waits there, and `mula index --workers` gives them its own flags. They share the
// work by the folder of the cache, which all must see; over the network go only the flags and how
// it ended.
//
// Both sides know a secret. The server sends a random number; the client answers with a line of its
// own random number and the length and SHA-256 of the request, with their HMAC-SHA256 under the
// secret, and then the request. Each answer of the server has an HMAC over the client's number and
// the answer's place. So nobody without the secret can have anything built or answer for a worker,
// and nothing can be sent twice. Nothing is encrypted.

const (
	secretVariable  = "MULA_SECRET"
	leastSecret     = 16               // bytes
	handshakeTime   = 20 * time.Second // for all before the build begins
	farewellTime    = time.Minute      // for the last answers, when this process has seen all complete
	maxLine         = 1 << 16
	maxRequest      = 64 << 20
	defaultServe    = "127.0.0.1:7161"
	mostConnections = 64
)

// A workerRequest is what a worker is to do.
type workerRequest struct {
	Version    string   `json:"version"`
	Args       []string `json:"args"` // of `mula index`
	Dir        string   `json:"dir"`  // working directory
	Rank, Size int
	// path of a file in the cache, by which the worker knows that it sees the same folder
	Proof string `json:"proof"`
	Text  string `json:"text"` // what is in it
}

// A workerAnswer comes when the worker begins, and when it has ended.
type workerAnswer struct {
	Began bool   `json:"began,omitempty"`
	Error string `json:"error,omitempty"`
}

func workerSecret() ([]byte, error) {
	secret := os.Getenv(secretVariable)
	if len(secret) < leastSecret {
		return nil, usagef("set %s to a secret of at least %d characters, "+
			"the same on all hosts", secretVariable, leastSecret)
	}
	return []byte(secret), nil
}

// tag is the HMAC of a message; purpose keeps messages of different kinds apart.
func tag(secret []byte, purpose string, parts ...string) string {
	h := hmac.New(sha256.New, secret)
	fmt.Fprintf(h, "mula index %s\n", purpose)
	for _, p := range parts {
		fmt.Fprintf(h, "%d %s\n", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func tagged(secret []byte, got, purpose string, parts ...string) bool {
	return hmac.Equal([]byte(got), []byte(tag(secret, purpose, parts...)))
}

func nonce() string {
	var b [32]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

type helloLine struct {
	Mula, Nonce string
}

type requestLine struct {
	Nonce  string
	Bytes  int
	SHA256 string
	MAC    string
}

type answerLine struct {
	Answer string // JSON
	MAC    string
}

func writeLine(w io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(text, '\n'))
	return err
}

// readLine reads a line of bounded length.
func readLine(r *bufio.Reader, v any) error {
	text, err := r.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return fmt.Errorf("a line has more than %d bytes; the peer is not a mula worker", maxLine)
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("invalid line %.60q; the peer is not a mula worker", text)
	}
	return nil
}

func indexServeCommand() *cli.Command {
	return &cli.Command{
		Name:      "serve",
		Usage:     "run a worker for `mula index --workers` on other hosts, until interrupted",
		ArgsUsage: "[HOST:PORT]",
		Description: "Listens at HOST:PORT, by default " + defaultServe +
			", for builds by clients with the same secret in the environment variable " + secretVariable +
			".\n" +
			"Builds one at a time, with the rights of the user that started it. Worker and client must see the same files under the same paths. Nothing is\n" +
			"encrypted: use an address of a private network.\n\n" +
			"Example: MULA_SECRET=… mula index serve node7:7161",
		Action: runIndexServe,
	}
}

func runIndexServe(c *cli.Context) error {
	if c.NArg() > 1 {
		return usagef("unexpected %q: see `%s --help`", c.Args().Get(1), c.Command.HelpName)
	}
	address := c.Args().First()
	if address == "" {
		address = defaultServe
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return usagef("invalid address %q; it must be HOST:PORT, such as %s", address, defaultServe)
	}
	if host == "" { // which net takes for all networks of the machine
		host = "127.0.0.1"
	}
	secret, err := workerSecret()
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return fmt.Errorf("listening for builds: %w", err)
	}
	p := newProgress(c.App.ErrWriter)
	p.line("waiting for builds at %s", l.Addr())
	s := &workerServer{secret: secret, told: p.line, places: make(chan struct{}, mostConnections)}
	return s.serve(c.Context, l)
}

// A workerServer builds for others.
type workerServer struct {
	secret []byte
	told   func(format string, args ...any)
	places chan struct{} // of connections
	busy   sync.Mutex    // held while building: the working directory is the process's
}

// serve answers until ctx is done, which is no error.
func (s *workerServer) serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listening for builds: %w", err)
		}
		select {
		case s.places <- struct{}{}:
		default:
			conn.Close()
			continue
		}
		conns.Go(func() {
			defer func() { <-s.places }()
			defer conn.Close()
			if err := s.answer(ctx, conn); err != nil {
				s.told("%s: %s", conn.RemoteAddr(), printable(err.Error()))
			}
		})
	}
}

// answer does what one connection asks for.
func (s *workerServer) answer(ctx context.Context, conn net.Conn) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })()
	conn.SetDeadline(time.Now().Add(handshakeTime))
	r := bufio.NewReaderSize(conn, maxLine)
	mine := nonce()
	if err := writeLine(conn, helloLine{version.String(), mine}); err != nil {
		return err
	}
	var line requestLine
	if err := readLine(r, &line); err != nil {
		return err
	}
	if !tagged(s.secret, line.MAC, "request", mine, line.Nonce, fmt.Sprint(line.Bytes), line.SHA256) {
		return fmt.Errorf("refused: the client has another %s; set the same value on all hosts", secretVariable)
	}
	if line.Bytes < 0 || line.Bytes > maxRequest {
		return fmt.Errorf("invalid request of %d bytes", line.Bytes)
	}
	text := make([]byte, line.Bytes)
	if _, err := io.ReadFull(r, text); err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	var req workerRequest
	if hex.EncodeToString(sum[:]) != line.SHA256 || json.Unmarshal(text, &req) != nil {
		return errors.New("the request does not match its checksum")
	}
	sent := 0
	say := func(a workerAnswer) error {
		text, err := json.Marshal(a)
		if err != nil {
			return err
		}
		sent++
		return writeLine(conn, answerLine{string(text), tag(s.secret, "answer", line.Nonce, fmt.Sprint(sent),
			string(text))})
	}
	fail := func(err error) error { return errors.Join(err, say(workerAnswer{Error: err.Error()})) }
	if req.Version != version.String() {
		return fail(fmt.Errorf("the worker runs mula %s and the client mula %s; use one version", version.String(),
			req.Version))
	}
	if !s.busy.TryLock() {
		return fail(errors.New("the worker is busy with another build"))
	}
	defer s.busy.Unlock()
	back, err := os.Getwd()
	if err == nil {
		err = os.Chdir(req.Dir)
	}
	if err != nil {
		return fail(fmt.Errorf("the worker cannot open the working directory: %w", err))
	}
	defer os.Chdir(back)
	if proof, err := os.ReadFile(req.Proof); err != nil || string(proof) != req.Text {
		return fail(fmt.Errorf("the worker does not see the same %s; workers need the cache folder and the token "+
			"files under the same paths", filepath.Dir(filepath.Dir(req.Proof))))
	}
	if err := say(workerAnswer{Began: true}); err != nil {
		return err
	}
	conn.SetDeadline(time.Time{})
	go func() { // who asked sends nothing more: whatever comes is its end
		r.ReadByte()
		cancel()
	}()
	s.told("building for %s in %s", conn.RemoteAddr(), printable(req.Dir))
	began := time.Now()
	if err := runAsked(ctx, req); err != nil {
		if ctx.Err() != nil {
			return errors.New("build cancelled: the client disconnected")
		}
		return fail(err)
	}
	s.told("done for %s in %.1f s", conn.RemoteAddr(), time.Since(began).Seconds())
	return say(workerAnswer{})
}

// runAsked runs `mula index` as a rank of the one that asked.
func runAsked(ctx context.Context, req workerRequest) error {
	app := newApp(strings.NewReader(""), io.Discard, io.Discard)
	current, _, err := renames.apply(app.Commands, append([]string{"mula", "index"}, req.Args...)) // the caller warns
	if err != nil {
		return err
	}
	args, err := flagsFirst(app.Commands, current)
	if err != nil {
		return err
	}
	return app.RunContext(context.WithValue(ctx, standingKey{}, standing{rank: req.Rank, size: req.Size, local: 1}),
		args)
}

// workers are those that help with a build.
type workers struct {
	addresses []string
	results   []chan error // what each came to; errGone if its connection broke
	conns     []net.Conn
	proof     string
}

var errGone = errors.New("the worker disconnected")

// askWorkers has the workers of --workers begin; stop is called with the error of one that fails.
// Without the flag it gives nil.
func askWorkers(c *cli.Context, stop context.CancelCauseFunc) (_ *workers, err error) {
	list := strings.FieldsFunc(strings.Join(c.StringSlice("workers"), ","), func(r rune) bool {
		return r == ',' ||
			r == ' '
	})
	if len(list) == 0 {
		return nil, nil
	}
	if standingOf(c.Context).size > 1 {
		return nil, usagef("--workers cannot be used in one of several ranks; " +
			"remove --workers, or start the process without mpiexec and srun")
	}
	if c.String("cache") == "" {
		return nil, usagef("--workers requires --cache, a folder that all workers see")
	}
	secret, err := workerSecret()
	if err != nil {
		return nil, err
	}
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	state, err := filepath.Abs(filepath.Join(c.String("cache"), cache.StateDir))
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(state, 0o777); err != nil {
		return nil, fmt.Errorf("making the directory: %w", err)
	}
	w := &workers{addresses: list, proof: atomicfile.TempName(filepath.Join(state, "workers"))}
	text := nonce()
	if err := os.WriteFile(w.proof, []byte(text), 0o666); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	req := workerRequest{Version: version.String(), Args: indexFlags(c), Dir: dir, Size: len(list) + 1, Proof: w.proof,
		Text: text}
	for i, address := range list {
		req.Rank = i + 1
		conn, answers, err := askWorker(c.Context, address, secret, req)
		if err != nil {
			return nil, fmt.Errorf("worker %s: %w", address, err)
		}
		w.conns = append(w.conns, conn)
		result := make(chan error, 1)
		w.results = append(w.results, result)
		go func() {
			a, err := answers()
			switch {
			case err != nil:
				err = errGone
			case a.Error != "":
				err = fmt.Errorf("worker %s: %s", address, a.Error)
				stop(err)
			}
			result <- err
		}()
	}
	return w, nil
}

// askWorker hands a request over and waits until the worker begins. answers gives what it says
// then.
func askWorker(ctx context.Context, address string, secret []byte, req workerRequest) (_ net.Conn,
	answers func() (workerAnswer, error), err error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, nil, fmt.Errorf("%w; check that `mula index serve` runs there", err)
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })()
	r := bufio.NewReaderSize(conn, maxLine)
	var hello helloLine
	if err := readLine(r, &hello); err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(req)
	if err != nil {
		return nil, nil, err
	}
	sum := sha256.Sum256(text)
	mine := nonce()
	line := requestLine{Nonce: mine, Bytes: len(text), SHA256: hex.EncodeToString(sum[:])}
	line.MAC = tag(secret, "request", hello.Nonce, line.Nonce, fmt.Sprint(line.Bytes), line.SHA256)
	if err := writeLine(conn, line); err != nil {
		return nil, nil, err
	}
	if _, err := conn.Write(text); err != nil {
		return nil, nil, refusal(err)
	}
	received := 0
	answers = func() (a workerAnswer, err error) {
		var line answerLine
		if err := readLine(r, &line); err != nil {
			return a, refusal(err)
		}
		received++
		if !tagged(secret, line.MAC, "answer", mine, fmt.Sprint(received), line.Answer) {
			return a, fmt.Errorf("the worker has another %s; set the same value on all hosts", secretVariable)
		}
		return a, json.Unmarshal([]byte(line.Answer), &a)
	}
	a, err := answers()
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	return conn, answers, err
}

// refusal explains the end of a connection in the middle of the talk.
func refusal(err error) error {
	return fmt.Errorf("the worker closed the connection: %w; check that %s is the same on both hosts", err, secretVariable)
}

// indexFlags are the flags that were given to `mula index`, for a worker.
func indexFlags(c *cli.Context) (args []string) {
	for _, name := range c.LocalFlagNames() {
		switch name {
		case "workers", "json", "dry-run":
			continue
		}
		if slice, ok := c.Value(name).(cli.StringSlice); ok {
			for _, v := range slice.Value() {
				args = append(args, "--"+name+"="+v)
			}
			continue
		}
		args = append(args, fmt.Sprintf("--%s=%v", name, c.Value(name)))
	}
	return args
}

// wait waits for the workers, when the build has ended here; err is what it came to. It gives the
// error of the build as a whole, and those workers that were lost on the way, whose work others
// have done.
func (w *workers) wait(err error) (lost []string, _ error) {
	defer w.close()
	if err != nil {
		return nil, err // the workers stop as their connections end
	}
	timeout := time.After(farewellTime)
	for i, result := range w.results {
		var ended error
		select {
		case ended = <-result:
		case <-timeout:
			ended = errGone
		}
		if errors.Is(ended, errGone) {
			lost = append(lost, w.addresses[i])
		} else if ended != nil {
			return nil, ended
		}
	}
	return lost, nil
}

func (w *workers) close() {
	for _, conn := range w.conns {
		conn.Close()
	}
	os.Remove(w.proof)
}
