package objectstest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/objects"
)

// Upload writes the files of a local folder whose names match a pattern to a folder of a store.
func Upload(t testing.TB, dir, pattern, folder string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%d files %s in %s, %v", len(paths), pattern, dir, err)
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err == nil {
			err = objects.WriteFile(t.Context(), objects.Join(folder, filepath.Base(path)), data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Contents returns the contents of the objects in a folder of a store and its subfolders, by their
// names in the folder.
func Contents(t testing.TB, folder string) map[string]string {
	t.Helper()
	folder = objects.Join(folder, "")
	contents := make(map[string]string)
	for e, err := range objects.List(t.Context(), folder) {
		if err != nil {
			t.Fatal(err)
		}
		data, _, err := objects.ReadFile(t.Context(), e.URL, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		contents[strings.TrimPrefix(e.URL, folder)] = string(data)
	}
	return contents
}
