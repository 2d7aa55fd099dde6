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
	first   time.Time // of the first commit
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
	roots := git("log", "--max-parents=0", "--format=%ct", "HEAD")
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
	var err error
	if s.time, err = parseTime(seconds); err != nil {
		return s, err
	}
	s.first = s.time
	for _, text := range strings.Fields(roots) {
		at, err := parseTime(text)
		if err != nil {
			return s, err
		}
		if at.Before(s.first) {
			s.first = at
		}
	}
	commits, err := strconv.Atoi(count)
	if err != nil {
		return s, fmt.Errorf("number of commits: %w", err)
	}
	s.version, err = newVersion(describe, commits)
	return s, err
}

func parseTime(seconds string) (time.Time, error) {
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("time of a commit: %w", err)
	}
	return time.Unix(unix, 0).UTC(), nil
}

// years returns the years of the first and the last commit, for copyright notices.
func (s source) years() string {
	if first, last := s.first.Year(), s.time.Year(); first < last {
		return fmt.Sprintf("%d-%d", first, last)
	}
	return strconv.Itoa(s.time.Year())
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
