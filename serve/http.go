package serve

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow/ipc"

	"mula/blend"
	"mula/blend/fingerprint"
)

// contentType is the content type of Arrow's IPC streaming format.
const contentType = "application/vnd.apache.arrow.stream"

const (
	streamPath  = "/v1/stream"
	peekPath    = "/v1/peek"
	oldPeekPath = "/v1/where" // deprecated name of peekPath
)

// paths maps each path to its handler.
var paths = map[string]func(*Service, http.ResponseWriter, *http.Request) error{
	"/v1/plan":   (*Service).servePlan,
	streamPath:   (*Service).serveStream,
	peekPath:     (*Service).servePeek,
	oldPeekPath:  (*Service).servePeek,
	"/v1/hash":   (*Service).serveHash,
	"/v1/health": (*Service).serveHealth,
	"/metrics":   (*Service).serveMetrics,
	"/healthz":   (*Service).serveHealthz,
}

// Handler answers the service's HTTP requests. If token is not empty, requests must have it as
// their bearer token, except for /healthz, which reveals nothing about the data. A stream that
// fails is cut off without its last chunk and without Arrow's end-of-stream marker.
func (s *Service) Handler(token string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.answer(w, r, token); err != nil {
			var refused *Error
			if !errors.As(err, &refused) && r.Context().Err() != nil {
				panic(http.ErrAbortHandler) // the client has disconnected
			}
			writeError(w, err)
		}
	})
}

func (s *Service) answer(w http.ResponseWriter, r *http.Request, token string) error {
	answer, known := paths[r.URL.Path]
	methods := []string{http.MethodGet, http.MethodHead}
	if r.URL.Path == streamPath { // HEAD would compute the whole stream and send none of it
		methods = methods[:1]
	}
	switch {
	case r.ContentLength != 0:
		w.Header().Set("Connection", "close")
		return refusef(http.StatusBadRequest, "request body not allowed; pass parameters in the query string")
	case !local(r, token):
		return refusef(http.StatusForbidden,
			"host %.*q is not allowed; a server without a token accepts only localhost and IP addresses",
			maxQuotedValue, r.Host)
	case token != "" && r.URL.Path != "/healthz" && !Bears(r.Header.Get("Authorization"), token):
		w.Header().Set("WWW-Authenticate", "Bearer")
		return refusef(http.StatusUnauthorized,
			"a token is required: send the header \"Authorization: Bearer TOKEN\"")
	case !known:
		return refusef(http.StatusNotFound, "no such path: %.*q; known are /v1/plan, /v1/stream, /v1/peek, "+
			"/v1/hash, /v1/health, /metrics and /healthz", maxQuotedValue, r.URL.Path)
	case !slices.Contains(methods, r.Method):
		w.Header().Set("Allow", strings.Join(methods, ", "))
		return refusef(http.StatusMethodNotAllowed, "%s does not support the method %.*q; use %s", r.URL.Path,
			maxQuotedValue, r.Method, strings.Join(methods, " or "))
	}
	return answer(s, w, r)
}

// Bears reports whether the value of an authorization header has the token. The comparison takes
// constant time.
func Bears(authorization, token string) bool {
	scheme, given, _ := strings.Cut(authorization, " ")
	a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(token))
	return strings.EqualFold(scheme, "bearer") && subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// local reports whether a request without a token may come from a program on this machine. A web
// page could resolve its own host name to this address, and its browser would then let it read the
// answers. Such requests have the page's host name.
func local(r *http.Request, token string) bool {
	address, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if token != "" || !ok || !address.IP.IsLoopback() {
		return true
	}
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.EqualFold(host, "localhost") || net.ParseIP(strings.Trim(host, "[]")) != nil
}

func writeError(w http.ResponseWriter, err error) {
	writeJSON(w, StatusOf(err), struct {
		Error string `json:"error"`
	}{err.Error()})
}

// writeJSON writes an answer. Write errors are ignored, because the client may have disconnected.
func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	_ = e.Encode(v)
}

// flushed is the size of the buffer that combines the small writes of a record.
const flushed = 32 << 10

// serveStream answers with an Arrow IPC stream. The first record is read before the answer starts,
// so that its errors have an HTTP status.
func (s *Service) serveStream(w http.ResponseWriter, r *http.Request) error {
	request, err := s.ParseQuery(r.URL.RawQuery)
	if err != nil {
		s.counts.refused.Add(1)
		return err
	}
	if r.Header.Get(memoryHeader) == "shared" {
		if shared, err := s.serveShared(w, r, request); shared || err != nil {
			return err
		}
		w.Header().Set(memoryHeader, "none")
	}
	st, err := s.Open(r.Context(), request, 1)
	if err != nil {
		return err
	}
	defer st.Close()
	record, err := st.Next()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	header := w.Header()
	header.Set("Content-Type", contentType)
	header.Set("Mula-Plan", s.Fingerprint())
	connection := http.NewResponseController(w)
	buffered := bufio.NewWriterSize(w, flushed)
	out := ipc.NewWriter(buffered, ipc.WithSchema(st.Schema()), ipc.WithAllocator(st.alloc))
	for err == nil {
		if err = out.Write(record); err == nil {
			err = buffered.Flush()
		}
		if err == nil {
			err = connection.Flush()
		}
		if err == nil {
			record, err = st.Next()
		}
	}
	if errors.Is(err, io.EOF) {
		if err = out.Close(); err == nil {
			err = buffered.Flush()
		}
	}
	if err != nil {
		panic(http.ErrAbortHandler) // the status has been sent; aborting shows that the stream is incomplete
	}
	return nil
}

// PlanDescription is the answer to /v1/plan.
type PlanDescription struct {
	Fingerprint    string              `json:"fingerprint"`
	OrderVersion   string              `json:"order_version"` // as in plan.json
	SequenceLength int                 `json:"sequence_length"`
	Positions      int64               `json:"positions"`
	TokenType      string              `json:"token_type"` // of the stream: uint16 or int32
	Sources        []SourceDescription `json:"sources"`
	Stages         []StageDescription  `json:"stages"`
	Skips          [][2]int64          `json:"skips"` // positions [from, to)

	// Parents are the plans that an amended plan was made from, oldest first. Each has the position
	// up to which the next plan has the same samples.
	Parents []blend.Parent `json:"parents,omitempty"`
}

// SourceDescription is a source of a [PlanDescription].
type SourceDescription struct {
	Name    string `json:"name"`
	Windows int64  `json:"windows"` // including the validation split
}

// StageDescription is a stage of a [PlanDescription]: positions [From, To).
type StageDescription struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

func (s *Service) servePlan(w http.ResponseWriter, r *http.Request) error {
	if _, err := queryValues(r.URL.RawQuery, nil); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.Describe())
	return nil
}

// Describe returns the answer to /v1/plan.
func (s *Service) Describe() PlanDescription {
	p := s.data.Plan
	d := PlanDescription{Fingerprint: p.Fingerprint(), OrderVersion: p.OrderVersion(), SequenceLength: p.SequenceLength,
		Positions: p.Length(),
		TokenType: s.tokens.Name(), Parents: p.Parents, Stages: []StageDescription{}, Skips: [][2]int64{}}
	for i := range p.Sources {
		d.Sources = append(d.Sources, SourceDescription{p.Sources[i].Name, p.Sources[i].Windows()})
	}
	from := int64(0)
	for _, stage := range p.Stages {
		d.Stages = append(d.Stages, StageDescription{from, from + stage.Samples})
		from += stage.Samples
	}
	for _, skip := range p.Skips {
		d.Skips = append(d.Skips, [2]int64{skip.From, skip.To})
	}
	return d
}

// A place is the answer to /v1/peek: the sample at a position.
type place struct {
	Position  int64      `json:"position"`
	Skipped   bool       `json:"skipped"` // the plan skips the position
	Source    string     `json:"source"`
	Epoch     *int64     `json:"epoch"` // null if the order has no epochs
	Window    int64      `json:"window"`
	Shard     int        `json:"shard"`
	Path      string     `json:"path"` // prefix of the shard's files
	Offset    int64      `json:"offset"`
	Documents []document `json:"documents"`
}

// A document is a document with tokens [From, To) of a window.
type document struct {
	Number int64  `json:"document"` // in the shard
	ID     string `json:"id"`       // empty, like File, if the shard has no record of origins
	File   string `json:"file"`
	Line   int64  `json:"line"`
	From   int    `json:"from"`
	To     int    `json:"to"`
	Shard  int    `json:"shard"` // the sample's shard, except in a packed plan
}

func (s *Service) servePeek(w http.ResponseWriter, r *http.Request) error {
	if r.URL.Path == oldPeekPath {
		w.Header().Set("Mula-Warning", oldPeekPath+" is now called "+peekPath)
	}
	values, err := queryValues(r.URL.RawQuery, []string{"position"})
	if err != nil {
		return err
	}
	position, err := number(values, "position", 0, s.data.Length()-1, -1)
	if err != nil {
		return err
	}
	if position < 0 {
		return refusef(http.StatusBadRequest, "position is required: a number from 0 to %d", s.data.Length()-1)
	}
	done, err := s.visit()
	if err != nil {
		return err
	}
	defer done()
	sample, parts, err := s.data.Peek(r.Context(), position)
	if err != nil {
		s.failed(err)
		return err
	}
	p := place{Position: position, Skipped: sample.Skipped, Source: s.data.Sources[sample.Source].Name,
		Window: sample.Window, Shard: sample.Shard,
		Path: s.data.ShardPath(sample.Source, sample.Shard), Offset: sample.Token, Documents: []document{}}
	if sample.Epoch >= 0 {
		p.Epoch = &sample.Epoch
	}
	for _, d := range parts {
		p.Documents = append(p.Documents, document{d.Number, d.ID, d.File, d.Line, d.From, d.To, d.Shard})
	}
	writeJSON(w, http.StatusOK, p)
	return nil
}

// visit starts a use for a request that reads without a stream; the use counts as a stream.
func (s *Service) visit() (done func(), err error) {
	used, err := s.use()
	if err != nil {
		return nil, err
	}
	if !s.streams.TryAcquire(1) {
		used()
		return nil, s.tooMany()
	}
	return func() { s.streams.Release(1); used() }, nil
}

func (s *Service) serveHash(w http.ResponseWriter, r *http.Request) error {
	values, err := queryValues(r.URL.RawQuery, []string{"step", "batch_size"})
	if err != nil {
		return err
	}
	batch, err := number(values, "batch_size", 1, maxBatchSize, 0)
	if err != nil {
		return err
	}
	if _, ok := values["step"]; !ok || batch == 0 {
		return refusef(http.StatusBadRequest, "step and batch_size are required")
	}
	step, err := number(values, "step", 0, s.data.Steps(int(batch))-1, 0)
	if err != nil {
		return err
	}
	done, err := s.visit()
	if err != nil {
		return err
	}
	defer done()
	hash, err := s.hash(r.Context(), step, batch)
	if err != nil {
		s.failed(err)
		return err
	}
	writeJSON(w, http.StatusOK, hash)
	return nil
}

// hash computes the fingerprint of a step sample by sample, so that its memory does not depend on
// the batch.
func (s *Service) hash(ctx context.Context, step, batch int64) (fingerprint.StepHash, error) {
	var h fingerprint.Hasher
	tokens := make([]uint32, s.data.SampleTokens())
	for position := step * batch; position < min((step+1)*batch, s.data.Length()); position++ {
		if err := context.Cause(ctx); err != nil {
			return fingerprint.StepHash{}, err
		}
		if s.stopping.Err() != nil {
			return fingerprint.StepHash{}, errStopping
		}
		sample, err := s.data.Locate(position)
		if err != nil {
			return fingerprint.StepHash{}, err
		}
		if sample.Skipped {
			continue
		}
		if err := s.data.Tokens(tokens, sample); err != nil {
			return fingerprint.StepHash{}, err
		}
		h.Add(tokens)
	}
	if err := s.data.Verification().Err; err != nil {
		return fingerprint.StepHash{}, err
	}
	return h.Step(step, step*batch), nil
}
