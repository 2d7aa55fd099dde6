package main

import (
	"fmt"
	"regexp"
	"strings"
)

// A version has one form for each kind of package. All forms of later commits sort after the forms
// of earlier ones, and all forms of a pre-release before its release.
type version struct {
	semver string // archives and `mula version`: 1.2.3-rc.1+git.4.gabc
	wheel  string // PEP 440: 1.2.3rc1+git.4.gabc
	linux  string // dpkg and rpm: 1.2.3~rc.1+git.4.gabc
	tag    string // of images, which have no "+": 1.2.3-rc.1_git.4.gabc
}

var (
	described  = regexp.MustCompile(`^v?(\d+\.\d+\.\d+)(?:-(alpha|beta|rc)\.(\d+))?(?:-(\d+)-g([0-9a-f]+))?(-dirty)?$`)
	bareCommit = regexp.MustCompile(`^([0-9a-f]{7,40})(-dirty)?$`)
)

// newVersion maps the output of `git describe --tags --always --dirty` to a version. The number of
// commits is used if no tag precedes the commit.
func newVersion(describe string, commits int) (version, error) {
	if m := bareCommit.FindStringSubmatch(describe); m != nil {
		describe = fmt.Sprintf("v0.0.0-%d-g%s%s", commits, m[1], m[2])
	}
	m := described.FindStringSubmatch(describe)
	if m == nil {
		return version{}, fmt.Errorf("cannot derive a version from %q; tags look like v1.2.3 or v1.2.3-rc.1", describe)
	}
	base, kind, number, distance, commit, dirty := m[1], m[2], m[3], m[4], m[5], m[6]
	v := version{semver: base, wheel: base, linux: base}
	if kind != "" {
		short := map[string]string{"alpha": "a", "beta": "b", "rc": "rc"}[kind]
		v.semver += "-" + kind + "." + number
		v.wheel += short + number
		v.linux += "~" + kind + "." + number
	}
	var local []string
	if distance != "" {
		local = append(local, "git", distance, "g"+commit)
	}
	if dirty != "" {
		local = append(local, "dirty")
	}
	if len(local) > 0 {
		suffix := "+" + strings.Join(local, ".")
		v.semver += suffix
		v.wheel += suffix
		v.linux += suffix
	}
	v.tag = strings.ReplaceAll(v.semver, "+", "_")
	return v, nil
}
