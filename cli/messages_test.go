package cli

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/longtest"
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

// Errors and the results of checks are coloured on a terminal only, and neither with NO_COLOR nor
// with TERM=dumb.
func TestColour(t *testing.T) {
	longtest.SkipIfShort(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	mula := filepath.Join(t.TempDir(), "mula")
	if err := os.Symlink(self, mula); err != nil {
		t.Skipf("no symbolic links here: %v", err)
	}
	shard := filepath.Join(t.TempDir(), "x.npy")
	if err := os.WriteFile(shard, make([]byte, 8), 0o644); err != nil {
		t.Fatal(err)
	}
	calls := []struct{ args, says, coloured string }{
		{"xyzzy", "has no command", "\x1b[31mmula:\x1b[0m "},
		{"doctor " + t.TempDir(), "kernels", "\n  \x1b[32mok\x1b[0m       cores "},
		{"doctor nowhere", "not a folder", "\n  \x1b[31merror\x1b[0m    write "},
		{"check --dtype uint16 --vocab-size 5 --eod 1 " + shard, shard, "\n\x1b[33mwarning\x1b[0m: "},
	}
	run := func(call int, terminal bool, env ...string) string {
		args := calls[call].args
		c := exec.Command(mula, strings.Fields(args)...)
		if terminal {
			c = exec.Command("script", "-qec", mula+" "+args, os.DevNull)
		}
		c.Env = append(append(os.Environ(), "TERM=xterm", "NO_COLOR=", "XDG_CACHE_HOME="+t.TempDir()), env...)
		out, _ := c.CombinedOutput() // some of the calls fail
		text := strings.ReplaceAll(string(out), "\r", "")
		if !strings.Contains(text, calls[call].says) {
			t.Errorf("mula %s: terminal %v, %q: %s", args, terminal, env, out)
		}
		return text
	}
	for i, c := range calls {
		if out := run(i, false); strings.Contains(out, "\x1b") {
			t.Errorf("mula %s without a terminal: %q", c.args, out)
		}
	}
	if _, err := exec.LookPath("script"); err != nil {
		t.Skip("no program script, which makes a terminal, on this machine")
	}
	for i, c := range calls {
		if out := run(i, true); !strings.Contains(out, c.coloured) {
			t.Errorf("mula %s on a terminal: %q", c.args, out)
		}
		for _, env := range []string{"NO_COLOR=1", "TERM=dumb"} {
			if out := run(i, true, env); strings.Contains(out, "\x1b") {
				t.Errorf("mula %s, %s: %q", c.args, env, out)
			}
		}
	}
}
