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
	fmt.Fprintf(&text, "# HELP mula_plan_info The plan that is served.\n# TYPE mula_plan_info "+
		"gauge\nmula_plan_info{fingerprint=%q,order_version=%q} 1\n",
		s.Fingerprint(), s.data.OrderVersion())
	add("uptime_seconds", "gauge", "Time since the start.", time.Since(s.began).Seconds())
	add("streams", "gauge", "Streams now, those in line for memory included.", c.streams.Load())
	add("streams_limit", "gauge", "Streams that may be open at a time.", s.o.MaxStreams)
	add("streams_waiting", "gauge", "Streams in line for memory.", c.waiting.Load())
	add("streams_opened_total", "counter", "Streams that were given memory.", c.opened.Load())
	add("streams_completed_total", "counter", "Streams that were read to their end.", c.completed.Load())
	add("streams_refused_total", "counter", "Requests for a stream that were refused.", c.refused.Load())
	add("errors_total", "counter", "Records and other answers that damaged or unreadable data did not let be made.",
		c.errors.Load())
	add("records_total", "counter", "Records that were read for streams.", c.records.Load())
	add("samples_total", "counter", "Samples in them.", c.samples.Load())
	add("bytes_total", "counter", "Bytes of their columns.", c.bytes.Load())
	add("reading_seconds_total", "counter", "Time in which records were read, added up over all streams.",
		time.Duration(c.reading.Load()).Seconds())
	add("memory_sending_bytes", "gauge", "Memory reserved for records that are being sent.", c.sendingBytes.Load())
	add("memory_ahead_bytes", "gauge", "Memory reserved for records that are read ahead.", c.aheadBytes.Load())
	add("memory_limit_bytes", "gauge", "Memory that both together may take.", s.o.Memory)
	if v := s.data.Verification(); v.OfFiles > 0 {
		add("verified_bytes", "gauge", "Bytes of whole files that were compared with the plan.", v.Bytes)
		add("verify_bytes", "gauge", "Bytes of whole files that are to be compared.", v.Total)
	}
	samples := []metrics.Sample{{Name: "/sched/goroutines:goroutines"}, {Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(samples)
	add("goroutines", "gauge", "Goroutines of the process.", samples[0].Value.Uint64())
	add("heap_bytes", "gauge", "Memory that Go's objects take, garbage included.", samples[1].Value.Uint64())
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write([]byte(text.String())) // who does not read it gets none
	return nil
}
