package lint

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// glossaryTerm matches the terms that a page may use only if it links to the glossary.
var glossaryTerm = regexp.MustCompile(
	`(?i)\b(?:plan|position|fingerprint|cursor|stage|window|source|shard|blend|sample)s?\b`)

var glossaryLink = regexp.MustCompile(`\]\([^)]*\bglossary\.md(?:#[^)]*)?\)`)

// otherMeanings lists pages that use a term only in another meaning.
var otherMeanings = map[string]string{
	"docs/decisions/0015-transports.md": "the window of a connection",
	"docs/decisions/0018-opencl.md":     "the source code of a kernel",
	"docs/formats/config-json.md":       "the position of a token in a model's input",
	"docs/reference/roofline.md":        "the source code of a kernel",
}

// needsGlossary returns a term that the page uses although it does not link to the glossary, or "".
// Code blocks, code spans and link targets do not count.
func needsGlossary(page string) string {
	if glossaryLink.MatchString(page) {
		return ""
	}
	isCode := false
	for l := range strings.Lines(page) {
		if strings.HasPrefix(strings.TrimSpace(l), "```") {
			isCode = !isCode
		} else if !isCode {
			prose := linkTo.ReplaceAllString(codeSpan.ReplaceAllString(l, ""), "]")
			if term := glossaryTerm.FindString(prose); term != "" {
				return term
			}
		}
	}
	return ""
}

// Every page that uses a term of the glossary links to the glossary.
func TestGlossaryLinks(t *testing.T) {
	root := thisModule(t).root
	glossary := filepath.Join(root, "docs", "glossary.md")
	check := func(name string) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			t.Fatal(err)
		}
		rel = filepath.ToSlash(rel)
		if term := needsGlossary(string(text)); term != "" && name != glossary && otherMeanings[rel] == "" {
			t.Errorf("%s uses %q: link the term to docs/glossary.md", rel, term)
		}
	}
	for _, name := range []string{"README.md", "ARCHITECTURE.md", "benchmarks/README.md", "clients/python/README.md"} {
		check(filepath.Join(root, name))
	}
	err := filepath.WalkDir(filepath.Join(root, "docs"), func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && filepath.Ext(name) == ".md" {
			check(name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestNeedsGlossary(t *testing.T) {
	for _, test := range []struct{ page, want string }{
		{"mula writes Plans.", "Plans"},
		{"mula writes [plans](../glossary.md).", ""},
		{"mula writes [plans](../glossary.md#order).\n\nA shard.", ""},
		{"`plan` and [x](plan.md)\n```\na shard\n```\n", ""},
		{"```\na shard\n```\nthe cursor", "cursor"},
		{"a planet, outsourced", ""},
	} {
		if got := needsGlossary(test.page); got != test.want {
			t.Errorf("%q: %q, want %q", test.page, got, test.want)
		}
	}
}
