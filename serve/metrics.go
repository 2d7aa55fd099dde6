package serve

import (
	"fmt"
	"net/http"
	"runtime/metrics"
	"strings"
	"time"
)

// serveMetrics answers in the text format of Prometheus, version 0.0.4.
func (s *Service) serveMetrics(w http.ResponseWriter, r *http.Request) error {
	if _, err := queryValues(r.URL.RawQuery, nil); err != nil {
		return err
	}
	var text strings.Builder
	add := func(name, kind, help string, value any) {
		fmt.Fprintf(&text, "# HELP mula_%s %s\n# TYPE mula_%s %s\nmula_%s %v\n", name, help, name, kind, name, value)
	}
	c := &s.counts
	fmt.Fprintf(&text, "# HELP mula_plan_info The plan.\n# TYPE mula_plan_info "+
		"gauge\nmula_plan_info{fingerprint=%q,order_version=%q} 1\n",
		s.Fingerprint(), s.data.OrderVersion())
	add("uptime_seconds", "gauge", "Time since the start of the service.", time.Since(s.began).Seconds())
	add("streams", "gauge", "Open streams, including streams that wait for memory.", c.streams.Load())
	add("streams_limit", "gauge", "Maximum number of open streams.", s.o.MaxStreams)
	add("streams_waiting", "gauge", "Streams that wait for memory.", c.waiting.Load())
	add("streams_opened_total", "counter", "Streams that received memory.", c.opened.Load())
	add("streams_completed_total", "counter", "Streams that were read to their end.", c.completed.Load())
	add("streams_refused_total", "counter", "Refused requests for streams.", c.refused.Load())
	add("errors_total", "counter", "Records and other answers that failed because data was damaged or unreadable.",
		c.errors.Load())
	add("records_total", "counter", "Records read for streams.", c.records.Load())
	add("samples_total", "counter", "Samples in records read for streams.", c.samples.Load())
	add("bytes_total", "counter", "Bytes of the columns of these records.", c.bytes.Load())
	add("reading_seconds_total", "counter", "Time spent reading records, summed over all streams.",
		time.Duration(c.reading.Load()).Seconds())
	add("memory_sending_bytes", "gauge", "Memory reserved for records in transit.", c.sendingBytes.Load())
	add("memory_ahead_bytes", "gauge", "Memory reserved for records read ahead.", c.aheadBytes.Load())
	add("memory_limit_bytes", "gauge", "Maximum memory for both together.", s.o.Memory)
	if v := s.data.Verification(); v.OfFiles > 0 {
		add("verified_bytes", "gauge", "Bytes of complete files verified against the plan.", v.Bytes)
		add("verify_bytes", "gauge", "Bytes of complete files to verify.", v.Total)
	}
	samples := []metrics.Sample{{Name: "/sched/goroutines:goroutines"}, {Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(samples)
	add("goroutines", "gauge", "Goroutines of the process.", samples[0].Value.Uint64())
	add("heap_bytes", "gauge", "Memory of Go's heap objects, including garbage.", samples[1].Value.Uint64())
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write([]byte(text.String())) // the client may have disconnected
	return nil
}
