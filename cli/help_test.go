package cli

import (
	"runtime"
	"strings"
	"testing"

	"mula/internal/version"
)

// Help and version are commands, an unknown flag is answered with the known one, and a help text
// names kinds of values and no empty defaults.
func TestHelpAndVersion(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		out  []string // in the output
		none []string // not in the output
	}{
		{"help", exitDone, []string{"COMMANDS:", "--help, -h", "--version, -v"}, nil},
		{"--help", exitDone, []string{"COMMANDS:", "help ", "version ", "--help, -h"}, nil},
		{"help plan diff", exitDone, []string{"mula plan diff"}, nil},
		{"help blnd", exitUsage, []string{"did you mean `mula blend`?"}, nil},
		{"help plan dif", exitUsage, []string{"did you mean `mula plan diff`?"}, nil},
		{"--version", exitDone, []string{"mula " + version.String() + " (", runtime.Version()}, nil},
		{"version x", exitUsage, []string{`unexpected "x"`}, nil},
		{"blend --help", exitDone, []string{"--help, -h", "--batch-size N ", "--dry-run"},
			[]string{"default: none", "default: false", " value"}},
		{"hash --help", exitDone, []string{"--batch-size N, -B N", "over all ranks; required", "--world N",
			"(default: 1)"}, []string{"default: none"}},
		{"peek --positon 4", exitUsage,
			[]string{"not defined: --positon; did you mean --position? See `mula peek --help`"}, nil},
		{"blend --dryrun", exitUsage, []string{"did you mean --dry-run?"}, nil},
		{"hash --xyzzy", exitUsage, []string{"not defined: --xyzzy: see `mula hash --help`"}, nil},
		{"--verson", exitUsage, []string{"did you mean --version?"}, nil},
	} {
		code, stdout, stderr := call(t, strings.Fields(c.args)...)
		out := stdout + stderr
		if code != c.code {
			t.Errorf("mula %s: exit %d, want %d: %s", c.args, code, c.code, out)
		}
		for _, want := range c.out {
			if !strings.Contains(out, want) {
				t.Errorf("mula %s: no %q in %s", c.args, want, out)
			}
		}
		for _, not := range c.none {
			if strings.Contains(out, not) {
				t.Errorf("mula %s: %q in %s", c.args, not, out)
			}
		}
	}
}
