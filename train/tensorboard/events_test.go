package tensorboard

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"mula/internal/filesystem"
)

var update = flag.Bool("update", false, "rewrite golden files")

// golden is a file of this package that TensorBoard's own reader has read; testdata/read.py does
// that and prints what it found.
const golden = "testdata/golden.tfevents"

func TestGolden(t *testing.T) {
	dir := t.TempDir()
	start := time.Unix(1700000000, 123456000)
	w, err := Create(filesystem.OS{}, dir, 60, start)
	if err != nil {
		t.Fatal(err)
	}
	for step := int64(60); step < 63; step++ {
		now := start.Add(time.Duration(step-59) * time.Second)
		err := w.Write(step, now, []Scalar{{"train/loss", 5 / float64(step)}, {"loss/go", 1e-30 * float64(step)},
			{"learning_rate", 4e-4}})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	names, _ := filepath.Glob(filepath.Join(dir, "events.out.tfevents.*"))
	if len(names) != 1 {
		t.Fatalf("event files: %v", names)
	}
	got, err := os.ReadFile(names[0])
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("wrote\n%x\nwant\n%x\nrun testdata/read.py on the new file before -update", got, want)
	}
}

// Restarts within one second get files of their own, whose names sort in the order of their start.
func TestCreateTwice(t *testing.T) {
	dir := t.TempDir()
	start := time.Unix(1700000000, 0)
	for i := range 3 {
		w, err := Create(filesystem.OS{}, dir, 0, start.Add(time.Duration(i)*300*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Write(int64(i), start, []Scalar{{"x", float64(i)}}); err != nil {
			t.Fatal(err)
		}
		w.Close()
	}
	names, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(names) != 3 {
		t.Fatalf("files: %v", names)
	}
	for i, name := range names { // Glob sorts
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if last := data[len(data)-4-4:][:4]; last[2] != []byte{0, 0x80, 0}[i] {
			t.Errorf("file %d of %v holds % x", i, names, last)
		}
	}
}
