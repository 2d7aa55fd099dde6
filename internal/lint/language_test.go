package lint

import (
	"bufio"
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"mula/internal/longtest"
	"unicode/utf8"
)

var updateLanguage = flag.Bool("update-language", false,
	"lower the counts of language_exceptions.txt to what is there now")

// A languageRule is a construction that the project does not use, and what to write instead.
type languageRule struct {
	pattern *regexp.Regexp
	instead string
}

// languageRules lists constructions that make a reader stop. Patterns match whole words, in any
// case.
var languageRules = compileRules([][2]string{
	// Pronouns that replace a noun.
	{`that of`, "repeat the noun: the plan's fingerprint"},
	{`those of`, "repeat the noun"},
	{`those that`, "the + noun + that"},
	{`that which`, "the + noun"},
	{`one that`, "a + noun + that"},
	{`ones that`, "the + noun + that"},
	{`what is (read|written|given|left|wanted|asked|said|known|missing)`, "the + noun"},
	{`of what\b`, "the + noun"},
	{`to what\b`, "the + noun"},
	{`with what\b`, "the + noun"},
	{`by what\b`, "the + noun"},
	{`from what\b`, "the + noun"},
	{`about what\b`, "the + noun"},
	{`is what\b`, "name the thing"},
	{`are what\b`, "name the things"},
	{`whoever`, "the user, the client, the process"},
	{`nobody`, "no user, no process, nothing"},
	{`somebody`, "another user, another program"},
	{`everybody`, "all users, all ranks"},
	{`who (reads|asks|writes|sees|wants|has|gives|takes)\b`, "the reader, the caller, the user"},
	{`of which`, "whose, or a new sentence"},
	{`in which case`, "then"},
	{`so many\b`, "give the number"},
	{`as many as there are`, "all"},
	// Words that the field does not use.
	{`anew`, "again, re-"},
	{`at hand`, "available"},
	{`to be had`, "available"},
	{`by and by`, "gradually"},
	{`hither|thither|hence|thereof|therein|whereby|wherein`, "a plain word"},
	{`ere\b`, "before"},
	{`whilst`, "while"},
	{`vain`, "unused, lost"},
	{`outlived?`, "outlasted, stale"},
	{`spoilt`, "non-finite, invalid"},
	{`culprit`, "first failing rank"},
	{`undisturbed`, "uninterrupted"},
	{`stretch(es)? of`, "range of"},
	{`leave(s|ing)? out|left out`, "skip, omit"},
	{`half-written`, "partial"},
	{`in hand`, "in progress"},
	{`on the way`, "in transit"},
	{`beside(s)? (it|them|him|the run|the others)`, "next to, in addition to"},
	{`made of it`, "name the result"},
	{`whole again`, "complete"},
	{`as it stands`, "unchanged"},
	{`as ever`, "as usual"},
	{`by itself`, "automatically, alone"},
	{`on its own account`, "itself"},
	{`lends?\b`, "provides"},
	// Verbs that are used for everything.
	{`goes on (from|with|where|at|as)`, "resumes from, continues with"},
	{`go on (from|with|where|at|as)`, "resume from, continue with"},
	{`going on\b`, "resuming, in progress"},
	{`takes? up again`, "resumes"},
	{`stands? (for|in|behind|beside|there|where|at|on|between)`, "is, means, is stored in"},
	{`lies? (in|at|there|where|between|behind|before)\b`, "is in, is at"},
	{`comes? (to|of|by|with) (it|them|what)`, "name what happens"},
	{`comes? about`, "happens"},
	{`be about\b`, "describe"},
	{`is about (as|the|a)\b`, "describes, concerns"},
	{`speaks? (of|for|against)`, "mentions, describes"},
	{`knows? of`, "has, is aware of"},
	{`tells? (apart|what|where|how|which|that)`, "shows, distinguishes"},
	{`says (nothing|what|where|how|which|so)\b`, "names, describes, prints"},
	{`gives? (away|up on|back what)`, "returns, releases"},
	{`begins? with`, "starts with"},
	{`begins? (at|where|again|by)`, "starts at"},
	{`is there (no|any)\b`, "exists"},
	{`has (no )?meaning`, "is ignored, is not supported"},
	{`(it|this|that|which|what) is none\b`, "does not exist"},
	{`is no [a-z]+ (of|for|at|to|that)\b`, "is not a"},
	{`are no [a-z]+ of\b`, "are not"},
	{`may be one\b`, "name the case"},
	{`if need be`, "if necessary"},
	{`in turns?\b`, "alternately"},
	{`for good\b`, "permanently"},
	{`once more`, "again"},
	{`over again`, "again"},
	{`all of it`, "everything, or the noun"},
	{`the very\b`, "the same"},
	{`such a one`, "such a + noun"},
	{`the like\b`, "similar, and so on"},
	{`much the same`, "similar"},
	{`some [0-9]+\b`, "about N"},
})

func compileRules(rules [][2]string) []languageRule {
	var out []languageRule
	for _, r := range rules {
		out = append(out, languageRule{regexp.MustCompile(`(?i)\b(?:` + r[0] + `)\b`), r[1]})
	}
	return out
}

// maxProse is the longest line of Markdown prose, in characters. Tables, headings and code blocks
// may be longer.
const maxProse = 100

// A remark is one thing that the language lint has to say about a line.
type remark struct {
	line int
	text string
}

// isWholeWord reports whether no letter is next to text[begin:end]. The \b of package regexp knows
// only ASCII letters.
func isWholeWord(text string, begin, end int) bool {
	before, _ := utf8.DecodeLastRuneInString(text[:begin])
	after, _ := utf8.DecodeRuneInString(text[end:])
	return !unicode.IsLetter(before) && !unicode.IsLetter(after)
}

// lintText applies the rules to one piece of prose whose first line has the given number.
func lintText(line int, text string) []remark {
	var out []remark
	for i, l := range strings.Split(text, "\n") {
		for _, rule := range languageRules {
			for _, at := range rule.pattern.FindAllStringIndex(l, -1) {
				if isWholeWord(l, at[0], at[1]) {
					out = append(out, remark{line + i, fmt.Sprintf("%q: write %s", l[at[0]:at[1]], rule.instead)})
				}
			}
		}
	}
	return out
}

var (
	codeSpan = regexp.MustCompile("`[^`]*`")
	linkTo   = regexp.MustCompile(`\]\([^)]*\)`)
)

// lintMarkdown looks at prose: not at fenced blocks, code spans and link targets.
func lintMarkdown(text string) []remark {
	var out []remark
	fence := ""
	for i, l := range strings.Split(text, "\n") {
		trimmed := strings.TrimSpace(l)
		if mark := strings.TrimLeft(trimmed, "`~"); len(trimmed)-len(mark) >= 3 {
			switch opening := trimmed[:len(trimmed)-len(mark)]; {
			case fence == "":
				fence = opening
			case strings.HasPrefix(opening, fence) && mark == "":
				fence = ""
			}
			continue
		}
		if fence != "" {
			continue
		}
		prose := linkTo.ReplaceAllString(codeSpan.ReplaceAllString(l, "``"), "]()")
		out = append(out, lintText(i+1, prose)...)
		isTable, isHeading := strings.HasPrefix(trimmed, "|"), strings.HasPrefix(trimmed, "#")
		if n := utf8.RuneCountInString(l); n > maxProse && !isTable && !isHeading &&
			strings.Contains(strings.TrimLeft(trimmed, "-*> "), " ") {
			out = append(out, remark{i + 1, fmt.Sprintf("%d columns of prose: wrap at %d", n, maxProse)})
		}
	}
	return out
}

// lintGo looks at all comments, and at messages: strings with a space outside tests.
func lintGo(f *goFile) []remark {
	var out []remark
	for _, g := range f.syntax.Comments {
		for _, c := range g.List {
			out = append(out, lintText(f.set.Position(c.Pos()).Line, c.Text)...)
		}
	}
	if f.test() {
		return out
	}
	ast.Inspect(f.syntax, func(n ast.Node) bool {
		lit, ok := n.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING {
			return true
		}
		if text, err := strconv.Unquote(lit.Value); err == nil && strings.Contains(text, " ") {
			out = append(out, lintText(f.set.Position(lit.Pos()).Line, text)...)
		}
		return true
	})
	return out
}

// maxCode is the longest line of Python code, in characters. Comments and docstrings end at
// maxProse.
const maxCode = 120

// lintColumns reports a line that is longer than most columns, unless it is a single word or string
// without a space: no line break could shorten it.
func lintColumns(line int, text string, most int, kind string) []remark {
	n := utf8.RuneCountInString(strings.ReplaceAll(text, "\t", "    "))
	if n <= most || !strings.Contains(strings.TrimLeft(text, " \t#:-*"), " ") {
		return nil
	}
	return []remark{{line, fmt.Sprintf("%d columns of %s: wrap at %d", n, kind, most)}}
}

var (
	pythonDocstring = regexp.MustCompile(`^\s*r?"""`)
	pythonString    = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'`)
	pythonComment   = regexp.MustCompile(`(?:^|\s)(#.*)`)
	shellComment    = regexp.MustCompile(`(?:^|\s)(#[^!].*)`)
	shellScript     = regexp.MustCompile(`^#!.*\b(?:ba)?sh\s*\n`)
)

// lintPython looks at comments, docstrings and strings with a space. Other strings in triple quotes
// are programs and data: only the length of their lines is checked.
func lintPython(text string) []remark {
	var out []remark
	isDocstring, isData := false, false
	for i, l := range strings.Split(text, "\n") {
		line := i + 1
		quotes := strings.Count(l, `"""`)
		switch {
		case isData:
			isData = quotes%2 == 0
			out = append(out, lintColumns(line, l, maxCode, "code")...)
		case isDocstring || pythonDocstring.MatchString(l):
			isDocstring = isDocstring != (quotes%2 == 1)
			out = append(out, lintText(line, l)...)
			out = append(out, lintColumns(line, l, maxProse, "docstring")...)
		case strings.HasPrefix(strings.TrimSpace(l), "#"):
			out = append(out, lintText(line, l)...)
			out = append(out, lintColumns(line, l, maxProse, "comment")...)
		default:
			isData = quotes%2 == 1
			for _, s := range pythonString.FindAllString(l, -1) {
				if strings.Contains(s, " ") {
					out = append(out, lintText(line, s)...)
				}
			}
			code := pythonString.ReplaceAllString(l, `""`)
			if comment := pythonComment.FindStringSubmatch(code); comment != nil {
				out = append(out, lintText(line, comment[1])...)
			}
			out = append(out, lintColumns(line, l, maxCode, "code")...)
		}
	}
	return out
}

// isShellScript reports whether the first line of a file names a shell.
func isShellScript(name string) bool {
	f, err := os.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	start := make([]byte, 64)
	n, _ := io.ReadFull(f, start)
	return shellScript.Match(start[:n])
}

// lintKernel looks at the comments of OpenCL C and of assembly.
func lintKernel(text string) []remark {
	var out []remark
	for i, l := range strings.Split(text, "\n") {
		if _, comment, ok := strings.Cut(l, "//"); ok {
			out = append(out, lintText(i+1, comment)...)
		}
	}
	return out
}

// lintShell looks at the comments of shell scripts and of the Makefile.
func lintShell(text string) []remark {
	var out []remark
	for i, l := range strings.Split(text, "\n") {
		if comment := shellComment.FindStringSubmatch(l); comment != nil {
			out = append(out, lintText(i+1, comment[1])...)
			if strings.HasPrefix(strings.TrimSpace(l), "#") {
				out = append(out, lintColumns(i+1, l, maxProse, "comment")...)
			}
		}
	}
	return out
}

// languageRemarks collects the remarks on every file that people read, by path.
func languageRemarks(m *module) (map[string][]remark, error) {
	out := make(map[string][]remark)
	root := m.root
	for _, f := range m.files {
		out[f.path] = lintGo(f)
	}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := entry.Name()
		if entry.IsDir() {
			if name != root && base != ".ci" && (base == "quickstart" || strings.HasPrefix(base, ".")) {
				return fs.SkipDir
			}
			return nil
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		var lint func(string) []remark
		switch ext := path.Ext(rel); {
		case ext == ".md" && !strings.Contains(rel, "testdata/"):
			lint = lintMarkdown
		case ext == ".cl", ext == ".s":
			lint = lintKernel
		case ext == ".py":
			lint = lintPython
		case ext == ".sh", base == "Makefile", ext == "" && isShellScript(name):
			lint = lintShell
		default:
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		out[rel] = lint(string(text))
		return nil
	})
	return out, err
}

const exceptionsFile = "language_exceptions.txt"

// readExceptions reads the number of remarks that each file may still have: lines of a number, a
// space and a path.
func readExceptions(text string) (map[string]int, error) {
	out := make(map[string]int)
	s := bufio.NewScanner(strings.NewReader(text))
	for n := 1; s.Scan(); n++ {
		line := strings.TrimSpace(s.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		count, file, ok := strings.Cut(line, " ")
		number, err := strconv.Atoi(count)
		if !ok || err != nil || number < 1 {
			return nil, fmt.Errorf("%s:%d: want a number, a space and a path", exceptionsFile, n)
		}
		out[file] = number
	}
	return out, s.Err()
}

// Documentation, comments and messages follow the rules of the language. Files from before the
// rules have a number of exceptions, which only falls.
func TestLanguage(t *testing.T) {
	longtest.SkipIfShort(t) // `make lint` and `make check` run it
	all, err := languageRemarks(thisModule(t))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(exceptionsFile)
	if err != nil && !*updateLanguage {
		t.Fatal(err)
	}
	allowed, err := readExceptions(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if *updateLanguage {
		writeExceptions(t, all, allowed, len(text) == 0)
		return
	}
	for file, remarks := range all {
		if len(remarks) <= allowed[file] {
			continue
		}
		t.Errorf("%s: %d remarks, and %s allows %d:", file, len(remarks), exceptionsFile, allowed[file])
		const most = 30
		for _, r := range remarks[:min(len(remarks), most)] {
			t.Errorf("%s:%d: %s", file, r.line, r.text)
		}
		if len(remarks) > most {
			t.Errorf("%s: %d more", file, len(remarks)-most)
		}
	}
	for file := range allowed {
		if _, ok := all[file]; !ok {
			t.Errorf("%s lists %s, which does not exist: remove the line", exceptionsFile, file)
		}
	}
}

func writeExceptions(t *testing.T, all map[string][]remark, allowed map[string]int, first bool) {
	var b strings.Builder
	b.WriteString("# Remarks of the language lint that a file may still have. The numbers only fall:\n# go test " +
		"./internal/lint -run TestLanguage -update-language\n")
	type row struct {
		file  string
		count int
	}
	var rows []row
	for file, remarks := range all {
		n := len(remarks)
		if !first {
			n = min(n, allowed[file])
		}
		if n > 0 {
			rows = append(rows, row{file, n})
		}
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Compare(a.file, b.file) })
	for _, r := range rows {
		fmt.Fprintf(&b, "%d %s\n", r.count, r.file)
	}
	if err := os.WriteFile(exceptionsFile, []byte(b.String()), 0o666); err != nil {
		t.Fatal(err)
	}
}

func TestLanguageRules(t *testing.T) {
	if n := len(languageRules); n < 60 {
		t.Errorf("%d rules, want at least 60", n)
	}
	for _, test := range []struct {
		text string
		want int
	}{
		{"The plan's fingerprint differs from that of the log.", 1},
		{"Rebuilt files are byte-identical. mula checks the inputs again as usual.", 0},
		{"What is made anew goes on from there.", 2},
		{"THAT OF", 1},
		{"thatof, anewly", 0},
		{"größere, anewß", 0},
	} {
		if got := lintText(1, test.text); len(got) != test.want {
			t.Errorf("%q: %v, want %d remarks", test.text, got, test.want)
		}
	}
	long := strings.Repeat("word ", 21)
	for _, test := range []struct {
		text string
		want []int // lines
	}{
		{"one\n" + long + "\n", []int{2}},
		{"| " + long + " |\n# " + long, nil},
		{"```\n" + long + "\nthat of\n```\nthat of", []int{5}},
		{"````\n```\nthat of\n```\n````\nthat of", []int{6}},
		{"`that of` and [x](that of)", nil},
	} {
		var lines []int
		for _, r := range lintMarkdown(test.text) {
			lines = append(lines, r.line)
		}
		if !slices.Equal(lines, test.want) {
			t.Errorf("%q: remarks on lines %v, want %v", test.text, lines, test.want)
		}
	}
	long = strings.Repeat("a ", 70)
	for _, test := range []struct {
		lint func(string) []remark
		text string
		want []int // lines
	}{
		{lintPython, "x = 1  # that of\nthat_of = f(that, of)\n\"\"\"A.\nthat of\n\"\"\"", []int{1, 4}},
		{lintPython, "raise Error(f\"that of {x}\")\nx = 'that of'\ny = '#', that, of", []int{1, 2}},
		{lintPython, "x = \"\"\"\nthat of\n\"\"\"\ndef f():\n    \"\"\"that of\"\"\"\n# that of", []int{5, 6}},
		{lintPython, "# " + long[:98] + "\n# " + long[:100] + "\n", []int{2}},
		{lintPython, "\"\"\"" + long[:100] + "\n" + long[:100] + "b\n\"\"\"\nx = 1\n", []int{1, 2}},
		{lintPython, "x = [" + long[:114] + "]\ny = [" + long[:116] + "]", []int{2}},
		{lintPython, "x = \"\"\"\n" + long + "\n\"\"\"\n# " + strings.Repeat("a", 120), []int{2}},
		{lintPython, "    \"" + strings.Repeat("a", 120) + "\"\nx = \"" + strings.Repeat("a", 120) + "\"", []int{2}},
		{lintKernel, "that of // that of\nx = 1; // one\n// that of", []int{1, 3}},
		{lintShell, "#!/bin/sh\n# that of\nthat of\nx=1 # that of\ny=${x#that of}\n# " + long, []int{2, 4, 6}},
	} {
		var lines []int
		for _, r := range test.lint(test.text) {
			lines = append(lines, r.line)
		}
		if !slices.Equal(lines, test.want) {
			t.Errorf("%q: remarks on lines %v, want %v", test.text, lines, test.want)
		}
	}
}

func TestLintGo(t *testing.T) {
	const text = "// Package p is that of.\npackage p\n\n// that of\nfunc f() {\n\t// that of\n\tg(\"that of\")\n" +
		"}\n\n// F is that of.\nfunc F() {}\n"
	for _, test := range []struct {
		path string
		want []int // lines
	}{
		{"index/x.go", []int{1, 4, 6, 10, 7}},
		{"index/x_test.go", []int{1, 4, 6, 10}},
	} {
		f := &goFile{path: test.path, set: token.NewFileSet()}
		if err := f.parse([]byte(text)); err != nil {
			t.Fatal(err)
		}
		var lines []int
		for _, r := range lintGo(f) {
			lines = append(lines, r.line)
		}
		if !slices.Equal(lines, test.want) {
			t.Errorf("%s: remarks on lines %v, want %v", test.path, lines, test.want)
		}
	}
}
