package blend

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mula/shards"
)

// Damage in place, after a sample was read, is found when its blocks are compared again: when the
// sample is read after the set time, or by Reread.
func TestReadsFindLaterDamage(t *testing.T) {
	c := newCorpus(t)
	c.shard("web", shards.UInt16, 9000, 9000, 9000)
	p := c.seal("sequence_length: 64\nseed: 1\nsources:\n- {name: web, shards: [web.idx]}\n")
	for name, reverify := range map[string]time.Duration{"default": 0, "never": -1, "soon": 1} {
		d, err := Open(t.Context(), p, OpenOptions{Reverify: reverify})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		s, err := d.Locate(5)
		if err != nil {
			t.Fatal(err)
		}
		tokens := make([]uint32, 65)
		if err := d.Tokens(tokens, s); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(c.dir, "web.bin")
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		right := make([]byte, 1)
		if _, err := f.ReadAt(right, 2*s.Token); err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte{right[0] ^ 1}, 2*s.Token); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // more than the time of "soon"
		var e *shards.DamageError
		if err := d.Tokens(tokens, s); (name == "soon") != errors.As(err, &e) || name != "soon" && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := d.Reread(t.Context(), tokens, s); !errors.As(err, &e) || e.Path != path ||
			!strings.Contains(err.Error(), `source "web"`) {
			t.Errorf("%s: Reread: %v", name, err)
		}
		if _, err := f.WriteAt(right, 2*s.Token); err != nil {
			t.Fatal(err)
		}
		if err := d.Reread(t.Context(), tokens, s); err != nil {
			t.Errorf("%s: restored: %v", name, err)
		}
	}
}
