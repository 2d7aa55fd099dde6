package checkpoint

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/xpu/comm"
)

// The manifest of a checkpoint has no hash of its own: a renamed, repeated or unknown field is an
// error, not a zero. The error of a newer format names the format.
func TestManifestFields(t *testing.T) {
	dir := t.TempDir()
	for content, want := range map[string]string{
		`{"format": 2, "step": 0, "files": {}, "note": 1}`:    `unknown field "note"`,
		`{"format": 2, "Step": 0, "files": {}}`:               `unknown field "Step"`,
		`{"format": 2, "step": 0, "step": 1, "files": {}}`:    `duplicate field "step"`,
		`{"format": 2, "step": 0, "files": {"a\": {}}`:        "byte ",
		`{"format": 3, "stages": 7}`:                          "has format 3, written by a newer version of mula",
		`{"format": 2, "step": 0, "files": {}}`:               "does not list state.json",
		`{"format": 2, "step": 0, "files": {"a": {}}, "": 1}`: `unknown field ""`,
	} {
		path := filepath.Join(dir, manifestFile)
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		var m manifest
		if err := readManifest(filesystem.OS{}, dir, &m); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want %s", content, err, want)
		}
	}
}

// The error of a damaged checkpoint names the missing file, or the two files that disagree, in
// words of the user.
func TestDamagedCheckpointMessages(t *testing.T) {
	root := t.TempDir()
	oneModel(t).save(t, root, 1, 1, 1)
	dir := filepath.Join(root, Name(1))
	manifest, err := os.ReadFile(filepath.Join(dir, manifestFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		file    string
		content []byte // nil: the file is removed
		want    []string
	}{
		{modelFile, nil, []string{modelFile + " is missing, and manifest.json lists the file"}},
		{manifestFile, nil, []string{manifestFile + " is missing"}},
		{stateFile, []byte("{}"), []string{stateFile + " has 2 bytes, but manifest.json says",
			"one of the two files was changed"}},
		{manifestFile, append(bytes.Clone(manifest), 0), []string{manifestFile + ": byte ",
			"unexpected data after the JSON value"}},
		{manifestFile, regexp.MustCompile(`"sha256": *"[0-9a-f]{4}`).ReplaceAll(manifest, []byte(`"sha256": "0000`)),
			[]string{"has SHA-256", "but manifest.json says 0000", "one of the two files was changed"}},
	} {
		path := filepath.Join(dir, test.file)
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if test.content == nil {
			err = os.Remove(path)
		} else {
			err = os.WriteFile(path, test.content, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = verify(t.Context(), comm.NewSingle(), filesystem.OS{}, dir, true)
		if err == nil || !damaged(err) || strings.Contains(err.Error(), "stat ") ||
			strings.Contains(err.Error(), "invalid character") {
			t.Errorf("%s: %v", test.file, err)
		}
		for _, want := range test.want {
			if err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v\nwant %s", test.file, err, want)
			}
		}
		if err := os.WriteFile(path, whole, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
