package tokenize

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"mula/internal/alloctest"
)

// splitsGolden is testdata/splits.json, which splits.py had from the library.
type splitsGolden struct {
	Versions     string
	WordContexts []string `json:"word_contexts"`
	FormContexts []string `json:"form_contexts"`
	Texts        []string
	Scanners     map[string]struct {
		Regexes []string
		Hash    string
		Lengths [][]int
	}
	PatternTexts []string `json:"pattern_texts"`
	Patterns     []struct {
		Regex   string
		Matches [][][2]int
	}
	Characters map[string]string
	Marked     []string
	Forms      map[string]struct {
		Hash  string
		Texts []string
	}
}

var splitsGoldenOnce = sync.OnceValues(func() (*splitsGolden, error) {
	b, err := os.ReadFile("testdata/splits.json")
	if err != nil {
		return nil, err
	}
	g := &splitsGolden{}
	return g, json.Unmarshal(b, g)
})

func readSplits(t testing.TB) *splitsGolden {
	t.Helper()
	g, err := splitsGoldenOnce()
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// matchesOf is all matches that are not empty, looked for as the library does: an empty match at
// the end of the one before is passed over by a character.
func matchesOf(f *finder) [][2]int {
	s := f.s
	out := [][2]int{}
	last := -1
	for from := 0; from <= len(s); {
		start, end, ok := f.find(from)
		if !ok {
			break
		}
		if start == end && end == last {
			_, n := utf8.DecodeRune(s[from:])
			from += max(n, 1)
			continue
		}
		if from, last = end, end; start < end {
			out = append(out, [2]int{start, end})
		}
	}
	return out
}

// inRunes turns places in bytes into places in characters.
func inRunes(s []byte, places [][2]int) [][2]int {
	out := make([][2]int, len(places))
	for i, p := range places {
		out[i] = [2]int{utf8.RuneCount(s[:p[0]]), utf8.RuneCount(s[:p[1]])}
	}
	return out
}

func TestPatternsGolden(t *testing.T) {
	g := readSplits(t)
	for _, c := range g.Patterns {
		p, err := compilePattern(c.Regex)
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		for _, remember := range []bool{false, true} {
			for i, text := range g.PatternTexts {
				s := []byte(text)
				if got := inRunes(s, matchesOf(finderOn(p, s, remember))); !slices.Equal(got, c.Matches[i]) {
					t.Errorf("%s in %q (remembering %v):\n got %v\nwant %v", c.Regex, text, remember, got, c.Matches[i])
				}
			}
		}
	}
}

// finderOn returns a finder that looks at s, if wanted with states remembered from the start.
func finderOn(p *pattern, s []byte, remember bool) *finder {
	f := p.finder(s)
	if remember {
		f.startRemembering()
	}
	return f
}

func TestPatternsAreRefused(t *testing.T) {
	for _, c := range []struct{ regex, want string }{
		{`a\1`, `byte 1: \1`}, {`\X`, `byte 0: \X`}, {`\R`, `\R`}, {`\K`, `\K`}, {`\G`, `\G`}, {`\101`, `\1`}, {`\cA`,
			`\c`},
		{`(a`, `byte 0: a ( without a )`}, {`ab)`, `byte 2: a ) without a (`}, {`[a`, `a [ without a ]`}, {`[]a]`,
			`byte 1: an empty class`},
		{`a**`, `byte 2: repetition of a repetition`}, {`a+{2}`, `byte 2: repetition of a repetition`}, {`*a`,
			`byte 0: * without an operand`},
		{`a|{1}`, `byte 2: a count in braces without`}, {`a{3,1}`, `byte 1: the count {3,1}`}, {`a{1001}`,
			`the count {1001}`},
		{`(?:(?:a{1000}){1000}){1000}`, `too long`}, {`(?:a?)*`, `that may be empty`},
		{`(?=a)*`, `repetition of an empty expression`},
		{`^?`, `repetition of an empty expression`},
		{`(?s).`, `a group that starts with "(?s"`}, {`(?x)a`, `byte 0: a group`}, {`(?<n>a)`, `byte 0: a group`},
		{`(?#a)`, `byte 0: a group`},
		{`(?<=a+)b`, `a lookbehind of variable length`}, {`\p{Foo}`, `the property "Foo"`}, {`\pL`,
			`\p without {`}, {`\p{L`, `\p{ without a }`},
		{`(?i:ss)`, `byte 5: (?i) with the end of "ss", which also matches`}, {`(?i:x\u017f(?:sy))`,
			`(?i) with the end of "ss"`}, {`(?i:[\p{Lt}])`, `(?i) with a class`}, {`(?i:ß)`,
			`which also matches "ss"`}, {`(?i:[Þ-à])`, `(?i) with a class that has "ß"`}, {`(?i)a(?:b)fi`,
			`(?i) with the end of "fi"`},
		{`[a-\d]`, `a range that ends with a class`}, {`[\d-a]`, `a range that starts with a class`}, {`[b-a]`,
			`before its start`}, {`[a-c-e]`, `- that is neither first nor last`},
		{`[[:foo:]]`, `[:`}, {`[a&&]`, `&& without two operands`}, {`[&&a]`, `&& without two operands`}, {`\x80`,
			`as a code point`}, {`\x{110000}`, `as a code point`}, {`\u12`, `as a code point`},
		{`a\`, `byte 1: a \ at the end`}, {"\xff", `invalid UTF-8`}, {"[\xff]", `invalid UTF-8`}, {strings.Repeat("(",
			200), `nesting more than`}, {strings.Repeat("[", 200) + "a", `nesting more than`},
	} {
		if _, err := compilePattern(c.regex); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.regex, err, c.want)
		}
	}
}

// TestPatternsAreLinear runs patterns on texts that take plain backtracking forever.
func TestPatternsAreLinear(t *testing.T) {
	for _, c := range []struct {
		regex, text string
		matches     int
	}{
		{`(?:a|a)*b`, strings.Repeat("a", 20000), 0},
		{`(?:a+)+b`, strings.Repeat("a", 20000), 0},
		{`a*b|a`, strings.Repeat("a", 50000), 50000},
		{`a*?b|a`, strings.Repeat("a", 50000), 50000},
		{`a++b|a`, strings.Repeat("a", 50000), 50000},
		{`a*a*a*b`, strings.Repeat("a", 50000), 0},
		{`(?:a{1,3})+b|a`, strings.Repeat("a", 50000), 50000},
		{`(?:é|éé)*(?=b)`, strings.Repeat("é", 50000), 0},
		{`(?>a+)b`, strings.Repeat("a", 50000), 0},
		{`\s+(?!\S)|\s+`, strings.Repeat(" ", 300000) + "x", 2},
		{`(?:(?:(?:(?:){1000}){1000}){1000}){1000}a`, "aba", 2}, // to compile
	} {
		p, err := compilePattern(c.regex)
		if err != nil {
			t.Fatal(err)
		}
		if got := matchesOf(finderOn(p, []byte(c.text), false)); len(got) != c.matches {
			t.Errorf("%s: %d matches, want %d", c.regex, len(got), c.matches)
		}
		n := 0 // as Split and Replace look for them
		for it := (matcher{regex: p}).all([]byte(c.text)); it.next(); {
			n++
		}
		if n != c.matches {
			t.Errorf("%s: %d matches one after the other, want %d", c.regex, n, c.matches)
		}
	}
}

// A new finder and a reused finder find the same matches. State of one text does not affect another
// text.
func TestFindersAreUsedAgain(t *testing.T) {
	p, err := compilePattern(`(?<=a)b|(?:c|cc)+d`)
	if err != nil {
		t.Fatal(err)
	}
	find := func(s string, from int) (start, end int, ok bool) {
		f := p.finder([]byte(s))
		defer f.release()
		return f.find(from)
	}
	for range 3 {
		if start, end, ok := find("bab", 2); start != 2 || end != 3 || !ok {
			t.Fatal(start, end, ok)
		}
		if _, _, ok := find("bbb"+strings.Repeat("c", 5000), 1); ok {
			t.Fatal("found")
		}
		if start, end, ok := find("bbb"+strings.Repeat("c", 5000)+"d", 1); start != 3 || end != 5004 || !ok {
			t.Fatal(start, end, ok)
		}
	}
	s := []byte("xxxab")
	least := alloctest.Least(func() { // a pool may drop what it is given, which the race detector has it do on purpose
		f := p.finder(s)
		f.find(0)
		f.release()
	})
	if least != 0 {
		t.Errorf("%v allocations", least)
	}
}

// FuzzPattern compiles and runs anything, and compares with and without remembering states.
func FuzzPattern(f *testing.F) {
	for _, r := range []string{gpt2Regex, o200kRegex, `a{1,3}+(?<!b)|(?i:x)`, `(?>a|[^b-d[e]&&f])*?$`, `(?:a|ab)+c`} {
		f.Add(r, []byte("aab c'S 12 abab\n"))
	}
	f.Fuzz(func(t *testing.T, regex string, s []byte) {
		if len(regex) > 200 || len(s) > 300 {
			return
		}
		s = bytes.ToValidUTF8(s, nil)
		p, err := compilePattern(regex)
		if err != nil || len(p.program) > 500 {
			return
		}
		a := matchesOf(finderOn(p, s, false))
		if b := matchesOf(finderOn(p, s, true)); !slices.Equal(a, b) {
			t.Fatalf("%q in %q: %v, and %v remembering", regex, s, a, b)
		}
	})
}
