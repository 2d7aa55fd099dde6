package megatron

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"mula/fixtures/vectors"
	"mula/index/rebuild"
)

// Another node may see the token files elsewhere and keeps what is there; other tokens are noticed
// though the .idx file has the same size and time.
func TestResumeElsewhere(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	run := func(wantBuilt, wantKept int) {
		t.Helper()
		x, err := New(context.Background(), c)
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		s, err := x.Build(context.Background(), rebuild.BuildOptions{Threads: 2, Resume: true})
		if err != nil || s.Built != wantBuilt || s.Kept != wantKept {
			t.Errorf("%+v, %v; want %d built, %d kept", s, err, wantBuilt, wantKept)
		}
	}
	stamp := func(path string) {
		t.Helper()
		if err := os.Chtimes(path, time.Time{}, time.Unix(1e9, 0)); err != nil {
			t.Fatal(err)
		}
	}
	run(12, 0)
	// The same files, seen at another place.
	moved := filepath.Join(t.TempDir(), "moved")
	if err := os.Rename(c.Root, moved); err != nil {
		t.Fatal(err)
	}
	c.Root = moved
	run(0, 12)

	f1 := filepath.Join(c.Root, "f1.idx")
	stamp(f1)
	run(3, 9)
	lengths := vectors.Lengths(1, 25)
	lengths[len(lengths)-1]++
	writeFile(t, f1, vectors.Index(lengths))
	stamp(f1)
	run(3, 9)
}
