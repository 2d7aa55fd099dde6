package record

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"mula/internal/filesystem"
)

// The file has the section of the last heartbeat and the time of each section.
func TestHeartbeat(t *testing.T) {
	path := filepath.Join(t.TempDir(), "heartbeat")
	t.Setenv(HeartbeatVariable, path)
	h, err := NewHeartbeat(filesystem.OS{}, os.Getenv(HeartbeatVariable), 0)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	now := start
	h.now, h.began = func() time.Time { return now }, start
	for _, b := range []struct {
		seconds float64 // of the section before
		section Section
		step    int64
	}{
		{2, SectionStep, 40}, {0.5, SectionStep, 41}, {1.5, SectionStep, 42}, {0.25, SectionCheckpoint, 43}, {4,
			SectionStep, 43}, {1, SectionEvaluate, 44},
	} {
		now = now.Add(time.Duration(b.seconds * float64(time.Second)))
		h.Beat(b.section, b.step)
	}
	got, err := ReadHeartbeat(filesystem.OS{}, path)
	if err != nil {
		t.Fatal(err)
	}
	want := Heartbeat{PID: os.Getpid(), Section: SectionEvaluate, Step: 44, From: 40,
		Time: start.Add(9250 * time.Millisecond), Spent: map[Section]Spent{
			SectionSetup: {1, 2, 2}, SectionStep: {4, 3.25, 1.5}, SectionCheckpoint: {1, 4, 4}, SectionEvaluate: {},
		}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, slow := range []int{7, -1} {
		h.Slow(slow)
		h.Beat(SectionStep, 45)
		got, err := ReadHeartbeat(filesystem.OS{}, path)
		if err != nil || (got.Slow != nil) != (slow >= 0) || got.Slow != nil && *got.Slow != slow {
			t.Errorf("slow rank %d: %+v, %v", slow, got, err)
		}
	}
	if text, _ := os.ReadFile(path); len(text) != heartbeatBytes || !json.Valid(text) ||
		!bytes.HasSuffix(text, []byte("\n")) {
		t.Errorf("the file is %q", text)
	}

	// The largest numbers fit, too.
	for i := range h.spent {
		h.spent[i] = Spent{math.MaxInt64, 1e12, 1e12}
	}
	h.last.From = math.MaxInt64
	h.Slow(1 << 20)
	h.Beat(SectionCheckpoint, math.MaxInt64)
	for _, want := range []Ended{EndedDone, EndedStopped, EndedTerminated} {
		h.End(want, math.MaxInt64)
		if got, err := ReadHeartbeat(filesystem.OS{}, path); err != nil || got.Step != math.MaxInt64 ||
			got.Section != SectionCheckpoint || got.Ended != want {
			t.Errorf("%v, %v", got, err)
		}
	}
}

func TestHeartbeatWithoutFile(t *testing.T) {
	t.Setenv(HeartbeatVariable, "")
	h, err := NewHeartbeat(filesystem.OS{}, os.Getenv(HeartbeatVariable), 0)
	if h != nil || err != nil {
		t.Errorf("without %s: %v, %v", HeartbeatVariable, h, err)
	}
	h.Beat(SectionStep, 1) // does nothing
	h.End(EndedDone, 1)
	t.Setenv(HeartbeatVariable, filepath.Join(t.TempDir(), "nowhere", "heartbeat"))
	if _, err := NewHeartbeat(filesystem.OS{}, os.Getenv(HeartbeatVariable), 0); err == nil ||
		!strings.Contains(err.Error(), HeartbeatVariable) ||
		!strings.Contains(err.Error(), "nowhere") {
		t.Errorf("a file that cannot be written: %v", err)
	}
}

// A damaged file, and a file that is read while it is written, are not a heartbeat.
func TestHeartbeatDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "heartbeat")
	t.Setenv(HeartbeatVariable, path)
	h, err := NewHeartbeat(filesystem.OS{}, os.Getenv(HeartbeatVariable), 0)
	if err != nil {
		t.Fatal(err)
	}
	h.Beat(SectionStep, 12)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	h.Beat(SectionStep, 99)
	other, _ := os.ReadFile(path)
	end := bytes.LastIndexByte(whole, '}')
	for i := range end {
		damaged := bytes.Clone(whole)
		damaged[i] ^= 4
		mixed := append(bytes.Clone(other[:i]), whole[i:]...)
		for _, text := range [][]byte{damaged, mixed, whole[:i]} {
			if err := os.WriteFile(path, text, 0o644); err != nil {
				t.Fatal(err)
			}
			if got, err := ReadHeartbeat(filesystem.OS{}, path); err == nil && got.Step != 12 && got.Step != 99 {
				t.Fatalf("with byte %d changed it says step %d", i, got.Step)
			} else if err == nil && bytes.Equal(text, damaged) {
				t.Fatalf("byte %d changed: %+v", i, got)
			}
		}
	}

	// Read and written at once.
	var wait sync.WaitGroup
	done := make(chan struct{})
	wait.Go(func() {
		for step := range int64(2000) {
			h.Beat(SectionStep, step*1_000_003)
		}
		close(done)
	})
	read := 0
	for open := true; open; {
		select {
		case <-done:
			open = false
		default:
		}
		if got, err := ReadHeartbeat(filesystem.OS{}, path); err == nil {
			read++
			if got.Step%1_000_003 != 0 && got.Step != 99 {
				t.Errorf("step %d was never done", got.Step)
			}
		}
	}
	wait.Wait()
	if read == 0 {
		t.Error("no heartbeat could be read")
	}
}

func BenchmarkHeartbeat(b *testing.B) {
	b.Setenv(HeartbeatVariable, filepath.Join(b.TempDir(), "heartbeat"))
	h, err := NewHeartbeat(filesystem.OS{}, os.Getenv(HeartbeatVariable), 0)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for step := int64(0); b.Loop(); step++ {
		h.Beat(SectionStep, step)
	}
}
