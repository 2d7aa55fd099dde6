package record

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"mula/train/spikes"
)

// A Server serves the newest metrics of a run at /metrics, in the text exposition format
// 0.0.4 of Prometheus (prometheus.io/docs/instrumenting/exposition_formats), and its health at
// /healthz.
type Server struct {
	server   *http.Server
	text     atomic.Pointer[string]    // the served text
	progress atomic.Pointer[time.Time] // of the last step, or of the start
	done     chan struct{}             // closed after the server has stopped

	ratios     map[string]float64 // newest measured ratios
	evaluation *Evaluation        // newest evaluation
}

// Serve starts to serve at an address. It serves no values before the first step.
func Serve(ctx context.Context, address string) (*Server, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics_listen %s: %w; choose another address, or \"\" for none", address, err)
	}
	s := &Server{done: make(chan struct{})}
	s.text.Store(new(string))
	s.progressed()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		io.WriteString(w, *s.text.Load())
	})
	mux.HandleFunc("GET /healthz", s.serveHealth)
	s.server = &http.Server{Handler: mux, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second}
	go func() {
		defer close(s.done)
		if err := s.server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			listener.Close() // no requests are answered any more; the run continues
		}
	}()
	return s, nil
}

func (s *Server) progressed() {
	now := time.Now()
	s.progress.Store(&now)
}

// serveHealth answers with an error if the last step, or the start of the run, was longer ago than
// the parameter within allows.
func (s *Server) serveHealth(w http.ResponseWriter, r *http.Request) {
	since := time.Since(*s.progress.Load())
	if text := r.FormValue("within"); text != "" {
		limit, err := time.ParseDuration(text)
		switch {
		case err != nil || limit <= 0:
			http.Error(w, fmt.Sprintf("within: must be a duration such as 30m, got %q", text), http.StatusBadRequest)
			return
		case since > limit:
			http.Error(w, fmt.Sprintf("no step was completed for %s; the limit is %s", since.Round(time.Second), limit),
				http.StatusServiceUnavailable)
			return
		}
	}
	io.WriteString(w, "ok\n")
}

// Close stops the server and closes its connections.
func (s *Server) Close() {
	s.server.Close()
	<-s.done
}

// Status has served values that are not metrics of a step.
type Status struct {
	Version, Plan, Device string // plan: the fingerprint
	StepsDone, Steps      int64
	Tokens                int64         // trained on
	PeakFLOPS             float64       // as in [Run]
	ExpertLayers          []int         // numbers of all layers with experts
	Spikes                *spikes.State // or nil
}

// Publish sets the served values to the state after a step. evaluation is the evaluation after the
// step, or nil. The goroutine of the run calls publish.
func (s *Server) Publish(run Status, m StepMetrics, evaluation *Evaluation) {
	s.progressed()
	t := &scrapeText{}
	t.head("mula_run_info", "gauge", "Run: version of mula, plan fingerprint, device.")
	t.value("mula_run_info", 1, "version", run.Version, "plan", run.Plan, "device", run.Device)
	t.metric("mula_steps_done", "gauge", "Number of completed steps.", float64(run.StepsDone))
	t.metric("mula_steps", "gauge", "Number of steps of the whole run.", float64(run.Steps))
	t.metric("mula_tokens", "gauge", "Number of tokens trained on, since step 0.", float64(run.Tokens))
	t.metric("mula_learning_rate", "gauge", "Learning rate of the last step.", m.LearningRate)
	t.metric("mula_step_seconds", "gauge", "Duration of the last step, in seconds.", m.Seconds)
	t.metric("mula_tokens_per_second", "gauge", "Tokens per second in the last step.", m.TokensPerSecond)
	t.metric("mula_mfu", "gauge", "Model FLOPs utilization of the last step, relative to the measured peak.", m.MFU)
	t.metric("mula_peak_flops", "gauge", "Measured peak of the device's matrix products, FLOP/s.", run.PeakFLOPS)
	if m.Samples > 0 && (m.Targets == nil || *m.Targets > 0) && (m.Skipped == nil || !m.Skipped.NotFinite) {
		t.metric("mula_loss", "gauge", "Cross entropy of the last step, nats per target.", m.Loss)
		t.metric("mula_aux_loss", "gauge", "Load-balancing loss of the last step, without its coefficient.", m.AuxLoss)
		t.metric("mula_z_loss", "gauge", "Router z-loss of the last step, without its coefficient.", m.ZLoss)
		t.metric("mula_grad_norm", "gauge", "Norm of the gradient of the last step, before clipping.", m.GradNorm)
	}
	if len(m.PredictionLoss) > 0 {
		t.head("mula_prediction_loss", "gauge", "Cross entropy of each layer of multi-token prediction in the last "+
			"step, nats per target. Depth 1 predicts the token after the next.")
		for k, loss := range m.PredictionLoss {
			t.value("mula_prediction_loss", loss, "depth", strconv.Itoa(k+1))
		}
	}
	if len(m.SourceLoss) > 0 {
		t.head("mula_source_loss", "gauge", "Cross entropy of each source in the last step, nats per target.")
		for _, name := range slices.Sorted(maps.Keys(m.SourceLoss)) {
			t.value("mula_source_loss", m.SourceLoss[name], "source", name)
		}
	}
	if len(m.ExpertTokens) > 0 {
		t.head("mula_expert_load_max_over_mean", "gauge",
			"Largest load of an expert in each layer in the last step, relative to the mean load.")
		for i, counts := range m.ExpertTokens {
			t.value("mula_expert_load_max_over_mean", BalanceOf(counts).MaxOverMean, "layer",
				strconv.Itoa(run.ExpertLayers[i]))
		}
	}
	if len(m.RouterEntropy) > 0 {
		t.head("mula_router_entropy", "gauge",
			"Entropy of the router's distribution in each layer in the last step, nats, mean over tokens.")
		for i, entropy := range m.RouterEntropy {
			t.value("mula_router_entropy", entropy, "layer", strconv.Itoa(run.ExpertLayers[i]))
		}
	}
	if len(m.DroppedChoices) > 0 {
		t.head("mula_dropped_choices", "gauge",
			"Choices that the experts of each layer dropped in the last step, as a fraction of all.")
		for i, dropped := range m.DroppedChoices {
			t.value("mula_dropped_choices", dropped, "layer", strconv.Itoa(run.ExpertLayers[i]))
		}
	}
	if r := m.RankSeconds; r != nil {
		t.head("mula_rank_seconds", "gauge", "Time of all ranks in the last step, by activity, in seconds.")
		for _, a := range []struct {
			name    string
			seconds Seconds
		}{{"reading", r.Reading}, {"compute", r.Compute}, {"waiting", r.Waiting}, {"update", r.Update},
			{"saving", r.Saving}} {
			t.value("mula_rank_seconds", float64(a.seconds), "activity", a.name)
		}
	}
	t.metric("mula_slow_ranks", "gauge", "Number of slow ranks in the last step.", float64(m.SlowRanks))
	if m.UpdateRatio != nil {
		s.ratios = m.UpdateRatio
	}
	if len(s.ratios) > 0 {
		t.head("mula_update_ratio", "gauge",
			"Norm of the last measured update relative to the norm of the weights, by group of tensors.")
		for _, group := range slices.Sorted(maps.Keys(s.ratios)) {
			t.value("mula_update_ratio", s.ratios[group], "group", group)
		}
	}
	if evaluation != nil {
		s.evaluation = evaluation
	}
	if e := s.evaluation; e != nil {
		t.metric("mula_eval_loss", "gauge", "Validation loss, nats per target.", e.Loss)
		t.head("mula_eval_source_loss", "gauge", "Validation loss of each source, nats per target.")
		for _, name := range slices.Sorted(maps.Keys(e.SourceLoss)) {
			t.value("mula_eval_source_loss", e.SourceLoss[name], "source", name)
		}
	}
	if spikes := run.Spikes; spikes != nil {
		t.metric("mula_left_out_samples", "gauge", "Number of positions skipped because of spikes.",
			float64(spikes.Excluded()))
		t.metric("mula_rollbacks", "gauge", "Number of rollbacks because of a spike.",
			float64(len(spikes.Rollbacks)))
	}
	text := t.String()
	s.text.Store(&text)
}

// A scrapeText builds the served text.
type scrapeText struct{ strings.Builder }

// metric adds a metric without labels.
func (t *scrapeText) metric(name, kind, help string, value float64) {
	t.head(name, kind, help)
	t.value(name, value)
}

func (t *scrapeText) head(name, kind, help string) {
	fmt.Fprintf(t, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

// value adds a value of a metric after its head. labels alternates names and values.
func (t *scrapeText) value(name string, value float64, labels ...string) {
	t.WriteString(name)
	separator := "{"
	for i := 0; i < len(labels); i += 2 {
		fmt.Fprintf(t, `%s%s="%s"`, separator, labels[i], labelEscapes.Replace(labels[i+1]))
		separator = ","
	}
	if len(labels) > 0 {
		t.WriteByte('}')
	}
	fmt.Fprintf(t, " %g\n", value)
}

var labelEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
