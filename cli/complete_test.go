package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"mula/internal/longtest"
	"mula/shards"
	"mula/shards/shardtest"
)

// writeForeignShards writes the shards of another program to a folder, with a blend.yaml, and
// builds the provisional plan plan.json. It returns the total size of the shards.
func writeForeignShards(t *testing.T, dir string, n int) (size int64) {
	t.Helper()
	for i := range n {
		name := string(rune('a' + i))
		shardtest.Write(t, filepath.Join(dir, "shards"), name, shards.UInt16, shardtest.Lengths(7000+500*i, 200)...)
		for _, ending := range []string{".json", ".sums", ".docs.arrow"} {
			if err := os.Remove(filepath.Join(dir, "shards", name+ending)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, content := range contents(t, filepath.Join(dir, "shards")) {
		size += int64(len(content))
	}
	if err := os.WriteFile(filepath.Join(dir, "blend.yaml"), []byte("sequence_length: 32\nvalidation: 0.05\n"+
		"sources:\n  - {name: a, shards: [shards/*]}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := mustRun(t, dir, "blend"); !strings.Contains(out, "note: plan.json is provisional") {
		t.Fatalf("mula blend: %s", out)
	}
	return size
}

// Processes that start together read each byte once, and write the plan of --hash-all.
func TestCompleteTogether(t *testing.T) {
	dir := t.TempDir()
	size := writeForeignShards(t, dir, 5)
	mustRun(t, dir, "blend", "--hash-all", "--output", "all.json")
	var read int64
	var mu sync.Mutex
	var wait sync.WaitGroup
	for range 3 {
		wait.Go(func() {
			out, err := mula(dir, "blend", "--complete", "plan.json", "--sums", "sums", "--json").Output()
			var result struct{ Bytes int64 }
			if err == nil {
				err = json.Unmarshal(out, &result)
			}
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			mu.Lock()
			defer mu.Unlock()
			read += result.Bytes
		})
	}
	wait.Wait()
	if read != size {
		t.Errorf("%d bytes were read, want %d", read, size)
	}
	if all, one := fingerprintIn(t, dir, "all.json"), fingerprintIn(t, dir, "plan.json"); all != one {
		t.Errorf("fingerprint %s, with --hash-all %s", one, all)
	}
	mustRun(t, dir, "check")
}

func fingerprintIn(t *testing.T, dir, plan string) string {
	t.Helper()
	var shown struct{ Fingerprint string }
	if err := json.Unmarshal([]byte(mustRun(t, dir, "plan", "show", "--json", plan)), &shown); err != nil {
		t.Fatal(err)
	}
	return shown.Fingerprint
}

// Killed processes leave the provisional plan or the complete plan. The next process ends with the
// files of a process that was never killed.
func TestKilledComplete(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	writeForeignShards(t, dir, 5)
	provisional := contents(t, dir)
	command := []string{"blend", "--complete", "plan.json", "--threads", "1"}
	k := newKiller(4, func() { mustRun(t, dir, command...) })
	whole := contents(t, dir)
	restart := func() {
		t.Helper()
		for name := range contents(t, dir) {
			if _, ok := provisional[name]; ok {
				continue
			}
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		err := os.WriteFile(filepath.Join(dir, "plan.json"), []byte(provisional["plan.json"]), 0o644)
		if err != nil {
			t.Fatal(err)
		}
	}
	restart()
	for range kills {
		k.kill(t, dir, command...)
		switch plan := contents(t, dir)["plan.json"]; plan {
		case provisional["plan.json"]:
			mustRun(t, dir, "peek", "--position", "0")
		case whole["plan.json"]:
			mustRun(t, dir, "check")
			restart()
		default:
			t.Fatalf("after a kill plan.json is neither provisional nor complete:\n%s", plan)
		}
	}
	mustRun(t, dir, command...)
	for name, content := range contents(t, dir) {
		if content != whole[name] {
			t.Errorf("%s differs from the file of a process that was never killed", name)
		}
	}
	k.enough(t)
}
