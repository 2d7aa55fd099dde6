package cli

import (
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// In a TrainJob, mula train reports its last step to the controller. If it cannot, it warns and
// trains.
func TestTrainJob(t *testing.T) {
	t.Parallel()
	dir := prepared(t)
	var last struct {
		TrainerStatus struct {
			ProgressPercentage        int
			EstimatedRemainingSeconds *int
			Metrics                   []struct{ Name, Value string }
		}
	}
	controller := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer token of the pod" {
			w.WriteHeader(http.StatusForbidden)
		} else if err := json.NewDecoder(r.Body).Decode(&last); err != nil {
			t.Error(err)
		}
	}))
	defer controller.Close()
	writeFile(t, "token of the pod\n", dir, "token")
	writeFile(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: controller.Certificate().Raw})), dir,
		"ca.crt")
	mustRun(t, dir, "blend")
	environment := []string{"KUBEFLOW_TRAINER_SERVER_URL=" + controller.URL,
		"KUBEFLOW_TRAINER_SERVER_TOKEN=" + filepath.Join(dir, "token")}
	train := func(args ...string) string {
		c := mula(dir, append([]string{"train"}, args...)...)
		c.Env = append(c.Environ(), environment...)
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return string(out)
	}
	if out := train("--set", "output=other", "--set", "steps=1"); !strings.Contains(out,
		"warning: environment variable KUBEFLOW_TRAINER_SERVER_CA_CERT is missing") {
		t.Errorf("without a certificate:\n%s", out)
	}
	environment = append(environment, "KUBEFLOW_TRAINER_SERVER_CA_CERT="+filepath.Join(dir, "ca.crt"))
	if out := train(); strings.Contains(out, "warning") {
		t.Errorf("%s", out)
	}
	controller.Close() // it has answered
	s := last.TrainerStatus
	var names []string
	for _, m := range s.Metrics {
		names = append(names, m.Name)
	}
	want := []string{"grad_norm", "learning_rate", "loss", "mfu", "tokens_per_second", "validation_loss"}
	if !slices.Equal(names, want) || s.ProgressPercentage != 100 || s.EstimatedRemainingSeconds == nil ||
		*s.EstimatedRemainingSeconds != 0 {
		t.Errorf("the last status is %+v, want 100 %% and the metrics %q", s, want)
	}
}
