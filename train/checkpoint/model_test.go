package checkpoint

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/moe"
	"mula/train/checkpoint/checkpointtest"
	"mula/xpu/comm"
)

// meshRanks are the ranks of a mesh with two ranks on each axis.
var meshRanks = comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 2, comm.PP: 2, comm.EP: 2})

// loadTogether loads a model on the ranks of a mesh, and calls check on each.
func loadTogether(t *testing.T, from ModelDir, c moe.Config, check func(m *moe.Model) error) []error {
	t.Helper()
	return onRanks(meshRanks.Ranks(), func(world *comm.Comm) error {
		mesh, err := comm.NewMesh(t.Context(), world, meshRanks)
		if err != nil {
			return err
		}
		m, err := moe.NewParallel(c, checkpointtest.Device(t, 1), moe.Parallel{Mesh: mesh})
		if err != nil {
			return err
		}
		return errors.Join(from.Load(t.Context(), m), check(m))
	})
}

// The ranks of a run together read each weight of the initial model once.
func TestInitialReadsOnce(t *testing.T) {
	dir, whole := checkpointtest.Model(t, nil, nil)
	fsys := checkpointtest.NewCounter(filesystem.OS{}, dir)
	for r, err := range loadTogether(t, ModelDir{Dir: dir, fsys: fsys}, whole.Config(), func(m *moe.Model) error {
		for _, p := range m.Parameters() {
			if want := whole.Parameters()[p.Index]; p.Name != want.Name ||
				!slices.Equal(p.Weight.Floats(), want.Weight.Floats()) {
				return fmt.Errorf("%s differs from %s", p.Name, want.Name)
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil || len(files) < 2 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		header := 8 + int(binary.LittleEndian.Uint64(content))
		reads := fsys.Reads(filepath.Base(file))
		for i, n := range reads[header:] {
			if n != 1 {
				t.Fatalf("byte %d of %s was read %d times", header+i, file, n)
			}
		}
	}
}

// If a rank cannot read a weight, the other ranks do not wait for it.
func TestInitialReadFails(t *testing.T) {
	dir, whole := checkpointtest.Model(t, nil, nil)
	if err := os.Remove(filepath.Join(dir, "model-00002-of-00008.safetensors")); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for _, err := range loadTogether(t, ModelDir{Dir: dir}, whole.Config(), func(*moe.Model) error { return nil }) {
		if err != nil && strings.Contains(err.Error(), "model-00002-of-00008.safetensors") {
			failed++
		}
	}
	if failed == 0 {
		t.Error("no rank has an error")
	}
}
