//go:build unix

package audit

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/shards"
	"mula/shards/formats"
)

// A shard that is cut short while it is looked at is a finding.
func TestShardCutMeanwhile(t *testing.T) {
	for _, ending := range []string{".bin", ".idx"} {
		prefix := filepath.Join(t.TempDir(), "x")
		write(t, &formats.Megatron, prefix, info, text(1, 9000, eod), text(2, 9000, eod))
		r, err := Run(context.Background(), []Input{{Source: "s", Path: prefix, Open: func() (*shards.Shard, error) {
			s, err := shards.Open(prefix)
			if err == nil {
				err = os.Truncate(prefix+ending, 0)
			}
			return s, err
		}}}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		found := strings.Join(findings(r, filepath.Dir(prefix)), "\n")
		if !strings.Contains(found, "x"+ending+": the file was cut short while in use") || r.Shards[0].Verified {
			t.Errorf("%s cut: %s", ending, found)
		}
	}
}
