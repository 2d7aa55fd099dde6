package report

import (
	"maps"
	"os"
	"path/filepath"
	"testing"

	"mula/internal/strictyaml"
	"mula/train"
)

// Old names of fields are read as the current names, and the list of old names is complete.
func TestRenamedFields(t *testing.T) {
	if want := strictyaml.OldNames(&train.Config{}); !maps.Equal(renamed, want) {
		t.Errorf("renamed fields %v, want %v", renamed, want)
	}
	path := filepath.Join(t.TempDir(), "train.yaml")
	if err := os.WriteFile(path, []byte("layout: {dp: 2, ep: 1, links: tcp}\nverify: behind\n"+
		"spikes:\n  leave_out: 5\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := readConfig(path)
	want := map[string]string{"layout.expert_dp": "2", "layout.ep": "1", "layout.transport": "tcp",
		"spikes.skip_steps": "5", "verify": "background"}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
}
