package tokenize

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
)

// The name in manifests has to change with the tables.
func TestTablesArePinned(t *testing.T) {
	sum := sha256.Sum256([]byte(onigurumaTSV + rustTSV + normalFormsTSV + graphemesTSV))
	const want = "tokenizers-0.23.3 13f06f9445753310"
	if got := ClassTable() + " " + hex.EncodeToString(sum[:8]); got != want {
		t.Errorf("tables are %s, want %s: give new tables a new name", got, want)
	}
}

// goldenSplitters are the hand-written splitters by their names in testdata/splits.json.
func goldenSplitters(t testing.TB) map[string]splitter {
	out := map[string]splitter{}
	for name, c := range readSplits(t).Scanners {
		split, ok := splitterOf(c.Regexes...)
		if !ok {
			t.Fatalf("%s has no scanner", name)
		}
		out[name] = split
	}
	return out
}

// wordsOf are the lengths of the words that a scanner cuts.
func wordsOf(t *classTable, scan scanner, s []byte) []int {
	out := []int{}
	for len(s) > 0 {
		n := scan(t, s)
		out = append(out, n)
		s = s[n:]
	}
	return out
}

// TestWordsOfAllCodePoints compares with the words that the library's regexes cut, for every code
// point in each context.
func TestWordsOfAllCodePoints(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine with much work, which the race detector makes ten times slower")
	}
	g := readSplits(t)
	classes := pinnedClasses()
	separator := []byte{0}
	for name, split := range goldenSplitters(t) {
		c := newCutter(classes, split)
		for way, words := range map[string]func(s []byte) []int{
			"scanner": func(s []byte) []int { return wordsOf(classes, split.first, s) },
			"cutter":  func(s []byte) []int { return cutWords(c, s) },
		} {
			if way == "scanner" && testing.Short() { // the other golden tests run it
				continue
			}
			got := hashAll(g.WordContexts, func(h io.Writer, s []byte) {
				for _, n := range words(s) {
					h.Write(s[:n])
					if s = s[n:]; len(s) > 0 {
						h.Write(separator)
					}
				}
			})
			if want := g.Scanners[name].Hash; got != want {
				t.Errorf("%s, %s: hash is %s, want %s", name, way, got, want)
			}
		}
	}
}

func TestScannersGolden(t *testing.T) {
	g := readSplits(t)
	for name, split := range goldenSplitters(t) {
		for i, text := range g.Texts {
			s := []byte(text)
			got := []int{}
			for _, n := range wordsOf(pinnedClasses(), split.first, s) {
				got = append(got, utf8.RuneCount(s[:n]))
				s = s[n:]
			}
			if !slices.Equal(got, g.Scanners[name].Lengths[i]) {
				t.Errorf("%s of %q: words of %v characters, want %v", name, text, got, g.Scanners[name].Lengths[i])
			}
		}
	}
}

// Some published files have the line breaks themselves in the pattern.
func TestScannerOf(t *testing.T) {
	if _, ok := splitterOf(strings.NewReplacer(`\r`, "\r", `\n`, "\n").Replace(qwen2Regex)); !ok {
		t.Error("Qwen's pattern with line breaks has no scanner")
	}
	for _, r := range [][]string{{}, {""}, {qwen2Regex + " "}, {gpt2Regex, gpt2Regex},
		{deepSeekNumbers, deepSeekRegex}} {
		if _, ok := splitterOf(r...); ok {
			t.Errorf("%q has a scanner", r)
		}
	}
}

// pieces are chosen to meet each other badly.
var pieces = []string{
	" ", "  ", "                         ", "\t", "\n", "\r", "\r\n", "\n\n", "\u00a0", "\u3000", "\u2003", "\u200b",
	"\v", "\f",
	"\u0085", "\u2028", "\u1680", "\ufeff", "\x00", "\x1f", "\x1c", "\u180e", "don't", "I'LL", "we've", "'s", "'S",
	"\u2019s", "x'd",
	"123", "1234567", "\u0661\u0662", "\u00bd", "\u2167", "foo_bar", "XXIII", "000", "!!!", "-----", "-->",
	"\U0001f600",
	"\u4f60\u597d", "e\u0301", "\u0915\u094d\u0937", "<|endoftext|>", "<|padding|>", "|||EMAIL_ADDRESS|||", "<|endof",
	"text|>",
	"\u01c5", "\u02b0", "''t", "'re", "'\u017f", "'\u212a", "\u212b", "\ufb01", "\uac00", "\u1100\u1161", "\u11a8", "/",
	"//\n", "\u0301A", "A\u0301",
	"\u30a2\u30fc", "\u3042", "\u30fb", "\u9fa5\u9fa6", "\x00a", "\u200d", "\ufe0f", "HelloWORLD", "\u2028", "\u0660",
	"\ue000", "\u0378",
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

// regexp2 has Go's classes, so for the comparison with it the scanners get them too.
func goClass(r rune) class {
	if unicode.Is(unicode.White_Space, r) && unicode.Is(unicode.Cc, r) {
		return spaceControl
	}
	for k, name := range categoryNames[1:] {
		if unicode.Is(unicode.Categories[name], r) {
			return class(k + 1)
		}
	}
	return cn
}

// splitPlainly cuts s at the matches of one regex after the other and returns the lengths of
// matches and what is between.
func splitPlainly(t *testing.T, s []byte, regexes []func([]byte) [][2]int) []int {
	pieces := []int{len(s)}
	for _, matches := range regexes {
		var next []int
		at := 0
		for _, n := range pieces {
			done := 0
			for _, m := range matches(s[at : at+n]) {
				if m[0] > done {
					next = append(next, m[0]-done)
				}
				next = append(next, m[1]-m[0])
				done = m[1]
			}
			if n > done {
				next = append(next, n-done)
			}
			at += n
		}
		pieces = next
	}
	return pieces
}

// oracle compares a scanner with its regexes as compilePattern and as regexp2 take them.
type oracle struct {
	name         string
	scan         scanner
	own, regexp2 []func([]byte) [][2]int
}

func oracles(t testing.TB) []oracle {
	var out []oracle
	for name, split := range goldenSplitters(t) {
		o := oracle{name: name, scan: split.first}
		for _, regex := range readSplits(t).Scanners[name].Regexes {
			p, err := compilePattern(regex)
			if err != nil {
				t.Fatal(err)
			}
			o.own = append(o.own, func(s []byte) [][2]int {
				f := p.finder(s)
				defer f.release()
				return matchesOf(f)
			})
			r := regexp2.MustCompile(regex)
			o.regexp2 = append(o.regexp2, func(s []byte) [][2]int {
				var out [][2]int
				for m, err := r.FindStringMatch(string(s)); m != nil && err == nil; m, err = r.FindNextMatch(m) {
					if start, n := m.ByteRange(); n > 0 {
						out = append(out, [2]int{start, start + n})
					}
				}
				return out
			})
		}
		out = append(out, o)
	}
	return out
}

func (o oracle) compare(t *testing.T, goClasses *classTable, s []byte) {
	t.Helper()
	if got, want := wordsOf(pinnedClasses(), o.scan, s), splitPlainly(t, s, o.own); !slices.Equal(got, want) {
		t.Fatalf("%s of %q:\n got %v\nwant %v", o.name, s, got, want)
	}
	if got, want := wordsOf(goClasses, o.scan, s), splitPlainly(t, s, o.regexp2); !slices.Equal(got, want) {
		t.Fatalf("%s of %q, after regexp2:\n got %v\nwant %v", o.name, s, got, want)
	}
}

func TestScannersAreTheirPatterns(t *testing.T) {
	goClasses := newClassTable(goClass)
	r := rand.New(rand.NewPCG(1, 2))
	all := oracles(t)
	for range 600 {
		s := randomText(r)
		for _, o := range all {
			o.compare(t, goClasses, s)
		}
	}
}

func FuzzScanners(f *testing.F) {
	for _, p := range pieces {
		f.Add([]byte(p + p))
	}
	goClasses, all := newClassTable(goClass), oracles(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		b = bytes.ToValidUTF8(b, nil)
		for _, o := range all {
			o.compare(t, goClasses, b)
		}
	})
}

func TestASCIIRuns(t *testing.T) {
	for c := range 256 {
		for n := range 20 {
			s := append(bytes.Repeat([]byte("aZ"), n), byte(c), 'b')
			want := 2 * n
			if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' {
				want = len(s)
			}
			if got := asciiLetters(s, 0); got != want {
				t.Fatalf("asciiLetters(%q) = %d, want %d", s, got, want)
			}
			s = append(bytes.Repeat([]byte("z"), n), byte(c), 'b')
			want = n
			if 'a' <= c && c <= 'z' {
				want = len(s)
			}
			if got := asciiLower(s, 0); got != want {
				t.Fatalf("asciiLower(%q) = %d, want %d", s, got, want)
			}
		}
	}
}

// benchmarkTexts are repeated.
var benchmarkTexts = map[string]string{
	"english": "It is a truth universally acknowledged, that a single man in possession of a good fortune, " +
		"must be in want of a wife.\nHowever little known the feelings of such a man may be, don't we say that 1813 " +
		"was his year? ",
	"code": "func (t *table) run(s []byte, i int) int {\n\tfor i < len(s) && s[i] >= 0x80 {\n\t\ti += 2 // " +
		"next\n\t}\n\treturn i\n}\n",
	"russian": "Быстрая лиса прыгает через ленивую собаку 42 раза, и никто этого не заметил. ",
	"chinese": "你好，世界。今天天气很好，我们去公园散步。",
	"hindi":   "नमस्ते दुनिया, आज मौसम अच्छा है और बड़ी लड़की पढ़ रही है। ",
	"arabic":  "مرحبا بالعالم، الجو جميل اليوم وَالشَّمْسُ مشرقة. ",
	"french":  "L'été dernier, à l'hôtel, ç'a été très agréable où naïveté règne. ",
	"bengali": "আমার সোনার বাংলা, আমি তোমায় ভালোবাসি। ",
	"korean":  "안녕하세요 세계, 오늘은 날씨가 좋습니다. ",
}

func BenchmarkScan(b *testing.B) {
	classes := pinnedClasses()
	for name, split := range goldenSplitters(b) {
		for language, s := range benchmarkTexts {
			b.Run(name+"/"+language, func(b *testing.B) {
				text := bytes.Repeat([]byte(s), 1<<16/len(s))
				b.SetBytes(int64(len(text)))
				for b.Loop() {
					for s := text; len(s) > 0; {
						s = s[split.first(classes, s):]
					}
				}
			})
		}
	}
}

func BenchmarkPattern(b *testing.B) {
	text := bytes.Repeat([]byte(benchmarkTexts["english"]), 300)
	for name, c := range readSplits(b).Scanners {
		b.Run(name, func(b *testing.B) {
			p, err := compilePattern(c.Regexes[len(c.Regexes)-1])
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				f := p.finder(text)
				for from := 0; from < len(text); {
					_, end, ok := f.find(from)
					if !ok {
						break
					}
					from = end
				}
				f.release()
			}
		})
	}
}
