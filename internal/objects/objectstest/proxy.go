package objectstest

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync/atomic"
	"testing"
	"time"
)

// A Fault is a disturbance of one request by a [Proxy].
type Fault struct {
	Delay  time.Duration // before everything else
	Status int           // answer with this status instead of forwarding the request
	Header http.Header   // of that answer
	Drop   bool          // close the connection instead of forwarding the request
	Lose   bool          // forward the request, and close the connection instead of answering
	Cut    int           // close the connection after this number of bytes of the content, if above 0
	Stall  bool          // send no more after Cut bytes
	Range  bool          // claim that the content is another range
}

// A Proxy forwards requests to a server, and disturbs them.
type Proxy struct {
	URL string // of the proxy

	target *url.URL
	fault  atomic.Pointer[func(*http.Request) Fault]
}

// NewProxy starts a proxy of a server. It ends with the test.
func NewProxy(t testing.TB, server string) *Proxy {
	target, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{target: target}
	s := httptest.NewUnstartedServer(p)
	s.Config.ErrorLog = nil
	s.Start()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	p.URL = s.URL
	return p
}

// Disturb makes the proxy call fault for every request from now on. Nil ends the disturbance.
func (p *Proxy) Disturb(fault func(*http.Request) Fault) {
	if fault == nil {
		p.fault.Store(nil)
		return
	}
	p.fault.Store(&fault)
}

// Repeat returns a function for [Proxy.Disturb]. Request k, counted from 1, has the fault
// faults[k%n].
func Repeat(n int64, faults map[int64]Fault) func(*http.Request) Fault {
	var requests atomic.Int64
	return func(*http.Request) Fault { return faults[requests.Add(1)%n] }
}

// ServeHTTP forwards a request.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var f Fault
	if fault := p.fault.Load(); fault != nil {
		f = (*fault)(r)
	}
	select {
	case <-time.After(f.Delay):
	case <-r.Context().Done():
	}
	if f.Drop {
		panic(http.ErrAbortHandler)
	}
	if f.Status != 0 {
		io.Copy(io.Discard, r.Body)
		for name, values := range f.Header {
			w.Header()[name] = values
		}
		w.WriteHeader(f.Status)
		return
	}
	out := r.Clone(r.Context())
	out.RequestURI, out.URL.Scheme, out.URL.Host = "", p.target.Scheme, p.target.Host
	resp, err := http.DefaultTransport.RoundTrip(out)
	if err != nil || f.Lose {
		panic(http.ErrAbortHandler)
	}
	defer resp.Body.Close()
	for name, values := range resp.Header {
		w.Header()[name] = values
	}
	if f.Range && resp.Header.Get("Content-Range") != "" {
		w.Header().Set("Content-Range", "bytes 1-2/3")
	}
	w.WriteHeader(resp.StatusCode)
	if f.Cut == 0 {
		io.Copy(w, resp.Body)
		return
	}
	n, _ := io.CopyN(w, resp.Body, int64(f.Cut))
	if n < int64(f.Cut) {
		return
	}
	http.NewResponseController(w).Flush()
	if f.Stall {
		<-r.Context().Done()
	}
	panic(http.ErrAbortHandler)
}
