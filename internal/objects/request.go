package objects

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// client sends all requests. It uses HTTP/1.1: a connection for each request in flight is faster
// than streams that share one connection.
var client = &http.Client{
	Transport:     newTransport(),
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

func newTransport() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	t.ForceAttemptHTTP2 = false
	t.MaxIdleConns, t.MaxIdleConnsPerHost = 0, 64
	t.DialContext = (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext
	t.ResponseHeaderTimeout = time.Minute
	t.DisableCompression = true // objects are read as they are stored
	return t
}

type patienceKey struct{}

const defaultPatience = 3 * time.Minute

// WithPatience sets how long an operation repeats failed requests without any progress: by default
// 3 minutes. The pauses in between grow from a thousandth of this time to a tenth. A connection
// without data for a sixth of this time has failed. If a host has never answered, the first request
// to it is repeated for an eighteenth of this time only.
func WithPatience(ctx context.Context, d time.Duration) context.Context {
	return context.WithValue(ctx, patienceKey{}, d)
}

func patience(ctx context.Context) time.Duration {
	if d, ok := ctx.Value(patienceKey{}).(time.Duration); ok {
		return d
	}
	return defaultPatience
}

// A Network replaces the connections to stores, in simulations.
type Network struct {
	http.RoundTripper
	// Random returns a random time below n, for the pauses between tries.
	Random func(n time.Duration) time.Duration
}

type networkKey struct{}

// WithNetwork sends the requests of ctx through a network.
func WithNetwork(ctx context.Context, n Network) context.Context {
	return context.WithValue(ctx, networkKey{}, n)
}

// A failure is a response with a status that is not a success.
type failure struct {
	status  int
	code    string // the store's name of the error, such as NoSuchKey
	message string
	kind    error         // the error that this wraps, such as fs.ErrNotExist, or nil
	again   bool          // the request may be repeated
	after   time.Duration // as the server asked
	header  http.Header
}

func (f *failure) Error() string {
	text := strconv.Itoa(f.status) + " " + http.StatusText(f.status)
	switch {
	case f.code != "" && f.message != "":
		text += " (" + f.code + ": " + f.message + ")"
	case f.code != "" || f.message != "":
		text += " (" + f.code + f.message + ")"
	}
	return text
}

func (f *failure) Unwrap() error { return f.kind }

// A transient error is not a response, but the request may be repeated.
type transient struct {
	err     error
	connect bool // no connection was made
}

func (e *transient) Error() string { return e.err.Error() }
func (e *transient) Unwrap() error { return e.err }

func temporary(err error) error { return &transient{err: err} }

// answered has the hosts that have answered a request.
var answered sync.Map

// send sends a request once. It returns the response if its status is a success or one of accept,
// and otherwise a *failure or a *transient error.
func send(c *http.Client, req *http.Request, accept ...int) (*http.Response, error) {
	counters.requests.Add(1)
	if req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", "mula")
	}
	if n, ok := req.Context().Value(networkKey{}).(Network); ok {
		c = &http.Client{Transport: n.RoundTripper, CheckRedirect: c.CheckRedirect}
	}
	resp, err := c.Do(req)
	if err != nil {
		if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
			err = wrapped.Err // without the URL, which may have a signature
		}
		if bad := (*tls.CertificateVerificationError)(nil); errors.As(err, &bad) {
			return nil, err
		}
		operation := (*net.OpError)(nil)
		_, known := answered.Load(req.URL.Host)
		return nil, &transient{err, !known && errors.As(err, &operation) && operation.Op == "dial"}
	}
	answered.Store(req.URL.Host, true)
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	for _, status := range accept {
		if resp.StatusCode == status {
			return resp, nil
		}
	}
	defer resp.Body.Close()
	return nil, failed(resp)
}

// failed returns the error of a response.
func failed(resp *http.Response) *failure {
	f := &failure{status: resp.StatusCode, header: resp.Header}
	if text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10)); err == nil {
		f.code, f.message = storeError(text)
	}
	if code := resp.Header.Get("X-Ms-Error-Code"); code != "" {
		f.code = code
	}
	switch f.status {
	case http.StatusNotFound, http.StatusGone:
		f.kind = fs.ErrNotExist
	case http.StatusUnauthorized, http.StatusForbidden:
		f.kind = fs.ErrPermission
	case http.StatusPreconditionFailed:
		f.kind = ErrChanged
	case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		f.again = true
	}
	switch f.code { // of S3
	case "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "OperationAborted",
		"ConditionalRequestConflict":
		f.again = true
	}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && seconds > 0 {
		f.after = time.Duration(seconds) * time.Second
	}
	return f
}

// byteOrderMark is at the start of Azure's XML.
const byteOrderMark = "\xef\xbb\xbf"

// storeError reads code and message of an error of S3, Azure or Google.
func storeError(text []byte) (code, message string) {
	var x struct {
		XMLName xml.Name `xml:"Error"`
		Code    string
		Message string
	}
	var j struct {
		Error struct{ Message string }
	}
	text = bytes.TrimPrefix(text, []byte(byteOrderMark))
	if xml.Unmarshal(text, &x) == nil {
		code, message = x.Code, x.Message
	} else if json.Unmarshal(text, &j) == nil {
		message = j.Error.Message
	}
	message, _, _ = strings.Cut(message, "\n")
	return code, strings.TrimSuffix(message[:min(len(message), 300)], ".")
}

// A retrier repeats an operation until it makes no progress for the context's patience.
type retrier struct {
	last   time.Time // of the last progress
	tries  int       // since then
	moved  bool      // there was progress
	before error     // of the try before the last one
	other  error     // of an earlier try; its text differs from the text of before
}

func newRetrier() *retrier { return &retrier{last: time.Now()} }

// progress says that bytes have arrived.
func (r *retrier) progress() { *r = retrier{last: time.Now(), moved: true} }

// again waits before the next try after an error. It returns an error if there is no next try.
func (r *retrier) again(ctx context.Context, err error) error {
	if stop := ctx.Err(); stop != nil {
		return stop
	}
	r.tries++
	budget := patience(ctx)
	first, most := budget/1000, budget/10
	pause := most
	if r.tries < 10 {
		pause = min(most, first<<(r.tries-1))
	}
	random := rand.N[time.Duration]
	if n, ok := ctx.Value(networkKey{}).(Network); ok {
		random = n.Random
	}
	pause = pause/2 + random(pause/2+1)
	if r.moved && r.tries == 1 { // the server works, and only the connection broke
		pause = 0
	}
	lost, fail := (*transient)(nil), (*failure)(nil)
	switch {
	case errors.As(err, &fail):
		if !fail.again {
			return err
		}
		pause = max(pause, fail.after)
	case errors.As(err, &lost):
		if lost.connect {
			budget /= 18
		}
	default:
		return err
	}
	if r.before != nil && r.before.Error() != err.Error() {
		r.other = r.before
	}
	r.before = err
	// A process that was stopped during its only try sends the request again.
	if passed := time.Since(r.last); passed+pause > budget && (r.tries > 1 || lost != nil && lost.connect) {
		err = fmt.Errorf("%w (%d tries in %v)", err, r.tries, passed.Round(100*time.Millisecond))
		if r.other != nil { // a last try without a response does not hide what the store answered
			err = fmt.Errorf("%w; an earlier try: %w", err, r.other)
		}
		return err
	}
	counters.retries.Add(1)
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// retry calls try until it succeeds or [retrier.again] returns an error. Errors name the object.
func retry(ctx context.Context, l location, try func(context.Context) error) error {
	r := newRetrier()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if err = r.again(ctx, err); err != nil {
			return fmt.Errorf("%s: %w", l.name(), err)
		}
	}
}

// limited calls a function that sends n bytes and reads a short response, with a time limit. A
// request that exceeds it may be repeated.
func limited(ctx context.Context, n int, call func(context.Context) error) error {
	limit := patience(ctx)/3 + time.Duration(n)*time.Second/(256<<10)
	inner, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := call(inner)
	if err != nil && ctx.Err() == nil && inner.Err() != nil {
		return temporary(fmt.Errorf("no response in %v", limit))
	}
	return err
}

// newRequest returns a request with data and a copy of the header h, which may be nil.
func newRequest(ctx context.Context, method, address string, h http.Header, data []byte) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(data))
	if err == nil && h != nil {
		req.Header = h.Clone()
	}
	return req, err
}

// decode reads a short response into out with the function unmarshal.
func decode(resp *http.Response, unmarshal func([]byte, any) error, out any) error {
	defer discard(resp.Body)
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return temporary(err)
	}
	if err := unmarshal(bytes.TrimPrefix(text, []byte(byteOrderMark)), out); err != nil {
		return temporary(fmt.Errorf("unexpected response of the store: %w", err))
	}
	return nil
}

// done ends a request whose response has no content of interest.
func done(resp *http.Response, err error) error {
	if err == nil {
		discard(resp.Body)
	}
	return err
}

// discard reads the rest of a short body, so that the connection is used again, and closes it.
func discard(body io.ReadCloser) {
	_, _ = io.CopyN(io.Discard, body, 64<<10) // the result has no use
	body.Close()
}
