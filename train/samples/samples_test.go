package samples

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// A target counts if it is of the same document as its input and no padding, and a token attends to
// its document from its beginning in the sample on.
func TestSamples(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		length := rapid.IntRange(1, 20).Draw(t, "length")
		packed := rapid.Bool().Draw(t, "packed")
		attention := rapid.SampledFrom([]Attention{"", WindowAttention, DocumentAttention}).Draw(t, "attention")
		s := NewRows(length, packed, attention)
		rows := rapid.IntRange(1, 3).Draw(t, "rows")
		var documents [][]int // of each token of a row; padding is -1
		for range rows {
			var starts []int32
			filled, document := length+1, 0
			if packed {
				filled = rapid.IntRange(1, length+1).Draw(t, "filled")
			}
			var of []int
			for i := range length + 1 {
				begins := i < filled && rapid.IntRange(0, 3).Draw(t, "begins") == 0 || packed && i == 0
				if begins {
					starts = append(starts, int32(i))
					document++
				}
				if of = append(of, document); i >= filled {
					of[i] = -1
				}
				s.Tokens = append(s.Tokens, uint32(i))
			}
			documents = append(documents, of)
			s.End(starts, filled)
		}
		b := s.Batch(0, rows)
		within := attention == DocumentAttention || attention == "" && packed
		if (len(b.Begin) > 0) != within || (len(b.Counted) > 0) != (within || packed) || s.Len() != rows {
			t.Fatalf("%d rows, %d begins and %d counts of %q, packed %v", s.Len(), len(b.Begin), len(b.Counted),
				attention, packed)
		}
		for row, of := range documents {
			targets := int64(0)
			for i := range length {
				counts := of[i+1] == of[i] && of[i] >= 0 || len(b.Counted) == 0
				if counts {
					targets++
				}
				if len(b.Counted) > 0 && b.Counted[row*length+i] != counts {
					t.Fatalf("documents %v: target of %d counts: %v", of, i, !counts)
				}
				if within && int(b.Begin[row*length+i]) != slices.Index(of, of[i]) {
					t.Fatalf("documents %v: token %d attends from %d on", of, i, b.Begin[row*length+i])
				}
			}
			if s.Targets[row] != targets {
				t.Fatalf("documents %v: %d targets, want %d", of, s.Targets[row], targets)
			}
		}
		if part := s.Batch(rows-1, rows); part.Rows != 1 || len(part.Tokens) != length+1 || len(part.Begin) > 0 &&
			part.Begin[0] != 0 {
			t.Fatalf("the last row %+v", part)
		}
	})
}

// The samples that are read again are spread over all steps since the last checkpoint, and few.
func TestTrainedSamplesAreSpread(t *testing.T) {
	var trained Trained
	for step := range int64(1000) {
		trained.Note(step, 10*step, []uint32{uint32(step)})
	}
	list := trained.list
	if n := len(list); n < maxTrained/2 || n > maxTrained {
		t.Fatalf("%d samples", n)
	}
	for i, s := range list {
		if s.position != 10*s.step || i > 0 && s.step-list[i-1].step != trained.every {
			t.Errorf("sample %d is of step %d, position %d", i, s.step, s.position)
		}
	}
	if first, last := list[0].step, list[len(list)-1].step; first != 0 || last < 1000-2*trained.every {
		t.Errorf("steps %d to %d, every %d", first, last, trained.every)
	}
}
