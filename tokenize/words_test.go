package tokenize

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func TestWordKeys(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	narrow, wide := map[narrowKey]string{}, map[wideKey]string{}
	for range 60000 {
		s := make([]byte, 1+r.IntN(48))
		for i := range s {
			s[i] = byte(r.IntN(2)) // zero bytes are bytes too
		}
		n := 1 + r.IntN(min(len(s), wideWord))
		w := string(s[:n])
		if n <= narrowWord {
			k := narrowKeyOf(s, n)
			if k != narrowKeyOf(slices.Clone(s[:n]), n) {
				t.Fatalf("the key of %x depends on what follows", w)
			}
			if had, ok := narrow[k]; ok && had != w {
				t.Fatalf("%x and %x have one key", w, had)
			}
			narrow[k] = w
			continue
		}
		k := wideKeyOf(s, n)
		if k != wideKeyOf(slices.Clone(s[:n]), n) {
			t.Fatalf("the key of %x depends on what follows", w)
		}
		if had, ok := wide[k]; ok && had != w {
			t.Fatalf("%x and %x have one key", w, had)
		}
		wide[k] = w
	}
	if len(narrow) < 5000 || len(wide) < 5000 {
		t.Errorf("%d narrow and %d wide keys are too few to tell", len(narrow), len(wide))
	}
}
