package cli

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"mula/moe"
)

// With -q, before or after the command, there are results and errors and no notes.
func TestQuiet(t *testing.T) {
	plot := filepath.Join(t.TempDir(), "x.svg")
	args := []string{"estimate", "--model", moe.Presets()[0], "--plot", plot}
	code, result, notes := call(t, args...)
	if code != exitDone || result == "" || !strings.Contains(notes, "wrote ") {
		t.Fatalf("exit %d, %s%s", code, result, notes)
	}
	for _, quiet := range [][]string{append([]string{"-q"}, args...), append([]string{"--quiet"}, args...),
		append(args[:len(args):len(args)], "-q"), append([]string{args[0], "--quiet"}, args[1:]...)} {
		if code, stdout, stderr := call(t, quiet...); code != exitDone || stdout != result || stderr != "" {
			t.Errorf("%q: exit %d, %q, %q", quiet, code, stdout, stderr)
		}
	}
	if code, _, stderr := call(t, "-q", "peek", "--positon", "4"); code != exitUsage || !strings.HasPrefix(stderr,
		"mula: ") {
		t.Errorf("exit %d, %q", code, stderr)
	}
}

func TestMessages(t *testing.T) {
	for _, c := range []struct {
		quiet, colour bool
		want          string
	}{
		{false, false, "note\nwarning: w\nmula: e\n"},
		{true, false, "warning: w\nmula: e\n"},
		{true, true, "\x1b[33mwarning:\x1b[0m w\n\x1b[31mmula:\x1b[0m e\n"},
	} {
		var b bytes.Buffer
		m := &messages{&b, c.quiet, c.colour}
		for _, text := range []string{"note\n", "warning: w\n", "mula: e\n"} {
			if n, err := m.Write([]byte(text)); n != len(text) || err != nil {
				t.Errorf("%d, %v", n, err)
			}
		}
		if b.String() != c.want {
			t.Errorf("%q, want %q", b.String(), c.want)
		}
	}
}

// Errors are coloured on a terminal only, and neither with NO_COLOR nor with TERM=dumb.
func TestColour(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	mula := filepath.Join(t.TempDir(), "mula")
	if err := os.Symlink(self, mula); err != nil {
		t.Skipf("no symbolic links here: %v", err)
	}
	run := func(terminal bool, env ...string) string {
		c := exec.Command(mula, "xyzzy")
		if terminal {
			c = exec.Command("script", "-qec", mula+" xyzzy", os.DevNull)
		}
		c.Env = append(append(os.Environ(), "TERM=xterm", "NO_COLOR="), env...)
		out, _ := c.CombinedOutput() // it fails: there is no such command
		if !strings.Contains(string(out), "has no command") {
			t.Errorf("terminal %v, %q: %s", terminal, env, out)
		}
		return string(out)
	}
	if out := run(false); strings.Contains(out, "\x1b") {
		t.Errorf("without a terminal: %q", out)
	}
	if _, err := exec.LookPath("script"); err != nil {
		t.Skip("no program script, which makes a terminal, on this machine")
	}
	if out := run(true); !strings.Contains(out, "\x1b[31mmula:\x1b[0m") {
		t.Errorf("on a terminal: %q", out)
	}
	for _, env := range []string{"NO_COLOR=1", "TERM=dumb"} {
		if out := run(true, env); strings.Contains(out, "\x1b") {
			t.Errorf("%s: %q", env, out)
		}
	}
}
