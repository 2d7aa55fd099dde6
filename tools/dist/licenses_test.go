package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestLegalFiles(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"LICENSE", "NOTICE.txt", "license.go", "README.md", "a/used/LICENSE-MIT",
		"a/COPYING", "a/unused/LICENSE", "bare/NOTICE"} {
		name = filepath.Join(root, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte("text\r\n\r\n"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	files, err := legalFiles(root, []string{filepath.Join(root, "a", "used"), root})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range files {
		names = append(names, f.name)
	}
	if want := []string{"LICENSE", "NOTICE.txt", "a/COPYING", "a/used/LICENSE-MIT"}; !slices.Equal(names, want) {
		t.Errorf("got %q, want %q", names, want)
	}
	bare := filepath.Join(root, "bare")
	if _, err := legalFiles(bare, []string{bare}); err == nil || !strings.Contains(err.Error(), "no licence file") {
		t.Errorf("a module with a notice and no licence: error %v", err)
	}
}

func TestLicenseText(t *testing.T) {
	text := string(licenseText([]component{
		{"b", "v2", []file{{"LICENSE", 0o644, []byte("text of b\r\n\r\n")}}},
		{"a", "v1", []file{{"LICENSE", 0o644, []byte("text of a")}, {"x/NOTICE", 0o644, []byte("notice of a\n")}}}}))
	rule := strings.Repeat("=", 80) + "\n"
	want := "The program mula contains the software listed here. The licences follow the list.\n\n  a v1\n  b v2\n" +
		"\n" + rule + "a v1\nLICENSE\n" + rule + "\ntext of a\n" +
		"\n" + rule + "a v1\nx/NOTICE\n" + rule + "\nnotice of a\n" +
		"\n" + rule + "b v2\nLICENSE\n" + rule + "\ntext of b\n"
	if text != want {
		t.Errorf("got %q, want %q", text, want)
	}
}
