package lint

import (
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
