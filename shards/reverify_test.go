package shards

import (
	"errors"
	"os"
	"testing"
	"time"
)

// flipInPlace changes a bit of a file that may be open.
func flipInPlace(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
}

// Damage that comes in place after a block was first read is found when the block is compared
// again: after the set time, always, or never.
func TestReverify(t *testing.T) {
	const period = 10 * time.Minute
	for name, c := range map[string]struct {
		after time.Duration
		found []bool // by reads one after the other, which the clock below follows
	}{
		"never":  {0, []bool{false, false, false}},
		"always": {-1, []bool{true, true, true}},
		"period": {period, []bool{false, true, true}},
	} {
		prefix := writeLengths(t, t.TempDir(), UInt16, []int{9000, 9000})
		s := open(t, prefix)
		now := time.Unix(1000, 0)
		s.sums.now = func() time.Time { return now }
		s.Reverify(c.after)
		ids := make([]uint32, 100)
		if err := s.Read(ids, 8200); err != nil { // in block 1, whose first token is 8,192
			t.Fatal(err)
		}
		flipInPlace(t, prefix+".bin", 2*8250)
		for i, after := range []time.Duration{period - time.Second, time.Second, time.Second} {
			now = now.Add(after)
			err := s.Read(ids, 8200)
			var e *DamageError
			if found := errors.As(err, &e); found != c.found[i] || !found && err != nil {
				t.Errorf("%s: read %d: %v", name, i, err)
			} else if found && (e.Path != prefix+".bin" || len(e.Blocks) != 1 || e.Blocks[0].First != 16384) {
				t.Errorf("%s: read %d: %v", name, i, e)
			}
			if err := s.Read(ids, 0); err != nil { // another block
				t.Errorf("%s: read %d: %v", name, i, err)
			}
		}
		var e *DamageError
		if err := s.Recheck(t.Context(), 8300, 8301); !errors.As(err, &e) || e.Blocks[0].First != 16384 {
			t.Errorf("%s: Recheck: %v", name, err)
		}
		if err := s.Recheck(t.Context(), 0, 8192); err != nil {
			t.Errorf("%s: Recheck of the block before: %v", name, err)
		}
	}
}
