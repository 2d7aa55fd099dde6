package blendcorpus

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"mula/fixtures/vectors"
)

// Another node may see the token files elsewhere and keeps what is there; other tokens are noticed
// though the .idx file has the same size and time.
func TestResumeElsewhere(t *testing.T) {
	c := vectorConfig(t)
	run := func(wantBuilt, wantKept int) {
		t.Helper()
		if s := build(t, c); s.Built != wantBuilt || s.Kept != wantKept {
			t.Errorf("%+v; want %d built, %d kept", s, wantBuilt, wantKept)
		}
	}
	all := build(t, c).Built
	moved := filepath.Join(t.TempDir(), "moved")
	if err := os.Rename(c.Root, moved); err != nil {
		t.Fatal(err)
	}
	c.Root = moved
	run(0, all)

	prefix := filepath.Join(c.Root, c.Files[1].Prefix)
	stamp := func() {
		t.Helper()
		if err := os.Chtimes(prefix+".idx", time.Time{}, time.Unix(1e9, 0)); err != nil {
			t.Fatal(err)
		}
	}
	stamp()
	run(3, all-3)
	lengths := vectors.Lengths(1, 25)
	lengths[len(lengths)-1]++ // so few that the number of epochs, which is part of the name, stays
	writeIndex(t, prefix, lengths)
	stamp()
	run(3, all-3)
}
