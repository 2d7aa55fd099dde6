package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm"
)

const (
	summary = "pretraining data and mixture-of-experts training"
	// noMaintainer is in .deb packages without -maintainer, because Debian requires the field.
	noMaintainer = "maintainer not set <nobody@not-set.invalid>"
)

// overrides are lintian's tags that are accepted, each with its reason.
const overrides = `# The go command links Go code without RELRO and PIE; the program has no C code of its own.
mula: hardening-no-pie
mula: hardening-no-relro
# mula is not part of Debian, so no bug asks for the package.
mula: initial-upload-closes-no-bugs
`

// copyrightFormat is the file copyright of .deb packages, without its years.
const copyrightFormat = `Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: mula
Comment:
 The program contains Go modules of other authors. Their copyright notices and
 licenses are in the file THIRD-PARTY-LICENSES in this folder.

Files: *
Copyright: %s The mula authors
License: Apache-2.0
 On Debian systems, the full text of the Apache License 2.0 is in
 /usr/share/common-licenses/Apache-2.0.
`

// debianDocuments returns the files that Debian's policy asks for.
func (b *build) debianDocuments(maintainer string) ([]file, error) {
	entry, err := compress(fmt.Appendf(nil,
		"mula (%s-1) unstable; urgency=medium\n\n  * Version %s; see changelog.gz.\n\n -- %s  %s\n",
		b.version.linux, b.version.semver, maintainer, b.time.Format(time.RFC1123Z)))
	return []file{{"/usr/share/doc/mula/changelog.Debian.gz", 0o644, entry},
		{"/usr/share/doc/mula/copyright", 0o644, fmt.Appendf(nil, copyrightFormat, b.years())},
		{"/usr/share/lintian/overrides/mula", 0o644, []byte(overrides)}}, err
}

// linuxPackage returns the .deb or .rpm package for a platform.
func (b *build) linuxPackage(p platform, format string) (file, error) {
	program, err := os.ReadFile(b.binary(p, false))
	if err != nil {
		return file{}, err
	}
	licenses, err := b.thirdParty(p, false)
	if err != nil {
		return file{}, err
	}
	contents := []file{{"/usr/bin/mula", 0o755, program}}
	var failed error
	gzipped := func(name string, data []byte) {
		data, err := compress(data)
		if err != nil {
			failed = err
		}
		contents = append(contents, file{name + ".gz", 0o644, data})
	}
	for _, m := range b.man {
		gzipped("/usr/share/man/man1/"+m.name, m.data)
	}
	gzipped("/usr/share/doc/mula/changelog", b.changelog)
	license, maintainer := "", b.maintainer
	targets := map[string]string{"mula.bash": "bash-completion/completions/mula",
		"mula.zsh": "zsh/site-functions/_mula", "mula.fish": "fish/vendor_completions.d/mula.fish"}
	if format == "deb" {
		targets["mula.zsh"] = "zsh/vendor-completions/_mula"
		maintainer = cmp.Or(maintainer, noMaintainer)
		documents, err := b.debianDocuments(maintainer)
		if err != nil {
			return file{}, err
		}
		contents = append(append(contents, documents...),
			file{"/usr/share/doc/mula/" + licenses.name, 0o644, licenses.data})
	} else {
		license = "Apache-2.0" // Debian's control files have no such field
		contents = append(contents, file{"/usr/share/licenses/mula/LICENSE", 0o644, b.license},
			file{"/usr/share/licenses/mula/" + licenses.name, 0o644, licenses.data})
	}
	if failed != nil {
		return file{}, failed
	}
	for _, c := range b.completions {
		contents = append(contents, file{"/usr/share/" + targets[c.name], 0o644, c.data})
	}
	info := &nfpm.Info{Name: "mula", Arch: p.arch, Platform: "linux", Version: b.version.linux, VersionSchema: "none",
		Release: "1", Section: "science", Priority: "optional", Maintainer: maintainer, Homepage: b.homepage,
		License: license, MTime: b.time, Description: summary + "\n" +
			"mula tokenizes documents, blends token shards into one exact and resumable\n" +
			"order of samples, streams it to any trainer, and proves which samples a run\n" +
			"consumed."}
	info.RPM.BuildHost, info.RPM.Summary, info.RPM.Group = "localhost", summary, "Applications/Engineering"
	info.Depends = map[string][]string{"deb": {"libc6 (>= 2.17)"}, "rpm": {"glibc >= 2.17"}}[format]
	// nfpm reads files by name.
	root := filepath.Join(b.staging, format+"_"+p.String())
	for _, c := range contents {
		name := filepath.Join(root, filepath.FromSlash(c.name))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return file{}, err
		}
		if err := os.WriteFile(name, c.data, 0o600); err != nil {
			return file{}, err
		}
		kind := files.TypeFile
		if format == "rpm" && strings.HasPrefix(c.name, "/usr/share/licenses/") {
			kind = files.TypeRPMLicense
		}
		info.Contents = append(info.Contents, &files.Content{Source: name, Destination: path.Clean(c.name), Type: kind,
			FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root", Mode: os.FileMode(c.mode), MTime: b.time}})
	}
	info = nfpm.WithDefaults(info)
	if err := nfpm.PrepareForPackager(info, format); err != nil {
		return file{}, err
	}
	packager, err := nfpm.Get(format)
	if err != nil {
		return file{}, err
	}
	var out bytes.Buffer
	if err := packager.Package(info, &out); err != nil {
		return file{}, err
	}
	return file{packager.ConventionalFileName(info), 0o644, out.Bytes()}, nil
}
