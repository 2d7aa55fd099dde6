// Package version reports the program's version and how the program was built.
package version

import (
	"runtime"
	"runtime/debug"
	"strings"
)

// unknown is the version of a program that was built outside a git repository, or without its data.
const unknown = "unknown version"

// number is the version without a leading v. The Makefile sets it from `git describe`, with
// -ldflags "-X mula/internal/version.number=1.2.3". It is empty in other builds.
var number string

// commit and date are the commit's hash and time. `make dist` sets them, because the go command
// does not record them in git worktrees. They are empty in other builds.
var commit, date string

// A Build describes how the program was built. Fields are empty if they are not known.
type Build struct {
	Version  string            `json:"version"`               // "1.2.3", or [unknown]
	Commit   string            `json:"commit,omitempty"`      // of git
	Modified bool              `json:"modified"`              // the sources differ from the commit
	Date     string            `json:"commit_date,omitempty"` // of the commit, as in RFC 3339
	Go       string            `json:"go"`                    // "go1.26.8"
	Platform string            `json:"platform"`              // "linux/amd64"
	Settings map[string]string `json:"settings"`              // "-trimpath", "CGO_ENABLED", "GOAMD64", …
}

// String returns the program's version.
func String() string { return Read().Version }

// Read returns what the linker and the go command recorded in the program.
func Read() Build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{GoVersion: runtime.Version()}
	}
	b := read(number, info)
	if commit != "" {
		b.Commit, b.Date = commit, date
	}
	return b
}

func read(number string, info *debug.BuildInfo) Build {
	b := Build{Version: strings.TrimPrefix(number, "v"), Go: info.GoVersion,
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Settings: map[string]string{}}
	if b.Version == "" && info.Main.Version != "(devel)" { // the go command's name for an unknown version
		b.Version = strings.TrimPrefix(info.Main.Version, "v")
	}
	if b.Version == "" {
		b.Version = unknown
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		case "vcs.time":
			b.Date = s.Value
		case "vcs", "GOOS", "GOARCH": // git, and parts of the platform
		default:
			b.Settings[s.Key] = s.Value
		}
	}
	return b
}
