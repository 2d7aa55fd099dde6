package tokenize

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"
	"unicode/utf8"
)

// TestKindsOfAllCodePoints compares the kinds with hashes of the library's result for every code
// point.
func TestKindsOfAllCodePoints(t *testing.T) {
	g := readSplits(t)
	for name, kind := range map[string]uint16{
		"white_space": whiteSpace, "word": wordCharacter, "numeric": numeric, "punctuation": punctuationMark,
		"bert_control": bertControl,
		"bert_space":   bertSpace, "bert_chinese": bertChinese, "mark": combiningMark, "bert_mark": nonspacingMark,
	} {
		is := pinnedRust().is(kind)
		compareHash(t, g, name, func(r rune) []byte {
			if is(r) {
				return []byte{1}
			}
			return []byte{0}
		})
	}
	compareHash(t, g, "lower", func(r rune) []byte { return appendLower(nil, utf8.AppendRune(nil, r)) })
	// In how many pieces UnicodeScripts cuts a letter, the character and the next one.
	scripts := pinnedRust().scripts
	compareHash(t, g, "scripts", func(r rune) []byte {
		next := r + 1
		if !utf8.ValidRune(next) {
			next = 0x3042
		}
		pieces, last := byte(1), scripts.at('a')
		for _, c := range []rune{r, next} {
			if k := scripts.at(c); k != anyScript && k != last {
				pieces++
				last = k
			}
		}
		return []byte{pieces}
	})
}

func compareHash(t *testing.T, g *splitsGolden, name string, of func(rune) []byte) {
	t.Helper()
	h := sha256.New()
	var b []byte
	for r := range rune(utf8.MaxRune + 1) {
		if utf8.ValidRune(r) {
			b = append(b, of(r)...)
		}
	}
	h.Write(b)
	if got := hex.EncodeToString(h.Sum(nil)); got != g.Characters[name] {
		t.Errorf("%s: hash is %s, want %s", name, got, g.Characters[name])
	}
}

func TestAppendLower(t *testing.T) {
	if got := appendLower([]byte("x"), []byte("ÀΣ İZ[@")); string(got) != "xàσ i\u0307z[@" {
		t.Errorf("%q", got)
	}
}
