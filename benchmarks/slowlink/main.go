// Slowlink is a proxy before an HTTP server that makes its link slow and unreliable: each request
// waits for a latency, all responses together have a rate, and a fraction of the requests fails. It
// counts requests, bytes and faults.
//
//	go run ./benchmarks/slowlink -listen 127.0.0.1:7071 -server http://127.0.0.1:7070 -latency 50ms -rate 100e6
//
// GET /_stats returns the counters as JSON and sets them to zero: requests, bytes, faults, and the
// seconds between the first and the last byte in which a link with a rate had nothing to send.
package main

import (
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:7071", "address of the proxy")
	server := flag.String("server", "", "URL of the server")
	latency := flag.Duration("latency", 50*time.Millisecond, "wait before each request")
	rate := flag.Float64("rate", 0, "bytes/s of all responses together; 0: no limit")
	faults := flag.Float64("faults", 0, "fraction of the requests that fail: status 503 or 429, a connection that "+
		"is closed before, within or after the response, or a long wait")
	seed := flag.Uint64("seed", 1, "seed of the faults")
	flag.Parse()
	target, err := url.Parse(*server)
	if err != nil || *server == "" {
		log.Fatalf("-server %q: name the URL of the server", *server)
	}
	l := &link{rate: *rate, random: rand.New(rand.NewPCG(*seed, 0))}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = r.In.Host // is part of the signature of a request to S3
		},
		Transport: &http.Transport{MaxIdleConnsPerHost: 1000, DisableCompression: true},
	}
	log.Fatal(http.ListenAndServe(*listen, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/_stats" {
			fmt.Fprintf(w, "{\"requests\": %d, \"bytes\": %d, \"faults\": %d, \"idle\": %.3f}\n", l.requests.Swap(0),
				l.bytes.Swap(0), l.faults.Swap(0), l.stopIdle().Seconds())
			return
		}
		l.requests.Add(1)
		time.Sleep(*latency)
		if l.draw() >= *faults {
			proxy.ServeHTTP(response{w, l, -1}, r)
			return
		}
		l.faults.Add(1)
		switch kind := l.draw() * 6; {
		case kind < 1:
			w.WriteHeader(http.StatusServiceUnavailable)
		case kind < 2:
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
		case kind < 3: // the server does not get the request
			panic(http.ErrAbortHandler)
		case kind < 4: // the server has served it, and the client does not know
			proxy.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		case kind < 5: // the content is cut
			proxy.ServeHTTP(response{w, l, int(l.draw() * 1e5)}, r)
		default:
			time.Sleep(time.Duration(l.draw() * float64(3*time.Second)))
			proxy.ServeHTTP(response{w, l, -1}, r)
		}
	})))
}

// A link counts bytes, and lets them pass at its rate.
type link struct {
	requests, bytes, faults atomic.Int64
	rate                    float64

	mu     sync.Mutex
	free   time.Time // when the bytes before have passed; zero before the first
	idle   time.Duration
	random *rand.Rand
}

// draw returns a random number in [0, 1).
func (l *link) draw() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.random.Float64()
}

// stopIdle returns the time in which the link had nothing to send, and sets it to zero.
func (l *link) stopIdle() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	idle := l.idle
	l.idle, l.free = 0, time.Time{}
	return idle
}

// pass waits until n bytes have passed.
func (l *link) pass(n int) {
	l.bytes.Add(int64(n))
	if l.rate == 0 {
		return
	}
	l.mu.Lock()
	now := time.Now()
	if l.free.Before(now) {
		if !l.free.IsZero() {
			l.idle += now.Sub(l.free)
		}
		l.free = now
	}
	l.free = l.free.Add(time.Duration(float64(n) / l.rate * 1e9))
	wait := l.free.Sub(now)
	l.mu.Unlock()
	time.Sleep(wait)
}

type response struct {
	http.ResponseWriter
	link *link
	left int // bytes until the connection is closed; below 0: it is not
}

func (r response) Write(p []byte) (int, error) {
	r.link.pass(len(p))
	if r.left >= 0 && len(p) > r.left {
		_, _ = r.ResponseWriter.Write(p[:r.left])
		panic(http.ErrAbortHandler)
	}
	return r.ResponseWriter.Write(p)
}

// Flush implements [http.Flusher].
func (r response) Flush() {
	if f, ok := r.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}
