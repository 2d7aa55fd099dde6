package main

import (
	"fmt"
	"net/mail"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// A build has the parts of release files: binaries in a staging folder, and documents.
type build struct {
	source
	contact
	staging     string
	man         []file // mula.1, mula-blend.1, …
	completions []file // mula.bash, mula.zsh, mula.fish
	license     []byte
	readme      []byte
	changelog   []byte
}

// A contact is optional. Packages without it lack the fields, except for the maintainer of a .deb.
type contact struct {
	maintainer string // "Name <address>"
	homepage   string // a URL
}

// newContact checks a contact: packages have one field in one line for each part.
func newContact(maintainer, homepage string) (contact, error) {
	if maintainer != "" {
		parsed, err := mail.ParseAddress(maintainer)
		if err != nil || parsed.Name == "" || strings.ContainsAny(maintainer, "\r\n") {
			return contact{}, fmt.Errorf("-maintainer: must look like \"Name <address>\", got %q", maintainer)
		}
	}
	if homepage != "" {
		parsed, err := url.Parse(homepage) // which refuses control characters
		if err != nil || parsed.Scheme != "https" && parsed.Scheme != "http" || parsed.Host == "" {
			return contact{}, fmt.Errorf("-homepage: must be an http or https URL, got %q", homepage)
		}
	}
	return contact{maintainer, homepage}, nil
}

// binary is the path of the program for a platform. The static one, for images, needs no C library
// and opens none.
func (b *build) binary(p platform, static bool) string {
	name := "mula_" + p.String()
	if static {
		name += "_static"
	}
	return filepath.Join(b.staging, name)
}

// compile builds the program for all platforms.
func (b *build) compile() error {
	for _, p := range platforms {
		if err := b.compileOne(p, false); err != nil {
			return err
		}
		if p.os == "linux" {
			if err := b.compileOne(p, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// compileOne builds one program. The go command's own stamp of the commit is missing in git
// worktrees, so the linker sets it.
func (b *build) compileOne(p platform, static bool) error {
	const pkg = "mula/internal/version"
	set := fmt.Sprintf("-s -w -X %s.number=%s -X %s.commit=%s -X %s.date=%s", pkg, b.version.semver, pkg, b.commit, pkg,
		b.time.Format(time.RFC3339))
	args := []string{"build", "-trimpath", "-buildvcs=false", "-ldflags", set, "-o", b.binary(p, static)}
	args = append(args, tags(static)...)
	_, err := command(b.root, goEnvironment(p), "go", append(args, "./cli/mula")...)
	return err
}

// goEnvironment returns the variables of the go command that decide which code is in a program.
func goEnvironment(p platform) []string {
	return []string{"CGO_ENABLED=0", "GOOS=" + p.os, "GOARCH=" + p.arch, "GOFLAGS=", "GOAMD64=v1", "GOARM64=v8.0",
		"GOEXPERIMENT=", "GOWORK=off"}
}

// tags returns the build tags of the static or the usual program.
func tags(static bool) []string {
	if static {
		return []string{"-tags", "static"}
	}
	return nil
}

// documents reads the texts of the repository, and asks the program for man pages and completions.
func (b *build) documents() error {
	for name, to := range map[string]*[]byte{"LICENSE": &b.license, "README.md": &b.readme, "CHANGELOG.md": &b.changelog} {
		text, err := os.ReadFile(filepath.Join(b.root, name))
		if err != nil {
			return err
		}
		*to = text
	}
	env := []string{"CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off"}
	man := filepath.Join(b.staging, "man")
	if _, err := command(b.root, env, "go", "run", "-trimpath", "-buildvcs=false", "-ldflags",
		"-X mula/internal/version.number="+b.version.semver, "./cli/manpages", "-output", man,
		"-date", b.time.Format(time.DateOnly)); err != nil {
		return err
	}
	entries, err := os.ReadDir(man)
	if err != nil {
		return err
	}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(man, e.Name()))
		if err != nil {
			return err
		}
		b.man = append(b.man, file{e.Name(), 0o644, text})
	}
	return b.readCompletions()
}

// readCompletions runs the program that was built for this machine.
func (b *build) readCompletions() error {
	host := platform{runtime.GOOS, runtime.GOARCH}
	if !slices.Contains(platforms, host) {
		return fmt.Errorf("%s is not a platform of mula; build on one of %v", host, platforms)
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		text, err := command(b.staging, nil, b.binary(host, false), "completion", shell)
		if err != nil {
			return err
		}
		b.completions = append(b.completions, file{"mula." + shell, 0o644, text})
	}
	return nil
}

func byName(a, b file) int { return strings.Compare(a.name, b.name) }
