//go:build unix

package blendcorpus

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"mula/index/rebuild"
	"mula/internal/mapping"
)

// An .idx file that is cut short while indexes are built from it ends the build with an error about
// it.
func TestBuildFromCutIndex(t *testing.T) {
	for _, left := range []int64{0, 50, -1} {
		c := vectorConfig(t)
		x := open(t, c)
		path, size := filepath.Join(c.Root, "f1.idx"), left
		if left < 0 { // in its last page
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			size += info.Size()
		}
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		_, err := x.Build(context.Background(), rebuild.BuildOptions{Threads: 2})
		var at *os.PathError
		if !errors.As(err, &at) || at.Path != path || !errors.Is(err, mapping.ErrUnreadable) {
			t.Errorf("%d bytes left: %v", size, err)
		}
	}
}
