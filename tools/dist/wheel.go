package main

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// wheelTags are the platform tags. The Linux program links to libc.so.6, libdl.so.2 and
// libpthread.so.0 and uses only functions that glibc 2.17, the one of manylinux2014, has. It does not
// run with musl, so there is no musllinux tag. Go 1.26 supports macOS 12 and newer.
var wheelTags = map[platform]string{
	{"linux", "amd64"}:  "manylinux_2_17_x86_64.manylinux2014_x86_64",
	{"linux", "arm64"}:  "manylinux_2_17_aarch64.manylinux2014_aarch64",
	{"darwin", "arm64"}: "macosx_12_0_arm64",
}

// A pyproject is the part of clients/python/pyproject.toml that a wheel needs.
type pyproject struct {
	Project struct {
		Name           string
		Description    string
		RequiresPython string `toml:"requires-python"`
		Dependencies   []string
		Optional       map[string][]string `toml:"optional-dependencies"`
	}
}

var versionLine = regexp.MustCompile(`(?m)^__version__ = .*$`)

// wheel returns the wheel for a platform: the Python client, and the program as a script, which pip
// installs into the environment's folder of programs.
func (b *build) wheel(p platform) (file, error) {
	client := filepath.Join(b.root, "clients", "python")
	var project pyproject
	if _, err := toml.DecodeFile(filepath.Join(client, "pyproject.toml"), &project); err != nil {
		return file{}, err
	}
	readme, err := os.ReadFile(filepath.Join(client, "README.md"))
	if err != nil {
		return file{}, err
	}
	program, err := os.ReadFile(b.binary(p, false))
	if err != nil {
		return file{}, err
	}
	files, err := clientFiles(filepath.Join(client, "mula"), b.version.wheel)
	if err != nil {
		return file{}, err
	}
	licenses, err := b.thirdParty(p, false)
	if err != nil {
		return file{}, err
	}
	stem := strings.ReplaceAll(project.Project.Name, "-", "_") + "-" + b.version.wheel
	info := stem + ".dist-info/"
	var tags strings.Builder
	for tag := range strings.SplitSeq(wheelTags[p], ".") {
		fmt.Fprintf(&tags, "Tag: py3-none-%s\n", tag)
	}
	files = append(files,
		file{stem + ".data/scripts/mula", 0o755, program},
		file{info + "METADATA", 0o644, metadata(project, b.version.wheel, b.contact, readme)},
		file{info + "WHEEL", 0o644, []byte("Wheel-Version: 1.0\nGenerator: mula tools/dist\nRoot-Is-Purelib: false\n" +
			tags.String())},
		file{info + "licenses/LICENSE", 0o644, b.license},
		file{info + "licenses/" + licenses.name, 0o644, licenses.data})
	slices.SortFunc(files, byName)
	files = append(files, record(files, info+"RECORD"))
	data, err := zipped(files, b.time)
	return file{stem + "-py3-none-" + wheelTags[p] + ".whl", 0o644, data}, err
}

// clientFiles reads the Python package, and sets its version.
func clientFiles(dir, version string) ([]file, error) {
	var out []file
	err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if ext := path.Ext(name); entry.IsDir() || ext != ".py" && ext != ".typed" {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		if rel == "__init__.py" {
			if !versionLine.Match(text) {
				return fmt.Errorf("%s: no line __version__ = …", name)
			}
			text = versionLine.ReplaceAllLiteral(text, fmt.Appendf(nil, "__version__ = %q", version))
		}
		out = append(out, file{"mula/" + filepath.ToSlash(rel), 0o644, text})
		return nil
	})
	return out, err
}

// metadata returns the METADATA file, in version 2.4 of the format.
func metadata(p pyproject, version string, who contact, readme []byte) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "Metadata-Version: 2.4\nName: %s\nVersion: %s\nSummary: %s\nLicense-Expression: Apache-2.0\n"+
		"License-File: LICENSE\nLicense-File: %s\nRequires-Python: %s\n", p.Project.Name, version,
		p.Project.Description, thirdPartyName, p.Project.RequiresPython)
	if who.maintainer != "" {
		fmt.Fprintf(&b, "Maintainer-email: %s\n", who.maintainer)
	}
	if who.homepage != "" {
		fmt.Fprintf(&b, "Project-URL: Homepage, %s\n", who.homepage)
	}
	for _, d := range p.Project.Dependencies {
		fmt.Fprintf(&b, "Requires-Dist: %s\n", d)
	}
	for _, extra := range slices.Sorted(maps.Keys(p.Project.Optional)) {
		fmt.Fprintf(&b, "Provides-Extra: %s\n", extra)
		for _, d := range p.Project.Optional[extra] {
			fmt.Fprintf(&b, "Requires-Dist: %s; extra == %q\n", d, extra)
		}
	}
	fmt.Fprintf(&b, "Description-Content-Type: text/markdown; charset=UTF-8\n\n%s", readme)
	return []byte(b.String())
}

// record returns the RECORD file: each file with its hash and size, and RECORD without them.
func record(files []file, name string) file {
	var b strings.Builder
	for _, f := range files {
		sum := sha256.Sum256(f.data)
		fmt.Fprintf(&b, "%s,sha256=%s,%d\n", f.name, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.data))
	}
	fmt.Fprintf(&b, "%s,,\n", name)
	return file{name, 0o644, []byte(b.String())}
}

// zipped returns a zip archive of the files in their order, with one time.
func zipped(files []file, at time.Time) ([]byte, error) {
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for _, f := range files {
		h := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: at}
		h.SetMode(fs.FileMode(f.mode))
		member, err := w.CreateHeader(h)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		if _, err := member.Write(f.data); err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
	}
	err := w.Close()
	return out.Bytes(), err
}
