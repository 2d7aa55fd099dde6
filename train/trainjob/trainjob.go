// Package trainjob reports the progress of a run to the controller of Kubeflow Trainer, which shows
// it in the status of the TrainJob (kubeflow/trainer, docs/user-guides/trainjob-progress.md).
package trainjob

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"time"
)

// The controller sets these variables in each pod of a TrainJob, if its feature TrainJobStatus is
// on.
const (
	urlVariable   = "KUBEFLOW_TRAINER_SERVER_URL"
	caVariable    = "KUBEFLOW_TRAINER_SERVER_CA_CERT" // path of a PEM file
	tokenVariable = "KUBEFLOW_TRAINER_SERVER_TOKEN"   // path of a file
)

const (
	timeout = 5 * time.Second
	maxBody = 1 << 16 // of an answer; the server has the same limit for requests
)

// interval is the least time between two requests. Tests change it.
var interval = 10 * time.Second

// A Status is the state of a run.
type Status struct {
	Done, Steps int64              // done steps, and steps of the whole run
	Left        time.Duration      // estimate; 0: unknown
	Metrics     map[string]float64 // newest values; values that are not finite are not sent
}

// A Reporter sends the newest status in the background. The methods of a nil Reporter do nothing.
type Reporter struct {
	url, ca, token string
	warn           func(text string)

	newest  chan Status // at most one
	closing chan struct{}
	done    chan struct{} // closed after the last request
	failed  bool          // the last request
}

// New returns a Reporter for the TrainJob of this process, or nil if there is none. The Reporter
// calls warn in a goroutine of its own, when a request fails after a success, and when the next
// one succeeds. The end of ctx ends a request.
func New(ctx context.Context, warn func(text string)) (*Reporter, error) {
	if os.Getenv(urlVariable) == "" {
		return nil, nil
	}
	for _, name := range []string{caVariable, tokenVariable} {
		if os.Getenv(name) == "" {
			return nil, fmt.Errorf("environment variable %s is missing, but %s is set; set both, or neither", name,
				urlVariable)
		}
	}
	r := &Reporter{url: os.Getenv(urlVariable), ca: os.Getenv(caVariable), token: os.Getenv(tokenVariable), warn: warn,
		newest: make(chan Status, 1), closing: make(chan struct{}), done: make(chan struct{})}
	go r.run(ctx)
	return r, nil
}

// Report sends s, unless a newer status replaces it before the next request. It does not wait. One
// goroutine may call Report and Close.
func (r *Reporter) Report(s Status) {
	if r == nil {
		return
	}
	select {
	case <-r.newest:
	default:
	}
	r.newest <- s
}

// Close sends the last status, and waits until that is done or has failed.
func (r *Reporter) Close() {
	if r == nil {
		return
	}
	close(r.closing)
	close(r.newest)
	<-r.done
}

func (r *Reporter) run(ctx context.Context) {
	defer close(r.done)
	for s := range r.newest {
		err := r.send(ctx, s)
		switch {
		case err != nil && !r.failed:
			r.warn(fmt.Sprintf("the status of the TrainJob cannot be updated: %v; the run continues without it", err))
		case err == nil && r.failed:
			r.warn("the status of the TrainJob is updated again")
		}
		r.failed = err != nil
		select {
		case <-time.After(interval):
		case <-r.closing:
		}
	}
}

// The request, and the error in an answer: UpdateTrainJobStatusRequest of Kubeflow Trainer's
// API v1alpha1, and Status of Kubernetes' API v1.
type (
	request struct {
		TrainerStatus trainerStatus `json:"trainerStatus"`
	}
	trainerStatus struct {
		ProgressPercentage        int32    `json:"progressPercentage"`
		EstimatedRemainingSeconds *int32   `json:"estimatedRemainingSeconds,omitempty"`
		Metrics                   []metric `json:"metrics,omitempty"`
		LastUpdatedTime           string   `json:"lastUpdatedTime"`
	}
	metric struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	failure struct {
		Message string `json:"message"`
	}
)

func newRequest(s Status) request {
	status := trainerStatus{ProgressPercentage: int32(100 * s.Done / max(s.Steps, 1)),
		LastUpdatedTime: time.Now().UTC().Format(time.RFC3339)}
	switch {
	case s.Done >= s.Steps:
		status.ProgressPercentage, status.EstimatedRemainingSeconds = 100, new(int32)
	case s.Left > 0:
		status.EstimatedRemainingSeconds = new(int32(min(math.Ceil(s.Left.Seconds()), math.MaxInt32)))
	}
	for _, name := range slices.Sorted(maps.Keys(s.Metrics)) {
		if v := s.Metrics[name]; !math.IsNaN(v) && !math.IsInf(v, 0) {
			status.Metrics = append(status.Metrics, metric{name, strconv.FormatFloat(v, 'g', 6, 64)})
		}
	}
	return request{status}
}

// send makes one request. It reads the certificate and the token again, because Kubernetes replaces
// them.
func (r *Reporter) send(ctx context.Context, s Status) error {
	ca, err := os.ReadFile(r.ca)
	if err != nil {
		return fmt.Errorf("%s: %w", caVariable, err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return fmt.Errorf("%s: %s has no certificate in PEM form", caVariable, r.ca)
	}
	token, err := os.ReadFile(r.token)
	if err != nil {
		return fmt.Errorf("%s: %w", tokenVariable, err)
	}
	body, err := json.Marshal(newRequest(s))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("%s: %w", urlVariable, err)
	}
	post.Header.Set("Content-Type", "application/json")
	post.Header.Set("Authorization", "Bearer "+string(bytes.TrimSpace(token)))
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	defer transport.CloseIdleConnections()
	answer, err := (&http.Client{Transport: transport}).Do(post)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxBody))
	if err != nil {
		return fmt.Errorf("%s: %w", r.url, err)
	}
	if answer.StatusCode == http.StatusOK {
		return nil
	}
	var f failure
	if json.Unmarshal(text, &f) != nil || f.Message == "" {
		return fmt.Errorf("%s: the server answers %s", r.url, answer.Status)
	}
	return fmt.Errorf("%s: the server answers %s: %s", r.url, answer.Status, f.Message)
}
