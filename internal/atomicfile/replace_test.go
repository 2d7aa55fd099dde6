package atomicfile

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReplaceBetween(t *testing.T) {
	const begin, end = "<!-- from here -->\n", "<!-- up to here -->\n"
	path := filepath.Join(t.TempDir(), "page.md")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("before\n" + begin + "old\n" + end + "after\n")
	for range 2 {
		if err := ReplaceBetween(path, begin, end, "new\n"); err != nil {
			t.Fatal(err)
		}
		if data, err := os.ReadFile(path); string(data) != "before\n"+begin+"new\n"+end+"after\n" {
			t.Errorf("%v: %s", err, data)
		}
	}
	for _, text := range []string{"no place", begin, end, end + begin} {
		if write(text); ReplaceBetween(path, begin, end, "new\n") == nil {
			t.Errorf("%q has no place for a text", text)
		}
	}
	if ReplaceBetween(path+"x", begin, end, "new\n") == nil {
		t.Error("a file that is not there was written")
	}
}
