package train

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/shards"
	"mula/train/checkpoint"
)

// A shard that is damaged in place during a run ends it at the next checkpoint, before that is
// written: by the sums of its blocks, and where it has none by the samples that were trained on.
func TestDamageDuringRunEndsIt(t *testing.T) {
	for name, want := range map[string]string{
		"with sums":    "go.bin: bytes 0 to 12119 are damaged, in documents 0 ",
		"without sums": "trained on a sample at position ",
	} {
		dir := t.TempDir()
		if name == "without sums" { // as shards of Megatron-LM are
			makePlan(t, dir, "first.json", "")
			for _, ending := range []string{"go.json", "go.sums", "go.docs.arrow"} {
				if err := os.Remove(filepath.Join(dir, ending)); err != nil {
					t.Fatal(err)
				}
			}
		}
		c := testConfig(t, makePlan(t, dir, "plan.json", ""), "")
		_, err := Run(context.Background(), c, Options{atStep: func(r *run) {
			if r.state.Step != 2 {
				return
			}
			f, err := os.OpenFile(filepath.Join(dir, "go.bin"), os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			ids := make([]byte, 2*60*101)
			if _, err := f.ReadAt(ids, 0); err != nil {
				t.Fatal(err)
			}
			for i := 0; i < len(ids); i += 2 { // every id: some sample since the last checkpoint has one of them
				ids[i] ^= 1
			}
			if _, err := f.WriteAt(ids, 0); err != nil {
				t.Fatal(err)
			}
		}})
		if err == nil || !strings.Contains(err.Error(), want) ||
			errors.Is(err, shards.ErrCorrupt) != (name == "with sums") {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
		if found, err := filepath.Glob(filepath.Join(c.Output, checkpoint.DirName, "step-*")); len(found) > 0 ||
			err != nil {
			t.Errorf("%s: checkpoints %v were written, %v", name, found, err)
		}
	}
}
