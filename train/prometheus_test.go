package train

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// scrape reads the metrics that are served at an address: values by name and labels, as they stand
// in the text.
func scrape(t testing.TB, address string) map[string]float64 {
	t.Helper()
	transport := new(http.Transport)
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport}
	response, err := client.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK ||
		response.Header.Get("Content-Type") != "text/plain; version=0.0.4; charset=utf-8" {
		t.Fatalf("%v, status %d, %v", err, response.StatusCode, response.Header)
	}
	return parseExposition(t, string(text))
}

var (
	expositionHead   = regexp.MustCompile(`^# (HELP|TYPE) ([a-z_]+) (.+)$`)
	expositionSample = regexp.MustCompile(`^([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*\})? (\S+)$`)
)

// parseExposition reads the format strictly: each metric has its help and type before its values,
// which are consecutive.
func parseExposition(t testing.TB, text string) map[string]float64 {
	t.Helper()
	if text != "" && !strings.HasSuffix(text, "\n") {
		t.Errorf("the last line has no end: %q", text)
	}
	values, heads, metric := map[string]float64{}, map[string]int{}, ""
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if m := expositionHead.FindStringSubmatch(line); m != nil {
			if m[1] == "HELP" && heads[m[2]] != 0 || m[1] == "TYPE" && (heads[m[2]] != 1 || m[2] != metric ||
				m[3] != "gauge" && m[3] != "counter") {
				t.Errorf("out of order: %s", line)
			}
			heads[m[2]]++
			metric = m[2]
			continue
		}
		m := expositionSample.FindStringSubmatch(line)
		if m == nil || m[1] != metric || heads[metric] != 2 {
			t.Errorf("no line of the format, or out of order: %s", line)
			continue
		}
		v, err := strconv.ParseFloat(m[3], 64)
		if _, twice := values[m[1]+m[2]]; err != nil || twice {
			t.Errorf("%s: %v, twice %v", line, err, twice)
		}
		values[m[1]+m[2]] = v
	}
	return values
}

// While a run works, its newest metrics are served; they equal metrics.jsonl. Afterwards nothing is
// served.
func TestServeMetrics(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	c := testConfig(t, makePlan(t, t.TempDir(), "plan.json", ""),
		"evaluate: {every: 4, samples: 2}\nlog: {update_ratio_every: 3}\n")
	c.MetricsListen = address
	if _, err := Run(context.Background(), c, Options{}); !errors.Is(err, syscall.EADDRINUSE) ||
		!strings.Contains(err.Error(), "metrics_listen "+address) {
		t.Errorf("address in use: %v", err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	scrapes := 0
	mustRun(t, c, Options{Version: `v"1"`, Progress: func(p Progress) {
		scrapes++
		got := scrape(t, address)
		want := map[string]float64{
			"mula_steps_done": float64(p.Step + 1), "mula_steps": 8, "mula_tokens": float64(128 * (p.Step + 1)),
			"mula_loss": p.Loss, "mula_grad_norm": p.GradNorm, "mula_mfu": p.MFU,
			`mula_source_loss{source="go"}`: p.SourceLoss["go"], `mula_router_entropy{layer="1"}`: p.RouterEntropy[1],
			"mula_learning_rate": p.LearningRate,
		}
		if p.Step >= 4 {
			want[`mula_eval_source_loss{source="tests"}`] = got[`mula_eval_source_loss{source="tests"}`]
		}
		if p.UpdateRatio != nil {
			want[`mula_update_ratio{group="experts"}`] = p.UpdateRatio["experts"]
		}
		if p.Evaluation != nil {
			want["mula_eval_loss"] = p.Evaluation.Loss
		}
		for name, v := range want {
			if got[name] != v {
				t.Errorf("step %d: %s is %v, want %v", p.Step, name, got[name], v)
			}
		}
		if (got["mula_eval_loss"] > 0) != (p.Step >= 3) || !(got[`mula_update_ratio{group="head"}`] > 0) ||
			!(got[`mula_expert_load_max_over_mean{layer="0"}`] >= 1) {
			t.Errorf("step %d: %v", p.Step, got)
		}
		if p.Step == 0 {
			found := false
			for name := range got {
				found = found || strings.HasPrefix(name, `mula_run_info{version="v\"1\"",plan="`)
			}
			if !found {
				t.Errorf("no info on the run in %v", got)
			}
		}
	}})
	if scrapes != 8 {
		t.Errorf("%d scrapes", scrapes)
	}
	if _, err := net.Dial("tcp", address); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after the run: %v", err)
	}
}
