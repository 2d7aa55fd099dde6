package main

import (
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// A source is a commit of mula in a folder.
type source struct {
	root    string
	version version
	commit  string
	time    time.Time // of the commit; every file of a release has this time
	dirty   bool
}

// readSource asks git for the commit in a folder.
func readSource(root string) (source, error) {
	s := source{root: root}
	var failed error
	git := func(args ...string) string {
		text, err := command(root, nil, "git", args...)
		failed = errors.Join(failed, err)
		return strings.TrimSpace(string(text))
	}
	shallow := git("rev-parse", "--is-shallow-repository")
	s.commit = git("rev-parse", "HEAD")
	seconds := git("log", "-1", "--format=%ct")
	count := git("rev-list", "--count", "HEAD")
	// A fixed length: git's default depends on the number of objects, which differs between clones.
	describe := git("describe", "--tags", "--match", "v[0-9]*", "--always", "--abbrev=12")
	s.dirty = git("status", "--porcelain") != "" // untracked files too, which describe --dirty ignores
	if failed != nil {
		return s, failed
	}
	if shallow != "false" {
		return s, fmt.Errorf("%s is a shallow clone, so its version is unknown; run git fetch --unshallow --tags", root)
	}
	if s.dirty {
		describe += "-dirty"
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return s, fmt.Errorf("time of the commit: %w", err)
	}
	s.time = time.Unix(unix, 0).UTC()
	commits, err := strconv.Atoi(count)
	if err != nil {
		return s, fmt.Errorf("number of commits: %w", err)
	}
	s.version, err = newVersion(describe, commits)
	return s, err
}

// command runs a program in a folder and returns its standard output.
func command(dir string, env []string, name string, args ...string) ([]byte, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(cmd.Environ(), env...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}
