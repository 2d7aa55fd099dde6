package tokenize

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
)

// The name in manifests has to change with the tables.
func TestTablesArePinned(t *testing.T) {
	sum := sha256.Sum256([]byte(classesTSV + nfcTSV))
	const want = "tokenizers-0.23.3 b0cab0698e0b303c"
	if got := ClassTable() + " " + hex.EncodeToString(sum[:8]); got != want {
		t.Errorf("tables are %s, want %s: give new tables a new name", got, want)
	}
}

// TestWordsOfAllCodePoints compares with the words that the library's regexes cut, for every code point in each context.
func TestWordsOfAllCodePoints(t *testing.T) {
	contexts := []string{"'%e", "a%1%2", " %%\n %.", "\u00a0%!%\r\n%", "'l%"}
	classes := pinnedClasses()
	for _, p := range []Pattern{GPT2, CL100K} {
		scan := p.scanner()
		separator := []byte{0}
		got := hashAll(contexts, func(h io.Writer, s []byte) {
			for len(s) > 0 {
				n := scan(classes, s)
				h.Write(s[:n])
				if s = s[n:]; len(s) > 0 {
					h.Write(separator)
				}
			}
		})
		if want := readGolden(t).Hashes[p.String()]; got != want {
			t.Errorf("%s: hash is %s, want %s", p, got, want)
		}
	}
}

// pieces are chosen to meet each other badly.
var pieces = []string{
	" ", "  ", "                         ", "\t", "\n", "\r", "\r\n", "\n\n", "\u00a0", "\u3000", "\u2003", "\u200b", "\v", "\f",
	"\u0085", "\u2028", "\u1680", "\ufeff", "\x00", "\x1f", "\x1c", "\u180e", "don't", "I'LL", "we've", "'s", "'S", "\u2019s", "x'd",
	"123", "1234567", "\u0661\u0662", "\u00bd", "\u2167", "foo_bar", "XXIII", "000", "!!!", "-----", "-->", "\U0001f600",
	"\u4f60\u597d", "e\u0301", "\u0915\u094d\u0937", "<|endoftext|>", "<|padding|>", "|||EMAIL_ADDRESS|||", "<|endof", "text|>",
	"\u01c5", "\u02b0", "''t", "'re", "'\u017f", "'\u212a", "\u212b", "\ufb01", "\uac00", "\u1100\u1161",
}

func randomText(r *rand.Rand) []byte {
	var b []byte
	for range 1 + r.IntN(12) {
		b = append(b, pieces[r.IntN(len(pieces))]...)
		if r.IntN(8) == 0 {
			b = utf8.AppendRune(b, rune(r.IntN(0x3000)))
		}
	}
	return b
}

// regexp2 has Go's classes, so for the comparison the scanners get them too.
func goClass(r rune) class {
	switch {
	case unicode.Is(unicode.L, r):
		return letter
	case unicode.Is(unicode.N, r):
		return number
	case unicode.Is(unicode.White_Space, r):
		return space
	}
	return other
}

type oracle struct {
	pattern Pattern
	regex   *regexp2.Regexp
}

func oracles() []oracle {
	return []oracle{{GPT2, regexp2.MustCompile(gpt2Regex)}, {CL100K, regexp2.MustCompile(cl100kRegex)}}
}

func (o oracle) compare(t *testing.T, classes *classTable, text []byte) {
	t.Helper()
	var got, want []string
	for b := text; len(b) > 0; {
		n := o.pattern.scanner()(classes, b)
		got = append(got, string(b[:n]))
		b = b[n:]
	}
	m, err := o.regex.FindStringMatch(string(text))
	for ; m != nil && err == nil; m, err = o.regex.FindNextMatch(m) {
		want = append(want, m.String())
	}
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("%s of %q:\n got %q\nwant %q (%v)", o.pattern, text, got, want, err)
	}
}

func TestScannersAreTheirPatterns(t *testing.T) {
	classes := newClassTable(goClass)
	for _, o := range oracles() {
		r := rand.New(rand.NewPCG(1, 2))
		for range 4000 {
			o.compare(t, classes, randomText(r))
		}
	}
}

func FuzzScanners(f *testing.F) {
	for _, p := range pieces {
		f.Add([]byte(p + p))
	}
	classes, both := newClassTable(goClass), oracles()
	f.Fuzz(func(t *testing.T, b []byte) {
		b = bytes.ToValidUTF8(b, nil)
		for _, o := range both {
			o.compare(t, classes, b)
		}
	})
}
