package checkpoint

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/train/checkpoint/checkpointtest"
	"mula/xpu/comm"
)

// Prune keeps the newest checkpoints and the models of others. A model has the files of its
// checkpoint, except for the state.
func TestPruneKeepsModels(t *testing.T) {
	m := oneModel(t)
	run := t.TempDir()
	dir := filepath.Join(run, DirName)
	models := func() []string {
		names, err := filepath.Glob(filepath.Join(run, ModelsDir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range names {
			names[i] = filepath.Base(names[i])
		}
		return names
	}
	keep := Kept{Newest: 2, BackTo: -1, ModelEvery: 2}
	for step := int64(1); step <= 7; step++ {
		m.save(t, dir, step, 2, 1)
		if err := Prune(filesystem.OS{}, dir, keep, []Refused{{Checkpoint: Name(4)}}); err != nil {
			t.Fatal(err)
		}
	}
	if got := checkpointtest.Names(t, dir); !slices.Equal(got, []string{Name(6), Name(7)}) {
		t.Errorf("checkpoints %v", got)
	}
	if got := models(); !slices.Equal(got, []string{Name(2)}) { // 4 was refused
		t.Errorf("models %v", got)
	}
	path := filepath.Join(run, ModelsDir, Name(2))
	if names, want := checkpointtest.Names(t, path), []string{modelConfig, generationFile, modelShardName(1, 2),
		modelShardName(2, 2), modelIndexFile}; !slices.Equal(names, want) {
		t.Errorf("files %v, want %v", names, want)
	}
	m.checkModel(t, path, 2)
	if found, _, err := FindModel(t.Context(), path); err != nil || found.Checkpoint != nil {
		t.Errorf("found %v, %v", found, err)
	}

	// A run that went back replaces the model, and an error of any operation loses nothing.
	defer func() { atomicfile.Fault = nil }()
	for k := 1; ; k++ {
		for step := int64(8); step <= 10; step++ {
			m.save(t, dir, step, 2, 1)
		}
		calls := 0
		atomicfile.Fault = func(op atomicfile.Op, path string) error {
			if calls++; calls == k {
				return syscall.EIO
			}
			return nil
		}
		err := Prune(filesystem.OS{}, dir, keep, nil)
		atomicfile.Fault = nil
		if failed := calls >= k; failed != (err != nil) {
			t.Fatalf("operation %d: %v", k, err)
		}
		if err := FinishModels(filesystem.OS{}, dir); err != nil {
			t.Fatal(err)
		}
		if err := Prune(filesystem.OS{}, dir, keep, nil); err != nil {
			t.Fatal(err)
		}
		if got := models(); !slices.Equal(got, []string{Name(2), Name(6), Name(8)}) {
			t.Fatalf("operation %d: models %v", k, got)
		}
		m.checkModel(t, filepath.Join(run, ModelsDir, Name(8)), 8)
		if got := checkpointtest.Names(t, dir); !slices.Equal(got, []string{Name(9), Name(10)}) {
			t.Fatalf("operation %d: checkpoints %v", k, got)
		}
		if err == nil {
			if k < 4 {
				t.Errorf("only %d operations", k-1)
			}
			return
		}
		for _, name := range []string{Name(9), Name(10)} {
			if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// At most Writers ranks write at the same time, and the checkpoint has the same bytes.
func TestWriters(t *testing.T) {
	m := oneModel(t)
	const ranks = 7
	all := t.TempDir()
	m.save(t, all, 1, ranks, 1)
	for writers, waves := range map[int]int{1: 7, 2: 4, 3: 3, 7: 1, 100: 1} {
		dir := t.TempDir()
		var mu sync.Mutex
		var turns []int // of the waves in which ranks begin to write
		ended := 0      // ranks
		atomicfile.Fault = func(op atomicfile.Op, path string) error {
			mu.Lock()
			defer mu.Unlock()
			var rank int
			name := filepath.Base(path)
			switch n, _ := fmt.Sscanf(name, "optimizer-%05d-of-00007.safetensors", &rank); {
			case op == atomicfile.OpCreate && n == 1:
				wave := (rank - 1) % waves
				turns = append(turns, wave)
				before := 0 // ranks of the waves before
				for r := range ranks {
					if r%waves < wave {
						before++
					}
				}
				if ended < before {
					t.Errorf("%d writers: rank %d begins after %d ranks, want %d", writers, rank-1, ended, before)
				}
			case op == atomicfile.OpSyncDir && strings.HasSuffix(name, atomicfile.TempSuffix):
				ended++
			}
			return nil
		}
		errs := onRanks(ranks, func(world *comm.Comm) error {
			s := m.shard(world.Rank(), 1, 1, m.evenly(ranks, 1))
			return Save(context.Background(), world, dir, &State{Step: 1}, s, Options{Writers: writers})
		})
		atomicfile.Fault = nil
		for r, err := range errs {
			if err != nil {
				t.Fatalf("rank %d: %v", r, err)
			}
		}
		if len(turns) != ranks || !slices.IsSorted(turns) {
			t.Errorf("%d writers: waves %v", writers, turns)
		}
		checkpointtest.SameFiles(t, fmt.Sprint(writers, " writers"), filepath.Join(all, Name(1)),
			filepath.Join(dir, Name(1)))
	}
}
