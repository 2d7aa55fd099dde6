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

// maxFailures is how many failures are kept and reported. A disk that is gone fails in as many ways
// as there are shards.
const maxFailures = 1000

// failures are what could not be read, one for each shard.
type failures struct {
	mu   sync.Mutex
	list []failure // in the order in which they were met
}

// A failure is the first error about a shard.
type failure struct {
	key           string // the shard, or the text where it names none
	text          string
	source, shard int
	lost          bool // bytes of the shard's files could not be read, which can come right again
}

// failed counts an error that the data gave, and reports it where it is the first of its shard.
// Refusals, and requests whose client has gone, are no errors of the data.
func (s *Service) failed(err error) {
	var refused *Error
	if err == nil || errors.As(err, &refused) || errors.Is(err, context.Canceled) ||
		errors.Is(err, context.DeadlineExceeded) {
		return
	}
	s.counts.errors.Add(1)
	s.report(err)
}

// report keeps the first error of each shard, and tells [Options.Report] of it.
func (s *Service) report(err error) {
	text := strings.ReplaceAll(err.Error(), "\n", " ")
	met := failure{text: text}
	for i := range s.data.Sources {
		for k := range s.data.Sources[i].Shards {
			// A path may be the end of another.
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

// left forgets the failures that have come right, and gives the texts of the others.
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

// health is how the service is, with the HTTP status that says so, and what was found damaged: by
// streams, by other requests, and by the verification of the files.
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

// serveHealthz answers who has no token too: it says that something is wrong, and not what.
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

// serveHealth says what is wrong.
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
