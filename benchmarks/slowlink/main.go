// Slowlink is a proxy before an HTTP server that makes its link slow: each request waits for a
// latency, and all responses together have a rate. It counts requests and bytes.
//
//	go run ./benchmarks/slowlink -listen 127.0.0.1:7071 -server http://127.0.0.1:7070 -latency 50ms -rate 100e6
//
// GET /_stats returns the counters as JSON and sets them to zero.
package main

import (
	"flag"
	"fmt"
	"log"
	"net/http"
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
	flag.Parse()
	target, err := url.Parse(*server)
	if err != nil || *server == "" {
		log.Fatalf("-server %q: name the URL of the server", *server)
	}
	l := &link{rate: *rate}
	proxy := httputil.NewSingleHostReverseProxy(target)
	direct := proxy.Director
	proxy.Director = func(r *http.Request) {
		host := r.Host // is part of the signature of a request to S3
		direct(r)
		r.Host = host
	}
	proxy.Transport = &http.Transport{MaxIdleConnsPerHost: 1000, DisableCompression: true}
	log.Fatal(http.ListenAndServe(*listen, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/_stats" {
			fmt.Fprintf(w, "{\"requests\": %d, \"bytes\": %d}\n", l.requests.Swap(0), l.bytes.Swap(0))
			return
		}
		l.requests.Add(1)
		time.Sleep(*latency)
		proxy.ServeHTTP(response{w, l}, r)
	})))
}

// A link counts bytes, and lets them pass at its rate.
type link struct {
	requests, bytes atomic.Int64
	rate            float64

	mu   sync.Mutex
	free time.Time // when the bytes before have passed
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
}

func (r response) Write(p []byte) (int, error) {
	r.link.pass(len(p))
	return r.ResponseWriter.Write(p)
}

// Flush implements [http.Flusher].
func (r response) Flush() {
	if f, ok := r.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}
