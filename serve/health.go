package serve

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"

	"mula/internal/mapping"
)

// maxFailures is the maximum number of failures that are kept and reported. A lost disk causes one
// for every shard.
const maxFailures = 1000

// failures are read errors, one for each shard.
type failures struct {
	mu   sync.Mutex
	list []failure // in order of occurrence
}

// A failure is the first error of a shard.
type failure struct {
	key           string // the shard's path, or text if the error names no shard
	text          string
	source, shard int
	lost          bool // bytes of the shard's files could not be read, which may be temporary
}

// failed counts an error of the data, and reports it if it is the first of its shard. It ignores
// refusals and cancelled requests.
func (s *Service) failed(err error) {
	var refused *Error
	if err == nil || errors.As(err, &refused) || errors.Is(err, context.Canceled) ||
		errors.Is(err, context.DeadlineExceeded) {
		return
	}
	s.counts.errors.Add(1)
	s.report(err)
}

// report stores the first error of each shard, and calls [Options.Report].
func (s *Service) report(err error) {
	text := strings.ReplaceAll(err.Error(), "\n", " ")
	met := failure{text: text}
	for i := range s.data.Sources {
		for k := range s.data.Sources[i].Shards {
			// A path may be a suffix of another.
			if path := s.data.ShardPath(i, k) + "."; len(path) > len(met.key) && strings.Contains(text, path) {
				met.key, met.source, met.shard = path, i, k
			}
		}
	}
	shard := met.key != ""
	if !shard {
		met.key = text
	}
	f := &s.failures
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.list) == maxFailures ||
		slices.ContainsFunc(f.list, func(known failure) bool { return known.key == met.key }) {
		return
	}
	met.lost = shard && (errors.Is(err, mapping.ErrUnreadable) || s.data.Probe(met.source, met.shard) != nil)
	f.list = append(f.list, met)
	if s.o.Report != nil {
		s.o.Report(text)
	}
}

// left removes the failures for which right returns true, and returns the texts of the others.
func (f *failures) left(right func(failure) bool) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = slices.DeleteFunc(f.list, right)
	texts := make([]string, len(f.list))
	for i, met := range f.list {
		texts[i] = met.text
	}
	return texts
}

// health returns the service's health as HTTP status and name, and all damage that streams, other
// requests and the verification of files have found.
func (s *Service) health() (status int, name string, damage []string) {
	if err := s.data.Verification().Err; err != nil {
		s.report(err)
	}
	damage = s.failures.left(func(f failure) bool { return f.lost && s.data.Probe(f.source, f.shard) == nil })
	switch {
	case s.stopping.Err() != nil:
		return http.StatusServiceUnavailable, "stopping", damage
	case len(damage) > 0:
		return http.StatusInternalServerError, "damaged", damage
	}
	return http.StatusOK, "ok", damage
}

// serveHealthz also answers without a token. It reports only whether the service is healthy.
func (s *Service) serveHealthz(w http.ResponseWriter, r *http.Request) error {
	if _, err := queryValues(r.URL.RawQuery, nil); err != nil {
		return err
	}
	status, name, _ := s.health()
	writeJSON(w, status, struct {
		Status string `json:"status"`
	}{name})
	return nil
}

// serveHealth reports the damage.
func (s *Service) serveHealth(w http.ResponseWriter, r *http.Request) error {
	if _, err := queryValues(r.URL.RawQuery, nil); err != nil {
		return err
	}
	status, name, damage := s.health()
	writeJSON(w, status, struct {
		Status string   `json:"status"`
		Plan   string   `json:"plan"`
		Damage []string `json:"damage"`
	}{name, s.Fingerprint(), damage})
	return nil
}
