package record

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// Names that a user chose keep the format.
func TestScrapeText(t *testing.T) {
	text := &scrapeText{}
	text.head("mula_x", "gauge", "A test.")
	text.value("mula_x", 1.5, "source", "a\"b\\c\nd", "layer", "0")
	want := "# HELP mula_x A test.\n# TYPE mula_x gauge\nmula_x{source=\"a\\\"b\\\\c\\nd\",layer=\"0\"} 1.5\n"
	if text.String() != want {
		t.Errorf("got %q", text.String())
	}
}

// A run is healthy until it completes no step for the given time.
func TestHealth(t *testing.T) {
	s, err := Serve(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ask := func(query string, code int, says string) {
		t.Helper()
		w := httptest.NewRecorder()
		s.server.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz"+query, nil))
		if text, _ := io.ReadAll(w.Body); w.Code != code || !strings.Contains(string(text), says) {
			t.Errorf("%q: %d, %q", query, w.Code, text)
		}
	}
	ask("?within=1h", http.StatusOK, "ok")
	past := time.Now().Add(-2 * time.Hour)
	s.progress.Store(&past)
	ask("?within=1h", http.StatusServiceUnavailable, "the limit is 1h0m0s")
	ask("?within=20h", http.StatusOK, "ok")
	ask("", http.StatusOK, "ok")
	ask("?within=soon", http.StatusBadRequest, `must be a duration such as 30m, got "soon"`)
	s.Publish(Status{}, StepMetrics{}, nil)
	ask("?within=1h", http.StatusOK, "ok")
}
