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

// The samples that are read again are spread over all steps since the last checkpoint, and few.
func TestTrainedSamplesAreSpread(t *testing.T) {
	var samples trainedSamples
	for step := range int64(1000) {
		samples.note(step, 10*step, []uint32{uint32(step)})
	}
	list := samples.list
	if n := len(list); n < maxTrained/2 || n > maxTrained {
		t.Fatalf("%d samples", n)
	}
	for i, s := range list {
		if s.position != 10*s.step || i > 0 && s.step-list[i-1].step != samples.every {
			t.Errorf("sample %d is of step %d, position %d", i, s.step, s.position)
		}
	}
	if first, last := list[0].step, list[len(list)-1].step; first != 0 || last < 1000-2*samples.every {
		t.Errorf("steps %d to %d, every %d", first, last, samples.every)
	}
}
