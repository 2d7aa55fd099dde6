package cli

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"mula/internal/longtest"
)

// Every command has a page, which names every flag, and which man renders without a warning. The
// same commit gives the same bytes.
func TestManPages(t *testing.T) {
	longtest.SkipIfShort(t)
	dir, again := t.TempDir(), t.TempDir()
	for _, d := range []string{dir, again} {
		if err := WriteManPages(d, "2026-01-02"); err != nil {
			t.Fatal(err)
		}
	}
	man, err := exec.LookPath("man")
	if err != nil {
		t.Log("no man program on this machine (apt-get install man-db groff)")
	}
	var look func(name string, commands []*cli.Command)
	look = func(name string, commands []*cli.Command) {
		for _, c := range commands {
			page := name + "-" + c.Name
			path := filepath.Join(dir, page+".1")
			text, err := os.ReadFile(path)
			if err != nil {
				t.Error(err)
				continue
			}
			if second, err := os.ReadFile(filepath.Join(again, page+".1")); err != nil || !bytes.Equal(text, second) {
				t.Errorf("%s: not the same bytes again: %v", page, err)
			}
			shown := strings.ReplaceAll(string(text), `\-`, "-")
			if man != "" {
				shown = render(t, man, path)
			}
			for _, f := range c.Flags {
				if v, ok := f.(cli.VisibleFlag); ok && v.IsVisible() && !strings.Contains(shown, "--"+f.Names()[0]) {
					t.Errorf("%s: no --%s", page, f.Names()[0])
				}
			}
			if !strings.Contains(shown, "SYNOPSIS") || !strings.Contains(shown, "OPTIONS") {
				t.Errorf("%s: %s", page, shown)
			}
			look(page, c.Subcommands)
		}
	}
	app := newApp(strings.NewReader(""), io.Discard, io.Discard)
	look("mula", app.Commands)
	if man != "" {
		if shown := render(t, man, filepath.Join(dir, "mula.1")); !strings.Contains(shown, "mula-train(1)") {
			t.Error(shown)
		}
	}
}

func render(t *testing.T, man, path string) string {
	t.Helper()
	c := exec.Command(man, "--warnings", "-E", "UTF-8", "-l", path)
	c.Env = append(os.Environ(), "MANWIDTH=100", "LC_ALL=C.UTF-8", "MAN_KEEP_FORMATTING=", "PAGER=cat", "TERM=dumb")
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil || errs.Len() > 0 {
		t.Errorf("%s: %v: %s", path, err, errs.String())
	}
	return strings.NewReplacer("\u2010", "-", "\u2212", "-").Replace(out.String())
}
