package documents

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tree makes empty files in a folder, with the folders above them, and changes to the folder.
func tree(t *testing.T, files ...string) {
	t.Helper()
	t.Chdir(t.TempDir())
	for _, file := range files {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFind(t *testing.T) {
	tree(t, "c/a.jsonl.zst", "c/b.jsonl.zstd", "c/c.jsonl.xz", "c/d.parq", "c/e.jsonlines", "c/README",
		"c/.hidden.jsonl", "c/.git/x.jsonl", "c/sub/f.md",
		"c/sub/deep/g.md", "c/sub/h.txt", "c/.git/y", "c/i.tar.GZ", "other/a.txt")
	read := []string{"c/a.jsonl.zst", "c/b.jsonl.zstd", "c/d.parq", "c/e.jsonlines", "c/sub/h.txt"}
	unread := map[string]int{".xz": 1, NoEnding: 1, Hidden: 1, HiddenFolder: 1, ".md": 2, ".tar.gz": 1}
	all := []string{"c/README", "c/a.jsonl.zst", "c/b.jsonl.zstd", "c/c.jsonl.xz", "c/d.parq", "c/e.jsonlines",
		"c/i.tar.GZ", "c/sub/deep/g.md", "c/sub/f.md", "c/sub/h.txt"}
	for _, test := range []struct {
		operands string
		format   Format
		globs    string
		want     []string
		unread   map[string]int
	}{
		{"c", Auto, "", read, unread},
		{"c/ -", Auto, "", append(slices.Clone(read), "-"), unread},
		{"c/README", Auto, "", []string{"c/README"}, nil},
		{"c", Text, "", all, map[string]int{Hidden: 1, HiddenFolder: 1}},
		{"c", Auto, "*.md", []string{"c/sub/deep/g.md", "c/sub/f.md"}, nil},
		{"c", Auto, "sub/*.md", []string{"c/sub/f.md"}, nil},
		{"c", Auto, "./sub/*.md", []string{"c/sub/f.md"}, nil},
		{"c", Auto, "/README", []string{"c/README"}, nil},
		{"c", Auto, "sub/**/*.md", []string{"c/sub/deep/g.md", "c/sub/f.md"}, nil},
		{"c", Auto, "sub/**", []string{"c/sub/deep/g.md", "c/sub/f.md", "c/sub/h.txt"}, nil},
		{"c", Auto, "**/g.md", []string{"c/sub/deep/g.md"}, nil},
		{"c", Auto, "sub/deep *.xz sub/*/g.md", nil, nil}, // a folder is no file
		{"c", JSONLines, "*.xz READM?", []string{"c/README", "c/c.jsonl.xz"}, nil},
		{"c", Auto, ".h*", []string{"c/.hidden.jsonl"}, nil},
		{"c", Auto, "**/.h*", []string{"c/.hidden.jsonl"}, nil},
		{"c c/README", Auto, "*.txt", []string{"c/sub/h.txt", "c/README"}, nil},
		{"c other", Auto, "a.*", []string{"c/a.jsonl.zst", "other/a.txt"}, nil},
		{"c", Auto, "*.pdf", nil, nil},
		{"c", Auto, "*.md *.pdf", nil, nil},
		{"c/README", Auto, "*", nil, nil},
		{"c", Auto, "[", nil, nil},
		{"c absent", Auto, "", nil, nil},
	} {
		got, err := Find(t.Context(), strings.Fields(test.operands), test.format, strings.Fields(test.globs))
		if test.want == nil {
			if err == nil {
				t.Errorf("%s, globs %s: %q and no error", test.operands, test.globs, got.Inputs)
			}
			continue
		}
		if err != nil || !slices.Equal(got.Inputs, test.want) || !maps.Equal(got.Unread, test.unread) {
			t.Errorf("%s, globs %s: %+v, %v; want %q, %v", test.operands, test.globs, got, err, test.want, test.unread)
		}
	}
	if got, want := ListUnread(unread),
		"2 .md, 1 .tar.gz, 1 .xz, 1 without an extension, 1 hidden, 1 hidden folder"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := ListUnread(map[string]int{".a": 1, ".b": 1, ".c": 1, ".d": 1, ".e": 1, ".f": 1, ".g": 1, ".h": 1,
		".i": 1, ".j": 1, ".k": 1, ".l": 2}),
		"2 .l, 1 .a, 1 .b, 1 .c, 1 .d, 1 .e, 1 .f, 1 .g, 1 .h, 1 .i, 2 with 2 other extensions"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if _, err := Find(t.Context(), []string{"c/sub/deep"}, Auto, nil); err == nil ||
		!strings.Contains(err.Error(), "in c/sub/deep, which has 1 .md; select files with --glob") {
		t.Error(err)
	}
}

// A glob with a dot at its start, and a glob without a folder below it, match the same names and no
// others.
func TestGlob(t *testing.T) {
	for _, test := range []struct {
		pattern, path string
		want          bool
	}{
		{"*.md", "a/b.md", true}, {"*.md", ".md", false}, {".*", ".x", true}, {"a/*.md", "a/b.md", true}, {"a/*.md",
			"b/a/b.md", false}, {"**/*.md", "b.md", true},
		{"**", "a/b", true}, {"**/**", "a/b", true}, {"a/**/b", "a/b", true}, {"a/**/b", "a/x/y/b", true}, {"a/**/b",
			"a/x/y/c", false}, {"a/**", "a", false},
		{`a/\*`, "a/*", true}, {`a/\*`, "a/b", false}, {"[a-c]?", "x/b2", true}, {"**/x/**/y", "x/x/y", true}, {"/a",
			"b/a", false},
	} {
		var g glob
		if err := g.parse(test.pattern); err != nil {
			t.Fatal(err)
		}
		if g.matches(test.path) != test.want {
			t.Errorf("%s and %s: %v", test.pattern, test.path, !test.want)
		}
	}
}

// Names are relative to the input, and unique.
func TestNames(t *testing.T) {
	tree(t, "p/a/README.txt", "p/b/README.txt", "p/c.txt", "q/a/README.txt", "q/d.txt", "README.txt")
	for operands, want := range map[string]string{
		"p":                               "a/README.txt b/README.txt c.txt",
		"p/":                              "a/README.txt b/README.txt c.txt",
		"p/a/README.txt":                  "README.txt",
		"p/a/README.txt p/c.txt":          "README.txt c.txt",
		"p/a/README.txt p/b/README.txt":   "p/a/README.txt p/b/README.txt",
		"p q":                             "p/a/README.txt b/README.txt c.txt q/a/README.txt d.txt",
		"p/a p/b":                         "p/a/README.txt p/b/README.txt",
		"README.txt p/a p/c.txt -":        "README.txt p/a/README.txt c.txt -",
		"p p/a/README.txt q/a/README.txt": "a/README.txt b/README.txt c.txt p/a/README.txt q/a/README.txt",
	} {
		got, err := Find(t.Context(), strings.Fields(operands), Auto, nil)
		if err != nil || strings.Join(got.Names, " ") != want {
			t.Errorf("%s: %v, %v; want %s", operands, got, err, want)
		}
	}
	if got := BaseNames([]string{"x/a", "y/a", "z/b", "-"}); !slices.Equal(got, []string{"x/a", "y/a", "b", "-"}) {
		t.Errorf("%q", got)
	}
}
