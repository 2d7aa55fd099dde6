package lint

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Every script in .ci can be run and stops at the first error, and .ci/run calls it.
func TestContinuousIntegrationScripts(t *testing.T) {
	dir := filepath.Join(thisModule(t).root, ".ci")
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	main, err := os.ReadFile(filepath.Join(dir, "run"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if filepath.Ext(e.Name()) != "" {
			continue // a module of a script
		}
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode()&0o111 == 0 {
			t.Errorf(".ci/%s: not executable; run chmod +x", e.Name())
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(text), "#!/usr/bin/env bash\n") || !strings.Contains(string(text),
			"\nset -euo pipefail\n") {
			t.Errorf(".ci/%s: must start with #!/usr/bin/env bash and set -euo pipefail", e.Name())
		}
		if e.Name() != "run" && !callsScript(string(main), e.Name()) {
			t.Errorf(".ci/%s: .ci/run does not call this script", e.Name())
		}
	}
}

// callsScript reports whether a line of a script starts with the call of another script.
func callsScript(text, name string) bool {
	for line := range strings.Lines(text) {
		if command, _, _ := strings.Cut(strings.TrimSpace(line), " "); command == ".ci/"+name {
			return true
		}
	}
	return false
}

// A file that names its interpreter can be run by its path, as its documentation says.
func TestScriptsAreExecutable(t *testing.T) {
	root, count := thisModule(t).root, 0
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name != root && strings.HasPrefix(entry.Name(), ".") {
				return fs.SkipDir
			}
			return nil
		}
		if ext := filepath.Ext(name); ext != ".py" && ext != ".sh" {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil || !strings.HasPrefix(string(text), "#!") {
			return err
		}
		count++
		info, err := entry.Info()
		if err == nil && info.Mode()&0o111 == 0 {
			t.Errorf("%s: starts with #!, but is not executable; run chmod +x", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if count < 20 {
		t.Errorf("only %d scripts were found", count)
	}
}
