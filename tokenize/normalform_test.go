package tokenize

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"mula/internal/alloctest"
)

// wholeForm is the normal form of s taken as one piece.
func wholeForm(f form, s []byte) []byte {
	z := newNormalizer()
	z.rewrite(f, s)
	return z.out
}

func wholeNFC(s []byte) []byte { return wholeForm(nfc, s) }

func TestFormsGolden(t *testing.T) {
	g := readSplits(t)
	z := newNormalizer()
	for f := range formCount {
		name := formNames[f]
		for i, s := range g.Marked {
			if got := z.normalize(f, []byte(s)); string(got) != g.Forms[name].Texts[i] {
				t.Errorf("%s of %+q is %+q, want %+q", name, s, got, g.Forms[name].Texts[i])
			}
		}
		got := hashAll(g.FormContexts, func(h io.Writer, s []byte) { h.Write(z.normalize(f, s)) })
		if want := g.Forms[name].Hash; got != want {
			t.Errorf("%s: hash is %s, want %s", name, got, want)
		}
	}
}

func TestNFCGolden(t *testing.T) {
	g := readGolden(t)
	z := newNormalizer()
	for _, c := range g.NFC {
		if got := z.normalize(nfc, []byte(c[0])); string(got) != c[1] {
			t.Errorf("NFC of %+q is %+q, want %+q", c[0], got, c[1])
		}
	}
}

// hashAll hashes the result of f for each code point in each context, like testdata/golden.py. It
// uses one code point in 251 from U+33000, because almost none is assigned there. "%" is replaced
// by the code point.
func hashAll(contexts []string, f func(h io.Writer, s []byte)) string {
	sum := sha256.New()
	h := bufio.NewWriterSize(sum, 1<<16)
	var s []byte
	for r := range rune(utf8.MaxRune + 1) {
		if !utf8.ValidRune(r) || r >= 0x33000 && r%251 != 0 {
			continue
		}
		for _, c := range contexts {
			s = s[:0]
			for i := range len(c) {
				if c[i] == '%' {
					s = utf8.AppendRune(s, r)
				} else {
					s = append(s, c[i])
				}
			}
			f(h, s)
			h.WriteByte('\n')
		}
	}
	h.Flush()
	return hex.EncodeToString(sum.Sum(nil))
}

// TestNFCOfAllCodePoints compares with the library for every code point, alone, between letters and
// marks, and inside Hangul.
func TestNFCOfAllCodePoints(t *testing.T) {
	z := newNormalizer()
	contexts := []string{"%", "a%", "%\u0301", "\u0345%\u0316", "\u1100%\u11a8"}
	got := hashAll(contexts, func(h io.Writer, s []byte) { h.Write(z.normalize(nfc, s)) })
	if want := readGolden(t).Hashes["nfc"]; got != want {
		t.Errorf("hash is %s, want %s", got, want)
	}
}

// markedText is letters, marks, Hangul and what else composes, in any order.
func markedText(r *rand.Rand, n int) []byte {
	var s []byte
	for range n {
		switch r.IntN(8) {
		case 0:
			s = append(s, "aeoAEO "[r.IntN(7)])
		case 1:
			s = utf8.AppendRune(s, rune(0xc0+r.IntN(0x180)))
		case 2:
			s = utf8.AppendRune(s, []rune{0x1100, 0x1161, 0x11a8, 0xac00, 0xac01, 0x11a7, 0xd7a3}[r.IntN(7)])
		case 3:
			s = utf8.AppendRune(s, []rune{0x0344, 0x0f73, 0x0958, 0x212b, 0x1e9b, 0x0b47, 0x0b3e, 0x0b57, 0x3099,
				0x304b, 0x1d15e, 0x2126, 0x110a5, 0x110ba, 0x2f800}[r.IntN(15)])
		default:
			s = utf8.AppendRune(s, []rune{0x0300, 0x0301, 0x0323, 0x0307, 0x0345, 0x0334, 0x05b0, 0x05bc, 0x064b,
				0x093c, 0x094d, 0x0e38, 0x0f71, 0x0f72, 0x1d165, 0x20d0}[r.IntN(16)])
		}
	}
	return s
}

// checkForm compares a text normalized in pieces with one normalized as a whole, and with the forms
// of its forms.
func checkForm(t *testing.T, z *normalizer, f form, s []byte) {
	t.Helper()
	got := slices.Clone(z.normalize(f, s))
	if want := wholeForm(f, s); !bytes.Equal(got, want) {
		t.Fatalf("%s of %+q is %+q in pieces and %+q as a whole", formNames[f], s, got, want)
	}
	for inner, outer := range map[form]form{f: f, f ^ 1: f, nfc: f, nfd: f} {
		// f ^ 1 composes if f does not, and the other way round
		if again := z.normalize(outer, slices.Clone(z.normalize(inner, s))); !bytes.Equal(again, got) {
			t.Fatalf("%s of %+q is %+q, but that of its %s is %+q", formNames[f], s, got, formNames[inner], again)
		}
	}
}

func TestFormProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	z := newNormalizer()
	for range 5000 {
		s := markedText(r, 1+r.IntN(80))
		for f := range formCount {
			checkForm(t, z, f, s)
		}
	}
}

func FuzzForms(f *testing.F) {
	for _, s := range readSplits(f).Marked[:20] {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, s []byte) {
		s = bytes.ToValidUTF8(s, nil)
		z := newNormalizer()
		for f := range formCount {
			checkForm(t, z, f, s)
		}
	})
}

func TestNormalizerDoesNotAllocate(t *testing.T) {
	z := newNormalizer()
	s := markedText(rand.New(rand.NewPCG(1, 2)), 5000)
	z.normalize(nfkc, s)
	if n := alloctest.Least(func() {
		z.normalize(nfc, s)
		z.normalize(nfd, s)
		z.normalize(nfkc, s)
		z.normalize(nfkd,
			s)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestMillionMarks would take hours if ordering marks were quadratic.
func TestMillionMarks(t *testing.T) {
	s := []byte("a" + strings.Repeat("\u0301\u0323\u0345", 300000))
	want := "\u1ea1" + strings.Repeat("\u0323", 299999) + strings.Repeat("\u0301", 300000) + strings.Repeat("\u0345",
		300000)
	if got := newNormalizer().normalize(nfc, s); string(got) != want {
		t.Errorf("got %+q…", got[:min(len(got), 60)])
	}
}

// TestSortMarks compares counting with the library's slices.SortStableFunc, on both sides of the
// length where it begins.
func TestSortMarks(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	z := newNormalizer()
	var all []rune
	for c := range rune(utf8.MaxRune + 1) {
		if z.data.class.at(c) != 0 {
			all = append(all, c)
		}
	}
	for n := range 100 {
		marks := make([]rune, n)
		for i := range marks {
			marks[i] = all[r.IntN(len(all))]
		}
		want := slices.Clone(marks)
		slices.SortStableFunc(want, func(a, b rune) int { return int(z.data.class.at(a)) - int(z.data.class.at(b)) })
		if z.sortMarks(marks); !slices.Equal(marks, want) {
			t.Fatalf("%d marks: %x, want %x", n, marks, want)
		}
	}
}

func TestTablesAreRefused(t *testing.T) {
	for _, s := range []string{"class\t1\t2", "class\t0300\t0301\tFF", "class\t0301\t0300\t1", "pair\t41\t300",
		"decomposition\t110000\t41", "mark\t1\t2\t3", "x"} {
		if _, err := parseNormalForms(s); err == nil {
			t.Errorf("%q was accepted", s)
		}
	}
	for _, s := range []string{"41\t42-41", "x\t", "x\t110000", "x\ty", "x", "\t41", "x\t41\ty"} {
		if _, err := parseTable(s); err == nil {
			t.Errorf("%q was accepted", s)
		}
	}
	if _, err := parseRust("unheard_of\t41"); err == nil {
		t.Error("an unknown kind was accepted")
	}
	if _, err := parseOniguruma("Lu\t41"); err == nil {
		t.Error("a table without most properties was accepted")
	}
}

func BenchmarkNFC(b *testing.B) {
	for name, s := range benchmarkTexts {
		b.Run(name, func(b *testing.B) {
			text := bytes.Repeat([]byte(s), 1<<16/len(s))
			z := newNormalizer()
			text = slices.Clone(z.normalize(nfc, text))
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				z.normalize(nfc, text)
			}
		})
	}
}
