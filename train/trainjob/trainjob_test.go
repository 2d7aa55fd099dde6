package trainjob

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A controller is a server with the protocol of Kubeflow Trainer 2.3: TLS with a certificate of its
// own, a token, and JSON.
type controller struct {
	*httptest.Server
	token, tokenFile, caFile string

	mu       sync.Mutex
	statuses []trainerStatus
	fail     int // requests that it refuses from now on
}

const statusPath = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/train/status"

func newController(t *testing.T) *controller {
	dir := t.TempDir()
	c := &controller{tokenFile: filepath.Join(dir, "token"), caFile: filepath.Join(dir, "ca.crt")}
	c.Server = httptest.NewTLSServer(http.HandlerFunc(c.serve))
	t.Cleanup(c.Close)
	c.setToken(t, "first")
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate().Raw})
	if err := os.WriteFile(c.caFile, certificate, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(urlVariable, c.URL+statusPath)
	t.Setenv(caVariable, c.caFile)
	t.Setenv(tokenVariable, c.tokenFile)
	return c
}

func (c *controller) setToken(t *testing.T, token string) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.token = token
	if err := os.WriteFile(c.tokenFile, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (c *controller) serve(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	refuse := func(code int, message string) {
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"status":"Failure","message":%q,"code":%d}`, message, code)
	}
	var update request
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	switch {
	case r.Method != http.MethodPost || r.URL.Path != statusPath:
		refuse(http.StatusNotFound, "Not found")
	case r.Header.Get("Authorization") != "Bearer "+c.token || c.fail > 0:
		c.fail--
		refuse(http.StatusForbidden, "Forbidden")
	case decoder.Decode(&update) != nil:
		refuse(http.StatusUnprocessableEntity, "Invalid payload")
	default:
		c.statuses = append(c.statuses, update.TrainerStatus)
		json.NewEncoder(w).Encode(update)
	}
}

func (c *controller) received() []trainerStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.statuses)
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for start := time.Now(); !done(); time.Sleep(time.Millisecond) {
		if time.Since(start) > time.Minute {
			t.Fatalf("no %s within a minute", what)
		}
	}
}

// The first and the last status arrive, with the newest token. Between two requests is the
// interval.
func TestReport(t *testing.T) {
	c := newController(t)
	r, err := New(t.Context(), func(text string) { t.Error(text) })
	if err != nil {
		t.Fatal(err)
	}
	r.Report(Status{Done: 0, Steps: 200})
	waitFor(t, "first status", func() bool { return len(c.received()) == 1 })
	c.setToken(t, "second")
	for done := int64(1); done <= 150; done++ { // less than the interval
		r.Report(Status{Done: done, Steps: 200, Left: 1500 * time.Millisecond,
			Metrics: map[string]float64{"mfu": 0.5, "loss": 1.0 / 3, "grad_norm": math.NaN()}})
	}
	r.Close()
	got := c.received()
	if len(got) != 2 {
		t.Fatalf("got %d statuses, want the first and the last", len(got))
	}
	for i, want := range []string{
		`{"progressPercentage":0,"lastUpdatedTime":""}`,
		`{"progressPercentage":75,"estimatedRemainingSeconds":2,"metrics":[{"name":"loss","value":"0.333333"},` +
			`{"name":"mfu","value":"0.5"}],"lastUpdatedTime":""}`,
	} {
		if at, err := time.Parse(time.RFC3339, got[i].LastUpdatedTime); err != nil || time.Since(at) > time.Hour {
			t.Errorf("status %d is of %q: %v", i, got[i].LastUpdatedTime, err)
		}
		got[i].LastUpdatedTime = ""
		if text, err := json.Marshal(got[i]); err != nil || string(text) != want {
			t.Errorf("status %d is %s (%v), want %s", i, text, err, want)
		}
	}
}

func TestPercentage(t *testing.T) {
	for _, c := range []struct {
		done, steps int64
		want        int32
		left        bool
	}{{0, 0, 100, true}, {0, 3, 0, false}, {2, 3, 66, false}, {3, 3, 100, true},
		{1<<53 - 1, 1 << 53, 99, false}} {
		got := newRequest(Status{Done: c.done, Steps: c.steps}).TrainerStatus
		if got.ProgressPercentage != c.want || (got.EstimatedRemainingSeconds != nil) != c.left {
			t.Errorf("%d of %d steps: %+v, want %d %%", c.done, c.steps, got, c.want)
		}
	}
	long := newRequest(Status{Done: 1, Steps: 2, Left: math.MaxInt64}).TrainerStatus.EstimatedRemainingSeconds
	if long == nil || *long != math.MaxInt32 {
		t.Errorf("the longest time is %v", long)
	}
}

// Failures are named once, until a request succeeds. They do not disturb the caller.
func TestFailures(t *testing.T) {
	defer func(d time.Duration) { interval = d }(interval)
	interval = time.Millisecond
	c := newController(t)
	c.fail = 3
	var mu sync.Mutex
	var warnings []string
	r, err := New(t.Context(), func(text string) { mu.Lock(); defer mu.Unlock(); warnings = append(warnings, text) })
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "success", func() bool { r.Report(Status{Done: 1, Steps: 2}); return len(c.received()) > 0 })
	r.Close()
	if len(warnings) != 2 || !strings.Contains(warnings[0], "403 Forbidden: Forbidden; the run continues") ||
		!strings.Contains(warnings[1], "updated again") {
		t.Errorf("warnings: %q", warnings)
	}
}

// Each file that is wrong is named.
func TestFiles(t *testing.T) {
	for want, change := range map[string]func(c *controller) error{
		caVariable + ": open ":               func(c *controller) error { return os.Remove(c.caFile) },
		"ca.crt has no certificate":          func(c *controller) error { return os.WriteFile(c.caFile, []byte("?"), 0o600) },
		"failed to verify certificate: x509": func(c *controller) error { return otherCertificate(c.caFile) },
		tokenVariable + ": open ":            func(c *controller) error { return os.Remove(c.tokenFile) },
	} {
		c := newController(t)
		if err := change(c); err != nil {
			t.Fatal(err)
		}
		var warning string
		r, err := New(t.Context(), func(text string) { warning = text })
		if err != nil {
			t.Fatal(err)
		}
		r.Report(Status{Steps: 1})
		r.Close()
		if !strings.Contains(warning, want) || len(c.received()) > 0 {
			t.Errorf("warning %q, want %q", warning, want)
		}
	}
}

// otherCertificate writes a certificate that the server does not have.
func otherCertificate(path string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}), 0o600)
}

func TestEnvironment(t *testing.T) {
	t.Setenv(urlVariable, "")
	r, err := New(t.Context(), nil)
	if r != nil || err != nil {
		t.Errorf("without a TrainJob: %v, %v", r, err)
	}
	r.Report(Status{})
	r.Close()
	t.Setenv(urlVariable, "https://controller"+statusPath)
	t.Setenv(caVariable, "ca.crt")
	t.Setenv(tokenVariable, "")
	if _, err := New(t.Context(), nil); err == nil || !strings.Contains(err.Error(), tokenVariable+" is missing") {
		t.Errorf("without a token: %v", err)
	}
}
