package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects/objectstest"
	"mula/moe/safetensors"
	"mula/train/checkpoint/checkpointtest"
	"mula/xpu/comm"
)

// The ranks of any layout together open each of 64 files of state once and read each byte once,
// from a disk and from an object store, and get the values of the checkpoint.
func TestLoadReadsOnce(t *testing.T) {
	objectstest.S3(t)
	m := oneModel(t)
	for i := range 40 { // so that 64 ranks have weights to write
		m.tensors = append(m.tensors, safetensors.Tensor{Name: fmt.Sprint("more.", i), DType: safetensors.F32,
			Shape: []int{2}})
		m.states, m.expert = append(m.states, m.states[0]), append(m.expert, -1)
	}
	dir := t.TempDir()
	m.save(t, dir, 1, 16, 4)
	names := checkpointtest.Names(t, filepath.Join(dir, Name(1)))
	if !slices.Contains(names, optimizerShardName(64, 64)) {
		t.Fatalf("files %v", names)
	}
	store, err := OpenStore("s3://bucket/run")
	if err != nil {
		t.Fatal(err)
	}
	copied, err := store.Prepare(filesystem.OS{}, filepath.Join(dir, Name(1)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer copied.Close()
	if err := copied.Run(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	for _, layout := range [][2]int{{16, 4}, {64, 1}, {3, 1}, {1, 4}, {1, 1}} {
		for _, stored := range []bool{false, true} {
			if stored && layout[0] == 64 {
				continue // it takes seconds
			}
			from, files := filepath.Join(dir, Name(1)), filesystem.FS(filesystem.OS{})
			if stored {
				from, files = "s3://bucket/run/"+Name(1), objectfs.New(t.Context(), nil, "")
			}
			fsys := checkpointtest.NewCounter(files, from)
			size, ep := layout[0]*layout[1], layout[1]
			for r, err := range onRanks(size, func(world *comm.Comm) error {
				c, err := verify(context.Background(), world, fsys, from, false)
				if err != nil {
					return err
				}
				s := m.shard(world.Rank(), ep, 0, m.evenly(size, ep))
				return errors.Join(s.Load(context.Background(), world, c), m.check(s, 1))
			}) {
				if err != nil {
					t.Fatalf("%v, in a store %v, rank %d: %v", layout, stored, r, err)
				}
			}
			if err := fsys.Check(names); err != nil {
				t.Errorf("%v, in a store %v: %v", layout, stored, err)
			}
		}
	}
}

// No buffer of a rank exceeds the limit, also if all ranks read the elements of one rank, and if
// each element goes to all ranks.
func TestLoadMemory(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	dir := t.TempDir()
	m.save(t, dir, 1, 8, 1)
	for what, owner := range map[string]func(tensor, state, element int) int{
		"one owner": func(int, int, int) int { return 5 }, "all are owners": m.evenly(8, 1)} {
		for _, window := range []int{1, 3, 50} {
			for r, err := range onRanks(8, func(world *comm.Comm) error {
				c, _, err := Candidate(context.Background(), world, nil, dir, nil)
				if err != nil {
					return err
				}
				l := &loader{Shard: m.shard(world.Rank(), 1, 0, owner), world: world, from: c}
				l.Shard.window = window
				if err := l.load(context.Background()); err != nil {
					return err
				}
				for _, buffer := range l.buffers {
					if most := 4*window + pieceHeader; cap(buffer) > most || cap(l.window) > window {
						return fmt.Errorf("a message of %d bytes, want at most %d; a window of %d", cap(buffer), most,
							cap(l.window))
					}
				}
				return m.check(l.Shard, 1)
			}) {
				if err != nil {
					t.Errorf("%s, window %d, rank %d: %v", what, window, r, err)
				}
			}
		}
	}
}

// Only the reader of a file learns which ranks need its elements. In the layout that has written
// the checkpoint, each rank reads its own state.
func TestLoadNeeds(t *testing.T) {
	t.Parallel()
	const ranks = 4
	m := oneModel(t)
	dir := t.TempDir()
	m.save(t, dir, 1, ranks, 1)
	var needs atomic.Int64
	for r, err := range onRanks(ranks, func(world *comm.Comm) error {
		c, _, err := Candidate(context.Background(), world, nil, dir, nil)
		if err != nil {
			return err
		}
		l := &loader{Shard: m.shard(world.Rank(), 1, 0, m.evenly(ranks, 1)), world: world, from: c}
		if err := l.load(context.Background()); err != nil {
			return err
		}
		for tensor, list := range l.needs {
			needs.Add(int64(len(list)))
			for _, n := range list {
				if n.tensorRange != l.weights(tensor) || n.to == world.Rank() {
					return fmt.Errorf("rank %d needs %+v", n.to, n.tensorRange)
				}
			}
		}
		return m.check(l.Shard, 1)
	}) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	if want := int64(len(m.tensors) * (ranks - 1)); needs.Load() != want {
		t.Errorf("readers know %d ranges that other ranks need, want %d", needs.Load(), want)
	}
}

// An error of the file system on one rank, at any operation, is an error of all ranks. It is no
// damage, so no older checkpoint is used.
func TestLoadFaults(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	dir := t.TempDir()
	m.save(t, dir, 1, 3, 1)
	m.save(t, dir, 2, 3, 1)
	absent := func(name string) string { return "stat " + filepath.Join(dir, Name(2), name) }
	for k := int64(1); ; k++ {
		nth := &faultfs.Nth{K: k, Err: syscall.EIO, Counts: func(op faultfs.Op, _ string) bool { return op.Reads() }}
		fsys := faultfs.New(nth.Fault)
		errs := onRanks(3, func(world *comm.Comm) error {
			s := m.shard(world.Rank(), 1, 0, m.evenly(3, 1))
			found, refused, err := resume(world, fsys, dir, s)
			if refused != nil {
				t.Errorf("%s: refused %v", nth.Failed(), refused)
			}
			if err != nil {
				return err
			}
			return m.check(s, found.State.Step)
		})
		for r, err := range errs {
			switch {
			case nth.Failed() == "", nth.Failed() == absent(modelFile), nth.Failed() == absent(optimizerFile):
				if err != nil { // the files must not exist
					t.Errorf("%q, rank %d: %v", nth.Failed(), r, err)
				}
			case err == nil || !strings.Contains(err.Error(), syscall.EIO.Error()):
				t.Errorf("%s, rank %d: %v", nth.Failed(), r, err)
			}
		}
		if nth.Failed() == "" {
			if k < 30 {
				t.Errorf("only %d operations", k-1)
			}
			return
		}
	}
}

// A checkpoint that lacks elements is an error that names them, also if no index lists them.
func TestLoadIncomplete(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	fewer := m
	last := len(m.tensors) - 1
	fewer.tensors, fewer.states = m.tensors[:last], m.states[:last]
	for _, layout := range []int{1, 3} {
		dir := t.TempDir()
		fewer.save(t, dir, 1, layout, 1)
		for r, err := range onRanks(2, func(world *comm.Comm) error {
			_, refused, err := resume(world, nil, dir, m.shard(world.Rank(), 1, 0, m.evenly(2, 1)))
			if refused != nil {
				t.Errorf("refused %v", refused)
			}
			return err
		}) {
			if err == nil || !strings.Contains(err.Error(), "norm is missing") {
				t.Errorf("saved by %d, rank %d: %v", layout, r, err)
			}
		}
	}
}
