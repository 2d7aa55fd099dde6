package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// write makes a repository of the given files.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestProblems(t *testing.T) {
	for _, test := range []struct {
		text, want string // want is empty if the link is right
	}{
		{"[a](docs/a.md) [b](docs/a.md#a-heading-with-code-1) [c](#title) ![d](d.svg) [e](https://example.org/#x)", ""},
		{"```\n[a](none.md)\n```\n`[a](none.md)`", ""},
		{"<!-- a comment -->", ""},
		{"one\ntwo [a](none.md)", "README.md:4: link none.md: none.md does not exist; correct the path"},
		{"[a](docs/a.md#heading)",
			"README.md:3: link docs/a.md#heading: docs/a.md has no heading with the anchor #heading; " +
				"similar: #a-heading-with-code, #a-heading-with-code-1"},
		{"[a](#x)", "README.md:3: link #x: README.md has no heading with the anchor #x; correct it"},
		{"| x |\n|---|\n| [a](docs) |", "README.md:5: link docs: docs is a folder; link to a file in it"},
		{"| x |\n|---|\n| a |\n\n| b |",
			"README.md:7: a row outside of a table; remove the blank line before it, or add a header"},
		{"![](none.svg)", "README.md:3: link none.svg: none.svg does not exist; correct the path"},
		{"![x](https://example.org/x.svg)", "README.md:3: image https://example.org/x.svg: loaded from another host; " +
			"add a copy to docs/images"},
		{"[a](../x.md)", "README.md:3: link ../x.md: outside the repository; use a relative path in it"},
		{"[a](/docs/a.md)", "README.md:3: link /docs/a.md: outside the repository; use a relative path in it"},
		{"[a](htp://example.org)",
			"README.md:3: link htp://example.org: unknown form of URL; use https, http or mailto"},
		{"[a](https:///x)", "README.md:3: link https:///x: unknown form of URL; use https, http or mailto"},
		{"[a](d.svg#x)", "README.md:3: link d.svg#x: d.svg is not a page and has no anchors; remove #x"},
		{"a <b>c</b>", "README.md:3: raw HTML \"<b>\"; write Markdown"},
	} {
		root := write(t, map[string]string{"README.md": "# Title\n\n" + test.text + "\n", "d.svg": "<svg/>",
			"docs/a.md": "# A\n\n## A heading, with `code`\n\n## A heading with code\n"})
		got := ""
		if err := run(root, "", true); err != nil {
			got, _, _ = strings.Cut(err.Error(), "\n")
		}
		if got != test.want {
			t.Errorf("%q:\n got %s\nwant %s", test.text, got, test.want)
		}
	}
}

func TestFiles(t *testing.T) {
	root := write(t, map[string]string{"README.md": "# mula\n\n[a](docs/guides/a.md#b) [c](x.go)\n", "x.go": "package x", "x.svg": "<svg/>",
		"docs/guides/a.md": "# A & B\n\n## B\n\n![x](../../x.svg) [up](../../README.md)\n",
		"testdata/b.md":    "no page"})
	s, err := load(root)
	if err != nil {
		t.Fatal(err)
	}
	files, err := s.render()
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"docs/guides/a.html", "index.html", "style.css", "x.go.txt", "x.svg"}
	if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	for name, parts := range map[string][]string{
		"index.html": {`<title>mula</title>`, `href="style.css"`, `<a href="docs/guides/a.html#b">a</a>`},
		"docs/guides/a.html": {`<title>A &amp; B · mula</title>`, `href="../../style.css"`, `<h2 id="b">`,
			`src="../../x.svg"`, `<a href="../../index.html">up</a>`, `<a href="a.html" aria-current="page">`},
	} {
		for _, part := range parts {
			if !strings.Contains(string(files[name]), part) {
				t.Errorf("%s has no %s:\n%s", name, part, files[name])
			}
		}
	}
}

// Reading a page of the repository's site makes no request to another host.
func TestNoRequests(t *testing.T) {
	s, err := load("../..")
	if err != nil {
		t.Fatal(err)
	}
	files, err := s.render()
	if err != nil {
		t.Fatal(err)
	}
	request := regexp.MustCompile(`<script|<iframe|(src|srcset)="(https?:)?//|<link[^>]*href="(https?:)?//|url\((https?:)?//|@import`)
	for name, data := range files {
		if strings.HasSuffix(name, ".html") || strings.HasSuffix(name, ".css") {
			if found := request.Find(data); found != nil {
				t.Errorf("%s loads something: %s", name, found)
			}
		}
	}
}

// A folder that is not an earlier site is never removed.
func TestClear(t *testing.T) {
	folder := write(t, map[string]string{"precious": "x"})
	if err := clear(folder); err == nil || !strings.Contains(err.Error(), "not an earlier site") {
		t.Errorf("error %v", err)
	}
	site := filepath.Join(t.TempDir(), "site")
	for range 2 {
		if err := clear(site); err != nil {
			t.Fatal(err)
		}
	}
}
