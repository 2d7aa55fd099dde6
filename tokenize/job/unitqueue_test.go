package job

import "testing"

// A writer asks for line numbers of a late unit while an early unit is encoded again, because
// another writer found it damaged.
func TestLinesWhileAUnitIsEncodedAgain(t *testing.T) {
	d := &description{}
	for range 4 {
		d.Units = append(d.Units, unit{{Input: 0}})
	}
	b := newUnitQueue(&workDir{d: d})
	for u := range 4 {
		b.complete(u, &unitRecord{Parts: []totals{{Lines: 10}}})
	}
	b.reopen(1, open, "")
	for u, want := range []int64{0, 10, 20, 30} {
		if got := b.base(u, 0); got != want {
			t.Errorf("unit %d: %d lines before it, want %d", u, got, want)
		}
	}
	b.complete(1, &unitRecord{Parts: []totals{{Lines: 10}}})
	if got := b.base(3, 0); b.prefix != 4 || got != 30 {
		t.Errorf("after unit 1 is complete again: prefix %d, %d lines before unit 3; want 4 and 30", b.prefix, got)
	}
}
