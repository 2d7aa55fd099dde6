package tokenize

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestCutPairsChangeNothing compares the ids of words that are cut between characters with the ids
// of the complete text, and the merges of few symbols with the merges of many.
func TestCutPairsChangeNothing(t *testing.T) {
	p := readPipelines(t)
	r := rand.New(rand.NewPCG(9, 10))
	seen := 0
	for _, c := range p.Cases {
		tok, err := Parse(p.file(t, c), c.Name)
		if err != nil {
			t.Fatal(err)
		}
		if tok.general == nil || len(tok.general.preTokenizers) == 0 {
			continue
		}
		last, ok := tok.general.preTokenizers[len(tok.general.preTokenizers)-1].(cutPairs)
		if !ok {
			continue
		}
		seen++
		var z modelScratch
		for range 5000 {
			var text []byte
			for range 1 + r.IntN(40) {
				switch r.IntN(4) {
				case 0:
					text = append(text, lowerOneEighthBlock...)
				case 1:
					text = append(text, string(rune(0x4e00+r.IntN(200)))...)
				default:
					text = append(text, "etaoinsrh>,."[r.IntN(12)])
				}
			}
			var cut cutting
			cut.begin(text, 0, false)
			last.cut(&cut)
			cut.finish()
			var got []uint32
			for _, p := range cut.pieces {
				if got, err = tok.general.model.appendWord(&z, got, text[p.start:p.end]); err != nil {
					t.Fatal(err)
				}
			}
			want, err := tok.general.model.appendWord(&z, nil, text)
			if err != nil || !slices.Equal(got, want) {
				t.Fatalf("%s: %q: ids %v, want %v (%v)", c.Name, text, got, want, err)
			}
			if n := len(z.ids); n <= shortWord {
				few := z.merger.mergeFew(tok, nil, slices.Clone(z.ids[:n]))
				if many := z.merger.mergeSymbols(tok, nil, z.ids[:n]); !slices.Equal(few, many) {
					t.Fatalf("%s: %q: ids %v, want %v", c.Name, text, few, many)
				}
			}
		}
	}
	if seen == 0 {
		t.Error("no tokenizer cuts between characters")
	}
}
